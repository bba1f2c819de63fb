"""PURE: what a web hook can be: URLs and headers that an HTTP request can carry.

References to secrets may stand in both; what they stand for is not known before a call is made, and
is judged then. What is wrong is said without repeating the value, which may be a secret.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

_REFERENCE: Final = re.compile(r"(?<!\$)\$\{(env|file):[^}]*\}")
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"([!-~]([ \t!-~]*[!-~])?)?")
_FRAMING: Final = frozenset({"connection", "content-length", "transfer-encoding"})


def url_problem(url: str) -> str | None:
    """Why this is no URL to call; None if it is one, as far as it is known."""
    if _REFERENCE.search(url.partition("://")[0]):
        return None
    known = _REFERENCE.sub("1", url)
    if re.search(r"[\x00-\x20\x7f]", known):
        return "the URL has a space or a control character in it"
    try:
        parts = urlsplit(known)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        wrong_port = "port" in str(error).lower()
        return "the port of the URL is not from 1 to 65535" if wrong_port else "this is not a URL"
    if parts.scheme not in ("http", "https"):
        return "the URL does not begin with https:// or http://"
    if not host:
        return "the URL names no host"
    if port == 0:
        return "the port of the URL is not from 1 to 65535"
    return None


def header_problem(name: str, value: str) -> str | None:
    """Why this is no header to send; None if it is one, as far as it is known."""
    if not _NAME.fullmatch(name):
        return "the name of a header has letters, digits and hyphens"
    if name.lower() in _FRAMING:
        return "this header belongs to the connection, and is set by the call itself"
    known = _REFERENCE.sub("x", value)
    if not known.isascii():
        return "the value of a header is ASCII"
    if not _VALUE.fullmatch(known):
        return "the value of a header has no line breaks or control characters, and no space around"
    return None
