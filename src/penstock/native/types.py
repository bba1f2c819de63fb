"""Column layouts as Spark and Arrow types, and types of other people's tables as shapes.

Both type systems are derived from one `Column` tree, so they cannot disagree. What a type cannot
say is in field metadata, under keys that begin with `penstock.`: that a STRING is JSON text, what
the text of a string stands for, whether a member is required or may be null, and which members are
hidden ones. Arrow carries it the way Spark writes it, so it survives either road.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as spark

from penstock.errors import UserError
from penstock.model.columns import Column, Kind
from penstock.model.shape import (
    ANY,
    NOTHING,
    Arrays,
    Numbers,
    Objects,
    Property,
    Shape,
    Strings,
    of_type,
    union,
)

JSON: Final = "penstock.json"
LOGICAL: Final = "penstock.logical"
REQUIRED: Final = "penstock.required"
NULLABLE: Final = "penstock.nullable"
HIDDEN: Final = "penstock.hidden"
NAMES: Final = "penstock.names"
ELEMENT: Final = "penstock.element"

_SPARK_METADATA: Final = b"SPARK::metadata::json"
_NULLS_TYPE: Final = spark.ArrayType(spark.ShortType())
_EXTRA_TYPE: Final = spark.MapType(spark.StringType(), spark.StringType())
_ENCODINGS: Final = frozenset({"base64", "base32", "base16", "quoted-printable"})


def spark_schema(root: Column) -> spark.StructType:
    """The columns of whole documents. Every column is nullable: NULL is how absence is stored."""
    fields = [
        spark.StructField(
            member.name,
            _spark_type(member.column),
            True,
            _metadata(member.column) | ({REQUIRED: True} if member.required else {}),
        )
        for member in root.members
        if member.column is not None
    ]
    if root.nulls is not None:
        names = [member.name for member in root.members]
        hidden = {HIDDEN: "nulls", NAMES: names}
        fields.append(spark.StructField(root.nulls, _NULLS_TYPE, True, hidden))
    if root.extra is not None:
        fields.append(spark.StructField(root.extra, _EXTRA_TYPE, True, {HIDDEN: "extra"}))
    return spark.StructType(fields)


def _spark_type(column: Column) -> spark.DataType:
    match column.kind:
        case Kind.BOOLEAN:
            return spark.BooleanType()
        case Kind.LONG:
            return spark.LongType()
        case Kind.DECIMAL:
            return spark.DecimalType(column.precision, column.scale)
        case Kind.DOUBLE:
            return spark.DoubleType()
        case Kind.STRING | Kind.JSON:
            return spark.StringType()
        case Kind.STRUCT:
            return spark_schema(column)
        case Kind.MAP:
            return spark.MapType(spark.StringType(), _spark_type(column.item))
        case Kind.ARRAY:
            return spark.ArrayType(_spark_type(column.item))


def _metadata(column: Column) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if column.kind is Kind.JSON:
        said[JSON] = True
    elif column.nullable:
        said[NULLABLE] = True
    if column.logical is not None:
        said[LOGICAL] = column.logical
    if column.element is not None and (below := _metadata(column.element)):
        said[ELEMENT] = below
    return said


def arrow_schema(root: Column) -> pa.Schema:
    """The same columns for Arrow."""
    return pa.schema([_arrow_field(field) for field in spark_schema(root).fields])


def arrow_type(column: Column) -> pa.DataType:
    """One column's type for Arrow."""
    return _arrow_type(_spark_type(column))


def _arrow_field(field: spark.StructField) -> pa.Field[Any]:
    metadata = {_SPARK_METADATA: json.dumps(field.metadata).encode()} if field.metadata else None
    return pa.field(field.name, _arrow_type(field.dataType), True, metadata)


