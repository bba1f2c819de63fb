"""SQLite: the embedded default. Data and checkpoint are one file, and one transaction.

    config     path (of the database file), busyTimeout (seconds, 30)
    resource   table, delta_updates

Tables are STRICT: a sum that outgrows 64 bits is refused, where SQLite would else silently go on
with a float. Tasks stage Arrow files beside the database, and the leader alone writes to it.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow

from penstock import failpoints
from penstock.connectors import sql
from penstock.connectors.sql import CHECKPOINTS, quoted
from penstock.errors import UserError
from penstock.model.clock import Clock
from penstock.model.columns import Column, Kind
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.runtime.connector import (
    DELETE,
    Applied,
    Attempt,
    ConnectorError,
    Constraint,
    FencedEndpoint,
    Pattern,
    Staged,
    Target,
    TargetField,
    Task,
    Verdict,
)
from penstock.runtime.secrets import resolve

_pa: Any = pyarrow

_TYPES: Final = {
    Kind.BOOLEAN: "INTEGER",
    Kind.LONG: "INTEGER",
    Kind.DOUBLE: "REAL",
}
"""Everything else is TEXT: decimals to the digit, containers as JSON."""

_ROWS: Final = 16_384

_STAGED = failpoints.declare("sqlite.after-stage", "rows are staged, and nobody knows it yet")
_STORED = failpoints.declare("sqlite.before-commit", "rows are written, and not committed")
_COMMITTED = failpoints.declare("sqlite.after-commit", "rows and checkpoint are committed")


@dataclass(frozen=True, slots=True)
class Database:
    """Where the file is, and how long to wait for whoever has it."""

    path: str
    busy_s: float

    @property
    def staging(self) -> Path:
        return Path(f"{self.path}.staging")

    @contextlib.contextmanager
    def connect(self, *, read_only: bool = False) -> Iterator[sqlite3.Connection]:
        mode = "ro" if read_only else "rwc"
        uri = f"{Path(self.path).resolve().as_uri()}?mode={mode}"
        with _explained(self.path):
            connection = sqlite3.connect(
                uri, uri=True, timeout=self.busy_s, isolation_level=None, check_same_thread=False
            )
            try:
                if not read_only:
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.execute("PRAGMA synchronous = FULL")
                yield connection
            finally:
                connection.close()


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorname", "") or ""
        busy = code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
        fix = {
            "SQLITE_FULL": "free some space; the task goes on by itself then",
            "SQLITE_CANTOPEN": "make the directory, and let this user write there",
            "SQLITE_READONLY": "let this user write to the file and its directory",
            "SQLITE_NOTADB": "the file is something else: give another path",
        }.get(code.split("_CANTINIT")[0])
        if busy:
            fix = "somebody else writes to the database for long; raise busyTimeout, or end that"
        raise ConnectorError(
            f"SQLite refused: {error}",
            where=path,
            fix=fix,
            transient=busy or code.startswith(("SQLITE_FULL", "SQLITE_IOERR")),
        ) from error


# -------------------------------------------------------------------------------------- in tasks


@dataclass(frozen=True, slots=True)
class SqliteWorkers:
    """Stages Arrow files, and looks keys up read-only."""

    database: Database
    targets: Mapping[int, Target]

    def stager(self, attempt: Attempt) -> SqliteStager:
        return SqliteStager(self.database.staging / _owner(attempt.task), attempt)

    def loader(self, attempt: Attempt) -> SqliteLoader:
        return SqliteLoader(self.database, self.targets)


def _owner(task: str) -> str:
    """A directory name for a task: nothing in it leads elsewhere."""
    return task.encode().hex()


class SqliteStager:
    """One Arrow file per binding; nobody looks at it unless its path is in a manifest."""

    def __init__(self, directory: Path, attempt: Attempt) -> None:
        self._directory = directory
        self._attempt = attempt
        self._files: dict[int, tuple[Path, Any, int]] = {}

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        if binding not in self._files:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{self._attempt.name}_{binding}.arrow"
            self._files[binding] = (path, _pa.ipc.new_file(str(path), rows.schema), 0)
        path, writer, count = self._files[binding]
        writer.write_batch(rows)
        self._files[binding] = (path, writer, count + rows.num_rows)

    def finish(self) -> list[Staged]:
        staged = []
        for binding, (path, writer, count) in self._files.items():
            writer.close()
            staged.append(
                Staged(
                    binding=binding,
                    shard=self._attempt.shard,
                    at=str(path),
                    rows=count,
                    bytes=path.stat().st_size,
                )
            )
        failpoints.hit(_STAGED)
        return staged

    def discard(self) -> None:
        for path, writer, _ in self._files.values():
            with contextlib.suppress(Exception):
                writer.close()
            path.unlink(missing_ok=True)


class SqliteLoader:
    """Documents by key, through an index, from what is committed."""

    def __init__(self, database: Database, targets: Mapping[int, Target]) -> None:
        self._targets = targets
        self._stack = contextlib.ExitStack()
        self._connection = self._stack.enter_context(database.connect(read_only=True))
        self._path = database.path

    def load(self, binding: int, keys: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        target = self._targets[binding]
        document = target.document
        if document is None:
            raise ConnectorError(f"{target.collection} is loaded, and no document is stored")
        names = [field.name for field in target.key]
        table, wanted = quoted(*target.path), quoted("penstock_keys")
        same = " AND ".join(f"s.{quoted(name)} = k.{quoted(name)}" for name in names)
        with _explained(self._path):
            self._connection.execute(f"DROP TABLE IF EXISTS temp.{wanted}")
            columns = ", ".join(map(quoted, names))
            self._connection.execute(f"CREATE TEMP TABLE {wanted} ({columns})")
            marks = ", ".join("?" * len(names))
            self._connection.executemany(
                f"INSERT INTO temp.{wanted} VALUES ({marks})", _rows(keys, target.key)
            )
            found = self._connection.execute(
                f"SELECT s.{quoted(document.name)} FROM temp.{wanted} k "
                f"JOIN main.{table} s ON {same}"
            )
            while some := found.fetchmany(_ROWS):
                yield _pa.record_batch([_pa.array([row[0] for row in some], _pa.utf8())], ["d"])

    def close(self) -> None:
        self._stack.close()


def _rows(batch: pyarrow.RecordBatch, fields: Sequence[TargetField]) -> Iterator[tuple[Any, ...]]:
    """Rows as SQLite takes them; decimals are text, booleans are integers."""
    arrays: Any = batch
    columns = [
        arrays.column(field.name).cast(_pa.utf8()).to_pylist()
        if field.column.kind is Kind.DECIMAL
        else arrays.column(field.name).to_pylist()
        for field in fields
    ]
    return zip(*columns, strict=True)


# --------------------------------------------------------------------------------- on the leader


class SqliteSession:
    """The database, fenced for one session of a task."""

    def __init__(self, database: Database, task: Task, epoch: int) -> None:
        self._database = database
        self._task = task
        self._epoch = epoch
        self._targets = {target.binding: target for target in task.targets}
        self._stack = contextlib.ExitStack()
        self._connection = self._stack.enter_context(database.connect())
        with _explained(database.path):
            _raise_fence(self._connection, task.name, epoch, database.path)
            row = self._connection.execute(
                f"SELECT checkpoint FROM {CHECKPOINTS} WHERE task = ?", (task.name,)
            ).fetchone()
        self.checkpoint: bytes | None = row[0]
        self.workers = SqliteWorkers(database, self._targets)

    def flush(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def start_commit(
        self, close: Clock, staged: Sequence[Staged], checkpoint: bytes, patches: Sequence[Json]
    ) -> Sequence[Json]:
        """Everything in one transaction. SQLite has one writer, so it is before or after."""
        with _explained(self._database.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for each in staged:
                    self._store(each)
                self._store_checkpoint(checkpoint)
                failpoints.hit(_STORED)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        failpoints.hit(_COMMITTED)
        for each in staged:
            Path(each.at).unlink(missing_ok=True)
        return ()

    def _store_checkpoint(self, checkpoint: bytes) -> None:
        """With the fence checked in the same statement."""
        updated = self._connection.execute(
            f"UPDATE {CHECKPOINTS} SET checkpoint = ?, updated_at = CURRENT_TIMESTAMP "
            "WHERE task = ? AND fence = ?",
            (checkpoint, self._task.name, self._epoch),
        )
        if updated.rowcount != 1:
            raise _fenced(self._task.name, self._epoch, self._database.path)

    def _store(self, staged: Staged) -> None:
        target = self._targets[staged.binding]
        with _pa.memory_map(staged.at) as source:
            reader = _pa.ipc.open_file(source)
            count = 0
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                count += batch.num_rows
                self._store_batch(target, batch)
        if count != staged.rows:
            raise ConnectorError(
                f"{staged.rows} rows were staged, and {count} are there", where=staged.at
            )

    def _store_batch(self, target: Target, batch: pyarrow.RecordBatch) -> None:
        rows: Any = batch
        deleted = rows.column(DELETE)
        if not target.delta_updates and deleted.true_count:
            same = " AND ".join(f"{quoted(field.name)} = ?" for field in target.key)
            self._connection.executemany(
                f"DELETE FROM {quoted(*target.path)} WHERE {same}",
                _rows(rows.filter(deleted), target.key),
            )
            rows = rows.filter(_pa.compute.invert(deleted))
        self._connection.executemany(_insert(target), _rows(rows, target.fields))

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def sweep(self, keep: Sequence[Staged]) -> None:
        """Remove what attempts of this task have left behind."""
        kept = {each.at for each in keep}
        for path in (self._database.staging / _owner(self._task.name)).glob("*.arrow"):
            if str(path) not in kept:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._stack.close()


@functools.cache
def _insert(target: Target) -> str:
    table = quoted(*target.path)
    marks = ", ".join("?" * len(target.fields))
    insert = f"INSERT INTO {table} ({sql.columns_of(target)}) VALUES ({marks})"
    if target.delta_updates:
        return insert
    return f"{insert} {sql.on_conflict(target, table=table, least='min', greatest='max')}"


def _raise_fence(connection: sqlite3.Connection, task: str, epoch: int, path: str) -> None:
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {CHECKPOINTS} (task TEXT PRIMARY KEY, "
        "fence INTEGER NOT NULL, checkpoint BLOB, updated_at TEXT) STRICT"
    )
    connection.execute(
        f"INSERT INTO {CHECKPOINTS} (task, fence) VALUES (?, ?) "
        "ON CONFLICT (task) DO UPDATE SET fence = max(fence, excluded.fence)",
        (task, epoch),
    )
    row = connection.execute(f"SELECT fence FROM {CHECKPOINTS} WHERE task = ?", (task,)).fetchone()
    if row[0] != epoch:
        raise _fenced(task, epoch, path)


def _fenced(task: str, epoch: int, path: str) -> FencedEndpoint:
    return FencedEndpoint(
        f"session {epoch} of {task} is over: a newer one has the database", where=path
    )


# ---------------------------------------------------------------------------------- the connector


class Sqlite:
    """`penstock/materialize-sqlite`."""

    pattern = Pattern.ENDPOINT
    flush_barrier = False

    def __init__(self, config: Json, *, where: str) -> None:
        match resolve(config, where=where):
            case {"path": str(path), **rest} if path:
                busy_s = rest.pop("busyTimeout", 30)
            case _:
                raise UserError(
                    "the configuration lacks the path of the database",
                    where=f"{where}: endpoint.connector.config",
                    fix="path: views.db",
                )
        if rest or not isinstance(busy_s, int | float) or busy_s < 0:
            raise UserError(
                f"{', '.join(map(str, rest)) or 'busyTimeout'} is not understood",
                where=f"{where}: endpoint.connector.config",
                fix="path, and busyTimeout in seconds",
            )
        self._where = where
        self._database = Database(path, float(busy_s))

    def path(self, resource: Json) -> tuple[str, ...]:
        match resource:
            case {"table": str(table), **rest} if table and rest.keys() <= {"delta_updates"}:
                if table.lower().startswith(("sqlite_", "penstock_")):
                    raise UserError(
                        f"a table cannot be called {table}",
                        where=self._where,
                        fix="names that begin with sqlite_ and penstock_ are taken",
                    )
                return (table,)
            case _:
                raise UserError(
                    "the resource of a binding lacks its table, or has more than that",
                    where=self._where,
                    fix="resource: {table: orders, delta_updates: false}",
                )

    def delta_updates(self, resource: Json) -> bool:
        return isinstance(resource, dict) and resource.get("delta_updates") is True

    def can_reduce(self, field: TargetField) -> bool:
        numeric = field.column.kind in (Kind.LONG, Kind.DOUBLE)
        match field.reduction:
            case Strategy.SUM:
                return numeric
            case Strategy.MINIMIZE | Strategy.MAXIMIZE:
                return numeric or field.column.kind is Kind.STRING  # compared by bytes
            case Strategy.FIRST_WRITE_WINS | Strategy.LAST_WRITE_WINS:
                return True
            case _:
                return False

    def check(self) -> None:
        with self._database.connect() as connection, _explained(self._database.path):
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()

    def validate(
        self, path: tuple[str, ...], fields: Sequence[TargetField], *, delta_updates: bool
    ) -> Mapping[str, Verdict]:
        found = sql.verdicts(fields) if not delta_updates else {}
        if not Path(self._database.path).exists():
            return found
        with self._database.connect() as connection:
            there = _columns(connection, path)
        for field in fields:
            kind = there.get(field.name.lower())
            if kind is not None and kind != _type(field.column):
                found[field.name] = Verdict(
                    constraint=Constraint.INCOMPATIBLE,
                    reason=f"the column of table {path[0]} is {kind}, and {_type(field.column)} "
                    "is needed",
                )
        return found

    def apply(self, task: Task, last: Task | None, state: Json, *, epoch: int) -> Applied:
        before = {} if last is None else {target.path: target for target in last.targets}
        done: list[str] = []
        with self._database.connect() as connection, _explained(self._database.path):
            _raise_fence(connection, task.name, epoch, self._database.path)
            connection.execute("BEGIN IMMEDIATE")
            for target in task.targets:
                done += _apply(connection, target, before.get(target.path))
            connection.execute("COMMIT")
        return Applied(description="; ".join(done))

    def open(self, task: Task, *, epoch: int, state: Json) -> SqliteSession:
        session = SqliteSession(self._database, task, epoch)
        session.sweep(())
        return session


def _apply(connection: sqlite3.Connection, target: Target, before: Target | None) -> Iterator[str]:
    """Bring one table to its target; columns that others added stay."""
    table = quoted(*target.path)
    there = _columns(connection, target.path)
    if there and before is not None and before.state_key != target.state_key:
        if _key_names(connection, target.path) != [f.name.lower() for f in target.key]:
            connection.execute(f"DROP TABLE {table}")
            there = {}
            yield f"dropped {table}, whose key changes"
        else:
            connection.execute(f"DELETE FROM {table}")
            yield f"emptied {table} for a backfill"
    if not there:
        connection.execute(_create(target))
        yield f"created {table}"
        return
    for field in target.fields:
        if field.name.lower() not in there:
            kind = _type(field.column)
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {quoted(field.name)} {kind}")
            yield f"added {table}.{quoted(field.name)}"


def _create(target: Target) -> str:
    columns = [
        f"{quoted(field.name)} {_type(field.column)}{' NOT NULL' if field.is_key else ''}"
        for field in target.fields
    ]
    if not target.delta_updates:
        columns.append(f"PRIMARY KEY ({sql.key_of(target)})")
    return f"CREATE TABLE {quoted(*target.path)} ({', '.join(columns)}) STRICT"


def _type(column: Column) -> str:
    return _TYPES.get(column.kind, "TEXT")


def _columns(connection: sqlite3.Connection, path: tuple[str, ...]) -> dict[str, str]:
    rows = connection.execute("SELECT lower(name), type FROM pragma_table_info(?)", path)
    return dict(rows.fetchall())


def _key_names(connection: sqlite3.Connection, path: tuple[str, ...]) -> list[str]:
    rows = connection.execute(
        "SELECT lower(name) FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk", path
    )
    return [row[0] for row in rows]
