"""Runs one object: builds its task from the applied catalog, keeps it going, knows how it is.

A runner never gives up and never ends another. What may mend itself is tried again by the task's
own supervision (`runtime.supervise`); what needs a person is tried again here, less and less often,
since what the person does may happen elsewhere: a permission, a file, a table. If another
process leads the task, it is taken back when that process has written nothing for a while. Trying
again is a new epoch of the same dataflow, and never a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from penstock.batch import keep_running, what_went_wrong
from penstock.cluster.state import Object, Put
from penstock.cluster.wanted import AppliedCatalog
from penstock.consensus.statelog import Fenced
from penstock.errors import PenstockError
from penstock.runtime.control import Control, StoppedEarly, TransactionSummary
from penstock.runtime.kinds import TaskSpec
from penstock.runtime.recovery import recovery_key
from penstock.runtime.session import World

_log = logging.getLogger("penstock.runtime")

AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 60.0
"""Seconds until a task that has failed is tried again: at first, and at most."""

QUIET_S: Final = 30.0
"""Seconds in which another leader writes nothing, before its task is taken back."""

RATE_S: Final = 10.0
"""Seconds over which a rate is the average."""

_MATCH_S: Final = 2.0
"""Seconds that the catalog may take to have what the log says that it has."""


class Condition(enum.Enum):
    """How a task is."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    RETRYING = "retrying"
    FAILED = "failed"
    ELSEWHERE = "elsewhere"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class TaskStatus:
    """How a task is, and what it has done since this process runs it."""

    kind: str
    task: str
    dataflow_id: int
    condition: Condition = Condition.STARTING
    transactions: int = 0
    documents: int = 0
    bytes: int = 0
    committed_at: float | None = None
    """Unix time of the last commit."""
    error: PenstockError | None = None
    """The last one, until a transaction gets through."""
    reason: str | None = None
    """Why it waits, or is not running."""
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=1_000))

    def add(self, progress: TransactionSummary, now: float) -> None:
        """Count a transaction."""
        self.transactions += 1
        self.documents += progress.documents
        self.bytes += progress.bytes
        self.committed_at = now
        self.error = self.reason = None
        self.recent.append((now, progress.documents))

    def rate(self, now: float) -> float:
        """Documents per second, lately."""
        return sum(count for at, count in self.recent if at > now - RATE_S) / RATE_S


OnProgress: TypeAlias = Callable[[TaskStatus, TransactionSummary], None]


