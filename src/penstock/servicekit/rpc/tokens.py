"""Bearer tokens, each with capabilities and a key prefix.

A line of the token file is `name capabilities prefix sha256 [until=TIME]`. The capabilities are
some of read, list, append and apply, with commas between them, or a role that stands for several;
the prefix limits the keys (`*`: all); sha256 is the hex digest of the token, so the file does not
hold what it checks; TIME, such as 2027-01-31T00:00:00Z, is when the token expires. Several lines
may be valid at once, which is how tokens are rotated; the file is read again when it changes.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import re
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.errors import UserError
from penstock.servicekit.guarded import read_guarded
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.auth")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIX = (
    "one token per line: NAME CAPABILITIES PREFIX|* SHA256HEX [until=2027-01-31T00:00:00Z], where "
    "the capabilities are some of read,list,append,apply, or one of reader, writer, admin"
)


class Access(enum.Flag):
    """What an operation needs, and a token has."""

    READ = enum.auto()
    """Read and follow what a key has."""
    LIST = enum.auto()
    """List keys."""
    APPEND = enum.auto()
    """Write documents, and all else that running tasks write."""
    APPLY = enum.auto()
    """Change what is to run."""

    @property
    def word(self) -> str:
        return (self.name or "").lower()


EVERYTHING: Final = ~Access(0)

_CAPABILITIES: Final = {each.word: each for each in Access}
_ADMIN: Final = "admin"
_ROLES: Final = {
    "reader": Access.READ | Access.LIST,
    "writer": EVERYTHING,
    _ADMIN: EVERYTHING,  # of all keys, whatever the prefix says
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The holder of a valid token."""

    name: str
    access: Access
    prefix: str
    digest: str = field(default="", repr=False)
    """Digest of the token: another token under the same name is another principal."""
    until: float | None = None
    """When the token expires, in seconds since 1970."""

    def allows(self, needed: Access, key: str) -> bool:
        """True if the token gives `needed` access to `key`, which may be a prefix."""
        return needed in self.access and key.startswith(self.prefix)

    @property
    def is_unlimited(self) -> bool:
        """True if it may do everything."""
        return self.access == EVERYTHING and not self.prefix


ANYBODY = Principal(name="anybody", access=EVERYTHING, prefix="")
"""Every caller of a service without a token file, which listens on loopback or was asked to be
open."""


class TokenRefusal(enum.Enum):
    """Why a caller is not a principal."""

    MISSING = "a token is required"
    INVALID = "the token is not valid"
    EXPIRED = "the token has expired"


def parse_tokens(text: str, *, where: str) -> tuple[Principal, ...]:
    """Return the principals of a token file, which errors call `where`."""
    principals = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].split()
        if not content:
            continue
        try:
            principals.append(_parse_principal(content))
        except (ValueError, KeyError):
            # The line itself stays out of the message: it may hold a token written in clear.
            raise UserError(
                "token file refused", where=f"{where}, line {number}", fix=_FIX
            ) from None
    if not principals:
        raise UserError("token file refused: no token in it", where=where, fix=_FIX)
    return tuple(principals)


def _parse_principal(content: list[str]) -> Principal:
    name, words, prefix, digest, *options = content
    if not _DIGEST.fullmatch(digest) or len(options) > 1:
        raise ValueError
    until = None
    if options:
        option, _, moment = options[0].partition("=")
        ends = datetime.fromisoformat(moment)
        if option != "until" or ends.tzinfo is None:
            raise ValueError
        until = ends.timestamp()
    return Principal(
        name=name,
        access=_ROLES.get(words) or _capabilities(words),
        prefix="" if prefix == "*" or words == _ADMIN else prefix,
        digest=digest,
        until=until,
    )


def _capabilities(words: str) -> Access:
    access = Access(0)
    for word in words.split(","):
        access |= _CAPABILITIES[word]
    return access


class TokenFile:
    """The tokens of a file, read again when it changes.

    If the file becomes unreadable, malformed or writable by others, the last good tokens stay in
    force: a typo during a rotation must neither lock everybody out nor let anybody in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stat()
        self._principals = parse_tokens(self._read(), where=str(path))
        self._failure = ""

    def recognize(self, authorization: str | None) -> Principal | TokenRefusal:
        """Return the principal of an authorization header.

        Every line is compared, each in constant time, so that timing reveals nothing.
        """
        self._reload()
        scheme, _, token = (authorization or "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).hexdigest()
        found: Principal | None = None
        for principal in self._principals:
            if hmac.compare_digest(principal.digest, given) and scheme.lower() == "bearer":
                found = principal
        if found is None:
            return TokenRefusal.INVALID if authorization else TokenRefusal.MISSING
        return TokenRefusal.EXPIRED if _expired(found) else found

    def in_force(self, principal: Principal) -> bool:
        """True if the file still has exactly this line, and the token has not expired."""
        self._reload()
        return principal in self._principals and not _expired(principal)

    def _reload(self) -> None:
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._principals = parse_tokens(self._read(), where=str(self._path))
        except (UserError, OSError) as error:
            if str(error) != self._failure:  # once, and not every second
                log.error("token file not reloaded", extra=fields(error=error))  # noqa: TRY400
            self._failure = str(error)
        else:
            self._failure = ""
            log.info("token file reloaded", extra=fields(tokens=len(self._principals)))

    def _stat(self) -> tuple[int, ...]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _read(self) -> str:
        try:
            return read_guarded(self._path).decode()
        except UnicodeDecodeError:
            raise UserError(
                "token file refused: it is not text", where=str(self._path), fix=_FIX
            ) from None


def _expired(principal: Principal) -> bool:
    return principal.until is not None and principal.until <= time.time()
