"""Sequencing a run from its statistics equals sequencing its rows."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.model.clock import CLOCK_MAX, Clock, Flag, Producer
from penstock.model.runs import (
    Run,
    RunOutcome,
    advance_run,
    fatal_outcome,
    seen_through,
    sequence_run,
)
from penstock.model.sequence import Outcome, ProducerState, advance, sequence
from support.strategies_frontier import clocks

O, C = Flag.OUTSIDE_TXN, Flag.CONTINUE_TXN  # noqa: E741
P1 = Producer(Producer.MULTICAST | 1)


def run_of(kind: Flag, stamps: list[tuple[int, Clock]]) -> Run:
    """The statistics of rows, each an offset and a clock, as a fragment's writer counts them."""
    only = [clock for _, clock in stamps]
    return Run(
        producer=P1,
        kind=kind,
        first_offset=stamps[0][0],
        last_offset=stamps[-1][0],
        rows=len(stamps),
        clock_min=min(only),
        clock_max=max(only),
        clock_max_offset=next(offset for offset, clock in stamps if clock == max(only)),
        increasing=all(a < b for a, b in pairwise(only)),
    )


def run(kind: Flag, *clock: int) -> Run:
    return run_of(kind, [(8 + i, Clock(c)) for i, c in enumerate(clock)])


def state(last_commit: int, max_continue: int = 0) -> ProducerState:
    return ProducerState(last_commit=Clock(last_commit), max_continue=Clock(max_continue), offset=3)


@pytest.mark.parametrize(
    ("before", "met", "want"),
    [
        pytest.param(state(9), run(C, 7, 9), RunOutcome.NONE, id="committed before"),
        pytest.param(state(2, 9), run(C, 7, 9), RunOutcome.NONE, id="in the open span"),
        pytest.param(state(6), run(C, 7, 9), RunOutcome.WHOLE, id="clean"),
        pytest.param(state(2, 6), run(C, 7, 9), RunOutcome.WHOLE, id="clean, extends"),
        pytest.param(state(6), run(C, 7, 9, 8), RunOutcome.RUNNING_MAX, id="not increasing"),
        pytest.param(state(2, 7), run(C, 7, 9), RunOutcome.ABOVE, id="overlaps the open span"),
        pytest.param(state(2, 7), run(C, 7, 9, 9), RunOutcome.RUNNING_MAX, id="overlaps, mixed"),
        pytest.param(state(7), run(C, 7, 9), RunOutcome.READ_ROWS, id="overlaps a commit"),
        pytest.param(state(9), run(O, 7, 9), RunOutcome.NONE, id="outside: before"),
        pytest.param(state(6), run(O, 7, 9), RunOutcome.WHOLE, id="outside: clean"),
        pytest.param(state(7), run(O, 7, 9), RunOutcome.ABOVE, id="outside: overlaps"),
        pytest.param(state(7), run(O, 7, 9, 8), RunOutcome.RUNNING_MAX, id="outside: mixed"),
        pytest.param(
            state(2, 6), run(O, 1 << 9), RunOutcome.OUTSIDE_WITH_PRECEDING_CONTINUE, id="in a span"
        ),
        pytest.param(state(0), run(O, 1, 7), RunOutcome.ILLEGAL_CLOCK, id="the floor"),
        pytest.param(state(0), run(O, 7, CLOCK_MAX + 1), RunOutcome.ILLEGAL_CLOCK, id="too late"),
        pytest.param(
            replace(state(9), gapped=True), run(C, 7, 9), RunOutcome.NONE, id="gapped: still silent"
        ),
        pytest.param(
            replace(state(7), gapped=True), run(C, 7, 9), RunOutcome.REPLAY_FIRST, id="gapped"
        ),
        pytest.param(
            replace(state(9), gapped=True),
            run(O, 7),
            RunOutcome.OUTSIDE_WITH_PRECEDING_CONTINUE,
            id="gapped: outside",
        ),
    ],
)
def test_run_table(before: ProducerState, met: Run, want: RunOutcome) -> None:
    assert sequence_run(before, met) is want


def closes_at(clock: int, offset: int) -> ProducerState:
    return ProducerState(last_commit=Clock(clock), offset=offset)


