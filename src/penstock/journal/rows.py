"""The rows of a fragment: the columns of documents, then the writer, time and kind of each row.

The last three columns are a row's **stamp**: `_clock`, `_producer`, `_flags`. Everything else about
a row follows from them and its place: its UUID is made of the stamp, its offset is its record's
`begin` plus its index. Like other hidden columns they yield to members of a document by growing
underscores, so callers ask for their names, or take the last three.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from penstock.journal.committed import VisibleRows
from penstock.journal.evolve import adapt
from penstock.model.clock import Clock, Producer
from penstock.model.columns import Column, Kind, Member
from penstock.native.arrow import to_json
from penstock.native.arrow_types import arrow_schema

_pa: Any = pa  # the published stubs know few of the constructors and kernels used here
_pc: Any = pyarrow.compute

STAMPS: Final = 3
"""The number of columns of a stamp."""

META: Final = "_meta"
UUID: Final = "uuid"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StampNames:
    """The names of the last three columns, and of one that is made when rows are read."""

    clock: str
    producer: str
    flags: str
    level: str
    """The clock, or a later one where what committed the row says so (`VisibleRows.level`)."""


def stamp_names(root: Column) -> StampNames:
    """The names of the stamp in fragments of this layout."""
    taken = {member.name for member in root.members} | {root.nulls, root.extra}
    return StampNames(
        clock=_free("_clock", taken),
        producer=_free("_producer", taken),
        flags=_free("_flags", taken),
        level=_free("_level", taken),
    )


@functools.lru_cache(maxsize=256)
def row_schema(root: Column) -> pa.Schema:
    """The columns of a fragment."""
    names = stamp_names(root)
    fields: list[Any] = [
        *arrow_schema(root),
        pa.field(names.clock, pa.int64()),
        pa.field(names.producer, pa.int64()),
        pa.field(names.flags, pa.int16()),
    ]
    return pa.schema(fields)


def stamp_rows(
    documents: pa.RecordBatch, root: Column, *, producer: Producer, first_clock: Clock, flags: int
) -> pa.RecordBatch:
    """Documents as rows of one producer, with one clock after the other from `first_clock` on."""
    rows = documents.num_rows
    stamp = [
        _pa.array(np.arange(first_clock, first_clock + rows, dtype=np.int64)),
        _pa.array(np.full(rows, int(producer), np.int64)),
        _pa.array(np.full(rows, flags, np.int16)),
    ]
    columns = [documents.column(name) for name in arrow_schema(root).names]
    batch: pa.RecordBatch = _pa.RecordBatch.from_arrays([*columns, *stamp], schema=row_schema(root))
    return batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """The stamps of a batch of rows, as numpy arrays."""

    clock: npt.NDArray[np.int64]
    producer: npt.NDArray[np.int64]
    flags: npt.NDArray[np.int16]

    @classmethod
    def of(cls, rows: pa.RecordBatch) -> Stamps:
        """Read the last three columns; raises ArrowInvalid if one has a NULL."""
        clock, producer, flags = (column.to_numpy() for column in rows.columns[-STAMPS:])
        return cls(clock=clock, producer=producer, flags=flags)


# --------------------------------------------------------------------------------------- reading


def visible_batches(
    rows: VisibleRows, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Filter the rows between a run's first and last offset: those to show, in their order.

    Most runs are shown as they are. Else: the rows of the run's producer, whose clock is above what
    was seen before, and, where the run repeats itself, above every clock before in the run.
    """
    run = rows.run
    alone = run.rows == run.last_offset - run.first_offset + 1
    above = int(rows.clock_gt)
    for batch in batches:
        if alone and rows.whole:
            yield batch
            continue
        stamps = Stamps.of(batch)
        mine = np.ones(batch.num_rows, bool) if alone else stamps.producer == int(run.producer)
        keep = mine & (stamps.clock > above)
        if rows.running_max:
            clocks = np.where(keep, stamps.clock, above)
            highest = np.maximum.accumulate(np.concatenate(([above], clocks)))
            keep &= stamps.clock > highest[:-1]
            above = int(highest[-1])
        if keep.any():
            yield batch if keep.all() else batch.filter(_pa.array(keep))


