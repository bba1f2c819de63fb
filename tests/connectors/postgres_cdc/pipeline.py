"""A deployment that captures from PostgreSQL, and dies for real (`runtime.crash_world`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from connectors.postgres_cdc.changing import config_of
from penstock import failpoints
from penstock.batch import make_world, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.connectors.postgres_cdc import gathering, snapshot
from penstock.connectors.postgres_cdc.source import PostgresChanges
from penstock.consensus.open import open_consensus
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas
from penstock.runtime.ops import STATS
from runtime.crash_world import Deployment

Document = dict[str, Any]


def catalog_of(
    url: str, tables: Sequence[str], *, materialization: Document | None = None
) -> Document:
    """What is discovered of tables, in a collection each; and a materialization of all of them."""
    source = PostgresChanges(config_of(url), where="capture acme/changes")
    found = {each.name: each for each in source.discover()}
    catalog: Document = {
        "collections": {
            f"acme/{table}": {"key": list(found[table].key), "schema": found[table].schema}
            for table in tables
        },
        "captures": {
            "acme/changes": {
                "endpoint": {
                    "connector": {"image": "penstock/source-postgres", "config": config_of(url)}
                },
                "bindings": [
                    {"resource": found[table].resource, "target": f"acme/{table}"}
                    for table in tables
                ],
            }
        },
    }
    if materialization is not None:
        catalog["materializations"] = {
            "acme/views": {
                "endpoint": {"connector": materialization},
                "bindings": [
                    {"source": f"acme/{table}", "resource": {"table": table}} for table in tables
                ],
            }
        }
    return catalog


@dataclass
class Capturing(Deployment):
    """Its whole graph is run."""

    def run(self, failpoint: str | None = None) -> int:
        async def run() -> None:
            os.chdir(self.directory)
            if self.through_tasks:
                gathering.GIVEN_BYTES_MAX = snapshot.GIVEN_BYTES_MAX = 0  # type: ignore[misc,attr-defined]
            store = await open_consensus(self.settings.consensus)
            catalog = await desired.load(store)
            world = replace(make_world(self.settings, store), spark=lambda _: self.spark)
            failpoints.arm(failpoint)
            runs = await run_graph(catalog, tasks_to_run(catalog), world)
            failpoints.arm(None)
            await store.close()
            for each in runs:
                if each.error is not None:
                    raise each.error

        return self._forked(run)

    def read(self, collection: str) -> list[Document]:
        """Everything that is committed to a collection, in its order."""

        async def read() -> list[Document]:
            store = await open_consensus(self.settings.consensus)
            blobs = open_blobs(self.settings.blob)
            reader = CollectionReader(Journals(store), blobs, Schemas(store), collection)
            found = [
                json.loads(line)
                async for rows in reader.read()
                for line in to_lines(rows.batch, rows.root)
            ]
            await store.close()
            return found

        return asyncio.run(read())

    def table(self, name: str) -> dict[int, Document]:
        """Rows of a table that the collections were materialized to."""
        with contextlib.closing(sqlite3.connect(self.directory / "views.db")) as database:
            rows = database.execute(f"SELECT id, amount FROM {name}").fetchall()  # noqa: S608
        return {key: {"id": key, "amount": amount} for key, amount in rows}

    def captured(self) -> int:
        """Documents that the capture's statistics add up to."""
        every = (stats["capture"] for stats in self.read(STATS.name) if "capture" in stats)
        return sum(each["out"]["docsTotal"] for stats in every for each in stats.values())
