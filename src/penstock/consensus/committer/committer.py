"""The committer: the one component that talks to the backend, on behalf of everybody else.

    InProcessConsensus ─┐                                        ┌─ ShardCache, HeadReads
                        ├─ PersistCommitter ─── ServedStore ─────┼─ Hub, Streams
    gRPC service ───────┘  checks, admission    of one           └─ GroupCommit → Backing → backend
                                                incarnation

Both transports call the same methods, so admission, cache and metrics are the same for both.

Rules that are easy to break by accident:

- **R5** Every compare-and-set goes to the backend. The cache neither accepts nor refuses one.
- An operation takes the `ServedStore` once, when the store its caller knows is compared with it,
  and stays with it to its end: the one that may have taken its place meanwhile is not asked.
- **R10** A caller that is cancelled leaves; what it asked for runs to its end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.consensus.backend import LIST_PAGE, Backend, LivePage, ScanPage, Traits, Unit, prove
from penstock.consensus.committer.admission import Admission
from penstock.consensus.committer.metrics import CommitterMetrics, result_of
from penstock.consensus.committer.options import CommitterOptions
from penstock.consensus.committer.recovery import Recover
from penstock.consensus.committer.served import ServedStore
from penstock.consensus.committer.unread import Unread
from penstock.consensus.committer.writes import Writes
from penstock.consensus.snapshot import Behind, read_page
from penstock.consensus.store import (
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
    check_position,
    check_prefix,
    check_revision,
    check_seqno,
)
from penstock.servicekit.logs import fields
from penstock.servicekit.readiness import Readiness

log = logging.getLogger("penstock.consensus.committer")

Outcome = CasResult | ConsensusError
Batch = Sequence[tuple[str, VersionedData]]

_READY_WITHIN_S = 30.0

_OFTEN = 5
"""So many times oftener than usual do we look for commits of others while there are some."""
_BUSY_S = 1.0
"""And go on with it for so long after the last one."""
_SELDOM, _QUIET_S = 2, 3.0
"""When there was none for so long, the pauses are so many times longer than usual."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the share it may occupy, the transport it is counted under, the store it knows."""

    client: str | None
    transport: str
    knows: bytes = b""
    """The incarnation the caller believes in; empty: whichever is there."""
    principal: str = "this process"
    """Who it has proven to be."""


IN_PROCESS = Caller(None, "inproc")


