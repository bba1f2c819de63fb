"""The order of documents over several transforms, transaction after transaction of one session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog import desired
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas, layout
from penstock.model.clock import Clock, Producer, duration
from penstock.native.arrow import to_arrow
from penstock.runtime.control import Control, TransactionSummary
from runtime.sessions import Place, lead, now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Document = dict[str, Any]

VALUES: Document = {
    "type": "object",
    "required": ["k", "v"],
    "additionalProperties": False,
    "properties": {"k": {"type": "integer"}, "v": {"type": "string"}},
}
ONE = {"key": ["/k"], "schema": VALUES}
USING: Document = {"spark": {"spark": {}}, "sqlite": {"sqlite": {}}}
LAMBDAS = {"spark": "select k, upper(v) as v from source", "sqlite": "select $k, lower($v) as v"}


def collections(language: str) -> Document:
    transforms = [
        {"name": name, "source": f"acme/{name}", "shuffle": "any", "lambda": LAMBDAS[language]}
        for name in ("ones", "twos")
    ]
    derive = {
        "using": USING[language],
        "transforms": transforms,
        "shards": {"minTxnDuration": "1s"},
    }
    return {"acme/ones": ONE, "acme/twos": ONE, "acme/last": {**ONE, "derive": derive}}


async def append(place: Place, *transactions: tuple[str, Document, Clock]) -> None:
    """Append transactions of one document each, one right after the other.

    Each is by a writer of its own, whose clock says that it is at a certain time.
    """
    async with place.store() as store:
        catalog = await desired.load(store)
        publishers = []
        for collection, document, at in transactions:
            spec = catalog.collection(collection)
            assert spec is not None
            publisher = Publisher(
                Journals(store),
                open_blobs(place.settings.blob),
                Schemas(store),
                [Mapped(spec=spec)],
                producer=Producer.from_random(os.urandom(6)),
                now=partial(Clock, at),
            )
            await publisher.publish(0, to_arrow([document], layout(spec.write_schema.text)))
            publishers.append(publisher)
        for publisher in publishers:
            await publisher.commit_now()


async def in_one_session(place: Place, *steps: Callable[[], Awaitable[None]], each: int) -> None:
    """Run all tasks; after each step, wait until a transaction has read `each` documents."""
    async with place.store() as store:
        seen: asyncio.Queue[int] = asyncio.Queue()
        control = Control()
        task = await place.built(store, "acme/last")
        leading = asyncio.create_task(
            lead(lambda: task, place.world(store), control, name="acme/last", failures_max=1)
        )
        await asyncio.sleep(0)
        counted = control.on_progress

        def progressed(summary: TransactionSummary) -> None:
            counted(summary)
            seen.put_nowait(summary.documents)

        control.on_progress = progressed
        for step in steps:
            await step()
            read = asyncio.create_task(seen.get())
            await asyncio.wait([read, leading], return_when=asyncio.FIRST_COMPLETED)
            assert read.done(), leading.result().error
            assert await read == each, "they are one transaction"
        control.stop()
        run = await leading
        assert run.error is None


@pytest.mark.parametrize("language", ["spark", "sqlite"])
def test_a_late_clock_comes_in_the_order_of_commits_also_when_its_query_was_planned_before(
    tmp_path: Path, spark: SparkSession, language: str
) -> None:
    place = Place(tmp_path, spark)
    place.apply(collections(language), {})

    async def usual() -> None:
        one, two = {"k": 1, "v": "a"}, {"k": 1, "v": "b"}
        await append(place, ("acme/ones", one, now()), ("acme/twos", two, now()))

    async def late() -> None:
        one, two = {"k": 1, "v": "c"}, {"k": 1, "v": "d"}
        an_hour_ago = Clock(now() - duration(3600))
        await append(place, ("acme/ones", one, now()), ("acme/twos", two, an_hour_ago))

    asyncio.run(in_one_session(place, usual, late, usual, late, each=2))
    found = [document["v"].lower() for document in place.read("acme/last")]
    assert found == ["b", "d", "b", "d"]


@pytest.mark.parametrize(
    "code",
    [
        "select k, max(v) as v from source group by k",
        "select distinct k, v from source",
        "select k, v from source where v in (select v from source)",
    ],
    ids=["aggregate", "distinct", "subquery"],
)
def test_a_query_that_was_planned_before_reads_the_documents_of_its_own_transaction(
    tmp_path: Path, spark: SparkSession, code: str
) -> None:
    """Spark keeps what an exchange, a broadcast or a subquery of a plan has made."""
    place = Place(tmp_path, spark)
    summed = {**VALUES, "reduce": {"strategy": "merge"}}
    summed["properties"] = VALUES["properties"] | {
        "v": {"type": "string", "reduce": {"strategy": "maximize"}}
    }
    derive = {
        "using": {"spark": {"nonlinear": "allow"}},
        "transforms": [
            {"name": "ones", "source": "acme/ones", "shuffle": "any", "lambda": code},
        ],
    }
    derived = {"key": ["/k"], "schema": summed, "derive": derive}
    place.apply({"acme/ones": ONE, "acme/last": derived}, {})

    async def next_one(k: int) -> None:
        await append(place, ("acme/ones", {"k": k, "v": f"v{k}"}, now()))

    steps = [partial(next_one, k) for k in range(3)]
    asyncio.run(in_one_session(place, *steps, each=1))
    assert place.read("acme/last") == [{"k": k, "v": f"v{k}"} for k in range(3)]
