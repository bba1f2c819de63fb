"""How far a task has read its journals, producer by producer, and what it must still wait for.

A **delta** frontier is what progressed; a **cumulative** one is the reduction of all deltas, and is
what a task persists and resumes from.

The frontier invariant, for each (journal, binding) of a cumulative frontier:

1. Its entries describe one continuous read, through at least the *cut floor* M, the greatest
   `abs(offset)` among them.
2. Every committing close below M is covered by its producer's `last_commit`, and every span that is
   open at the cut is carried as a positive offset.

So resuming at M loses nothing: what is read again is a duplicate, and open spans are found by
replay. It holds for the empty frontier and is kept by reducing the next delta of a continuous read,
provided the delta has *every* producer that was heard of since the one before, open ones included.

A **hint** is news from another journal: this producer commits here too, at this clock. A frontier
with unresolved hints shows half of some transaction and must not be committed alone.
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
    """The producers of one journal as one binding has read it; sorted and unique by producer.

    The byte deltas say how much was read, and by how much the distance to the journal's head grew,
    since the last report. They add up, so a delta must never be reduced twice.
    """

    journal: str
    binding: int = 0
    producers: tuple[ProducerFrontier, ...] = ()
    bytes_read_delta: int = 0
    bytes_behind_delta: int = 0

    @property
    def cut_floor(self) -> int:
        """The offset through which, at least, the journal was read; reading resumes there."""
        return max((abs(entry.offset) for entry in self.producers), default=0)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Frontier:
    """A sorted map of (journal, binding) to producer entries. A value: operations make another.

    Built by `of` from values, or by a decoder; iterating gives values back. In between, it is
    columns (`frontier_table.py`).
    """

    table: Table
    flushed_lsn: tuple[int, ...] = ()
    """Per shard, how far its log must be read; empty if nothing is known."""
    gap_floors: Mapping[int, Clock] = field(default_factory=dict)
    """Per binding, the clock below which content may have been removed before it was read."""
    unresolved_hints: int = field(init=False)
    """How many entries have a hinted commit above their last commit. Exact, always."""

    def __post_init__(self) -> None:
        if not all(0 <= lsn <= OFFSET_MAX for lsn in self.flushed_lsn):
            raise InvalidFrontier(f"flushed LSNs {self.flushed_lsn} are not all within 64 bits")
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
        """The frontier of journals, which must be sorted and unique, as their producers must."""
        return cls(
            table=_table_of(tuple(journals)),
            flushed_lsn=flushed_lsn,
            gap_floors=dict(gap_floors or {}),
        )

    @classmethod
    def gather(cls, reads: Iterable[JournalFrontier]) -> Self:
        """The delta of what reads have to report, in any order; those with nothing are left out."""
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
        """How many (journal, binding) pairs there are; an empty frontier is false."""
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
        """The entries of one (journal, binding), if there are any."""
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
        """The journals from one to another. Columns become numbers of Python once for all."""
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

        Commutative and associative, with the empty frontier as identity. Entries also join with
        themselves unchanged, so a delta that comes late costs nothing; byte deltas are sums.
        """
        return Frontier(
            table=self.table.merge(other.table),
            flushed_lsn=_greatest_of_each(self.flushed_lsn, other.flushed_lsn),
            gap_floors=greatest_floors(self.gap_floors, other.gap_floors),
        )

    def since(self, base: Frontier) -> Frontier:
        """The least delta that takes `base` to this frontier, which must have come from it."""
        mine, theirs = self.table.join(base.table)
        same = np.ones(len(mine), np.bool_)
        for now, then in (
            (self.table.last_commit, base.table.last_commit),
            (self.table.hinted_commit, base.table.hinted_commit),
            (self.table.offset, base.table.offset),
        ):
            same &= now[mine] == then[theirs]
        changed = np.ones(len(self.table.producer), np.bool_)
        changed[mine[same]] = False

        bytes_read, bytes_behind = self.table.bytes_read.copy(), self.table.bytes_behind.copy()
        places = self.table.find(base.table.keys)
        if (places < 0).any():
            raise ValueError("a frontier that lacks journals of another did not come from it")
        bytes_read[places] -= base.table.bytes_read
        bytes_behind[places] -= base.table.bytes_behind
        is_new = np.ones(len(self), np.bool_)
        is_new[places] = False
        rows_changed = np.zeros(len(self), np.bool_)
        rows_changed[self.table.key_of(np.flatnonzero(changed))] = True
        table = replace(self.table, bytes_read=bytes_read, bytes_behind=bytes_behind)
        keep = is_new | rows_changed | (bytes_read != 0) | (bytes_behind != 0)
        return replace(self, table=table.take(changed, keep))

    # Hints

    def resolve_hints(self, other: Frontier) -> Resolved:
        """Advance entries with an unresolved hint by commits that `other` has read.

        Nothing else of `other` is taken: not beyond the hint, which is where this frontier ends,
        and not its offset, because this frontier's cut has not moved.
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
        """Only what is still to be waited for; nothing that was read, or is to be read in logs."""
        table = self.table
        waiting = table.take(table.hinted_commit > table.last_commit)
        return Frontier(table=waiting.without_bytes(), gap_floors=self.gap_floors)

    def clear_discharged_hints(self) -> Frontier:
        """Forget hints above the last commit: a checkpoint was resolved without them.

        Peeks may have carried hints that were later pruned instead of resolved.
        """
        table = self.table
        hints = np.where(table.hinted_commit > table.last_commit, 0, table.hinted_commit)
        return replace(self, table=replace(table, hinted_commit=hints))

    def describe_unresolved(self) -> str:
        """A line for each entry that waits for a hinted commit, the first 20 of them."""
        lines = [
            f"journal {read.journal}, binding {read.binding}: producer {entry.producer} "
            f"is at {entry.last_commit:#x}, and {entry.hinted_commit:#x} was hinted"
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
        """Only the journals and gap floors of the bindings that are wanted."""
        table = self.table
        keys = np.fromiter((wanted(binding) for _, binding in table.keys), np.bool_, len(self))
        rows = np.repeat(keys, table.counts)
        floors = {binding: floor for binding, floor in self.gap_floors.items() if wanted(binding)}
        return replace(self, table=table.take(rows, keys), gap_floors=floors)

    def without_bytes(self) -> Frontier:
        """The same progress, with byte deltas that were, or will be, reported elsewhere."""
        return replace(self, table=self.table.without_bytes())


class Resolved(NamedTuple):
    """A frontier after `resolve_hints`; what moved, and what of that reached its hint."""

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
    """The higher gap floor of each binding; floors only rise."""
    return {binding: max(a.get(binding, NEVER), b.get(binding, NEVER)) for binding in (*a, *b)}


EMPTY: Final = Frontier.of(())
