"""The faults of a source, in words that help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import psycopg

from penstock.connectors.postgres.server import Server, explain
from penstock.connectors.postgres_cdc.tables import Slot, Table
from penstock.connectors.postgres_cdc.wire import Malformed
from penstock.runtime.connector.common import ConnectorError

RAISE: Final = "raise `backfill` of the capture's bindings: their tables are read again"

_FIXES: Final = {
    "42P01": "a table was dropped or renamed: disable its binding, or name another table",
    "42703": "a column was dropped while its table was read: nothing, it is read again",
    "42501": "GRANT what is missing: SELECT on the tables, USAGE on their schemas, and the "
    "attribute REPLICATION (ALTER ROLE … REPLICATION)",
    "42704": "a publication is gone: create it again, and raise `backfill` of bindings whose "
    "tables changed meanwhile",
    "55006": "end what uses it, or wait: it is tried again",
    "55000": RAISE,
    "58P01": RAISE,
    "22023": "nothing: the snapshot is taken again",
    "53400": "raise max_replication_slots, or drop unused slots (pg_replication_slots)",
}
_LASTING: Final = frozenset({"42P01", "42704", "55000", "58P01", "53400"})
_PASSING: Final = frozenset({"22023", "42703", "55006"})


@contextlib.contextmanager
def explained(server: Server) -> Iterator[None]:
    """Within this, errors of the server are `ConnectorError`."""
    try:
        yield
    except psycopg.Error as error:
        raise explanation(error, server) from error


def explanation(error: psycopg.Error, server: Server) -> ConnectorError:
    """Explain an error of the server as one of a source."""
    found = explain(error, where=server.name, user=server.user)
    code = error.sqlstate
    if code is None or code not in _FIXES:
        return found
    return ConnectorError(
        found.what,
        where=found.where,
        why=found.why,
        fix=_FIXES[code],
        transient=(found.transient or code in _PASSING) and code not in _LASTING,
    )


def may_not_replicate(server: Server) -> ConnectorError:
    return ConnectorError(
        f"{server.user} may not read the server's log",
        where=server.name,
        fix=f'ALTER ROLE "{server.user}" REPLICATION; at a provider, the group that stands for it',
    )


def another_server(server: Server, *, known: str, found: str) -> ConnectorError:
    return ConnectorError(
        "this is another server than the one that was captured so far",
        where=server.name,
        why=f"its system identifier is {found}, and was {known}: its log has other positions",
        fix=f"give the address of the server that was captured, or {RAISE}",
    )


def in_use(server: Server, slot: str, pid: int) -> ConnectorError:
    return ConnectorError(
        f"replication slot {slot} is in use by pid {pid}",
        where=server.name,
        why="a slot has one reader: another session of this capture, perhaps one that is ending",
        fix=f"wait, or end it: SELECT pg_terminate_backend({pid})",
        transient=True,
    )


def lost(server: Server, slot: str, why: str) -> ConnectorError:
    return ConnectorError(
        "changes were lost: the log does not have them any more",
        where=f"{server.name}: replication slot {slot}",
        why=why,
        fix=f"{RAISE}, and the slot is created again; rows that were deleted meanwhile stay in the "
        "collections. To keep the log for longer, raise max_slot_wal_keep_size",
    )


def slot_fault(
    server: Server, name: str, slot: Slot | None, *, database: str, cursor: int
) -> ConnectorError | None:
    """What is wrong with the slot of a capture that has come to a position; None if nothing is."""
    if slot is None:
        return lost(server, name, "there is no such slot")
    if slot.database != database:
        return lost(server, name, f"it belongs to database {slot.database}")
    if slot.is_lost:
        return lost(server, name, "the server removed log that the slot needs (wal_status = lost)")
    if slot.confirmed is not None and slot.confirmed > cursor:
        return lost(
            server,
            name,
            "it was moved beyond what this capture has committed, by another process; or the "
            "deployment was restored to an older state",
        )
    return None


def went_back(server: Server, *, cursor: str, current: str) -> ConnectorError:
    return ConnectorError(
        "the server's log ends before the changes that were captured",
        where=server.name,
        why=f"it ends at {current}, and was read up to {cursor}: was the server restored?",
        fix=RAISE,
    )


def not_on_disk(server: Server, error: OSError) -> ConnectorError:
    return ConnectorError(
        "a large transaction cannot be put on disk",
        where=f"{server.where}: {error.filename or 'spoolDirectory'}",
        why=error.strerror,
        fix="free some space there, or set `spoolDirectory` to a directory that has some",
        transient=True,
    )


def misunderstood(server: Server, error: Malformed) -> ConnectorError:
    return ConnectorError(
        "the server sent something that is not part of the protocol that was agreed on",
        where=server.name,
        why=str(error),
        fix="is this PostgreSQL? Report it, with the server's version",
    )


def truncated(server: Server, table: str) -> ConnectorError:
    return ConnectorError(
        f"table {table} was truncated, which no document can say",
        where=server.name,
        why="its rows are gone at the source, and stay in the collection",
        fix="raise `backfill` of its binding: the table is read again, and its rows of before stay "
        "in the collection; or set `onTruncate: ignore` on the binding's resource",
    )


def value_lost(server: Server, table: str, column: str) -> ConnectorError:
    return ConnectorError(
        f"a row of table {table} got another key, and the log does not repeat its {column}",
        where=server.name,
        why="large values that an update did not change are not part of the log",
        fix="raise `backfill` of its binding, and let the log have them from now on: ALTER TABLE "
        f"{table} REPLICA IDENTITY FULL",
    )


def no_table(server: Server, name: str) -> ConnectorError:
    return ConnectorError(
        f"there is no table {name}",
        where=server.name,
        fix="correct the binding's resource, or disable it; views and foreign tables have no log",
    )


def may_not_read(server: Server, table: Table) -> ConnectorError:
    return ConnectorError(
        f"{server.user} may not read table {table.shown}",
        where=server.name,
        fix=f'GRANT SELECT ON {table.quoted} TO "{server.user}", and USAGE on its schema',
    )


def no_identity(server: Server, table: Table, missing: list[str]) -> ConnectorError:
    return ConnectorError(
        f"the log would not say which row of table {table.shown} is updated or deleted",
        where=server.name,
        why=f"its replica identity does not have {', '.join(missing)}, of the collection's key",
        fix="give the table a primary key of these columns; or ALTER TABLE "
        f"{table.quoted} REPLICA IDENTITY FULL",
    )


def replaced(server: Server, table: str) -> ConnectorError:
    return ConnectorError(
        f"table {table} is not the one that was captured so far",
        where=server.name,
        why="it was dropped, and made again",
        fix="raise `backfill` of its binding",
    )


def unpublished(server: Server, publication: str, table: Table, *, known: bool) -> ConnectorError:
    missed = "; then raise `backfill` of its binding: changes were missed" if known else ""
    return ConnectorError(
        f"publication {publication} does not have table {table.shown}",
        where=server.name,
        fix=f"ALTER PUBLICATION {publication} ADD TABLE {table.quoted}{missed}; a partitioned "
        "table needs publish_via_partition_root",
    )
