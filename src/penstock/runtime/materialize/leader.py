"""The leader of a materialization: performs what its machines decide, and tells them how it went.

A session begins by taking the task's recovery log over, which fences whoever led before. It brings
the endpoint to the spec, opens it, settles with it which transaction counts as the last, and opens
the shuffle at that place. From then on `fsm.step` decides and this module does: reads checkpoints,
runs Spark jobs, calls the connector, appends records, ACKs, statistics.

Every action is one task of the event loop, and whatever blocks runs in a thread. The first error
ends the session: nothing is retried here, because the next session starts from the log, and knows
from it what is to be done again. After `Fenced` nothing at all is written, deleted or called.

A crash point follows every action (`penstock failpoints`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock import failpoints
from penstock.consensus.store import Consensus
from penstock.errors import Bug
from penstock.garbage import uncollected
from penstock.journal.blobs import spark_root
from penstock.journal.planning import Planner
from penstock.journal.publisher import Fixed, Publisher
from penstock.journal.schemas import layout
from penstock.journal.selector import MisnamedJournal
from penstock.journal.transaction import Intents
from penstock.model.clock import Clock, Producer, duration
from penstock.model.json_order import Json
from penstock.model.routing import split_shards
from penstock.native.arrow import to_arrow
from penstock.runtime import apply_loop, ops, renames
from penstock.runtime.connector import Pattern
from penstock.runtime.connector import Session as EndpointSession
from penstock.runtime.connector import Task as ConnectorTask
from penstock.runtime.control import Control
from penstock.runtime.materialize import fsm
from penstock.runtime.materialize.build import Built, decode_task
from penstock.runtime.materialize.messages import (
    Acknowledge,
    Acknowledged,
    Action,
    CallTrigger,
    CloseRequested,
    Event,
    Flush,
    Flushed,
    FrontierReady,
    Gather,
    Gathered,
    IntentsWritten,
    Load,
    Loaded,
    Rotate,
    Sleep,
    StartCommit,
    StartedCommit,
    StatsWritten,
    Stop,
    StopRequested,
    Store,
    Stored,
    TriggerCalled,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.materialize.state import Idle, Leader
from penstock.runtime.materialize.work import Jobs, Transaction
from penstock.runtime.protocol import Kind, Persisted, PersistRecord
from penstock.runtime.pruning import Pruning, pruned
from penstock.runtime.recovery import (
    NO_INTENTS,
    EndpointCheckpoint,
    EndpointMismatch,
    Layout,
    Persist,
    Recovered,
    reconcile,
)
from penstock.runtime.renames import Log
from penstock.runtime.waiting import in_thread, interruptible
from penstock.servicekit.logs import fields
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.session import Session
from penstock.shuffle.state import NeedRows
from penstock.shuffle.state import Options as ShuffleOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("penstock.runtime")

_STORE: Final = "the consensus store"
_ENDPOINT: Final = "its endpoint"

_MANY_BYTES: Final = 1 << 40
"""Rows are looked up where there are too many of them for the leader."""

__all__ = ["Control", "Ended", "World", "run_session"]

T = TypeVar("T")

_LEADS = failpoints.declare("leader.after-epoch", "a leader has taken the recovery log over")
_SUPERSEDED = failpoints.declare(
    "leader.after-supersede", "positions are dropped of tables that a backfill will empty"
)
_OPENED = failpoints.declare("leader.after-open", "the endpoint is opened and fenced")
_APPLIED = failpoints.declare("leader.after-apply", "the endpoint was applied to, not recorded yet")
_RECONCILED = failpoints.declare("leader.after-reconcile", "a commit of the endpoint is recorded")
_AFTER: Final[Mapping[type[Action], str]] = {
    Load: failpoints.declare("leader.after-load", "a checkpoint is part of the open transaction"),
    Gather: failpoints.declare("leader.after-gather", "the input of a transaction is gathered"),
    Flush: failpoints.declare("leader.after-flush", "its job is done, and nothing is recorded"),
    Store: failpoints.declare("leader.after-store", "rows are staged or stored, and hinted"),
    WriteStats: failpoints.declare("leader.after-stats", "statistics are published, without ACK"),
    StartCommit: failpoints.declare(
        "leader.after-start-commit", "the endpoint has committed, or has what the commit needs"
    ),
    Acknowledge: failpoints.declare("leader.after-acknowledge", "the endpoint shows it"),
    WriteIntents: failpoints.declare("leader.after-intents", "ACKs of it are written"),
    CallTrigger: failpoints.declare("leader.after-trigger", "webhooks were called, unrecorded"),
}
_PERSISTED: Final[Mapping[Kind, str]] = {
    Kind.APPLY: failpoints.declare("leader.after-apply-record", "what was applied is recorded"),
    Kind.HINT: failpoints.declare("leader.after-hint-record", "extents are hinted"),
    Kind.TRIGGER_HINT: failpoints.declare(
        "leader.after-trigger-hint-record", "trigger variables are hinted"
    ),
    Kind.COMMIT: failpoints.declare("leader.after-commit-record", "a transaction is committed"),
    Kind.ACK: failpoints.declare("leader.after-ack-record", "acknowledged patches are recorded"),
    Kind.TRIGGER_DONE: failpoints.declare(
        "leader.after-trigger-done-record", "it is recorded that webhooks were called"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where a leader lives: the stores, Spark, and the time."""

    planner: Planner
    spark: Callable[[int], SparkSession]
    """Starts it if it must; called in a thread, and only if there is something to read: so many
    bytes, as they are stored."""
    now: Callable[[], Clock]
    entropy: Callable[[int], bytes]
    between: str
    """A directory that executors reach too, for what one job leaves to the next."""
    scratch: Consensus | None = None
    """Where recovery logs are, if not beside the journals: of a preview, which publishes nothing
    either, and leaves nothing behind in the journals' store."""
    shuffle: ShuffleOptions = field(default_factory=ShuffleOptions)
    pruning: Pruning = Pruning()  # noqa: RUF009 - frozen


