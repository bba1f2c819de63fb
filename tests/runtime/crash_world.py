"""A deployment whose leaders die for real, and are run again.

A leader runs in a forked process: it has the Spark of this one, since threads of a fork make
connections of their own to the JVM, and dies alone. So a crash costs what a crash costs, and not
the start of a JVM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import failpoints, wall_clock
from penstock.batch import make_world, run_until
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors import builtin
from penstock.consensus.open import open_consensus
from penstock.journal.blobs import open_blobs
from penstock.journal.follower import current_revision
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas, layout
from penstock.model.clock import Producer
from penstock.model.spec import Endpoint
from penstock.native.arrow import to_arrow
from penstock.runtime import reading
from penstock.runtime.connector.materialize import Materialization
from penstock.runtime.materialize import transaction_jobs
from penstock.runtime.ops import STATS
from penstock.settings import Settings
from runtime.forks import begin_anew

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CRASHED = 137

Document = dict[str, Any]

CATALOG = """
collections:
  acme/accounts:
    key: [/account]
    schema:
      type: object
      required: [account]
      additionalProperties: false
      reduce: {strategy: merge}
      properties:
        account: {type: integer}
        count: {type: integer, reduce: {strategy: sum}}
        total: {type: integer, reduce: {strategy: sum}}
        top: {type: integer, reduce: {strategy: maximize}}
        region: {type: string}
  acme/tags:
    key: [/account]
    schema:
      type: object
      required: [account]
      reduce: {strategy: merge}
      properties:
        account: {type: integer}
        tags: {type: array, items: {type: integer}, reduce: {strategy: append}}
materializations:
  acme/views:
    endpoint: {connector: {image: %(image)s, config: %(config)s}}
    bindings:
