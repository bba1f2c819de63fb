from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from consensus.backend_conformance import BackendConformance, expect_another_store
from consensus.conformance import (
    COMMITTED,
    MISMATCH,
    ConsensusConformance,
    Subject,
    V,
    increment,
    new_key,
    refused,
)
from consensus.direct import DirectConsensus
from consensus.pgproxy import PgProxy, Side
from fix_postgres import PostgresServer
from penstock.consensus import postgres
from penstock.consensus.backend import Backend, PoolOptions, Unit
from penstock.consensus.coalesce import GroupCommit, GroupCommitOptions
from penstock.consensus.postgres import PostgresBackend, check_server, classify
from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    Consensus,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
)
from penstock.errors import Unavailable, UsageError, UserError

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def shared_url(postgres: PostgresServer) -> str:
    """One database for the whole suite: its cases use keys of their own."""
    return postgres.create_database()


@pytest.mark.parametrize(
    "options",
    [GroupCommitOptions(), GroupCommitOptions(elements_max=0)],
    ids=["grouped", "one by one"],
)
class TestPostgres(ConsensusConformance):
    @pytest.fixture
    async def subject(self, shared_url: str, options: GroupCommitOptions) -> AsyncIterator[Subject]:
        async with AsyncExitStack() as opened:

            async def another() -> Consensus:
                store = DirectConsensus(await PostgresBackend.open(shared_url), options)
                opened.push_async_callback(store.close)
                return store

            yield Subject(store=await another(), another=another, rounds=6)


@pytest.fixture
async def backend(shared_url: str) -> AsyncIterator[PostgresBackend]:
    backend = await PostgresBackend.open(shared_url)
    yield backend
    await backend.close()


class TestPostgresBackend(BackendConformance):
    @pytest.fixture
    async def backend(self, backend: PostgresBackend) -> Backend:
        return backend


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement))


# --------------------------------------------------------------------------------- opening


async def test_many_openers_of_an_empty_database_agree_on_one_store(postgres_url: str) -> None:
    backends = await asyncio.gather(*[PostgresBackend.open(postgres_url) for _ in range(8)])
    assert len({backend.incarnation for backend in backends}) == 1
    await asyncio.gather(*[backend.close() for backend in backends])


async def test_a_store_that_is_made_anew_is_another_one(postgres_url: str) -> None:
    incarnations = []
    for _ in range(2):
        backend = await PostgresBackend.open(postgres_url)
        incarnations.append(backend.incarnation)
        execute(postgres_url, "DROP SCHEMA penstock CASCADE")
        await backend.close()
    assert incarnations[0] != incarnations[1]


async def test_a_role_without_rights_to_create_can_use_an_existing_store(
    postgres: PostgresServer, postgres_url: str
) -> None:
    await (await PostgresBackend.open(postgres_url)).close()
    role = f"r{os.urandom(4).hex()}"
    execute(postgres_url, f"CREATE ROLE {role} LOGIN PASSWORD 'pw'")
    execute(postgres_url, f"GRANT USAGE ON SCHEMA penstock TO {role}")
    execute(
        postgres_url,
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA penstock TO {role}",
    )
    url = postgres_url.replace("penstock:penstock@", f"{role}:pw@")
    backend = await PostgresBackend.open(url)
    assert (await backend.commit([(("k", V(0, b"")),)])).outcomes == (COMMITTED,)
    assert await backend.truncate("k", 0) == 0
    await backend.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(lambda u: u.replace(":penstock@", ":hunter2@"), "password", id="password"),
        pytest.param(lambda u: re.sub(r"@[^/]*/", "@127.0.0.1:1/", u), "refused", id="nobody"),
        pytest.param(lambda u: u.rsplit("/", 1)[0] + "/nope", "does not exist", id="database"),
        pytest.param(lambda u: re.sub("@[^/:]*:", "@no.invalid:", u), "no.invalid", id="host"),
    ],
)
async def test_a_database_that_cannot_be_reached_says_why_and_keeps_the_secret(
    postgres_url: str, change: object, why: str
) -> None:
    url = change(postgres_url)  # type: ignore[operator]
    with pytest.raises(Unavailable) as caught:
        await PostgresBackend.open(url)
    assert caught.value.why is not None
    assert why in caught.value.why
    assert "hunter2" not in str(caught.value)
    assert "<redacted>" in str(caught.value)
    with pytest.raises(Unavailable, match="cannot be used"):
        await PostgresBackend.probe(url)


