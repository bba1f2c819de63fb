"""At most so many connections to one PostgreSQL server, opened when needed.

Not `psycopg_pool`, for three reasons that matter to a committer. A caller gets the real cause of a
failed connection, at once, instead of a time-out after a background worker's retries. There is no
second backoff: the first call after an outage connects. And the bound is exact, also while a
connection is being replaced, so that an administrator may rely on it.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from penstock.consensus.backend import PoolOptions
from penstock.consensus.store import Determinate, ErrorKind, cause_chain

Connection = psycopg.AsyncConnection[TupleRow]

_CONFIGURE = """
SELECT set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('statement_timeout', %s, false),
       set_config('idle_in_transaction_session_timeout', %s, false),
       set_config('client_encoding', 'UTF8', false)"""


class ConnectionPool:
    """Connections in autocommit mode, newest first; lives on one event loop."""

    def __init__(self, conninfo: str, options: PoolOptions) -> None:
        defaults: dict[str, str | int | None] = {
            "application_name": "penstock",
            "connect_timeout": options.connect_timeout_s,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 5,
            "tcp_user_timeout": 30_000,
        }
        self._conninfo = make_conninfo("", **(defaults | conninfo_to_dict(conninfo)))
        self._options = options
        self._slots = asyncio.Semaphore(options.connections_max)
        self._idle: list[tuple[float, Connection]] = []
        self._open = 0
        self._closed = False

    @property
    def open_connections(self) -> int:
        return self._open

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Connection]:
        """A working connection, as far as one can tell without asking the server.

        Comes back clean or not at all: one left inside a transaction, or broken, is closed, and
        the server rolls back what it had begun.
        """
        await self._acquire()
        try:
            expires, connection = await self._take()
            try:
                yield connection
            finally:
                clean = connection.pgconn.transaction_status == TransactionStatus.IDLE
                if clean and not self._closed and time.monotonic() < expires:
                    self._idle.append((expires, connection))
                else:
                    await self._drop(connection)
        finally:
            self._slots.release()

    async def forget_idle(self) -> None:
        """Close what is idle: after one connection was lost, the others are dead as well."""
        idle, self._idle = self._idle, []
        for _, connection in idle:
            await self._drop(connection)

    async def close(self) -> None:
        """Close now what is idle, and the rest as it comes back; waits for that."""
        self._closed = True
        for _ in range(self._options.connections_max):
            await self._slots.acquire()
        await self.forget_idle()
        for _ in range(self._options.connections_max):
            self._slots.release()

    async def _acquire(self) -> None:
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")
        try:
            async with asyncio.timeout(self._options.wait_s):
                await self._slots.acquire()
        except TimeoutError as error:
            what = f"no database connection was free within {self._options.wait_s:g} s"
            raise Determinate(ErrorKind.OVERLOADED, what) from error

    async def _take(self) -> tuple[float, Connection]:
        while self._idle:
            expires, connection = self._idle.pop()
            if time.monotonic() < expires and not connection.closed:
                return expires, connection
            await self._drop(connection)
        try:
            connection = await self._connect()
        except psycopg.Error as error:
            raise Determinate(ErrorKind.UNAVAILABLE, cause_chain(error)) from error
        # Staggered, or all connections of a burst would be replaced in one moment.
        lifetime_s = self._options.lifetime_s * random.uniform(0.8, 1.2)  # noqa: S311
        return time.monotonic() + lifetime_s, connection

    async def _connect(self) -> Connection:
        options = self._options
        self._open += 1
        try:
            connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        except BaseException:
            self._open -= 1
            raise
        try:
            with deadline(connection, options.call_timeout_s):
                timeouts = (options.statement_timeout_s, options.idle_in_transaction_s)
                await connection.execute(_CONFIGURE, [f"{s * 1000:.0f}" for s in timeouts])
        except BaseException:
            await self._drop(connection)
            raise
        return connection

    async def _drop(self, connection: Connection) -> None:
        self._open -= 1
        await connection.close()


@contextmanager
def deadline(connection: Connection, seconds: float) -> Iterator[None]:
    """Hang up on a server that has not answered within `seconds`.

    Cancelling the waiting task instead would first ask the silent server to cancel the query, and
    wait for its answer.
    """
    timer = asyncio.get_running_loop().call_later(seconds, _hang_up, connection)
    try:
        yield
    finally:
        timer.cancel()


def _hang_up(connection: Connection) -> None:
    if not connection.closed:
        with socket.socket(fileno=os.dup(connection.fileno())) as copy, suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)
