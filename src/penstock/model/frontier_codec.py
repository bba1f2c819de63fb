"""Frontiers as bytes, for state logs and the wire: a version, columns, and a checksum.

    "PSF" version | journals rows shards floors | names | ten columns | crc32 of all before it

A column is stored as distances from its smallest value, each in as few whole bytes as the largest
needs. The producers of a task commit within hours of each other, so a clock takes five or six
bytes, and a column of zeros, such as the hints of a resolved checkpoint, takes none. The few small
values that stand for "none" would stretch the range, so they are stored as they are, below the
distances.

Damaged bytes are refused: any change of up to 32 adjacent bits fails the checksum, and what passes
the checksum is checked like any other frontier.
"""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise
from typing import Final

import numpy as np

from penstock.errors import PenstockError
from penstock.model.clock import Clock
from penstock.model.frontier import Frontier
from penstock.model.frontier_table import Int64s, InvalidFrontier, Table, column, starts_of

_MAGIC: Final = b"PSF"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(">3sB5I")
_COLUMN: Final = struct.Struct(">qB")
_CHECKSUM: Final = struct.Struct(">I")

NAMES_BYTES_MAX: Final = 1 << 26
"""Limit on decompressed names: room for over a hundred thousand of the longest."""

_SHARDS_MAX: Final = 1 << 16

# The smallest values are stored as they are: 0 and 1 of last commits, 0 of hints.
_LAST_COMMIT_VERBATIM: Final = 2
_HINT_VERBATIM: Final = 1


class CorruptFrontier(PenstockError):
    """An encoded frontier that is damaged, truncated, or of an unknown version."""