async def test_a_url_that_libpq_cannot_read_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        await PostgresBackend.open("postgresql://u:hunter2@h/d?nonsense=1")
    assert "hunter2" not in str(caught.value)


async def test_a_probe_creates_nothing(postgres_url: str) -> None:
    assert (await PostgresBackend.probe(postgres_url)).startswith("PostgreSQL ")
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'penstock'")
        assert found.fetchone() is None


async def test_commits_that_are_not_durable_are_refused(postgres_url: str) -> None:
    name = urlsplit(postgres_url).path[1:]
    execute(postgres_url, f"ALTER DATABASE {name} SET synchronous_commit = off")
    with pytest.raises(UserError, match="before they are durable"):
        await PostgresBackend.open(postgres_url)


@pytest.mark.parametrize(
    ("version", "encoding", "what"),
    [
        pytest.param("CockroachDB CCL v25.1.0 (x86)", "UTF8", "not a PostgreSQL", id="cockroach"),
        pytest.param("PostgreSQL 11.2-YB-2.1 on x", "UTF8", "not a PostgreSQL", id="yugabyte"),
        pytest.param("PostgreSQL 16.1 on x", "SQL_ASCII", "SQL_ASCII", id="encoding"),
    ],
)
def test_servers_that_cannot_keep_the_promises_are_refused(
    version: str, encoding: str, what: str
) -> None:
    check_server("PostgreSQL 16.1 on x86_64", "UTF8", "on", "postgresql://h")
    with pytest.raises(UserError, match=what):
        check_server(version, encoding, "on", "postgresql://h")


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
async def test_any_isolation_default_is_fine(postgres_url: str, isolation: str) -> None:
    name = urlsplit(postgres_url).path[1:]
    for setting, value in [
        ("default_transaction_isolation", isolation),
        ("search_path", "nowhere"),
        ("default_transaction_read_only", "on"),
    ]:
        execute(postgres_url, f"ALTER DATABASE {name} SET {setting} = '{value}'")
    stores = [DirectConsensus(await PostgresBackend.open(postgres_url)) for _ in range(2)]
    done = await asyncio.gather(*[increment(stores[n % 2], "k", 5, f"w{n}") for n in range(6)])
    entries = await stores[0].scan("k", 0)
    assert sorted(entries, key=lambda e: e.seqno) == sorted(
        (new for news in done for new in news), key=lambda e: e.seqno
    )
    assert await stores[0].truncate("k", 20) == 20
    await asyncio.gather(*[store.close() for store in stores])


# ------------------------------------------------------------------------------ the contract of SQL


@pytest.fixture(scope="module")
def large_store(postgres: PostgresServer) -> str:
    """100,000 live entries: 200 keys with 500 each."""
    url = postgres.create_database()
    asyncio.run(_open_and_close(url))
    execute(
        url,
        """
        INSERT INTO penstock.consensus_head SELECT 'k' || k, 499 FROM generate_series(1, 200) k;
        INSERT INTO penstock.consensus_head SELECT 'x' || k, 0 FROM generate_series(1, 20000) k;
        INSERT INTO penstock.consensus_log SELECT 'k' || k, n, n * 200 + k, 'data'
        FROM generate_series(1, 200) k, generate_series(0, 499) n;
        INSERT INTO penstock.consensus_floor SELECT 'k' || k, 0, k FROM generate_series(1, 20000) k;
        UPDATE penstock.consensus_revision SET r = 200000;
        UPDATE penstock.consensus_meta SET v = 'known' WHERE k = 'incarnation';
        ANALYZE;
        """,
    )
    return url


async def _open_and_close(url: str) -> None:
    await (await PostgresBackend.open(url)).close()


Parameters = tuple[object, ...] | dict[str, object]
KEYS = [f"k{n}" for n in range(1, 65)]


