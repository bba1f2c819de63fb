"""Redaction removes what the schema marks, and nothing else."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.infer import infer
from penstock.model.redact import digest, has_redactions, redact
from support import strategies_schema as strategies

BLOCK: dict[str, Any] = {"redact": {"strategy": "block"}}
HASH: dict[str, Any] = {"redact": {"strategy": "sha256"}}


@pytest.mark.parametrize(
    ("value", "hashed"),
    [
        pytest.param("a@b", b"saltya@b", id="a string as it is"),
        pytest.param(2.0, b"salty2", id="a number as canonical JSON"),
        pytest.param({"b": 1, "a": None}, b'salty{"a":null,"b":1}', id="an object, members sorted"),
    ],
)
def test_the_text_of_a_digest_is_documented(value: Any, hashed: bytes) -> None:  # noqa: ANN401
    assert digest(value, b"salty") == f"sha256:{hashlib.sha256(hashed).hexdigest()}"


@pytest.mark.parametrize(
    ("schema", "document", "want"),
    [
        pytest.param({"properties": {"a": BLOCK}}, {"a": 1, "b": 2}, {"b": 2}, id="a member"),
        pytest.param({"properties": {"a": BLOCK}}, {"a": None}, {}, id="null is blocked as well"),
        pytest.param(
            {"properties": {"a": HASH}}, {"a": None}, {"a": None}, id="null is not hashed"
        ),
        pytest.param(
            {"properties": {"a": {"items": {"properties": {"s": BLOCK}}}}},
            {"a": [{"s": 1, "t": 2}, 5]},
            {"a": [{"t": 2}, 5]},
            id="inside items",
        ),
        pytest.param({"additionalProperties": BLOCK}, {"a": 1}, {}, id="unnamed members"),
        pytest.param(
            {"patternProperties": {"^s": BLOCK}}, {"s1": 1, "t": 2}, {"t": 2}, id="by pattern"
        ),
        pytest.param(
            {"anyOf": [{"properties": {"a": BLOCK}}, {"properties": {"a": {}}}]},
            {"a": 1},
            {},
            id="whichever alternative holds",
        ),
        pytest.param(
            {"properties": {"a": {**BLOCK, "allOf": [HASH]}}}, {"a": 1}, {}, id="more wins"
        ),
    ],
)
def test_redact(schema: dict[str, Any], document: Any, want: Any) -> None:  # noqa: ANN401
    assert redact(document, infer(schema), b"") == want


@given(strategies.schemas(), st.dictionaries(strategies.names, strategies.json_values))
def test_without_marks_nothing_changes(schema: dict[str, Any], document: dict[str, Any]) -> None:
    shape = infer(schema)
    assert not has_redactions(shape)
    assert redact(document, shape, b"") is document
