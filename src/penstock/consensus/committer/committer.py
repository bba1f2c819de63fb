"""The committer: the one component that talks to the backend, on behalf of all others.

    InProcessConsensus ─┐                                        ┌─ ShardCache, HeadReads
                        ├─ PersistCommitter ─── ServedStore ─────┼─ Hub, Streams
    gRPC service ───────┘  checks, admission    of one           └─ GroupCommit → Backing → backend
                                                incarnation

Both transports call the same methods, so admission, cache and metrics are the same for both.

Rules that are easy to break by accident:

- Every compare-and-set goes to the backend. The cache neither accepts nor refuses one.
- An operation takes the `ServedStore` once, when it is compared with the store its caller knows,
  and keeps it to its end, even if another store has taken its place meanwhile.
- A caller that is cancelled leaves; its operation runs to its end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.consensus.backend import LIST_PAGE, Backend, LivePage, ScanPage, Traits, Unit, prove
from penstock.consensus.coalesce import Outcome, size_of
from penstock.consensus.committer.admission import Admission
from penstock.consensus.committer.metrics import CommitterMetrics, result_of
from penstock.consensus.committer.options import CommitterOptions
from penstock.consensus.committer.recovery import Recover
from penstock.consensus.committer.served import ServedStore
from penstock.consensus.committer.writes import Writes
from penstock.consensus.snapshot import Behind, read_page
from penstock.consensus.store import (
    Batch,
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
from penstock.servicekit.rpc.unread import Unread

log = logging.getLogger("penstock.consensus.committer")

_READY_WITHIN_S = 30.0

_BUSY_POLL_DIVISOR, _BUSY_S = 5, 1.0
"""Within `_BUSY_S` after another process committed, polls are this many times more frequent."""
_QUIET_POLL_FACTOR, _QUIET_S = 2, 3.0
"""After `_QUIET_S` without such a commit, the pauses between polls are this many times longer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an operation."""

    client: str | None
    """Client whose share of the limits it uses; None for this process, which has no such share."""
    transport: str
    """Metrics label."""
    knows: bytes = b""
    """Incarnation of the store that the caller knows; empty for the current one."""
    principal: str = "this process"
    """Authenticated name."""


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
        """`recover` reopens a store that is gone; without it, the committer stays failed.

        For the standalone daemon only: a process that runs pipelines knows that its data should
        exist.
        """
        self.options = options or CommitterOptions()
        self.metrics = metrics or CommitterMetrics()
        self.admission = Admission(self.options.limits)
        self.unread = Unread(
            bytes_max=self.options.limits.unread_bytes_max,
            client_bytes_max=self.options.limits.client_unread_bytes_max,
            refuse=functools.partial(self.admission.refuse, "unread"),
        )
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
        """Check that the store is there, and start following it."""
        await self._verify()
        for name, repeated in (("poll", self._follow()), ("verify", self._keep_verifying())):
            self._tasks.add(asyncio.get_running_loop().create_task(repeated, name=name))

    def drain(self) -> None:
        """Refuse new operations and end all streams; what is under way goes on."""
        self.admission.close()
        self._store.hub.close()

    async def close(self) -> None:
        """Refuse new operations, finish what is under way, release the backend."""
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
        """Return the store; raise if it is gone, or is not the one that the caller knows."""
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")
        if self._lost is not None:
            raise Determinate(self._lost.kind, cause_chain(self._lost))
        if caller.knows:
            prove(caller.knows, self._store.incarnation)
        return self._store

    def readiness(self) -> Readiness:
        """Return ready if the backend has answered recently."""
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
            with self.admission.operation(caller.client):
                return await store.read_head(key)

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int, caller: Caller = IN_PROCESS
    ) -> ScanPage:
        """Return one page, always from the backend."""
        with self.metrics.operation("scan", caller.transport):
            store = self.serving(caller)
            check_key(key)
            check_seqno(from_)
            check_limit(limit)
            with self.admission.operation(caller.client):
                return await store.scan(key, from_, limit, bytes_max=bytes_max)

    async def list_page(
        self, prefix: str, after: str, *, caller: Caller = IN_PROCESS
    ) -> tuple[list[str], bool]:
        """Return one page of keys above `after`, and True if there are more."""
        with self.metrics.operation("list_keys", caller.transport):
            store = self.serving(caller)
            check_prefix(prefix)
            check_prefix(after)
            with self.admission.operation(caller.client):
                keys = await store.backend.list_page(prefix, after)
            return keys, len(keys) >= LIST_PAGE

    async def snapshot_page(
        self, prefix: str, behind: Behind, *, caller: Caller = IN_PROCESS
    ) -> LivePage:
        """Return one page of a snapshot, always from the backend."""
        with self.metrics.operation("snapshot", caller.transport):
            store = self.serving(caller)
            check_prefix(prefix)
            if isinstance(behind, int):
                check_revision(behind)
            else:
                check_position(*behind)
            with self.admission.operation(caller.client):
                return await read_page(store.backend, prefix, behind)

    async def subscribe(
        self, key: str, from_: int, *, caller: Caller = IN_PROCESS
    ) -> AsyncGenerator[SubscribeEvent, None]:
        with self.metrics.operation("subscribe", caller.transport):
            store = self.serving(caller)
            check_key(key)
            check_seqno(from_)
            with self.admission.stream():
                events = store.streams.subscribe(key, from_, caller.client)
                async with contextlib.aclosing(events):
                    async for event in events:
                        yield event

    async def watch(
        self, prefix: str, from_revision: int, *, caller: Caller = IN_PROCESS
    ) -> AsyncGenerator[WatchEvent, None]:
        with self.metrics.operation("watch", caller.transport):
            store = self.serving(caller)
            check_prefix(prefix)
            check_revision(from_revision)
            with self.admission.stream():
                events = store.streams.watch(prefix, from_revision, caller.client)
                async with contextlib.aclosing(events):
                    async for event in events:
                        yield event

    # -------------------------------------------------------------------------------- writes

    async def compare_and_set(
        self, key: str, new: VersionedData, *, caller: Caller = IN_PROCESS
    ) -> CasResult:
        def check() -> None:
            check_entry(key, new, entry_bytes_max=self.options.entry_bytes_max)

        return await self._commit_unit("cas", ((key, new),), caller, check, key)

    async def compare_and_set_all(self, batch: Batch, *, caller: Caller = IN_PROCESS) -> CasResult:
        def check() -> None:
            check_all(batch, entry_bytes_max=self.options.entry_bytes_max)

        return await self._commit_unit("cas_all", tuple(batch), caller, check)

    async def _commit_unit(
        self,
        op: str,
        unit: Unit,
        caller: Caller,
        check: Callable[[], None],
        key: str | None = None,
    ) -> CasResult:
        """Commit one unit as one operation; `key` is given if it queues by its key."""
        with self.metrics.operation(op, caller.transport) as operation:
            store = self.serving(caller)
            check()
            size = size_of(unit)
            self._admit(store, caller, size, key)
            self.metrics.entry_bytes.labels(op).observe(size)
            keys = [key for key, _ in unit]
            try:
                with self.writes.failing(caller.principal, op, keys):
                    result = await store.group.commit(unit)
            finally:
                self.admission.leave(caller.client, size, key)
            operation.outcomes(ended := {result_of(result): 1})
            self.writes.note(caller.principal, op, keys, ended)
            return result

    async def compare_and_set_each(
        self, batch: Batch, *, caller: Caller, may: Callable[[str], None] | None = None
    ) -> list[Outcome]:
        """Run compare-and-sets that arrived together; each is admitted or refused on its own.

        `may` raises for a key that the caller may not write.
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
        """Run independent elements as one operation; an error of the whole is that of each."""
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

    async def truncate(self, key: str, seqno: int, *, caller: Caller = IN_PROCESS) -> int | None:
        with self.metrics.operation("truncate", caller.transport):
            store = self.serving(caller)
            check_key(key)
            check_seqno(seqno)
            # Idempotent, so unlike a commit it needs no shield against its caller leaving.
            with (
                self.admission.operation(caller.client),
                self.writes.failing(caller.principal, "truncate", (key,)),
            ):
                deleted = await store.backend.truncate(key, seqno)
            self.writes.note(caller.principal, "truncate", (key,), {"truncated": 1})
            return deleted

    # ------------------------------------------------------------------------- what is known

    async def _store_lost(self, store: ServedStore, error: ConsensusError) -> ConsensusError:
        """Recover, if possible, after a call found `store` gone; return the error to answer."""
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
        """Set the gauges that are cheaper to read than to keep."""
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
        """Admit a write, by the limits of the commit queue and of what is under way."""
        self.admission.check_queue(store.group.queue_depth, store.group.bytes_total, size)
        self.admission.enter(caller.client, size, key)

    async def _follow(self) -> None:
        """Poll for commits of other processes: often while they come, rarely when they do not."""
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
    """Return the pause before the next poll, `since_s` after another process last committed."""
    if since_s < _BUSY_S:
        return traits.foreign_poll_s / _BUSY_POLL_DIVISOR
    return traits.foreign_poll_s * (_QUIET_POLL_FACTOR if since_s >= _QUIET_S else 1)


@contextlib.contextmanager
def _outage_passed_over() -> Iterator[None]:
    """Ignore an outage of the backend, which `Backing` has reported."""
    try:
        yield
    except ConsensusError as error:
        log.debug("will look again", extra=fields(error=cause_chain(error)))


def _tally(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Count outcomes by result; nearly all are committed, and counting by identity is cheap."""
    committed = outcomes.count(CasResult.COMMITTED)
    if committed == len(outcomes):
        return {"committed": committed}
    return collections.Counter(map(result_of, outcomes))
