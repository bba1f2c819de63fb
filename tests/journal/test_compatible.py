"""Which changes of a collection its journals survive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from penstock.journal.compatible import incompatible, narrowed
from penstock.model.infer import infer
from penstock.model.shape import union
from penstock.model.spec import CollectionSpec, Field, Frozen
from support import strategies_schema as strategies

Schema = dict[str, Any]


def obj(required: tuple[str, ...] = (), *, closed: bool = False, **properties: Any) -> Schema:  # noqa: ANN401
    schema: Schema = {"type": "object", "properties": properties, "required": sorted(required)}
    return {**schema, "additionalProperties": False} if closed else schema


INTEGER, NUMBER, STRING = ({"type": kind} for kind in ("integer", "number", "string"))
MONEY = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 999}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        pytest.param(obj(a=STRING), obj(a=STRING, b=INTEGER), [], id="new optional member"),
        pytest.param(obj(a=STRING), obj(), [], id="member removed, kept among the unknown"),
        pytest.param(
            obj(a=STRING, b=STRING),
            obj(a=STRING, closed=True),
            [("W-DROP", "/b")],
            id="member removed and no room for it: dropped, and said",
        ),
        pytest.param(obj(("a",), a=STRING), obj(a=STRING), [], id="required to optional"),
        pytest.param(obj(a=STRING), obj(("a",), a=STRING), [], id="optional to required"),
        pytest.param(obj(a=INTEGER), obj(a=NUMBER), [], id="integer to number"),
        pytest.param(
            obj(a=NUMBER), obj(a=INTEGER), [("E-TYPE-CHANGE", "/a")], id="number to integer"
        ),
        pytest.param(
            obj(a=INTEGER), obj(a={**INTEGER, "maximum": 2**64}), [], id="64 bits to wider"
        ),
        pytest.param(
            obj(a={**INTEGER, "maximum": 2**64}),
            obj(a=INTEGER),
            [("E-NARROWED", "/a")],
            id="wider to 64 bits",
        ),
        pytest.param(
            obj(a={**STRING, "format": "date"}), obj(a=STRING), [], id="a format taken away"
        ),
        pytest.param(
            obj(a=INTEGER), obj(a={"type": ["integer", "string"]}), [], id="one more type"
        ),
        pytest.param(
            obj(a={"type": ["integer", "string"]}),
            obj(a=INTEGER),
            [("E-TYPE-CHANGE", "/a")],
            id="one type less",
        ),
        pytest.param(obj(a=INTEGER), obj(a={}), [], id="anything"),
        pytest.param(obj(a={}), obj(a=INTEGER), [("E-TYPE-CHANGE", "/a")], id="anything before"),
        pytest.param(obj(a=INTEGER), obj(a=STRING), [("E-TYPE-CHANGE", "/a")], id="type swap"),
        pytest.param(
            obj(a={"type": ["string", "null"]}),
            obj(a=STRING),
            [("E-TYPE-CHANGE", "/a")],
            id="null no longer allowed",
        ),
        pytest.param(obj(a=STRING), obj(a={"type": ["string", "null"]}), [], id="null allowed"),
        pytest.param(
            obj(o=obj(a=INTEGER)),
            obj(o=obj(a=STRING)),
            [("E-TYPE-CHANGE", "/o/a")],
            id="inside of an object",
        ),
        pytest.param(
            obj(l={"type": "array", "items": obj(a=INTEGER)}),
            obj(l={"type": "array", "items": obj(a=STRING)}),
            [("E-TYPE-CHANGE", "/l/*/a")],
            id="inside of items",
        ),
        pytest.param(
            obj(m={"type": "object", "additionalProperties": INTEGER}),
            obj(m={"type": "object", "additionalProperties": STRING}),
            [("E-TYPE-CHANGE", "/m/*")],
            id="values of a map",
        ),
        pytest.param(
            obj(m={"type": "object", "additionalProperties": INTEGER}),
            obj(m={**obj(x=STRING), "additionalProperties": INTEGER}),
            [("E-TYPE-CHANGE", "/m/x")],
            id="a map's value gets a name and another type",
        ),
        pytest.param(
            obj(a=INTEGER), obj(a=MONEY), [("E-NARROWED", "/a")], id="integers to three digits"
        ),
        pytest.param(
            obj(a={**INTEGER, "minimum": 0, "maximum": 99}), obj(a=MONEY), [], id="two digits"
        ),
        pytest.param(
            obj(a=MONEY),
            obj(a={**MONEY, "maximum": 9}),
            [("E-NARROWED", "/a")],
            id="fewer digits",
        ),
        pytest.param(obj(a=MONEY), obj(a={**MONEY, "multipleOf": 0.001}), [], id="more decimals"),
        pytest.param(obj(a=MONEY), obj(a=NUMBER), [], id="decimals to doubles"),
        pytest.param(
            obj(a={"type": "array", "maxItems": 0, "items": NUMBER}),
            obj(a={"type": "array", "items": INTEGER}),
            [],
            id="items of an array that has none",
        ),
    ],
)
def test_a_change_is_allowed_or_refused_where_it_is(
    old: Schema, new: Schema, found: list[tuple[str, str]]
) -> None:
    problems = narrowed(infer(old), infer(new))
    assert [(problem.code, problem.pointer) for problem in problems] == found


@given(strategies.collection_schemas(), strategies.collection_schemas())
def test_a_union_is_never_narrower(old: Schema, other: Schema) -> None:
    shape = infer(old)
    problems = narrowed(shape, union(shape, infer(other)))
    assert [p for p in problems if not p.code.startswith("W-")] == []


def collection(
    schema: Schema, key: tuple[str, ...] = ("/a",), partitions: tuple[str, ...] = ()
) -> CollectionSpec:
    return CollectionSpec(
        name="acme/orders",
        key=key,
        write_schema=Frozen(schema),
        read_schema=Frozen(schema),
        fields=tuple(
            Field(name=name, location=f"/{name}", partition=name in partitions) for name in "abc"
        ),
    )


SCHEMA = obj(("a", "b"), a=STRING, b=STRING)


@pytest.mark.parametrize(
    ("old", "new", "codes"),
    [
        pytest.param(collection(SCHEMA), collection(SCHEMA), [], id="nothing"),
        pytest.param(
            collection(SCHEMA), collection(SCHEMA, key=("/b",)), ["E-KEY-CHANGE"], id="key"
        ),
        pytest.param(
            collection(SCHEMA, key=("/a", "/b")),
            collection(SCHEMA, key=("/b", "/a")),
            ["E-KEY-CHANGE"],
            id="the order of the key",
        ),
        pytest.param(
            collection(SCHEMA, partitions=("a",)),
            collection(SCHEMA, partitions=("b",)),
            ["E-PARTITION-CHANGE", "E-PARTITION-CHANGE"],
            id="partitions",
        ),
        pytest.param(
            collection(SCHEMA),
            collection({**SCHEMA, "reduce": {"strategy": "merge"}}),
            ["W-REDUCE-CHANGED"],
            id="a reduction: a warning",
        ),
        pytest.param(
            collection(SCHEMA),
            collection({**SCHEMA, "title": "Orders"}),
            [],
            id="words",
        ),
    ],
)
def test_keys_partitions_and_reductions_are_judged_too(
    old: CollectionSpec, new: CollectionSpec, codes: list[str]
) -> None:
    assert [problem.code for problem in incompatible(old, new)] == codes
