"""Packed keys, their hash and their shard as Spark expressions, byte for byte those of the model.

What `penstock.model.keys` says of a value is said here of a column, by its Spark type:

    BOOLEAN, TINYINT … BIGINT, DECIMAL(p, 0), STRING, BINARY        NULL packs as null

**DOUBLE is refused**, as are FLOAT and decimals with a fraction: the catalog does not allow
numbers with fractions as keys, and Spark has no expression for the bits of a double. An integer
of more than 38 digits is stored as text; its column would pack as a string, so the
resolver of such a key packs it in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.errors import UserError
from penstock.model import keys, routing

if TYPE_CHECKING:
    from pyspark.sql import Column

_DIGITS: Final = "0123456789ABCDEF"
_BIGINT_MIN: Final = -(2**63)
_BIGINT_MAX: Final = 2**63 - 1
_DECIMAL_DIGITS: Final = 38


def packed_key(components: Sequence[tuple[Column, t.DataType]]) -> Column:
    """The packed key over columns and their types: BINARY, never NULL."""
    parts = [pack_component(column, kind) for column, kind in components]
    return parts[0] if len(parts) == 1 else f.concat(*parts)


def key_hash(packed: Column) -> Column:
    """The key's 32-bit hash as BIGINT, so that it is never negative."""
    return f.shiftrightunsigned(f.xxhash64(packed), 32)


def shard_index(key_hash: Column, count: int) -> Column:
    """The one of `count` equal shards that owns a key hash: `model.routing.shard_of`, as INT."""
    if not 1 <= count <= routing.SHARDS_MAX:
        raise UserError(f"cannot route to {count} shards")
    return f.shiftright((key_hash + 1) * count - 1, 32).cast("int")


def pack_component(column: Column, kind: t.DataType) -> Column:
    """One component of a packed key."""
    match kind:
        case t.StringType():
            packed = f.concat(f.lit(b"\x02"), _escaped(column), f.lit(b"\0"))
        case t.LongType():
            packed = _pack_bigint(column)
        case t.ByteType() | t.ShortType() | t.IntegerType():
            packed = _pack_bigint(column.cast("bigint"))
        case t.DecimalType(scale=0):
            packed = _pack_decimal(column.cast(f"decimal({_DECIMAL_DIGITS},0)"))
        case t.BooleanType():
            packed = f.when(column, keys.pack([True])).when(~column, keys.pack([False]))
        case t.BinaryType():
            packed = f.concat(f.lit(b"\x01"), _escaped(column.cast("string")), f.lit(b"\0"))
        case t.NullType():
            return f.lit(keys.pack([None]))
        case _:
            raise UserError(
                f"a {kind.simpleString().upper()} column cannot be part of a key",
                why="keys are booleans, integers, strings and bytes",
                fix="choose another key, or declare the location as an integer or a string",
            )
    return f.coalesce(packed, f.lit(keys.pack([None])))


def _escaped(text: Column) -> Column:
    # Spark's strings are bytes it does not check, so one may hold the escape, which is not UTF-8.
    # `replace` hands a string without NUL, as nearly all are, back untouched.
    escape = f.lit(b"\0\xff").cast("string")
    return f.replace(text, f.lit("\0"), escape).cast("binary")


def _pack_bigint(value: Column) -> Column:
    # The least BIGINT has no absolute value, but its two's complement digits are its magnitude.
    magnitude = f.when(value == _BIGINT_MIN, value).otherwise(f.abs(value))
    return _pack_digits(value, f.hex(magnitude))


def _pack_decimal(value: Column) -> Column:
    """Decimals beyond BIGINT, in two steps: 38 decimal digits are less than 63 + 64 bits."""
    # Spark's `abs` and unary minus round decimals to 34 digits; a difference keeps them all.
    magnitude = f.when(value < 0, _decimal(0) - value).otherwise(value)
    low = f.pmod(magnitude, _decimal(2**64))
    digits = f.concat(
        f.hex(_div(magnitude, 2**64)),
        f.lpad(f.hex(_div(low, 2**32)), 8, "0"),
        f.lpad(f.hex(f.pmod(low, _decimal(2**32)).cast("bigint")), 8, "0"),
    )
    fits = value.between(_decimal(_BIGINT_MIN), _decimal(_BIGINT_MAX))
    large = _pack_digits(value, f.ltrim(digits, f.lit("0")))
    return f.when(fits, _pack_bigint(value.cast("bigint"))).otherwise(large)


def _div(value: Column, divisor: int) -> Column:
    return f.call_function("div", value, _decimal(divisor))


def _decimal(value: int) -> Column:
    return f.lit(str(value)).cast(f"decimal({_DECIMAL_DIGITS},0)")


def _pack_digits(value: Column, digits: Column) -> Column:
    """An integer from its sign and the hexadecimal digits of its magnitude, without leading zeros.

    What comes before the digits depends on how many there are, and is looked up in tables made
    by the model: code, byte count if any, and the digit that fills up the first byte.
    """
    below = f.translate(digits, _DIGITS, _DIGITS[::-1])
    return (
        f.when(value == 0, keys.pack([0]))
        .when(value > 0, f.unhex(f.concat(_head(digits, _HEADS), digits)))
        .when(value < 0, f.unhex(f.concat(_head(digits, _HEADS_BELOW_ZERO), below)))
    )


def _head(digits: Column, heads: tuple[str, ...]) -> Column:
    table = f.expr(f"array({', '.join(map(repr, heads))})")  # one call to the JVM, not one each
    return f.element_at(table, f.length(digits))


def _heads(sign: int) -> tuple[str, ...]:
    counts = range(1, 33)
    return tuple(keys.pack([sign * 16 ** (n - 1)]).hex()[:-n] for n in counts)


_HEADS: Final = _heads(1)
_HEADS_BELOW_ZERO: Final = _heads(-1)
