"""Which commits are accounted for already, so that nothing waits for what will never be read again.

A hint may name a commit that was read long ago, by a producer that was since forgotten, or in
content that was removed before it could be read. Three authorities tell:

    authority    fed by                                  covers clocks          of
    ledger       promoted checkpoints, and the one       at or below it         commits and hints
                 resumed from; per (journal, binding,
                 producer)
    horizon      the newest promoted commit of the       48 hours behind it     commits and hints
                 binding
    gap floor    reads that found content removed        below it               hints

The ledger is kept per journal. A commit that is complete in one journal of a cohort is not for that
reason complete in the others: they may be read at another pace.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer, delta, duration
from penstock.model.frontier import EMPTY, Frontier, greatest_floors
from penstock.model.frontier_table import Column, Mask, Table, column
from penstock.model.producer_frontier import OBSERVED_FLOOR

STALENESS_HORIZON: Final = duration(48 * 3600)
"""How far behind a producer may fall before it is forgotten, and its hints with it.

One constant for both: whatever forgets a producer makes its hints unresolvable.
"""

GAP_MARGIN: Final = duration(10 * 60)
"""How far writers' clocks may differ, when removed content is bounded by a clock that remains."""


def gap_floor(first_clock: Clock) -> Clock:
    """The floor of a read that had to begin late, at a document of this clock."""
    return min(Clock(first_clock + GAP_MARGIN), CLOCK_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What was promoted so far. It only grows."""

    ledger: Frontier
    """The last commit of each entry; no hints, offsets or bytes."""
    newest: Mapping[int, Clock]
    gap_floors: Mapping[int, Clock]

    @classmethod
    def of(cls, checkpoint: Frontier) -> Completed:
        """Everything that a task resumes from counts as promoted."""
        nothing = cls(ledger=EMPTY, newest={}, gap_floors={})
        return nothing.update(checkpoint).raise_floors(checkpoint.gap_floors)

    def update(self, promoted: Frontier) -> Completed:
        """Account for a promoted checkpoint."""
        table = promoted.table
        newest = dict(self.newest)
        for (_, binding), clock in zip(
            table.keys, table.greatest(table.last_commit).tolist(), strict=True
        ):
            newest[binding] = max(newest.get(binding, NEVER), Clock(clock))
        return replace(self, ledger=self.ledger.reduce(_commits_of(table)), newest=newest)

    def raise_floors(self, floors: Mapping[int, Clock]) -> Completed:
        """Account for gaps that reads have found."""
        return replace(self, gap_floors=greatest_floors(self.gap_floors, floors))

    def clock(self, journal: str, binding: int, producer: Producer) -> Clock:
        """The commit through which this producer is accounted for; zero if it is unknown."""
        at_key = self.ledger.table.find(((journal, binding),))
        if at_key[0] < 0:
            return NEVER
        at, found = self.ledger.table.locate(at_key, np.array([producer], np.int64))
        return Clock(int(self.ledger.table.last_commit[at[0]])) if found[0] else NEVER

    def is_stale(self, binding: int, clock: Clock) -> bool:
        """Whether a clock is so far behind that its producer may have been forgotten."""
        return delta(self.newest.get(binding, NEVER), clock) >= STALENESS_HORIZON

    def is_below_gap_floor(self, binding: int, clock: Clock) -> bool:
        """Whether a clock may lie in content that was removed."""
        return clock < self.gap_floors.get(binding, NEVER)


def _commits_of(table: Table) -> Frontier:
    committed = table.take(table.last_commit > OBSERVED_FLOOR).without_bytes()
    nothing = np.zeros(len(committed.producer), np.int64)
    return Frontier(table=replace(committed, hinted_commit=nothing, offset=nothing))


class _Authorities(NamedTuple):
    """What `completed` says of each row of a table; clocks of its ledger, and masks for `clock`."""

    table: Table
    completed: Completed

    def ledger(self) -> Column:
        known = np.zeros(len(self.table.producer), np.int64)
        theirs, mine = self.completed.ledger.table.join(self.table)
        known[mine] = self.completed.ledger.table.last_commit[theirs]
        return known

    def stale(self, clock: Column) -> Mask:
        return self._of_binding(self.completed.newest) - clock >= STALENESS_HORIZON

    def below_gap_floor(self, clock: Column) -> Mask:
        return clock < self._of_binding(self.completed.gap_floors)

    def _of_binding(self, clocks: Mapping[int, Clock]) -> Column:
        bindings = (binding for _, binding in self.table.keys)
        per_key = column((clocks.get(binding, NEVER) for binding in bindings), len(self.table.keys))
        return self.table.spread(per_key)


class Pruned(NamedTuple):
    """A frontier after `prune_hints`, and how many hints each authority discharged."""

    frontier: Frontier
    by_ledger: int
    by_horizon: int
    by_gap_floor: int


def prune_hints(frontier: Frontier, completed: Completed) -> Pruned:
    """Clear the unresolved hints that are accounted for, by the first authority that says so.

    An entry without a commit is dropped with its hint, and a journal with its last entry.
    """
    table = frontier.table
    says = _Authorities(table, completed)
    waiting = table.hinted_commit > table.last_commit
    by_ledger = waiting & (table.hinted_commit <= says.ledger())
    by_horizon = waiting & ~by_ledger & says.stale(table.hinted_commit)
    by_floor = waiting & ~by_ledger & ~by_horizon & says.below_gap_floor(table.hinted_commit)
    cleared = by_ledger | by_horizon | by_floor
    if not cleared.any():
        return Pruned(frontier, 0, 0, 0)
    hints = np.where(cleared, 0, table.hinted_commit)
    dropped = cleared & (table.last_commit == 0)
    emptied = np.zeros(len(frontier), np.bool_)
    emptied[table.key_of(np.flatnonzero(dropped))] = True
    emptied[table.key_of(np.flatnonzero(~dropped))] = False
    return Pruned(
        replace(frontier, table=replace(table, hinted_commit=hints).take(~dropped, ~emptied)),
        by_ledger=int(np.count_nonzero(by_ledger)),
        by_horizon=int(np.count_nonzero(by_horizon)),
        by_gap_floor=int(np.count_nonzero(by_floor)),
    )


class Progress(enum.Enum):
    """What an unaccounted entry brings."""

    COMMIT = "commit"
    HINT = "hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unaccounted:
    """The first thing in a delta that a pending checkpoint does not commit to."""

    journal: str
    binding: int
    producer: Producer
    progress: Progress
    clock: Clock
    ceiling: Clock


def first_unaccounted(
    pending: Frontier, delta: Frontier, completed: Completed
) -> Unaccounted | None:
    """What, if anything, in `delta` goes beyond the boundary that `pending` already commits to.

    With nothing, folding the delta in may only improve offsets and resolve hints: the pending
    checkpoint comes closer and does not grow.
    """
    table = delta.table
    says = _Authorities(table, completed)
    ceiling = says.ledger()
    theirs, mine = pending.table.join(table)
    boundary = np.maximum(pending.table.last_commit[theirs], pending.table.hinted_commit[theirs])
    ceiling[mine] = np.maximum(ceiling[mine], boundary)

    commit = np.where(table.last_commit <= OBSERVED_FLOOR, 0, table.last_commit)
    commits = (commit > ceiling) & ~says.stale(commit)
    hints = (
        (table.hinted_commit > ceiling)
        & ~says.stale(table.hinted_commit)
        & ~says.below_gap_floor(table.hinted_commit)
    )
    beyond = np.flatnonzero(commits | hints)
    if not len(beyond):
        return None
    row = int(beyond[0])
    journal, binding = table.keys[int(table.key_of(beyond[:1])[0])]
    is_commit = bool(commits[row])
    return Unaccounted(
        journal=journal,
        binding=binding,
        producer=Producer(int(table.producer[row])),
        progress=Progress.COMMIT if is_commit else Progress.HINT,
        clock=Clock(int((commit if is_commit else table.hinted_commit)[row])),
        ceiling=Clock(int(ceiling[row])),
    )
