"""Penstock's own tables in a SQL database: checkpoints with their fences, and ownership records.

A session raises its task's fence before it reads the checkpoint, and every commit checks the fence
in the statement that stores the new checkpoint. So an older session finds that its time is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final

from penstock.connectors import ownership
from penstock.connectors.ownership import Claim, Found, TableRecord
from penstock.connectors.sql.dialect import Dialect, LiveTable, SqlConnection
from penstock.connectors.sql.statements import quoted
from penstock.runtime.connector.materialize import FencedEndpoint, SinkTask, Target

CHECKPOINTS: Final = "penstock_checkpoints"
"""Name of the table of fences and checkpoints, one row per task."""

TABLES: Final = "penstock_tables"
"""Name of the table of ownership records, one row per target."""


def is_empty(connection: SqlConnection, path: tuple[str, ...]) -> bool:
    return connection.run(f"SELECT 1 FROM {quoted(*path)} LIMIT 1").fetchone() is None


class Records:
    """The two tables at one place of a database. Every method runs in the caller's transaction."""

    identity_columns: ClassVar[Mapping[str, str]] = {}
    """Columns, with their types, that remember which table a record is about."""
    identity: ClassVar[str] = "NULL"
    """An expression over them: the identity of the table that was filled."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        checkpoints: tuple[str, ...],
        tables: tuple[str, ...],
        where: str,
    ) -> None:
        self._dialect = dialect
        self._at = checkpoints
        self._records_at = tables
        self._where = where
        self.checkpoints, self.tables = quoted(*checkpoints), quoted(*tables)

    # Checkpoints and fences

    def raise_fence(self, connection: SqlConnection, task: str, epoch: int) -> bytes | None:
        """Keep older sessions out, and return the checkpoint that the same statement read.

        A later read could see a successor's checkpoint, and take it for a predecessor's.
        """
        types = self._dialect.record_types
        if self._dialect.look(connection, self._at) is None:
            if self._dialect.ddl_lock is not None:
                connection.run(self._dialect.ddl_lock)
            connection.run(
                f"CREATE TABLE IF NOT EXISTS {self.checkpoints} (task {types.text} PRIMARY KEY, "
                f"fence {types.integer} NOT NULL, checkpoint {types.binary}, "
                f"updated_at {types.instant}){self._dialect.table_options}"
            )
        one, two = self._dialect.marks(2)
        rows = connection.run(
            f"INSERT INTO {self.checkpoints} AS t (task, fence) VALUES ({one}, {two}) "
            "ON CONFLICT (task) DO UPDATE "
            f"SET fence = {self._dialect.greatest}(t.fence, excluded.fence) "
            "RETURNING fence, checkpoint",
            (task, epoch),
        ).fetchall()
        if not rows or rows[0][0] != epoch:
            raise self.fenced(task, epoch)
        checkpoint: bytes | None = rows[0][1]
        return checkpoint

    def store_checkpoint(
        self, connection: SqlConnection, task: str, epoch: int, checkpoint: bytes
    ) -> None:
        """Store a checkpoint if the fence is still this session's; in a server, that locks it."""
        one, two, three = self._dialect.marks(3)
        updated = connection.run(
            f"UPDATE {self.checkpoints} SET checkpoint = {one}, updated_at = CURRENT_TIMESTAMP "
            f"WHERE task = {two} AND fence = {three}",
            (checkpoint, task, epoch),
        )
        if updated.rowcount != 1:
            raise self.fenced(task, epoch)

    def fenced(self, task: str, epoch: int) -> FencedEndpoint:
        return FencedEndpoint(
            f"{task} was taken over by another penstock run. Nothing is lost; do not run it twice "
            "at once.",
            where=self._where,
            why=f"session {epoch} is over: a newer one has the database",
            fix="let the other one run; if there is none, another data directory has run a task "
            "of this name here: give one of them another name and other tables",
        )

    # Ownership records

    def make(self, connection: SqlConnection) -> None:
        """Create the table of records, or bring an older release's table up to date."""
        types = self._dialect.record_types
        newer = {
            "task": types.text,
            "filled": types.boolean,
            "rebuild": types.text,
            **self.identity_columns,
        }
        live = self._dialect.look(connection, self._records_at)
        if live is None:
            key = self._dialect.record_key
            columns = [f"{name} {types.text}" for name in key]
            columns.append(f"state_key {types.text} NOT NULL")
            columns += [f"{name} {type_}" for name, type_ in newer.items()]
            connection.run(
                f"CREATE TABLE {self.tables} ({', '.join(columns)}, "
                f"PRIMARY KEY ({', '.join(key)})){self._dialect.table_options}"
            )
            return
        for name, type_ in newer.items():
            if name not in live.columns:
                connection.run(f"ALTER TABLE {self.tables} ADD COLUMN {name} {type_}")

    def find(self, connection: SqlConnection, path: tuple[str, ...]) -> TableRecord | None:
        """Return the record of a target."""
        live = self._dialect.look(connection, self._records_at)
        if live is None:
            return None
        newer = "task, filled" if "task" in live.columns else "NULL, NULL"
        rebuild = "rebuild" if "rebuild" in live.columns else "NULL"
        known = self.identity_columns.keys() <= live.columns.keys()
        row = connection.run(
            f"SELECT state_key, {newer}, {rebuild}, {self.identity if known else 'NULL'} "
            f"FROM {self.tables} WHERE {self._is_at()}",
            path,
        ).fetchone()
        if row is None:
            return None
        state_key, task, filled, rebuilt, identity = row
        return TableRecord(
            state_key=state_key,
            task=task,
            filled=None if filled is None else bool(filled),
            identity=identity,
            rebuild=rebuilt,
        )

    def _is_at(self) -> str:
        marks = self._dialect.marks(len(self._dialect.record_key))
        return " AND ".join(
            f"{column} = {mark}{self._dialect.same_name}"
            for column, mark in zip(self._dialect.record_key, marks, strict=True)
        )

    def store(self, connection: SqlConnection, path: tuple[str, ...], record: TableRecord) -> None:
        """Replace the record of a target."""
        connection.run(f"DELETE FROM {self.tables} WHERE {self._is_at()}", path)
        columns = (*self._dialect.record_key, "state_key", "task", "filled", "rebuild")
        connection.run(
            f"INSERT INTO {self.tables} ({', '.join(columns)}) "
            f"VALUES ({', '.join(self._dialect.marks(len(columns)))})",
            (*path, record.state_key, record.task, record.filled, record.rebuild),
        )

    def store_filled(self, connection: SqlConnection, path: tuple[str, ...]) -> None:
        """Note that rows were stored to a target."""
        connection.run(
            f"UPDATE {self.tables} SET filled = TRUE WHERE {self._is_at()} AND filled IS NOT TRUE",
            path,
        )

    def store_identity(self, connection: SqlConnection, path: tuple[str, ...]) -> None:
        """Note which table a target is, where tables of one name can be told apart."""

    def check_elsewhere(
        self, connection: SqlConnection, task: SinkTask, path: tuple[str, ...]
    ) -> None:
        """Raise if other tables of records, at another place, give the table to another task."""

    def claim(
        self,
        connection: SqlConnection,
        task: SinkTask,
        target: Target,
        *,
        was: Target | None,
        live: LiveTable | None,
        hard_delete: bool,
    ) -> Claim:
        """Give a table to the task; raises if it may not be given. The caller fences its owner.

        If the table has rows that are out of date, it keeps them until a shadow replaces them.
        """
        record = self.find(connection, target.path)
        if record is None:
            self.check_elsewhere(connection, task, target.path)
            if was is not None:
                record = TableRecord(state_key=was.state_key)
        claim = ownership.claim(
            task,
            target,
            record,
            Found(
                there=live is not None,
                is_empty=lambda: is_empty(connection, target.path),
                identity=None if live is None else live.identity,
            ),
            was=was,
            hard_delete=hard_delete,
            forget=self.forget(target.path),
        )
        claimed = ownership.claimed(task, target, record, claim)
        if record is not None and claim.emptied and self.rebuilds(connection, claim, target, live):
            claim = replace(claim, rebuilds=True)
            claimed = replace(record, task=task.name, rebuild=target.state_key)
        self.store(connection, target.path, claimed)
        return claim

    @staticmethod
    def rebuilds(
        connection: SqlConnection, claim: Claim, target: Target, live: LiveTable | None
    ) -> bool:
        """True if readers see rows that must stay until others replace them."""
        if claim.under_way:
            return True
        return live is not None and live.kind == "table" and not is_empty(connection, target.path)

    def store_swapped(self, connection: SqlConnection, task: str, target: Target) -> None:
        """Note that a table holds what was stored to its shadow."""
        filled = target.delta_updates or not is_empty(connection, target.path)
        record = TableRecord(state_key=target.state_key, task=task, filled=filled)
        self.store(connection, target.path, record)
        self.store_identity(connection, target.path)

    def fence_out(self, connection: SqlConnection, task: str) -> None:
        """Keep the session of a task from storing that has lost a table."""
        (one,) = self._dialect.marks(1)
        connection.run(
            f"UPDATE {self.checkpoints} SET fence = fence + 1 WHERE task = {one}", (task,)
        )

    def check_fence(self, connection: SqlConnection, task: str, epoch: int) -> None:
        """Raise unless the fence is this session's; in a server, that locks it."""
        one, two = self._dialect.marks(2)
        updated = connection.run(
            f"UPDATE {self.checkpoints} SET updated_at = CURRENT_TIMESTAMP "
            f"WHERE task = {one} AND fence = {two}",
            (task, epoch),
        )
        if updated.rowcount != 1:
            raise self.fenced(task, epoch)

    def rename(self, connection: SqlConnection, task: SinkTask, checkpoint: bytes | None) -> None:
        """Move what is kept under the task's old name to its name; that fences the old one.

        Raises if both names have a checkpoint.
        """
        if task.renamed_from is None:
            return
        one, two = self._dialect.marks(2)
        gone = connection.run(
            f"DELETE FROM {self.checkpoints} WHERE task = {one} RETURNING checkpoint",
            (task.renamed_from,),
        ).fetchall()
        if gone and gone[0][0] is not None:
            if checkpoint is not None:
                raise ownership.two_checkpoints(task, self._where)
            connection.run(
                f"UPDATE {self.checkpoints} SET checkpoint = {one} WHERE task = {two}",
                (gone[0][0], task.name),
            )
        connection.run(
            f"UPDATE {self.tables} SET task = {one} WHERE task = {two}",
            (task.name, task.renamed_from),
        )

    def move(self, connection: SqlConnection, task: SinkTask, target: Target) -> bool:
        """Give a target the record that it had at its former path; false if there is none.

        Its table has moved as well, or is about to, in the same transaction.
        """
        if target.renamed_from is None or self.find(connection, target.path) is not None:
            return False
        record = self.find(connection, target.renamed_from)
        if record is None or record.task not in (None, task.name):
            return False
        connection.run(f"DELETE FROM {self.tables} WHERE {self._is_at()}", target.renamed_from)
        resource = target.state_key.rpartition(".v")[0]

        def moved(state_key: str) -> str:
            return f"{resource}.v{state_key.rpartition('.v')[2]}"

        rebuild = None if record.rebuild is None else moved(record.rebuild)
        self.store(
            connection,
            target.path,
            replace(record, state_key=moved(record.state_key), rebuild=rebuild),
        )
        return True

    def forget(self, path: tuple[str, ...]) -> str:
        """Return the statement that removes a record, for people."""
        parts = zip(self._dialect.record_key, path, strict=True)
        escaped = ((name, part.replace("'", "''")) for name, part in parts)
        which = " AND ".join(f"{name} = '{part}'" for name, part in escaped)
        return f"DELETE FROM {self.tables} WHERE {which}"
