"""Sequence whole runs of rows from their statistics, without reading them.

A fragment's writer records, per producer, each maximal sequence of rows of one kind with no ACK
between them: a **run**. Sequencing a run gives the same state, and keeps the same rows, as
sequencing its rows one by one, so readers plan from metadata. A *clean* run, strictly increasing
and wholly after what was seen, is taken as a whole; only one case needs a look at the rows.
"""

from __future__ import annotations

import enum

from msgspec import Struct
from msgspec.structs import replace

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Flag, Producer
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.model.sequence import Outcome, ProducerState


class Run(Struct, frozen=True, kw_only=True, gc=False):
    """Statistics of consecutive rows of one producer and one kind; never of ACKs.

    Rows of other producers may lie between them, so `rows` is at most the length of the offsets.
    """

    producer: Producer
    kind: Flag
    first_offset: int
    last_offset: int
    rows: int
    clock_min: Clock
    clock_max: Clock
    clock_max_offset: int
    """Offset of the first row with `clock_max`."""
    increasing: bool
    """True if clocks strictly increase from row to row."""

    def __post_init__(self) -> None:
        if self.kind is Flag.ACK_TXN:
            raise ValueError("ACKs are records of their own, not rows of a run")
        if not 1 <= self.rows <= self.last_offset - self.first_offset + 1:
            raise ValueError(
                f"{self.rows} rows do not fit offsets {self.first_offset}..{self.last_offset}"
            )
        if not self.first_offset <= self.clock_max_offset <= self.last_offset:
            raise ValueError(f"clock_max_offset {self.clock_max_offset} lies outside the run")
        if self.clock_min > self.clock_max:
            raise ValueError(f"clock_min {self.clock_min} is above clock_max {self.clock_max}")

    def moved(self, by: int) -> Run:
        """Return the run with its offsets moved by `by` rows."""
        return replace(
            self,
            first_offset=self.first_offset + by,
            last_offset=self.last_offset + by,
            clock_max_offset=self.clock_max_offset + by,
        )


class RunOutcome(enum.Enum):
    """Which rows of a run are new."""

    NONE = "holds nothing new"
    WHOLE = "is clean: every row is new"
    ABOVE = "is new where its clock is above what was seen"
    RUNNING_MAX = "is new where its clock is above what was seen and every row before"
    READ_ROWS = "begins a span at an offset that only its rows show"
    REPLAY_FIRST = Outcome.REPLAY_FIRST.value
    OUTSIDE_WITH_PRECEDING_CONTINUE = Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE.value
    ILLEGAL_CLOCK = Outcome.ILLEGAL_CLOCK.value


_FATAL = {
    RunOutcome.OUTSIDE_WITH_PRECEDING_CONTINUE: Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE,
    RunOutcome.ILLEGAL_CLOCK: Outcome.ILLEGAL_CLOCK,
}


def seen_through(state: ProducerState) -> Clock:
    """Return the clock up to which rows are duplicates; `ABOVE` keeps rows strictly above it."""
    return max(state.last_commit, state.max_continue)


def sequence_run(state: ProducerState, run: Run) -> RunOutcome:
    """Decide the outcome of a run for its producer's state; changes nothing."""
    if run.clock_min <= OBSERVED_FLOOR or run.clock_max > CLOCK_MAX:
        return RunOutcome.ILLEGAL_CLOCK
    if run.kind is Flag.OUTSIDE_TXN and (state.max_continue or state.gapped):
        return RunOutcome.OUTSIDE_WITH_PRECEDING_CONTINUE
    duplicate_through = seen_through(state)
    if run.clock_max <= duplicate_through:
        return RunOutcome.NONE
    if state.gapped:
        return RunOutcome.REPLAY_FIRST
    if run.clock_min > duplicate_through:
        return RunOutcome.WHOLE if run.increasing else RunOutcome.RUNNING_MAX
    if run.kind is Flag.CONTINUE_TXN and state.max_continue == NEVER:
        return RunOutcome.READ_ROWS
    return RunOutcome.ABOVE if run.increasing else RunOutcome.RUNNING_MAX


def fatal_outcome(outcome: RunOutcome) -> Outcome | None:
    """Return the outcome to refuse a run with, at its first offset; None if there is none."""
    return _FATAL.get(outcome)


def advance_run(
    state: ProducerState, outcome: RunOutcome, run: Run, span_begin: int | None = None
) -> ProducerState:
    """Return the state after a run.

    After `READ_ROWS`, `span_begin` is the offset of the first row with a clock above
    `seen_through(state)`.
    """
    if outcome is RunOutcome.NONE:
        return state
    if outcome is RunOutcome.REPLAY_FIRST or outcome in _FATAL:
        raise ValueError(f"there is no state after a run that {outcome.value}")
    if (outcome is RunOutcome.READ_ROWS) != (span_begin is not None):
        raise ValueError("span_begin is given if and only if the outcome is READ_ROWS")
    if run.kind is Flag.OUTSIDE_TXN:
        return ProducerState(last_commit=run.clock_max, offset=-(run.clock_max_offset + 1))
    if state.max_continue != NEVER:
        begin = state.offset
    else:
        begin = run.first_offset if span_begin is None else span_begin
    return ProducerState(last_commit=state.last_commit, max_continue=run.clock_max, offset=begin)