def encode(frontier: Frontier) -> bytes:
    """Encode a frontier in the compact binary form."""
    table = frontier.table
    names = [name.encode() for name, _ in table.keys]
    packed_names = zlib.compress(b"".join(names), 1)
    floors = sorted(frontier.gap_floors.items())
    body = b"".join(
        (
            _HEADER.pack(
                _MAGIC,
                _VERSION,
                len(names),
                len(table.producer),
                len(frontier.flushed_lsn),
                len(floors),
                len(packed_names),
            ),
            packed_names,
            _pack(column(map(len, names), len(names))),
            _pack(table.bindings()),
            _pack(table.counts),
            _pack(_zigzag(table.bytes_read)),
            _pack(_zigzag(table.bytes_behind)),
            _pack(table.producer),
            _pack(table.last_commit, verbatim=_LAST_COMMIT_VERBATIM),
            _pack(table.hinted_commit, verbatim=_HINT_VERBATIM),
            _pack(_zigzag(table.offset)),
            _pack(column(frontier.flushed_lsn, len(frontier.flushed_lsn))),
            _pack(column((binding for binding, _ in floors), len(floors))),
            _pack(column((floor for _, floor in floors), len(floors))),
        )
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode(data: bytes) -> Frontier:
    """Decode a frontier; raises CorruptFrontier if the bytes are not exactly one."""
    if len(data) < _HEADER.size + _CHECKSUM.size or data[:3] != _MAGIC:
        raise CorruptFrontier(f"these {len(data)} bytes are not an encoded frontier")
    body = data[: -_CHECKSUM.size]
    if zlib.crc32(body) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
        raise CorruptFrontier("an encoded frontier does not match its checksum")
    _, version, journals, rows, shards, floors, names_size = _HEADER.unpack_from(body)
    if version != _VERSION:
        raise CorruptFrontier(
            f"an encoded frontier has version {version}; this release reads version {_VERSION}",
            fix="run the release that wrote it, or a newer one",
        )
    try:
        return _decode_body(_Reader(body, _HEADER.size), journals, rows, shards, floors, names_size)
    except (InvalidFrontier, zlib.error, ValueError) as error:
        raise CorruptFrontier("an encoded frontier is not valid", why=str(error)) from error


def _decode_body(
    reader: _Reader, journals: int, rows: int, shards: int, floors: int, names_size: int
) -> Frontier:
    names = _inflate(reader.take(names_size))
    if (
        journals > len(names)
        or rows > max(journals, reader.size)
        or max(shards, floors) > _SHARDS_MAX
    ):
        raise ValueError("the header announces more than these bytes can hold")
    keys = tuple(
        zip(_split(names, reader.column(journals)), reader.column(journals).tolist(), strict=True)
    )
    counts = reader.column(journals)
    if ((counts < 0) | (counts > rows)).any() or counts.sum() != rows:
        raise ValueError(f"the producers per journal do not add up to the {rows} stored")
    table = Table(
        keys=keys,
        starts=starts_of(counts),
        bytes_read=_unzigzag(reader.column(journals)),
        bytes_behind=_unzigzag(reader.column(journals)),
        producer=reader.column(rows),
        last_commit=reader.column(rows, verbatim=_LAST_COMMIT_VERBATIM),
        hinted_commit=reader.column(rows, verbatim=_HINT_VERBATIM),
        offset=_unzigzag(reader.column(rows)),
    )
    table.check()
    flushed_lsn = tuple(reader.column(shards).tolist())
    floor_bindings, floor_clocks = reader.column(floors), reader.column(floors)
    reader.finish()
    return Frontier(
        table=table,
        flushed_lsn=flushed_lsn,
        gap_floors=dict(
            zip(floor_bindings.tolist(), map(Clock, floor_clocks.tolist()), strict=True)
        ),
    )


class _Reader:
    """Reads one part after another, and never past the end."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self.size = len(data)

    def take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise ValueError(f"{size} bytes were announced, but {len(part)} are left")
        self._at += size
        return part

    def column(self, length: int, *, verbatim: int = 0) -> Int64s:
        least, width = _COLUMN.unpack(self.take(_COLUMN.size))
        if width > 8:
            raise ValueError(f"a column is {width} bytes wide")
        if not length:
            return np.zeros(0, np.int64)
        stored = np.frombuffer(self.take(length * width), np.uint8).reshape(length, width)
        wide = np.zeros((length, 8), np.uint8)
        wide[:, :width] = stored
        codes = wide.view("<u8").reshape(length)
        distances = codes if not verbatim else np.maximum(codes, verbatim) - np.uint64(verbatim)
        values = (distances + np.uint64(least & (1 << 64) - 1)).astype(np.int64)
        return np.where(codes < verbatim, codes.astype(np.int64), values) if verbatim else values

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes follow the last column")


def _pack(values: Int64s, *, verbatim: int = 0) -> bytes:
    """Encode a column as distances from its smallest value; values below `verbatim` as is."""
    if not len(values):
        return _COLUMN.pack(0, 0)
    if verbatim:
        ranged = values >= verbatim
        least = int(values[ranged].min()) if ranged.any() else verbatim
        codes = np.where(ranged, values - least + verbatim, values).astype(np.uint64)
    else:
        least = int(values.min())
        codes = values.astype(np.uint64) - np.uint64(least & (1 << 64) - 1)
    width = (int(codes.max()).bit_length() + 7) // 8
    stored = np.ascontiguousarray(codes.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width])
    return _COLUMN.pack(least, width) + stored.tobytes()


def _zigzag(values: Int64s) -> Int64s:
    """Move signs into the lowest bit, so that values near zero are small."""
    return (values << 1) ^ (values >> 63)


def _unzigzag(codes: Int64s) -> Int64s:
    return (codes >> 1) & np.int64((1 << 63) - 1) ^ -(codes & 1)


def _inflate(packed: bytes) -> bytes:
    inflater = zlib.decompressobj()
    names = inflater.decompress(packed, NAMES_BYTES_MAX)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("journal names are truncated, have trailing data, or are far too long")
    return names


def _split(names: bytes, lengths: Int64s) -> list[str]:
    if ((lengths < 1) | (lengths > len(names))).any() or lengths.sum() != len(names):
        raise ValueError("journal names do not have the stored lengths")
    bounds = starts_of(lengths).tolist()
    return [names[begin:end].decode() for begin, end in pairwise(bounds)]
