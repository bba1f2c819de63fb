"""Documents that Python programs hand over, as JSON lines: what dates, decimals, arrays become.

    date, time             their ISO text; a time of the format `time` without a zone is in UTC
    datetime               RFC 3339, in UTC; one without a zone is refused
    Decimal                its digits where the schema wants text, else a number
    UUID, bytes            text; bytes in base64
    timedelta              seconds, as a number
    numpy                  scalars as numbers, arrays as lists
    pandas                 Timestamp as datetime; NA and NaT are absent, as NULL is in frames
    NaN, infinities        refused

Most documents hold nothing of that, and are written as they are.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import sys
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from penstock.errors import UserError
from penstock.model import pointer
from penstock.model.columns import Column, Kind
from penstock.model.json_order import Json
from penstock.native.plain import plain_as

_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

_Path = tuple[str | int, ...]


def to_lines(documents: Iterable[Any], root: Column) -> bytes:
    """Documents as what is validated: JSON lines, the first of which is document 1."""
    return b"".join(
        _line(document, root, number) for number, document in enumerate(documents, start=1)
    )


def _line(document: Any, root: Column, number: int) -> bytes:  # noqa: ANN401
    try:
        return _text(document, root).encode() + b"\n"
    except _Unfit as unfit:
        at = pointer.render(tuple(map(str, unfit.path)))
        raise UserError(
            "nothing was appended: a document is not JSON",
            where=f"document {number}{': ' if at else ''}{at}",
            why=unfit.why,
            fix=unfit.fix,
        ) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            "nothing was appended: a document is not JSON",
            where=f"document {number}",
            why=f"{half!r} is half of a surrogate pair, and no character",
            fix="decode what it came from as UTF-16, or write U+FFFD in its place",
        ) from None
    except RecursionError:
        raise UserError(
            "nothing was appended: a document is not JSON",
            where=f"document {number}",
            why="it is nested too deeply, or contains itself",
        ) from None


def _text(document: Any, root: Column) -> str:  # noqa: ANN401
    if not isinstance(document, Mapping):
        raise _Unfit((), *_no_document(document))
    try:
        return _encode(document)
    except (TypeError, ValueError):  # something in it is not JSON as it is
        return _encode(_object(document, root, ()))


class _Unfit(Exception):
    """A value that has no JSON."""

    def __init__(self, path: _Path, why: str, fix: str | None = None) -> None:
        super().__init__(why)
        self.path = path
        self.why = why
        self.fix = fix


def _no_document(value: Any) -> tuple[str, str]:  # noqa: ANN401
    if isinstance(value, str | bytes):
        return "it is text", "a document is a dict: json.loads(text)"
    return f"it is of type {_type(value)}", "a document is a dict"


_MISSING: Final = object()


def _value(value: Any, column: Column | None, at: _Path) -> Any:  # noqa: ANN401
    """JSON of a value as the layout wants it; `_MISSING` for what pandas calls missing."""
    match value:
        case None | bool() | str():
            return value
        case np.ndarray() if not value.ndim:
            return _value(value[()], column, at)
        case np.ndarray():
            return _list(list(value) if value.dtype.kind in "mMO" else value.tolist(), column, at)
        case np.datetime64():
            return _numpy_instant(value, column, at)
        case np.timedelta64():
            return _MISSING if np.isnat(value) else float(value / np.timedelta64(1, "s"))
        case np.floating():
            return _value(float(value), column, at)
        case np.generic():
            return _value(value.item(), column, at)
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise _Unfit(at, f"{value} is not a JSON number", _NAN_FIX)
            return float(value)
        case _ if _is_missing(value):
            return _MISSING
        case datetime.datetime():
            if value.tzinfo is None:
                raise _Unfit(at, f"{value.isoformat()} has no time zone", _ZONE_FIX)
            return plain_as(value, column)
        case decimal.Decimal():
            if not value.is_finite():
                raise _Unfit(at, f"{value} is not a JSON number", _NAN_FIX)
            return plain_as(value, column)
        case datetime.date() | datetime.time() | datetime.timedelta() | bytes():
            return plain_as(value, column)
        case uuid.UUID():
            return str(value)
        case Mapping():
            return _object(value, column, at)
        case list() | tuple():
            return _list(value, column, at)
        case _:
            known = "numbers, text, dates, dicts and lists have JSON"
            raise _Unfit(at, f"a value is of type {_type(value)}", f"convert it: {known}")


_NAN_FIX: Final = "for a missing value leave the member out, or write None"
_ZONE_FIX: Final = "say which: value.replace(tzinfo=datetime.UTC), or datetime.now(datetime.UTC)"


def _object(value: Mapping[Any, Any], column: Column | None, at: _Path) -> dict[str, Json]:
    is_struct = column is not None and column.kind is Kind.STRUCT
    members = {m.name: m for m in column.members} if column is not None and is_struct else {}
    item = column.item if column is not None and column.kind is Kind.MAP else None
    made: dict[str, Json] = {}
    for name, below in value.items():
        if not isinstance(name, str):
            why = f"a member is called {name!r}, which is of type {_type(name)}"
            raise _Unfit(at, why, "names of members are text")
        member = members.get(name)
        found = _value(below, item if member is None else member.column, (*at, name))
        if found is not _MISSING:
            made[name] = found
        elif member is not None and member.required and member.nullable:
            made[name] = None
    return made


def _list(values: Iterable[Any], column: Column | None, at: _Path) -> list[Json]:
    item = column.item if column is not None and column.kind is Kind.ARRAY else None
    found = (_value(each, item, (*at, n)) for n, each in enumerate(values))
    return [None if each is _MISSING else each for each in found]


def _numpy_instant(value: np.datetime64, column: Column | None, at: _Path) -> Any:  # noqa: ANN401
    if np.isnat(value):
        return _MISSING
    if np.datetime_data(value.dtype)[0] in ("Y", "M", "W", "D"):
        return plain_as(value.astype("datetime64[D]").item(), column)
    raise _Unfit(at, f"{value} has no time zone", 'pandas.Timestamp(value, tz="UTC") has one')


def _is_missing(value: Any) -> bool:  # noqa: ANN401
    """True for what pandas puts in the place of a value; it is there only if somebody uses it."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and (value is pandas.NA or value is pandas.NaT)


def _type(value: Any) -> str:  # noqa: ANN401
    kind = type(value)
    named = kind.__qualname__
    return named if kind.__module__ == "builtins" else f"{kind.__module__}.{named}"
