"""The total order of JSON values, and the canonical text of each.

    absent < null < false < true < numbers < strings < arrays < objects

Numbers compare exactly by value, integers and floats mixed (20 equals 20.0): Python compares the
two without rounding. Strings compare by code point, which is the order of their UTF-8 bytes, so
Spark's binary collation, packed keys and this module agree. Arrays compare item by item, objects
member by member in name order (name, then value), and a prefix comes first. *Absent* is not a JSON
value: it stands for a location that a document does not have.

Text that UTF-8 cannot encode (a lone surrogate) and numbers that JSON cannot write (NaN,
infinities) are not in the order and have no canonical text: both raise `NotJson`.
"""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

from penstock.errors import UserError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class Absent(enum.Enum):
    """The type of `ABSENT`, the value of a location that a document does not have."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT

EXACT_MAX: Final = 2**53
"""Below this magnitude every integer has its own float; from here on floats are rounded."""


class NotJson(UserError):
    """A value that JSON text in UTF-8 cannot represent; `where` is the JSON pointer to it."""


_ABSENT, _NULL, _FALSE, _TRUE, _NUMBER, _STRING, _ARRAY, _OBJECT = range(8)


def sort_key(value: Json | Absent) -> tuple[Any, ...]:
    """Return a key for `sorted`, `min`, `max` and dictionaries; equal keys mean equal JSON values.

    It begins with the rank of the value's type, so Python never compares values of different types:
    it would refuse some pairs, and call True equal to 1.
    """
    match value:
        case str():
            return _STRING, _storable(value, "")
        case None:
            return (_NULL,)
        case bool():
            return (_TRUE if value else _FALSE,)
        case int():
            return _NUMBER, value
        case float():
            return _NUMBER, _finite(value, "")
        case list():
            return _ARRAY, tuple(map(sort_key, value))
        case dict():
            return _OBJECT, tuple((name, sort_key(value[name])) for name in _names(value, ""))
        case Absent.ABSENT:
            return (_ABSENT,)
        case _:
            raise _foreign(value, "")


EXPONENT_MAX: Final = 10**18
"""Exponents beyond this count as this, so that every engine can compare them."""

_NUMERAL: Final = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?")
_COMPLEMENT: Final = str.maketrans("0123456789", "9876543210")
_WORDS: Final = {"NaN": 3, "Infinity": 2, "-Infinity": -2}


def numeric_key(text: str) -> tuple[int, int, str, str]:
    """Return a key that sorts texts by the numbers they write, and texts of one number as texts.

    NaN is above all numbers, as in PostgreSQL; text that writes none is below all of them. No
    number is too long: the key is the sign, the place of the first digit, and the digits.
    """
    found = _NUMERAL.fullmatch(text)
    if found is None:
        return _WORDS.get(text, -3), 0, "", text
    minus, whole, after, exponent = found.groups()
    written = whole + (after or "")
    counted = written.lstrip("0")
    digits = counted.rstrip("0")
    if not digits:
        return 0, 0, "", text
    scale = max(-EXPONENT_MAX, min(int(exponent or 0), EXPONENT_MAX))
    place = len(whole) + scale - (len(written) - len(counted))
    if minus:
        return -1, -place, digits.translate(_COMPLEMENT) + "~", text
    return 1, place, digits, text


def canonical_json(value: Json) -> str:
    """Write `value` as compact JSON: members sorted by name, text unescaped where JSON allows it.

    Numbers are written as they are, but an integral float below 2**53 loses its fraction:
    JSON Schema calls 2 and 2.0 one value, and Spark hands integers back from DOUBLE columns. So
    equal documents have equal text, up to numbers too large for a double to hold exactly.
    """
    try:
        text = _encode(value)
        text.isascii() or text.encode()
    except (ValueError, TypeError):
        return _write(value, "")  # names the value at fault, and writes integers of any size
    # Every integral float of that size has a representation that ends in ".0".
    return _write(value, "") if ".0" in text else text


_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


def _write(value: Json, pointer: str) -> str:
    """Write the same text, value by value."""
    match value:
        case str():
            return _encode(_storable(value, pointer))
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return _digits(value)
        case float():
            if _finite(value, pointer).is_integer() and abs(value) < EXACT_MAX:
                return _digits(int(value))
            return float.__repr__(value)
        case list():
            items = (_write(item, f"{pointer}/{i}") for i, item in enumerate(value))
            return f"[{','.join(items)}]"
        case dict():
            members = (_member(name, value[name], pointer) for name in _names(value, pointer))
            return f"{{{','.join(members)}}}"
        case _:
            raise _foreign(value, pointer)


def _member(name: str, value: Json, pointer: str) -> str:
    return f"{_encode(name)}:{_write(value, f'{pointer}/{escape_pointer(name)}')}"


def _names(members: Mapping[Any, Json], pointer: str) -> list[str]:
    for name in members:
        if not isinstance(name, str):
            raise _foreign(name, pointer)
        _storable(name, pointer)
    return sorted(members)


def escape_pointer(name: str) -> str:
    """Escape a member name as one token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _digits(value: int) -> str:
    # Python refuses to print integers of more than 4,300 digits; a Decimal prints them exactly.
    return int.__repr__(value) if value.bit_length() < 10_000 else format(Decimal(value), "f")


def _storable(text: str, pointer: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise NotJson(
                f"text with a lone surrogate, \\u{ord(text[e.start]):04x} at character {e.start}",
                where=pointer or None,
                why="it is half of a UTF-16 pair, which UTF-8 cannot encode",
                fix="write the character in full, or U+FFFD in its place",
            ) from None
    return text


def _finite(value: float, pointer: str) -> float:
    if not math.isfinite(value):
        raise NotJson(
            f"{value} is not a JSON number",
            where=pointer or None,
            why="JSON has no NaN and no infinities",
            fix='use null, or a string with `format: number`, which allows "NaN" and "Infinity"',
        )
    return value


def _foreign(value: object, pointer: str) -> NotJson:
    return NotJson(
        f"a {type(value).__name__} is not a JSON value",
        where=pointer or None,
        fix="use null, booleans, numbers, strings, lists, and dictionaries with string keys",
    )
