"""The schema of documents that were seen: what they have in common, and nothing else.

A schema here has `type`, `properties`, `required`, `items`, `additionalProperties` and `format`. It
names no bounds and no values: documents to come have others. `observe` describes some values, and
`widen` returns the narrowest such schema that admits what either of two admits. It is commutative,
associative and idempotent, so documents may be seen in any order, in parts, and again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from penstock.model.json_order import Json
from penstock.model.shape import type_of

MEMBERS_MAX: Final = 750
"""Members of an object above which their names count as data."""

Observed: TypeAlias = dict[str, Any]
"""A schema of documents that were seen. The empty one admits anything: nothing is known."""

_FORMATS: Final = {
    "date-time": re.compile(
        r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?"
        r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
    ),
    "date": re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"),
}


def observe(values: Sequence[Json]) -> Observed:
    """Return the schema of some values, one at least."""
    types = sorted({type_of(value) for value in values})
    if "number" in types and "integer" in types:
        types.remove("integer")
    schema: Observed = {"type": types[0] if len(types) == 1 else types}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        schema |= _members(objects)
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = observe(items)
    texts = [value for value in values if isinstance(value, str)]
    if texts and (found := _format(texts)) is not None:
        schema["format"] = found
    return schema


def _format(texts: Sequence[str]) -> str | None:
    """The format that all texts have; days that not every month has are none's proof."""
    for name, pattern in _FORMATS.items():
        if all(pattern.fullmatch(text) for text in texts):
            return name
    return None


def _members(objects: Sequence[dict[str, Any]]) -> Observed:
    names = sorted({name for each in objects for name in each})
    if len(names) > MEMBERS_MAX:
        return {"additionalProperties": observe([v for each in objects for v in each.values()])}
    made: Observed = {}
    required = [name for name in names if all(name in each for each in objects)]
    if required:
        made["required"] = required
    if names:
        made["properties"] = {
            name: observe([each[name] for each in objects if name in each]) for name in names
        }
    return made


def widen(a: Observed, b: Observed) -> Observed:
    """Return the schema that admits what either admits."""
    if not a or not b:
        return {}
    types = _types(a) | _types(b)
    if "number" in types:
        types.discard("integer")
    listed = sorted(types)
    schema: Observed = {"type": listed[0] if len(listed) == 1 else listed}
    with_objects = [each for each in (a, b) if "object" in _types(each)]
    if with_objects:
        schema |= _widen_members(with_objects)
    if items := [each["items"] for each in (a, b) if "items" in each]:
        schema["items"] = items[0] if len(items) == 1 else widen(*items)
    formats = {each.get("format") for each in (a, b) if "string" in _types(each)}
    if len(formats) == 1 and (only := formats.pop()) is not None:
        schema["format"] = only
    return schema


def _types(schema: Observed) -> set[str]:
    found = schema.get("type", [])
    return {found} if isinstance(found, str) else set(found)


def _widen_members(schemas: Sequence[Observed]) -> Observed:
    """The members of objects, of one schema or two."""
    required = set.intersection(*(set(each.get("required", ())) for each in schemas))
    properties: dict[str, Observed] = {}
    for each in schemas:
        for name, below in each.get("properties", {}).items():
            properties[name] = widen(properties[name], below) if name in properties else below
    others = [each["additionalProperties"] for each in schemas if "additionalProperties" in each]
    if others or len(properties) > MEMBERS_MAX:
        everything = [*others, *properties.values()]
        merged = everything[0]
        for each in everything[1:]:
            merged = widen(merged, each)
        return {"additionalProperties": merged}
    made: Observed = {}
    if required:
        made["required"] = sorted(required)
    if properties:
        made["properties"] = dict(sorted(properties.items()))
    return made


def with_sourced(observed: Observed | None, sourced: Json) -> Observed:
    """Return what is known of documents, with what their source says of locations never seen."""
    if not isinstance(sourced, dict):
        return observed or {}
    if observed is None:
        return _only_structure(sourced)
    made = dict(observed)
    said = sourced.get("properties")
    if isinstance(said, dict) and "additionalProperties" not in observed:
        properties = dict(observed.get("properties", {}))
        for name, below in said.items():
            properties[name] = with_sourced(properties.get(name), below)
        made["properties"] = dict(sorted(properties.items()))
    return made


def _only_structure(schema: dict[str, Any]) -> Observed:
    """What a schema says of types and members; nothing is required that was never seen."""
    made: Observed = {}
    if isinstance(schema.get("type"), str | list):
        made["type"] = schema["type"]
    if isinstance(schema.get("format"), str):
        made["format"] = schema["format"]
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {
            name: _only_structure(below) if isinstance(below, dict) else {}
            for name, below in sorted(schema["properties"].items())
        }
    if isinstance(schema.get("items"), dict):
        made["items"] = _only_structure(schema["items"])
    return made
