"""PURE: values from PostgreSQL's text format to JSON, and the JSON Schemas of their types.

Nothing is rounded. A `numeric` is a text of `format: number`, unless its declaration says that it
is an integer of at most 18 digits. What JSON has no number for, NaN and the infinities, is a text,
too; schemas do not admit it where they expect numbers, since a column of two types is a slow one.

Texts are those of a session with `SETTINGS`: dates as ISO writes them, and times in UTC.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from penstock.model.json_order import Json

SETTINGS: Final[Mapping[str, str]] = {
    "datestyle": "ISO",
    "intervalstyle": "iso_8601",
    "timezone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "3",
}
"""Under which the server writes values as they are read here."""

Convert: TypeAlias = Callable[[bytes], bytes]
"""From a value's text to its JSON."""

_encode: Final = msgspec.json.Encoder().encode
_special: Final = re.compile(rb'[\x00-\x1f"\\]').search

INTEGER_DIGITS_MAX: Final = 18
"""Digits of a `numeric` without fraction up to which it is an integer: it fits 64 bits."""


def as_text(value: bytes) -> bytes:
    """A JSON string."""
    if _special(value) is None:
        return b'"%b"' % value
    return _encode(value.decode())


def as_number(value: bytes) -> bytes:
    """A number as it is, or a text where JSON has no number: NaN, and the infinities."""
    return b'"%b"' % value if value[-1:] in b"Ny" else value


def _as_is(value: bytes) -> bytes:
    return value


def _quoted(value: bytes) -> bytes:
    """A text of a type that has nothing to escape."""
    return b'"%b"' % value


def _boolean(value: bytes) -> bytes:
    return b"true" if value == b"t" else b"false"


def _json(value: bytes) -> bytes:
    """JSON in one line: outside of strings, where it is escaped, a line break is a space."""
    if b"\n" in value or b"\r" in value:
        return value.replace(b"\n", b" ").replace(b"\r", b" ")
    return value


def _bytea(value: bytes) -> bytes:
    return b'"%b"' % base64.b64encode(bytes.fromhex(value[2:].decode()))


def _timestamp(value: bytes) -> bytes:
    """`2026-11-17T08:30:00.5`, of no zone. Infinities, and years before 1, are as written."""
    return b'"%b"' % value.replace(b" ", b"T", 1) if _is_common(value) else _quoted(value)


def _timestamptz(value: bytes) -> bytes:
    """`2026-11-17T08:30:00.5Z`."""
    if _is_common(value) and value[-3:] == b"+00":
        return b'"%bT%bZ"' % (value[:10], value[11:-3])
    return _quoted(value)


def _is_common(value: bytes) -> bool:
    """A time in the years 1 to 9999."""
    return value[10:11] == b" " and value[-2:] != b"BC"


# ----------------------------------------------------------------------------------------- arrays

_PLAIN_ITEM: Final = re.compile(rb"[^,{}\"]*")


def _array_of(convert: Convert) -> Convert:
    def array(value: bytes) -> bytes:
        start = value.index(b"{")  # `[0:1]={…}` says where it counts from, which JSON cannot
        text, at = _items(value, start, convert)
        if at != len(value):
            raise ValueError("an array goes on after its end")
        return text

    return array


def _items(value: bytes, at: int, convert: Convert) -> tuple[bytes, int]:
    """The array that begins at a place, and where it ends."""
    items: list[bytes] = []
    at += 1
    while value[at : at + 1] != b"}":
        if value[at : at + 1] == b",":
            at += 1
        if value[at : at + 1] == b"{":
            item, at = _items(value, at, convert)
            items.append(item)
        elif value[at : at + 1] == b'"':
            quoted, at = _quoted_item(value, at + 1)
            items.append(convert(quoted))
        else:
            found = _PLAIN_ITEM.match(value, at)
            plain = found[0] if found else b""
            if not plain:
                raise ValueError("an array is cut short")
            at += len(plain)
            items.append(b"null" if plain.upper() == b"NULL" else convert(plain))
    return b"[%b]" % b",".join(items), at + 1


def _quoted_item(value: bytes, at: int) -> tuple[bytes, int]:
    parts: list[bytes] = []
    while True:
        end = value.index(b'"', at)
        escape = value.find(b"\\", at, end)
        if escape < 0:
            parts.append(value[at:end])
            return b"".join(parts), end + 1
        parts.append(value[at:escape])
        parts.append(value[escape + 1 : escape + 2])
        at = escape + 2


