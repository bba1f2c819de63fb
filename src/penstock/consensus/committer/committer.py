"""The committer: the one component that talks to the backend, on behalf of everybody else.

    InProcessConsensus ─┐                          ┌─ ShardCache, HeadReads   (heads)
                        ├─ PersistCommitter ───────┼─ Hub, Streams            (subscribe, watch)
    gRPC service ───────┘  checks, admission       └─ GroupCommit → Backing → backend

Both transports call the same methods, so admission, cache and metrics are the same for both.

Rules that are easy to break by accident:

- **R5** Every compare-and-set goes to the backend. The cache neither accepts nor refuses one.
- A loser makes the cached head it contradicts suspect *before* it is answered, so its very next
  `head` cannot be the value that just lost.
- Followers and the cache hear of a commit before its caller does.
- **R10** A caller that is cancelled leaves; what it asked for runs to its end.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from penstock.consensus.backend import LIST_PAGE, Backend, Commit, LivePage, ScanPage, Unit
from penstock.consensus.coalesce import GroupCommit, GroupCommitOptions
from penstock.consensus.committer.admission import Admission, Limits
from penstock.consensus.committer.backing import Backing
from penstock.consensus.committer.cache import ShardCache
from penstock.consensus.committer.hub import Hub
from penstock.consensus.committer.metrics import CommitterMetrics, result_of
from penstock.consensus.committer.reads import HeadReads
from penstock.consensus.committer.streams import StreamOptions, Streams
from penstock.consensus.snapshot import Behind, read_page
from penstock.consensus.store import (
    ENTRY_BYTES_MAX,
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    cause_chain,
    check_all,
    check_entry,
    check_key,
    check_limit,
    check_many,
    check_prefix,
    check_revision,
    check_seqno,
)
from penstock.servicekit.logs import fields
from penstock.servicekit.readiness import Readiness

log = logging.getLogger("penstock.consensus.committer")

Outcome = CasResult | ConsensusError
Batch = Sequence[tuple[str, VersionedData]]

_UNKNOWN_REFRESH_S = 0.1
"""After an unknown outcome the backend is given this long to make up its mind."""

_READY_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitterOptions:
    """How a committer behaves; the defaults are those of `penstock persistd`."""

    cache: bool | None = None
    """Answer heads from memory; None: where the backend's traits recommend it."""
    cached_shards_max: int = 10_000
    cached_bytes_max: int = 256 << 20
    entry_bytes_max: int = ENTRY_BYTES_MAX
    group: GroupCommitOptions = field(default_factory=GroupCommitOptions)
    limits: Limits = field(default_factory=Limits)
    streams: StreamOptions = field(default_factory=StreamOptions)
    verify_s: float = 10.0
    """How often to ask the store who it is: a liveness check that also notices a reset."""
    adopts_reset: bool = False
    """Serve a store that was created anew, to clients that knew none before. Standalone only: a
    process that runs pipelines knows that its data should exist, and must stay failed."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the share it may occupy, and the transport it is counted under."""

    client: str | None
    transport: str


IN_PROCESS = Caller(None, "inproc")


