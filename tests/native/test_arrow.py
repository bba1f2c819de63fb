"""Documents to Arrow and back: nothing is lost, nothing is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from pyspark.sql import SparkSession

from penstock.model.columns import as_stored, columns, unstorable
from penstock.model.infer import infer
from penstock.model.json_order import canonical_json
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow, to_json
from support import strategies_schema as strategies


@given(strategies.cases())
def test_documents_survive_the_way_through_columns(
    case: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    schema, documents = case
    compiled = CompiledSchema(schema)
    root = columns(compiled.shape)
    stored = [d for d in documents if compiled.is_valid(d) and unstorable(d, root) is None]
    texts = [canonical_json(as_stored(d, root)) for d in stored]
    batch = to_arrow(stored, root)
    batch.validate(full=True)
    assert to_json(batch, root) == texts
    assert to_json(batch.slice(1, 3), root) == texts[1:4]


@pytest.mark.spark
def test_odd_names_survive_spark_and_parquet(spark: SparkSession, tmp_path: Path) -> None:
    odd = ["", " ", "a.b", "a`b", 'a"b', "A", "a", "é/~", "x;,{}()=\n\t", "_n", "_x"]
    members = {name: {"type": ["integer", "null"]} for name in odd}
    nested = {"type": "object", "properties": members}
    root = columns(infer({"type": "object", "properties": {**members, "o": nested}}))
    documents: list[dict[str, Any]] = [
        {name: i for i, name in enumerate(odd)},
        {**dict.fromkeys(odd), "o": dict.fromkeys(odd), "more": 1},
        {"o": {"a.b": 1, "other": {"b": 1, "a": 2}}},
    ]
    frame = spark.createDataFrame(pa.Table.from_batches([to_arrow(documents, root)]))
    frame.write.parquet(str(tmp_path / "odd"))
    (batch,) = spark.read.parquet(str(tmp_path / "odd")).toArrow().combine_chunks().to_batches()
    assert sorted(to_json(batch, root)) == sorted(map(canonical_json, documents))
