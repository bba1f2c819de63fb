"""SPARK: texts as what they write, for people who read collections in Spark.

    format: date-time    TIMESTAMP, the same instant to the microsecond
    format: date         DATE
    format: number       DECIMAL(38,18), as Spark reads NUMERIC of PostgreSQL
    format: integer      DECIMAL(38,0)

A collection keeps the text, with its offset and all of its digits; only readers see this. A leap
second is the second after it, as in PostgreSQL. A number that has more digits is refused, and never
rounded. A `time` stays text: it has an offset, and Spark's own TIME, which has none, is off by
default.

Twice, as everything here: Spark expressions for rows that Spark reads itself, and Arrow kernels for
rows that pass through Python. A property test holds them equal.
"""

from __future__ import annotations

import decimal
import itertools
from collections.abc import Sequence
from typing import Any, Final

import pyarrow
import pyarrow.compute
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.errors import UserError
from penstock.model import pointer
from penstock.model.columns import READ_DECIMALS, Column, Kind, walk_columns
from penstock.native import sql

pa: Any = pyarrow
pc: Any = pyarrow.compute

_SPARK: Final[dict[str, t.DataType]] = {
    "date-time": t.TimestampType(),
    "date": t.DateType(),
    **{name: t.DecimalType(*digits) for name, digits in READ_DECIMALS.items()},
}
_ARROW: Final[dict[str, Any]] = {
    "date-time": pa.timestamp("us", "UTC"),
    "date": pa.date32(),
    **{name: pa.decimal128(*digits) for name, digits in READ_DECIMALS.items()},
}
_SAID: Final = {
    "date-time": "a date-time",
    "date": "a date",
    "number": "a number that fits DECIMAL(38,18)",
    "integer": "an integer that fits DECIMAL(38,0)",
}
_FIX: Final = 'read texts as they are: read(…, keep_text=True), or .option("keepText", "true")'
_SCALE: Final = READ_DECIMALS["number"][1]


def has_meaning(column: Column) -> bool:
    """True if a column, or anything inside it, is read as something else than it is stored as."""
    return any(inner.meaning is not None for _, inner in walk_columns(column))


# ------------------------------------------------------------------------------------------ types


def read_schema(stored: t.StructType, root: Column) -> t.StructType:
    """The types that readers see: those of `stored` columns, some of which are a layout's."""
    inner = {m.name: m.column for m in root.members if m.column is not None}
    return t.StructType(
        [
            t.StructField(
                field.name,
                _read_type(inner[field.name], field.dataType)
                if field.name in inner
                else field.dataType,
                True,
                field.metadata,
            )
            for field in stored.fields
        ]
    )


def _read_type(column: Column, stored: t.DataType) -> t.DataType:
    if column.meaning is not None:
        return _SPARK[column.meaning]
    match stored:
        case t.StructType():
            return read_schema(stored, column)
        case t.ArrayType():
            return t.ArrayType(_read_type(column.item, stored.elementType))
        case t.MapType():
            return t.MapType(t.StringType(), _read_type(column.item, stored.valueType))
        case _:
            return stored


# ------------------------------------------------------------------------- as Spark expressions


def read_frame(frame: DataFrame, root: Column) -> DataFrame:
    """Rows of stored columns, some of which are a layout's, as readers see them."""
    inner = {m.name: m.column for m in root.members if m.column is not None}
    if not any(has_meaning(inner[name]) for name in frame.columns if name in inner):
        return frame
    wanted = read_schema(frame.schema, root)
    variables = (f"x{n}" for n in itertools.count())
    taken = [
        _read_sql(sql.name(name), inner[name], pointer.child("", name), variables)
        if name in inner
        else sql.name(name)
        for name in frame.columns
    ]
    selected = frame.select(
        *(f.expr(text).alias(name) for text, name in zip(taken, frame.columns, strict=True))
    )
    return selected.to(wanted)  # expressions forget the metadata of fields


