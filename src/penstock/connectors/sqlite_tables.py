"""Tables of SQLite: what is there, and what has to be done to it.

The same division as for PostgreSQL: `look` asks, `plan` decides, and a transaction does it. SQLite
compares names without regard to case, so live columns are known by their lower-case names; and it
knows four types, of which TEXT holds what no other does: decimals to the digit, containers as JSON.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from penstock.connectors import ownership
from penstock.connectors.ownership import Found, Record
from penstock.connectors.sql import CHECKPOINTS, TABLES, key_of, quoted
from penstock.model.columns import Column, Kind
from penstock.runtime.connector import ConnectorError, Target, TargetField, Task

_TYPES: Final = {
    Kind.BOOLEAN: "INTEGER",
    Kind.LONG: "INTEGER",
    Kind.DOUBLE: "REAL",
}


def type_of(column: Column) -> str:
    return _TYPES.get(column.kind, "TEXT")


class Fit(enum.Enum):
    """What a column that is there means for a field."""

    HOLDS = "it holds every value as it is"
    WIDENS = "it does once its values are written as text, which keeps them"
    FAILS = "it cannot hold the values"


def fit(field: TargetField, live: str) -> Fit:
    """Whether a column of type `live` holds the field."""
    live = "INTEGER" if live == "INT" else live
    if live == type_of(field.column):
        return Fit.HOLDS
    digits = field.column.kind is Kind.DECIMAL and not field.column.scale and not field.is_key
    return Fit.WIDENS if digits and live == "INTEGER" else Fit.FAILS


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTable:
    """A table that is there."""

    columns: dict[str, str]
    """Types by lower-case name."""
    key: tuple[str, ...]
    strict: bool
    required: frozenset[str] = frozenset()
    """Columns that must be given a value."""


def look(connection: sqlite3.Connection, path: tuple[str, ...]) -> LiveTable | None:
    """What is at `path`, the name of a table."""
    listed = connection.execute(
        "SELECT type, strict FROM pragma_table_list(?) WHERE schema = 'main'", path
    ).fetchone()
    if listed is None:
        return None
    kind, strict = listed
    if kind != "table":
        raise ConnectorError(
            f"{path[0]} is there, and is not a table but a {kind}",
            fix="give the binding another table, or drop what is there",
        )
    rows = connection.execute(
        'SELECT lower(name), upper(type), pk, "notnull" AND dflt_value IS NULL '
        "FROM pragma_table_info(?) ORDER BY pk",
        path,
    ).fetchall()
    return LiveTable(
        columns={name: type_ for name, type_, _, _ in rows},
        key=tuple(name for name, _, pk, _ in rows if pk),
        strict=bool(strict),
        required=frozenset(name for name, _, _, needed in rows if needed),
    )


def is_empty(connection: sqlite3.Connection, path: tuple[str, ...]) -> bool:
    return connection.execute(f"SELECT 1 FROM {quoted(*path)} LIMIT 1").fetchone() is None


def record(connection: sqlite3.Connection, path: tuple[str, ...]) -> Record | None:
    """What is remembered of a target, by any spelling of its name."""
    columns = _record_columns(connection)
    if not columns:
        return None
    newer = "task, filled" if "task" in columns else "NULL, NULL"
    row = connection.execute(
        f"SELECT state_key, {newer} FROM {TABLES} WHERE name = ? COLLATE NOCASE", path
    ).fetchone()
    if row is None:
        return None
    state_key, task, filled = row
    return Record(state_key=state_key, task=task, filled=None if filled is None else bool(filled))


def _record_columns(connection: sqlite3.Connection) -> set[str]:
    return {
        name for (name,) in connection.execute(f"SELECT name FROM pragma_table_info('{TABLES}')")
    }


def make_records(connection: sqlite3.Connection) -> None:
    """The table of records, as this release has it."""
    columns = _record_columns(connection)
    if not columns:
        connection.execute(
            f"CREATE TABLE {TABLES} (name TEXT PRIMARY KEY, state_key TEXT NOT NULL, task TEXT, "
            "filled INTEGER) STRICT"
        )
    elif "task" not in columns:
        connection.execute(f"ALTER TABLE {TABLES} ADD COLUMN task TEXT")
        connection.execute(f"ALTER TABLE {TABLES} ADD COLUMN filled INTEGER")


def shape(connection: sqlite3.Connection, path: tuple[str, ...]) -> list[str]:
    """Statements that make such a table elsewhere, with its indexes, if it is there."""
    rows = connection.execute(
        "SELECT sql FROM sqlite_schema WHERE tbl_name = ? COLLATE NOCASE AND sql IS NOT NULL "
        "AND type IN ('view', 'table', 'index') ORDER BY type DESC",
        path,
    )
    return [statement for (statement,) in rows]


def remember(connection: sqlite3.Connection, path: tuple[str, ...], record: Record) -> None:
    """Note what is true of a target from now on."""
    connection.execute(f"DELETE FROM {TABLES} WHERE name = ? COLLATE NOCASE", path)
    connection.execute(
        f"INSERT INTO {TABLES} (name, state_key, task, filled) VALUES (?, ?, ?, ?)",
        (*path, record.state_key, record.task, record.filled),
    )


def claim(
    connection: sqlite3.Connection,
    task: Task,
    target: Target,
    *,
    was: Target | None,
    live: LiveTable | None,
    hard_delete: bool,
) -> bool:
    """Make a table the task's, and say whether its rows are out of date; raises if it may not be.

    Whoever had it before is fenced.
    """
    found = record(connection, target.path)
    if found is None and was is not None:
        found = Record(state_key=was.state_key)
    name = target.path[0].replace("'", "''")
    claim = ownership.claim(
        task,
        target,
        found,
        Found(there=live is not None, is_empty=lambda: is_empty(connection, target.path)),
        was=was,
        hard_delete=hard_delete,
        forget=f"DELETE FROM {TABLES} WHERE name = '{name}'",
    )
    if claim.taken_from is not None:
        connection.execute(
            f"UPDATE {CHECKPOINTS} SET fence = fence + 1 WHERE task = ?", (claim.taken_from,)
        )
    remember(connection, target.path, ownership.claimed(task, target, found, claim))
    return claim.emptied


def rename(connection: sqlite3.Connection, task: Task, checkpoint: bytes | None) -> bool:
    """Keep under the task's name what was kept under its old one, which is fenced by that.

    False if there is a checkpoint of each.
    """
    if task.renamed_from is None:
        return True
    gone = connection.execute(
        f"DELETE FROM {CHECKPOINTS} WHERE task = ? RETURNING checkpoint", (task.renamed_from,)
    ).fetchall()
    if gone and gone[0][0] is not None:
        if checkpoint is not None:
            return False
        connection.execute(
            f"UPDATE {CHECKPOINTS} SET checkpoint = ? WHERE task = ?", (gone[0][0], task.name)
        )
    connection.execute(
        f"UPDATE {TABLES} SET task = ? WHERE task = ?", (task.name, task.renamed_from)
    )
    return True


def remember_filled(connection: sqlite3.Connection, path: tuple[str, ...]) -> None:
    """Rows were stored to a target."""
    connection.execute(
        f"UPDATE {TABLES} SET filled = 1 WHERE name = ? COLLATE NOCASE AND filled IS NOT 1", path
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Statements, and what they do, for people."""

    statements: tuple[str, ...]
    says: str


