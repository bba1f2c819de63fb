"""Shapes: the algebra, inference from schemas, and rendering back."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.infer import infer, to_schema
from penstock.model.shape import (
    ANY,
    NOTHING,
    Reduction,
    admits,
    intersect,
    locate,
    of_type,
    of_values,
    union,
)
from support import strategies_schema as strategies


def valid(schema: dict[str, Any], value: object) -> bool:
    return jsonschema_rs.Draft201909Validator(schema).is_valid(value)


@st.composite
def schemas_with_values(draw: st.DrawFn) -> tuple[dict[str, Any], list[Any]]:
    schema = draw(strategies.schemas())
    return schema, draw(st.lists(strategies.values_of(schema), min_size=1, max_size=5))


@given(schemas_with_values())
def test_every_valid_document_is_admitted(case: tuple[dict[str, Any], list[Any]]) -> None:
    schema, values = case
    shape = infer(schema)
    for value in values:
        assert admits(shape, value) or not valid(schema, value)


@given(schemas_with_values(), schemas_with_values())
def test_union_and_intersection_follow_the_sets(
    one: tuple[dict[str, Any], list[Any]], two: tuple[dict[str, Any], list[Any]]
) -> None:
    a, b = infer(one[0]), infer(two[0])
    either, both = union(a, b), intersect(a, b)
    for value in one[1] + two[1]:
        in_a, in_b = admits(a, value), admits(b, value)
        assert admits(either, value) or not (in_a or in_b)
        assert admits(both, value) or not (in_a and in_b)


@given(strategies.schemas(), strategies.schemas())
def test_identities(one: dict[str, Any], two: dict[str, Any]) -> None:
    a, b = infer(one), infer(two)
    assert union(a, NOTHING).types == a.types
    assert a.impossible or union(a, NOTHING) == a == union(NOTHING, a)
    assert intersect(a, ANY) == a == intersect(ANY, a)
    assert union(a, b).types == union(b, a).types
    assert intersect(a, b).types == intersect(b, a).types


@given(schemas_with_values())
def test_a_rendered_shape_accepts_every_valid_document(
    case: tuple[dict[str, Any], list[Any]],
) -> None:
    schema, values = case
    rendered = jsonschema_rs.Draft201909Validator(to_schema(infer(schema)))
    for value in values:
        assert rendered.is_valid(value) or not valid(schema, value)


@given(strategies.schemas())
def test_rendering_and_reading_back_changes_nothing(schema: dict[str, Any]) -> None:
    rendered = to_schema(infer(schema))
    assert to_schema(infer(rendered)) == rendered


SUM = {"reduce": {"strategy": "sum"}}
LAST = {"reduce": {"strategy": "lastWriteWins"}}
TREE = {"type": "object", "properties": {"v": SUM, "below": {"items": {"$ref": "#"}}}}


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        pytest.param({"type": ["integer", "number"]}, {"number"}, id="number includes integer"),
        pytest.param({"enum": [1, 1.5]}, {"number"}, id="enum gives types"),
        pytest.param({"const": 2.0}, {"integer"}, id="2.0 is an integer"),
        pytest.param({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}, id="allOf"),
        pytest.param(
            {"anyOf": [{"type": "null"}, {"type": "string"}]}, {"null", "string"}, id="anyOf"
        ),
        pytest.param({"oneOf": [False, {"type": "string"}]}, {"string"}, id="impossible branch"),
        pytest.param(
            {"if": {"type": "null"}, "then": True, "else": {"type": "array"}},
            {"null", "array"},
            id="both outcomes of if",
        ),
        pytest.param({"not": {"type": "string"}}, set(ANY.types), id="not is ignored"),
        pytest.param({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, {"null"}, id="$ref"),
        pytest.param(
            {"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": {"type": "number"}}},
            {"integer"},
            id="beside $ref",
        ),
        pytest.param(
            {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "const": 1}}}, {"integer"}, id="$anchor"
        ),
        pytest.param(
            {
                "$ref": "flow://w",
                "$defs": {
                    "a": {"$id": "flow://w", "$ref": "#/$defs/b", "$defs": {"b": {"const": ""}}}
                },
            },
            {"string"},
            id="$id with references of its own",
        ),
        pytest.param({"$ref": "#"}, set(ANY.types), id="endless reference"),
        pytest.param({"type": "string", "minLength": 3, "maxLength": 2}, set(), id="no string"),
        pytest.param(
            {"type": "object", "required": ["a"], "additionalProperties": False},
            set(),
            id="no object",
        ),
        pytest.param(
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/a",
                "type": "null",
                "definitions": {"a": {"type": "string"}},
            },
            {"string"},
            id="draft 7 ignores what is beside $ref",
        ),
        pytest.param(
            {"$schema": "http://json-schema.org/draft-04/schema#", "const": 1},
            set(ANY.types),
            id="draft 4 has no const",
        ),
    ],
)
def test_types(schema: dict[str, Any], want: set[str]) -> None:
    assert infer(schema).types == want


@pytest.mark.parametrize(
    ("pointer", "types", "exists"),
    [
        pytest.param("", {"object"}, True, id="the document"),
        pytest.param("/a", {"object"}, True, id="required"),
        pytest.param("/a/b", {"integer"}, True, id="required on every step"),
        pytest.param("/c", {"object"}, False, id="optional"),
        pytest.param("/c/b", {"integer"}, False, id="required below optional"),
        pytest.param("/d", {"string"}, True, id="a default stands for a missing value"),
        pytest.param("/l/0", {"string"}, True, id="below minItems"),
        pytest.param("/l/1", {"string"}, False, id="at minItems"),
        pytest.param("/l/2", set(), False, id="beyond maxItems"),
        pytest.param("/l/x", set(), False, id="no index"),
        pytest.param("/x~1y", {"boolean"}, True, id="escaped"),
        pytest.param("/other", set(ANY.types), False, id="not named"),
        pytest.param("/n/b", {"integer"}, False, id="below something that may be null"),
    ],
)
def test_locate(pointer: str, types: set[str], exists: bool) -> None:
    inner = {"type": "object", "required": ["b"], "properties": {"b": {"type": "integer"}}}
    shape = infer(
        {
            "type": "object",
            "required": ["a", "l", "x/y", "n"],
            "properties": {
                "a": inner,
                "c": inner,
                "d": {"type": "string", "default": ""},
                "l": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                "x/y": {"type": "boolean"},
                "n": {"anyOf": [inner, {"type": "null"}]},
            },
        }
    )
    found, must_exist = locate(shape, pointer)
    assert (found.types, must_exist) == (types, exists)


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        pytest.param({}, None, id="none"),
        pytest.param(SUM, "sum", id="said"),
        pytest.param({"$ref": "#/$defs/a", "$defs": {"a": SUM}}, "sum", id="referred to"),
        pytest.param(
            {"$ref": "#/$defs/a", **LAST, "$defs": {"a": SUM}},
            "lastWriteWins",
            id="beside beats $ref",
        ),
        pytest.param({"allOf": [SUM, LAST]}, "lastWriteWins", id="of equals the later"),
        pytest.param({"allOf": [{"allOf": [LAST]}, SUM]}, "sum", id="fewest applicators"),
        pytest.param(
            {"oneOf": [{"type": "null", **LAST}, {"type": "integer", **SUM}]},
            "conditional",
            id="oneOf",
        ),
        pytest.param(
            {"oneOf": [{"type": "null", **SUM}, {"type": "integer", **SUM}]},
            "sum",
            id="oneOf, all agree",
        ),
        pytest.param(
            {"anyOf": [{"type": "null"}, {"type": "integer", **SUM}]},
            "conditional",
            id="one branch only",
        ),
        pytest.param({"if": {"type": "null"}, "then": LAST, "else": SUM}, "conditional", id="if"),
        pytest.param(
            {**SUM, "if": {"type": "null"}, "then": LAST}, "sum", id="own annotation beats if"
        ),
        pytest.param({"dependentSchemas": {"a": SUM}}, "conditional", id="dependents"),
    ],
)
def test_fixed_reduction(schema: dict[str, Any], want: str | None) -> None:
    fixed = infer(schema).fixed_reduction()
    assert (fixed.strategy if isinstance(fixed, Reduction) else fixed) == want


def test_recursion_is_cut_and_says_so() -> None:
    below, _ = locate(infer(TREE), "/below/0")
    assert below.cut
    assert below.types == ANY.types


def test_definitions_that_refer_to_each_other_end() -> None:
    names = [f"d{i}" for i in range(14)]
    every = {"anyOf": [{"properties": {n: {"$ref": f"#/$defs/{n}"}}} for n in names]}
    assert infer({"$defs": dict.fromkeys(names, every), **every}).types == ANY.types


def test_bounds_of_a_union_are_those_of_the_types_that_have_them() -> None:
    shape = union(of_type("null"), infer({"type": "integer", "minimum": 0, "maximum": 9}))
    assert (shape.numbers.minimum, shape.numbers.maximum) == (0, 9)
    listed = union(of_values(["a"]), of_type("null"))
    assert listed.enum == ("a", None)


def test_redaction_and_secrets_survive_every_combination() -> None:
    marked = infer({"type": "string", "secret": True, "redact": {"strategy": "sha256"}})
    for combined in (union(marked, of_type("null")), intersect(of_type("string"), marked)):
        assert combined.secret
        assert combined.redact == "sha256"


@pytest.mark.parametrize(
    ("one", "two", "want"),
    [
        pytest.param(
            {"type": "integer"}, {"type": "string"}, {"type": ["integer", "string"]}, id="scalars"
        ),
        pytest.param(
            {
                "type": "object",
                "required": ["a", "b"],
                "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
            },
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}},
            {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"type": ["integer", "string"]}, "b": True},
            },
            id="members unite, required intersects",
        ),
    ],
)
def test_union_of_schemas(one: dict[str, Any], two: dict[str, Any], want: dict[str, Any]) -> None:
    assert to_schema(union(infer(one), infer(two))) == want
