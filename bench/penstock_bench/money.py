"""Money that moves between two collections, and what a reader sees of it in two tables.

Accounts are kept in `checking` and in `savings`. Append 0 opens all of them; each later append is a
batch of moves, each of which takes from an account in one what it gives to an account in the other.
So from the first append on the total over both never changes: a reader that sees another total sees
money missing or doubled. All moves are generated from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow
import pyarrow.parquet
import yaml

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
from penstock_bench.events import Integers, postgres_endpoint, settings_in

pa: Any = pyarrow
pq: Any = pyarrow.parquet

TABLES: Final = ("checking", "savings")
COLLECTIONS: Final = tuple(f"bank/{table}" for table in TABLES)
TASK: Final = "bank/tables"

OPENED: Final = 1_000_000
"""Initial balance of each account."""
MOVED_MAX: Final = 1_000

READ_S: Final = 0.02
APPEND_S: Final = 0.05

_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["account", "balance", "moves"],
    "additionalProperties": False,
    "reduce": {"strategy": "merge"},
    "properties": {
        "account": {"type": "integer"},
        "balance": {"type": "integer", "reduce": {"strategy": "sum"}},
        "moves": {"type": "integer", "reduce": {"strategy": "sum"}},
    },
}

# One statement reads one snapshot.
_TOTALS: Final = """
    SELECT (a.balance + b.balance)::bigint, (a.moves + b.moves)::bigint
    FROM (SELECT coalesce(sum(balance), 0) balance, coalesce(sum(moves), 0) moves FROM checking) a,
         (SELECT coalesce(sum(balance), 0) balance, coalesce(sum(moves), 0) moves FROM savings) b
"""


# -------------------------------------------------------------------------------------- the moves


@dataclass(frozen=True, slots=True)
class Part:
    """What an append adds to one of the collections."""

    account: Integers
    balance: Integers
    moves: Integers

    def batch(self) -> pyarrow.RecordBatch:
        """Return it as documents of a collection."""
        schema: Any = arrow_schema(layout(Frozen(_SCHEMA).text))
        arrays = [pa.array(getattr(self, each.name)).cast(each.type) for each in schema]
        rows: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return rows

    def table(self) -> pyarrow.Table:
        """Return it as a peer gets it."""
        rows: pyarrow.Table = pa.table(
            {"account": self.account, "balance": self.balance, "moves": self.moves}
        )
        return rows


@dataclass(frozen=True)
class Moves:
    """The number of accounts in each collection, and of moves in an append."""

    accounts: int = 1_000
    per_append: int = 50
    seed: int = 11

    @property
    def total(self) -> int:
        """The constant total over both collections."""
        return OPENED * self.accounts * len(TABLES)

    def generate(self, number: int) -> tuple[Part, Part]:
        """Generate what an append adds to each of the two."""
        if number == 0:
            every = np.arange(self.accounts)
            opened = Part(every, np.full(self.accounts, OPENED), np.zeros_like(every))
            return opened, opened
        chance = np.random.default_rng((self.seed, number))
        giver, taker = chance.integers(0, self.accounts, (2, self.per_append))
        moved = chance.integers(1, MOVED_MAX, self.per_append, endpoint=True)
        moved *= chance.choice((-1, 1), self.per_append)  # in both directions
        once = np.ones(self.per_append, dtype=np.int64)
        return Part(giver, -moved, once), Part(taker, moved, once)

    def visible(self, appends: int) -> int:
        """Return the number of moves in both tables after this many appends."""
        return len(TABLES) * self.per_append * max(appends - 1, 0)

    def balances(self, appends: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return the expected balances after this many appends."""
        sums = [np.zeros(self.accounts, dtype=np.int64) for _ in TABLES]
        for number in range(appends):
            for total, part in zip(sums, self.generate(number), strict=True):
                np.add.at(total, part.account, part.balance)
        checking, savings = (dict(enumerate(total.tolist())) for total in sums)
        return checking, savings


def wrong_rows(found: dict[int, int], expected: dict[int, int]) -> int:
    """Count accounts with a wrong balance, missing accounts and unexpected ones."""
    return sum(found.get(key) != expected.get(key) for key in found.keys() | expected.keys())


# ------------------------------------------------------------------------------------- the reader


@dataclass(slots=True)
class Reads:
    """What a reader has seen, counted from the first read that sees any money."""

    total: int
    count: int = 0
    torn: int = 0
    largest_error: int = 0
    states: int = 0
    """How often the tables had changed since the previous read; a stuck table is never torn."""
    moves: int = -1
    """Moves in both tables at the last read."""

    def count_read(self, total: int, moves: int) -> None:
        """Count a read."""
        if not self.count and total == 0:
            return
        self.count += 1
        self.torn += total != self.total
        self.largest_error = max(self.largest_error, abs(total - self.total))
        self.states += moves != self.moves
        self.moves = moves

    @property
    def torn_share(self) -> float:
        return self.torn / self.count if self.count else 1.0


