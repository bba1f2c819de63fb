"""A kind of task that publishes: it shows that machine and tail carry more than materializations.

It copies numbers from a source to a journal, doubled. Like a capture it hands a transaction over
when it closes, commits in its tail, and tells its source what it may forget. Whatever dies after
whichever effect, readers see every number once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock, Producer, from_unix
from penstock.model.hints import Commit
from penstock.model.json_order import Json
from penstock.runtime import tail
from penstock.runtime.machine import Leader, LeaderMachine, State, Stopped, rotate, session_clocks
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import (
    Acknowledged,
    Action,
    Event,
    IntentsWritten,
    Persisted,
    PersistRecord,
    StatsWritten,
    Stop,
    StopRequested,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.recovery import NO_INTENTS, Entries, Layout, Persist, RecoveryMachine

# ---------------------------------------------------------------------------------------- the kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A transaction: numbers, and the place in the source behind them."""

    position: int
    values: tuple[int, ...] = ()
    closed: Clock = NEVER
    intents: Intents = NO_INTENTS

    def stats(self) -> dict[str, Json]:
        return {"copied": len(self.values)}

    def with_intents(self, intents: Intents) -> Copy:
        return replace(self, intents=intents)

    def start_commit(self) -> None:
        return None

    def commit(self, patches: Patches) -> Persist:
        return Persist(
            committed_close=self.closed,
            ack_intents=self.intents,
            patches=({"position": self.position},),
        )

    def unfinished(self, patches: Patches) -> tail.Unfinished:
        return tail.Unfinished(acknowledge=Forget(self.position), intents=self.intents)


@dataclass(frozen=True, slots=True)
class Reading(State):
    txn: Copy


@dataclass(frozen=True, slots=True)
class Draining(State):
    txn: Copy


@dataclass(frozen=True, slots=True)
class Given(Event):
    value: int


@dataclass(frozen=True, slots=True)
class Drain(Action):
    txn: Copy


class Drained(Event):
    """All numbers of the transaction are in the journal."""


@dataclass(frozen=True, slots=True)
class Forget(Action):
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLeader(Leader):
    @property
    def is_open(self) -> bool:
        return isinstance(self.head, Reading) and bool(self.head.txn.values)


def head_turn(leader: CopyLeader) -> tuple[CopyLeader, Action | None] | None:
    if not isinstance(leader.head, Reading) or not leader.tail_done:
        return None
    txn = leader.head.txn
    if leader.stopping and not txn.values:
        return replace(leader, head=Stopped()), Stop()
    if len(txn.values) < (1 if leader.stopping else 2):
        return None
    closed = replace(txn, closed=leader.clock)
    leader = rotate(leader, head=Reading(Copy(position=txn.position)))
    return replace(leader, tail=Draining(closed)), Drain(closed)


def receive(leader: CopyLeader, event: Event) -> tuple[CopyLeader, Action | None]:
    match event, leader.head, leader.tail:
        case Given(value), Reading(txn), _:
            txn = replace(txn, position=txn.position + 1, values=(*txn.values, value))
            return replace(leader, head=Reading(txn)), None
        case Drained(), _, Draining(txn):
            moved, action = tail.publish(txn)
        case _:
            moved, action = tail.advance(leader, leader.tail, event)
    return replace(leader, tail=moved), action


MACHINE = LeaderMachine(head_turn, receive)

# --------------------------------------------------------------------------------------- the world


class Crash(Exception):
    """The process dies."""


LOG, LAYOUT = RecoveryMachine(), Layout({})


