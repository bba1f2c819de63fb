"""A connection that speaks the replication protocol, on `libpq` itself: psycopg has none for it.

Nothing here blocks for longer than it is told to: commands are sent, and asked for their result.
"""

from __future__ import annotations

import contextlib
import re
import select
import time
from collections.abc import Mapping, Sequence
from typing import Final

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from penstock.connectors.postgres.locks import PostgresConnection
from penstock.connectors.postgres.server import Server
from penstock.connectors.postgres_cdc import faults
from penstock.connectors.postgres_cdc.values import SETTINGS
from penstock.connectors.postgres_cdc.wire import POSTGRES_EPOCH_S, lsn_of, lsn_text, status
from penstock.connectors.sql.statements import quoted
from penstock.runtime.connector.common import ConnectorError

_STREAM_SETTINGS: Final = {
    **SETTINGS,
    # A transaction of ours may take longer than any patience of the server: nothing is read
    # meanwhile. A client that is gone is noticed by its socket.
    "wal_sender_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "statement_timeout": "0",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}


def options(settings: Mapping[str, str]) -> str:
    """Settings of a session, as libpq wants them."""
    return " ".join(f"-c {name}={value}" for name, value in settings.items())


def connect(server: Server) -> PostgresConnection:
    """Connect for SQL, to a session that writes values as `values.py` reads them."""
    return server.connect(options=options(SETTINGS))


class Replication:
    """A connection to one database, for replication."""

    def __init__(self, server: Server) -> None:
        try:
            self.connection = server.connect(
                replication="database", options=options(_STREAM_SETTINGS)
            )
        except ConnectorError as error:
            # The server knows best who may: some have groups for it, beside the attribute.
            if re.search("wal ?sender", error.why or "", re.IGNORECASE):
                raise faults.may_not_replicate(server) from error
            raise
        self._libpq = self.connection.pgconn
        self._readable = select.poll()
        self._readable.register(self._libpq.socket, select.POLLIN)
        self.frames = self._libpq.get_copy_data

    @property
    def pid(self) -> int:
        return self._libpq.backend_pid

    def system(self) -> str:
        """The identifier of the server."""
        result = self._libpq.exec_(b"IDENTIFY_SYSTEM")
        (row,) = _rows(result)
        return row[0]

    def create_slot(self, name: str, *, temporary: bool) -> None:
        """Begin to make a slot, and to export what is visible at its start: `created` tells."""
        kind = "TEMPORARY LOGICAL" if temporary else "LOGICAL"
        self._send(f"CREATE_REPLICATION_SLOT {quoted(name)} {kind} pgoutput EXPORT_SNAPSHOT")

    def created(self, until: float) -> tuple[int, str] | None:
        """Where the slot begins, and the name of the snapshot; None if it is not made by then."""
        result = self._result(until)
        if result is None:
            return None
        ((_, lsn, snapshot, _),) = _rows(result)
        return lsn_of(lsn), snapshot

    def start(self, slot: str, lsn: int, publication: str) -> None:
        """Begin to read changes from a position on."""
        names = quoted(publication).replace("'", "''")
        self._send(
            f"START_REPLICATION SLOT {quoted(slot)} LOGICAL {lsn_text(lsn)} "
            f"(proto_version '1', publication_names '{names}')"
        )
        result = self._result(time.monotonic() + 60)
        if result is None:
            raise psycopg.OperationalError("the server does not begin to send its log")
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise psycopg.OperationalError("the server does not send its log")

    def wait(self, until: float) -> bool:
        """Wait for bytes of the server; False if none came by then."""
        left_ms = max(0, int((until - time.monotonic()) * 1000))
        if not self._readable.poll(left_ms):
            return False
        self._libpq.consume_input()
        return True

    def ended(self) -> psycopg.Error:
        """Why the server sends no more."""
        result = self._libpq.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return error_from_result(result)
        return psycopg.OperationalError("the server has ended the stream of its log")

    def confirm(self, lsn: int, *, wants_reply: bool = False) -> None:
        """Say up to where nothing is needed any more."""
        now_us = int((time.time() - POSTGRES_EPOCH_S) * 1_000_000)
        self._libpq.put_copy_data(status(lsn, now_us=now_us, wants_reply=wants_reply))
        self._libpq.flush()

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self.connection.close()

    def _send(self, command: str) -> None:
        self._libpq.send_query(command.encode())

    def _result(self, until: float) -> pq.abc.PGresult | None:
        """The result of what was sent; raises the error of the server."""
        while self._libpq.is_busy():
            if not self.wait(until):
                return None
        result = self._libpq.get_result()
        if result is None:
            raise psycopg.OperationalError("the server has not answered")
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise error_from_result(result)
        if result.status != pq.ExecStatus.COPY_BOTH:
            while self._libpq.get_result() is not None:
                pass
        return result


def _rows(result: pq.abc.PGresult) -> list[Sequence[str]]:
    if result.status == pq.ExecStatus.FATAL_ERROR:
        raise error_from_result(result)
    return [
        [(result.get_value(row, column) or b"").decode() for column in range(result.nfields)]
        for row in range(result.ntuples)
    ]
