"""Validation on Spark: good documents become columns, bad ones rows that say where and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession

from penstock.model.columns import columns
from penstock.model.redact import digest
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow
from penstock.native.validate import check_rows, documents, json_lines, read_json, refusals

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


def test_lines_become_documents_or_refusals_by_file_line_and_pointer(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "orders + more.jsonl"
    lines = [
        '{"id": 1, "total": 9.5, "mail": "a@b", "card": "1234", "more": {"b": 1, "a": [1.0]}}',
        '{"id": 2.0, "total": null, "id": 3}',
        "",
        '{"id": "x", "total": -1}',
        '{"total": 1',
        '{"id": 18446744073709551615}',
        '{"id": 4, "card": "12345"}',
        '{"id": 5, "at": "yesterday"}\r',
    ]
    path.write_text("\n".join(lines))
    read = read_json(json_lines(spark, str(path)), ORDERS, salt=b"salt").cache()

    assert plain(documents(read).orderBy("id").collect()) == [
        {
            "at": None,
            "card": None,
            "id": 1,
            "mail": digest("a@b", b"salt"),
            "total": 9.5,
            "_n": None,
            "_x": {"more": '{"a":[1],"b":1}'},
        },
        {"at": None, "card": None, "id": 3, "mail": None, "total": None, "_n": [4], "_x": None},
    ]
    found = refusals(read).orderBy("line", "pointer").collect()
    assert {row["file"] for row in found} == {str(path)}
    assert [(row["line"], row["pointer"], row["message"]) for row in found] == [
        (4, "/id", '"x" is not an integer'),
        (4, "/total", "-1 is less than 0"),
        (5, "", "is not a JSON document: Input data was truncated"),
        (
            6,
            "/id",
            "18446744073709551615 does not fit 64 bits (declare minimum and maximum, "
            "or a string with format: integer) [E-INT-RANGE]",
        ),
        (7, "/card", "the value, which is secret, is longer than 4 characters"),
        (8, "/at", '"yesterday" does not have the format date-time'),
    ]


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


def test_what_is_read_is_what_was_written(spark: SparkSession) -> None:
    schema = CompiledSchema(
        {"type": "object", "properties": {"big": {"maximum": 10**30, "type": "integer"}}}
    )
    texts = [{"big": 10**25, "x": [None, {"é": 0.1}]}, {"big": 1e3}, {}]
    lines = spark.createDataFrame([(json.dumps(t),) for t in texts], "text string")
    got = plain(documents(read_json(lines, schema)).collect())
    assert [(row["big"], row["_x"]) for row in got] == [
        (10**25, {"x": '[null,{"é":0.1}]'}),
        (1000, None),
        (None, None),
    ]
