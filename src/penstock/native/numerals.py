"""Numbers that are written as text, in Spark: their order, and their exact sum.

The text is what is stored, so both go from text to text: the greatest value as it was written, and
a sum with as many digits after the point as the value that has most, as the reference reducer does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f

from penstock.model.json_order import EXPONENT_MAX

_NUMERAL: Final = r"^-?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?$"
_DIGITS: Final = 12
_PLAIN: Final = rf"^-?[0-9]{{1,{_DIGITS}}}([.][0-9]{{1,{_DIGITS}}})?$"
"""Texts that a DECIMAL(24,12) holds: ten thousand million of them add up without an overflow."""


def numeric_order(value: Column) -> Column:
    """`json_order.numeric_key` as a struct whose last field is the text itself."""
    mantissa = f.regexp_extract(value, "^-?([0-9.]*)", 1)
    exponent = f.regexp_extract(value, "[eE](.*)$", 1)
    beyond = f.when(f.startswith(exponent, f.lit("-")), -EXPONENT_MAX).otherwise(EXPONENT_MAX)
    scale = f.when(exponent == "", f.lit(0).cast("bigint")).otherwise(
        f.coalesce(exponent.try_cast("bigint"), beyond)
    )
    scale = f.greatest(f.least(scale, f.lit(EXPONENT_MAX)), f.lit(-EXPONENT_MAX))
    whole = f.substring_index(mantissa, ".", 1)
    written = f.replace(mantissa, f.lit("."), f.lit(""))
    counted = f.ltrim(written, f.lit("0"))
    digits = f.rtrim(counted, f.lit("0"))
    place = f.length(whole) + scale - (f.length(written) - f.length(counted))
    negative = f.startswith(value, f.lit("-"))
    sign = (
        f.when(value == "NaN", 3)
        .when(value == "Infinity", 2)
        .when(value == "-Infinity", -2)
        .when(~value.rlike(_NUMERAL), -3)
        .when(digits == "", 0)
        .when(negative, -1)
        .otherwise(1)
    )
    complement = f.concat(f.translate(digits, "0123456789", "9876543210"), f.lit("~"))
    return f.struct(
        sign.alias("sign"),
        f.when(sign == 1, place).when(sign == -1, -place).otherwise(0).alias("place"),
        f.when(sign == 1, digits).when(sign == -1, complement).otherwise("").alias("digits"),
        value.alias("text"),
    )


@dataclass(frozen=True, slots=True)
class NumeralSum:
    """The exact sum of texts that write numbers, over the results of its aggregates."""

    total: Column
    """The sum, where Spark can add; NULL in groups with other values."""
    others: Column
    """Texts that Spark cannot add exactly, and the sum of the rest: NULL where there are none."""


def numeral_sum(value: Column, add: Callable[[Column], Column]) -> NumeralSum:
    """Add texts. `add` takes an aggregate and gives its result.

    A single value stays as it is written. Values of many digits or with an exponent, mostly none,
    are left to the reference reducer.
    """
    is_plain = value.rlike(_PLAIN)
    plain = f.when(is_plain, value)
    after = f.when(f.contains(plain, f.lit(".")), f.length(f.substring_index(plain, ".", -1)))
    count, only = add(f.count(value)), add(f.max(value))
    scale = f.coalesce(add(f.max(after)), f.lit(0))
    total = add(f.sum(plain.cast(f"decimal({2 * _DIGITS},{_DIGITS})")))
    others = add(f.collect_list(f.when(~is_plain, value)))
    text = total.cast("string")
    dropped = f.when(scale == 0, _DIGITS + 1).otherwise(_DIGITS - scale)
    cut = f.substring(text, f.lit(1), f.length(text) - dropped)
    leftover = (count > 1) & (f.size(others) > 0)
    return NumeralSum(
        total=f.when(count == 1, only).when(~leftover, cut),
        others=f.when(leftover, f.array_compact(f.concat(others, f.array(cut)))),
    )
