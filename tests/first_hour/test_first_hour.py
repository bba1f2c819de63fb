"""The first hour of somebody who has real work to do, by the commands that they would type.

Orders are nested documents with money, dates, partitions and a composite key. They go to SQLite and
PostgreSQL. First two runs at once store 300,000 of them; then `penstock up` runs, while the catalog
changes under it: schemas, names of tables, columns and tasks. After each change both databases must
hold what Python computes from the documents that were appended.
"""

from __future__ import annotations

import copy
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from support.commands import Command

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(1500)]

DOCUMENTS = 300_000
NOTEBOOK = Path(__file__).parents[2] / "examples" / "orders.ipynb"
SOON_S = 300.0
"""Generous: a rebuild takes seconds, on a machine that does nothing else."""

Document = dict[str, Any]
Row = tuple[Any, ...]

ORDERS: Document = {
    "key": ["/region", "/id"],
    "projections": {"region": {"location": "/region", "partition": True}},
    "schema": {
        "type": "object",
        "required": ["region", "id", "total", "day"],
        "properties": {
            "region": {"type": "string", "maxLength": 10},
            "id": {"type": "integer"},
            "total": {"type": "string", "format": "number"},
            "day": {"type": "string", "format": "date"},
            "placedAt": {"type": "string", "format": "date-time"},
            "quantity": {"type": "integer"},
            "note": {"type": "string", "maxLength": 100},
            "customer": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "address": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                    },
                },
            },
            "lines": {
                "type": "array",
                "items": {"type": "object", "properties": {"sku": {"type": "string"}}},
            },
        },
    },
}


def order(number: int, **others: object) -> Document:
    cents = number * 37 % 100_000
    return {
        "region": ("eu", "us", "asia")[number % 3],
        "id": number,
        "total": f"{cents // 100}.{cents % 100:02d}",
        "day": f"2026-{number % 12 + 1:02d}-{number % 28 + 1:02d}",
        "placedAt": f"2026-01-05T10:{number % 60:02d}:00Z",
        "quantity": number % 9,
        "customer": {"name": f"c{number % 50}", "address": {"city": f"city {number % 7}"}},
        "lines": [{"sku": f"s{number % 11}"}],
        **others,
    }


