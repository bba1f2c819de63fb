"""Types of Python derivations: models of schemas, and the modules that hold them."""

from __future__ import annotations

import sys
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.json_order import canonical_json
from penstock.model.schema import CompiledSchema
from penstock.runtime.derive.python_models import document_model, source_model, to_document
from penstock.runtime.derive.python_names import class_name, method_name, module_name
from penstock.runtime.derive.python_types import TransformTypes, make_types, state_of
from runtime.derive.python_catalogs import INTS, SUMS, Task, engine, ints
from support.strategies_schema import cases


def source(schema: Any) -> type[pydantic.BaseModel]:  # noqa: ANN401
    return source_model(canonical_json(schema), "SourceX", "acme.x")


def document(schema: Any) -> Any:  # noqa: ANN401 - a model whose members follow from the schema
    return document_model(canonical_json(schema), "Document", "acme.x")


def through(schema: Any, value: Any) -> Any:  # noqa: ANN401
    validator = source(schema).__pydantic_validator__
    return to_document(validator.validate_python(value, by_alias=True, by_name=False))


@pytest.mark.parametrize(
    ("transform", "method", "title"),
    [
        ("fromInts", "from_ints", "FromInts"),
        ("from-ints", "from_ints", "FromInts"),
        ("from_ints.v2", "from_ints_v2", "FromIntsV2"),
        ("FromHTTP", "from_http", "FromHTTP"),
        ("class", "class_", "Class"),
        ("2nd", "_2nd", "2nd"),
    ],
)
def test_names_of_transforms(transform: str, method: str, title: str) -> None:
    assert (method_name(transform), class_name(transform)) == (method, title)


@pytest.mark.parametrize(
    ("collection", "module"),
    [
        ("patterns/stateful", "patterns.stateful"),
        ("acme-co/by-day.v2", "acme_co.by_day_v2"),
        ("acme/class", "acme.class_"),
    ],
)
def test_names_of_modules(collection: str, module: str) -> None:
    assert module_name(collection) == module


NESTED = {
    "type": "object",
    "required": ["id"],
    "properties": {
        "id": {"type": "integer"},
        "address": {
            "type": ["object", "null"],
            "required": ["city"],
            "properties": {"city": {"type": "string"}, "zip-code": {"type": "string"}},
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "items": {"type": "object", "properties": {"n": {"type": "number"}}},
        },
        "color": {"enum": ["red", "green", None]},
        "kind": {"const": "order"},
        "level": {"enum": [1, 2.5]},
        "flag": {"enum": [False, 0, "0"]},
        "either": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "boolean"}}]},
        "by_name": {"type": "object", "additionalProperties": {"type": "integer"}},
        "pair": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
        "class": {"type": "string"},
        "with-dash": {"type": "integer"},
        "with_dash": {"type": "integer"},
        "_meta": {"type": "object", "properties": {"uuid": {"type": "string"}}},
        "model_dump": {"type": "boolean"},
        "json": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        "anything": {},
    },
}


@pytest.mark.parametrize(
    "value",
    [
        {"id": 1},
        {"id": 1.0, "address": None, "color": None, "flag": 0.0},
        {"id": 1, "flag": False},
        {
            "id": 1,
            "address": {"city": "x", "zip-code": "1"},
            "lines": [{"n": 1}, {"n": 2.5, "m": 3}],
        },
        {"id": 1, "color": "red", "kind": "order", "level": 1, "either": [True], "pair": ["a", 2]},
        {"id": 1, "level": 2.5, "either": "s", "by_name": {"a": 1}, "class": "c"},
        {"id": 1, "with-dash": 1, "with_dash": 2, "with_dash_": 3, "_meta": {"uuid": "u", "x": 1}},
        {"id": 2**70, "model_dump": True, "json": "{}", "anything": {"a": [None]}, "other": None},
    ],
)
def test_documents_survive(value: Any) -> None:  # noqa: ANN401
    assert CompiledSchema(NESTED).is_valid(value)
    assert canonical_json(through(NESTED, value)) == canonical_json(value)


@given(cases(documents_max=4), st.booleans())
def test_valid_documents_survive_whatever_the_schema(
    case: tuple[dict[str, Any], list[dict[str, Any]]], reading: bool
) -> None:
    schema, documents = case
    compiled = CompiledSchema(schema)
    model = source(schema) if reading else document(schema)
    for value in filter(compiled.is_valid, documents):
        read = model.__pydantic_validator__.validate_python(value, by_alias=True, by_name=False)
        assert canonical_json(to_document(read)) == canonical_json(value)


