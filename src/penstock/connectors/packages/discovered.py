"""PURE: streams as a package describes them, made resources and collections for them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.connectors.packages.pending import ROW_ID
from penstock.model import pointer
from penstock.model.json_order import Json
from penstock.model.schema_check import check_schema
from penstock.runtime.connector.capture import Discovered

ROW_KEY: Final = f"/_meta/source/{ROW_ID}"
"""The key of a stream that has none."""

_NOTE_NO_KEY: Final = (
    "the stream names no key: documents are identified by their hash: equal documents "
    "become one, and one that changes at the source is another"
)
_NOTE_SCHEMA: Final = "the schema of the package cannot be used, and only its key was taken over"
_LEFT_OUT: Final = ("$schema", "$id", "format", "selected")
"""Words of a schema. Packages claim formats that their documents lack: dates without zones."""


def discovered(
    name: str, resource: Mapping[str, Json], schema: Json, key: Sequence[Sequence[str]]
) -> Discovered:
    """Return a stream; `key` are paths to members, none if the package names none."""
    pointers = tuple(pointer.render(path) for path in key) or (ROW_KEY,)
    notes = [] if key else [_NOTE_NO_KEY]
    prepared = _prepared(schema, key)
    if any(problem.code.startswith("E-") for problem in check_schema(prepared)):
        prepared = _prepared({}, key)
        notes.append(_NOTE_SCHEMA)
    return Discovered(
        name=re.sub(r"[^\w.-]+", "_", name).strip("_.-").lower() or "stream",
        resource=dict(resource),
        schema=prepared,
        key=pointers,
        note="; ".join(notes) or None,
    )


def _prepared(schema: Json, key: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The schema of a collection, which has its key, without what packages mean differently."""
    prepared: dict[str, Any] = _cleaned(copy.deepcopy(schema) if isinstance(schema, dict) else {})
    prepared["type"] = "object"
    prepared.setdefault("properties", {})
    for path in key:
        _require(prepared, path)
    if not key:
        _require(prepared, ("_meta", "source", ROW_ID))
    return prepared


def _cleaned(value: Any) -> Any:  # noqa: ANN401 - any part of a schema
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if not isinstance(value, dict):
        return value
    left = {name: _cleaned(item) for name, item in value.items()}
    for name in _LEFT_OUT:
        if isinstance(left.get(name), str | bool):  # a member of documents may be called so
            del left[name]
    return left


def _require(schema: dict[str, Any], path: Sequence[str]) -> None:
    """A member must be there, and not null: it is part of the key."""
    name, *below = path
    required = schema.setdefault("required", [])
    if name not in required:
        required.append(name)
    member = schema.setdefault("properties", {}).setdefault(name, {})
    if below:
        member["type"] = "object"
        _require(member, below)
    elif isinstance(member.get("type"), list):
        kinds = [kind for kind in member["type"] if kind != "null"]
        member["type"] = kinds[0] if len(kinds) == 1 else kinds
    else:
        member.setdefault("type", "string")
