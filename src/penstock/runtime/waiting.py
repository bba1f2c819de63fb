"""Reports what a task waits for, and runs calls that block but can be interrupted.

A task that does nothing because another process holds a lock looks like one that hangs. So every
wait is registered here, with what it is for (`runtime.awaited`); after `REPORT_S` seconds the log
says so, and says it again later and later. A stop does not wait for a wait that was reported
(`runtime.control`), and `penstock status` shows it.

Calls of a connector block. They run in threads that do not keep the process alive, and if the
caller is cancelled the connector is asked to interrupt them: afterwards the thread has ended, or is
left behind after a moment. Nothing depends on how such a call ended: a session that is over is
followed by one that finds out.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from penstock.runtime.awaited import IN_REPORT, Awaited, Wait

_log = logging.getLogger("penstock.runtime")

REPORT_S: Final = 2.0
"""Seconds that a wait may last before the log says what it is for."""

INTERRUPT_S: Final = 3.0
"""Seconds that a call may take to end after it was interrupted, before it is left behind."""

_AGAIN_S: Final = 0.2

T = TypeVar("T")

Look = Callable[[], Awaited | None]
"""Finds out what is waited for, if anything is; blocks, and may be called in any thread."""


def blocked(waits_for: Callable[[], str | None], on: Awaited) -> Look:
    """Look by asking a connector, which only says what it waits for."""

    def look() -> Awaited | None:
        found = waits_for()
        return None if found is None else Awaited(found, on.fix)

    return look


class Waits:
    """The things that a task waits for now. Used on one event loop."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called when the task begins to wait, or waits no more."""
        self._reported: dict[object, Wait] = {}
        self._changed = changed

    @property
    def reported(self) -> bool:
        """True if the task waits for something that others have to do, and has logged it."""
        return bool(self._reported)

    @property
    def longest(self) -> Wait | None:
        """The wait that has lasted longest, of those that were reported."""
        return min(self._reported.values(), key=lambda wait: wait.since, default=None)

    @contextlib.contextmanager
    def on(self, task: str, awaited: Awaited, look: Look | None = None) -> Iterator[None]:
        """Within this, the task waits for this; or works, unless `look` finds what it waits for.

        An error of `look` counts as finding nothing.
        """
        loop, reports = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        began = time.time()

        def report() -> None:
            reports.append(loop.create_task(self._report(task, awaited, look, began)))

        timer = loop.call_later(REPORT_S, report)  # most waits are over by then
        try:
            yield
        finally:
            timer.cancel()
            for reporting in reports:
                reporting.cancel()

    async def _report(self, task: str, awaited: Awaited, look: Look | None, began: float) -> None:
        wait, told_at = object(), 0.0
        try:
            while True:
                found: Awaited | None = awaited
                if look is not None:
                    found = None
                    with contextlib.suppress(Exception):
                        found = await in_thread(look)
                told_at = self._tell(wait, task, found, began, told_at)
                if found is None:
                    began = time.time()  # from here on it works: what it waits for later is new
                await asyncio.sleep(REPORT_S)
        finally:
            if self._reported.pop(wait, None) is not None:
                self._changed()

    def _tell(
        self, wait: object, task: str, found: Awaited | None, began: float, told_at: float
    ) -> float:
        """Keep what was found, and log it: at first, then after twice as long each time."""
        before = self._reported.get(wait)
        if found is None:
            if self._reported.pop(wait, None) is not None:
                self._changed()
            return 0.0
        self._reported[wait] = now = Wait(found.what, found.fix, began)
        if now != before:
            self._changed()
        waited_s = max(time.time() - began, 0.0)
        if told_at and waited_s < 2 * told_at:
            return told_at
        _log.warning(
            "%s waits for %s, for %.0f s now; %s",
            task,
            found.what,
            waited_s,
            found.fix,
            extra={IN_REPORT: True},
        )
        return max(waited_s, REPORT_S)


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run `call` in a thread of its own, which does not keep the process alive."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(act: Callable[[], None]) -> None:
        if not answer.done():
            act()

    def run() -> None:
        try:
            result = context.run(call)
        except BaseException as error:
            act = functools.partial(answer.set_exception, error)
        else:
            act = functools.partial(answer.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, act)

    threading.Thread(target=run, name="penstock-call", daemon=True).start()
    return answer


async def interruptible(call: Callable[[], T], interrupt: Callable[[], None]) -> T:
    """Run a blocking `call`; if cancelled, interrupt it until it has ended, for a moment at most.

    `interrupt` may block as well. It is repeated: it may come between two statements.
    """
    running = in_thread(call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(ignore_result)  # first: another cancellation may end the waits
        loop = asyncio.get_running_loop()
        until = loop.time() + INTERRUPT_S
        while not running.done() and loop.time() < until:
            ending = in_thread(interrupt)
            both: list[asyncio.Future[Any]] = [running, ending]
            await asyncio.wait(both, timeout=_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([running], timeout=_AGAIN_S)
            ending.add_done_callback(ignore_result)
        raise


def ignore_result(ended: asyncio.Future[T]) -> None:
    """Callback: its result or error is not asked for."""
    if not ended.cancelled():
        ended.exception()
