"""`docs/types.md` is true: its table is what the code does, and its example runs."""

from __future__ import annotations

import datetime
import json
import re
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.connectors.postgres.columns import type_of as postgres_type
from penstock.connectors.sqlite.dialect import SqliteDialect
from penstock.model.columns import Column, Kind, columns
from penstock.model.infer import infer
from penstock.runtime.connector.materialize import TargetField

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAGE = (Path(__file__).parents[1] / "docs" / "types.md").read_text()
EXAMPLE = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]


def rows() -> list[list[str]]:
    table = PAGE.partition("<!-- the types")[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[3:]
    ]


def said(column: Column, kind: Any) -> str:  # noqa: ANN401 - a type of Spark
    """A type as the page writes it."""
    if column.kind is Kind.JSON:
        return "JSON text"
    text = kind.simpleString().upper()
    return re.sub(r"STRUCT<A:", "STRUCT<a: ", text).replace("MAP<STRING,", "MAP<STRING, ")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_table_is_what_the_code_does(row: list[str]) -> None:
    from penstock.native.meanings import read_schema
    from penstock.native.spark_types import spark_schema

    schema, stored, spark, sqlite, postgres = row
    root = columns(
        infer(
            {
                "type": "object",
                "properties": {"v": yaml.safe_load(schema.strip("`"))},
                "additionalProperties": False,
            }
        )
    )
    (member,) = root.members
    assert member.column is not None
    kept = spark_schema(root)
    field = TargetField(name="v", pointer="/v", column=member.column)
    assert row[1:] == [
        said(member.column, kept.fields[0].dataType),
        said(member.column, read_schema(kept, root).fields[0].dataType),
        SqliteDialect().type_of(field),
        postgres_type(field),
    ], (stored, spark, sqlite, postgres)


def test_the_page_has_all_rows() -> None:
    assert len(rows()) > 25


# ---------------------------------------------------------------------------------------- example


def order(number: int, price: str, shipping: float) -> dict[str, Any]:
    return {
        "id": number,
        "customer": "ann",
        "price": price,
        "shipping": shipping,
        "placed": f"2026-01-31T10:00:0{number % 10}.123456789+02:00",
        "due": "2026-02-28",
    }


BATCHES = (
    [order(n, "0.10", 0.1) for n in range(10)],
    [
        order(10, "9.00", 0.7),
        order(11, "10.005", 0.01),
        order(12, "99999999999999999999.99", 0.02),
    ],
)
SPENT = Decimal("100000000000000000019.995")
SHIPPING = Decimal("1.73")
ASKED = "id BIGINT, placed STRING, price STRING"


def in_postgresql(url: str) -> str:
    """The same tables in PostgreSQL, as one more member of the materializations."""
    catalog = yaml.load(EXAMPLE, yaml.BaseLoader)  # noqa: S506 - texts, as in the example
    there = conninfo_to_dict(url)
    config = {
        "address": f"{there['host']}:{there['port']}",
        "database": there["dbname"],
        "user": there["user"],
        "password": there["password"],
    }
    endpoint = {"connector": {"image": "penstock/materialize-postgres", "config": config}}
    views = catalog["materializations"]["shop/views"]
    more = {"materializations": {"shop/pg": {**views, "endpoint": endpoint}}}
    return yaml.safe_dump(more).partition("\n")[2]


@pytest.mark.spark
@pytest.mark.postgres
def test_the_example_is_exact_over_several_transactions(
    spark: SparkSession, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, tests = EXAMPLE.split("\ntests:")
    second = in_postgresql(postgres_url)
    (tmp_path / "catalog.yaml").write_text(f"{before}\n{second}\ntests:{tests}")
    with penstock.open(data=tmp_path / "data") as p:
        p.apply(tmp_path / "catalog.yaml")
        for batch in BATCHES:
            p.append("shop/orders", batch)
            p.run()
        with sqlite3.connect(tmp_path / "views.db") as db:
            ((spent, largest, shipping),) = db.execute(
                "select spent, largest, shipping from customers"
            )
            prices = dict(db.execute("select id, price from orders"))
        db.close()
        assert (Decimal(spent), largest) == (SPENT, "99999999999999999999.99")
        assert Decimal(shipping) == SHIPPING
        assert (prices[0], prices[11]) == ("0.10", "10.005")
        with psycopg.connect(postgres_url) as connection:
            found = connection.execute("select spent, largest, shipping from customers").fetchall()
            ((total, first),) = connection.execute("select sum(price), min(placed) from orders")
        assert found == [(SPENT, Decimal("99999999999999999999.99"), SHIPPING)]
        assert total == SPENT
        assert first.astimezone(datetime.UTC).hour == 8

        lines = CliRunner().invoke(app, ["read", "shop/orders", "--data", str(tmp_path / "data")])
        (first,) = [doc for doc in map(json.loads, lines.stdout.splitlines()) if doc["id"] == 0]
        assert (first["price"], first["placed"]) == (
            BATCHES[0][0]["price"],
            BATCHES[0][0]["placed"],
        )

        frame = p.read("shop/orders")
        check_readers(frame)
        options = {"data": str(tmp_path / "data"), "collection": "shop/orders"}
        through_python = spark.read.format("penstock").options(**options).load()
        assert through_python.dtypes == frame.dtypes
        check_readers(through_python)
        assert sorted(map(tuple, through_python.collect())) == sorted(map(tuple, frame.collect()))

        for texts in (
            p.read("shop/orders", keep_text=True),
            spark.read.format("penstock").options(**options, keepText="true").load(),
            spark.read.format("penstock").options(**options).schema(ASKED).load(),
        ):
            (first,) = texts.where("id = 0").select("placed", "price").collect()
            assert tuple(first) == ("2026-01-31T10:00:00.123456789+02:00", "0.10")


def check_readers(frame: DataFrame) -> None:
    from pyspark.sql import functions as f

    kinds = dict(frame.dtypes)
    assert (kinds["price"], kinds["shipping"]) == ("decimal(38,18)", "decimal(6,2)")
    assert (kinds["placed"], kinds["due"]) == ("timestamp", "date")
    small = frame.where("id < 12")
    ((price, shipping, placed, due),) = small.agg(
        f.sum("price"), f.sum("shipping"), f.min("placed").cast("string"), f.max("due")
    ).collect()
    assert (price, shipping) == (Decimal("20.005"), Decimal("1.71"))
    assert placed == "2026-01-31 08:00:00.123456"
    assert due == datetime.date(2026, 2, 28)


def test_the_tests_of_the_example_pass(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(EXAMPLE)
    done = CliRunner().invoke(app, ["test", str(tmp_path / "catalog.yaml")])
    assert done.exit_code == 0, done.output