class PersistCommitter:
    """Serves one backend to any number of callers; lives on one event loop."""

    def __init__(
        self,
        backend: Backend,
        options: CommitterOptions | None = None,
        *,
        metrics: CommitterMetrics | None = None,
    ) -> None:
        self.options = options or CommitterOptions()
        self.metrics = metrics or CommitterMetrics()
        self.admission = Admission(self.options.limits)
        wanted = self.options.cache
        self._caching = backend.traits.cache_heads if wanted is None else wanted
        self._cache = ShardCache(
            shards_max=self.options.cached_shards_max, bytes_max=self.options.cached_bytes_max
        )
        self._backend = Backing(
            backend, self.metrics, overhear=self._overhear, took=self.admission.observe
        )
        self._group = GroupCommit(self._backend, self.options.group)
        self._reads = HeadReads(self._read_head)
        self._hub = Hub(self._backend, on_foreign=self._contradicted)
        self._streams = Streams(
            self._hub, self.metrics, self.options.streams, lambda: self.incarnation
        )
        self._incarnation: bytes | None = None
        self._lost: Determinate | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._hits = self.metrics.cache_hits.labels("head")
        self._misses = self.metrics.cache_misses.labels("head")
        self.metrics.registry.before_collect(self.update_gauges)

    # ------------------------------------------------------------------------------ lifetime

    async def open(self) -> None:
        """Learn which store this is, and start to follow it."""
        self._incarnation = await self._backend.incarnation()
        self._background(self._every(self._backend.traits.foreign_poll_s, self._poll), "poll")
        self._background(self._every(self.options.verify_s, self.verify), "verify")

    def drain(self) -> None:
        """Refuse what is new and end all streams; what is under way goes on."""
        self.admission.close()
        self._hub.close()

    async def close(self) -> None:
        """Refuse what is new, finish what is under way, release the backend."""
        if self._closed:
            return
        self._closed = True
        self.drain()
        await self._group.close()
        await self._reads.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backend.close()

    @property
    def incarnation(self) -> bytes:
        if self._incarnation is None:
            raise Determinate(ErrorKind.UNAVAILABLE, "the committer is not open yet")
        return self._incarnation

    def check(self, expected: bytes = b"") -> None:
        """Raise unless open, and on the store that the caller knows (if it knows one)."""
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")
        if self._lost is not None:
            raise Determinate(self._lost.kind, self._lost.message)
        if expected and expected != self.incarnation:
            what = f"knew {expected.hex()}, found {self.incarnation.hex()}: its contents are gone"
            raise Determinate(ErrorKind.STORE_RESET, what)

    def readiness(self) -> Readiness:
        """Whether the backend has answered lately."""
        if self._closed:
            return Readiness(False, "shutting down")
        if self._lost is not None:
            return Readiness(False, str(self._lost))
        silent_s = time.monotonic() - self._backend.answered_at
        if silent_s > _READY_WITHIN_S:
            return Readiness(False, f"the backend has not answered for {silent_s:.0f} s")
        return Readiness(True)

    # --------------------------------------------------------------------------------- reads

    async def head(
        self, key: str, *, fresh: bool = False, caller: Caller = IN_PROCESS
    ) -> VersionedData | None:
        with self.metrics.operation("head", caller.transport):
            self.check()
            check_key(key)
            if self._caching and not fresh:
                if (cached := self._cache.get(key)) is not None:
                    self._hits.value += 1
                    return cached
                self._misses.value += 1
            self.admission.enter(caller.client)
            try:
                return await self._reads.get(key)
            finally:
                self.admission.leave(caller.client)

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int, caller: Caller = IN_PROCESS
    ) -> ScanPage:
        """One page; always from the backend."""
        with self.metrics.operation("scan", caller.transport):
            self.check()
            check_key(key)
            check_seqno(from_)
            check_limit(limit)
            self.admission.enter(caller.client)
            ticket = self._cache.ticket(key)
            try:
                page = await self._backend.scan(key, from_, limit, bytes_max=bytes_max)
            finally:
                self.admission.leave(caller.client)
            reached_head = not page.more and len(page.entries) < limit
            if self._caching and page.entries and (reached_head or self._cache.known(key) >= 0):
                self._cache.put(key, page.entries[-1], ticket)
            return page

    async def list_page(
        self, prefix: str, after: str, *, caller: Caller = IN_PROCESS
    ) -> tuple[list[str], bool]:
        """Some keys above `after`, and whether there are more."""
        with self.metrics.operation("list_keys", caller.transport):
            self.check()
            check_prefix(prefix)
            self.admission.enter(caller.client)
            try:
                keys = await self._backend.list_page(prefix, after)
            finally:
                self.admission.leave(caller.client)
            return keys, len(keys) >= LIST_PAGE

    async def snapshot_page(
        self, prefix: str, behind: Behind, *, caller: Caller = IN_PROCESS
    ) -> LivePage:
        """One page of a snapshot; always from the backend."""
        with self.metrics.operation("snapshot", caller.transport):
            self.check()
            check_prefix(prefix)
            self.admission.enter(caller.client)
            try:
                return await read_page(self._backend, prefix, behind)
            finally:
                self.admission.leave(caller.client)

    async def subscribe(
        self, key: str, from_: int, *, caller: Caller = IN_PROCESS
    ) -> AsyncGenerator[SubscribeEvent, None]:
        with self.metrics.operation("subscribe", caller.transport):
            self.check()
            check_key(key)
            check_seqno(from_)
            self.admission.enter_stream()
            events = self._streams.subscribe(key, from_)
            try:
                async for event in events:
                    yield event
            finally:
                self.admission.leave_stream()
                await events.aclose()

    async def watch(
        self, prefix: str, from_revision: int, *, caller: Caller = IN_PROCESS
    ) -> AsyncGenerator[WatchEvent, None]:
        with self.metrics.operation("watch", caller.transport):
            self.check()
            check_prefix(prefix)
            check_revision(from_revision)
            self.admission.enter_stream()
            events = self._streams.watch(prefix, from_revision)
            try:
                async for event in events:
                    yield event
            finally:
                self.admission.leave_stream()
                await events.aclose()

    # -------------------------------------------------------------------------------- writes

    async def compare_and_set(
        self, key: str, new: VersionedData, *, caller: Caller = IN_PROCESS
    ) -> CasResult:
        with self.metrics.operation("cas", caller.transport) as operation:
            self.check()
            check_entry(key, new, entry_bytes_max=self.options.entry_bytes_max)
            size = len(new.data)
            self._admit(caller, size, key)
            self.metrics.entry_bytes.labels("cas").observe(size)
            try:
                result = await self._group.commit(((key, new),))
            finally:
                self.admission.leave(caller.client, size, key)
            operation.outcomes({result_of(result): 1})
            return result

    async def compare_and_set_each(
        self, batch: Batch, *, caller: Caller, may: Callable[[str], None] | None = None
    ) -> list[Outcome]:
        """Compare-and-sets that happened to arrive together: each is admitted, or not, alone.

        `may` raises for a key that the caller has no right to.
        """
        with self.metrics.operation("cas", caller.transport, len(batch)) as operation:
            self.check()
            outcomes: list[Outcome | None] = []
            units: list[Unit] = []
            sizes = self.metrics.entry_bytes.labels("cas")
            bytes_max = self.options.entry_bytes_max
            for element in batch:
                key, new = element
                try:
                    check_entry(key, new, entry_bytes_max=bytes_max)
                    if may is not None:
                        may(key)
                    self._admit(caller, len(new.data), key)
                except ConsensusError as error:
                    outcomes.append(error)
                else:
                    sizes.observe(len(new.data))
                    units.append((element,))
                    outcomes.append(None)
            try:
                committed = await self._group.commit_each(units) if units else []
            finally:
                for ((key, new),) in units:
                    self.admission.leave(caller.client, len(new.data), key)
            operation.outcomes(_tally(committed))
            if len(units) == len(batch):
                return committed
            operation.outcomes(_tally([o for o in outcomes if o is not None]))
            settled = iter(committed)
            return [next(settled) if o is None else o for o in outcomes]

    async def compare_and_set_many(
        self, batch: Batch, *, caller: Caller = IN_PROCESS
    ) -> list[Outcome]:
        """One operation of independent elements; what stops them all is the outcome of each."""
        check_many(batch)
        with self.metrics.operation("cas_many", caller.transport) as operation:
            outcomes: list[Outcome | None] = []
            units: list[Unit] = []
            for key, new in batch:
                try:
                    check_entry(key, new, entry_bytes_max=self.options.entry_bytes_max)
                except Determinate as error:
                    outcomes.append(error)
                else:
                    units.append(((key, new),))
                    outcomes.append(None)
            size = sum(len(new.data) for ((_, new),) in units)
            try:
                self.check()
                self._admit(caller, size)
            except ConsensusError as error:
                operation.outcomes({result_of(error): 1})
                return [error if o is None else o for o in outcomes]
            self.metrics.entry_bytes.labels("cas_many").observe(size)
            try:
                committed = iter(await self._group.commit_each(units) if units else ())
            finally:
                self.admission.leave(caller.client, size)
            results = [next(committed) if o is None else o for o in outcomes]
            operation.outcomes(_tally(results))
            return results

    async def compare_and_set_all(self, batch: Batch, *, caller: Caller = IN_PROCESS) -> CasResult:
        with self.metrics.operation("cas_all", caller.transport) as operation:
            self.check()
            check_all(batch, entry_bytes_max=self.options.entry_bytes_max)
            size = sum(len(new.data) for _, new in batch)
            self._admit(caller, size)
            self.metrics.entry_bytes.labels("cas_all").observe(size)
            try:
                result = await self._group.commit(tuple(batch))
            finally:
                self.admission.leave(caller.client, size)
            operation.outcomes({result_of(result): 1})
            return result

    async def truncate(self, key: str, seqno: int, *, caller: Caller = IN_PROCESS) -> int | None:
        with self.metrics.operation("truncate", caller.transport):
            self.check()
            check_key(key)
            check_seqno(seqno)
            self.admission.enter(caller.client)
            try:
                # Idempotent, so unlike a commit it needs no shield against its caller leaving.
                return await self._backend.truncate(key, seqno)
            finally:
                self.admission.leave(caller.client)

    # ------------------------------------------------------------------------- what is known

    def reset(self, incarnation: bytes) -> None:
        """The store is another one: forget the old one, and end whoever follows it."""
        log.error(
            "consensus store was created anew",
            extra=fields(known=self._incarnation, found=incarnation, adopted=self._adopts),
        )
        self._incarnation = incarnation
        self._cache.clear()
        self._hub.reset()
        if not self._adopts:
            what = f"the store is {incarnation.hex()} now; its former contents are gone"
            self._lost = Determinate(ErrorKind.STORE_RESET, what)

    async def verify(self) -> None:
        """Ask the store who it is."""
        found = await self._backend.incarnation()
        if found != self._incarnation:
            self.reset(found)

    def update_gauges(self) -> None:
        """Set the gauges that are cheaper asked than kept."""
        metrics = self.metrics
        metrics.cached_shards.set(len(self._cache))
        metrics.cached_bytes.set(self._cache.bytes_total)
        metrics.late_inserts_dropped.set(self._cache.late_inserts_dropped)
        metrics.queue_depth.set(self._group.queue_depth)
        metrics.subscribers.set(self.admission.subscribers)
        for state, count in self._backend.connections().items():
            metrics.pool.labels(state).set(count)
        for reason, count in self.admission.rejected.items():
            metrics.rejected.labels(reason).set(count)

    @property
    def _adopts(self) -> bool:
        return self.options.adopts_reset

    def _admit(self, caller: Caller, size: int, key: str | None = None) -> None:
        """Admission of a write. Callers may leave while what they asked for still waits (R10), so
        the queue itself is looked at too."""
        if self._group.queue_depth >= self.options.limits.inflight_max:
            self.admission.refuse("inflight", "the commit queue is full")
        self.admission.enter(caller.client, size, key)

    async def _read_head(self, key: str) -> VersionedData | None:
        if not self._caching:
            return await self._backend.head(key)
        ticket, known = self._cache.ticket(key), self._cache.known(key)
        found = await self._backend.head(key)
        if (-1 if found is None else found.seqno) < known:
            self.metrics.store_regressions.add()
            log.error(
                "store regression: it knows less than it had said before",
                extra=fields(shard=key, known=known, found=found),
            )
            self._cache.clear()
            await self.verify()
        elif found is not None:
            self._cache.put(key, found, ticket)
        return found

    def _overhear(self, units: Sequence[Unit]) -> Callable[[Commit], None]:
        """Called before a transaction; what it returns is called with its outcomes."""
        tickets = (
            {key: self._cache.ticket(key) for unit in units for key, _ in unit}
            if self._caching
            else {}
        )

        def heard(commit: Commit) -> None:
            revision = commit.revision
            entries: list[tuple[str, VersionedData]] = []
            for unit, outcome in zip(units, commit.outcomes, strict=True):
                if outcome is CasResult.COMMITTED and revision is not None:
                    for key, new in unit:
                        entry = VersionedData(new.seqno, new.data, revision)
                        entries.append((key, entry))
                        if self._caching:
                            self._cache.put(key, entry, tickets[key])
                elif self._caching:
                    unknown = isinstance(outcome, ConsensusError)
                    for key, new in unit:
                        self._contradicted(key, new.seqno, _UNKNOWN_REFRESH_S if unknown else 0.0)
            if revision is not None:
                self._hub.publish(revision, entries)

        return heard

    def _contradicted(self, key: str, seqno: int, delay_s: float = 0.0) -> None:
        """Something does not fit the cached head: do not serve it, and look again."""
        if self._caching and self._cache.suspect(key, seqno):
            self._background(self._refresh(key, delay_s), f"refresh {key}")

    async def _refresh(self, key: str, delay_s: float) -> None:
        started = time.perf_counter()
        await asyncio.sleep(delay_s)
        try:
            await self._reads.get(key)
        except ConsensusError as error:  # the entry stays suspect, so the next head reads again
            log.warning("head not refreshed", extra=fields(shard=key, error=cause_chain(error)))
        else:
            self.metrics.refresh_lag.observe(time.perf_counter() - started - delay_s)

    # ---------------------------------------------------------------------------- background

    async def _poll(self) -> None:
        if self._hub.followed:
            await self._hub.poll()

    async def _every(self, interval_s: float, do: Callable[[], Awaitable[None]]) -> None:
        """Repeat; an outage of the backend is its own to report."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await do()
            except ConsensusError as error:
                log.debug("will look again", extra=fields(error=cause_chain(error)))

    def _background(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tally(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many ended how; nearly all are committed, and counting those by identity is cheap."""
    committed = outcomes.count(CasResult.COMMITTED)
    if committed == len(outcomes):
        return {"committed": committed}
    return collections.Counter(map(result_of, outcomes))
