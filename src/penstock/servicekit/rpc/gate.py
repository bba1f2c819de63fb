"""Authenticates callers, ends what a revoked token opened, and slows down failed attempts.

    gate = Gate(tokens, count=…)
    who = await gate.admit(context)          # Unauthenticated without a valid token
    async with gate.visit(who):              # around sessions and streams, which last
        …                                    # Revoked, as soon as the token is not in force

When a token is removed from the file, its line changes or it expires, everything it had opened ends
within about `RECHECK_S`. The client may reconnect with the token that its file has by then: that is
all a rotation costs it.

The more failures a host makes, the later they are answered, up to `DELAY_S_MAX`. This costs little
memory and delays no other caller: a valid token never waits, at most `WAITING_MAX` calls do, and
while a connection has a failure waiting, its other calls are refused without looking at them.
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
from typing import Final
from urllib.parse import unquote

from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.grpcio import Context
from penstock.servicekit.rpc.tokens import ANYBODY, Principal, TokenFile, TokenRefusal

log = logging.getLogger("penstock.auth")

RECHECK_S: Final = 1.0
"""Interval between checks of the tokens of open sessions and streams."""

DELAY_S: Final = 0.05
DELAY_S_MAX: Final = 1.0
"""Delay of the answer to the first failure, which doubles, and its maximum."""

WAITING_MAX: Final = 256
"""Failed calls that wait for their answer at once; one more is answered immediately."""

_HOSTS_MAX: Final = 1_024
_FORGIVEN_S: Final = 60.0
_LOG_S: Final = 10.0
"""Interval between two log lines about one host."""
_LOG_LINES_MAX: Final = 20
"""Lines about all hosts in that interval."""


class Unauthenticated(Exception):
    """The caller has no valid token; nothing of its call has run."""


class Revoked(Exception):
    """The token of an open session or stream is no longer in force; much of the call may have run.

    The client may come again.
    """

    def __init__(self) -> None:
        super().__init__("the token is not in force any more")


class Gate:
    """The entrance of one service; on the event loop of that service."""

    def __init__(
        self,
        tokens: TokenFile | None,
        *,
        count: Callable[[str], None] = lambda _: None,
        recheck_s: float = RECHECK_S,
    ) -> None:
        """`count` is called with the reason of every failure."""
        self._tokens = tokens
        self._count = count
        self._failures = _Failures()
        self._recheck_s = recheck_s
        self._visits: dict[asyncio.Timeout, Principal] = {}
        self._next: asyncio.TimerHandle | None = None

    async def admit(self, context: Context) -> Principal:
        """Return the caller; raise `Unauthenticated`, perhaps delayed, without a valid token."""
        if self._tokens is None:
            return ANYBODY
        peer = context.peer()
        if peer in self._failures.waiting:
            self._count("waiting")
            what = "another attempt of this connection has failed, and is not answered yet"
            raise Unauthenticated(what)
        found = self._tokens.recognize(_authorization(context))
        if isinstance(found, Principal):
            return found
        self._count(found.name.lower())
        await self._failures.wait(peer, found)
        raise Unauthenticated(found.value)

    @contextlib.asynccontextmanager
    async def visit(self, who: Principal) -> AsyncIterator[None]:
        """Run the block, and end it with `Revoked` once the token of `who` is not in force."""
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
    """Recent failures of one host."""

    failures: int = 0
    last: float = -math.inf
    unlogged: int = 0
    logged: float = -math.inf


class _Failures:
    """Slows down and logs failed authentications."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        """Connections with a failure that is not answered yet."""
        self._held = 0
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self._lines = 0
        self._lines_since = -math.inf
        self._total = 0

    async def wait(self, peer: str, why: TokenRefusal) -> None:
        """Record a failure of `peer`, and return when it may be answered."""
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

    def _log(self, name: str, host: _Host, why: TokenRefusal) -> None:
        now = time.monotonic()
        self._total += 1
        host.unlogged += 1
        if now - self._lines_since > _LOG_S:
            self._lines, self._lines_since = 0, now
        if now - host.logged < _LOG_S or self._lines >= _LOG_LINES_MAX:
            return
        self._lines += 1
        log.warning(
            "authentication failed",
            extra=fields(
                peer=name, reason=why.name.lower(), attempts=host.unlogged, total=self._total
            ),
        )
        host.logged, host.unlogged = now, 0


def _authorization(context: Context) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer; for IPv6 its /64 network, all of which one host may have."""
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
