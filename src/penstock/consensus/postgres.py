"""The shared store: PostgreSQL, correct whatever the server's defaults are.

A commit is one explicit READ COMMITTED transaction in two round trips.

1. BEGIN; read the incarnation; claim the keys that some unit wants to create; lock the head rows of
   all keys. What the locks return stays true until the end of the transaction, so Python may judge
   (`judge`).
2. Move the heads, take the next revision and append the entries, in one statement; COMMIT, sent
   along. So the counter row, which every commit needs, is never locked while a client thinks.

**Revision order is commit order**: the counter's row lock is held from its increment until after
the commit is visible, so a snapshot that shows revision r shows every revision below it.

**No deadlock**: all transactions claim new keys in key order, then lock heads in key order, then
the counter. A claim waits only for other claims; a lock waits only for rows that others can see.
Truncation locks its floor row and then entries below the head, which no append touches.

**The store stays the same one**: a transaction that has read the incarnation holds a lock on its
table until its end (the end of the statement, for a read of one statement), and DROP waits for it.
So a table that is looked up later in the transaction belongs to the same schema.

**What is known after an error.** Before the second round trip nothing can have committed, whatever
happened to the connection. From then on, an ERROR (not FATAL) of a class that aborts proves that
the server rolled back; anything else leaves the outcome open.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from penstock.consensus.backend import (
    LIST_PAGE,
    PAGE_BYTES,
    PAGE_ENTRIES,
    SCHEMA_VERSION,
    CommitOutcome,
    LivePage,
    PoolOptions,
    Position,
    RevisionPage,
    ScanPage,
    Traits,
    Unit,
    Verdict,
    check_schema_version,
    judge,
    page_end,
    prefix_range,
    prove,
    settle,
    truncate_bound,
    unsettled,
)
from penstock.consensus.postgres_pool import Connection, ConnectionPool
from penstock.consensus.store import (
    SCAN_ALL,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
)
from penstock.errors import Unavailable, UsageError, UserError
from penstock.failpoints import declare, hit
from penstock.garbage import gc_paused
from penstock.servicekit.secrets import mask_url

T = TypeVar("T")

BEFORE_COMMIT = declare("postgres-before-commit", "keys are locked and judged, nothing is written")
AFTER_COMMIT = declare("postgres-after-commit", "entries are durable, no caller has been answered")

SCHEMA_LOCK = 0x70656E73746F636B
"""Advisory lock of the schema's creation: concurrent CREATE … IF NOT EXISTS fail otherwise."""

# One head row per key is what appends lock; it outlives truncation (I4). Its other columns are not
# indexed and its pages not full, so that moving a head stays within the page. Writers compress
# entries where it pays: EXTERNAL spares PostgreSQL the attempt.
SCHEMA = """
CREATE SCHEMA IF NOT EXISTS penstock;
CREATE TABLE IF NOT EXISTS penstock.consensus_meta (k text PRIMARY KEY, v bytea NOT NULL);
CREATE TABLE IF NOT EXISTS penstock.consensus_revision (
    id boolean PRIMARY KEY DEFAULT true CHECK (id), r bigint NOT NULL) WITH (fillfactor = 10);
CREATE TABLE IF NOT EXISTS penstock.consensus_head (
    shard text COLLATE "C" PRIMARY KEY, seqno bigint NOT NULL CHECK (seqno >= 0)
) WITH (fillfactor = 70);
CREATE TABLE IF NOT EXISTS penstock.consensus_floor (
    shard text COLLATE "C" PRIMARY KEY, seqno bigint NOT NULL, revision bigint NOT NULL);
CREATE INDEX IF NOT EXISTS consensus_floor_revision ON penstock.consensus_floor (revision, shard);
CREATE TABLE IF NOT EXISTS penstock.consensus_log (
    shard text COLLATE "C" NOT NULL, seqno bigint NOT NULL CHECK (seqno >= 0),
    revision bigint NOT NULL, data bytea NOT NULL, PRIMARY KEY (shard, seqno));
CREATE INDEX IF NOT EXISTS consensus_log_revision
    ON penstock.consensus_log (revision, shard, seqno);
ALTER TABLE penstock.consensus_log ALTER COLUMN data SET STORAGE EXTERNAL;
INSERT INTO penstock.consensus_revision (r) VALUES (0) ON CONFLICT DO NOTHING;
"""
META = "SELECT k, v FROM penstock.consensus_meta"
SET_META = """
INSERT INTO penstock.consensus_meta VALUES ('incarnation', %s::bytea), ('schema_version', %s::bytea)
ON CONFLICT DO NOTHING"""
SERVER = """
SELECT version(), current_setting('server_encoding'), current_setting('synchronous_commit')"""