@dataclass
class Hour:
    """A directory in which somebody works, and what they have appended so far."""

    directory: Path
    url: str
    orders: dict[tuple[str, int], Document] = field(default_factory=dict)
    collection: Document = field(default_factory=lambda: copy.deepcopy(ORDERS))
    tasks: dict[str, Document] = field(default_factory=dict)

    def penstock(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=self.directory,
            env={**os.environ, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
            timeout=SOON_S,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def write(self) -> None:
        catalog = {"collections": {"acme/orders": self.collection}, "materializations": self.tasks}
        (self.directory / "catalog.yaml").write_text(json.dumps(catalog))

    def apply(self, *options: str) -> str:
        """Check and apply the catalog, and return what was said."""
        self.write()
        assert "ok" in self.penstock("check").stdout
        done = self.penstock("apply", *options)
        return done.stdout + done.stderr

    def refused(self, code: str) -> str:
        """Try a catalog that must be refused by `check` and `apply`, and put it back."""
        self.write()
        checked = self.penstock("check", code=1)
        said = self.penstock("apply", code=1)
        assert code in checked.stdout + checked.stderr, checked.stdout + checked.stderr
        return said.stdout + said.stderr

    def append(self, documents: Sequence[Document]) -> None:
        file = self.directory / "new.jsonl"
        with file.open("w") as lines:
            for document in documents:
                lines.write(json.dumps(document) + "\n")
                self.orders[document["region"], document["id"]] = document
        self.penstock("append", "acme/orders", "new.jsonl")

    # What the databases hold

    def sqlite(self, table: str, columns: Sequence[str]) -> list[Row]:
        names = ", ".join(f'"{column}"' for column in columns)
        with sqlite3.connect(self.directory / "shop.db") as database:
            rows = database.execute(f'SELECT {names} FROM "{table}"').fetchall()  # noqa: S608
        database.close()
        return rows

    def postgres(self, table: str, columns: Sequence[str]) -> list[Row]:
        query = sql.SQL("SELECT {} FROM {}").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(table)
        )
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchall()

    def until_stored(self, table: str = "orders", **columns: Callable[[Document], object]) -> None:
        """Wait until both tables have all orders, with these columns as computed here.

        A table is never empty, and never has a row twice.
        """
        names = ("region", "id", *columns)
        want = {
            key: tuple(of(document) for of in columns.values())
            for key, document in self.orders.items()
        }
        deadline = time.monotonic() + SOON_S
        for read in (self.sqlite, self.postgres):
            while True:
                try:
                    rows = read(table, names)
                except (sqlite3.OperationalError, psycopg.errors.UndefinedColumn) as error:
                    found, problem = None, str(error)
                except psycopg.errors.UndefinedTable as error:
                    found, problem = None, str(error)
                else:
                    assert rows, "a reader sees an empty table"
                    found = {row[:2]: tuple(map(plain, row[2:])) for row in rows}
                    assert len(found) == len(rows), "a row is there twice"
                    problem = next(
                        (f"{key}: {found.get(key)}" for key in want if found.get(key) != want[key]),
                        "more rows",
                    )
                if found == want:
                    break
                assert time.monotonic() < deadline, f"{read.__name__}: {problem}"
                time.sleep(2)  # reading all of it takes as long


def plain(value: object) -> object:
    """A value as text and numbers, which databases show differently."""
    if isinstance(value, Decimal):
        return str(value)
    return value.isoformat() if hasattr(value, "isoformat") else value


@pytest.fixture
def hour(tmp_path: Path, postgres_url: str) -> Hour:
    return Hour(tmp_path, postgres_url)


def endpoint(hour: Hour, kind: str) -> Document:
    if kind == "sqlite":
        config = {"path": "shop.db"}
    else:
        given = conninfo_to_dict(hour.url)
        config = {
            "address": f"{given['host']}:{given['port']}",
            "database": str(given["dbname"]),
            "user": str(given["user"]),
            "password": str(given["password"]),
        }
    return {"connector": {"image": f"penstock/materialize-{kind}", "config": config}}


def materializations(hour: Hour) -> dict[str, Document]:
    binding = {"source": "acme/orders", "resource": {"table": "orders"}}
    return {
        f"acme/{kind}": {"endpoint": endpoint(hour, kind), "bindings": [copy.deepcopy(binding)]}
        for kind in ("sqlite", "postgres")
    }


def test_a_first_hour(hour: Hour) -> None:
    properties = hour.collection["schema"]["properties"]
    hour.tasks = materializations(hour)

    # A catalog, 300,000 documents, and two runs of it at once.
    said = hour.apply()
    assert "acme/orders" in said
    assert "acme/postgres" in said
    hour.append([order(number) for number in range(DOCUMENTS)])
    runs = [Command(hour.directory, "run", "--own-spark") for _ in range(2)]
    for run in runs:
        assert run.ended_within(SOON_S) == 0, run.said
    hour.until_stored(quantity=lambda order: order["quantity"])
    with psycopg.connect(hour.url) as connection:
        (total,) = connection.execute("SELECT sum(total), count(*) FROM orders").fetchall()
        keys = connection.execute(
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid "
            "AND a.attnum = ANY (i.indkey) WHERE i.indrelid = 'orders'::regclass "
            "AND i.indisprimary ORDER BY array_position(i.indkey, a.attnum)"
        ).fetchall()
    assert total == (sum(Decimal(each["total"]) for each in hour.orders.values()), DOCUMENTS)
    assert keys == [("region",), ("id",)]

    # From here on everything runs, and the catalog changes under it; small orders, soon stored.
    up = Command(hour.directory, "up")
    try:
        up.until_it_says("acme/")
        number = iter(range(DOCUMENTS, DOCUMENTS + 1000))

        def more(**others: object) -> None:
            hour.append([order(next(number), **others) for _ in range(3)])

        # 1: integer to number.
        properties["quantity"] = {"type": "number"}
        assert "orders" in hour.apply()
        more(quantity=2.5)
        hour.until_stored(quantity=lambda order: order.get("quantity"))

        # 2, 3: longer strings, and a required member becomes optional.
        properties["note"]["maxLength"] = 1000
        hour.collection["schema"]["required"].remove("day")
        hour.apply()
        more(note="x" * 500)
        hour.append([{k: v for k, v in order(next(number)).items() if k != "day"}])
        hour.until_stored(note=lambda order: order.get("note"), day=lambda order: order.get("day"))

        # 4: a new field.
        properties["channel"] = {"type": "string"}
        hour.apply()
        more(channel="web")
        hour.until_stored(channel=lambda order: order.get("channel"))

        # 5: a field is renamed by a projection, of a nested member.
        hour.collection["projections"]["town"] = "/customer/address/city"
        said = hour.apply()
        assert "town" in said
        hour.until_stored(town=lambda order: order["customer"]["address"]["city"])

        # 6: an item of a list becomes a column, which old rows have after a rebuild.
        hour.collection["projections"]["first_sku"] = "/lines/0/sku"
        hour.apply()
        for task in hour.tasks:
            assert "orders" in "".join(
                (done := hour.penstock("backfill", task, "--yes")).stdout + done.stderr
            )
        hour.until_stored(first_sku=lambda order: order["lines"][0]["sku"])

        # 7: a date becomes text, and 8: a date again.
        properties["day"] = {"type": "string"}
        hour.apply()
        more()
        hour.until_stored(day=lambda order: order.get("day"))
        properties["day"] = {"type": "string", "format": "date"}
        hour.apply()
        more()
        hour.until_stored(day=lambda order: order.get("day"))

        # 9: a removed field. Its column stays, and is filled no more.
        del properties["note"]
        hour.apply()
        more()
        hour.until_stored(quantity=lambda order: order.get("quantity"))

        # 10, 11, 12: what stored documents could not be read under is refused, and changes nothing.
        before = copy.deepcopy(hour.collection)
        for change, code in refusals():
            hour.collection = copy.deepcopy(before)
            change(hour.collection)
            said = hour.refused(code)
            assert "acme/orders" in said
        hour.collection = before
        properties = hour.collection["schema"]["properties"]
        hour.apply()
        more()
        hour.until_stored(quantity=lambda order: order.get("quantity"))

        # A table is renamed, then both tasks; each goes on from where it was.
        for task in hour.tasks.values():
            binding = task["bindings"][0]
            binding["renamedFrom"] = {"table": "orders"}
            binding["resource"] = {"table": "sales"}
        hour.apply()
        more()
        hour.until_stored("sales", quantity=lambda order: order.get("quantity"))
        hour.tasks = {
            f"{name}-sales": {**task, "renamedFrom": name} for name, task in hour.tasks.items()
        }
        for task in hour.tasks.values():
            del task["bindings"][0]["renamedFrom"]
        hour.apply("--yes")
        more()
        hour.until_stored("sales", quantity=lambda order: order.get("quantity"))

        status = json.loads(hour.penstock("status", "--json").stdout)
        assert {each["task"] for each in status} == set(hour.tasks)
        hour.penstock("logs", "acme/sqlite-sales")
    finally:
        assert up.stopped() == 0, up.said


def refusals() -> list[tuple[Callable[[Document], None], str]]:
    def text(collection: Document) -> None:
        collection["schema"]["properties"]["quantity"] = {"type": "string"}

    def key(collection: Document) -> None:
        collection["key"] = ["/id"]

    def partition(collection: Document) -> None:
        collection["projections"]["region"] = "/region"

    return [
        (text, "E-TYPE-CHANGE"),
        (key, "E-KEY-CHANGE"),
        (partition, "E-PARTITION-CHANGE"),
    ]


def test_the_notebook_runs_in_a_process_that_has_no_spark_yet(tmp_path: Path) -> None:
    """`run` starts Spark in a thread of its own, and the cells after it use that in theirs."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if "outputs" in cell]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "document:2: /id" in done.stdout
    assert "shop/customers: 4 documents" in done.stdout