# ------------------------------------------------------------------------------------------ types

BOOL, BYTEA, INT8, INT2, INT4, TEXT, OID = 16, 17, 20, 21, 23, 25, 26
JSON, FLOAT4, FLOAT8, DATE, TIMESTAMP, TIMESTAMPTZ = 114, 700, 701, 1082, 1114, 1184
NUMERIC, UUID, JSONB, INTERVAL = 1700, 2950, 3802, 1186

USER_TYPES_FROM: Final = 16384
"""Types with greater OIDs are made by users: enums, domains, composites."""

ANY_ARRAY: Final = -1
"""Stands for an array whose items are of a type that is text here."""


@dataclass(frozen=True, slots=True)
class TypeOf:
    """How a type's values become JSON, and which JSON that is; {} is any."""

    convert: Convert
    schema: Mapping[str, Json]


_INTEGER: Final = TypeOf(_as_is, {"type": "integer"})
_WHOLE: Final = TypeOf(as_number, {"type": "integer"})
_FLOAT: Final = TypeOf(as_number, {"type": "number"})
_EXACT: Final = TypeOf(_quoted, {"type": "string", "format": "number"})
_OTHER: Final = TypeOf(as_text, {"type": "string"})
_ANY_JSON: Final = TypeOf(_json, {})

_TYPES: Final[Mapping[int, TypeOf]] = {
    BOOL: TypeOf(_boolean, {"type": "boolean"}),
    BYTEA: TypeOf(_bytea, {"type": "string", "contentEncoding": "base64"}),
    INT8: _INTEGER,
    INT2: _INTEGER,
    INT4: _INTEGER,
    OID: _INTEGER,
    JSON: _ANY_JSON,
    JSONB: _ANY_JSON,
    FLOAT4: _FLOAT,
    FLOAT8: _FLOAT,
    NUMERIC: _EXACT,
    UUID: TypeOf(_quoted, {"type": "string", "format": "uuid"}),
    DATE: TypeOf(_quoted, {"type": "string", "format": "date"}),
    TIMESTAMP: TypeOf(_timestamp, {"type": "string"}),
    TIMESTAMPTZ: TypeOf(_timestamptz, {"type": "string", "format": "date-time"}),
    INTERVAL: _OTHER,
}

_ARRAYS: Final[Mapping[int, int]] = {
    1000: BOOL,
    1001: BYTEA,
    1005: INT2,
    1007: INT4,
    1016: INT8,
    1028: OID,
    199: JSON,
    3807: JSONB,
    1021: FLOAT4,
    1022: FLOAT8,
    1231: NUMERIC,
    2951: UUID,
    1182: DATE,
    1115: TIMESTAMP,
    1185: TIMESTAMPTZ,
    1187: INTERVAL,
    1002: TEXT,
    1003: TEXT,
    1009: TEXT,
    1014: TEXT,
    1015: TEXT,
    1183: TEXT,
    1270: TEXT,
    ANY_ARRAY: TEXT,
}


_ARRAY_OF: Final = {item: array for array, item in _ARRAYS.items() if array != ANY_ARRAY}


def array_of(item: int) -> int | None:
    """The type of arrays of a type, if it is more than text here."""
    return _ARRAY_OF.get(item) if item in _TYPES else None


def type_of(oid: int, modifier: int, bases: Mapping[int, tuple[int, int]]) -> TypeOf:
    """Return the type of a column.

    `bases` has the types that users made, and what they are made of, with the modifier: the base of
    a domain, `ANY_ARRAY` or an array of the server's own. What it does not have is text.
    """
    if oid in bases:
        oid, modifier = bases[oid]
    if oid in _ARRAYS:
        item = type_of(_ARRAYS[oid], -1, {})
        schema: dict[str, Json] = {"type": "array", "items": nullable(item.schema)}
        return TypeOf(_array_of(item.convert), schema)
    if oid == NUMERIC and modifier >= 4:
        digits, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
        if scale == 0 and digits <= INTEGER_DIGITS_MAX:
            return _WHOLE
    return _TYPES.get(oid, _OTHER)


def nullable(schema: Mapping[str, Json]) -> dict[str, Json]:
    """The schema of the same values, or null."""
    kinds = schema.get("type")
    if kinds is None:
        return dict(schema)
    return {**schema, "type": [*(kinds if isinstance(kinds, list) else [kinds]), "null"]}
