"""A process for each domain: `penstock cluster --no-unified-runtime`.

The parent serves sessions, which write to the log, and runs no task. Its children follow the same
log, and each runs the tasks of its domain, with a Spark of its own: ids and what is to run are
those of a unified cluster, and changing from one form to the other is a restart. One child that
dies, or runs out of memory, does not stop the other, and is started again.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, Final, NoReturn

from penstock.cluster.claim import check_claim, claim_cluster
from penstock.cluster.follow import Follower
from penstock.cluster.introspect import OF_TASKS, Row, Rows, WitnessedMachine
from penstock.cluster.sessions import Sessions
from penstock.cluster.state import ClusterState, Object
from penstock.cluster.unified import MAIN
from penstock.consensus.store import Consensus
from penstock.errors import Bug
from penstock.model.domain import Domain
from penstock.runtime.introspection import Introspection
from penstock.servicekit.children import Child

_ASK_S: Final = 2.0
"""Seconds that a child may take to say what it does."""


class Split:
    """The parent of both processes. Used on one event loop."""

    def __init__(self, store: Consensus, make_child: Callable[[Domain, int], Child]) -> None:
        """`make_child` gets the number of the claim, which is its child's as well.

        The last word of the first line that a child says is its admin address.
        """
        self.sessions = Sessions(store, MAIN)
        self.children: Mapping[Domain, Child] = {}
        self._store = store
        self._make_child = make_child
        self._machine = WitnessedMachine()
        self._stop = asyncio.Event()

    async def claim(self) -> None:
        """Take the cluster over from the process that has it, if any."""
        self.sessions.claim = await claim_cluster(self._store, MAIN)

    def stop(self) -> None:
        """End when transactions under way are done; asked for once more, at once."""
        self._stop.set()
        for child in self.children.values():
            child.signal()

    async def run(self) -> None:
        """Run until stopped; raises what it cannot go on after, when both have ended."""
        self.children = {each: self._make_child(each, self.sessions.claim) for each in Domain}
        follower = Follower(
            self._store, MAIN, _runs_nothing, (), on_move=self._observe, machine=self._machine
        )
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(follower.run(), name="cluster log"),
            asyncio.create_task(self._keep(), name="processes"),
            asyncio.create_task(self._stop.wait(), name="stop"),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            results = await asyncio.gather(*waits, return_exceptions=True)
            if not self._stop.is_set():
                self.stop()
            await asyncio.gather(*(child.stop() for child in self.children.values()))
        for result in results:
            if isinstance(result, Exception):
                raise result

    def relations(self) -> dict[str, Rows]:
        """Return what gives the rows of each relation: of both processes, each with its domain.

        What was said is known here.
        """
        asked = (*Introspection(time.time).relations(), *OF_TASKS)
        return {
            **{name: partial(self._rows, name) for name in asked},
            "sessions": lambda: self._machine.sessions(self.sessions),
            "commands": self._machine.commands,
        }

    async def _keep(self) -> None:
        await asyncio.gather(*(child.start() for child in self.children.values()))
        await asyncio.gather(*(child.keep() for child in self.children.values()))

    async def _rows(self, relation: str) -> list[Row]:
        asked = [
            asyncio.to_thread(_ask, child.said.rpartition(" ")[2], relation, domain)
            for domain, child in self.children.items()
            if child.said
        ]
        both = zip_longest(*await asyncio.gather(*asked))  # in turn: an answer may be cut short
        return [row for rows in both for row in rows if row is not None]

    def _observe(self, state: ClusterState) -> None:
        self.sessions.observe(state)
        check_claim(state, self.sessions.claim)


def _ask(admin: str, relation: str, domain: Domain) -> list[Row]:
    """The rows of a child; none of one that does not answer: it is being started again."""
    url = f"{admin}/introspection/v1/{relation}"
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:  # noqa: S310 - of our child
            rows: list[Row] = json.load(answer)["rows"]
    except (OSError, ValueError):
        return []
    return [{"runtime": domain.value, **row} for row in rows]


def _runs_nothing(wanted: Object) -> NoReturn:
    raise Bug(f"{wanted.id} is not of this process")
