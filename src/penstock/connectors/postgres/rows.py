"""The part that runs in Spark tasks: staging rows, and looking documents up.

Few rows are carried in the manifest itself, and then by the statement that stores them: a small
transaction costs the server no table, no connection and no round trip before its commit. More rows
are copied into an UNLOGGED table of the attempt's own, which is written once, without a log; a
crash of the server empties it, and the commit notices that by counting.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

import psycopg
import pyarrow

from penstock import failpoints
from penstock.connectors.postgres.columns import NAME_BYTES_MAX, RowLayout
from penstock.connectors.postgres.locks import TASK_IDLE_S, PostgresConnection, bounds
from penstock.connectors.postgres.server import Server
from penstock.connectors.sql.statements import quoted, same_key
from penstock.errors import Bug
from penstock.runtime.connector.common import SparkAttempt
from penstock.runtime.connector.materialize import DELETE, Staged, Target

_pa: Any = pyarrow

STAGE: Final = "penstock_stage"
"""The schema of staged tables."""

CARRIED_BYTES_MAX: Final = 1 << 20
"""Per attempt and binding: more is cheaper to copy than to carry in the leader's memory."""

_CARRIED: Final = "rows:"
_COPY_BYTES: Final = 4 << 20
_ROWS: Final = 16_384

_STAGED = failpoints.declare("postgres.after-stage", "rows are staged, and not reported yet")


def stage_prefix(task: str) -> str:
    """Return the prefix of all staged tables of a task, whose own name is long and free."""
    return f"{hashlib.sha256(task.encode()).hexdigest()[:16]}_"


def stage_name(attempt: SparkAttempt, binding: int, prefix: str = "") -> str:
    """Name an attempt's table: prefix, epoch, then the rest of the attempt or its digest."""
    prefix = f"{prefix or stage_prefix(attempt.task)}{attempt.epoch}_"
    return fitting(prefix, f"{attempt.name}_{binding}".removeprefix(f"{attempt.epoch}_"))


def fitting(prefix: str, name: str) -> str:
    """Return prefix and name, or prefix and digest if that would be too long."""
    if len(prefix.encode()) + len(name.encode()) <= NAME_BYTES_MAX:
        return prefix + name
    return prefix + hashlib.sha256(name.encode()).hexdigest()[: NAME_BYTES_MAX - len(prefix)]


def epoch_of(name: str) -> int:
    """Return the epoch of a staged table."""
    return int(name.split("_")[1])


