"""The shell of sessions that read collections: asks the shuffle for checkpoints, and knows the end.

One request for a checkpoint is outstanding while the machine holds none. In batch mode the session
ends once everything that was committed up to a revision is part of a transaction.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from penstock import failpoints
from penstock.errors import PenstockError, UserError
from penstock.journal.blobs import spark_root
from penstock.journal.state import JournalState
from penstock.model.frontier import Frontier
from penstock.runtime.awaited import STORE
from penstock.runtime.control import Control
from penstock.runtime.protocol import Event, Woken
from penstock.runtime.reading import CheckpointReady, Idle, ReadingLeader
from penstock.runtime.session import Recorder, RunnableTask, SessionLoop, TaskPublisher, World
from penstock.shuffle.binding import Binding
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.lag import reading_lag
from penstock.shuffle.session import Session
from penstock.shuffle.state import NeedRows

_MANY_BYTES: Final = 1 << 40
"""Rows are looked up where there are too many of them for the leader."""

_LOADED = failpoints.declare("leader.after-load", "a checkpoint is part of the open transaction")

R = TypeVar("R", bound=ReadingLeader)


def check_retained(
    bindings: Sequence[Binding], resume: Frontier, states: Mapping[str, JournalState]
) -> None:
    """Refuse to go on from where retention has passed: documents would be missing unnoticed.

    What tasks of the applied catalog have not read is not forgotten. This is about one that was
    not part of it for a while, or whose recovery log was restored.
    """
    names = {binding.index: binding.collection.name for binding in bindings}
    for read in resume:
        state = states.get(read.journal)
        position = max((abs(entry.offset) for entry in read.producers), default=0)
        started = position or any(entry.is_open for entry in read.producers)
        if state is None or not state.forgotten.revision or not started or not state.readable:
            continue
        if position < state.begin:
            raise UserError(
                f"documents of {names[read.binding]} were forgotten before this task has read them",
                where=f"binding {read.binding}, journal {read.journal}, "
                f"offsets {position} to {state.begin}",
                why="the retention of the collection has passed them while no task of the applied "
                "catalog needed them",
                fix="raise `backfill` of the binding: it is filled anew with what is left",
            )


class ReadingSession(SessionLoop[R]):
    """A session whose machine takes checkpoints."""

    def __init__(
        self,
        task: RunnableTask,
        world: World,
        control: Control,
        recorder: Recorder,
        publisher: TaskPublisher,
    ) -> None:
        super().__init__(task, world, control, recorder, publisher)
        self.shuffle: Session
        self.until_revision = control.until_revision
        """End when all that was committed up to it is part of a transaction; None: run on."""
        self._asked = False
        """A checkpoint was asked for, and the machine does not have it yet."""
        self._queued = False
        """The checkpoint that was asked for is there."""
        self._caught_up = self._ending = False
        self._measured = False

    async def open_shuffle(self, bindings: Sequence[Binding], resume: Frontier) -> None:
        """Open the shuffle session, which the caller closes."""
        self._reads = (bindings, resume)
        with self.waiting(STORE):
            self.shuffle = await Session.open(
                self.world.planner,
                bindings,
                resume=resume,
                now=self.world.now,
                lookup=self._look_up if spark_root(self.world.planner.blobs) else None,
            )
        try:
            check_retained(bindings, resume, self.shuffle.states)
        except PenstockError:
            await self.shuffle.close()
            raise

    async def _look_up(self, need: NeedRows) -> int:
        from penstock.shuffle.lookup import spark_lookup

        start = functools.partial(self.world.spark, _MANY_BYTES)
        return await spark_lookup(start, self.world.planner)(need)

    def after_step(self, event: Event | None) -> None:
        """Keep one request for a checkpoint outstanding while the machine holds none."""
        if event is None and self.until_revision is not None:
            self.in_background(self._watch_catching_up(self.until_revision))
        if isinstance(event, CheckpointReady):
            self._asked = self._queued = False
            self._show_taken(event.checkpoint)
            failpoints.hit(_LOADED)
        if self.leader.wants_more and not self._asked:
            self._asked = True
            self.in_background(self._next_checkpoint())
        self._stop_if_caught_up()

    @property
    def is_caught_up(self) -> bool:
        """True if it has come to its end, and was not stopped before."""
        return self._ending

    def _show_taken(self, checkpoint: Checkpoint) -> None:
        """Say how much was taken in; and in batch mode, of how much."""
        activity = self.control.activity
        activity.takes(checkpoint.documents, checkpoint.bytes)
        if self.control.until_revision is None:
            return
        if self._caught_up:
            so_far = activity.report()
            activity.expects(so_far.taken, so_far.taken_bytes)
        elif not self._measured:
            self._measured = True
            self.in_background(self._measure())

    async def _measure(self) -> None:
        """Find out what a backlog that takes several checkpoints is in all."""
        bindings, resume = self._reads
        journals: dict[str, dict[str, JournalState]] = {}
        for name, state in self.shuffle.states.items():
            journals.setdefault(state.collection, {})[name] = state
        before = self.control.activity.report()
        lag = await asyncio.to_thread(reading_lag, bindings, resume, journals, self.world.now())
        self.control.activity.expects(before.documents + lag.documents, before.bytes + lag.bytes)

    async def _next_checkpoint(self) -> None:
        checkpoint = await self.shuffle.next_checkpoint()
        self._queued = True
        self.events.put_nowait(CheckpointReady(checkpoint))

    async def _watch_catching_up(self, revision: int) -> None:
        await self.shuffle.caught_up(revision)
        self._caught_up = True
        self.events.put_nowait(Woken())

    def _stop_if_caught_up(self) -> None:
        """In batch mode: end when all that was to be done is part of a transaction.

        What is handed out later does not count, or a steady writer could defer the end for ever; so
        the open transaction closes, whatever its minima, and no other follows it. A checkpoint that
        is held may be the last one that counts: it is taken in first.
        """
        leader = self.leader
        taken = leader.held is None and not self._queued
        replaying = leader.replay is not None and leader.head == Idle()
        if self._caught_up and taken and not replaying and not self._ending:
            self._ending = True
            self.end_when_closed()
