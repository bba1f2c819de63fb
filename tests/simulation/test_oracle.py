"""The judge is judged first: the oracle by the table of sequencing, the ledger by each offence."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from penstock.model.clock import Clock, Flag, Producer
from penstock.model.runs import RunOutcome, advance_run, seen_through, sequence_run
from penstock.model.sequence import Outcome, ProducerState, advance, sequence
from support.shuffle_oracle import (
    Contradiction,
    Doc,
    Ledger,
    Sequencer,
    Stamp,
    Torn,
    Violation,
    Written,
    contradiction,
)
from support.simulated_writers import Writers
from support.simulation import Habits, World, create_journal, runs_of

P1 = Producer(Producer.MULTICAST | 1)
P2 = Producer(Producer.MULTICAST | 2)

KINDS = {"C": Flag.CONTINUE_TXN, "A": Flag.ACK_TXN, "O": Flag.OUTSIDE_TXN}


def stamps(text: str) -> list[Stamp]:
    """`C10 A20`: the rows and ACKs of one producer."""
    return [Stamp(P1, KINDS[word[0]], Clock(int(word[1:]))) for word in text.split()]


def read(text: str) -> list[int]:
    sequencer = Sequencer()
    return [clock for at, stamp in enumerate(stamps(text)) for clock in sequencer.read(at, stamp)]


@pytest.mark.parametrize(
    ("journal", "committed"),
    [
        pytest.param("C10 C20 C15 C20 A20 O30 O30 A20", [10, 20, 30], id="repetitions"),
        pytest.param("C10 A20 C40 C50 A20 C60 A70 A70", [10, 60], id="rolled back, then committed"),
        pytest.param("C10 A20 C30 A40 C80 A20", [10, 30], id="rolled back behind the last commit"),
        pytest.param("C10 C20", [], id="open"),
        pytest.param("A10 A20 C30 A30", [30], id="empty spans"),
    ],
)
def test_the_oracle_knows_what_is_committed(journal: str, committed: list[int]) -> None:
    assert read(journal) == committed


@pytest.mark.parametrize("journal", ["O5 C15 O20", "O5 C20 A15"])
def test_the_oracle_knows_a_contradiction(journal: str) -> None:
    with pytest.raises(Contradiction):
        read(journal)
    assert contradiction(enumerate(stamps(journal)))
    assert not contradiction(enumerate(stamps(journal)[:-1]))


# -------------------------------------------------------------------------------------- journals


def journals_of(seed: int) -> list[list[Stamp]]:
    """The journals of a world in which writers did as they liked."""
    rng = Random(seed)
    world = World({"a": ["a/pivot=00", "a/pivot=80"]}, Habits(repeat=0.5, interleave=0.4))
    for name in list(world.collection_of):
        create_journal(world, name)
    writers = Writers(world)
    actions = (
        writers.write,
        writers.write_outside,
        writers.repeat,
        writers.close,
        writers.acknowledge,
        writers.recover,
        writers.crash,
        writers.roll_back,
    )
    for _ in range(30):
        rng.choice(actions)(rng)
    assert not any(journal.contradiction for journal in world.journals.values())
    return [journal.stamps for journal in world.journals.values()]


def by_model(
    journal: Sequence[Stamp], states: dict[Producer, ProducerState]
) -> list[tuple[Producer, Clock]]:
    """Rows that `model.sequence` lets be committed, in that order; states are moved on."""
    pending: dict[Producer, list[Clock]] = {}
    committed = []
    for at, stamp in enumerate(journal):
        state = states.get(stamp.producer, ProducerState())
        outcome = sequence(state, stamp.kind, stamp.clock)
        states[stamp.producer] = advance(state, outcome, stamp.clock, at)
        if outcome is Outcome.OUTSIDE_COMMIT:
            committed.append((stamp.producer, stamp.clock))
        elif stamp.kind is Flag.CONTINUE_TXN and not outcome.is_duplicate:
            pending.setdefault(stamp.producer, []).append(stamp.clock)
        elif outcome.is_commit:
            committed += [(stamp.producer, clock) for clock in pending.pop(stamp.producer, [])]
        elif outcome.is_rollback:
            del pending[stamp.producer]
    return committed


def test_what_the_oracle_commits_is_what_the_model_commits() -> None:
    for seed in range(100):
        for journal in journals_of(seed):
            sequencer = Sequencer()
            assert by_model(journal, {}) == [
                (stamp.producer, clock)
                for at, stamp in enumerate(journal)
                for clock in sequencer.read(at, stamp)
            ]


def test_reading_again_commits_nothing_twice_and_ends_where_it_did() -> None:
    """Against the final states, from any place that no span reaches over."""
    tried = 0
    for seed in range(60):
        for journal in journals_of(seed):
            states: dict[Producer, ProducerState] = {}
            boundaries = [0]
            for at, stamp in enumerate(journal):
                move(stamp, states)
                if not any(state.max_continue for state in states.values()):
                    boundaries.append(at + 1)
            resumed = {p: ProducerState(last_commit=s.last_commit) for p, s in states.items()}
            for boundary in boundaries:
                again = dict(resumed)
                assert by_model(journal[boundary:], again) == []
                assert {p: (s.last_commit, s.max_continue) for p, s in again.items()} == {
                    p: (s.last_commit, s.max_continue) for p, s in states.items()
                }
                tried += 1
    assert tried > 200


def move(stamp: Stamp, states: dict[Producer, ProducerState]) -> None:
    """Move the state of one producer on by one row."""
    state = states.get(stamp.producer, ProducerState())
    states[stamp.producer] = advance(
        state, sequence(state, stamp.kind, stamp.clock), stamp.clock, 0
    )


def test_the_runs_of_a_simulated_fragment_say_what_its_rows_say() -> None:
    for seed in range(100):
        for journal in journals_of(seed):
            rows = [stamp for stamp in journal if stamp.kind is not Flag.ACK_TXN]
            runs: dict[Producer, ProducerState] = {}
            for run in runs_of(rows):
                state = runs.get(run.producer, ProducerState())
                outcome = sequence_run(state, run)
                if outcome is RunOutcome.OUTSIDE_WITH_PRECEDING_CONTINUE:
                    break  # without ACKs, spans do not end
                begin = None
                if outcome is RunOutcome.READ_ROWS:
                    begin = next(
                        at
                        for at, stamp in enumerate(rows)
                        if stamp.producer == run.producer and stamp.clock > seen_through(state)
                    )
                runs[run.producer] = advance_run(state, outcome, run, begin)
            else:
                states: dict[Producer, ProducerState] = {}
                for row in rows:
                    move(row, states)
                assert {p: (s.last_commit, s.max_continue) for p, s in states.items()} == {
                    p: (s.last_commit, s.max_continue) for p, s in runs.items()
                }


# ---------------------------------------------------------------------------------------- ledger

ONE, TWO = Doc("a/x", P1, Clock(10)), Doc("b/x", P1, Clock(11))
LATER = Doc("a/x", P1, Clock(20))
OPEN = Doc("a/x", P2, Clock(5))
SOON = Doc("a/x", P2, Clock(15))
PAIR = Written(name="T", docs=(ONE, TWO), clock=Clock(12), commits=(), whole=True)
REVISIONS = {ONE: 3, TWO: 3, LATER: 5, SOON: 6}


def ledger(*, lost: Sequence[Doc] = (), excused: bool = False) -> Ledger:
    """Of a task that reads `a` with binding 0 and `b` with 1, in a cohort, and `b` with 2."""
    return Ledger(
        cohorts={0: (0, 1), 1: (2,)},
        reads=lambda binding, journal: journal.startswith("abb"[binding]),
        committed=REVISIONS,
        written={ONE: PAIR, TWO: PAIR},
        revision=lambda _cohort, doc: REVISIONS[doc],
        lost=lost.__contains__,
        excused=lambda _cohort, _written: excused,
    )


@pytest.mark.parametrize(
    ("docs", "offence"),
    [
        pytest.param([(0, OPEN)], "not committed", id="a document of an open span"),
        pytest.param([(0, ONE), (1, TWO), (0, ONE)], "comes after", id="a document twice"),
        pytest.param([(0, LATER), (0, ONE), (1, TWO)], "comes after", id="clocks that go back"),
        pytest.param([(0, ONE), (1, ONE)], "none of its journals", id="another's document"),
        pytest.param([(0, ONE)], "torn", id="half of a transaction"),
        pytest.param([(1, TWO)], "torn", id="the other half"),
        pytest.param(
            [(0, ONE), (1, TWO), (0, SOON), (0, LATER)], "comes after", id="by clock alone"
        ),
    ],
)
def test_the_ledger_refuses(docs: list[tuple[int, Doc]], offence: str) -> None:
    with pytest.raises(Violation, match=offence):
        ledger().check(docs)


def test_the_ledger_remembers_what_was_committed() -> None:
    book = ledger()
    both = [(0, ONE), (1, TWO)]
    book.check(both)
    assert set(book.missing()) == {(0, ONE), (0, LATER), (0, SOON), (1, TWO), (2, TWO)}
    book.commit(both)
    assert set(book.missing()) == {(0, LATER), (0, SOON), (2, TWO)}
    with pytest.raises(Violation, match="twice"):
        book.check(both)
    book.check([(0, LATER)])


def test_a_cohort_does_not_wait_for_another() -> None:
    book = ledger()
    book.check([(2, TWO)])
    book.check([(0, ONE), (1, TWO)])


def test_what_was_removed_is_not_missed() -> None:
    ledger(lost=[TWO]).check([(0, ONE)])
    ledger(excused=True).check([(0, ONE)])
    with pytest.raises(Torn):
        ledger(lost=[LATER]).check([(0, ONE)])