@dataclass(frozen=True, slots=True)
class PostgresWorkers:
    """The server, its secrets unresolved, and the format of rows."""

    server: Server
    targets: Mapping[int, Target]
    layouts: Mapping[int, RowLayout]
    prefix: str = ""
    """In a preview, the beginning of the names of its tables."""

    def stager(self, attempt: SparkAttempt) -> PostgresStager:
        return PostgresStager(self.server, self.layouts, attempt, self.prefix)

    def loader(self, attempt: SparkAttempt) -> PostgresLoader:
        return PostgresLoader(self.server, self.targets, self.layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Rows in a manifest: an array for each column, as PostgreSQL writes arrays."""

    literals: tuple[str, ...]
    rows: int
    deleted: int
    """Rows among them that delete."""

    @classmethod
    def of(cls, layout: RowLayout, rows: pyarrow.RecordBatch) -> Carried:
        batch: Any = rows
        return cls(
            literals=tuple(layout.literals(rows)),
            rows=rows.num_rows,
            deleted=batch.column(DELETE).true_count,
        )

    @property
    def at(self) -> str:
        """The text for `Staged.at`: numbers of rows, the length of each literal, the literals."""
        numbers = (self.rows, self.deleted, *map(len, self.literals))
        return "".join((_CARRIED, ",".join(map(str, numbers)), ";", *self.literals))

    @classmethod
    def read(cls, at: str) -> Carried:
        """Decode `Staged.at`."""
        numbers, _, text = at.removeprefix(_CARRIED).partition(";")
        rows, deleted, *lengths = map(int, numbers.split(","))
        bounds = pairwise(accumulate(lengths, initial=0))
        literals = tuple(text[begin:end] for begin, end in bounds)
        return cls(literals=literals, rows=rows, deleted=deleted)


def is_carried(at: str) -> bool:
    """True if `Staged.at` holds the rows themselves, and not the name of a table."""
    return at.startswith(_CARRIED)


@dataclass(slots=True)
class _PendingRows:
    """Rows of a binding; those in `waiting` are not copied yet."""

    layout: RowLayout
    table: str
    waiting: list[pyarrow.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0
    bytes: int = 0
    rows: int = 0
    copied: int = 0

    def add(self, rows: pyarrow.RecordBatch) -> None:
        self.waiting.append(rows)
        self.waiting_bytes += rows.nbytes
        self.bytes += rows.nbytes
        self.rows += rows.num_rows

    def staged(self, binding: int, shard: int) -> Staged:
        at = (
            self.table
            if self.copied
            else Carried.of(self.layout, _pa.concat_batches(self.waiting)).at
        )
        return Staged(binding=binding, shard=shard, at=at, rows=self.rows, bytes=self.bytes)


class PostgresStager:
    """Collects rows; what is too much to carry goes to a table, in one transaction."""

    def __init__(
        self,
        server: Server,
        layouts: Mapping[int, RowLayout],
        attempt: SparkAttempt,
        prefix: str = "",
    ) -> None:
        self._server = server
        self._layouts = layouts
        self._attempt = attempt
        self._prefix = prefix
        self._pending: dict[int, _PendingRows] = {}
        self._connection: PostgresConnection | None = None

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        if (pending := self._pending.get(binding)) is None:
            table = stage_name(self._attempt, binding, self._prefix)
            pending = _PendingRows(self._layouts[binding], table)
            self._pending[binding] = pending
        pending.add(rows)
        if pending.waiting_bytes > (_COPY_BYTES if pending.copied else CARRIED_BYTES_MAX):
            self._copy(pending)

    def finish(self) -> list[Staged]:
        for pending in self._pending.values():
            if pending.copied and pending.waiting:
                self._copy(pending)
        if self._connection is not None:
            with self._server.explained():
                self._connection.run("COMMIT")
            self._connection.close()
        shard = self._attempt.shard
        staged = [pending.staged(binding, shard) for binding, pending in self._pending.items()]
        failpoints.hit(_STAGED)
        return staged

    def discard(self) -> None:
        """Close the connection: an uncommitted transaction leaves no table."""
        if self._connection is not None:
            self._connection.close()

    def _copy(self, pending: _PendingRows) -> None:
        chunks = [pending.layout.csv(rows) for rows in pending.waiting]
        if self._connection is None:
            self._connection = self._server.connect()
            with self._server.explained():
                # If the server forgets it, the commit will notice; that is cheaper.
                self._connection.run(
                    f"BEGIN; SET LOCAL synchronous_commit = off; {bounds(TASK_IDLE_S)}",
                )
        with self._server.explained():
            table = quoted(STAGE, pending.table)
            if not pending.copied:
                columns = f"{pending.layout.ddl}, {quoted(DELETE)} boolean"
                self._connection.run(
                    f"CREATE UNLOGGED TABLE {table} ({columns}) WITH (autovacuum_enabled = false)"
                )
            pending.copied += _copy_in(
                self._connection, f"{table} FROM STDIN (FORMAT csv, FREEZE)", chunks
            )
        if pending.copied != pending.rows:
            raise Bug(f"{pending.copied} rows of {pending.rows} were copied", where=pending.table)
        pending.waiting.clear()
        pending.waiting_bytes = 0


def _copy_in(connection: PostgresConnection, what: str, chunks: list[bytes]) -> int:
    """Run `COPY what`; return the number of rows."""
    with connection.cursor() as cursor:
        with cursor.copy(f"COPY {what}".encode()) as copy:
            for chunk in chunks:
                copy.write(chunk)
        return cursor.rowcount


class PostgresLoader:
    """Looks documents up by key. Only the leader writes, so any committed snapshot will do."""

    def __init__(
        self, server: Server, targets: Mapping[int, Target], layouts: Mapping[int, RowLayout]
    ) -> None:
        self._server = server
        self._targets = targets
        self._layouts = layouts
        self._connection = server.connect()

    def load(self, binding: int, keys: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        target = self._targets[binding]
        document = target.document
        if document is None:
            raise Bug(f"{target.collection} is loaded, and no document is stored")
        layout = self._layouts[binding].key
        chunk = layout.csv(keys)
        wanted = "pg_temp.penstock_keys"
        with self._server.explained():
            self._connection.run(
                f"BEGIN; {bounds(TASK_IDLE_S)}; "
                f"CREATE TEMP TABLE penstock_keys ({layout.ddl}) ON COMMIT DROP",
            )
            _copy_in(self._connection, f"{wanted} FROM STDIN (FORMAT csv)", [chunk])
            # Without statistics the planner would guess, and could choose to read the whole table.
            self._connection.run(f"ANALYZE {wanted}")
            with self._connection.cursor(name="penstock_documents") as cursor:
                query = (
                    f"SELECT t.{quoted(document.name)}::text FROM {wanted} k "
                    f"JOIN {quoted(*target.path)} t ON {same_key(target, 't', 'k')}"
                )
                cursor.execute(query.encode())
                while some := cursor.fetchmany(_ROWS):
                    texts = _pa.array([row[0] for row in some], _pa.utf8())
                    yield _pa.record_batch([texts], ["d"])
            self._connection.run("COMMIT")

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()
