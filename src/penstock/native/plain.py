"""Arrow values as JSON: what a date, a timestamp, bytes and a decimal are in a document.

    date, time       their ISO text            2026-11-17, 12:30:00
    timestamp        RFC 3339, in UTC          2026-11-17T12:30:00Z; one without a zone is UTC
    duration         seconds, as a number
    binary           base64 text
    decimal          a number, if a double holds it exactly as written, else its text
    NaN, infinities  their text                "NaN", "-Infinity"

Where the layout says that a member is text, a decimal or an integer is its digits, a date-time at
midnight is a `date` if that is the format, and a `time` without a zone is in UTC (`plain_as`).

A NULL at the top, or in a struct, is a member that is absent; where a member must be there and may
be null, it is null.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from typing import Any, Final

import pyarrow

from penstock.model.columns import Column, Kind
from penstock.model.json_order import Json

PADDED_SCALE: Final = 18
"""The scale of Spark's DECIMAL(38,18), which stands for any number: its last zeros say nothing."""


def plain_rows(batch: pyarrow.RecordBatch) -> list[dict[str, Json]]:
    """Rows as documents."""
    return [_members(row) for row in batch.to_pylist()]


def rows_as(batch: pyarrow.RecordBatch, root: Column) -> list[dict[str, Json]]:
    """Rows as documents of a layout; its own hidden columns may be among them."""
    return [_members_as(row, root) for row in batch.to_pylist()]


def plain_as(value: Any, column: Column | None) -> Json:  # noqa: ANN401 - whatever Arrow returns
    """One value, which is not None, as the layout wants it, if it can be that."""
    if column is None:
        return plain(value)
    match column.kind, value:
        case Kind.STRING, _:
            return _text_as(value, column.logical)
        case Kind.STRUCT, dict():
            return _members_as(value, column)
        case Kind.ARRAY, list():
            return [None if each is None else plain_as(each, column.item) for each in value]
        case Kind.MAP, list() | dict():
            entries = value.items() if isinstance(value, dict) else value
            return {
                str(name): None if each is None else plain_as(each, column.item)
                for name, each in entries
            }
        case _:
            return plain(value)


def _text_as(value: Any, logical: str | None) -> Json:  # noqa: ANN401
    match value:
        case decimal.Decimal() if value.is_finite():
            text = format(value, "f")
            padded = value.as_tuple().exponent == -PADDED_SCALE
            return text.rstrip("0").rstrip(".") if padded else text
        case bool():
            return value
        case float() if logical == "integer" and value.is_integer():
            return str(int(value))
        case int() | float() if logical in ("integer", "number"):
            return str(plain(value))
        case datetime.datetime() if logical == "date" and value.time() == datetime.time():
            return value.date().isoformat()
        case datetime.time() if logical == "time" and value.tzinfo is None:
            return f"{value.isoformat()}Z"
        case _:
            return plain(value)


def _members_as(row: dict[str, Any], column: Column) -> dict[str, Json]:
    members = {member.name: member for member in column.members}
    hidden = {column.nulls, column.extra} - members.keys()
    made = {
        name: plain_as(value, members[name].column if name in members else None)
        for name, value in row.items()
        if value is not None and name not in hidden
    }
    for name in hidden & row.keys():
        made |= _hidden(row[str(name)], column, is_extra=name == column.extra)
    for member in column.members:
        if member.required and member.nullable:
            made.setdefault(member.name, None)
    return made


def _hidden(value: Any, column: Column, *, is_extra: bool) -> dict[str, Json]:  # noqa: ANN401
    """The members that a hidden column stands for; a column that only has its name is a member."""
    if value is None:
        return {}
    try:
        if is_extra:
            return {name: json.loads(text) for name, text in value}
        return {column.members[at].name: None for at in value}
    except (ValueError, TypeError, IndexError):
        return {str(column.extra if is_extra else column.nulls): plain(value)}


def _members(row: dict[str, Any]) -> dict[str, Json]:
    return {name: plain(value) for name, value in row.items() if value is not None}


def plain(value: Any) -> Json:  # noqa: ANN401 - whatever Arrow returns
    """One value."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if math.isnan(value):
                return "NaN"
            return value if math.isfinite(value) else ("-Infinity" if value < 0 else "Infinity")
        case decimal.Decimal():
            return _decimal(value)
        case datetime.datetime():
            return _instant(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case bytes():
            return base64.b64encode(value).decode()
        case dict():
            return _members(value)
        case list() if value and all(isinstance(each, tuple) for each in value):
            return {str(name): plain(each) for name, each in value}
        case list():
            return [plain(each) for each in value]
        case _:
            return str(value)


def _decimal(value: decimal.Decimal) -> Json:
    if not value.is_finite():
        return str(value)
    if value == value.to_integral_value():
        return int(value)
    number = float(value)
    return number if decimal.Decimal(repr(number)) == value else format(value, "f")


def _instant(value: datetime.datetime) -> str:
    instant = value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value
    text = instant.astimezone(datetime.UTC).replace(tzinfo=None).isoformat()
    return f"{text}Z"