@pytest.mark.parametrize("generic", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize(
    ("name", "parameters", "rows_max"),
    [
        ("HEAD", ("k7",), 1),
        ("HEADS", (KEYS,), 64),
        ("HEADS_UNDER", ("k7", "k8"), 200),
        ("LIST", ("k7", "k", "l", 10), 10),
        ("FLOOR", ("k7",), 1),
        ("SCAN", ("k7", 490, 10), 10),
        ("SCAN_PAGE", ("k7", 490, 10, 1_000), 10),
        ("SIZES_SINCE", (99_900, "k", "k", 100), 101),
        ("ENTRIES_SINCE", (99_900, 99_950, "k", "k"), 50),
        ("LOST_SINCE", (19_990, "k", "k"), 10),
        ("LOCK", (KEYS,), 64),
        ("CLAIM", (["new1", "k1"],), 2),
        ("UNCLAIM", (KEYS,), 64),
        ("APPEND", (KEYS, [500] * 64, KEYS, [500] * 64, [b"d"] * 64), 64),
        ("TRUNCATE", {"key": "k7", "seqno": 20, "incarnation": b"known"}, 20),
        ("INCARNATION", (), 1),
    ],
)
def test_the_cost_of_a_statement_does_not_grow_with_the_store(
    large_store: str, name: str, parameters: Parameters, rows_max: int, generic: str
) -> None:
    with psycopg.connect(large_store) as connection:
        connection.execute(f"SET plan_cache_mode = {generic}")
        statement = f"EXPLAIN (ANALYZE, FORMAT JSON) {vars(postgres)[name]}"
        row = connection.execute(statement, parameters, prepare=True).fetchone()
        assert row is not None
        connection.rollback()

    def nodes(plan: dict[str, object]) -> Iterator[dict[str, object]]:
        yield plan
        for child in plan.get("Plans", []):  # type: ignore[attr-defined]
            yield from nodes(child)

    for node in nodes(row[0][0]["Plan"]):
        relation = node.get("Relation Name", "")
        if node["Node Type"] == "Seq Scan":
            assert relation in ("consensus_meta", "consensus_revision")  # of one page, for ever
        touched = (
            float(node["Actual Rows"])  # type: ignore[arg-type]
            + float(node.get("Rows Removed by Filter", 0))  # type: ignore[arg-type]
        ) * int(node["Actual Loops"])  # type: ignore[call-overload]
        assert touched <= rows_max * 2, node


async def test_a_missing_table_is_named_with_its_code(postgres_url: str) -> None:
    backend = await PostgresBackend.open(postgres_url)
    execute(postgres_url, "DROP SCHEMA penstock CASCADE")
    for call in (
        backend.head("k"),
        backend.commit([(("k", V(0, b"")),)]),
        backend.truncate("k", 0),
        backend.entries_since("", 0),
    ):
        error = await refused(call, ErrorKind.UNDEFINED_TABLE)
        assert "42P01" in error.message
        assert "penstock.consensus" in error.message
    await backend.close()


async def test_a_store_made_anew_behind_the_back_of_a_handle_is_not_touched(
    postgres_url: str,
) -> None:
    """I7: the handle has not met the gap between the two stores."""
    old = await PostgresBackend.open(postgres_url)
    assert (await old.commit([(("k", V(0, b"old")),)])).revision == 1
    execute(postgres_url, "DROP SCHEMA penstock CASCADE")
    new = await PostgresBackend.open(postgres_url)
    await new.commit([((key, V(n, b"new")),) for key in ("k", "l") for n in range(3)])
    await expect_another_store(old)
    assert await old.pool.run(lambda c: c.execute(postgres.INCARNATION).fetchone())  # it is alive
    assert [e.seqno for e in (await new.scan("k", 0, SCAN_ALL)).entries] == [0, 1, 2]
    assert await new.list_page("", "") == ["k", "l"]
    assert await new.revision() == 1
    await old.close()
    await new.close()


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda b: b.commit([(("k", V(0, b"late")),)]), id="a first append"),
        pytest.param(lambda b: b.commit([(("known", V(1, b"late")),)]), id="an append"),
        pytest.param(lambda b: b.truncate("known", 0), id="truncation"),
        pytest.param(lambda b: b.head("known"), id="a read"),
        pytest.param(lambda b: b.entries_since("", 0), id="a read of several statements"),
    ],
)
async def test_what_waits_while_the_store_is_made_anew_does_not_happen_in_it(
    postgres_url: str, write: Callable[[PostgresBackend], Awaitable[object]]
) -> None:
    """One transaction drops the schema and creates it, and the other waits for its locks: when it
    gets them, the names it uses are those of the new store."""
    old = await PostgresBackend.open(postgres_url)
    await old.commit([(("known", V(0, b"")),)])
    await write(old)  # prepared statements, and plans of the old tables, exist
    with psycopg.connect(postgres_url) as admin:
        admin.execute("DROP SCHEMA penstock CASCADE")
        waiting = asyncio.create_task(write(old))  # type: ignore[arg-type]
        await lock_is_awaited(postgres_url)
        admin.execute(postgres.SCHEMA)
        admin.execute(postgres.SET_META, (b"0123456789abcdef", b"1"))
        admin.execute("INSERT INTO penstock.consensus_head VALUES ('known', 0)")
        admin.execute("INSERT INTO penstock.consensus_log VALUES ('known', 0, 1, 'new')")
    await refused(waiting, ErrorKind.STORE_RESET)
    await old.close()
    new = await PostgresBackend.open(postgres_url)
    assert await new.list_page("", "") == ["known"]
    assert await new.head("known") == V(0, b"new")
    await new.close()


