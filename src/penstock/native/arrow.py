"""Documents to Arrow columns and back to canonical JSON text.

    to_json(to_arrow(documents, root), root) == [canonical_json(as_stored(d, root)), ...]

for all documents that are valid under the schema and that the columns can hold (`unstorable`). Text
and column differ in nothing but the digits of numbers, and only beyond 2**53 (`as_stored`).

Both directions go column by column. A document is taken apart once, level by level, into one Python
list per column, which Arrow converts in C++; texts are put together by Arrow's string kernels, so
that a value is touched by Python only where JSON needs it: floats, escapes, unknown members.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow
import pyarrow.compute

from penstock.model.columns import Column, Kind, Member, is_beyond_doubles
from penstock.model.json_order import ABSENT, Json, canonical_json
from penstock.native.arrow_types import EXTRA_TYPE, NULLS_TYPE, arrow_schema, arrow_type

# The published stubs know few of the kernels used here, and those without scalars.
pa: Any = pyarrow
pc: Any = pyarrow.compute
Array: TypeAlias = Any


_ESCAPED: Final = r'["\\\x00-\x1f]'
_quote = json.JSONEncoder(ensure_ascii=False).encode


def to_arrow(documents: Sequence[dict[str, Json]], root: Column) -> pyarrow.RecordBatch:
    """Documents as columns. All of them must be valid, and `columns.unstorable` of none.

    Raises OverflowError or ArrowInvalid if a number does not fit its column.
    """
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(
        to_struct(documents, root).flatten(), schema=arrow_schema(root)
    )
    return batch


def to_struct(documents: Sequence[dict[str, Json] | None], root: Column) -> Array:
    """Documents as one array of structs, NULL where there is none."""
    return _encode_struct(root, list(documents))


def _encode(column: Column, values: list[Any]) -> Array:
    """One column. A value of None is NULL, but in a JSON column, where ABSENT is."""
    match column.kind:
        case Kind.BOOLEAN:
            return pa.array(values, pa.bool_())
        case Kind.STRING:
            return pa.array(values, pa.utf8())
        case Kind.LONG:
            if float in set(map(type, values)):  # 1.0 is an integer, and Arrow would cut 1.5 to 1
                values = [v if v is None else int(v) for v in values]
            return pa.array(values, pa.int64())
        case Kind.DOUBLE:
            if int in set(map(type, values)):  # Arrow refuses what a double cannot hold exactly
                values = [v if v is None else float(v) for v in values]
            return pa.array(values, pa.float64())
        case Kind.DECIMAL:
            floats = [v for v in values if isinstance(v, float)]
            if any(is_beyond_doubles(v, column) for v in floats):
                raise OverflowError(f"a number of DECIMAL({column.precision},{column.scale})")
            decimals = [v if v is None else Decimal(repr(v)) for v in values]
            return pa.array(decimals, arrow_type(column))
        case Kind.JSON:
            texts = [None if v is ABSENT else canonical_json(v) for v in values]
            return pa.array(texts, pa.utf8())
        case Kind.STRUCT:
            return _encode_struct(column, values)
        case Kind.ARRAY:
            items = list(itertools.chain.from_iterable(v for v in values if v is not None))
            return pa.ListArray.from_arrays(
                _offsets(values),
                _encode(column.item, items),
                type=arrow_type(column),
                mask=_nulls_of(values),
            )
        case Kind.MAP:
            entries = [sorted(v.items()) for v in values if v is not None]
            flat = list(itertools.chain.from_iterable(entries))
            return pa.MapArray.from_arrays(
                _offsets(values),
                pa.array([name for name, _ in flat], pa.utf8()),
                _encode(column.item, [value for _, value in flat]),
                type=arrow_type(column),
                mask=_nulls_of(values),
            )


def _encode_struct(column: Column, values: list[Any]) -> Array:
    mask = _nulls_of(values)
    dicts = values if mask is None else [{} if v is None else v for v in values]
    arrays: list[Array] = []
    for member in column.members:
        if member.column is not None:
            absent = ABSENT if member.column.kind is Kind.JSON else None
            name = member.name
            arrays.append(_encode(member.column, [d.get(name, absent) for d in dicts]))
    if column.nulls is not None:
        arrays.append(pa.array(_explicit_nulls(column, dicts), NULLS_TYPE))
    if column.extra is not None:
        known = frozenset(member.name for member in column.members)
        unknown = [None if d.keys() <= known else _unknown(d, known) for d in dicts]
        arrays.append(pa.array(unknown, EXTRA_TYPE))
    fields = list(arrow_schema(column))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)


def _explicit_nulls(column: Column, dicts: list[dict[str, Json]]) -> list[list[int] | None]:
    listed = [(at, member.name) for at, member in enumerate(column.members) if member.listed]
    return [
        ([at for at, name in listed if d.get(name, ABSENT) is None] or None)
        if None in d.values()
        else None
        for d in dicts
    ]


def _unknown(document: dict[str, Json], known: frozenset[str]) -> list[tuple[str, str]]:
    return [(name, canonical_json(document[name])) for name in sorted(document.keys() - known)]


def _offsets(values: list[Any]) -> Array:
    lengths = np.fromiter((0 if v is None else len(v) for v in values), np.int32, len(values))
    return pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())


def _nulls_of(values: list[Any]) -> Array | None:
    return pa.array([v is None for v in values], pa.bool_()) if None in values else None


def to_json(batch: pyarrow.RecordBatch, root: Column) -> list[str]:
    """Each row as canonical JSON. Columns are found by name, others are left alone."""
    names = [m.name for m in root.members if m.column is not None]
    names += [hidden for hidden in (root.nulls, root.extra) if hidden is not None]
    struct = pa.StructArray.from_arrays([batch.column(name) for name in names], names=names)
    texts: list[str] = _texts_of_struct(root, struct, batch.num_rows).to_pylist()
    return texts


def json_texts(column: Column, array: Array) -> Array:
    """JSON text of each value; NULL where the column is."""
    match column.kind:
        case Kind.BOOLEAN:
            return pc.if_else(array, "true", "false")
        case Kind.LONG:
            return array.cast(pa.utf8())
        case Kind.DOUBLE:
            return _texts_of_doubles(array)
        case Kind.DECIMAL:
            plain = [None if v is None else _decimal(v) for v in array.to_pylist()]
            return pa.array(plain, pa.utf8())
        case Kind.STRING:
            return _quoted(array)
        case Kind.JSON:
            return array
        case Kind.STRUCT:
            return _texts_of_struct(column, array, len(array))
        case Kind.ARRAY:
            items = _or_null(json_texts(column.item, array.values))
            joined = pc.binary_join(_relisted(array, items), ",")
            return pc.binary_join_element_wise("[", joined, "]", "")
        case Kind.MAP:
            return _texts_of_map(column, array)


def _texts_of_doubles(array: Array) -> Array:
    """Write floats as `canonical_json` does: Python's digits, no fraction for small integers."""
    values = array.to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):
        if bool(np.all(np.isnan(values) | ((values == np.floor(values)) & (abs(values) < 2**53)))):
            return array.cast(pa.int64()).cast(pa.utf8())
    return pa.array(
        [None if v is None else canonical_json(v) for v in array.to_pylist()], pa.utf8()
    )


