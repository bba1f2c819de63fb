"""Check the URL and headers of a webhook: can an HTTP request carry them?

Both may contain references to secrets, whose values are only known, and checked, when the call is
made. Messages never repeat a value, which may be a secret.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from penstock.model.spec import SECRET_REFERENCE

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"([!-~]([ \t!-~]*[!-~])?)?")
_PORT: Final = "the port of the URL is not between 1 and 65535"
_FRAMING: Final = frozenset({"connection", "content-length", "transfer-encoding"})


def url_problem(url: str) -> str | None:
    """Return what is wrong with a URL, as far as it is known; None if nothing is."""
    if SECRET_REFERENCE.search(url.partition("://")[0]):
        return None
    known = SECRET_REFERENCE.sub("1", url)
    if re.search(r"[\x00-\x20\x7f]", known):
        return "the URL contains a space or a control character"
    try:
        parts = urlsplit(known)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return _PORT if "port" in str(error).lower() else "this is not a URL"
    if parts.scheme not in ("http", "https"):
        return "the URL does not begin with https:// or http://"
    if not host:
        return "the URL names no host"
    if port == 0:
        return _PORT
    return None


def header_problem(name: str, value: str) -> str | None:
    """Return what is wrong with a header, as far as it is known; None if nothing is."""
    if not _NAME.fullmatch(name):
        return "a header name consists of letters, digits and hyphens"
    if name.lower() in _FRAMING:
        return "this header is set by the call itself"
    known = SECRET_REFERENCE.sub("x", value)
    if not known.isascii():
        return "a header value must be ASCII"
    if not _VALUE.fullmatch(known):
        return "a header value has no line breaks, control characters or surrounding spaces"
    return None