def adapt_rows(rows: pa.RecordBatch, written: Column, wanted: Column) -> pa.RecordBatch:
    """Rows of one layout in another, stamps and all."""
    if written == wanted:
        return rows
    columns = [*adapt(rows, written, wanted).columns, *rows.columns[-STAMPS:]]
    batch: pa.RecordBatch = _pa.RecordBatch.from_arrays(columns, schema=row_schema(wanted))
    return batch


def to_lines(rows: pa.RecordBatch, root: Column, *, uuid: bool = False) -> list[str]:
    """Each row's document as canonical JSON, on request with its UUID at `/_meta/uuid`."""
    if not uuid:
        return to_json(rows, root)
    meta = _meta_with_uuid(root)
    batch = adapt(rows, root, _with_meta(root, meta, surely=False))
    at = batch.schema.get_field_index(META)
    column: Any = batch.column(at)
    schema = arrow_schema(meta)
    fields = [column.field(i) for i in range(len(schema))]
    text = _pc.binary_join_element_wise('"', uuids(Stamps.of(rows)), '"', "")
    fields[schema.get_field_index(UUID)] = text
    # Without a mask: documents that have no _meta get one, with nothing in it but the UUID.
    filled = _pa.StructArray.from_arrays(fields, fields=list(schema))
    return to_json(batch.set_column(at, META, filled), _with_meta(root, meta, surely=True))


def _meta_with_uuid(root: Column) -> Column:
    """The layout of `_meta` as it is, open, and with any value for a UUID."""
    before = next((m.column for m in root.members if m.name == META), None)
    known = before.members if before is not None and before.kind is Kind.STRUCT else ()
    members = {member.name: member for member in known}
    text = Column(kind=Kind.JSON, nullable=True)
    members[UUID] = Member(name=UUID, column=text, required=False, nullable=True)
    return Column(
        kind=Kind.STRUCT,
        members=tuple(sorted(members.values(), key=lambda m: m.name)),
        nulls=_free("_n", members),
        extra=_free("_x", members),
    )


def _with_meta(root: Column, meta: Column, *, surely: bool) -> Column:
    """The layout with `_meta` in it: as documents may have it, or as all of them have it."""
    members = {member.name: member for member in root.members}
    members[META] = Member(name=META, column=meta, required=surely, nullable=not surely)
    return dataclasses.replace(
        root,
        members=tuple(sorted(members.values(), key=lambda m: m.name)),
        nulls=root.nulls or _free("_n", {*members, root.extra}),
    )


def _free(name: str, taken: Collection[str | None]) -> str:
    """A name for a hidden column."""
    while name in taken:
        name = f"_{name}"
    return name


def uuids(stamps: Stamps) -> pa.Array[Any]:
    """The text of each row's UUID (`model.clock.DocumentId.uuid`)."""
    clock = stamps.clock.astype(np.uint64)
    flags = stamps.flags.astype(np.uint64)
    upper = (
        ((clock >> np.uint64(4)) & np.uint64(0xFFFFFFFF)) << np.uint64(32)
        | ((clock >> np.uint64(36)) & np.uint64(0xFFFF)) << np.uint64(16)
        | np.uint64(0x1000)
        | clock >> np.uint64(52)
    )
    sequence = np.uint64(0x8000) | (clock & np.uint64(0xF)) << np.uint64(10) | flags
    lower = sequence << np.uint64(48) | stamps.producer.astype(np.uint64)
    digits = np.stack([upper, lower], axis=1).astype(">u8").view(np.uint8)
    text = np.full((len(clock), 36), ord("-"), np.uint8)
    text[:, _DIGITS] = _HEX[digits].reshape(len(clock), 32)
    offsets = np.arange(0, 36 * len(clock) + 1, 36, dtype=np.int32)
    buffers = [None, _pa.py_buffer(offsets), _pa.py_buffer(text)]
    array: pa.Array[Any] = _pa.Array.from_buffers(_pa.utf8(), len(clock), buffers)
    return array


_HEX: Final = np.array([list(b"%02x" % byte) for byte in range(256)], np.uint8)
_DIGITS: Final = [at for at in range(36) if at not in (8, 13, 18, 23)]
