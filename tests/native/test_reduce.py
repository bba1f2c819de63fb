"""Native reductions against the reference: worked examples, refusals, and random schemas."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.json_order import ABSENT, Json
from penstock.model.reduce import ReductionError, reduce_full
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow, to_json
from penstock.native.plan import ReductionPlan, compile_reduction
from penstock.native.reduce import (
    FrameReduction,
    flag_column,
    reduce_dataframe,
    reduction_errors,
    shared_reduction,
)
from penstock.testing.sink_harness import reduce_partially
from support.reductions import (
    EXAMPLES,
    LAST,
    REFUSALS,
    SUM,
    Example,
    Refusal,
    document,
    nearly_equal,
)
from support.strategies_reduce import (
    Grown,
    deciding,
    documents,
    flat_leaves,
    starting_over,
)

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
            return [f.col("$seq")]
        return [-f.col("$priority"), f.col("$clock"), f.col("$journal"), f.col("$offset")]


def frame(
    spark: SparkSession, plan: ReductionPlan, groups: Sequence[Sequence[Json]], seed: int = 0
) -> DataFrame:
    """Documents of several keys as rows, shuffled, in a few partitions.

    Each part of the order decides somewhere: priority falls, clocks restart with it, journals
    share clocks, and offsets tell the rest apart.
    """
    rows = [
        ({**cast("dict[str, Json]", value), "id": f"k{i:03}"}, at)
        for i, group in enumerate(groups)
        for at, value in enumerate(group)
    ]
    chance = random.Random(seed)
    chance.shuffle(rows)
    table = pa.Table.from_batches([to_arrow([value for value, _ in rows], plan.columns)])
    order = {
        "$seq": pa.array([at for _, at in rows], pa.int64()),
        "$priority": pa.array([9 - at // 4 for _, at in rows], pa.int32()),
        "$clock": pa.array([at % 4 // 3 for _, at in rows], pa.int64()),
        "$journal": pa.array([f"j{at % 4 // 2}" for _, at in rows], pa.utf8()),
        "$offset": pa.array([at % 2 for _, at in rows], pa.int64()),
    }
    for name, values in order.items():
        table = table.append_column(name, values)
    return spark.createDataFrame(table).repartition(chance.randint(1, 3))


def reduced(
    spark: SparkSession,
    plan: ReductionPlan,
    groups: Sequence[Sequence[Json]],
    *,
    full: bool,
    order: Order = Order(parts=False),
    seed: int = 0,
) -> list[list[Any]]:
    """What each group came to."""
    df = frame(spark, plan, groups, seed)
    return outcomes(plan, reduce_dataframe(plan, df, order=order.columns(), full=full), full=full)


def outcomes(plan: ReductionPlan, df: DataFrame, *, full: bool) -> list[list[Any]]:
    """The documents of each key, in key order; of a full reduction one, ABSENT if deleted."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    with reduction_errors():
        batches = df.toArrow().to_batches()
    for batch in batches:
        flags = batch.column(flag_column(plan, full=full)).to_pylist()
        for text, flag in zip(to_json(batch, plan.columns), flags, strict=True):
            document = json.loads(text)
            found.setdefault(document["id"], []).append((flag, {**document, "id": "k"}))
    by_key = [sorted(found[key], key=lambda row: int(row[0])) for key in sorted(found)]
    if full:
        assert all(len(rows) == 1 for rows in by_key)
        return [[ABSENT if deleted else state for deleted, state in rows] for rows in by_key]
    return [[state for _, state in rows] for rows in by_key]


def plans_of(schema: dict[str, Any]) -> list[ReductionPlan]:
    """The plan that is chosen, and the fold that always works."""
    plan = compile_reduction(CompiledSchema(schema), ["/id"])
    if plan.fold is not None:
        return [plan]
    return [plan, dataclasses.replace(plan, fold="the test says so")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_reduce_on_spark_by_their_plan_and_by_the_fold(
    spark: SparkSession, example: Example
) -> None:
    prefixes = [example.documents[: i + 1] for i in range(len(example.documents))]
    prefixes = prefixes[-len(example.states) :]
    for plan in plans_of(example.schema):
        states = reduced(spark, plan, prefixes, full=True)
        assert nearly_equal(states, [[state] for state in example.states]), plan.explain()


@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if example.combined is not None or example.uncombined],
    ids=lambda example: example.name,
)
def test_examples_combine_on_spark(spark: SparkSession, example: Example) -> None:
    plan = plans_of(example.schema)[0]
    combined = reduced(spark, plan, [example.documents], full=False)
    want = example.documents if example.uncombined else example.combined
    assert nearly_equal(combined, [list(want or [])]), plan.explain()


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
            [reduce_full(group, schema.active_rules)] if full else reduce_partially(schema, group)
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


@JOBS
@given(histories(deciding()), st.booleans())
def test_documents_in_which_a_condition_decides_reduce_as_the_reference_does(
    spark: SparkSession, history: tuple[Grown, list[list[Json]], int], full: bool
) -> None:
    check(spark, *history, full=full)


@JOBS
@given(histories(st.one_of(starting_over(), deciding())), st.integers(0, 4))
def test_a_stored_state_is_no_document(
    spark: SparkSession, history: tuple[Grown, list[list[Json]], int], cut: int
) -> None:
    """However the documents of a key are split into transactions, by the plan and by the fold."""
    from pyspark.sql import functions as f

    grown, groups, _ = history
    schema = CompiledSchema(grown.schema)
    want = [[reduce_full(group, schema.active_rules)] for group in groups]
    split = [
        (reduce_full(group[:cut], schema.active_rules), group[cut:])
        for group in groups
        if len(group) > cut
    ]
    want = [state for group, state in zip(groups, want, strict=True) if len(group) > cut]
    if not split:
        return
    for plan in plans_of(grown.schema):
        rows = frame(spark, plan, [[{} if s is ABSENT else s, *rest] for s, rest in split])
        gone = [f"k{i:03}" for i, (state, _) in enumerate(split) if state is ABSENT]
        rows = rows.where((f.col("$seq") > 0) | ~f.col("id").isin(gone))
        reduction = FrameReduction(
            plan, order=[f.col("$seq")], full=True, stored=f.col("$seq") == f.lit(0)
        )
        assert nearly_equal(outcomes(plan, reduction.apply(rows), full=True), want), plan.explain()


