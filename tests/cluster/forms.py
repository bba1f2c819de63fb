"""Clusters in both forms, without Spark: one process, and a process for each domain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.cluster.controller import Controller
from penstock.cluster.remote import RemoteCluster
from penstock.cluster.service import ClusterService, serving
from penstock.cluster.sessions import (
    Closed,
    CloseReason,
    Done,
    Hello,
    InitializationComplete,
    Message,
    Opened,
    Response,
)
from penstock.cluster.split import Split
from penstock.cluster.unified import Unified
from penstock.cluster.wanted import AppliedCatalog
from penstock.model.domain import Domain
from penstock.servicekit.children import Child
from penstock.servicekit.rpc.address import ServiceAddress
from support.deployments import SOON_S, Deployment, catalog_of

HALF = Path(__file__).with_name("half.py")

FORMS = ("unified", "split")

R = TypeVar("R", bound=Response)


@dataclasses.dataclass
class Cluster:
    """A cluster that runs, and where controllers reach it."""

    host: Unified | Split
    task: asyncio.Task[None]
    url: str

    async def rows(self, relation: str) -> list[dict[str, Any]]:
        found = self.host.relations()[relation]()
        return await found if inspect.isawaitable(found) else found

    async def tasks(self) -> list[str]:
        return sorted(row["task"] for row in await self.rows("dataflows"))

    async def documents(self, task: str) -> int:
        rows = await self.rows("tasks")
        return sum(row.get("documents", 0) for row in rows if row["task"] == task)

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + SOON_S
        while not await is_so():
            if self.task.done():
                self.task.result()
            assert time.monotonic() < deadline, await self.rows("tasks")
            await asyncio.sleep(0.05)

    async def until_read(self, task: str, documents: int) -> None:
        async def has_read() -> bool:
            return await self.documents(task) >= documents

        await self.until(has_read)

    async def until_runs(self, *tasks: str) -> None:
        async def run() -> bool:
            return await self.tasks() == sorted(tasks)

        await self.until(run)


def split_of(here: Deployment) -> Split:
    path = os.pathsep.join(sys.path)

    def half(domain: Domain, claim: int) -> Child:
        arguments = [str(HALF), str(here.directory), domain.value, str(claim)]
        env = {**os.environ, "PYTHONPATH": path}
        return Child(f"the {domain} domain", [sys.executable, *arguments], env)

    return Split(here.store, half)


@contextlib.asynccontextmanager
async def cluster_of(
    form: str, here: Deployment, listen: str = "127.0.0.1:0"
) -> AsyncIterator[Cluster]:
    """Within this, a cluster of this form runs, and takes what controllers say."""
    host = Unified(await here.world(), controlled=True) if form == "unified" else split_of(here)
    async with serving(ClusterService(host.sessions), listen=listen, before=host.claim) as url:
        task = asyncio.create_task(host.run())
        try:
            yield Cluster(host, task, url)
        finally:
            host.stop()
            host.stop()
            await asyncio.wait([task])
            if isinstance(host, Split):
                assert all(child.pid is None for child in host.children.values())


@contextlib.asynccontextmanager
async def controller_of(here: Deployment, url: str) -> AsyncIterator[Controller]:
    """Within this, a controller says what the applied catalog wants."""
    catalog = AppliedCatalog(here.store)
    remote = RemoteCluster(ServiceAddress.parse(url))
    made = Controller(catalog, remote.connect, holder="a controller")
    tasks = [asyncio.create_task(catalog.follow()), asyncio.create_task(made.run())]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await remote.close()


class Remote:
    """A controller's side of one stream, for tests that say what they like."""

    def __init__(self, url: str, *said: Message) -> None:
        self.cluster = RemoteCluster(ServiceAddress.parse(url))
        self.session = self.cluster.connect()
        self._responses = self.session.responses()
        self._first: Response | None = None
        self.say(*said)

    def say(self, *said: Message) -> None:
        for message in said:
            self.session.receive(message)

    async def hears(self, kind: type[R]) -> R:
        """The next answer, which is of this kind."""
        async with asyncio.timeout(SOON_S):
            response = await anext(self._responses)
        assert isinstance(response, kind), response
        self._first = self._first or response
        return response

    async def heard(self) -> None:
        """Wait until it was answered once."""
        if self._first is None:
            await self.hears(Response)

    async def serves(self) -> Done:
        await self.hears(Opened)
        done = await self.hears(Done)
        assert done.initialized
        return done

    async def closed(self) -> Closed:
        async with asyncio.timeout(SOON_S):
            while not isinstance(response := await anext(self._responses), Closed):
                pass
        return response

    async def leaves(self) -> None:
        self.session.close(CloseReason.LEFT)
        await self.cluster.close()


def first_words(domain: Domain, nonce: str, *said: Message) -> list[Message]:
    """Everything that a controller says when it connects."""
    hello = Hello(domain=domain, nonce=nonce.encode().ljust(16, b"."), holder=f"test {nonce}")
    return [hello, *said, InitializationComplete()]


def with_derivations(*names: str, of: str) -> dict[str, Any]:
    """Captures of these names, and a derivation of what each of those in `of` captures."""
    catalog = catalog_of(*names)
    for name in of.split():
        catalog["collections"][f"acme/{name}-derived"] = {
            **catalog["collections"][f"acme/{name}"],
            "derive": {
                "using": {"sqlite": {}},
                "transforms": [
                    {
                        "name": "all",
                        "source": f"acme/{name}",
                        "shuffle": {"key": ["/id"]},
                        "lambda": "SELECT $id AS id;",
                    }
                ],
            },
        }
    return catalog
