"""Runs one object: builds its task from the applied catalog, keeps it going, knows how it is.

A runner never gives up and never ends another. What may mend itself is tried again by the task's
own supervision (`runtime.supervise`); what needs a person is tried again here, less and less often,
since what the person does may happen elsewhere: a permission, a file, a table. A task that another
process leads is taken back when that process has ended, or has written nothing for a while. Trying
again is a new epoch of the same dataflow, and never a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from penstock.batch import keep_running, what_went_wrong
from penstock.cluster.state import Object
from penstock.cluster.wanted import AppliedCatalog
from penstock.consensus.statelog import Fenced
from penstock.errors import PenstockError, UserError
from penstock.runtime.control import Control, StoppedEarly, TransactionSummary
from penstock.runtime.introspection import Activity, TaskReport
from penstock.runtime.kinds import TaskSpec
from penstock.runtime.leadership import IfBusy, Watch
from penstock.runtime.recovery import log_name
from penstock.runtime.session import World

_log = logging.getLogger("penstock.runtime")

AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 60.0
"""Seconds until a task that has failed is tried again: at first, and at most."""

QUIET_S: Final = 10.0
"""Seconds since another leader has written anything, before its task is taken back."""

_LOOK_S: Final = 0.5

_MATCH_S: Final = 2.0
"""Seconds that the catalog may take to have what the log says that it has."""


OnProgress: TypeAlias = Callable[[TaskReport, TransactionSummary], None]


class Runner:
    """One object that runs, or tries to. Used on one event loop."""

    def __init__(
        self,
        wanted: Object,
        world: World,
        catalog: AppliedCatalog,
        on_progress: OnProgress = lambda _, __: None,
        is_lent: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_lent` is true while a command of this machine may run the task instead."""
        self.wanted = wanted
        self._world = world
        self._catalog = catalog
        self._on_progress = on_progress
        self._is_lent = is_lent
        self._retired = False
        self._control: Control | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def _activity(self) -> Activity:
        return self._world.introspection.task(self.wanted.kind, self.wanted.name)

    @property
    def report(self) -> TaskReport:
        """What it does now, and did since this process runs it."""
        return self._activity.report()

    @property
    def spec(self) -> TaskSpec | None:
        """The task as the catalog has it now; None if it has none any more."""
        found = self._catalog.wanted.get(self.wanted.id)
        return None if found is None else found[1]

    def start(self, *, after: Runner | None = None) -> None:
        """Run until stopped; `after` must have ended first, since it runs the same task."""
        self._task = asyncio.create_task(self._run(after), name=f"runner of {self.wanted.id}")

    def stop(self) -> None:
        """End at the next transaction boundary."""
        asked_before = self._stop.is_set()
        self._stop.set()
        if self._control is not None and not asked_before:
            self._control.stop()

    def abort(self) -> None:
        """End at once."""
        self._stop.set()
        if self._control is not None:
            self._control.abort()

    def retire(self) -> None:
        """End for good: the task is not of this process any more."""
        self._retired = True
        self.stop()

    async def ended(self) -> None:
        """Wait until it runs no more."""
        if self._task is not None:
            await asyncio.wait([self._task])

    # ----------------------------------------------------------------------------------- running

    async def _run(self, after: Runner | None) -> None:
        if after is not None:
            await after.ended()
        self._activity.is_dataflow(self.wanted.dataflow_id)
        self._activity.starts()
        failures = 0
        try:
            while not self._stop.is_set():
                spec = await self._current()
                if spec is None:  # deleted, and the log has not heard of it yet: it will
                    await self._unless_stopped(self._catalog.after(self._catalog.version))
                    continue
                committed = self.report.transactions
                error = await self._attempt(spec)
                if error is not None and not self._stop.is_set():
                    failures = 1 if self.report.transactions > committed else failures + 1
                    await self._pause(error, failures)
        except Exception as error:  # a mistake of ours in one task must not end the others
            self._activity.fails(error, retry_in_s=None)
            _log.exception("%s: an unexpected error, and it is not run any more", self.wanted.name)
        finally:
            self._activity.ends()
            if self._retired:
                self._world.introspection.forget(self.wanted.kind, self.wanted.name)

    async def _attempt(self, spec: TaskSpec) -> PenstockError | None:
        """Run the task until it is stopped, or return what it cannot go on with."""
        control = Control(
            if_busy=IfBusy.WAIT,
            takes_from_up=True,
            on_progress=self._progressed,
            activity=self._activity,
        )
        catalog, dataflow_id = self._catalog.catalog, self.wanted.dataflow_id
        self._control = control
        try:
            await keep_running(catalog, spec, self._world, control, dataflow_id=dataflow_id)
        except StoppedEarly:
            return None
        except Exception as error:
            return what_went_wrong(spec, error)
        finally:
            self._control = None
        return None

    async def _current(self) -> TaskSpec | None:
        """The task as the catalog has it: as the log says, or as it is by now."""
        await self._unless_stopped(self._matching())
        return self.spec

    async def _matching(self) -> None:
        """Wait until the catalog has what the log says that it has, for a moment at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MATCH_S):
                while self._digest() != self.wanted.digest:
                    await self._catalog.after(self._catalog.version)

    def _digest(self) -> str | None:
        found = self._catalog.wanted.get(self.wanted.id)
        return None if found is None else found[0].digest

    async def _pause(self, error: PenstockError, failures: int) -> None:
        """Wait until it may be worth trying again."""
        if isinstance(error, Fenced):
            elsewhere = UserError(
                "another process runs this task",
                why=error.what,
                fix="end that one, if it is not wanted: the task is taken back when it is quiet",
            )
            self._activity.fails(elsewhere, count=failures, retry_in_s=QUIET_S)
            await self._unless_stopped(self._quiet())
            return
        wait_s = min(AGAIN_S * 2 ** (failures - 1), AGAIN_S_MAX)
        self._activity.fails(error, count=failures, retry_in_s=None)  # it needs a person
        _log.warning("%s: failed, and is retried in %.0f s", self.wanted.name, wait_s)
        await self._unless_stopped(asyncio.sleep(wait_s))

    async def _quiet(self) -> None:
        """Wait until the one that runs the task here has ended, or is quiet elsewhere."""
        store = self._world.planner.journals.store
        watch = Watch(store, log_name(self.wanted.kind, self.wanted.name))
        lent = False
        while True:
            if self._is_lent():
                lent = True
            elif lent:
                return
            else:
                with contextlib.suppress(PenstockError):  # the store is away: so is everybody
                    if await watch.is_over(self._world.introspection.id, QUIET_S):
                        return
            await asyncio.sleep(_LOOK_S)

    async def _unless_stopped(self, wait: Coroutine[Any, Any, object]) -> None:
        """Wait, but not longer than until a stop."""
        waiting = [asyncio.create_task(wait), asyncio.create_task(self._stop.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    def _progressed(self, progress: TransactionSummary) -> None:
        self._on_progress(self.report, progress)
