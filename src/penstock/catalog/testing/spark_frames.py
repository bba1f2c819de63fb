"""SPARK: derivations by Spark SQL in a test: the lambdas that run on frames of its documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow
from pyspark.sql.types import LongType

from penstock.catalog.testing.contents import PRODUCER
from penstock.catalog.testing.running import Output, Read
from penstock.journal.rows import row_schema
from penstock.journal.scan import rows_schema
from penstock.journal.schemas import layout
from penstock.model.clock import Flag
from penstock.model.spec import Catalog, CollectionSpec
from penstock.native.arrow import to_arrow, to_json
from penstock.runtime.derive.languages import spark_lambdas
from penstock.runtime.derive.spark_engine import SparkTransform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_pa: Any = pyarrow

_ORDER: Final = "$ord"
"""The column of positions among the reads of a transaction."""


class FrameDerivation:
    """A derivation whose code works on frames. It keeps no state, and has no shards."""

    def __init__(
        self, catalog: Catalog, target: CollectionSpec, spark: Callable[[], SparkSession]
    ) -> None:
        self._lambdas = spark_lambdas(catalog, target) or {}
        self._target = target
        self._root = layout(target.write_schema.text)
        self._spark = spark
        self._transforms: dict[int, SparkTransform] = {}

    def run(self, reads: Sequence[Read]) -> list[Output]:
        by_transform: dict[int, list[int]] = {}
        for position, read in enumerate(reads):
            by_transform.setdefault(read.binding.index, []).append(position)
        made = [
            each
            for at, positions in by_transform.items()
            for each in self._transformed(at, positions, [reads[i] for i in positions])
        ]
        made.sort(key=lambda each: -1 if each[0] is None else each[0])
        return made

    def _transformed(
        self, at: int, positions: Sequence[int], reads: Sequence[Read]
    ) -> list[Output]:
        transform = self._transform(at, reads[0].source.spec)
        ordered = self._lambdas[at].ordered_text is not None
        with transform.errors():
            frame = transform.apply(
                self._frame(reads, positions), order=_ORDER if ordered else None, uniform=True
            )
            table: Any = frame.toArrow()
        names = [name for name in table.column_names if name != _ORDER]
        texts = [
            text
            for batch in table.select(names).to_batches()
            for text in to_json(batch, self._root)
        ]
        order = table.column(_ORDER).to_pylist() if ordered else [None] * len(texts)
        rows = list(zip(order, texts, strict=True))
        if ordered:
            rows.sort(key=lambda row: tuple(row[0].values()))
        return [
            (None if place is None else place["$document"], json.loads(text))
            for place, text in rows
        ]

    def _transform(self, at: int, source: CollectionSpec) -> SparkTransform:
        if at not in self._transforms:
            derivation = self._target.derivation
            name = derivation.transforms[at].name if derivation is not None else ""
            self._transforms[at] = SparkTransform(
                self._lambdas[at], source, self._target, name=name
            )
        return self._transforms[at]

    def _frame(self, reads: Sequence[Read], positions: Sequence[int]) -> DataFrame:
        """The documents as rows of a journal, with their positions."""
        root = layout(reads[0].source.spec.read_schema.text)
        documents = to_arrow([read.stored.document for read in reads], root)
        rows = len(reads)
        stamps = [
            _pa.array([int(read.stored.clock) for read in reads], _pa.int64()),
            _pa.array(np.full(rows, int(PRODUCER), np.int64)),
            _pa.array(np.full(rows, int(Flag.CONTINUE_TXN), np.int16)),
        ]
        arrow = row_schema(root)
        table = _pa.Table.from_arrays([*documents.columns, *stamps], schema=arrow)
        table = table.append_column(_ORDER, _pa.array(positions, _pa.int64()))
        schema = rows_schema(root, arrow.names).add(_ORDER, LongType())
        return self._spark().createDataFrame(table, schema)
