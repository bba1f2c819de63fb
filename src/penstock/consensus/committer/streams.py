"""The two streams a reader can open: `subscribe` to a key, `watch` a prefix.

Both read from the store first and then follow the hub, in this order and no other: a follower
that is registered before it reads misses nothing that is committed in between. Both go on through
outages of the backend, since reading again has no side effects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.consensus.backend import PAGE_BYTES
from penstock.consensus.committer.backoff import RECONNECT_CLAMP_S, Backoff
from penstock.consensus.committer.hub import REORDER_S, Buffer, Hub, waited
from penstock.consensus.committer.metrics import CommitterMetrics
from penstock.consensus.committer.unread import Held, Unread
from penstock.consensus.store import (
    SCAN_ALL,
    CaughtUp,
    ConsensusError,
    Entries,
    Entry,
    ErrorKind,
    Heartbeat,
    Progress,
    Resync,
    ResyncReason,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    WatchResync,
    cause_chain,
)
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.committer")

_LASTING = frozenset({ErrorKind.UNDEFINED_TABLE, ErrorKind.STORE_RESET})

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The times of a stream, in seconds."""

    heartbeat_s: float = 10.0
    progress_s: float = 1.0
    slow_s: float = 60.0
    """A subscriber that let its buffer overflow and took this long for one event must resync."""


