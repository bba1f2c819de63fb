"""Rows written under one schema, read under another.

    to_json(adapt(to_arrow(documents, written), written, wanted), wanted) == documents

for documents that fit both layouts, up to what the new one keeps of numbers (`columns.as_stored`).
Members are matched by name, level by level, hence by JSON pointer and never by position:

    in both layouts      the same column, or cast, or rendered as JSON text, or parsed out of it
    only in the new one  taken out of `_x` where a document has it, missing elsewhere
    only in the old one  kept in `_x` if the object is open, else dropped

`_n` lists positions, and positions are those of a layout: it is always made anew. Columns that are
equal are passed on untouched, casts and re-arrangements are Arrow kernels, and only values that
change their representation (text to typed column and back) go through Python.

A document that the new layout cannot hold (a string where there are integers now, no value where
one is required) is an `UnreadableDocument`, which names row and location.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from penstock.errors import PenstockError
from penstock.model import pointer
from penstock.model.columns import Column, Kind, Member, unstorable
from penstock.model.json_order import Json
from penstock.model.shape import type_of
from penstock.native.arrow import to_json, to_struct
from penstock.native.arrow_types import arrow_schema, arrow_type

if TYPE_CHECKING:
    from collections.abc import Callable

# The published stubs know few of the kernels used here, and those without scalars.
_pa: Any = pa
_pc: Any = pyarrow.compute
Array: TypeAlias = Any
Mask: TypeAlias = npt.NDArray[np.bool_]

_JSON = Column(kind=Kind.JSON, nullable=True)


class UnreadableDocument(PenstockError):
    """A stored document that the schema it is read under cannot hold."""

    row = 0
    """The row of the batch."""


class _Misfit(Exception):
    """Some value does not fit. Never leaves this file."""

    def __init__(self, at: str, why: str) -> None:
        super().__init__(at, why)
        self.at = at
        self.why = why


def adapt(batch: pa.RecordBatch, written: Column, wanted: Column) -> pa.RecordBatch:
    """The documents of a batch in another layout. Columns that are not documents' are left out."""
    try:
        return _adapt(batch, written, wanted)
    except _Misfit as misfit:
        raise _unreadable(batch, written, wanted, misfit) from None


def _adapt(batch: pa.RecordBatch, written: Column, wanted: Column) -> pa.RecordBatch:
    names = arrow_schema(written).names
    struct = _pa.StructArray.from_arrays([batch.column(n) for n in names], names=names)
    columns = _struct(written, wanted, struct, batch.num_rows, "").flatten()
    adapted: pa.RecordBatch = _pa.RecordBatch.from_arrays(columns, schema=arrow_schema(wanted))
    return adapted


def _unreadable(
    batch: pa.RecordBatch, written: Column, wanted: Column, misfit: _Misfit
) -> UnreadableDocument:
    """Find the first row that does not fit, by halves: kernels only know that some row does not."""
    begin, end = 0, batch.num_rows
    while end - begin > 1:
        middle = (begin + end) // 2
        try:
            _adapt(batch.slice(begin, middle - begin), written, wanted)
        except _Misfit as earlier:
            misfit, end = earlier, middle
        else:
            begin = middle
    error = UnreadableDocument(
        f"a stored document does not fit the schema it is read under: {misfit.why}",
        where=f"{misfit.at or 'the document'}, row {begin}",
        why="it was written under an earlier schema of the collection",
        fix="let the read schema admit both, or write to a collection of another name",
    )
    error.row = begin
    return error


# --------------------------------------------------------------------------------------- objects


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """One member of all objects: where `null` it is explicitly null, where it has no value either
    it is missing."""

    column: Column
    values: Array
    null: Mask

    @property
    def valid(self) -> Mask:
        found: Mask = self.values.is_valid().to_numpy(zero_copy_only=False)
        return found


