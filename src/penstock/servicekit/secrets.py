"""Masks secrets: passwords, tokens, and the values of names that sound like one.

`mask` is for any text, `mask_url` for a URL or a connection string and nothing else. Everything
that is printed, logged, kept as a status or sent to another process as an error goes through one of
them, at the last moment.

`mask` recognizes secrets by their form: URLs, `name=value`, members of JSON, headers. That is not
enough for what a driver makes of one, so code that reads a secret registers it with `conceal`; from
then on `mask` hides that value wherever it appears in this process, however it is spelled.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote

REDACTED: Final = "<redacted>"

CONCEALED_CHARS_MIN: Final = 6
"""A shorter value is part of too many words: hiding it would hide everything else."""

_CONCEALED_MAX: Final = 512
_NO_SECRETS: Final = ("penstock", "postgres", "password", "redacted", REDACTED)
"""As passwords these protect nothing, and they occur in half of all messages."""

_NAME = r"(?:pass|pwd|token|secret|key|credential)"
_SURE_NAME = r"(?:passw|pwd|secret|token|credential|(?:api|access|private)[_-]?key)"
_ESCAPED = r"\\'.*?\\'|\\\".*?\\\""  # in a string of a string
_QUOTED = rf"{_ESCAPED}|'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?"
_PARAMETER = re.compile(r"(?P<name>[^?&=;]*)=[^&]*")
_WORD = re.compile(r"\S+")
_SETTING = re.compile(
    rf"(?i)((?:^|[?&\s\"'({{\[,;])[\w.%-]*{_NAME}[\w.%-]*)=(?!\s)(?:{_QUOTED}|[^\s&]+)"
)
_SPACED = re.compile(rf"(?i)(\bpassword\s*=\s*)(?:{_QUOTED}|[^\s&]+)")
_MEMBER = re.compile(
    rf"(?i)([\"'][\w.-]*{_SURE_NAME}[\w.-]*\\?[\"']\s*:\s*|\bpassw(?:or)?d:\s*)"
    rf"(?![\"']?\$\{{)(?:{_QUOTED}|[^\s,}}\]]+)"
)
_HEADER = re.compile(r"(?i)\b(bearer|authorization: *\w+|basic(?= +[\w+/]{8,}=*(?:\s|$)))\s+\S+")
_SECRET_NAME = re.compile(rf"(?i)[\w.-]*{_NAME}[\w.-]*")
_TOKEN_SCHEMES = frozenset({"grpc", "grpc+unix", "http", "https"})
"""In such a URL, a single word before the @ is a token, not a user."""

_PLACEHOLDERS = frozenset({"password", "…"})
"""Placeholders for a password in examples."""

_concealed: OrderedDict[str, None] = OrderedDict()
_pattern: re.Pattern[str] | None = None


def sounds_secret(name: str) -> bool:
    """True if the value of a field of this name must be masked."""
    return _SECRET_NAME.fullmatch(name) is not None


# ----------------------------------------------------------------------------------- known secrets


def conceal(value: str, *, beside: Iterable[object] = ()) -> None:
    """Hide this value from now on in every text that this process masks.

    A value equal to a name `beside` it, such as its user's, is not hidden: such names are in every
    message.
    """
    global _pattern  # of the process, as its standard error is
    if len(value) < CONCEALED_CHARS_MIN or value in (*beside, *_NO_SECRETS):
        return
    if value in _concealed:
        _concealed.move_to_end(value)
        return
    _concealed[value] = None
    if len(_concealed) > _CONCEALED_MAX:
        _concealed.popitem(last=False)
    _pattern = None


def conceal_url(url: str) -> None:
    """Conceal the secrets of a URL, including the parts that a driver may split them into."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        for found in re.finditer(rf"(?i)\bpassword\s*=\s*({_QUOTED}|\S+)", url):
            conceal(found[1].strip("'\""))
        return
    userinfo, _, address = rest.rpartition("@")
    user, colon, password = userinfo.partition(":")
    host, _, query = address.partition("?")
    beside = (user, *re.split(r"[/:,]", host))
    if not colon and scheme.lower() in _TOKEN_SCHEMES:
        password = user
        beside = beside[1:]
    # A driver may take the password apart where it holds what separates the parts of a URL.
    for value in (password, unquote(password), *re.split(r"[@/:?#]", password)):
        conceal(value, beside=beside)
    for name, value in parse_qsl(query):
        if sounds_secret(name) and not name.lower().endswith(_FILE_OPTIONS):
            conceal(value, beside=beside)


_FILE_OPTIONS = ("file", "key", "cert")
"""Options that name a file, such as token_file=, sslkey= and key=; others hold the secret."""


def _concealing() -> re.Pattern[str]:
    """Return the pattern that finds every concealed value."""
    global _pattern
    if (pattern := _pattern) is None:
        spellings = {spelling for value in list(_concealed) for spelling in _spellings(value)}
        longest_first = sorted(spellings, key=len, reverse=True)
        pattern = _pattern = re.compile("|".join(map(re.escape, longest_first)))
    return pattern


def _spellings(value: str) -> Iterable[str]:
    escaped = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    return (
        value,
        quote(value, safe=""),
        quote(value),
        quote_plus(value),
        repr(value)[1:-1],
        *escaped,
    )


# ----------------------------------------------------------------------------------------- masking


def mask_url(url: str) -> str:
    """Return `url` without its password and without query values that sound secret.

    Host, database and options stay: a wrong URL is the common mistake. Malformed URLs, which end up
    in errors, must be masked too: everything before the last `@` is taken for user and password,
    and no parser is trusted to know better. A connection string of `name=value` is masked as such.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if (masked := _mask_settings(url)) != url:
            return masked
        scheme, rest = "", url
    userinfo, at, address = rest.rpartition("@")
    user, colon, password = userinfo.partition(":")
    if at and not colon and scheme.lower() in _TOKEN_SCHEMES and "/" not in userinfo:
        user = REDACTED
    host, question, query = address.partition("?")
    hidden = f":{password if password in _PLACEHOLDERS else REDACTED}" if colon else ""
    masked = f"{user}{hidden}{at}{host}"
    return f"{scheme}{separator}{masked}{question}{_PARAMETER.sub(_parameter, query)}"


def mask(text: str, *known: str | None) -> str:
    """Return `text` without secrets: those that look like one, concealed ones, and `known`."""
    for value in known:
        if value:
            text = text.replace(value, REDACTED)
    if _concealed:
        text = _concealing().sub(REDACTED, text)
    if "://" in text:
        text = _WORD.sub(lambda w: mask_url(w[0]) if "://" in w[0] else w[0], text)
    text = _MEMBER.sub(_member, _mask_settings(text))
    return _HEADER.sub(rf"\1 {REDACTED}", text)


def _mask_settings(text: str) -> str:
    if "=" not in text:
        return text
    return _SPACED.sub(rf"\1{REDACTED}", _SETTING.sub(rf"\1={REDACTED}", text))


def _parameter(found: re.Match[str]) -> str:
    name = found["name"]
    return f"{name}={REDACTED}" if sounds_secret(unquote(name)) else found[0]


def _member(found: re.Match[str]) -> str:
    """Keep the quotes, so that JSON stays JSON."""
    value = found[0][len(found[1]) :]
    mark = value[: 2 if value[0] == "\\" else value[0] in "\"'"]
    return f"{found[1]}{mark}{REDACTED}{mark}"
