"""Waiting for a SQLite file that another process writes to: in short steps, and not past a stop.

SQLite's own waiting cannot be interrupted. So it waits for `STEP_S` at most, and a longer wait asks
again: a statement that finds the file busy outside of a transaction has done nothing.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

STEP_S: Final = 0.1


class BusyWait:
    """The patience of one task with its file: a time limit, and a stop. For any thread."""

    def __init__(self, busy_s: float) -> None:
        self.busy_s = busy_s
        self.waits = False
        """True while a statement waits for the file."""
        self.ended = False
        """True once no statement may wait any more."""
        self._lock = threading.Lock()
        self._open: set[sqlite3.Connection] = set()

    @contextlib.contextmanager
    def on(self, connection: SqliteConnection) -> Iterator[None]:
        """Within this, statements of the connection wait in steps, and can be interrupted."""
        with self._lock:
            self._open.add(connection)
            self.ended = False
        connection.busy_wait = self
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def interrupt(self) -> None:
        """End the statements that wait or run."""
        self.ended = True
        with self._lock:
            for connection in self._open:
                connection.interrupt()


class SqliteConnection(sqlite3.Connection):
    """A connection that waits in short steps; made with a time-out of `STEP_S`."""

    busy_wait: BusyWait | None = None

    def run(self, statement: str, values: Sequence[Any] = (), /) -> sqlite3.Cursor:
        """Execute; if the file is busy, again until it is not, or the wait is over."""
        wait = self.busy_wait
        if wait is None:
            return self.execute(statement, values)
        until = time.monotonic() + wait.busy_s
        try:
            while True:
                try:
                    return self.execute(statement, values)
                except sqlite3.OperationalError as error:
                    busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                    over = wait.ended or time.monotonic() >= until
                    if not busy or over or self.in_transaction:
                        raise
                wait.waits = True
                time.sleep(STEP_S / 10)
        finally:
            wait.waits = False

    def run_many(self, statement: str, rows: Iterable[Sequence[Any]], /) -> int:
        return max(self.executemany(statement, rows).rowcount, 0)  # -1 of none at all
