"""The reference reducer: worked examples, refusals, and the laws a reduction obeys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.model.json_order import ABSENT, Json
from penstock.model.reduce import (
    Lookup,
    ReductionError,
    Rule,
    State,
    Strategy,
    reduce_full,
)
from penstock.model.schema import CompiledSchema
from penstock.testing.sink_harness import reduce_partially
from support.reductions import (
    EXAMPLES,
    REFUSALS,
    Example,
    Refusal,
    nearly_equal,
)
from support.strategies_reduce import Grown, deciding, documents, starting_over


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_state_after_each_document(example: Example) -> None:
    lookup = rules_of(example.schema)
    first = len(example.documents) - len(example.states)
    states = [
        reduce_full(example.documents[: i + 1], lookup)
        for i in range(first, len(example.documents))
    ]
    assert states == example.states


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_what_documents_combine_to(example: Example) -> None:
    want = example.combined if example.combined is not None else [example.states[-1]]
    want = example.documents if example.uncombined else want
    assert reduce_partially(CompiledSchema(example.schema), example.documents) == want


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_combining_any_tail_first_changes_nothing(example: Example) -> None:
    schema = CompiledSchema(example.schema)
    for at in range(len(example.documents)):
        head, tail = example.documents[:at], example.documents[at:]
        combined = [*head, *reduce_partially(schema, tail)]
        assert reduce_full(combined, schema.active_rules) == example.states[-1]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_stored_state_stands_for_all_that_went_into_it(example: Example) -> None:
    lookup = rules_of(example.schema)
    first = len(example.documents) - len(example.states) + 1
    for at, stored in enumerate(example.states, start=first):
        state = reduce_full(example.documents[at:], lookup, stored=stored)
        assert state == example.states[-1]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_a_refusal_names_location_key_and_both_sides(refusal: Refusal) -> None:
    with pytest.raises(ReductionError) as caught:
        reduce_full(refusal.documents, rules_of(refusal.schema), key=["k", 7])
    assert 'of key ["k",7]' in str(caught.value)
    for part in refusal.says:
        assert part in str(caught.value)


def test_a_refusal_cuts_long_values() -> None:
    with pytest.raises(ReductionError) as caught:
        reduce_full([["x" * 5000], "y"], lambda _: {"": Rule(strategy=Strategy.APPEND)})
    assert "while reducing the document: append expects arrays" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        pytest.param({"strategy": "max"}, 'unknown strategy "max"', id="unknown strategy"),
        pytest.param({"strategy": "sum", "key": []}, 'sum has no member "key"', id="stray member"),
        pytest.param({"strategy": "merge", "key": "/a"}, 'reduce key is "/a"', id="key is a list"),
        pytest.param({"strategy": "merge", "key": ["a"]}, "reduce key is", id="key of pointers"),
        pytest.param({"strategy": "merge", "delete": 1}, "delete is 1", id="delete is a boolean"),
        pytest.param({"strategy": "merge", "associative": 0}, "associative is 0", id="associative"),
        pytest.param({}, "reduce is {}", id="no strategy"),
        pytest.param("sum", 'reduce is "sum"', id="not an object"),
    ],
)
def test_a_meaningless_annotation_is_refused(annotation: Json, says: str) -> None:
    with pytest.raises(UserError, match="fix") as caught:
        Rule.parse(annotation)
    assert says in str(caught.value)


@pytest.mark.parametrize("strategy", Strategy, ids=lambda strategy: strategy.value)
def test_annotations_read_back_as_written(strategy: Strategy) -> None:
    assert Rule.parse({"strategy": strategy.value}) == Rule(strategy=strategy)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Grown, list[Json]]:
    grown = draw(st.one_of(documents(), starting_over(), deciding()))
    return grown, draw(st.lists(grown.values, min_size=1, max_size=5))


@given(histories(), st.data())
def test_documents_may_be_combined_in_any_runs_before_they_are_reduced(
    history: tuple[Grown, list[Json]], data: st.DataObject
) -> None:
    grown, docs = history
    schema = CompiledSchema(grown.schema)
    lookup = schema.active_rules
    cuts = sorted(data.draw(st.lists(st.integers(0, len(docs)), max_size=3)))
    runs = [docs[a:b] for a, b in zip([0, *cuts], [*cuts, len(docs)], strict=True)]
    combined = [document for run in runs if run for document in reduce_partially(schema, run)]
    want = reduce_full(docs, lookup)
    assert nearly_equal(reduce_full(combined, lookup), want)
    stored: State = ABSENT
    for run in runs:
        stored = reduce_full(reduce_partially(schema, run) if run else [], lookup, stored=stored)
    assert nearly_equal(stored, want)


@given(histories())
def test_reducing_does_not_change_its_operands(history: tuple[Grown, list[Json]]) -> None:
    grown, docs = history
    before = repr(docs)
    lookup = rules_of(grown.schema)
    reduce_full(docs, lookup)
    reduce_partially(CompiledSchema(grown.schema), docs)
    assert repr(docs) == before


def rules_of(schema: dict[str, Any]) -> Lookup:
    return CompiledSchema(schema).active_rules
