"""Previews in PostgreSQL: tables of their own, where tasks stage rows anyway.

So a preview needs no privilege that a run does not need. All of its tables have names that begin
with `preview_` and its number, and it holds an advisory lock of that number while it lives, in a
transaction that stays open: the server lets go of it when the connection ends, in whatever way.
"""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass, replace
from typing import Final

import psycopg

from penstock.connectors import postgres_tables
from penstock.connectors.postgres_locks import Connection
from penstock.connectors.postgres_rows import STAGE, fitting
from penstock.connectors.postgres_server import run
from penstock.connectors.sql import quoted
from penstock.runtime.connector import Target, Task

_log = logging.getLogger("penstock.connectors")

_LOCKS: Final = 0x70656E73
"""The first half of the keys of our advisory locks that say who lives."""
_NUMBER: Final = re.compile(r"preview_([0-9a-f]{8})_")
_TABLES: Final = (
    "SELECT tablename::text FROM pg_tables WHERE schemaname = $1 AND starts_with(tablename, $2) "
    "AND pg_has_role(tableowner, 'MEMBER')"
)


@dataclass(frozen=True, slots=True)
class Preview:
    """Where a preview has what a run has elsewhere."""

    number: str

    @property
    def prefix(self) -> str:
        return f"preview_{self.number}_"

    def table(self, *path: str) -> tuple[str, str]:
        """The place of a table."""
        return STAGE, fitting(self.prefix, ".".join(path))

    def task(self, task: Task) -> Task:
        """The task with the tables of the preview; progress is kept by the same state keys."""
        return replace(task, targets=tuple(map(self._target, task.targets)))

    def _target(self, target: Target) -> Target:
        return replace(target, path=self.table(*target.path))

    def shown(self, text: str, task: Task) -> str:
        """A text about the preview's tables as one about those that they stand for."""
        for target in task.targets:
            text = text.replace(".".join(self.table(*target.path)), ".".join(target.path))
        return text


def claim(connection: Connection) -> Preview:
    """A number that is nobody's, until the transaction that this begins has ended."""
    run(connection, "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0")
    while True:
        preview = Preview(secrets.token_hex(4))
        if _locked(connection, preview.number):
            return preview


def sweep(connection: Connection) -> None:
    """Remove the tables of every preview that does not live any more."""
    rows = run(connection, _TABLES, (STAGE, "preview_")).fetchall()
    for number in sorted({found[1] for (name,) in rows if (found := _NUMBER.match(name))}):
        run(connection, "BEGIN")
        if _locked(connection, number):
            remove(connection, Preview(number))
        run(connection, "COMMIT")


def remove(connection: Connection, preview: Preview) -> None:
    """Drop its tables; what somebody holds on to is left to the next preview."""
    for (name,) in run(connection, _TABLES, (STAGE, preview.prefix)).fetchall():
        try:
            with connection.transaction():
                run(connection, "SET LOCAL lock_timeout = '5s'")
                run(connection, f"DROP TABLE IF EXISTS {quoted(STAGE, name)}")
        except psycopg.Error as error:
            _log.warning(
                "%s stays until the next preview: %s",
                quoted(STAGE, name),
                error.diag.message_primary or error,
            )


def copy_shape(connection: Connection, preview: Preview, path: tuple[str, ...]) -> None:
    """Make the preview's table like the one that is there, if it is."""
    live = postgres_tables.look(connection, path)
    if live is None:
        return
    postgres_tables.check_kind(path, live)
    run(
        connection,
        f"CREATE TABLE {quoted(*preview.table(*path))} (LIKE {quoted(*path)} INCLUDING DEFAULTS "
        "INCLUDING CONSTRAINTS INCLUDING INDEXES INCLUDING GENERATED INCLUDING IDENTITY)",
    )


def _locked(connection: Connection, number: str) -> bool:
    key = int.from_bytes(bytes.fromhex(number), "big", signed=True)
    found = run(connection, f"SELECT pg_try_advisory_xact_lock({_LOCKS}, {key})").fetchone()
    return found is not None and bool(found[0])
