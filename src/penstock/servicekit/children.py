"""Processes that a process starts, starts again if they end, and stops with itself.

    child = Child("cluster", [sys.executable, "-m", "penstock.cli.child", "cluster"], env)
    line = await child.start()      # the first that it says on stdout: it can be used
    …                               # `keep` starts it again whenever it has ended
    await child.stop()

A child has a pipe as its standard input, which nothing is written to: its end says that the parent
is gone, however that ended. It has a session of its own, so that Ctrl-C reaches it through us only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.errors import Unavailable
from penstock.servicekit.logs import fields

_log = logging.getLogger("penstock.children")

AGAIN_S: Final = 0.2
AGAIN_S_MAX: Final = 10.0
"""Seconds until a child that has ended is started again: at first, and at most."""

LASTED_S: Final = 30.0
"""A child that ran for so long has not failed at once."""

STOP_S: Final = 20.0
"""Seconds that a child may take to end before it is killed."""


class Child:
    """One process, or the next one in its place. Used on one event loop."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self.said = ""
        """The first line that the present process has said, where it can be reached; "" before."""
        self.command = command
        self.env = env
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def spawn(self) -> None:
        """Start a process, without waiting for its word."""
        self.said = ""
        self._ready = asyncio.Event()
        self._process = await asyncio.create_subprocess_exec(
            *self.command,
            env=self.env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        listening = self._listen(self._process, self._ready)
        self._listening = asyncio.create_task(listening, name=f"what {self.name} says")

    async def start(self) -> str:
        """Start a process, and return its first word; `Unavailable` if it ends without one."""
        await self.spawn()
        await self._ready.wait()
        if not self.said:
            code = await self._ended()
            raise Unavailable(
                f"{self.name} has not started",
                why=f"it ended with exit code {code}",
                fix="see what it says above",
            )
        return self.said

    async def keep(self) -> None:
        """Start it again whenever it has ended, until cancelled or stopped."""
        loop = asyncio.get_running_loop()
        wait_s, began = AGAIN_S, loop.time()
        while True:
            code = await self._ended()
            if self._stopping:
                return
            wait_s = AGAIN_S if loop.time() - began > LASTED_S else min(2 * wait_s, AGAIN_S_MAX)
            _log.warning(
                "a process has ended, and is started again",
                extra=fields(name=self.name, exit_code=code, in_s=wait_s),
            )
            await asyncio.sleep(wait_s)
            began = loop.time()
            await self.spawn()

    def signal(self) -> None:
        """Ask it to end; asked once more, it does not wait for anything."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def stop(self) -> None:
        """End it, and wait until it has ended; one that does not is killed."""
        if not self._stopping:
            self.signal()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await self._ended()
        except TimeoutError:
            _log.warning("a process does not end, and is killed", extra=fields(name=self.name))
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._ended()

    async def _ended(self) -> int:
        """Wait for the end of the present process, and of what it says."""
        if self._process is None:
            return 0
        code = await self._process.wait()
        if self._listening is not None:
            await asyncio.wait([self._listening])
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    async def _listen(self, process: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
        """Keep the first line; read on, so that nothing is held up."""
        if process.stdout is None:
            return
        try:
            self.said = (await process.stdout.readline()).decode(errors="replace").strip()
        finally:
            ready.set()
        while await process.stdout.read(1 << 16):
            pass
