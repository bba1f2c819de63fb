"""Ownership records in PostgreSQL, which also tell tables of one name apart.

A record holds the OID of the table that was filled, as long as the records themselves are where
they were written: a database that was dumped and restored has other OIDs, and the table of records
has another one too, which shows it.
"""

from __future__ import annotations

from penstock.connectors.sql.dialect import SqlConnection
from penstock.connectors.sql.records import TABLES, Records
from penstock.connectors.sql.statements import quoted
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import SinkTask


class PostgresRecords(Records):
    """`made` is the OID of the table that was filled, `kept` that of the table of records."""

    identity_columns = {"made": "oid", "kept": "oid"}  # noqa: RUF012 - a constant
    identity = "CASE WHEN kept = tableoid THEN made END"

    def store_identity(self, connection: SqlConnection, path: tuple[str, ...]) -> None:
        connection.run(
            f"UPDATE {self.tables} SET made = to_regclass($3)::oid, kept = tableoid "
            "WHERE schema = $1 AND name = $2",
            (*path, quoted(*path)),
        )

    def check_elsewhere(
        self, connection: SqlConnection, task: SinkTask, path: tuple[str, ...]
    ) -> None:
        """Raise if another task fills a table and keeps its checkpoint in another schema."""
        others = connection.run(
            "SELECT n.nspname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.relname = $1 AND c.relkind = 'r' "
            "AND c.oid IS DISTINCT FROM to_regclass($2)::oid "
            "AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')",
            (TABLES, self.tables),
        ).fetchall()
        for (schema,) in others:
            there = PostgresRecords(
                self._dialect, checkpoints=self._at, tables=(schema, TABLES), where=self._where
            )
            found = there.find(connection, path)
            if found is not None and found.task not in (None, task.name, task.renamed_from):
                raise ConnectorError(
                    f"table {'.'.join(path)} belongs to {found.task}",
                    where=task.name,
                    why=f"that task keeps its checkpoint in schema {schema}; two tasks that fill "
                    "one table count everything twice",
                    fix="give the binding another table, or drop this one and what is noted of "
                    f"it: {there.forget(path)}",
                )