class Ended(enum.Enum):
    """How a session came to its end."""

    STOPPED = "as it was asked to, or after its number of transactions"
    REPLAYED = "after the one transaction that it had to repeat"


async def run_session(built: Built, world: World, control: Control) -> Ended:
    """One session, from taking over to its end; raises what ended it otherwise."""
    store = world.scratch or world.planner.journals.store
    with control.waits.on(built.name, _STORE):
        log = await renames.lead(store, built.name, renamed_from=built.task.renamed_from)
        failpoints.hit(_LEADS)
        recorder = _Recorder(log, _layout(built))
        await recorder.supersede()
    built = built.resumed(_resumed(recorder.recovered))
    state = await _apply(built, recorder.recovered, recorder, control)
    opening = functools.partial(built.connector.open, built.task, epoch=_epoch(log), state=state)
    endpoint = await _called(built, control, opening)
    try:
        failpoints.hit(_OPENED)
        with control.waits.on(built.name, _STORE):
            settled = await _reconciled(built, endpoint, recorder)
            recovered = await recorder.prune(settled, built, world)
        async with _publishing(built, world) as publishing:
            session = _Session(built, world, control, recorder, endpoint, publishing, _epoch(log))
            return await session.run(recovered)
    finally:
        await in_thread(endpoint.close)


async def _called(built: Built, control: Control, call: Callable[[], T]) -> T:
    """Let the connector do something; if cancelled, it is interrupted, and has ended."""
    connector = built.connector
    with control.waits.on(built.name, _ENDPOINT, connector.waits_for):
        return await interruptible(call, connector.interrupt)


def _layout(built: Built) -> Layout:
    bindings = {binding.index: binding for binding in built.bindings}

    def reads(index: int, journal: str) -> bool:
        try:
            return bindings[index].reads(journal)
        except MisnamedJournal:
            return True  # the shuffle says what is wrong with it

    return Layout({index: binding.state_key for index, binding in bindings.items()}, reads)


def _resumed(recovered: Recovered) -> frozenset[int]:
    """Bindings of which something may have been stored: committed, or hinted and not known."""
    frontiers = (recovered.committed_frontier, recovered.hinted_frontier)
    return frozenset(read.binding for frontier in frontiers for read in frontier)


def _epoch(log: Log) -> int:
    if log.leads is None:
        raise Bug("a log is used by who does not lead it", where=log.key)
    return log.leads


