"""A session of a task, whatever its kind: takes its recovery log over, and runs its machine.

A session begins by taking the task's recovery log over, which fences an earlier leader. It brings
the endpoint to the spec (`run_applies`), and opens what it publishes with (`open_publisher`). From
then on the kind's machine decides, and its `SessionLoop` does.

Every action is one task of the event loop, and whatever blocks runs in a thread. The first error
ends the session: nothing is retried here, because the next session starts from the log, and knows
from it what is to be done again. After `Fenced` nothing at all is written, deleted or called.

A crash point follows every action (`penstock failpoints`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
import logging
import re
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol

from penstock import failpoints
from penstock.consensus.statelog import Fenced
from penstock.consensus.store import Consensus
from penstock.errors import Bug
from penstock.garbage import gc_paused
from penstock.journal.planning import Planner
from penstock.journal.publisher import Fixed, Mapped, Publisher
from penstock.journal.schemas import layout
from penstock.journal.transaction import Intents
from penstock.model.clock import Clock, Producer, duration
from penstock.model.json_order import Json
from penstock.model.spec import CollectionSpec
from penstock.native.arrow import to_arrow
from penstock.runtime import apply_loop, leadership, ops, renames
from penstock.runtime.awaited import STORE, Awaited
from penstock.runtime.connector.common import Applied
from penstock.runtime.control import Control
from penstock.runtime.introspection import Introspection
from penstock.runtime.leadership import IfBusy
from penstock.runtime.machine import L, LeaderMachine, Stepped
from penstock.runtime.protocol import (
    Action,
    CloseRequested,
    Event,
    IntentsWritten,
    Persisted,
    PersistRecord,
    RecordKind,
    Sleep,
    StatsWritten,
    Stop,
    StopRequested,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.pruning import Pruning, pruned
from penstock.runtime.recovery import NO_INTENTS, Layout, Op, Persist, Recovered, log_name
from penstock.runtime.renames import Log
from penstock.runtime.reports import process_of
from penstock.runtime.stats import with_phases
from penstock.runtime.tail import Committing
from penstock.servicekit.logs import fields

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("penstock.runtime")

_LEADS = failpoints.declare("leader.after-epoch", "a leader has taken the recovery log over")
_SUPERSEDED = failpoints.declare(
    "leader.after-supersede", "positions are dropped of tables that a backfill will empty"
)
_APPLIED = failpoints.declare("leader.after-apply", "the endpoint was applied to, not recorded yet")
_AFTER: Final[Mapping[type[Action], str]] = {
    WriteStats: failpoints.declare("leader.after-stats", "statistics are published, without ACK"),
    WriteIntents: failpoints.declare("leader.after-intents", "ACKs of it are written"),
}
_PERSISTED: Final[Mapping[RecordKind, str]] = {
    RecordKind.APPLY: failpoints.declare(
        "leader.after-apply-record", "what was applied is recorded"
    ),
    RecordKind.HINT: failpoints.declare("leader.after-hint-record", "extents are hinted"),
    RecordKind.TRIGGER_HINT: failpoints.declare(
        "leader.after-trigger-hint-record", "trigger variables are hinted"
    ),
    RecordKind.COMMIT: failpoints.declare(
        "leader.after-commit-record", "a transaction is committed"
    ),
    RecordKind.ACK: failpoints.declare(
        "leader.after-ack-record", "acknowledged patches are recorded"
    ),
    RecordKind.TRIGGER_DONE: failpoints.declare(
        "leader.after-trigger-done-record", "it is recorded that webhooks were called"
    ),
}


_MOVED = failpoints.declare(
    "rename.after-binding", "positions are kept under the new name of a table"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where a leader lives: the stores, Spark, and the time."""

    planner: Planner
    spark: Callable[[int], SparkSession]
    """Starts Spark if it must; called in a thread, and only if there is something to read: this
    many bytes, as they are stored."""
    now: Callable[[], Clock]
    entropy: Callable[[int], bytes]
    local_dir: Path
    """For files that only this machine needs."""
    preview_store: Consensus | None = None
    """The store of a preview's recovery log, which is beside the journals otherwise. A preview
    publishes nothing, calls no webhook, and leaves nothing behind in the journals' store."""
    pruning: Pruning = Pruning()  # noqa: RUF009 - frozen
    introspection: Introspection = field(default_factory=lambda: Introspection(time.time))
    """What the tasks of this process do."""