def _struct(written: Column, wanted: Column, array: Array, rows: int, at: str) -> Array:
    there = array.is_valid().to_numpy(zero_copy_only=False)
    before = {member.name: i for i, member in enumerate(written.members)}
    extra = array.field(written.extra) if written.extra is not None else None
    explicit = _positions(array.field(written.nulls)) if written.nulls is not None else None

    def find(name: str) -> _Found | None:
        if name in before:
            return _stored(written.members[before[name]], before[name], array, explicit, there)
        if extra is None or extra.null_count == rows:
            return None
        return _unwrapped(_JSON, _pc.map_lookup(extra, name, "first"))

    columns: list[Array] = []
    nulls: list[tuple[int, Mask]] = []
    for position, member in enumerate(wanted.members):
        below = pointer.child(at, member.name)
        found = find(member.name)
        if found is None:
            _check_missing(member, there, below)
            if member.column is not None:
                columns.append(_pa.nulls(rows, arrow_type(member.column)))
            continue
        _check_member(member, found, there, below)
        if member.column is not None:
            columns.append(_member(member.column, found, below))
        if member.listed and found.null.any():
            nulls.append((position, found.null))
    if wanted.nulls is not None:
        columns.append(_explicit_nulls(nulls, rows))
    if wanted.extra is not None:
        gone = [m.name for m in written.members if m.name not in {w.name for w in wanted.members}]
        demoted = [(name, found) for name in gone if (found := find(name)) is not None]
        taken = [m.name for m in wanted.members if m.name not in before]
        columns.append(_extra(extra, taken, demoted, rows))
    fields = list(arrow_schema(wanted))
    mask = None if there.all() else _pa.array(~there)
    return _pa.StructArray.from_arrays(columns, fields=fields, mask=mask)


def _stored(
    member: Member, position: int, array: Array, explicit: _Positions | None, there: Mask
) -> _Found:
    """A member that the old layout names."""
    if member.column is None:
        values = _pa.nulls(len(array), _pa.utf8())
    else:
        values = array.field(member.name)
        if member.column.kind is Kind.JSON:
            return _unwrapped(member.column, values)
    null = np.zeros(len(array), bool)
    if member.required and member.nullable:
        null = there & ~values.is_valid().to_numpy(zero_copy_only=False)
    elif member.listed and explicit is not None:
        null[explicit.rows[explicit.positions == position]] = True
    return _Found(member.column or _JSON, values, null)


def _unwrapped(column: Column, texts: Array) -> _Found:
    """JSON text, in which null is a text like others."""
    null = _pc.fill_null(_pc.equal(texts, "null"), False).to_numpy(zero_copy_only=False)
    values = _pc.if_else(_pa.array(null), None, texts) if null.any() else texts
    return _Found(column, values, null)


def _check_missing(member: Member, there: Mask, at: str) -> None:
    if member.required and there.any():
        raise _Misfit(at, "no value, and one is required")


def _check_member(member: Member, found: _Found, there: Mask, at: str) -> None:
    if member.required and bool(np.any(there & ~found.valid & ~found.null)):
        raise _Misfit(at, "no value, and one is required")
    if not member.nullable and bool(found.null.any()):
        raise _Misfit(at, "null, which is not allowed")
    if member.column is None and bool(found.valid.any()):
        raise _Misfit(at, "a value where only null is allowed")


def _member(wanted: Column, found: _Found, at: str) -> Array:
    values = _convert(found.column, wanted, found.values, at)
    if wanted.kind is Kind.JSON and found.null.any():
        return _pc.if_else(_pa.array(found.null), "null", values)
    return values


@dataclasses.dataclass(frozen=True, slots=True)
class _Positions:
    """A hidden `_n`, flat: which positions are null in which rows."""

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int16]


def _positions(lists: Array) -> _Positions | None:
    if lists.null_count == len(lists):
        return None
    return _Positions(_pc.list_parent_indices(lists).to_numpy(), _pc.list_flatten(lists).to_numpy())


def _explicit_nulls(nulls: list[tuple[int, Mask]], rows: int) -> Array:
    kind = _pa.list_(_pa.field("element", _pa.int16()))
    if not nulls:
        return _pa.nulls(rows, kind)
    where = [np.flatnonzero(mask) for _, mask in nulls]
    row = np.concatenate(where)
    position = np.repeat([p for p, _ in nulls], [len(w) for w in where]).astype(np.int16)
    order = np.lexsort((position, row))
    offsets, empty = _grouped(row, rows)
    return _pa.ListArray.from_arrays(offsets, _pa.array(position[order]), type=kind, mask=empty)


