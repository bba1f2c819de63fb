"""Penstock from Python: what `penstock.open` returns.

    with penstock.open(data="./.penstock") as p:
        p.apply("catalog.yaml")
        p.append("acme/orders", [{"id": 1, "total": 9.5}])
        p.run()
        p.read("acme/orders").show()

Calls block. The stores live on an event loop in a thread of its own, so an open `Penstock` may be
used from any thread, a notebook's too. Spark starts with the first call that needs it, and it is
left running: there is one per process, and others may use it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock import applying
from penstock.batch import TaskRun, open_world, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.append import append_documents
from penstock.catalog.build import build_valid
from penstock.catalog.collection_lookup import find_collection
from penstock.catalog.desired import ApplyResult
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.open import open_consensus
from penstock.deployment import check_not_lost, refuse_beside_up
from penstock.engine import EngineOptions, open_spark
from penstock.errors import UserError
from penstock.journal.blobs import open_blobs
from penstock.journal.follower import LoopThread
from penstock.journal.inferred import all_inferred
from penstock.journal.journals import Journal, Journals
from penstock.journal.ownership import Ownership
from penstock.journal.schemas import Schemas
from penstock.journal.selector import LabelSelector
from penstock.model.spec import CollectionSpec
from penstock.runtime.kinds import shards_of
from penstock.settings import Settings
from penstock.status import TaskStatus, statuses

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.consensus.store import Consensus


def open(  # noqa: A001 - it is called as penstock.open
    data: str | Path | None = None,
    *,
    consensus: str | None = None,
    blob: str | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> Penstock:
    """Open a deployment: a data directory, or the stores it consists of.

    What is not given comes from PENSTOCK_… variables, a penstock.toml here, or the default, as on
    the command line. A SQLite store that does not exist is made.
    """
    flags = {
        "data": None if data is None else Path(data),
        "consensus": consensus,
        "blob": blob,
        "master": master,
        "conf": conf,
    }
    return Penstock(Settings.resolve(flags, os.environ))


class Penstock:
    """An open deployment. Close it, or use it in a `with` block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        check_not_lost(settings)
        self._blobs = open_blobs(settings.blob)
        self._thread = LoopThread("penstock")
        try:
            self._store: Consensus = self._thread.run(open_consensus(settings.consensus))
        except BaseException:
            self._thread.close()
            raise
        self._journals = Journals(self._store)
        self._schemas = Schemas(self._store)
        self._ownership = Ownership(self._journals, self._blobs)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the stores; once is enough. Spark goes on."""
        if not self._closed:
            self._closed = True
            try:
                self._thread.run(self._store.close())
            finally:
                self._thread.close()

    @property
    def spark(self) -> SparkSession:
        """The process's SparkSession, started if there is none."""
        return open_spark(EngineOptions(master=self._settings.master, conf=self._settings.conf))

    def apply(self, *catalogs: str | Path) -> ApplyResult:
        """Check catalogs and record them as what shall run here; what they leave out is removed."""
        paths = [Path(path) for path in catalogs]
        inferred = self._thread.run(all_inferred(self._store))
        given = build_valid(paths, environ=os.environ, connectors=BUILTIN, inferred=inferred)
        return self._thread.run(applying.apply(self._store, given))

    def append(self, collection: str, documents: Iterable[Mapping[str, Any]]) -> int:
        """Append documents as one transaction, and return how many they were.

        If one does not fit the collection's schema, nothing is appended.
        """
        return self._thread.run(self._append(collection, _lines(documents)))

    def run(self, *tasks: str, shards: int | None = None) -> tuple[TaskRun, ...]:
        """Run the tasks of the catalog, or those named, until all of them have caught up.

        What is there when it is called is processed when it returns, through all derivations. One
        task that fails does not stop another: all are run, and then the first error is raised.
        """
        return self._thread.run(self._run(tasks, shards))

    def status(self) -> tuple[TaskStatus, ...]:
        """What every task of the catalog does, wherever it runs; and why it waits, if it does."""

        async def look() -> tuple[TaskStatus, ...]:
            return tuple(await statuses(self._store, await desired.load(self._store)))

        return self._thread.run(look())

    def read(
        self,
        collection: str,
        *,
        selector: str = "",
        columns: Sequence[str] | None = None,
        meta: bool = False,
    ) -> DataFrame:
        """The documents that are committed now, as a DataFrame without order.

        `selector` chooses journals by their labels (region=eu), `columns` top-level columns; with
        `meta`, each document has its clock, producer and flags. Members that the schema does not
        name are JSON text in the map `_x`.
        """
        from penstock.journal.scan import read_collection

        spark, chosen = self.spark, LabelSelector.parse(selector)

        async def read() -> DataFrame:
            return await read_collection(
                spark,
                self._journals,
                self._blobs,
                self._schemas,
                await self._find(collection),
                selector=chosen,
                columns=columns,
                meta=meta,
            )

        return self._thread.run(read())

    def journals(self, collection: str | None = None, *, selector: str = "") -> tuple[Journal, ...]:
        """The journals of a collection, or of all, as of one revision."""
        return self._thread.run(self._journals.list(collection, LabelSelector.parse(selector)))

    # ----------------------------------------------------------------------------------- details

    async def _find(self, name: str) -> CollectionSpec:
        return find_collection(await desired.load(self._store), name)

    async def _run(self, names: Sequence[str], shards: int | None) -> tuple[TaskRun, ...]:
        catalog = await desired.load(self._store)
        specs = tasks_to_run(catalog, names)
        led = [spec.name for spec in specs if not shards_of(spec).disable]
        refuse_beside_up(self._settings, led)
        world = await open_world(self._settings, self._store)
        outcomes = await run_graph(catalog, specs, world, shards=shards)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return tuple(outcomes)

    async def _append(self, collection: str, lines: bytes) -> int:
        appended = await append_documents(
            self._journals,
            self._blobs,
            self._schemas,
            self._ownership,
            await desired.load(self._store),
            collection,
            lambda intake: intake.read(io.BytesIO(lines), "document"),
        )
        return appended.documents


def _lines(documents: Iterable[Mapping[str, Any]]) -> bytes:
    """Documents as what is validated: JSON lines, the first of which is document 1."""
    try:
        return b"".join(
            json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            for document in documents
        )
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            "nothing was appended: a document is not JSON",
            why=f"{half!r} is half of a surrogate pair, and no character",
            fix="decode what it came from as UTF-16, or write U+FFFD in its place",
        ) from None
    except (TypeError, ValueError) as error:
        raise UserError("nothing was appended: a document is not JSON", why=str(error)) from None
