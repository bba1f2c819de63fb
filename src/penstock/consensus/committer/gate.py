"""Who comes in, who is shown out, and what becomes of those who try in vain.

    gate = Gate(tokens, count=…)
    who = await gate.admit(context)          # raises for who has no valid token
    async with gate.visit(who):              # around whatever lasts: sessions and streams
        …                                    # Revoked, as soon as the token is not in force

A token that was taken from the file, or whose line changed, or whose time is over, ends what it had
opened within `RECHECK_S`, plus as long as it takes to look. The client may come again, with the
token its file has by then: a rotation costs it a reconnect.

Failures are answered the later the more of them a host makes, up to `DELAY_S_MAX`. That holds
neither memory nor anybody else: a valid token is never made to wait, at most `WAITING_MAX` calls
are, and while a connection has a failure waiting, everything else from it is refused unlooked-at.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from penstock.consensus.committer.auth import (
    ANYBODY,
    Principal,
    Refusal,
    TokenFile,
    authorization_of,
)
from penstock.consensus.committer.grpcio import aio
from penstock.consensus.store import Determinate, ErrorKind
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.auth")

RECHECK_S: Final = 1.0
"""How often the tokens of open sessions and streams are looked up again."""

DELAY_S: Final = 0.05
DELAY_S_MAX: Final = 1.0
"""How long a failure waits for its answer: the first, doubling, and at most."""

WAITING_MAX: Final = 256
"""Calls that wait for such an answer; one more is answered at once."""

_HOSTS_MAX: Final = 1_024
_FORGIVEN_S: Final = 60.0
_LOG_S: Final = 10.0
"""Between two log lines about one host."""
_LOG_LINES_MAX: Final = 20
"""About all hosts, in the same time."""

Context = aio.ServicerContext[Any, Any]


class Revoked(Determinate):
    """The token of an open session or stream is not in force any more."""

    def __init__(self) -> None:
        super().__init__(ErrorKind.UNAUTHENTICATED, "the token is not in force any more")


class Gate:
    """The entrance of one service; on the event loop of that service."""

    def __init__(
        self,
        tokens: TokenFile | None,
        *,
        count: Callable[[str], None] = lambda _: None,
        recheck_s: float = RECHECK_S,
    ) -> None:
        """`count` is told of every failure, and why."""
        self._tokens = tokens
        self._count = count
        self._failures = _Failures()
        self._recheck_s = recheck_s
        self._visits: dict[asyncio.Timeout, Principal] = {}
        self._next: asyncio.TimerHandle | None = None

    async def admit(self, context: Context) -> Principal:
        """Who calls; `Determinate(UNAUTHENTICATED)`, perhaps later, if that is nobody."""
        if self._tokens is None:
            return ANYBODY
        peer = context.peer()
        if peer in self._failures.waiting:
            self._count("waiting")
            what = "another attempt of this connection has failed, and is not answered yet"
            raise Determinate(ErrorKind.UNAUTHENTICATED, what)
        found = self._tokens.recognize(authorization_of(context.invocation_metadata() or ()))
        if isinstance(found, Principal):
            return found
        self._count(found.name.lower())
        await self._failures.wait(peer, found)
        raise Determinate(ErrorKind.UNAUTHENTICATED, found.value)

    @contextlib.asynccontextmanager
    async def visit(self, who: Principal) -> AsyncIterator[None]:
        """The block, until the token of `who` is not in force any more: then it is `Revoked`."""
        if self._tokens is None:
            yield
            return
        leave = asyncio.timeout(None)
        try:
            async with leave:
                self._visits[leave] = who
                self._recheck_later()
                try:
                    yield
                finally:
                    del self._visits[leave]
        except TimeoutError:
            if leave.expired():
                raise Revoked from None
            raise

    def _recheck_later(self) -> None:
        if self._next is None and self._visits:
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(self._recheck_s, self._recheck)

    def _recheck(self) -> None:
        self._next = None
        if self._tokens is None:
            return
        now = asyncio.get_running_loop().time()
        known: dict[Principal, bool] = {}
        for leave, who in self._visits.items():
            if who not in known:
                known[who] = self._tokens.in_force(who)
                if not known[who]:
                    log.warning("token not in force any more", extra=fields(principal=who.name))
            if not known[who] and not leave.expired():
                leave.reschedule(now)
        self._recheck_later()


@dataclass(slots=True)
class _Host:
    """What one host did in vain lately."""

    failures: int = 0
    last: float = -math.inf
    unlogged: int = 0
    logged: float = -math.inf


class _Failures:
    """Failed authentications: how each is slowed and logged."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        """Connections with a failure that has not been answered."""
        self._held = 0
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self._lines = 0
        self._lines_since = -math.inf
        self._total = 0

    async def wait(self, peer: str, why: Refusal) -> None:
        """Note a failure of `peer`, and return when it may be answered."""
        name = host_of(peer)
        host = self._host(name)
        self._log(name, host, why)
        if self._held >= WAITING_MAX:
            return
        connection = {peer} if peer.rpartition(":")[2] else set()  # on a Unix socket none is known
        self._held += 1
        self.waiting |= connection
        try:
            await asyncio.sleep(min(DELAY_S_MAX, DELAY_S * 2.0 ** min(host.failures - 1, 10)))
        finally:
            self._held -= 1
            self.waiting -= connection

    def _host(self, name: str) -> _Host:
        host = self._hosts.pop(name, None)
        now = time.monotonic()
        if host is None or now - host.last > _FORGIVEN_S:
            host = _Host()
        self._hosts[name] = host
        if len(self._hosts) > _HOSTS_MAX:
            self._hosts.popitem(last=False)
        host.failures += 1
        host.last = now
        return host

    def _log(self, name: str, host: _Host, why: Refusal) -> None:
        now = time.monotonic()
        self._total += 1
        host.unlogged += 1
        if now - self._lines_since > _LOG_S:
            self._lines, self._lines_since = 0, now
        if now - host.logged < _LOG_S or self._lines >= _LOG_LINES_MAX:
            return
        self._lines += 1
        told = fields(peer=name, reason=why.name.lower(), attempts=host.unlogged, total=self._total)
        log.warning("authentication failed", extra=told)
        host.logged, host.unlogged = now, 0


def host_of(peer: str) -> str:
    """The host of a peer as gRPC writes it; of IPv6 its network, of which one host has all."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = rest.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        return str(ipaddress.IPv6Network((int(address), 64), strict=False))
    return host
