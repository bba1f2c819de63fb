"""Journals: the same documents in 10,000 of them and in 10, through a whole task to SQLite.

The task runs in this process, on a Spark that is warm; it is timed from opening the store until it
has caught up. 2,000,000 documents in 10,000 journals are 200 in each, and an object for each; a
quick run has 100 journals.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.bench.events import settings_in, sqlite_endpoint
from penstock.bench.frame import OURS, Bench, Chart, Goal, Report, Result, seconds_of
from penstock.bench.scale_runs import (
    applied,
    catalog_of,
    caught_up,
    check_documents,
    opened,
    task,
)
from penstock.bench.stock import SCHEMA, Integers, Stage, Stock, fill
from penstock.catalog.lookup import find_collection
from penstock.errors import Bug
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.schemas import Schemas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.model.json_order import Json

FEW: Final = 10
ROUNDS: Final = 3
TABLE: Final = "customers"


def measure(bench: Bench) -> Report:
    """A task over many journals, beside one over few."""
    journals = bench.size(full=10_000, quick=100)
    documents = bench.size(full=2_000_000, quick=100_000)
    stock = Stock(documents=documents, lots=FEW, parts=journals)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        places = {
            FEW: Place(Path(scratch) / "few", stock, "lot", bench.spark),
            journals: Place(Path(scratch) / "many", stock, "part", bench.spark),
        }
        for count, place in places.items():
            bench.say(f"writing {documents:,} documents to {count:,} journals")
            place.fill(tasks=1 + ROUNDS)

        def run(place: Place) -> Callable[[], float]:
            return seconds_of(place.run)

        taken = bench.interleave(
            f"{documents:,} documents",
            {str(count): run(place) for count, place in places.items()},
            rounds=ROUNDS,
        )
        for place in places.values():
            place.check()
    return Report(
        results=tuple(
            Result(
                name=f"a task, {documents:,} documents in {count:,} journals",
                value=taken.median(str(count)),
                unit="s",
            )
            for count in places
        ),
        goals=(
            Goal(
                name=f"a task: time of {FEW:,} journals / {journals:,}",
                measured=taken.ratio(str(FEW), str(journals)),
                goal=0.5,
            ),
        ),
        charts=(
            Chart(
                name="journals",
                title=f"{documents:,} documents to SQLite, by the number of journals",
                unit="s",
                bars=tuple(
                    (f"{OURS}, {count:,} journals", taken.median(str(count))) for count in places
                ),
                note="Without the start of Spark; less is better.",
            ),
        ),
    )


@dataclass(slots=True)
class Place:
    """A stock in the journals of a collection, and a task for every time that it is read."""

    data: Path
    stock: Stock
    by: str
    spark: Callable[[], SparkSession]
    runs: int = 0
    _tasks: dict[str, Path] = field(default_factory=dict)

    def fill(self, *, tasks: int) -> None:
        """Fill the journals, and apply so many tasks."""
        self.data.mkdir(parents=True)
        self._tasks = {f"bench/task-{n}": self.data / f"task-{n}.db" for n in range(tasks)}
        name = f"bench/by-{self.by}"
        partition: Json = {"location": f"/{self.by}", "partition": True}
        catalog = catalog_of(
            {
                name: {
                    "key": ["/customer"],
                    "schema": SCHEMA.value,
                    "projections": {self.by: partition},
                }
            },
            {
                each: task(sqlite_endpoint(database), name, TABLE)
                for each, database in self._tasks.items()
            },
        )

        async def fill_() -> None:
            settings = settings_in(self.data)
            async with opened(settings) as store:
                spec = find_collection(await applied(store, self.data, catalog), name)
                here = Stage(
                    journals=Journals(store),
                    blobs=open_blobs(settings.blob),
                    schemas=Schemas(store),
                )
                await fill(here, spec, self.stock)

        asyncio.run(fill_())

    def run(self) -> None:
        """Let the next task catch up."""
        name = list(self._tasks)[self.runs]
        check_documents(asyncio.run(caught_up(self.data, [name], self.spark)), self.stock.documents)
        self.runs += 1

    def check(self) -> None:
        """Refuse tables that are not exactly what the stock makes of them."""
        expected = last_of_customers(self.stock)
        for database in list(self._tasks.values())[: self.runs]:
            if not np.array_equal(_stored(database), expected):
                raise Bug(f"{database.name} is not what is in the journals")


def last_of_customers(stock: Stock) -> Integers:
    """Rows of (customer, its last document), by customer."""
    ids = np.arange(stock.documents)
    last = np.full(stock.customers, -1)
    last[stock.customers_of(ids)] = ids  # of equal indices, the last one counts
    (seen,) = np.nonzero(last >= 0)
    return np.stack([seen, last[seen]], axis=1)


def _stored(database: Path) -> Integers:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        query = f"SELECT customer, id FROM {TABLE} ORDER BY customer"  # noqa: S608
        return np.array(connection.execute(query).fetchall(), dtype=np.int64).reshape(-1, 2)
