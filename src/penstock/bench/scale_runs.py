"""Tasks that are run to the end: in a fresh process, as a user would, or in this one, on its Spark.

A task that has caught up has nothing to do a second time. So a deployment has a task of its own for
every time that something is measured, all of them alike but for where they store.
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

from penstock.batch import make_world, materializations, run_until
from penstock.bench.events import settings_in
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.consensus.open import open_consensus
from penstock.errors import Bug
from penstock.journal.follower import current_revision

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.batch import TaskRun
    from penstock.consensus.store import Consensus
    from penstock.model.json_order import Json
    from penstock.model.spec import Catalog
    from penstock.settings import Settings


def penstock_run(data: Path, *tasks: str) -> list[str | Path]:
    """The command that runs tasks of a deployment until they have caught up; all by default."""
    named = [part for task in tasks for part in ("--task", task)]
    return [sys.executable, "-m", "penstock", "run", "--data", data, "--json", *named]


def task(endpoint: Json, source: str, table: str) -> Json:
    """A materialization of one collection in one table, by columns."""
    binding: Json = {
        "source": source,
        "resource": {"table": table},
        "fields": {"recommended": True, "exclude": ["flow_document"]},
    }
    return {"endpoint": endpoint, "bindings": [binding]}


def catalog_of(collections: Mapping[str, Json], tasks: Mapping[str, Json]) -> str:
    """The text of a catalog."""
    both: Json = {"collections": dict(collections), "materializations": dict(tasks)}
    return yaml.safe_dump(both, sort_keys=False)


@contextlib.asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Consensus]:
    """The store of a deployment."""
    store = await open_consensus(settings.consensus)
    try:
        yield store
    finally:
        await store.close()


async def applied(store: Consensus, data: Path, catalog: str) -> Catalog:
    """Apply the text of a catalog; all that is declared then."""
    (data / "catalog.yaml").write_text(catalog)
    await desired.apply(store, load_catalog([data / "catalog.yaml"], environ=None))
    return await desired.load(store)


async def caught_up(
    data: Path, names: Sequence[str], spark: Callable[[], SparkSession] | None = None
) -> list[TaskRun]:
    """Run tasks at once in this process, from opening the store until all have caught up.

    Without `spark` they start one, should they need it. What a task fails with is raised.
    """
    settings = settings_in(data)
    async with opened(settings) as store:
        catalog = await desired.load(store)
        world = make_world(settings, store)
        if spark is not None:
            world = dataclasses.replace(world, spark=lambda _: spark())
        revision = await current_revision(store)
        specs = materializations(catalog, names)
        runs = await asyncio.gather(*(run_until(catalog, each, world, revision) for each in specs))
    for run in runs:
        if run.error is not None:
            raise run.error
    return runs


def check_documents(runs: Sequence[TaskRun], documents: int) -> None:
    """Refuse runs that have not read what there was, once."""
    if (read := sum(run.documents for run in runs)) != documents:
        raise Bug(f"of {documents:,} documents, {read:,} were read")
