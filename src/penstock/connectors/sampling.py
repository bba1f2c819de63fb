"""PURE: a schema and a key for documents of which some are known: what `discover` proposes.

The schema admits every document of the sample, and others like them. It names no bounds and no
values: a sample does not know them. Formats are named where every text of the sample has one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from penstock.model.json_order import Json, canonical_json
from penstock.model.shape import type_of

MEMBERS_MAX: Final = 750
"""Members of an object above which they count as data, and are not named."""

_KEYS: Final = ("id", "_id", "uuid", "key", "guid")
_FORMATS: Final = {
    "date-time": re.compile(
        r"\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
    ),
    "date": re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"),
    "uuid": re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE),
}


def schema_of(documents: Sequence[Json]) -> dict[str, Any]:
    """Return a JSON Schema that admits the documents."""
    return _schema([each for each in documents if isinstance(each, dict)])


def _schema(values: Sequence[Any]) -> dict[str, Any]:
    types = sorted({type_of(value) for value in values})
    if "number" in types and "integer" in types:
        types.remove("integer")
    schema: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        schema |= _members(objects)
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = _schema(items)
    texts = [value for value in values if isinstance(value, str)]
    for name, pattern in _FORMATS.items():
        if texts and all(pattern.fullmatch(text) for text in texts):
            schema["format"] = name
            break
    return schema


def _members(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in objects for name in each)
    if len(names) > MEMBERS_MAX:
        return {}
    required = [name for name in names if all(name in each for each in objects)]
    made: dict[str, Any] = {}
    if required:
        made["required"] = required
    made["properties"] = {
        name: _schema([each[name] for each in objects if name in each]) for name in names
    }
    return made


def key_of(documents: Sequence[Json]) -> tuple[str, ...] | None:
    """Return a member that every document has, and no two alike; None if none looks like a key."""
    objects = [each for each in documents if isinstance(each, dict)]
    if not objects:
        return None
    named = [name for name in objects[0] if name.lower() in _KEYS or name.lower().endswith("_id")]
    for name in sorted(named, key=lambda each: (each.lower() not in _KEYS, len(each))):
        values = [each.get(name) for each in objects]
        scalar = all(isinstance(v, int | str) and not isinstance(v, bool) for v in values)
        if scalar and len({canonical_json(value) for value in values}) == len(values):
            return (f"/{name}",)
    return None
