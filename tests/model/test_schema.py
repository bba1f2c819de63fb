"""Compiled schemas: which documents are valid, messages about others, and active rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.reduce import Rule, Strategy
from penstock.model.schema import CompiledSchema, compiled, read_documents
from penstock.model.shape import Reduction, locate
from support import strategies_schema as strategies


@pytest.mark.parametrize(
    ("schema", "value", "says"),
    [
        pytest.param({"type": "number"}, "x", '"x" is not a number', id="type"),
        pytest.param(
            {"type": ["null", "integer"]}, 1.5, "1.5 is not an integer or null", id="types"
        ),
        pytest.param({"enum": [1, "a"]}, None, 'null is not one of 1, "a"', id="enum"),
        pytest.param({"const": 5}, 6, "6 is not 5", id="const"),
        pytest.param({"minimum": 3}, 2, "2 is less than 3", id="minimum"),
        pytest.param({"exclusiveMaximum": 3}, 3, "3 is not less than 3", id="exclusive"),
        pytest.param({"multipleOf": 0.01}, 0.005, "0.005 is not a multiple of 0.01", id="multiple"),
        pytest.param({"maxLength": 2}, "abc", '"abc" is longer than 2 characters', id="length"),
        pytest.param({"pattern": "^a"}, "b", '"b" does not match the pattern ^a', id="pattern"),
        pytest.param({"format": "date"}, "x", '"x" does not have the format date', id="format"),
        pytest.param(
            {"format": "integer"}, "1.0", '"1.0" does not have the format integer', id="own format"
        ),
        pytest.param(
            {"format": "number"}, "1_0", '"1_0" does not have the format number', id="and number"
        ),
        pytest.param(
            {"minItems": 2}, [1], "the array of 1 item has fewer than 2 items", id="items"
        ),
        pytest.param(
            {"uniqueItems": True}, [1, 1], "the array of 2 items has duplicate items", id="unique"
        ),
        pytest.param(False, 1, "must not be present", id="false"),
        pytest.param({"not": {}}, {}, "the object is excluded by `not`", id="not"),
        pytest.param(
            {"anyOf": [{"type": "null"}, {"const": 1}]},
            2,
            "2 matches none of 2 alternatives",
            id="anyOf",
        ),
        pytest.param(
            {"oneOf": [{}, {}]}, 2, "2 matches more than one alternative of oneOf", id="oneOf"
        ),
        pytest.param(
            {"propertyNames": {"maxLength": 0}},
            {"a": 1},
            "the object does not satisfy propertyNames",
            id="other",
        ),
    ],
)
def test_a_violation_says_what_was_found_and_expected(
    schema: dict[str, Any], value: object, says: str
) -> None:
    whole = CompiledSchema({"type": "object", "properties": {"v": schema}})
    assert [(v.pointer, v.message) for v in whole.violations({"v": value})] == [("/v", says)]  # type: ignore[dict-item]


def test_missing_and_unknown_members_are_named_by_their_own_pointer() -> None:
    schema = CompiledSchema(
        {
            "type": "object",
            "properties": {"o": {"required": ["a/b"], "additionalProperties": False}},
        }
    )
    assert [str(v) for v in schema.violations({"o": {"x": 1, "y": 2}})] == [
        "/o/a~1b: is required but missing",
        "/o/x: is not allowed by the schema",
        "/o/y: is not allowed by the schema",
    ]
    assert [str(v) for v in CompiledSchema({"type": "object"}).violations([])] == [
        "the document: the array of 0 items is not an object"
    ]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"secret": True}, id="secret"),
        pytest.param({"airbyte_secret": True}, id="secret, as connectors say it"),
        pytest.param({"redact": {"strategy": "sha256"}}, id="redacted"),
    ],
)
def test_values_that_must_not_be_seen_are_not_shown(where: dict[str, Any]) -> None:
    members = {"password": {"type": "string", "maxLength": 3}}
    schema = CompiledSchema({"properties": {"login": {"properties": members, **where}}})
    (violation,) = schema.violations({"login": {"password": "hunter2"}})
    assert violation.pointer == "/login/password"
    assert "hunter2" not in violation.message


def test_long_values_are_cut() -> None:
    (violation,) = CompiledSchema({"type": "object"}).violations("x" * 10_000)
    assert len(violation.message) < 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "truncated", id="nothing"),
        pytest.param('{"a": 1', "truncated", id="cut off"),
        pytest.param('{"a": NaN}', "malformed", id="NaN"),
        pytest.param('{"a": 1e999}', "out of range", id="beyond every double"),
        pytest.param('{"a": "\\ud800"}', "surrogate pair", id="half a character"),
        pytest.param("[" * 100_000, "recursion", id="too deep"),
        pytest.param("{} {}", "trailing", id="two documents"),
        pytest.param(b'{"a": "\xff"}', "utf-8", id="not UTF-8"),
    ],
)
def test_what_is_not_json_is_refused_like_any_other_bad_document(
    text: str | bytes, says: str
) -> None:
    schema = CompiledSchema({"type": "object"})
    (_, (violation,)), (good, none) = read_documents(schema, [text, '{"a": 1}'])
    assert violation.message.startswith("is not a JSON document: ")
    assert says in violation.message
    assert (good, none) == ({"a": 1}, ())


def test_reading_is_exact() -> None:
    text = '{"a": 1, "big": 123456789012345678901234567890, "f": 44.099999999999994, "a": 2}'
    ((document, _),) = read_documents(CompiledSchema({}), [text])
    assert document == {"a": 2, "big": 123456789012345678901234567890, "f": 44.099999999999994}


def test_equal_schemas_compile_once() -> None:
    one, two = CompiledSchema({"a": 1, "b": 2}), CompiledSchema({"b": 2, "a": 1})
    assert compiled(one.text) is compiled(two.text)


ANNOTATIONS = st.sampled_from(
    [{"strategy": s} for s in ("sum", "minimize", "maximize", "firstWriteWins", "lastWriteWins")]
)


@st.composite
def annotated(draw: st.DrawFn, below: st.SearchStrategy[Any]) -> Any:  # noqa: ANN401
    schema = draw(below)
    return {**schema, "reduce": draw(ANNOTATIONS)} if isinstance(schema, dict) else schema


TYPED = st.sampled_from(
    [{"type": "integer"}, {"type": "string"}, {}, {"minimum": 3}, {"const": "a"}]
)


def applied(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    branches = st.lists(below, min_size=1, max_size=3)
    return st.one_of(
        annotated(st.builds(lambda b: {"allOf": b}, branches)),
        st.builds(lambda b: {"allOf": b}, branches),
        st.builds(lambda b: {"anyOf": b}, branches),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, below, below, below),
        st.builds(lambda b: {**b, "$ref": "#/$defs/d"}, below),
        st.builds(lambda b: {"properties": {"p": b}}, below),
    )


LAYERED = st.recursive(annotated(TYPED), applied, max_leaves=6)


@given(LAYERED, LAYERED, annotated(TYPED), st.lists(strategies.json_values, min_size=1, max_size=4))
def test_active_rules_are_among_those_the_shape_expects(
    inner: Any,  # noqa: ANN401
    outer: Any,  # noqa: ANN401
    definition: dict[str, Any],
    values: list[Any],
) -> None:
    schema = CompiledSchema(
        {
            "properties": {"v": inner},
            "allOf": [{"properties": {"v": outer}}],
            "$defs": {"d": definition},
        }
    )
    for document in [{"v": value} for value in values] + [{"v": {"p": value}} for value in values]:
        if not schema.is_valid(document):
            continue
        active = schema.active_rules(document)
        for at in ("/v", "/v/p"):
            expected = locate(schema.shape, at)[0]
            fixed = expected.fixed_reduction()
            if at == "/v/p" and not (isinstance(document["v"], dict) and "p" in document["v"]):
                continue
            if isinstance(fixed, Reduction):
                assert active[at] == Rule.parse(dict(fixed.annotation))
            elif fixed is None:
                assert at not in active
            elif at in active:
                candidates = [Rule.parse(dict(r.annotation)) for r in expected.reductions]
                assert active[at] in candidates


def strategies_of(schema: dict[str, Any], document: Any) -> dict[str, Strategy]:  # noqa: ANN401
    rules = CompiledSchema(schema).active_rules(document)
    return {at: rule.strategy for at, rule in rules.items()}


def test_the_branch_that_a_document_takes_decides() -> None:
    schema = {
        "reduce": {"strategy": "merge"},
        "properties": {
            "v": {
                "if": {"type": "null"},
                "then": {"reduce": {"strategy": "lastWriteWins"}},
                "else": {"reduce": {"strategy": "append"}},
            },
            "n": {"$ref": "#/$defs/n", "reduce": {"strategy": "maximize"}},
        },
        "$defs": {"n": {"reduce": {"strategy": "sum"}}},
    }
    merged = {"": Strategy.MERGE}
    assert strategies_of(schema, {"v": None}) == merged | {"/v": Strategy.LAST_WRITE_WINS}
    assert strategies_of(schema, {"v": []}) == merged | {"/v": Strategy.APPEND}
    assert strategies_of(schema, {"n": 1}) == merged | {"/n": Strategy.MAXIMIZE}


def test_annotations_below_a_recursion_are_found() -> None:
    schema = {
        "reduce": {"strategy": "merge"},
        "properties": {
            "n": {"reduce": {"strategy": "sum"}},
            "below": {"type": "array", "items": {"$ref": "#"}},
        },
    }
    active = strategies_of(schema, {"below": [{"below": [{"n": 1}]}]})
    assert active["/below/0/below/0/n"] is Strategy.SUM


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (r'{"x": "\ud800"}', r"\ud800"),
        (r'{"x": "\uDFFF!"}', r"\uDFFF"),
        (r'{"x": "\ud83d\ude00\ud83d", "y": 1}', r"\ud83d"),
        (r'{"x": "\\\ud800"}', r"\ud800"),
        (r'{"x": "\\ud800", }', None),
    ],
)
def test_half_a_surrogate_pair_is_told_as_that(text: str, half: str | None) -> None:
    ((_, (violation,)),) = read_documents(CompiledSchema({"type": "object"}), [text])
    assert (f"{half} is half of a surrogate pair" in violation.message) is (half is not None)