@JOBS
@given(histories(documents(flat_leaves())), st.integers(0, 5))
def test_documents_may_be_combined_on_spark_before_they_are_reduced(
    spark: SparkSession, history: tuple[Grown, list[list[Json]], int], cut: int
) -> None:
    from pyspark.sql import functions as f

    grown, groups, seed = history
    schema = CompiledSchema(grown.schema)
    plan = compile_reduction(schema, ["/id"])
    rows = frame(spark, plan, groups, seed)
    halves = [
        reduce_dataframe(plan, half, order=[f.col("$seq")], full=False).withColumn(
            "$seq", f.lit(at)
        )
        for at, half in enumerate((rows.where(f"`$seq` < {cut}"), rows.where(f"`$seq` >= {cut}")))
    ]
    combined = halves[0].union(halves[1])
    order = [f.col("$seq"), f.col(flag_column(plan, full=False))]
    got = outcomes(plan, reduce_dataframe(plan, combined, order=order, full=True), full=True)
    want = [[reduce_full(group, schema.active_rules)] for group in groups]
    assert nearly_equal(got, want), plan.explain()


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(
            document(
                {"n": {"type": "integer", "reduce": SUM}, "k": {"type": ["integer", "null"]}},
                {"strategy": "maximize", "key": ["/k"]},
            )
            | {"required": ["id", "k"]},
            id="whole documents by the greatest key, null below all",
        ),
        pytest.param(
            document({"n": {"type": "number", "reduce": SUM, "x-penstock-ordered": True}}),
            id="a sum of floats in read order",
        ),
        pytest.param(
            document(
                {
                    "n": {
                        "type": "number",
                        "multipleOf": 0.01,
                        "minimum": -1000,
                        "maximum": 1000,
                        "reduce": SUM,
                    }
                }
            ),
            id="a sum of exact decimals",
        ),
        pytest.param(
            document({"n": {"type": "integer", "reduce": {"strategy": "minimize"}}}, LAST),
            id="the last document whole",
        ),
    ],
)
def test_what_the_grammar_does_not_grow(spark: SparkSession, schema: dict[str, Any]) -> None:
    compiled = CompiledSchema(schema)
    plan = compile_reduction(compiled, ["/id"])
    groups: list[list[Json]] = [
        [{"id": "k", "n": 1, "k": 3, "x": [1]}, {"id": "k", "n": 2.0, "k": 5}],
        [
            {"id": "k", "n": 4, "k": None},
            {"id": "k", "k": 5, "y": "z"},
            {"id": "k", "n": 7, "k": 5},
        ],
        [{"id": "k", "n": -3, "k": None}, {"id": "k", "n": 8, "k": None, "x": None}],
    ]
    assert plan.fold is None, plan.explain()
    got = reduced(spark, plan, groups, full=True, order=Order(parts=True))
    want = [[reduce_full(group, compiled.active_rules)] for group in groups]
    assert nearly_equal(got, want), plan.explain()


def test_hidden_members_may_be_left_out_and_absent_keys_count_as_their_default(
    spark: SparkSession,
) -> None:
    schema = document({"n": {"type": "integer", "reduce": SUM}, "r": {"type": "string"}})
    schema["properties"]["r"]["default"] = "eu"
    plan = compile_reduction(CompiledSchema(schema), ["/id", "/r"])
    groups: list[list[Json]] = [[{"n": 1}, {"n": 2, "r": "eu"}, {"n": 5, "r": "us"}]]
    df = frame(spark, plan, groups).drop("_x")
    result = reduce_dataframe(plan, df, order=Order(parts=False).columns(), full=True)
    rows = {(row["r"], row["n"]) for row in result.collect()}
    assert rows == {("eu", 3), ("us", 5)}
    assert "_x" not in result.columns


# ----------------------------------------------------------------------------------- alike tasks


def test_tasks_that_are_alike_share_their_reduction(spark: SparkSession) -> None:
    """Whoever made it, it reduces the rows of its frame; whatever differs, is not shared."""
    schema = document({"v": {"type": "integer", "reduce": SUM}})

    def shared(order: str = "$seq", *, full: bool = True, columns: object = None) -> FrameReduction:
        plan = compile_reduction(CompiledSchema(schema), ["/id"])
        return shared_reduction(spark, plan, order=[order], full=full, columns=columns)

    assert shared() is shared()
    assert len({*map(id, [shared(), shared("$clock"), shared(full=False), shared(columns=1)])}) == 4
    other = compile_reduction(
        CompiledSchema(document({"v": {"type": "number", "reduce": SUM}})), ["/id"]
    )
    assert shared_reduction(spark, other, order=["$seq"], full=True, columns=None) is not shared()
    for histories in ([[1, 2, 3]], [[5], [7, 8]]):
        plan = compile_reduction(CompiledSchema(schema), ["/id"])
        groups: list[list[Json]] = [
            [{"id": "k", "v": each} for each in group] for group in histories
        ]
        got = outcomes(plan, shared().apply(frame(spark, plan, groups)), full=True)
        rules = CompiledSchema(schema).active_rules
        assert nearly_equal(got, [[reduce_full(group, rules)] for group in groups])
