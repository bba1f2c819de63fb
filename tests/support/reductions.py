"""Worked examples of reductions: one table, run through every implementation.

Each example folds documents of one key, and gives the state after each of them. Where an example is
about a value rather than a document, the value is at `/v` of a document that merges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from penstock.model.json_order import ABSENT, Absent, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Documents of one key, and the states they reduce to."""

    name: str
    schema: dict[str, Any]
    documents: Sequence[Json]
    states: Sequence[Json | Absent]
    """The full states after the last documents, one each; ABSENT if the document is deleted."""
    combined: Sequence[Json] | None = None
    """The combination of all documents, if it differs from the last state."""
    uncombined: bool = False
    """True if the documents are not combined at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Documents of one key that cannot be reduced, and what the error must contain."""

    name: str
    schema: dict[str, Any]
    documents: Sequence[Json]
    says: list[str]


LAST = {"strategy": "lastWriteWins"}
FIRST = {"strategy": "firstWriteWins"}
MERGE = {"strategy": "merge"}
SUM = {"strategy": "sum"}


def document(properties: dict[str, Any], reduce: dict[str, Any] = MERGE) -> dict[str, Any]:
    """Return the schema of a document with key `/id`."""
    return {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "string"}, **properties},
        "reduce": reduce,
    }


def _value(
    name: str,
    schema: dict[str, Any],
    documents: list[Json],
    states: list[Json],
    combined: Json | Absent = ABSENT,
    *,
    uncombined: bool = False,
) -> Example:
    return Example(
        name=name,
        schema=document({"v": schema}),
        documents=[_at_v(value) for value in documents],
        states=[_at_v(value) for value in states],
        combined=None if combined is ABSENT else [_at_v(combined)],
        uncombined=uncombined,
    )


def _at_v(value: Json) -> Json:
    return {"id": "k", "v": value}


def _docs(*documents: dict[str, Json]) -> list[Json]:
    return [{"id": "k", **members} for members in documents]


_SET_OF_SUMS = {
    "type": "object",
    "reduce": {"strategy": "set"},
    "properties": {
        term: {"type": "object", "additionalProperties": {"type": "integer", "reduce": SUM}}
        for term in ("add", "remove", "intersect")
    },
}

_ACTIONS = {
    "type": "object",
    "required": ["id", "action"],
    "properties": {
        "id": {"type": "string"},
        "action": {"type": "string"},
        "value": {"type": "number"},
    },
    "oneOf": [
        {"properties": {"action": {"const": "reset"}}, "reduce": LAST},
        {
            "properties": {"action": {"const": "sum", "reduce": FIRST}, "value": {"reduce": SUM}},
            "reduce": MERGE,
        },
    ],
}

CDC = {
    "type": "object",
    "required": ["id", "_meta"],
    "properties": {
        "id": {"type": "string"},
        "_meta": {
            "type": "object",
            "required": ["op"],
            "properties": {"op": {"enum": ["c", "u", "d"]}},
        },
        "v": {"type": "integer"},
        "w": {"type": "integer"},
    },
    "if": {"properties": {"_meta": {"properties": {"op": {"const": "d"}}}}},
    "then": {"reduce": {"strategy": "merge", "delete": True}},
    "else": {"reduce": MERGE},
}


_SET_OR_ADD = {
    "type": "object",
    "required": ["id", "op"],
    "reduce": MERGE,
    "properties": {
        "id": {"type": "string"},
        "op": {"enum": ["add", "set"]},
        "n": {"type": "integer"},
    },
    "if": {"properties": {"op": {"const": "add"}}},
    "then": {"properties": {"n": {"reduce": SUM}}},
}

_DELETED_BY_ZERO = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "string"},
        "n": {"type": "integer", "reduce": SUM},
        "w": {"type": "integer"},
    },
    "if": {"required": ["n"], "properties": {"n": {"const": 0}}},
    "then": {"reduce": {"strategy": "merge", "delete": True}},
    "else": {"reduce": MERGE},
}


def _cdc(op: str, **members: Json) -> dict[str, Json]:
    return {"id": "k", "_meta": {"op": op}, **members}


