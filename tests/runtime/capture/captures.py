"""Deployments that capture files into sums, which show whatever is lost or doubled."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock import failpoints
from penstock.batch import make_world, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.connectors.files import source as files_source
from penstock.consensus.open import open_consensus
from runtime.crash_world import Deployment
from runtime.sessions import ACCOUNTS

Document = dict[str, Any]


def catalog_of(endpoint: Document, resources: dict[str, Document], **binding: object) -> Document:
    """A capture of some resources, and a table for each of the collections that they fill."""
    return {
        "collections": {f"acme/{name}": ACCOUNTS for name in resources},
        "captures": {
            "acme/source": {
                "endpoint": endpoint,
                "bindings": [
                    {"resource": resource, "target": f"acme/{name}", **binding}
                    for name, resource in resources.items()
                ],
            }
        },
        "materializations": {
            "acme/views": {
                "endpoint": {
                    "connector": {
                        "image": "penstock/materialize-sqlite",
                        "config": {"path": "views.db"},
                    }
                },
                "bindings": [
                    {"source": f"acme/{name}", "resource": {"table": name}} for name in resources
                ],
            }
        },
    }


FILES = catalog_of(
    {
        "connector": {
            "image": "penstock/source-files",
            "config": {"path": "incoming", "settle": 0},
        }
    },
    {"accounts": {"path": "accounts*.jsonl"}, "others": {"path": "others*.csv"}},
)


def write_lines(path: Path, docs: Sequence[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(doc)}\n" for doc in docs))


def write_csv(path: Path, docs: Sequence[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(docs[0])
    lines = [",".join(names), *(",".join(str(doc[name]) for name in names) for doc in docs)]
    path.write_text("".join(f"{line}\n" for line in lines))


@dataclass
class Capturing(Deployment):
    """A deployment whose whole graph is run: a capture, and the tables behind it."""

    def run(self, failpoint: str | None = None) -> int:
        async def run() -> None:
            os.chdir(self.directory)
            if self.through_tasks:
                files_source.GIVEN_BYTES_MAX = -1  # type: ignore[misc]
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

    def captured(self) -> int:
        """Documents that committed transactions of captures have published."""
        return sum(
            counts["out"]["docsTotal"]
            for stats in self.read_stats()
            for counts in stats.get("capture", {}).values()
        )
