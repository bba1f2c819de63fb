"""A schema as a Spark expression agrees with the validator on every row."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from penstock.model.columns import Column, as_stored, columns, unstorable
from penstock.model.infer import infer
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_struct
from penstock.native.predicate import predicate
from penstock.native.regex import to_java
from support import strategies_schema as strategies

Case = tuple[dict[str, Any], list[dict[str, Any]]]

STRUCTURE = {"type", "properties", "items", "additionalProperties"}


def loose(schema: Any) -> Any:  # noqa: ANN401
    """The same structure without what narrows it: rows that its columns hold may break `schema`."""
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if k in STRUCTURE}
    if "properties" in kept:
        kept["properties"] = {name: loose(below) for name, below in kept["properties"].items()}
    for keyword in ("items", "additionalProperties"):
        if keyword in kept:
            kept[keyword] = True if isinstance(kept[keyword], list) else loose(kept[keyword])
    return kept


PLAIN = strategies.cases(documents_max=5, bodies=strategies.plain_bodies, widened=loose)
ANYTHING = strategies.cases(documents_max=5, widened=loose)


def rows_of(case: Case) -> tuple[Column, list[dict[str, Any]]]:
    schema, documents = case
    wide = CompiledSchema(loose(schema))
    root = columns(wide.shape)
    return root, [d for d in documents if wide.is_valid(d) and unstorable(d, root) is None]


def judged(session: SparkSession, batch: list[Case]) -> list[tuple[Case, dict[str, Any], bool]]:
    """What the expressions say of every row, all in one job: each case is a struct column of it."""
    asked = []
    for at, case in enumerate(batch):
        root, rows = rows_of(case)
        if rows and (expression := predicate(case[0], root, f"c{at}")) is not None:
            asked.append((f"c{at}", case, root, rows, expression))
    if not asked:
        return []
    height = max(len(rows) for _, _, _, rows, _ in asked)
    table = pa.table(
        {
            name: to_struct([*rows, *[None] * (height - len(rows))], root)
            for name, _, root, rows, _ in asked
        }
    )
    answers = session.createDataFrame(table).selectExpr(*(e for *_, e in asked)).collect()
    return [
        (case, as_stored(row, root), answers[at][i])
        for i, (_, case, root, rows, _) in enumerate(asked)
        for at, row in enumerate(rows)
    ]


@pytest.mark.spark
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.one_of(PLAIN, PLAIN, ANYTHING), min_size=25, max_size=25))
def test_the_expression_and_the_validator_agree(spark: SparkSession, batch: list[Case]) -> None:
    for (schema, _), document, ok in judged(spark, batch):
        assert ok == CompiledSchema(schema).is_valid(document), (schema, document)


KEYWORDS = [
    ({"type": "integer", "minimum": 3, "maximum": 5}, [2, 3, 5, 6, 4.0]),
    ({"type": "integer", "exclusiveMinimum": 2.5, "exclusiveMaximum": 5}, [2, 3, 4, 5]),
    ({"type": "integer", "minimum": -(2**70)}, [-(2**63), 2**63 - 1]),
    ({"type": "integer", "multipleOf": 3}, [0, 3, 4, -6]),
    ({"type": "integer", "multipleOf": 0.5}, [1, 2]),
    ({"type": ["integer", "null"], "enum": [1, None, "x"]}, [1, 2, None]),
    ({"type": "number", "minimum": 0.1, "exclusiveMaximum": 2}, [0.1, 0.09999, 2, 1.999999]),
    ({"type": "number", "enum": [0, 1.5]}, [0, -0.0, 0.0, 1.5, 2]),
    ({"type": "number", "const": None}, [1.5]),
    ({"type": "boolean", "const": True}, [True, False]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "😀😀😀", "é" * 4, ""]),
    (
        {"type": "string", "pattern": "^a.c$"},
        ["abc", "a\nc", "a\u0085c", "a\u2028c", "abc\n", "xabc"],
    ),
    ({"type": "string", "pattern": r"^\d{2,3}(-|x)?\w+$"}, ["12a", "123-_", "1", "٣٣a", "12é"]),
    ({"type": "string", "pattern": "[^a-c$&[]|\\$"}, ["abc", "d", "$", "&", "["]),
    (
        {"type": "string", "enum": ["a'b", "${user.home}", "\\", "`"]},
        ["a'b", "${user.home}", "\\", "a"],
    ),
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29", ""],
    ),
    (
        {"type": "string", "format": "date"},
        ["2024-04-31", "2024-13-01", "2024-1-01", "2024-01-01\n"],
    ),
    ({"type": "string", "format": "uuid"}, ["6f1c1f0e-3b1a-4b6e-9c57-0d6f6f0f5a11", "6f1c1f0e"]),
    ({"type": "string", "format": "ipv4"}, ["1.2.3.4", "01.2.3.4", "256.1.1.1", "1.2.3"]),
    ({"type": "string", "format": "integer"}, ["-12", "1.0", "", "+1", "12\n"]),
    (
        {"type": "string", "format": "number"},
        ["-1.5e3", "01", "NaN", "-Infinity", "Infinity", ".5"],
    ),
    ({"type": "string", "format": "of our own"}, ["x"]),
    (
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
        [[], [1], [1, 0]],
    ),
    (
        {"type": "array", "items": {"enum": [1, "a", None]}, "maxItems": 2},
        [[1, "a"], [None], [2], [1] * 3],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
        [{}, {"x": 1}, {"x": 0}],
    ),
    (
        {"type": "object", "required": ["p"], "additionalProperties": {"type": "integer"}},
        [{}, {"p": 1}],
    ),
    (
        {"type": "object", "properties": {"p": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"p": 1}],
    ),
    (
        {"type": ["object", "null"], "properties": {"p": {"type": "integer", "minimum": 3}}},
        [None, {}, {"p": 3}, {"p": 2}],
    ),
    ({"oneOf": [{"type": "string"}, {"const": 3}, {"const": "a"}]}, ["a", "b", 3, 4, None]),
    (
        {"type": "integer", "not": {"enum": [3]}, "if": {"minimum": 5}, "then": {"maximum": 6}},
        [3, 4, 6, 7],
    ),
    ({"type": "integer", "if": {"minimum": 5}, "else": {"const": 1}}, [1, 2, 5]),
    ({"type": ["integer", "string"]}, [1, "a"]),
    ({"type": "null"}, [None]),
]


@pytest.mark.spark
def test_each_keyword_agrees_on_its_edges(spark: SparkSession) -> None:
    # Present, null where that is allowed, and absent: required does not hide behind the keyword.
    batch = [
        (
            {"type": "object", "properties": {"v": body}, **required},
            [{"v": value} for value in values] + [{}],
        )
        for body, values in KEYWORDS
        for required in ({}, {"required": ["v"]})
    ]
    answers = judged(spark, batch)
    assert len(answers) == sum(len(documents) for _, documents in batch)
    for (schema, _), document, ok in answers:
        assert ok == CompiledSchema(schema).is_valid(document), (schema, document)


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(
            {"properties": {"v": {"type": "string", "format": "date-time"}}}, id="leap seconds"
        ),
        pytest.param(
            {"properties": {"v": {"type": "array", "uniqueItems": True}}}, id="unique items"
        ),
        pytest.param(
            {"properties": {"v": {"type": "string", "pattern": "(?=a)"}}}, id="look-ahead"
        ),
        pytest.param(
            {"properties": {"v": {"type": "number", "multipleOf": 0.1}}}, id="binary fractions"
        ),
        pytest.param({"properties": {"v": {"$ref": "#"}}}, id="recursion"),
        pytest.param({"patternProperties": {"^a": {"type": "string"}}}, id="members by pattern"),
        pytest.param({"minProperties": 2}, id="number of members"),
    ],
)
def test_what_spark_cannot_decide_exactly_has_no_expression(schema: dict[str, Any]) -> None:
    whole = {"type": "object", **schema}
    assert predicate(whole, columns(infer(whole))) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "\\s",
        "\\b",
        "(?=a)",
        "(?<n>a)",
        "a**",
        "*a",
        "[a",
        "(a",
        "a)",
        "\\u0041",
        "[[:x:]]x]",
        "x{2",
    ],
)
def test_patterns_that_java_may_read_differently_are_left_alone(pattern: str) -> None:
    assert to_java(pattern) is None


TEXTS = ["", "a", "b1", "a\n", "\n", "aé", "A-Z", "[x]", "a.b", "12", "😀", "a&b", "^", "\u2028"]


@given(
    st.from_regex(
        r"(\^?([ab1.\-]|\\d|\\w|\\\.|\[[a-c]+\]|\[\^-?[ab&]+\]|\(a\|b\))([*+?]|\{1,2\})?){1,4}\$?",
        fullmatch=True,
    )
)
def test_translated_patterns_stay_valid_for_the_validator(pattern: str) -> None:
    # The same text means the same to the validator: only spelling changed, except for \z.
    translated = to_java(pattern)
    assert translated is not None
    ours = jsonschema_rs.Draft201909Validator({"pattern": pattern})
    theirs = jsonschema_rs.Draft201909Validator({"pattern": translated})
    for text in TEXTS:
        assert ours.is_valid(text) == theirs.is_valid(text), (pattern, translated, text)
