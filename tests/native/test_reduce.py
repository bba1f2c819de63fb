"""Native reductions against the reference: worked examples, refusals, and random schemas."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.json_order import ABSENT, Json
from penstock.model.reduce import ReductionError, combine, reduce_full
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow, to_json
from penstock.native.plan import ReductionPlan, compile_reduction
from penstock.native.reduce import flag_column, reduce_dataframe, reduction_errors
from penstock.testing.reductions import EXAMPLES, REFUSALS, Example, Refusal, nearly_equal
from penstock.testing.strategies_reduce import Grown, documents, flat_leaves, starting_over

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

pytestmark = pytest.mark.spark


@dataclasses.dataclass(frozen=True)
class Order:
    """How rows say when they are: as one number, or as the parts that `ord` has."""

    parts: bool

    def columns(self) -> Sequence[Column]:
        from pyspark.sql import functions as f

        if not self.parts:
            return [f.col("$clock")]
        return [-f.col("$priority"), f.col("$clock"), f.col("$journal"), f.col("$offset")]


def frame(
    spark: SparkSession, plan: ReductionPlan, groups: Sequence[Sequence[Json]], seed: int = 0
) -> DataFrame:
    """Documents of several keys as rows, shuffled, in a few partitions.

    Priority decides before clocks, so clocks begin again where it falls.
    """
    rows: list[tuple[Any, ...]] = []
    for i, group in enumerate(groups):
        for at, document in enumerate(group):
            assert isinstance(document, dict)
            rows.append(({**document, "id": f"k{i:03}"}, 9 - at // 2, at, f"j{at % 2}", at))
    chance = random.Random(seed)
    chance.shuffle(rows)
    batch = to_arrow([row[0] for row in rows], plan.columns)
    table = pa.Table.from_batches([batch])
    for at, (name, kind) in enumerate(
        (
            ("$priority", pa.int32()),
            ("$clock", pa.int64()),
            ("$journal", pa.utf8()),
            ("$offset", pa.int64()),
        ),
        start=1,
    ):
        table = table.append_column(name, pa.array([row[at] for row in rows], kind))
    return spark.createDataFrame(table).repartition(chance.randint(1, 3))


def reduced(
    spark: SparkSession,
    plan: ReductionPlan,
    groups: Sequence[Sequence[Json]],
    *,
    full: bool,
    order: Order = Order(parts=False),  # noqa: B008
    seed: int = 0,
) -> list[list[Any]]:
    """What each group came to: of a full reduction one state, ABSENT if deleted."""
    df = reduce_dataframe(plan, frame(spark, plan, groups, seed), order=order.columns(), full=full)
    flag = flag_column(plan, full=full)
    found: dict[str, list[tuple[Any, Any]]] = {}
    with reduction_errors():
        table = df.toArrow()
    for batch in table.to_batches():
        for text, said in zip(
            to_json(batch, plan.columns), batch.column(flag).to_pylist(), strict=True
        ):
            document = json.loads(text)
            key = document["id"]
            document["id"] = "k"
            found.setdefault(key, []).append((said, document))
    keys = [f"k{i:03}" for i, group in enumerate(groups) if group]
    assert sorted(found) == keys
    if full:
        assert all(len(outcome) == 1 for outcome in found.values())
        return [[ABSENT if deleted else state for deleted, state in found[key]] for key in keys]
    return [[state for _, state in sorted(found[key], key=lambda row: row[0])] for key in keys]


def plans_of(schema: dict[str, Any]) -> list[ReductionPlan]:
    """The plan that is chosen, and the fold that always works."""
    plan = compile_reduction(CompiledSchema(schema), ["/id"])
    if plan.fold is not None:
        return [plan]
    return [plan, dataclasses.replace(plan, fold="the test says so")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_reduce_on_spark(spark: SparkSession, example: Example) -> None:
    prefixes = [example.documents[: i + 1] for i in range(len(example.documents))]
    prefixes = prefixes[-len(example.states) :]
    combined = example.combined if example.combined is not None else [example.states[-1]]
    for plan in plans_of(example.schema):
        states = reduced(spark, plan, prefixes, full=True)
        assert nearly_equal([[s] for s in example.states], states), plan.explain()
        assert nearly_equal([list(combined)], reduced(spark, plan, prefixes[-1:], full=False)), (
            plan.explain()
        )


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusals_cross_spark_with_location_and_key(spark: SparkSession, refusal: Refusal) -> None:
    plan = plans_of(refusal.schema)[0]
    with pytest.raises(ReductionError) as caught:
        reduced(spark, plan, [refusal.documents], full=True)
    for part in [*refusal.says, 'of key ["k000"]']:
        assert part in caught.value.what


@st.composite
def histories(
    draw: st.DrawFn, kinds: st.SearchStrategy[Grown]
) -> tuple[Grown, list[list[Json]], int]:
    """A schema and the documents of some keys, most of them few; and a seed to shuffle with."""
    grown = draw(kinds)
    group = st.lists(grown.values, min_size=1, max_size=5)
    return grown, draw(st.lists(group, min_size=8, max_size=12)), draw(st.integers(0, 2**16))


JOBS = settings(max_examples=max(1, settings().max_examples // 6))
"""Each example is a Spark job, over many keys at once."""


def check(
    spark: SparkSession, grown: Grown, groups: list[list[Json]], seed: int, *, full: bool
) -> None:
    schema = CompiledSchema(grown.schema)
    plan = compile_reduction(schema, ["/id"])
    order = Order(parts=bool(seed % 2))
    got = reduced(spark, plan, groups, full=full, order=order, seed=seed)
    for group, outcome in zip(groups, got, strict=True):
        want = (
            [reduce_full(group, schema.active_rules)]
            if full
            else combine(group, schema.active_rules)
        )
        assert nearly_equal(outcome, want), f"{plan.explain()}\n{group}\n{outcome}\n{want}"


@JOBS
@given(histories(documents(flat_leaves())))
def test_flat_schemas_reduce_as_the_reference_does(
    spark: SparkSession, history: tuple[Grown, list[list[Json]], int]
) -> None:
    check(spark, *history, full=True)


@JOBS
@given(histories(documents()), st.booleans())
def test_any_schema_reduces_as_the_reference_does(
    spark: SparkSession, history: tuple[Grown, list[list[Json]], int], full: bool
) -> None:
    check(spark, *history, full=full)


@JOBS
@given(histories(starting_over()), st.booleans())
def test_documents_that_start_over_reduce_as_the_reference_does(
    spark: SparkSession, history: tuple[Grown, list[list[Json]], int], full: bool
) -> None:
    check(spark, *history, full=full)
