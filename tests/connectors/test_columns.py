"""Which columns a table has, what they are called, and in which order its key is."""

from __future__ import annotations

import json
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import pointer
from penstock.model.columns import Column, column_at, columns
from penstock.model.infer import infer
from penstock.model.json_order import ABSENT, Json
from penstock.native.arrow import to_arrow
from penstock.runtime.connector.materialize import TargetField
from penstock.runtime.materialize.project import project
from penstock.testing.sink_harness import Bind, SqlPlace, start

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["z", "a", "m"],
    "properties": {
        "z": {"type": "string"},
        "a": {"type": "integer"},
        "m": {"type": "string"},
        "city": {"type": "string"},
        "home": {"type": "object", "properties": {"city": {"type": "string"}}},
        "lines": {
            "type": "array",
            "items": {"type": "object", "properties": {"sku": {"type": "string"}}},
        },
    },
}
KEY = ("/z", "/a", "/m")


def primary_key(place: SqlPlace, table: str = "t") -> list[str]:
    """The columns of the primary key, in the order of its index."""
    if "path" in place.config:
        found = place.execute(
            f"SELECT name FROM pragma_table_info('{table}') WHERE pk > 0 ORDER BY pk"  # noqa: S608
        )
    else:
        found = place.execute(
            "SELECT a.attname::text FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(n, at) "  # noqa: S608
            "JOIN pg_attribute a ON a.attnum = k.n "
            f"WHERE i.indrelid = '\"{table}\"'::regclass AND i.indisprimary "
            "AND a.attrelid = i.indrelid ORDER BY k.at"
        )
    return [name for (name,) in found]


def test_a_composite_key_keeps_its_order(place: SqlPlace) -> None:
    run = start(place, Bind(schema=SCHEMA, key=KEY))
    run.transaction([{"z": "1", "a": 2, "m": "3", "city": "x"}])
    run.transaction([{"z": "1", "a": 2, "m": "3", "city": "y"}, {"z": "2", "a": 2, "m": "3"}])
    assert primary_key(place) == ["z", "a", "m"]
    assert list(place.columns())[:3] == ["z", "a", "m"]
    assert sorted((row["z"], row["city"]) for row in place.rows()) == [("1", "y"), ("2", None)]


def test_a_group_is_the_key_in_its_order(place: SqlPlace) -> None:
    start(place, Bind(schema=SCHEMA, key=KEY, fields={"groupBy": ["m", "z"]}))
    assert primary_key(place) == ["m", "z"]


def test_a_table_of_another_order_is_used_as_it_is(place: SqlPlace) -> None:
    """Older releases made primary keys in the order of names."""
    columns = "a integer NOT NULL, m text NOT NULL, z text NOT NULL, PRIMARY KEY (a, m, z)"
    place.execute(f"CREATE TABLE t ({columns}){place.table_options}")
    run = start(place, Bind(schema=SCHEMA, key=KEY))
    run.transaction([{"z": "1", "a": 2, "m": "3", "city": "x"}])
    run.transaction([{"z": "1", "a": 2, "m": "3", "city": "y"}])
    assert primary_key(place) == ["a", "m", "z"]
    assert [row["city"] for row in place.rows()] == ["y"]


def test_a_declared_field_is_the_column_of_its_location(place: SqlPlace) -> None:
    names = {"zone": "/z", "zzz": "/home/city", "sku": "/lines/0/sku", "last": "/lines/1/sku"}
    run = start(place, Bind(schema=SCHEMA, key=KEY, projections=names))
    lines: list[Json] = [{"sku": "x"}, {"sku": "y"}, {}]
    run.transaction(
        [
            {"z": "1", "a": 2, "m": "3", "home": {"city": "Bonn"}, "lines": lines},
            {"z": "2", "a": 2, "m": "3", "lines": lines[2:]},
            {"z": "3", "a": 2, "m": "3"},
        ]
    )
    assert primary_key(place) == ["zone", "a", "m"]
    shown = [(r["zone"], r["zzz"], r["sku"], r["last"]) for r in place.rows()]
    assert sorted(shown) == [
        ("1", "Bonn", "x", "y"),
        ("2", None, None, None),
        ("3", None, None, None),
    ]
    assert not {"z", "home/city"} & place.columns().keys()