async def lock_is_awaited(url: str) -> None:
    waiting = """SELECT count(*) FROM pg_stat_activity
                 WHERE wait_event_type = 'Lock' AND datname = current_database()"""
    async with (
        await psycopg.AsyncConnection.connect(url, autocommit=True) as connection,
        asyncio.timeout(30),
    ):
        while (await (await connection.execute(waiting)).fetchone()) == (0,):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_store_whose_tables_were_emptied_is_another_one(postgres_url: str) -> None:
    """As a harness may do between two scenarios, instead of dropping them."""
    old = await PostgresBackend.open(postgres_url)
    tables = ("meta", "revision", "head", "floor", "log")
    names = ", ".join(f"penstock.consensus_{table}" for table in tables)
    execute(postgres_url, f"TRUNCATE {names}")
    await expect_another_store(old)
    new = await PostgresBackend.open(postgres_url)
    assert new.incarnation != old.incarnation
    assert (await new.commit([(("k", V(0, b"")),)])).revision == 1
    await expect_another_store(old)
    await old.close()
    await new.close()


async def test_a_store_without_its_counter_commits_nothing(postgres_url: str) -> None:
    backend = await PostgresBackend.open(postgres_url)
    execute(postgres_url, "DELETE FROM penstock.consensus_revision")
    await refused(backend.commit([(("k", V(0, b"")),)]), ErrorKind.INTERNAL)
    assert await backend.heads(["k"]) == {}
    await backend.close()


@pytest.mark.parametrize(
    ("state", "cls", "kind"),
    [
        ("40001", Determinate, ErrorKind.CONFLICT),
        ("40P01", Determinate, ErrorKind.CONFLICT),
        ("40003", Indeterminate, ErrorKind.INTERNAL),
        ("42P01", Determinate, ErrorKind.UNDEFINED_TABLE),
        ("3F000", Determinate, ErrorKind.UNDEFINED_TABLE),
        ("42501", Determinate, ErrorKind.PERMISSION_DENIED),
        ("22001", Determinate, ErrorKind.INTERNAL),
        ("23505", Determinate, ErrorKind.INTERNAL),
        ("25006", Determinate, ErrorKind.UNAVAILABLE),
        ("53100", Determinate, ErrorKind.UNAVAILABLE),
        ("53300", Determinate, ErrorKind.OVERLOADED),
        ("57014", Determinate, ErrorKind.TIMEOUT),
        ("57P01", Indeterminate, ErrorKind.UNAVAILABLE),
        ("08006", Indeterminate, ErrorKind.UNAVAILABLE),
        ("XX000", Indeterminate, ErrorKind.INTERNAL),
        ("58030", Indeterminate, ErrorKind.INTERNAL),
    ],
)
def test_what_a_server_error_proves(
    shared_url: str, state: str, cls: type[ConsensusError], kind: ErrorKind
) -> None:
    body = f"BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END"
    with pytest.raises(psycopg.Error) as caught:
        execute(shared_url, f"DO $$ {body} $$")
    error = classify(caught.value)
    assert (type(error), error.kind) == (cls, kind)
    assert state in error.message


# ------------------------------------------------------------------------------------ crashes


