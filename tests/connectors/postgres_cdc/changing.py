"""A server whose log has changes of rows, and a driver that runs sessions as the runtime does."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict

from penstock.connectors.postgres_cdc.session import ChangesSession
from penstock.connectors.postgres_cdc.source import PostgresChanges
from penstock.model.json_order import Json
from penstock.model.spec import CollectionSpec, Frozen
from penstock.runtime.connector.capture import (
    CaptureSequence,
    Idle,
    Opening,
    SourceBinding,
    SparkRead,
)
from penstock.runtime.patches import apply_patches
from penstock.testing.postgres import PostgresServer

Document = dict[str, Any]


@contextlib.contextmanager
def changing_postgres(*settings: str) -> Iterator[PostgresServer]:
    """A fresh server with `wal_level = logical`, and other settings."""
    with tempfile.TemporaryDirectory(prefix="penstock-cdc-", ignore_cleanup_errors=True) as name:
        server = PostgresServer(Path(name), _lasting_port())
        server.initialise()
        with (server.directory / "data" / "postgresql.conf").open("a") as conf:
            lines = ("wal_level = logical", "max_replication_slots = 50", "max_wal_senders = 50")
            conf.write("\n".join((*lines, *settings, "")))
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _lasting_port() -> int:
    """A port that clients are not given: one may have it while a server that was killed is down."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            return port


def config_of(url: str, **others: object) -> Document:
    """The endpoint of a catalog."""
    parts = conninfo_to_dict(url)
    return {
        "address": f"{parts['host']}:{parts['port']}",
        "database": parts["dbname"],
        "user": parts["user"],
        "password": parts["password"],
        **others,
    }


def ran(url: str, *statements: str) -> None:
    """Run statements, each in a transaction of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def texts_of(read: SparkRead) -> list[bytes]:
    """What the tasks of a read find, in order."""
    count = len(getattr(read, "parts", None) or read.splits)  # type: ignore[attr-defined]
    batches = (pa.record_batch({"id": pa.array([at], pa.int64())}) for at in range(count))
    return [text for documents in read.documents(iter(batches)) for text in documents.texts or ()]


@dataclass
class Driver:
    """Runs sessions, and commits what they give; what survives is here."""

    url: str
    tables: Sequence[str]
    task: str = "acme/changes"
    resources: Mapping[str, Document] = field(default_factory=dict)
    """Further members of resources, by table."""
    options: Document = field(default_factory=dict)
    state: Json = field(default_factory=dict)
    documents: dict[str, list[Document]] = field(default_factory=dict)
    sequences: list[dict[str, list[Document]]] = field(default_factory=list)
    """What each sequence had, by table."""
    schemas: dict[str, Json] = field(default_factory=dict)
    spark_reads: int = 0
    backfill: dict[str, int] = field(default_factory=dict)
    _specs: dict[str, CollectionSpec] = field(default_factory=dict)

    @property
    def source(self) -> PostgresChanges:
        return PostgresChanges(config_of(self.url, **self.options), where=f"capture {self.task}")

    def bindings(self) -> tuple[SourceBinding, ...]:
        found = {each.name: each for each in self.source.discover()}
        made = []
        for index, table in enumerate(self.tables):
            if table in found:
                proposed = found[table]
                self._specs[table] = CollectionSpec(
                    name=f"acme/{table}",
                    key=proposed.key or ("/id",),
                    write_schema=Frozen(proposed.schema),
                    read_schema=Frozen(proposed.schema),
                    fields=(),
                )
            resource = {"table": table, **self.resources.get(table, {})}
            made.append(
                SourceBinding(
                    index=index,
                    state_key=f"{table}.v{self.backfill.get(table, 0)}",
                    resource=Frozen(resource),
                    collection=self._specs[table],
                )
            )
        return tuple(made)

    def open(self, *, ends: bool = True, preview: bool = False) -> ChangesSession:
        return self.source.open(
            Opening(
                task=self.task,
                bindings=self.bindings(),
                state=self.state,
                ends=ends,
                preview=preview,
            )
        )

    def run(
        self,
        *,
        until: Callable[[Driver], bool] | None = None,
        sequences_max: int | None = None,
        preview: bool = False,
    ) -> None:
        """Run a session until it has given what was there, or until something holds."""
        session = self.open(ends=until is None, preview=preview)
        try:
            self.drive(session, until=until, sequences_max=sequences_max)
        finally:
            session.close()

    def drive(
        self,
        session: ChangesSession,
        *,
        until: Callable[[Driver], bool] | None = None,
        sequences_max: int | None = None,
    ) -> None:
        given = 0
        while sequences_max is None or given < sequences_max:
            polled = session.poll(0.5)
            if isinstance(polled, CaptureSequence):
                self.commit(polled)
                session.acknowledge(1)
                given += 1
            elif until is None and polled is Idle.NOTHING:
                return
            if until is not None and until(self):
                return

    def commit(self, sequence: CaptureSequence) -> None:
        """Documents and state, as one."""
        had: dict[str, list[Document]] = {}
        for read in sequence.reads:
            self.spark_reads += 1
            had.setdefault(self.tables[read.binding], []).extend(map(json.loads, texts_of(read)))
        for given in sequence.given:
            texts = given.documents.texts or ()
            had.setdefault(self.tables[given.binding], []).extend(map(json.loads, texts))
        for table, documents in had.items():
            self.documents.setdefault(table, []).extend(documents)
        for binding, schema in sequence.schemas.items():
            self.schemas[self.tables[binding]] = schema
        self.state = apply_patches(self.state, sequence.patches)
        self.sequences.append(had)

    # What has come of it

    def rows(self, table: str) -> dict[Any, Document]:
        """The documents of a table reduced by key, as its schema says."""
        return reduced(self.documents.get(table, ()))

    def check(self, *tables: str) -> None:
        """Every table is equal to what was captured of it."""
        for table in tables or self.tables:
            assert self.rows(table) == live_rows(self.url, table)


def reduced(documents: Sequence[Document], key: str = "id") -> dict[Any, Document]:
    rows: dict[Any, Document] = {}
    for document in documents:
        at = document[key]
        values = {name: value for name, value in document.items() if name != "_meta"}
        if document["_meta"]["op"] == "d":
            rows.pop(at, None)
        else:
            rows[at] = {**rows.get(at, {}), **values}
    return rows


def live_rows(url: str, table: str, key: str = "id") -> dict[Any, Document]:
    """A table as its server shows it as JSON; only for types that both show alike."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(f"SELECT to_jsonb(t) FROM {table} t".encode()).fetchall()  # noqa: S608
    return {row[key]: row for (row,) in rows}
