"""Every mistake in a schema has a code, a pointer and a hint."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from penstock.model.schema_check import check_schema
from support import strategies_schema as strategies

MERGE = {"strategy": "merge"}
SUM = {"strategy": "sum"}


def root(**members: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"type": "object", "reduce": MERGE, "properties": members}


@pytest.mark.parametrize(
    ("schema", "want"),
    [
        pytest.param(
            {"type": "objct"},
            (
                "E-SCHEMA",
                "/type",
                'schema is not valid: "objct" is not a type',
                "did you mean object?",
            ),
            id="unknown type",
        ),
        pytest.param(
            root(a={"type": "timestamp"}),
            (
                "E-SCHEMA",
                "/properties/a/type",
                'schema is not valid: "timestamp" is not a type',
                "write type: string, format: date-time",
            ),
            id="a type of SQL",
        ),
        pytest.param(
            root(a={"type": ["decimal", "null"]}),
            (
                "E-SCHEMA",
                "/properties/a/type",
                'schema is not valid: "decimal" is not a type',
                "write type: string, format: number (exact, as text), or type: number with "
                "multipleOf: 0.01, minimum and maximum (DECIMAL)",
            ),
            id="a type of SQL, or null",
        ),
        pytest.param(
            root(a={"minimum": "3"}),
            ("E-SCHEMA", "/properties/a/minimum", 'schema is not valid: "3" is not a number', None),
            id="keyword of the wrong type",
        ),
        pytest.param(
            {"type": "object", "requird": ["a"]},
            (
                "E-SCHEMA",
                "/requird",
                'schema is not valid: unknown keyword "requird"',
                'did you mean "required"? Custom keywords begin with x-',
            ),
            id="misspelt keyword",
        ),
        pytest.param(
            root(a={"pattern": "("}),
            (
                "E-SCHEMA",
                "/properties/a/pattern",
                'schema is not valid: "(" does not have the format regex',
                None,
            ),
            id="pattern that is none",
        ),
        pytest.param(
            {"$schema": "https://json-schema.org/draft/2030-01/schema", "type": "object"},
            (
                "E-SCHEMA",
                "/$schema",
                '"https://json-schema.org/draft/2030-01/schema" is not a supported draft '
                "of JSON Schema",
                "supported: 4, 6, 7, 2019-09 (the default) and 2020-12",
            ),
            id="unknown draft",
        ),
        pytest.param(
            root(a={"$ref": "#/$defs/x"}),
            ("E-SCHEMA-REF", "/properties/a/$ref", '$ref "#/$defs/x" points to nothing', None),
            id="dangling reference",
        ),
        pytest.param(
            {"type": ["object", "array"]},
            (
                "E-ROOT",
                "/type",
                "the root of the schema must be of type object; it allows [array, object]",
                "add type: object",
            ),
            id="root that may be an array",
        ),
        pytest.param(
            root(a={"type": "string", "const": 5}),
            (
                "E-IMPOSSIBLE",
                "/properties/a",
                "no value can be valid at /a: its schemas exclude each other",
                "write false to forbid the member",
            ),
            id="impossible location",
        ),
        pytest.param(
            {"type": "object", "required": ["a"], "properties": {"a": False}},
            ("E-IMPOSSIBLE", "", "no document can be valid under this schema", None),
            id="impossible document",
        ),
        pytest.param(
            {"type": "object", "additionalProperties": False},
            (
                "E-SPARK-TYPE",
                "",
                "no Spark type fits: documents cannot have any member",
                "name the members in properties, or allow additionalProperties",
            ),
            id="no Spark type fits",
        ),
        pytest.param(
            root(a={"type": "string", "reduce": SUM}),
            (
                "E-REDUCE-TYPE",
                "/properties/a/reduce",
                "sum at /a, which is a string",
                "sum numbers, or strings with format: number",
            ),
            id="sum of text",
        ),
        pytest.param(
            root(
                a={
                    "type": "number",
                    "multipleOf": 0.01,
                    "minimum": 0,
                    "maximum": 10**14,
                    "reduce": SUM,
                }
            ),
            (
                "E-REDUCE-DIGITS",
                "/properties/a/reduce",
                "sum at /a, whose bounds allow 17 digits: a JSON number keeps 15, so the sum would "
                "not be exact",
                "write type: string, format: number, or bounds of fewer digits",
            ),
            id="sum of more digits than JSON keeps",
        ),
        pytest.param(
            root(
                a={
                    "type": "object",
                    "properties": {"n": {"type": "string", "format": "number"}},
                    "reduce": {"strategy": "maximize", "key": ["/n"]},
                }
            ),
            (
                "W-REDUCE-TEXT",
                "/properties/a/reduce",
                'the key of maximize at /a is text, and is compared as text: "9" is above "10"',
                "write the number as type: integer, or type: number with multipleOf",
            ),
            id="a number in a key that is text",
        ),
        pytest.param(
            root(a={"type": "integer", "reduce": {"strategy": "append"}}),
            (
                "E-REDUCE-TYPE",
                "/properties/a/reduce",
                "append at /a, which is an integer",
                "append is for arrays",
            ),
            id="append to a number",
        ),
        pytest.param(
            root(a={"type": "object", "properties": {"x": {}}, "reduce": {"strategy": "set"}}),
            (
                "E-REDUCE-TYPE",
                "/properties/a/reduce",
                'set at /a, which has a member "x"',
                "a set has only add, remove and intersect",
            ),
            id="set with another member",
        ),
        pytest.param(
            root(a={"type": "integer", "reduce": {"strategy": "minimize", "key": ["/k"]}}),
            (
                "E-REDUCE-TYPE",
                "/properties/a/reduce",
                "minimize at /a, which is an integer",
                "a key points into objects or arrays; remove it",
            ),
            id="key of a scalar",
        ),
        pytest.param(
            root(stats={"type": "object", "properties": {"n": {"type": "integer", "reduce": SUM}}}),
            (
                "E-REDUCE-PARENT",
                "/properties/stats/properties/n/reduce",
                "the strategy at /stats/n never acts: /stats is replaced as a whole",
                "add reduce: {strategy: merge} to /stats",
            ),
            id="parent that is replaced",
        ),
        pytest.param(
            root(n={"type": ["integer", "null"], "reduce": SUM}),
            (
                "W-REDUCE-NULL",
                "/properties/n/reduce",
                "sum at /n fails on null, which is allowed",
                "remove null from its type, or choose the strategy with if/then/else",
            ),
            id="sum that may meet null",
        ),
        pytest.param(
            root(a={"redact": {"strategy": "md5"}}),
            (
                "E-REDACT",
                "/properties/a/redact",
                "redact has no known strategy",
                "write redact: {strategy: block} or {strategy: sha256}",
            ),
            id="unknown redaction",
        ),
        pytest.param(
            {**root(a={"redact": {"strategy": "block"}}), "required": ["a"]},
            (
                "E-REDACT",
                "/properties/a/redact",
                "/a is blocked, but required in documents",
                "remove it from required and key, or use {strategy: sha256}",
            ),
            id="blocked and required",
        ),
        pytest.param(
            root(a={"type": "integer", "redact": {"strategy": "sha256"}}),
            (
                "E-REDACT",
                "/properties/a/redact",
                "sha256 turns /a into a string, but it is an integer",
                "allow strings there, or use {strategy: block}",
            ),
            id="hash of a number",
        ),
    ],
)
def test_each_mistake_is_located_and_explained(
    schema: dict[str, Any], want: tuple[str, str, str, str | None]
) -> None:
    assert [(p.code, p.pointer, p.message, p.hint) for p in check_schema(schema)] == [want]


def test_an_unknown_strategy_is_refused_where_it_stands() -> None:
    (problem,) = check_schema(root(a={"reduce": {"strategy": "maximise"}}))
    assert (problem.code, problem.pointer) == ("E-REDUCE", "/properties/a/reduce")
    assert problem.hint == "did you mean maximize?"


def test_a_blocked_key_is_refused() -> None:
    (problem,) = check_schema(root(a={"redact": {"strategy": "block"}}), key=["/a"])
    assert problem.code == "E-REDACT"


def test_every_mistake_of_a_kind_is_reported_at_once() -> None:
    problems = check_schema({"type": "objct", "requird": [], "properties": {"a": {"$ref": "#/x"}}})
    assert [p.code for p in problems] == ["E-SCHEMA", "E-SCHEMA", "E-SCHEMA-REF"]


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(root(a={"type": "integer", "reduce": SUM}, b={"x-mine": 1}), id="plain"),
        pytest.param(root(a=False), id="false is a way to say never"),
        pytest.param(
            root(a={"type": "string", "format": "number", "reduce": SUM}),
            id="sum of numeric strings",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": {"reduce": {"strategy": "lastWriteWins"}}}},
            id="saying what happens anyway",
        ),
        pytest.param(
            root(
                a={
                    "type": "object",
                    "reduce": {"strategy": "maximize", "key": ["/k"]},
                    "properties": {"n": {"type": "integer", "reduce": SUM}},
                }
            ),
            id="equal keys merge",
        ),
        pytest.param({"$ref": "#/$defs/r", "$defs": {"r": root(a={})}}, id="type by reference"),
        pytest.param(
            {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, id="draft 7"
        ),
    ],
)
def test_a_good_schema_has_no_problems(schema: dict[str, Any]) -> None:
    assert check_schema(schema) == []


@given(strategies.collection_schemas())
def test_valid_schemas_are_never_called_invalid(schema: dict[str, Any]) -> None:
    assert {p.code for p in check_schema(schema)} <= {"E-IMPOSSIBLE", "E-ROOT"}


N_SUM = {"n": {"type": "integer", "reduce": SUM}}
NOTHING_LOST = {
    **{
        f"explicit {strategy}": {
            "type": "object",
            "reduce": {"strategy": strategy},
            "properties": N_SUM,
        }
        for strategy in ("lastWriteWins", "firstWriteWins", "minimize", "jsonSchemaMerge")
    },
    "explicit append": {
        "type": "array",
        "reduce": {"strategy": "append"},
        "items": {"type": "object", "properties": N_SUM},
    },
    "items of a set's object": {
        "type": "object",
        "reduce": {"strategy": "set"},
        "properties": {
            term: {"type": "object", "additionalProperties": N_SUM["n"]}
            for term in ("add", "remove", "intersect")
        },
    },
    "items of a set's array": {
        "type": "object",
        "reduce": {"strategy": "set", "key": ["/k"]},
        "properties": {
            "add": {
                "type": "array",
                "items": {"type": "object", "reduce": {"strategy": "merge"}, "properties": N_SUM},
            }
        },
    },
}


@pytest.mark.parametrize("schema", NOTHING_LOST.values(), ids=NOTHING_LOST)
def test_a_location_with_an_annotation_is_as_its_author_wants_it(schema: dict[str, Any]) -> None:
    assert check_schema(root(a=schema)) == []


def test_a_set_replaces_items_without_an_annotation() -> None:
    add = {"type": "object", "additionalProperties": {"type": "object", "properties": N_SUM}}
    (found,) = check_schema(
        root(a={"type": "object", "reduce": {"strategy": "set"}, "properties": {"add": add}})
    )
    assert found.message == "the strategy at /a/add/*/n never acts: /a/add/* is replaced as a whole"


def test_a_shared_definition_may_act_in_one_place_and_not_in_another() -> None:
    shared = {"$ref": "#/$defs/money"}
    schema = root(total=shared, last={"type": "object", "properties": {"cost": shared}})
    money = {"type": "integer", "reduce": SUM}
    assert check_schema({**schema, "$defs": {"money": money}}) == []
    del schema["properties"]["total"]
    (found,) = check_schema({**schema, "$defs": {"money": money}})
    assert (found.code, found.pointer) == ("E-REDUCE-PARENT", "/$defs/money/reduce")
