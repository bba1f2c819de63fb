"""Two small endpoints without transactions, for tests of what the runtime guarantees for them.

    Files    pattern APPLY: the connector state names staged files, which are applied once the
             transaction counts; each target remembers the clock up to which it was applied
    Direct   pattern DIRECT: rows are visible as they are stored

Both keep each target in a SQLite file of its own, as rows of JSON text by key: targets share no
transaction, so tests can find some of them ahead of others.

    config     path (a directory)
    resource   table, delta_updates
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow

from penstock import failpoints
from penstock.connectors import file_previews
from penstock.connectors.sql import statements as sql
from penstock.errors import Bug
from penstock.model.clock import Clock
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.common import Applied, SparkAttempt
from penstock.runtime.connector.materialize import (
    DELETE,
    FencedEndpoint,
    FieldVerdict,
    Pattern,
    SinkTask,
    Staged,
    Target,
    TargetField,
)
from penstock.runtime.patches import apply_patches

_pa: Any = pyarrow

_APPLIED = failpoints.declare("files.after-apply", "a unit is applied to one target of several")


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one target in a file of its own, with the clock up to which it was applied."""

    path: Path

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT, row TEXT)")
            connection.execute("CREATE INDEX IF NOT EXISTS by_key ON rows (key)")
            connection.execute("CREATE TABLE IF NOT EXISTS applied (close INTEGER)")
            connection.execute("CREATE TABLE IF NOT EXISTS filled (state_key TEXT, epoch INTEGER)")
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()

    def rows(self) -> list[dict[str, Any]]:
        """Return the visible rows."""
        with self.transaction() as connection:
            found = connection.execute("SELECT row FROM rows ORDER BY key, rowid").fetchall()
        return [json.loads(text) for (text,) in found]

    def find(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        with self.transaction() as connection:
            found = [
                connection.execute("SELECT row FROM rows WHERE key = ?", (key,)).fetchone()
                for key in keys
            ]
        return [json.loads(row[0]) for row in found if row is not None]

    def store(self, connection: sqlite3.Connection, target: Target, rows: Any) -> None:  # noqa: ANN401
        """Upsert or append rows, and remove deleted ones."""
        for key, row in zip(_keys(target, rows), rows.to_pylist(), strict=True):
            deleted = row.pop(DELETE)
            if not target.delta_updates:
                connection.execute("DELETE FROM rows WHERE key = ?", (key,))
            if not deleted:
                values = (key, json.dumps(row, default=str))
                connection.execute("INSERT INTO rows VALUES (?, ?)", values)

    def state_key(self) -> str | None:
        """Return the state key under which it was filled."""
        with self.transaction() as connection:
            return _filled(connection)[0]

    def prepare(self, state_key: str, epoch: int) -> None:
        """Empty it if it was filled under another state key; refuse a session that is older."""
        with self.transaction() as connection:
            before, newest = _filled(connection)
            if epoch < newest:
                raise FencedEndpoint(f"session {epoch} is over: {newest} has {self.path.stem}")
            if before not in (None, state_key):
                connection.execute("DELETE FROM rows")
            connection.execute("DELETE FROM filled")
            connection.execute("INSERT INTO filled VALUES (?, ?)", (state_key, epoch))

    def apply(
        self, state_key: str, close: Clock, store: Callable[[sqlite3.Connection], None]
    ) -> bool:
        """Store, unless this or a later transaction was applied; the guard moves with the rows.

        Rows staged under a state key other than the table's current one are stale.
        """
        with self.transaction() as connection:
            last = connection.execute("SELECT max(close) FROM applied").fetchone()[0]
            if _filled(connection)[0] != state_key or (last is not None and close <= last):
                return False
            store(connection)
            connection.execute("DELETE FROM applied")
            connection.execute("INSERT INTO applied VALUES (?)", (close,))
        return True


def _filled(connection: sqlite3.Connection) -> tuple[str | None, int]:
    found = connection.execute("SELECT state_key, epoch FROM filled").fetchone()
    return (None, 0) if found is None else (found[0], found[1])


def _keys(target: Target, rows: Any) -> list[str]:  # noqa: ANN401
    columns = [rows.column(field.name).to_pylist() for field in target.key]
    return [json.dumps(key, default=str) for key in zip(*columns, strict=True)]


class TableLoader:
    """Loads documents by key."""

    def __init__(self, directory: Path, targets: Mapping[int, Target]) -> None:
        self._directory = directory
        self._targets = targets

    def load(self, binding: int, keys: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        target = self._targets[binding]
        document = target.document
        if document is None:
            raise Bug(f"{target.collection} is loaded, and no document is stored")
        found = table(self._directory, target).find(_keys(target, keys))
        texts = _pa.array([row[document.name] for row in found], _pa.utf8())
        yield _pa.record_batch([texts], ["d"])

    def close(self) -> None:
        """Nothing is open."""


def table(directory: Path, target: Target) -> Table:
    """Return the table that holds the rows of a target."""
    return Table(directory / f"{target.path[0]}.db")


class _Connector:
    """The common base of both connectors."""

    flush_barrier = False
    config_schema = ConfigSchema({"path": {"type": "string"}}, required=("path",))
    resource_schema = ConfigSchema(
        {"table": {"type": "string"}, "delta_updates": {"type": "boolean"}}, required=("table",)
    )

    def __init__(self, config: Json, *, where: str) -> None:
        self.directory = Path(self.config_schema.read(config, where=where)["path"])
        self._where = where

    def path(self, resource: Json) -> tuple[str, ...]:
        return (self.resource_schema.read(resource, where=self._where)["table"],)

    def location(self, resource: Json) -> tuple[str, ...]:
        return str(self.directory.resolve()), *self.path(resource)

    def delta_updates(self, resource: Json) -> bool:
        given = self.resource_schema.read(resource, where=self._where)
        return bool(given.get("delta_updates", False))

    def can_reduce(self, field: TargetField) -> bool:
        return False

    def interrupt(self) -> None:
        """No call here takes long."""

    def waits_for(self) -> str | None:
        return None

    def check(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def validate(
        self,
        path: tuple[str, ...],
        fields: Sequence[TargetField],
        *,
        delta_updates: bool,
        state_key: str,
    ) -> Mapping[str, FieldVerdict]:
        return sql.verdicts(fields, delta_updates=delta_updates)

    def apply(self, task: SinkTask, last: SinkTask | None, state: Json, *, epoch: int) -> Applied:
        self.check()
        for target in task.targets:
            table(self.directory, target).prepare(target.state_key, epoch)
        return Applied(description="")

    @contextlib.contextmanager
    def preview(self, paths: Sequence[tuple[str, ...]]) -> Iterator[Self]:
        with file_previews.beside(self.directory) as place:
            yield type(self)({"path": str(place)}, where=self._where)


# -------------------------------------------------------------------------------- pattern APPLY


@dataclass(frozen=True, slots=True)
class FilesWorkers:
    """Stages Arrow files."""

    directory: Path
    targets: Mapping[int, Target]

    def stager(self, attempt: SparkAttempt) -> FilesStager:
        return FilesStager(self.directory / "staged", attempt)

    def loader(self, attempt: SparkAttempt) -> TableLoader:
        return TableLoader(self.directory, self.targets)


class FilesStager:
    """Writes one file per binding, named after its attempt."""

    def __init__(self, directory: Path, attempt: SparkAttempt) -> None:
        self._directory = directory
        self._attempt = attempt
        self._batches: dict[int, list[pyarrow.RecordBatch]] = {}

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        self._batches.setdefault(binding, []).append(rows)

    def finish(self) -> list[Staged]:
        self._directory.mkdir(parents=True, exist_ok=True)
        staged = []
        for binding, batches in self._batches.items():
            path = self._directory / f"{self._attempt.name}_{binding}.arrow"
            with _pa.ipc.new_file(str(path), batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            staged.append(
                Staged(
                    binding=binding,
                    shard=self._attempt.shard,
                    at=path.name,
                    rows=sum(batch.num_rows for batch in batches),
                    bytes=path.stat().st_size,
                )
            )
        return staged

    def discard(self) -> None:
        """Nothing has been written yet."""


class FilesSession:
    """Names units when a transaction starts to commit, and applies them once it counts.

    The state is `{"units": {close: {state key: {"table": …, "files": [file, …]}}}}`: by state key,
    since rows staged for a target that was emptied afterwards must not come back. Units of a target
    that the task does not have at present are committed, and stay named until it has it again.
    """

    checkpoint = None

    def __init__(self, directory: Path, task: SinkTask, state: Json) -> None:
        self._directory = directory
        self._targets = {target.binding: target for target in task.targets}
        self._state = apply_patches(state, ())
        self.workers = FilesWorkers(directory, self._targets)

    def flush(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def start_commit(
        self, close: Clock, staged: Sequence[Staged], checkpoint: bytes, patches: Sequence[Json]
    ) -> Sequence[Json]:
        """Only name the units: they become true with the recovery log's record."""
        units: dict[str, Json] = {}
        for target in self._targets.values():
            files: list[Json] = [each.at for each in staged if each.binding == target.binding]
            if files:
                units[target.state_key] = {"table": target.path[0], "files": files}
        return ({"units": {f"{close:016x}": units}},) if units else ()

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        """Apply every named unit of this task's targets, oldest first, and remove its name."""
        self._state = apply_patches(self._state, patches)
        units = self._state.get("units", {}) if isinstance(self._state, dict) else {}
        if not isinstance(units, dict):
            return ()
        forget: dict[str, Json] = {}
        for close, named in sorted(units.items()):
            if not isinstance(named, dict):
                continue
            done: dict[str, Json] = {
                state_key: None
                for state_key, unit in named.items()
                if isinstance(unit, dict) and self._apply(Clock(int(close, 16)), state_key, unit)
            }
            if done:
                forget[close] = None if len(done) == len(named) else done
        if not forget:
            return ()
        self._state = apply_patches(self._state, ({"units": forget},))
        return ({"units": forget},)

    def _apply(self, close: Clock, state_key: str, unit: Mapping[str, Json]) -> bool:
        """True if a unit is settled: it was applied, or its table was emptied since."""
        where, names = Table(self._directory / f"{unit['table']}.db"), unit["files"]
        paths = [
            self._directory / "staged" / str(name)
            for name in (names if isinstance(names, list) else ())
        ]
        target = next((t for t in self._targets.values() if t.state_key == state_key), None)
        if target is None and where.state_key() == state_key:
            return False

        def store(connection: sqlite3.Connection) -> None:
            for path in paths:
                with _pa.memory_map(str(path)) as source:
                    rows = _pa.ipc.open_file(source).read_all()
                if target is not None:
                    where.store(connection, target, rows)

        if target is not None:
            where.apply(state_key, close, store)
            failpoints.hit(_APPLIED)
        for path in paths:  # only now, when the guard is durable
            path.unlink(missing_ok=True)
        return True

    def sweep(self, keep: Sequence[Staged]) -> None:
        """Remove staged files that no unit in the state names."""
        kept = {each.at for each in keep}
        for path in (self._directory / "staged").glob("*.arrow"):
            if path.name not in kept and path.name not in json.dumps(self._state):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""


class Files(_Connector):
    """Pattern APPLY."""

    pattern = Pattern.APPLY

    def open(self, task: SinkTask, *, epoch: int, state: Json) -> FilesSession:
        session = FilesSession(self.directory, task, state)
        session.sweep(())
        return session


# ------------------------------------------------------------------------------- pattern DIRECT


@dataclass(frozen=True, slots=True)
class DirectWorkers:
    """Stores rows immediately."""

    directory: Path
    targets: Mapping[int, Target]

    def stager(self, attempt: SparkAttempt) -> DirectStager:
        return DirectStager(self.directory, self.targets, attempt)

    def loader(self, attempt: SparkAttempt) -> TableLoader:
        return TableLoader(self.directory, self.targets)


class DirectStager:
    """Makes every batch visible before `store` returns."""

    def __init__(
        self, directory: Path, targets: Mapping[int, Target], attempt: SparkAttempt
    ) -> None:
        self._directory = directory
        self._targets = targets
        self._shard = attempt.shard
        self._rows: dict[int, int] = {}

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        target = self._targets[binding]
        where = table(self._directory, target)
        with where.transaction() as connection:
            where.store(connection, target, rows)
        self._rows[binding] = self._rows.get(binding, 0) + rows.num_rows

    def finish(self) -> list[Staged]:
        return [
            Staged(binding=binding, shard=self._shard, at="", rows=rows, bytes=0)
            for binding, rows in self._rows.items()
        ]

    def discard(self) -> None:
        """Stored rows cannot be taken back."""


class DirectSession:
    """Has nothing to commit."""

    checkpoint = None

    def __init__(self, directory: Path, task: SinkTask) -> None:
        self.workers = DirectWorkers(directory, {target.binding: target for target in task.targets})

    def flush(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def start_commit(
        self, close: Clock, staged: Sequence[Staged], checkpoint: bytes, patches: Sequence[Json]
    ) -> Sequence[Json]:
        return ()

    def acknowledge(self, patches: Sequence[Json]) -> Sequence[Json]:
        return ()

    def sweep(self, keep: Sequence[Staged]) -> None:
        """Nothing is staged."""

    def close(self) -> None:
        """Nothing is open."""


class Direct(_Connector):
    """Pattern DIRECT."""

    pattern = Pattern.DIRECT

    def open(self, task: SinkTask, *, epoch: int, state: Json) -> DirectSession:
        return DirectSession(self.directory, task)
