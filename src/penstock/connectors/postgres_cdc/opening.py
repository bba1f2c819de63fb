"""How a session begins: the server, the tables and the slot are what the state says they are."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.connectors.postgres.locks import PostgresConnection
from penstock.connectors.postgres.server import Server
from penstock.connectors.postgres_cdc import faults, tables
from penstock.connectors.postgres_cdc.faults import slot_fault
from penstock.connectors.postgres_cdc.progress import ChangesProgress
from penstock.connectors.postgres_cdc.rows import key_members
from penstock.connectors.postgres_cdc.tables import Publication, Slot, Table, TableName
from penstock.connectors.postgres_cdc.wire import lsn_of, lsn_text
from penstock.connectors.sql.statements import quoted
from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import SourceBinding
from penstock.runtime.connector.common import ConnectorError

_log = logging.getLogger("penstock.connectors")

VERSION_MIN: Final = 130000
IN_USE_S: Final = 5.0
"""Seconds that a slot may take to be let go of by a session that has ended."""
META: Final = "_meta"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTable:
    """A binding, and its table."""

    binding: SourceBinding
    table: Table
    key: tuple[str, ...]
    """Members of documents that the collection's key is in."""
    ignores_truncate: bool

    @property
    def state_key(self) -> str:
        return self.binding.state_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a session begins with."""

    system: str
    slot: str
    cursor: int | None
    """None: there is no slot yet, and all tables are to be read."""
    is_claimed: bool
    """The name of the slot is committed already."""
    known: tuple[BoundTable, ...]
    pending: tuple[BoundTable, ...]
    """Tables that are to be read whole."""
    forgotten: Json | None
    """The patch that forgets bindings, if there are any to forget."""
    target: int
    """Where the log ends now."""

    def as_claimed(self) -> Start:
        """For a slot that ends with its session: its name need not be known afterwards."""
        return replace(self, is_claimed=True)


def check_server(connection: PostgresConnection, server: Server) -> None:
    """Refuse a server that cannot give changes."""
    if connection.info.server_version < VERSION_MIN:
        raise ConnectorError(
            "this server is too old", where=server.name, fix="PostgreSQL 13 or later is needed"
        )
    row = connection.run(
        "SELECT current_setting('wal_level'), pg_is_in_recovery(), "
        "current_setting('max_replication_slots')::int > 0 AND "
        "current_setting('max_wal_senders')::int > 0"
    ).fetchone()
    level, standby, has_slots = row or ("", False, False)
    if level != "logical":
        raise ConnectorError(
            "the server's log does not have changes of rows",
            where=server.name,
            why=f"wal_level is {level}",
            fix="ALTER SYSTEM SET wal_level = logical, and restart the server",
        )
    if standby:
        raise ConnectorError(
            "the server is a standby",
            where=server.name,
            why="a slot is made on the server that tables are changed on",
            fix="give the address of the primary",
        )
    if not has_slots:
        raise ConnectorError(
            "the server has no replication slots",
            where=server.name,
            fix="raise max_replication_slots and max_wal_senders, and restart the server",
        )


# ---------------------------------------------------------------------------------------- tables


def bound_tables(
    connection: PostgresConnection,
    server: Server,
    bindings: Sequence[SourceBinding],
    names: Sequence[TableName],
    ignores_truncate: Sequence[bool],
) -> list[BoundTable]:
    """The tables of bindings, which have to be fit for it."""
    found = {(each.schema, each.name): each for each in tables.tables_named(connection, names)}
    bound = []
    for binding, name, ignores in zip(bindings, names, ignores_truncate, strict=True):
        if name not in found:
            raise faults.no_table(server, ".".join(name))
        table, key = found[name], key_members(binding.collection.key)
        _check_table(server, binding, table, key)
        bound.append(BoundTable(binding=binding, table=table, key=key, ignores_truncate=ignores))
    return bound


def _check_table(
    server: Server, binding: SourceBinding, table: Table, key: tuple[str, ...]
) -> None:
    where = f"{server.where}: {table.shown}"
    names = [column.name for column in table.columns]
    if not table.is_readable:
        raise faults.may_not_read(server, table)
    if META in names:
        raise UserError(
            f"table {table.shown} has a column {META}, where documents say what happened",
            where=where,
            fix="rename the column, or disable the binding",
        )
    if not binding.wants_meta:
        raise UserError(
            f"the schema of {binding.collection.name} does not name /{META}",
            where=where,
            why="without it, a document cannot say that its row was deleted",
            fix="take the schema that `penstock discover` proposes, or add `_meta: {type: object}` "
            "to its properties",
        )
    if absent := [name for name in key if name not in names]:
        raise UserError(
            f"the key of {binding.collection.name} is not in table {table.shown}",
            where=where,
            why=f"there is no column {', '.join(absent)}",
            fix=f"columns of the table: {', '.join(names)}",
        )
    missing = [name for name in key if name not in table.identity_columns]
    if missing:
        raise faults.no_identity(server, table, missing)


# ------------------------------------------------------------------------------------ publications


def ensure_published(
    connection: PostgresConnection,
    server: Server,
    name: str,
    start: Start,
    *,
    managed: bool,
) -> None:
    """See that all changes are published; make the publication, if it is the capture's own."""
    found = tables.publication(connection, name)
    if managed and found is None and start.cursor is None:
        _create(connection, server, name, [each.table for each in start.pending])
        return
    if found is None:
        raise ConnectorError(
            f"there is no publication {name}",
            where=server.name,
            why=None if start.cursor is None else "changes since it was dropped are not known",
            fix=f"CREATE PUBLICATION {name} FOR TABLE …"
            if start.cursor is None
            else f"{faults.RAISE}, and a publication is created if none is named",
        )
    if not found.is_whole:
        raise ConnectorError(
            f"publication {name} leaves changes out",
            where=server.name,
            fix=f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')",
        )
    for bound in start.known:
        if not _has(found, bound.table):
            raise faults.unpublished(server, name, bound.table, known=True)
    for bound in start.pending:
        if not _has(found, bound.table):
            if not managed:
                raise faults.unpublished(server, name, bound.table, known=False)
            connection.run(f"ALTER PUBLICATION {quoted(name)} ADD TABLE {bound.table.quoted}")
            _log.info("publication %s has table %s now", name, bound.table.shown)