def _read_sql(value: str, column: Column, at: str, variables: Any) -> str:  # noqa: ANN401
    if not has_meaning(column):
        return value
    match column.kind:
        case Kind.STRUCT:
            parts = []
            for member in column.members:
                if member.column is not None:
                    inner, below = (
                        f"{value}.{sql.name(member.name)}",
                        pointer.child(at, member.name),
                    )
                    read = _read_sql(inner, member.column, below, variables)
                    parts.append(f"{sql.text(member.name)}, {read}")
            hidden = [name for name in (column.nulls, column.extra) if name is not None]
            parts += [f"{sql.text(name)}, {value}.{sql.name(name)}" for name in hidden]
            return f"CASE WHEN {value} IS NOT NULL THEN named_struct({', '.join(parts)}) END"
        case Kind.ARRAY:
            item = next(variables)
            below = _read_sql(item, column.item, f"{at}/*", variables)
            return f"transform({value}, {item} -> {below})"
        case Kind.MAP:
            name, item = next(variables), next(variables)
            below = _read_sql(item, column.item, f"{at}/*", variables)
            return f"transform_values({value}, ({name}, {item}) -> {below})"
        case _:
            meaning = column.meaning or ""
            return _CONVERSIONS[meaning](value, _raised(value, meaning, at))


def _raised(value: str, meaning: str, at: str) -> str:
    """An error about a text that does not write what it should; NULL stays NULL."""
    said = sql.text(f"penstock: {at} is not {_SAID[meaning]}: ")
    fix = sql.text(f". {_FIX}")
    return f"CASE WHEN {value} IS NOT NULL THEN raise_error(concat({said}, {value}, {fix})) END"


def _instant_sql(value: str, wrong: str) -> str:
    """Spark reads most of what RFC 3339 allows; the rest is put together from its parts."""
    is_one = (
        f"{value} RLIKE '^[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[tT][0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}}"
        "([.][0-9]+)?([zZ]|[+-][0-9]{2}:[0-9]{2})$'"
    )
    minute = (
        f"CAST(concat(substr({value}, 1, 10), 'T', substr({value}, 12, 5), ':00Z') AS TIMESTAMP)"
    )
    seconds = f"CAST(substr({value}, 18, 2) AS BIGINT) * 1000000"
    fraction = f"rpad(regexp_extract({value}, '[.]([0-9]{{1,6}})', 1), 6, '0')"
    minutes = f"CAST(substr({value}, -5, 2) AS BIGINT) * 60 + CAST(substr({value}, -2) AS BIGINT)"
    sign = f"CASE WHEN substr({value}, -6, 1) = '-' THEN -60000000 ELSE 60000000 END"
    offset = f"CASE WHEN {value} RLIKE '[zZ]$' THEN 0 ELSE ({minutes}) * {sign} END"
    micros = f"unix_micros({minute}) + {seconds} + CAST({fraction} AS BIGINT) - {offset}"
    odd = f"CASE WHEN {is_one} THEN timestamp_micros({micros}) ELSE {wrong} END"
    return f"coalesce(try_cast({value} AS TIMESTAMP), {odd})"


def _date_sql(value: str, wrong: str) -> str:
    return f"coalesce(try_cast({value} AS DATE), {wrong})"


def _number_sql(value: str, wrong: str) -> str:
    """A cast would round digits beyond the scale, so the digits that count are counted."""
    mantissa = f"regexp_extract({value}, '^([^eE]*)', 1)"
    digits = f"regexp_replace({mantissa}, '[^0-9]', '')"
    zeros = f"(length({digits}) - length(rtrim('0', {digits})))"
    after = f"length(regexp_extract({mantissa}, '[.]([0-9]*)', 1))"
    exponent = f"coalesce(try_cast(regexp_extract({value}, '[eE](.*)', 1) AS INT), 0)"
    no_exponent = f"instr({value}, 'e') = 0 AND instr({value}, 'E') = 0"
    plain = f"{no_exponent} AND length(substring_index({value}, '.', -1)) <= {_SCALE}"
    exact = f"({plain}) OR {after} - {exponent} - {zeros} <= {_SCALE} OR rtrim('0', {digits}) = ''"
    read = f"try_cast({value} AS DECIMAL(38,{_SCALE}))"
    return f"coalesce(CASE WHEN {exact} THEN {read} END, {wrong})"


def _integer_sql(value: str, wrong: str) -> str:
    return f"coalesce(try_cast({value} AS DECIMAL(38,0)), {wrong})"


_CONVERSIONS: Final = {
    "date-time": _instant_sql,
    "date": _date_sql,
    "number": _number_sql,
    "integer": _integer_sql,
}


# ------------------------------------------------------------------------------ as Arrow kernels


