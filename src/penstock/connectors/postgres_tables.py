"""Tables of PostgreSQL: what is there, and what has to be done to it.

`look` asks the server once for one table, `plan` decides from its answer (and changes nothing), and
whoever has a transaction executes the statements of the plan. So a decision can be tested without a
server, and half of a plan never happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from penstock.connectors.postgres_columns import Fit, fit, type_of
from penstock.connectors.postgres_locks import Connection
from penstock.connectors.sql import quoted
from penstock.runtime.connector import ConnectorError, Target, TargetField

_TABLE: Final = """
SELECT c.oid, c.relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2"""
_COLUMNS: Final = """
SELECT attname::text, format_type(atttypid, atttypmod), attnotnull,
       atthasdef OR attidentity <> '' OR attgenerated <> ''
FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""
# Only an index that ON CONFLICT would find: of plain columns, whole, and checked at once.
_UNIQUE: Final = """
SELECT ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = i.indrelid
               AND a.attnum = ANY((string_to_array(i.indkey::text, ' ')::int2[])[1:i.indnkeyatts]))
FROM pg_index i
WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveColumn:
    """A column of a table that is there."""

    type: str
    not_null: bool = False
    filled: bool = False
    """It has a value where an INSERT names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTable:
    """A table that is there."""

    columns: dict[str, LiveColumn]
    oid: int = 0
    unique: frozenset[frozenset[str]] = frozenset()
    """The sets of columns of which no two rows may have the same values."""
    is_table: bool = True


def look(connection: Connection, path: tuple[str, ...]) -> LiveTable | None:
    """What is at `path`, a schema and a name."""
    found = connection.execute(_TABLE, path).fetchone()
    if found is None:
        return None
    oid, kind = found
    columns = connection.execute(_COLUMNS, (oid,)).fetchall()
    unique = connection.execute(_UNIQUE, (oid,)).fetchall()
    return LiveTable(
        oid=oid,
        columns={
            name: LiveColumn(type=type_, not_null=not_null, filled=filled)
            for name, type_, not_null, filled in columns
        },
        unique=frozenset(frozenset(names) for (names,) in unique),
        is_table=kind in ("r", "p"),
    )


