"""Which commits are already accounted for, so that no read waits for what it will never meet again.

A hint may name a commit that was read long ago, that a since forgotten producer made, or that was
removed before it could be read. Three authorities decide:

    authority    fed by                                  covers clocks          of
    ledger       promoted checkpoints, and the one       at or below it         commits and hints
                 resumed from; per (journal, binding,
                 producer)
    horizon      the newest promoted commit of the       48 hours behind it     commits and hints
                 binding
    gap floor    reads that found content removed        below it               hints

The ledger is kept per journal, because a commit that is complete in one journal of a cohort may not
be complete in the others: they may be read at another pace.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer, duration
from penstock.model.frontier import EMPTY, Frontier, greatest_floors
from penstock.model.frontier_table import Int64s, Mask, Table, column
from penstock.model.producer_frontier import OBSERVED_FLOOR

STALENESS_HORIZON: Final = duration(48 * 3600)
"""How far a producer may fall behind before it is forgotten, and its hints with it.

Both use one constant, because forgetting a producer makes its hints unresolvable.
"""

GAP_MARGIN: Final = duration(10 * 60)
"""How far writers' clocks may differ where a remaining clock bounds removed content."""


def gap_floor(first_clock: Clock) -> Clock:
    """Return the gap floor of a read that had to begin late, at a document of this clock."""
    return min(Clock(first_clock + GAP_MARGIN), CLOCK_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Everything promoted so far. It only grows."""

    ledger: Frontier
    """The last commit of each entry, without hints, offsets or bytes."""
    newest: Mapping[int, Clock]
    gap_floors: Mapping[int, Clock]

    @classmethod
    def of(cls, checkpoint: Frontier) -> Completed:
        """Start from a checkpoint: all that a task resumes from counts as promoted."""
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
        """Account for gaps that reads found."""
        return replace(self, gap_floors=greatest_floors(self.gap_floors, floors))


def _commits_of(table: Table) -> Frontier:
    committed = table.take(table.last_commit > OBSERVED_FLOOR).without_bytes()
    nothing = np.zeros(len(committed.producer), np.int64)
    return Frontier(table=replace(committed, hinted_commit=nothing, offset=nothing))


class _Authorities(NamedTuple):
    """The authorities for each row of a table: ledger clocks, and masks for a clock column."""

    table: Table
    completed: Completed

    def ledger(self) -> Int64s:
        known = np.zeros(len(self.table.producer), np.int64)
        theirs, mine = self.completed.ledger.table.join(self.table)
        known[mine] = self.completed.ledger.table.last_commit[theirs]
        return known

    def stale(self, clock: Int64s) -> Mask:
        return self._of_binding(self.completed.newest) - clock >= STALENESS_HORIZON

    def below_gap_floor(self, clock: Int64s) -> Mask:
        return clock < self._of_binding(self.completed.gap_floors)

    def _of_binding(self, clocks: Mapping[int, Clock]) -> Int64s:
        bindings = (binding for _, binding in self.table.keys)
        per_key = column((clocks.get(binding, NEVER) for binding in bindings), len(self.table.keys))
        return self.table.spread(per_key)


class Pruned(NamedTuple):
    """A frontier after `prune_hints`, and the number of hints that each authority discharged."""

    frontier: Frontier
    by_ledger: int
    by_horizon: int
    by_gap_floor: int


def prune_hints(frontier: Frontier, completed: Completed) -> Pruned:
    """Clear the unresolved hints that are accounted for, by the first authority that covers them.

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
    """What an unaccounted entry would add."""

    COMMIT = "commit"
    HINT = "hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unaccounted:
    """The first entry of a delta that a pending checkpoint does not commit to."""

    journal: str
    binding: int
    producer: Producer
    progress: Progress
    clock: Clock
    ceiling: Clock


def first_unaccounted(
    pending: Frontier, delta: Frontier, completed: Completed
) -> Unaccounted | None:
    """Return the first entry of `delta` beyond the boundary that `pending` commits to, if any.

    If there is none, folding the delta in only improves offsets and resolves hints: the pending
    checkpoint comes closer to completion and does not grow.
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
