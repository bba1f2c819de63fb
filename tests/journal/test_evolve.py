"""Fragments of an older schema under a newer one: the same documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from penstock.journal.evolve import UnreadableDocument, adapt
from penstock.journal.rows import adapt_rows, stamp_rows, to_lines
from penstock.model.clock import Clock, Producer
from penstock.model.columns import Column, as_stored, columns, unstorable
from penstock.model.infer import infer
from penstock.model.json_order import canonical_json
from penstock.model.schema import CompiledSchema
from penstock.model.shape import union
from penstock.native.arrow import to_arrow, to_json
from support import strategies_schema as strategies

Schema = dict[str, Any]


def layout(*schemas: Schema) -> Column:
    shape = infer(schemas[0])
    for schema in schemas[1:]:
        shape = union(shape, infer(schema))
    return columns(shape)


def reread(documents: list[dict[str, Any]], written: Column, wanted: Column) -> list[str]:
    batch = adapt(to_arrow(documents, written), written, wanted)
    batch.validate(full=True)
    return to_json(batch, wanted)


@given(strategies.cases(), strategies.collection_schemas())
def test_a_widened_schema_reads_every_document_as_it_is(
    case: tuple[Schema, list[dict[str, Any]]], other: Schema
) -> None:
    """The union with any schema admits all that either admits: the widest of widenings."""
    schema, documents = case
    compiled = CompiledSchema(schema)
    written, wanted = layout(schema), layout(schema, other)
    stored = [
        d
        for d in documents
        if compiled.is_valid(d) and unstorable(d, written) is None and unstorable(d, wanted) is None
    ]
    kept = [as_stored(as_stored(d, written), wanted) for d in stored]
    texts = [canonical_json(d) for d in kept]
    assert reread(stored, written, wanted) == texts
    sliced = adapt(to_arrow(stored, written).slice(1, 3), written, wanted)
    assert to_json(sliced, wanted) == texts[1:4]


def obj(required: tuple[str, ...] = (), *, closed: bool = False, **properties: Any) -> Schema:  # noqa: ANN401
    schema: Schema = {"type": "object", "properties": properties, "required": sorted(required)}
    return {**schema, "additionalProperties": False} if closed else schema


INTEGER, NUMBER, STRING = ({"type": kind} for kind in ("integer", "number", "string"))
OPTIONAL = {"type": ["string", "null"]}


@pytest.mark.parametrize(
    ("old", "new", "document", "text"),
    [
        pytest.param(
            obj(a=STRING, closed=True),
            obj(a=STRING, b=INTEGER),
            {"a": "x"},
            '{"a":"x"}',
            id="a new member is missing",
        ),
        pytest.param(
            obj(a=STRING),
            obj(a=STRING, b=INTEGER),
            {"a": "x", "b": 7, "c": [1.5]},
            '{"a":"x","b":7,"c":[1.5]}',
            id="a new member is taken from the unknown ones",
        ),
        pytest.param(
            obj(a=OPTIONAL, c=OPTIONAL),
            obj(a=OPTIONAL, b=OPTIONAL, c=OPTIONAL),
            {"a": None, "b": None, "c": None},
            '{"a":null,"b":null,"c":null}',
            id="nulls keep their names when positions move",
        ),
        pytest.param(
            obj(a=OPTIONAL, b=OPTIONAL, z=INTEGER),
            obj(z=INTEGER),
            {"a": None, "m": {"x": 1}, "z": 1},
            '{"a":null,"m":{"x":1},"z":1}',
            id="a removed member joins the unknown ones",
        ),
        pytest.param(
            obj(a=STRING, b=STRING),
            obj(a=STRING, closed=True),
            {"a": "x", "b": "y", "c": 1},
            '{"a":"x"}',
            id="a removed member of a closed object is dropped",
        ),
        pytest.param(
            obj(a=INTEGER), obj(a=NUMBER), {"a": 2**52}, '{"a":4503599627370496}', id="to number"
        ),
        pytest.param(
            obj(a=INTEGER),
            obj(a={**INTEGER, "maximum": 2**70}),
            {"a": -(2**63)},
            '{"a":-9223372036854775808}',
            id="to a wider integer",
        ),
        pytest.param(
            obj(a=INTEGER), obj(a={}), {"a": 7}, '{"a":7}', id="to any value: rendered as JSON"
        ),
        pytest.param(
            obj(a=obj(x=OPTIONAL)),
            obj(a={"type": ["object", "string"]}),
            {"a": {"x": None, "y": "é"}},
            '{"a":{"x":null,"y":"é"}}',
            id="an object to JSON text",
        ),
        pytest.param(
            obj(m={"type": "object", "additionalProperties": INTEGER}),
            obj(m=obj(x=NUMBER)),
            {"m": {"x": 1, "y": 2}},
            '{"m":{"x":1,"y":2}}',
            id="a map to an object with names",
        ),
        pytest.param(
            obj(l={"type": "array", "items": obj(x=INTEGER)}),
            obj(l={"type": "array", "items": obj(x=NUMBER, w=OPTIONAL)}),
            {"l": [{"x": 1, "w": None}, {}]},
            '{"l":[{"w":null,"x":1},{}]}',
            id="inside of items",
        ),
        pytest.param(
            obj(a={"type": "null"}), obj(a=OPTIONAL), {"a": None}, '{"a":null}', id="only null"
        ),
        pytest.param(
            obj(("a",), a=OPTIONAL), obj(a=OPTIONAL), {"a": None}, '{"a":null}', id="required null"
        ),
        pytest.param(
            obj(a=STRING),
            obj(_clock=STRING, _n=STRING, _x=STRING, a=OPTIONAL),
            {"_x": "1", "a": "x", "zz": None},
            '{"_x":"1","a":"x","zz":null}',
            id="names that hidden columns had",
        ),
    ],
)
def test_a_stored_document_reads_as_the_table_of_changes_says(
    old: Schema, new: Schema, document: dict[str, Any], text: str
) -> None:
    beside: list[dict[str, Any]] = [] if old["required"] else [{}]
    found = reread([*beside, document, *beside], layout(old), layout(new))
    assert found == [*["{}" for _ in beside], text, *["{}" for _ in beside]]


@pytest.mark.parametrize(
    ("old", "new", "document", "where", "what"),
    [
        pytest.param(
            obj(a=INTEGER), obj(a=STRING), {"a": 1}, "/a", "integer where", id="another type"
        ),
        pytest.param(
            obj(a=STRING), obj(("a",), a=STRING), {"b": 1}, "/a", "required", id="now required"
        ),
        pytest.param(obj(a=OPTIONAL), obj(a=STRING), {"a": None}, "/a", "null", id="null no more"),
        pytest.param(obj(), obj(b=INTEGER), {"b": "x"}, "/b", "string where", id="was unknown"),
        pytest.param(
            obj(a={**INTEGER, "maximum": 2**70}),
            obj(a=INTEGER),
            {"a": 2**65},
            "/a",
            "64 bits",
            id="too large",
        ),
        pytest.param(
            obj(l={"type": "array", "items": {"type": ["integer", "null"]}}),
            obj(l={"type": "array", "items": INTEGER}),
            {"l": [1, None]},
            "/l/*",
            "null",
            id="a null item",
        ),
        pytest.param(
            obj(m={}), obj(m=obj(("x",), x=INTEGER)), {"m": {}}, "/m/x", "required", id="below JSON"
        ),
    ],
)
def test_a_document_that_does_not_fit_is_named_by_row_and_location(
    old: Schema, new: Schema, document: dict[str, Any], where: str, what: str
) -> None:
    fits: dict[str, Any] = {"a": "s"} if new["required"] else {}
    stored = [fits] * 5 + [document] + [fits] * 3
    with pytest.raises(UnreadableDocument, match=what) as caught:
        reread(stored, layout(old), layout(new))
    assert caught.value.row == 5
    assert (caught.value.where or "").startswith(f"{where}, row 5")


def test_rows_keep_their_stamps_under_new_names() -> None:
    written = layout(obj(a=STRING))
    wanted = layout(obj(a=STRING, _clock=STRING))
    producer = Producer(Producer.MULTICAST)
    documents: list[dict[str, Any]] = [{"a": "x"}, {"_clock": "noon"}]
    batch = stamp_rows(
        to_arrow(documents, written), written, producer=producer, first_clock=Clock(5), flags=1
    )
    adapted = adapt_rows(batch, written, wanted)
    assert adapted.schema.names[-3:] == ["__clock", "_producer", "_flags"]
    assert adapted.column("__clock").to_pylist() == [5, 6]
    assert to_lines(adapted, wanted) == ['{"a":"x"}', '{"_clock":"noon"}']
    assert adapt_rows(batch, written, written) is batch
