"""Texts as what they write: Spark expressions and Arrow kernels agree, and nothing is rounded."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.model.columns import Column, columns
from penstock.model.infer import infer
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow
from penstock.native.meanings import read_frame, read_rows, read_schema
from penstock.native.spark_types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

AT = {"type": "string", "format": "date-time"}
ON = {"type": "string", "format": "date"}
NUMBER = {"type": "string", "format": "number"}
WHOLE = {"type": "string", "format": "integer"}
SCHEMA = {
    "type": "object",
    "properties": {
        "at": AT,
        "on": {**ON, "type": ["string", "null"]},
        "n": NUMBER,
        "i": WHOLE,
        "plain": {"type": "string"},
        "list": {"type": "array", "items": {"type": "object", "properties": {"n": NUMBER}}},
        "map": {"type": "object", "additionalProperties": AT},
        "in": {"type": "object", "properties": {"o`n": ON, "deep": {"type": "array", "items": ON}}},
        "hidden": {**NUMBER, "redact": {"strategy": "sha256"}},
    },
}
ROOT = columns(infer(SCHEMA))

_pad = "{:02}".format
CLOCKS = st.builds(
    lambda h, m, s, f, z: f"{h}:{m}:{s}{f}{z}",
    st.integers(0, 23).map(_pad),
    st.integers(0, 59).map(_pad),
    st.integers(0, 59).map(_pad),
    st.sampled_from(["", ".5", ".000001", ".123456789", ".9999999", ".120"]),
    st.sampled_from(["Z", "z", "+00:00", "-00:00", "+05:30", "-11:15", "+18:01", "-23:59"]),
)
DATES = st.dates(datetime.date(2, 1, 1), datetime.date(9998, 12, 31)).map(str)
INSTANTS = st.one_of(
    st.builds(lambda d, t, c: d + t + c, DATES, st.sampled_from("Tt"), CLOCKS),
    st.sampled_from(["2016-12-31T23:59:60Z", "1990-12-31T15:59:60.25-08:00"]),
)
NUMBERS = st.one_of(
    st.decimals(-(10**19), 10**19, places=2).map(str),
    st.sampled_from(
        [
            *("10.10", "-0", "0.0", "1e3", "1.50E+2", "-2.5e-17", "1200e-20", "0e-30", "7e0"),
            *("99999999999999999999.999999999999999999", "0.1000000000000000000000"),
        ]
    ),
)
INTEGERS = st.one_of(st.integers(-(10**38) + 1, 10**38 - 1).map(str), st.just("-007"))
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "at": INSTANTS,
        "on": st.one_of(st.none(), DATES),
        "n": NUMBERS,
        "i": INTEGERS,
        "plain": st.text(max_size=3),
        "list": st.lists(st.fixed_dictionaries({}, optional={"n": NUMBERS}), max_size=3),
        "map": st.dictionaries(st.sampled_from("ab"), INSTANTS, max_size=2),
        "in": st.fixed_dictionaries(
            {}, optional={"o`n": DATES, "deep": st.lists(DATES, max_size=2)}
        ),
        "hidden": st.just("e3b0"),
        "more": st.integers(),
    },
)


def as_spark_reads(spark: SparkSession, documents: list[Any], root: Column) -> Any:  # noqa: ANN401
    stored = spark.createDataFrame(
        pa.Table.from_batches([to_arrow(documents, root)]), spark_schema(root)
    )
    return read_frame(stored, root)


@settings(max_examples=6, deadline=None)
@given(st.lists(DOCUMENTS, min_size=40, max_size=80))
def test_both_read_the_same(spark: SparkSession, documents: list[Any]) -> None:
    valid = CompiledSchema(SCHEMA)
    assert all(valid.is_valid({k: v for k, v in d.items() if k != "hidden"}) for d in documents)
    frame = as_spark_reads(spark, documents, ROOT)
    wanted = read_schema(spark_schema(ROOT), ROOT)
    assert frame.schema == wanted, "metadata included"
    batch = to_arrow(documents, ROOT)
    names = [field.name for field in wanted.fields]
    for part in (batch, batch.slice(len(documents) // 3)):
        rows = read_rows(part, ROOT, names)
        kernels = spark.createDataFrame(pa.Table.from_batches([rows]), wanted)
        assert kernels.collect() == frame.collect()[-part.num_rows :]


def test_the_instant_and_the_number_are_those_that_were_written(spark: SparkSession) -> None:
    documents = [
        {"at": "2024-02-29T01:30:00.123456789+02:00", "n": "10.10", "on": "2024-02-29"},
        {"at": "2016-12-31t23:59:60z", "n": "-1.5e-17", "on": None},
    ]
    rows = as_spark_reads(spark, documents, ROOT).selectExpr("string(at)", "n", "on")
    assert [tuple(row) for row in rows.collect()] == [
        (
            "2024-02-28 23:30:00.123456",
            Decimal("10.10"),
            datetime.date(2024, 2, 29),
        ),
        ("2017-01-01 00:00:00", Decimal("-1.5e-17"), None),
    ]


@pytest.mark.parametrize(
    ("member", "text"),
    [
        ("n", "NaN"),
        ("n", "Infinity"),
        ("n", "1e21"),
        ("n", "0.0000000000000000001"),
        ("n", "100000000000000000000"),
        ("i", "1" * 39),
        ("at", "yesterday"),
        ("on", "2024-13-01"),
    ],
)
def test_what_does_not_fit_is_refused_by_both(spark: SparkSession, member: str, text: str) -> None:
    documents = [{member: text}]
    with pytest.raises(Exception, match=f"/{member} is not .*{text}.*keepText"):
        as_spark_reads(spark, documents, ROOT).collect()
    with pytest.raises(UserError, match=f"/{member} is not .*{text}"):
        read_rows(to_arrow(documents, ROOT), ROOT, [member])


def test_a_collection_without_meanings_is_left_alone(spark: SparkSession) -> None:
    root = columns(infer({"type": "object", "properties": {"a": {"type": "string"}}}))
    stored = spark.createDataFrame(
        pa.Table.from_batches([to_arrow([{"a": "x"}], root)]), spark_schema(root)
    )
    assert read_frame(stored, root) is stored
