"""`using: sqlite`: lambdas of SQL statements that real SQLite runs, once for every document.

All documents of a transaction run in one transaction of SQLite. With migrations, each shard has a
database of its own, whose changes become visible with the transaction (`sqlite_state.py`). Without
them a lambda is a pure map: the database is in memory, empty, and may not be written to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import apsw

from penstock.errors import Bug, PenstockError, UserError
from penstock.model.schema import compiled
from penstock.model.spec import Catalog, CollectionSpec, DerivationSpec
from penstock.runtime.derive.engine import (
    Document,
    Finished,
    LambdaFailed,
    ShardContext,
    SourceRead,
)
from penstock.runtime.derive.sqlite_code import (
    Described,
    Statement,
    described,
    error_offset,
    line_of,
    migration_hashes,
    parameters,
    refusal,
    statements,
)
from penstock.runtime.derive.sqlite_decimal import add_decimals
from penstock.runtime.derive.sqlite_state import ShardFile
from penstock.runtime.derive.sqlite_values import (
    BindAll,
    MakeDocument,
    NotConvertible,
    document_maker,
    each_binder,
    row_binder,
)

DOCUMENT_S_MAX: Final = 60.0
"""Seconds of CPU that the lambda of one document may take."""
_STEPS_BETWEEN_CHECKS: Final = 100_000
_WRITES: Final = frozenset({apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE})
_MIGRATIONS: Final = "penstock_migrations"
_REMEMBER: Final = (
    "create table if not exists penstock_migrations (position integer primary key, hash text)"
)
_APPLIED: Final = "select hash from penstock_migrations order by position"
_APPLY: Final = "insert into penstock_migrations (hash) values (?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lambda:
    """The code of one transform, and the source whose fields are its parameters."""

    transform: str
    code: str
    source: CollectionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteEngine:
    """The code of a derivation `using: sqlite`. Build it with `of`."""

    target: CollectionSpec
    lambdas: tuple[_Lambda | None, ...]
    """By the index of the transform; None if it is disabled."""
    document_s_max: float = DOCUMENT_S_MAX

    @classmethod
    def of(cls, catalog: Catalog, collection: CollectionSpec) -> SqliteEngine:
        """Return the engine of a derived collection. The catalog holds its sources."""
        lambdas: list[_Lambda | None] = []
        for transform in _derivation(collection).transforms:
            source = catalog.collection(transform.source.collection)
            if transform.disable or source is None or transform.code is None:
                lambdas.append(None)
            else:
                found = _Lambda(transform=transform.name, code=transform.code, source=source)
                lambdas.append(found)
        return cls(target=collection, lambdas=tuple(lambdas))

    @property
    def stateful(self) -> bool:
        return bool(_derivation(self.target).migrations)

    def open(self, context: ShardContext) -> SqliteProcessor:
        """Begin a transaction of one shard.

        Raises `LambdaFailed` if SQLite does not accept the code, and `UserError` if the state does
        not fit it: its migrations changed, or its number of shards.
        """
        file = ShardFile(context, self.target.name) if self.stateful else None
        processor = SqliteProcessor(self, file)
        try:
            processor.begin()
        except BaseException:
            processor.close()
            raise
        return processor


def _derivation(collection: CollectionSpec) -> DerivationSpec:
    if collection.derivation is None:
        raise Bug(f"{collection.name} is not derived")
    return collection.derivation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A statement, and all that is known of it before the first document."""

    sql: str
    line: int
    bind: BindAll
    bind_each: BindAll
    make: MakeDocument


