"""A process for each domain: the same log, the same ids, one introspection; without Spark."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster import split as split_module
from penstock.cluster import unified as unified_module
from penstock.cluster.claim import ClusterTaken, claim_cluster
from penstock.cluster.controller import Controller
from penstock.cluster.remote import RemoteCluster
from penstock.cluster.service import ClusterService, serving
from penstock.cluster.split import Split
from penstock.cluster.unified import MAIN
from penstock.cluster.wanted import AppliedCatalog
from penstock.model.domain import Domain
from penstock.servicekit.children import Child
from penstock.servicekit.rpc.address import ServiceAddress
from support.deployments import SOON_S, Deployment, catalog_of, deployed, write_documents

HALF = Path(__file__).with_name("half.py")


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    async with deployed(tmp_path) as deployment:
        yield deployment


def with_derivation(*names: str) -> dict[str, Any]:
    """Captures, and a derivation of what the first of them captures."""
    catalog = catalog_of(*names)
    catalog["collections"]["acme/derived"] = {
        **catalog["collections"][f"acme/{names[0]}"],
        "derive": {
            "using": {"sqlite": {}},
            "transforms": [
                {
                    "name": "all",
                    "source": f"acme/{names[0]}",
                    "shuffle": {"key": ["/id"]},
                    "lambda": "SELECT $id AS id;",
                }
            ],
        },
    }
    return catalog


@contextlib.asynccontextmanager
async def running(here: Deployment) -> AsyncIterator[tuple[Split, asyncio.Task[None], str]]:
    path = os.pathsep.join(sys.path)

    def half(domain: Domain, claim: int) -> Child:
        arguments = [str(HALF), str(here.directory), domain.value, str(claim)]
        env = {**os.environ, "PYTHONPATH": path}
        return Child(f"the {domain} domain", [sys.executable, *arguments], env)

    split = Split(here.store, half)
    async with serving(ClusterService(split.sessions), before=split.claim) as url:
        task = asyncio.create_task(split.run())
        try:
            yield split, task, url
        finally:
            split.stop()
            split.stop()
            await asyncio.wait([task])
            assert all(child.pid is None for child in split.children.values())


@contextlib.asynccontextmanager
async def controller(here: Deployment, url: str) -> AsyncIterator[None]:
    catalog = AppliedCatalog(here.store)
    remote = RemoteCluster(ServiceAddress.parse(url))
    made = Controller(catalog, remote.connect, holder="a controller")
    tasks = [asyncio.create_task(catalog.follow()), asyncio.create_task(made.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await remote.close()


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + SOON_S
    while not await is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def documents(split: Split, task: str) -> int:
    rows = await split.relations()["tasks"]()
    return sum(row.get("documents", 0) for row in rows if row["task"] == task)


async def test_t01_t40_both_processes_run_one_log_and_are_shown_as_one(here: Deployment) -> None:
    for name in ("a", "b"):
        write_documents(here.directory, name, range(3))
    await here.apply(with_derivation("a", "b"))
    async with running(here) as (split, task, url):
        async with controller(here, url):

            async def all_run() -> bool:
                assert not task.done(), task.exception()
                rows = await split.relations()["tasks"]()
                return len(rows) == 3 and await documents(split, "acme/a-files") == 3

            await until(all_run)
        rows = await split.relations()["tasks"]()
        assert {(row["task"], row["runtime"]) for row in rows} == {
            ("acme/a-files", "storage"),
            ("acme/b-files", "storage"),
            ("acme/derived", "compute"),
        }
        ids = [each.dataflow_id for each in (await here.state()).objects.values()]
        assert sorted(ids) == [1, 2, 3]

        killed = split.children[Domain.COMPUTE].pid
        other = split.children[Domain.STORAGE].pid
        assert killed is not None
        before = await here.state()
        os.kill(killed, signal.SIGKILL)
        write_documents(here.directory, "a", range(3, 5))

        async def is_back() -> bool:
            rows = await split.relations()["tasks"]()
            return {row["runtime"] for row in rows} == {"storage", "compute"} and (
                await documents(split, "acme/a-files") == 5
            )

        await until(is_back)
        assert split.children[Domain.STORAGE].pid == other
        assert split.children[Domain.COMPUTE].pid not in (killed, None)
        assert await here.state() == before  # T07: coming back gives no id


async def test_a_second_cluster_ends_both_processes(here: Deployment) -> None:
    await here.apply(catalog_of("a"))
    async with running(here) as (split, task, _):

        async def both_run() -> bool:
            assert not task.done(), task.exception()
            return len(split.children) == 2 and all(c.said for c in split.children.values())

        await until(both_run)
        await claim_cluster(here.store, MAIN)
        with pytest.raises(ClusterTaken):
            await asyncio.wait_for(task, SOON_S)


def test_t47_both_forms_run_the_same_class() -> None:
    """No logic of a domain is in the parent, and what runs a domain stays small."""
    assert "Runner(" not in inspect.getsource(split_module)
    assert len(inspect.getsource(unified_module).splitlines()) < 300
