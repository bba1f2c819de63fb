"""One store, as it is served: the handle that is bound to it, and everything known through it.

A store that is created anew is another store and gets a `ServedStore` of its own. Nothing meant for
the old one can reach the new one, since nothing refers to it: not a unit that waits in the commit
queue, not a read that is under way, not a cached head, not a follower of a log. They all end at the
old handle, which finds out inside every transaction that its store is gone.

Two rules that are easy to break by accident:

- A loser makes the cached head it contradicts suspect *before* it is answered, so its very next
  `head` cannot be the value that just lost.
- Followers and the cache hear of a commit before its caller does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from penstock.consensus.backend import Backend, CommitOutcome, ScanPage, Unit
from penstock.consensus.coalesce import GroupCommit
from penstock.consensus.committer.backing import Backing
from penstock.consensus.committer.cache import ShardCache
from penstock.consensus.committer.hub import Hub
from penstock.consensus.committer.metrics import CommitterMetrics
from penstock.consensus.committer.options import CommitterOptions
from penstock.consensus.committer.reads import HeadReads
from penstock.consensus.committer.streams import Streams
from penstock.consensus.store import CasResult, ConsensusError, VersionedData, cause_chain
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.unread import Unread

log = logging.getLogger("penstock.consensus.committer")

_UNKNOWN_REFRESH_S = 0.1
"""How long to wait after an unknown outcome before reading the head again."""


class ServedStore:
    """See the module; lives on one event loop.

    `lost` is called if the store turns out to be gone, and returns the error to answer with.
    """

    def __init__(
        self,
        handle: Backend,
        options: CommitterOptions,
        metrics: CommitterMetrics,
        *,
        unread: Unread,
        took: Callable[[float], None],
        lost: Callable[[ServedStore, ConsensusError], Awaitable[ConsensusError]],
    ) -> None:
        self.handle = handle
        self.incarnation = handle.incarnation
        self.backend = Backing(
            handle,
            metrics,
            observe=self._observe,
            took=took,
            lost=lambda error: lost(self, error),
        )
        self.group = GroupCommit(self.backend, options.group)
        self.hub = Hub(self.backend, on_foreign=self._contradicted)
        self.streams = Streams(
            self.hub,
            metrics,
            options.streams,
            self.incarnation,
            unread=unread,
            catch_ups_max=options.limits.catch_ups_max,
        )
        self.cache = ShardCache(
            shards_max=options.cached_shards_max, bytes_max=options.cached_bytes_max
        )
        self._caching = handle.traits.cache_heads if options.cache is None else options.cache
        self._reads = HeadReads(self._read_head)
        self._metrics = metrics
        self._hits = metrics.cache_hits.labels("head")
        self._misses = metrics.cache_misses.labels("head")
        self._refreshing: set[asyncio.Task[None]] = set()

    # --------------------------------------------------------------------------------- reads

    def cached_head(self, key: str) -> VersionedData | None:
        """Return the cached head, None to read it."""
        if not self._caching:
            return None
        if (cached := self.cache.get(key)) is not None:
            self._hits.value += 1
            return cached
        self._misses.value += 1
        return None

    async def read_head(self, key: str) -> VersionedData | None:
        """Return the head, by a read that starts now or later."""
        return await self._reads.get(key)

    async def scan(self, key: str, from_: int, limit: int, *, bytes_max: int) -> ScanPage:
        """Return one page, always from the backend; the cache learns the head if it is in it."""
        ticket = self.cache.ticket(key)
        page = await self.backend.scan(key, from_, limit, bytes_max=bytes_max)
        reached_head = not page.more and len(page.entries) < limit
        if self._caching and page.entries and (reached_head or self.cache.known(key) >= 0):
            self.cache.put(key, page.entries[-1], ticket)
        return page

    async def _read_head(self, key: str) -> VersionedData | None:
        if not self._caching:
            return await self.backend.head(key)
        ticket, known = self.cache.ticket(key), self.cache.known(key)
        found = await self.backend.head(key)
        if (-1 if found is None else found.seqno) < known:
            self._metrics.store_regressions.add()
            log.error(
                "store regression: it knows less than it had said before",
                extra=fields(shard=key, known=known, found=found),
            )
            self.cache.clear()
        elif found is not None:
            self.cache.put(key, found, ticket)
        return found

    # ------------------------------------------------------------------------------- commits

    def _observe(self, units: Sequence[Unit]) -> Callable[[CommitOutcome], None]:
        """Called before a transaction; the function it returns is called with the outcomes."""
        tickets = (
            {key: self.cache.ticket(key) for unit in units for key, _ in unit}
            if self._caching
            else {}
        )

        def settled(commit: CommitOutcome) -> None:
            revision = commit.revision
            entries: list[tuple[str, VersionedData]] = []
            for unit, outcome in zip(units, commit.outcomes, strict=True):
                if outcome is CasResult.COMMITTED and revision is not None:
                    for key, new in unit:
                        entry = VersionedData(new.seqno, new.data, revision)
                        entries.append((key, entry))
                        if self._caching:
                            self.cache.put(key, entry, tickets[key])
                elif self._caching:
                    unknown = isinstance(outcome, ConsensusError)
                    for key, new in unit:
                        self._contradicted(key, new.seqno, _UNKNOWN_REFRESH_S if unknown else 0.0)
            if revision is not None:
                self.hub.publish(revision, entries)

        return settled

    def _contradicted(self, key: str, seqno: int, delay_s: float = 0.0) -> None:
        """Stop serving a cached head that something contradicts, and read it again."""
        if self._caching and self.cache.suspect(key, seqno):
            self._background(self._refresh(key, delay_s), f"refresh {key}")

    async def _refresh(self, key: str, delay_s: float) -> None:
        started = time.perf_counter()
        await asyncio.sleep(delay_s)
        try:
            await self._reads.get(key)
        except ConsensusError as error:  # the entry stays suspect, so the next head reads again
            log.warning("head not refreshed", extra=fields(shard=key, error=cause_chain(error)))
        else:
            self._metrics.refresh_lag.observe(time.perf_counter() - started - delay_s)

    def _background(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._refreshing.add(task)
        task.add_done_callback(self._refreshing.discard)

    # --------------------------------------------------------------------------------- the end

    def retire(self) -> None:
        """Forget the store, which is gone, and end its followers."""
        self.cache.clear()
        self.hub.retire()
        for task in self._refreshing:
            task.cancel()

    async def close(self) -> None:
        """Finish what is queued and running, release the handle."""
        await self.group.close()
        await self._reads.close()
        for task in self._refreshing:
            task.cancel()
        await asyncio.gather(*self._refreshing, return_exceptions=True)
        await self.backend.close()
