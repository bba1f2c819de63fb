"""PostgreSQL: rows and checkpoint in one database, and one transaction."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Self

import psycopg

from penstock.connectors.ownership import TableRecord
from penstock.connectors.postgres import preview as previews
from penstock.connectors.postgres.columns import NAME_BYTES_MAX
from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.connectors.postgres.locks import OpenConnections, PostgresConnection
from penstock.connectors.postgres.preview import PostgresPreview
from penstock.connectors.postgres.records import PostgresRecords
from penstock.connectors.postgres.rows import STAGE
from penstock.connectors.postgres.server import CONFIG_SCHEMA, SCHEMA, Server
from penstock.connectors.postgres.session import PostgresSession
from penstock.connectors.sql.plan import check_kind
from penstock.connectors.sql.records import CHECKPOINTS, TABLES
from penstock.connectors.sql.sink import DELTA_UPDATES, SqlSink
from penstock.connectors.sql.statements import quoted
from penstock.errors import UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import SinkTask
from penstock.runtime.secrets import resolve

_log = logging.getLogger("penstock.connectors")


class Postgres(SqlSink[PostgresConnection]):
    """`penstock/materialize-postgres`."""

    dialect = PostgresDialect()
    config_schema = CONFIG_SCHEMA
    resource_schema = ConfigSchema(
        {
            "table": {
                "type": "string",
                "pattern": r"^(?!penstock_)[^\u0000]+$",
                "maxLength": NAME_BYTES_MAX,
                "title": f"the name of a table, of at most {NAME_BYTES_MAX} bytes; names that "
                "begin with penstock_ are taken",
                "description": "The table. It is created if it does not exist.",
                "examples": ["orders"],
            },
            "schema": {**SCHEMA, "description": "The schema of the table."},
            "delta_updates": DELTA_UPDATES,
        },
        required=("table",),
    )

    def __init__(self, config: Json, *, where: str) -> None:
        self.server = Server.of(config, where)
        given = self.server.config.value
        super().__init__(where=where, hard_delete=given.get("hardDelete", False))
        self.connections = OpenConnections()
        schema = resolve(given.get("schema", "public"), where=f"{where}: endpoint.connector.config")
        self._schema = self._checked(str(schema))
        self._preview: PostgresPreview | None = None

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def records(self) -> PostgresRecords:
        return PostgresRecords(
            self.dialect,
            checkpoints=self.place((self._schema, CHECKPOINTS)),
            tables=self.place((self._schema, TABLES)),
            where=self.server.name,
        )

    @property
    def stage_prefix(self) -> str:
        """In a preview, the beginning of the names of staged tables; empty otherwise."""
        return "" if self._preview is None else self._preview.prefix

    @contextlib.contextmanager
    def connected(self) -> Iterator[PostgresConnection]:
        connection = self.server.connect()
        try:
            with self.server.explained(), self.connections.on(connection):
                yield connection
        finally:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return self.server.explained()

    def session(self, task: SinkTask, epoch: int) -> PostgresSession:
        return PostgresSession(self, task, epoch)

    def path(self, resource: Json) -> tuple[str, ...]:
        given = self.read_resource(resource)
        schema = self._checked(given.get("schema", self._schema))
        if schema == STAGE:
            raise UserError(
                f"a table cannot be in schema {STAGE}",
                where=self._where,
                fix="staged rows are there: give the resource another schema",
            )
        return schema, self._checked(given["table"])

    def _checked(self, name: str) -> str:
        if len(name.encode()) > NAME_BYTES_MAX:  # a schema counts letters
            raise UserError(
                f"{name!r} is not a name for PostgreSQL",
                where=self._where,
                fix=f"at most {NAME_BYTES_MAX} bytes; letters beyond ASCII count more",
            )
        return name

    def location(self, resource: Json) -> tuple[str, ...]:
        return "postgres", *self.server.location, *self.path(resource)

    def check(self) -> None:
        """Check that the user can log in, and make tables."""
        with self.connected() as connection:
            row = connection.run(
                "SELECT n.oid IS NOT NULL, COALESCE("
                "has_schema_privilege(n.oid, 'CREATE') AND has_schema_privilege(n.oid, 'USAGE'), "
                "has_database_privilege(current_database(), 'CREATE')) "
                "FROM (VALUES ($1::text)) v(name) LEFT JOIN pg_namespace n ON n.nspname = v.name",
                (self._schema,),
            ).fetchone()
        exists, may = row or (False, False)
        if exists and not may:
            raise self._may_not(self._schema)
        if not may:
            user = self.server.user
            raise ConnectorError(
                f"there is no schema {self._schema}, and {user} may not make it",
                where=self.server.name,
                fix=f"CREATE SCHEMA {quoted(self._schema)} AUTHORIZATION {quoted(user)}",
            )

    def interrupt(self) -> None:
        self.connections.interrupt()

    def waits_for(self) -> str | None:
        return self.server.blocked()

    def prepare(self, connection: PostgresConnection, task: SinkTask) -> Iterator[str]:
        home, _ = self.place((self._schema, CHECKPOINTS))
        return self._make_schemas(connection, {STAGE, home, *(t.path[0] for t in task.targets)})

    def _make_schemas(self, connection: PostgresConnection, names: set[str]) -> Iterator[str]:
        """Make those that are missing: a user who may not make a schema may still use one."""
        rows = connection.run(
            "SELECT nspname::text, has_schema_privilege(oid, 'CREATE') "
            "AND has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = ANY($1)",
            (list(names),),
        ).fetchall()
        usable: dict[str, bool] = dict(rows)
        for name in sorted(names):
            if name not in usable:
                connection.run(f"CREATE SCHEMA {quoted(name)}")
                yield f"created schema {name}"
            elif not usable[name]:
                raise self._may_not(name)

    def _may_not(self, schema: str) -> ConnectorError:
        user = self.server.user
        return ConnectorError(
            f"{user} may not make tables in schema {schema}",
            where=self.server.name,
            fix=f"GRANT CREATE, USAGE ON SCHEMA {quoted(schema)} TO {quoted(user)}",
        )

    def shadow(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """Where staged rows are, out of the way of those who look for tables."""
        return STAGE, f"rebuild_{self.digest(path)}"

    # Previews

    def place(self, path: tuple[str, ...]) -> tuple[str, ...]:
        return path if self._preview is None else self._preview.place(path)

    @contextlib.contextmanager
    def preview(self, paths: Sequence[tuple[str, ...]]) -> Iterator[Self]:
        """Preview in tables of its own, beside those that Spark tasks stage rows in."""
        # Interrupting what a preview does must not end what keeps its tables its own.
        with contextlib.closing(self.server.connect()) as keeper:
            with self.server.explained():
                claimed = previews.claim(keeper)
            preview = copy.copy(self)
            preview._preview = claimed  # noqa: SLF001 - a copy
            try:
                with self.connected() as connection:
                    previews.sweep(connection)
                    connection.run("BEGIN")
                    list(self._make_schemas(connection, {STAGE}))
                    preview.records.make(connection)
                    for path in paths:
                        self._copy_shape(connection, path, preview)
                    connection.run("COMMIT")
                yield preview
            finally:
                try:
                    with self.connected() as connection:
                        previews.remove(connection, claimed)
                except ConnectorError as error:
                    _log.warning("the next preview removes what this one leaves: %s", error.what)

    def _copy_shape(
        self, connection: PostgresConnection, path: tuple[str, ...], preview: Postgres
    ) -> None:
        """Make the preview's table like the live one, if there is one, with its state key."""
        if (live := self.dialect.look(connection, path)) is not None:
            check_kind(path, live)
            connection.run(
                f"CREATE TABLE {quoted(*preview.place(path))} (LIKE {quoted(*path)} "
                "INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES INCLUDING GENERATED "
                "INCLUDING IDENTITY)"
            )
        if (record := self.records.find(connection, path)) is not None:
            known = TableRecord(state_key=record.state_key)
            preview.records.store(connection, preview.place(path), known)