@dataclass(slots=True)
class _Recorder:
    """Appends records to the recovery log, one at a time."""

    log: Log
    layout: Layout
    seq_no: int = 0

    @property
    def recovered(self) -> Recovered:
        """What the log says now."""
        return self.layout.decode(self.log.state)

    async def write(self, action: PersistRecord) -> Persisted:
        await self.append(action.record)
        self.seq_no = action.seq_no
        failpoints.hit(_PERSISTED[action.kind])
        return Persisted(action.seq_no)

    async def append(self, record: Persist) -> None:
        with uncollected():
            ops_ = self.layout.encode(record, self.log.state)
        await self.log.append(lambda _: ops_)

    async def supersede(self) -> None:
        """Drop positions of tables that are to be emptied: before they are, and for good."""
        if superseded := self.layout.supersede(self.log.state):
            await self.log.append(lambda _: superseded)
            failpoints.hit(_SUPERSEDED)

    async def prune(self, recovered: Recovered, built: Built, world: World) -> Recovered:
        """Forget the writers that will not be heard of again, here and in the log."""
        kept = await pruned(
            recovered, world.planner, built.collections, now=world.now(), options=world.pruning
        )
        if forgotten := self.layout.forget(self.log.state, kept.committed_frontier):
            await self.log.append(lambda _: forgotten)
            _log.info("forgot the positions of %d writers of long ago", len(forgotten))
        return kept


# -------------------------------------------------------------------------------------- startup


async def _apply(built: Built, recovered: Recovered, recorder: _Recorder, control: Control) -> Json:
    """Bring the endpoint to the spec; the connector's state afterwards."""
    loop, action = apply_loop.begin(
        spec=built.applied, last_applied=recovered.last_applied, state=recovered.connector_state
    )
    following: apply_loop.Action | None = action
    while following is not None:
        match following:
            case apply_loop.Apply(last_applied=last, state=state):
                before: ConnectorTask | None = None if last is None else decode_task(last)
                apply = functools.partial(
                    built.connector.apply, built.task, before, state, epoch=_epoch(recorder.log)
                )
                applied = await _called(built, control, apply)
                failpoints.hit(_APPLIED)
                control.on_applied(applied.description)
                loop, following = apply_loop.step(loop, applied)
            case PersistRecord():
                with control.waits.on(built.name, _STORE):
                    persisted = await recorder.write(following)
                loop, following = apply_loop.step(loop, persisted)
    if not isinstance(loop, apply_loop.Converged):
        raise Bug("applying ended without converging")
    return loop.state


async def _reconciled(built: Built, endpoint: EndpointSession, recorder: _Recorder) -> Recovered:
    """What to start from, after the endpoint has said which transaction it committed last."""
    data = endpoint.checkpoint
    checkpoint = None if data is None else EndpointCheckpoint.decode(data)
    commits = built.runtime.pattern is Pattern.ENDPOINT
    recovered = recorder.recovered
    if checkpoint is not None and not (recovered.committed_close or recovered.hinted_close):
        raise EndpointMismatch(
            f"another data directory has run {built.name} at this endpoint",
            why="the recovery log here is new, and the endpoint has a checkpoint",
            fix="run the task where it was run before; to start over here, delete its row of "
            "penstock_checkpoints, and raise `backfill` of the bindings",
        )
    record = reconcile(recovered, checkpoint, endpoint_commits=commits)
    if record is None:
        return recovered
    await recorder.append(record)
    failpoints.hit(_RECONCILED)
    if reconcile(recorder.recovered, checkpoint, endpoint_commits=commits) is not None:
        raise Bug("reconciling with an endpoint did not settle")
    return recorder.recovered


class _Silent:
    """Publishes nothing: statistics of a preview go to its log."""

    async def publish_stats(self, document: dict[str, Json]) -> Intents:
        _log.info("stats", extra=fields(**document))
        return NO_INTENTS

    async def write_intents(self, intents: Intents) -> None:
        if intents:
            raise Bug("a preview has nothing to acknowledge")


@dataclass(slots=True)
class _Statistics:
    """Publishes the statistics of transactions, as part of them."""

    publisher: Publisher

    async def publish_stats(self, document: dict[str, Json]) -> Intents:
        root = layout(ops.STATS.write_schema.text)
        await self.publisher.publish(0, to_arrow([document], root))
        return await self.publisher.commit()

    async def write_intents(self, intents: Intents) -> None:
        await self.publisher.write_intents(intents)


@contextlib.asynccontextmanager
async def _publishing(built: Built, world: World) -> AsyncIterator[_Silent | _Statistics]:
    """What publishes for the task; its producer lives as long as the session."""
    if world.scratch is not None:
        yield _Silent()
        return
    journal = ops.journal_of(ops.STATS, kind="materialization", task=built.name)
    journals = world.planner.journals
    if not await journals.exists(str(journal)):
        await journals.create(journal)
    publisher = Publisher(
        journals,
        world.planner.blobs,
        world.planner.schemas,
        [Fixed(spec=ops.STATS, journal=str(journal))],
        producer=Producer.from_random(world.entropy(6)),
        now=world.now,
    )
    try:
        yield _Statistics(publisher)
    finally:
        await publisher.abort()