def plan(target: Target, live: LiveTable | None, *, emptied: bool) -> Iterator[Step]:
    """What brings a table to its target; columns that others added stay.

    `emptied`: its rows are out of date. Raises `ConnectorError` where only a person can decide.
    """
    table = quoted(*target.path)
    if live is not None and emptied:
        if live.strict and live.key == _key(target) and not _misfits(target, live, keys=True):
            yield Step(statements=(f"DELETE FROM {table}",), says=f"emptied {table} for a backfill")
            for field in _misfits(target, live, keys=False):
                column, kind = quoted(field.name), type_of(field.column)
                yield Step(
                    statements=(
                        f"ALTER TABLE {table} DROP COLUMN {column}",
                        f"ALTER TABLE {table} ADD COLUMN {column} {kind}",
                    ),
                    says=f"{table}.{column} is {kind} now",
                )
                live.columns[field.name.lower()] = kind
        else:
            yield Step(
                statements=(f"DROP TABLE {table}",), says=f"dropped {table}: it does not fit"
            )
            live = None
    if live is None:
        yield Step(statements=(_create(target),), says=f"created {table}")
        return
    _check(target, live)
    for field in target.fields:
        yield from _column(target, field, live.columns.get(field.name.lower()))


def _column(target: Target, field: TargetField, there: str | None) -> Iterator[Step]:
    table, column, kind = quoted(*target.path), quoted(field.name), type_of(field.column)
    add = f"ALTER TABLE {table} ADD COLUMN {{}} {kind}"
    if there is None:
        yield Step(statements=(add.format(column),), says=f"added {table}.{column}")
        return
    match fit(field, there):
        case Fit.WIDENS:
            # SQLite does not change the type of a column, but it can put another in its place.
            new = quoted(f"penstock_{field.name}")
            yield Step(
                statements=(
                    add.format(new),
                    f"UPDATE {table} SET {new} = CAST({column} AS {kind})",
                    f"ALTER TABLE {table} DROP COLUMN {column}",
                    f"ALTER TABLE {table} RENAME COLUMN {new} TO {column}",
                ),
                says=f"widened {table}.{column} from {there} to {kind}",
            )
        case Fit.FAILS:
            raise ConnectorError(
                f"column {target.path[0]}.{field.name} is {there}, and {kind} is needed",
                why="the table was made by something else, or the schema has changed",
                fix="exclude the field, raise `backfill` to fill the table anew, or give another "
                "table",
            )
        case Fit.HOLDS:
            pass


