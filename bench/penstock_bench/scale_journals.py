"""Journals: the same documents in 10,000 journals and in 10, through a whole task to SQLite.

The task runs in this process, on a warm Spark; it is timed from opening the store until it has
caught up. 2,000,000 documents in 10,000 journals are 200 in each, in one object per journal; a
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

from penstock.catalog.collection_lookup import find_collection
from penstock.errors import Bug
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.schemas import Schemas
from penstock_bench.events import settings_in, sqlite_endpoint
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, seconds_of
from penstock_bench.scale_runs import (
    apply_catalog_text,
    catalog_of,
    check_documents,
    open_store,
    run_until_caught_up,
    task_config,
)
from penstock_bench.stock import SCHEMA, Integers, Stage, Stock, fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.model.json_order import Json

FEW: Final = 10
ROUNDS: Final = 3
TABLE: Final = "customers"


def measure(bench: Bench) -> Report:
    """Measure a task over many journals, beside one over few."""
    journals = bench.size(full=10_000, quick=100)
    documents = bench.size(full=2_000_000, quick=100_000)
    stock = Stock(documents=documents, lots=FEW, parts=journals)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        deployments = {
            FEW: JournalDeployment(Path(temp_dir) / "few", stock, "lot", bench.spark),
            journals: JournalDeployment(Path(temp_dir) / "many", stock, "part", bench.spark),
        }
        for count, deployment in deployments.items():
            bench.say(f"writing {documents:,} documents to {count:,} journals")
            deployment.fill(tasks=1 + ROUNDS)

        def run(deployment: JournalDeployment) -> Callable[[], float]:
            return seconds_of(deployment.run)

        taken = bench.interleave(
            f"{documents:,} documents",
            {str(count): run(deployment) for count, deployment in deployments.items()},
            rounds=ROUNDS,
        )
        for deployment in deployments.values():
            deployment.check()
    return Report(
        results=tuple(
            Result(
                name=f"a task, {documents:,} documents in {count:,} journals",
                value=taken.median(str(count)),
                unit="s",
            )
            for count in deployments
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
                    (f"{OURS}, {count:,} journals", taken.median(str(count)))
                    for count in deployments
                ),
                note="Without the start of Spark; less is better.",
            ),
        ),
    )


@dataclass(slots=True)
class JournalDeployment:
    """A stock in the journals of a collection, and a task for each time it is read."""

    data: Path
    stock: Stock
    by: str
    spark: Callable[[], SparkSession]
    runs: int = 0
    _tasks: dict[str, Path] = field(default_factory=dict)

    def fill(self, *, tasks: int) -> None:
        """Fill the journals, and apply this many tasks."""
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
                each: task_config(sqlite_endpoint(database), name, TABLE)
                for each, database in self._tasks.items()
            },
        )

        async def fill_() -> None:
            settings = settings_in(self.data)
            async with open_store(settings) as store:
                spec = find_collection(await apply_catalog_text(store, self.data, catalog), name)
                here = Stage(
                    journals=Journals(store),
                    blobs=open_blobs(settings.blob),
                    schemas=Schemas(store),
                )
                await fill(here, spec, self.stock)

        asyncio.run(fill_())

    def run(self) -> None:
        """Run the next task until it has caught up."""
        name = list(self._tasks)[self.runs]
        check_documents(
            asyncio.run(run_until_caught_up(self.data, [name], self.spark)), self.stock.documents
        )
        self.runs += 1

    def check(self) -> None:
        """Raise if a table differs from what the stock reduces to."""
        expected = last_of_customers(self.stock)
        for database in list(self._tasks.values())[: self.runs]:
            if not np.array_equal(_stored(database), expected):
                raise Bug(f"{database.name} is not what is in the journals")


def last_of_customers(stock: Stock) -> Integers:
    """Return rows of (customer, its last document), sorted by customer."""
    ids = np.arange(stock.documents)
    last = np.full(stock.customers, -1)
    last[stock.customers_of(ids)] = ids  # for equal indices, the last assignment wins
    (seen,) = np.nonzero(last >= 0)
    return np.stack([seen, last[seen]], axis=1)


def _stored(database: Path) -> Integers:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        query = f"SELECT customer, id FROM {TABLE} ORDER BY customer"  # noqa: S608
        return np.array(connection.execute(query).fetchall(), dtype=np.int64).reshape(-1, 2)
