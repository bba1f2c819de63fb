"""Numbers written as text: their order against `decimal`, and Spark's against that."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native.test_reduce import reduced
from penstock.model.json_order import numeric_key
from penstock.model.reduce import ReductionError
from penstock.model.schema import CompiledSchema
from penstock.native.numerals import numeric_order
from penstock.native.plan import PlanKind, compile_reduction
from support.reductions import SUM, document

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUMERALS = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.from_regex(r"\A-?[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?\Z"),
    st.sampled_from(["0", "-0", "0.00", "1", "1.0", "10", "9", "-10", "-9", "1e1", "007"]),
)


@given(NUMERALS, NUMERALS)
def test_the_order_is_that_of_the_numbers(one: str, other: str) -> None:
    a, b = Decimal(one), Decimal(other)
    assert (numeric_key(one)[:3] < numeric_key(other)[:3]) == (a < b)
    assert (numeric_key(one)[:3] == numeric_key(other)[:3]) == (a == b)


def test_words_have_a_place() -> None:
    words = ["ten", "-Infinity", "-1e99", "0", "1e99", "Infinity", "NaN"]
    words.reverse()
    assert [*reversed(words)] == sorted(words, key=numeric_key)


@pytest.mark.spark
@settings(max_examples=3, deadline=None)
@given(st.lists(NUMERALS, min_size=100, max_size=200))
def test_spark_has_the_same_key(spark: SparkSession, texts: list[str]) -> None:
    from pyspark.sql import functions as f

    given_ = [*texts, "NaN", "Infinity", "-Infinity", "ten", "1e" + "9" * 30, "-1e-" + "9" * 30]
    frame = spark.createDataFrame([(text,) for text in given_], "v string")
    found = frame.select(numeric_order(f.col("v")).alias("k")).select("k.*").collect()
    assert [tuple(row) for row in found] == [numeric_key(text) for text in given_]


def cents(maximum: int) -> CompiledSchema:
    bounded = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": maximum}
    return CompiledSchema(document({"v": {**bounded, "reduce": SUM}}))


@pytest.mark.spark
def test_a_sum_of_decimals_ends_at_its_bounds(spark: SparkSession) -> None:
    plan = compile_reduction(cents(99), ["/id"])
    whole = [[{"v": 99.5}, {"v": 0.49}]]
    assert reduced(spark, plan, whole, full=True) == [[{"id": "k", "v": 99.99}]]
    with pytest.raises(ReductionError, match=r"/v of key .*sum overflow; LHS 100\.00"):
        reduced(spark, plan, [[{"v": 99.5}, {"v": 0.5}]], full=True)


@pytest.mark.spark
def test_many_texts_are_added_by_spark(spark: SparkSession) -> None:
    schema = document({"v": {"type": "string", "format": "number", "reduce": SUM}})
    plan = compile_reduction(CompiledSchema(schema), ["/id"])
    assert plan.kind is PlanKind.FLAT
    assert "sum of string" in plan.explain()
    texts = [f"{n / 100:.2f}" for n in range(1, 1001)]
    groups = [[{"v": text} for text in texts], [{"v": "1e2"}], [{"v": "1e2"}, {"v": "0.5"}]]
    assert reduced(spark, plan, groups, full=True) == [
        [{"id": "k", "v": f"{sum(map(Decimal, texts))}"}],
        [{"id": "k", "v": "1e2"}],
        [{"id": "k", "v": "100.5"}],
    ]
