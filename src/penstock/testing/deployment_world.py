"""A test's world that is a deployment: real journals, and leaders that run derivations on Spark.

It lives in a directory that ends with its test. The runtime asks it for the time, so time is
virtual here, too: it is wall time, and ahead of it by as much as the test has waited.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from penstock import wall_clock
from penstock.batch import StopHandle, TaskRun, open_world, run_graph
from penstock.catalog.append import append_documents
from penstock.catalog.testing.contents import Contents, Published, salt_given
from penstock.catalog.testing.graph import Graph
from penstock.catalog.testing.memory import Endless
from penstock.consensus.open import open_consensus
from penstock.consensus.store import Consensus
from penstock.journal.blobs import open_blobs
from penstock.journal.follower import LoopThread
from penstock.journal.journals import Journals
from penstock.journal.ownership import Ownership
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import Stamps, to_lines
from penstock.journal.schemas import Schemas, layout
from penstock.journal.selector import PartitionFilter
from penstock.model.clock import Clock
from penstock.model.json_order import canonical_json
from penstock.model.spec import Catalog, CollectionSpec, Selector
from penstock.runtime.control import TransactionSummary
from penstock.runtime.derive.engine import Document
from penstock.runtime.derive.languages import needs_one_shard, row_engine
from penstock.runtime.session import World
from penstock.settings import Settings
from penstock.shuffle.binding import derivation_bindings

TRANSACTIONS_MAX: Final = 200
"""Transactions of one derivation, while the world settles, before its cycle is endless."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A committed document."""

    clock: Clock
    partition: str
    """The name of its journal, behind that of the collection."""
    document: Document


class DeploymentWorld:
    """A temporary deployment of a catalog, of which only the derivations run."""

    def __init__(
        self, catalog: Catalog, *, directory: Path, settings: Settings, shards: int = 1
    ) -> None:
        flags = {"data": directory, "master": settings.master, "conf": settings.conf}
        own = Settings.resolve(flags, {}, ())
        self._catalog = catalog = _sharded(catalog, shards)
        self._graph = Graph.of(catalog)
        self._tasks = [spec for spec in catalog.derivations if spec.name in self._graph.sources]
        self._ahead = 0
        self._settled_at = self._now()
        self._blobs = open_blobs(own.blob)
        self._thread = LoopThread("penstock test")
        try:
            self._store, world = self._thread.run(_opened(own))
        except BaseException:
            self._thread.close()
            raise
        self._world = dataclasses.replace(world, now=self._now)
        self._journals = Journals(self._store)
        self._schemas = Schemas(self._store)
        self._ownership = Ownership(self._journals, self._blobs)

    def ingest(self, collection: str, documents: Sequence[Document]) -> None:
        contents = self._contents(collection)
        published = [
            Published(document=document, origin=f"document {i} of the step")
            for i, document in enumerate(documents)
        ]
        lines = [canonical_json(each.document) for each in contents.combined(published)]
        text = "".join(f"{line}\n" for line in lines).encode()
        self._thread.run(
            append_documents(
                self._journals,
                self._blobs,
                self._schemas,
                self._ownership,
                self._catalog,
                collection,
                lambda intake: intake.read(io.BytesIO(text), "document"),
                redact_salt=salt_given(contents.spec, self._catalog),
                now=self._now,
            )
        )

    def settle(self) -> None:
        began = self._now()
        stop = StopHandle()
        endless: list[TaskRun] = []

        def progressed(run: TaskRun, _: TransactionSummary) -> None:
            if run.transactions > TRANSACTIONS_MAX:
                endless.append(run)
                stop.stop()

        runs = self._thread.run(
            run_graph(
                self._catalog,
                self._tasks,
                self._world,
                stop=stop,
                on_progress=progressed,
            )
        )
        for run in runs:
            if run.error is not None:
                raise run.error
        if endless:
            name = endless[0].task
            raise Endless(
                f"the derivations of {' -> '.join(self._graph.cycle_through(name) or [name])} do "
                "not come to rest",
                why=f"{name} has made {endless[0].transactions} transactions",
                fix="let a transform of the cycle publish nothing once nothing changes",
            )
        self._settled_at = began

    def advance_to_next_due(self, collection: str) -> bool:
        """Whatever was due when the world began to settle has been read."""
        due = [time for time in self._due(collection) if time > self._settled_at]
        if not due:
            return False
        self._ahead += max(0, min(due) - self._now())
        return True

    def read(self, collection: str, selector: Selector) -> list[Document]:
        contents = self._contents(collection)
        chosen = PartitionFilter.of((field.name for field in contents.spec.partitions), selector)
        rows = [row for row in self._rows(collection) if chosen.matches(row.partition)]
        for row in rows:
            contents.check_read(row.document)
        return [row.document for row in sorted(rows, key=lambda row: row.clock)]

    def close(self) -> None:
        try:
            self._thread.run(self._store.close())
        finally:
            self._thread.close()

    # --- details ---

    def _now(self) -> Clock:
        return Clock(wall_clock.now() + self._ahead)

    def _contents(self, collection: str) -> Contents:
        (spec,) = (spec for spec in self._catalog.collections if spec.name == collection)
        return Contents(spec, self._catalog)

    def _due(self, collection: str) -> Iterator[int]:
        writers = self._graph.writers_of(collection)
        for spec in self._tasks:
            if spec.name not in writers:
                continue
            for binding in derivation_bindings(self._catalog, spec):
                if not binding.read_delay:
                    continue
                for row in self._rows(binding.collection.name):
                    if binding.partitions.matches(row.partition) and binding.bounds.admit(
                        row.clock
                    ):
                        yield row.clock + binding.read_delay

    def _rows(self, collection: str) -> list[_Row]:
        """All documents that are committed."""
        return self._thread.run(self._read_rows(collection))

    async def _read_rows(self, collection: str) -> list[_Row]:
        root = layout(self._contents(collection).spec.read_schema.text)
        reader = CollectionReader(self._journals, self._blobs, self._schemas, collection, root=root)
        found: list[_Row] = []
        async for rows in reader.read():
            clocks: list[Any] = Stamps.of(rows.batch).clock.tolist()
            found += (
                _Row(
                    clock=Clock(clock),
                    partition=rows.journal.removeprefix(f"{collection}/"),
                    document=json.loads(line),
                )
                for clock, line in zip(clocks, to_lines(rows.batch, rows.root), strict=True)
            )
        return found


def _sharded(catalog: Catalog, shards: int) -> Catalog:
    """The same catalog, whose derivations have this many shards, if they can."""

    def sharded(spec: CollectionSpec) -> CollectionSpec:
        derivation = spec.derivation
        if derivation is None or derivation.shards.disable:
            return spec
        one = needs_one_shard(spec, row_engine(catalog, spec))
        count = dataclasses.replace(derivation.shards, count=1 if one else shards)
        return dataclasses.replace(spec, derivation=dataclasses.replace(derivation, shards=count))

    return dataclasses.replace(catalog, collections=tuple(map(sharded, catalog.collections)))


async def _opened(settings: Settings) -> tuple[Consensus, World]:
    store = await open_consensus(settings.consensus)
    try:
        return store, await open_world(settings, store)
    except BaseException:
        await store.close()
        raise
