"""What is proposed for a topic, by its records: pure."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.kafka.discovery import Sample, propose, shape_of
from penstock.model.infer import to_schema
from penstock.model.schema import compiled
from penstock.model.shape import admits, union


def sample(value: Any, key: Any = None) -> Sample:  # noqa: ANN401 - JSON
    return Sample(
        None if key is None else json.dumps(key).encode(),
        None if value is None else json.dumps(value).encode(),
    )


def test_keys_that_are_objects_are_keys_of_documents() -> None:
    samples = [
        sample({"id": 1, "name": "a", "tags": ["x"], "more": []}, {"id": 1}),
        sample({"id": 2, "tags": []}, {"id": 2}),
        sample(None, {"id": 3}),
    ]
    found = propose("orders", samples)
    assert found.key == ("/id",)
    assert found.resource == {"topic": "orders"}
    assert found.note is None
    schema: Any = found.schema
    assert schema["required"] == ["_meta", "id"]
    assert schema["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    assert schema["properties"]["name"] == {"type": "string"}
    assert schema["properties"]["more"] == {"type": "array"}
    checked = compiled(json.dumps(schema))
    assert checked.is_valid({"id": 3, "_meta": {"op": "d"}})
    assert not checked.is_valid({"name": "a", "_meta": {"op": "u"}})


def test_without_such_keys_a_document_is_known_by_its_place() -> None:
    for key in (None, "k1", {"other": 1}, {"id": [1]}):
        found = propose("orders", [sample({"id": 1}, key)])
        assert found.key == ("/_meta/partition", "/_meta/offset")
        schema: Any = found.schema
        assert schema["properties"]["_meta"]["required"] == ["partition", "offset"]


def test_values_that_are_no_documents_are_text_or_bytes() -> None:
    text = propose("lines", [Sample(None, b"plain"), sample({"id": 1})])
    assert text.resource == {"topic": "lines", "format": "text"}
    raw = propose("lines", [Sample(None, b"\xff\xfe")])
    assert raw.resource == {"topic": "lines", "format": "raw"}
    assert raw.note is not None


def test_an_empty_topic_says_that_its_schema_is_a_guess() -> None:
    found = propose("new", [])
    assert "guesses" in (found.note or "")
    assert compiled(json.dumps(found.schema)).is_valid(
        {"a": 1, "_meta": {"partition": 0, "offset": 1}}
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.sampled_from("ab"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values, json_values)
def test_the_shape_of_some_values_admits_them(a: Any, b: Any) -> None:  # noqa: ANN401
    both = union(shape_of(a), shape_of(b))
    assert admits(both, a)
    assert admits(both, b)
    assert to_schema(both) is not False
