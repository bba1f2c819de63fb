"""Frontiers as bytes, for state logs and the wire, and as JSON, for people.

The binary form is a version, columns, and a checksum:

    "PSF" version | journals rows shards floors | names | ten columns | crc32 of all before it

A column is stored as distances from its least value, each in as few whole bytes as the greatest
needs. Producers of a task commit within hours of each other, so a clock takes five or six bytes,
and columns that are all zero, such as the hints of a resolved checkpoint, take none. The few small
values that stand for "none" would stretch the range; they are kept apart, below the distances.

What was damaged is refused: any change of up to 32 adjacent bits is certain to be found, and what
passes the checksum must still be sound.
"""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise
from typing import Annotated, Final

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.model.clock import Clock
from penstock.model.frontier import Frontier
from penstock.model.frontier_table import Column, InvalidFrontier, Table, column, starts_of

_MAGIC: Final = b"PSF"
_VERSION: Final = 1
_HEADER: Final = struct.Struct(">3sB5I")
_COLUMN: Final = struct.Struct(">qB")
_CHECKSUM: Final = struct.Struct(">I")

NAMES_BYTES_MAX: Final = 1 << 26
"""Limits what compressed names may unfold to: over a hundred thousand names of the longest kind."""

_SHARDS_MAX: Final = 1 << 16

# How many of the smallest values are stored as they are: 0 and 1 of last commits, 0 of hints.
_LAST_COMMIT_APART: Final = 2
_HINT_APART: Final = 1


class CorruptFrontier(PenstockError):
    """An encoded frontier that was damaged, cut off, or made by a version that is not known."""


def encode(frontier: Frontier) -> bytes:
    """The compact binary form."""
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
            _pack(table.last_commit, apart=_LAST_COMMIT_APART),
            _pack(table.hinted_commit, apart=_HINT_APART),
            _pack(_zigzag(table.offset)),
            _pack(column(frontier.flushed_lsn, len(frontier.flushed_lsn))),
            _pack(column((binding for binding, _ in floors), len(floors))),
            _pack(column((floor for _, floor in floors), len(floors))),
        )
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode(data: bytes) -> Frontier:
    """The frontier of a binary form; raises CorruptFrontier if it is not exactly one."""
    if len(data) < _HEADER.size + _CHECKSUM.size or data[:3] != _MAGIC:
        raise CorruptFrontier(f"these {len(data)} bytes are no encoded frontier")
    body = data[: -_CHECKSUM.size]
    if zlib.crc32(body) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
        raise CorruptFrontier("an encoded frontier does not match its checksum")
    _, version, journals, rows, shards, floors, names_size = _HEADER.unpack_from(body)
    if version != _VERSION:
        raise CorruptFrontier(
            f"an encoded frontier is of version {version}, and this is version {_VERSION}",
            fix="run the release that wrote it, or a newer one",
        )
    try:
        return _decode_body(_Reader(body, _HEADER.size), journals, rows, shards, floors, names_size)
    except (InvalidFrontier, zlib.error, ValueError) as error:
        raise CorruptFrontier("an encoded frontier holds what none can", why=str(error)) from error


