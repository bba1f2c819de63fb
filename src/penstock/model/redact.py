"""Redact what a schema marks with `redact`, before a document is stored.

- `block` removes the member, or the item of an array.
- `sha256` replaces the value with a text that is equal for equal values: `sha256:` and 64
  hexadecimal digits, the SHA-256 of the salt followed by the value in UTF-8. A string is hashed as
  it is, any other value as its canonical JSON. Null stays null: there is nothing to hide.

A location is marked if any schema that may apply to it marks it, whatever the document is: where
schemas disagree, more is removed. What is inside a redacted value goes with it.
"""

from __future__ import annotations

import hashlib

from penstock.model.json_order import ABSENT, Absent, Json, canonical_json
from penstock.model.shape import Shape


def redact(document: Json, shape: Shape, salt: bytes) -> Json:
    """Return the document redacted; the same object if nothing is marked."""
    redacted = _redact(document, shape, salt)
    if redacted is ABSENT:
        raise ValueError("a whole document cannot be blocked")
    return redacted


def has_redactions(shape: Shape) -> bool:
    """True if documents of this shape may have something to redact."""
    return shape.redact is not None or any(
        has_redactions(below) for _, _, below in shape.children()
    )


def digest(value: Json, salt: bytes) -> str:
    """Return the text that replaces a hashed value."""
    text = value if isinstance(value, str) else canonical_json(value)
    return f"sha256:{hashlib.sha256(salt + text.encode()).hexdigest()}"


def _redact(value: Json, shape: Shape, salt: bytes) -> Json | Absent:
    if shape.redact == "block":
        return ABSENT
    if shape.redact == "sha256":
        return value if value is None else digest(value, salt)
    match value:
        case dict() if has_redactions(shape):
            members = {n: _redact(v, shape.objects.member(n), salt) for n, v in value.items()}
            return {name: member for name, member in members.items() if member is not ABSENT}
        case list() if has_redactions(shape):
            items = [_redact(v, shape.arrays.item(i), salt) for i, v in enumerate(value)]
            return [item for item in items if item is not ABSENT]
        case _:
            return value