class Ended(enum.Enum):
    """The way in which a session came to its end."""

    STOPPED = "as it was asked to, or after its number of transactions"
    REPLAYED = "after the one transaction that it had to repeat"
    REBUILT = "after tables that were filled again have replaced those before"
    PAUSED = "at the end of what its source has for now"


class RunnableTask(Protocol):
    """A task of any kind, built and ready to run."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> ops.TaskKindName: ...

    @property
    def log_level(self) -> int:
        """The level from which on what the task logs is kept."""
        ...

    async def run_session(self, world: World, control: Control) -> Ended:
        """Run one session, from taking over to its end; raises what ended it otherwise."""
        ...


# ------------------------------------------------------------------------------- the recovery log


@dataclass(slots=True)
class Recorder:
    """Appends records to the recovery log, one at a time."""

    task: str
    log: Log
    layout: Layout
    seq_no: int = 0

    @classmethod
    async def lead(
        cls,
        task: RunnableTask,
        layout: Layout,
        world: World,
        control: Control,
        *,
        renamed_from: str | None = None,
    ) -> Recorder:
        """Take a task's recovery log over, and drop what a raised backfill makes obsolete.

        What is done about a living process that runs the task, `control` says.
        """
        recorder = await cls.take_over(task, world, control, renamed_from=renamed_from)
        with control.waits.on(task.name, STORE):
            await recorder.lay_out(layout)
        return recorder

    @classmethod
    async def take_over(
        cls,
        task: RunnableTask,
        world: World,
        control: Control,
        *,
        renamed_from: str | None = None,
    ) -> Recorder:
        """Take a task's recovery log over, which decides how it is laid out (`lay_out`)."""
        log = await _led(task, world, control, renamed_from)
        recorder = cls(task.name, log, Layout({}))
        failpoints.hit(_LEADS)
        return recorder

    async def lay_out(self, layout: Layout, renamed: Mapping[int, str] | None = None) -> None:
        """Use a layout; what a raised backfill makes obsolete is dropped, for good.

        `renamed` are the former names of resources, by binding.
        """
        self.layout = layout
        if moved := layout.rename(self.log.state, renamed or {}):
            await self._append(moved)
            failpoints.hit(_MOVED)
        await self._supersede()

    @property
    def epoch(self) -> int:
        if self.log.leads is None:
            raise Bug("a log is used by a session that does not lead it", where=self.log.key)
        return self.log.leads

    @property
    def recovered(self) -> Recovered:
        """The state that the log holds now."""
        return self.layout.decode(self.log.state)

    async def write(self, action: PersistRecord) -> Persisted:
        await self.append(action.record)
        self.seq_no = action.seq_no
        failpoints.hit(_PERSISTED[action.kind])
        return Persisted(action.seq_no)

    async def append(self, record: Persist) -> None:
        with gc_paused():
            encoded = self.layout.encode(record, self.log.state)
        await self._append(encoded)

    async def _append(self, record: tuple[Op, ...]) -> None:
        try:
            await self.log.append(lambda _: record)
        except Fenced as error:
            by = leadership.leader_of(self.log.state)
            raise leadership.taken_over(self.task, by) from error

    async def _supersede(self) -> None:
        """Drop positions of tables that are to be emptied: before they are, and for good."""
        if superseded := self.layout.supersede(self.log.state):
            await self._append(superseded)
            if any(what == "del" for what, _, _ in superseded):
                failpoints.hit(_SUPERSEDED)

    async def prune(
        self, recovered: Recovered, collections: Iterable[str], world: World
    ) -> Recovered:
        """Forget the writers that will not be heard of again, here and in the log."""
        kept = await pruned(
            recovered, world.planner, collections, now=world.now(), options=world.pruning
        )
        if forgotten := self.layout.forget(self.log.state, kept.committed_frontier):
            await self._append(forgotten)
            _log.info("forgot the positions of %d writers of long ago", len(forgotten))
        return kept


