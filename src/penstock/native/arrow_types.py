"""Column layouts as Arrow types. Nothing here imports Spark: appending needs no more than this.

What a type cannot say is in field metadata, under keys that begin with `penstock.`: that a string
is JSON text, what the text of a string stands for, whether a member is required or may be null, and
which members are hidden. Arrow carries it the way Spark writes it, so it survives either road.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from penstock.model.columns import Column, Kind, Member

JSON: Final = "penstock.json"
LOGICAL: Final = "penstock.logical"
REQUIRED: Final = "penstock.required"
NULLABLE: Final = "penstock.nullable"
HIDDEN: Final = "penstock.hidden"
NAMES: Final = "penstock.names"
ELEMENT: Final = "penstock.element"

NULLS_TYPE: Final = pa.list_(pa.field("element", pa.int16()))
EXTRA_TYPE: Final = pa.map_(pa.utf8(), pa.utf8())

_SPARK_METADATA: Final = b"SPARK::metadata::json"


@functools.lru_cache(maxsize=1024)
def arrow_schema(root: Column) -> pa.Schema:
    """The columns of whole documents. Every column is nullable: NULL is how absence is stored."""
    fields = [
        _field(member.name, arrow_type(member.column), member_metadata(member))
        for member in root.members
        if member.column is not None
    ]
    kinds: dict[str, pa.DataType] = {"nulls": NULLS_TYPE, "extra": EXTRA_TYPE}
    fields += [
        _field(name, kinds[metadata[HIDDEN]], metadata) for name, metadata in hidden_fields(root)
    ]
    return pa.schema(fields)


@functools.lru_cache(maxsize=4096)
def arrow_type(column: Column) -> pa.DataType:
    """One column's type."""
    match column.kind:
        case Kind.BOOLEAN:
            return pa.bool_()
        case Kind.LONG:
            return pa.int64()
        case Kind.DECIMAL:
            return pa.decimal128(column.precision, column.scale)
        case Kind.DOUBLE:
            return pa.float64()
        case Kind.STRING | Kind.JSON:
            return pa.utf8()
        case Kind.STRUCT:
            return pa.struct(list(arrow_schema(column)))
        case Kind.MAP:
            return pa.map_(pa.utf8(), arrow_type(column.item))
        case Kind.ARRAY:
            return pa.list_(pa.field("element", arrow_type(column.item)))


def _field(name: str, kind: pa.DataType, metadata: dict[str, Any]) -> pa.Field[Any]:
    carried = {_SPARK_METADATA: json.dumps(metadata).encode()} if metadata else None
    return pa.field(name, kind, True, carried)


def member_metadata(member: Member) -> dict[str, Any]:
    """Field metadata of a member that has a column."""
    column = member.column
    assert column is not None  # noqa: S101 - the caller's
    return _metadata(column) | ({REQUIRED: True} if member.required else {})


def hidden_fields(root: Column) -> Iterator[tuple[str, dict[str, Any]]]:
    """The hidden columns of an object, each with its field metadata."""
    if root.nulls is not None:
        yield root.nulls, {HIDDEN: "nulls", NAMES: [member.name for member in root.members]}
    if root.extra is not None:
        yield root.extra, {HIDDEN: "extra"}


def _metadata(column: Column) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if column.kind is Kind.JSON:
        metadata[JSON] = True
    elif column.nullable:
        metadata[NULLABLE] = True
    if column.logical is not None:
        metadata[LOGICAL] = column.logical
    if column.element is not None and (below := _metadata(column.element)):
        metadata[ELEMENT] = below
    return metadata
