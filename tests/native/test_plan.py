"""The choice of a plan: pure, and explained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from penstock.model.schema import CompiledSchema
from penstock.native.plan import PlanKind, ReductionPlan, compile_reduction
from support.reductions import CDC, LAST, MERGE, SUM, document
from support.strategies_reduce import Grown, documents, flat_leaves, starting_over


def plan_of(schema: dict[str, Any]) -> ReductionPlan:
    return compile_reduction(CompiledSchema(schema), ["/id"])


def items(properties: dict[str, Any], **reduce: Any) -> dict[str, Any]:  # noqa: ANN401
    item = {"type": "object", "properties": properties, "reduce": MERGE, "required": ["k"]}
    return {"type": "array", "items": item, "reduce": {"strategy": "merge", **reduce}}


INTEGER = {"type": "integer"}
SUMMED = {"type": "integer", "reduce": SUM}
ELEMENTS = {"type": "object", "additionalProperties": SUMMED}


def sets(*terms: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    properties = dict.fromkeys(terms, ELEMENTS)
    return {"type": "object", "properties": properties, "reduce": {"strategy": "set"}, **more}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        pytest.param(INTEGER, "/v: lastWriteWins of bigint", id="no strategy: last"),
        pytest.param(SUMMED, "/v: sum of bigint", id="sum of integers"),
        pytest.param(
            {"type": ["integer", "null"], "reduce": SUM},
            "/v: PY fold of this value, because sum may meet null",
            id="sum that may meet null fails as the reference does",
        ),
        pytest.param(
            {"reduce": {"strategy": "maximize"}},
            "/v: PY fold of this value, because maximize may meet null",
            id="extremes of any type",
        ),
        pytest.param(
            {"type": "array", "items": {"type": "object"}, "reduce": {"strategy": "append"}},
            "/v: append of array",
            id="append of anything",
        ),
        pytest.param(
            {"type": "object", "additionalProperties": SUMMED, "reduce": MERGE},
            "/v: N3 nested, elements by name",
            id="map",
        ),
        pytest.param(
            items({"k": INTEGER, "n": SUMMED}, key=["/k"]),
            "/v: N3 nested, elements by key",
            id="keyed array",
        ),
        pytest.param(
            items({"k": INTEGER, "n": SUMMED}), "/v: N3 nested, elements by position", id="array"
        ),
        pytest.param(
            items({"k": {"type": ["integer", "string"]}}, key=["/k"]),
            "because Spark orders the key of items differently",
            id="keyed by values of several types",
        ),
        pytest.param(
            sets("add", "remove", additionalProperties=False),
            "/v: N3 nested, elements added and removed by name",
            id="set that adds and removes",
        ),
        pytest.param(
            sets("add", "remove"),
            "because a set may intersect, or hold members it must not",
            id="set that is open may hold intersect",
        ),
        pytest.param(
            {
                "type": "object",
                "required": ["k"],
                "properties": {"k": INTEGER, "n": SUMMED},
                "reduce": {"strategy": "maximize", "key": ["/k"]},
            },
            "/v: N5 extremum, the greatest by key",
            id="keyed maximize",
        ),
        pytest.param(
            {"type": "object", "reduce": {"strategy": "jsonSchemaMerge"}},
            "/v: PY fold of this value, because jsonSchemaMerge of json",
            id="schemas",
        ),
        pytest.param(
            {
                "type": "integer",
                "if": {"minimum": 5},
                "then": {"reduce": LAST},
                "else": {"reduce": SUM},
            },
            "whole documents go through Python, because what acts at /v depends on the document",
            id="condition below the root",
        ),
    ],
)
def test_each_location_has_the_cheapest_plan_that_is_exact(
    value: dict[str, Any], says: str
) -> None:
    assert says in plan_of(document({"v": value})).explain()


@pytest.mark.parametrize(
    ("schema", "kind", "says"),
    [
        pytest.param(
            document({}, LAST), PlanKind.LAST, "the last document is taken whole", id="no merge"
        ),
        pytest.param(
            document({"n": SUMMED}), PlanKind.FLAT, "one aggregate per location", id="merge"
        ),
        pytest.param(
            CDC, PlanKind.BARRIER, "what acts in a document depends on it", id="change data"
        ),
        pytest.param(
            {**CDC, "if": {"properties": {"id": {"format": "email"}}}},
            PlanKind.FOLD,
            "a condition on the document cannot be said in SQL",
            id="condition without SQL",
        ),
        pytest.param(
            document({"n": SUMMED}, {"strategy": "minimize", "key": ["/n"]}),
            PlanKind.EXTREMUM,
            "documents that are not extreme by key are dropped",
            id="root extremum",
        ),
        pytest.param(
            document({"n": SUMMED}, {"strategy": "merge", "associative": False}),
            PlanKind.FLAT,
            "documents stay apart until the stored one is known: a reduction is not associative",
            id="not associative",
        ),
    ],
)
def test_documents_have_a_plan(schema: dict[str, Any], kind: PlanKind, says: str) -> None:
    plan = plan_of(schema)
    assert plan.kind is kind
    assert says in plan.explain()


@given(documents(flat_leaves()))
def test_flat_schemas_never_need_python(grown: Grown) -> None:
    plan = plan_of(grown.schema)
    assert plan.kind is PlanKind.FLAT
    assert "PY fold" not in plan.explain()


@given(starting_over())
def test_documents_that_start_over_are_cut_by_a_barrier(grown: Grown) -> None:
    assert plan_of(grown.schema).kind is PlanKind.BARRIER


@given(documents())
def test_every_schema_has_an_explained_plan(grown: Grown) -> None:
    plan = plan_of(grown.schema)
    assert plan.explain().startswith(plan.kind.value)
