"""The SQL sink: rows and checkpoint in one transaction of the database, which checks the fence.

`SqlSink` is the connector and `SqlSession` its session; both are complete but for what differs
between databases. A database subclasses them and brings a `Dialect`. `penstock.connectors.sql.rows`
has a session that works with any driver, and stages rows in files.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from penstock import failpoints
from penstock.connectors import ownership
from penstock.connectors.ownership import Claim
from penstock.connectors.sql import plan as planning
from penstock.connectors.sql.changes import changes
from penstock.connectors.sql.dialect import Dialect, Fit, LiveTable, SqlConnection
from penstock.connectors.sql.plan import check_kind
from penstock.connectors.sql.records import Records, is_empty
from penstock.connectors.sql.statements import check_stored, misfit, quoted, renamed, verdicts
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
    TableChange,
    Target,
    TargetField,
    Workers,
)

C = TypeVar("C", bound=SqlConnection)

_SHADOWED = failpoints.declare("sql.before-shadow", "a shadow table is made, and not committed")
_SWAPPING = failpoints.declare("sql.before-swap", "a shadow has replaced rows, uncommitted")
_SWAPPED = failpoints.declare("sql.after-swap", "a shadow has replaced the rows of its table")

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
        self._is_offline = False

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

    def shadow(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """Return where the rows of a table are gathered that is filled again."""
        return (*path[:-1], f"penstock_rebuild_{self.digest(path)}")

    def digest(self, path: tuple[str, ...]) -> str:
        """Return a short name for a path, however it is spelled."""
        text = "\0".join(map(self.dialect.fold, path))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # What all have in common

    def offline(self) -> Self:
        offline = copy.copy(self)
        offline._is_offline = True  # noqa: SLF001 - a copy
        return offline

    def foresee(self, was: Target, now: Target) -> Sequence[TableChange]:
        return tuple(changes(self.dialect, was, now))

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
        if self._is_offline or not self.exists():
            return found
        place = self.place(path)
        with self.connected() as connection:
            live = self.dialect.look(connection, place)
            record = self.records.find(connection, place)
            if record is not None and record.rebuild == state_key:
                live = self.dialect.look(connection, self.shadow(place))
        if live is None:
            return found
        check_kind(path, live)
        if record is not None and state_key not in (record.state_key, record.rebuild):
            return found  # a backfill makes it fit
        unfit = (Fit.FAILS,) if record is not None else (Fit.FAILS, Fit.CONVERTS)
        shown = {f.pointer: f for f in fields if self.dialect.fold(f.name) in live.columns}
        for field in fields:
            column = live.columns.get(self.dialect.fold(field.name))
            if column is not None and self.dialect.fit(field, column.type) in unfit:
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
        robbed: set[str] = set()
        with self.connected() as connection:
            connection.run(self.dialect.begin)
            if self.dialect.ddl_lock is not None:
                connection.run(self.dialect.ddl_lock)
            done += self.prepare(connection, here)
            checkpoint = self.records.raise_fence(connection, task.name, epoch)
            self.records.make(connection)
            self.records.rename(connection, task, checkpoint)
            for target in here.targets:
                was = before.get(target.path) or before.get(target.renamed_from or ())
                done += self._apply(connection, here, target, was, robbed)
            for other in sorted(robbed):
                self.records.fence_out(connection, other)
            if any("rebuilding" in each for each in done):
                failpoints.hit(_SHADOWED)
            connection.run("COMMIT")
        description = "; ".join(done)
        for target, placed in zip(task.targets, here.targets, strict=True):
            description = description.replace(".".join(placed.path), ".".join(target.path))
        return Applied(description=description)

    def _apply(
        self,
        connection: C,
        task: SinkTask,
        target: Target,
        was: Target | None,
        robbed: set[str],
    ) -> Iterator[str]:
        """Bring one table to its target; adds the task that it was taken from to `robbed`."""
        yield from self._rename(connection, task, target)
        live = self.dialect.look(connection, target.path)
        claim = self.records.claim(
            connection, task, target, was=was, live=live, hard_delete=self.hard_delete
        )
        if claim.taken_from is not None:
            robbed.add(claim.taken_from)
        if live is not None:
            check_kind(target.path, live)
        if claim.rebuilds:
            yield from self._rebuild(connection, task, target, claim, was=was, live=live)
        else:
            shadow = self.shadow(target.path)
            if self.dialect.look(connection, shadow) is not None:  # nobody goes on with it
                connection.run(f"DROP TABLE {quoted(*shadow)}")
            yield from self._steps(
                connection,
                planning.remake(
                    self.dialect,
                    target,
                    live,
                    planning.types(self.dialect, target, live, before=was),
                )
                if claim.emptied
                else planning.plan(self.dialect, target, live, before=was),
            )
        self.records.store_identity(connection, target.path)

    def _rebuild(
        self,
        connection: C,
        task: SinkTask,
        target: Target,
        claim: Claim,
        *,
        was: Target | None,
        live: LiveTable | None,
    ) -> Iterator[str]:
        """Make the shadow of a table that is filled again, or bring it up to date."""
        shadow = replace(target, path=self.shadow(target.path))
        there = self.dialect.look(connection, shadow.path)
        if claim.under_way and there is not None:
            steps = planning.plan(self.dialect, shadow, there, before=was)
            for says in self._steps(connection, steps):
                yield says.replace(".".join(shadow.path), ".".join(target.path))
            return
        if claim.under_way and target.binding in task.resumed:
            raise ownership.gone_shadow(task, target)
        if there is not None:
            connection.run(f"DROP TABLE {quoted(*shadow.path)}")
        types = planning.types(self.dialect, target, live, before=was)
        connection.run(planning.create(self.dialect, shadow, types))
        yield f"rebuilding {'.'.join(target.path)}: it keeps its rows until all are there"

    def _rename(self, connection: C, task: SinkTask, target: Target) -> Iterator[str]:
        """Rename a table, and the shadow in which it is rebuilt, if its binding says so."""
        old, new = target.renamed_from, target.path
        if old is None or not self.records.move(connection, task, target):
            return
        pairs = ((old, new), (self.shadow(old), self.shadow(new)))
        for before, after in pairs:
            if self.dialect.look(connection, before) is None:
                continue
            if self.dialect.look(connection, after) is not None:
                raise ConnectorError(
                    f"table {'.'.join(before)} cannot be renamed: {'.'.join(after)} is there",
                    where=self.name,
                    fix=f"DROP TABLE {quoted(*after)} if nobody needs it, or choose another name",
                )
            for statement in renamed(before, after):
                connection.run(statement)
        yield f"renamed {'.'.join(old)} to {'.'.join(new)}"

    @staticmethod
    def _steps(connection: C, steps: Iterator[planning.DdlStep]) -> Iterator[str]:
        for step in steps:
            for statement in step.statements:
                connection.run(statement)
            yield step.says

    def _placed(self, task: SinkTask) -> SinkTask:
        def placed(target: Target) -> Target:
            old = target.renamed_from
            return replace(
                target,
                path=self.place(target.path),
                renamed_from=None if old is None else self.place(old),
            )

        return replace(task, targets=tuple(map(placed, task.targets)))

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
        self._visible = {target.binding: target for target in task.targets}
        self._targets = dict(self._visible)
        self._filled: set[int] = set()
        self._stack = contextlib.ExitStack()
        self._connection = self._stack.enter_context(sink.connected())
        try:
            with sink.explained():
                self._connection.run(sink.dialect.begin)
                self.checkpoint = sink.records.raise_fence(self._connection, task.name, epoch)
                self._connection.run("COMMIT")
                self.rebuilding = frozenset(filter(self._has_shadow, self._visible))
                for binding in self.rebuilding:
                    target = self._visible[binding]
                    self._targets[binding] = replace(target, path=sink.shadow(target.path))
                self._task = replace(task, targets=tuple(self._targets.values()))
                task = self._task
                self._live = {target.binding: self._look(target) for target in task.targets}
        except BaseException:
            self.close()
            raise

    def _has_shadow(self, binding: int) -> bool:
        target = self._visible[binding]
        record = self._sink.records.find(self._connection, target.path)
        return record is not None and record.rebuild == target.state_key

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

    def swap(self) -> None:
        """Replace rows in one transaction: others see the old ones, or the new."""
        with self._sink.explained():
            try:
                self._swap()
            except BaseException:
                self._roll_back()
                raise
        failpoints.hit(_SWAPPED)

    def _swap(self) -> None:
        sink, connection = self._sink, self._connection
        connection.run(sink.dialect.begin)
        if sink.dialect.ddl_lock is not None:
            connection.run(sink.dialect.ddl_lock)
        sink.records.check_fence(connection, self._task.name, self._epoch)
        for binding in sorted(self.rebuilding):
            target, shadow = self._visible[binding], self._targets[binding].path
            types = {
                field.name: self._live[binding].columns[sink.dialect.fold(field.name)].type
                for field in target.fields
            }
            live = sink.dialect.look(connection, target.path)
            for step in planning.remake(sink.dialect, target, live, types):
                for statement in step.statements:
                    connection.run(statement)
            sent = connection.run(f"SELECT count(*) FROM {quoted(*shadow)}").fetchone()[0]
            stored = connection.run(planning.copy(target, shadow)).rowcount
            check_stored(target, sent=sent, stored=stored, where=sink.name)
            connection.run(f"DROP TABLE {quoted(*shadow)}")
            sink.records.store_swapped(connection, self._task.name, target)
        failpoints.hit(_SWAPPING)
        connection.run("COMMIT")

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
