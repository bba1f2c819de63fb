"""The embedded store: one SQLite file, safe against kill -9 and against other processes.

One thread with one connection does every write, inside `BEGIN IMMEDIATE … COMMIT`; four read-only
connections serve reads, each from one snapshot. Several processes of one host may use the file at
once (`penstock append` beside `penstock up`): SQLite's write lock arbitrates every commit. It also
serialises them, so the revision counter, a row that is bumped inside the transaction, is in commit
order.

Write-ahead log with `synchronous=FULL`: with NORMAL, a power cut may take commits that were
acknowledged (I5).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.consensus.backend import (
    LIST_PAGE,
    PAGE_BYTES,
    PAGE_ENTRIES,
    SCHEMA_VERSION,
    CommitOutcome,
    LivePage,
    Position,
    RevisionPage,
    ScanPage,
    Traits,
    Unit,
    check_schema_version,
    judge,
    page_end,
    prefix_range,
    prove,
    settle,
    truncate_bound,
    unsettled,
)
from penstock.consensus.store import (
    SCAN_ALL,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
)
from penstock.errors import Unavailable, UserError
from penstock.failpoints import declare, hit
from penstock.garbage import gc_paused

T = TypeVar("T")

READERS = 4
BUSY_TIMEOUT_MS = 5_000
"""How long to wait for another process's transaction; they take milliseconds."""

BUSY_STEP_MS = 100
"""How long SQLite itself waits, uninterruptibly, before we check whether to go on."""

BEFORE_COMMIT = declare("sqlite-before-commit", "entries are written, COMMIT is not sent")
AFTER_COMMIT = declare("sqlite-after-commit", "entries are durable, no caller has been answered")

# A head row per key answers "is the expected entry the head?" with one look-up, outlives
# truncation (I4) and lists the keys. The floor row remembers what truncation took.
SCHEMA = """
CREATE TABLE IF NOT EXISTS consensus_meta (k TEXT PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS consensus_revision (
    id INTEGER PRIMARY KEY CHECK (id = 0), r INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS consensus_head (
    shard TEXT PRIMARY KEY, seqno INTEGER NOT NULL CHECK (seqno >= 0)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS consensus_floor (
    shard TEXT PRIMARY KEY, seqno INTEGER NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS consensus_floor_revision ON consensus_floor (revision, shard);
CREATE TABLE IF NOT EXISTS consensus_log (
    shard TEXT NOT NULL, seqno INTEGER NOT NULL CHECK (seqno >= 0), revision INTEGER NOT NULL,
    data BLOB NOT NULL, PRIMARY KEY (shard, seqno)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS consensus_log_revision ON consensus_log (revision, shard, seqno);
INSERT OR IGNORE INTO consensus_revision VALUES (0, 0);
"""

HEAD = """
SELECT l.seqno, l.data, l.revision FROM consensus_head h
JOIN consensus_log l ON l.shard = h.shard AND l.seqno = h.seqno WHERE h.shard = ?"""
HEAD_SEQNO = "SELECT seqno FROM consensus_head WHERE shard = ?"
HEADS_UNDER = "SELECT shard, seqno FROM consensus_head WHERE shard >= ? AND shard <= ?"
LIST = """
SELECT shard FROM consensus_head
WHERE shard > ? AND shard >= ? AND shard <= ? ORDER BY shard LIMIT ?"""
SCAN = """
SELECT seqno, data, revision FROM consensus_log
WHERE shard = ? AND seqno >= ? ORDER BY seqno LIMIT ?"""
FLOOR = "SELECT seqno FROM consensus_floor WHERE shard = ?"
REVISION = "SELECT r FROM consensus_revision WHERE id = 0"
INCARNATION = "SELECT v FROM consensus_meta WHERE k = 'incarnation'"
SIZES_SINCE = """
SELECT revision, length(data) FROM consensus_log INDEXED BY consensus_log_revision
WHERE revision > ? AND shard >= ? AND shard <= ? ORDER BY revision LIMIT ?"""
ENTRIES_SINCE = """
SELECT shard, seqno, data, revision FROM consensus_log INDEXED BY consensus_log_revision
WHERE revision > ? AND revision <= ? AND shard >= ? AND shard <= ?
ORDER BY revision, shard, seqno"""
LIVE = """
SELECT shard, seqno, data, revision FROM consensus_log
WHERE (shard, seqno) > (?, ?) AND shard <= ? ORDER BY shard, seqno LIMIT ?"""
LOST_SINCE = """
SELECT 1 FROM consensus_floor INDEXED BY consensus_floor_revision
WHERE revision > ? AND shard >= ? AND shard <= ? LIMIT 1"""

