"""Frontiers: how far a task has read, per journal and producer, and what it must still wait for.

A **delta** frontier holds what progressed. A **cumulative** one is the reduction of all deltas: a
task persists it, and resumes from it.

The frontier invariant holds for each (journal, binding) of a cumulative frontier:

1. Its entries describe one continuous read, through at least the *cut floor* M, the greatest
   `abs(offset)` among them.
2. Every committing close below M is covered by its producer's `last_commit`, and every span that is
   open at the cut is carried as a positive offset.

So resuming at M loses nothing: what is read again is a duplicate, and open spans are found by
replay. The invariant holds for the empty frontier, and reducing the next delta of a continuous read
keeps it, provided the delta has *every* producer met since the previous one, open ones included.

A **hint** comes from another journal and says: this producer commits here too, at this clock. A
frontier with unresolved hints covers part of some transaction, and must not be committed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Final, NamedTuple, Self

import numpy as np
from msgspec import Struct, structs

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer
from penstock.model.frontier_table import (
    BINDING_MAX,
    InvalidFrontier,
    Table,
    column,
    starts_of,
)
from penstock.model.producer_frontier import OFFSET_MAX, ProducerFrontier

DESCRIBED_MAX: Final = 20


class JournalFrontier(Struct, frozen=True, kw_only=True, gc=False):
    """The producers of one journal as one binding has read it, sorted and unique by producer.

    The byte deltas are the bytes read, and the growth of the distance to the journal's head, since
    the last report. They add up, so a delta must never be reduced twice.
    """

    journal: str
    binding: int = 0
    producers: tuple[ProducerFrontier, ...] = ()
    bytes_read_delta: int = 0
    bytes_behind_delta: int = 0

    @property
    def cut_floor(self) -> int:
        """The offset that the journal was read to, at least; reading resumes there."""
        return max((abs(entry.offset) for entry in self.producers), default=0)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Frontier:
    """A sorted map of (journal, binding) to producer entries. Operations return a new one.

    `of` builds it from values, and iterating gives values back. In between it is columns
    (`frontier_table.py`).
    """

    table: Table
    flushed_lsn: tuple[int, ...] = ()
    """Per shard, how far its log must be read; empty if unknown."""
    gap_floors: Mapping[int, Clock] = field(default_factory=dict)
    """Per binding, the clock below which content may have been removed unread."""
    unresolved_hints: int = field(init=False)
    """Number of entries whose hinted commit is above their last commit. Always exact."""

    def __post_init__(self) -> None:
        if not all(0 <= lsn <= OFFSET_MAX for lsn in self.flushed_lsn):
            raise InvalidFrontier(f"flushed LSNs {self.flushed_lsn} do not all fit 64 bits")
        for binding, floor in self.gap_floors.items():
            if not (0 <= binding <= BINDING_MAX and 0 <= floor <= CLOCK_MAX):
                raise InvalidFrontier(f"binding {binding} cannot have a gap floor of {floor:#x}")
        pending = np.count_nonzero(self.table.hinted_commit > self.table.last_commit)
        object.__setattr__(self, "unresolved_hints", int(pending))

    @classmethod
    def of(
        cls,
        journals: Iterable[JournalFrontier],
        *,
        flushed_lsn: tuple[int, ...] = (),
        gap_floors: Mapping[int, Clock] | None = None,
    ) -> Self:
        """Build from journals. They must be sorted and unique, and so must their producers."""
        return cls(
            table=_table_of(tuple(journals)),
            flushed_lsn=flushed_lsn,
            gap_floors=dict(gap_floors or {}),
        )

    @classmethod
    def gather(cls, reads: Iterable[JournalFrontier]) -> Self:
        """Build a delta from reports in any order; those without producers are left out."""
        return cls.of(
            sorted(
                (
                    structs.replace(read, producers=tuple(sorted(read.producers, key=_by_producer)))
                    for read in reads
                    if read.producers
                ),
                key=lambda read: (read.journal, read.binding),
            )
        )

    # As a value

    def __iter__(self) -> Iterator[JournalFrontier]:
        return self._journals(0, len(self.table.keys))

    def __len__(self) -> int:
        """Number of (journal, binding) pairs, so that an empty frontier is false."""
        return len(self.table.keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frontier):
            return NotImplemented
        return (
            self.flushed_lsn == other.flushed_lsn
            and self.gap_floors == other.gap_floors
            and self.table == other.table
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Frontier of {len(self)} journals, {len(self.table.producer)} producers, "
            f"{self.unresolved_hints} unresolved hints>"
        )

    def find(self, journal: str, binding: int) -> JournalFrontier | None:
        """Return the entries of one (journal, binding), if any."""
        at = int(self.table.find(((journal, binding),))[0])
        return None if at < 0 else next(self._journals(at, at + 1))

    def bytes_behind(self) -> dict[int, int]:
        """The sum of `bytes_behind_delta`, by binding."""
        total: dict[int, int] = {}
        for (_, binding), delta in zip(
            self.table.keys, self.table.bytes_behind.tolist(), strict=True
        ):
            total[binding] = total.get(binding, 0) + delta
        return total

    def _journals(self, begin: int, end: int) -> Iterator[JournalFrontier]:
        """Yield a range of journals. Each column is converted to Python numbers once."""
        table = self.table
        starts = table.starts[begin : end + 1].tolist()
        rows = slice(starts[0], starts[-1])
        entries = (
            ProducerFrontier(
                producer=Producer(producer),
                last_commit=Clock(last_commit),
                hinted_commit=Clock(hinted_commit),
                offset=offset,
            )
            for producer, last_commit, hinted_commit, offset in zip(
                table.producer[rows].tolist(),
                table.last_commit[rows].tolist(),
                table.hinted_commit[rows].tolist(),
                table.offset[rows].tolist(),
                strict=True,
            )
        )
        for (name, binding), (first, last), bytes_read, bytes_behind in zip(
            table.keys[begin:end],
            pairwise(starts),
            table.bytes_read[begin:end].tolist(),
            table.bytes_behind[begin:end].tolist(),
            strict=True,
        ):
            yield JournalFrontier(
                journal=name,
                binding=binding,
                producers=tuple(islice(entries, last - first)),
                bytes_read_delta=bytes_read,
                bytes_behind_delta=bytes_behind,
            )

    # Reduction

    def reduce(self, other: Frontier) -> Frontier:
        """Fold another frontier into this one; neither operand changes.

        Commutative and associative, with the empty frontier as identity. An entry joined with
        itself is unchanged, so a late delta does no harm; byte deltas are summed.
        """
        return Frontier(
            table=self.table.merge(other.table),
            flushed_lsn=_greatest_of_each(self.flushed_lsn, other.flushed_lsn),
            gap_floors=greatest_floors(self.gap_floors, other.gap_floors),
        )

    # Hints

    def resolve_hints(self, other: Frontier) -> Resolved:
        """Advance entries with an unresolved hint by the commits that `other` has read.

        Nothing else of `other` is taken: nothing beyond the hint, which is where this frontier
        ends, and not the offset, because this frontier's cut has not moved.
        """
        table = self.table
        mine, theirs = table.join(other.table)
        last_commit, hint = table.last_commit[mine], table.hinted_commit[mine]
        committed = other.table.last_commit[theirs]
        moved = (hint > last_commit) & (committed > last_commit)
        if not moved.any():
            return Resolved(self, 0, 0)
        rows, hint, committed = mine[moved], hint[moved], committed[moved]
        last_commits, offsets = table.last_commit.copy(), table.offset.copy()
        last_commits[rows] = np.minimum(committed, hint)
        offsets[rows] = -table.greatest(np.abs(table.offset))[table.key_of(rows)]
        return Resolved(
            frontier=replace(self, table=replace(table, last_commit=last_commits, offset=offsets)),
            advanced=len(rows),
            resolved=int(np.count_nonzero(committed >= hint)),
        )

    def project_unresolved_hints(self) -> Frontier:
        """Keep only unresolved hints: nothing that was read, or that logs hold."""
        table = self.table
        waiting = table.take(table.hinted_commit > table.last_commit)
        return Frontier(table=waiting.without_bytes(), gap_floors=self.gap_floors)

    def clear_discharged_hints(self) -> Frontier:
        """Forget hints above the last commit, once a checkpoint was resolved without them.

        A peek may have carried hints that were later pruned instead of resolved.
        """
        table = self.table
        hints = np.where(table.hinted_commit > table.last_commit, 0, table.hinted_commit)
        return replace(self, table=replace(table, hinted_commit=hints))

    def describe_unresolved(self) -> str:
        """Describe the first 20 entries that wait for a hinted commit, one line each."""
        lines = [
            f"journal {read.journal}, binding {read.binding}: producer {entry.producer} "
            f"is at {entry.last_commit:#x}, waiting for the hinted {entry.hinted_commit:#x}"
            for read in replace(self, table=self._first_unresolved())
            for entry in read.producers
        ]
        if self.unresolved_hints > len(lines):
            lines.append(f"and {self.unresolved_hints - len(lines)} more")
        return "\n".join(lines)

    def _first_unresolved(self) -> Table:
        waiting = self.table.hinted_commit > self.table.last_commit
        waiting[np.flatnonzero(waiting)[DESCRIBED_MAX:]] = False
        return self.table.take(waiting)

    # Parts

    def retain_bindings(self, wanted: Callable[[int], bool]) -> Frontier:
        """Keep only the journals and gap floors of the wanted bindings."""
        table = self.table
        keys = np.fromiter((wanted(binding) for _, binding in table.keys), np.bool_, len(self))
        rows = np.repeat(keys, table.counts)
        floors = {binding: floor for binding, floor in self.gap_floors.items() if wanted(binding)}
        return replace(self, table=table.take(rows, keys), gap_floors=floors)

    def without_bytes(self) -> Frontier:
        """Return the same progress without byte deltas, which are reported elsewhere."""
        return replace(self, table=self.table.without_bytes())


class Resolved(NamedTuple):
    """A frontier after `resolve_hints`, and the entries that advanced or reached their hint."""

    frontier: Frontier
    advanced: int
    resolved: int


def _table_of(journals: tuple[JournalFrontier, ...]) -> Table:
    entries = [entry for read in journals for entry in read.producers]
    table = Table(
        keys=tuple((read.journal, read.binding) for read in journals),
        starts=starts_of(column((len(read.producers) for read in journals), len(journals))),
        bytes_read=column((read.bytes_read_delta for read in journals), len(journals)),
        bytes_behind=column((read.bytes_behind_delta for read in journals), len(journals)),
        producer=column((entry.producer for entry in entries), len(entries)),
        last_commit=column((entry.last_commit for entry in entries), len(entries)),
        hinted_commit=column((entry.hinted_commit for entry in entries), len(entries)),
        offset=column((entry.offset for entry in entries), len(entries)),
    )
    table.check()
    return table


def _by_producer(entry: ProducerFrontier) -> Producer:
    return entry.producer


def _greatest_of_each(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    shorter, longer = sorted((a, b), key=len)
    padded = shorter + (0,) * (len(longer) - len(shorter))
    return tuple(map(max, padded, longer))


def greatest_floors(a: Mapping[int, Clock], b: Mapping[int, Clock]) -> dict[int, Clock]:
    """Return the higher gap floor of each binding: floors only rise."""
    return {binding: max(a.get(binding, NEVER), b.get(binding, NEVER)) for binding in (*a, *b)}


EMPTY: Final = Frontier.of(())
