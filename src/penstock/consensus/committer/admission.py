"""How much work the committer takes in: every queue has an end, and a refusal proves itself.

An operation is admitted before anything of it runs, so a refusal is `Determinate(OVERLOADED)`: the
caller may send the same bytes again after `retry_after_ms`. Streams of events, sessions and calls
are not operations and are bounded by their number; what their readers do not take is bounded by
`unread`.

Used on the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from penstock.consensus.store import Determinate, ErrorKind

_RETRY_MS_MIN = 5
_RETRY_MS_MAX = 5_000
_LATENCY_WEIGHT = 0.05
_CLIENT_SHARE = 4
_REASONS = (
    "inflight", "client", "key", "bytes", "subscribers", "sessions", "calls", "unread", "closing",
)  # fmt: skip

MESSAGE_BYTES = 1 << 20
"""What every client may send in one message, whatever the server was told."""


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
    sessions_max: int = 4_096
    """Open sessions, of which every client process has one."""
    calls_max: int = 2_048
    """Calls that are under way, from their first byte to the last of their answer."""
    message_bytes_max: int = MESSAGE_BYTES
    """Of one message to the committer, decompressed or not: gRPC takes in no more of it."""
    batch_elements_max: int = 1_000
    """Operations of one batch, in however many messages; a session's message has its window."""
    request_s: float = 30.0
    """How long a message of a call may take to arrive."""
    unread_bytes_max: int = 128 << 20
    """Answers and events that wait for their readers; one client may hold a quarter of them."""
    session_unread_bytes_max: int = 1 << 20
    """Of them, heads that wait in one session: past it, the session answers no further one."""
    slow_s: float = 60.0
    """How long a message to a client may wait to be taken, until its stream is ended."""
    catch_ups_max: int = 4
    """Subscriptions and watches that read the store at once."""

    def __post_init__(self) -> None:
        if self.message_bytes_max < MESSAGE_BYTES:
            raise ValueError(f"clients send messages of up to {MESSAGE_BYTES} bytes")

    @property
    def client_inflight_max(self) -> int:
        return max(1, self.inflight_max // _CLIENT_SHARE)

    @property
    def client_unread_bytes_max(self) -> int:
        return max(1, self.unread_bytes_max // _CLIENT_SHARE)


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
        self.sessions = 0
        self.calls = 0
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
            what = f"{self.inflight} operations are under way, {limits.inflight_max} is the limit"
            self.refuse("inflight", what)
        of_client = self._by_client.get(client, 0) if client is not None else 0
        if client is not None and of_client >= limits.client_inflight_max:
            limit = limits.client_inflight_max
            what = f"this client has {of_client} operations under way, {limit} is the limit"
            self.refuse("client", what)
        of_key = self._by_key.get(key, 0) if key is not None else 0
        if of_key >= limits.queue_per_key_max:
            limit = limits.queue_per_key_max
            self.refuse("key", f"{of_key} compare-and-sets wait for {key!r}, {limit} is the limit")
        self._check_bytes(self.bytes_total, size)
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

    def check_queue(self, elements: int, size_queued: int, size: int) -> None:
        """Refuse to add `size` bytes to a commit queue of so many elements and bytes.

        Callers may leave while what they asked for still waits (R10), so that what is under way by
        the count of callers is not all there is.
        """
        if elements >= self.limits.inflight_max:
            what = f"{elements} appends wait, {self.limits.inflight_max} is the limit"
            self.refuse("inflight", f"the commit queue is full: {what}")
        self._check_bytes(size_queued, size)

    def _check_bytes(self, held: int, size: int) -> None:
        limit = self.limits.queue_bytes_max
        if held and held + size > limit:
            self.refuse(
                "bytes", f"{held} bytes are under way, {size} more pass the limit of {limit}"
            )

    @contextlib.contextmanager
    def arriving(self, size: int) -> Iterator[None]:
        """Keep room for `size` bytes of a batch while its parts arrive."""
        self._check_bytes(self.bytes_total, size)
        self.bytes_total += size
        try:
            yield
        finally:
            self.bytes_total -= size

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The place of one session."""
        if self._closing:
            self.refuse("closing", "the committer is shutting down", ErrorKind.UNAVAILABLE)
        if self.sessions >= self.limits.sessions_max:
            what = f"{self.sessions} sessions are open, {self.limits.sessions_max} is the limit"
            self.refuse("sessions", what)
        self.sessions += 1
        try:
            yield
        finally:
            self.sessions -= 1

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """The place of one call, before anything of its request is read."""
        if self.calls >= self.limits.calls_max:
            what = f"{self.calls} calls are under way, {self.limits.calls_max} is the limit"
            self.refuse("calls", what)
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    def enter_stream(self) -> None:
        if self._closing:
            self.refuse("closing", "the committer is shutting down", ErrorKind.UNAVAILABLE)
        if self.subscribers >= self.limits.subscribers_max:
            limit = self.limits.subscribers_max
            what = f"{self.subscribers} subscriptions are open, {limit} is the limit"
            self.refuse("subscribers", what)
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
