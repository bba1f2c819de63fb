"""One process that runs both domains, and tells itself what to run: `penstock up`.

It is a cluster and its controller, with nothing between them but sessions.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

from penstock.cluster.controller import Controller
from penstock.cluster.follow import Follower
from penstock.cluster.runner import OnProgress, Runner
from penstock.cluster.sessions import Sessions
from penstock.cluster.state import Object
from penstock.cluster.upkeep import Upkeep
from penstock.cluster.wanted import AppliedCatalog
from penstock.runtime.introspection import TaskReport
from penstock.runtime.reports import reporting
from penstock.runtime.session import World

MAIN: Final = "main"
"""The cluster of a deployment that has no other."""


class Unified:
    """Runs everything of the applied catalog. Used on one event loop."""

    def __init__(
        self,
        world: World,
        *,
        on_progress: OnProgress = lambda _, __: None,
        is_lent: Callable[[], bool] = lambda: False,
    ) -> None:
        store = world.planner.journals.store
        self._world = world
        self._on_progress = on_progress
        self._is_lent = is_lent
        self._catalog = AppliedCatalog(store)
        self._sessions = Sessions(store, MAIN)
        self._controller = Controller(self._catalog, self._sessions.connect, holder=_this_process())
        self._follower = Follower(store, MAIN, self._runner, on_move=self._sessions.observe)
        self._upkeep = Upkeep(world.planner)
        self._stop = asyncio.Event()

    @property
    def reports(self) -> list[TaskReport]:
        """What each task does."""
        return self._follower.reports

    def stop(self) -> None:
        """End when transactions under way are done; asked for once more, at once."""
        self._stop.set()
        self._follower.stop()

    async def run(self) -> None:
        """Run until stopped; raises what no part of it can go on after, when tasks have ended."""
        async with reporting(self._world.planner.journals.store, self._world.introspection):
            await self._run()

    async def _run(self) -> None:
        parts = [
            asyncio.create_task(self._catalog.follow(), name="catalog"),
            asyncio.create_task(self._controller.run(), name="controller"),
            asyncio.create_task(self._follow(), name="cluster log"),
            asyncio.create_task(self._upkeep.run(), name="upkeep"),
        ]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*parts, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                self.stop()
            await self._follower.ended()
        finally:
            for part in (*parts, stopped):
                part.cancel()
            results = await asyncio.gather(*parts, stopped, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise _first(result)

    async def _follow(self) -> None:
        # What was to run when the process before this one ended may be out of date.
        await self._controller.initialized()
        await self._follower.run()

    def _runner(self, wanted: Object) -> Runner:
        return Runner(wanted, self._world, self._catalog, self._on_progress, self._is_lent)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _first(error: Exception) -> Exception:
    """Return the first error of a group of them."""
    found: BaseException = error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, Exception) else error
