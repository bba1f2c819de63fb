"""SQLite: the embedded default. Data and checkpoint are one file, and one transaction.

Spark tasks stage Arrow files beside the database, and the leader alone writes to it.

A file can be replaced under a session, which would go on writing to one that is no longer at the
path. So a commit first checks that the file at the path is still the one it has open.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from penstock import failpoints
from penstock.connectors import file_previews
from penstock.connectors.arrow_files import ArrowFiles, ArrowStager
from penstock.connectors.ownership import TableRecord
from penstock.connectors.sql.records import CHECKPOINTS, TABLES, Records
from penstock.connectors.sql.rows import KeyLoader, RowSession
from penstock.connectors.sql.sink import DELTA_UPDATES, HARD_DELETE, SqlSink
from penstock.connectors.sqlite.busy import STEP_S, BusyWait, SqliteConnection
from penstock.connectors.sqlite.dialect import GREATEST_NUMERAL, LEAST_NUMERAL, SqliteDialect
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json, numeric_key
from penstock.runtime.connector.common import ConnectorError, SparkAttempt
from penstock.runtime.connector.materialize import SinkTask, Target
from penstock.runtime.secrets import resolve

_STAGED = failpoints.declare("sqlite.after-stage", "rows are staged, and not reported yet")
_STORED = failpoints.declare("sqlite.before-commit", "rows are written, and not committed")
_COMMITTED = failpoints.declare("sqlite.after-commit", "rows and checkpoint are committed")


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A database file, and how long to wait for other processes that write to it."""

    path: str
    busy_s: float

    @property
    def staging(self) -> ArrowFiles:
        return ArrowFiles(Path(f"{self.path}.staging"))

    def identity(self) -> tuple[int, int] | None:
        """Tell which file is at the path now."""
        try:
            found = Path(self.path).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def connect(
        self, *, read_only: bool = False, wait: BusyWait | None = None
    ) -> Iterator[SqliteConnection]:
        """Connect. Without `wait`, waiting cannot be interrupted: in tasks, whose jobs can be."""
        uri = f"{Path(self.path).resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        with self.explained():
            connection = sqlite3.connect(
                uri,
                uri=True,
                timeout=self.busy_s if wait is None else min(self.busy_s, STEP_S),
                isolation_level=None,
                check_same_thread=False,
                factory=SqliteConnection,
            )
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                if wait is not None:
                    stack.enter_context(wait.on(connection))
                if not read_only:
                    for name, pick in ((LEAST_NUMERAL, min), (GREATEST_NUMERAL, max)):
                        connection.create_function(name, 2, _of_two(pick), deterministic=True)
                    connection.run("PRAGMA journal_mode = WAL")
                    connection.run("PRAGMA synchronous = FULL")
                yield connection

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within this, errors of SQLite are `ConnectorError`."""
        try:
            yield
        except sqlite3.Error as error:
            code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
            overflow = _OVERFLOW.search(str(error))
            raise ConnectorError(
                f"the sum in column {overflow[1]} is out of range"
                if overflow
                else f"SQLite refused: {error}",
                where=self.path,
                fix=_FIXES.get(code),
                transient=code in _TRANSIENT,
            ) from error


def _of_two(pick: Callable[..., str]) -> Callable[[str | None, str | None], str | None]:
    """The lesser or greater number of two texts; NULL if one is, as SQLite's own functions."""

    def picked(one: str | None, other: str | None) -> str | None:
        return None if one is None or other is None else pick(one, other, key=numeric_key)

    return picked


_FIXES: Final = {
    sqlite3.SQLITE_BUSY: "another process writes to it for long; raise busyTimeout, or end that",
    sqlite3.SQLITE_LOCKED: "another process writes to it for long; raise busyTimeout, or end that",
    sqlite3.SQLITE_FULL: "free some space; the task then continues by itself",
    sqlite3.SQLITE_IOERR: "check whether the disk is full or broken; the task continues by itself "
    "when it recovers",
    sqlite3.SQLITE_CANTOPEN: "make the directory, and let this user write there",
    sqlite3.SQLITE_READONLY: "let this user write to the file and its directory",
    sqlite3.SQLITE_NOTADB: "the file is something else: give another path",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore it, or remove it and raise `backfill`",
    sqlite3.SQLITE_CONSTRAINT: "rows break a constraint of the table: drop it, or mend the "
    "collection; a sum that has outgrown 64 bits can be a `number`, or start over by `backfill`",
}
"""By SQLite's primary result codes."""
_TRANSIENT: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
)
_OVERFLOW: Final = re.compile(
    r"cannot store (?:REAL value in INTEGER|TEXT value in REAL) column (.+)"
)
"""A STRICT table's refusal of a sum that has left 64 bits, or the range of a float."""


@dataclass(frozen=True, slots=True)
class SqliteWorkers:
    """Stages Arrow files, and looks keys up read-only."""

    file: SqliteFile
    targets: Mapping[int, Target]

    def stager(self, attempt: SparkAttempt) -> ArrowStager:
        return self.file.staging.stager(attempt, failpoint=_STAGED)

    def loader(self, attempt: SparkAttempt) -> KeyLoader:
        connected = self.file.connect(read_only=True)
        return KeyLoader(connected, self.file.explained, Sqlite.dialect, self.targets)


