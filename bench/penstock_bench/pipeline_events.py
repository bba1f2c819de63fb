"""Events as they arrive, customers, and the table that two hops make of them.

An event has an account, an amount and a region. Regions are spelled in any case, with spaces
around them. Some events are invalid: the amount is missing or negative, or no region is known by
that name. Two hops make a table of them:

1. *clean* drops invalid events, and spells regions in one way.
2. *accounts* adds events up by account, and joins them with customers: the number of events, the
   sum and the maximum of amounts, the sum of amounts in the region `eu`, and the customer's tier.

It is an outer join: customers without events have a row of zeros, accounts without a customer have
no tier. Nothing in the table depends on the order of events, so every contestant may read them in
any order. An oracle computes the expected table here with numpy, independently of all contestants.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import psycopg
import pyarrow
import pyarrow.parquet
import yaml

from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.catalog.collection_lookup import find_collection
from penstock.consensus.open import open_consensus
from penstock.journal.schemas import layout
from penstock.model.json_order import Json
from penstock.model.spec import Frozen
from penstock.native.arrow_types import arrow_schema
from penstock_bench.events import REGIONS, Appender, Events, pa, pq, settings_in

RAW: Final = "bench/raw"
CUSTOMERS: Final = "bench/customers"
CLEAN: Final = "bench/clean"
ACCOUNTS: Final = "bench/accounts"
TASK: Final = "bench/table"
TABLE: Final = "accounts"

EU: Final = REGIONS.index("eu")
TIERS: Final = ("basic", "gold", "plus", "trial")
SPELLINGS: Final = ("{}", " {}", "{} ", "  {} ")
UNKNOWN: Final = "??"
FLAWS: Final = 3
"""Ways in which an event is invalid: no amount, a negative one, or an unknown region."""
FLAWED_SHARE: Final = 0.03

Row: TypeAlias = tuple[int, int, int, int, int, str | None]
"""Account, events, amount, largest, eu, tier."""

RAW_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["id", "account", "region"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "integer"},
        "account": {"type": "integer"},
        "amount": {"type": "integer"},
        "region": {"type": "string"},
    },
}

CLEAN_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["id", "account", "amount", "region"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "integer"},
        "account": {"type": "integer"},
        "amount": {"type": "integer", "minimum": 1},
        "region": {"enum": list(REGIONS), "type": "string"},
    },
}

_CUSTOMER_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["account", "tier"],
    "additionalProperties": False,
    "properties": {"account": {"type": "integer"}, "tier": {"type": "string"}},
}

_ACCOUNT_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["account", "events", "amount", "largest", "eu"],
    "additionalProperties": False,
    "reduce": {"strategy": "merge"},
    "properties": {
        "account": {"type": "integer"},
        "events": {"type": "integer", "reduce": {"strategy": "sum"}},
        "amount": {"type": "integer", "reduce": {"strategy": "sum"}},
        "largest": {"type": "integer", "reduce": {"strategy": "maximize"}},
        "eu": {"type": "integer", "reduce": {"strategy": "sum"}},
        "tier": {"type": "string", "reduce": {"strategy": "lastWriteWins"}},
    },
}

CLEANED: Final = """\
select id, account, amount, lower(trim(region)) as region
from source
where amount > 0 and lower(trim(region)) in ('ap', 'eu', 'me', 'sa', 'us')
"""

FROM_EVENTS: Final = """\
select account, count(*) as events, sum(amount) as amount, max(amount) as largest,
       sum(case when region = 'eu' then amount else 0 end) as eu
