"""Validation on Spark: rows that do not fit become data, and never stop those that do.

Rows are columns already, such as the output of a derivation. They are judged by a compiled
expression where that is exact, else by the validator over the rows' JSON text. The rare row that is
refused is explained by the validator either way. Documents that are still text are `native.take`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as spark

from penstock.model.columns import Column
from penstock.model.schema import CompiledSchema, compiled, read_documents
from penstock.native import sql
from penstock.native.arrow import to_json
from penstock.native.predicate import predicate

_REFUSAL: Final = spark.StructType(
    [
        spark.StructField("pointer", spark.StringType()),
        spark.StructField("schema_pointer", spark.StringType()),
        spark.StructField("message", spark.StringType()),
    ]
)
Batches = Iterator[pa.RecordBatch]


def check_rows(
    rows: DataFrame, schema: CompiledSchema, root: Column, *, keep: Sequence[str] = ()
) -> tuple[DataFrame, DataFrame]:
    """Rows laid out as `root`, parted into those that are valid and the refusals of the others.

    `keep` names columns that say where a row comes from; refusals have them, too.
    """
    refused = spark.StructType([*(rows.schema[name] for name in keep), *_REFUSAL.fields])
    explain = _Explainer(schema=schema.text, root=root, keep=tuple(keep))
    valid = predicate(schema.schema, root)
    if valid is None:
        keeper = _Keeper(schema=schema.text, root=root)
        return rows.mapInArrow(keeper, rows.schema), rows.mapInArrow(explain, refused)
    refusable = rows.where(sql.negated(valid))
    return rows.where(valid), refusable.mapInArrow(explain, refused)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Keeper:
    """Keeps the rows that are valid."""

    schema: str
    root: Column

    def __call__(self, batches: Batches) -> Batches:
        schema = compiled(self.schema)
        for batch in batches:
            verdicts = read_documents(schema, to_json(batch, self.root))
            yield batch.filter(pa.array([not wrong for _, wrong in verdicts], pa.bool_()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Explainer:
    """Says what is wrong with the rows that are not valid."""

    schema: str
    root: Column
    keep: tuple[str, ...]

    def __call__(self, batches: Batches) -> Batches:
        schema = compiled(self.schema)
        for batch in batches:
            verdicts = read_documents(schema, to_json(batch, self.root))
            found = [(row, v) for row, (_, wrong) in enumerate(verdicts) for v in wrong]
            at = pa.array([row for row, _ in found], pa.int64())
            arrays = [batch.column(name).take(at) for name in self.keep]
            arrays += [
                pa.array([getattr(v, field) for _, v in found], pa.utf8())
                for field in _REFUSAL.fieldNames()
            ]
            names = [*self.keep, *_REFUSAL.fieldNames()]
            yield pa.RecordBatch.from_arrays(arrays, names=names)
