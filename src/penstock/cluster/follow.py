"""Turns what a cluster's log says into tasks that run: starts, restarts and stops, and no more.

A dataflow id stands for one version of one object. An object without a runner gets one; a runner
whose id is not the object's any more is stopped, and another one takes its place when it has ended;
an object that is gone is stopped. All else goes on untouched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import TypeAlias

from penstock.cluster.runner import Runner
from penstock.cluster.state import ClusterMachine, ClusterState, Object, log_key
from penstock.consensus.statelog import follow
from penstock.consensus.store import Consensus
from penstock.model.domain import Domain
from penstock.runtime.introspection import TaskReport

_log = logging.getLogger("penstock.runtime")

MakeRunner: TypeAlias = Callable[[Object], Runner]


class Follower:
    """The runners of a cluster process. Used on one event loop."""

    def __init__(
        self,
        store: Consensus,
        cluster: str,
        make_runner: MakeRunner,
        domains: Collection[Domain],
        *,
        on_move: Callable[[ClusterState], None] = lambda _: None,
        machine: ClusterMachine,
    ) -> None:
        self._store = store
        self._key = log_key(cluster)
        self._make_runner = make_runner
        self._domains = domains
        self._on_move = on_move
        self._machine = machine
        self._runners: dict[str, Runner] = {}
        self._before: dict[str, Runner] = {}
        """The last runner of an object that was stopped, and may not have ended."""
        self._stopping = False

    @property
    def runners(self) -> list[Runner]:
        """One for each object that is to run."""
        return list(self._runners.values())

    @property
    def reports(self) -> list[TaskReport]:
        """What each task does."""
        return [runner.report for runner in self._runners.values()]

    async def run(self) -> None:
        """Follow the log until cancelled; runners go on."""
        moves = follow(self._store, self._key, self._machine)
        async with aclosing(moves) as states:  # type: ignore[type-var]
            async for followed in states:
                self._on_move(followed.replica.state)
                if not self._stopping:
                    self._move(followed.replica.state)

    def stop(self) -> None:
        """Stop all runners, each at its next transaction boundary; once more, at once."""
        again, self._stopping = self._stopping, True
        for runner in (*self._runners.values(), *self._before.values()):
            if again:
                runner.abort()
            else:
                runner.stop()

    async def ended(self) -> None:
        """Wait until all runners that were stopped have ended."""
        for runner in (*self._runners.values(), *self._before.values()):
            await runner.ended()

    def _move(self, state: ClusterState) -> None:
        objects = {id_: o for id_, o in state.objects.items() if o.domain in self._domains}
        for id_ in [id_ for id_ in self._runners if id_ not in objects]:
            _log.info("%s: is not wanted any more, and stops", self._runners[id_].wanted.name)
            self._end(id_).retire()
        for id_, wanted in objects.items():
            running = self._runners.get(id_)
            if running is None:
                how = f"starts ({wanted.kind}, dataflow {wanted.dataflow_id})"
            elif running.wanted.dataflow_id == wanted.dataflow_id:
                continue
            else:
                how = "has changed, and starts again"
                self._end(id_).stop()
            _log.info("%s: %s", wanted.name, how)
            self._runners[id_] = started = self._make_runner(wanted)
            started.start(after=self._before.get(id_))

    def _end(self, id_: str) -> Runner:
        self._before[id_] = runner = self._runners.pop(id_)
        return runner