def present(outcome: object, stored: bool) -> bool:
    """True if an outcome and the store do not contradict each other."""
    match outcome:
        case Indeterminate():
            return True
        case Determinate():
            return not stored
        case _:
            return stored == (outcome is COMMITTED)


@pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name.lower())
async def test_no_outcome_contradicts_the_store_wherever_the_connection_dies(
    shared_url: str, side: Side
) -> None:
    parts = urlsplit(shared_url)
    assert parts.hostname is not None
    assert parts.port is not None
    reader = await PostgresBackend.open(shared_url)
    seen: set[type] = set()
    async with PgProxy(parts.hostname, parts.port).running() as proxy:
        url = shared_url.replace(f":{parts.port}/", f":{proxy.listen_port}/")
        backend = await PostgresBackend.open(f"{url}?sslmode=disable&gssencmode=disable")
        cut_at = 0
        while True:
            cut_at += 1
            base = new_key("/")
            old = f"{base}old"
            assert (await reader.commit([((old, V(0, b"")),)])).outcomes == (COMMITTED,)
            units: list[Unit] = [
                ((f"{base}new", V(0, b"1")),),
                ((old, V(1, b"2")),),
                ((f"{base}a", V(0, b"3")), (f"{base}b", V(0, b"3"))),
                ((f"{base}never", V(0, b"4")), (old, V(7, b"4"))),
                ((old, V(9, b"5")),),
                ((old, V(2, b"6")),),
            ]
            proxy.arm(side, cut_at)
            try:
                outcomes = list((await backend.commit(units)).outcomes)
            except Determinate as error:
                outcomes = [error] * len(units)
            survived = proxy.counted[side] < cut_at
            proxy.arm(side, None)
            for unit, outcome in zip(units, outcomes, strict=True):
                for key, new in unit:
                    page = await reader.scan(key, new.seqno, 1)
                    stored = bool(page.entries) and page.entries[0] == new
                    assert present(outcome, stored), (cut_at, key, outcome, stored)
            # A loser judged against committed heads is told so, whatever became of COMMIT.
            assert outcomes[4] is MISMATCH or isinstance(outcomes[4], Determinate)
            assert f"{base}never" not in await reader.heads([f"{base}never"])
            seen |= {type(outcome) for outcome in outcomes}
            if survived:
                break
        await backend.close()
    await reader.close()
    assert cut_at > 10
    assert Indeterminate in seen


