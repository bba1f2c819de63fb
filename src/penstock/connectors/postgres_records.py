"""What PostgreSQL remembers of the targets of tasks: a row each, beside the checkpoints.

A row also holds which table it was filled (by its OID), as long as the rows themselves are where
they were written: a database that was dumped and restored has other OIDs, and the table of records
too, by which that is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.connectors import ownership
from penstock.connectors.ownership import Found, Record
from penstock.connectors.postgres_locks import Connection
from penstock.connectors.postgres_server import run
from penstock.connectors.postgres_tables import LiveTable, is_empty
from penstock.connectors.sql import TABLES, quoted
from penstock.runtime.connector import ConnectorError, Target, Task

_NEWER = "ADD COLUMN task text, ADD COLUMN filled boolean, ADD COLUMN made oid, ADD COLUMN kept oid"
"""Columns that an older release did not have: `kept` is the OID of the table of records itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The tables that an endpoint's memory is in, quoted."""

    checkpoints: str
    tables: str


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


def claim(
    connection: Connection,
    records: Records,
    task: Task,
    target: Target,
    *,
    was: Target | None,
    live: LiveTable | None,
    hard_delete: bool,
) -> bool:
    """Make a table the task's, and say whether its rows are out of date; raises if it may not be.

    Whoever had it before is fenced. Within a transaction that holds the lock for such changes.
    """
    found = record(connection, records.tables, target.path)
    if found is None:
        _check_elsewhere(connection, records.tables, task, target.path)
        if was is not None:
            found = Record(state_key=was.state_key)
    claim = ownership.claim(
        task,
        target,
        found,
        Found(
            there=live is not None,
            is_empty=lambda: is_empty(connection, target.path),
            made=None if live is None else live.oid,
        ),
        was=was,
        hard_delete=hard_delete,
        forget=forget(records.tables, target.path),
    )
    if claim.taken_from is not None:
        run(
            connection,
            f"UPDATE {records.checkpoints} SET fence = fence + 1 WHERE task = $1",
            (claim.taken_from,),
        )
    claimed = ownership.claimed(task, target, found, claim)
    _remember(connection, records.tables, target.path, claimed)
    return claim.emptied


def _remember(connection: Connection, tables: str, path: tuple[str, ...], what: Record) -> None:
    run(
        connection,
        f"INSERT INTO {tables} (schema, name, state_key, task, filled) "
        "VALUES ($1, $2, $3, $4, $5) "
        "ON CONFLICT (schema, name) DO UPDATE SET state_key = excluded.state_key, "
        "task = excluded.task, filled = excluded.filled",
        (*path, what.state_key, what.task, what.filled),
    )


def remember_made(connection: Connection, tables: str, path: tuple[str, ...]) -> None:
    """Note which table a target is."""
    run(
        connection,
        f"UPDATE {tables} SET made = to_regclass($3)::oid, kept = tableoid "
        "WHERE schema = $1 AND name = $2",
        (*path, quoted(*path)),
    )


def remember_filled(connection: Connection, tables: str, path: tuple[str, ...]) -> None:
    """Note that rows were stored to a target."""
    run(
        connection,
        f"UPDATE {tables} SET filled = true WHERE schema = $1 AND name = $2 AND filled IS NOT TRUE",
        path,
    )


def copy_state_key(
    connection: Connection, real: str, path: tuple[str, ...], mine: str, at: tuple[str, ...]
) -> None:
    """Of a preview: under which state key the real table was filled, and nothing else of it."""
    if (found := record(connection, real, path)) is not None:
        _remember(connection, mine, at, Record(state_key=found.state_key))


def rename(connection: Connection, records: Records, task: Task, checkpoint: bytes | None) -> bool:
    """Keep under the task's name what was kept under its old one, which is fenced by that.

    False if there is a checkpoint of each.
    """
    if task.renamed_from is None:
        return True
    gone = run(
        connection,
        f"DELETE FROM {records.checkpoints} WHERE task = $1 RETURNING checkpoint",
        (task.renamed_from,),
    ).fetchone()
    if gone is not None and gone[0] is not None:
        if checkpoint is not None:
            return False
        run(
            connection,
            f"UPDATE {records.checkpoints} SET checkpoint = $1 WHERE task = $2",
            (gone[0], task.name),
        )
    run(
        connection,
        f"UPDATE {records.tables} SET task = $1 WHERE task = $2",
        (task.name, task.renamed_from),
    )
    return True


def forget(tables: str, path: tuple[str, ...]) -> str:
    """The statement that removes a record, for people."""
    schema, name = (part.replace("'", "''") for part in path)
    return f"DELETE FROM {tables} WHERE schema = '{schema}' AND name = '{name}'"


def _check_elsewhere(
    connection: Connection, tables: str, task: Task, path: tuple[str, ...]
) -> None:
    """That no other task fills a table whose checkpoints are in another schema."""
    others = run(
        connection,
        "SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE c.relname = $1 AND c.relkind = 'r' AND c.oid IS DISTINCT FROM to_regclass($2)::oid "
        "AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')",
        (TABLES, tables),
    ).fetchall()
    for (schema,) in others:
        found = record(connection, quoted(schema, TABLES), path)
        if found is not None and found.task not in (None, task.name, task.renamed_from):
            raise ConnectorError(
                f"table {'.'.join(path)} belongs to {found.task}",
                where=task.name,
                why=f"that task keeps its checkpoint in schema {schema}; two tasks that fill one "
                "table count everything twice",
                fix="give the binding another table, or drop this one and what is noted of it: "
                f"{forget(quoted(schema, TABLES), path)}",
            )
