"""The conformance suite against real databases, and values of every type."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from connectors.places import PostgresPlace, SqlitePlace
from penstock.connectors.sql.statements import verdicts
from penstock.model.columns import LONG_MAX, LONG_MIN, Column, Kind
from penstock.runtime.connector.materialize import Constraint, TargetField
from penstock.testing.connector_suite import SqlSinkSuite
from penstock.testing.sink_harness import Bind, Document, SqlPlace, by_key, start


class TestSqlite(SqlSinkSuite):
    @pytest.fixture
    def place(self, sqlite_place: SqlitePlace) -> SqlitePlace:
        return sqlite_place


@pytest.mark.postgres
class TestPostgres(SqlSinkSuite):
    @pytest.fixture
    def place(self, postgres_place: PostgresPlace) -> PostgresPlace:
        return postgres_place


EVERYTHING = {
    "type": "object",
    "required": ["k", "sure"],
    "properties": {
        "k": {"type": "integer"},
        "sure": {"type": "integer"},
        "int": {"type": "integer"},
        "big": {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
        "double": {"type": "number"},
        "money": {"type": "number", "minimum": -(10**9), "maximum": 10**9, "multipleOf": 0.01},
        "flag": {"type": "boolean"},
        "text": {"type": "string"},
        "nullable": {"type": ["string", "null"]},
        "list": {"type": "array", "items": {"type": "string"}},
        "any": {},
        "nested": {"type": "object", "properties": {"deep": {"type": "number"}}},
    },
}
ALL_FIELDS = Bind(schema=EVERYTHING, fields={"require": {"list": {}, "any": {}}})

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_doubles = st.floats(allow_nan=False, allow_infinity=False)
_values = st.fixed_dictionaries(
    {"sure": st.integers(LONG_MIN, LONG_MAX)},
    optional={
        "int": st.integers(LONG_MIN, LONG_MAX),
        "big": st.integers(-(10**30), 10**30),
        "double": _doubles,
        "money": st.integers(-(10**11), 10**11).map(lambda cents: cents / 100),
        "flag": st.booleans(),
        "text": _text,
        "nullable": st.none() | _text,
        "list": st.lists(_text, max_size=3),
        "any": _json,
        "nested": st.fixed_dictionaries({}, optional={"deep": _doubles}),
    },
)


def _seen(value: Any, like: Any) -> Any:  # noqa: ANN401
    """A value of a database as JSON, by what it should be."""
    if isinstance(like, bool) and isinstance(value, int):
        return bool(value)
    if isinstance(like, int | float) and isinstance(value, Decimal | str):
        return type(like)(Decimal(value)) if isinstance(like, int) else float(value)
    return value


def test_every_value_of_every_type_comes_back(place: SqlPlace) -> None:
    """Whole batches of examples, each replacing the one before."""
    run = start(place, ALL_FIELDS)

    @settings(max_examples=4, phases=[Phase.generate])  # each example is a batch of many
    @given(st.lists(_values, min_size=60, max_size=60))
    def check(values: list[Document]) -> None:
        documents: list[Document] = [{"k": at, **value} for at, value in enumerate(values)]
        run.transaction(documents)
        rows = {row["k"]: row for row in place.rows()}
        for document in documents:
            row = rows[document["k"]]
            for name in ("sure", "int", "big", "double", "money", "flag", "text", "nullable"):
                want = document.get(name)
                assert _seen(row[name], want) == want, name
            assert _seen(row["nested/deep"], 0.5) == document.get("nested", {}).get("deep")
            for name in ("list", "any"):
                text = row[name]
                value = json.loads(text) if isinstance(text, str) and not _parsed(place) else text
                assert _doubled(value) == _doubled(document.get(name)), name
        loaded = {
            each["k"]: each for each in run.load(0, [{"k": d["k"], "sure": 0} for d in documents])
        }
        assert loaded == {document["k"]: document for document in documents}

    check()


def _doubled(value: Any) -> Any:  # noqa: ANN401
    """JSON with its numbers as doubles: 1e17 and 100000000000000000 are one number."""
    match value:
        case bool():
            return value
        case int() | float():
            return float(value)
        case list():
            return [_doubled(item) for item in value]
        case dict():
            return {name: _doubled(item) for name, item in value.items()}
        case _:
            return value


def _parsed(place: SqlPlace) -> bool:
    """True if the endpoint's driver returns JSON columns as values, not as text."""
    return isinstance(place, PostgresPlace)


def test_a_key_that_may_be_null_is_refused_but_for_delta_updates() -> None:
    maybe = TargetField(name="k", pointer="/k", column=Column(kind=Kind.LONG), is_key=True)
    (verdict,) = verdicts([maybe], delta_updates=False).values()
    assert verdict.constraint is Constraint.INCOMPATIBLE
    assert verdicts([maybe], delta_updates=True) == {}


def test_the_suite_groups_documents_by_key() -> None:
    assert by_key(["/k"], [{"k": 1}, {"k": 2}, {"k": 1}]) == {
        "[1]": [{"k": 1}, {"k": 1}],
        "[2]": [{"k": 2}],
    }
