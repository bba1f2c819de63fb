"""A frontier as sorted numpy columns, so that 100,000 producers cost milliseconds.

A frontier is a map (journal, binding, producer) → (last commit, hinted commit, offset). Here it is
four parallel columns, sorted by that key, with one range of rows per (journal, binding). Every
operation is a handful of numpy calls over whole columns, or over the few rows that a small table
shares with a large one; none loops over producers. `frontier.py` says what the columns mean.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.errors import PenstockError
from penstock.model.clock import CLOCK_MAX, Producer
from penstock.model.producer_frontier import OFFSET_MAX

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Key = tuple[str, int]
"""Journal name and binding. Python sorts text by code point, which is the order of its UTF-8."""

BINDING_MAX: Final = (1 << 16) - 1

# A producer has 48 bits: the index into a block of this many journals fits beside it in 64.
_BLOCK: Final = 1 << 15


class InvalidFrontier(PenstockError):
    """Rows that are not a frontier: out of order, repeated, or with values out of range."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """Sorted, unique rows. Columns are read-only once in a table, so tables share them."""

    keys: tuple[Key, ...]
    starts: Int64s
    """The rows of `keys[i]` are `starts[i]:starts[i + 1]`. One longer than `keys`."""
    bytes_read: Int64s
    bytes_behind: Int64s
    producer: Int64s
    last_commit: Int64s
    hinted_commit: Int64s
    offset: Int64s

    def __post_init__(self) -> None:
        for held in self._columns():
            held.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return self.keys == other.keys and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self._columns(), other._columns(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def _columns(self) -> Iterator[Int64s]:
        yield self.starts
        yield self.bytes_read
        yield self.bytes_behind
        yield self.producer
        yield self.last_commit
        yield self.hinted_commit
        yield self.offset

    @property
    def counts(self) -> Int64s:
        """Number of rows of each key."""
        return np.diff(self.starts)

    def spread(self, per_key: Int64s) -> Int64s:
        """Repeat each key's value for each of its rows."""
        return np.repeat(per_key, self.counts)

    def bindings(self) -> Int64s:
        """The binding of each key."""
        return column((binding for _, binding in self.keys), len(self.keys))

    def key_of(self, rows: Int64s) -> Int64s:
        """Return the position of each row's key."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def greatest(self, per_row: Int64s) -> Int64s:
        """Return the greatest value among the rows of each key; zero for a key without rows."""
        found = np.zeros(len(self.keys), np.int64)
        filled = self.counts > 0
        if filled.any():
            found[filled] = np.maximum.reduceat(per_row, self.starts[:-1][filled])
        return found

    # Finding

    def find(self, keys: Sequence[Key]) -> Int64s:
        """Return the position of each of the sorted `keys` in this table, or -1."""
        if keys is self.keys or keys == self.keys:
            return np.arange(len(keys))
        if len(keys) * 16 > len(self.keys):
            position = {key: at for at, key in enumerate(self.keys)}
            return column((position.get(key, -1) for key in keys), len(keys))
        places = ((bisect_left(self.keys, key), key) for key in keys)  # few keys in a large table
        return column(
            (at if self.keys[at : at + 1] == (key,) else -1 for at, key in places), len(keys)
        )

    def locate(self, at_key: Int64s, producer: Int64s) -> tuple[Int64s, Mask]:
        """Return where each wanted row is, or would be inserted, and a mask of those present.

        Wanted rows are given by the position of their key here and by producer, sorted by both.
        """
        at = np.empty(len(producer), np.int64)
        for first in range(0, len(self.keys), _BLOCK):
            end = min(first + _BLOCK, len(self.keys))
            begin_row, end_row = int(self.starts[first]), int(self.starts[end])
            wanted_rows = slice(*np.searchsorted(at_key, (first, end)))
            rows_per_key = np.diff(self.starts[first : end + 1])
            held = np.repeat(np.arange(end - first) << 48, rows_per_key)
            held |= self.producer[begin_row:end_row]
            wanted = (at_key[wanted_rows] - first) << 48 | producer[wanted_rows]
            at[wanted_rows] = np.searchsorted(held, wanted) + begin_row
        found = at < self.starts[at_key + 1]
        found[found] = self.producer[at[found]] == producer[found]
        return at, found

    def join(self, other: Table) -> tuple[Int64s, Int64s]:
        """Return the rows here and in `other` that share journal, binding and producer."""
        at_key = other.spread(self.find(other.keys))
        theirs = np.flatnonzero(at_key >= 0)
        at, found = self.locate(at_key[theirs], other.producer[theirs])
        return at[found], theirs[found]

    # Making others

    def take(self, rows: Mask, keys: Mask | None = None) -> Table:
        """Keep only these rows and keys; by default, the keys that keep a row."""
        kept = _count_set(rows, self.starts)
        if keys is None:
            keys = kept > 0
        return Table(
            keys=tuple(key for key, keep in zip(self.keys, keys.tolist(), strict=True) if keep),
            starts=starts_of(kept[keys]),
            bytes_read=self.bytes_read[keys],
            bytes_behind=self.bytes_behind[keys],
            producer=self.producer[rows],
            last_commit=self.last_commit[rows],
            hinted_commit=self.hinted_commit[rows],
            offset=self.offset[rows],
        )

    def without_bytes(self) -> Table:
        """Return the same rows with byte counts of zero."""
        zeros = np.zeros(len(self.keys), np.int64)
        return replace(self, bytes_read=zeros, bytes_behind=zeros)

    def merge(self, other: Table) -> Table:
        """Return the rows of both, joined where both have one, with bytes summed."""
        if len(other.producer) > len(self.producer):
            return other.merge(self)  # the smaller into the larger
        if not other.keys:
            return self
        base = self._with_keys(other.keys)
        places = base.find(other.keys)
        at_key = other.spread(places)
        at, found = base.locate(at_key, other.producer)

        last_commit, hinted_commit = base.last_commit.copy(), base.hinted_commit.copy()
        offset = base.offset.copy()
        rows = at[found]
        last_commit[rows], hinted_commit[rows], offset[rows] = _join_rows(
            (base.last_commit[rows], base.hinted_commit[rows], base.offset[rows]),
            (other.last_commit[found], other.hinted_commit[found], other.offset[found]),
        )

        new = ~found
        counts = base.counts + np.bincount(at_key[new], minlength=len(base.keys))
        bytes_read, bytes_behind = base.bytes_read.copy(), base.bytes_behind.copy()
        bytes_read[places] += other.bytes_read
        bytes_behind[places] += other.bytes_behind
        insert = _Insertion(at[new], len(offset))
        return Table(
            keys=base.keys,
            starts=starts_of(counts),
            bytes_read=bytes_read,
            bytes_behind=bytes_behind,
            producer=insert(base.producer, other.producer[new]),
            last_commit=insert(last_commit, other.last_commit[new]),
            hinted_commit=insert(hinted_commit, other.hinted_commit[new]),
            offset=insert(offset, other.offset[new]),
        )

    def _with_keys(self, keys: tuple[Key, ...]) -> Table:
        """Return the same rows, with a place for each of the sorted `keys`."""
        absent = self.find(keys) < 0
        if not absent.any():
            return self
        added = [key for key, is_absent in zip(keys, absent.tolist(), strict=True) if is_absent]
        merged = sorted(self.keys + tuple(added))  # two sorted runs: a merge, not a sort
        is_added = set(added)
        held = np.fromiter((key not in is_added for key in merged), np.bool_, len(merged))
        counts, bytes_read, bytes_behind = np.zeros((3, len(merged)), np.int64)
        counts[held] = self.counts
        bytes_read[held] = self.bytes_read
        bytes_behind[held] = self.bytes_behind
        return replace(
            self,
            keys=tuple(merged),
            starts=starts_of(counts),
            bytes_read=bytes_read,
            bytes_behind=bytes_behind,
        )

    # Checking

    def check(self) -> None:
        """Raise InvalidFrontier unless the rows are a frontier."""
        for index, (name, binding) in enumerate(self.keys):
            if not name or not _is_unicode(name):
                raise InvalidFrontier(f"journal {index} of the frontier has no name: {name!a}")
            if not 0 <= binding <= BINDING_MAX:
                raise InvalidFrontier(f"journal {index} ({name}) has binding {binding}")
        for index, (before, after) in enumerate(pairwise(self.keys), start=1):
            if before >= after:
                raise _disorder(
                    f"journal {index} of the frontier ({after[0]}, binding {after[1]})",
                    repeated=before == after,
                )
        for values, least, most in (
            (self.last_commit, 0, CLOCK_MAX),
            (self.hinted_commit, 0, CLOCK_MAX),
            (self.offset, -OFFSET_MAX, OFFSET_MAX),
            (self.producer, 0, (1 << 48) - 1),
        ):
            self._refuse_first((values < least) | (values > most), "has a value out of range")
        self._refuse_first(self.producer & Producer.MULTICAST == 0, "lacks the multicast bit")
        self._check_producer_order()

    def _check_producer_order(self) -> None:
        begins = np.zeros(len(self.producer) + 1, np.bool_)
        begins[self.starts] = True  # the first row of a key follows nothing
        wrong = np.flatnonzero((np.diff(self.producer) <= 0) & ~begins[1:-1])
        if len(wrong):
            row = int(wrong[0]) + 1
            raise _disorder(
                self._name_row(row),
                repeated=bool(self.producer[row] == self.producer[row - 1]),
            )

    def _refuse_first(self, wrong: Mask, why: str) -> None:
        if wrong.any():
            raise InvalidFrontier(f"{self._name_row(int(wrong.argmax()))} {why}")

    def _name_row(self, row: int) -> str:
        at_key = int(self.key_of(np.array([row]))[0])
        name, binding = self.keys[at_key]
        return (
            f"producer {row - int(self.starts[at_key])} of journal {name}, binding {binding} "
            f"({int(self.producer[row]):012x})"
        )


def _is_unicode(name: str) -> bool:
    """True if the name has no lone surrogates, and so has UTF-8 bytes to sort by."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def _disorder(which: str, *, repeated: bool) -> InvalidFrontier:
    return InvalidFrontier(f"{which} is {'a duplicate' if repeated else 'out of order'}")


