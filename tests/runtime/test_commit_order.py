"""The last write is the last that was committed: with skewed clocks, real writers and a real Spark.

Two hosts and a third whose transactions stay open for long write documents of the same keys to the
partitions of some collections. However a task splits what they wrote, its tables are those of the
documents in the order of their commits.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from penstock.catalog import desired
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas, layout
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.model.clock import Clock, Producer, duration
from penstock.model.json_order import ABSENT
from penstock.model.reduce import reduce_full
from penstock.model.schema import compiled
from penstock.native.arrow import to_arrow
from penstock.runtime import reading
from penstock.runtime.materialize.fields import Mode
from runtime.sessions import Document, Place, now, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.consensus.store import Consensus

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

KEYS = 4
HOUR = duration(3600)
SKEWS = (0, -HOUR, HOUR)
LARGE = 6_000
"""Characters that make an object of a fragment, which else travels with its record."""


def collection(reduce: Document, **properties: Document) -> Document:
    return {
        "key": ["/id"],
        "projections": {"region": {"location": "/region", "partition": True}},
        "schema": {
            "type": "object",
            "required": ["id", "region"],
            "properties": {
                "id": {"type": "integer"},
                "region": {"type": "string"},
                "text": {"type": "string"},
                **properties,
            },
            **reduce,
        },
    }


MERGE: Document = {"reduce": {"strategy": "merge"}}
VALUE: Document = {"type": "integer"}
COLLECTIONS = {
    "acme/last": collection({}, v=VALUE),
    "acme/merged": collection(
        MERGE, v=VALUE, sum={"type": "integer", "reduce": {"strategy": "sum"}}
    ),
    "acme/loaded": collection(
        MERGE,
        v={"type": "integer", "reduce": {"strategy": "firstWriteWins"}},
        nested={
            "type": "object",
            **MERGE,
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
        tags={"type": "array", "items": VALUE, "reduce": {"strategy": "append"}},
        set={
            "type": "object",
            "additionalProperties": {"type": "array", "items": VALUE},
            "reduce": {"strategy": "set"},
        },
    ),
    "acme/deleted": collection(
        {
            "if": {"required": ["op"]},
            "then": {"reduce": {"strategy": "merge", "delete": True}},
            "else": MERGE,
        },
        v=VALUE,
        op={"type": "string"},
    ),
    "acme/conditional": collection(
        {
            "if": {"required": ["op"]},
            "then": {"reduce": {"strategy": "lastWriteWins"}},
            "else": MERGE,
        },
        v=VALUE,
        w=VALUE,
        op={"type": "string"},
    ),
}


def document(name: str, number: int, rng: Random, *, large: bool) -> Document:
    found: Document = {"id": number % KEYS, "region": rng.choice(("eu", "us")), "v": number}
    if large:
        found["text"] = os.urandom(LARGE // 2).hex()
    match name:
        case "acme/merged":
            found["sum"] = number
        case "acme/loaded":
            found["nested"] = {rng.choice("ab"): number}
            found["tags"] = [number]
            found["set"] = {rng.choice(("add", "remove")): [rng.randrange(3)]}
        case "acme/deleted" if rng.random() < 0.3:
            found["op"] = "d"
        case "acme/conditional":
            found |= {"w": number} if rng.random() < 0.5 else {"op": "replace"}
    if name in ("acme/merged", "acme/conditional") and rng.random() < 0.3:
        del found["v"]
    return found


@dataclass
class History:
    """What was written, and when it counted."""

    rng: Random
    large: float
    committed: dict[str, list[Document]] = field(default_factory=dict)
    """By collection, in the order of commits."""
    _count: int = 0

    def documents(self) -> dict[str, list[Document]]:
        """Those of one transaction."""
        large = self.rng.random() < self.large
        numbers = range(self._count, self._count + self.rng.randint(1, 3))
        self._count = numbers.stop
        return {
            name: [document(name, number, self.rng, large=large) for number in numbers]
            for name in COLLECTIONS
        }

    def commit(self, docs: dict[str, list[Document]]) -> None:
        for name, some in docs.items():
            self.committed.setdefault(name, []).extend(some)

    def tables(self) -> dict[str, dict[int, Document]]:
        """What must be stored, by the reference reducer."""
        found = {}
        for name, docs in self.committed.items():
            lookup = compiled(json.dumps(COLLECTIONS[name]["schema"])).active_rules
            rows = {
                key: reduce_full([doc for doc in docs if doc["id"] == key], lookup, key)
                for key in range(KEYS)
            }
            found[name] = {key: row for key, row in rows.items() if row is not ABSENT}
        return found


@dataclass
class Writer:
    """A publisher on a host whose clock is wrong by some."""

    publisher: Publisher
    roots: Sequence[Any]
    pending: dict[str, list[Document]] | None = None

    async def publish(self, docs: dict[str, list[Document]]) -> None:
        for index, (some, root) in enumerate(zip(docs.values(), self.roots, strict=True)):
            await self.publisher.publish(index, to_arrow(some, root))
        self.pending = docs

    async def commit(self, history: History) -> None:
        await self.publisher.commit_now()
        if self.pending is not None:
            history.commit(self.pending)
        self.pending = None


@asynccontextmanager
async def writing(place: Place) -> AsyncIterator[tuple[Consensus, list[Writer]]]:
    async with place.store() as store:
        catalog = await desired.load(store)
        specs = [spec for name in COLLECTIONS if (spec := catalog.collection(name)) is not None]
        yield (
            store,
            [
                Writer(
                    Publisher(
                        Journals(store),
                        open_blobs(place.settings.blob),
                        Schemas(store),
                        [Mapped(spec=spec) for spec in specs],
                        producer=Producer.from_random(os.urandom(6)),
                        now=lambda skew=skew: Clock(now() + skew),  # type: ignore[misc]
                    ),
                    [layout(spec.write_schema.text) for spec in specs],
                )
                for skew in SKEWS
            ],
        )


async def story(place: Place, history: History, *, every: int, commits: int = 10) -> None:
    """Writers take turns; the task runs after every so many commits, and at the end."""
    rng = history.rng

    def run() -> None:
        done = place.run()["acme/views"]
        assert done.error is None, done.error

    async with writing(place) as (store, writers):
        for number in range(1, commits + 1):
            writer = rng.choice(writers)
            if writer.pending is None:
                await writer.publish(history.documents())
                if rng.random() < 0.4:
                    await writer.publisher.flush()  # in the journals, and for others to overtake
                    writer = rng.choice(writers)
            if writer.pending is not None:
                await writer.commit(history)
            if number == commits // 2:
                await compact_all(
                    Journals(store),
                    open_blobs(place.settings.blob),
                    Schemas(store),
                    options=CompactionOptions(inputs_min=2),
                )
            if number % every == 0:
                await asyncio.to_thread(run)
        for writer in rng.sample(writers, len(writers)):
            if writer.pending is not None:
                await writer.commit(history)
    await asyncio.to_thread(run)


def stored(place: Place, name: str) -> dict[int, Document]:
    table = place.table(name.rpartition("/")[2], "flow_document", key="id")
    return {key: json.loads(row["flow_document"]) for key, row in table.items()}


@pytest.mark.parametrize(
    ("every", "large", "small_bytes"),
    [
        pytest.param(100, 0.0, reading.SMALL_BYTES, id="one run, and all rows at hand"),
        pytest.param(100, 0.5, 0, id="one run, of objects too"),
        pytest.param(4, 0.3, reading.SMALL_BYTES, id="runs in between"),
    ],
)
def test_the_last_write_is_the_last_that_was_committed(
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    large: float,
    small_bytes: int,
) -> None:
    monkeypatch.setattr(reading, "SMALL_BYTES", small_bytes)
    place = Place(tmp_path, spark)
    bindings = [
        {
            "source": name,
            "resource": {"table": name.rpartition("/")[2]},
            "fields": {"recommended": True, "include": {"flow_document": {}}},
        }
        for name in COLLECTIONS
    ]
    config = {"path": place.database(), "hardDelete": True}
    place.apply(COLLECTIONS, {"acme/views": task("sqlite", config, bindings)})
    history = History(Random(every + int(10 * large)), large)
    asyncio.run(story(place, history, every=every))
    want = history.tables()
    assert {name: stored(place, name) for name in COLLECTIONS} == want
    modes = asyncio.run(_modes(place))
    assert {Mode.REPLACE, Mode.LOAD} <= modes


async def _modes(place: Place) -> set[Mode]:
    async with place.store() as store:
        return {target.mode for target in (await place.built(store, "acme/views")).targets}
