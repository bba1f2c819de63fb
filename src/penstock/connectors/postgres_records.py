"""What PostgreSQL remembers of the targets of tasks: a row each, beside the checkpoints.

A row also holds which table it was filled (by its OID), as long as the rows themselves are where
they were written: a database that was dumped and restored has other OIDs, and the table of records
too, by which that is seen.
"""

from __future__ import annotations

from penstock.connectors.ownership import Record
from penstock.connectors.postgres_server import Connection, run
from penstock.connectors.sql import TABLES, quoted
from penstock.runtime.connector import ConnectorError

_NEWER = "ADD COLUMN task text, ADD COLUMN filled boolean, ADD COLUMN made oid, ADD COLUMN kept oid"
"""Columns that an older release did not have: `kept` is the OID of the table of records itself."""


def make(connection: Connection, tables: str) -> None:
    """The table of records, as this release has it; within a transaction that makes tables."""
    run(
        connection,
        f"CREATE TABLE IF NOT EXISTS {tables} "
        "(schema text, name text, state_key text NOT NULL, PRIMARY KEY (schema, name))",
    )
    if not _is_new(connection, tables):
        run(connection, f"ALTER TABLE {tables} {_NEWER}")


def _is_new(connection: Connection, tables: str) -> bool:
    found = run(
        connection,
        "SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass($1) AND attname = 'kept'",
        (tables,),
    )
    return found.fetchone() is not None


def record(connection: Connection, tables: str, path: tuple[str, ...]) -> Record | None:
    """What is remembered of a target."""
    found = run(connection, "SELECT to_regclass($1)", (tables,)).fetchone()
    if found is None or found[0] is None:
        return None
    newer = "NULL, NULL, NULL"
    if _is_new(connection, tables):
        newer = "task, filled, CASE WHEN kept = tableoid THEN made END"
    row = run(
        connection,
        f"SELECT state_key, {newer} FROM {tables} WHERE schema = $1 AND name = $2",
        path,
    ).fetchone()
    if row is None:
        return None
    state_key, task, filled, made = row
    return Record(state_key=state_key, task=task, filled=filled, made=made)


def remember(connection: Connection, tables: str, path: tuple[str, ...], what: Record) -> None:
    """Note what is true of a target from now on, and of the table that is there now."""
    run(
        connection,
        f"INSERT INTO {tables} (schema, name, state_key, task, filled, made, kept) "
        "VALUES ($1, $2, $3, $4, $5, to_regclass($6)::oid, to_regclass($7)::oid) "
        "ON CONFLICT (schema, name) DO UPDATE SET state_key = excluded.state_key, "
        "task = excluded.task, filled = excluded.filled, made = excluded.made, "
        "kept = excluded.kept",
        (*path, what.state_key, what.task, what.filled, quoted(*path), tables),
    )


def forget(tables: str, path: tuple[str, ...]) -> str:
    """The statement that removes a record, for people."""
    schema, name = (part.replace("'", "''") for part in path)
    return f"DELETE FROM {tables} WHERE schema = '{schema}' AND name = '{name}'"


def elsewhere(connection: Connection, path: tuple[str, ...], tables: str) -> ConnectorError | None:
    """Why a table is not to be had, if tasks whose checkpoints are in another schema fill it."""
    others = run(
        connection,
        "SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.relname = $1 AND c.relkind = 'r' AND c.oid IS DISTINCT FROM to_regclass($2)::oid "
        "AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')",
        (TABLES, tables),
    ).fetchall()
    for (schema,) in others:
        found = record(connection, quoted(schema, TABLES), path)
        if found is not None and found.task is not None:
            return ConnectorError(
                f"table {'.'.join(path)} belongs to {found.task}",
                why=f"that task keeps its checkpoint in schema {schema}; two tasks that fill one "
                "table count everything twice",
                fix="give the binding another table, or drop this one and what is noted of it: "
                f"{forget(quoted(schema, TABLES), path)}",
            )
    return None
