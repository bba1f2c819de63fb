"""PURE: tables as collections that might hold them."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.connectors.postgres_cdc.rows import META_SCHEMA
from penstock.connectors.postgres_cdc.tables import Table
from penstock.connectors.postgres_cdc.values import nullable, type_of
from penstock.model import pointer
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import Discovered


def discovered(table: Table, bases: Mapping[int, tuple[int, int]]) -> Discovered:
    """Propose a collection for a table."""
    key = table.primary_key
    return Discovered(
        name=table.name if table.schema == "public" else f"{table.schema}/{table.name}",
        resource={"schema": table.schema, "table": table.name},
        schema=schema_of(table, key, bases),
        key=tuple(pointer.child("", name) for name in key),
        disable=not key or not table.is_readable,
        note=_note(table),
    )


def schema_of(
    table: Table, key: tuple[str, ...], bases: Mapping[int, tuple[int, int]]
) -> dict[str, Json]:
    """The schema of a table's documents: they merge by key, and some of them delete."""
    properties: dict[str, Json] = {}
    for column in table.columns:
        kind = type_of(column.type, column.modifier, bases).schema
        required = column.name in table.required
        properties[column.name] = dict(kind) if required else nullable(kind)
    properties["_meta"] = dict(META_SCHEMA)
    schema: dict[str, Json] = {
        "type": "object",
        "required": [*key, "_meta"],
        "properties": properties,
        "if": {"properties": {"_meta": {"properties": {"op": {"const": "d"}}}}},
        "then": {"reduce": {"strategy": "merge", "delete": True}},
        "else": {"reduce": {"strategy": "merge"}},
    }
    return {"description": table.comment, **schema} if table.comment else schema


def _note(table: Table) -> str | None:
    if not table.primary_key:
        return (
            "it has no primary key to identify its rows: add one; or set REPLICA "
            "IDENTITY FULL, and name a key that no two rows share"
        )
    if not table.is_readable:
        return "the user of the endpoint may not read it: GRANT SELECT"
    if table.identity == "n":
        return "it has REPLICA IDENTITY NOTHING: set it to DEFAULT before using this"
    return None
