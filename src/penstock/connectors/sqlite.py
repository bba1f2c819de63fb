"""SQLite: the embedded default. Data and checkpoint are one file, and one transaction.

    config     path (of the database file), busyTimeout (seconds, 30), hardDelete
    resource   table, delta_updates

Tables are STRICT: a sum that outgrows 64 bits is refused, where SQLite would else silently go on
with a float, and then with Infinity. Tasks stage Arrow files beside the database, and the leader
alone writes to it.

A file can be replaced under a session, which would go on writing to the one that nobody sees any
more. So a commit first looks whether the file at the path is still the one it has open.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import pyarrow

from penstock import failpoints
from penstock.connectors import ownership, scratch, sql, sqlite_tables
from penstock.connectors.ownership import Record
from penstock.connectors.sql import CHECKPOINTS, quoted
from penstock.connectors.sqlite_busy import STEP_S, Patience, PatientConnection
from penstock.connectors.sqlite_tables import Fit, fit, type_of
from penstock.errors import UserError
from penstock.model.clock import Clock
from penstock.model.columns import Kind
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.runtime.connector import (
    DELETE,
    Applied,
    Attempt,
    ConnectorError,
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

_DIALECT: Final = sql.Dialect(  # text compares by its bytes
    least="min",
    greatest="max",
    # A STRICT table refuses a text in a REAL column; SQLite itself would go on with Infinity.
    checked_sums={
        Kind.DOUBLE: f"CASE WHEN abs({{0}}) <= {sys.float_info.max!r} THEN {{0}} "
        "WHEN {0} IS NOT NULL THEN 'overflow' END"
    },
)

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

    def identity(self) -> tuple[int, int] | None:
        """Which file is at the path now."""
        try:
            found = Path(self.path).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def connect(
        self, *, read_only: bool = False, patience: Patience | None = None
    ) -> Iterator[sqlite3.Connection]:
        """With `patience`, waiting can be interrupted; it cannot in tasks, whose jobs can be."""
        mode = "ro" if read_only else "rwc"
        uri = f"{Path(self.path).resolve().as_uri()}?mode={mode}"
        with _explained(self.path):
            connection = sqlite3.connect(
                uri,
                uri=True,
                timeout=self.busy_s if patience is None else min(self.busy_s, STEP_S),
                isolation_level=None,
                check_same_thread=False,
                factory=PatientConnection,
            )
            with contextlib.ExitStack() as interruptible:
                interruptible.callback(connection.close)
                if patience is not None:
                    interruptible.enter_context(patience.on(connection))
                if not read_only:
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.execute("PRAGMA synchronous = FULL")
                yield connection


_FIXES: Final = {
    sqlite3.SQLITE_BUSY: "somebody else writes to it for long; raise busyTimeout, or end that",
    sqlite3.SQLITE_LOCKED: "somebody else writes to it for long; raise busyTimeout, or end that",
    sqlite3.SQLITE_FULL: "free some space; the task goes on by itself then",
    sqlite3.SQLITE_IOERR: "is the disk full, or broken? The task goes on by itself if it recovers",
    sqlite3.SQLITE_CANTOPEN: "make the directory, and let this user write there",
    sqlite3.SQLITE_READONLY: "let this user write to the file and its directory",
    sqlite3.SQLITE_NOTADB: "the file is something else: give another path",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore it, or remove it and raise `backfill`",
    sqlite3.SQLITE_CONSTRAINT: "rows break a constraint of the table: drop it, or mend the "
    "collection; a sum that has outgrown 64 bits can be a `number`, or start over by `backfill`",
}
"""By what SQLite calls primary result codes."""
_TRANSIENT: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
)


_OVERFLOW: Final = re.compile(
    r"cannot store (?:REAL value in INTEGER|TEXT value in REAL) column (.+)"
)
"""How a STRICT table refuses a sum that has left 64 bits, or the range of a float."""


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Within this, errors of SQLite and of the file system are `ConnectorError`."""
    try:
        yield
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        overflow = _OVERFLOW.search(str(error))
        raise ConnectorError(
            f"the sum in column {overflow[1]} is out of range"
            if overflow
            else f"SQLite refused: {error}",
            where=path,
            fix=_FIXES.get(code),
            transient=code in _TRANSIENT,
        ) from error
    except OSError as error:
        raise ConnectorError(
            f"rows cannot be staged: {error.strerror or error}",
            where=path,
            fix="free some space, and let this user write beside the database",
            transient=True,
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
    """A directory name for a task: short, and nothing in it leads elsewhere."""
    return hashlib.sha256(task.encode()).hexdigest()


class SqliteStager:
    """One Arrow file per binding; nobody looks at it unless its path is in a manifest."""

    def __init__(self, directory: Path, attempt: Attempt) -> None:
        self._directory = directory
        self._attempt = attempt
        self._files: dict[int, tuple[Path, Any, int]] = {}

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        with _explained(str(self._directory)):
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
            with _explained(str(path)):
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
        with _explained(self._path):
            self._connection.execute(f"DROP TABLE IF EXISTS temp.{wanted}")
            columns = ", ".join(map(quoted, names))
            self._connection.execute(f"CREATE TEMP TABLE {wanted} ({columns})")
            marks = ", ".join("?" * len(names))
            self._connection.executemany(
                f"INSERT INTO temp.{wanted} VALUES ({marks})", _rows(keys, target.key)
            )
            found = self._connection.execute(
                f"SELECT t.{quoted(document.name)} FROM temp.{wanted} k "
                f"JOIN main.{table} t ON {sql.same_key(target, 't', 'k')}"
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

    def __init__(
        self,
        database: Database,
        task: Task,
        epoch: int,
        *,
        hard_delete: bool,
        patience: Patience | None = None,
    ) -> None:
        self._database = database
        self._hard_delete = hard_delete
        self._task = task
        self._epoch = epoch
        self._targets = {target.binding: target for target in task.targets}
        self._stack = contextlib.ExitStack()
        self._connection = self._stack.enter_context(database.connect(patience=patience))
        with _explained(database.path):
            self.checkpoint = _raise_fence(self._connection, task.name, epoch, database.path)
        self._file = database.identity()
        self._schema = self._schema_version()
        self._filled: set[int] = set()
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
                self._store_checkpoint(checkpoint)
                self._check_tables()
                for each in staged:
                    self._store(each)
                filled = self._remember_filled({each.binding for each in staged})
                failpoints.hit(_STORED)
                self._check_file()
                self._connection.execute("COMMIT")
                self._filled |= filled
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        failpoints.hit(_COMMITTED)
        for each in staged:
            Path(each.at).unlink(missing_ok=True)
        return ()

    def _store_checkpoint(self, checkpoint: bytes) -> None:
        """First of all, and with the fence checked in the same statement."""
        updated = self._connection.execute(
            f"UPDATE {CHECKPOINTS} SET checkpoint = ?, updated_at = CURRENT_TIMESTAMP "
            "WHERE task = ? AND fence = ?",
            (checkpoint, self._task.name, self._epoch),
        )
        if updated.rowcount != 1:
            raise _fenced(self._task.name, self._epoch, self._database.path)

    def _check_tables(self) -> None:
        """If somebody made, changed or dropped tables: whether ours have lost their rows by it.

        A session that ends by this is followed by one that applies, and says what is wrong.
        """
        version = self._schema_version()
        if version == self._schema:
            return
        for target in self._task.targets:
            record = sqlite_tables.record(self._connection, target.path)
            live = sqlite_tables.look(self._connection, target.path)
            if live is None or (
                record is not None
                and record.filled
                and ownership.keeps_rows(target, self._hard_delete)
                and sqlite_tables.is_empty(self._connection, target.path)
            ):
                raise ConnectorError(
                    f"table {target.path[0]} was dropped while a session had it open",
                    where=self._database.path,
                    fix="raise `backfill` of the binding to fill it anew",
                    transient=True,
                )
        self._schema = version

    def _schema_version(self) -> int:
        version: int = self._connection.execute("PRAGMA schema_version").fetchone()[0]
        return version

    def _remember_filled(self, bindings: set[int]) -> set[int]:
        """Note which targets have rows, once in a session."""
        filled = {
            binding
            for binding in bindings - self._filled
            if not sqlite_tables.is_empty(self._connection, self._targets[binding].path)
        }
        for binding in filled:
            sqlite_tables.remember_filled(self._connection, self._targets[binding].path)
        return filled

    def _check_file(self) -> None:
        if self._database.identity() != self._file:
            raise ConnectorError(
                "the database was replaced or removed while a session had it open",
                where=self._database.path,
                fix="put it back, or raise `backfill` of the bindings",
                transient=True,
            )

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
            self._delete(target, rows.filter(deleted))
            rows = rows.filter(_pa.compute.invert(deleted))
        done = self._connection.executemany(_insert(target), _rows(rows, target.fields))
        sql.check_stored(
            target,
            sent=rows.num_rows,
            stored=max(done.rowcount, 0),  # -1 of none at all
            where=self._database.path,
        )

    def _delete(self, target: Target, rows: pyarrow.RecordBatch) -> None:
        """Rows go, or show the deletion; a key that is not there does not appear by it."""
        table = quoted(*target.path)
        same = " AND ".join(f"{quoted(field.name)} = ?" for field in target.key)
        shown = [field for field in target.fields if not field.is_key]
        count = f"SELECT count(*) FROM {table} WHERE {same}"
        there = sum(
            self._connection.execute(count, key).fetchone()[0] for key in _rows(rows, target.key)
        )
        if self._hard_delete:
            done = self._connection.executemany(
                f"DELETE FROM {table} WHERE {same}", _rows(rows, target.key)
            )
        elif shown:
            sets = ", ".join(f"{quoted(field.name)} = ?" for field in shown)
            done = self._connection.executemany(
                f"UPDATE {table} SET {sets} WHERE {same}", _rows(rows, [*shown, *target.key])
            )
        else:
            return
        sql.check_removed(
            target, there=there, removed=max(done.rowcount, 0), where=self._database.path
        )

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def sweep(self, keep: Sequence[Staged]) -> None:
        """Remove what attempts of this task have left behind."""
        kept = {each.at for each in keep}
        for name in filter(None, (self._task.name, self._task.renamed_from)):
            for path in (self._database.staging / _owner(name)).glob("*.arrow"):
                if str(path) not in kept:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        self._stack.close()


@functools.cache
def _insert(target: Target) -> str:
    table = quoted(*target.path)
    marks = ", ".join("?" * len(target.fields))
    insert = f"INSERT INTO {table} AS t ({sql.columns_of(target)}) VALUES ({marks})"
    return insert if target.delta_updates else f"{insert} {sql.on_conflict(target, _DIALECT)}"


def _raise_fence(connection: sqlite3.Connection, task: str, epoch: int, path: str) -> bytes | None:
    """Keep older sessions out, and read the checkpoint in the same statement.

    Read any later, it could be a successor's, and look like nobody's.
    """
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {CHECKPOINTS} (task TEXT PRIMARY KEY, "
        "fence INTEGER NOT NULL, checkpoint BLOB, updated_at TEXT) STRICT"
    )
    fence, checkpoint = connection.execute(
        f"INSERT INTO {CHECKPOINTS} (task, fence) VALUES (?, ?) "
        "ON CONFLICT (task) DO UPDATE SET fence = max(fence, excluded.fence) "
        "RETURNING fence, checkpoint",
        (task, epoch),
    ).fetchall()[0]
    if fence != epoch:
        raise _fenced(task, epoch, path)
    stored: bytes | None = checkpoint
    return stored


def _fenced(task: str, epoch: int, path: str) -> FencedEndpoint:
    return FencedEndpoint(
        f"session {epoch} of {task} is over: a newer one has the database",
        where=path,
        fix=sql.FENCED,
    )


# ---------------------------------------------------------------------------------- the connector


class Sqlite:
    """`penstock/materialize-sqlite`."""

    pattern = Pattern.ENDPOINT
    flush_barrier = False

    def __init__(self, config: Json, *, where: str) -> None:
        at = f"{where}: endpoint.connector.config"
        given = sql.check_members(
            resolve(config, where=where),
            ("path", "busyTimeout", "hardDelete"),
            required=("path",),
            where=at,
            example="{path: views.db, busyTimeout: 30, hardDelete: false}",
        )
        busy_s = given.get("busyTimeout", 30)
        if not isinstance(busy_s, int | float) or isinstance(busy_s, bool) or busy_s < 0:
            raise UserError("busyTimeout is no number of seconds", where=at, fix="busyTimeout: 30")
        self._where = where
        path = Path(sql.text(given, "path", where=at)).resolve()  # tasks work in other directories
        self._database = Database(str(path), float(busy_s))
        self._patience = Patience(float(busy_s))
        self._hard_delete = sql.flag(given, "hardDelete", where=at)

    def path(self, resource: Json) -> tuple[str, ...]:
        at = f"{self._where}: resource"
        given = sql.check_members(
            resource,
            ("table", "delta_updates"),
            required=("table",),
            where=at,
            example="{table: orders, delta_updates: false}",
        )
        table = sql.text(given, "table", where=at)
        if table.lower().startswith(("sqlite_", "penstock_")) or "\0" in table:
            raise UserError(
                f"a table cannot be called {table}",
                where=at,
                fix="names that begin with sqlite_ and penstock_ are taken",
            )
        return (table,)

    def location(self, resource: Json) -> tuple[str, ...]:
        (table,) = self.path(resource)
        folded = "".join(c.lower() if c.isascii() else c for c in table)  # as SQLite compares them
        return "sqlite", self._database.path, folded

    def delta_updates(self, resource: Json) -> bool:
        return isinstance(resource, dict) and sql.flag(
            resource, "delta_updates", where=f"{self._where}: resource"
        )

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

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection for one errand."""
        with (
            self._database.connect(patience=self._patience) as connection,
            _explained(self._database.path),
        ):
            yield connection

    def interrupt(self) -> None:
        self._patience.interrupt()

    def waits_for(self) -> str | None:
        if not self._patience.waits:
            return None
        return f"another process that writes to {self._database.path}"

    def check(self) -> None:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")

    def validate(
        self,
        path: tuple[str, ...],
        fields: Sequence[TargetField],
        *,
        delta_updates: bool,
        state_key: str,
    ) -> Mapping[str, Verdict]:
        found = sql.verdicts(fields, delta_updates=delta_updates)
        if not Path(self._database.path).exists():
            return found
        with self._connected() as connection:
            live = sqlite_tables.look(connection, path)
            record = sqlite_tables.record(connection, path)
        if live is None or (record is not None and record.state_key != state_key):
            return found  # it is made to fit, by a backfill that was asked for
        for field in fields:
            there = live.columns.get(field.name.lower())
            if there is not None and fit(field, there) is Fit.FAILS:
                found[field.name] = sql.misfit(path[0], there, type_of(field.column))
        return found

    def apply(self, task: Task, last: Task | None, state: Json, *, epoch: int) -> Applied:
        """All or nothing, and only if no newer session has been here."""
        before = {} if last is None else {target.path: target for target in last.targets}
        done: list[str] = []
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            checkpoint = _raise_fence(connection, task.name, epoch, self._database.path)
            sqlite_tables.make_records(connection)
            if not sqlite_tables.rename(connection, task, checkpoint):
                raise ownership.two_checkpoints(task, self._database.path)
            for target in task.targets:
                done += self._apply(connection, task, target, before.get(target.path))
            connection.execute("COMMIT")
        return Applied(description="; ".join(done))

    def _apply(
        self, connection: sqlite3.Connection, task: Task, target: Target, was: Target | None
    ) -> Iterator[str]:
        live = sqlite_tables.look(connection, target.path)
        emptied = sqlite_tables.claim(
            connection, task, target, was=was, live=live, hard_delete=self._hard_delete
        )
        for step in sqlite_tables.plan(target, live, emptied=emptied):
            for statement in step.statements:
                connection.execute(statement)
            yield step.says

    def open(self, task: Task, *, epoch: int, state: Json) -> SqliteSession:
        session = SqliteSession(
            self._database,
            task,
            epoch,
            hard_delete=self._hard_delete,
            patience=self._patience,
        )
        session.sweep(())
        return session

    @contextlib.contextmanager
    def preview(self, paths: Sequence[tuple[str, ...]]) -> Iterator[Self]:
        """In a file of its own beside the database, which is only read."""
        real = self._database
        with scratch.beside(Path(real.path)) as place:
            mine = replace(real, path=str(place))
            if Path(real.path).exists():
                with _explained(real.path), real.connect(read_only=True) as there:
                    shapes = [sqlite_tables.shape(there, path) for path in paths]
                    records = {path: sqlite_tables.record(there, path) for path in paths}
                with _explained(mine.path), mine.connect() as connection:
                    for statement in itertools.chain.from_iterable(shapes):
                        connection.execute(statement)
                    sqlite_tables.make_records(connection)
                    for path, record in records.items():
                        if record is not None:
                            known = Record(state_key=record.state_key)
                            sqlite_tables.remember(connection, path, known)
            connector = copy.copy(self)
            connector._database = mine  # noqa: SLF001 - a copy
            yield connector