def test_members_are_attributes() -> None:
    read: Any = source(NESTED).model_validate(
        {"id": 1, "with-dash": 2, "with_dash": 3, "_meta": {"uuid": "u"}, "class": "c", "x": 9}
    )
    assert (read.with_dash, read.with_dash_, read.meta.uuid, read.class_, read.x) == (
        3,
        2,
        "u",
        "c",
        9,
    )
    assert read.tags == []
    assert read.address is None


def test_what_was_not_set_is_not_published() -> None:
    model = document(NESTED)
    made = model(id=1, class_="c", address=model.Address(city="x"), lines=[model.Lines(n=1)])
    assert to_document(made) == {
        "id": 1,
        "class": "c",
        "address": {"city": "x"},
        "lines": [{"n": 1}],
    }
    assert to_document(model(id=1, address=None)) == {"id": 1, "address": None}
    made.tags = ["t"]
    assert to_document(made)["tags"] == ["t"]


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"id": "x"},
        {"id": 1.5},
        {"id": 1, "tags": None},
        {"id": 1, "color": "blue"},
        {"id": 1, "address": {"city": "x", "street": "y"}},
    ],
)
def test_a_document_that_cannot_be_valid_is_refused_where_it_is_made(members: Any) -> None:  # noqa: ANN401
    with pytest.raises(pydantic.ValidationError):
        document(NESTED)(**members)


def test_a_closed_source_does_not_show_the_uuid() -> None:
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    assert through(closed, {"a": 1, "_meta": {"uuid": "u"}}) == {"a": 1}


def test_values_that_json_lacks_are_written_as_text() -> None:
    import datetime
    import decimal

    made = document({"type": "object", "properties": {"n": {"type": "number"}}})(
        n=decimal.Decimal("1.5"), at=datetime.date(2024, 1, 31), some={1}
    )
    assert to_document(made) == {"n": 1.5, "at": "2024-01-31", "some": [1]}


# --- modules ---


def types_of(name: str = "acme-co/sums") -> Any:  # noqa: ANN401
    transform = TransformTypes(name="fromInts", read_schema=canonical_json(INTS))  # type: ignore[arg-type]
    return make_types(name, canonical_json(SUMS), (transform,)).module  # type: ignore[arg-type]


def test_every_generation_finds_its_names() -> None:
    types = types_of()
    assert types.__name__ == "acme_co.sums"
    assert types.Request.ReadFromInts is types.ReadFromInts
    assert types.Request.Open is types.Open
    read = types.Request.ReadFromInts(doc={"Key": "a", "Int": 1})
    assert isinstance(read.doc, types.SourceFromInts)
    answers = [
        types.Response.StartedCommit(
            state=types.Response.StartedCommit.State(updated={"n": 1}, merge_patch=True)
        ),
        types.StartedCommit(state=types.Response.ConnectorState(updated={"n": 1}, mergePatch=True)),
        types.Response.Flushed(state={"updated": {"n": 1}, "merge_patch": True}),
        types.ConnectorState(updated={"n": 1}, merge_patch=True),
    ]
    assert [state_of(answer) for answer in answers] == [({"n": 1}, True)] * 4
    assert state_of(types.Response.Flushed()) is None


def test_models_of_one_schema_are_made_once() -> None:
    assert types_of().Document is types_of().Document
    assert types_of().Document is not types_of("acme-co/others").Document


def test_two_derivations_have_their_own_types() -> None:
    code = "from {} import Document, IDerivation\nclass Derivation(IDerivation):\n"
    code += "  def from_ints(self, read):\n    import {}\n    yield Document(Key={}.__name__)\n"
    names = ("acme.one", "acme.two", "other.three.four")
    tasks = [Task(engine(code.format(n, n, n), name=n.replace(".", "/"))) for n in names]
    for _ in range(2):
        for task, name in zip(tasks, names, strict=True):
            assert task.transaction(ints(("a", 1))) == [{"Key": name}]
            assert name in sys.modules
            assert not [n for n in names if n != name and n in sys.modules]


def test_a_changed_schema_makes_new_types() -> None:
    code = "from acme.one import Document, IDerivation\nclass Derivation(IDerivation):\n"
    code += "  def from_ints(self, read):\n    yield Document(Key='k', More=1)\n"
    closed = {**SUMS, "additionalProperties": False}
    wider = {**closed, "properties": {**SUMS["properties"], "More": {}}}  # type: ignore[dict-item]
    with pytest.raises(Exception, match="transform fromInts failed"):
        Task(engine(code, name="acme/one", derived=closed)).transaction(ints(("a", 1)))
    assert Task(engine(code, name="acme/one", derived=wider)).transaction(ints(("a", 1))) == [
        {"Key": "k", "More": 1}
    ]
