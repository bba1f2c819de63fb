"""SPARK: rows of fragments as DataFrames, also those of an older layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql import types as t

from penstock.journal.rows import adapt_rows, stamp_names
from penstock.model.columns import Column
from penstock.native.spark_types import spark_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def frame_schema(root: Column) -> t.StructType:
    """The columns of a fragment, for Spark's own Parquet reader."""
    names = stamp_names(root)
    return t.StructType(
        [
            *spark_schema(root).fields,
            t.StructField(names.clock, t.LongType()),
            t.StructField(names.producer, t.LongType()),
            t.StructField(names.flags, t.ShortType()),
        ]
    )


def map_rows(
    frame: DataFrame,
    function: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    schema: t.StructType | str,
) -> DataFrame:
    """`mapInArrow`, whatever the columns are called.

    Spark resolves the columns of such a stage by name and trips over dots and backticks, which are
    fine in the names of members: so they go through it under numbers.
    """
    names = frame.columns

    def named(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from function(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*map(str, range(len(names)))).mapInArrow(named, schema)


def adapt_frame(frame: DataFrame, written: Column, wanted: Column) -> DataFrame:
    """Rows of one layout in another; of the same layout, the frame itself. The stamp is last.

    A stage of Arrow batches in Python, like `adapt_rows`: taking text apart into columns, and
    putting columns together to text, have no Spark expression that keeps every number as it is.
    """
    if written == wanted:
        return frame

    def adapted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield adapt_rows(batch, written, wanted)

    return map_rows(frame, adapted, frame_schema(wanted))