class Streams:
    """Makes streams over a hub and its backend."""

    def __init__(
        self,
        hub: Hub,
        metrics: CommitterMetrics,
        options: StreamOptions,
        incarnation: bytes,
        *,
        unread: Unread,
        catch_ups_max: int,
    ) -> None:
        self._hub = hub
        self._metrics = metrics
        self._options = options
        self._incarnation = incarnation
        self._unread = unread
        self._catch_ups = asyncio.Semaphore(catch_ups_max)

    # ----------------------------------------------------------------------------- subscribe

    async def subscribe(
        self, key: str, from_: int, client: str | None
    ) -> AsyncGenerator[SubscribeEvent, None]:
        """Entries of one key from `from_` on; see `Consensus.subscribe`."""
        loop = asyncio.get_running_loop()
        next_ = from_
        with self._hub.subscriber(key) as buffer:
            async with contextlib.aclosing(self._follow(key, from_, buffer, client)) as events:
                async for event in events:
                    if isinstance(event, Entry):
                        if event.data.seqno != next_:
                            self._metrics.subscribe_gap.add()
                        next_ = event.data.seqno + 1
                        buffer.upto = max(buffer.upto, event.data.seqno)
                    elif isinstance(event, Resync):
                        self._metrics.subscribe_resync.labels(event.reason.name).add()
                    handed_over = loop.time()
                    yield event
                    took = loop.time() - handed_over
                    if buffer.overflowed and took > self._options.slow_s:
                        self._metrics.subscribe_resync.labels(ResyncReason.SLOW.name).add()
                        floor, head = await self._bounds(key)
                        yield Resync(floor=floor, head=head, reason=ResyncReason.SLOW)
                        return

    async def _follow(
        self, key: str, from_: int, buffer: Buffer, client: str | None
    ) -> AsyncGenerator[SubscribeEvent, None]:
        loop = asyncio.get_running_loop()
        next_ = from_
        head: int | None = None
        behind = True
        early: dict[int, VersionedData] = {}
        patience_ends: float | None = None
        while True:
            if self._hub.retired:
                yield Resync(floor=0, head=0, reason=ResyncReason.STORE_RESET)
                return
            self._hub.check_open()
            if behind:
                if buffer.overflowed:
                    self._metrics.subscribe_lag.add()
                buffer.restart()
                buffer.overflowed = False
                early.clear()
                patience_ends = None
                more = True
                while more:
                    read = partial(
                        self._hub.backend.scan, key, next_, SCAN_ALL, bytes_max=PAGE_BYTES
                    )
                    async with self._page(client) as held:
                        page = await self._catching_up(read)
                        held.resize(sum(len(entry.data) for entry in page.entries))
                        if page.entries and page.entries[0].seqno > next_:
                            floor, last = await self._bounds(key)
                            yield Resync(floor=floor, head=last, reason=ResyncReason.TRUNCATED)
                            return
                        for entry in page.entries:
                            yield Entry(entry)
                            next_ = entry.seqno + 1
                        more = page.more
                    del page
                if next_ > from_:
                    head = next_ - 1
                else:
                    heads = await self._persistently(partial(self._hub.backend.heads, [key]))
                    head = heads.get(key)
                behind = buffer.behind
                if not behind:
                    yield CaughtUp(head)
                continue

            timeout_s = self._options.heartbeat_s
            if patience_ends is not None:
                timeout_s = max(0.0, patience_ends - loop.time())
            if not await buffer.wait(timeout_s):
                if patience_ends is None:
                    yield Heartbeat(head=head, incarnation=self._incarnation)
                else:
                    behind = True
                continue
            if buffer.behind:
                behind = True
                continue
            early.update((e.seqno, e) for e in buffer.take() if e.seqno >= next_)
            delivered = False
            while (found := early.pop(next_, None)) is not None:
                await self._unread.room(client)
                yield Entry(found)
                head = found.seqno
                next_ += 1
                delivered = True
            if early and patience_ends is None:
                patience_ends = loop.time() + REORDER_S
            elif not early:
                patience_ends = None
                if delivered:
                    yield CaughtUp(head)

    async def _bounds(self, key: str) -> tuple[int, int]:
        floor = await self._persistently(partial(self._hub.backend.floor, key))
        heads = await self._persistently(partial(self._hub.backend.heads, [key]))
        return floor, heads.get(key, floor)

    # --------------------------------------------------------------------------------- watch

    async def watch(
        self, prefix: str, from_revision: int, client: str | None
    ) -> AsyncGenerator[WatchEvent, None]:
        """Entries under a prefix in revision order; see `Consensus.watch`.

        `last` is everything there is to know about the stream. It only ever moves to a revision
        up to which all entries were handed over, and only by the neighbour from the tail or by a
        page of the store that is complete up to its end.
        """
        hub = self._hub
        loop = asyncio.get_running_loop()
        last = from_revision
        patience_ends = 0.0  # the first look is always into the store
        with hub.watcher() as wake:
            while True:
                if hub.retired:
                    self._metrics.subscribe_resync.labels(ResyncReason.STORE_RESET.name).add()
                hub.check_open()
                wake.clear()
                if (entries := hub.tail.get(last + 1)) is not None:
                    while entries is not None:
                        last += 1
                        if wanted := tuple(e for e in entries if e[0].startswith(prefix)):
                            await self._unread.room(client)
                            yield Entries(last, wanted)
                        entries = hub.tail.get(last + 1)
                    yield Progress(last)
                    patience_ends = loop.time() + REORDER_S
                elif patience_ends == 0.0 or hub.revision > last:
                    if loop.time() < patience_ends:
                        await waited(wake, patience_ends - loop.time())
                        continue
                    async with contextlib.aclosing(self._read(prefix, last, client)) as pages:
                        async for event, upto in pages:
                            last = max(last, upto)
                            yield event
                    patience_ends = loop.time() + REORDER_S
                elif not await waited(wake, self._options.progress_s):
                    yield Progress(last)
                else:
                    patience_ends = loop.time() + REORDER_S

    async def _read(
        self, prefix: str, after: int, client: str | None
    ) -> AsyncGenerator[tuple[WatchEvent, int], None]:
        """What the store has after a revision; each event with the revision it completes."""
        more = True
        last = after
        while more:
            async with self._page(client) as held:
                page = await self._catching_up(
                    partial(self._hub.backend.entries_since, prefix, last)
                )
                held.resize(sum(len(entry.data) for _, entry in page.entries))
                if page.lost:
                    revision, heads = await self._persistently(
                        partial(self._hub.backend.heads_under, prefix)
                    )
                    self._metrics.subscribe_resync.labels(ResyncReason.TRUNCATED.name).add()
                    last = max(last, revision)
                    event = WatchResync(revision=last, heads=heads, reason=ResyncReason.TRUNCATED)
                    yield event, last
                    yield Progress(last), last
                    return
                start = 0
                for index in range(1, len(page.entries) + 1):
                    revision = page.entries[start][1].revision
                    if index == len(page.entries) or page.entries[index][1].revision != revision:
                        yield Entries(revision, page.entries[start:index]), revision
                        start = index
                last = max(last, page.upto)
                yield Progress(last), last
                more = page.more
            del page

    @contextlib.asynccontextmanager
    async def _page(self, client: str | None) -> AsyncIterator[Held]:
        """Room for a page of the store, until all of it is delivered: a client that does not read
        holds what it was given, and not as much as it has streams."""
        await self._unread.room(client)
        with self._unread.held(client, PAGE_BYTES) as held:
            yield held

    async def _catching_up(self, read: Callable[[], Awaitable[T]]) -> T:
        """A page of the store; few streams read at once, so that others get at it, too."""
        async with self._catch_ups:
            return await self._persistently(read)

    # ------------------------------------------------------------------------------- outages

    async def _persistently(self, read: Callable[[], Awaitable[T]]) -> T:
        """The answer of a read, however long the backend takes to come back.

        A missing schema is not an outage: whoever embeds a committer must hear of it.
        """
        backoff = Backoff(clamp_s=RECONNECT_CLAMP_S)
        while True:
            self._hub.check_open()
            try:
                return await read()
            except ConsensusError as error:
                if error.kind in _LASTING:
                    raise
                log.log(
                    backoff.level,
                    "stream waits for backend",
                    extra=fields(error=cause_chain(error)),
                )
                await backoff.wait()
