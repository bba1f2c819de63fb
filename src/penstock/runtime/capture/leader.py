"""The leader of a capture: performs what its machine decides.

A session takes the recovery log over, opens the source at the state that is committed, and runs
transactions: polls sequences, publishes their documents, records the source's state and ACK intents
as one, and tells the source. What every session does is `runtime/session.py`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from penstock import failpoints
from penstock.errors import Bug
from penstock.model.clock import Clock, duration, elapsed
from penstock.runtime.awaited import BLOBS, SOURCE
from penstock.runtime.capture import fsm
from penstock.runtime.capture.fsm import CaptureLeader, DocumentsPublished, Publish, SequenceReady
from penstock.runtime.capture.jobs import CaptureJobs
from penstock.runtime.capture.transaction import Acknowledge, CaptureTransaction
from penstock.runtime.connector.capture import (
    WAIT_S,
    WAIT_S_MAX,
    CaptureSequence,
    CaptureSession,
    Idle,
    Opening,
    Polled,
)
from penstock.runtime.control import Control, TransactionSummary
from penstock.runtime.ops import QUARANTINE
from penstock.runtime.protocol import Acknowledged, Action, Event
from penstock.runtime.recovery import Layout, Recovered, log_name
from penstock.runtime.session import (
    Ended,
    Recorder,
    SessionLoop,
    TaskPublisher,
    World,
    open_publisher,
)
from penstock.runtime.tail import Committing
from penstock.runtime.waiting import blocked, in_thread, interruptible

if TYPE_CHECKING:
    from penstock.runtime.capture.build import CaptureTask

_POLLED = failpoints.declare("capture.after-poll", "a sequence is part of the open transaction")


async def run_session(task: CaptureTask, world: World, control: Control) -> Ended:
    """Run one session, from taking over to its end; raises what ended it otherwise."""
    began = time.monotonic()
    old = None if task.renamed_from is None else log_name(task.kind, task.renamed_from)
    recorder = await Recorder.lead(task, _LAYOUT, world, control, renamed_from=old)
    reports = [QUARANTINE] if task.quarantines else []
    async with open_publisher(task, world, *task.collections, reports=reports) as publisher:
        loop = CaptureLoop(task, world, control, recorder, publisher)
        ended = await loop.run(recorder.recovered)
    if ended is Ended.PAUSED:
        control.nothing_to_finish = True
        await control.pause(max(0.0, began + task.interval_s - time.monotonic()))
    return ended


_LAYOUT = Layout({}, lambda _, __: True)
"""A capture reads no journals, and has no positions in them."""


class CaptureLoop(SessionLoop[CaptureLeader]):
    """Performs the actions of a capture's machine."""

    crash_points: ClassVar[Mapping[type[Action], str]] = {
        Publish: failpoints.declare(
            "capture.after-publish", "documents are published, and nothing is recorded"
        ),
        Acknowledge: failpoints.declare(
            "capture.after-acknowledge", "the source knows of a commit, before it is visible"
        ),
    }

    def __init__(
        self,
        task: CaptureTask,
        world: World,
        control: Control,
        recorder: Recorder,
        publisher: TaskPublisher,
    ) -> None:
        super().__init__(task, world, control, recorder, publisher)
        self._task = task
        self._jobs = CaptureJobs(task, world, control, publisher, epoch=recorder.epoch)
        self._source: CaptureSession
        self._polling = False
        self._ended = False
        """The source has said that it gives nothing more."""

    async def run(self, recovered: Recovered) -> Ended:
        """Take transactions one after the other until the machine stops."""
        connector = self._task.connector
        opening = Opening(
            task=self._task.name,
            bindings=self._task.sources,
            state=recovered.connector_state,
            interval_s=self._task.interval_s,
            ends=self.control.until_revision is not None,
            preview=self.publisher.is_preview,
        )
        with self.control.waits.on(self._task.name, SOURCE, blocked(connector.waits_for, SOURCE)):
            self._source = await interruptible(lambda: connector.open(opening), connector.interrupt)
        limited = replace(self._task.leader_task, transactions_max=self.control.transactions_max)
        begun = fsm.start(limited, recovered, self.world.now(), seq_no=self.recorder.seq_no)
        try:
            await self.run_machine(fsm.MACHINE, begun)
        finally:
            await asyncio.shield(in_thread(self._source.close))
        paused = self._ended and self.control.until_revision is None
        return Ended.PAUSED if paused and not self.control.is_stopping() else Ended.STOPPED

    def after_step(self, event: Event | None) -> None:
        """Keep one poll under way while the machine holds no sequence."""
        if isinstance(event, SequenceReady):
            failpoints.hit(_POLLED)
        if self.leader.wants_more and not self._polling and not self._ended:
            self._polling = True
            self.in_background(self._poll())

    async def _poll(self) -> None:
        """Poll until there is a sequence, or nothing more."""
        connector, wait_s = self._task.connector, WAIT_S
        while True:
            polled: Polled = await interruptible(
                functools.partial(self._source.poll, wait_s), connector.interrupt
            )
            wait_s = min(2 * wait_s, WAIT_S_MAX) if polled is Idle.NOTHING else WAIT_S
            if isinstance(polled, CaptureSequence):
                self._polling = False
                self.events.put_nowait(SequenceReady(polled))
                return
            at_end = polled is Idle.NOTHING and self.control.until_revision is not None
            if polled is Idle.END or at_end:
                self._ended = True
                self.end_when_closed()
                return

    async def execute(self, action: Action) -> Event:
        match action:
            case Publish(txn):
                with self.waiting(BLOBS):
                    return DocumentsPublished(captured=await self._jobs.publish(txn))
            case Acknowledge(sequences):
                return await self._acknowledge(sequences)
            case _:
                raise Bug(f"nobody does {type(action).__name__}")

    async def _acknowledge(self, sequences: int) -> Acknowledged:
        connector = self._task.connector
        with self.control.waits.on(self._task.name, SOURCE, blocked(connector.waits_for, SOURCE)):
            await interruptible(lambda: self._source.acknowledge(sequences), connector.interrupt)
        return Acknowledged()

    def on_committed(self, committed: Committing) -> None:
        txn = committed.txn
        if not isinstance(txn, CaptureTransaction):
            raise Bug("a capture committed a transaction of another kind")
        age = elapsed(Clock(self.world.now() + self.leader.skew), txn.opened)
        written = [counts.written for counts in txn.captured.values()]
        refused = sum(counts.refused for counts in txn.captured.values())
        documents = sum(counts.docs for counts in written)
        self.control.committed(
            TransactionSummary(
                transactions=self.leader.transactions,
                documents=documents + refused,
                bytes=txn.read_bytes,
                stored=documents,
                jobs=self._jobs.finish(),
                seconds=age / duration(1),
            ),
            txn.patches,
        )
