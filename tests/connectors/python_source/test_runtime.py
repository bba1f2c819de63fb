"""Captures in Python, run as `penstock run` runs them: crashes, and rows that Spark reads."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from connectors.http_ingest.ingest_world import in_fork
from penstock import failpoints
from penstock.batch import TaskRun, make_world, run_until
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.open import open_consensus
from penstock.failpoints import FAILPOINTS
from penstock.journal.blobs import open_blobs
from penstock.journal.follower import current_revision
from penstock.journal.journals import Journals
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas
from penstock.runtime import kinds as _kinds  # noqa: F401 - declares the crash points
from penstock.settings import Settings
from runtime.crash_world import CRASHED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)

Document = dict[str, Any]

MODULE = """
from penstock.capture import State

def read(config, state):
    for page in range(state.get("page", 0), config["pages"]):
        first = page * config["size"]
        name = "x" * config["width"]
        rows = [{"id": n, "name": name} for n in range(first, first + config["size"])]
        yield "orders", rows
        yield State({"page": page + 1})
"""
SCHEMA: Document = {
    "type": "object",
    "required": ["id"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "_meta": {"type": "object"},
    },
}


@dataclass
class Place:
    """A deployment with one capture."""

    directory: Path
    spark: SparkSession | None = None

    @property
    def settings(self) -> Settings:
        return Settings.resolve({"data": self.directory / "data"}, {})

    def apply(self, *, schema: Document = SCHEMA, **config: int) -> Place:
        (self.directory / "orders.py").write_text(MODULE)
        file = self.directory / "catalog.json"
        endpoint = {"python": {"module": "orders.py", "config": {"width": 3, **config}}}
        bound = [{"resource": {"stream": "orders"}, "target": "acme/orders"}]
        file.write_text(
            json.dumps(
                {
                    "collections": {"acme/orders": {"key": ["/id"], "schema": schema}},
                    "captures": {"acme/in": {"endpoint": endpoint, "bindings": bound}},
                }
            )
        )

        async def apply() -> None:
            store = await open_consensus(self.settings.consensus)
            try:
                catalog = load_catalog([file], environ=None, connectors=BUILTIN)
                await desired.apply(store, catalog)
            finally:
                await store.close()

        asyncio.run(apply())
        return self

    async def run(self, failpoint: str | None = None) -> TaskRun:
        store = await open_consensus(self.settings.consensus)
        try:
            catalog = await desired.load(store)
            world = make_world(self.settings, store, ends=True)
            if self.spark is not None:
                spark = self.spark
                world = replace(world, spark=lambda _: spark)
            failpoints.arm(failpoint)
            revision = await current_revision(store)
            run = await run_until(catalog, catalog.captures[0], world, revision)
            failpoints.arm(None)
        finally:
            await store.close()
        if run.error is not None:
            raise run.error
        return run

    def run_forked(self, failpoint: str | None = None) -> int:
        async def run() -> None:
            await self.run(failpoint)

        return os.waitstatus_to_exitcode(os.waitpid(in_fork(run), 0)[1])

    def documents(self) -> list[Document]:
        found: list[Document] = []

        async def read() -> None:
            store = await open_consensus(self.settings.consensus)
            reader = CollectionReader(
                Journals(store), open_blobs(self.settings.blob), Schemas(store), "acme/orders"
            )
            async for rows in reader.read():
                found.extend(json.loads(line) for line in to_lines(rows.batch, rows.root))
            await store.close()

        asyncio.run(read())
        return found

    def ids(self) -> list[int]:
        return sorted(document["id"] for document in self.documents())


POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith("capture.")
    or name
    in {
        "leader.after-commit-record",
        "leader.after-epoch",
        "leader.after-intents",
        "leader.after-stats",
        "publisher.acks",
        "publisher.done",
        "publisher.flushed",
        "publisher.intents",
        "publisher.rows",
        "statelog.after-send",
    }
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture that has read two pages, of what are four now."""
    place = Place(tmp_path_factory.mktemp("begun")).apply(pages=2, size=10)
    assert place.run_forked() == 0
    place.apply(pages=4, size=10)
    return place.directory


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_loses_nothing_and_doubles_nothing(begun: Path, tmp_path: Path, point: str) -> None:
    shutil.copytree(begun, tmp_path / "case")
    place = Place(tmp_path / "case")
    assert place.run_forked(f"{point}:1") == CRASHED
    assert place.run_forked() == 0
    assert place.ids() == list(range(40))


def test_a_run_that_ends_reads_to_the_end_of_the_function(tmp_path: Path) -> None:
    place = Place(tmp_path).apply(pages=3, size=5)
    run = asyncio.run(place.run())
    assert (run.documents, run.stored) == (15, 15)
    found = place.documents()
    assert sorted(document["id"] for document in found) == list(range(15))
    assert {document["_meta"]["source"]["stream"] for document in found} == {"orders"}
    assert asyncio.run(place.run()).documents == 0


@pytest.mark.spark
def test_spark_reads_a_large_sequence_in_order_and_once(
    tmp_path: Path, spark: SparkSession
) -> None:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"]}}
    del schema["properties"]["_meta"]
    place = Place(tmp_path, spark).apply(schema=schema, pages=1, size=200_000, width=100)
    run = asyncio.run(place.run())
    assert run.jobs == 1
    assert place.ids() == list(range(200_000))
    assert asyncio.run(place.run()).documents == 0


@pytest.mark.spark
@pytest.mark.parametrize("point", ["publisher.adopted", "leader.after-commit-record"])
def test_a_crash_around_a_large_sequence(tmp_path: Path, spark: SparkSession, point: str) -> None:
    place = Place(tmp_path, spark).apply(pages=1, size=60_000, width=100)
    assert place.run_forked(f"{point}:1") == CRASHED
    assert place.run_forked() == 0
    assert place.ids() == list(range(60_000))
