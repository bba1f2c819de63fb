"""The leader of a derivation: performs what its machine decides.

A session takes the recovery log over, opens the shuffle behind what is committed, and runs
transactions: reads checkpoints, runs the transforms in Spark, publishes what they publish, and
records frontier, state and ACK intents as one. What every session does is `runtime/session.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from penstock import failpoints
from penstock.errors import Bug
from penstock.journal.selector import MisnamedJournal
from penstock.model.clock import Clock, duration, elapsed
from penstock.native.arrow import to_json
from penstock.runtime.awaited import BLOBS, STORE
from penstock.runtime.control import Control, TransactionSummary
from penstock.runtime.derive import fsm
from penstock.runtime.derive.fsm import DeriveLeader, Transform, Transformed
from penstock.runtime.derive.state_files import texts
from penstock.runtime.derive.transaction import DeriveTransaction
from penstock.runtime.derive.transaction_jobs import DeriveJobs, TransformOutcome, transform_reads
from penstock.runtime.patches import apply_patches
from penstock.runtime.protocol import Action, Event
from penstock.runtime.reading_session import ReadingSession
from penstock.runtime.recovery import (
    Entries,
    Layout,
    Recovered,
    Wanted,
    generations,
    split_state_key,
)
from penstock.runtime.session import Ended, Recorder, TaskPublisher, World, open_publisher
from penstock.runtime.stats import Counts
from penstock.runtime.tail import Committing
from penstock.shuffle.binding import Binding

if TYPE_CHECKING:
    from penstock.runtime.derive.build import DerivationTask

_PUBLISHED = failpoints.declare(
    "derive.after-publish", "what transforms publish is taken by the publisher"
)
_SWEPT = failpoints.declare("derive.after-sweep", "state files that nothing names are removed")


async def run_session(task: DerivationTask, world: World, control: Control) -> Ended:
    """Run one session, from taking over to its end; raises what ended it otherwise."""
    recorder = await Recorder.take_over(task, world, control)
    with control.waits.on(task.name, STORE):
        counters = {each.index: split_state_key(each.state_key)[1] for each in task.bindings}
        task = _settled(task, recorder.log.state)
        await recorder.lay_out(_layout(task, counters))
        recovered = await recorder.prune(recorder.recovered, task.collections, world)
    async with open_publisher(task, world, task.target.spec) as publisher:
        session = DeriveSession(task, world, control, recorder, publisher)
        return await session.run(recovered)


def _settled(task: DerivationTask, entries: Entries) -> DerivationTask:
    """Return the task with transforms under the generations that their counters ask for."""
    known = generations(entries)

    def settled(binding: Binding) -> Binding:
        resource, backfill = split_state_key(binding.state_key)
        if (at := known.get(resource)) is None:
            return binding
        return binding.at_generation(at.next(backfill=backfill, request=0))

    return replace(task, bindings=tuple(map(settled, task.bindings)))


def _layout(task: DerivationTask, counters: Mapping[int, int]) -> Layout:
    bindings = {binding.index: binding for binding in task.bindings}

    def reads(index: int, journal: str) -> bool:
        try:
            return bindings[index].reads(journal)
        except MisnamedJournal:
            return True  # the shuffle says what is wrong with it

    keys = {index: binding.state_key for index, binding in bindings.items()}
    return Layout(keys, reads, {at: Wanted(backfill=count) for at, count in counters.items()})


class DeriveSession(ReadingSession[DeriveLeader]):
    """Performs the actions of a derivation's machine."""

    crash_points: ClassVar[Mapping[type[Action], str]] = {
        Transform: failpoints.declare(
            "derive.after-transform", "transforms have run, and nothing is recorded"
        ),
    }

    def __init__(
        self,
        task: DerivationTask,
        world: World,
        control: Control,
        recorder: Recorder,
        publisher: TaskPublisher,
    ) -> None:
        super().__init__(task, world, control, recorder, publisher)
        self._task = task
        self._jobs = DeriveJobs(task, world, control, publisher, epoch=recorder.epoch)
        self._state = recorder.recovered.connector_state
        """As of the last transaction whose transforms have run."""
        self._files = set(texts(self._state))
        """The texts of the committed state: the names of its files are among them."""

    async def run(self, recovered: Recovered) -> Ended:
        """Take transactions one after the other until the machine stops."""
        world = self.world
        if not self.publisher.is_preview:
            with self.waiting(BLOBS):
                await asyncio.to_thread(self._jobs.files.sweep, self._state)
            failpoints.hit(_SWEPT)
        await self.open_shuffle(self._task.bindings, recovered.resume)
        limited = replace(self._task.leader_task, transactions_max=self.control.transactions_max)
        begun = fsm.start(limited, recovered, world.now(), seq_no=self.recorder.seq_no)
        try:
            await self.run_machine(fsm.MACHINE, begun)
        finally:
            self._jobs.close()
            await self.shuffle.close()
            if self.publisher.is_preview and self.control.drain:
                await asyncio.to_thread(self._jobs.files.remove_all)
        return Ended.STOPPED

    async def execute(self, action: Action) -> Event:
        match action:
            case Transform(txn):
                return await self._transform(txn)
            case _:
                raise Bug(f"nobody does {type(action).__name__}")

    async def _transform(self, txn: DeriveTransaction) -> Transformed:
        outcome = await self._jobs.transform(txn, self.shuffle.states, self._state)
        with self.waiting(BLOBS):
            await self._jobs.publish(outcome)
        failpoints.hit(_PUBLISHED)
        self._report(outcome)
        self._state = apply_patches(self._state, outcome.patches)
        return Transformed(
            reads=transform_reads(txn.deliveries()),
            published=Counts(docs=outcome.published),
            written=outcome.written,
            patches=outcome.patches,
        )

    def _report(self, outcome: TransformOutcome) -> None:
        """In a preview: show what would be published."""
        if self.publisher.is_preview:
            target = self._task.target
            for batch in outcome.batches:
                for line in to_json(batch, target.root):
                    self.control.on_document(target.spec.name, line)

    def on_committed(self, committed: Committing) -> None:
        txn = committed.txn
        if not isinstance(txn, DeriveTransaction):
            raise Bug("a derivation committed a transaction of another kind")
        if txn.patches and not self.publisher.is_preview:
            self.tasks.create_task(self._remove_obsolete())
        age = elapsed(Clock(self.world.now() + self.leader.skew), txn.opened)
        self.control.committed(
            TransactionSummary(
                transactions=self.leader.transactions,
                documents=txn.read_docs,
                bytes=txn.read_bytes,
                stored=txn.written.docs,
                jobs=self._jobs.finish(),
                seconds=age / duration(1),
            ),
            txn.patches,
        )

    async def _remove_obsolete(self) -> None:
        """Remove state files that the last commit has made obsolete."""
        named = set(texts(self.recorder.recovered.connector_state)) | set(texts(self._state))
        obsolete = self._files - named
        self._files = named
        await asyncio.to_thread(self._jobs.files.remove, sorted(obsolete))