EXAMPLES: list[Example] = [
    Example(
        name="F-1 without annotations the last document wins whole",
        schema=document({"a": {"type": "integer"}, "b": {"type": "integer"}}, LAST),
        documents=_docs({"a": 1}, {"b": 2}),
        states=_docs({"a": 1}, {"b": 2}),
    ),
    Example(
        name="F-2 null is a value, absent is not",
        schema=document(
            {
                "a": {"type": "integer", "reduce": FIRST},
                "b": {"type": ["integer", "null"], "reduce": LAST},
            }
        ),
        documents=_docs({"a": 1, "b": 1}, {"a": 2, "b": 2}, {"b": None}),
        states=_docs({"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": None}),
    ),
    Example(
        name="F-3 a sum passes over documents without it",
        schema=document({"n": {"type": "integer", "reduce": SUM}}),
        documents=_docs({"n": 2}, {}, {"n": -5}),
        states=_docs({"n": 2}, {"n": 2}, {"n": -3}),
    ),
    _value(
        "F-4 keyed merge of arrays reduces items of equal key",
        {
            "type": "array",
            "reduce": {"strategy": "merge", "key": ["/k"]},
            "items": {
                "type": "object",
                "required": ["k"],
                "reduce": MERGE,
                "properties": {
                    "k": {"type": "integer"},
                    "n": {"type": "integer", "reduce": SUM},
                    "m": {"type": "integer", "reduce": SUM},
                },
            },
        },
        [
            [{"k": 5, "n": 1}, {"k": 9, "n": 1}],
            [{"k": 7, "m": 1}],
            [{"k": 5, "n": 3}, {"k": 7, "m": 1}],
        ],
        [
            [{"k": 5, "n": 1}, {"k": 9, "n": 1}],
            [{"k": 5, "n": 1}, {"k": 7, "m": 1}, {"k": 9, "n": 1}],
            [{"k": 5, "n": 4}, {"k": 7, "m": 2}, {"k": 9, "n": 1}],
        ],
    ),
    _value(
        "F-5 an item can be its own key",
        {
            "type": "array",
            "reduce": {"strategy": "merge", "key": [""]},
            "items": {"type": "integer"},
        },
        [[5, 9], [7], [2, 4, 5]],
        [[5, 9], [5, 7, 9], [2, 4, 5, 7, 9]],
    ),
    _value(
        "F-6 merge of arrays without a key goes by position",
        {
            "type": "array",
            "reduce": MERGE,
            "items": {"type": ["integer", "string"], "reduce": {"strategy": "maximize"}},
        },
        [[0, 1, 0], [3, 0, 2], [-1, 0, 4, "a"]],
        [[0, 1, 0], [3, 1, 2], [3, 1, 4, "a"]],
    ),
    _value(
        "F-7 keyed minimize keeps the smaller side whole and merges ties",
        {
            "type": "object",
            "required": ["k"],
            "reduce": {"strategy": "minimize", "key": ["/k"]},
            "properties": {
                "k": {"type": "integer"},
                "n": {"type": "integer", "reduce": SUM},
                "x": {"type": "boolean"},
            },
        },
        [{"k": 3, "n": 1}, {"k": 4, "n": 1}, {"k": 3, "n": 1, "x": True}, {"k": 2, "n": 1}],
        [{"k": 3, "n": 1}, {"k": 3, "n": 1}, {"k": 3, "n": 2, "x": True}, {"k": 2, "n": 1}],
    ),
    _value(
        "F-8 maximize orders values of different types",
        {"type": ["integer", "string", "null"], "reduce": {"strategy": "maximize"}},
        [3, "2", None],
        [3, "2", "2"],
    ),
    _value(
        "F-9 null ends an append",
        {
            "type": ["array", "null"],
            "items": {"type": "integer"},
            "if": {"type": "null"},
            "then": {"reduce": LAST},
            "else": {"reduce": {"strategy": "append"}},
        },
        [[0, 1], [2], None, [5]],
        [[0, 1], [0, 1, 2], None, None],
        uncombined=True,
    ),
    _value(
        "F-10 an empty array starts over",
        {
            "type": "array",
            "items": {"type": "integer"},
            "oneOf": [
                {"minItems": 1, "reduce": {"strategy": "append"}},
                {"maxItems": 0, "reduce": LAST},
            ],
        },
        [[1, 2], [], [3]],
        [[1, 2], [], [3]],
        uncombined=True,
    ),
    Example(
        name="F-11 the branch of oneOf that passed decides (sum)",
        schema=_ACTIONS,
        documents=_docs({"action": "sum", "value": 5}, {"action": "sum", "value": -1.2}),
        states=_docs({"action": "sum", "value": 5}, {"action": "sum", "value": 3.8}),
        uncombined=True,
    ),
    Example(
        name="F-11 the branch of oneOf that passed decides (reset)",
        schema=_ACTIONS,
        documents=_docs(
            {"action": "sum", "value": 5},
            {"action": "reset", "value": 0},
            {"action": "sum", "value": 1.3},
        ),
        states=_docs(
            {"action": "sum", "value": 5},
            {"action": "reset", "value": 0},
            {"action": "reset", "value": 1.3},
        ),
        uncombined=True,
    ),
    _value(
        "F-12 a set removes, then adds",
        _SET_OF_SUMS,
        [{"add": {"a": 1}}, {"add": {"b": 1}}, {"remove": {"a": 0}, "add": {"c": 1}}],
        [{"add": {"a": 1}}, {"add": {"a": 1, "b": 1}}, {"add": {"b": 1, "c": 1}}],
        combined={"add": {"b": 1, "c": 1}, "remove": {"a": 0}},
    ),
    _value(
        "F-13 a set intersects",
        _SET_OF_SUMS,
        [
            {"add": {"b": 1, "c": 1}},
            {"intersect": {"b": 0, "z": 0}},
            {"add": {"z": 2}},
        ],
        [{"add": {"b": 1, "c": 1}}, {"add": {"b": 1}}, {"add": {"b": 1, "z": 2}}],
        combined={"add": {"b": 1, "z": 2}, "intersect": {"b": 0, "z": 0}},
    ),
    _value(
        "F-14 a set of arrays has a key",
        {
            "type": "object",
            "reduce": {"strategy": "set", "key": ["/0"]},
            "additionalProperties": {
                "type": "array",
                "items": {
                    "type": "array",
                    "reduce": MERGE,
                    "items": [
                        {"type": "integer", "reduce": LAST},
                        {"type": "integer", "reduce": SUM},
                    ],
                },
            },
        },
        [{"add": [[55, 1]]}, {"remove": [[99]], "add": [[22, 1], [55, 1]]}],
        [{"add": [[55, 1]]}, {"add": [[22, 1], [55, 2]]}],
        combined={"add": [[22, 1], [55, 2]], "remove": [[99]]},
    ),
    Example(
        name="F-15 a deletion forgets what was before",
        schema=CDC,
        documents=[_cdc("c", v=1), _cdc("u", w=2), _cdc("d"), _cdc("c", v=9)],
        states=[_cdc("c", v=1), _cdc("u", v=1, w=2), ABSENT, _cdc("c", v=9)],
        uncombined=True,
    ),
    _value(
        "F-16 schemas of scalars unite their types",
        {"type": "object", "reduce": {"strategy": "jsonSchemaMerge"}},
        [{"type": "integer"}, {"type": "string"}],
        [{"type": "integer"}, {"type": ["integer", "string"]}],
    ),
    _value(
        "F-16 schemas of objects unite members and intersect what is required",
        {"type": "object", "reduce": {"strategy": "jsonSchemaMerge"}},
        [
            {
                "type": "object",
                "additionalProperties": False,
                "required": ["a", "b"],
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
            {
                "type": "object",
                "additionalProperties": False,
                "required": ["a"],
                "properties": {"a": {"type": "string"}, "c": {"type": "boolean"}},
            },
        ],
        [
            {
                "type": "object",
                "additionalProperties": False,
                "required": ["a", "b"],
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
            {
                "type": "object",
                "additionalProperties": False,
                "required": ["a"],
                "properties": {
                    "a": {"type": ["integer", "string"]},
                    "b": {"type": "string"},
                    "c": {"type": "boolean"},
                },
            },
        ],
    ),
    _value(
        "6.3 a sum may leave the range on the way",
        {"type": "integer", "maximum": 2**64 - 1, "reduce": SUM},
        [2**64 - 1, 5, -10],
        [2**64 - 6],
    ),
    _value(
        "6.3 integers and floats add",
        {"type": "number", "reduce": SUM},
        [123, 45, -70, 0.1],
        [123, 168, 98, 98.1],
    ),
    _value(
        "6.3 a numeric string makes the sum exact",
        {"type": ["integer", "string"], "reduce": SUM},
        [5, "-1.2"],
        [5, "3.8"],
    ),
    _value(
        "6.3 a sum of amounts in cents is one, however many there are",
        {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 9999, "reduce": SUM},
        [0.1, 0.2, 0.7, *([0.01] * 7)],
        [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07],
    ),
    _value(
        "6.3 a sum of texts has the digits of the value that has most",
        {"type": "string", "format": "number", "reduce": SUM},
        ["10.10", "0.9", "-1", "-10"],
        ["10.10", "11.00", "10.00", "0.00"],
    ),
    _value(
        "6.3 a sum of texts has no largest value",
        {"type": "string", "format": "number", "reduce": SUM},
        ["1e3", "99999999999999999999999999999999999999.5", "0.25"],
        ["1e3", "100000000000000000000000000000000000999.5", "1" + "0" * 35 + "999.75"],
    ),
    _value(
        "6.2 texts that write numbers compare as numbers",
        {"type": "string", "format": "number", "reduce": {"strategy": "maximize"}},
        ["9.00", "10.00", "-20", "1e1"],
        ["9.00", "10.00", "10.00", "1e1"],
    ),
    _value(
        "6.2 the least of negative numbers is the longest",
        {"type": "string", "format": "integer", "reduce": {"strategy": "minimize"}},
        ["-9", "-10", "7", "-010"],
        ["-9", "-10", "-10", "-010"],
    ),
    _value(
        "bigSum is always a string",
        {"type": ["integer", "string"], "reduce": {"strategy": "bigSum"}},
        [2**62, 2**62, "1" + "0" * 40],
        [2**62, str(2**63), str(2**63 + 10**40)],
    ),
    _value(
        "R-8 keyed merge sorts its input and folds duplicates",
        {
            "type": "array",
            "reduce": {"strategy": "merge", "key": ["/k"]},
            "items": {
                "type": "object",
                "reduce": MERGE,
                "properties": {"k": {"type": "integer"}, "n": {"type": "integer", "reduce": SUM}},
            },
        },
        [[{"k": 2, "n": 1}, {"k": 1, "n": 1}, {"k": 2, "n": 1}], [{"k": 1, "n": 5}]],
        [[{"k": 1, "n": 1}, {"k": 2, "n": 2}], [{"k": 1, "n": 6}, {"k": 2, "n": 2}]],
    ),
    _value(
        "R-9 a deleted member disappears",
        {
            "type": "object",
            "reduce": MERGE,
            "additionalProperties": {
                "type": ["integer", "null"],
                "if": {"type": "null"},
                "then": {"reduce": {"strategy": "lastWriteWins", "delete": True}},
                "else": {"reduce": SUM},
            },
        },
        [{"a": 1, "b": 1}, {"a": None, "b": 1}],
        [{"a": 1, "b": 1}, {"b": 2}],
        uncombined=True,
    ),
    Example(
        name="R-10 what is not associative is never combined",
        schema=document(
            {"n": {"type": "integer", "reduce": SUM}}, {"strategy": "merge", "associative": False}
        ),
        documents=_docs({"n": 1}, {"n": 2}),
        states=_docs({"n": 1}, {"n": 3}),
        uncombined=True,
    ),
    Example(
        name="R-11 what one document adds another may set, and the sum is not what was set",
        schema=_SET_OR_ADD,
        documents=_docs({"op": "add", "n": 10}, {"op": "set", "n": 5}, {"op": "add", "n": 1}),
        states=_docs({"op": "add", "n": 10}, {"op": "set", "n": 5}, {"op": "add", "n": 6}),
        uncombined=True,
    ),
    Example(
        name="R-12 a total that looks like a deletion is none",
        schema=_DELETED_BY_ZERO,
        documents=_docs({"n": 5, "w": 1}, {"n": -5}, {"w": 2}, {"n": 0}, {"w": 3}),
        states=[
            *_docs({"n": 5, "w": 1}, {"n": 0, "w": 1}, {"n": 0, "w": 2}),
            ABSENT,
            *_docs({"w": 3}),
        ],
        uncombined=True,
    ),
    _value(
        "R-13 a member whose total looks like a deletion stays",
        {
            "type": "object",
            "reduce": MERGE,
            "additionalProperties": {
                "type": "integer",
                "if": {"const": 0},
                "then": {"reduce": {"strategy": "lastWriteWins", "delete": True}},
                "else": {"reduce": SUM},
            },
        },
        [{"a": 5, "b": 1}, {"a": -5}, {"b": 1}, {"a": 0}],
        [{"a": 5, "b": 1}, {"a": 0, "b": 1}, {"a": 0, "b": 2}, {"b": 2}],
        uncombined=True,
    ),
]


def _refused(name: str, schema: dict[str, Any], documents: list[Json], *says: str) -> Refusal:
    return Refusal(
        name=name,
        schema=document({"v": schema}),
        documents=[_at_v(value) for value in documents],
        says=["/v", *says],
    )


_ANY_SUM = {"type": ["integer", "string"], "reduce": SUM}

REFUSALS: list[Refusal] = [
    _refused(
        "F-17 unsigned integers end at 2^64 - 1",
        {"type": "integer", "maximum": 2**64 - 1, "reduce": SUM},
        [2**64 - 1, 1],
        "sum overflow",
        "18446744073709551616",
    ),
    _refused(
        "F-17 signed integers end at -2^63",
        {"type": "integer", "reduce": SUM},
        [-(2**63), -1],
        "sum overflow",
        "-9223372036854775809",
    ),
    _refused(
        "6.3 floats end at infinity",
        {"type": "number", "reduce": SUM},
        [1.7976931348623157e308, 1e308],
        "sum overflow",
    ),
    _refused(
        "6.3 NaN does not add",
        {"type": "string", "format": "number", "reduce": SUM},
        ["NaN", "1"],
        "sum expects numbers",
        '"NaN"',
    ),
    _refused("6.3 words do not add", _ANY_SUM, [1, "whoops"], "sum expects numbers", '"whoops"'),
    _refused(
        "append expects arrays",
        {"type": ["array", "string"], "reduce": {"strategy": "append"}},
        [[1], "x"],
        "append expects arrays",
        'LHS [1], RHS "x"',
    ),
    _refused(
        "merge expects containers of one kind",
        {"type": ["array", "object"], "reduce": MERGE},
        [[1], {"a": 1}],
        "merge expects two objects or two arrays",
    ),
    _refused(
        "a set has three terms",
        {"type": "object", "reduce": {"strategy": "set"}},
        [{"add": {}}, {"ad": {}}],
        'set has no term "ad"',
    ),
    _refused(
        "a set does not mix arrays and objects",
        {"type": "object", "reduce": {"strategy": "set"}},
        [{"add": {}}, {"add": []}],
        "set mixes arrays and objects",
    ),
    _refused(
        "a set does not remove and intersect at once",
        {"type": "object", "reduce": {"strategy": "set"}},
        [{"add": {}}, {"remove": {}, "intersect": {}}],
        "set cannot both remove and intersect",
    ),
    _refused(
        "jsonSchemaMerge expects schemas",
        {"type": ["object", "boolean"], "reduce": {"strategy": "jsonSchemaMerge"}},
        [{"type": "string"}, True],
        "jsonSchemaMerge expects two schemas",
    ),
]


def nearly_equal(a: object, b: object) -> bool:
    """True if JSON values are equal, except that floats may differ in the last bits.

    Adding floats is not associative, and the order of a sum depends on the partitioning.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(nearly_equal(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(nearly_equal, a, b))
    if _is_number(a) and _is_number(b) and float in (type(a), type(b)):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return type(a) is type(b) and a == b


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
