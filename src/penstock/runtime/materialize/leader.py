"""The leader of a materialization: performs what its machine decides.

A session settles with the endpoint which transaction counts as the last, and opens the shuffle at
that place. From then on `fsm.step` decides and this module does: reads checkpoints, runs Spark
jobs, calls the connector and the webhooks. What every session does is `runtime/session.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from penstock import failpoints
from penstock.errors import Bug
from penstock.journal.follower import current_revision
from penstock.journal.selector import MisnamedJournal
from penstock.model.clock import Clock, duration, elapsed
from penstock.model.json_order import Json
from penstock.runtime import requests
from penstock.runtime.awaited import ENDPOINT, STORE, WEBHOOKS
from penstock.runtime.connector.common import Applied
from penstock.runtime.connector.materialize import Pattern, Rebuilds, SinkSession
from penstock.runtime.control import Control, TransactionSummary
from penstock.runtime.history import History
from penstock.runtime.materialize import fsm
from penstock.runtime.materialize.messages import (
    Acknowledge,
    CallTrigger,
    Flush,
    Flushed,
    Gather,
    Gathered,
    StartCommit,
    Store,
    Stored,
    TriggerCalled,
)
from penstock.runtime.materialize.state import MaterializeLeader
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.materialize.transaction_jobs import TransactionJobs
from penstock.runtime.protocol import Acknowledged, Action, Event, StartedCommit
from penstock.runtime.reading_session import ReadingSession
from penstock.runtime.recovery import (
    EndpointCheckpoint,
    EndpointMismatch,
    Layout,
    Recovered,
    reconcile,
)
from penstock.runtime.session import (
    Ended,
    Recorder,
    TaskPublisher,
    World,
    open_publisher,
    run_applies,
)
from penstock.runtime.tail import Committing
from penstock.runtime.waiting import blocked, in_thread, interruptible

if TYPE_CHECKING:
    from penstock.runtime.materialize.build import MaterializationTask

T = TypeVar("T")

_OPENED = failpoints.declare("leader.after-open", "the endpoint is opened and fenced")
_REBUILT = failpoints.declare("rebuild.complete", "a shadow holds everything, unseen")
_RECONCILED = failpoints.declare("leader.after-reconcile", "a commit of the endpoint is recorded")


async def run_session(task: MaterializationTask, world: World, control: Control) -> Ended:
    """Run one session, from taking over to its end; raises what ended it otherwise."""
    store, renamed_from = world.planner.journals.store, task.sink_task.renamed_from
    recorder = await Recorder.take_over(task, world, control, renamed_from=renamed_from)
    with control.waits.on(task.name, STORE):
        refills = await requests.refills(store, task.name, renamed_from)
    history = History.of(recorder.log.state, refills)
    if task.history not in (None, history):
        task = await _call(task, control, functools.partial(task.settle, history))
    with control.waits.on(task.name, STORE):
        await recorder.lay_out(_layout(task), task.renamed)
    task = task.resumed(_resumed(recorder.recovered))
    epoch = recorder.epoch

    async def apply(last: bytes | None, state: Json) -> Applied:
        before = None if last is None else task.decode_applied(last)
        call = functools.partial(task.connector.apply, task.sink_task, before, state, epoch=epoch)
        return await _call(task, control, call)

    state = await run_applies(task.name, task.applied, recorder, control, apply)
    opening = functools.partial(task.connector.open, task.sink_task, epoch=epoch, state=state)
    endpoint = await _call(task, control, opening)
    try:
        failpoints.hit(_OPENED)
        with control.waits.on(task.name, STORE):
            settled = await _reconcile(task, endpoint, recorder)
            recovered = await recorder.prune(settled, task.collections, world)
        async with open_publisher(task, world) as publisher:
            session = MaterializeSession(task, world, control, recorder, publisher, endpoint)
            if isinstance(endpoint, Rebuilds) and endpoint.rebuilding:
                return await _rebuild(session, endpoint, recovered)
            return await session.run(recovered)
    finally:
        await in_thread(endpoint.close)


async def _rebuild(session: MaterializeSession, endpoint: Rebuilds, recovered: Recovered) -> Ended:
    """Run until everything that is committed now is stored, and show it to readers then."""
    control = session.control
    revision = await current_revision(session.world.planner.journals.store)
    session.until_revision = max(revision, control.until_revision or 0)
    ended = await session.run(recovered)
    if ended is not Ended.STOPPED or not session.is_caught_up:
        return ended
    failpoints.hit(_REBUILT)
    await session.call(endpoint.swap)
    return Ended.REBUILT if control.until_revision is None else Ended.STOPPED


async def _call(task: MaterializationTask, control: Control, call: Callable[[], T]) -> T:
    """Let the connector do something; if cancelled, it is interrupted, and has ended."""
    connector = task.connector
    with control.waits.on(task.name, ENDPOINT, blocked(connector.waits_for, ENDPOINT)):
        return await interruptible(call, connector.interrupt)


def _layout(task: MaterializationTask) -> Layout:
    bindings = {binding.index: binding for binding in task.bindings}

    def reads(index: int, journal: str) -> bool:
        try:
            return bindings[index].reads(journal)
        except MisnamedJournal:
            return True  # the shuffle says what is wrong with it

    keys = {index: binding.state_key for index, binding in bindings.items()}
    return Layout(keys, reads, task.wanted)


def _resumed(recovered: Recovered) -> frozenset[int]:
    """Return bindings that may have stored something: committed, or hinted and not known."""
    frontiers = (recovered.committed_frontier, recovered.hinted_frontier)
    return frozenset(read.binding for frontier in frontiers for read in frontier)


async def _reconcile(
    task: MaterializationTask, endpoint: SinkSession, recorder: Recorder
) -> Recovered:
    """Return what to start from, after the endpoint has said which transaction it has last."""
    data = endpoint.checkpoint
    checkpoint = None if data is None else EndpointCheckpoint.decode(data)
    commits = task.leader_task.pattern is Pattern.ENDPOINT
    recovered = recorder.recovered
    if checkpoint is not None and not (recovered.committed_close or recovered.hinted_close):
        raise EndpointMismatch(
            f"another data directory has run {task.name} at this endpoint",
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


class MaterializeSession(ReadingSession[MaterializeLeader]):
    """Performs the actions of a materialization's machine."""

    crash_points: ClassVar[Mapping[type[Action], str]] = {
        Gather: failpoints.declare("leader.after-gather", "the input of a transaction is gathered"),
        Flush: failpoints.declare("leader.after-flush", "its job is done, and nothing is recorded"),
        Store: failpoints.declare("leader.after-store", "rows are stored, and were hinted"),
        StartCommit: failpoints.declare(
            "leader.after-start-commit", "the endpoint has committed, or has what the commit needs"
        ),
        Acknowledge: failpoints.declare("leader.after-acknowledge", "the endpoint shows it"),
        CallTrigger: failpoints.declare("leader.after-trigger", "webhooks were called, unrecorded"),
    }

    def __init__(
        self,
        task: MaterializationTask,
        world: World,
        control: Control,
        recorder: Recorder,
        publisher: TaskPublisher,
        endpoint: SinkSession,
    ) -> None:
        super().__init__(task, world, control, recorder, publisher)
        self._task = task
        self._endpoint = endpoint
        self._jobs = TransactionJobs(task, world, control, epoch=recorder.epoch)

    async def run(self, recovered: Recovered) -> Ended:
        """Take transactions one after the other until the machine stops."""
        world, leader_task = self.world, self._task.leader_task
        await self.open_shuffle(self._task.bindings, recovered.resume)
        limited = replace(
            leader_task,
            transactions_max=self.control.transactions_max,
            drain=self.control.drain,
            has_triggers=leader_task.has_triggers and world.preview_store is None,
        )
        begun = fsm.start(limited, recovered, world.now(), seq_no=self.recorder.seq_no)
        try:
            await self.run_machine(fsm.MACHINE, begun)
        finally:
            self._jobs.close()
            await self.shuffle.close()
        replayed = recovered.resume.unresolved_hints > 0 and self.leader.transactions
        return Ended.REPLAYED if replayed else Ended.STOPPED

    # -------------------------------------------------------------------------------- what is done

    async def execute(self, action: Action) -> Event:
        match action:
            case Gather(txn):
                await self._jobs.gather(txn, self.shuffle.states)
                return Gathered()
            case Flush(txn, patches):
                reports = await self._jobs.flush(txn, self._endpoint.workers, self.shuffle.states)
                said = await self.call(self._endpoint.flush, patches)
                return Flushed(reports=reports, patches=tuple(said))
            case Store(txn):
                return Stored(reports=await self._jobs.store(txn, self._endpoint.workers))
            case StartCommit():
                said = await self.call(
                    self._endpoint.start_commit,
                    action.close,
                    self._jobs.staged,
                    action.checkpoint.encode(),
                    action.patches,
                )
                return StartedCommit(tuple(said))
            case Acknowledge(patches=patches):
                return Acknowledged(tuple(await self.call(self._endpoint.acknowledge, patches)))
            case CallTrigger(params=params):
                with self.waiting(WEBHOOKS):
                    await self._task.webhooks.call(json.loads(params))
                return TriggerCalled()
            case _:
                raise Bug(f"nobody does {type(action).__name__}")

    async def call(self, call: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401
        """Let the endpoint do something."""
        return await _call(self._task, self.control, functools.partial(call, *arguments))

    def on_committed(self, committed: Committing) -> None:
        txn = committed.txn
        if not isinstance(txn, Transaction):
            raise Bug("a materialization committed a transaction of another kind")
        jobs = self._jobs.finish()
        if jobs.handoffs:
            self.tasks.create_task(self._jobs.remove(jobs.handoffs))
        age = elapsed(Clock(self.world.now() + self.leader.skew), txn.opened)
        self.control.committed(
            TransactionSummary(
                transactions=self.leader.transactions + 1,
                documents=txn.read_docs,
                bytes=txn.read_bytes,
                stored=jobs.stored,
                jobs=jobs.jobs,
                seconds=age / duration(1),
            ),
            (*txn.patches, *committed.patches),
        )
