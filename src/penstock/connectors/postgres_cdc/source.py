"""`penstock/source-postgres`: tables of PostgreSQL, and every change of them, once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psycopg

from penstock.connectors.postgres.columns import NAME_BYTES_MAX
from penstock.connectors.postgres.locks import OpenConnections, PostgresConnection
from penstock.connectors.postgres.server import CONFIG_SCHEMA, SCHEMA, Server
from penstock.connectors.postgres_cdc import tables
from penstock.connectors.postgres_cdc.discovery import discovered
from penstock.connectors.postgres_cdc.faults import explained
from penstock.connectors.postgres_cdc.opening import (
    Start,
    begin,
    bound_tables,
    check_server,
    ensure_published,
)
from penstock.connectors.postgres_cdc.progress import ChangesProgress
from penstock.connectors.postgres_cdc.replication import Replication, connect
from penstock.connectors.postgres_cdc.session import ChangesSession
from penstock.connectors.postgres_cdc.spool import sweep
from penstock.connectors.postgres_cdc.tables import TableName
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import Discovered, Opening

_SERVER: Final = ("address", "database", "user", "password", "sslmode")
_NAME: Final[dict[str, Json]] = {"type": "string", "minLength": 1, "maxLength": NAME_BYTES_MAX}


class PostgresChanges:
    """A source (`Capture`)."""

    config_schema = ConfigSchema(
        {
            **{name: CONFIG_SCHEMA.value["properties"][name] for name in _SERVER},
            "publication": {
                **_NAME,
                "title": "the name of a publication",
                "description": "A publication that has the tables. By default one is created.",
                "examples": ["sales_changes"],
            },
            "spoolDirectory": {
                "type": "string",
                "minLength": 1,
                "path": True,
                "title": "a directory",
                "description": "Where large transactions are put as they arrive. Spark's executors "
                "must see it. The system's directory for temporary files if none is named.",
                "examples": ["/srv/penstock/spool"],
            },
        },
        required=("address", "database", "user"),
    )
    resource_schema = ConfigSchema(
        {
            "table": {
                **_NAME,
                "identity": True,
                "title": "the name of a table",
                "description": "The table.",
                "examples": ["orders"],
            },
            "schema": {**SCHEMA, "identity": True, "description": "The schema of the table."},
            "onTruncate": {
                "enum": ["stop", "ignore"],
                "type": "string",
                "default": "stop",
                "title": "a text",
                "description": "What to do if the table is truncated, which no document can say: "
                "stop, or continue and keep its rows.",
                "examples": ["ignore"],
            },
        },
        required=("table",),
    )

    def __init__(self, config: Json, *, where: str) -> None:
        given = self.config_schema.read(config, where=f"{where}: endpoint.connector.config")
        self.server = Server.of({k: v for k, v in given.items() if k in _SERVER}, where)
        self.connections = OpenConnections()
        self.stopping = threading.Event()
        """Somebody interrupts what is under way."""
        self.waiting: str | None = None
        """What a session waits for."""
        self._where = where
        self._publication: str | None = given.get("publication")
        spool = given.get("spoolDirectory")
        self._spool_home = None if spool is None else Path(spool)

    @contextlib.contextmanager
    def connected(self) -> Iterator[PostgresConnection]:
        """A connection for SQL, for a moment."""
        connection = connect(self.server)
        try:
            with explained(self.server), self.connections.on(connection):
                yield connection
        finally:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    def check(self) -> None:
        with self.connected() as connection:
            check_server(connection, self.server)
        with contextlib.closing(Replication(self.server)) as replication, explained(self.server):
            replication.system()

    def discover(self) -> Sequence[Discovered]:
        with self.connected() as connection:
            bases = tables.bases(connection)
            return [discovered(table, bases) for table in tables.all_tables(connection)]

    def interrupt(self) -> None:
        self.stopping.set()
        self.connections.interrupt()

    def waits_for(self) -> str | None:
        return self.waiting or self.server.blocked()

    def open(self, opening: Opening) -> ChangesSession:
        self.stopping.clear()
        self.waiting = None
        resources = [self._resource(each.resource.value) for each in opening.bindings]
        names = [name for name, _ in resources]
        progress = ChangesProgress() if opening.preview else ChangesProgress.of(opening.state)
        # A task that was renamed goes on with its slot, and with the publication of that.
        made = (progress.slot or "").rpartition("_")[0]
        publication = self._publication or made or f"penstock_{tables.task_hash(opening.task)}"
        with self.connected() as connection, contextlib.ExitStack() as opened:
            check_server(connection, self.server)
            replication = Replication(self.server)
            opened.callback(replication.close)
            bound = bound_tables(
                connection,
                self.server,
                opening.bindings,
                names,
                [ignores for _, ignores in resources],
            )
            start = begin(
                connection,
                self.server,
                progress,
                bound,
                system=replication.system(),
                task=opening.task,
                stopping=self.stopping,
            )
            found: str | None = publication
            if opening.preview:
                start, found = _previewed(connection, start, publication)
            else:
                ensure_published(
                    connection, self.server, publication, start, managed=self._publication is None
                )
            opened.pop_all()  # it is the session's from here on
        sweep(self._spool_home, start.slot)
        return ChangesSession(
            self,
            replication,
            start,
            publication=found,
            spool_home=self._spool_home,
            ends=opening.ends,
            temporary=opening.preview,
        )

    def _resource(self, resource: Json) -> tuple[TableName, bool]:
        given = self.resource_schema.read(resource, where=f"{self._where}: resource")
        name = (given.get("schema", "public"), given["table"])
        return name, given.get("onTruncate") == "ignore"


def _previewed(
    connection: PostgresConnection, start: Start, publication: str
) -> tuple[Start, str | None]:
    """A preview makes nothing that lasts: without a publication, it shows the tables only."""
    found = tables.publication(connection, publication)
    wanted = {(each.table.schema, each.table.name) for each in start.pending}
    has_all = found is not None and wanted <= found.tables
    return start.as_claimed(), publication if has_all else None
