"""Reports what a task waits for, and runs calls that block but can be interrupted.

A task that does nothing because another process holds a lock looks like one that hangs. So every
wait is registered here, with what it is for; after `REPORT_S` seconds the log says so, and says it
again later and later. A stop does not wait for a wait that was reported (`runtime.control`).

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
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

_log = logging.getLogger("penstock.runtime")

REPORT_S: Final = 2.0
"""Seconds that a wait may last before the log says what it is for."""

INTERRUPT_S: Final = 3.0
"""Seconds that a call may take to end after it was interrupted, before it is left behind."""

_AGAIN_S: Final = 0.2

T = TypeVar("T")

Look = Callable[[], str | None]
"""Finds out what is waited for, if anything is; blocks, and may be called in any thread."""


class Waits:
    """The things that a task waits for now. Used on one event loop."""

    def __init__(self) -> None:
        self._reported: dict[object, str] = {}

    @property
    def reported(self) -> bool:
        """True if the task waits for something that others have to do, and has logged it."""
        return bool(self._reported)

    @property
    def longest(self) -> str | None:
        """What it waits for, of that the wait that was reported first."""
        return next(iter(self._reported.values()), None)

    @contextlib.contextmanager
    def on(self, task: str, what: str, look: Look | None = None) -> Iterator[None]:
        """Within this, the task waits for `what`; or works, unless `look` finds what it waits for.

        An error of `look` counts as finding nothing.
        """
        loop, reports = asyncio.get_running_loop(), list[asyncio.Task[None]]()

        def report() -> None:
            reports.append(loop.create_task(self._report(task, what, look)))

        timer = loop.call_later(REPORT_S, report)  # most waits are over by then
        try:
            yield
        finally:
            timer.cancel()
            for reporting in reports:
                reporting.cancel()

    async def _report(self, task: str, what: str, look: Look | None) -> None:
        wait, waited_s = object(), REPORT_S
        try:
            while True:
                found: str | None = what
                if look is not None:
                    found = None
                    with contextlib.suppress(Exception):
                        found = await in_thread(look)
                if found is None:
                    self._reported.pop(wait, None)
                    next_s = waited_s + REPORT_S
                else:
                    self._reported[wait] = found
                    _log.warning("%s waits for %s, for %.0f s now", task, found, waited_s)
                    next_s = waited_s * 2
                await asyncio.sleep(next_s - waited_s)
                waited_s = next_s
        finally:
            self._reported.pop(wait, None)


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