WRITER = """
import asyncio, sys
from penstock import failpoints
from penstock.consensus.postgres import PostgresBackend
from penstock.consensus.store import VersionedData

async def main(url, key, failpoint):
    backend = await PostgresBackend.open(url)
    failpoints.arm(failpoint)
    for n in range(10):
        await backend.commit([((key, VersionedData(n, b"")),)])
        print(n, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("failpoint", "stored"),
    [
        pytest.param(postgres.BEFORE_COMMIT, 2, id="dies before COMMIT: rolled back"),
        pytest.param(postgres.AFTER_COMMIT, 3, id="dies before the answer: committed"),
    ],
)
async def test_a_crash_around_commit_is_all_or_nothing(
    backend: PostgresBackend, shared_url: str, failpoint: str, stored: int
) -> None:
    key = new_key()
    command = [sys.executable, "-c", WRITER, shared_url, key, f"{failpoint}:3"]
    process = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    assert process.returncode == 137
    assert process.stdout.split() == [b"0", b"1"]
    # Whoever comes next is not kept waiting by the locks of the dead.
    assert (await backend.commit([((key, V(stored, b"")),)])).outcomes == (COMMITTED,)
    assert len((await backend.scan(key, 0, SCAN_ALL)).entries) == stored + 1


async def test_what_was_acknowledged_survives_kill_9_of_the_server(
    own_postgres: PostgresServer,
) -> None:
    backend = await PostgresBackend.open(own_postgres.url())
    group = GroupCommit(backend)
    acknowledged: dict[str, int] = {}
    revisions: list[int] = []
    progress = asyncio.Event()

    async def grown(total: int) -> None:
        while sum(acknowledged.values()) < total:
            progress.clear()
            await progress.wait()

    async def write(key: str, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                head = await backend.head(key)
                seqno = head.seqno + 1 if head else 0
                if await group.commit(((key, V(seqno, b"")),)) is COMMITTED:
                    acknowledged[key] = seqno
                    progress.set()
            except ConsensusError:
                await asyncio.sleep(0.05)

    for _ in range(2):
        stop = asyncio.Event()
        before = sum(acknowledged.values())
        writers = [asyncio.create_task(write(f"k{n}", stop)) for n in range(8)]
        await grown(before + 100)
        own_postgres.kill()
        await asyncio.sleep(0.1)
        await asyncio.to_thread(own_postgres.start)
        await grown(sum(acknowledged.values()) + 20)  # it goes on by itself
        stop.set()
        await asyncio.gather(*writers)
    for key, seqno in acknowledged.items():
        entries = (await backend.scan(key, 0, SCAN_ALL)).entries
        assert len(entries) > seqno
        assert [e.seqno for e in entries] == list(range(len(entries)))
        mine = [e.revision for e in entries]
        assert mine == sorted(set(mine))
        revisions += mine
    assert max(revisions) == await backend.revision()
    await group.close()
    await backend.close()


async def test_connections_that_died_idle_are_replaced_unnoticed(
    own_postgres: PostgresServer,
) -> None:
    backend = await PostgresBackend.open(own_postgres.url())
    await asyncio.gather(*[backend.head("k") for _ in range(20)])
    own_postgres.stop()
    error = await refused(backend.commit([(("k", V(0, b"")),)]), ErrorKind.UNAVAILABLE)
    assert "refused" in error.message
    own_postgres.start()
    await asyncio.gather(*[backend.head("k") for _ in range(20)])
    for call in (
        lambda: backend.commit([(("k", V(0, b"")),)]),
        lambda: backend.entries_since("", 0),
        lambda: backend.heads_under(""),
        lambda: backend.truncate("k", 0),
    ):
        own_postgres.stop()
        own_postgres.start()
        await call()
    assert await backend.heads(["k"]) == {"k": 0}
    await backend.close()


async def test_appends_and_truncations_do_not_deadlock(postgres_url: str) -> None:
    stores = [DirectConsensus(await PostgresBackend.open(postgres_url)) for _ in range(2)]
    keys = [f"k{n}" for n in range(3)]
    stop = asyncio.Event()

    async def truncate(store: DirectConsensus) -> None:
        while not stop.is_set():
            for key in keys:
                if head := await store.head(key):
                    await store.truncate(key, head.seqno)

    async def append() -> None:
        await asyncio.gather(
            *[increment(stores[n % 2], keys[n % 3], 15, f"w{n}") for n in range(6)]
        )
        stop.set()

    await asyncio.gather(append(), *[truncate(stores[n % 2]) for n in range(4)])
    await asyncio.gather(*[store.close() for store in stores])
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row == (0,)


async def test_a_deadlock_that_is_forced_is_a_conflict(shared_url: str) -> None:
    backend = await PostgresBackend.open(shared_url)
    base = new_key("/")
    await backend.commit([((f"{base}a", V(0, b"")), (f"{base}b", V(0, b"")))])
    lock = "SELECT 1 FROM penstock.consensus_head WHERE shard = %s FOR UPDATE"
    async with await psycopg.AsyncConnection.connect(shared_url) as other:
        await other.execute(lock, (f"{base}b",))
        unit = ((f"{base}a", V(1, b"")), (f"{base}b", V(1, b"")))
        commit = asyncio.create_task(backend.commit([unit]))
        await lock_is_awaited(shared_url)  # it waits for b, holding a
        await other.execute(lock, (f"{base}a",))
        error = await refused(_awaited(commit), ErrorKind.CONFLICT)
        assert "40P01" in error.message
        await other.rollback()
    assert (await backend.commit([unit])).outcomes == (COMMITTED,)
    await backend.close()


async def _awaited(task: asyncio.Task[object]) -> object:
    return await task


# ----------------------------------------------------------------------------------------- limits


async def test_the_number_of_connections_is_bounded(postgres_url: str) -> None:
    backend = await PostgresBackend.open(postgres_url)
    group = GroupCommit(backend)
    most = 0

    async def watch(stop: asyncio.Event) -> None:
        nonlocal most
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'penstock'"
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other:
            while not stop.is_set():
                row = await (
                    await other.execute(count + " AND datname = current_database()")
                ).fetchone()
                assert row is not None
                most = max(most, row[0])

    async def client(n: int) -> None:
        for seqno in range(5):
            assert await group.commit(((f"k{n}", V(seqno, b"")),)) is COMMITTED
            assert await backend.head(f"k{n}")

    stop = asyncio.Event()
    watching = asyncio.create_task(watch(stop))
    await asyncio.gather(*[client(n) for n in range(64)])
    stop.set()
    await watching
    assert 1 < most <= 8
    assert backend.pool.open_connections <= 8
    await backend.close()
    assert backend.pool.open_connections == 0


async def test_no_free_connection_in_time_is_overload(shared_url: str) -> None:
    options = PoolOptions(connections_max=1, wait_s=0.05)
    backend = await PostgresBackend.open(shared_url, options)
    release = threading.Event()
    holding = asyncio.create_task(backend.pool.run(lambda _: release.wait(30)))
    await asyncio.sleep(0)
    error = await refused(backend.head("k"), ErrorKind.OVERLOADED)
    assert "0.05 s" in error.message
    release.set()
    assert await holding
    assert await backend.head(new_key()) is None
    await backend.close()


async def test_readers_cannot_keep_commits_waiting(shared_url: str) -> None:
    """Beside 150 watches that caught up, one compare-and-set waited 3.25 s for a connection."""
    options = PoolOptions(connections_max=4, commit_connections=2, wait_s=20)
    backend = await PostgresBackend.open(shared_url, options)
    release = threading.Event()
    reading = [asyncio.create_task(backend.pool.run(lambda _: release.wait(30))) for _ in range(20)]
    await asyncio.sleep(0.05)
    key = new_key()
    for seqno in range(3):
        assert (await backend.commit([((key, V(seqno, b"")),)])).outcomes == (COMMITTED,)
    assert not any(task.done() for task in reading)
    release.set()
    assert all(await asyncio.gather(*reading))
    both = [backend.commit([((new_key(), V(0, b"")),)]) for _ in range(20)]
    assert len(await asyncio.gather(*both, *[backend.head(key) for _ in range(20)])) == 40
    await backend.close()


async def test_a_server_that_falls_silent_is_hung_up_on(shared_url: str) -> None:
    parts = urlsplit(shared_url)
    assert parts.hostname is not None
    assert parts.port is not None
    async with PgProxy(parts.hostname, parts.port).running() as proxy:
        url = shared_url.replace(f":{parts.port}/", f":{proxy.listen_port}/")
        options = PoolOptions(call_timeout_s=0.3, connections_max=2, connect_timeout_s=2)
        backend = await PostgresBackend.open(
            f"{url}?sslmode=disable&gssencmode=disable&connect_timeout=2", options
        )
        key = new_key()
        assert (await backend.commit([((key, V(0, b"")),)])).outcomes == (COMMITTED,)
        proxy.speaking.clear()
        started = time.monotonic()
        await refused(backend.commit([((key, V(1, b"")),)]), ErrorKind.UNAVAILABLE)
        assert time.monotonic() - started < 30
        proxy.speaking.set()
        assert (await backend.commit([((key, V(1, b"")),)])).outcomes == (COMMITTED,)
        await backend.close()


async def test_a_64_mib_value_comes_back(backend: PostgresBackend) -> None:
    key, data = new_key(), os.urandom(64 << 20)
    assert (await backend.commit([((key, V(0, data)),)])).outcomes == (COMMITTED,)
    assert await backend.head(key) == V(0, data)


async def test_a_connection_that_failed_is_not_used_again(postgres_url: str) -> None:
    """After an aborted pipeline the driver believes in statements that the server skipped."""
    backend = await PostgresBackend.open(postgres_url)
    try:
        await backend.commit([(("k", VersionedData(0, b"")),)])
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("ALTER TABLE penstock.consensus_log RENAME TO away")
            for _ in range(3):
                with pytest.raises(Determinate):
                    await backend.commit([(("k", VersionedData(1, b"")),)])
            other.execute("ALTER TABLE penstock.away RENAME TO consensus_log")
        outcomes = [await backend.commit([(("k", VersionedData(n, b"")),)]) for n in (1, 2, 3)]
        assert [o.outcomes for o in outcomes] == [(CasResult.COMMITTED,)] * 3
    finally:
        await backend.close()
