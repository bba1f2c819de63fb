"""PURE: when an open transaction takes more, and when it closes.

Each measure of a transaction has a band: below its minimum the transaction would rather go on, at
its maximum it must not. The rules, in the order of their strength:

- Unresolved hints force extending: closing would show half of a writer's transaction.
- A busy tail forbids closing: one transaction at most is between its commit and its end.
- A full transaction closes even below its minimum age, or it would wait with nothing to wait for.
- A replay takes exactly the hinted extents, and closes once it has them.
- A request to close overrides every minimum; and, as a stop does, it ends extending as soon as
  closing is possible, so that a steady supply of input cannot defer it for ever.
- Past a maximum, the minima of usage do not matter any more: they could never be reached.

Maxima are about open transactions only. Opening one is never gated, or a task that was idle for
longer than a maximum would stay so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.model.clock import Clock, duration

UNBOUNDED: Final = (1 << 63) - 1
"""A maximum that is never reached."""

COMBINER_BYTES_MAX: Final = 30 << 30
"""Bytes that a shard of a materialization may hold before a transaction closes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where a measure may be when a transaction closes. Zero satisfies a minimum of zero."""

    min: int = 0
    max: int = UNBOUNDED

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise ValueError(f"a band from {self.min} to {self.max} holds nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The measures of an open transaction. Ages are durations of clocks."""

    open_age: int
    last_close_age: int
    """Since the last transaction closed; since the session began, if none ever did."""
    combiner_bytes: int
    """Bytes of the fullest shard."""
    read_bytes: int
    read_docs: int
    unresolved_hints: bool = False
    replay: bool = False
    sealed: bool = False
    """Its input is being gathered already, and nothing can be added."""
    tail_done: bool = True
    close_requested: bool = False
    stopping: bool = False

    def __post_init__(self) -> None:
        if self.sealed and self.unresolved_hints:
            raise ValueError("a transaction with unresolved hints must extend, and is never sealed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """If both are allowed, extend while there is something to extend with, and then close."""

    may_extend: bool
    may_close: bool
    ripe: bool
    """It would close, if hints and the tail let it."""
    room: bool
    """No maximum is reached."""
    wake_after: Clock | None
    """When time alone changes the decision; never zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePolicy:
    """The bands of a task."""

    open_age: Band = Band()
    last_close_age: Band = Band()
    combiner_bytes: Band = Band(max=COMBINER_BYTES_MAX)
    read_bytes: Band = Band()
    read_docs: Band = Band()

    @classmethod
    def between(cls, min_txn_s: int, max_txn_s: int) -> ClosePolicy:
        """The policy of a task that gives the shortest and the longest transaction it wants."""
        return cls(open_age=Band(min=duration(min_txn_s), max=duration(max(min_txn_s, max_txn_s))))

    def decide(self, inputs: Inputs) -> Decision:
        """Decide what an open transaction may do now."""
        usage = (
            (inputs.combiner_bytes, self.combiner_bytes),
            (inputs.read_bytes, self.read_bytes),
            (inputs.read_docs, self.read_docs),
        )
        ages = ((inputs.open_age, self.open_age), (inputs.last_close_age, self.last_close_age))
        full = any(measure >= band.max for measure, band in usage)
        enough = all(measure >= band.min for measure, band in usage)
        room = not full and all(age < band.max for age, band in ages)
        ripe = (
            (all(age >= band.min for age, band in ages) and (enough or not room))
            or inputs.close_requested
            or full
            or (inputs.replay and not inputs.unresolved_hints)
        )
        may_close = ripe and not inputs.unresolved_hints and inputs.tail_done
        hurried = (inputs.close_requested or inputs.stopping) and may_close
        return Decision(
            may_extend=inputs.unresolved_hints
            or (not inputs.replay and not inputs.sealed and room and not hurried),
            may_close=may_close,
            ripe=ripe,
            room=room,
            wake_after=min(
                (
                    Clock(bound - age)
                    for age, band in ages
                    for bound in (band.min, band.max)
                    if age < bound < UNBOUNDED
                ),
                default=None,
            ),
        )
