"""A deployment in a directory: catalogs of captures from files, which need no Spark."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from penstock.batch import open_world
from penstock.catalog import desired
from penstock.catalog.build import build_valid
from penstock.cluster.state import ClusterMachine, ClusterState, log_key
from penstock.cluster.unified import MAIN, Unified
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import load
from penstock.consensus.store import Consensus
from penstock.deployment import is_taken_over
from penstock.runtime.introspection import TaskReport
from penstock.runtime.session import World
from penstock.settings import Settings, sqlite_url

SOON_S = 60.0
"""Generous: what is waited for takes a second, on a machine that does nothing else."""

EVENTS: dict[str, Any] = {
    "key": ["/id"],
    "schema": {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer"}},
    },
}


def capture(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A capture of the files in the directory `name`, to a collection of its own."""
    config = {"path": f"data/{name}", "settle": 0}
    return {
        "endpoint": {"connector": {"image": "penstock/source-files", "config": config}},
        "bindings": [{"resource": {"path": "*.jsonl"}, "target": f"acme/{name}"}],
        "interval": "1s",
        **options,
    }


def catalog_of(*names: str, **changed: dict[str, Any]) -> dict[str, Any]:
    """A catalog with a capture of each name; `changed` has other options of some."""
    tasks = {f"acme/{name}-files": capture(name, changed.get(name, {})) for name in names}
    return {"collections": {f"acme/{name}": EVENTS for name in names}, "captures": tasks}


def write_documents(directory: Path, name: str, ids: Iterable[int]) -> None:
    """A new file for the capture of this name, which appears as a whole."""
    folder = directory / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{time.time_ns()}.tmp"
    new.write_text("".join(f'{{"id": {each}}}\n' for each in ids))
    new.rename(new.with_suffix(".jsonl"))


def _no_spark(_: int) -> NoReturn:
    raise AssertionError("Spark was started")


@dataclasses.dataclass
class Deployment:
    """Its stores, and the directory in which its catalog is."""

    directory: Path
    store: Consensus
    settings: Settings

    async def apply(self, catalog: dict[str, Any]) -> None:
        path = self.directory / "catalog.yaml"
        path.write_text(json.dumps(catalog))
        built = build_valid([path], environ=None, connectors=BUILTIN)
        await desired.apply(self.store, built.catalog)

    async def world(self) -> World:
        return dataclasses.replace(await open_world(self.settings, self.store), spark=_no_spark)

    async def state(self) -> ClusterState:
        return (await load(self.store, log_key(MAIN), ClusterMachine())).state

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Running]:
        """Within this, everything runs."""
        unified = Unified(await self.world(), is_lent=lambda: is_taken_over(self.settings))
        running = asyncio.create_task(unified.run())
        try:
            yield Running(unified, running)
        finally:
            unified.stop()
            unified.stop()
            await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error


@dataclasses.dataclass
class Running:
    """Tasks that run."""

    unified: Unified
    task: asyncio.Task[None]

    @property
    def tasks(self) -> list[str]:
        return [each.task for each in self.unified.reports]

    def of(self, task: str) -> TaskReport | None:
        return next((each for each in self.unified.reports if each.task == task), None)

    def doing(self, task: str) -> str | None:
        report = self.of(task)
        return None if report is None else report.doing

    async def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not is_so():
            if self.task.done():
                self.task.result()
            assert time.monotonic() < deadline, self.unified.reports
            await asyncio.sleep(0.02)

    async def until_read(self, task: str, documents: int) -> None:
        def has_read() -> bool:
            status = self.of(task)
            return status is not None and status.documents >= documents

        await self.until(has_read)


@contextlib.asynccontextmanager
async def deployed(directory: Path) -> AsyncIterator[Deployment]:
    """A new deployment, or the one that is there."""
    settings = Settings(
        data=directory / "data-store",
        consensus=sqlite_url(directory / "consensus.db"),
        blob=str(directory / "blobs"),
    )
    store = await open_consensus(settings.consensus)
    try:
        yield Deployment(directory, store, settings)
    finally:
        await store.close()