def test_a_declared_field_takes_the_name_of_another_location(place: SqlPlace) -> None:
    names = {"city": "/home/city", "town": "/city"}
    run = start(place, Bind(schema=SCHEMA, key=KEY, projections=names))
    run.transaction([{"z": "1", "a": 2, "m": "3", "city": "outer", "home": {"city": "inner"}}])
    (row,) = place.rows()
    assert (row["city"], row["town"]) == ("inner", "outer")


def test_a_table_keeps_the_column_that_shows_a_location(place: SqlPlace) -> None:
    """Under another name it would be empty in all rows that are there."""
    first = start(place, Bind(schema=SCHEMA, key=KEY))
    first.transaction([{"z": "1", "a": 2, "m": "3", "city": "x"}])
    names = {"zone": "/z", "town": "/city"}
    second = start(place, Bind(schema=SCHEMA, key=KEY, projections=names), epoch=2, last=first)
    second.transaction([{"z": "2", "a": 2, "m": "3", "city": "y"}])
    assert primary_key(place) == ["z", "a", "m"]
    assert sorted(row["city"] for row in place.rows()) == ["x", "y"]
    assert "town" not in place.columns()
    anew = Bind(schema=SCHEMA, key=KEY, projections=names, backfill=1)
    third = start(place, anew, epoch=3, last=second, resumed=False)
    third.transaction([{"z": "2", "a": 2, "m": "3", "city": "y"}])
    assert primary_key(place) == ["zone", "a", "m"]
    assert [row["town"] for row in place.rows()] == ["y"]


# --- values ---

DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "list": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "n": st.integers(-5, 5),
                    "deep": st.lists(st.integers(0, 9), max_size=3),
                    "map": st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)),
                },
            ),
            max_size=3,
        ),
        "unnamed": st.one_of(st.none(), st.integers(), st.lists(st.text(max_size=2), max_size=2)),
        "open": st.dictionaries(st.sampled_from("pq"), st.booleans(), max_size=2),
    },
)
ITEM = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "deep": {"type": "array", "items": {"type": "integer"}},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
}
ROOT: Column = columns(
    infer(
        {
            "type": "object",
            "properties": {
                "list": {"type": "array", "items": ITEM},
                "open": {"type": "object", "properties": {"p": {"type": "boolean"}}},
            },
        }
    )
)
LOCATIONS = (
    "/list/0/n",
    "/list/2/n",
    "/list/1/deep/2",
    "/list/0/deep",
    "/list/0/map/x",
    "/list/0/map",
    "/list/1/other",
    "/unnamed",
    "/unnamed/1",
    "/open/p",
    "/open/q",
)


@pytest.mark.parametrize("location", LOCATIONS)
@given(documents=st.lists(DOCUMENTS, min_size=1, max_size=6), start=st.integers(0, 2))
def test_a_declared_field_shows_what_is_at_its_location(
    location: str, documents: list[dict[str, Json]], start: int
) -> None:
    column = column_at(ROOT, location, declared=True)
    assert column is not None
    field = TargetField(name="f", pointer=location, column=column)
    batch: pyarrow.RecordBatch = to_arrow(documents, ROOT).slice(start)
    found = [_json(each) for each in project(batch, ROOT, [field]).column(0).to_pylist()]
    wanted = [pointer.get(document, location) for document in documents[start:]]
    # A column's NULL is both: absent, and null.
    assert found == [None if each is ABSENT else each for each in wanted]


def _json(value: Any) -> Json:  # noqa: ANN401
    return json.loads(value) if isinstance(value, str) else value


@pytest.mark.parametrize("location", [each for each in LOCATIONS if each != "/open/p"])
def test_such_a_location_is_no_column_unless_it_is_declared(location: str) -> None:
    assert column_at(ROOT, location, declared=False) is None
