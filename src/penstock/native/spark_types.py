"""Column layouts as Spark types.

The same columns as `arrow_types`, with the same field metadata: a frame and a batch of one layout
never disagree.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import types as spark

from penstock.model.columns import Column, Kind
from penstock.native.arrow_types import HIDDEN, hidden_fields, member_metadata

_NULLS_TYPE: Final = spark.ArrayType(spark.ShortType())
_EXTRA_TYPE: Final = spark.MapType(spark.StringType(), spark.StringType())


def spark_schema(root: Column) -> spark.StructType:
    """The columns of whole documents. Every column is nullable: NULL is how absence is stored."""
    fields = [
        spark.StructField(member.name, _spark_type(member.column), True, member_metadata(member))
        for member in root.members
        if member.column is not None
    ]
    kinds = {"nulls": _NULLS_TYPE, "extra": _EXTRA_TYPE}
    fields += [
        spark.StructField(name, kinds[metadata[HIDDEN]], True, metadata)
        for name, metadata in hidden_fields(root)
    ]
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