from source
group by account
"""

FROM_CUSTOMERS: Final = """\
select account, 0 as events, 0 as amount, 0 as largest, 0 as eu, tier
from source
"""


# --------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class RawEvents(Events):
    """Events as they arrive; their ids begin with `first_id`."""

    first_id: int = 0

    def generate(self, file: int) -> dict[str, Any]:
        """Generate the events of a file, by column; regions, spellings and flaws as indices."""
        made = super().generate(file)
        size = len(made["seq"])
        random = np.random.default_rng((self.seed, file, 1))
        flaw = np.where(random.random(size) < FLAWED_SHARE, random.integers(1, FLAWS + 1, size), 0)
        return {
            "id": made["seq"] + self.first_id,
            "account": made["account"],
            "amount": made["amount"],
            "region": made["region"],
            "spelling": random.integers(0, 2 * len(SPELLINGS), size),
            "flaw": flaw,
        }

    def rows(self, file: int) -> pyarrow.Table:
        """Return the events of a file as they arrive."""
        made = self.generate(file)
        flaw = made["flaw"]
        names = [
            spelling.format(name.upper() if upper else name)
            for name in REGIONS
            for spelling in SPELLINGS
            for upper in (False, True)
        ]
        spelled = made["region"] * 2 * len(SPELLINGS) + made["spelling"]
        spelled = np.where(flaw == 3, len(names), spelled)
        rows: pyarrow.Table = pa.table(
            {
                "id": made["id"],
                "account": made["account"],
                "amount": pa.array(
                    np.where(flaw == 2, -made["amount"], made["amount"]),
                    mask=flaw == 1,
                ),
                "region": pa.DictionaryArray.from_arrays(spelled, [*names, UNKNOWN]).cast(
                    pa.utf8()
                ),
            }
        )
        return rows

    def write_files(self, directory: Path) -> None:
        """Write Parquet files for the peers, each atomically, named by their first id."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in range(self.files):
            write_file(self.rows(file), directory, self.name(file))

    def name(self, file: int) -> str:
        """Return the name of a file; a later one has a larger name."""
        return f"part-{self.first_id + file * (self.count // self.files):09d}.parquet"

    def batch(self, file: int) -> pyarrow.RecordBatch:
        """Return the events of a file as documents of the collection."""
        return as_documents(self.rows(file), RAW_SCHEMA)

    @cached_property
    def sums(self) -> Mapping[str, Any]:
        """Sums and maximum of valid events, indexed by account."""
        found = {
            name: np.zeros(self.accounts, dtype=np.int64)
            for name in ("events", "amount", "largest", "eu")
        }
        for file in range(self.files):
            made = self.generate(file)
            valid = (made["flaw"] == 0) & (made["account"] >= 0)
            account, amount = made["account"][valid], made["amount"][valid]
            np.add.at(found["events"], account, 1)
            np.add.at(found["amount"], account, amount)
            np.maximum.at(found["largest"], account, amount)
            np.add.at(found["eu"], account, np.where(made["region"][valid] == EU, amount, 0))
        return found


def write_file(rows: pyarrow.Table, directory: Path, name: str) -> None:
    """Write a Parquet file that is complete when it appears."""
    hidden = directory / f".{name}"
    pq.write_table(rows, hidden, compression="zstd")
    hidden.rename(directory / name)


def as_documents(rows: pyarrow.Table, schema: Json) -> pyarrow.RecordBatch:
    """Return rows in the form in which a collection with this schema stores documents."""
    fields: Any = arrow_schema(layout(Frozen(schema).text))
    columns: Any = rows.combine_chunks()
    arrays = [
        columns[field.name].combine_chunks().cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in fields
    ]
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(arrays, schema=fields)
    return batch


def customers(accounts: int) -> pyarrow.Table:
    """Return the customers: one account in fifty has none."""
    (has_one,) = np.nonzero(np.arange(accounts) % 50 != 49)
    tiers = pa.DictionaryArray.from_arrays(has_one * 31 % len(TIERS), list(TIERS)).cast(pa.utf8())
    table: pyarrow.Table = pa.table({"account": has_one, "tier": tiers})
    return table


def oracle(parts: Iterable[RawEvents]) -> list[Row]:
    """Return the expected table when these events and all customers are in it."""
    parts = list(parts)
    events, amount, eu = (
        np.sum([part.sums[name] for part in parts], axis=0) for name in ("events", "amount", "eu")
    )
    largest = np.max([part.sums["largest"] for part in parts], axis=0)
    tiers: dict[int, str] = dict(
        zip(*customers(parts[0].accounts).to_pydict().values(), strict=True)
    )
    figures = zip(events.tolist(), amount.tolist(), largest.tolist(), eu.tolist(), strict=True)
    return [
        (account, *of_account, tiers.get(account))
        for account, of_account in enumerate(figures)
        if of_account[0] or account in tiers
    ]


