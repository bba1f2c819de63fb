"""Events on accounts: the input of the task benchmarks, for Penstock and for its peers.

Events are generated from a seed, file by file: amounts on Zipf-distributed accounts, each from a
region. Every contestant builds the same table by account: the number of events, the sum of
amounts, the largest amount, and the region of the last event. An oracle computes the expected
table here with numpy, independently of all contestants.

Peers read Parquet files (`account`, `amount`, `region`, and `seq`, which orders events). Penstock
reads a collection: one transaction for each file, whose documents say what each event adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow
import pyarrow.parquet
import yaml
from psycopg import sql

from penstock import wall_clock
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.catalog.collection_lookup import find_collection
from penstock.consensus.open import open_consensus
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas, layout
from penstock.model.clock import Producer
from penstock.model.json_order import Json
from penstock.model.spec import Frozen
from penstock.native.arrow_types import arrow_schema
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.model.spec import CollectionSpec

pa: Any = pyarrow
pq: Any = pyarrow.parquet

COLLECTION: Final = "bench/events"
TASK: Final = "bench/accounts"
TABLE: Final = "accounts"
REGIONS: Final = ("ap", "eu", "me", "sa", "us")

Integers = npt.NDArray[np.int64]

_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["account", "amount", "events", "largest", "region"],
    "additionalProperties": False,
    "reduce": {"strategy": "merge"},
    "properties": {
        "account": {"type": "integer"},
        "amount": {"type": "integer", "reduce": {"strategy": "sum"}},
        "events": {"type": "integer", "reduce": {"strategy": "sum"}},
        "largest": {"type": "integer", "reduce": {"strategy": "maximize"}},
        "region": {"type": "string", "reduce": {"strategy": "lastWriteWins"}},
    },
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table by account, sorted by account."""

    account: Integers
    events: Integers
    amount: Integers
    largest: Integers
    region: npt.NDArray[np.str_]

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int, str]]) -> Table:
        """Build from rows of (account, events, amount, largest, region), in any order."""
        columns = list(zip(*sorted(rows), strict=True)) or [(), (), (), (), ()]
        account, events, amount, largest = (np.array(each, dtype=np.int64) for each in columns[:4])
        return cls(account, events, amount, largest, np.array(columns[4], dtype=np.str_))

    def wrong_rows(self, oracle: Table) -> int:
        """Count rows that are missing, unexpected, duplicated or different."""
        mine, theirs = self._rows(), oracle._rows()
        wrong = sum(1 for account, row in theirs.items() if mine.get(account) != row)
        return wrong + len(mine.keys() - theirs.keys()) + len(self.account) - len(mine)

    def _rows(self) -> dict[int, tuple[object, ...]]:
        columns = (self.account, self.events, self.amount, self.largest, self.region)
        return {row[0]: row for row in zip(*(column.tolist() for column in columns), strict=True)}


@dataclass(frozen=True)
class Events:
    """`count` events in `files` equal files."""

    count: int
    files: int
    accounts: int = 100_000
    seed: int = 7

    def __post_init__(self) -> None:
        if self.count % self.files:
            raise ValueError(f"{self.count} events do not make {self.files} equal files")

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        weights = 1.0 / np.arange(1, self.accounts + 1)
        shares: npt.NDArray[np.float64] = np.cumsum(weights) / weights.sum()
        return shares

    def generate(self, file: int) -> dict[str, Any]:
        """Generate the events of a file, by column; regions as indices."""
        size = self.count // self.files
        random = np.random.default_rng((self.seed, file))
        ranks = np.searchsorted(self._shares, random.random(size), side="right")
        return {
            # Spread busy accounts over all numbers, and so over all key hashes.
            "account": ranks * 7_919 % self.accounts,
            "amount": random.integers(1, 100_000, size),
            "region": random.integers(0, len(REGIONS), size),
            "seq": np.arange(file * size, (file + 1) * size),
        }

    @cached_property
    def oracle(self) -> Table:
        """The expected table when all events are in it."""
        events = np.zeros(self.accounts, dtype=np.int64)
        amount, largest, region = events.copy(), events.copy(), events.copy()
        for file in range(self.files):
            made = self.generate(file)
            np.add.at(events, made["account"], 1)
            np.add.at(amount, made["account"], made["amount"])
            np.maximum.at(largest, made["account"], made["amount"])
            region[made["account"]] = made["region"]  # for equal indices, the last assignment wins
        (seen,) = np.nonzero(events)
        names = np.array(REGIONS)
        return Table(seen, events[seen], amount[seen], largest[seen], names[region[seen]])

    def write_files(self, directory: Path) -> None:
        """Write Parquet files for the peers, each atomically: `part-00000.parquet`, …"""
        directory.mkdir(parents=True, exist_ok=True)
        for file in range(self.files):
            made = self.generate(file)
            regions = pa.DictionaryArray.from_arrays(made["region"], list(REGIONS)).cast(pa.utf8())
            table = pa.table({**made, "region": regions})
            with tempfile.NamedTemporaryFile(dir=directory, prefix=".", delete=False) as hidden:
                pq.write_table(table, hidden, compression="zstd")
            Path(hidden.name).rename(directory / f"part-{file:05d}.parquet")

    def batch(self, file: int) -> pyarrow.RecordBatch:
        """Return the events of a file as documents of the collection."""
        made = self.generate(file)
        columns = {
            "account": pa.array(made["account"]),
            "amount": pa.array(made["amount"]),
            "events": pa.array(np.ones(len(made["seq"]), dtype=np.int64)),
            "largest": pa.array(made["amount"]),
            "region": pa.DictionaryArray.from_arrays(made["region"], list(REGIONS)),
        }
        schema: Any = arrow_schema(layout(Frozen(_SCHEMA).text))
        arrays = [columns[field.name].cast(field.type) for field in schema]
        rows: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return rows