def _decode_body(
    reader: _Reader, journals: int, rows: int, shards: int, floors: int, names_size: int
) -> Frontier:
    names = _inflate(reader.take(names_size))
    if (
        journals > len(names)
        or rows > max(journals, reader.size)
        or max(shards, floors) > _SHARDS_MAX
    ):
        raise ValueError("more is announced than these bytes can hold")
    keys = tuple(
        zip(_split(names, reader.column(journals)), reader.column(journals).tolist(), strict=True)
    )
    counts = reader.column(journals)
    if ((counts < 0) | (counts > rows)).any() or counts.sum() != rows:
        raise ValueError(f"the producers of all journals are not the {rows} that are stored")
    table = Table(
        keys=keys,
        starts=starts_of(counts),
        bytes_read=_unzigzag(reader.column(journals)),
        bytes_behind=_unzigzag(reader.column(journals)),
        producer=reader.column(rows),
        last_commit=reader.column(rows, apart=_LAST_COMMIT_APART),
        hinted_commit=reader.column(rows, apart=_HINT_APART),
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
    """Takes parts of bytes in turn, and never more than there are."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self.size = len(data)

    def take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise ValueError(f"{size} bytes were announced, and {len(part)} are left")
        self._at += size
        return part

    def column(self, length: int, *, apart: int = 0) -> Column:
        least, width = _COLUMN.unpack(self.take(_COLUMN.size))
        if width > 8:
            raise ValueError(f"a column is {width} bytes wide")
        if not length:
            return np.zeros(0, np.int64)
        stored = np.frombuffer(self.take(length * width), np.uint8).reshape(length, width)
        wide = np.zeros((length, 8), np.uint8)
        wide[:, :width] = stored
        codes = wide.view("<u8").reshape(length)
        distances = codes if not apart else np.maximum(codes, apart) - np.uint64(apart)
        values = (distances + np.uint64(least & (1 << 64) - 1)).astype(np.int64)
        return np.where(codes < apart, codes.astype(np.int64), values) if apart else values

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes follow the last column")


def _pack(values: Column, *, apart: int = 0) -> bytes:
    """A column as its least value, a width, and distances; values below `apart` as they are."""
    if not len(values):
        return _COLUMN.pack(0, 0)
    if apart:
        ranged = values >= apart
        least = int(values[ranged].min()) if ranged.any() else apart
        codes = np.where(ranged, values - least + apart, values).astype(np.uint64)
    else:
        least = int(values.min())
        codes = values.astype(np.uint64) - np.uint64(least & (1 << 64) - 1)
    width = (int(codes.max()).bit_length() + 7) // 8
    stored = np.ascontiguousarray(codes.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width])
    return _COLUMN.pack(least, width) + stored.tobytes()


def _zigzag(values: Column) -> Column:
    """Signs into the lowest bit, so that what is near zero is small."""
    return (values << 1) ^ (values >> 63)


def _unzigzag(codes: Column) -> Column:
    return (codes >> 1) & np.int64((1 << 63) - 1) ^ -(codes & 1)


def _inflate(packed: bytes) -> bytes:
    inflater = zlib.decompressobj()
    names = inflater.decompress(packed, NAMES_BYTES_MAX)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("journal names are cut off, followed by others, or far too long")
    return names


def _split(names: bytes, lengths: Column) -> list[str]:
    if ((lengths < 1) | (lengths > len(names))).any() or lengths.sum() != len(names):
        raise ValueError("journal names do not have the lengths that are stored")
    bounds = starts_of(lengths).tolist()
    return [names[begin:end].decode() for begin, end in pairwise(bounds)]


# JSON. Clocks are text: numbers above 2^53 do not survive most readers of JSON.

_ProducerText = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{12}$")]
_ClockText = Annotated[str, msgspec.Meta(pattern="^(0|[1-9a-f][0-9a-f]{0,15})$")]


class _ProducerJson(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    producer: _ProducerText
    last_commit: _ClockText
    offset: int
    hinted_commit: _ClockText = "0"


class _JournalJson(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    journal: str
    binding: int
    producers: list[_ProducerJson]
    bytes_read_delta: int = 0
    bytes_behind_delta: int = 0


class _FrontierJson(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    version: int
    journals: list[_JournalJson]
    flushed_lsn: list[int] = []
    gap_floors: dict[int, _ClockText] = {}


_JSON_DECODER: Final = msgspec.json.Decoder(_FrontierJson)


def to_json(frontier: Frontier) -> str:
    """The JSON form; what is zero or empty is left out."""
    table = frontier.table
    entries = [
        _ProducerJson(f"{producer:012x}", f"{last_commit:x}", offset, f"{hinted_commit:x}")
        for producer, last_commit, offset, hinted_commit in zip(
            table.producer.tolist(),
            table.last_commit.tolist(),
            table.offset.tolist(),
            table.hinted_commit.tolist(),
            strict=True,
        )
    ]
    journals = [
        _JournalJson(name, binding, entries[begin:end], bytes_read, bytes_behind)
        for (name, binding), (begin, end), bytes_read, bytes_behind in zip(
            table.keys,
            pairwise(table.starts.tolist()),
            table.bytes_read.tolist(),
            table.bytes_behind.tolist(),
            strict=True,
        )
    ]
    floors = {binding: f"{floor:x}" for binding, floor in sorted(frontier.gap_floors.items())}
    value = _FrontierJson(_VERSION, journals, list(frontier.flushed_lsn), floors)
    return msgspec.json.encode(value).decode()


def from_json(text: str) -> Frontier:
    """The frontier of a JSON form; raises CorruptFrontier if it is not exactly one."""
    try:
        return _frontier_of(_JSON_DECODER.decode(text))
    except (InvalidFrontier, ValueError) as error:
        raise CorruptFrontier("this JSON is no frontier", why=str(error)) from error


def _frontier_of(value: _FrontierJson) -> Frontier:
    if value.version != _VERSION:
        raise ValueError(f"it is of version {value.version}, and this is version {_VERSION}")
    journals = value.journals
    entries = [entry for read in journals for entry in read.producers]
    table = Table(
        keys=tuple((read.journal, read.binding) for read in journals),
        starts=starts_of(column((len(read.producers) for read in journals), len(journals))),
        bytes_read=column((read.bytes_read_delta for read in journals), len(journals)),
        bytes_behind=column((read.bytes_behind_delta for read in journals), len(journals)),
        producer=column((int(entry.producer, 16) for entry in entries), len(entries)),
        last_commit=column((int(entry.last_commit, 16) for entry in entries), len(entries)),
        hinted_commit=column((int(entry.hinted_commit, 16) for entry in entries), len(entries)),
        offset=column((entry.offset for entry in entries), len(entries)),
    )
    table.check()
    return Frontier(
        table=table,
        flushed_lsn=tuple(value.flushed_lsn),
        gap_floors={binding: Clock(int(floor, 16)) for binding, floor in value.gap_floors.items()},
    )
