"""Statistics of rows, taken while they are written: enough for readers to plan without them.

**Runs** (`model.runs.Run`): per producer, each maximal stretch of its rows of one kind. A batch of
one producer and increasing clocks, which is what publishers write, costs three passes of numpy.

**Key-hash range**: of all rows, so that a reader of a part of the hashes can skip a fragment. It
is exact for up to `HASHED_ROWS_MAX` rows and the journal's own range above. Hashes are spread
evenly, so n of them cover about 1 - 2/n of the range they lie in: beyond a few hundred rows the
exact range skips no more than the journal's does, and computing it costs as much as writing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import Bug
from penstock.journal.rows import Stamps
from penstock.model import pointer
from penstock.model.clock import Clock, Flag, Producer, kind_of
from penstock.model.columns import Column, Kind
from penstock.model.keys import KeyValue, key_hash, pack_columns
from penstock.model.runs import Run

HASHED_ROWS_MAX: Final = 256
"""Rows whose key hashes are worth computing."""


class Statistics:
    """Runs and key-hash range of the rows added so far, in the order they were added."""

    def __init__(self, root: Column, key: Sequence[str], key_begin: int, key_end: int) -> None:
        self.rows = 0
        self._closed: list[Run] = []
        self._open: dict[int, _Stretch] = {}
        self._key = _KeyColumns(root, key)
        self._journal_range = key_begin, key_end
        self._hashes: tuple[int, int] | None = (0xFFFFFFFF, 0)

    def add(self, rows: pa.RecordBatch) -> None:
        """The next rows. Raises `Bug` for an ACK: those are records, not rows."""
        if not rows.num_rows:
            return
        for stretch in _stretches(Stamps.of(rows), self.rows):
            before = self._open.get(stretch.producer)
            if before is not None and before.kind is stretch.kind:
                before.extend(stretch)
                continue
            if before is not None:
                self._closed.append(before.run())
            self._open[stretch.producer] = stretch
        self.rows += rows.num_rows
        self._hashes = self._widened(rows)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs, by their first offsets, which are relative to the first row."""
        runs = [*self._closed, *(stretch.run() for stretch in self._open.values())]
        return tuple(sorted(runs, key=lambda run: run.first_offset))

    @property
    def runs_count(self) -> int:
        return len(self._closed) + len(self._open)

    @property
    def key_hashes(self) -> tuple[int, int]:
        """A range that holds the key hash of every row."""
        return self._journal_range if self._hashes is None else self._hashes

    def _widened(self, rows: pa.RecordBatch) -> tuple[int, int] | None:
        if self._hashes is None or self.rows > HASHED_ROWS_MAX:
            return None
        hashes = self._key.hashes(rows)
        if hashes is None:
            return None
        low, high = self._hashes
        return min(low, *hashes), max(high, *hashes)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Stretch:
    """A run that may grow."""

    producer: int
    kind: Flag
    first_offset: int
    last_offset: int
    rows: int
    clock_first: int
    clock_last: int
    clock_min: int
    clock_max: int
    clock_max_offset: int
    increasing: bool

    def extend(self, later: _Stretch) -> None:
        self.increasing &= later.increasing and later.clock_first > self.clock_last
        self.last_offset = later.last_offset
        self.rows += later.rows
        self.clock_last = later.clock_last
        self.clock_min = min(self.clock_min, later.clock_min)
        if later.clock_max > self.clock_max:
            self.clock_max = later.clock_max
            self.clock_max_offset = later.clock_max_offset

    def run(self) -> Run:
        return Run(
            producer=Producer(self.producer),
            kind=self.kind,
            first_offset=self.first_offset,
            last_offset=self.last_offset,
            rows=self.rows,
            clock_min=Clock(self.clock_min),
            clock_max=Clock(self.clock_max),
            clock_max_offset=self.clock_max_offset,
            increasing=self.increasing,
        )


def _stretches(stamps: Stamps, begin: int) -> list[_Stretch]:
    """The stretches of a batch whose first row has the offset `begin`."""
    clock, producer, kinds = stamps.clock, stamps.producer, stamps.flags & 3
    offsets: npt.NDArray[np.int64] | None = None
    if (producer != producer[0]).any():  # rows of each producer together, in their order
        offsets = np.argsort(producer, kind="stable")
        clock, producer, kinds = clock[offsets], producer[offsets], kinds[offsets]
    borders = np.flatnonzero((np.diff(producer) != 0) | (np.diff(kinds) != 0)) + 1
    edges = [0, *borders.tolist(), len(clock)]
    return [
        _stretch(clock[first:end], producer[first], kinds[first], first, offsets, begin)
        for first, end in itertools.pairwise(edges)
    ]


def _stretch(
    clock: npt.NDArray[np.int64],
    producer: np.int64,
    flags: np.int16,
    first: int,
    offsets: npt.NDArray[np.int64] | None,
    begin: int,
) -> _Stretch:
    """One stretch; without `offsets`, its rows lie side by side from `first` on."""
    is_a = kind_of(int(flags))
    if is_a is Flag.ACK_TXN:
        raise Bug("an ACK among the rows of a fragment", why="ACKs are records of their own")

    def offset(at: int) -> int:
        return begin + (first + at if offsets is None else int(offsets[first + at]))

    last = len(clock) - 1
    increasing = bool((np.diff(clock) > 0).all())
    highest = last if increasing else int(clock.argmax())
    return _Stretch(
        producer=int(producer),
        kind=is_a,
        first_offset=offset(0),
        last_offset=offset(last),
        rows=len(clock),
        clock_first=int(clock[0]),
        clock_last=int(clock[last]),
        clock_min=int(clock[0] if increasing else clock.min()),
        clock_max=int(clock[highest]),
        clock_max_offset=offset(highest),
        increasing=increasing,
    )


class _KeyColumns:
    """The columns of a key, where they are plain enough to be read without the schema."""

    def __init__(self, root: Column, key: Sequence[str]) -> None:
        paths = [_path(root, pointer.parse(location)) for location in key]
        self._paths = [path for path in paths if path is not None]
        self._known = bool(key) and len(self._paths) == len(paths)

    def hashes(self, rows: pa.RecordBatch) -> list[int] | None:
        """Each row's key hash; None if the columns alone do not determine it."""
        if not self._known:
            return None
        values = [_values(rows, path) for path in self._paths]
        # A NULL is a null, or missing and then the default, which the schema knows.
        if any(None in column for column in values):
            return None
        return [key_hash(packed) for packed in pack_columns(values)]


_Path = tuple[tuple[str, ...], Kind]


def _path(column: Column, tokens: tuple[str, ...]) -> _Path | None:
    names: list[str] = []
    for token in tokens:
        member = next((m for m in column.members if m.name == token), None)
        if member is None or member.column is None:
            return None
        names.append(token)
        column = member.column
    scalar = column.kind in (Kind.BOOLEAN, Kind.LONG, Kind.DECIMAL, Kind.STRING, Kind.JSON)
    return (tuple(names), column.kind) if names and scalar else None


def _values(rows: pa.RecordBatch, path: _Path) -> list[KeyValue]:
    (first, *below), of_kind = path
    array: Any = rows.column(first)
    for name in below:
        array = array.field(name)
    values: list[Any] = array.to_pylist()
    match of_kind:
        case Kind.DECIMAL:
            return [v if v is None else int(v) for v in values]
        case Kind.JSON:  # integers of more digits than a decimal holds
            return [v if v is None else json.loads(v) for v in values]
        case _:
            return values