def _create(
    connection: PostgresConnection, server: Server, name: str, wanted: Sequence[Table]
) -> None:
    listed = ", ".join(dict.fromkeys(table.quoted for table in wanted))
    statement = (
        f"CREATE PUBLICATION {quoted(name)} FOR TABLE {listed} "
        "WITH (publish_via_partition_root = true)"
    )
    row = connection.run("SELECT has_database_privilege(current_database(), 'CREATE')").fetchone()
    if not (row and row[0]) or not all(table.is_owned for table in wanted):
        raise ConnectorError(
            f"{server.user} may not publish these tables",
            where=server.name,
            why="that takes CREATE on the database, and owning the tables",
            fix=f"as their owner: {statement}; and name it: `publication: {name}`",
        )
    connection.run(statement)
    _log.info("made publication %s", name)


def _has(publication: Publication, table: Table) -> bool:
    return (table.schema, table.name) in publication.tables


# ------------------------------------------------------------------------------------------- slots


def begin(
    connection: PostgresConnection,
    server: Server,
    progress: ChangesProgress,
    bound: Sequence[BoundTable],
    *,
    system: str,
    task: str,
    stopping: threading.Event,
) -> Start:
    """Find out where to begin, and refuse if changes since then are lost."""
    database, current = _place(connection)
    known = [each for each in bound if each.state_key in progress.tables]
    is_same = progress.system == system
    if progress.cursor is not None and known:
        if not is_same:
            raise faults.another_server(server, known=progress.system or "another", found=system)
        name = progress.slot or ""
        slot = _free(connection, server, name, stopping)
        fault = slot_fault(server, name, slot, database=database, cursor=progress.cursor)
        if fault is not None:
            raise fault
        if current < progress.cursor:
            raise faults.went_back(
                server, cursor=lsn_text(progress.cursor), current=lsn_text(current)
            )
        for each in known:
            if progress.tables[each.state_key] != each.table.oid:
                raise faults.replaced(server, each.table.shown)
        return Start(
            system=system,
            slot=name,
            cursor=progress.cursor,
            is_claimed=True,
            known=tuple(known),
            pending=tuple(each for each in bound if each not in known),
            forgotten=progress.forgotten(each.state_key for each in bound),
            target=current,
        )
    # All tables are read, from a slot that is new: one that was begun is of no use.
    if progress.slot is not None and is_same:
        slot = _free(connection, server, progress.slot, stopping)
        if slot is not None and slot.database == database:
            connection.run("SELECT pg_drop_replication_slot($1)", (progress.slot,))
    reused = progress.slot if is_same and progress.cursor is None else None
    return Start(
        system=system,
        slot=reused or f"penstock_{tables.task_hash(task)}_{secrets.token_hex(4)}",
        cursor=None,
        is_claimed=reused is not None,
        known=(),
        pending=tuple(bound),
        forgotten=None,
        target=current,
    )


def _place(connection: PostgresConnection) -> tuple[str, int]:
    row = connection.run("SELECT current_database()::text, pg_current_wal_lsn()::text").fetchone()
    database, lsn = row or ("", "0/0")
    return database, lsn_of(lsn)


def _free(
    connection: PostgresConnection, server: Server, name: str, stopping: threading.Event
) -> Slot | None:
    """The slot, once nobody uses it: a process that was killed may hold it for a moment."""
    until = time.monotonic() + IN_USE_S
    while True:
        slot = tables.slot(connection, name)
        if slot is None or slot.active_pid is None:
            return slot
        if time.monotonic() > until or stopping.wait(0.1):
            raise faults.in_use(server, name, slot.active_pid)
