"""Waiting for a SQLite file that somebody else writes to: in short steps, and not past a stop.

SQLite's own waiting cannot be interrupted. So it waits for `STEP_S` at most, and whoever waits
longer asks again: a statement that finds the file busy outside of a transaction has done nothing.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

STEP_S: Final = 0.1


class Patience:
    """Of one task with its file: how long it waits, and whether it was told not to. Any thread."""

    def __init__(self, busy_s: float) -> None:
        self.busy_s = busy_s
        self.waits = False
        """Whether somebody waits for the file now."""
        self.ended = False
        """Nobody waits any more."""
        self._lock = threading.Lock()
        self._open: set[sqlite3.Connection] = set()

    @contextlib.contextmanager
    def on(self, connection: PatientConnection) -> Iterator[None]:
        """Within this, the connection waits so, and what is done on it can be interrupted."""
        with self._lock:
            self._open.add(connection)
            self.ended = False
        connection.patience = self
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def interrupt(self) -> None:
        """Let what is waited for or runs end."""
        self.ended = True
        with self._lock:
            for connection in self._open:
                connection.interrupt()


class PatientConnection(sqlite3.Connection):
    """A connection that waits in short steps; made with a time-out of `STEP_S`."""

    patience: Patience | None = None

    def execute(self, statement: str, values: Any = (), /) -> sqlite3.Cursor:  # noqa: ANN401
        """As ever; but if the file is busy, again until it is not, or patience is at its end."""
        patience = self.patience
        if patience is None:
            return super().execute(statement, values)
        until = time.monotonic() + patience.busy_s
        try:
            while True:
                try:
                    return super().execute(statement, values)
                except sqlite3.OperationalError as error:
                    busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                    over = patience.ended or time.monotonic() >= until
                    if not busy or over or self.in_transaction:
                        raise
                patience.waits = True
                time.sleep(STEP_S / 10)
        finally:
            patience.waits = False
