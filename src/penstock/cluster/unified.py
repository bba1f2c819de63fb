"""The process that runs what a cluster's log says, and takes what controllers say.

    penstock up                                  both domains, and a controller of its own
    penstock cluster                             both domains; controllers connect (`service.py`)
    penstock cluster --no-unified-runtime        a process for each domain (`split.py`)

All of them are this class: nothing of a domain is done differently anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from penstock.cluster.claim import check_claim, claim_cluster, this_process
from penstock.cluster.controller import Controller
from penstock.cluster.follow import Follower
from penstock.cluster.introspect import Row, Rows, WitnessedMachine, dataflows, frontiers, operators
from penstock.cluster.runner import OnProgress, Runner
from penstock.cluster.sessions import Sessions
from penstock.cluster.state import ClusterState, Object
from penstock.cluster.upkeep import Upkeep
from penstock.cluster.wanted import AppliedCatalog
from penstock.errors import PenstockError
from penstock.model.domain import Domain
from penstock.runtime.introspection import TaskReport
from penstock.runtime.reports import reporting
from penstock.runtime.session import World
from penstock.status import statuses

MAIN: Final = "main"
"""The cluster of a deployment that has no other."""

_ASK_S: Final = 1.5
"""Seconds that the store may take to say how far tasks are."""


class Unified:
    """Runs what the log says that the applied catalog wants. Used on one event loop."""

    def __init__(
        self,
        world: World,
        *,
        on_progress: OnProgress = lambda _, __: None,
        is_lent: Callable[[], bool] = lambda: False,
        controlled: bool = False,
        domains: Collection[Domain] = tuple(Domain),
        claim: int = 0,
    ) -> None:
        """`controlled`: other processes say what is to run. `claim`: made by another for this one.

        Sessions are served by the process that made the claim.
        """
        store = world.planner.journals.store
        self._store = store
        self._world = world
        self._domains = domains
        self._on_progress = on_progress
        self._is_lent = is_lent
        self._catalog = AppliedCatalog(store)
        self.sessions = Sessions(store, MAIN)
        self.sessions.claim = claim
        self._controller = (
            None
            if controlled
            else Controller(self._catalog, self.sessions.connect, holder=this_process())
        )
        self._machine = WitnessedMachine()
        self._follower = Follower(
            store, MAIN, self._runner, domains, on_move=self._observe, machine=self._machine
        )
        self._upkeep = Upkeep(world.planner)
        self._stop = asyncio.Event()

    @property
    def reports(self) -> list[TaskReport]:
        """What each task does."""
        return self._follower.reports

    def relations(self) -> dict[str, Rows]:
        """Return what gives the rows of each relation, without Spark."""
        return {
            **self._world.introspection.relations(),
            "dataflows": lambda: dataflows(self._follower.runners),
            "operators": lambda: operators(self._follower.runners),
            "frontiers": self._frontiers,
            "sessions": lambda: self._machine.sessions(self.sessions),
            "commands": self._machine.commands,
        }

    def stop(self) -> None:
        """End when transactions under way are done; asked for once more, at once."""
        self._stop.set()
        self._follower.stop()

    async def claim(self) -> None:
        """Take the cluster over from the process that has it, if any."""
        self.sessions.claim = await claim_cluster(self._store, MAIN)

    async def run(self) -> None:
        """Run until stopped; raises what no part of it can go on after, when tasks have ended."""
        if not self.sessions.claim:
            await self.claim()
        async with reporting(self._world.planner.journals.store, self._world.introspection):
            await self._run()

    async def _run(self) -> None:
        parts = [
            asyncio.create_task(self._catalog.follow(), name="catalog"),
            asyncio.create_task(self._follow(), name="cluster log"),
        ]
        if Domain.STORAGE in self._domains:  # once per cluster, however many processes it has
            parts.append(asyncio.create_task(self._upkeep.run(), name="upkeep"))
        if self._controller is not None:
            parts.append(asyncio.create_task(self._controller.run(), name="controller"))
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
                raise result

    async def _follow(self) -> None:
        if self._controller is not None:
            # What was to run when the process before this one ended may be out of date.
            await self._controller.initialized()
        await self._follower.run()

    async def _frontiers(self) -> list[Row]:
        try:
            async with asyncio.timeout(_ASK_S):
                found = await statuses(self._store, self._catalog.catalog)
        except (PenstockError, TimeoutError):  # the store is away, which others say
            return []
        return frontiers(self._follower.runners, found)

    def _observe(self, state: ClusterState) -> None:
        self.sessions.observe(state)
        check_claim(state, self.sessions.claim)

    def _runner(self, wanted: Object) -> Runner:
        return Runner(wanted, self._world, self._catalog, self._on_progress, self._is_lent)
