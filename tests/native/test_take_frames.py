"""Columns of frames become the same documents on both roads, in the words of the schema."""

from __future__ import annotations

import datetime
import json
import uuid
from decimal import Decimal
from typing import Any
from unittest import mock

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.schema import CompiledSchema
from penstock.native import take
from penstock.native.arrow import to_json
from penstock.native.take import Taken, Taker

pa: Any = pyarrow

UTC = datetime.UTC
START, END = datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1)  # noqa: DTZ001
PROPERTIES = {
    "id": {"type": "integer"},
    "price": {"type": "string", "format": "number"},
    "count": {"type": "string", "format": "integer"},
    "total": {"type": "number"},
    "at": {"type": "string", "format": "date-time"},
    "day": {"type": "string", "format": "date"},
    "note": {"type": ["string", "null"]},
    "must": {"type": ["string", "null"]},
    "where": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "seen": {"type": "string"}},
    },
    "lines": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["sku"],
            "properties": {"sku": {"type": "string"}, "qty": {"type": "integer"}},
        },
    },
}
SCHEMA = CompiledSchema({"type": "object", "required": ["id", "must"], "properties": PROPERTIES})


def documents(taken: Taken, taker: Taker) -> list[dict[str, Any]]:
    return [json.loads(text) for text in to_json(taken.rows, taker.root)]


def carefully(batch: Any) -> Taken:  # noqa: ANN401
    with mock.patch.object(take, "_laid_out", return_value=None):
        return Taker(SCHEMA).take_columns(batch)


def surely(batch: Any) -> Taken:  # noqa: ANN401
    """By columns alone: nothing is judged one by one."""
    with mock.patch.object(Taker, "_careful", side_effect=AssertionError("not sure")):
        return Taker(SCHEMA).take_columns(batch)


ROWS = st.fixed_dictionaries(
    {
        "id": st.integers(0, 2**62),
        "price": st.none() | st.decimals(-1000, 1000, places=2),
        "count": st.none() | st.integers(0, 10**15),
        "total": st.none() | st.decimals(-(10**6), 10**6, places=4),
        "at": st.none() | st.datetimes(START, END, timezones=st.just(UTC)),
        "day": st.none() | st.dates(START.date(), END.date()),
        "note": st.none() | st.text(max_size=5),
        "must": st.none() | st.text(max_size=5),
        "other": st.none() | st.integers(-(2**60), 2**60),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False).filter(bool),
        "tag": st.none() | st.text(max_size=3),
        "since": st.none() | st.dates(START.date(), END.date()),
        "where": st.none()
        | st.fixed_dictionaries(
            {
                "city": st.none() | st.text(max_size=3),
                "seen": st.none() | st.datetimes(START, END),
                "flag": st.none() | st.booleans(),
            }
        ),
        "lines": st.none()
        | st.lists(
            st.fixed_dictionaries(
                {"sku": st.text(max_size=3), "qty": st.none() | st.integers(0, 9)}
            ),
            max_size=3,
        ),
    }
)  # fmt: skip
TYPES = pa.schema(
    [
        ("id", pa.int64()),
        ("price", pa.decimal128(12, 2)),
        ("count", pa.int64()),
        ("total", pa.decimal128(15, 4)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("note", pa.large_string()),
        ("must", pa.string_view()),
        ("other", pa.int64()),
        ("ratio", pa.float64()),
        ("tag", pa.dictionary(pa.int8(), pa.utf8())),
        ("since", pa.date32()),
        (
            "where",
            pa.struct([("city", pa.utf8()), ("seen", pa.timestamp("ns")), ("flag", pa.bool_())]),
        ),
        ("lines", pa.list_(pa.struct([("sku", pa.utf8()), ("qty", pa.int16())]))),
    ]
)


@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 2))
def test_whole_columns_and_single_rows_become_the_same_documents(
    rows: list[dict[str, Any]], begin: int
) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=TYPES).slice(min(begin, len(rows) - 1))
    taker = Taker(SCHEMA)
    sure, careful = surely(batch), carefully(batch)
    assert careful.refused == ()
    assert documents(sure, taker) == documents(careful, taker)
    for row, document in zip(rows[batch.num_rows * -1 :], documents(sure, taker), strict=True):
        assert document["must"] == row["must"], "it must be there: NULL is null"
        assert ("note" in document) == (row["note"] is not None), "elsewhere NULL is absent"


def test_columns_take_the_form_that_the_schema_asks_for() -> None:
    at = datetime.datetime(
        2026, 1, 31, 9, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=2))
    )
    batch = pa.RecordBatch.from_pylist(
        [
            {
                "id": 7,
                "must": None,
                "price": Decimal("9.50"),
                "count": 3,
                "at": at,
                "day": datetime.date(2026, 1, 31),
            }
        ]
    )
    taker = Taker(SCHEMA)
    expected = {
        "id": 7,
        "must": None,
        "price": "9.50",
        "count": "3",
        "at": "2026-01-31T07:30:00Z",
        "day": "2026-01-31",
    }
    assert documents(carefully(batch), taker) == [expected]
    assert documents(surely(batch), taker) == [expected]


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("day", pa.array([datetime.datetime(2026, 1, 31)]), "2026-01-31"),  # noqa: DTZ001
        ("price", pa.array([Decimal("1E-9")], pa.decimal128(20, 9)), "0.000000001"),
        ("price", pa.array([2.5]), "2.5"),
        ("price", pa.array([Decimal("9.50")], pa.decimal128(38, 18)), "9.5"),
        ("price", pa.array([Decimal(100)], pa.decimal128(38, 18)), "100"),
        ("price", pa.array([Decimal(0)], pa.decimal128(38, 18)), "0"),
        ("count", pa.array([2.0]), "2"),
        ("id", pa.array([2.0]), 2),
        ("id", pa.array([Decimal(2)]), 2),
        ("must", pa.array([uuid.UUID(int=1).bytes], pa.uuid()), str(uuid.UUID(int=1))),
        ("must", pa.array(["a"]).dictionary_encode(), "a"),
        ("must", pa.nulls(1), None),
        ("unknown", pa.array([datetime.time(1, 2)]), "01:02:00"),
        ("_x", pa.array([[("color", '"red"')]], pa.map_(pa.utf8(), pa.utf8())), None),
    ],
)  # fmt: skip
def test_columns_of_other_types_are_converted(name: str, column: Any, expected: object) -> None:  # noqa: ANN401
    columns = {"id": pa.array([1]), "must": pa.array(["m"]), name: column}
    batch = pa.RecordBatch.from_pydict(columns)
    taken, taker = Taker(SCHEMA).take_columns(batch), Taker(SCHEMA)
    assert taken.refused == ()
    (document,) = documents(taken, taker)
    if name == "_x":
        assert document == {"id": 1, "must": "m", "color": "red"}, "what a reader got is given back"
    else:
        assert document[name] == expected


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("total", pa.array([float("nan")])),
        ("total", pa.array([Decimal("0.12345678901234567890")])),
        ("day", pa.array([datetime.datetime(2026, 1, 31, 1)])),  # noqa: DTZ001
        ("id", pa.array([1.5])),
        ("id", pa.nulls(1)),
        ("lines", pa.array([[{"qty": 1}]])),
    ],
)
def test_what_cannot_be_the_same_value_is_refused(name: str, column: Any) -> None:  # noqa: ANN401
    columns = {"id": pa.array([1]), "must": pa.array(["m"]), name: column}
    taken = Taker(SCHEMA).take_columns(pa.RecordBatch.from_pydict(columns))
    (refused,) = taken.refused
    assert name in str(refused.violations[0])