INCARNATION = "SELECT v FROM penstock.consensus_meta WHERE k = 'incarnation'"


def _proven(statement: str) -> str:
    """Put the incarnation in front of the columns of `statement`, with a row even if it has none.

    One statement: a pipeline of two costs twice as much. The one row on the left leaves PostgreSQL
    a nested loop as the only plan, which keeps the order of the rows.
    """
    return f"""
SELECT m.v AS incarnation, found.* FROM penstock.consensus_meta m
LEFT JOIN LATERAL ({statement}) found ON true WHERE m.k = 'incarnation'"""  # noqa: S608 - ours


REVISION = _proven("SELECT r FROM penstock.consensus_revision WHERE id")
HEAD = _proven("""
SELECT l.seqno, l.data, l.revision FROM penstock.consensus_head h
JOIN penstock.consensus_log l ON l.shard = h.shard AND l.seqno = h.seqno
WHERE h.shard = %s::text""")
HEADS = _proven("SELECT shard, seqno FROM penstock.consensus_head WHERE shard = ANY(%s::text[])")
HEADS_UNDER = """
SELECT shard, seqno FROM penstock.consensus_head WHERE shard >= %s::text AND shard <= %s::text"""
LIST = _proven("""
SELECT shard FROM penstock.consensus_head
WHERE shard > %s::text AND shard >= %s::text AND shard <= %s::text
ORDER BY shard LIMIT %s::bigint""")
FLOOR = _proven("SELECT seqno FROM penstock.consensus_floor WHERE shard = %s::text")
SCAN = _proven("""
SELECT seqno, data, revision FROM penstock.consensus_log
WHERE shard = %s::text AND seqno >= %s::bigint ORDER BY seqno LIMIT %s::bigint""")
# Sizes are known without reading the entries: those above a few KB are stored out of line.
SCAN_PAGE = _proven("""
SELECT seqno, data, revision, available FROM (
    SELECT seqno, data, revision, count(*) OVER () AS available,
           sum(octet_length(data)) OVER (ORDER BY seqno) - octet_length(data) AS size_before
    FROM (SELECT * FROM penstock.consensus_log WHERE shard = %s::text AND seqno >= %s::bigint
          ORDER BY seqno LIMIT %s::bigint) rows
) page WHERE size_before <= %s::bigint ORDER BY seqno""")
LIVE = """
SELECT shard, seqno, data, revision, available FROM (
    SELECT shard, seqno, data, revision, count(*) OVER () AS available,
           sum(octet_length(data)) OVER (ORDER BY shard, seqno) - octet_length(data) AS size_before
    FROM (SELECT * FROM penstock.consensus_log
          WHERE (shard, seqno) > (%s::text, %s::bigint) AND shard <= %s::text
          ORDER BY shard, seqno LIMIT %s::bigint) rows
) page WHERE size_before <= %s::bigint ORDER BY shard, seqno LIMIT %s::bigint"""
# The prefix is compared in a way that no index serves: reading in revision order is the point.
SIZES_SINCE = """
SELECT revision, octet_length(data) FROM penstock.consensus_log
WHERE revision > %s::bigint AND left(shard, char_length(%s::text)) = %s::text
ORDER BY revision LIMIT %s::bigint"""
ENTRIES_SINCE = """
SELECT shard, seqno, data, revision FROM penstock.consensus_log
WHERE revision > %s::bigint AND revision <= %s::bigint
  AND left(shard, char_length(%s::text)) = %s::text
ORDER BY revision, shard, seqno"""
LOST_SINCE = """
SELECT EXISTS (SELECT FROM penstock.consensus_floor
               WHERE revision > %s::bigint AND left(shard, char_length(%s::text)) = %s::text)"""

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
CLAIM = """
INSERT INTO penstock.consensus_head (shard, seqno)
SELECT k, 0 FROM unnest(%s::text[]) k ORDER BY k COLLATE "C"
ON CONFLICT DO NOTHING RETURNING shard"""
LOCK = """
SELECT shard, seqno FROM penstock.consensus_head
WHERE shard = ANY(%s::text[]) ORDER BY shard FOR NO KEY UPDATE"""
UNCLAIM = "DELETE FROM penstock.consensus_head WHERE shard = ANY(%s::text[])"
# Without a counter row the revision is NULL, which the column refuses: then nothing commits.
APPEND = """
WITH moved AS (UPDATE penstock.consensus_head h SET seqno = m.n
               FROM unnest(%s::text[], %s::bigint[]) m(k, n) WHERE h.shard = m.k),
     bump AS (UPDATE penstock.consensus_revision SET r = r + 1 WHERE id RETURNING r),
     added AS (INSERT INTO penstock.consensus_log (shard, seqno, revision, data)
               SELECT u.k, u.n, (SELECT r FROM bump), u.d
               FROM unnest(%s::text[], %s::bigint[], %b::bytea[]) u(k, n, d))
SELECT r FROM bump"""
# Entries are contiguous, so the last one to go exists iff there is anything to delete. Its revision
# is the greatest of those that go. The floor row is written first: truncations of one key queue
# there instead of meeting in the middle of their deletes.
TRUNCATE = """
WITH store AS (SELECT v FROM penstock.consensus_meta WHERE k = 'incarnation'),
     head AS (SELECT seqno FROM penstock.consensus_head
              WHERE shard = %(key)s::text AND (SELECT v FROM store) = %(incarnation)s::bytea),
     raised AS (INSERT INTO penstock.consensus_floor AS f (shard, seqno, revision)
                SELECT l.shard, l.seqno + 1, l.revision FROM penstock.consensus_log l, head
                WHERE l.shard = %(key)s::text AND l.seqno = %(seqno)s::bigint - 1
                  AND head.seqno >= %(seqno)s::bigint
                ON CONFLICT (shard) DO UPDATE
                SET seqno = greatest(f.seqno, excluded.seqno),
                    revision = greatest(f.revision, excluded.revision)
                RETURNING 1),
     gone AS (DELETE FROM penstock.consensus_log
              WHERE shard = %(key)s::text AND seqno < %(seqno)s::bigint
                AND EXISTS (SELECT FROM raised) RETURNING 1)
SELECT (SELECT v FROM store), (SELECT seqno FROM head), (SELECT count(*) FROM gone)"""

