"""The tables of previews in PostgreSQL, in the schema where tasks stage rows.

So a preview needs no privilege that a run does not need. All of its tables have names that begin
with `preview_` and its number. While it lives it holds an advisory lock of that number, in a
transaction that stays open: the server releases it when the connection ends, in whatever way.
"""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass
from typing import Final

import psycopg

from penstock.connectors.postgres.locks import PostgresConnection
from penstock.connectors.postgres.rows import STAGE, fitting
from penstock.connectors.sql.statements import quoted

_log = logging.getLogger("penstock.connectors")

_LOCKS: Final = 0x70656E73
"""The first half of the keys of advisory locks that show which previews live."""
_NUMBER: Final = re.compile(r"preview_([0-9a-f]{8})_")
_TABLES: Final = (
    "SELECT tablename::text FROM pg_tables WHERE schemaname = $1 AND starts_with(tablename, $2) "
    "AND pg_has_role(tableowner, 'MEMBER')"
)


@dataclass(frozen=True, slots=True)
class PostgresPreview:
    """The names of a preview's tables."""

    number: str

    @property
    def prefix(self) -> str:
        return f"preview_{self.number}_"

    def place(self, path: tuple[str, ...]) -> tuple[str, str]:
        """Return the table that stands for the one at `path`."""
        return STAGE, fitting(self.prefix, ".".join(path))


def claim(connection: PostgresConnection) -> PostgresPreview:
    """Take a free number, until the transaction that this begins has ended."""
    connection.run("BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0")
    while True:
        preview = PostgresPreview(secrets.token_hex(4))
        if _locked(connection, preview.number):
            return preview


def sweep(connection: PostgresConnection) -> None:
    """Remove the tables of every preview that does not live any more."""
    rows = connection.run(_TABLES, (STAGE, "preview_")).fetchall()
    for number in sorted({found[1] for (name,) in rows if (found := _NUMBER.match(name))}):
        connection.run("BEGIN")
        if _locked(connection, number):
            remove(connection, PostgresPreview(number))
        connection.run("COMMIT")


def remove(connection: PostgresConnection, preview: PostgresPreview) -> None:
    """Drop its tables; one that another session holds is left to the next preview."""
    for (name,) in connection.run(_TABLES, (STAGE, preview.prefix)).fetchall():
        try:
            with connection.transaction():
                connection.run("SET LOCAL lock_timeout = '5s'")
                connection.run(f"DROP TABLE IF EXISTS {quoted(STAGE, name)}")
        except psycopg.Error as error:
            _log.warning(
                "%s stays until the next preview: %s",
                quoted(STAGE, name),
                error.diag.message_primary or error,
            )


def _locked(connection: PostgresConnection, number: str) -> bool:
    key = int.from_bytes(bytes.fromhex(number), "big", signed=True)
    found = connection.run(f"SELECT pg_try_advisory_xact_lock({_LOCKS}, {key})").fetchone()
    return found is not None and bool(found[0])
