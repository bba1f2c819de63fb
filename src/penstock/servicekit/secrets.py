"""What must not be seen: passwords, tokens, and values of names that sound like one.

`mask_url` is for a URL, `mask` for any text that may hold one. Everything that is logged, or sent
to another process as an error, goes through one of them.
"""

from __future__ import annotations

import re

REDACTED = "<redacted>"

_NAME = r"(?:pass|token|secret|key)"
_PARAMETER = re.compile(rf"(?i)(?P<name>[^?&=]*{_NAME}[^?&=]*)=[^&]*")
_WORD = re.compile(r"\S+")
_SETTING = re.compile(rf"(?i)((?:^|[?&\s])[\w.-]*{_NAME}[\w.-]*)=(?!\s)[^\s&]+")
_BEARER = re.compile(r"(?i)\b(bearer)\s+\S+")
_SECRET_NAME = re.compile(rf"(?i)[\w.-]*{_NAME}[\w.-]*")


def sounds_secret(name: str) -> bool:
    """Whether the value of a field of this name must not be seen."""
    return _SECRET_NAME.fullmatch(name) is not None


def mask_url(url: str) -> str:
    """`url` for people: without its password and without query values that sound secret.

    Host, database and options stay: a wrong URL is the common mistake. Must hold for malformed
    URLs too, which is where a password ends up in an error: whatever stands before the last `@`
    is taken for user and password, and no parser is trusted to know better.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    userinfo, at, address = rest.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    host, question, query = address.partition("?")
    masked = f"{user}{f':{REDACTED}' if colon else ''}{at}{host}"
    query = _PARAMETER.sub(rf"\g<name>={REDACTED}", query)
    return f"{scheme}{separator}{masked}{question}{query}"


def mask(text: str) -> str:
    """`text` with its URLs masked, and without bearer tokens and `name=value` of secret names."""
    if "://" in text:
        text = _WORD.sub(lambda w: mask_url(w[0]) if "://" in w[0] else w[0], text)
    text = _SETTING.sub(rf"\1={REDACTED}", text)
    return _BEARER.sub(rf"\1 {REDACTED}", text)
