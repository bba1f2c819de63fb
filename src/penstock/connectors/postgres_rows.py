"""Rows on their way to PostgreSQL and documents on their way back: what runs in Spark tasks.

Few rows are carried in the manifest itself, and then by the statement that stores them: a small
transaction costs the server no table, no connection and no round trip before its commit. More are
copied into an UNLOGGED table of the attempt's own, which is written once, without a log; a crash
of the server empties it, and the commit notices that by counting.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import pyarrow

from penstock import failpoints
from penstock.connectors import sql
from penstock.connectors.postgres_columns import NAME_BYTES_MAX, Layout
from penstock.connectors.postgres_locks import TASK_IDLE_S, Connection, bounds
from penstock.connectors.postgres_server import Server, run
from penstock.connectors.sql import quoted
from penstock.errors import Bug
from penstock.runtime.connector import DELETE, Attempt, Staged, Target

_pa: Any = pyarrow

STAGE: Final = "penstock_stage"
"""The schema of tables that attempts make."""

CARRIED_BYTES_MAX: Final = 1 << 20
"""Of one attempt and binding: more is cheaper to copy than to carry, and the leader has memory."""

_CARRIED: Final = "rows:"
_COPY_BYTES: Final = 4 << 20
_ROWS: Final = 16_384

_STAGED = failpoints.declare("postgres.after-stage", "rows are staged, and nobody knows it yet")


def stage_prefix(task: str) -> str:
    """What the names of all tables of a task begin with; names of tasks are long, and free."""
    return f"{hashlib.sha256(task.encode()).hexdigest()[:16]}_"


def stage_name(attempt: Attempt, binding: int, prefix: str = "") -> str:
    """The table of an attempt: epoch after the prefix, then what makes it unique, or a digest."""
    prefix = f"{prefix or stage_prefix(attempt.task)}{attempt.epoch}_"
    return fitting(prefix, f"{attempt.name}_{binding}".removeprefix(f"{attempt.epoch}_"))


def fitting(prefix: str, name: str) -> str:
    """A name with a prefix, or with a digest in its place if it would be too long."""
    if len(prefix.encode()) + len(name.encode()) <= NAME_BYTES_MAX:
        return prefix + name
    return prefix + hashlib.sha256(name.encode()).hexdigest()[: NAME_BYTES_MAX - len(prefix)]


def epoch_of(name: str) -> int:
    """Of which epoch a staged table is."""
    return int(name.split("_")[1])


@dataclass(frozen=True, slots=True)
class PostgresWorkers:
    """Where the server is, its secrets unresolved, and what rows look like."""

    server: Server
    targets: Mapping[int, Target]
    layouts: Mapping[int, Layout]
    prefix: str = ""
    """Of a preview: what the names of its tables begin with."""

    def stager(self, attempt: Attempt) -> PostgresStager:
        return PostgresStager(self.server, self.layouts, attempt, self.prefix)

    def loader(self, attempt: Attempt) -> PostgresLoader:
        return PostgresLoader(self.server, self.targets, self.layouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Rows in a manifest: an array for each column, as PostgreSQL writes them."""

    literals: tuple[str, ...]
    rows: int
    deleted: int
    """How many of them delete."""

    @classmethod
    def of(cls, layout: Layout, rows: pyarrow.RecordBatch) -> Carried:
        batch: Any = rows
        return cls(
            literals=tuple(layout.literals(rows)),
            rows=rows.num_rows,
            deleted=batch.column(DELETE).true_count,
        )

    @property
    def at(self) -> str:
        """For `Staged.at`."""
        return _CARRIED + json.dumps([self.rows, self.deleted, *self.literals])

    @classmethod
    def read(cls, at: str) -> Carried:
        """What `at` was made of."""
        rows, deleted, *literals = json.loads(at.removeprefix(_CARRIED))
        return cls(literals=tuple(literals), rows=rows, deleted=deleted)


def is_carried(at: str) -> bool:
    """Whether `Staged.at` holds the rows themselves, and not the name of a table."""
    return at.startswith(_CARRIED)


