"""Money at endpoints: columns of their own type, and sums without a cent too much.

Over random streams, cut into transactions, what a table shows is what `decimal` adds.
"""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest

from connectors.places import PostgresPlace
from penstock.connectors.sql.dialect import Fit
from penstock.connectors.sqlite.dialect import SqliteDialect
from penstock.model.columns import Column, Kind
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import TargetField
from penstock.runtime.materialize.fields import Mode
from penstock.testing.sink_harness import Bind, SqlPlace, merging_schema, start

CENTS = {"type": "number", "multipleOf": 0.01, "minimum": -1e12, "maximum": 1e12}
NUMERAL = {"type": "string", "format": "number"}

ADDED = Bind(
    schema=merging_schema(
        cents={**CENTS, "reduce": {"strategy": "sum"}},
        text={**NUMERAL, "reduce": {"strategy": "sum"}},
        units={"type": "string", "format": "integer", "reduce": {"strategy": "sum"}},
    )
)
COMPARED = Bind(
    schema=merging_schema(
        low={**NUMERAL, "reduce": {"strategy": "minimize"}},
        top={**NUMERAL, "reduce": {"strategy": "maximize"}},
        last=NUMERAL,
    )
)


def money(value: Any) -> Decimal:  # noqa: ANN401 - text, or what a driver makes of NUMERIC
    return value if isinstance(value, Decimal) else Decimal(value)


def amounts(rng: random.Random, count: int) -> list[str]:
    return [f"{rng.randrange(-(10**12), 10**12) / 100:.2f}" for _ in range(count)]


def test_sums_over_many_transactions_are_exact(place: SqlPlace) -> None:
    rng = random.Random(18)
    given = amounts(rng, 400)
    run = start(place, ADDED)
    for begin in range(0, len(given), 50):
        run.transaction(
            [
                {"k": at % 3, "cents": float(text), "text": text, "units": text.replace(".", "")}
                for at, text in enumerate(given[begin : begin + 50], begin)
            ]
        )
    want = {key: sum(map(Decimal, given[key::3])) for key in range(3)}
    rows = {row["k"]: row for row in place.rows()}
    assert {key: money(row["cents"]) for key, row in rows.items()} == want
    assert {key: money(row["text"]) for key, row in rows.items()} == want
    assert {key: money(row["units"]) for key, row in rows.items()} == {
        key: total * 100 for key, total in want.items()
    }


def test_the_least_and_the_greatest_are_numbers_not_letters(place: SqlPlace) -> None:
    rng = random.Random(5)
    given = [*amounts(rng, 60), "9", "10", "-9", "-10", "1e13", "-1E13", "0.1"]
    rng.shuffle(given)
    run = start(place, COMPARED)
    assert run.built.targets[0].mode is Mode.PUSHDOWN
    for begin in range(0, len(given), 7):
        some = given[begin : begin + 7]
        run.transaction([{"k": 1, "low": text, "top": text, "last": text} for text in some])
        run.transaction([{"k": 1}])
    (row,) = place.rows()
    values = [Decimal(text) for text in given]
    assert (money(row["low"]), money(row["top"])) == (min(values), max(values))
    assert money(row["last"]) == values[-1]


def test_no_digit_of_a_text_is_too_much(place: SqlPlace) -> None:
    run = start(place, ADDED)
    run.transaction([{"k": 1, "text": "12345678901234567890123456789012345678901234567890.10"}])
    run.transaction([{"k": 1, "text": "0.90"}])
    (row,) = place.rows()
    assert str(row["text"]) == "12345678901234567890123456789012345678901234567891.00"


@pytest.mark.postgres
def test_postgresql_has_numeric(postgres_place: PostgresPlace) -> None:
    start(postgres_place, ADDED)
    kinds = postgres_place.columns()
    assert {kinds[name] for name in ("cents", "text", "units")} == {"numeric"}


@pytest.mark.postgres
def test_a_table_of_text_goes_on_as_it_is(postgres_place: PostgresPlace) -> None:
    """Tables that were made when such a field was TEXT are neither altered nor refused."""
    run = start(postgres_place, COMPARED)
    run.close()
    for name in ("low", "top", "last"):
        postgres_place.execute(f"ALTER TABLE t ALTER COLUMN {name} TYPE text")
    run = start(postgres_place, COMPARED, epoch=2, last=run)
    for text in ("9.50", "10.10", "-3"):
        run.transaction([{"k": 1, "low": text, "top": text, "last": text}])
    (row,) = postgres_place.rows()
    assert (row["low"], row["top"], row["last"]) == ("-3", "10.10", "-3")
    assert postgres_place.columns()["low"] == "text"


@pytest.mark.postgres
def test_values_beyond_every_number_of_postgresql(postgres_place: PostgresPlace) -> None:
    run = start(postgres_place, COMPARED)
    run.transaction([{"k": 1, "top": "NaN"}, {"k": 2, "top": "-Infinity"}])
    run.transaction([{"k": 1, "top": "5"}, {"k": 2, "top": "5"}])
    rows = {row["k"]: str(row["top"]) for row in postgres_place.rows()}
    assert rows == {1: "NaN", 2: "5"}, "NaN is above all numbers, as in the reference"
    with pytest.raises(ConnectorError, match="numeric") as refused:
        run.transaction([{"k": 3, "top": "1e200000"}])
    assert not refused.value.transient


def _numeral(form: str = "number") -> TargetField:
    return TargetField(name="v", pointer="/v", column=Column(kind=Kind.STRING, logical=form))


@pytest.mark.parametrize(
    ("live", "want"),
    [
        ("numeric", Fit.HOLDS),
        ("text", Fit.HOLDS),
        ("numeric(12,2)", Fit.WIDENS),
        ("bigint", Fit.WIDENS),
        ("double precision", Fit.FAILS),
    ],
)
def test_which_columns_hold_numbers_of_any_length(live: str, want: Fit) -> None:
    from penstock.connectors.postgres.columns import fit

    assert fit(_numeral(), live) is want


def test_digests_are_text_whatever_their_format() -> None:
    from penstock.connectors.postgres.columns import type_of

    column = Column(kind=Kind.STRING, logical="number", redact="sha256")
    assert type_of(TargetField(name="v", pointer="/v", column=column)) == "text"
    assert SqliteDialect().type_of(_numeral()) == "TEXT"
    assert type_of(_numeral("integer")) == "numeric"