def read(url: str, reads: Reads, done: threading.Event) -> None:
    """Read the total fifty times a second until done, without catching up on late reads."""
    due = time.monotonic()
    with psycopg.connect(url, autocommit=True) as connection:
        while not done.wait(max(0.0, due - time.monotonic())):
            with contextlib.suppress(psycopg.errors.UndefinedTable):
                row = connection.execute(_TOTALS).fetchone()
                reads.count_read(*(row or (0, 0)))
            due = max(due + READ_S, time.monotonic())


def balances_in(url: str) -> tuple[dict[int, int], dict[int, int]]:
    """Read the balances of both tables."""
    with psycopg.connect(url) as connection:

        def balances(table: str) -> dict[int, int]:
            rows = connection.execute(f"SELECT account, balance::bigint FROM {table}")  # noqa: S608
            return dict(rows.fetchall())

        return balances(TABLES[0]), balances(TABLES[1])


# ------------------------------------------------------------------------------------ the writers


Append = Callable[[int], Awaitable[None]]


def catalog_text(url: str) -> str:
    """Return a catalog with two collections, and one task with a table for each."""
    collection: Json = {"key": ["/account"], "schema": _SCHEMA}
    bindings: list[Json] = [
        {
            "source": name,
            "resource": {"table": table},
            "fields": {"recommended": True, "exclude": ["flow_document"]},
        }
        for name, table in zip(COLLECTIONS, TABLES, strict=True)
    ]
    task: Json = {"endpoint": postgres_endpoint(url), "bindings": bindings}
    collections: Json = dict.fromkeys(COLLECTIONS, collection)
    return yaml.safe_dump(
        {"collections": collections, "materializations": {TASK: task}}, sort_keys=False
    )


def _write_catalog(data: Path, url: str) -> Path:
    data.mkdir(parents=True)
    catalog = data / "catalog.yaml"
    catalog.write_text(catalog_text(url))
    return catalog


@contextlib.asynccontextmanager
async def to_collections(moves: Moves, data: Path, url: str) -> AsyncIterator[Append]:
    """Append to a new deployment, each transaction over both collections."""
    catalog = _write_catalog(data, url)
    settings = settings_in(data)
    store = await open_consensus(settings.consensus)
    try:
        await desired.apply(store, load_catalog([catalog], environ=os.environ))
        applied = await desired.load(store)
        publisher = Publisher(
            Journals(store),
            open_blobs(settings.blob),
            Schemas(store),
            [Mapped(spec=find_collection(applied, name)) for name in COLLECTIONS],
            producer=Producer.from_random(os.urandom(6)),
            now=wall_clock.now,
        )

        async def append(number: int) -> None:
            for binding, part in enumerate(moves.generate(number)):
                await publisher.publish(binding, part.batch())
            await publisher.commit_now()

        yield append
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def to_files(moves: Moves, directory: Path) -> AsyncIterator[Append]:
    """Append two files, both complete before the first is renamed into place."""
    for table in TABLES:
        (directory / table).mkdir(parents=True)

    async def append(number: int) -> None:
        places: list[tuple[Path, Path]] = []
        for table, part in zip(TABLES, moves.generate(number), strict=True):
            hidden = directory / table / f".part-{number:06d}"
            pq.write_table(part.table(), hidden, compression="zstd")
            places.append((hidden, hidden.with_name(f"part-{number:06d}.parquet")))
        for hidden, shown in places:
            hidden.rename(shown)

    yield append


@dataclass(slots=True)
class WriterProgress:
    """How far a writer is."""

    appends: int = 0


def write(
    appending: AbstractAsyncContextManager[Append], written: WriterProgress, done: threading.Event
) -> None:
    """Append twenty times a second until done, without catching up on late appends."""

    async def append_on() -> None:
        async with appending as append:
            due = time.monotonic()
            while not done.is_set():
                await append(written.appends)
                written.appends += 1
                due = max(due + APPEND_S, time.monotonic())
                await asyncio.sleep(due - time.monotonic())

    asyncio.run(append_on())


@dataclass(frozen=True, slots=True)
class Background:
    """A thread that works until it is stopped."""

    _done: threading.Event
    _working: Future[None]

    def check(self) -> None:
        """Raise the exception that it failed with, if any."""
        if self._working.done():
            self._working.result()

    def end(self) -> None:
        """Stop it, wait for it, and raise the exception that it failed with, if any."""
        self._done.set()
        self._working.result()


@contextlib.contextmanager
def run_in_background(work: Callable[[threading.Event], None]) -> Iterator[Background]:
    """Run `work` in a thread until its event is set, at the latest at the end of the block."""
    done = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        working = Background(done, thread.submit(work, done))
        try:
            yield working
        finally:
            done.set()
        working.end()