# ------------------------------------------------------------------------------------ the session


class _Session:
    """Performs the actions of the machines."""

    def __init__(
        self,
        built: Built,
        world: World,
        control: Control,
        recorder: _Recorder,
        endpoint: EndpointSession,
        publishing: _Silent | _Statistics,
        epoch: int,
    ) -> None:
        self._built = built
        self._world = world
        self._control = control
        self._recorder = recorder
        self._endpoint = endpoint
        self._publishing = publishing
        self._shards = built.runtime.shards
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._held: Checkpoint | None = None
        self._jobs = Jobs(
            built,
            world.planner,
            world.spark,
            epoch=epoch,
            between=world.between,
            waits=control.waits,
        )
        self._work: Transaction | None = None
        self._transactions = 0
        self._caught_up = self._ending = False
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None

    async def run(self, recovered: Recovered) -> Ended:
        """Take transactions one after the other until the machines stop."""
        with self._control.waits.on(self._built.name, _STORE):
            self._shuffle = await Session.open(
                self._world.planner,
                self._built.bindings,
                routing=split_shards(self._shards),
                resume=recovered.resume,
                options=self._world.shuffle,
                now=self._world.now,
                lookup=self._look_up if spark_root(self._world.planner.blobs) else None,
            )
        try:
            return await self._run(recovered)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._jobs.close()
            await self._shuffle.close()

    async def _look_up(self, need: NeedRows) -> int:
        from penstock.shuffle.lookup import spark_lookup

        start = functools.partial(self._world.spark, _MANY_BYTES)
        return await spark_lookup(start, self._world.planner)(need)

    async def _run(self, recovered: Recovered) -> Ended:
        replayed = recovered.resume.unresolved_hints > 0
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._control._wake = self._take_requests  # noqa: SLF001 - one thing in two parts
                self._control.nothing_to_finish = False
                self._take_requests()
                watcher = tasks.create_task(self._watch_catching_up())
                leader, actions = fsm.start(
                    self._built.runtime, recovered, self._world.now(), seq_no=self._recorder.seq_no
                )
                while True:
                    if self._perform(actions):
                        break
                    self._read_on(leader)
                    self._stop_if_caught_up(leader)
                    event = await self._events.get()
                    leader, actions = fsm.step(leader, event, self._world.now())
                watcher.cancel()
                if self._reading is not None:
                    self._reading.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._control._wake = lambda: None  # noqa: SLF001
        return Ended.REPLAYED if replayed and self._transactions else Ended.STOPPED

    # --------------------------------------------------------------------------- what comes to pass

    def _take_requests(self) -> None:
        for event in self._control.take():
            self._events.put_nowait(event)

    def _read_on(self, leader: Leader) -> None:
        """Keep one request for a checkpoint outstanding while the machines hold none."""
        wants = leader.wants_frontier and self._held is None
        if wants and (self._reading is None or self._reading.done()):
            self._reading = self._tasks.create_task(self._next_checkpoint())

    async def _next_checkpoint(self) -> None:
        self._held = await self._shuffle.next_checkpoint()
        self._events.put_nowait(FrontierReady(self._held.frontier))

    async def _watch_catching_up(self) -> None:
        if self._control.until_revision is not None:
            await self._shuffle.caught_up(self._control.until_revision)
            self._caught_up = True
            self._events.put_nowait(Woken())

    def _stop_if_caught_up(self, leader: Leader) -> None:
        """In batch mode: end when all that was to be done is part of a transaction.

        What is handed out later does not count, or a steady writer could defer the end for ever; so
        the open transaction closes, whatever its minima, and no other follows it. A frontier that
        is held may be the last one that counts: it is loaded first.
        """
        loaded = self._held is None and leader.held is None
        replaying = leader.replay is not None and leader.head == Idle()
        if self._caught_up and loaded and not replaying and not self._ending:
            self._ending = True
            self._events.put_nowait(StopRequested(drain=True))
            self._events.put_nowait(CloseRequested())

    # -------------------------------------------------------------------------------- what is done

    def _perform(self, actions: Iterable[Action]) -> bool:
        """Begin what is to be done; whether that is nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for action in actions:
            match action:
                case Stop():
                    return True
                case Sleep(wake_after):
                    delay_s = wake_after / duration(1)
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(delay_s, self._events.put_nowait, Woken())
                case Load():
                    self._load(action)
                case Rotate():
                    pass  # told with the commit itself, which is also the last thing of a stop
                case _:
                    self._tasks.create_task(self._do(action))
        return False

    async def _do(self, action: Action) -> None:
        events = await self._done(action)
        if (name := _AFTER.get(type(action))) is not None:
            failpoints.hit(name)
        for event in events:
            self._events.put_nowait(event)

    async def _done(self, action: Action) -> Sequence[Event]:
        match action:
            case PersistRecord(kind=kind):
                with self._waiting(_STORE):
                    persisted = await self._recorder.write(action)
                if kind is Kind.COMMIT:
                    self._committed()
                return [persisted]
            case Gather():
                await self._jobs.gather(self._current(), self._shuffle.states)
                return [Gathered()]
            case Flush():
                return await self._flush(action)
            case Store():
                stored = await self._jobs.store(self._current(), self._endpoint.workers)
                return [
                    Stored(shard=shard, reports=tuple(stored.get(shard, ())))
                    for shard in range(self._shards)
                ]
            case WriteStats(document=document):
                with self._waiting(_STORE):
                    return [StatsWritten(await self._publishing.publish_stats(document))]
            case StartCommit():
                return await self._start_commit(action)
            case Acknowledge(patches=patches):
                said = await self._blocking(self._endpoint.acknowledge, patches)
                return self._answers(Acknowledged, said)
            case WriteIntents(intents=intents):
                with self._waiting(_STORE):
                    await self._publishing.write_intents(intents)
                return [IntentsWritten()]
            case CallTrigger(params=params):
                with self._waiting("its webhooks"):
                    await self._built.triggers.call(json.loads(params))
                return [TriggerCalled()]
            case _:
                raise Bug(f"nobody does {type(action).__name__}")

    def _answers(
        self, kind: type[Acknowledged | StartedCommit | Flushed], said: Sequence[Json]
    ) -> list[Event]:
        """The answers of all shards to one call that served them; the first speaks for it."""
        return [
            kind(shard=shard, patches=tuple(said) if shard == 0 else ())
            for shard in range(self._shards)
        ]

    async def _blocking(self, call: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401
        return await _called(self._built, self._control, functools.partial(call, *arguments))

    def _waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._control.waits.on(self._built.name, what)

    # The parts of a transaction

    def _load(self, action: Load) -> None:
        """Take a checkpoint in: from its records it is known how much that is."""
        checkpoint, self._held = self._held, None
        if checkpoint is None or checkpoint.frontier is not action.frontier:
            raise Bug("a frontier is loaded that is not the one which is held")
        if self._work is None:
            self._work = Transaction(opened=action.transaction)
        self._work.checkpoints.append(checkpoint)
        share = self._work.bytes // self._shards
        for shard in range(self._shards):
            self._events.put_nowait(
                Loaded(
                    shard=shard,
                    combiner_bytes=share,
                    read_docs=checkpoint.documents if shard == 0 else 0,
                    read_bytes=checkpoint.bytes if shard == 0 else 0,
                )
            )
        failpoints.hit(_AFTER[Load])

    async def _flush(self, action: Flush) -> Sequence[Event]:
        reports = await self._jobs.flush(
            self._current(),
            self._endpoint.workers,
            plan=action.plan,
            states=self._shuffle.states,
            max_keys=action.max_keys,
        )
        patches = await self._blocking(self._endpoint.flush, action.patches)
        return [
            Flushed(
                shard=shard,
                reports=tuple(reports.get(shard, ())),
                patches=tuple(patches) if shard == 0 else (),
            )
            for shard in range(self._shards)
        ]

    async def _start_commit(self, action: StartCommit) -> Sequence[Event]:
        said = await self._blocking(
            self._endpoint.start_commit,
            action.close,
            self._current().staged,
            action.checkpoint.encode(),
            action.patches,
        )
        self._current().patches = (*action.patches, *said)
        return self._answers(StartedCommit, said)

    def _committed(self) -> None:
        work, self._work = self._current(), None
        self._jobs.forget(work)
        for checkpoint in work.checkpoints:
            self._shuffle.consumed(checkpoint)
        self._transactions += 1
        self._control.on_state(work.patches)
        self._control.on_progress(work.progress(transactions=self._transactions))

    def _current(self) -> Transaction:
        if self._work is None:
            raise Bug("there is no transaction")
        return self._work


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended a session: of several errors, the one that came first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
