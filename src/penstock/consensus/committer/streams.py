"""The two streams a reader can open: `subscribe` to a key, `watch` a prefix.

Both register with the hub, then read the store, then follow the hub, in this order: a follower that
is registered before it reads misses nothing that is committed in between. Both survive outages of
the backend, since reading again has no side effects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from penstock.consensus.backend import PAGE_BYTES
from penstock.consensus.committer.hub import REORDER_S, Buffer, Hub, wait_for_event
from penstock.consensus.committer.metrics import CommitterMetrics
from penstock.consensus.committer.options import StreamOptions
from penstock.consensus.store import (
    SCAN_ALL,
    CaughtUp,
    ConsensusError,
    Entries,
    Entry,
    ErrorKind,
    Heartbeat,
    Resync,
    ResyncReason,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    WatchProgress,
    WatchResync,
    cause_chain,
)
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.backoff import RECONNECT_CLAMP_S, Backoff
from penstock.servicekit.rpc.unread import Held, Unread

log = logging.getLogger("penstock.consensus.committer")

_LASTING = frozenset({ErrorKind.UNDEFINED_TABLE, ErrorKind.STORE_RESET})

T = TypeVar("T")


class Streams:
    """The streams over one hub and its backend."""

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
        """Yield entries of one key from `from_` on; see `Consensus.subscribe`."""
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
        """Yield entries under a prefix in revision order; see `Consensus.watch`.

        `last` is the whole state of the stream. It only moves to a revision up to which all entries
        were delivered: by the next revision from the tail, or by a page of the store that is
        complete up to its end.
        """
        hub = self._hub
        loop = asyncio.get_running_loop()
        last = from_revision
        patience_ends = 0.0  # the first look is always into the store
        with hub.watcher(prefix) as wake:
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
                    yield WatchProgress(last)
                    patience_ends = loop.time() + REORDER_S
                elif patience_ends == 0.0 or hub.revision > last:
                    if loop.time() < patience_ends:
                        await wait_for_event(wake, patience_ends - loop.time())
                        continue
                    async with contextlib.aclosing(self._read(prefix, last, client)) as pages:
                        async for event, upto in pages:
                            last = max(last, upto)
                            yield event
                    patience_ends = loop.time() + REORDER_S
                elif not await wait_for_event(wake, self._options.progress_s):
                    yield WatchProgress(last)
                else:
                    patience_ends = loop.time() + REORDER_S

    async def _read(
        self, prefix: str, after: int, client: str | None
    ) -> AsyncGenerator[tuple[WatchEvent, int], None]:
        """Yield what the store has after a revision, each event with the revision it completes."""
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
                    yield WatchProgress(last), last
                    return
                start = 0
                for index in range(1, len(page.entries) + 1):
                    revision = page.entries[start][1].revision
                    if index == len(page.entries) or page.entries[index][1].revision != revision:
                        yield Entries(revision, page.entries[start:index]), revision
                        start = index
                last = max(last, page.upto)
                yield WatchProgress(last), last
                more = page.more
            del page

    @contextlib.asynccontextmanager
    async def _page(self, client: str | None) -> AsyncIterator[Held]:
        """Hold room for a page of the store until all of it is delivered.

        So a client that does not read holds its share of unread bytes, however many its streams.
        """
        await self._unread.room(client)
        with self._unread.held(client, PAGE_BYTES) as held:
            yield held

    async def _catching_up(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read a page of the store; few streams read at once, so others can too."""
        async with self._catch_ups:
            return await self._persistently(read)

    # ------------------------------------------------------------------------------- outages

    async def _persistently(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of a read, however long the backend takes to come back.

        A missing schema is not an outage: the process that embeds a committer must learn of it.
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