SET_HEAD = """
INSERT INTO consensus_head VALUES (?, ?) ON CONFLICT (shard) DO UPDATE SET seqno = excluded.seqno"""
BUMP = "UPDATE consensus_revision SET r = r + 1 WHERE id = 0 RETURNING r"
APPEND = "INSERT INTO consensus_log (shard, seqno, revision, data) VALUES (?, ?, ?, ?)"
LAST_BELOW = """
SELECT revision FROM consensus_log WHERE shard = ? AND seqno < ? ORDER BY seqno DESC LIMIT 1"""
TRUNCATE = "DELETE FROM consensus_log WHERE shard = ? AND seqno < ?"
SET_FLOOR = """
INSERT INTO consensus_floor VALUES (?, ?, ?)
ON CONFLICT (shard) DO UPDATE SET seqno = excluded.seqno, revision = excluded.revision"""

_NETWORK_FILESYSTEMS = frozenset(
    {
        "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "lustre",
        "nfs", "nfs4", "smb3", "smbfs",
    }
)  # fmt: skip


class SqliteBackend:
    """See the module; opened by `SqliteBackend.open`."""

    traits = Traits(name="sqlite", cache_heads=False, foreign_poll_s=0.05, commit_concurrency=1)

    def __init__(
        self,
        path: Path,
        incarnation: bytes,
        writer: sqlite3.Connection,
        readers: list[sqlite3.Connection],
    ) -> None:
        self.incarnation = incarnation
        self.url = f"sqlite:///{path}"
        self._path = path
        self._inode = path.stat().st_ino
        self._writer = writer
        self._readers: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for reader in readers:
            self._readers.put(reader)
        self._connections = [writer, *readers]
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-writer")
        self._read_threads = ThreadPoolExecutor(READERS, thread_name_prefix="sqlite-reader")
        self._closed = False
        """No new work is accepted, and waits for other processes end."""

    @classmethod
    async def open(cls, path: Path) -> SqliteBackend:
        """Open `path`, creating the file, its directory and its tables where missing."""
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(cls._open, path, given_up.is_set)
        except asyncio.CancelledError:
            given_up.set()
            raise

    @classmethod
    def _open(cls, path: Path, given_up: Callable[[], bool]) -> SqliteBackend:
        path = path.absolute()
        refuse_network_filesystem(path, _mounts())
        with contextlib.ExitStack() as opened:

            def connect(*, readonly: bool) -> sqlite3.Connection:
                made = _connect(path, readonly=readonly, given_up=given_up)
                return opened.enter_context(contextlib.closing(made))

            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                writer = connect(readonly=False)
                incarnation = _create_schema(writer, given_up)
                readers = [connect(readonly=True) for _ in range(READERS)]
                backend = cls(path, incarnation, writer, readers)
            except (sqlite3.Error, OSError) as error:
                raise _cannot_open(path, error) from error
            opened.pop_all()
            return backend

    @staticmethod
    def probe(path: Path) -> str:
        """Return a sentence about the store in `path`, which need not exist; see `open.probe`."""
        refuse_network_filesystem(path.absolute(), _mounts())
        if not path.exists():
            return f"{path} will be created"
        try:
            with contextlib.closing(_connect(path.absolute(), readonly=True)) as db:
                (revision,) = _one(db, REVISION)
        except sqlite3.Error as error:
            raise _cannot_open(path, error) from error
        return f"{path} is at revision {revision}"

    # ----------------------------------------------------------------------------------- reads

    async def revision(self) -> int:
        return await self._read(lambda db: int(_one(db, REVISION)[0]))

    async def list_page(self, prefix: str, after: str) -> list[str]:
        low, high = prefix_range(prefix)
        return await self._read(
            lambda db: [str(key) for (key,) in db.execute(LIST, (after, low, high, LIST_PAGE))]
        )

    async def head(self, key: str) -> VersionedData | None:
        def read(db: sqlite3.Connection) -> VersionedData | None:
            row = db.execute(HEAD, (key,)).fetchone()
            return row and VersionedData(*row)

        return await self._read(read)

    async def heads(self, keys: Sequence[str]) -> dict[str, int]:
        return await self._read(lambda db: _head_seqnos(db, keys))

    async def heads_under(self, prefix: str) -> tuple[int, dict[str, int]]:
        return await self._read(
            lambda db: (
                int(_one(db, REVISION)[0]),
                dict(db.execute(HEADS_UNDER, prefix_range(prefix))),
            )
        )

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int = SCAN_ALL
    ) -> ScanPage:
        def read(db: sqlite3.Connection) -> ScanPage:
            entries: list[VersionedData] = []
            size = 0
            for row in db.execute(SCAN, (key, from_, limit)):
                if size > bytes_max:
                    return ScanPage(entries=tuple(entries), more=True)
                entries.append(VersionedData(*row))
                size += len(entries[-1].data)
            return ScanPage(entries=tuple(entries), more=False)

        return await self._read(read)

    async def floor(self, key: str) -> int:
        def read(db: sqlite3.Connection) -> int:
            row = db.execute(FLOOR, (key,)).fetchone()
            return int(row[0]) if row else 0

        return await self._read(read)

    async def entries_since(self, prefix: str, revision: int) -> RevisionPage:
        low, high = prefix_range(prefix)

        def read(db: sqlite3.Connection) -> RevisionPage:
            current = max(revision, int(_one(db, REVISION)[0]))
            lost = db.execute(LOST_SINCE, (revision, low, high)).fetchone() is not None
            sizes = db.execute(SIZES_SINCE, (revision, low, high, PAGE_ENTRIES + 1)).fetchall()
            end = page_end(sizes)
            upto = current if end is None else end
            rows = db.execute(ENTRIES_SINCE, (revision, upto, low, high)) if sizes else ()
            return RevisionPage(
                entries=tuple((key, VersionedData(*entry)) for key, *entry in rows),
                upto=upto,
                more=end is not None,
                lost=lost,
            )

        return await self._read(read)

    async def live_page(self, prefix: str, after: Position) -> LivePage:
        low, high = prefix_range(prefix)

        @gc_paused()
        def read(db: sqlite3.Connection) -> LivePage:
            revision = int(_one(db, REVISION)[0])
            entries: list[tuple[str, VersionedData]] = []
            size = 0
            for key, *entry in db.execute(LIVE, (*max(after, (low, -1)), high, PAGE_ENTRIES + 1)):
                if size > PAGE_BYTES or len(entries) == PAGE_ENTRIES:
                    return LivePage(entries=tuple(entries), revision=revision, more=True)
                entries.append((key, VersionedData(*entry)))
                size += len(entries[-1][1].data)
            return LivePage(entries=tuple(entries), revision=revision, more=False)

        return await self._read(read)

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on a read-only connection, inside one snapshot."""

        def run() -> T:
            self._check_file()
            db = self._readers.get()
            try:
                db.execute("BEGIN")
                try:
                    self._prove(db)
                    return work(db)
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
            finally:
                self._readers.put(db)

        def classified() -> T:
            try:
                return _while_busy(run, self._is_closed)
            except sqlite3.Error as error:
                raise Determinate(kind_of(error), cause_chain(error)) from error

        return await self._in_thread(self._read_threads, classified)

    def _begin(self) -> None:
        """Begin to write."""
        _while_busy(lambda: self._writer.execute("BEGIN IMMEDIATE"), self._is_closed)

    def _is_closed(self) -> bool:
        return self._closed

    # ---------------------------------------------------------------------------------- writes

    async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
        return await self._in_thread(self._write_thread, lambda: self._commit(units))

    def _commit(self, units: Sequence[Unit]) -> CommitOutcome:
        db = self._writer
        self._check_file()
        with self._rolled_back_on_error():
            self._begin()
            self._prove(db)
            verdict = judge(_head_seqnos(db, {key for unit in units for key, _ in unit}), units)
            if not any(verdict.wins):
                db.execute("ROLLBACK")
                return settle(verdict, None)
            (revision,) = _one(db, BUMP)
            db.executemany(SET_HEAD, verdict.heads.items())
            rows = [(key, new.seqno, revision, new.data) for key, new in verdict.entries]
            db.executemany(APPEND, rows)
            hit(BEFORE_COMMIT)
        try:
            with self._rolled_back_on_error(determinate=_COMMIT_REFUSED):
                db.execute("COMMIT")
        except Indeterminate as error:
            return unsettled(verdict, error)
        hit(AFTER_COMMIT)
        return settle(verdict, revision)

    async def truncate(self, key: str, seqno: int) -> int | None:
        return await self._in_thread(self._write_thread, lambda: self._truncate(key, seqno))

    def _truncate(self, key: str, seqno: int) -> int:
        db = self._writer
        self._check_file()
        with self._rolled_back_on_error():
            self._begin()
            self._prove(db)
            head = db.execute(HEAD_SEQNO, (key,)).fetchone()
            last = db.execute(LAST_BELOW, (key, seqno)).fetchone()
            if head is None or seqno > head[0] or last is None:
                db.execute("ROLLBACK")
                if head is None or seqno > head[0]:
                    raise truncate_bound(key, seqno, head and head[0])
                return 0
            count = db.execute(TRUNCATE, (key, seqno)).rowcount
            db.execute(SET_FLOOR, (key, seqno, last[0]))
        with self._rolled_back_on_error(determinate=_COMMIT_REFUSED):
            db.execute("COMMIT")
        return count

    @contextlib.contextmanager
    def _rolled_back_on_error(self, determinate: frozenset[int] | None = None) -> Iterator[None]:
        """Roll back on any error; one of SQLite's is then determinate if listed (None: always)."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            known = determinate is None or _code(error) in determinate
            known = known and not self._writer.in_transaction
            cls = Determinate if known else Indeterminate
            raise cls(kind_of(error), cause_chain(error)) from error

    # ------------------------------------------------------------------------------ the shell

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._write_thread.shutdown()
        self._read_threads.shutdown()
        for connection in reversed(self._connections):  # the writer last: it checkpoints the log
            connection.close()

    async def _in_thread(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _check_file(self) -> None:
        """Refuse to go on with a file that other processes can no longer see.

        SQLite keeps working on a file that was deleted or replaced, and would acknowledge commits
        that are lost.
        """
        try:
            inode = self._path.stat().st_ino
        except OSError:
            inode = -1
        if inode != self._inode:
            what = f"{self._path} was removed or replaced while it was open"
            raise Determinate(ErrorKind.STORE_RESET, what)

    def _prove(self, db: sqlite3.Connection) -> None:
        """Check the incarnation inside a transaction: the tables may have been created anew."""
        row = db.execute(INCARNATION).fetchone()
        prove(self.incarnation, row and bytes(row[0]))


# ------------------------------------------------------------------------------------- connecting


def _cannot_open(path: Path, error: Exception) -> Unavailable:
    is_damaged = isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_CORRUPT
    return Unavailable(
        f"{path.name} is damaged" if is_damaged else "the consensus store cannot be opened",
        where=f"sqlite:///{path}",
        why=cause_chain(error),
        fix=_FIXES.get(_code(error)) if isinstance(error, sqlite3.Error) else None,
    )


_RESTORE = "restore it from a backup (see docs/backup.md)"
_BUSY = "another process holds it: wait for it, or find and stop it"
_FIXES = {
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_CORRUPT: _RESTORE,
    sqlite3.SQLITE_NOTADB: "this is not a SQLite database, or it is damaged: name another file, "
    "or restore it from a backup (see docs/backup.md)",
    sqlite3.SQLITE_FULL: "free some space on its disk",
    sqlite3.SQLITE_CANTOPEN: "name a file on a local disk that this user may write",
    sqlite3.SQLITE_READONLY: "let this user write to the file and its directory",
    sqlite3.SQLITE_IOERR: "check whether the disk is full or broken",
}


def _connect(
    path: Path, *, readonly: bool, given_up: Callable[[], bool] = lambda: False
) -> sqlite3.Connection:
    mode = "ro" if readonly else "rwc"
    db = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    db.execute(f"PRAGMA busy_timeout = {BUSY_STEP_MS}")
    db.execute("PRAGMA temp_store = MEMORY")
    if not readonly:
        _while_busy(lambda: db.execute("PRAGMA journal_mode = WAL"), given_up)
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA wal_autocheckpoint = 1000")
    return db


def _while_busy(work: Callable[[], T], given_up: Callable[[], bool]) -> T:
    """Return the result of `work`, which does nothing while another process is in the way.

    Tries again for `BUSY_TIMEOUT_MS`, unless the caller has given up.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or given_up() or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _create_schema(db: sqlite3.Connection, given_up: Callable[[], bool]) -> bytes:
    """Create what is missing, and return the incarnation.

    An error leaves the transaction to `close`, which rolls it back.
    """
    _while_busy(lambda: db.execute("BEGIN IMMEDIATE"), given_up)
    for statement in SCHEMA.split(";")[:-1]:
        db.execute(statement)
    meta = {"incarnation": secrets.token_bytes(16), "schema_version": b"%d" % SCHEMA_VERSION}
    db.executemany("INSERT OR IGNORE INTO consensus_meta VALUES (?, ?)", meta.items())
    (version,) = _one(db, "SELECT v FROM consensus_meta WHERE k = 'schema_version'")
    check_schema_version(int(version))
    (incarnation,) = db.execute(INCARNATION).fetchone()
    db.execute("COMMIT")
    return bytes(incarnation)


def _mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(errors="replace")
    except OSError:
        return ""


def refuse_network_filesystem(path: Path, mounts: str) -> None:
    """Refuse a network filesystem: SQLite's locks and shared memory do not work across hosts.

    `mounts` is the text of `/proc/self/mounts`; without it nothing is refused.
    """
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = point == "/" or path == Path(point) or Path(point) in path.parents
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    if kind in _NETWORK_FILESYSTEMS:
        raise UserError(
            f"a SQLite consensus store cannot be on a network filesystem ({kind})",
            where=os.fspath(path),
            why="its locks and its write-ahead log need one host",
            fix="use a local disk, or PostgreSQL: --consensus postgresql://…",
        )


# ------------------------------------------------------------------------------------ statements


def _one(db: sqlite3.Connection, statement: str) -> tuple[int, ...]:
    row: tuple[int, ...] = db.execute(statement).fetchone()
    return row


def _head_seqnos(db: sqlite3.Connection, keys: Iterable[str]) -> dict[str, int]:
    found = ((key, db.execute(HEAD_SEQNO, (key,)).fetchone()) for key in keys)
    return {key: row[0] for key, row in found if row is not None}


# ---------------------------------------------------------------------------------------- errors

_COMMIT_REFUSED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY})
"""A COMMIT that fails so has written no commit record; an IO error proves nothing."""

_KINDS = {
    sqlite3.SQLITE_BUSY: ErrorKind.CONFLICT,
    sqlite3.SQLITE_LOCKED: ErrorKind.CONFLICT,
    sqlite3.SQLITE_FULL: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_READONLY: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_CANTOPEN: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_IOERR: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_TOOBIG: ErrorKind.TOO_LARGE,
    sqlite3.SQLITE_CORRUPT: ErrorKind.DAMAGED,
    sqlite3.SQLITE_NOTADB: ErrorKind.DAMAGED,
}


def _code(error: sqlite3.Error) -> int:
    """Return the primary result code, which extended ones carry in their low byte."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) == sqlite3.SQLITE_BUSY


def kind_of(error: sqlite3.Error) -> ErrorKind:
    if "no such table" in str(error):
        return ErrorKind.UNDEFINED_TABLE
    return _KINDS.get(_code(error), ErrorKind.INTERNAL)