def read_rows(rows: pyarrow.RecordBatch, root: Column, names: Sequence[str]) -> pyarrow.RecordBatch:
    """The same rows with the columns of these names as readers see them."""
    inner = {m.name: m.column for m in root.members if m.column is not None}
    batch: Any = rows
    arrays, fields = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        if field.name in names and field.name in inner:
            array = _read_array(inner[field.name], array, pointer.child("", field.name))
        arrays.append(array)
        fields.append(pa.field(field.name, array.type, True, field.metadata))
    made: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    return made


def _read_array(column: Column, array: Any, at: str) -> Any:  # noqa: ANN401 - Arrow's
    if not has_meaning(column):
        return array
    match column.kind:
        case Kind.STRUCT:
            members = {m.name: m.column for m in column.members}
            fields, arrays = [], []
            for field in array.type:
                below, member = array.field(field.name), members.get(field.name)
                if member is not None:
                    below = _read_array(member, below, pointer.child(at, field.name))
                arrays.append(below)
                fields.append(pa.field(field.name, below.type, True, field.metadata))
            return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())
        case Kind.ARRAY:
            items = _read_array(column.item, array.values, f"{at}/*")
            kind = pa.list_(pa.field("element", items.type))
            return pa.ListArray.from_arrays(_offsets(array), items, type=kind, mask=array.is_null())
        case Kind.MAP:
            items = _read_array(column.item, array.items, f"{at}/*")
            return pa.MapArray.from_arrays(_offsets(array), array.keys, items, mask=array.is_null())
        case _:
            meaning = column.meaning or ""
            try:
                return _KERNELS[meaning](array)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise _refusal(array, meaning, at) from None


def _offsets(array: Any) -> Any:  # noqa: ANN401
    return pa.array(array.offsets.to_numpy(), pa.int32())  # a copy: no mask beside a slice


def _refusal(array: Any, meaning: str, at: str) -> UserError:  # noqa: ANN401
    """Find the text that a kernel stumbled over."""
    for text in array.to_pylist():
        try:
            _KERNELS[meaning](pa.array([text], pa.utf8()))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return UserError(f"{at} is not {_SAID[meaning]}: {text}", fix=_FIX)
    return UserError(f"{at} is not {_SAID[meaning]}", fix=_FIX)


def _instants(array: Any) -> Any:  # noqa: ANN401
    texts = pc.replace_substring_regex(pc.ascii_upper(array), r"(\.[0-9]{6})[0-9]+", r"\1")
    leap = pc.equal(pc.utf8_slice_codeunits(texts, 17, 19), "60")
    if not pc.any(leap).as_py():
        return texts.cast(_ARROW["date-time"])
    texts = pc.if_else(leap, pc.binary_replace_slice(texts, 17, 19, "59").cast(pa.utf8()), texts)
    micros = texts.cast(_ARROW["date-time"]).cast(pa.int64())
    return pc.add(micros, pc.if_else(leap, 1_000_000, 0)).cast(_ARROW["date-time"])


def _dates(array: Any) -> Any:  # noqa: ANN401
    return array.cast(_ARROW["date"])


def _decimals(array: Any) -> Any:  # noqa: ANN401
    try:
        return array.cast(_ARROW["number"])
    except pa.ArrowInvalid:
        # Zeros at the end and exponents: what fits exactly may be written in more digits.
        return pa.array([_decimal(text) for text in array.to_pylist()], _ARROW["number"])


_EXACT: Final = decimal.Context(
    prec=READ_DECIMALS["number"][0], traps=[decimal.Inexact, decimal.InvalidOperation]
)
_LAST_DIGIT: Final = decimal.Decimal(1).scaleb(-_SCALE)


def _decimal(text: str | None) -> decimal.Decimal | None:
    if text is None:
        return None
    try:
        value = decimal.Decimal(text).quantize(_LAST_DIGIT, context=_EXACT)
    except decimal.DecimalException:
        raise pa.ArrowInvalid("does not fit") from None
    if not value.is_finite():
        raise pa.ArrowInvalid("not a number")
    return value


def _integers(array: Any) -> Any:  # noqa: ANN401
    return array.cast(_ARROW["integer"])


_KERNELS: Final = {
    "date-time": _instants,
    "date": _dates,
    "number": _decimals,
    "integer": _integers,
}
