"""PostgreSQL: rows and checkpoint in one transaction, which first checks the fence.

    config     address (host:port, or a directory of sockets), database, user, password, schema,
               sslmode, hardDelete
    resource   table, schema, delta_updates

Tasks stage, the leader commits. A commit locks the task's row of `penstock_checkpoints` and stores
the new checkpoint there, if the fence is still its own; then it merges what was staged into all
targets. So two sessions of a task stand in line, and the older finds that its time is over.

**Unknown outcomes.** If the connection is lost while the server commits, the stored checkpoint
tells. It is read under the row's lock, which a transaction that is still at work would hold.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import psycopg

from penstock import failpoints
from penstock.connectors import (
    ownership,
    postgres_preview,
    postgres_records,
    postgres_tables,
    sql,
)
from penstock.connectors.postgres_columns import (
    NAME_BYTES_MAX,
    SYSTEM_COLUMNS,
    Fit,
    Layout,
    fit,
    type_of,
)
from penstock.connectors.postgres_locks import Connection, Lines
from penstock.connectors.postgres_preview import Preview
from penstock.connectors.postgres_records import Records
from penstock.connectors.postgres_rows import (
    STAGE,
    Carried,
    PostgresWorkers,
    epoch_of,
    is_carried,
    stage_prefix,
)
from penstock.connectors.postgres_server import BEGIN, LOCKED, SERIALIZATION, Server, run
from penstock.connectors.sql import CHECKPOINTS, TABLES, quoted
from penstock.errors import Bug, UserError
from penstock.model.clock import Clock
from penstock.model.columns import Kind
from penstock.model.json_order import Json
from penstock.model.reduce import Strategy
from penstock.runtime.connector import (
    DELETE,
    Applied,
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

_log = logging.getLogger("penstock.connectors")

COMMITS_MAX: Final = 3
"""Tries of a commit that others were in the way of."""

_DDL_LOCK: Final = 0x70656E73746F636B
"""Advisory lock: tasks that make the same schema at the same time fail otherwise."""

_DIALECT: Final = sql.Dialect(
    least="LEAST",
    greatest="GREATEST",
    bytewise=' COLLATE "C"',
    # A NUMERIC column that somebody else made would hold what no integer of a collection can be.
    checked_sums={Kind.LONG: "CAST({0} AS bigint)"},
)

_STORED = failpoints.declare("postgres.before-commit", "rows are merged, and not committed")
_COMMITTED = failpoints.declare("postgres.after-commit", "rows and checkpoint are committed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a catalog may choose."""

    server: Server
    schema: str
    hard_delete: bool
    preview: Preview | None = None
    """What stands for the tables of a run, if it is none."""

    @property
    def checkpoints(self) -> str:
        return quoted(*self.place((self.schema, CHECKPOINTS)))

    @property
    def tables(self) -> str:
        return quoted(*self.place((self.schema, TABLES)))

    @property
    def records(self) -> Records:
        return Records(checkpoints=self.checkpoints, tables=self.tables)

    def place(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """Where a table is, in this run or preview."""
        return path if self.preview is None else self.preview.table(*path)


# --------------------------------------------------------------------------------- on the leader


class PostgresSession:
    """The database, fenced for one session of a task."""

    def __init__(
        self, options: Options, task: Task, epoch: int, lines: Lines | None = None
    ) -> None:
        self._options = options
        self._server = options.server
        self._lines = lines or Lines()
        self._task = task.name
        self._old_name = task.renamed_from
        self._epoch = epoch
        self._targets = {target.binding: target for target in task.targets}
        self._connect()
        try:
            with self._server.explained():
                run(self._connection, BEGIN)
                self.checkpoint = raise_fence(self._connection, options, task.name, epoch)
                run(self._connection, "COMMIT")
                layouts = {
                    target.binding: _layout(self._connection, target) for target in task.targets
                }
        except BaseException:
            self.close()
            raise
        self._layouts = {binding: layout for binding, (layout, _) in layouts.items()}
        self._oids = {binding: oid for binding, (_, oid) in layouts.items()}
        self._filled: set[int] = set()
        prefix = "" if options.preview is None else options.preview.prefix
        self.workers = PostgresWorkers(self._server, self._targets, self._layouts, prefix)

    def _connect(self) -> None:
        self._connection = self._server.connect()
        self._let_go = self._lines.add(self._connection)

    def flush(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def start_commit(
        self, close: Clock, staged: Sequence[Staged], checkpoint: bytes, patches: Sequence[Json]
    ) -> Sequence[Json]:
        """Everything in one transaction; afterwards, the tables that were read are dropped."""
        for tries_left in reversed(range(COMMITS_MAX)):
            try:
                self._commit(staged, checkpoint)
                break
            except psycopg.Error as error:
                self._roll_back()
                if self._is_lost():
                    self._settle(checkpoint)  # it may be that a successor has taken over
                    break
                if error.sqlstate not in {LOCKED, *SERIALIZATION} or not tries_left:
                    with self._server.explained():
                        raise
                _log.info("%s: a commit was in the way of others, and is tried again", self._task)
            except BaseException:
                self._roll_back()
                raise
        failpoints.hit(_COMMITTED)
        self._drop([each.at for each in staged if not is_carried(each.at)])
        return ()

    def _roll_back(self) -> None:
        with contextlib.suppress(psycopg.Error):
            run(self._connection, "ROLLBACK")

    def _commit(self, staged: Sequence[Staged], checkpoint: bytes) -> None:
        run(self._connection, BEGIN)
        self._store_checkpoint(checkpoint)
        for each in staged:
            if is_carried(each.at):
                self._merge_carried(each.binding, Carried.read(each.at))
            else:
                self._merge_table(each)
        filled = self._check_tables({each.binding for each in staged})
        failpoints.hit(_STORED)
        try:
            ended = run(self._connection, "COMMIT").statusmessage
        except psycopg.Error:
            if not self._is_lost():
                raise  # the server has said no, and is there: nothing was committed
            self._settle(checkpoint)
        else:
            if ended != "COMMIT":
                raise Bug(f"a transaction ended with {ended}")
        self._filled |= filled

    def _check_tables(self, bindings: set[int]) -> set[int]:
        """Whether rows went to the tables that were opened, and note that these have some.

        What was stored to is locked: nobody can put another table in its place any more.
        """
        if not bindings:
            return set()
        order = sorted(bindings)
        names = [quoted(*self._targets[binding].path) for binding in order]
        rows = run(
            self._connection,
            "SELECT to_regclass(name)::oid FROM unnest($1::text[]) WITH ORDINALITY AS n(name, at) "
            "ORDER BY at",
            (names,),
        ).fetchall()
        for binding, name, (oid,) in zip(order, names, rows, strict=True):
            if oid != self._oids[binding]:
                raise ConnectorError(
                    f"table {name} was dropped while a session had it open",
                    where=self._server.name,
                    fix="raise `backfill` of the binding to fill it anew",
                    transient=True,
                )
        filled = {
            binding
            for binding in bindings - self._filled
            if self._targets[binding].delta_updates
            or not postgres_tables.is_empty(self._connection, self._targets[binding].path)
        }
        for binding in filled:
            path = self._targets[binding].path
            postgres_records.remember_filled(self._connection, self._options.tables, path)
        return filled

    def _is_lost(self) -> bool:
        """Whether the connection is gone; not so if it was hung up on, since nobody asks then."""
        return self._connection.broken and not self._lines.is_interrupted(self._connection)

    def _store_checkpoint(self, checkpoint: bytes) -> None:
        """First of all, and with the fence checked in the same statement: it is a lock as well."""
        updated = run(
            self._connection,
            f"UPDATE {self._options.checkpoints} SET checkpoint = $1, updated_at = now() "
            "WHERE task = $2 AND fence = $3",
            (checkpoint, self._task, self._epoch),
        )
        if updated.rowcount != 1:
            raise fenced(self._options, self._task, self._epoch)

    def _settle(self, checkpoint: bytes) -> None:
        """Find out whether a transaction committed whose answer was lost."""
        self.close()
        self._connect()
        with self._server.explained():
            run(self._connection, BEGIN)
            row = run(
                self._connection,
                f"SELECT checkpoint, fence FROM {self._options.checkpoints} "
                "WHERE task = $1 FOR UPDATE",
                (self._task,),
            ).fetchone()
            run(self._connection, "COMMIT")
        if row is not None and row[0] == checkpoint:
            return
        if row is None or row[1] != self._epoch:
            raise fenced(self._options, self._task, self._epoch)
        raise ConnectorError(
            "the connection to PostgreSQL was lost while it committed, and it did not commit",
            where=self._server.name,
            fix="nothing: the transaction is run again",
            transient=True,
        )

    # What becomes of rows

    def _merge_carried(self, binding: int, carried: Carried) -> None:
        layout = self._layouts[binding]
        arrays = ", ".join(
            f"${at}::{type_}[]" for at, type_ in enumerate((*layout.types, "boolean"), start=1)
        )
        columns = f"{sql.columns_of(self._targets[binding])}, {quoted(DELETE)}"
        source = f"unnest({arrays}) AS s ({columns})"
        self._merge(binding, source, carried.literals, rows=carried.rows, deleted=carried.deleted)

    def _merge_table(self, staged: Staged) -> None:
        """Rows that were copied, if they are still there."""
        table = quoted(STAGE, staged.at)
        counts = f"SELECT count(*), count(*) FILTER (WHERE {quoted(DELETE)}) FROM {table}"
        try:
            counted = run(self._connection, counts).fetchone()
        except psycopg.errors.UndefinedTable:
            counted = None
        there, deleted = counted or (0, 0)
        if counted is None or there != staged.rows:
            raise ConnectorError(
                f"{staged.rows} rows were staged, and {there} are there",
                where=f"{self._server.name}: {table}",
                why="a crash of the server empties staged tables",
                fix="nothing: the transaction is run again",
                transient=True,
            )
        self._merge(staged.binding, f"{table} AS s", None, rows=there, deleted=deleted)

    def _merge(
        self, binding: int, source: str, values: Sequence[str] | None, *, rows: int, deleted: int
    ) -> None:
        """Release rows: update what is there, add what is not, remove what is deleted."""
        target = self._targets[binding]
        if deleted and not target.delta_updates:
            self._remove(target, source, values)
            rows -= deleted
        columns = sql.columns_of(target)
        insert = (
            f"INSERT INTO {quoted(*target.path)} AS t ({columns}) SELECT {columns} FROM {source}"
        )
        if not target.delta_updates:
            # The condition also keeps ON from being read as that of a join.
            insert += f" WHERE NOT {quoted(DELETE)} {sql.on_conflict(target, _DIALECT)}"
        done = run(self._connection, insert, values)
        sql.check_stored(target, sent=rows, stored=done.rowcount, where=self._server.name)

    def _remove(self, target: Target, source: str, values: Sequence[str] | None) -> None:
        """Rows go, or show the deletion; a key that is not there does not appear by it."""
        hard = self._options.hard_delete
        removal = _removal(target, source, hard=hard)
        if removal is None:
            return
        removed = run(self._connection, removal, values).rowcount
        left = run(
            self._connection,
            f"SELECT count(*) FROM {source}, {quoted(*target.path)} AS t "
            f"WHERE s.{quoted(DELETE)} AND {sql.same_key(target, 't', 's')}",
            values,
        ).fetchone()
        there = left[0] if left is not None else 0
        sql.check_removed(
            target,
            there=removed + there if hard else there,
            removed=removed,
            where=self._server.name,
        )

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def sweep(self, keep: Sequence[Staged]) -> None:
        """Drop tables that attempts of this task have left; those of a newer session are its."""
        kept = {each.at for each in keep}
        names = [name for name in self._staged(self._task) if epoch_of(name) <= self._epoch]
        if self._old_name is not None:
            names += self._staged(self._old_name)
        self._drop([name for name in names if name not in kept])

    def _staged(self, task: str) -> list[str]:
        with self._server.explained():
            rows = run(
                self._connection,
                "SELECT tablename::text FROM pg_tables WHERE schemaname = $1 "
                "AND starts_with(tablename::text, $2)",
                (STAGE, stage_prefix(task)),
            ).fetchall()
        return [name for (name,) in rows]

    def _drop(self, names: Sequence[str]) -> None:
        """Best effort: an attempt that still writes holds its table, and is not waited for."""
        for name in names:
            try:
                run(
                    self._connection,
                    "BEGIN; SET LOCAL lock_timeout = '100ms'; "
                    f"DROP TABLE IF EXISTS {quoted(STAGE, name)}; COMMIT",
                )
            except psycopg.Error as error:
                _log.info("%s: %s stays for now: %s", self._task, name, error.diag.message_primary)
                self._roll_back()

    def close(self) -> None:
        self._let_go()
        with contextlib.suppress(psycopg.Error):
            self._connection.close()


def _removal(target: Target, source: str, *, hard: bool) -> str | None:
    """What happens to rows that are deleted: they go, or they show the deletion. None appears."""
    table = quoted(*target.path)
    rows = f"s.{quoted(DELETE)} AND {sql.same_key(target, 't', 's')}"
    if hard:
        return f"DELETE FROM {table} AS t USING {source} WHERE {rows}"
    sets = ", ".join(
        f"{quoted(field.name)} = s.{quoted(field.name)}"
        for field in target.fields
        if not field.is_key
    )
    return f"UPDATE {table} AS t SET {sets} FROM {source} WHERE {rows}" if sets else None


def _layout(connection: Connection, target: Target) -> tuple[Layout, int]:
    """How rows of a target are written, and which table it is."""
    live = postgres_tables.look(connection, target.path)
    if live is None:
        raise ConnectorError(f"table {'.'.join(target.path)} is gone", transient=True)
    types = {name: column.type for name, column in live.columns.items()}
    if missing := [field.name for field in target.fields if field.name not in types]:
        raise ConnectorError(
            f"table {'.'.join(target.path)} has lost {', '.join(missing)}", transient=True
        )
    return Layout.of(".".join(target.path), target.fields, types), live.oid


def raise_fence(connection: Connection, options: Options, task: str, epoch: int) -> bytes | None:
    """Take the task's row for a session, within a transaction; the checkpoint that is there."""
    found = run(connection, "SELECT to_regclass($1)", (options.checkpoints,)).fetchone()
    if found is None or found[0] is None:
        run(connection, f"SELECT pg_advisory_xact_lock({_DDL_LOCK})")
        run(
            connection,
            f"CREATE TABLE IF NOT EXISTS {options.checkpoints} (task text PRIMARY KEY, "
            "fence bigint NOT NULL, checkpoint bytea, updated_at timestamptz)",
        )
    row = run(
        connection,
        f"INSERT INTO {options.checkpoints} AS t (task, fence) VALUES ($1, $2) "
        "ON CONFLICT (task) DO UPDATE SET fence = GREATEST(t.fence, excluded.fence) "
        "RETURNING fence, checkpoint",
        (task, epoch),
    ).fetchone()
    if row is None or row[0] != epoch:
        raise fenced(options, task, epoch)
    checkpoint: bytes | None = row[1]
    return checkpoint


def fenced(options: Options, task: str, epoch: int) -> FencedEndpoint:
    return FencedEndpoint(
        f"session {epoch} of {task} is over: a newer one has the database",
        where=options.server.name,
        fix=sql.FENCED,
    )


# ---------------------------------------------------------------------------------- the connector


class Postgres:
    """`penstock/materialize-postgres`."""

    pattern = Pattern.ENDPOINT
    flush_barrier = False

    def __init__(self, config: Json, *, where: str) -> None:
        server = Server.of(config, where)
        at = f"{where}: endpoint.connector.config"
        given = config if isinstance(config, dict) else {}
        self._where = where
        self._lines = Lines()
        self._options = Options(
            server=server,
            schema=self._name(sql.text(given, "schema", where=at, default="public")),
            hard_delete=sql.flag(given, "hardDelete", where=at),
        )

    def path(self, resource: Json) -> tuple[str, ...]:
        given = sql.check_members(
            resource,
            ("table", "schema", "delta_updates"),
            required=("table",),
            where=f"{self._where}: resource",
            example="{table: orders, schema: public, delta_updates: false}",
        )
        default = self._options.schema
        schema = self._name(sql.text(given, "schema", where=self._where, default=default))
        table = self._name(sql.text(given, "table", where=self._where))
        if table.startswith("penstock_") or schema.startswith("pg_") or schema == STAGE:
            raise UserError(
                f"a table cannot be {schema}.{table}",
                where=self._where,
                fix="schemas that begin with pg_ and tables that begin with penstock_ are taken",
            )
        return schema, table

    def _name(self, name: str) -> str:
        if "\0" in name or len(name.encode()) > NAME_BYTES_MAX:
            raise UserError(
                f"{name!r} is not a name for PostgreSQL",
                where=self._where,
                fix=f"at most {NAME_BYTES_MAX} bytes, and no U+0000",
            )
        return name

    def location(self, resource: Json) -> tuple[str, ...]:
        return "postgres", *self._options.server.location, *self.path(resource)

    def delta_updates(self, resource: Json) -> bool:
        return isinstance(resource, dict) and sql.flag(
            resource, "delta_updates", where=f"{self._where}: resource"
        )

    def can_reduce(self, field: TargetField) -> bool:
        kind = field.column.kind
        match field.reduction:
            case Strategy.SUM:  # of decimals the schema limits the digits, and the column does not
                return kind in (Kind.LONG, Kind.DOUBLE)
            case Strategy.MINIMIZE | Strategy.MAXIMIZE:
                # Texts compare by their bytes; an instant is not ordered as its text is.
                same = kind is Kind.STRING and type_of(field) == "text"
                return same or kind in (Kind.LONG, Kind.DOUBLE, Kind.DECIMAL)
            case Strategy.FIRST_WRITE_WINS | Strategy.LAST_WRITE_WINS:
                return True
            case _:
                return False

    def check(self) -> None:
        """Whether the user can get in, and make tables."""
        schema = self._options.schema
        with self._connected() as connection:
            row = run(
                connection,
                "SELECT n.oid IS NOT NULL, COALESCE("
                "has_schema_privilege(n.oid, 'CREATE') AND has_schema_privilege(n.oid, 'USAGE'), "
                "has_database_privilege(current_database(), 'CREATE')) "
                "FROM (VALUES ($1::text)) v(name) LEFT JOIN pg_namespace n ON n.nspname = v.name",
                (schema,),
            ).fetchone()
        exists, may = row or (False, False)
        if exists and not may:
            raise _may_not(self._options.server, schema)
        if not may:
            user = self._options.server.user
            raise ConnectorError(
                f"there is no schema {schema}, and {user} may not make it",
                where=self._options.server.name,
                fix=f"CREATE SCHEMA {quoted(schema)} AUTHORIZATION {quoted(user)}",
            )

    def validate(
        self,
        path: tuple[str, ...],
        fields: Sequence[TargetField],
        *,
        delta_updates: bool,
        state_key: str,
    ) -> Mapping[str, Verdict]:
        found = sql.verdicts(fields, delta_updates=delta_updates)
        for each in fields:
            if each.name in SYSTEM_COLUMNS or len(each.name.encode()) > NAME_BYTES_MAX:
                found[each.name] = Verdict(
                    constraint=Constraint.FORBIDDEN,
                    reason="PostgreSQL has no column of that name: give the location another, of "
                    f"at most {NAME_BYTES_MAX} bytes, by a projection",
                )
        there = self._options.place(path)
        with self._connected() as connection:
            live = postgres_tables.look(connection, there)
            record = postgres_records.record(connection, self._options.tables, there)
        if live is None or (record is not None and record.state_key != state_key):
            return found  # it is made to fit, by a backfill that was asked for
        for each in fields:
            column = live.columns.get(each.name)
            if column is not None and fit(each, column.type) is Fit.FAILS:
                found[each.name] = sql.misfit(".".join(path), column.type, type_of(each))
        return found

    def interrupt(self) -> None:
        self._lines.interrupt()

    def waits_for(self) -> str | None:
        return self._options.server.blocked()

    def apply(self, task: Task, last: Task | None, state: Json, *, epoch: int) -> Applied:
        """All or nothing, and only if no newer session has been here."""
        given, task = task, self._placed(task)
        before = {} if last is None else {each.path: each for each in self._placed(last).targets}
        done: list[str] = []
        with self._connected() as connection:
            run(connection, BEGIN)
            run(connection, f"SELECT pg_advisory_xact_lock({_DDL_LOCK})")
            home = self._options.place((self._options.schema, CHECKPOINTS))[0]
            schemas = {STAGE, home, *(target.path[0] for target in task.targets)}
            done += _make_schemas(connection, schemas, self._options.server)
            checkpoint = raise_fence(connection, self._options, task.name, epoch)
            postgres_records.make(connection, self._options.tables)
            if not postgres_records.rename(connection, self._options.records, task, checkpoint):
                raise ownership.two_checkpoints(task, self._options.server.name)
            for target in task.targets:
                done += self._apply(connection, task, target, before.get(target.path))
            run(connection, "COMMIT")
        said = "; ".join(done)
        preview = self._options.preview
        return Applied(description=said if preview is None else preview.shown(said, given))

    def _apply(
        self, connection: Connection, task: Task, target: Target, was: Target | None
    ) -> Iterator[str]:
        live = postgres_tables.look(connection, target.path)
        emptied = postgres_records.claim(
            connection,
            self._options.records,
            task,
            target,
            was=was,
            live=live,
            hard_delete=self._options.hard_delete,
        )
        for step in postgres_tables.plan(target, live, before=was, emptied=emptied):
            run(connection, step.statement)
            yield step.says
        postgres_records.remember_made(connection, self._options.tables, target.path)

    def _placed(self, task: Task) -> Task:
        preview = self._options.preview
        return task if preview is None else preview.task(task)

    def open(self, task: Task, *, epoch: int, state: Json) -> PostgresSession:
        session = PostgresSession(self._options, self._placed(task), epoch, self._lines)
        try:
            session.sweep(())
        except BaseException:
            session.close()
            raise
        return session

    @contextlib.contextmanager
    def preview(self, paths: Sequence[tuple[str, ...]]) -> Iterator[Self]:
        """In tables of its own, beside those that tasks stage rows in."""
        # Interrupting what a preview does must not end what keeps its tables its own.
        with contextlib.closing(self._options.server.connect()) as keeper:
            with self._options.server.explained():
                preview = postgres_preview.claim(keeper)
            connector = copy.copy(self)
            connector._options = replace(self._options, preview=preview)  # noqa: SLF001 - a copy
            try:
                with self._connected() as connection:
                    postgres_preview.sweep(connection)
                    run(connection, "BEGIN")
                    for _ in _make_schemas(connection, {STAGE}, self._options.server):
                        pass
                    mine = connector._options.tables  # noqa: SLF001
                    postgres_records.make(connection, mine)
                    for path in paths:
                        postgres_preview.copy_shape(connection, preview, path)
                        postgres_records.copy_state_key(
                            connection, self._options.tables, path, mine, preview.table(*path)
                        )
                    run(connection, "COMMIT")
                yield connector
            finally:
                try:
                    with self._connected() as connection:
                        postgres_preview.remove(connection, preview)
                except ConnectorError as error:
                    _log.warning("the next preview removes what this one leaves: %s", error.what)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        """A connection for one errand; what it has not committed is undone with it."""
        connection = self._options.server.connect()
        try:
            with self._options.server.explained(), self._lines.on(connection):
                yield connection
        finally:
            with contextlib.suppress(psycopg.Error):
                connection.close()


def _make_schemas(connection: Connection, names: set[str], server: Server) -> Iterator[str]:
    """Those that are missing: who may not make a schema may still use one."""
    rows = run(
        connection,
        "SELECT nspname::text, has_schema_privilege(oid, 'CREATE') "
        "AND has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = ANY($1)",
        (list(names),),
    ).fetchall()
    usable: dict[str, bool] = dict(rows)
    for name in sorted(names):
        if name not in usable:
            run(connection, f"CREATE SCHEMA {quoted(name)}")
            yield f"created schema {name}"
        elif not usable[name]:
            raise _may_not(server, name)


def _may_not(server: Server, schema: str) -> ConnectorError:
    return ConnectorError(
        f"{server.user} may not make tables in schema {schema}",
        where=server.name,
        fix=f"GRANT CREATE, USAGE ON SCHEMA {quoted(schema)} TO {quoted(server.user)}",
    )