class SqliteProcessor:
    """Runs the lambdas of one shard in one transaction."""

    def __init__(self, engine: SqliteEngine, file: ShardFile | None) -> None:
        self._engine = engine
        self._file = file
        self._watch = _Watch(engine.document_s_max)
        self._guard = _Guard(stateful=file is not None)
        self._db = apsw.Connection(str(file.path) if file else ":memory:", statementcachesize=1000)
        add_decimals(self._db)
        self._prepared: list[Sequence[_Prepared]] = []
        self._committed = False
        """The file may hold what this transaction changed."""

    def begin(self) -> None:
        """Open the transaction, run migrations that are new, and prepare all lambdas."""
        if self._file is not None:
            # No other process has this file, and what a crash leaves of it is never read: neither
            # locks nor durability are needed. The log must not flow into the file before its end.
            self._db.execute("pragma locking_mode = exclusive")
            self._db.execute("pragma synchronous = off")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma wal_autocheckpoint = 0")
        self._db.execute("begin immediate")
        if self._file is not None:
            self._migrate()
        self._db.authorizer = self._guard.authorize
        self._prepared = [self._prepare(found) if found else () for found in self._engine.lambdas]
        self._db.set_progress_handler(self._watch.expired, _STEPS_BETWEEN_CHECKS)

    def process(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        """Yield the rows of every statement as documents."""
        prepared, watch = self._prepared, self._watch
        execute = self._db.cursor().execute
        for position, read in enumerate(reads):
            watch.position = position
            document = read.document
            for statement in prepared[read.transform]:
                make = statement.make
                try:
                    for row in execute(statement.sql, statement.bind(document)):
                        yield position, make(row)
                except (apsw.Error, ValueError, OverflowError, MemoryError, PenstockError) as e:
                    self._blame(e, position, read, statement)

    def finish(self) -> Finished:
        """Commit, and stage how the database changed."""
        if self._file is None:
            return Finished()
        self._quiet()
        self._committed = True
        self._db.execute("commit")
        patches, chain = self._file.staged()
        self._db.execute("pragma wal_checkpoint(truncate)")
        if chain is None:
            patches, chain = self._file.rebased()
        self._db.close()
        self._file.keep(chain)
        self._file = None
        return Finished(patches=patches)

    def close(self) -> None:
        """Roll back; if `finish` has committed, and could not stage that, drop the file."""
        self._quiet()
        self._db.close(True)
        if self._file is not None:
            if self._committed:
                self._file.discard()
            else:
                self._file.give_back()
            self._file = None

    def _quiet(self) -> None:
        with contextlib.suppress(apsw.ConnectionClosedError):
            self._db.authorizer = None
            self._db.set_progress_handler(None)

    def _migrate(self) -> None:
        derivation = _derivation(self._engine.target)
        wanted = migration_hashes(derivation)
        self._db.execute(_REMEMBER)
        applied = [str(hash_) for (hash_,) in self._db.execute(_APPLIED)]
        for position, hash_ in enumerate(applied, start=1):
            if position > len(wanted) or wanted[position - 1] != hash_:
                self._refuse_change(position, removed=position > len(wanted))
        with self._guard.migrating(self._db):
            for position in range(len(applied), len(wanted)):
                self._run_migration(position + 1, derivation.migrations[position])
        self._db.executemany(_APPLY, [(hash_,) for hash_ in wanted[len(applied) :]])

    def _run_migration(self, position: int, sql: str) -> None:
        for statement in statements(sql):
            self._guard.denied = None
            try:
                self._db.execute(statement.text).fetchall()
            except (apsw.Error, ValueError) as e:
                line = line_of(sql, statement.offset + error_offset(e, statement.text))
                raise LambdaFailed(
                    f"migration {position} of {self._engine.target.name} failed",
                    where=f"{self._engine.target.name}, migration {position}, line {line}",
                    why=self._guard.denied or str(e),
                ) from None

    def _refuse_change(self, position: int, *, removed: bool) -> NoReturn:
        raise UserError(
            f"migration {position} {'was removed' if removed else 'changed'} since it was applied"
            " [E-MIGRATION]",
            where=self._engine.target.name,
            why="the database of each shard has run it already",
            fix="put its text back, and append a new migration",
        )

    def _prepare(self, found: _Lambda) -> Sequence[_Prepared]:
        source = compiled(found.source.read_schema.text).shape
        target = compiled(self._engine.target.write_schema.text).shape
        known = parameters(found.source.fields)
        prepared = []
        for statement in statements(found.code):
            used, columns = self._describe(found, statement)
            for name in used:
                if len(known.get(name, ())) != 1:
                    what = "ambiguous" if name in known else f"not a field of {found.source.name}"
                    self._refuse(found, statement, f"${name} is {what}")
            fields = [known[name][0] for name in used]
            prepared.append(
                _Prepared(
                    sql=statement.text,
                    line=line_of(found.code, statement.offset),
                    bind=row_binder(fields, source),
                    bind_each=each_binder(fields, source),
                    make=document_maker(columns, found.source.fields, target),
                )
            )
        return prepared

    def _describe(self, found: _Lambda, statement: Statement) -> Described:
        self._guard.denied = None
        try:
            return described(self._db, statement.text)
        except (apsw.Error, ValueError) as e:
            offset = statement.offset + error_offset(e, statement.text)
            at = Statement(offset=offset, text=statement.text)
            self._refuse(found, at, self._guard.denied or str(e))

    def _refuse(self, found: _Lambda, at: Statement, why: str) -> NoReturn:
        raise LambdaFailed(
            f"the lambda of transform {found.transform} cannot run",
            where=self._where(found, line_of(found.code, at.offset)),
            why=why,
        )

    def _blame(
        self, error: Exception, position: int, read: SourceRead, statement: _Prepared
    ) -> NoReturn:
        found = self._engine.lambdas[read.transform]
        if found is None:
            raise Bug("a disabled transform was given a document") from error
        if isinstance(error, OverflowError):
            try:
                statement.bind_each(read.document)
            except NotConvertible as which:
                error = which
        if isinstance(error, apsw.InterruptError):
            why = f"it ran for more than {self._engine.document_s_max:g} s on one document"
        elif isinstance(error, PenstockError):
            why = error.what
        elif isinstance(error, NotConvertible | apsw.Error):
            why = str(error)
        elif isinstance(error, UnicodeError):
            why = "a text is not valid UTF-8"
        else:
            why = str(error) or type(error).__name__
        failed = LambdaFailed(
            f"the lambda of transform {found.transform} failed on a document",
            where=self._where(found, statement.line),
            why=why,
        )
        failed.read = position
        raise failed from None

    def _where(self, found: _Lambda, line: int) -> str:
        return f"{self._engine.target.name}, transform {found.transform}, line {line} of its lambda"


class _Guard:
    """Refuses statements that reach outside the database, or outside the transaction."""

    def __init__(self, *, stateful: bool) -> None:
        self.denied: str | None = None
        self._stateful = stateful
        self._migrating = False

    def authorize(
        self, action: int, name: str | None, argument: str | None, _: str | None, __: str | None
    ) -> int:
        why = refusal(action, name, argument, migrating=self._migrating)
        if why is None and action in _WRITES and not self._migrating:
            if (name or "").startswith("sqlite_"):
                pass  # SQLite's own, which it writes as part of actions that it asks about
            elif not self._stateful:
                why = "a lambda without migrations keeps no state: it has no tables to write"
            elif name == _MIGRATIONS:
                why = f"{_MIGRATIONS} is the runtime's"
        self.denied = self.denied or why
        return apsw.SQLITE_DENY if why else apsw.SQLITE_OK

    @contextlib.contextmanager
    def migrating(self, db: apsw.Connection) -> Iterator[None]:
        self._migrating = True
        db.authorizer = self.authorize
        try:
            yield
        finally:
            db.authorizer = None
            self._migrating = False


class _Watch:
    """Interrupts a lambda that takes too long on one document, by the thread's CPU time.

    SQLite asks from time to time; so a document costs no more than setting `position`.
    """

    def __init__(self, seconds_max: float) -> None:
        self.position = -1
        self._seconds_max = seconds_max
        self._seen = -1
        self._since = 0.0

    def expired(self) -> bool:
        now = time.thread_time()
        if self.position != self._seen:
            self._seen, self._since = self.position, now
        return now - self._since > self._seconds_max