@dataclass(slots=True)
class _Pile:
    """Rows of a binding, as far as they were not copied yet."""

    layout: Layout
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
        at = self.table if self.copied else Carried.of(self.layout, self._together()).at
        return Staged(binding=binding, shard=shard, at=at, rows=self.rows, bytes=self.bytes)

    def _together(self) -> pyarrow.RecordBatch:
        batch: pyarrow.RecordBatch = _pa.concat_batches(self.waiting)
        return batch


class PostgresStager:
    """Piles rows up; only what is too much to carry goes to a table, in one transaction."""

    def __init__(
        self, server: Server, layouts: Mapping[int, Layout], attempt: Attempt, prefix: str = ""
    ) -> None:
        self._server = server
        self._layouts = layouts
        self._attempt = attempt
        self._prefix = prefix
        self._piles: dict[int, _Pile] = {}
        self._connection: Connection | None = None

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        if (pile := self._piles.get(binding)) is None:
            table = stage_name(self._attempt, binding, self._prefix)
            pile = _Pile(self._layouts[binding], table)
            self._piles[binding] = pile
        pile.add(rows)
        if pile.waiting_bytes > (_COPY_BYTES if pile.copied else CARRIED_BYTES_MAX):
            self._copy(pile)

    def finish(self) -> list[Staged]:
        for pile in self._piles.values():
            if pile.copied and pile.waiting:
                self._copy(pile)
        if self._connection is not None:
            with self._server.explained():
                run(self._connection, "COMMIT")
            self._connection.close()
        shard = self._attempt.shard
        staged = [pile.staged(binding, shard) for binding, pile in self._piles.items()]
        failpoints.hit(_STAGED)
        return staged

    def discard(self) -> None:
        """A transaction that was not committed leaves no table."""
        if self._connection is not None:
            self._connection.close()

    def _copy(self, pile: _Pile) -> None:
        chunks = [pile.layout.csv(rows) for rows in pile.waiting]
        if self._connection is None:
            self._connection = self._server.connect()
            with self._server.explained():
                # Should the server forget it, then the commit will notice; that is cheaper.
                run(
                    self._connection,
                    f"BEGIN; SET LOCAL synchronous_commit = off; {bounds(TASK_IDLE_S)}",
                )
        with self._server.explained():
            table = quoted(STAGE, pile.table)
            if not pile.copied:
                run(
                    self._connection,
                    f"CREATE UNLOGGED TABLE {table} ({pile.layout.ddl}, {quoted(DELETE)} boolean) "
                    "WITH (autovacuum_enabled = false)",
                )
            pile.copied += _copy_in(
                self._connection, f"{table} FROM STDIN (FORMAT csv, FREEZE)", chunks
            )
        if pile.copied != pile.rows:
            raise Bug(f"{pile.copied} rows of {pile.rows} were copied", where=pile.table)
        pile.waiting.clear()
        pile.waiting_bytes = 0


def _copy_in(connection: Connection, what: str, chunks: list[bytes]) -> int:
    """`COPY what`, and the number of rows that there were."""
    with connection.cursor() as cursor:
        with cursor.copy(f"COPY {what}".encode()) as copy:
            for chunk in chunks:
                copy.write(chunk)
        return cursor.rowcount


class PostgresLoader:
    """Documents by key, from what is committed: only the leader writes, so any snapshot will do."""

    def __init__(
        self, server: Server, targets: Mapping[int, Target], layouts: Mapping[int, Layout]
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
            run(
                self._connection,
                f"BEGIN; {bounds(TASK_IDLE_S)}; "
                f"CREATE TEMP TABLE penstock_keys ({layout.ddl}) ON COMMIT DROP",
            )
            _copy_in(self._connection, f"{wanted} FROM STDIN (FORMAT csv)", [chunk])
            # Without statistics the planner would guess, and could choose to read the whole table.
            run(self._connection, f"ANALYZE {wanted}")
            with self._connection.cursor(name="penstock_documents") as cursor:
                query = (
                    f"SELECT t.{quoted(document.name)}::text FROM {wanted} k "
                    f"JOIN {quoted(*target.path)} t ON {sql.same_key(target, 't', 'k')}"
                )
                cursor.execute(query.encode())
                while some := cursor.fetchmany(_ROWS):
                    texts = _pa.array([row[0] for row in some], _pa.utf8())
                    yield _pa.record_batch([texts], ["d"])
            run(self._connection, "COMMIT")

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()
