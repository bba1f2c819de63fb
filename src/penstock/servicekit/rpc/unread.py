"""Answers that are sent and not yet read: bytes that wait for the other end of a connection.

A client that does not read costs the server memory: gRPC holds one message for each of its streams
and releases it only when the client goes away, whatever becomes of the stream meanwhile. So unread
bytes are counted until they are taken, in total and for each client, and a sender waits for room
before it adds to them. A client that does not read holds up only itself, since it may hold only a
share of the whole.

Used on the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Generator
from typing import NoReturn

from penstock.servicekit.rpc.grpcio import Context


class SlowReader(Exception):
    """The client is alive, since it answers pings, but it does not read."""


class ReaderGone(Exception):
    """The client has gone: nothing more can be sent to it."""


class Unread:
    """Unread bytes, in total and by client. The client None, in the same process, is not counted.

    `refuse` raises the service's own error for a client that waited too long.
    """

    def __init__(
        self, *, bytes_max: int, client_bytes_max: int, refuse: Callable[[str], NoReturn]
    ) -> None:
        self._bytes_max = bytes_max
        self._client_bytes_max = client_bytes_max
        self._refuse = refuse
        self.bytes_total = 0
        self._by_client: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def room(self, client: str | None, wait_s: float | None = None) -> None:
        """Wait until this client may be sent more; refuse it after `wait_s`."""
        if client is None or self.has_room(client):
            return
        try:
            async with asyncio.timeout(wait_s):
                while not self.has_room(client):
                    await self._turn(client)
        except TimeoutError:
            of_client, limit = self._by_client.get(client, 0), self._client_bytes_max
            what = f"{of_client} bytes of answers to this client are not read, {limit} is the limit"
            if of_client < limit:
                limit = self._bytes_max
                what = f"{self.bytes_total} bytes of answers are not read, {limit} is the limit"
            self._refuse(what)
        # The caller adds its bytes before the next waiter checks for room.
        asyncio.get_running_loop().call_soon(self._wake)

    @contextlib.contextmanager
    def held(self, client: str | None, size: int) -> Generator[Held, None, None]:
        """Count `size` bytes as unread while the block runs."""
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
        return client is None or (
            self.bytes_total < self._bytes_max
            and self._by_client.get(client, 0) < self._client_bytes_max
        )

    async def _turn(self, client: str) -> None:
        waiting = self._waiting.setdefault(client, deque())
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_soon(self._wake)  # this turn may have been ours
            raise
        finally:
            if turn in waiting:
                waiting.remove(turn)
            if not waiting and self._waiting.get(client) is waiting:
                del self._waiting[client]

    def _wake(self) -> None:
        """Wake one waiter of every client that has room; it wakes the next one in turn."""
        for client, waiting in list(self._waiting.items()):
            while waiting and self.has_room(client):
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(None)
                    break


class Held:
    """Bytes counted for one client, which may be resized until they are released."""

    def __init__(self, unread: Unread, client: str | None, size: int) -> None:
        self._unread = unread
        self._client = client
        self._size = size
        unread.add(client, size)

    def resize(self, size: int) -> None:
        self._unread.add(self._client, size - self._size)
        self._size = size


class Outlet:
    """Sends messages to one client on one stream.

    `count` is called with the size of a message when it is handed to gRPC, and with the negative
    size when it is gone.
    """

    def __init__(
        self, context: Context, slow_s: float, count: Callable[[int], None] = lambda _: None
    ) -> None:
        self._context = context
        self._slow_s = slow_s
        self._count = count

    async def write(self, message: bytes) -> None:
        """Send a message and wait until gRPC has sent it; raise `SlowReader` or `ReaderGone`.

        The message counts until it is gone, even if the caller no longer waits for that.
        """
        writing = asyncio.ensure_future(self._context.write(message))
        size = len(message)
        self._count(size)

        def gone(_: asyncio.Future[None]) -> None:
            self._count(-size)
            if not writing.cancelled():
                writing.exception()  # retrieved here; a caller that still waits raises it below

        writing.add_done_callback(gone)
        done, _ = await asyncio.wait([writing], timeout=self._slow_s)
        if not done:
            raise SlowReader
        if (error := writing.exception()) is not None:
            raise ReaderGone from error