def _arrow_type(kind: spark.DataType) -> pa.DataType:
    match kind:
        case spark.BooleanType():
            return pa.bool_()
        case spark.LongType():
            return pa.int64()
        case spark.ShortType():
            return pa.int16()
        case spark.DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
        case spark.DoubleType():
            return pa.float64()
        case spark.StringType():
            return pa.utf8()
        case spark.ArrayType():
            return pa.list_(pa.field("element", _arrow_type(kind.elementType)))
        case spark.MapType():
            return pa.map_(pa.utf8(), _arrow_type(kind.valueType))
        case spark.StructType():
            return pa.struct([_arrow_field(field) for field in kind.fields])
        case _:
            raise AssertionError(f"no layout has a column of type {kind.simpleString()}")


def shape_of(kind: spark.DataType, metadata: Mapping[str, Any] | None = None) -> Shape:
    """What a Spark type says of its values as JSON: the way back, also for foreign tables.

    Of our own types, laying the shape out again gives the same type. Of foreign ones, dates and
    times become strings of that format, binary becomes base64, and a NULL is a missing member.
    """
    said = metadata or {}
    shape = ANY if said.get(JSON) else _shape_of(kind, said)
    return union(shape, of_type("null")) if said.get(NULLABLE) else shape


def _shape_of(kind: spark.DataType, said: Mapping[str, Any]) -> Shape:
    match kind:
        case spark.NullType():
            return of_type("null")
        case spark.BooleanType():
            return of_type("boolean")
        case spark.ByteType() | spark.ShortType() | spark.IntegerType() | spark.LongType():
            return of_type("integer")
        case spark.FloatType() | spark.DoubleType():
            return of_type("number")
        case spark.DecimalType():
            return _decimal_shape(kind)
        case spark.StringType() | spark.CharType() | spark.VarcharType():
            return _text_shape(said.get(LOGICAL))
        case spark.BinaryType():
            return _text_shape("base64")
        case spark.DateType():
            return _text_shape("date")
        case spark.TimestampType():
            return _text_shape("date-time")
        case spark.TimestampNTZType() | spark.TimeType():
            return _text_shape(None)  # without a zone, which the formats of JSON Schema want
        case spark.VariantType():
            return ANY
        case spark.ArrayType():
            items = shape_of(kind.elementType, said.get(ELEMENT))
            return Shape(types=frozenset({"array"}), arrays=Arrays(items=items))
        case spark.MapType() if isinstance(kind.keyType, spark.StringType):
            values = shape_of(kind.valueType, said.get(ELEMENT))
            return Shape(types=frozenset({"object"}), objects=Objects(additional=values))
        case spark.StructType():
            return _struct_shape(kind)
        case _:
            raise UserError(
                f"the Spark type {kind.simpleString()} has no JSON counterpart",
                fix="cast the column to a string, a number or a struct first",
            )


def _decimal_shape(kind: spark.DecimalType) -> Shape:
    whole = 10 ** (kind.precision - kind.scale) - 1
    if not kind.scale:
        bounds = Numbers(minimum=-whole, maximum=whole)
        return Shape(types=frozenset({"integer"}), numbers=bounds)
    # The last fraction is left out of the bounds: only their digits count.
    numbers = Numbers(minimum=-whole, maximum=whole, multiple_of=float(f"1e-{kind.scale}"))
    return Shape(types=frozenset({"number"}), numbers=numbers)


def _text_shape(logical: str | None) -> Shape:
    strings = (
        Strings(content_encoding=logical) if logical in _ENCODINGS else Strings(format=logical)
    )
    return Shape(types=frozenset({"string"}), strings=strings)


def _struct_shape(kind: spark.StructType) -> Shape:
    properties: dict[str, Property] = {}
    named: list[str] = []
    additional: Shape | None = NOTHING
    for field in kind.fields:
        match field.metadata.get(HIDDEN):
            case "nulls":
                named = field.metadata[NAMES]
            case "extra":
                additional = None
            case _:
                properties[field.name] = Property(
                    shape=shape_of(field.dataType, field.metadata),
                    required=bool(field.metadata.get(REQUIRED)),
                )
    for name in named:  # those without a column are null whenever they are there
        properties.setdefault(name, Property(shape=of_type("null"), required=False))
    objects = Objects(properties=dict(sorted(properties.items())), additional=additional)
    return Shape(types=frozenset({"object"}), objects=objects)