def is_empty(connection: Connection, path: tuple[str, ...]) -> bool:
    query = f"SELECT 1 FROM {quoted(*path)} LIMIT 1"
    return connection.execute(query.encode()).fetchone() is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A statement, and what it does, for people."""

    statement: str
    says: str


def plan(
    target: Target, live: LiveTable | None, *, before: Target | None, emptied: bool
) -> Iterator[Step]:
    """What brings a table to its target; columns that others added stay.

    `before` is the target as it was applied last, `emptied` whether its rows are out of date.
    Raises `ConnectorError` where only a person can decide.
    """
    table = ".".join(target.path)
    name = quoted(*target.path)
    if live is not None:
        check_kind(target.path, live)
    if live is not None and emptied:
        if _fits_key(target, live):
            yield Step(statement=f"TRUNCATE {name}", says=f"emptied {table} for a backfill")
            yield from _replaced(target, live)
            live = _without_misfits(target, live)
        else:
            yield Step(statement=f"DROP TABLE {name}", says=f"dropped {table}: its key changes")
            live = None
    if live is None:
        yield Step(statement=_create(target), says=f"created {table}")
        return
    _check_key(target, live)
    yield from _columns(target, live)
    yield from _left_over(target, live, before)


def check_kind(path: tuple[str, ...], live: LiveTable) -> None:
    """Rows that a view filters out, or that something else takes, would be lost."""
    if not live.is_table:
        raise ConnectorError(
            f"{'.'.join(path)} is there, and is not a table",
            fix="give the binding another table, or drop what is there",
        )


def _create(target: Target) -> str:
    columns = [
        f"{quoted(field.name)} {type_of(field)}{' NOT NULL' if _is_not_null(target, field) else ''}"
        for field in target.fields
    ]
    if not target.delta_updates:
        columns.append(f"PRIMARY KEY ({', '.join(quoted(field.name) for field in target.key)})")
    return f"CREATE TABLE {quoted(*target.path)} ({', '.join(columns)})"


def _is_not_null(target: Target, field: TargetField) -> bool:
    return field.required or (field.is_key and not target.delta_updates)


def _fits_key(target: Target, live: LiveTable) -> bool:
    """Whether rows are told apart as the target needs it, by columns of the right types."""
    key = frozenset(field.name for field in target.key)
    if target.delta_updates:
        return not any(columns <= key for columns in live.unique)
    return key in live.unique and all(
        fit(field, live.columns[field.name].type) is not Fit.FAILS for field in target.key
    )


def _check_key(target: Target, live: LiveTable) -> None:
    names = [field.name for field in target.key]
    key, table = frozenset(names), ".".join(target.path)
    if not target.delta_updates and key not in live.unique:
        raise ConnectorError(
            f"table {table} is there, and has no unique index of its key ({', '.join(names)})",
            why="rows are updated by their key",
            fix=f"ALTER TABLE {quoted(*target.path)} ADD PRIMARY KEY "
            f"({', '.join(map(quoted, names))}), raise `backfill`, or give another table",
        )
    if target.delta_updates and any(columns <= key for columns in live.unique):
        raise ConnectorError(
            f"table {table} has a unique index of its key ({', '.join(names)})",
            why="with delta updates it gets several rows of one key",
            fix="drop the index, raise `backfill`, or give another table",
        )


def _columns(target: Target, live: LiveTable) -> Iterator[Step]:
    table, name = ".".join(target.path), quoted(*target.path)
    for field in target.fields:
        column, there = quoted(field.name), live.columns.get(field.name)
        needed = type_of(field)
        if there is None:
            # Without NOT NULL: rows that are there already have no value yet.
            yield Step(
                statement=f"ALTER TABLE {name} ADD COLUMN {column} {needed}",
                says=f"added {table}.{field.name}",
            )
            continue
        match fit(field, there.type):
            case Fit.WIDENS:
                yield Step(
                    statement=f"ALTER TABLE {name} ALTER COLUMN {column} TYPE {needed}",
                    says=f"widened {table}.{field.name} from {there.type} to {needed}",
                )
            case Fit.FAILS:
                raise ConnectorError(
                    f"column {table}.{field.name} is {there.type}, and {needed} is needed",
                    why="the table was made by something else, or the schema has changed",
                    fix="exclude the field, raise `backfill` to fill the table anew, or change "
                    f"the column: ALTER TABLE {name} ALTER COLUMN {column} TYPE {needed} USING …",
                )
            case Fit.HOLDS:
                pass
        if there.not_null and not _is_not_null(target, field):
            yield _nullable(target, field.name)


def _left_over(target: Target, live: LiveTable, before: Target | None) -> Iterator[Step]:
    """Columns that the target no longer fills, or never did: they must do without a value."""
    fields = {field.name for field in target.fields}
    were = {field.name for field in before.fields} if before is not None else set()
    for name, column in live.columns.items():
        if name in fields or not column.not_null or column.filled:
            continue
        if name not in were:
            raise ConnectorError(
                f"column {'.'.join(target.path)}.{name} may not be null and has no default",
                why="it is not a field of the binding, so rows come without it",
                fix="give the column a default, or let it be null",
            )
        yield _nullable(target, name)


def _nullable(target: Target, column: str) -> Step:
    return Step(
        statement=f"ALTER TABLE {quoted(*target.path)} ALTER COLUMN {quoted(column)} DROP NOT NULL",
        says=f"{'.'.join(target.path)}.{column} may be null",
    )


def _misfits(target: Target, live: LiveTable) -> list[TargetField]:
    return [
        field
        for field in target.fields
        if field.name in live.columns and fit(field, live.columns[field.name].type) is Fit.FAILS
    ]


def _replaced(target: Target, live: LiveTable) -> Iterator[Step]:
    """In an empty table a column can be had anew; grants and indexes of the others stay."""
    for field in _misfits(target, live):
        column = quoted(field.name)
        yield Step(
            statement=f"ALTER TABLE {quoted(*target.path)} DROP COLUMN {column}, "
            f"ADD COLUMN {column} {type_of(field)}",
            says=f"{'.'.join(target.path)}.{field.name} is {type_of(field)} now",
        )


def _without_misfits(target: Target, live: LiveTable) -> LiveTable:
    now = {field.name: LiveColumn(type=type_of(field)) for field in _misfits(target, live)}
    return LiveTable(columns=live.columns | now, unique=live.unique)
