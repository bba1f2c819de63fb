"""Splits, one per task of a scan: visible rows in pieces, cut to a size, and turned into batches.

A piece is a whole fragment, or the visible rows of one run. Fragments that compaction has put side
by side in one object are read as one piece, so an object is opened once and not once per append.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow
from msgspec.structs import replace

from penstock.journal.blobs import BlobStore
from penstock.journal.committed import VisibleRows
from penstock.journal.fragments import BATCH_ROWS, read_fragment, read_visible
from penstock.journal.rows import StampNames, adapt_rows, row_schema, stamp_names
from penstock.journal.state import Blob, Inline
from penstock.model.columns import Column

_pa: Any = pyarrow  # the published stubs lack `concat_batches`

SPLIT_BYTES: Final = 32 << 20
SPLIT_BYTES_MAX: Final = 512 << 20
"""Stored bytes that one task reads: enough to be worth a task, and some seconds of work."""

PIECE_BYTES: Final = 4 << 10
OBJECT_BYTES: Final = 64 << 10
"""The cost of another piece, and of opening an object, in bytes that could be read instead."""


class WholeRows(NamedTuple):
    """All rows of a fragment, or of several that lie side by side in an object.

    How they were sequenced is left out: tasks are sent ten thousand of these.
    """

    at: Blob | Inline
    rows: int
    bytes: int
    schema: str
    levels: tuple[tuple[int, int], ...] = ()
    """Pairs of rows and level (`VisibleRows`), one after the other; empty if no row has a level."""


Piece = WholeRows | VisibleRows


def pieces(visible: Iterable[VisibleRows]) -> Iterator[Piece]:
    """Visible rows, in their order, in as few pieces as they make."""
    last: list[WholeRows] = []
    for _, rows in groupby(visible, key=lambda rows: (rows.fragment.begin, id(rows.fragment))):
        for piece in _of_fragment(tuple(rows)):
            if not isinstance(piece, WholeRows):
                yield from _joined(last)
                last = []
                yield piece
            elif last and _adjoin(last[-1], piece):
                last.append(piece)
            else:
                yield from _joined(last)
                last = [piece]
    yield from _joined(last)


def _of_fragment(rows: tuple[VisibleRows, ...]) -> tuple[Piece, ...]:
    fragment, level = rows[0].fragment, rows[0].level
    if (
        all(part.whole and part.level == level for part in rows)
        and sum(part.run.rows for part in rows) == fragment.rows
    ):
        levels = ((fragment.rows, int(level)),) if level else ()
        return (WholeRows(fragment.at, fragment.rows, fragment.bytes, fragment.schema, levels),)
    return rows


def _joined(side_by_side: Sequence[WholeRows]) -> Iterator[WholeRows]:
    """Neighbours of an object as one piece, if there are any."""
    if len(side_by_side) < 2:
        yield from side_by_side
        return
    levels: tuple[tuple[int, int], ...] = ()
    if any(piece.levels for piece in side_by_side):
        each = (level for piece in side_by_side for level in piece.levels or ((piece.rows, 0),))
        levels = tuple(
            (sum(rows for rows, _ in some), level)
            for level, some in groupby(each, key=lambda one: one[1])
        )
    yield side_by_side[0]._replace(
        rows=sum(piece.rows for piece in side_by_side),
        bytes=sum(piece.bytes for piece in side_by_side),
        levels=levels,
    )


def _adjoin(left: WholeRows, right: WholeRows) -> bool:
    return (
        isinstance(left.at, Blob)
        and right.at == replace(left.at, row=left.at.row + left.rows)
        and left.schema == right.schema
    )


def piece_rows(piece: Piece) -> int:
    """The number of rows of a piece, at most."""
    return piece.rows if isinstance(piece, WholeRows) else piece.run.rows


def piece_bytes(piece: Piece) -> int:
    """Its share of what is stored."""
    if isinstance(piece, WholeRows):
        return piece.bytes
    return piece.fragment.bytes * piece.run.rows // piece.fragment.rows


def _cost_bytes(piece: Piece) -> int:
    """The work of reading a piece, as a number of bytes: of tiny ones, their number counts."""
    opening = OBJECT_BYTES if isinstance(place_of(piece), Blob) else 0
    return piece_bytes(piece) + PIECE_BYTES + opening


def split_bytes(found: Sequence[Piece], cores: int) -> int:
    """The size of splits that gives each core one task, unless they were tiny then, or huge.

    The fewer the tasks, the more of a key's documents meet in one of them, and are combined there
    instead of being exchanged.
    """
    costs = [_cost_bytes(piece) for piece in found]
    share = sum(costs) // cores + max(costs, default=0)  # so that no rest is left to one more
    return min(max(share, SPLIT_BYTES), SPLIT_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Pieces for one task, and the layouts that they were written in, by fingerprint."""

    pieces: tuple[Piece, ...]
    layouts: Mapping[str, Column]