async def _led(task: RunnableTask, world: World, control: Control, renamed_from: str | None) -> Log:
    """Take a task's recovery log over, when the process that runs the task lets it, or is gone."""
    store = world.preview_store or world.planner.journals.store
    name, me = log_name(task.kind, task.name), process_of(world.introspection)
    gone: str | None = None
    watch: leadership.Watch | None = None
    while True:
        try:
            with control.waits.on(task.name, STORE):
                claim = leadership.claim(me, gone)
                return await renames.lead(store, name, claim=claim, renamed_from=renamed_from)
        except leadership.Led as led:
            leader = led.leader
        todo = leadership.verdict(
            leader, if_busy=control.if_busy, takes_from_up=control.takes_from_up
        )
        watch = watch or leadership.Watch(store, name, *([renamed_from] if renamed_from else []))
        if todo is not IfBusy.TAKE_OVER:
            with control.waits.on(task.name, leadership.awaited(leader)):
                if todo is IfBusy.WAIT:
                    await watch.until_free(leader)
                elif await watch.settled(leader):
                    raise leadership.busy(task.name, leader)
        gone = leader.id


async def run_applies(
    task: str,
    spec: bytes,
    recorder: Recorder,
    control: Control,
    apply: Callable[[bytes | None, Json], Awaitable[Applied]],
) -> Json:
    """Bring the endpoint to the spec, and return the connector's state afterwards.

    `apply` is given the spec that was applied last, if any, and the connector's state.
    """
    recovered = recorder.recovered
    loop, action = apply_loop.begin(
        spec=spec, last_applied=recovered.last_applied, state=recovered.connector_state
    )
    following: apply_loop.Action | None = action
    while following is not None:
        match following:
            case apply_loop.Apply(last_applied=last, state=state):
                applied = await apply(last, state)
                failpoints.hit(_APPLIED)
                control.on_applied(applied.description)
                loop, following = apply_loop.step(loop, applied)
            case PersistRecord():
                with control.waits.on(task, STORE):
                    persisted = await recorder.write(following)
                loop, following = apply_loop.step(loop, persisted)
    if not isinstance(loop, apply_loop.Converged):
        raise Bug("applying ended without converging")
    return loop.state


# ------------------------------------------------------------------------------------- publishing


@dataclass(slots=True)
class TaskPublisher:
    """Publishes what a task's transactions publish, and their statistics, as part of them."""

    publisher: Publisher | None
    """None in a preview: statistics go to its log, and there is nothing to acknowledge."""

    @property
    def is_preview(self) -> bool:
        return self.publisher is None

    @property
    def producer(self) -> str | None:
        return None if self.publisher is None else str(self.publisher.producer)

    async def publish_stats(self, document: dict[str, Json]) -> Intents:
        """Publish the last document of a transaction, and return the ACKs of all of them."""
        if self.publisher is None:
            _log.info("stats", extra=fields(**document))
            return NO_INTENTS
        root = layout(ops.STATS.write_schema.text)
        await self.publisher.publish(0, to_arrow([document], root))
        return await self.publisher.commit()

    async def write_intents(self, intents: Intents) -> None:
        if self.publisher is not None:
            await self.publisher.write_intents(intents)
        elif intents:
            raise Bug("a preview has nothing to acknowledge")


@contextlib.asynccontextmanager
async def open_publisher(
    task: RunnableTask,
    world: World,
    *collections: CollectionSpec,
    reports: Sequence[CollectionSpec] = (),
) -> AsyncIterator[TaskPublisher]:
    """Open what publishes for a task; its producer lives as long as the session.

    The bindings of the publisher are the statistics, then these collections, then `reports`: other
    collections in which the task reports on itself.
    """
    if world.preview_store is not None:
        yield TaskPublisher(None)
        return
    journals = world.planner.journals

    async def fixed(spec: CollectionSpec) -> Fixed:
        journal = ops.journal_of(spec, kind=task.kind, task=task.name)
        if not await journals.exists(str(journal)):
            await journals.create(journal)
        return Fixed(spec=spec, journal=str(journal))

    publisher = Publisher(
        journals,
        world.planner.blobs,
        world.planner.schemas,
        [
            await fixed(ops.STATS),
            *(Mapped(spec=collection) for collection in collections),
            *[await fixed(spec) for spec in reports],
        ],
        producer=Producer.from_random(world.entropy(6)),
        now=world.now,
    )
    try:
        yield TaskPublisher(publisher)
    finally:
        await publisher.abort()


# ----------------------------------------------------------------------------------- the event loop


