"""PURE: a schema and a key for documents of which some are known: what `discover` proposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.model.json_order import Json, canonical_json
from penstock.model.observed import observe

_KEYS: Final = ("id", "_id", "uuid", "key", "guid")


def schema_of(documents: Sequence[Json]) -> dict[str, Any]:
    """Return a JSON Schema that admits the documents, and others like them."""
    return observe([each for each in documents if isinstance(each, dict)])


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
