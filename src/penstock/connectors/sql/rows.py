"""Rows through any driver of Python: staged in Arrow files, stored and looked up by parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar

import pyarrow
import pyarrow.compute

from penstock.connectors.arrow_files import ArrowFiles
from penstock.connectors.sql.dialect import Dialect, SqlConnection
from penstock.connectors.sql.sink import SqlSession, SqlSink
from penstock.connectors.sql.statements import (
    check_removed,
    check_stored,
    columns_of,
    on_conflict,
    quoted,
    same_key,
)
from penstock.errors import Bug
from penstock.model.columns import Kind
from penstock.runtime.connector.materialize import DELETE, SinkTask, Staged, Target, TargetField

_pa: Any = pyarrow
_FETCHED_ROWS: Final = 16_384


class RowConnection(SqlConnection, Protocol):
    """A connection that executes a statement for many rows."""

    def run_many(self, statement: str, rows: Iterable[Sequence[Any]], /) -> int:
        """Execute a statement for each row; return how many rows it changed in total."""
        ...


R = TypeVar("R", bound=RowConnection)


class RowSession(SqlSession[R]):
    """A session that stores rows from Arrow files, one statement per row."""

    def __init__(self, sink: SqlSink[R], task: SinkTask, epoch: int, *, files: ArrowFiles) -> None:
        super().__init__(sink, task, epoch)
        self._files = files

    def _store(self, staged: Staged) -> None:
        for batch in self._files.read(staged):
            self._store_batch(self._targets[staged.binding], batch)

    def _store_batch(self, target: Target, batch: pyarrow.RecordBatch) -> None:
        rows: Any = batch
        deleted = rows.column(DELETE)
        if not target.delta_updates and deleted.true_count:
            self._delete(target, rows.filter(deleted))
            rows = rows.filter(_pa.compute.invert(deleted))
        stored = self._connection.run_many(
            _insert(target, self._sink.dialect), bound_rows(rows, target.fields)
        )
        check_stored(target, sent=rows.num_rows, stored=stored, where=self._sink.name)

    def _delete(self, target: Target, rows: pyarrow.RecordBatch) -> None:
        """Remove rows, or let them show the deletion; a key without a row does not get one."""
        table, dialect = quoted(*target.path), self._sink.dialect
        shown = [field for field in target.fields if not field.is_key]
        marks = dialect.marks(len(target.key))
        count = f"SELECT count(*) FROM {table} WHERE {_equal(target.key, marks, ' AND ')}"
        there = sum(
            self._connection.run(count, key).fetchone()[0] for key in bound_rows(rows, target.key)
        )
        if self._sink.hard_delete:
            removed = self._connection.run_many(
                f"DELETE FROM {table} WHERE {_equal(target.key, marks, ' AND ')}",
                bound_rows(rows, target.key),
            )
        elif shown:
            marks = dialect.marks(len(target.fields))
            sets = _equal(shown, marks[: len(shown)], ", ")
            removed = self._connection.run_many(
                f"UPDATE {table} SET {sets} "
                f"WHERE {_equal(target.key, marks[len(shown) :], ' AND ')}",
                bound_rows(rows, [*shown, *target.key]),
            )
        else:
            return
        check_removed(target, there=there, removed=removed, where=self._sink.name)

    def _discard(self, staged: Sequence[Staged]) -> None:
        self._files.discard(staged)

    def sweep(self) -> None:
        self._files.sweep(filter(None, (self._task.name, self._task.renamed_from)))


class KeyLoader:
    """Looks documents up by key: the keys go to a temporary table, which is joined."""

    def __init__(
        self,
        connected: AbstractContextManager[RowConnection],
        explained: Callable[[], AbstractContextManager[None]],
        dialect: Dialect,
        targets: Mapping[int, Target],
    ) -> None:
        self._explained = explained
        self._dialect = dialect
        self._targets = targets
        self._made: set[str] = set()
        self._stack = contextlib.ExitStack()
        self._connection = self._stack.enter_context(connected)

    def load(self, binding: int, keys: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        target = self._targets[binding]
        document = target.document
        if document is None:
            raise Bug(f"{target.collection} is loaded, and no document is stored")
        with self._explained():
            wanted = quoted(f"penstock_keys_{binding}")
            if wanted in self._made:
                self._connection.run(f"DELETE FROM {wanted}")
            else:
                columns = [f"{quoted(f.name)} {self._dialect.type_of(f)}" for f in target.key]
                self._connection.run(f"CREATE TEMP TABLE {wanted} ({', '.join(columns)})")
                self._made.add(wanted)
            marks = ", ".join(self._dialect.marks(len(target.key)))
            self._connection.run_many(
                f"INSERT INTO {wanted} VALUES ({marks})", bound_rows(keys, target.key)
            )
            found = self._connection.run(
                f"SELECT t.{quoted(document.name)} FROM {wanted} k "
                f"JOIN {quoted(*target.path)} t ON {same_key(target, 't', 'k')}"
            )
            while some := found.fetchmany(_FETCHED_ROWS):
                yield _pa.record_batch([_pa.array([row[0] for row in some], _pa.utf8())], ["d"])

    def close(self) -> None:
        self._stack.close()


@functools.lru_cache(maxsize=1024)
def _insert(target: Target, dialect: Dialect) -> str:
    marks = ", ".join(dialect.marks(len(target.fields)))
    insert = f"INSERT INTO {quoted(*target.path)} AS t ({columns_of(target)}) VALUES ({marks})"
    return insert if target.delta_updates else f"{insert} {on_conflict(target, dialect)}"


def _equal(fields: Sequence[TargetField], marks: Sequence[str], between: str) -> str:
    pairs = zip(fields, marks, strict=True)
    return between.join(f"{quoted(field.name)} = {mark}" for field, mark in pairs)


def bound_rows(
    batch: pyarrow.RecordBatch, fields: Sequence[TargetField]
) -> Iterator[tuple[Any, ...]]:
    """Yield rows as drivers take them; decimals are text, with all of their digits."""
    arrays: Any = batch
    columns = [
        arrays.column(field.name).cast(_pa.utf8()).to_pylist()
        if field.column.kind is Kind.DECIMAL
        else arrays.column(field.name).to_pylist()
        for field in fields
    ]
    return zip(*columns, strict=True)