SCAN_PAGE_ROWS = 4_096
"""Rows considered for one page limited in bytes: a bound on the rows of the window."""

_LOOKALIKES = ("cockroach", "-yb-", "redshift", "materialize", "greenplum")
"""Servers that speak the protocol, but differ in what READ COMMITTED and row locks mean."""


class PostgresBackend:
    """See the module; opened by `PostgresBackend.open`."""

    traits = Traits(name="postgresql", cache_heads=True, foreign_poll_s=1.0, commit_concurrency=2)

    def __init__(self, url: str, options: PoolOptions) -> None:
        check_url(url)
        self.url = mask_url(url)
        self.incarnation = b""
        self.pool = ConnectionPool(url, options)

    @classmethod
    async def open(cls, url: str, options: PoolOptions | None = None) -> PostgresBackend:
        """Connect, check that the server can keep the promises, create the schema if missing."""
        backend = cls(url, options or PoolOptions())
        try:
            await backend._prepare()
        except ConsensusError as error:
            await backend.close()
            raise _cannot_use(url, error) from error
        except BaseException:
            await backend.close()
            raise
        return backend

    async def _prepare(self) -> None:
        await self._check_server()
        meta = await self._run(_meta)
        check_schema_version(int(meta["schema_version"]))
        self.incarnation = meta["incarnation"]

    @classmethod
    async def probe(cls, url: str) -> str:
        """Return a sentence about the server, which is not changed; see `open.probe`."""
        backend = cls(url, PoolOptions())
        try:
            return f"{await backend._check_server()} at {backend.url}"
        except ConsensusError as error:
            raise _cannot_use(url, error) from error
        finally:
            await backend.close()

    async def _check_server(self) -> str:
        version, encoding, synchronous_commit = await self._idempotent(
            lambda connection: _one(connection.execute(SERVER))
        )
        check_server(version, encoding, synchronous_commit, self.url)
        return str(version).split(" on ")[0]

    # ----------------------------------------------------------------------------------- reads

    async def revision(self) -> int:
        return await self._idempotent(
            lambda connection: self._revision(connection.execute(REVISION, prepare=True))
        )

    async def list_page(self, prefix: str, after: str) -> list[str]:
        rows = await self._query(LIST, after, *prefix_range(prefix), LIST_PAGE)
        return [key for (key,) in rows]

    async def head(self, key: str) -> VersionedData | None:
        rows = await self._query(HEAD, key)
        return VersionedData(*rows[0]) if rows else None

    async def heads(self, keys: Sequence[str]) -> dict[str, int]:
        return dict(await self._query(HEADS, list(keys)))

    async def heads_under(self, prefix: str) -> tuple[int, dict[str, int]]:
        def read(connection: Connection) -> tuple[int, dict[str, int]]:
            with _snapshot(connection) as current:
                heads = connection.execute(HEADS_UNDER, prefix_range(prefix))
                return self._revision(current), dict(heads.fetchall())

        return await self._idempotent(read)

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int = SCAN_ALL
    ) -> ScanPage:
        if bytes_max == SCAN_ALL:
            rows = await self._query(SCAN, key, from_, limit)
            return ScanPage(entries=tuple(VersionedData(*row) for row in rows), more=False)
        considered = min(limit, SCAN_PAGE_ROWS)
        rows = await self._query(SCAN_PAGE, key, from_, considered, bytes_max)
        available = rows[0][3] if rows else 0
        return ScanPage(
            entries=tuple(VersionedData(*row[:3]) for row in rows),
            more=len(rows) < available or considered <= available < limit,
        )

    async def floor(self, key: str) -> int:
        rows = await self._query(FLOOR, key)
        return int(rows[0][0]) if rows else 0

    async def entries_since(self, prefix: str, revision: int) -> RevisionPage:
        since = (revision, prefix, prefix)

        def read(connection: Connection) -> RevisionPage:
            with _snapshot(connection) as current:
                losses = connection.execute(LOST_SINCE, since)
                rows = connection.execute(SIZES_SINCE, (*since, PAGE_ENTRIES + 1))
                upto, lost = max(revision, self._revision(current)), _one(losses)[0]
                end = page_end(sizes := rows.fetchall())
                upto = upto if end is None else end
                until = (revision, upto, prefix, prefix)
                found = connection.execute(ENTRIES_SINCE, until, binary=True) if sizes else None
                return RevisionPage(
                    entries=tuple((key, VersionedData(*entry)) for key, *entry in found or ()),
                    upto=upto,
                    more=end is not None,
                    lost=lost,
                )

        return await self._idempotent(read)

    async def live_page(self, prefix: str, after: Position) -> LivePage:
        low, high = prefix_range(prefix)
        behind = (*max(after, (low, -1)), high, PAGE_ENTRIES + 1, PAGE_BYTES, PAGE_ENTRIES)

        def read(connection: Connection) -> LivePage:
            with _snapshot(connection) as current:
                found = connection.execute(LIVE, behind, binary=True)
                with gc_paused():
                    rows = found.fetchall()
                    entries = tuple((key, VersionedData(*entry)) for key, *entry, _ in rows)
                return LivePage(
                    entries=entries,
                    revision=self._revision(current),
                    more=bool(rows) and len(rows) < rows[0][-1],
                )

        return await self._run(read)

    async def _query(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a `_proven` statement, without the incarnation."""

        def read(connection: Connection) -> list[tuple[Any, ...]]:
            rows = connection.execute(
                statement, parameters or None, prepare=True, binary=True
            ).fetchall()
            prove(self.incarnation, rows[0][0] if rows else None)
            return [] if rows[0][1] is None else [row[1:] for row in rows]

        return await self._idempotent(read)

    def _revision(self, cursor: psycopg.Cursor[TupleRow]) -> int:
        """Return the result of `REVISION`."""
        row = cursor.fetchone()
        prove(self.incarnation, row[0] if row else None)
        if row is None or row[1] is None:
            raise psycopg.DataError("the revision counter has no row")
        return int(row[1])

    async def _idempotent(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which may run twice: the first connection may have died while idle."""
        try:
            return await self._run(work)
        except Indeterminate:
            return await self._run(work)

    # ---------------------------------------------------------------------------------- writes

    async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
        def commit(connection: Connection) -> CommitOutcome:
            return _commit(connection, self.incarnation, units)

        try:
            return await self._run(commit, commits=True)
        except Indeterminate:
            pass  # lost before anything was written: the connection may have died while idle
        try:
            return await self._run(commit, commits=True)
        except Indeterminate as error:
            raise Determinate(error.kind, error.message) from error

    async def truncate(self, key: str, seqno: int) -> int | None:
        def truncate(connection: Connection) -> TupleRow:
            parameters = {"key": key, "seqno": seqno, "incarnation": self.incarnation}
            return _one(connection.execute(TRUNCATE, parameters, prepare=True))

        found, head, count = await self._idempotent(truncate)
        prove(self.incarnation, found)
        if head is None or seqno > head:
            raise truncate_bound(key, seqno, head)
        return int(count)

    async def close(self) -> None:
        await self.pool.close()

    async def _run(self, work: Callable[[Connection], T], *, commits: bool = False) -> T:
        """Run `work` on a connection, and classify its errors."""

        def classified(connection: Connection) -> T:
            try:
                return work(connection)
            except psycopg.Error as error:
                raise classify(error) from error
            finally:
                if connection.closed:
                    self.pool.forget_idle()

        return await self.pool.run(classified, commits=commits)


# ---------------------------------------------------------------------------------- transactions


def _commit(connection: Connection, incarnation: bytes, units: Sequence[Unit]) -> CommitOutcome:
    """Run one transaction. An error that is raised came before COMMIT was sent, or refused it."""
    found, heads, claimed = _lock(connection, units)
    prove(incarnation, found)
    verdict = judge(heads, units)
    if not any(verdict.wins):
        # Below psycopg, which forgets its prepared statements with every ROLLBACK it sees.
        connection.pgconn.exec_(b"ROLLBACK")
        return settle(verdict, None)
    hit(BEFORE_COMMIT)
    try:
        revision = _write(connection, verdict, claimed)
    except psycopg.Error as error:
        outcome = classify(error)
        if isinstance(outcome, Determinate):
            raise
        connection.close()  # whatever it is in the middle of
        return unsettled(verdict, outcome)
    hit(AFTER_COMMIT)
    return settle(verdict, revision)


def _lock(
    connection: Connection, units: Sequence[Unit]
) -> tuple[bytes | None, dict[str, int], set[str]]:
    """Return incarnation and heads, fixed until the transaction ends, and the keys it has claimed.

    A claimed key was created just now, at 0 and without an entry: it has no head yet.
    """
    keys = sorted({key for unit in units for key, _ in unit})
    created = sorted({key for unit in units for key, new in unit if new.seqno == 0})
    with connection.pipeline():
        connection.execute(BEGIN)
        found = connection.execute(INCARNATION, prepare=True)
        claims = connection.execute(CLAIM, (created,), prepare=True) if created else ()
        locks = connection.execute(LOCK, (keys,), prepare=True)
    claimed = {key for (key,) in claims}
    heads = {key: seqno for key, seqno in locks if key not in claimed}
    row = found.fetchone()
    return row[0] if row else None, heads, claimed


def _write(connection: Connection, verdict: Verdict, claimed: set[str]) -> int:
    """Write what was decided, commit, and return the revision."""
    moved = {k: n for k, n in verdict.heads.items() if not (n == 0 and k in claimed)}
    unused = [key for key in claimed if key not in verdict.heads]
    parameters = (
        list(moved),
        list(moved.values()),
        [key for key, _ in verdict.entries],
        [new.seqno for _, new in verdict.entries],
        [new.data for _, new in verdict.entries],
    )
    with connection.pipeline():
        if unused:
            connection.execute(UNCLAIM, (unused,), prepare=True)
        appended = connection.execute(APPEND, parameters, prepare=True)
        committed = connection.execute("COMMIT")
    if committed.statusmessage != "COMMIT":  # an aborted transaction answers ROLLBACK
        raise Determinate(ErrorKind.INTERNAL, f"COMMIT answered {committed.statusmessage}")
    return int(_one(appended)[0])


@contextmanager
def _snapshot(connection: Connection) -> Iterator[psycopg.Cursor[TupleRow]]:
    """Run statements on one snapshot, and yield the cursor of its `REVISION`."""
    with connection.pipeline():
        connection.execute(BEGIN_SNAPSHOT)
        yield connection.execute(REVISION)
        connection.execute("COMMIT")


def _meta(connection: Connection) -> dict[str, bytes]:
    """Return the store's metadata, after creating its tables if there are none."""
    try:  # usually they exist, and then no right to create anything is needed
        found: dict[str, bytes] = dict(connection.execute(META).fetchall())
        if found:
            return found
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        pass
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
        connection.execute(SCHEMA)
        connection.execute(SET_META, (secrets.token_bytes(16), b"%d" % SCHEMA_VERSION))
    return dict(connection.execute(META).fetchall())


def _one(cursor: psycopg.Cursor[TupleRow]) -> TupleRow:
    row = cursor.fetchone()
    if row is None:
        raise psycopg.DataError("a statement that always has a row had none")
    return row


# ---------------------------------------------------------------------------------------- errors

_ABORTED = ("22", "23", "25", "28", "3F", "40", "42", "53", "54", "55", "57014")
"""Classes of ERROR after which the transaction is certainly rolled back."""

_UNKNOWN = ("40003",)
"""Statement completion unknown: of class 40, but it proves nothing."""

_KINDS = {
    "40001": ErrorKind.CONFLICT,
    "40P01": ErrorKind.CONFLICT,
    "42P01": ErrorKind.UNDEFINED_TABLE,
    "3F000": ErrorKind.UNDEFINED_TABLE,
    "42501": ErrorKind.PERMISSION_DENIED,
    "53100": ErrorKind.UNAVAILABLE,
    "53200": ErrorKind.OVERLOADED,
    "53300": ErrorKind.OVERLOADED,
    "55P03": ErrorKind.CONFLICT,
    "57014": ErrorKind.TIMEOUT,
    "25006": ErrorKind.UNAVAILABLE,
    "XX001": ErrorKind.DAMAGED,
    "XX002": ErrorKind.DAMAGED,
}


def classify(error: psycopg.Error) -> ConsensusError:
    """Return what the error of a statement, perhaps its own transaction, proves."""
    state = error.sqlstate or ""
    said_error = error.diag.severity_nonlocalized == "ERROR"
    determinate = said_error and state.startswith(_ABORTED) and state not in _UNKNOWN
    connection_lost = not state or state.startswith(("08", "57P"))
    kind = ErrorKind.UNAVAILABLE if connection_lost else _KINDS.get(state, ErrorKind.INTERNAL)
    return (Determinate if determinate else Indeterminate)(kind, cause_chain(error))


def _cannot_use(url: str, error: ConsensusError) -> Unavailable:
    return Unavailable(
        "the consensus database cannot be used",
        where=mask_url(url),
        why=error.message,
        fix="check that the server runs, and the host, port, user, password and database",
    )


def check_url(url: str) -> None:
    """Refuse a URL that libpq cannot read, without repeating it: it may hold a password."""
    refused = UsageError(
        "the PostgreSQL URL cannot be read",
        where=mask_url(url),
        fix="write postgresql://user:password@host:5432/database; percent-encode special "
        "characters of the password (@ is %40, / is %2F)",
    )
    # libpq ends the password at the first @, and would show the rest of it as the name of a host.
    authority, _, path = url.partition("://")[2].partition("?")[0].partition("/")
    if authority.count("@") > 1 or "@" in path:
        raise refused
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise refused from None


def check_server(version: str, encoding: str, synchronous_commit: str, url: str) -> None:
    """Refuse a server that cannot keep the promises of the contract."""
    if not version.startswith("PostgreSQL") or any(n in version.lower() for n in _LOOKALIKES):
        raise UserError(
            f"this is not a PostgreSQL server: {version.split(' on ')[0]}",
            where=url,
            why="its transactions differ from PostgreSQL's, and consensus depends on them",
            fix="use PostgreSQL 13 or newer",
        )
    if encoding != "UTF8":
        raise UserError(
            f"the consensus database has the encoding {encoding}",
            where=url,
            why="keys are Unicode",
            fix="create it with: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0",
        )
    if synchronous_commit == "off":
        raise UserError(
            "the consensus database acknowledges commits before they are durable",
            where=url,
            why="synchronous_commit is off, so a crash may take what was acknowledged",
            fix="ALTER DATABASE … SET synchronous_commit = on (or ALTER ROLE, where it was set)",
        )
