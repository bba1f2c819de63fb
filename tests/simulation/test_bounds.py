"""What a session costs: by what it reads, not by how much there is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest
from msgspec import Struct, structs

from penstock.journal.state import AckRecord
from penstock.model.clock import Clock, Flag, Producer
from penstock.shuffle.rounds import Round
from penstock.shuffle.state import RoundLimits, SessionState
from support.shuffle_oracle import Stamp
from support.simulated_bindings import Reads, bindings_of
from support.simulation import START, Habits, World, create_journal

PRODUCERS = [Producer(Producer.MULTICAST | number) for number in (1, 2, 3)]


def world_of(journals: int) -> World:
    names = [f"a/pivot={number:08x}" for number in range(journals)]
    world = World({"a": names}, Habits())
    for name in names:
        create_journal(world, name)
    return world


def write(world: World, *, transactions: int, rows: int) -> None:
    """Transactions of three producers, each over three journals; the last stays open."""
    names = list(world.journals)[:5]
    clock = START + world.revision * 1_000_000
    for number in range(transactions):
        producer = PRODUCERS[number % 3]
        chosen = [names[(number + at) % 5] for at in range(3)]
        for name in chosen:
            stamps = [
                Stamp(producer, Flag.CONTINUE_TXN, Clock(clock + at + 1)) for at in range(rows)
            ]
            clock += rows
            world.append({name: [world.fragment(stamps)]})
        if number < transactions - 1:
            clock += 1
            ack = AckRecord(producer=producer, clock=Clock(clock))
            world.append({name: [ack] for name in chosen})


def session_of(limits: RoundLimits = RoundLimits()) -> SessionState:  # noqa: B008 - frozen
    bindings = bindings_of([Reads(collection="a"), Reads(collection="a", priority=1)])
    return SessionState(bindings, limits=limits)


def learn(session: SessionState, world: World) -> None:
    states = {name: journal.state for name, journal in world.journals.items()}
    session.learn("a", world.revision, states)


def read(session: SessionState) -> int:
    """Read rounds for a checkpoint that is requested; how many there were."""
    count = 0
    while isinstance(session.advance(START), Round):
        count += 1
    return count


# -------------------------------------------------------------------------------------- 98: size


_UNCOUNTED = type | ModuleType | FunctionType | int | str | bytes


def size_of(root: object) -> int:
    """How many objects are reachable; code is left out, and so are numbers and texts."""
    seen: set[int] = set()
    left: list[Any] = [root]
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, _UNCOUNTED):
            continue
        seen.add(id(found))
        # Values that no cycle can be in are not known to the collector.
        left += structs.astuple(found) if isinstance(found, Struct) else gc.get_referents(found)
    return len(seen)


def state_size(*, rows: int, transactions: int = 30) -> int:
    world = world_of(5)
    write(world, transactions=transactions, rows=rows)
    session = session_of()
    learn(session, world)
    session.request()
    assert read(session) > 0
    return size_of(session)


def test_98_what_a_session_holds_does_not_grow_with_rows() -> None:
    assert state_size(rows=200) == state_size(rows=2)
    assert state_size(rows=2, transactions=60) > state_size(rows=2) * 1.5


@pytest.mark.parametrize("limit", [200, 1000])
def test_98_a_checkpoint_is_no_larger_than_a_round_and_nothing_is_read_ahead_of_it(
    limit: int,
) -> None:
    """However large the backlog is, so a task can take it in transactions of a bounded size."""
    world = world_of(5)
    write(world, transactions=120, rows=3)
    session = session_of(RoundLimits(bytes=limit))
    learn(session, world)
    sizes, handed_out = [], 0
    while True:
        session.request()
        read(session)
        checkpoint = session.answer()
        if checkpoint is None:
            break
        assert session.advance(START) is None, "nobody has asked for more"
        sizes.append(checkpoint.bytes)
        handed_out += checkpoint.documents
    assert max(sizes) <= limit
    assert len(sizes) > sum(sizes) / limit
    assert handed_out == 119 * 3 * 3 * 2


# ------------------------------------------------------------------------------------- 99: scale


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of code run: time, as far as nobody else is to blame for it."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:  # noqa: ANN401 - by its contract
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def cost_of_a_checkpoint(journals: int) -> int:
    world = world_of(journals)
    session = session_of()
    learn(session, world)
    listed = world.revision
    write(world, transactions=9, rows=2)
    changed = {name: state for revision, name, state in world.history["a"] if revision > listed}

    def checkpoint() -> None:
        session.learn("a", world.revision, changed)
        session.request()
        while session.answer() is None:
            session.advance(START)

    return lines_of(checkpoint)


def test_99_a_checkpoint_costs_what_it_has_to_read_however_many_journals_are_silent() -> None:
    few, many = cost_of_a_checkpoint(10), cost_of_a_checkpoint(2_000)
    assert few > 500
    assert many < few * 1.1