class SqliteSession(RowSession[SqliteConnection]):
    """A file has one writer at a time, so a commit is before another or after it."""

    before_commit = _STORED
    after_commit = _COMMITTED

    def __init__(self, sink: Sqlite, task: SinkTask, epoch: int) -> None:
        super().__init__(sink, task, epoch, files=sink.file.staging)
        self._file = sink.file
        self._opened = self._file.identity()
        self._schema = self._schema_version()
        self.workers = SqliteWorkers(self._file, self._targets)

    def _schema_version(self) -> int:
        version: int = self._connection.run("PRAGMA schema_version").fetchone()[0]
        return version

    def _before_rows(self) -> None:
        """Look at the tables only if one was created, altered or dropped."""
        if (version := self._schema_version()) != self._schema:
            super()._before_rows()
            self._schema = version

    def _end(self, checkpoint: bytes) -> None:
        if self._file.identity() != self._opened:
            raise ConnectorError(
                "the database was replaced or removed while a session had it open",
                where=self._file.path,
                fix="put it back, or raise `backfill` of the bindings",
                transient=True,
            )
        super()._end(checkpoint)


class Sqlite(SqlSink[SqliteConnection]):
    """`penstock/materialize-sqlite`."""

    dialect = SqliteDialect()
    config_schema = ConfigSchema(
        {
            "path": {
                "type": "string",
                "minLength": 1,
                "path": True,
                "title": "the path of a file",
                "description": "The database file. It is created if it does not exist.",
                "examples": ["views.db"],
            },
            "busyTimeout": {
                "type": "number",
                "minimum": 0,
                "default": 30,
                "title": "a number of seconds",
                "description": "How long to wait for other processes that write to the file.",
                "examples": [30],
            },
            "hardDelete": HARD_DELETE,
        },
        required=("path",),
    )
    resource_schema = ConfigSchema(
        {
            "table": {
                "type": "string",
                "pattern": r"^(?!(?i:sqlite_|penstock_))[^\u0000]+$",
                "title": "the name of a table; names that begin with sqlite_ and penstock_ are "
                "taken",
                "description": "The table. It is created if it does not exist.",
                "examples": ["orders"],
            },
            "delta_updates": DELTA_UPDATES,
        },
        required=("table",),
    )

    def __init__(self, config: Json, *, where: str) -> None:
        at = f"{where}: endpoint.connector.config"
        given = self.config_schema.read(resolve(config, where=where), where=at)
        super().__init__(where=where, hard_delete=given.get("hardDelete", False))
        busy_s = float(given.get("busyTimeout", 30))
        path = Path(given["path"]).resolve()  # tasks run in other directories
        self.file = SqliteFile(str(path), busy_s)
        self._wait = BusyWait(busy_s)

    @property
    def name(self) -> str:
        return self.file.path

    @property
    def records(self) -> Records:
        return Records(
            self.dialect, checkpoints=(CHECKPOINTS,), tables=(TABLES,), where=self.file.path
        )

    def connected(self) -> contextlib.AbstractContextManager[SqliteConnection]:
        return self.file.connect(wait=self._wait)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return self.file.explained()

    def session(self, task: SinkTask, epoch: int) -> SqliteSession:
        return SqliteSession(self, task, epoch)

    def exists(self) -> bool:
        return Path(self.file.path).exists()

    def path(self, resource: Json) -> tuple[str, ...]:
        return (self.read_resource(resource)["table"],)

    def location(self, resource: Json) -> tuple[str, ...]:
        (table,) = self.path(resource)
        folded = "".join(c.lower() if c.isascii() else c for c in table)  # as SQLite compares them
        return "sqlite", self.file.path, folded

    def check(self) -> None:
        with self.connected() as connection:
            connection.run("BEGIN IMMEDIATE")
            connection.run("ROLLBACK")

    def interrupt(self) -> None:
        self._wait.interrupt()

    def waits_for(self) -> str | None:
        return f"another process that writes to {self.file.path}" if self._wait.waits else None

    @contextlib.contextmanager
    def preview(self, paths: Sequence[tuple[str, ...]]) -> Iterator[Self]:
        """Preview in a file of its own beside the database, which is only read."""
        with file_previews.beside(Path(self.file.path)) as place:
            preview = copy.copy(self)
            preview.file = replace(self.file, path=str(place))
            if self.exists():
                with self.file.explained(), self.file.connect(read_only=True) as there:
                    shapes = [_shape(there, path) for path in paths]
                    found = {path: self.records.find(there, path) for path in paths}
                with preview.explained(), preview.file.connect() as connection:
                    for statement in itertools.chain.from_iterable(shapes):
                        connection.run(statement)
                    preview.records.make(connection)
                    for path, record in found.items():
                        if record is not None:
                            known = TableRecord(state_key=record.state_key)
                            preview.records.store(connection, path, known)
            yield preview


def _shape(connection: SqliteConnection, path: tuple[str, ...]) -> list[str]:
    """Return the statements that made a table and its indexes; none if it does not exist."""
    rows = connection.run(
        "SELECT sql FROM sqlite_schema WHERE tbl_name = ? COLLATE NOCASE AND sql IS NOT NULL "
        "AND type IN ('view', 'table', 'index') ORDER BY type DESC",
        path,
    )
    return [statement for (statement,) in rows]
