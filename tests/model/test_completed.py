"""What is accounted for: three authorities, and the boundary of a pending checkpoint."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer, duration
from penstock.model.completed import (
    GAP_MARGIN,
    STALENESS_HORIZON,
    Completed,
    Progress,
    Unaccounted,
    first_unaccounted,
    gap_floor,
    prune_hints,
)
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier
from support.strategies_frontier import clocks, frontiers

P1, P2, P3, P5, P9 = (Producer(Producer.MULTICAST | n) for n in (1, 2, 3, 5, 9))
NOTHING = Completed.of(EMPTY)


def entry(producer: Producer, last_commit: int, hint: int, offset: int) -> ProducerFrontier:
    return ProducerFrontier(
        producer=producer,
        last_commit=Clock(last_commit),
        hinted_commit=Clock(hint),
        offset=offset,
    )


def frontier(journal: str, binding: int, *entries: ProducerFrontier) -> Frontier:
    return Frontier.of([JournalFrontier(journal=journal, binding=binding, producers=entries)])


def test_the_horizon_is_48_hours_and_the_margin_10_minutes() -> None:
    assert duration(172_800) == STALENESS_HORIZON
    assert duration(600) == GAP_MARGIN
    assert gap_floor(duration(1000)) == duration(1600)
    assert gap_floor(CLOCK_MAX) == CLOCK_MAX


def test_the_ledger_clears_hints_of_its_own_journal_only() -> None:
    completed = NOTHING.update(frontier("C", 1, entry(P2, 80, 0, -9)))
    waiting = [entry(P1, 0, 60, 0), entry(P2, 40, 60, -2), entry(P3, 0, 60, 0)]
    pruned = prune_hints(frontier("C", 1, *waiting), completed)
    assert pruned.frontier == frontier(
        "C", 1, entry(P1, 0, 60, 0), entry(P2, 40, 0, -2), entry(P3, 0, 60, 0)
    )
    assert (pruned.by_ledger, pruned.by_horizon, pruned.by_gap_floor) == (1, 0, 0)
    for elsewhere in (frontier("C", 0, *waiting), frontier("D", 1, *waiting)):
        assert prune_hints(elsewhere, completed).frontier == elsewhere


def test_the_ledger_covers_the_clock_it_names_and_none_above() -> None:
    completed = NOTHING.update(frontier("C", 0, entry(P1, 80, 0, -9)))
    assert prune_hints(frontier("C", 0, entry(P1, 0, 80, 0)), completed).by_ledger == 1
    assert prune_hints(frontier("C", 0, entry(P1, 0, 81, 0)), completed).by_ledger == 0


def test_hints_48_hours_behind_are_stale() -> None:
    completed = NOTHING.update(frontier("A", 0, entry(P9, duration(300_000), 0, -1)))
    waiting = frontier(
        "C", 0, entry(P1, 0, duration(127_200), 0), entry(P2, 0, duration(127_201), 0)
    )
    pruned = prune_hints(waiting, completed)
    assert pruned.frontier == frontier("C", 0, entry(P2, 0, duration(127_201), 0))
    assert (pruned.by_ledger, pruned.by_horizon, pruned.by_gap_floor) == (0, 1, 0)
    other_binding = frontier("C", 1, entry(P1, 0, duration(127_200), 0))
    assert prune_hints(other_binding, completed).frontier == other_binding


def test_hints_below_a_gap_floor_are_cleared() -> None:
    completed = NOTHING.raise_floors({0: duration(500_000)})
    waiting = frontier(
        "C", 0, entry(P1, 5, duration(499_999), -1), entry(P2, 5, duration(500_000), -1)
    )
    pruned = prune_hints(waiting, completed)
    assert pruned.frontier == frontier(
        "C", 0, entry(P1, 5, 0, -1), entry(P2, 5, duration(500_000), -1)
    )
    assert (pruned.by_ledger, pruned.by_horizon, pruned.by_gap_floor) == (0, 0, 1)


def test_a_journal_goes_with_its_last_entry() -> None:
    completed = NOTHING.raise_floors({0: Clock(100)})
    waiting = frontier("C", 0, entry(P1, 0, 60, 0), entry(P2, 0, 70, 0))
    assert prune_hints(waiting, completed).frontier == EMPTY


def test_everything_resumed_from_is_completed() -> None:
    checkpoint = Frontier.of(
        [
            JournalFrontier(
                journal="A",
                producers=(entry(P1, 500, 0, -1), entry(P2, OBSERVED_FLOOR, 0, 4)),
            )
        ],
        gap_floors={0: Clock(7)},
    )
    completed = Completed.of(checkpoint)
    assert ledger_clock(completed, "A", 0, P1) == 500
    assert ledger_clock(completed, "A", 0, P2) == NEVER, "an open span is no commit"
    assert ledger_clock(completed, "A", 0, P3) == NEVER
    assert ledger_clock(completed, "B", 0, P1) == NEVER
    assert completed.newest == {0: 500}
    assert completed.gap_floors == {0: 7}


def test_what_was_completed_in_one_journal_is_still_awaited_in_another() -> None:
    """A recovery would otherwise stop short of the transaction it has to replay."""
    checkpoint = Frontier.of(
        [
            JournalFrontier(journal="A", producers=(entry(P1, 500, 0, -5),)),
            JournalFrontier(journal="B", producers=(entry(P1, 100, 300, -2),)),
        ]
    )
    pruned = prune_hints(checkpoint, Completed.of(checkpoint))
    assert pruned.frontier == checkpoint


@st.composite
def completeds(draw: st.DrawFn) -> Completed:
    """Anything promoted and any floors, with a newest commit that may be far ahead."""
    completed = Completed.of(draw(frontiers())).raise_floors(
        draw(st.dictionaries(st.integers(0, 1), clocks()))
    )
    if draw(st.booleans()):
        ahead = Clock(STALENESS_HORIZON + draw(clocks(least=1)))
        completed = completed.update(frontier("acme/z", 0, entry(P9, ahead, 0, -1)))
    return completed


def ledger_clock(completed: Completed, journal: str, binding: int, producer: Producer) -> Clock:
    known = completed.ledger.find(journal, binding)
    found = (
        one.last_commit for one in (known.producers if known else ()) if one.producer == producer
    )
    return next(found, NEVER)


def is_stale(completed: Completed, binding: int, clock: Clock) -> bool:
    return completed.newest.get(binding, NEVER) - clock >= STALENESS_HORIZON


def is_below_gap_floor(completed: Completed, binding: int, clock: Clock) -> bool:
    return clock < completed.gap_floors.get(binding, NEVER)


def covered(completed: Completed, journal: str, binding: int, one: ProducerFrontier) -> str:
    """Which authority accounts for a hint, asked one entry at a time."""
    if one.hinted_commit <= ledger_clock(completed, journal, binding, one.producer):
        return "ledger"
    if is_stale(completed, binding, one.hinted_commit):
        return "horizon"
    if is_below_gap_floor(completed, binding, one.hinted_commit):
        return "gap floor"
    return ""


@given(frontiers(), completeds())
def test_pruning_asks_each_authority_in_turn(waiting: Frontier, completed: Completed) -> None:
    pruned = prune_hints(waiting, completed)
    reasons = [
        covered(completed, read.journal, read.binding, one)
        for read in waiting
        for one in read.producers
        if one.is_unresolved
    ]
    assert pruned.by_ledger == reasons.count("ledger")
    assert pruned.by_horizon == reasons.count("horizon")
    assert pruned.by_gap_floor == reasons.count("gap floor")
    assert pruned.frontier.unresolved_hints == reasons.count("")
    assert pruned.frontier.unresolved_hints == sum(
        one.is_unresolved for read in pruned.frontier for one in read.producers
    )
    again = prune_hints(pruned.frontier, completed)
    assert again.frontier == pruned.frontier
    kept = [one for read in pruned.frontier for one in read.producers if not one.is_unresolved]
    assert len(kept) == sum(
        (not one.is_unresolved)
        or (one.last_commit > 0 and covered(completed, read.journal, read.binding, one) != "")
        for read in waiting
        for one in read.producers
    )


PENDING = frontier("A", 0, entry(P1, 50, 200, -100), entry(P5, 300, 0, -100))


def beyond(producer: Producer, progress: Progress, clock: int, ceiling: int) -> Unaccounted:
    return Unaccounted(
        journal="A",
        binding=0,
        producer=producer,
        progress=progress,
        clock=Clock(clock),
        ceiling=Clock(ceiling),
    )


@pytest.mark.parametrize(
    ("delta", "want"),
    [
        pytest.param(entry(P1, 200, 150, -700), None, id="up to the hint"),
        pytest.param(
            entry(P1, 201, 0, -700), beyond(P1, Progress.COMMIT, 201, 200), id="a later commit"
        ),
        pytest.param(
            entry(P1, 200, 201, -700), beyond(P1, Progress.HINT, 201, 200), id="a later hint"
        ),
        pytest.param(
            entry(P9, 5, 0, -1), beyond(P9, Progress.COMMIT, 5, 0), id="an unknown producer"
        ),
        pytest.param(entry(P9, OBSERVED_FLOOR, 0, 7), None, id="an open span is no commit"),
        pytest.param(
            entry(P1, 201, 202, -7), beyond(P1, Progress.COMMIT, 201, 200), id="commit comes first"
        ),
    ],
)
def test_what_goes_beyond_a_pending_checkpoint(
    delta: ProducerFrontier, want: Unaccounted | None
) -> None:
    assert first_unaccounted(PENDING, frontier("A", 0, delta), NOTHING) == want


def test_an_empty_delta_is_accounted_for() -> None:
    assert first_unaccounted(PENDING, EMPTY, NOTHING) is None
    assert first_unaccounted(EMPTY, EMPTY, NOTHING) is None


def test_a_floor_excuses_hints_and_not_commits() -> None:
    completed = NOTHING.raise_floors({0: Clock(1000)})
    assert first_unaccounted(PENDING, frontier("A", 0, entry(P9, 0, 999, 0)), completed) is None
    assert first_unaccounted(PENDING, frontier("A", 0, entry(P9, 999, 0, -1)), completed) == beyond(
        P9, Progress.COMMIT, 999, 0
    )


@given(frontiers(), frontiers(), completeds())
def test_the_first_entry_beyond_the_boundary_is_found(
    pending: Frontier, delta: Frontier, completed: Completed
) -> None:
    assert first_unaccounted(pending, delta, completed) == next(
        each_unaccounted(pending, delta, completed), None
    )


def each_unaccounted(
    pending: Frontier, delta: Frontier, completed: Completed
) -> Iterator[Unaccounted]:
    """The rule of `first_unaccounted`, one entry at a time."""
    for read in delta:
        known = pending.find(read.journal, read.binding)
        boundary = {
            one.producer: max(one.last_commit, one.hinted_commit)
            for one in (known.producers if known else ())
        }
        for one in read.producers:
            ceiling = max(
                ledger_clock(completed, read.journal, read.binding, one.producer),
                boundary.get(one.producer, NEVER),
            )
            commit = NEVER if one.last_commit <= OBSERVED_FLOOR else one.last_commit
            hint = one.hinted_commit
            is_commit = commit > ceiling and not is_stale(completed, read.binding, commit)
            is_hint = (
                hint > ceiling
                and not is_stale(completed, read.binding, hint)
                and not is_below_gap_floor(completed, read.binding, hint)
            )
            if is_commit or is_hint:
                yield Unaccounted(
                    journal=read.journal,
                    binding=read.binding,
                    producer=one.producer,
                    progress=Progress.COMMIT if is_commit else Progress.HINT,
                    clock=commit if is_commit else hint,
                    ceiling=ceiling,
                )