class SessionLoop(abc.ABC, Generic[L]):
    """Runs the machine of one session: performs its actions, and feeds their events back."""

    crash_points: ClassVar[Mapping[type[Action], str]] = {}
    """The failpoints after the kind's own actions."""

    def __init__(
        self,
        task: RunnableTask,
        world: World,
        control: Control,
        recorder: Recorder,
        publisher: TaskPublisher,
    ) -> None:
        self.task = task
        self.world = world
        self.control = control
        self.recorder = recorder
        self.publisher = publisher
        self.leader: L
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.tasks: asyncio.TaskGroup
        self._background: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @abc.abstractmethod
    async def execute(self, action: Action) -> Event:
        """Perform an action of the kind, and return the event that answers it."""

    @abc.abstractmethod
    def after_step(self, event: Event | None) -> None:
        """Look at the leader after it has begun, or moved by `event`: what is to be asked for?"""

    @abc.abstractmethod
    def on_committed(self, committed: Committing) -> None:
        """Report a transaction whose commit record is durable."""

    async def run_machine(self, machine: LeaderMachine[L], begun: Stepped[L]) -> None:
        """Run until the machine stops; raises the first error."""
        try:
            async with asyncio.TaskGroup() as self.tasks:
                with self.control.listening(self._take_requests):
                    self.leader, actions = begun
                    event: Event | None = None
                    self.control.activity.runs(self.publisher.producer)
                    while not self._perform(actions):
                        self.after_step(event)
                        self._show()
                        event = await self.events.get()
                        self.leader, actions = machine.step(self.leader, event, self.world.now())
                for task in self._background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._cancel_timer()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, or the session does."""
        task = self.tasks.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def end_when_closed(self) -> None:
        """Close the open transaction, whatever its minima, finish it, and stop."""
        self.events.put_nowait(StopRequested(drain=True))
        self.events.put_nowait(CloseRequested())

    def waiting(self, awaited: Awaited) -> contextlib.AbstractContextManager[None]:
        return self.control.waits.on(self.task.name, awaited)

    def _take_requests(self) -> None:
        for event in self.control.take():
            self.events.put_nowait(event)

    def _perform(self, actions: Iterable[Action]) -> bool:
        """Begin what is to be done; True if that is to stop."""
        self._cancel_timer()
        for action in actions:
            match action:
                case Stop():
                    return True
                case Sleep(wake_after):
                    delay_s = wake_after / duration(1)
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(delay_s, self.events.put_nowait, Woken())
                case _:
                    self.tasks.create_task(self._run_action(action))
        return False

    def _show(self) -> None:
        """Say how far the open transaction is."""
        leader = self.leader
        wake_after = leader.wake_after if leader.is_open else None
        closes_in_s = None if wake_after is None else wake_after / duration(1)
        self.control.activity.transaction_is(is_open=leader.is_open, closes_in_s=closes_in_s)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _run_action(self, action: Action) -> None:
        phase = self.control.activity.begins(_phase(action))
        try:
            event = await self._execute(action)
        finally:
            self.control.activity.completes(phase)
        kind = type(action)
        if (name := _AFTER.get(kind) or self.crash_points.get(kind)) is not None:
            failpoints.hit(name)
        self.events.put_nowait(event)

    async def _execute(self, action: Action) -> Event:
        match action:
            case PersistRecord():
                return await self._persist(action)
            case WriteStats(document=document):
                timed = with_phases(document, self.control.activity.untold_stage_seconds())
                with self.waiting(STORE):
                    return StatsWritten(await self.publisher.publish_stats(timed))
            case WriteIntents(intents=intents):
                with self.waiting(STORE):
                    await self.publisher.write_intents(intents)
                return IntentsWritten()
            case _:
                return await self.execute(action)

    async def _persist(self, action: PersistRecord) -> Persisted:
        states = (self.leader.head, self.leader.tail)
        with self.waiting(STORE):
            persisted = await self.recorder.write(action)
        if action.kind is RecordKind.COMMIT:
            for state in states:
                if isinstance(state, Committing):
                    self.on_committed(state)
        return persisted


def _phase(action: Action) -> str:
    """Return what people call an action: "start commit", "record hint"."""
    if isinstance(action, PersistRecord):
        return f"record {action.kind.name.lower().replace('_', ' ')}"
    return re.sub(r"(?<!^)(?=[A-Z])", " ", type(action).__name__).lower()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what ended a session: of several errors, the one that came first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