def _check(target: Target, live: LiveTable) -> None:
    name = target.path[0]
    another = "raise `backfill` to make it anew, or give another table"
    if not live.strict:
        raise ConnectorError(
            f"table {name} is there, and is not STRICT",
            why="SQLite would turn a sum that outgrows 64 bits into a float",
            fix=another,
        )
    if live.key != _key(target):
        is_, needed = ", ".join(live.key) or "nothing", ", ".join(_key(target)) or "nothing"
        raise ConnectorError(
            f"table {name} has the primary key {is_}, and {needed} is needed", fix=another
        )
    ours = {field.name.lower() for field in target.fields}
    if lacking := sorted(live.required - ours):
        raise ConnectorError(
            f"column {name}.{lacking[0]} may not be null and has no default",
            why="it is not a field of the binding, so rows come without it",
            fix=f"give the column a default, {another}",
        )


def _key(target: Target) -> tuple[str, ...]:
    if target.delta_updates:
        return ()
    return tuple(field.name.lower() for field in target.key)


def _misfits(target: Target, live: LiveTable, *, keys: bool) -> list[TargetField]:
    return [
        field
        for field in target.fields
        if field.is_key is keys
        and field.name.lower() in live.columns
        and fit(field, live.columns[field.name.lower()]) is Fit.FAILS
    ]


def _create(target: Target) -> str:
    """Only a key must have values: SQLite has no way to give that up again."""
    not_null = "" if target.delta_updates else " NOT NULL"
    columns = [
        f"{quoted(field.name)} {type_of(field.column)}{not_null if field.is_key else ''}"
        for field in target.fields
    ]
    if not target.delta_updates:
        columns.append(f"PRIMARY KEY ({key_of(target)})")
    return f"CREATE TABLE {quoted(*target.path)} ({', '.join(columns)}) STRICT"