def catalog_text(endpoint: Json, *, shards: Mapping[str, Json] | None = None) -> str:
    """Return a catalog with the collection, and one task that maintains the accounts table."""
    binding: Json = {
        "source": COLLECTION,
        "resource": {"table": TABLE},
        "fields": {"recommended": True, "exclude": ["flow_document"]},
    }
    task: dict[str, Json] = {"endpoint": endpoint, "bindings": [binding]}
    if shards:
        task["shards"] = dict(shards)
    collection: Json = {"key": ["/account"], "schema": _SCHEMA}
    return yaml.safe_dump(
        {"collections": {COLLECTION: collection}, "materializations": {TASK: task}},
        sort_keys=False,
    )


def postgres_endpoint(url: str) -> Json:
    """Return the endpoint of a task whose tables are in the database at this URL."""
    parts = psycopg.conninfo.conninfo_to_dict(url)
    config: Json = {
        "address": f"{parts['host']}:{parts['port']}",
        "database": str(parts["dbname"]),
        "user": str(parts["user"]),
        "password": str(parts["password"]),
    }
    return {"connector": {"image": "penstock/materialize-postgres", "config": config}}


def sqlite_endpoint(path: Path) -> Json:
    """Return the endpoint of a task whose tables are in a SQLite file."""
    return {"connector": {"image": "penstock/materialize-sqlite", "config": {"path": str(path)}}}


class Appender:
    """Appends events to a deployment's collection, one transaction per call."""

    def __init__(self, store: Consensus, settings: Settings, spec: CollectionSpec) -> None:
        self._publisher = Publisher(
            Journals(store),
            open_blobs(settings.blob),
            Schemas(store),
            [Mapped(spec=spec)],
            producer=Producer.from_random(os.urandom(6)),
            now=wall_clock.now,
        )

    async def append(self, batch: pyarrow.RecordBatch) -> None:
        await self._publisher.publish(0, batch)
        await self._publisher.commit_now()


def settings_in(data: Path) -> Settings:
    """Return the settings of the deployment in a directory."""
    return Settings.resolve({"data": data}, {})


async def apply_catalog(store: Consensus, at: Path) -> CollectionSpec:
    """Apply a catalog, and return its collection of events."""
    await desired.apply(store, load_catalog([at], environ=os.environ))
    return find_collection(await desired.load(store), COLLECTION)


def fill(events: Events, data: Path, catalog: str) -> None:
    """Create a deployment in `data`: apply the catalog, and append all events."""
    data.mkdir(parents=True, exist_ok=True)
    (data / "catalog.yaml").write_text(catalog)
    settings = settings_in(data)

    async def fill_() -> None:
        store = await open_consensus(settings.consensus)
        try:
            spec = await apply_catalog(store, data / "catalog.yaml")
            appender = Appender(store, settings, spec)
            for file in range(events.files):
                await appender.append(events.batch(file))
        finally:
            await store.close()

    asyncio.run(fill_())


def postgres_table(url: str, table: str = TABLE) -> Table:
    """Read the table from PostgreSQL; empty if it does not exist yet."""
    query = sql.SQL("SELECT account, events, amount, largest, region FROM {}")
    try:
        with psycopg.connect(url) as connection:
            return Table.of(connection.execute(query.format(sql.Identifier(table))).fetchall())
    except psycopg.errors.UndefinedTable:
        return Table.of([])


def sqlite_table(path: Path, table: str = TABLE) -> Table:
    """Read the table from SQLite."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        query = f'SELECT account, events, amount, largest, region FROM "{table}"'  # noqa: S608
        return Table.of(database.execute(query).fetchall())
