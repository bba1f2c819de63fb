"""A deployment on disk whose tasks run in this process, with the Spark of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.batch import TaskRun, make_world, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors.builtin import capture, materialization
from penstock.consensus.open import open_consensus
from penstock.errors import PenstockError
from penstock.journal.blobs import open_blobs
from penstock.journal.follower import current_revision
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas, layout
from penstock.model.clock import Clock, Producer, from_unix
from penstock.model.columns import Column
from penstock.model.spec import CollectionSpec, Endpoint, MaterializationSpec
from penstock.native.arrow import to_arrow
from penstock.runtime.connector.materialize import Materialization
from penstock.runtime.control import Control
from penstock.runtime.history import load_history
from penstock.runtime.kinds import Connect as Connecting
from penstock.runtime.kinds import build_task
from penstock.runtime.ops import LOGS, STATS
from penstock.runtime.session import RunnableTask, World
from penstock.runtime.supervise import Patience, supervise
from penstock.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.consensus.store import Consensus

Document = dict[str, Any]
Connect = Callable[[Endpoint, str], Materialization]

ACCOUNTS: Document = {
    "key": ["/account"],
    "schema": {
        "type": "object",
        "required": ["account", "region"],
        "additionalProperties": False,
        "reduce": {"strategy": "merge"},
        "properties": {
            "account": {"type": "integer"},
            "count": {"type": "integer", "reduce": {"strategy": "sum"}},
            "total": {"type": "integer", "reduce": {"strategy": "sum"}},
            "top": {"type": "integer", "reduce": {"strategy": "maximize"}},
            "region": {"type": "string"},
        },
    },
}
"""Sums, which show whatever is lost or doubled."""


def accounts(start: int, count: int, *, keys: int = 7) -> list[Document]:
    return [
        {
            "account": i % keys,
            "count": 1,
            "total": i * i,
            "top": i * 37 % 101,
            "region": f"r{i % 3}",
        }
        for i in range(start, start + count)
    ]


def reduced(docs: Sequence[Document], by: str = "account") -> dict[Any, Document]:
    """What a table of `ACCOUNTS` must hold, worked out by hand."""
    rows: dict[Any, Document] = {}
    for doc in docs:
        row = rows.setdefault(doc[by], {"count": 0, "total": 0, "top": 0})
        row["count"] += doc["count"]
        row["total"] += doc["total"]
        row["top"] = max(row["top"], doc["top"])
        row["region"] = doc["region"]
    return rows


def task(
    image: str, config: Document, bindings: Sequence[Document], **others: object
) -> dict[str, object]:
    endpoint = {"connector": {"image": f"penstock/materialize-{image}", "config": config}}
    return {"endpoint": endpoint, "bindings": bindings, **others}


@dataclass
class Place:
    """Where everything is that survives."""

    directory: Path
    spark: SparkSession
    consensus: str = ""
    connects: dict[str, Connect] = field(default_factory=dict)
    """Connectors of tasks, where they are not those that images name."""

    @property
    def settings(self) -> Settings:
        return Settings.resolve({"data": self.directory / "data"}, {})

    def database(self, name: str = "views") -> str:
        return str(self.directory / f"{name}.db")

    @contextlib.asynccontextmanager
    async def store(self) -> AsyncIterator[Consensus]:
        store = await open_consensus(self.settings.consensus)
        try:
            yield store
        finally:
            await store.close()

    def apply(
        self, collections: Document, tasks: Document, captures: Document | None = None
    ) -> None:
        """A catalog of these; JSON is YAML."""
        file = self.directory / "catalog.json"
        catalog = {"collections": collections, "materializations": tasks}
        file.write_text(json.dumps({**catalog, "captures": captures or {}}))

        async def apply() -> None:
            async with self.store() as store:
                await desired.apply(store, load_catalog([file], environ=None))

        asyncio.run(apply())

    def append(self, docs: Mapping[str, Sequence[Document]]) -> None:
        asyncio.run(self.appended(docs))

    async def appended(self, docs: Mapping[str, Sequence[Document]]) -> None:
        """One transaction over the collections."""
        async with self.store() as store:
            publisher, specs = await self._publisher(store, *docs)
            for index, some in enumerate(docs.values()):
                await publisher.publish(index, to_arrow(list(some), _layout(specs[index])))
            await publisher.commit_now()

    @contextlib.asynccontextmanager
    async def writing(
        self, collection: str
    ) -> AsyncIterator[Callable[[Sequence[Document]], Awaitable[None]]]:
        """A writer of a collection: each call is a transaction."""
        async with self.store() as store:
            publisher, (spec,) = await self._publisher(store, collection)

            async def append(docs: Sequence[Document]) -> None:
                await publisher.publish(0, to_arrow(list(docs), _layout(spec)))
                await publisher.commit_now()

            yield append

    async def _publisher(
        self, store: Consensus, *names: str
    ) -> tuple[Publisher, list[CollectionSpec]]:
        catalog = await desired.load(store)
        specs = [_known(catalog.collection(name)) for name in names]
        publisher = Publisher(
            Journals(store),
            open_blobs(self.settings.blob),
            Schemas(store),
            [Mapped(spec=spec) for spec in specs],
            producer=Producer.from_random(os.urandom(6)),
            now=now,
        )
        return publisher, specs

    def world(self, store: Consensus) -> World:
        return replace(make_world(self.settings, store), spark=lambda _: self.spark)

    def run(
        self,
        *names: str,
        shards: int | None = None,
        failures_max: int = 3,
        world: Callable[[World], World] = lambda world: world,
    ) -> dict[str, TaskRun]:
        """Run tasks, all by default, until they have caught up with what there is now."""

        return asyncio.run(self.ran(*names, shards=shards, failures_max=failures_max, world=world))

    async def ran(
        self,
        *names: str,
        shards: int | None = None,
        failures_max: int = 3,
        world: Callable[[World], World] = lambda world: world,
    ) -> dict[str, TaskRun]:
        async with self.store() as store:
            catalog = await desired.load(store)
            revision = await current_revision(store)
            specs = tasks_to_run(catalog, names)
            histories = {
                spec.name: await load_history(store, spec.name, spec.renamed_from)
                for spec in specs
                if isinstance(spec, MaterializationSpec)
            }
            runs = await asyncio.gather(
                *(
                    lead(
                        lambda spec=spec: build_task(  # type: ignore[misc]
                            catalog,
                            spec,
                            Connecting(capture, self.connects.get(spec.name, materialization)),
                            shards=shards,
                            history=histories.get(spec.name),
                        ),
                        world(self.world(store)),
                        Control(until_revision=revision),
                        name=spec.name,
                        failures_max=failures_max,
                    )
                    for spec in specs
                )
            )
        return {run.task: run for run in runs}

    async def built(
        self, store: Consensus, name: str, *, shards: int | None = None, with_history: bool = False
    ) -> RunnableTask:
        catalog = await desired.load(store)
        (spec,) = tasks_to_run(catalog, [name])
        connect = Connecting(capture, self.connects.get(name, materialization))
        history = await load_history(store, name) if with_history else None
        return await asyncio.to_thread(
            build_task, catalog, spec, connect, shards=shards, history=history
        )

    # What can be seen of it

    def read(self, collection: str) -> list[Document]:
        """Everything that is committed to a collection."""

        async def read() -> list[Document]:
            async with self.store() as store:
                blobs = open_blobs(self.settings.blob)
                reader = CollectionReader(Journals(store), blobs, Schemas(store), collection)
                return [
                    json.loads(line)
                    async for rows in reader.read()
                    for line in to_lines(rows.batch, rows.root)
                ]

        return asyncio.run(read())

    def counted(self, collection: str, side: str = "right") -> int:
        """Documents that statistics of transactions add up to."""
        every = (stats["materialize"].get(collection) for stats in self.read(STATS.name))
        return sum(counts[side]["docsTotal"] for counts in every if counts and side in counts)

    def logs(self) -> list[Document]:
        return self.read(LOGS.name)

    def table(
        self, name: str, *columns: str, key: str = "account", database: str = "views"
    ) -> dict[Any, Document]:
        """Rows of an SQLite table by their key; of `ACCOUNTS`, by default."""
        columns = columns or ("count", "total", "top", "region")
        with contextlib.closing(sqlite3.connect(self.database(database))) as connection:
            connection.row_factory = sqlite3.Row
            rows = [dict(row) for row in connection.execute(f"SELECT * FROM {name}")]  # noqa: S608
        found = {row[key]: {column: row[column] for column in columns} for row in rows}
        assert len(found) == len(rows), "a key has one row"
        return found


async def lead(
    make: Callable[[], RunnableTask],
    world: World,
    control: Control,
    *,
    name: str,
    failures_max: int | None = None,
) -> TaskRun:
    """Run a task's sessions; its error is part of what became of it."""
    run = TaskRun(task=name)
    control.on_progress = run.add
    try:
        built = await asyncio.to_thread(make)
        await supervise(built, world, control, Patience(failures_max=failures_max))
    except PenstockError as error:
        run.error = error
    return run


def now() -> Clock:
    return from_unix(*divmod(time.time_ns(), 1_000_000_000))


def _layout(spec: CollectionSpec) -> Column:
    return layout(spec.write_schema.text)


def _known(spec: CollectionSpec | None) -> CollectionSpec:
    assert spec is not None
    return spec
