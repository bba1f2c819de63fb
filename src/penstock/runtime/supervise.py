"""Keeps a task going: session after session, until it is done or cannot go on.

What ended a session decides what follows. A replay is followed by an ordinary session. An endpoint,
a store or a webhook that fails for now is tried again, later and later; each transaction
that gets through starts the counting anew. A leader that was fenced stops for good, since another
one runs the task. Everything else needs a person, and is raised. After a stop, no session follows,
whatever ended the last one (`runtime.control`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from penstock.consensus.store import ConsensusError
from penstock.errors import PenstockError, Unavailable
from penstock.runtime.awaited import IN_REPORT
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.control import Control, StoppedEarly
from penstock.runtime.requests import obey
from penstock.runtime.session import Ended, RunnableTask, World
from penstock.runtime.task_log import task_log
from penstock.runtime.triggers import TriggerFailed

_log = logging.getLogger("penstock.runtime")

_WAIT_S: Final = 0.5
_WAIT_S_MAX: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Number of sessions in a row that may fail without a transaction between them."""

    failures_max: int | None = None
    """None: any number."""
    unread_s_max: float | None = None
    """Seconds for which sessions may fail that read nothing at all; None: for ever. A source that
    does not answer may take minutes to be given up."""

    def is_over(self, failures: int, unread_s: float) -> bool:
        """True if no further session is to follow so many failures, in so long."""
        too_long = self.unread_s_max is not None and unread_s > self.unread_s_max
        return failures == self.failures_max or too_long


async def supervise(
    task: RunnableTask,
    world: World,
    control: Control,
    patience: Patience = Patience(),
) -> None:
    """Run sessions until one stops as asked; raises what no further session would mend.

    A stop that could not wait for the end of a session is an end as well.
    """
    try:
        await control.stoppable(_supervised(task, world, control, patience))
    except StoppedEarly:
        if not control.nothing_to_finish:
            _log.warning("%s: stopped; its open transaction is run again the next time", task.name)


async def _supervised(
    task: RunnableTask, world: World, control: Control, patience: Patience
) -> None:
    failures = 0
    loop = asyncio.get_running_loop()
    reading_at = loop.time()
    async with _kept_log(task, world), _obedient(task, world, control):
        while not control.is_stopping():
            control.nothing_to_finish = True
            control.activity.starts()
            committed = control.transactions
            try:
                control.begins_anew = False
                ended = await task.run_session(world, control)
                if ended is Ended.STOPPED and not control.begins_anew:
                    return
                if ended is Ended.REPLAYED:
                    _log.info("%s: replayed the transaction that was open", task.name)
                failures, reading_at = 0, loop.time()
                continue
            except PenstockError as error:
                if control.is_stopping() and is_transient(error):
                    _log.warning("%s: %s; not tried again", task.name, one_line(error))
                    return
                failures = failures + 1 if control.transactions == committed else 1
                if control.activity.has_read:
                    reading_at = loop.time()
                if not is_transient(error) or patience.is_over(failures, loop.time() - reading_at):
                    raise
                wait_s = min(_WAIT_S * 2 ** (failures - 1), _WAIT_S_MAX)
                wait_s *= random.uniform(0.5, 1)  # noqa: S311 - spreads tasks
                if isinstance(error, ConnectorError):
                    wait_s = max(wait_s, error.retry_after_s)
                again = "%s: %s; trying again in %.1f s"
                _log.warning(again, task.name, one_line(error), wait_s, extra={IN_REPORT: True})
                control.activity.fails(error, count=failures, retry_in_s=wait_s)
            control.nothing_to_finish = True
            await control.pause(wait_s)


def _kept_log(task: RunnableTask, world: World) -> contextlib.AbstractAsyncContextManager[None]:
    return task_log(
        world.planner,
        kind=task.kind,
        task=task.name,
        level=task.log_level,
        now=world.now,
        entropy=world.entropy,
    )


@contextlib.asynccontextmanager
async def _obedient(task: RunnableTask, world: World, control: Control) -> AsyncIterator[None]:
    """Within this, the task does what other processes ask of it."""
    store = world.planner.journals.store
    requests = asyncio.create_task(obey(store, task.name, control), name="requests")
    try:
        yield
    finally:
        requests.cancel()
        with contextlib.suppress(asyncio.CancelledError, PenstockError):
            await requests


def is_transient(error: BaseException) -> bool:
    """True if the same thing may work in a while, without anybody doing anything here."""
    match error:
        case ConnectorError(transient=transient):
            return transient
        case ConsensusError(kind=kind):
            return not kind.final
        case Unavailable() | TriggerFailed():
            return True
        case _:
            return False


def one_line(error: PenstockError) -> str:
    """Return what and why, for a log."""
    return f"{error.what}{f' ({error.why})' if error.why else ''}"
