"""Limits on what the committer takes in: every queue has an end, and a refusal proves itself.

An operation is admitted before anything of it runs, so a refusal is `Determinate(OVERLOADED)`: the
caller may send the same bytes again after `retry_after_ms`. Streams of events, sessions and calls
are not operations and are limited in number; `unread` limits what their readers leave unread.

Used on the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import NoReturn

from penstock.consensus.committer.options import Limits
from penstock.consensus.store import Determinate, ErrorKind

_RETRY_MS_MIN = 5
_RETRY_MS_MAX = 5_000
_LATENCY_WEIGHT = 0.05
_REASONS = (
    "inflight", "client", "key", "bytes", "subscribers", "sessions", "calls", "unread", "closing",
)  # fmt: skip


class Admission:
    """Counts what is under way and refuses what would pass a limit.

    `client` is None for the process that hosts the committer, which is limited by the whole and
    not by a client's share.
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
        self._check_open()
        if self.inflight >= limits.inflight_max:
            what = f"{self.inflight} operations are in progress, {limits.inflight_max} is the limit"
            self.refuse("inflight", what)
        of_client = self._by_client.get(client, 0) if client is not None else 0
        if client is not None and of_client >= limits.client_inflight_max:
            limit = limits.client_inflight_max
            what = f"this client has {of_client} operations in progress, {limit} is the limit"
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

    @contextlib.contextmanager
    def operation(
        self, client: str | None, size: int = 0, key: str | None = None
    ) -> Iterator[None]:
        """Hold the place of one operation; see `enter`."""
        self.enter(client, size, key)
        try:
            yield
        finally:
            self.leave(client, size, key)

    def check_queue(self, elements: int, size_queued: int, size: int) -> None:
        """Refuse to add `size` bytes to a commit queue that holds `elements` and `size_queued`.

        A caller may leave while its append still waits, so counting callers is not enough.
        """
        if elements >= self.limits.inflight_max:
            what = f"{elements} appends wait, {self.limits.inflight_max} is the limit"
            self.refuse("inflight", f"the commit queue is full: {what}")
        self._check_bytes(size_queued, size)

    def _check_bytes(self, held: int, size: int) -> None:
        limit = self.limits.queue_bytes_max
        if held and held + size > limit:
            self.refuse(
                "bytes", f"{held} bytes are in progress, {size} more pass the limit of {limit}"
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
        """Hold the place of one session."""
        self._check_open()
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
        """Hold the place of one call, before anything of its request is read."""
        if self.calls >= self.limits.calls_max:
            what = f"{self.calls} calls are in progress, {self.limits.calls_max} is the limit"
            self.refuse("calls", what)
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Hold the place of one subscription or watch."""
        self._check_open()
        if self.subscribers >= self.limits.subscribers_max:
            limit = self.limits.subscribers_max
            what = f"{self.subscribers} subscriptions are open, {limit} is the limit"
            self.refuse("subscribers", what)
        self.subscribers += 1
        try:
            yield
        finally:
            self.subscribers -= 1

    def observe(self, backing_s: float) -> None:
        """Note how long the backend took: refusals advise to wait as long as the queue may take."""
        self._latency_s += (backing_s - self._latency_s) * _LATENCY_WEIGHT

    def close(self) -> None:
        """Refuse everything from now on; what is under way finishes."""
        self._closing = True
        if not self.inflight:
            self._empty.set()

    async def emptied(self) -> None:
        """Wait, after `close`, until nothing is under way."""
        await self._empty.wait()

    @property
    def retry_after_ms(self) -> int:
        expected = self.inflight * self._latency_s * 1_000
        return int(min(max(expected, _RETRY_MS_MIN), _RETRY_MS_MAX))

    def _check_open(self) -> None:
        if self._closing:
            self.refuse("closing", "the committer is shutting down", ErrorKind.UNAVAILABLE)

    def refuse(self, reason: str, what: str, kind: ErrorKind = ErrorKind.OVERLOADED) -> NoReturn:
        self.rejected[reason] += 1
        raise Determinate(kind, what, retry_after_ms=self.retry_after_ms)


def _decrement(counts: dict[str, int], name: str) -> None:
    if counts[name] > 1:
        counts[name] -= 1
    else:
        del counts[name]