class PersistCommitter:
    """Serves one backend to any number of callers; lives on one event loop."""

    def __init__(
        self,
        backend: Backend,
        options: CommitterOptions | None = None,
        *,
        metrics: CommitterMetrics | None = None,
        recover: Recover | None = None,
    ) -> None:
        """`recover`: how to go on when the store is gone; without it, the committer stays failed.

        Standalone only: a process that runs pipelines knows that its data should exist.
        """
        self.options = options or CommitterOptions()
        self.metrics = metrics or CommitterMetrics()
        self.admission = Admission(self.options.limits)
        self.unread = Unread(self.admission)
        self.writes = Writes(self.metrics)
        self._store = self._serve(backend)
        self._recover = recover
        self._recovering = asyncio.Lock()
        self._lost: ConsensusError | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self.metrics.registry.before_collect(self.update_gauges)

    def _serve(self, backend: Backend) -> ServedStore:
        return ServedStore(
            backend,
            self.options,
            self.metrics,
            unread=self.unread,
            took=self.admission.observe,
            lost=self._store_lost,
        )

    # ------------------------------------------------------------------------------ lifetime

    async def open(self) -> None:
        """See that the store is there, and start to follow it."""
        await self._verify()
        for name, repeated in (("poll", self._follow()), ("verify", self._keep_verifying())):
            self._tasks.add(asyncio.get_running_loop().create_task(repeated, name=name))

    def drain(self) -> None:
        """Refuse what is new and end all streams; what is under way goes on."""
        self.admission.close()
        self._store.hub.close()

    async def close(self) -> None:
        """Refuse what is new, finish what is under way, release the backend."""
        if self._closed:
            return
        self._closed = True
        self.drain()
        for task in self._tasks:
            task.cancel()
        async with self._recovering:  # no other recovery begins
            ending = [*self._tasks, *self._retiring]
        await asyncio.gather(*ending, return_exceptions=True)
        await self._store.close()

    @property
    def incarnation(self) -> bytes:
        return self._store.incarnation

    def serving(self, caller: Caller) -> ServedStore:
        """The store, if it is the one that the caller knows (if it knows one)."""
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")
        if self._lost is not None:
            raise Determinate(self._lost.kind, cause_chain(self._lost))
        if caller.knows:
            prove(caller.knows, self._store.incarnation)
        return self._store

    def readiness(self) -> Readiness:
        """Whether the backend has answered lately."""
        if self._closed:
            return Readiness(False, "shutting down")
        if self._lost is not None:
            return Readiness(False, str(self._lost))
        silent_s = time.monotonic() - self._store.backend.answered_at
        if silent_s > _READY_WITHIN_S:
            return Readiness(False, f"the backend has not answered for {silent_s:.0f} s")
        return Readiness(True)

    # --------------------------------------------------------------------------------- reads

    async def head(
        self, key: str, *, fresh: bool = False, caller: Caller = IN_PROCESS
    ) -> VersionedData | None:
        with self.metrics.operation("head", caller.transport):
            store = self.serving(caller)
            check_key(key)
            if not fresh and (cached := store.cached_head(key)) is not None:
                return cached
            self.admission.enter(caller.client)
            try:
                return await store.read_head(key)
            finally:
                self.admission.leave(caller.client)

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int, caller: Caller = IN_PROCESS
    ) -> ScanPage:
        """One page; always from the backend."""
        with self.metrics.operation("scan", caller.transport):
            store = self.serving(caller)
            check_key(key)
            check_seqno(from_)
            check_limit(limit)
            self.admission.enter(caller.client)
            try:
                return await store.scan(key, from_, limit, bytes_max=bytes_max)
            finally:
                self.admission.leave(caller.client)

    async def list_page(
        self, prefix: str, after: str, *, caller: Caller = IN_PROCESS
    ) -> tuple[list[str], bool]:
        """Some keys above `after`, and whether there are more."""
        with self.metrics.operation("list_keys", caller.transport):
            store = self.serving(caller)
            check_prefix(prefix)
            check_prefix(after)
            self.admission.enter(caller.client)
            try:
                keys = await store.backend.list_page(prefix, after)
            finally:
                self.admission.leave(caller.client)
            return keys, len(keys) >= LIST_PAGE

    async def snapshot_page(
        self, prefix: str, behind: Behind, *, caller: Caller = IN_PROCESS
    ) -> LivePage:
        """One page of a snapshot; always from the backend."""
        with self.metrics.operation("snapshot", caller.transport):
            store = self.serving(caller)
            check_prefix(prefix)
            if isinstance(behind, int):
                check_revision(behind)
            else:
                check_position(*behind)
            self.admission.enter(caller.client)
            try:
                return await read_page(store.backend, prefix, behind)
            finally:
                self.admission.leave(caller.client)

    async def subscribe(
        self, key: str, from_: int, *, caller: Caller = IN_PROCESS
    ) -> AsyncGenerator[SubscribeEvent, None]:
        with self.metrics.operation("subscribe", caller.transport):
            store = self.serving(caller)
            check_key(key)
            check_seqno(from_)
            self.admission.enter_stream()
            events = store.streams.subscribe(key, from_, caller.client)
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
            store = self.serving(caller)
            check_prefix(prefix)
            check_revision(from_revision)
            self.admission.enter_stream()
            events = store.streams.watch(prefix, from_revision, caller.client)
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
            store = self.serving(caller)
            check_entry(key, new, entry_bytes_max=self.options.entry_bytes_max)
            size = len(new.data)
            self._admit(store, caller, size, key)
            self.metrics.entry_bytes.labels("cas").observe(size)
            try:
                with self.writes.failing(caller.principal, "cas", (key,)):
                    result = await store.group.commit(((key, new),))
            finally:
                self.admission.leave(caller.client, size, key)
            operation.outcomes(ended := {result_of(result): 1})
            self.writes.note(caller.principal, "cas", (key,), ended)
            return result

    async def compare_and_set_each(
        self, batch: Batch, *, caller: Caller, may: Callable[[str], None] | None = None
    ) -> list[Outcome]:
        """Compare-and-sets that happened to arrive together: each is admitted, or not, alone.

        `may` raises for a key that the caller has no right to.
        """
        with self.metrics.operation("cas", caller.transport, len(batch)) as operation:
            store = self.serving(caller)
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
                    self._admit(store, caller, len(new.data), key)
                except ConsensusError as error:
                    outcomes.append(error)
                else:
                    sizes.observe(len(new.data))
                    units.append((element,))
                    outcomes.append(None)
            try:
                committed = await store.group.commit_each(units) if units else []
            finally:
                for ((key, new),) in units:
                    self.admission.leave(caller.client, len(new.data), key)
            operation.outcomes(ended := _tally(committed))
            if units:
                self.writes.note(caller.principal, "cas", [key for ((key, _),) in units], ended)
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
                store = self.serving(caller)
                self._admit(store, caller, size)
            except ConsensusError as error:
                operation.outcomes({result_of(error): 1})
                return [error if o is None else o for o in outcomes]
            self.metrics.entry_bytes.labels("cas_many").observe(size)
            try:
                committed = iter(await store.group.commit_each(units) if units else ())
            finally:
                self.admission.leave(caller.client, size)
            results = [next(committed) if o is None else o for o in outcomes]
            operation.outcomes(ended := _tally(results))
            self.writes.note(caller.principal, "cas_many", [key for key, _ in batch], ended)
            return results

    async def compare_and_set_all(self, batch: Batch, *, caller: Caller = IN_PROCESS) -> CasResult:
        with self.metrics.operation("cas_all", caller.transport) as operation:
            store = self.serving(caller)
            check_all(batch, entry_bytes_max=self.options.entry_bytes_max)
            size = sum(len(new.data) for _, new in batch)
            self._admit(store, caller, size)
            self.metrics.entry_bytes.labels("cas_all").observe(size)
            keys = [key for key, _ in batch]
            try:
                with self.writes.failing(caller.principal, "cas_all", keys):
                    result = await store.group.commit(tuple(batch))
            finally:
                self.admission.leave(caller.client, size)
            operation.outcomes(ended := {result_of(result): 1})
            self.writes.note(caller.principal, "cas_all", keys, ended)
            return result

    async def truncate(self, key: str, seqno: int, *, caller: Caller = IN_PROCESS) -> int | None:
        with self.metrics.operation("truncate", caller.transport):
            store = self.serving(caller)
            check_key(key)
            check_seqno(seqno)
            self.admission.enter(caller.client)
            try:
                # Idempotent, so unlike a commit it needs no shield against its caller leaving.
                with self.writes.failing(caller.principal, "truncate", (key,)):
                    deleted = await store.backend.truncate(key, seqno)
            finally:
                self.admission.leave(caller.client)
            self.writes.note(caller.principal, "truncate", (key,), {"truncated": 1})
            return deleted

    # ------------------------------------------------------------------------- what is known

    async def _store_lost(self, store: ServedStore, error: ConsensusError) -> ConsensusError:
        """A call found `store` gone: go on with what is there now, if so told; what to answer."""
        if self._recover is None:
            if error.kind is ErrorKind.STORE_RESET and self._lost is None:
                log.error("consensus store was lost", extra=fields(error=cause_chain(error)))
                self._lost = error
                store.retire()
            return error
        async with self._recovering:
            if self._store is store:  # nobody has recovered meanwhile
                if self._closed:
                    return error
                try:
                    backend = await self._recover(store.handle, error)
                except ConsensusError as failure:
                    return failure
                self._replace(store, backend)
        what = "the store was missing and has been created again; its contents are gone"
        return Determinate(ErrorKind.STORE_RESET, what)

    def _replace(self, store: ServedStore, backend: Backend) -> None:
        self.metrics.heals.add()
        self._store = self._serve(backend)
        store.retire()
        task = asyncio.get_running_loop().create_task(store.close(), name="retire")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def update_gauges(self) -> None:
        """Set the gauges that are cheaper asked than kept."""
        metrics, store = self.metrics, self._store
        metrics.cached_shards.set(len(store.cache))
        metrics.cached_bytes.set(store.cache.bytes_total)
        metrics.late_inserts_dropped.set(store.cache.late_inserts_dropped)
        metrics.queue_depth.set(store.group.queue_depth)
        metrics.subscribers.set(self.admission.subscribers)
        for state, count in store.backend.connections().items():
            metrics.pool.labels(state).set(count)
        for reason, count in self.admission.rejected.items():
            metrics.rejected.labels(reason).set(count)

    def _admit(self, store: ServedStore, caller: Caller, size: int, key: str | None = None) -> None:
        """Admission of a write, by what callers wait for and by what the commit queue holds."""
        self.admission.check_queue(store.group.queue_depth, store.group.bytes_total, size)
        self.admission.enter(caller.client, size, key)

    async def _follow(self) -> None:
        """Look for commits of other processes: often while they come, seldom when they do not."""
        last = float("-inf")
        while True:
            pause_s = foreign_poll_s(self._store.backend.traits, time.monotonic() - last)
            await asyncio.sleep(pause_s)
            hub = self._store.hub
            with _outage_passed_over():
                if hub.followed and await hub.poll():
                    last = time.monotonic()

    async def _keep_verifying(self) -> None:
        while True:
            await asyncio.sleep(self.options.verify_s)
            with _outage_passed_over():
                await self._verify()

    async def _verify(self) -> None:
        await self._store.backend.revision()


def foreign_poll_s(traits: Traits, since_s: float) -> float:
    """When to look for commits of other processes again, so long after there was the last one."""
    if since_s < _BUSY_S:
        return traits.foreign_poll_s / _OFTEN
    return traits.foreign_poll_s if since_s < _QUIET_S else traits.foreign_poll_s * _SELDOM


@contextlib.contextmanager
def _outage_passed_over() -> Iterator[None]:
    """An outage of the backend is its own to report."""
    try:
        yield
    except ConsensusError as error:
        log.debug("will look again", extra=fields(error=cause_chain(error)))


def _tally(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many ended how; nearly all are committed, and counting those by identity is cheap."""
    committed = outcomes.count(CasResult.COMMITTED)
    if committed == len(outcomes):
        return {"committed": committed}
    return collections.Counter(map(result_of, outcomes))
