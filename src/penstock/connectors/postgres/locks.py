"""Connections to PostgreSQL, how long they wait for locks, and how a wait is interrupted.

Bounds are set for each transaction (`bounds`), since a pooler may hand the next one to another
server process. A wait for a lock ends after `LOCK_S`. A transaction whose client does nothing ends
after `IDLE_S`, which is less: a leader that is paused inside of a commit holds the lock on its
task's row, and its successor waits for that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
from psycopg.rows import TupleRow


class PostgresConnection(psycopg.Connection[TupleRow]):
    """A connection whose statements are quoted by the time they arrive."""

    def run(self, statement: str, values: Sequence[object] = (), /) -> psycopg.Cursor[TupleRow]:
        """Execute; without values, several statements may be separated by semicolons."""
        return self.execute(statement.encode(), values or None)


LOCK_S: Final = 15
IDLE_S: Final = 10
TASK_IDLE_S: Final = 600
"""In Spark tasks, which wait for rows between statements, and hold locks that delay only DDL."""

_CANCEL_S: Final = 1.0
_CANCELS: Final = 2
"""Requests to cancel before the connection of a server that does not react is shut."""

APPLICATION_BYTES_MAX: Final = 63

_BLOCKED: Final = """
SELECT b.pids, coalesce(wanted.name, '')
FROM pg_stat_activity w
CROSS JOIN LATERAL (SELECT pg_blocking_pids(w.pid) AS pids) b
LEFT JOIN LATERAL (
    SELECT c.relname::text AS name FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
    WHERE l.pid = w.pid AND c.relkind IN ('r', 'p') AND (
        NOT l.granted OR l.locktype = 'tuple' OR EXISTS (
            SELECT FROM pg_locks o WHERE o.pid = ANY (b.pids) AND o.relation = l.relation))
    ORDER BY l.granted, l.locktype = 'tuple' DESC LIMIT 1) wanted ON true
WHERE w.application_name = $1 AND w.datname = current_database() AND w.wait_event_type = 'Lock'
ORDER BY w.query_start LIMIT 1"""
_HOLDER: Final = """
SELECT usename::text, application_name, state FROM pg_stat_activity WHERE pid = $1"""


def bounds(idle_s: int = IDLE_S) -> str:
    """Return a statement that bounds the transaction it is in."""
    return (
        f"SELECT set_config('lock_timeout', '{LOCK_S}s', true), "
        f"set_config('idle_in_transaction_session_timeout', '{idle_s}s', true)"
    )


def application(where: str) -> str:
    """Return the name of a task's sessions on the server, which shows whose they are."""
    name = f"penstock {where}".encode("ascii", "replace")
    return name[:APPLICATION_BYTES_MAX].decode()


def blocked(connection: PostgresConnection, name: str) -> str | None:
    """Return the lock that a session of this name waits for, and its holder."""
    row = connection.run(_BLOCKED, (name,)).fetchone()
    if row is None or not row[0]:
        return None
    pids, table = row
    holder = connection.run(_HOLDER, (pids[0],)).fetchone() or ()
    about = ", ".join(part for part in holder if part)
    lock = f"a lock on table {table}" if table else "a lock"
    return f"{lock} held by pid {pids[0]}{f' ({about})' if about else ''}"


class OpenConnections:
    """The connections of a task to its server, and how to end what they do. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[PostgresConnection, int] = {}
        """Interrupts so far, by connection."""

    @contextlib.contextmanager
    def on(self, connection: PostgresConnection) -> Iterator[None]:
        """Within this, what is done on the connection can be interrupted."""
        with self._lock:
            self._open[connection] = 0
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(connection, None)

    def is_interrupted(self, connection: PostgresConnection) -> bool:
        """True if the connection was interrupted: then nothing more may be done on it."""
        with self._lock:
            return self._open.get(connection, 0) > 0

    def interrupt(self) -> None:
        """Cancel what runs; shut the connection of a server that does not listen."""
        with self._lock:
            for connection in self._open:
                self._open[connection] += 1
            asked = dict(self._open)
        for connection, times in asked.items():
            with contextlib.suppress(psycopg.Error, OSError):
                if times <= _CANCELS:
                    connection.cancel_safe(timeout=_CANCEL_S)
                elif not connection.closed:
                    _hang_up(connection)


def _hang_up(connection: PostgresConnection) -> None:
    """Shut the socket under the driver, which then sees a lost connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
