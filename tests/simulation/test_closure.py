"""Why the journals of a cohort are cut at one revision, and what becomes of those who are not.

A producer commits T1 to journals J0 and J2, then T2 to J1 and J2. Whoever reads J1 first, and then
J2 through both, has met every hint of T2, and shows a half of T1 beside it: hints gate what they
name, and nothing that came before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from penstock.journal.state import AckRecord
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.hints import Commit
from penstock.model.producer_frontier import ProducerFrontier
from penstock.shuffle.binding import Lane
from penstock.shuffle.checkpoint import Checkpoints
from penstock.shuffle.state import RoundLimits
from support.schedules import failure, schedule
from support.shuffle_oracle import Disordered, Doc, Stamp, Torn, Violation, Written
from support.simulated_bindings import Reads, bindings_of
from support.simulated_task import Task
from support.simulated_writers import Writers
from support.simulation import START, Habits, World, chance, create_journal

P = Producer(Producer.MULTICAST | 1)
J0, J1, J2 = "a/pivot=00", "a/pivot=40", "a/pivot=80"
T1 = {J0: 140, J2: 141}
T2 = {J1: 160, J2: 161}


def clock(of: int) -> Clock:
    return Clock(START + of)


def counter_example() -> World:
    """T1 committed at 150, then T2 at 165: rows under one revision each, and ACKs as well."""
    world = World({"a": (J0, J1, J2)}, Habits())
    for name in (J0, J1, J2):
        create_journal(world, name)
    for number, (rows, commit) in enumerate(((T1, 150), (T2, 165)), start=1):
        docs = tuple(Doc(name, P, clock(at)) for name, at in rows.items())
        written = Written(name=f"T{number}", docs=docs, clock=clock(commit), commits=(), whole=True)
        world.written.update(dict.fromkeys(docs, written))
        world.append(
            {
                name: [world.fragment([Stamp(P, Flag.CONTINUE_TXN, clock(at))])]
                for name, at in rows.items()
            }
        )
        world.append(
            {
                name: [
                    AckRecord(
                        producer=P,
                        clock=clock(commit),
                        hints=tuple(
                            Commit(other, P, clock(commit)) for other in rows if other != name
                        ),
                    )
                ]
                for name in rows
            }
        )
    return world


def task_of(world: World) -> Task:
    bindings = bindings_of([Reads(collection="a")])
    return Task(world, Writers(world), bindings, RoundLimits(bytes=1))


# ------------------------------------------------------------------------------- counter-example


def frontier_of(entries: Mapping[str, tuple[int, int, int]]) -> Frontier:
    return Frontier.of(
        JournalFrontier(
            journal=name,
            producers=(
                ProducerFrontier(
                    producer=P, last_commit=Clock(last), hinted_commit=Clock(hinted), offset=offset
                ),
            ),
        )
        for name, (last, hinted, offset) in sorted(entries.items())
    )


def test_89_deltas_of_unrelated_paces_make_a_torn_checkpoint() -> None:
    checkpoints = Checkpoints([Lane(bindings=(0,))], EMPTY)
    checkpoints.on_progressed(0, frontier_of({J1: (165, 0, -3), J2: (0, 165, 0)}))
    checkpoints.on_progressed(0, frontier_of({J2: (165, 0, -9), J0: (0, 150, 0)}))
    checkpoints.request()
    taken = checkpoints.answer()
    assert taken is not None
    assert taken.unresolved_hints == 0
    assert {read.journal: read.producers[0].last_commit for read in taken} == {J1: 165, J2: 165}

    shown = [
        (0, Doc(name, P, clock(at))) for rows in (T1, T2) for name, at in rows.items() if name != J0
    ]
    with pytest.raises(Torn, match="T1"):
        task_of(counter_example()).ledger.check(shown)


def read_some(task: Task) -> None:
    """Take what there is into the open transaction, and judge it whenever it could be committed."""
    for _ in range(12):
        task.request(chance(0))
        task.advance(chance(0))
        task.answer(chance(0))


def test_89_a_session_that_is_shown_journals_at_unrelated_paces_tears_them() -> None:
    world = counter_example()
    task = task_of(world)
    empty = {name: state for revision, name, state in world.history["a"] if revision <= 3}
    task.session.learn("a", world.revision, empty)
    task.session.learn("a", world.revision, {J1: world.journals[J1].state})
    with pytest.raises(Torn, match="T2"):  # by what it was told, J2 has nothing of it
        read_some(task)


def test_89_cut_by_revision_the_same_writes_are_never_torn() -> None:
    world = counter_example()
    for through in range(world.revision + 1):
        task = task_of(world)
        task.learn_through(through)
        read_some(task)
        task.drain(chance(0))
        assert len(task.ledger.taken(0)) == 4


# ------------------------------------------------------------------------------- unrelated paces


def test_90_unrelated_paces_tear_transactions_and_do_nothing_worse() -> None:
    found: list[Violation] = []
    for seed in range(120):
        what = schedule(seed)
        setting = replace(what.setting, paces=True)
        if violation := failure(replace(what, setting=setting)):
            found.append(violation)
    assert any(isinstance(violation, Torn) for violation in found)
    # A commit that is shown late comes behind later ones. Nothing is lost, repeated or made up.
    assert all(isinstance(violation, Torn | Disordered) for violation in found), found
