"""A capture's machine against a world in which processes die after any effect.

The source gives numbers, one or more in a sequence, from a cursor that is the connector's state.
Whatever dies after whichever effect, readers see every number once, in order, and the source is
told of no number that is not committed.
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
from penstock.runtime.capture import fsm
from penstock.runtime.capture.fsm import (
    DocumentsPublished,
    Polling,
    Publish,
    Publishing,
    SequenceReady,
)
from penstock.runtime.capture.task import CaptureLeaderTask
from penstock.runtime.capture.transaction import Acknowledge, BindingCounts
from penstock.runtime.connector.capture import CaptureSequence, Documents, Given
from penstock.runtime.machine import Done, Stopped
from penstock.runtime.protocol import (
    Acknowledged,
    Action,
    CloseRequested,
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
from penstock.runtime.recovery import Entries, Layout, Recovered, RecoveryMachine
from penstock.runtime.stats import Counts

TASK = CaptureLeaderTask(name="acme/numbers", targets=("acme/numbers",))
LOG, LAYOUT = RecoveryMachine(), Layout({})
NOW = from_unix(1_700_000_000)


def sequence(first: int, count: int = 1) -> CaptureSequence:
    texts = [b"%d" % number for number in range(first, first + count)]
    documents = Documents(texts=texts, origin=str)
    return CaptureSequence(
        given=(Given(binding=0, documents=documents, bytes=count),),
        patches=({"next": first + count},),
    )


class Crash(Exception):
    """The process dies."""


@dataclass
class World:
    """What survives, and after how many effects each process dies."""

    end: int
    deaths: Iterator[int]
    at_once: int = 1
    repeats: bool = True
    """Processes write the ACKs again that were durable when they began."""
    entries: Entries = field(default_factory=dict)
    journal: list[tuple[str, Producer, int, int]] = field(default_factory=list)
    acknowledged: int = 1
    """The source may have forgotten what is before."""
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

    @property
    def cursor(self) -> int:
        state = cast("dict[str, int]", LAYOUT.decode(self.entries).connector_state)
        return state.get("next", 1)

    def run(self) -> None:
        """One process, from what is durable to the end of the source."""
        self.processes += 1
        self.left = next(self.deaths, 0)
        producer = Producer(1 << 40 | self.processes)
        recovered = LAYOUT.decode(self.entries)
        if not self.repeats:
            recovered = Recovered(
                committed_close=recovered.committed_close,
                connector_state=recovered.connector_state,
            )
        given = self.cursor
        assert given >= self.acknowledged, "the source has forgotten what is needed"
        unacknowledged: list[int] = []
        leader, wanted = fsm.start(TASK, recovered, NOW)
        while not any(isinstance(each, Stop) for each in wanted):
            wanted = tuple(each for each in wanted if not isinstance(each, Sleep))
            event: Event | None = None
            if leader.wants_more and given <= self.end:
                count = min(self.at_once, self.end + 1 - given)
                event = SequenceReady(sequence(given, count))
                given += count
                unacknowledged.append(given)
            elif given > self.end and not leader.stopping:
                event = StopRequested(drain=True)
            if event is not None:
                leader, more = fsm.MACHINE.step(leader, event, NOW)
                wanted = (*wanted, *more)
                if isinstance(event, StopRequested):
                    leader, more = fsm.MACHINE.step(leader, CloseRequested(), NOW)
                    wanted = (*wanted, *more)
            if wanted and not isinstance(wanted[0], Stop):
                event = self.perform(wanted[0], producer, unacknowledged)
                leader, more = fsm.MACHINE.step(leader, event, NOW)
                wanted = (*wanted[1:], *more)

    def perform(self, action: Action, producer: Producer, unacknowledged: list[int]) -> Event:
        match action:
            case Publish(txn):
                count = 0
                for text in (t for s in txn.sequences for g in s.given for t in _texts(g)):
                    self.clock += 1
                    count += 1
                    self.journal.append(("doc", producer, self.clock, int(text)))
                    self.effect()
                return DocumentsPublished(captured={0: BindingCounts(written=Counts(docs=count))})
            case WriteStats(document=document):
                assert document["capture"]
                self.clock += 1
                return StatsWritten(Intents((Commit("n", producer, Clock(self.clock)),)))
            case PersistRecord(seq_no=seq_no, record=record):
                ops = LAYOUT.encode(record, self.entries)
                self.entries = LOG.apply(self.entries, ops, 0)
                self.effect()
                return Persisted(seq_no)
            case Acknowledge(sequences):
                for _ in range(sequences):
                    self.acknowledged = unacknowledged.pop(0)
                assert self.acknowledged <= self.cursor, "told of what is not committed"
                self.effect()
                return Acknowledged()
            case WriteIntents(intents=intents):
                for ack in intents.commits:
                    self.journal.append(("ack", ack.producer, int(ack.clock), 0))
                    self.effect()
                return IntentsWritten()
            case _:
                raise AssertionError(action)


def _texts(given: Given) -> list[bytes]:
    return list(given.documents.texts or ())


def captured(end: int, *deaths: int, at_once: int = 1, repeats: bool = True) -> World:
    """A world after processes that died after these numbers of effects, and one that lived."""
    world = World(end, iter(deaths), at_once, repeats)
    for _ in (*deaths, 0):
        with contextlib.suppress(Crash):
            world.run()
    return world


EFFECTS = 24
"""More than one process has."""


@pytest.mark.parametrize(("end", "at_once"), [(0, 1), (1, 1), (4, 1), (5, 2)])
def test_every_number_is_seen_once_whoever_dies_after_whichever_effect(
    end: int, at_once: int
) -> None:
    for deaths in itertools.product(range(1, EFFECTS), repeat=2):
        world = captured(end, *deaths, at_once=at_once)
        assert world.visible() == list(range(1, end + 1)), deaths
        assert world.cursor == end + 1
        assert world.acknowledged <= world.cursor


def test_it_does_not_hold_if_acks_are_not_written_again() -> None:
    worlds = [captured(4, death, repeats=False) for death in range(1, EFFECTS)]
    assert any(world.visible() != [1, 2, 3, 4] for world in worlds)


def test_publishing_waits_for_the_acks_of_the_last_transaction() -> None:
    leader, actions = fsm.start(TASK, Recovered(), NOW)
    assert actions == (WriteIntents(intents=Intents()),)
    leader, actions = fsm.MACHINE.step(leader, SequenceReady(sequence(1)), NOW)
    assert isinstance(leader.head, Polling)
    assert not any(isinstance(action, Publish) for action in actions)
    leader, actions = fsm.MACHINE.step(leader, IntentsWritten(), NOW)
    assert isinstance(leader.head, Publishing)
    assert any(isinstance(action, Publish) for action in actions)


def test_the_head_gathers_while_the_tail_commits_and_takes_whole_sequences() -> None:
    leader, _ = fsm.start(TASK, Recovered(), NOW)
    leader, _ = fsm.MACHINE.step(leader, SequenceReady(sequence(1)), NOW)
    leader, _ = fsm.MACHINE.step(leader, IntentsWritten(), NOW)
    leader, actions = fsm.MACHINE.step(leader, DocumentsPublished(), NOW)
    assert isinstance(actions[0], WriteStats)
    for first in (2, 3):
        assert leader.wants_more
        leader, _ = fsm.MACHINE.step(leader, SequenceReady(sequence(first)), NOW)
    assert isinstance(leader.head, Polling)
    assert leader.head.txn is not None
    assert len(leader.head.txn.sequences) == 2
    assert not isinstance(leader.tail, Done)


def test_a_sequence_that_is_held_at_a_stop_is_left_to_the_next_session() -> None:
    leader, _ = fsm.start(TASK, Recovered(), NOW)
    leader, actions = fsm.MACHINE.step(leader, StopRequested(), NOW)
    assert not leader.wants_more
    leader, actions = fsm.MACHINE.step(leader, SequenceReady(sequence(1)), NOW)
    leader, actions = fsm.MACHINE.step(leader, IntentsWritten(), NOW)
    assert isinstance(leader.head, Stopped)
    assert actions == (Stop(),)


def test_an_answer_that_nobody_waits_for_ends_the_session() -> None:
    leader, _ = fsm.start(TASK, Recovered(), NOW)
    for event in (DocumentsPublished(), Persisted(1), Acknowledged()):
        with pytest.raises(OutOfTurn):
            fsm.MACHINE.step(leader, event, NOW)
    leader, _ = fsm.MACHINE.step(leader, SequenceReady(sequence(1)), NOW)
    leader, _ = fsm.MACHINE.step(leader, IntentsWritten(), NOW)
    leader, _ = fsm.MACHINE.step(leader, SequenceReady(sequence(2)), NOW)
    assert not leader.wants_more
    with pytest.raises(OutOfTurn):
        fsm.MACHINE.step(leader, SequenceReady(sequence(3)), NOW)
