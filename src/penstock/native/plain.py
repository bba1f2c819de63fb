"""Arrow values as JSON: what a date, a timestamp, bytes and a decimal are in a document.

    date, time       their ISO text            2026-11-17, 12:30:00
    timestamp        RFC 3339, in UTC          2026-11-17T12:30:00Z; one without a zone is UTC
    duration         seconds, as a number
    binary           base64 text
    decimal          a number, if a double holds it exactly as written, else its text
    NaN, infinities  their text                "NaN", "-Infinity"

A NULL at the top, or in a struct, is a member that is absent.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
from typing import Any

import pyarrow

from penstock.model.json_order import Json


def plain_rows(batch: pyarrow.RecordBatch) -> list[dict[str, Json]]:
    """Rows as documents."""
    return [_members(row) for row in batch.to_pylist()]


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
