"""What the server says of tables, types, publications and slots."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.connectors.postgres.locks import PostgresConnection
from penstock.connectors.postgres_cdc.values import ANY_ARRAY, USER_TYPES_FROM, array_of
from penstock.connectors.postgres_cdc.wire import ColumnOf, lsn_of
from penstock.connectors.sql.statements import quoted

TableName = tuple[str, str]
"""Schema and table."""

_TABLES: Final = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relreplident::text,
    has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'),
    pg_has_role(c.relowner, 'USAGE'),
    (SELECT json_agg(json_build_array(a.attname, a.atttypid::bigint, a.atttypmod, a.attnotnull)
        ORDER BY a.attnum)
        FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        AND a.attgenerated = ''),
    (SELECT json_agg(a.attname ORDER BY array_position(i.indkey::int2[], a.attnum))
        FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
        WHERE i.indrelid = c.oid AND i.indisprimary),
    (SELECT json_agg(a.attname)
        FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)
        WHERE i.indrelid = c.oid AND i.indisreplident),
    obj_description(c.oid, 'pg_class')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' """
_NAMED: Final = """
AND EXISTS (
    SELECT FROM unnest($1::text[], $2::text[]) w(s, t) WHERE s = n.nspname AND t = c.relname)"""
_ALL: Final = """
AND NOT c.relispartition AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
ORDER BY n.nspname, c.relname"""
_LEAVES: Final = """
SELECT n.nspname::text, c.relname::text, pg_table_size(c.oid),
    pg_relation_size(c.oid) / current_setting('block_size')::int
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND (c.oid = $1::oid OR c.oid IN (
    SELECT relid FROM pg_partition_tree($1::oid::regclass) WHERE isleaf))
ORDER BY n.nspname, c.relname"""
_TYPES: Final = f"""
SELECT oid::bigint, typtype::text, typbasetype::bigint, typtypmod, typelem::bigint
FROM pg_type WHERE oid >= {USER_TYPES_FROM} AND (typtype = 'd' OR typcategory = 'A')"""
_PUBLICATION: Final = """
SELECT pubinsert AND pubupdate AND pubdelete, puballtables, pg_has_role(pubowner, 'USAGE')
FROM pg_publication WHERE pubname = $1"""
_PUBLISHED: Final = """
SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = $1"""
_SLOT: Final = """
SELECT active_pid, database::text, wal_status, confirmed_flush_lsn::text
FROM pg_replication_slots WHERE slot_name = $1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it is now."""

    oid: int
    schema: str
    name: str
    kind: str
    """`r`: a table; `p`: one that is split into partitions."""
    identity: str
    """`d`: the primary key; `i`: an index; `f`: the whole row; `n`: nothing."""
    is_readable: bool
    is_owned: bool
    columns: tuple[ColumnOf, ...]
    required: frozenset[str]
    """Columns that are never NULL."""
    primary_key: tuple[str, ...]
    identity_columns: frozenset[str]
    comment: str | None

    @property
    def shown(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return quoted(self.schema, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Where rows of a table are: itself, or one of its partitions."""

    quoted: str
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Which changes the server sends, and of which tables."""

    is_whole: bool
    """It publishes inserts, updates and deletes."""
    of_all: bool
    is_owned: bool
    tables: frozenset[TableName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A replication slot."""

    active_pid: int | None
    database: str | None
    is_lost: bool
    confirmed: int | None


def tables_named(connection: PostgresConnection, names: Sequence[TableName]) -> list[Table]:
    """Those of the named tables that there are."""
    schemas, tables = [s for s, _ in names], [t for _, t in names]
    return _tables(connection.run(_TABLES + _NAMED, (schemas, tables)).fetchall())


def all_tables(connection: PostgresConnection) -> list[Table]:
    """The tables of all users."""
    return _tables(connection.run(_TABLES + _ALL).fetchall())


def _tables(rows: Sequence[tuple[Any, ...]]) -> list[Table]:
    found = []
    for oid, schema, name, kind, identity, readable, owned, columns, key, index, comment in rows:
        names = [column[0] for column in columns or ()]
        by_identity = {"d": key, "i": index, "f": names}.get(identity) or ()
        found.append(
            Table(
                oid=oid,
                schema=schema,
                name=name,
                kind=kind,
                identity=identity,
                is_readable=readable,
                is_owned=owned,
                columns=tuple(
                    ColumnOf(column, kind_oid, modifier, column in by_identity)
                    for column, kind_oid, modifier, _ in columns or ()
                ),
                required=frozenset(column[0] for column in columns or () if column[3]),
                primary_key=tuple(key or ()),
                identity_columns=frozenset(by_identity),
                comment=comment,
            )
        )
    return found


def leaves(connection: PostgresConnection, table: Table) -> list[Leaf]:
    """Where the rows of a table are."""
    rows = connection.run(_LEAVES, (table.oid,)).fetchall()
    return [
        Leaf(quoted=quoted(schema, name), bytes=size, blocks=blocks)
        for schema, name, size, blocks in rows
    ]


def bases(connection: PostgresConnection) -> dict[int, tuple[int, int]]:
    """What types of users are made of, as `values.type_of` wants it."""
    rows = {row[0]: row[1:] for row in connection.run(_TYPES).fetchall()}
    return bases_of(rows)


def bases_of(rows: Mapping[int, tuple[str, int, int, int]]) -> dict[int, tuple[int, int]]:
    """Follow domains to their base: kind, base, modifier and item of each type."""

    def followed(oid: int, modifier: int) -> tuple[int, int]:
        while oid in rows and rows[oid][0] == "d":
            _, base, own, _ = rows[oid]
            modifier = own if modifier < 0 else modifier
            oid = base
        if oid in rows:
            item, _ = followed(rows[oid][3], -1)
            return array_of(item) or ANY_ARRAY, -1
        return oid, modifier

    return {oid: followed(oid, -1) for oid in rows}


def publication(connection: PostgresConnection, name: str) -> Publication | None:
    """A publication, if there is one of this name."""
    row = connection.run(_PUBLICATION, (name,)).fetchone()
    if row is None:
        return None
    tables = connection.run(_PUBLISHED, (name,)).fetchall()
    return Publication(
        is_whole=row[0],
        of_all=row[1],
        is_owned=row[2],
        tables=frozenset((schema, table) for schema, table in tables),
    )


def slot(connection: PostgresConnection, name: str) -> Slot | None:
    """A replication slot, if there is one of this name."""
    row = connection.run(_SLOT, (name,)).fetchone()
    if row is None:
        return None
    pid, database, wal_status, confirmed = row
    return Slot(
        active_pid=pid,
        database=database,
        is_lost=wal_status == "lost",
        confirmed=None if confirmed is None else lsn_of(confirmed),
    )


def task_hash(task: str) -> str:
    """A short name for a task, of letters that a slot may have."""
    return hashlib.sha256(task.encode()).hexdigest()[:10]
