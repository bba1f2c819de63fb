"""Redaction of rows that are columns already; the meaning is `penstock.model.redact`.

As SQL where the hidden locations are columns of their own; by the reference, over the rows' JSON
text, where something hidden is inside of JSON text or of members that have no name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from penstock.model.columns import Column, Kind
from penstock.model.json_order import Json
from penstock.model.redact import has_redactions, redact
from penstock.model.schema import CompiledSchema, compiled
from penstock.model.shape import ANY, Shape
from penstock.native import sql
from penstock.native.arrow import to_arrow, to_json


class _NotInSql(Exception):
    """Something hidden has no column of its own."""


def redact_rows(rows: DataFrame, schema: CompiledSchema, root: Column, salt: bytes) -> DataFrame:
    """Rows laid out as `root`, the layout of `schema`, without what the schema hides."""
    if not has_redactions(schema.shape):
        return rows
    changed = redaction(schema.shape, root, salt)
    if changed is None:
        stage = _Redactor(schema=schema.text, root=root, salt=salt)
        return rows.mapInArrow(stage, rows.schema)
    return rows.selectExpr(
        *(f"{changed.get(name, sql.name(name))} AS {sql.name(name)}" for name in rows.columns)
    )


def redaction(shape: Shape, root: Column, salt: bytes, struct: str = "") -> dict[str, str] | None:
    """SQL for each column that changes: those of the row, or the members of `struct`."""
    try:
        return _members(root, shape, struct, f"X'{salt.hex()}'")
    except _NotInSql:
        return None


def _members(column: Column, shape: Shape, value: str, salt: str) -> dict[str, str]:
    """The members of a struct that change, hidden ones included."""

    def field(name: str) -> str:
        return f"({value}).{sql.name(name)}" if value else sql.name(name)

    if any(has_redactions(unnamed) for unnamed in _unnamed(shape)):
        raise _NotInSql
    changed: dict[str, str] = {}
    blocked: list[int] = []
    for at, member in enumerate(column.members):
        below = shape.objects.member(member.name)
        if below.redact == "block":
            blocked.append(at)
        if member.column is not None and has_redactions(below):
            changed[member.name] = _hidden(member.column, below, field(member.name), salt)
    if column.nulls is not None and blocked:
        nulls = field(column.nulls)
        kept = f"filter({nulls}, p -> p NOT IN ({', '.join(f'{at}S' for at in blocked)}))"
        changed[column.nulls] = f"if(size({kept}) = 0, NULL, {kept})"
    return changed


def _unnamed(shape: Shape) -> list[Shape]:
    return [*(s for _, s in shape.objects.patterns), shape.objects.additional or ANY]


def _hidden(column: Column, shape: Shape, value: str, salt: str) -> str:
    """SQL for a column without what is hidden; NULL, in its type, if that is all of it.

    Every lambda calls its argument `v`: what is inside of one never looks outside.
    """
    if shape.redact == "block":
        return f"if(true, NULL, {value})"
    if shape.redact == "sha256":
        return _digest(column, value, salt)
    if not has_redactions(shape):
        return value
    match column.kind:
        case Kind.STRUCT:
            changed = _members(column, shape, value, salt)
            names = [m.name for m in column.members if m.column is not None]
            names += [hidden for hidden in (column.nulls, column.extra) if hidden is not None]
            fields = ", ".join(
                f"{sql.text(name)}, {changed.get(name, f'({value}).{sql.name(name)}')}"
                for name in names
            )
            return f"if({value} IS NULL, NULL, named_struct({fields}))"
        case Kind.ARRAY:
            items = shape.arrays.rest
            if items.redact == "block":
                return f"if({value} IS NULL, NULL, slice({value}, 1, 0))"
            return f"transform({value}, v -> {_hidden(column.item, items, 'v', salt)})"
        case Kind.MAP:
            (values,) = [s for s in _unnamed(shape) if not s.impossible]
            if values.redact == "block":
                return f"map_filter({value}, (k, v) -> false)"
            return f"transform_values({value}, (k, v) -> {_hidden(column.item, values, 'v', salt)})"
        case _:
            raise _NotInSql


def _digest(column: Column, value: str, salt: str) -> str:
    if column.kind is Kind.STRING:
        return f"concat('sha256:', {_sha(value, salt)})"
    if column.kind is not Kind.JSON:
        raise _NotInSql
    text = f"try_variant_get(parse_json({value}), '\\u0024', 'string')"
    return (
        f"CASE WHEN {value} = 'null' THEN {value}"
        f" WHEN startswith({value}, '\"') THEN concat('\"sha256:', {_sha(text, salt)}, '\"')"
        f" ELSE concat('\"sha256:', {_sha(value, salt)}, '\"') END"
    )


def _sha(value: str, salt: str) -> str:
    return f"sha2(concat({salt}, CAST({value} AS BINARY)), 256)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Redactor:
    """Redacts batches of rows in a Spark task."""

    schema: str
    root: Column
    salt: bytes

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shape = compiled(self.schema).shape
        for batch in batches:
            documents = [json.loads(text) for text in to_json(batch, self.root)]
            made = to_arrow([_document(redact(d, shape, self.salt)) for d in documents], self.root)
            arrays = [
                made.column(name) if name in made.schema.names else batch.column(name)
                for name in batch.schema.names
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _document(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict)  # noqa: S101 - redaction keeps a document an object
    return value
