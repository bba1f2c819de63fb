"""What was answered and not read yet: bytes that wait for the other end of a connection.

A reader that takes nothing costs the server what it was told: gRPC holds one message for each of
its streams, and gives it up only when the client goes away, whatever becomes of the stream
meanwhile. So what waits is counted until it is taken, in total and for each client, and who would
add to it waits for room first. A client that does not read waits for itself, since it may hold a
part of the whole only.

Used on the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator
from typing import Any

from penstock.consensus.committer.admission import Admission
from penstock.consensus.committer.grpcio import aio

Context = aio.ServicerContext[Any, Any]


class SlowReader(Exception):
    """The client is there, since it answers pings, and does not read."""


class ReaderGone(Exception):
    """The client cannot be told anything any more."""


class Unread:
    """Bytes by client; the process that hosts the committer, None, is not counted."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._limits = admission.limits
        self.bytes_total = 0
        self._by_client: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def room(self, client: str | None, wait_s: float | None = None) -> None:
        """Wait until this client may be told more; `Determinate(OVERLOADED)` after `wait_s`."""
        if client is None or self.has_room(client):
            return
        try:
            async with asyncio.timeout(wait_s):
                while not self.has_room(client):
                    await self._turn(client)
        except TimeoutError:
            of_client, limit = self._by_client.get(client, 0), self._limits.client_unread_bytes_max
            what = f"{of_client} bytes of answers to this client are not read, {limit} is the limit"
            if of_client < limit:
                limit = self._limits.unread_bytes_max
                what = f"{self.bytes_total} bytes of answers are not read, {limit} is the limit"
            self._admission.refuse("unread", what)
        # Whoever had this turn adds before the next one looks.
        asyncio.get_running_loop().call_soon(self._wake)

    @contextlib.contextmanager
    def held(self, client: str | None, size: int) -> Generator[Held, None, None]:
        """Count `size` bytes while the block runs."""
        held = Held(self, client, size)
        try:
            yield held
        finally:
            held.resize(0)

    def add(self, client: str | None, size: int) -> None:
        if client is None:
            return
        self.bytes_total += size
        left = self._by_client.get(client, 0) + size
        if left:
            self._by_client[client] = left
        else:
            self._by_client.pop(client, None)
        self._wake()

    def has_room(self, client: str | None) -> bool:
        limits = self._limits
        of_client = self._by_client.get(client, 0) if client is not None else 0
        return client is None or (
            self.bytes_total < limits.unread_bytes_max
            and of_client < limits.client_unread_bytes_max
        )

    async def _turn(self, client: str) -> None:
        waiting = self._waiting.setdefault(client, deque())
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_soon(self._wake)  # it may have been given to us
            raise
        finally:
            if turn in waiting:
                waiting.remove(turn)
            if not waiting and self._waiting.get(client) is waiting:
                del self._waiting[client]

    def _wake(self) -> None:
        """Give a turn to one waiter of every client that has room, which gives it to the next."""
        for client, waiting in list(self._waiting.items()):
            while waiting and self.has_room(client):
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break


class Held:
    """So many bytes of one client, until they are more, fewer or none."""

    def __init__(self, unread: Unread, client: str | None, size: int) -> None:
        self._unread = unread
        self._client = client
        self._size = size
        unread.add(client, size)

    def resize(self, size: int) -> None:
        self._unread.add(self._client, size - self._size)
        self._size = size


class Outlet:
    """The messages to one client on one stream; `client` is counted for those it has not taken."""

    def __init__(self, context: Context, unread: Unread, client: str | None, slow_s: float) -> None:
        self._context = context
        self._unread = unread
        self._client = client
        self._slow_s = slow_s

    async def write(self, message: bytes) -> None:
        """Send, and wait until gRPC has sent it; raises `SlowReader` or `ReaderGone` if it cannot.

        The message counts until it is gone, also if nobody waits for that any more.
        """
        writing = asyncio.ensure_future(self._context.write(message))
        size = len(message)
        self._unread.add(self._client, size)

        def gone(_: asyncio.Future[None]) -> None:
            self._unread.add(self._client, -size)
            if not writing.cancelled():
                writing.exception()  # seen: whoever waits is told below

        writing.add_done_callback(gone)
        done, _ = await asyncio.wait([writing], timeout=self._slow_s)
        if not done:
            raise SlowReader
        if (error := writing.exception()) is not None:
            raise ReaderGone from error
