"""The schema of documents that were seen: what it admits, and the laws of widening."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import observed
from penstock.model.infer import infer
from penstock.model.observed import observe, widen, with_sourced
from penstock.model.shape import admits

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(-3, 3),
        st.sampled_from(["", "x", "2026-01-02", "2026-01-02T03:04:05Z", "2026-02-30"]),
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.dictionaries(st.sampled_from("abcd"), below, max_size=4)
    ),
    max_leaves=8,
)
SOME = st.lists(VALUES, min_size=1, max_size=4)


@given(SOME)
def test_every_value_that_was_seen_is_admitted(values: list[Any]) -> None:
    schema = observe(values)
    validator = jsonschema_rs.Draft201909Validator(schema, validate_formats=True)
    assert all(map(validator.is_valid, values))
    assert all(admits(infer(schema), value) for value in values)


@given(SOME, SOME)
def test_seeing_in_parts_is_seeing_at_once(a: list[Any], b: list[Any]) -> None:
    assert widen(observe(a), observe(b)) == observe([*a, *b])


@given(SOME, SOME, SOME)
def test_widening_is_a_join(a: list[Any], b: list[Any], c: list[Any]) -> None:
    x, y, z = observe(a), observe(b), observe(c)
    assert widen(x, x) == x
    assert widen(x, y) == widen(y, x)
    assert widen(widen(x, y), z) == widen(x, widen(y, z))
    assert widen(x, {}) == {}


def test_too_many_names_are_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "MEMBERS_MAX", 3)
    many = [{f"k{at}": at} for at in range(5)]
    at_once = observe(many)
    assert at_once == {"type": "object", "additionalProperties": {"type": "integer"}}
    in_parts = observe(many[:1])
    for each in many[1:]:
        in_parts = widen(in_parts, observe([each]))
    assert in_parts == at_once


def test_a_source_speaks_of_what_was_never_seen() -> None:
    seen = observe([{"id": 1, "name": "x"}])
    sourced = {
        "type": "object",
        "required": ["later"],
        "properties": {
            "name": {"type": "integer"},
            "later": {"type": "string", "format": "date", "maxLength": 10},
        },
    }
    known = with_sourced(seen, sourced)
    assert known["properties"]["name"] == {"type": "string"}
    assert known["properties"]["later"] == {"type": "string", "format": "date"}
    assert known["required"] == ["id", "name"]
    assert with_sourced(known, sourced) == known
    assert with_sourced(None, sourced)["properties"]["name"] == {"type": "integer"}