@pytest.mark.parametrize(
    ("before", "met", "span_begin", "want"),
    [
        pytest.param(state(6), run(O, 7, 9, 8), None, closes_at(9, -10), id="at its last commit"),
        pytest.param(state(9), run(O, 7, 9), None, state(9), id="nothing new, nothing moves"),
        pytest.param(
            state(6), run(C, 7, 9), None, replace(state(6, 9), offset=8), id="begins a span"
        ),
        pytest.param(state(2, 7), run(C, 7, 9), None, state(2, 9), id="extends the open span"),
        pytest.param(
            state(7), run(C, 7, 9), 9, replace(state(7, 9), offset=9), id="begins where rows say"
        ),
    ],
)
def test_the_state_after_a_run(
    before: ProducerState, met: Run, span_begin: int | None, want: ProducerState
) -> None:
    assert advance_run(before, sequence_run(before, met), met, span_begin) == want


@given(
    st.builds(
        ProducerState,
        last_commit=clocks(),
        max_continue=st.just(Clock(0)) | clocks(),
        offset=st.just(3),
    ),
    st.sampled_from([O, C]),
    st.lists(clocks(least=1), min_size=1, max_size=6),
    st.data(),
)
def test_a_run_is_sequenced_as_its_rows_are(
    before: ProducerState, kind: Flag, stamps: list[Clock], data: st.DataObject
) -> None:
    """Same rows, same state, same refusal; other producers' rows may lie between."""
    gaps = data.draw(st.lists(st.integers(1, 3), min_size=len(stamps), max_size=len(stamps)))
    documents = [(3 + sum(gaps[: i + 1]), clock) for i, clock in enumerate(stamps)]
    met = run_of(kind, documents)

    row_by_row, kept, refused = before, list[int](), set[Outcome]()
    for offset, clock in documents:
        outcome = sequence(row_by_row, kind, clock)
        if outcome.is_fatal:
            refused.add(outcome)
            continue
        row_by_row = advance(row_by_row, outcome, clock, offset)
        if not outcome.is_duplicate:
            kept.append(offset)

    decided = sequence_run(before, met)
    fatal = fatal_outcome(decided)
    assert (fatal in refused) if refused else fatal is None
    if fatal is not None:
        return
    assert rows_kept(decided, before, documents) == kept
    found = kept[0] if decided is RunOutcome.READ_ROWS else None
    assert advance_run(before, decided, met, span_begin=found) == row_by_row


def rows_kept(
    decided: RunOutcome, before: ProducerState, documents: list[tuple[int, Clock]]
) -> list[int]:
    """The filter a scan applies for each outcome."""
    match decided:
        case RunOutcome.NONE:
            return []
        case RunOutcome.WHOLE:
            return [offset for offset, _ in documents]
        case RunOutcome.ABOVE:
            return [offset for offset, clock in documents if clock > seen_through(before)]
        case _:
            return [
                offset
                for i, (offset, clock) in enumerate(documents)
                if clock > max([seen_through(before), *(c for _, c in documents[:i])])
            ]


@pytest.mark.parametrize(
    "outcome", [RunOutcome.REPLAY_FIRST, RunOutcome.ILLEGAL_CLOCK], ids=lambda o: o.name
)
def test_there_is_no_state_after_a_run_that_was_not_sequenced(outcome: RunOutcome) -> None:
    with pytest.raises(ValueError, match="no state after"):
        advance_run(state(0), outcome, run(C, 7))


def test_the_begin_of_a_span_is_given_only_where_it_was_looked_up() -> None:
    with pytest.raises(ValueError, match="if and only if"):
        advance_run(state(7), RunOutcome.READ_ROWS, run(C, 7, 9))
    with pytest.raises(ValueError, match="if and only if"):
        advance_run(state(6), RunOutcome.WHOLE, run(C, 7, 9), span_begin=8)


@pytest.mark.parametrize(
    ("nudge", "why"),
    [
        ({"kind": Flag.ACK_TXN}, "ACKs"),
        ({"rows": 0}, "do not fit"),
        ({"rows": 3}, "do not fit"),
        ({"clock_max_offset": 7}, "outside the run"),
        ({"clock_min": Clock(10)}, "above clock_max"),
    ],
)
def test_statistics_that_cannot_be_are_refused(nudge: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(run(C, 7, 9), **nudge)  # type: ignore[arg-type]
