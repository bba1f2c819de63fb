"""Documents, as columns of a collection, turned into rows of a target.

Everything is done on whole Arrow columns. Locations in nested objects and lists become columns of
their own, containers and the document itself become JSON text, the same text that `penstock read`
prints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pyarrow
import pyarrow.compute

from penstock.errors import Bug
from penstock.model import pointer
from penstock.model.columns import Column, Kind, member_at
from penstock.model.json_order import canonical_json
from penstock.native.arrow import json_texts, to_json
from penstock.native.arrow_types import arrow_type
from penstock.runtime.connector.materialize import DELETE, TargetField

pa: Any = pyarrow
pc: Any = pyarrow.compute

_AS_JSON: Final = frozenset({Kind.STRUCT, Kind.MAP, Kind.ARRAY})


def target_schema(fields: Sequence[TargetField]) -> pyarrow.Schema:
    """Return the schema of a target's rows; connectors are given exactly this."""
    columns = [pa.field(field.name, _stored_type(field.column)) for field in fields]
    schema: pyarrow.Schema = pa.schema([*columns, pa.field(DELETE, pa.bool_())])
    return schema


def _stored_type(column: Column) -> Any:  # noqa: ANN401 - Arrow's types are not typed
    return pa.utf8() if column.kind in _AS_JSON else arrow_type(column)


def project(
    documents: pyarrow.RecordBatch,
    root: Column,
    fields: Sequence[TargetField],
    *,
    deleted: Any = None,  # noqa: ANN401 - an Arrow array of booleans
) -> pyarrow.RecordBatch:
    """Rows of a target for documents in the layout `root`; only what fields show must be there."""
    schema: Any = target_schema(fields)
    arrays = [
        _values(documents, root, field).cast(schema.field(field.name).type) for field in fields
    ]
    if deleted is None:
        deleted = pa.repeat(pa.scalar(False), documents.num_rows)
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays([*arrays, deleted], schema=schema)
    return batch


def _values(documents: Any, root: Column, field: TargetField) -> Any:  # noqa: ANN401
    if field.is_document:
        return pa.array(to_json(documents, root), pa.utf8())
    first, *rest = pointer.parse(field.pointer)
    column, array = _top(documents, root, first)
    for at, name in enumerate(rest):
        if column.kind is Kind.JSON:
            return _inside(array, rest[at:])
        column, array = _below(column, name), _member(array, column, name)
    if field.default is not None:
        array = pc.fill_null(array, pa.scalar(field.default, array.type))
    return json_texts(column, array) if column.kind in _AS_JSON else array


def _top(documents: Any, root: Column, name: str) -> tuple[Column, Any]:  # noqa: ANN401
    if any(member.name == name for member in root.members):
        return _below(root, name), documents.column(name)
    return _below(root, name), pc.map_lookup(documents.column(root.extra), name, "first")


def _below(column: Column, name: str) -> Column:
    found = member_at(column, name)
    if found is None:
        raise Bug(f"a target has a field at {name}, which no column holds")
    return found


def _member(array: Any, column: Column, name: str) -> Any:  # noqa: ANN401
    """The values of a member or an item, where there is one."""
    if column.kind is Kind.ARRAY:
        return _item(array, int(name))
    if column.kind is Kind.MAP:
        return pc.map_lookup(array, name, "first")
    if any(member.name == name for member in column.members):
        return pc.struct_field(array, name)
    return pc.map_lookup(pc.struct_field(array, column.extra), name, "first")


def _item(lists: Any, index: int) -> Any:  # noqa: ANN401
    """The item at an index of each list; null where the list is shorter, or null."""
    there = pc.greater(pc.list_value_length(lists), index)
    starts = pc.cast(lists.offsets[:-1], pa.int64())
    return lists.values.take(pc.if_else(there, pc.add(starts, index), pa.scalar(None, pa.int64())))


def _inside(texts: Any, path: Sequence[str]) -> Any:  # noqa: ANN401
    """JSON text of a location within JSON text."""
    return pa.array([_found(text, path) for text in texts.to_pylist()], pa.utf8())


def _found(text: str | None, path: Sequence[str]) -> str | None:
    if text is None:
        return None
    value = json.loads(text)
    for name in path:
        match value:
            case dict() if name in value:
                value = value[name]
            case list() if name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            case _:
                return None
    return canonical_json(value)
