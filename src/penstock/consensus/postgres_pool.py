"""A bounded pool of connections to one PostgreSQL server, opened when needed, used in threads.

Threads, because a call through psycopg's blocking connection costs a quarter of the CPU that it
costs through its asynchronous one: a whole transaction is one hop to a thread and back. Nor can it
be cancelled half-way: an operation must run to its end when its caller leaves.

Not `psycopg_pool`, for three reasons that matter to a committer. A caller gets the real cause of a
failed connection at once, instead of a time-out after a background worker's retries. There is no
second backoff: the first call after an outage connects. And the bound is exact, even while a
connection is being replaced, so that an administrator may rely on it.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from penstock.consensus.backend import PoolOptions
from penstock.consensus.store import Determinate, ErrorKind, cause_chain

Connection = psycopg.Connection[TupleRow]
T = TypeVar("T")

_CONFIGURE = """
SELECT set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('statement_timeout', %s, false),
       set_config('idle_in_transaction_session_timeout', %s, false),
       set_config('lock_timeout', %s, false),
       set_config('client_encoding', 'UTF8', false)"""


class ConnectionPool:
    """Connections in autocommit mode, the last used first; lives on one event loop."""

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
        kept = min(options.commit_connections, options.connections_max - 1)
        self._reads = asyncio.Semaphore(options.connections_max - kept)
        self._threads = ThreadPoolExecutor(options.connections_max, thread_name_prefix="postgres")
        self._idle: list[tuple[float, Connection]] = []
        self._open: set[Connection] = set()
        self._calls: set[_Call] = set()
        self._closed = False

    @property
    def open_connections(self) -> int:
        return len(self._open)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    async def run(self, work: Callable[[Connection], T], *, commits: bool = False) -> T:
        """Run `work` on a connection, in a thread, to its end, even if the caller leaves.

        Some connections are reserved for work that `commits`, however many reads wait. Hangs up on
        a server that neither answers nor closes; `work` then fails as with any lost connection.
        """
        await self._acquire(commits=commits)
        loop = asyncio.get_running_loop()
        call = _Call()
        timer = loop.call_later(self._options.call_timeout_s, call.hang_up)
        self._calls.add(call)

        def finished(ended: asyncio.Future[T]) -> None:
            timer.cancel()
            self._calls.discard(call)
            if not ended.cancelled():
                ended.exception()  # retrieved, in case the caller has left
            self._release(commits=commits)

        running = loop.run_in_executor(self._threads, self._serve, call, work)
        running.add_done_callback(finished)
        return await asyncio.shield(running)

    def forget_idle(self) -> None:
        """Close idle connections: after one was lost, the others are probably dead as well."""
        while self._idle:
            self._drop(self._idle.pop()[1])

    async def close(self) -> None:
        """Wait for calls under way, though not for a silent server, then close everything."""
        self._closed = True
        timer = asyncio.get_running_loop().call_later(self._options.close_s, self._hang_up)
        for _ in range(self._options.connections_max):
            await self._slots.acquire()
        timer.cancel()
        self.forget_idle()
        self._threads.shutdown()
        for _ in range(self._options.connections_max):
            self._slots.release()

    def _hang_up(self) -> None:
        for call in self._calls:
            call.hang_up()

    async def _acquire(self, *, commits: bool) -> None:
        self._check_open()
        try:
            async with asyncio.timeout(self._options.wait_s):
                if not commits:
                    await self._reads.acquire()
                try:
                    await self._slots.acquire()
                except BaseException:
                    if not commits:
                        self._reads.release()
                    raise
        except TimeoutError as error:
            what = f"no database connection was free within {self._options.wait_s:g} s"
            raise Determinate(ErrorKind.OVERLOADED, what) from error
        try:
            self._check_open()
        except Determinate:
            self._release(commits=commits)
            raise

    def _release(self, *, commits: bool) -> None:
        self._slots.release()
        if not commits:
            self._reads.release()

    def _check_open(self) -> None:
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")

    # ----------------------------------------------------------------------------- in a thread

    def _serve(self, call: _Call, work: Callable[[Connection], T]) -> T:
        """Run `work`; its connection returns to the pool clean, or not at all.

        One that failed, or is still inside a transaction, is closed, and the server rolls back.
        After an error in a pipeline the driver relies on prepared statements that the server has
        skipped, so being idle again does not make it clean.
        """
        expires, connection = self._take()
        clean = False
        try:
            with call.on(connection):
                result = work(connection)
            clean = connection.pgconn.transaction_status == TransactionStatus.IDLE
        finally:
            if clean and time.monotonic() < expires:
                self._idle.append((expires, connection))
            else:
                self._drop(connection)
        return result

    def _take(self) -> tuple[float, Connection]:
        with suppress(IndexError):
            while True:
                expires, connection = self._idle.pop()
                if time.monotonic() < expires and not connection.closed:
                    return expires, connection
                self._drop(connection)
        try:
            connection = self._connect()
        except psycopg.Error as error:
            raise Determinate(ErrorKind.UNAVAILABLE, cause_chain(error)) from error
        # Staggered, or all connections of a burst would be replaced in one moment.
        lifetime_s = self._options.lifetime_s * random.uniform(0.8, 1.2)  # noqa: S311
        return time.monotonic() + lifetime_s, connection

    def _connect(self) -> Connection:
        connection = psycopg.connect(self._conninfo, autocommit=True)
        self._open.add(connection)
        options = self._options
        timeouts = (options.statement_timeout_s, options.idle_in_transaction_s, options.lock_s)
        try:
            connection.execute(_CONFIGURE, [f"{s * 1000:.0f}" for s in timeouts])
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _drop(self, connection: Connection) -> None:
        connection.close()
        self._open.discard(connection)


class _Call:
    """A call in a thread and its connection, so that the event loop can end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._expired = False

    @contextmanager
    def on(self, connection: Connection) -> Iterator[None]:
        with self._lock:
            self._connection = connection
        if self._expired:
            self.hang_up()
        try:
            yield
        finally:
            with self._lock:
                self._connection = None

    def hang_up(self) -> None:
        """Shut the socket under the driver, which sees a lost connection.

        Cancellation would need an answer from the very server that gives none.
        """
        with self._lock:
            self._expired = True
            if self._connection is None or self._connection.closed:
                return
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