def wrong_rows(rows: Iterable[Row], expected: Iterable[Row]) -> int:
    """Count rows that are missing, unexpected, duplicated or different."""
    rows = list(rows)
    mine, theirs = {row[0]: row for row in rows}, {row[0]: row for row in expected}
    wrong = sum(1 for account, row in theirs.items() if mine.get(account) != row)
    return wrong + len(mine.keys() - theirs.keys()) + len(rows) - len(mine)


def postgres_rows(url: str) -> list[Row]:
    """Read the table from PostgreSQL; empty if it does not exist yet."""
    query = f"SELECT account, events, amount, largest, eu, tier FROM {TABLE}"  # noqa: S608
    try:
        with psycopg.connect(url) as connection:
            rows: list[Any] = connection.execute(query).fetchall()
            return rows
    except psycopg.errors.UndefinedTable:
        return []


def parquet_rows(directory: Path) -> list[Row]:
    """Read the table from the Parquet files of a directory."""
    columns = ("account", "events", "amount", "largest", "eu", "tier")
    rows: list[Row] = []
    for path in sorted(directory.glob("[!._]*")):
        table = pq.read_table(path, columns=list(columns)).to_pydict()
        rows += zip(*(table[name] for name in columns), strict=True)
    return rows


# ------------------------------------------------------------------------------- the deployment


def catalog_text(endpoint: Json) -> str:
    """Return a catalog with both hops, and a task that maintains the table of accounts."""

    def transform(name: str, source: str, text: str) -> Json:
        return {"name": name, "source": source, "shuffle": "any", "lambda": text}

    collections: Json = {
        RAW: {"key": ["/id"], "schema": RAW_SCHEMA},
        CUSTOMERS: {"key": ["/account"], "schema": _CUSTOMER_SCHEMA},
        CLEAN: {
            "key": ["/id"],
            "schema": CLEAN_SCHEMA,
            "derive": {
                "using": {"spark": {}},
                "transforms": [transform("fromRaw", RAW, CLEANED)],
                "shards": {"minTxnDuration": "0s"},
            },
        },
        ACCOUNTS: {
            "key": ["/account"],
            "schema": _ACCOUNT_SCHEMA,
            "derive": {
                "using": {"spark": {}},
                "transforms": [
                    transform("fromEvents", CLEAN, FROM_EVENTS),
                    transform("fromCustomers", CUSTOMERS, FROM_CUSTOMERS),
                ],
                "shards": {"minTxnDuration": "0s"},
            },
        },
    }
    binding: Json = {
        "source": ACCOUNTS,
        "resource": {"table": TABLE},
        "fields": {"recommended": True, "exclude": ["flow_document"]},
    }
    tasks: Json = {TASK: {"endpoint": endpoint, "bindings": [binding]}}
    return yaml.safe_dump({"collections": collections, "materializations": tasks}, sort_keys=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment in a directory, with a catalog at `catalog.yaml` that is applied."""

    data: Path

    @contextlib.asynccontextmanager
    async def appending(self, collection: str = RAW) -> AsyncIterator[Appender]:
        """Apply the catalog, and append to a collection for the duration of the block."""
        settings = settings_in(self.data)
        store = await open_consensus(settings.consensus)
        try:
            await desired.apply(
                store, load_catalog([self.data / "catalog.yaml"], environ=os.environ)
            )
            spec = find_collection(await desired.load(store), collection)
            yield Appender(store, settings, spec)
        finally:
            await store.close()

    def write_catalog(self, text: str) -> None:
        """Write a catalog, which the next append applies."""
        self.data.mkdir(parents=True, exist_ok=True)
        (self.data / "catalog.yaml").write_text(text)

    async def append_customers(self, accounts: int) -> None:
        """Append all customers in one transaction."""
        async with self.appending(CUSTOMERS) as appender:
            await appender.append(as_documents(customers(accounts), _CUSTOMER_SCHEMA))

    def apply(self) -> None:
        """Apply the catalog, and append nothing."""

        async def apply() -> None:
            async with self.appending():
                pass

        asyncio.run(apply())

    def append_events(self, events: RawEvents) -> None:
        """Append events, one transaction for each file."""

        async def append() -> None:
            async with self.appending() as appender:
                for file in range(events.files):
                    await appender.append(events.batch(file))

        asyncio.run(append())