%(bindings)s
%(triggers)s
"""

_BINDINGS = {
    "acme/accounts": "      - {source: acme/accounts, resource: {table: accounts}}",
    "acme/tags": "      - {source: acme/tags, resource: {table: tags}}",
}


def catalog_text(
    collections: Sequence[str],
    *,
    image: str,
    config: Document,
    webhook: str | None = None,
    bindings: Sequence[Document] = (),
) -> str:
    """With the usual bindings of these collections, or others."""
    hook = {"url": webhook, "payloadTemplate": '{"run": {{json run_id}}}'}
    triggers = f"    triggers: {json.dumps({'config': [hook]})}" if webhook else ""
    return CATALOG % {
        "image": image,
        "config": json.dumps(config),
        "bindings": "\n".join(
            [f"      - {json.dumps(binding)}" for binding in bindings]
            or [_BINDINGS[name] for name in collections]
        ),
        "triggers": triggers,
    }


def documents(collection: str, start: int, count: int) -> list[Document]:
    """Documents that add up: whoever counts one twice, or loses one, is found out."""
    if collection == "acme/tags":
        return [{"account": i % 5, "tags": [i]} for i in range(start, start + count)]
    return [
        {
            "account": i % 7,
            "count": 1,
            "total": i * i,
            "top": (i * 37) % 101,
            "region": f"r{i % 3}",
        }
        for i in range(start, start + count)
    ]


def oracle(collection: str, docs: Sequence[Document]) -> dict[int, Document]:
    """What a table must hold, worked out by hand."""
    rows: dict[int, Document] = {}
    for doc in docs:
        row = rows.setdefault(doc["account"], {})
        if collection == "acme/tags":
            row["tags"] = [*row.get("tags", []), *doc["tags"]]
            continue
        row["count"] = row.get("count", 0) + 1
        row["total"] = row.get("total", 0) + doc["total"]
        row["top"] = max(row.get("top", 0), doc["top"])
        row["region"] = doc["region"]
    return rows


@dataclass
class Deployment:
    """A directory with everything in it that survives."""

    directory: Path
    spark: SparkSession
    collections: Sequence[str]
    shards: int = 1
    through_tasks: bool = False
    """Stage from Spark tasks, as a large transaction does."""
    connect: Callable[[Endpoint, str], Materialization] | None = None
    """What makes the connector, if that is not one which an image names."""

    @property
    def settings(self) -> Settings:
        return Settings.resolve({"data": self.directory / "data"}, {})

    def copy(self, to: Path, *, shards: int = 1, through_tasks: bool = False) -> Deployment:
        shutil.copytree(self.directory, to)
        return replace(self, directory=to, shards=shards, through_tasks=through_tasks)

    def prepare(self, text: str) -> None:
        (self.directory / "catalog.yaml").write_text(text)

        async def apply() -> None:
            store = await open_consensus(self.settings.consensus)
            try:
                catalog = load_catalog([self.directory / "catalog.yaml"], environ=None)
                await desired.apply(store, catalog)
            finally:
                await store.close()

        self._forked(apply)

    def append(self, docs: Mapping[str, Sequence[Document]]) -> None:
        """One transaction over the collections."""

        async def append() -> None:
            store = await open_consensus(self.settings.consensus)
            try:
                catalog = await desired.load(store)
                specs = [catalog.collection(name) for name in docs]
                publisher = Publisher(
                    Journals(store),
                    open_blobs(self.settings.blob),
                    Schemas(store),
                    [Mapped(spec=spec) for spec in specs if spec is not None],
                    producer=Producer.from_random(os.urandom(6)),
                    now=wall_clock.now,
                )
                for index, some in enumerate(docs.values()):
                    spec = specs[index]
                    assert spec is not None
                    root = layout(spec.write_schema.text)
                    await publisher.publish(index, to_arrow(list(some), root))
                await publisher.commit_now()
            finally:
                await store.close()

        self._forked(append)

    def run(self, failpoint: str | None = None) -> int:
        """Run the task until it has caught up, or dies; its exit code."""

        async def run() -> None:
            os.chdir(self.directory)
            if self.through_tasks:
                reading.SMALL_BYTES = transaction_jobs.HERE_DOCUMENTS = 0  # type: ignore[misc]
            store = await open_consensus(self.settings.consensus)
            catalog = await desired.load(store)
            world = replace(make_world(self.settings, store), spark=lambda _: self.spark)
            if self.connect is not None:
                builtin.materialization = self.connect  # type: ignore[assignment]
            failpoints.arm(failpoint)
            run = await run_until(
                catalog,
                catalog.materializations[0],
                world,
                await current_revision(store),
                shards=self.shards,
            )
            failpoints.arm(None)
            await store.close()
            if run.error is not None:
                raise run.error

        return self._forked(run)

    def _forked(self, work: Callable[[], Awaitable[None]]) -> int:
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        begin_anew()
        code = 1

        def go() -> None:
            nonlocal code
            try:
                asyncio.run(work())  # type: ignore[arg-type]
                code = 0
            except BaseException:
                traceback.print_exc()

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        os._exit(code)

    def read_stats(self) -> list[Document]:
        """The statistics that are committed, by whoever can read."""
        found: list[Document] = []

        async def read() -> None:
            store = await open_consensus(self.settings.consensus)
            reader = CollectionReader(
                Journals(store), open_blobs(self.settings.blob), Schemas(store), STATS.name
            )
            async for rows in reader.read():
                lines = to_lines(rows.batch, rows.root)
                found.extend(json.loads(line) for line in lines)
            await store.close()

        asyncio.run(read())
        return found


def sqlite_rows(path: Path, collection: str, table: str | None = None) -> dict[int, Document]:
    """A table as the oracle has it."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        table = table or collection.removeprefix("acme/")
        rows = [dict(row) for row in database.execute(f"SELECT * FROM {table}")]  # noqa: S608
    return {row["account"]: shown(collection, row) for row in rows}


def shown(collection: str, row: Mapping[str, Any]) -> Document:
    if collection == "acme/tags":
        return {"tags": json.loads(row["flow_document"])["tags"]}
    return {name: row[name] for name in ("count", "total", "top", "region")}


@dataclass
class Receiver:
    """A webhook, which remembers the runs it was told of."""

    runs: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    told = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.runs.append(body["run"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
