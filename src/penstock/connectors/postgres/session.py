"""A session of PostgreSQL: staged rows are merged into all targets in one transaction.

The commit first stores the checkpoint, which locks the task's row of `penstock_checkpoints`: two
sessions of a task stand in line, and the older finds that its time is over.

**Unknown outcomes.** If the connection is lost while the server commits, the stored checkpoint
tells what happened. It is read under the row's lock, which a transaction still at work would hold.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import psycopg

from penstock import failpoints
from penstock.connectors.postgres.columns import RowLayout
from penstock.connectors.postgres.locks import PostgresConnection
from penstock.connectors.postgres.rows import (
    STAGE,
    Carried,
    PostgresWorkers,
    epoch_of,
    is_carried,
    stage_prefix,
)
from penstock.connectors.postgres.server import LOCKED, SERIALIZATION
from penstock.connectors.sql.sink import SqlSession
from penstock.connectors.sql.statements import (
    check_removed,
    check_stored,
    columns_of,
    on_conflict,
    quoted,
    same_key,
)
from penstock.errors import Bug
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import DELETE, SinkTask, Staged, Target

if TYPE_CHECKING:
    from penstock.connectors.postgres.sink import Postgres

_log = logging.getLogger("penstock.connectors")

COMMITS_MAX: Final = 3
"""Tries of a commit that other transactions were in the way of."""

_STORED = failpoints.declare("postgres.before-commit", "rows are merged, and not committed")
_COMMITTED = failpoints.declare("postgres.after-commit", "rows and checkpoint are committed")


class PostgresSession(SqlSession[PostgresConnection]):
    """Tries a commit again that others were in the way of, and settles one whose reply was lost."""

    before_commit = _STORED
    after_commit = _COMMITTED

    def __init__(self, sink: Postgres, task: SinkTask, epoch: int) -> None:
        super().__init__(sink, task, epoch)
        self._open = sink.connections
        self._layouts = {
            binding: RowLayout.of(".".join(target.path), target.fields, self._live[binding])
            for binding, target in self._targets.items()
        }
        self.workers = PostgresWorkers(sink.server, self._targets, self._layouts, sink.stage_prefix)

    # Commits

    def _commit(self, staged: Sequence[Staged], checkpoint: bytes) -> None:
        for tries_left in reversed(range(COMMITS_MAX)):
            try:
                super()._commit(staged, checkpoint)
            except psycopg.Error as error:
                if self._is_lost():
                    self._settle(checkpoint)  # a successor may have taken over
                elif error.sqlstate in {LOCKED, *SERIALIZATION} and tries_left:
                    _log.info(
                        "%s: others were in the way of a commit; trying again", self._task.name
                    )
                    continue
                else:
                    raise
            return

    def _end(self, checkpoint: bytes) -> None:
        try:
            ended = self._connection.run("COMMIT").statusmessage
        except psycopg.Error:
            if not self._is_lost():
                raise  # the server has refused, and is there: nothing was committed
            self._settle(checkpoint)
        else:
            if ended != "COMMIT":
                raise Bug(f"a transaction ended with {ended}")

    def _is_lost(self) -> bool:
        """True if the connection is gone, unless an interrupt has shut it."""
        return self._connection.broken and not self._open.is_interrupted(self._connection)

    def _settle(self, checkpoint: bytes) -> None:
        """Find out whether a transaction committed whose reply was lost; raise if it did not."""
        self.close()
        self._connection = self._stack.enter_context(self._sink.connected())
        with self._sink.explained():
            self._connection.run(self._sink.dialect.begin)
            row = self._connection.run(
                f"SELECT checkpoint, fence FROM {self._sink.records.checkpoints} "
                "WHERE task = $1 FOR UPDATE",
                (self._task.name,),
            ).fetchone()
            self._connection.run("COMMIT")
        if row is not None and row[0] == checkpoint:
            return
        if row is None or row[1] != self._epoch:
            raise self._sink.records.fenced(self._task.name, self._epoch)
        raise ConnectorError(
            "the connection to PostgreSQL was lost while it committed, and it did not commit",
            where=self._sink.name,
            fix="nothing: the transaction is run again",
            transient=True,
        )

    def _before_rows(self) -> None:
        """Do nothing: only once rows went to a table, which locks it, can it not be replaced."""

    def _after_rows(self, bindings: set[int]) -> None:
        if not bindings:
            return
        order = sorted(bindings)
        names = [quoted(*self._targets[binding].path) for binding in order]
        rows = self._connection.run(
            "SELECT to_regclass(name)::oid FROM unnest($1::text[]) WITH ORDINALITY AS n(name, at) "
            "ORDER BY at",
            (names,),
        ).fetchall()
        for binding, (oid,) in zip(order, rows, strict=True):
            if oid != self._live[binding].identity:
                raise self._dropped(self._targets[binding])

    # Rows

    def _store(self, staged: Staged) -> None:
        if is_carried(staged.at):
            self._merge_carried(staged.binding, Carried.read(staged.at))
        else:
            self._merge_table(staged)

    def _merge_carried(self, binding: int, carried: Carried) -> None:
        types = (*self._layouts[binding].types, "boolean")
        arrays = ", ".join(f"${at}::{type_}[]" for at, type_ in enumerate(types, start=1))
        columns = f"{columns_of(self._targets[binding])}, {quoted(DELETE)}"
        source = f"unnest({arrays}) AS s ({columns})"
        self._merge(binding, source, carried.literals, rows=carried.rows, deleted=carried.deleted)

    def _merge_table(self, staged: Staged) -> None:
        """Merge rows that were copied, if they are still there."""
        table = quoted(STAGE, staged.at)
        counts = f"SELECT count(*), count(*) FILTER (WHERE {quoted(DELETE)}) FROM {table}"
        try:
            counted = self._connection.run(counts).fetchone()
        except psycopg.errors.UndefinedTable:
            counted = None
        there, deleted = counted or (0, 0)
        if counted is None or there != staged.rows:
            raise ConnectorError(
                f"{staged.rows} rows were staged, and {there} are there",
                where=f"{self._sink.name}: {table}",
                why="a crash of the server empties staged tables",
                fix="nothing: the transaction is run again",
                transient=True,
            )
        self._merge(staged.binding, f"{table} AS s", (), rows=there, deleted=deleted)

    def _merge(
        self, binding: int, source: str, values: Sequence[str], *, rows: int, deleted: int
    ) -> None:
        """Update rows that exist, add those that do not, remove those that are deleted."""
        target = self._targets[binding]
        if deleted and not target.delta_updates:
            self._remove(target, source, values)
            rows -= deleted
        columns = columns_of(target)
        insert = (
            f"INSERT INTO {quoted(*target.path)} AS t ({columns}) SELECT {columns} FROM {source}"
        )
        if not target.delta_updates:
            # The condition also keeps ON from being read as that of a join.
            insert += f" WHERE NOT {quoted(DELETE)} {on_conflict(target, self._sink.dialect)}"
        stored = self._connection.run(insert, values).rowcount
        check_stored(target, sent=rows, stored=stored, where=self._sink.name)

    def _remove(self, target: Target, source: str, values: Sequence[str]) -> None:
        """Remove rows, or let them show the deletion; a key without a row does not get one."""
        hard = self._sink.hard_delete
        removal = _removal(target, source, hard=hard)
        if removal is None:
            return
        removed = self._connection.run(removal, values).rowcount
        left = self._connection.run(
            f"SELECT count(*) FROM {source}, {quoted(*target.path)} AS t "
            f"WHERE s.{quoted(DELETE)} AND {same_key(target, 't', 's')}",
            values,
        ).fetchone()
        there = left[0] if left is not None else 0
        check_removed(
            target,
            there=removed + there if hard else there,
            removed=removed,
            where=self._sink.name,
        )

    # Staged tables

    def _discard(self, staged: Sequence[Staged]) -> None:
        self._drop([each.at for each in staged if not is_carried(each.at)])

    def sweep(self) -> None:
        """Drop tables that attempts have left, except those of a newer session."""
        names = [name for name in self._staged(self._task.name) if epoch_of(name) <= self._epoch]
        if self._task.renamed_from is not None:
            names += self._staged(self._task.renamed_from)
        self._drop(names)

    def _staged(self, task: str) -> list[str]:
        with self._sink.explained():
            rows = self._connection.run(
                "SELECT tablename::text FROM pg_tables WHERE schemaname = $1 "
                "AND starts_with(tablename::text, $2)",
                (STAGE, stage_prefix(task)),
            ).fetchall()
        return [name for (name,) in rows]

    def _drop(self, names: Sequence[str]) -> None:
        """Best effort: an attempt that still writes holds its table, and is not waited for."""
        for name in names:
            try:
                self._connection.run(
                    "BEGIN; SET LOCAL lock_timeout = '100ms'; "
                    f"DROP TABLE IF EXISTS {quoted(STAGE, name)}; COMMIT"
                )
            except psycopg.Error as error:
                _log.info(
                    "%s: %s stays for now: %s", self._task.name, name, error.diag.message_primary
                )
                self._roll_back()


def _removal(target: Target, source: str, *, hard: bool) -> str | None:
    """Return the statement that deletes rows, or that lets them show the deletion."""
    table = quoted(*target.path)
    rows = f"s.{quoted(DELETE)} AND {same_key(target, 't', 's')}"
    if hard:
        return f"DELETE FROM {table} AS t USING {source} WHERE {rows}"
    sets = ", ".join(
        f"{quoted(field.name)} = s.{quoted(field.name)}"
        for field in target.fields
        if not field.is_key
    )
    return f"UPDATE {table} AS t SET {sets} FROM {source} WHERE {rows}" if sets else None