def splits(
    found: Iterable[Piece], layouts: Mapping[str, Column], bytes_max: int = SPLIT_BYTES
) -> tuple[Split, ...]:
    """Pieces cut into splits, none of them empty; one piece is never cut."""
    made: list[Split] = []
    some: list[Piece] = []
    size = 0
    for piece in found:
        cost = _cost_bytes(piece)
        if some and size + cost > bytes_max:
            made.append(_split(some, layouts))
            some, size = [], 0
        some.append(piece)
        size += cost
    if some:
        made.append(_split(some, layouts))
    return tuple(made)


def _split(some: Sequence[Piece], layouts: Mapping[str, Column]) -> Split:
    schemas = {schema_of(piece) for piece in some}
    return Split(pieces=tuple(some), layouts={name: layouts[name] for name in schemas})


def place_of(piece: Piece) -> Blob | Inline:
    """The place of a piece's rows."""
    return piece.at if isinstance(piece, WholeRows) else piece.fragment.at


def schema_of(piece: Piece) -> str:
    """The fingerprint of the schema a piece was written under."""
    return piece.schema if isinstance(piece, WholeRows) else piece.fragment.schema


def read_split(
    blobs: BlobStore,
    split: Split,
    wanted: Column,
    *,
    columns: Sequence[str] | None = None,
    leveled: bool = False,
) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a split in the wanted layout.

    `columns` are top-level columns of `row_schema`, all by default. If they are `leveled`, the
    clock is among them, and a last column has where each row comes (`StampNames.level`).
    """
    names = row_schema(wanted).names if columns is None else list(columns)
    for fingerprint, some in groupby(split.pieces, key=schema_of):
        written = split.layouts[fingerprint]
        # Adapting looks at whole documents; what was written as it is wanted can be read in part.
        part = columns if written == wanted else None
        read = (_read(blobs, piece, written, part, leveled=leveled) for piece in some)
        for batch in _gathered(read):
            rows = batch.remove_column(batch.num_columns - 1) if leveled else batch
            if part is None:
                rows = adapt_rows(rows, written, wanted).select(names)
            yield _raised(rows, batch.columns[-1], stamp_names(wanted)) if leveled else rows


def _read(
    blobs: BlobStore,
    piece: Piece,
    written: Column,
    columns: Sequence[str] | None,
    *,
    leveled: bool,
) -> Iterator[pyarrow.RecordBatch]:
    if isinstance(piece, WholeRows):
        batches = read_fragment(blobs, piece, written, columns=columns)
    else:
        batches = read_visible(blobs, piece, written, columns=columns)
    return _with_levels(piece, batches) if leveled else batches


def _with_levels(
    piece: Piece, batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    """The same rows, with the level of each as a last column."""
    levels = piece.levels if isinstance(piece, WholeRows) else ((piece.run.rows, int(piece.level)),)
    counts, values = zip(*levels or ((piece_rows(piece), 0),), strict=True)
    of_rows = np.repeat(np.array(values, np.int64), counts)
    row = 0
    for batch in batches:  # of a run that is shown in part these are fewer, and all of one level
        some = _pa.array(of_rows[row : row + batch.num_rows])
        yield batch.append_column("level", some)
        row += batch.num_rows


def _raised(
    rows: pyarrow.RecordBatch, levels: pyarrow.Array[Any], names: StampNames
) -> pyarrow.RecordBatch:
    """Rows with where each comes: at its clock, or at its level if that is later."""
    clocks = rows.column(names.clock).to_numpy()
    return rows.append_column(names.level, _pa.array(np.maximum(clocks, levels.to_numpy())))


def _gathered(
    pieces: Iterable[Iterator[pyarrow.RecordBatch]],
) -> Iterator[pyarrow.RecordBatch]:
    """Batches of some size, in order: whatever is done with one costs as much if it is tiny."""
    some: list[pyarrow.RecordBatch] = []
    rows = 0
    for batch in chain.from_iterable(pieces):
        if rows + batch.num_rows > BATCH_ROWS:
            yield from _together(some)
            some, rows = [], 0
        some.append(batch)
        rows += batch.num_rows
    yield from _together(some)


def _together(some: list[pyarrow.RecordBatch]) -> list[pyarrow.RecordBatch]:
    return [_pa.concat_batches(some)] if len(some) > 1 else some