def _decimal(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _quoted(array: Array) -> Array:
    if pc.any(pc.match_substring_regex(array, _ESCAPED)).as_py():
        return pa.array([None if v is None else _quote(v) for v in array.to_pylist()], pa.utf8())
    return pc.binary_join_element_wise('"', array, '"', "")


def _or_null(texts: Array) -> Array:
    return pc.fill_null(texts, "null")


def _relisted(array: Array, values: Array) -> Array:
    """The lists of `array` with other values in them."""
    offsets = pa.array(array.offsets.to_numpy(), pa.int32())  # a copy: no mask beside a slice
    return pa.ListArray.from_arrays(offsets, values, mask=array.is_null())


def _texts_of_map(column: Column, array: Array) -> Array:
    values = _or_null(json_texts(column.item, array.items))
    members = pc.binary_join_element_wise(_quoted(array.keys), values, ":")
    lists = _relisted(array, members)
    if _in_name_order(array):
        joined = pc.binary_join(lists, ",")
    else:
        names = _relisted(array, array.keys).to_pylist()
        joined = pa.array(
            [
                None
                if texts is None
                else ",".join(t for _, t in sorted(zip(row, texts, strict=True)))
                for row, texts in zip(names, lists.to_pylist(), strict=True)
            ],
            pa.utf8(),
        )
    return pc.binary_join_element_wise("{", joined, "}", "")


def _in_name_order(array: Array) -> bool:
    """True if every map has its names in order: as written here, but not as Spark makes them."""
    keys = array.keys
    if len(keys) < 2:
        return True
    ascending = pc.less(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
    starts = array.offsets.to_numpy()
    within = np.ones(len(keys) - 1, bool)
    borders = starts[(starts > 0) & (starts < len(keys))] - 1
    within[borders] = False
    return bool(np.all(ascending | ~within))


def _texts_of_struct(column: Column, array: Array, rows: int) -> Array:
    pieces: list[tuple[str, Array]] = []
    nulls = _ExplicitNulls(array.field(column.nulls) if column.nulls is not None else None, rows)
    for at, member in enumerate(column.members):
        text = _member_texts(member, at, array, nulls, rows)
        piece = pc.binary_join_element_wise(f",{_quote(member.name)}:", text, "")
        pieces.append((member.name, piece))
    empty = pa.array([""] * rows, pa.utf8())
    # Each piece brings its comma, as joining would drop rows in which every piece is missing.
    joined = pc.binary_join_element_wise(
        empty, *(p for _, p in pieces), "", null_handling="replace", null_replacement=""
    )
    if column.extra is not None and array.field(column.extra).null_count < rows:
        joined = _with_unknown(joined, pieces, array.field(column.extra))
    opened = pc.binary_replace_slice(joined, 0, 1, "{").cast(pa.utf8())
    texts = pc.binary_join_element_wise(opened, "}", "")
    return pc.if_else(array.is_valid(), texts, None) if array.null_count else texts


def _member_texts(member: Member, at: int, array: Array, nulls: _ExplicitNulls, rows: int) -> Array:
    if member.column is None:
        texts = pa.nulls(rows, pa.utf8())
    else:
        texts = json_texts(member.column, array.field(member.name))
        if member.column.kind is Kind.JSON:
            return texts
    if member.required and member.nullable:
        return _or_null(texts)
    if member.listed and (mask := nulls.mask(at)) is not None:
        return pc.if_else(mask, "null", texts)
    return texts


class _ExplicitNulls:
    """The hidden `_n` of a struct, asked member by member."""

    def __init__(self, lists: Array | None, rows: int) -> None:
        self._rows = rows
        some = lists is not None and lists.null_count < rows
        self._at = pc.list_flatten(lists).to_numpy() if some else None
        self._row = pc.list_parent_indices(lists).to_numpy() if some else None

    def mask(self, at: int) -> Array | None:
        """The rows in which the member at this position is null, if there are any."""
        if self._at is None or self._row is None:
            return None
        rows = self._row[self._at == at]
        if not len(rows):
            return None
        mask = np.zeros(self._rows, bool)
        mask[rows] = True
        return pa.array(mask)


def _with_unknown(joined: Array, pieces: list[tuple[str, Array]], extra: Array) -> Array:
    """Rows that have unknown members, put together again: those sort among the known ones."""
    rows = np.flatnonzero(extra.is_valid().to_numpy(zero_copy_only=False))
    index = pa.array(rows)
    known = [(name, piece.take(index).to_pylist()) for name, piece in pieces]
    unknown = extra.take(index).to_pylist()
    texts = joined.to_pylist()
    for i, row in enumerate(rows):
        members = [(name, column[i]) for name, column in known if column[i] is not None]
        members += [(name, f",{_quote(name)}:{text}") for name, text in unknown[i]]
        texts[row] = "".join(text for _, text in sorted(members))
    return pa.array(texts, pa.utf8())
