"""The SQL of PostgreSQL. Which types hold which fields is in `columns`."""

from __future__ import annotations

from typing import Final

from penstock.connectors.postgres.columns import NAME_BYTES_MAX, fit, type_of
from penstock.connectors.postgres.locks import bounds
from penstock.connectors.sql.dialect import (
    Dialect,
    Fit,
    LiveColumn,
    LiveTable,
    RecordTypes,
    SqlConnection,
)
from penstock.model.columns import Kind
from penstock.runtime.connector.materialize import TargetField

_SYSTEM_COLUMNS: Final = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})

_KINDS: Final = {
    "r": "table",
    "p": "table",
    "v": "view",
    "m": "materialized view",
    "f": "foreign table",
    "S": "sequence",
}
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


class PostgresDialect(Dialect):
    """Parameters are `$1`, `$2` and so on: a percent sign is a percent sign, names may have one."""

    mark = "${n}"
    # What is written must be on disk when the server says so, or a checkpoint could be forgotten
    # that the recovery log remembers. A role or database with a laxer default is overruled, a
    # stricter one is not.
    begin = (
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
        "SELECT set_config('synchronous_commit', 'on', true) "
        f"WHERE current_setting('synchronous_commit') IN ('off', 'local'); {bounds()}"
    )
    # Tasks that make the same schema at the same time fail otherwise.
    ddl_lock = f"SELECT pg_advisory_xact_lock({0x70656E73746F636B})"
    # A NUMERIC column made by others would hold what no integer of a collection can be.
    checked_sums = {Kind.LONG: "CAST({0} AS bigint)"}  # noqa: RUF012 - a constant
    record_types = RecordTypes(binary="bytea", instant="timestamptz")
    record_key = ("schema", "name")

    def forbids(self, name: str) -> str | None:
        if name in _SYSTEM_COLUMNS or len(name.encode()) > NAME_BYTES_MAX:
            return (
                "PostgreSQL has no column of that name: give the location another, of "
                f"at most {NAME_BYTES_MAX} bytes, by a projection"
            )
        return None

    def type_of(self, field: TargetField) -> str:
        return type_of(field)

    def fit(self, field: TargetField, live: str) -> Fit:
        return fit(field, live)

    def orders(self, field: TargetField) -> bool:
        """Texts compare by their bytes; an instant is not ordered as its text is."""
        kind = field.column.kind
        is_text = kind is Kind.STRING and type_of(field) in ("text", "numeric")
        return is_text or kind in (Kind.LONG, Kind.DOUBLE, Kind.DECIMAL)

    def extreme(self, field: TargetField, *, greatest: bool, new: str, old: str) -> str:
        """These functions of PostgreSQL pass over NULL."""
        if field.column.is_numeric_text:  # also in a column of text, which tables may have
            new, old = f"CAST({new} AS numeric)", f"CAST({old} AS numeric)"
        elif field.column.kind is Kind.STRING:
            new, old = f'{new} COLLATE "C"', f'{old} COLLATE "C"'
        return f"{self.greatest if greatest else self.least}({new}, {old})"

    def look(self, connection: SqlConnection, path: tuple[str, ...]) -> LiveTable | None:
        found = connection.run(_TABLE, path).fetchone()
        if found is None:
            return None
        oid, kind = found
        columns = connection.run(_COLUMNS, (oid,)).fetchall()
        unique = connection.run(_UNIQUE, (oid,)).fetchall()
        return LiveTable(
            columns={
                name: LiveColumn(type=type_, not_null=not_null, has_default=has_default)
                for name, type_, not_null, has_default in columns
            },
            unique=frozenset(frozenset(names) for (names,) in unique),
            kind=_KINDS.get(kind, "relation of another kind"),
            identity=oid,
        )
