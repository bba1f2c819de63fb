"""Stop a command on Ctrl-C, or on SIGTERM, which supervisors send.

    first     the command ends: where possible after finishing its current work, else at once
    second    it ends at once
    third     the process exits

Ending at once means cancelling, which cleans up. A thread that is blocked elsewhere (a driver that
connects, Spark starting) cannot be cancelled, and Python would wait for it, so a stopped process
exits by itself after `LAST_S`. That is safe, because a process may be killed at any time: what it
acknowledged is durable, and the next command continues from there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

LAST_S: Final = 5.0
"""Seconds that a process may take to end at once."""
AGAIN_S: Final = 0.01
"""Seconds after which a lost interrupt is sent again."""

T = TypeVar("T")


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """Send an interrupt again that native code has dropped, as a JSON Schema validator may."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


class Stops:
    """Handles the stop signals of this process."""

    def __init__(self) -> None:
        self.code: int | None = None
        """Exit code of a stopped process."""
        self.outcome = "nothing was begun"
        """What became of a command that is stopped now; set as it goes on."""
        self._told = False
        self._ours = False
        self._asked = 0
        self._finish: Callable[[], object] | None = None
        self._cancel: Callable[[], object] | None = None
        self._last: threading.Timer | None = None

    def tell(self) -> None:
        """Say once what became of the command; usable in a signal handler, and at the very end."""
        if not self._told:
            self._told = True
            text = f"penstock: stopped; {self.outcome}" if self.outcome else "penstock: stopped"
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a command to its end; raises `KeyboardInterrupt` if a signal ended it."""

        async def cancellable() -> T:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            if task is not None:
                self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            return await main

        with self._handled():
            try:
                result = asyncio.run(cancellable())
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
            finally:
                self._cancel = None
        if self._asked > 1:
            raise KeyboardInterrupt
        return result

    @contextlib.contextmanager
    def finishing(self, finish: Callable[[], None]) -> Iterator[None]:
        """Within this, the first two signals call `finish`, which makes the work end by itself."""
        loop = asyncio.get_running_loop()
        self._finish = lambda: loop.call_soon_threadsafe(finish)
        try:
            yield
        finally:
            self._finish = None

    def ends_with(self, code: int) -> None:
        """The result is printed: bound the time that cleaning up may take."""
        if self._asked < 2:
            self.code = code
        self._bound()

    def leave(self, code: int) -> NoReturn:
        """End the process without waiting for threads that are blocked.

        Nor for Python to take itself apart, which is half a second after a command with Spark.
        """
        self.code = code
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has ended
        self._bound()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        atexit._run_exitfuncs()  # noqa: SLF001 - os._exit has none
        os._exit(code)

    @contextlib.contextmanager
    def _handled(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Runs between two instructions of the main thread; the event loop may be blocked."""
        self._asked += 1
        self.code = 128 + number
        if self._finish is not None and self._asked <= 2:
            if self._asked == 2:
                self._bound()
            self._finish()
        elif self._asked == 1 and self._cancel is not None:
            self._bound()
            self._cancel()
        else:
            self.tell()
            os._exit(self.code)

    def _bound(self) -> None:
        if self._last is None:
            self._last = threading.Timer(LAST_S, self._exit)
            self._last.daemon = True
            self._last.start()

    def _exit(self) -> None:
        """Exit, if this process is the command's own."""
        if self._ours:
            if self._asked and self.code is not None and self.code > 128:
                self.tell()
            os._exit(1 if self.code is None else self.code)

    def own_process(self) -> None:
        """Declare that this process is the command's own, so that it may be ended."""
        self._ours = True
        sys.unraisablehook = _send_again


stops = Stops()
