"""Spark and Arrow types of a schema, rule by rule."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.model.columns import Kind, as_stored, check_columns, columns, unstorable, walk_columns
from penstock.model.infer import infer
from penstock.native.arrow_types import JSON, LOGICAL, arrow_schema
from penstock.native.spark_types import spark_schema
from support import strategies_schema as strategies

CENTS = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 9999999}
CLOSED = {"type": "object", "additionalProperties": False}


def type_of(schema: dict[str, Any]) -> str:
    """The Spark type of a location `v` with this schema, in Spark's notation."""
    whole = {**CLOSED, "properties": {"v": schema}, "required": ["v"]}
    return spark_schema(columns(infer(whole)))["v"].dataType.simpleString()


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        pytest.param({"type": "boolean"}, "boolean", id="boolean"),
        pytest.param({"type": "integer"}, "bigint", id="integer"),
        pytest.param({"enum": [1, 2, None]}, "bigint", id="listed integers"),
        pytest.param({"type": "integer", "maximum": 2**64 - 1}, "decimal(38,0)", id="unsigned"),
        pytest.param({"type": "integer", "exclusiveMaximum": 2**63}, "bigint", id="just fits"),
        pytest.param({"type": "integer", "maximum": 10**38}, "string", id="39 digits"),
        pytest.param({"type": "number"}, "double", id="number"),
        pytest.param({"type": ["integer", "number"]}, "double", id="integer and number"),
        pytest.param(CENTS, "decimal(9,2)", id="exact money"),
        pytest.param({**CENTS, "x-penstock-type": "double"}, "double", id="unless opted out"),
        pytest.param({**CENTS, "multipleOf": 0.05}, "double", id="not a power of ten"),
        pytest.param({"type": "string", "format": "date-time"}, "string", id="string"),
        pytest.param(
            {**CLOSED, "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}},
            "struct<a:string,b:bigint>",
            id="object",
        ),
        pytest.param(
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "map<string,bigint>",
            id="map",
        ),
        pytest.param({"type": "object"}, "string", id="nothing known"),
        pytest.param(
            {**CLOSED, "patternProperties": {"^a": {"type": "integer"}, "^b": {"type": "string"}}},
            "string",
            id="several patterns",
        ),
        pytest.param({"type": "array", "items": {"type": "string"}}, "array<string>", id="array"),
        pytest.param({"type": "array"}, "array<string>", id="of anything is JSON text"),
        pytest.param({"type": "array", "items": [{"type": "integer"}]}, "string", id="tuple"),
        pytest.param({"type": ["integer", "string"]}, "string", id="union"),
        pytest.param(True, "string", id="any"),
        pytest.param({"type": ["integer", "null"]}, "bigint", id="null beside a type"),
        pytest.param(
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            "struct<a:bigint,_x:map<string,string>>",
            id="open object",
        ),
        pytest.param(
            {**CLOSED, "properties": {"_n": {"type": ["string", "null"]}}},
            "struct<_n:string,__n:array<smallint>>",
            id="hidden members yield",
        ),
    ],
)
def test_each_rule_has_its_type(schema: dict[str, Any], want: str) -> None:
    assert type_of(schema) == want


def test_null_only_members_are_not_stored_but_known() -> None:
    root = columns(
        infer({**CLOSED, "properties": {"a": {"type": "integer"}, "z": {"type": "null"}}})
    )
    assert [field.name for field in spark_schema(root).fields] == ["a", "_n"]


def test_metadata_says_what_types_cannot() -> None:
    schema = {"properties": {"j": {}, "s": {"type": "string", "format": "uuid"}}, "type": "object"}
    made = spark_schema(columns(infer(schema)))
    assert made["j"].metadata[JSON] is True
    assert made["s"].metadata[LOGICAL] == "uuid"


@given(strategies.collection_schemas())
def test_arrow_types_are_what_spark_makes_of_its_types(schema: dict[str, Any]) -> None:
    root = columns(infer(schema))
    assert arrow_schema(root).equals(to_arrow_schema(spark_schema(root)), check_metadata=True)


def test_deep_and_wide_schemas_fold_into_json_text() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        deep = {**CLOSED, "properties": {"d": deep}}
    kinds = [column.kind for _, column in walk_columns(columns(infer(deep)))]
    assert kinds == [Kind.STRUCT] * 17 + [Kind.JSON]

    wide = {**CLOSED, "properties": {f"m{i}": {"type": "integer"} for i in range(1500)}}
    both = infer({**CLOSED, "properties": {"k": {"type": "string"}, "one": wide, "two": wide}})
    assert [member.column.kind for member in columns(both).members if member.column] == [
        Kind.STRING,
        Kind.STRUCT,
        Kind.JSON,
    ]
    assert [(p.code, p.message) for p in check_columns(both)] == [
        ("W-WIDE", "3001 columns exceed the limit of 2000: /two is kept as JSON text")
    ]


def test_a_document_without_members_has_no_type() -> None:
    assert [problem.code for problem in check_columns(infer(CLOSED))] == ["E-SPARK-TYPE"]


@pytest.mark.parametrize(
    ("schema", "value", "why"),
    [
        pytest.param(
            {"type": "integer"}, 2**63, "9223372036854775808 does not fit 64 bits", id="int64"
        ),
        pytest.param({"type": "integer"}, 1e19, "1e+19 does not fit 64 bits", id="as a float"),
        pytest.param(
            {"type": "integer", "maximum": 2**64},
            -(10**40),
            "does not fit DECIMAL(38,0)",
            id="decimal",
        ),
        pytest.param({"type": "number"}, 10**400, "does not fit a double", id="double"),
        pytest.param(CENTS, 0.001, "0.001 does not fit DECIMAL(9,2)", id="fraction"),
    ],
)
def test_numbers_that_no_column_holds_are_named(
    schema: dict[str, Any], value: float, why: str
) -> None:
    whole = {**CLOSED, "properties": {"v": {"type": "array", "items": schema}}}
    found = unstorable({"v": [1, value]}, columns(infer(whole)))
    assert found is not None
    assert found[0] == "/v/1"
    assert found[1].endswith(why)


def test_numbers_are_stored_as_their_column_keeps_them() -> None:
    members = {"i": {"type": "integer"}, "d": {"type": "number"}, "c": CENTS, "j": {}}
    root = columns(infer({**CLOSED, "properties": members}))
    stored = as_stored({"i": 1e17, "d": 2**60 + 1, "c": 2.0, "j": 1e17}, root)
    assert stored == {"i": 10**17, "d": float(2**60), "c": 2, "j": 1e17}
    assert isinstance(pa.array([stored["i"]], pa.int64()), pa.Int64Array)  # type: ignore[index]