class _Insertion:
    """Inserts values before given rows, in the same way for each column of a table."""

    __slots__ = ("_held", "_targets")

    def __init__(self, before: Int64s, rows: int) -> None:
        self._targets = before + np.arange(len(before))
        self._held = np.ones(rows + len(before), np.bool_)
        self._held[self._targets] = False

    def __call__(self, values: Int64s, added: Int64s) -> Int64s:
        if not len(added):
            return values
        widened = np.empty(len(self._held), np.int64)
        widened[self._held] = values
        widened[self._targets] = added
        return widened


_Rows = tuple[Int64s, Int64s, Int64s]


def _join_rows(a: _Rows, b: _Rows) -> _Rows:
    """`ProducerFrontier.reduce`, for columns."""
    last_commit = np.maximum(a[0], b[0])
    hinted_commit = np.maximum(a[1], b[1])
    furthest = np.maximum(np.abs(a[2]), np.abs(b[2]))
    stays_open = ((a[2] == furthest) & (a[0] == last_commit)) | (
        (b[2] == furthest) & (b[0] == last_commit)
    )
    return last_commit, hinted_commit, np.where(stays_open, furthest, -furthest)


def column(values: Iterable[int], length: int) -> Int64s:
    """Make a column of `length` 64-bit values."""
    try:
        return np.fromiter(values, np.int64, length)
    except OverflowError as error:
        raise InvalidFrontier("a number in a frontier does not fit 64 bits") from error


def starts_of(counts: Int64s) -> Int64s:
    """Return where each key's rows begin, and where the last ones end, from their counts."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _count_set(rows: Mask, starts: Int64s) -> Int64s:
    """Count the rows that are set for each key."""
    return np.diff(starts_of(rows.astype(np.int64))[starts])