def _extra(
    extra: Array | None, taken: list[str], demoted: list[tuple[str, _Found]], rows: int
) -> Array:
    """The hidden `_x`: as it was, without what has become a member, with what no longer is one."""
    kind = _pa.map_(_pa.utf8(), _pa.utf8())
    row: list[Array] = []
    name: list[Array] = []
    text: list[Array] = []
    if extra is not None and extra.null_count < rows:
        lists = extra.cast(_ENTRIES)  # kernels for lists do not take maps
        entries = _pc.list_flatten(lists)
        row.append(_pc.list_parent_indices(lists).cast(_pa.int64()))
        name.append(entries.field(0))
        text.append(entries.field(1))
        if not demoted and not _pc.any(_pc.is_in(name[0], _pa.array(taken, _pa.utf8()))).as_py():
            return extra
    for member, found in demoted:
        texts = _texts(found.column, found.values)
        texts = _pc.if_else(_pa.array(found.null), "null", texts)
        at = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
        row.append(_pa.array(at, _pa.int64()))
        name.append(_pa.array([member] * len(at), _pa.utf8()))
        text.append(texts.take(_pa.array(at)))
    if not row:
        return _pa.nulls(rows, kind)
    entries = _pa.table([_pa.chunked_array(c) for c in (row, name, text)], ["row", "name", "text"])
    entries = entries.filter(_pc.invert(_pc.is_in(entries["name"], _pa.array(taken, _pa.utf8()))))
    entries = entries.sort_by([("row", "ascending"), ("name", "ascending")]).combine_chunks()
    offsets, empty = _grouped(entries["row"].to_numpy(), rows)
    name_, text_ = (
        _pa.concat_arrays(entries[c].chunks or [_pa.array([], _pa.utf8())])
        for c in ("name", "text")
    )
    return _pa.MapArray.from_arrays(offsets, name_, text_, type=kind, mask=empty)


_ENTRIES = _pa.list_(
    _pa.struct([_pa.field("key", _pa.utf8(), nullable=False), _pa.field("value", _pa.utf8())])
)


def _grouped(row: npt.NDArray[np.int64], rows: int) -> tuple[Array, Array]:
    """Offsets of lists by row from the row of each element, and which rows have none."""
    counts = np.bincount(row, minlength=rows)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return _pa.array(offsets), _pa.array(counts == 0)


# ---------------------------------------------------------------------------------------- values


def _convert(written: Column, wanted: Column, array: Array, at: str) -> Array:
    """Values in another representation; NULL stays NULL."""
    if written == wanted:
        return array
    match written.kind, wanted.kind:
        case (before, after) if before is after and before in _UNCHANGED:
            return array
        case Kind.LONG, Kind.DOUBLE:
            return array.cast(_pa.float64(), safe=False)  # rounds, as `as_stored` does
        case Kind.STRUCT, Kind.STRUCT:
            return _struct(written, wanted, array, len(array), at)
        case Kind.ARRAY, Kind.ARRAY:
            begin, count, offsets = _extent(array)
            items = array.values.slice(begin, count)
            items = _items(written.item, wanted.item, items, pointer.child(at, "*"))
            kind, mask = arrow_type(wanted), _mask(array)
            return _pa.ListArray.from_arrays(offsets, items, type=kind, mask=mask)
        case Kind.MAP, Kind.MAP:
            begin, count, offsets = _extent(array)
            names, items = (part.slice(begin, count) for part in (array.keys, array.items))
            items = _items(written.item, wanted.item, items, pointer.child(at, "*"))
            kind, mask = arrow_type(wanted), _mask(array)
            return _pa.MapArray.from_arrays(offsets, names, items, type=kind, mask=mask)
        case _, Kind.JSON:
            return _texts(written, array)
        case _:
            return _reparsed(written, wanted, array, at)


_UNCHANGED = frozenset({Kind.BOOLEAN, Kind.LONG, Kind.DOUBLE, Kind.STRING, Kind.JSON})


def _extent(array: Array) -> tuple[int, int, Array]:
    """First element and number of elements of a sliced list array, and its offsets from zero."""
    offsets = array.offsets.to_numpy()
    begin = int(offsets[0])
    return begin, int(offsets[-1]) - begin, _pa.array(offsets - begin, _pa.int32())


