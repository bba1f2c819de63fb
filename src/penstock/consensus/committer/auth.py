"""Who may do what: bearer tokens with a role and a key prefix.

A line of the token file is `name role prefix sha256`, where role is reader, writer or admin, prefix
limits the keys (`*`: all), and sha256 is the hex digest of the token, so that the file does not
hold what it checks. Several lines may be valid at once, which is how tokens are rotated; the file
is read again when it changes.

    role      may
    reader    head, scan, subscribe, watch        under its prefix
    writer    and compare-and-set, truncate       under its prefix
    admin     and list keys                       everywhere
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.consensus.store import Determinate, ErrorKind
from penstock.errors import UserError
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.committer")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIX = "one token per line: NAME reader|writer|admin PREFIX|* SHA256HEX"


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

    def check(self, needed: Access, key: str) -> None:
        """Raise unless this principal may do `needed` to `key` (or to a whole prefix)."""
        if self.access is Access.ADMIN:
            return
        if needed > self.access or not key.startswith(self.prefix):
            what = f"{self.name} may not {needed.name.lower()} {key!r}"
            raise Determinate(ErrorKind.PERMISSION_DENIED, what)


ANYBODY = Principal(name="anybody", access=Access.ADMIN, prefix="")
"""Of a committer without a token file; such a one listens on loopback or was told to be open."""


@dataclass(frozen=True, slots=True)
class _Grant:
    principal: Principal
    digest: str


def parse_tokens(text: str, *, where: str) -> tuple[_Grant, ...]:
    """The grants of a token file; `where` names it in errors."""
    grants = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].split()
        if not content:
            continue
        if len(content) != 4 or content[1] not in _ROLES or not _DIGEST.fullmatch(content[3]):
            # The line itself stays out of the message: it may hold a token written in clear.
            raise UserError("token file refused", where=f"{where}, line {number}", fix=_FIX)
        name, role, prefix, digest = content
        principal = Principal(
            name=name, access=_ROLES[role], prefix="" if prefix == "*" else prefix
        )
        grants.append(_Grant(principal, digest))
    if not grants:
        raise UserError("token file refused: no token in it", where=where, fix=_FIX)
    return tuple(grants)


class TokenFile:
    """The tokens of a file, read again when it changes.

    A file that has become unreadable or wrong leaves the last good tokens in force: a typo during
    a rotation must not lock everybody out, nor let anybody in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stat()
        self._grants = parse_tokens(self._read(), where=str(path))

    def authenticate(self, authorization: str | None) -> Principal:
        """Whose token it is; every line is compared, in constant time, so timing tells nothing."""
        self._reload()
        scheme, _, token = (authorization or "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).hexdigest()
        found: Principal | None = None
        for grant in self._grants:
            if hmac.compare_digest(grant.digest, given) and scheme.lower() == "bearer":
                found = grant.principal
        if found is None:
            what = "the token is not valid" if authorization else "a token is required"
            raise Determinate(ErrorKind.UNAUTHENTICATED, what)
        return found

    def _reload(self) -> None:
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._grants = parse_tokens(self._read(), where=str(self._path))
        except (UserError, OSError) as error:
            log.error("token file not reloaded", extra=fields(error=error))  # noqa: TRY400
        else:
            log.info("token file reloaded", extra=fields(tokens=len(self._grants)))

    def _stat(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                "token file refused: it is no text", where=str(self._path), fix=_FIX
            ) from error


def authorization_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The authorization header among the metadata of a call."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            return value
    return None