@dataclass
class World:
    """What survives; and after how many effects each process dies."""

    numbers: range
    deaths: Iterator[int]
    repeats: bool = True
    """Processes write the ACKs again that were durable when they began."""
    entries: Entries = field(default_factory=dict)
    journal: list[tuple[str, Producer, int, int]] = field(default_factory=list)
    """("doc" or "ack", producer, clock, value)."""
    forgotten: int = 0
    clock: int = 0
    processes: int = 0
    left: int = 0

    def effect(self) -> None:
        """Whatever was just done was the last thing, if the process dies now."""
        self.left -= 1
        if self.left == 0:
            raise Crash

    def visible(self) -> list[int]:
        """What a reader of the journal sees."""
        pending: dict[Producer, list[tuple[int, int]]] = {}
        seen: list[int] = []
        for what, producer, clock, value in self.journal:
            if what == "doc":
                pending.setdefault(producer, []).append((clock, value))
            else:
                seen += [value for at, value in pending.pop(producer, []) if at <= clock]
        return seen

    def run(self) -> None:
        """One process, from what is durable to a stop."""
        self.processes += 1
        self.left = next(self.deaths, 0)
        producer = Producer(1 << 40 | self.processes)
        recovered = LAYOUT.decode(self.entries)
        position = cast("dict[str, int]", recovered.connector_state).get("position", 0)
        clock, skew = session_clocks(recovered, from_unix(1_700_000_000))
        intents = recovered.ack_intents if self.repeats else NO_INTENTS
        state, action = tail.finish(tail.Unfinished(acknowledge=Forget(position), intents=intents))
        leader = CopyLeader(
            head=Reading(Copy(position=position)),
            tail=state,
            clock=clock,
            skew=skew,
            session_start=clock,
        )
        assert self.forgotten <= position, "what is not committed is not forgotten"
        leader, wanted = MACHINE.begin(leader, action)
        numbers = [*self.numbers[position:]]
        while not any(isinstance(each, Stop) for each in wanted):
            # The source gives on while the tail is busy; its end stops the task.
            event: Event = Given(numbers.pop(0)) if numbers else StopRequested(drain=True)
            if not (isinstance(event, StopRequested) and leader.stopping):
                leader, more = MACHINE.step(leader, event, clock)
                wanted = (*wanted, *more)
            if wanted:
                event = self.perform(wanted[0], producer)
                leader, more = MACHINE.step(leader, event, clock)
                wanted = (*wanted[1:], *more)

    def perform(self, action: Action, producer: Producer) -> Event:
        match action:
            case Drain(txn):
                for value in txn.values:
                    self.clock += 1
                    self.journal.append(("doc", producer, self.clock, 2 * value))
                    self.effect()
                return Drained()
            case WriteStats(document=document):
                assert document["copied"]
                self.clock += 1
                return StatsWritten(Intents((Commit("copies", producer, Clock(self.clock)),)))
            case PersistRecord(seq_no=seq_no, record=record):
                ops = LAYOUT.encode(record, self.entries)
                self.entries = LOG.apply(self.entries, ops, 0)
                self.effect()
                return Persisted(seq_no)
            case Forget(position):
                self.forgotten = max(self.forgotten, position)
                self.effect()
                return Acknowledged()
            case WriteIntents(intents=intents):
                for ack in intents.commits:
                    self.journal.append(("ack", ack.producer, int(ack.clock), 0))
                    self.effect()
                return IntentsWritten()
            case _:
                raise AssertionError(action)


def copied(numbers: int, *deaths: int, repeats: bool = True) -> World:
    """A world after processes that died after these numbers of effects, and one that lived."""
    world = World(range(numbers), iter(deaths), repeats)
    for _ in (*deaths, 0):
        with contextlib.suppress(Crash):
            world.run()
    return world


EFFECTS = 24
"""More than one process has."""


@pytest.mark.parametrize("numbers", [0, 1, 5])
def test_every_number_is_copied_once_whoever_dies_after_whichever_effect(numbers: int) -> None:
    for deaths in itertools.product(range(1, EFFECTS), repeat=2):
        world = copied(numbers, *deaths)
        assert world.visible() == [2 * n for n in range(numbers)], deaths
        assert world.forgotten == numbers
        assert world.processes == 3


def test_it_does_not_hold_if_what_a_process_left_is_not_finished() -> None:
    worlds = [copied(5, death, repeats=False) for death in range(1, EFFECTS)]
    assert any(world.visible() != [0, 2, 4, 6, 8] for world in worlds)
