"""PURE: expressions that mean the same in SQLite and in Spark, with their types.

An expression has one type for all documents, and an integer has bounds: both are what decides
whether an operation is exactly the same in both (`sqlite_native.py`).
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import apsw
from sqlglot import exp

from penstock.model.columns import LONG_MAX, LONG_MIN
from penstock.model.json_order import EXACT_MAX
from penstock.model.shape import Shape
from penstock.model.spec import Field
from penstock.native import sql

_COUNT: Final = re.compile("[0-9]{1,9}")


class Unsupported(Exception):
    """An expression without an exact twin."""


class SqlType(enum.Enum):
    NULL = "null"
    FLAG = "a boolean"
    INTEGER = "an integer"
    REAL = "a number"
    TEXT = "text"


WHOLE = frozenset({SqlType.FLAG, SqlType.INTEGER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """An expression in both languages. Of a FLAG, `spark` is a BOOLEAN, and SQLite's is 0 or 1."""

    type: SqlType
    spark: str
    sqlite: str
    low: int = LONG_MIN
    high: int = LONG_MAX
    """Bounds of an INTEGER."""
    finite: bool = True
    """False of a REAL that may be infinite."""


def refuse(reason: str) -> NoReturn:
    raise Unsupported(reason)


def written_as(node: exp.Expression) -> str:
    text = node.sql("sqlite").replace('"$', "$").replace('"', "")
    return text if len(text) <= 60 else f"{text[:60]}…"


# --- leaves ---


def literal(node: exp.Expression) -> Expression:
    if isinstance(node, exp.Null):
        return Expression(type=SqlType.NULL, spark="NULL", sqlite="NULL")
    if isinstance(node, exp.Boolean):
        word = "true" if node.this else "false"
        return flag(word, word)
    if node.is_string:
        quoted = "'" + node.this.replace("'", "''") + "'"
        return string(sql.text(node.this), quoted)
    db = apsw.Connection(":memory:")
    try:
        ((value,),) = db.execute(f"SELECT {node.this}")
    except apsw.Error:
        refuse(f"{node.this} is not a number of SQLite")
    finally:
        db.close()
    if isinstance(value, int):
        return integer(sql.bigint(value), str(node.this), [value], node)
    if not isinstance(value, float) or not math.isfinite(value):
        refuse(f"{node.this} is not a finite number")
    return real(sql.double(value), str(node.this), finite=True)


def of_field(field: Field, name: str, shape: Shape) -> Expression:
    column = sql.name(field.name)
    strings = shape.strings
    if field.location in {"", "/_meta/uuid"}:
        refuse(f"{name} is not a column")
    match list(shape.not_null):
        case ["boolean"]:
            return flag(column, name)
        case ["integer"]:
            low, high = shape.numbers.minimum, shape.numbers.maximum
            ends = (
                LONG_MIN if low is None else math.floor(low),
                LONG_MAX if high is None else math.ceil(high),
            )
            if ends[0] < LONG_MIN or ends[1] > LONG_MAX:
                refuse(f"{name} may be beyond 64 bits")
            return Expression(
                type=SqlType.INTEGER, spark=column, sqlite=name, low=ends[0], high=ends[1]
            )
        case ["number"] if shape.numbers.multiple_of is None:
            return real(column, name, finite=True)
        case ["string"] if (
            strings.format not in {"integer", "number"} and strings.content_encoding is None
        ):
            return string(column, name)
        case _:
            refuse(f"the type of {name} has no exact twin in Spark")


# --- types ---


def flag(spark: str, sqlite: str) -> Expression:
    return Expression(type=SqlType.FLAG, spark=spark, sqlite=sqlite, low=0, high=1)


def real(spark: str, sqlite: str, *, finite: bool) -> Expression:
    return Expression(type=SqlType.REAL, spark=spark, sqlite=sqlite, finite=finite)


def string(spark: str, sqlite: str) -> Expression:
    return Expression(type=SqlType.TEXT, spark=spark, sqlite=sqlite)


def integer(spark: str, sqlite: str, ends: Sequence[int], node: exp.Expression) -> Expression:
    """Return an integer with the bounds of `ends`, which must fit 64 bits."""
    low, high = min(ends), max(ends)
    if low < LONG_MIN or high > LONG_MAX:
        refuse(f"{written_as(node)} may leave 64 bits: give its fields a minimum and a maximum")
    return Expression(type=SqlType.INTEGER, spark=spark, sqlite=sqlite, low=low, high=high)


