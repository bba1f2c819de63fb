"""Validation on Spark: good rows stay, bad ones become rows that say where and why."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession

from penstock.model.columns import columns
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow
from penstock.native.validate import check_rows

pytestmark = pytest.mark.spark

ORDERS = CompiledSchema(
    {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "total": {"type": ["number", "null"], "minimum": 0},
            "mail": {"type": "string", "redact": {"strategy": "sha256"}},
            "card": {"type": "string", "maxLength": 4, "redact": {"strategy": "block"}},
            "at": {"type": "string", "format": "date-time"},
        },
    }
)


def plain(rows: list[Row]) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in rows]


@pytest.mark.parametrize(
    "narrow",
    [
        pytest.param({"maxLength": 2}, id="by an expression"),
        pytest.param({"maxLength": 2, "format": "hostname"}, id="by the validator"),
    ],
)
def test_rows_are_parted_into_valid_ones_and_refusals(
    spark: SparkSession, narrow: dict[str, Any]
) -> None:
    wide: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    root = columns(CompiledSchema(wide).shape)
    batch = to_arrow([{"a": "ok"}, {"a": "long"}, {}, {"a": "no", "b": 1}], root)
    rows = spark.createDataFrame(pa.Table.from_batches([batch])).selectExpr(
        "*", "concat('row of ', coalesce(a, 'nothing')) AS origin"
    )
    schema = CompiledSchema(
        {
            "type": "object",
            "required": ["a"],
            "properties": {"a": {"type": "string", **narrow}},
            "additionalProperties": False,
        }
    )
    valid, refused = check_rows(rows, schema, root, keep=["origin"])
    assert [row["a"] for row in valid.collect()] == ["ok"]
    assert sorted((row["origin"], row["pointer"], row["message"]) for row in refused.collect()) == [
        ("row of long", "/a", '"long" is longer than 2 characters'),
        ("row of no", "/b", "is not allowed by the schema"),
        ("row of nothing", "/a", "is required but missing"),
    ]
