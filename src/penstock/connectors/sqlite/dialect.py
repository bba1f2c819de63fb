"""The SQL of SQLite.

It compares names without regard to case, so live columns are known by their lower-case names. It
has four types, of which TEXT holds what no other does: decimals to the digit, containers as JSON.

Tables are STRICT: a sum that outgrows 64 bits is refused, where SQLite would otherwise silently go
on with a float, and then with Infinity.
"""

from __future__ import annotations

import sys
from typing import Final

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

_TYPES: Final = {Kind.BOOLEAN: "INTEGER", Kind.LONG: "INTEGER", Kind.DOUBLE: "REAL"}


LEAST_NUMERAL: Final = "penstock_least_numeral"
GREATEST_NUMERAL: Final = "penstock_greatest_numeral"
"""Functions of two texts that write numbers, which a connection that stores rows has."""


class SqliteDialect(Dialect):
    """Text compares by its bytes."""

    begin = "BEGIN IMMEDIATE"
    can_alter = False
    table_options = " STRICT"
    least = "min"
    greatest = "max"
    # A STRICT table refuses a text in a REAL column; SQLite itself would go on with Infinity.
    checked_sums = {  # noqa: RUF012 - a constant
        Kind.DOUBLE: f"CASE WHEN abs({{0}}) <= {sys.float_info.max!r} THEN {{0}} "
        "WHEN {0} IS NOT NULL THEN 'overflow' END"
    }
    record_types = RecordTypes(
        text="TEXT", integer="INTEGER", boolean="INTEGER", binary="BLOB", instant="TEXT"
    )
    same_name = " COLLATE NOCASE"

    def fold(self, name: str) -> str:
        return name.lower()

    def type_of(self, field: TargetField) -> str:
        return _TYPES.get(field.column.kind, "TEXT")

    def fit(self, field: TargetField, live: str) -> Fit:
        live = "INTEGER" if live == "INT" else live
        if live == self.type_of(field):
            return Fit.HOLDS
        if field.column.kind is Kind.DOUBLE and live == "INTEGER" and not field.is_key:
            return Fit.CONVERTS  # rounded as a document is that is read with a number there
        digits = field.column.kind is Kind.DECIMAL and not field.column.scale and not field.is_key
        return Fit.WIDENS if digits and live == "INTEGER" else Fit.FAILS

    def orders(self, field: TargetField) -> bool:
        return field.column.kind in (Kind.LONG, Kind.DOUBLE, Kind.STRING)

    def extreme(self, field: TargetField, *, greatest: bool, new: str, old: str) -> str:
        if not field.column.is_numeric_text:
            return super().extreme(field, greatest=greatest, new=new, old=old)
        function = GREATEST_NUMERAL if greatest else LEAST_NUMERAL
        return f"COALESCE({function}({new}, {old}), {new}, {old})"

    def look(self, connection: SqlConnection, path: tuple[str, ...]) -> LiveTable | None:
        listed = connection.run(
            "SELECT type, strict FROM pragma_table_list(?) WHERE schema = 'main'", path
        ).fetchone()
        if listed is None:
            return None
        kind, strict = listed
        rows = connection.run(
            'SELECT lower(name), upper(type), pk, "notnull", dflt_value IS NOT NULL '
            "FROM pragma_table_info(?)",
            path,
        ).fetchall()
        key = frozenset(name for name, _, pk, _, _ in rows if pk)
        loose = ("is not STRICT", "SQLite would turn a sum that outgrows 64 bits into a float")
        return LiveTable(
            columns={
                name: LiveColumn(type=type_, not_null=bool(required), has_default=bool(default))
                for name, type_, _, required, default in rows
            },
            unique=frozenset({key} if key else ()),
            kind=kind,
            flaw=None if strict else loose,
        )
