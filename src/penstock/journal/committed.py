"""PURE: which rows of a journal are committed, by its records alone.

`CommitReader` reads records in order and answers, at each one, with the rows that just became
visible: the rows of an OUTSIDE run at once, the rows of a span when its ACK commits it. Rows of a
span that is open are kept back, rows of a span that was rolled back are forgotten, and duplicates
are passed over, which mostly means that a whole run is taken or left and no row is looked at.
"""

from __future__ import annotations

from msgspec import Struct

from penstock.journal.state import AckRecord, Fragment, Record
from penstock.model.clock import NEVER, Clock, Flag, Producer
from penstock.model.runs import (
    Run,
    RunOutcome,
    advance_run,
    fatal_outcome,
    seen_through,
    sequence_run,
)
from penstock.model.sequence import Position, ProducerState, advance, sequence, sequence_error


class VisibleRows(Struct, frozen=True, kw_only=True, gc=False):
    """Rows of one run of a fragment: those whose clock is above `clock_gt`.

    With `running_max`, also above the clock of every earlier row of the run: it holds repetitions.
    """

    fragment: Fragment
    run: Run
    """Offsets relative to the fragment, as it has them."""
    clock_gt: Clock
    running_max: bool = False
    level: Clock = NEVER
    """A row whose clock is below it comes where this clock would; see `shuffle.order`."""

    @property
    def whole(self) -> bool:
        """Every row of the run is visible: nothing needs to be compared."""
        return not self.running_max and self.run.clock_min > self.clock_gt


class CommitReader:
    """The committed rows of one journal, record by record, from the first one retained."""

    def __init__(self, journal: str) -> None:
        self._journal = journal
        self._states: dict[Producer, ProducerState] = {}
        self._spans: dict[Producer, list[VisibleRows]] = {}

    def read(self, record: Record) -> list[VisibleRows]:
        """Return the rows that `record` makes visible, in order; raises `SequenceError`."""
        if isinstance(record, AckRecord):
            return self._read_ack(record)
        visible: list[VisibleRows] = []
        for run, placed in zip(record.runs, record.runs_at(), strict=True):
            visible += self._read_run(record, run, placed)
        return visible

    def _read_run(self, fragment: Fragment, run: Run, placed: Run) -> list[VisibleRows]:
        state = self._states.get(run.producer, ProducerState())
        outcome = sequence_run(state, placed)
        if fatal := fatal_outcome(outcome):
            at = self._position(placed.first_offset, run.producer)
            raise sequence_error(fatal, state, run.kind, run.clock_min, at)
        if outcome is RunOutcome.NONE:
            return []
        rows = VisibleRows(
            fragment=fragment,
            run=run,
            clock_gt=seen_through(state),
            running_max=not run.increasing,
        )
        # A reader that resumes needs the exact begin of a span; here, any lower bound will do.
        begin = placed.first_offset if outcome is RunOutcome.READ_ROWS else None
        self._states[run.producer] = advance_run(state, outcome, placed, begin)
        if run.kind is Flag.OUTSIDE_TXN:
            return [rows]
        self._spans.setdefault(run.producer, []).append(rows)
        return []

    def _read_ack(self, ack: AckRecord) -> list[VisibleRows]:
        state = self._states.get(ack.producer, ProducerState())
        outcome = sequence(state, Flag.ACK_TXN, ack.clock)
        if outcome.is_fatal:
            at = self._position(ack.begin, ack.producer)
            raise sequence_error(outcome, state, Flag.ACK_TXN, ack.clock, at)
        if outcome.is_duplicate:
            return []
        self._states[ack.producer] = advance(state, outcome, ack.clock, ack.begin)
        span = self._spans.pop(ack.producer, [])
        return span if outcome.is_commit else []

    def _position(self, offset: int, producer: Producer) -> Position:
        return Position(journal=self._journal, binding=0, offset=offset, producer=producer)