class Runner:
    """One object that runs, or tries to. Used on one event loop."""

    def __init__(
        self,
        wanted: Object,
        world: World,
        catalog: AppliedCatalog,
        on_progress: OnProgress = lambda _, __: None,
    ) -> None:
        self.wanted = wanted
        self._world = world
        self._catalog = catalog
        self._on_progress = on_progress
        self._control: Control | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._status = TaskStatus(
            kind=wanted.kind, task=wanted.name, dataflow_id=wanted.dataflow_id
        )

    @property
    def status(self) -> TaskStatus:
        """How it is now."""
        status, control = self._status, self._control
        if control is not None and not self._stop.is_set():
            if (awaited := control.waits.longest) is not None:
                self._is(Condition.WAITING, awaited)
            elif not control.nothing_to_finish:
                self._is(Condition.RUNNING)
            elif status.condition is Condition.WAITING:
                self._is(Condition.STARTING)
        return status

    def start(self, *, after: Runner | None = None) -> None:
        """Run until stopped; `after` must have ended first, since it runs the same task."""
        if after is not None:
            before = after.status
            self._status.transactions, self._status.documents = (
                before.transactions,
                before.documents,
            )
            self._status.bytes, self._status.committed_at = before.bytes, before.committed_at
        self._task = asyncio.create_task(self._run(after), name=f"runner of {self.wanted.id}")

    def stop(self) -> None:
        """End at the next transaction boundary; asked for once more, at once."""
        self._is(Condition.STOPPING)
        self._stop.set()
        if self._control is not None:
            self._control.stop()

    async def ended(self) -> None:
        """Wait until it runs no more."""
        if self._task is not None:
            await asyncio.wait([self._task])

    # ----------------------------------------------------------------------------------- running

    async def _run(self, after: Runner | None) -> None:
        try:
            if after is not None:
                await after.ended()
            failures = 0
            while not self._stop.is_set():
                spec = await self._spec()
                if spec is None:
                    await self._wait_for_catalog()
                    continue
                committed = self._status.transactions
                error = await self._attempt(spec)
                if error is None:
                    return
                failures = 1 if self._status.transactions > committed else failures + 1
                await self._pause(error, failures)
        except Exception as error:  # one task must not end the others
            self._status.error = PenstockError(f"an unexpected error: {error}")
            self._is(Condition.FAILED)
            _log.exception("%s: an unexpected error", self.wanted.name)
        finally:
            if self._stop.is_set():
                self._is(Condition.STOPPED)

    async def _attempt(self, spec: TaskSpec) -> PenstockError | None:
        """Run the task until it is stopped, or return what it cannot go on with."""
        self._control = control = Control(on_progress=self._progressed, on_failure=self._retries)
        self._is(Condition.STARTING)
        catalog, dataflow_id = self._catalog.catalog, self.wanted.dataflow_id
        try:
            await keep_running(catalog, spec, self._world, control, dataflow_id=dataflow_id)
        except StoppedEarly:
            pass
        except Exception as error:
            return what_went_wrong(spec, error)
        finally:
            self._control = None
        self._stop.set()
        return None

    async def _spec(self) -> TaskSpec | None:
        """The task as the catalog has it: as the log says, or as it is by now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MATCH_S):
                while (found := self._found()) is None or found[0].digest != self.wanted.digest:
                    await self._catalog.after(self._catalog.version)
        found = self._found()
        return None if found is None else found[1]

    def _found(self) -> tuple[Put, TaskSpec] | None:
        return self._catalog.wanted.get(self.wanted.id)

    async def _wait_for_catalog(self) -> None:
        self._is(Condition.WAITING, "the catalog to name it")
        await self._unless_stopped(self._catalog.after(self._catalog.version))

    async def _pause(self, error: PenstockError, failures: int) -> None:
        """Wait until it may be worth trying again."""
        self._status.error = error
        if isinstance(error, Fenced):
            self._is(Condition.ELSEWHERE, "another process runs it")
            await self._unless_stopped(self._quiet())
            return
        wait_s = min(AGAIN_S * 2 ** (failures - 1), AGAIN_S_MAX)
        self._is(Condition.FAILED, f"again in {wait_s:.0f} s")
        _log.warning("%s: failed, and is tried again in %.0f s", self.wanted.name, wait_s)
        await self._unless_stopped(asyncio.sleep(wait_s))

    async def _quiet(self) -> None:
        """Wait until the task's log stands still."""
        store, key = self._world.planner.journals.store, recovery_key(self.wanted.name)
        seen = None
        while True:
            with contextlib.suppress(PenstockError):  # a store that is away stands still
                head = await store.head(key, fresh=True)
                if seen is not None and head == seen:
                    return
                seen = head
            await asyncio.sleep(QUIET_S)

    async def _unless_stopped(self, wait: Coroutine[Any, Any, object]) -> None:
        """Wait, but not longer than until a stop."""
        waiting = [asyncio.create_task(wait), asyncio.create_task(self._stop.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    # ------------------------------------------------------------------------------------ status

    def _is(self, condition: Condition, reason: str | None = None) -> None:
        if not self._stop.is_set() or condition is Condition.STOPPED:
            self._status.condition, self._status.reason = condition, reason

    def _progressed(self, progress: TransactionSummary) -> None:
        self._status.add(progress, time.time())
        self._on_progress(self._status, progress)

    def _retries(self, error: PenstockError, wait_s: float) -> None:
        self._status.error = error
        self._is(Condition.RETRYING, f"again in {wait_s:.0f} s" if wait_s >= 1 else None)
