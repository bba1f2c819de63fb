"""Plans how files are read: what one task reads, and in which order.

A plain file of this machine that is large is cut at ends of lines, outside of quotes, so that
several tasks read it; a Parquet file, between row groups. Everything else is read as a whole. Small
files share a task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow
import pyarrow.parquet

from penstock.connectors.files.cursor import Found
from penstock.connectors.files.formats import FilePart, FileReading, compression_of
from penstock.runtime.connector.common import ConnectorError

SPLIT_BYTES: Final = 32 << 20
"""Bytes that a task reads, about."""

_DENSE: Final = 64
"""How many bytes a compressed one may stand for, when rows are estimated."""

_LEAST: Final = 2
"""Bytes of a row at least: a brace and a line end, or a digit and one."""

_SCAN_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What one task reads, in order."""

    splits: tuple[FilePart, ...]
    rows_max: int
    """More rows than there are, or nearly surely so where files are compressed."""


def plan(reading: FileReading, files: Sequence[Found]) -> list[Group]:
    """Return what tasks read. Blocks: it looks into large files."""
    groups: list[Group] = []
    splits: list[FilePart] = []
    size = rows = 0

    def end() -> None:
        nonlocal size, rows
        if splits:
            groups.append(Group(splits=tuple(splits), rows_max=rows))
            splits.clear()
            size = rows = 0

    for split, split_bytes, split_rows in _all_splits(reading, files):
        if size + split_bytes > SPLIT_BYTES:
            end()
        splits.append(split)
        size += split_bytes
        rows += split_rows
    end()
    return groups


def _all_splits(
    reading: FileReading, files: Iterable[Found]
) -> Iterator[tuple[FilePart, int, int]]:
    """Each part of each file, its bytes, and more rows than it has."""
    for file in files:
        kind = reading.format_of(file.path)
        dense = _DENSE if compression_of(file.path) else 1
        if kind == "parquet":
            yield from _row_groups(reading, file)
        elif dense > 1 or file.size <= SPLIT_BYTES or not reading.place.is_local:
            yield FilePart(file=file), file.size, file.size * dense // _LEAST + 1
        else:
            quote = reading.csv.quote.encode() if kind == "csv" else b""
            yield from _line_ranges(reading, file, quote)


def _row_groups(reading: FileReading, file: Found) -> Iterator[tuple[FilePart, int, int]]:
    with reading.place.open(file.path) as opened:
        try:
            metadata: Any = pyarrow.parquet.ParquetFile(opened).metadata
        except pyarrow.ArrowException as error:
            raise ConnectorError(
                "a Parquet file cannot be read",
                where=reading.place.name(file.path),
                why=str(error).splitlines()[0],
                fix="see whether it is complete, and a Parquet file",
            ) from None
    start = first = size = rows = 0
    for at in range(metadata.num_row_groups):
        group = metadata.row_group(at)
        size += group.total_byte_size
        rows += group.num_rows
        if size > SPLIT_BYTES or at == metadata.num_row_groups - 1:
            yield FilePart(file=file, start=start, end=at + 1, row=first), size, rows + 1
            start, first, size, rows = at + 1, first + rows, 0, 0


def _line_ranges(
    reading: FileReading, file: Found, quote: bytes
) -> Iterator[tuple[FilePart, int, int]]:
    """Parts of a file that end with a line, and the rows before each.

    A line end within quotes ends no line: there is an odd number of quotes before it.
    """
    start = row = at = lines = 0
    quoted = False
    with reading.place.open(file.path) as opened:
        while data := opened.read(_SCAN_BYTES):
            cut = 0
            if at + len(data) - start >= SPLIT_BYTES:
                cut = _last_end(data, quote, quoted=quoted)
            if cut:
                lines += _count(data[:cut], quote, quoted=quoted)
                end = at + cut
                yield FilePart(file=file, start=start, end=end, row=row), end - start, _bound(lines)
                start, row, lines = end, row + lines, 0
                quoted = quoted != (bool(quote) and data[:cut].count(quote) % 2 == 1)
            lines += _count(data[cut:], quote, quoted=quoted)
            quoted = quoted != (bool(quote) and data[cut:].count(quote) % 2 == 1)
            at += len(data)
    if at > start:
        yield FilePart(file=file, start=start, end=None, row=row), at - start, _bound(lines)


def _bound(lines: int) -> int:
    return lines + 2


def _last_end(data: bytes, quote: bytes, *, quoted: bool) -> int:
    """Return the position after the last line end outside of quotes; 0 if there is none."""
    if not quote or quote not in data:
        return 0 if quoted else data.rfind(b"\n") + 1
    at = len(data)
    inside = quoted != (data.count(quote) % 2 == 1)
    for piece in reversed(data.split(quote)):
        if not inside and b"\n" in piece:
            return at - len(piece) + piece.rfind(b"\n") + 1
        at -= len(piece) + len(quote)
        inside = not inside
    return 0


def _count(data: bytes, quote: bytes, *, quoted: bool) -> int:
    """Count the line ends outside of quotes."""
    if not quote or quote not in data:
        return 0 if quoted else data.count(b"\n")
    pieces = data.split(quote)
    return sum(piece.count(b"\n") for piece in pieces[1 if quoted else 0 :: 2])
