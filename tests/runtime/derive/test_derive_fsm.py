"""A derivation's machine against a world in which processes die after any effect.

The derivation sums numbers: its state is the sum so far, and it publishes each sum. Whatever dies
after whichever effect, readers see every sum once, in order, and the state is that of the sums.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from penstock.journal.transaction import Intents
from penstock.model.clock import Clock, Producer, from_unix
from penstock.model.hints import Commit
from penstock.runtime.derive import fsm
from penstock.runtime.derive.fsm import Transform, Transformed, Transforming
from penstock.runtime.derive.task import DeriveLeaderTask, LeaderTransform
from penstock.runtime.derive.transaction import TransformRead
from penstock.runtime.machine import Done
from penstock.runtime.protocol import (
    Action,
    Event,
    IntentsWritten,
    OutOfTurn,
    Persisted,
    PersistRecord,
    Sleep,
    StatsWritten,
    Stop,
    StopRequested,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.reading import Idle
from penstock.runtime.recovery import Entries, Layout, Recovered, RecoveryMachine
from penstock.runtime.stats import Counts
from runtime.leading import ready

TASK = DeriveLeaderTask(
    name="acme/sums",
    transforms=(LeaderTransform(name="fromNumbers", source="acme/numbers"),),
)
LOG, LAYOUT = RecoveryMachine(), Layout({0: "fromNumbers.v0"})
NOW = from_unix(1_700_000_000)


class Crash(Exception):
    """The process dies."""


@dataclass
class World:
    """What survives, and after how many effects each process dies."""

    numbers: range
    deaths: Iterator[int]
    repeats: bool = True
    """Processes write the ACKs again that were durable when they began."""
    entries: Entries = field(default_factory=dict)
    journal: list[tuple[str, Producer, int, int]] = field(default_factory=list)
    """("doc" or "ack", producer, clock, value)."""
    clock: int = 0
    processes: int = 0
    left: int = 0

    def effect(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash

    def visible(self) -> list[int]:
        pending: dict[Producer, list[tuple[int, int]]] = {}
        seen: list[int] = []
        for what, producer, clock, value in self.journal:
            if what == "doc":
                pending.setdefault(producer, []).append((clock, value))
            else:
                seen += [value for at, value in pending.pop(producer, []) if at <= clock]
        return seen

    def run(self) -> None:
        """One process, from what is durable to the end of the source."""
        self.processes += 1
        self.left = next(self.deaths, 0)
        producer = Producer(1 << 40 | self.processes)
        recovered = LAYOUT.decode(self.entries)
        if not self.repeats:
            recovered = Recovered(
                committed_close=recovered.committed_close,
                committed_frontier=recovered.committed_frontier,
                connector_state=recovered.connector_state,
            )
        done = self._position(recovered)
        total = cast("dict[str, int]", recovered.connector_state).get("total", 0)
        leader, wanted = fsm.start(TASK, recovered, NOW)
        numbers = [*self.numbers[done:]]
        while not any(isinstance(each, Stop) for each in wanted):
            wanted = tuple(each for each in wanted if not isinstance(each, Sleep))
            event: Event | None = None
            if leader.wants_more and numbers:
                done += 1
                event = ready(done)
                numbers.pop(0)
            elif not numbers and not leader.stopping:
                event = StopRequested(drain=True)
            if event is not None:
                leader, more = fsm.MACHINE.step(leader, event, NOW)
                wanted = (*wanted, *more)
            if wanted and not isinstance(wanted[0], Stop):
                event, total = self.perform(wanted[0], producer, total)
                leader, more = fsm.MACHINE.step(leader, event, NOW)
                wanted = (*wanted[1:], *more)

    @staticmethod
    def _position(recovered: Recovered) -> int:
        for read in recovered.committed_frontier:
            for entry in read.producers:
                return int(entry.last_commit)
        return 0

    def perform(self, action: Action, producer: Producer, total: int) -> tuple[Event, int]:
        match action:
            case Transform(txn):
                through = self._position(Recovered(committed_frontier=txn.extents))
                before = through - len(txn.checkpoints)
                for number in self.numbers[before:through]:
                    total += number
                    self.clock += 1
                    self.journal.append(("doc", producer, self.clock, total))
                    self.effect()
                read = TransformRead(counts=Counts(docs=len(txn.checkpoints)), newest=Clock(1))
                return Transformed(reads={0: read}, patches=({"total": total},)), total
            case WriteStats(document=document):
                assert document["derive"]
                self.clock += 1
                return StatsWritten(Intents((Commit("sums", producer, Clock(self.clock)),))), total
            case PersistRecord(seq_no=seq_no, record=record):
                ops = LAYOUT.encode(record, self.entries)
                self.entries = LOG.apply(self.entries, ops, 0)
                self.effect()
                return Persisted(seq_no), total
            case WriteIntents(intents=intents):
                for ack in intents.commits:
                    self.journal.append(("ack", ack.producer, int(ack.clock), 0))
                    self.effect()
                return IntentsWritten(), total
            case _:
                raise AssertionError(action)


def derived(numbers: int, *deaths: int, repeats: bool = True) -> World:
    """A world after processes that died after these numbers of effects, and one that lived."""
    world = World(range(1, numbers + 1), iter(deaths), repeats)
    for _ in (*deaths, 0):
        with contextlib.suppress(Crash):
            world.run()
    return world


EFFECTS = 20
"""More than one process has."""


@pytest.mark.parametrize("numbers", [0, 1, 4])
def test_every_sum_is_published_once_whoever_dies_after_whichever_effect(numbers: int) -> None:
    sums = list(itertools.accumulate(range(1, numbers + 1)))
    for deaths in itertools.product(range(1, EFFECTS), repeat=2):
        world = derived(numbers, *deaths)
        assert world.visible() == sums, deaths
        state = LAYOUT.decode(world.entries).connector_state
        assert state == ({"total": sums[-1]} if sums else {})


def test_it_does_not_hold_if_acks_are_not_written_again() -> None:
    worlds = [derived(4, death, repeats=False) for death in range(1, EFFECTS)]
    assert any(world.visible() != [1, 3, 6, 10] for world in worlds)


def test_transforms_wait_for_the_acks_of_the_last_transaction() -> None:
    leader, actions = fsm.start(TASK, Recovered(), NOW)
    assert actions == (WriteIntents(intents=Intents()),)
    leader, actions = fsm.MACHINE.step(leader, ready(1), NOW)
    assert isinstance(leader.head, Idle)
    assert not any(isinstance(action, Transform) for action in actions)
    leader, actions = fsm.MACHINE.step(leader, IntentsWritten(), NOW)
    assert isinstance(leader.head, Transforming)
    assert any(isinstance(action, Transform) for action in actions)


def test_the_head_reads_on_while_the_tail_commits() -> None:
    leader, _ = fsm.start(TASK, Recovered(), NOW)
    leader, _ = fsm.MACHINE.step(leader, ready(1), NOW)
    leader, _ = fsm.MACHINE.step(leader, IntentsWritten(), NOW)
    leader, actions = fsm.MACHINE.step(
        leader, Transformed(reads={0: TransformRead(newest=Clock(1))}), NOW
    )
    assert isinstance(actions[0], WriteStats)
    assert leader.wants_more
    leader, _ = fsm.MACHINE.step(leader, ready(2), NOW)
    assert isinstance(leader.head, Idle)
    assert leader.head.txn is not None
    assert not isinstance(leader.tail, Done)


def test_an_answer_that_nobody_waits_for_ends_the_session() -> None:
    leader, _ = fsm.start(TASK, Recovered(), NOW)
    with pytest.raises(OutOfTurn):
        fsm.MACHINE.step(leader, Transformed(reads={}), NOW)
    with pytest.raises(OutOfTurn):
        fsm.MACHINE.step(leader, Persisted(1), NOW)
