"""Run tasks until they have caught up: in a fresh process, as a user would, or in this one.

A task that has caught up has nothing left to do. So a deployment has one task for each measurement;
the tasks differ only in where they store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from penstock.batch import make_world, run_until, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.consensus.open import open_consensus
from penstock.errors import Bug
from penstock.journal.follower import current_revision
from penstock_bench.events import settings_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.batch import TaskRun
    from penstock.consensus.store import Consensus
    from penstock.model.json_order import Json
    from penstock.model.spec import Catalog
    from penstock.settings import Settings


def penstock_run(data: Path, *tasks: str) -> list[str | Path]:
    """Return the command that runs tasks until they have caught up; all tasks by default."""
    named = [part for task in tasks for part in ("--task", task)]
    return [sys.executable, "-m", "penstock", "run", "--data", data, "--json", *named]


def task_config(endpoint: Json, source: str, table: str) -> dict[str, Json]:
    """Return the catalog entry of a materialization of one collection in one table."""
    binding: Json = {
        "source": source,
        "resource": {"table": table},
        "fields": {"recommended": True, "exclude": ["flow_document"]},
    }
    return {"endpoint": endpoint, "bindings": [binding]}


def catalog_of(collections: Mapping[str, Json], tasks: Mapping[str, Json]) -> str:
    """Return the text of a catalog."""
    both: Json = {"collections": dict(collections), "materializations": dict(tasks)}
    return yaml.safe_dump(both, sort_keys=False)


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Consensus]:
    """Open the consensus store of a deployment."""
    store = await open_consensus(settings.consensus)
    try:
        yield store
    finally:
        await store.close()


async def apply_catalog_text(store: Consensus, data: Path, catalog: str) -> Catalog:
    """Apply the text of a catalog, and return the whole catalog that is then in force."""
    (data / "catalog.yaml").write_text(catalog)
    await desired.apply(store, load_catalog([data / "catalog.yaml"], environ=None))
    return await desired.load(store)


async def run_until_caught_up(
    data: Path, names: Sequence[str], spark: Callable[[], SparkSession] | None = None
) -> list[TaskRun]:
    """Run tasks concurrently in this process, from opening the store until all have caught up.

    Without `spark` they start one if they need it. The error of a failed task is raised.
    """
    settings = settings_in(data)
    async with open_store(settings) as store:
        catalog = await desired.load(store)
        world = make_world(settings, store)
        if spark is not None:
            world = dataclasses.replace(world, spark=lambda _: spark())
        revision = await current_revision(store)
        specs = tasks_to_run(catalog, names)
        runs = await asyncio.gather(*(run_until(catalog, spec, world, revision) for spec in specs))
    for run in runs:
        if run.error is not None:
            raise run.error
    return runs


def check_documents(runs: Sequence[TaskRun], documents: int) -> None:
    """Raise unless the runs have read exactly this many documents."""
    if (read := sum(run.documents for run in runs)) != documents:
        raise Bug(f"of {documents:,} documents, {read:,} were read")