def as_integer(value: Expression) -> Expression:
    if value.type is SqlType.FLAG:
        spark = f"CAST({value.spark} AS BIGINT)"
        return Expression(type=SqlType.INTEGER, spark=spark, sqlite=value.sqlite, low=0, high=1)
    return value


def as_real(value: Expression, node: exp.Expression) -> Expression:
    if value.type in WHOLE:
        spark = f"CAST({as_integer(value).spark} AS DOUBLE)"
        return real(spark, value.sqlite, finite=True)
    if value.type is not SqlType.REAL:
        refuse(f"{written_as(node)} has an operand that is {value.type.value}")
    return value


def as_text(value: Expression, node: exp.Expression) -> str:
    if value.type is SqlType.TEXT:
        return value.spark
    if value.type in WHOLE:
        return f"CAST({as_integer(value).spark} AS STRING)"
    refuse(f"{written_as(node)} writes {value.type.value} as text")


def comparable(a: Expression, b: Expression, node: exp.Expression) -> tuple[str, str]:
    """Return both operands of a comparison in Spark, as one type."""
    if SqlType.NULL in {a.type, b.type}:
        return _typed(a, b), _typed(b, a)
    if a.type is b.type:
        return a.spark, b.spark
    if a.type in WHOLE and b.type in WHOLE:
        return as_integer(a).spark, as_integer(b).spark
    if SqlType.TEXT not in {a.type, b.type}:
        whole = a if a.type in WHOLE else b
        if whole.low >= -EXACT_MAX and whole.high <= EXACT_MAX:
            return as_real(a, node).spark, as_real(b, node).spark
        refuse(f"{written_as(node)} compares an integer beyond 2**53 with a number")
    refuse(f"{written_as(node)} compares {a.type.value} with {b.type.value}")


def _typed(value: Expression, other: Expression) -> str:
    if value.type is not SqlType.NULL:
        return value.spark
    kind = {SqlType.FLAG: "BOOLEAN", SqlType.INTEGER: "BIGINT", SqlType.REAL: "DOUBLE"}
    return f"CAST(NULL AS {kind.get(other.type, 'STRING')})"


def one_type(
    values: Sequence[Expression], node: exp.Expression
) -> tuple[list[str], Callable[[str, str], Expression]]:
    """Return alternatives in Spark as one type, and what makes an expression of their choice."""
    types = {value.type for value in values} - {SqlType.NULL}
    if types == {SqlType.FLAG, SqlType.INTEGER}:
        values = [as_integer(value) for value in values]
        types = {SqlType.INTEGER}
    if len(types) != 1:
        found = " or ".join(sorted(t.value for t in types)) or "always null"
        refuse(f"{written_as(node)} is {found}")
    (kind,) = types
    typed = [value for value in values if value.type is kind]
    low, high = min(value.low for value in typed), max(value.high for value in typed)
    finite = all(value.finite for value in typed)

    def joined(spark: str, sqlite: str) -> Expression:
        return Expression(type=kind, spark=spark, sqlite=sqlite, low=low, high=high, finite=finite)

    return [_typed(value, typed[0]) for value in values], joined


def count_of(node: object) -> int | None:
    """Return the number that a literal of digits writes."""
    if isinstance(node, exp.Literal) and not node.is_string and _COUNT.fullmatch(node.this):
        return int(node.this)
    return None


def until_zero(value: Expression) -> str:
    return f"substring_index({value.spark}, chr(0), 1)"


def output(value: Expression, shape: Shape, member: str) -> str:
    """Return an expression as the column of a member, if it becomes the same JSON."""
    only_flags = shape.not_null == {"boolean"}
    match value.type:
        case SqlType.NULL:
            return "CAST(NULL AS STRING)"
        case SqlType.FLAG if only_flags:
            return value.spark
        case SqlType.FLAG:
            return as_integer(value).spark
        case SqlType.INTEGER if only_flags:
            refuse(f"{member} is boolean, and its column may be another number than 0 and 1")
        case SqlType.REAL if not value.finite and shape.not_null != {"number"}:
            refuse(f"{member} may be infinite, which is text in a document")
        case SqlType.TEXT if not shape.types.isdisjoint({"array", "object"}):
            refuse(f"{member} may be an array or object, which text of a column is embedded as")
        case _:
            return value.spark
