"""The SQL sink: rows and checkpoint in one transaction of the database, which checks the fence.

`SqlSink` is the connector and `SqlSession` its session; both are complete but for what differs
between databases. A database subclasses them and brings a `Dialect`. `penstock.connectors.sql.rows`
has a session that works with any driver, and stages rows in files.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Final, Generic, TypeVar

from penstock import failpoints
from penstock.connectors import ownership
from penstock.connectors.sql.dialect import Dialect, Fit, LiveTable, SqlConnection
from penstock.connectors.sql.plan import check_kind, plan
from penstock.connectors.sql.records import Records, is_empty
from penstock.connectors.sql.statements import misfit, verdicts
from penstock.model.clock import Clock
from penstock.model.columns import Kind
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.runtime.connector.common import Applied, ConnectorError
from penstock.runtime.connector.materialize import (
    Constraint,
    FieldVerdict,
    Materialization,
    Pattern,
    SinkTask,
    Staged,
    Target,
    TargetField,
    Workers,
)

C = TypeVar("C", bound=SqlConnection)

HARD_DELETE: Final[Json] = {
    "type": "boolean",
    "default": False,
    "title": "true or false",
    "description": "Remove the row of a deleted document. By default it stays as it was.",
    "examples": [True],
}
"""A member of a configuration."""
DELTA_UPDATES: Final[Json] = {
    "type": "boolean",
    "default": False,
    "title": "true or false",
    "description": "Insert a row for each document, instead of keeping one row per key.",
    "examples": [True],
}
"""A member of a resource."""


class SqlSink(Materialization, Generic[C]):
    """A connector for one database, which adds the configuration and the preview to it."""

    pattern = Pattern.ENDPOINT
    flush_barrier = False
    dialect: ClassVar[Dialect]

    def __init__(self, *, where: str, hard_delete: bool) -> None:
        self._where = where
        self.hard_delete = hard_delete

    # What a database supplies

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The database as errors name it: without secrets."""

    @property
    @abc.abstractmethod
    def records(self) -> Records:
        """Where checkpoints and ownership records are."""

    @abc.abstractmethod
    def connected(self) -> AbstractContextManager[C]:
        """Connect, `explained`; closing undoes what was not committed. `interrupt` applies."""

    @abc.abstractmethod
    def explained(self) -> AbstractContextManager[None]:
        """Within this, errors of the driver become `ConnectorError`."""

    @abc.abstractmethod
    def session(self, task: SinkTask, epoch: int) -> SqlSession[C]:
        """Open a session."""

    def exists(self) -> bool:
        """False if connecting would create the database."""
        return True

    def prepare(self, connection: C, task: SinkTask) -> Iterator[str]:
        """Create what tables need to be in, a schema say; yield descriptions of it."""
        yield from ()

    def place(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """Return where the table at `path` really is: elsewhere in a preview."""
        return path

    # What all have in common

    def delta_updates(self, resource: Json) -> bool:
        return bool(self.read_resource(resource).get("delta_updates", False))

    def read_resource(self, resource: Json) -> dict[str, Any]:
        """Return a resource that fits its schema; raises `UserError`."""
        return self.resource_schema.read(resource, where=f"{self._where}: resource")

    def can_reduce(self, field: TargetField) -> bool:
        match field.reduction:
            case Strategy.SUM:  # a schema limits the digits of decimals, and a column does not
                return field.column.kind in (Kind.LONG, Kind.DOUBLE)
            case Strategy.MINIMIZE | Strategy.MAXIMIZE:
                return self.dialect.orders(field)
            case Strategy.FIRST_WRITE_WINS | Strategy.LAST_WRITE_WINS:
                return True
            case _:
                return False

    def verdicts(
        self, fields: Sequence[TargetField], *, delta_updates: bool
    ) -> dict[str, FieldVerdict]:
        """Return what the database says of fields, whatever tables it has."""
        found = verdicts(fields, delta_updates=delta_updates)
        for field in fields:
            if (reason := self.dialect.forbids(field.name)) is not None:
                forbidden = FieldVerdict(constraint=Constraint.FORBIDDEN, reason=reason)
                found[field.name] = forbidden
        return found

    def validate(
        self,
        path: tuple[str, ...],
        fields: Sequence[TargetField],
        *,
        delta_updates: bool,
        state_key: str,
    ) -> Mapping[str, FieldVerdict]:
        found = self.verdicts(fields, delta_updates=delta_updates)
        if not self.exists():
            return found
        with self.connected() as connection:
            live = self.dialect.look(connection, self.place(path))
            record = self.records.find(connection, self.place(path))
        if live is None:
            return found
        check_kind(path, live)
        if record is not None and record.state_key != state_key:
            return found  # a backfill makes it fit
        shown = {f.pointer: f for f in fields if self.dialect.fold(f.name) in live.columns}
        for field in fields:
            column = live.columns.get(self.dialect.fold(field.name))
            if column is not None and self.dialect.fit(field, column.type) is Fit.FAILS:
                needed = self.dialect.type_of(field)
                found[field.name] = misfit(".".join(path), column.type, needed)
            elif column is None and (there := shown.get(field.pointer)) is not None:
                # A new column of another name would be empty in all rows that are there.
                reason = f"column {there.name} shows {field.pointer}"
                found[field.name] = FieldVerdict(constraint=Constraint.OPTIONAL, reason=reason)
        return found

    def apply(self, task: SinkTask, last: SinkTask | None, state: Json, *, epoch: int) -> Applied:
        """Migrate all tables, or none, and only if no newer session has been here."""
        here = self._placed(task)
        before = {} if last is None else {each.path: each for each in self._placed(last).targets}
        done: list[str] = []
        with self.connected() as connection:
            connection.run(self.dialect.begin)
            if self.dialect.ddl_lock is not None:
                connection.run(self.dialect.ddl_lock)
            done += self.prepare(connection, here)
            checkpoint = self.records.raise_fence(connection, task.name, epoch)
            self.records.make(connection)
            self.records.rename(connection, task, checkpoint)
            for target in here.targets:
                done += self._apply(connection, here, target, before.get(target.path))
            connection.run("COMMIT")
        description = "; ".join(done)
        for target, placed in zip(task.targets, here.targets, strict=True):
            description = description.replace(".".join(placed.path), ".".join(target.path))
        return Applied(description=description)

    def _apply(
        self, connection: C, task: SinkTask, target: Target, was: Target | None
    ) -> Iterator[str]:
        live = self.dialect.look(connection, target.path)
        emptied = self.records.claim(
            connection, task, target, was=was, live=live, hard_delete=self.hard_delete
        )
        for step in plan(self.dialect, target, live, before=was, emptied=emptied):
            for statement in step.statements:
                connection.run(statement)
            yield step.says
        self.records.store_identity(connection, target.path)

    def _placed(self, task: SinkTask) -> SinkTask:
        targets = tuple(replace(each, path=self.place(each.path)) for each in task.targets)
        return replace(task, targets=targets)

    def open(self, task: SinkTask, *, epoch: int, state: Json) -> SqlSession[C]:
        session = self.session(self._placed(task), epoch)
        try:
            session.sweep()
        except BaseException:
            session.close()
            raise
        return session


class SqlSession(abc.ABC, Generic[C]):
    """A database, fenced for one session of a task."""

    workers: Workers
    before_commit: ClassVar[str]
    after_commit: ClassVar[str]
    """Failpoints, which the database declares."""

    def __init__(self, sink: SqlSink[C], task: SinkTask, epoch: int) -> None:
        self._sink = sink
        self._task = task
        self._epoch = epoch
        self._targets = {target.binding: target for target in task.targets}
        self._filled: set[int] = set()
        self._stack = contextlib.ExitStack()
        self._connection = self._stack.enter_context(sink.connected())
        try:
            with sink.explained():
                self._connection.run(sink.dialect.begin)
                self.checkpoint = sink.records.raise_fence(self._connection, task.name, epoch)
                self._connection.run("COMMIT")
                self._live = {target.binding: self._look(target) for target in task.targets}
        except BaseException:
            self.close()
            raise

    def _look(self, target: Target) -> LiveTable:
        live, fold = self._sink.dialect.look(self._connection, target.path), self._sink.dialect.fold
        if live is None:
            raise ConnectorError(f"table {'.'.join(target.path)} is gone", transient=True)
        if missing := [f.name for f in target.fields if fold(f.name) not in live.columns]:
            raise ConnectorError(
                f"table {'.'.join(target.path)} has lost {', '.join(missing)}", transient=True
            )
        return live

    # What a database supplies

    @abc.abstractmethod
    def _store(self, staged: Staged) -> None:
        """Store staged rows to their target; raise unless all are there, and all were taken."""

    @abc.abstractmethod
    def _discard(self, staged: Sequence[Staged]) -> None:
        """Remove staged rows that are committed, best effort."""

    @abc.abstractmethod
    def sweep(self) -> None:
        """Remove what attempts of this task and of its former name have left staged."""

    # What all have in common

    def flush(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def close(self) -> None:
        self._stack.close()

    def start_commit(
        self, close: Clock, staged: Sequence[Staged], checkpoint: bytes, patches: Sequence[Json]
    ) -> Sequence[Json]:
        """Commit rows and checkpoint together; then drop what was staged."""
        with self._sink.explained():
            self._commit(staged, checkpoint)
        failpoints.hit(self.after_commit)
        self._discard(staged)
        return ()

    def _commit(self, staged: Sequence[Staged], checkpoint: bytes) -> None:
        """Commit, or change nothing."""
        try:
            self._transact(staged, checkpoint)
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.run("ROLLBACK")

    def _transact(self, staged: Sequence[Staged], checkpoint: bytes) -> None:
        bindings = {each.binding for each in staged}
        self._connection.run(self._sink.dialect.begin)
        self._sink.records.store_checkpoint(
            self._connection, self._task.name, self._epoch, checkpoint
        )
        self._before_rows()
        for each in staged:
            self._store(each)
        self._after_rows(bindings)
        filled = self._store_filled(bindings - self._filled)
        failpoints.hit(self.before_commit)
        self._end(checkpoint)
        self._filled |= filled

    def _before_rows(self) -> None:
        """Raise if a table was dropped or emptied under the session.

        The next session applies, and explains what is wrong.
        """
        for target in self._task.targets:
            live = self._sink.dialect.look(self._connection, target.path)
            record = self._sink.records.find(self._connection, target.path)
            if live is None or (
                record is not None
                and record.filled
                and ownership.keeps_rows(target, self._sink.hard_delete)
                and is_empty(self._connection, target.path)
            ):
                raise self._dropped(target)

    def _after_rows(self, bindings: set[int]) -> None:
        """Raise if rows went to another table than the one that was opened."""

    def _dropped(self, target: Target) -> ConnectorError:
        return ConnectorError(
            f"table {'.'.join(target.path)} was dropped while a session had it open",
            where=self._sink.name,
            fix="raise `backfill` of the binding to fill it anew",
            transient=True,
        )

    def _store_filled(self, bindings: set[int]) -> set[int]:
        """Note which targets have rows; return them."""
        filled = {
            binding
            for binding in bindings
            if (target := self._targets[binding]).delta_updates
            or not is_empty(self._connection, target.path)
        }
        for binding in filled:
            self._sink.records.store_filled(self._connection, self._targets[binding].path)
        return filled

    def _end(self, checkpoint: bytes) -> None:
        self._connection.run("COMMIT")
