"""Who may do what: bearer tokens with a role and a key prefix.

A line of the token file is `name role prefix sha256 [until=TIME]`, where role is reader, writer or
admin, prefix limits the keys (`*`: all), sha256 is the hex digest of the token, so that the file
does not hold what it checks, and TIME, such as 2027-01-31T00:00:00Z, ends it. Several lines may be
valid at once, which is how tokens are rotated; the file is read again when it changes.

    role      may
    reader    head, scan, subscribe, watch        under its prefix
    writer    and compare-and-set, truncate       under its prefix
    admin     and list keys                       everywhere

A prefix of journals opens what their readers and writers cannot do without, to be read and nothing
else: the catalog, which says what a collection is, and the schemas of documents (`COMMONS`).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.consensus.store import LIVENESS_KEY, Determinate, ErrorKind
from penstock.errors import UserError
from penstock.servicekit.guarded import read_guarded
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.committer")

JOURNALS: Final = "journal/"
COMMONS: Final = ("catalog/main", "schema/", "blobs/turns", LIVENESS_KEY)
"""Keys, and prefixes of keys, that whoever has a prefix of journals may read."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIX = (
    "one token per line: NAME reader|writer|admin PREFIX|* SHA256HEX [until=2027-01-31T00:00:00Z]"
)


class Access(enum.IntEnum):
    """What an operation needs, and what a role has; each includes those below."""

    READ = 1
    WRITE = 2
    ADMIN = 3


_ROLES = {"reader": Access.READ, "writer": Access.WRITE, "admin": Access.ADMIN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Somebody who showed a valid token."""

    name: str
    access: Access
    prefix: str
    digest: str = field(default="", repr=False)
    """Of the token: another one of the same name is another principal."""
    until: float | None = None
    """When the token ends, in seconds since 1970."""

    def check(self, needed: Access, key: str) -> None:
        """Raise unless this principal may do `needed` to `key` (or to a whole prefix)."""
        if self.access is Access.ADMIN:
            return
        if needed <= self.access and key.startswith(self.prefix):
            return
        if needed is Access.READ and self.prefix.startswith(JOURNALS) and is_common(key):
            return
        what = f"{self.name} may not {needed.name.lower()} {key!r}"
        raise Determinate(ErrorKind.PERMISSION_DENIED, what)


def is_common(key: str) -> bool:
    """Whether a key, or a prefix, lies among the `COMMONS`."""
    return any(
        key.startswith(common) if common.endswith("/") else key == common for common in COMMONS
    )


ANYBODY = Principal(name="anybody", access=Access.ADMIN, prefix="")
"""Of a committer without a token file; such a one listens on loopback or was told to be open."""


class Refusal(enum.Enum):
    """Why a caller is nobody."""

    MISSING = "a token is required"
    INVALID = "the token is not valid"
    EXPIRED = "the token has expired"


def parse_tokens(text: str, *, where: str) -> tuple[Principal, ...]:
    """Whom a token file lets in; `where` names it in errors."""
    principals = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].split()
        if not content:
            continue
        try:
            principals.append(_principal(content))
        except (ValueError, KeyError):
            # The line itself stays out of the message: it may hold a token written in clear.
            raise UserError(
                "token file refused", where=f"{where}, line {number}", fix=_FIX
            ) from None
    if not principals:
        raise UserError("token file refused: no token in it", where=where, fix=_FIX)
    return tuple(principals)


def _principal(content: list[str]) -> Principal:
    name, role, prefix, digest, *options = content
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
        access=_ROLES[role],
        prefix="" if prefix == "*" else prefix,
        digest=digest,
        until=until,
    )


class TokenFile:
    """The tokens of a file, read again when it changes.

    A file that has become unreadable, wrong, or others' to write leaves the last good tokens in
    force: a typo during a rotation must not lock everybody out, nor let anybody in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stat()
        self._principals = parse_tokens(self._read(), where=str(path))
        self._failure = ""

    def authenticate(self, authorization: str | None) -> Principal:
        """Whose token it is; `Determinate(UNAUTHENTICATED)` if it is nobody's."""
        found = self.recognize(authorization)
        if isinstance(found, Refusal):
            raise Determinate(ErrorKind.UNAUTHENTICATED, found.value)
        return found

    def recognize(self, authorization: str | None) -> Principal | Refusal:
        """Whose token it is; every line is compared, in constant time, so timing tells nothing."""
        self._reload()
        scheme, _, token = (authorization or "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).hexdigest()
        found: Principal | None = None
        for principal in self._principals:
            if hmac.compare_digest(principal.digest, given) and scheme.lower() == "bearer":
                found = principal
        if found is None:
            return Refusal.INVALID if authorization else Refusal.MISSING
        return Refusal.EXPIRED if _expired(found) else found

    def in_force(self, principal: Principal) -> bool:
        """Whether the file, as it is now, still has this very line, and its time is not over."""
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


def authorization_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The authorization header among the metadata of a call."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            return value
    return None
