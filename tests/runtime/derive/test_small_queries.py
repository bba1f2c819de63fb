"""Small transactions of Spark lambdas in one session: each reads rows of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.runtime.control import Control
from penstock.runtime.supervise import supervise
from runtime.sessions import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Document = dict[str, Any]

LAMBDAS = {
    "one row per document": "select account, amount as total, 1L as count from source",
    "grouped": "select account, sum(amount) as total, count(*) as count "
    "from source group by account",
    "joined with a view": "select account, amount * factor as total, 1L as count "
    "from source join factors on true",
}


def collections(query: str) -> Document:
    return {
        "acme/events": {
            "key": ["/id"],
            "schema": {
                "type": "object",
                "required": ["id", "account", "amount"],
                "properties": {
                    "id": {"type": "integer"},
                    "account": {"type": "string"},
                    "amount": {"type": "integer"},
                },
            },
        },
        "acme/totals": {
            "key": ["/account"],
            "schema": {
                "type": "object",
                "required": ["account"],
                "additionalProperties": False,
                "reduce": {"strategy": "merge"},
                "properties": {
                    "account": {"type": "string"},
                    "total": {"type": "integer", "reduce": {"strategy": "sum"}},
                    "count": {"type": "integer", "reduce": {"strategy": "sum"}},
                },
            },
            "derive": {
                "using": {"spark": {"views": {"factors": "select 1L as factor"}}},
                "transforms": [
                    {
                        "name": "fromEvents",
                        "source": "acme/events",
                        "shuffle": "any",
                        "lambda": query,
                    }
                ],
            },
        },
    }


def events(start: int, count: int) -> list[Document]:
    return [
        {"id": i, "account": f"a{i % 3}", "amount": i * 7 % 31} for i in range(start, start + count)
    ]


@pytest.mark.parametrize("query", LAMBDAS.values(), ids=LAMBDAS)
def test_every_transaction_reads_its_own_rows(
    tmp_path: Path, spark: SparkSession, query: str
) -> None:
    place = Place(tmp_path, spark)
    place.apply(collections(query), {})
    sizes = [10, 4, 7, 1]

    async def run() -> int:
        async with place.store() as store:
            task = await place.built(store, "acme/totals")
            committed: asyncio.Queue[int] = asyncio.Queue()
            control = Control(on_progress=lambda done: committed.put_nowait(done.documents))
            leading = asyncio.create_task(supervise(task, place.world(store), control))
            start = 0
            async with place.writing("acme/events") as append:
                for size in sizes:
                    await append(events(start, size))
                    start += size
                    async with asyncio.timeout(120):
                        assert await committed.get() == size
            control.stop()
            await leading
            return start

    total = asyncio.run(run())
    found: dict[str, list[int]] = {}
    for doc in place.read("acme/totals"):
        row = found.setdefault(doc["account"], [0, 0])
        row[0] += doc["total"]
        row[1] += doc["count"]
    wanted = {
        account: [
            sum(e["amount"] for e in events(0, total) if e["account"] == account),
            sum(e["account"] == account for e in events(0, total)),
        ]
        for account in ("a0", "a1", "a2")
    }
    assert found == wanted