def _mask(array: Array) -> Array | None:
    return array.is_null() if array.null_count else None


def _items(written: Column, wanted: Column, array: Array, at: str) -> Array:
    """Items of arrays and values of maps: all of them are there, so a NULL is a null."""
    found = (
        _unwrapped(written, array)
        if written.kind is Kind.JSON
        else _Found(written, array, array.is_null().to_numpy(zero_copy_only=False))
    )
    if not wanted.nullable and wanted.kind is not Kind.JSON and bool(found.null.any()):
        raise _Misfit(at, "null, which is not allowed")
    return _member(wanted, found, at)


def _texts(column: Column, array: Array) -> Array:
    """Canonical JSON of each value, NULL where there is none."""
    if column.kind is Kind.JSON:
        return array
    lone = Column(kind=Kind.STRUCT, members=(_lone(column),))
    lines = to_json(_pa.RecordBatch.from_arrays([array], names=[_LONE]), lone)
    # Each is {"v":…}, or {"v":null} for a NULL.
    texts = _pc.utf8_slice_codeunits(_pa.array(lines, _pa.utf8()), len(_LONE) + 4, -1)
    return _pc.if_else(array.is_valid(), texts, None) if array.null_count else texts


def _reparsed(written: Column, wanted: Column, array: Array, at: str) -> Array:
    """By way of text: any representation to any other, value by value."""
    values: list[Any] = [
        None if text is None else json.loads(text) for text in _texts(written, array).to_pylist()
    ]
    for value in values:
        if value is not None:
            _check_value(wanted, value, at)
    lone = Column(kind=Kind.STRUCT, members=(_lone(wanted),))
    documents: list[dict[str, Json] | None] = [
        {} if value is None else {_LONE: value} for value in values
    ]
    return to_struct(documents, lone).field(0)


_LONE = "v"


def _lone(column: Column) -> Member:
    return Member(name=_LONE, column=column, required=True, nullable=True)


_CHECKS: dict[Kind, Callable[[Json], bool]] = {
    Kind.BOOLEAN: lambda value: isinstance(value, bool),
    Kind.LONG: lambda value: type_of(value) == "integer",
    Kind.DECIMAL: lambda value: type_of(value) in ("integer", "number"),
    Kind.DOUBLE: lambda value: type_of(value) in ("integer", "number"),
    Kind.STRING: lambda value: isinstance(value, str),
    Kind.JSON: lambda _: True,
    Kind.STRUCT: lambda value: isinstance(value, dict),
    Kind.MAP: lambda value: isinstance(value, dict),
    Kind.ARRAY: lambda value: isinstance(value, list),
}


def _check_value(column: Column, value: Json, at: str) -> None:
    """Raise unless a column can hold a value that comes from another one."""
    if not _CHECKS[column.kind](value):
        raise _Misfit(at, f"{_a(type_of(value))} where the column is {column.kind.value}")
    if (found := unstorable(value, column)) is not None and not found[0]:
        raise _Misfit(at, found[1])
    match value:
        case dict() if column.kind is Kind.STRUCT:
            _check_members(column, value, at)
        case dict() if column.kind is Kind.MAP:
            for name, item in value.items():
                _check_item(column.item, item, pointer.child(at, name))
        case list() if column.kind is Kind.ARRAY:
            for i, item in enumerate(value):
                _check_item(column.item, item, pointer.child(at, i))
        case _:
            pass


def _check_members(column: Column, value: dict[str, Json], at: str) -> None:
    for member in column.members:
        below = pointer.child(at, member.name)
        if member.name not in value:
            if member.required:
                raise _Misfit(below, "no value, and one is required")
        elif (inner := value[member.name]) is None:
            if not member.nullable:
                raise _Misfit(below, "null, which is not allowed")
        elif member.column is None:
            raise _Misfit(below, "a value where only null is allowed")
        else:
            _check_value(member.column, inner, below)


def _check_item(column: Column, value: Json, at: str) -> None:
    if value is not None:
        _check_value(column, value, at)
    elif not column.nullable and column.kind is not Kind.JSON:
        raise _Misfit(at, "null, which is not allowed")


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
