"""How much work the committer takes in: every queue has an end, and a refusal proves itself.

An operation is admitted before anything of it runs, so a refusal is `Determinate(OVERLOADED)`: the
caller may send the same bytes again after `retry_after_ms`. Streams of events are not operations
and are bounded by their number alone.

Used on the event-loop thread only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NoReturn

from penstock.consensus.store import Determinate, ErrorKind

_RETRY_MS_MIN = 5
_RETRY_MS_MAX = 5_000
_LATENCY_WEIGHT = 0.05
_CLIENT_SHARE = 4
_REASONS = ("inflight", "client", "key", "bytes", "subscribers", "closing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be under way at once."""

    inflight_max: int = 1_024
    """Operations; one client over the network may hold a quarter of them."""
    queue_per_key_max: int = 64
    """Compare-and-sets of one key: they can only commit one after the other."""
    queue_bytes_max: int = 64 << 20
    """Payload of everything under way; a single larger operation is admitted when alone."""
    subscribers_max: int = 10_000
    """Open subscriptions and watches."""

    @property
    def client_inflight_max(self) -> int:
        return max(1, self.inflight_max // _CLIENT_SHARE)


class Admission:
    """Counts what is under way and refuses what would pass a limit.

    `client` is None for the process that hosts the committer: it is bounded by the whole, not by
    a share, since it competes with nobody of its kind.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.inflight = 0
        self.bytes_total = 0
        self.subscribers = 0
        self.rejected = dict.fromkeys(_REASONS, 0)
        self._by_client: dict[str, int] = {}
        self._by_key: dict[str, int] = {}
        self._latency_s = 0.001
        self._closing = False
        self._empty = asyncio.Event()

    def enter(self, client: str | None, size: int = 0, key: str | None = None) -> None:
        """Admit one operation with `size` bytes of payload; `key` is that of a compare-and-set.

        `leave` with the same arguments gives its place back.
        """
        limits = self.limits
        if self._closing:
            self.refuse("closing", "the committer is shutting down", ErrorKind.UNAVAILABLE)
        if self.inflight >= limits.inflight_max:
            self.refuse("inflight", f"{self.inflight} operations are under way")
        of_client = self._by_client.get(client, 0) if client is not None else 0
        if client is not None and of_client >= limits.client_inflight_max:
            self.refuse("client", f"this client has {of_client} operations under way")
        of_key = self._by_key.get(key, 0) if key is not None else 0
        if of_key >= limits.queue_per_key_max:
            self.refuse("key", f"{of_key} compare-and-sets wait for {key!r}")
        if self.bytes_total and self.bytes_total + size > limits.queue_bytes_max:
            self.refuse("bytes", f"{self.bytes_total} bytes are under way")
        self.inflight += 1
        self.bytes_total += size
        if client is not None:
            self._by_client[client] = of_client + 1
        if key is not None:
            self._by_key[key] = of_key + 1

    def leave(self, client: str | None, size: int = 0, key: str | None = None) -> None:
        self.inflight -= 1
        if self._closing and not self.inflight:
            self._empty.set()
        self.bytes_total -= size
        if client is not None:
            _decrement(self._by_client, client)
        if key is not None:
            _decrement(self._by_key, key)

    def enter_stream(self) -> None:
        if self._closing:
            self.refuse("closing", "the committer is shutting down", ErrorKind.UNAVAILABLE)
        if self.subscribers >= self.limits.subscribers_max:
            self.refuse("subscribers", f"{self.subscribers} subscriptions are open")
        self.subscribers += 1

    def leave_stream(self) -> None:
        self.subscribers -= 1

    def observe(self, backing_s: float) -> None:
        """How long the backend took; refusals advise to wait as long as the queue should take."""
        self._latency_s += (backing_s - self._latency_s) * _LATENCY_WEIGHT

    def close(self) -> None:
        """Refuse everything from now on; what is under way finishes."""
        self._closing = True
        if not self.inflight:
            self._empty.set()

    async def emptied(self) -> None:
        """Wait, after `close`, until nothing is under way any more."""
        await self._empty.wait()

    @property
    def retry_after_ms(self) -> int:
        expected = self.inflight * self._latency_s * 1_000
        return int(min(max(expected, _RETRY_MS_MIN), _RETRY_MS_MAX))

    def refuse(self, reason: str, what: str, kind: ErrorKind = ErrorKind.OVERLOADED) -> NoReturn:
        self.rejected[reason] += 1
        raise Determinate(kind, what, retry_after_ms=self.retry_after_ms)


def _decrement(counts: dict[str, int], name: str) -> None:
    if counts[name] > 1:
        counts[name] -= 1
    else:
        del counts[name]
