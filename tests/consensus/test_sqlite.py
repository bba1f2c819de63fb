from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from consensus.backend_conformance import BackendConformance, expect_another_store
from consensus.conformance import COMMITTED, ConsensusConformance, Subject, V, new_key, refused
from consensus.direct import DirectConsensus
from penstock.consensus import sqlite
from penstock.consensus.backend import Backend
from penstock.consensus.coalesce import GroupCommitOptions
from penstock.consensus.sqlite import SqliteBackend
from penstock.consensus.store import SCAN_ALL, Consensus, ConsensusError, Determinate, ErrorKind
from penstock.errors import Unavailable, UserError


@pytest.mark.parametrize(
    "options",
    [GroupCommitOptions(), GroupCommitOptions(elements_max=0)],
    ids=["grouped", "one by one"],
)
class TestSqlite(ConsensusConformance):
    @pytest.fixture
    async def subject(self, tmp_path: Path, options: GroupCommitOptions) -> AsyncIterator[Subject]:
        async with AsyncExitStack() as opened:

            async def another() -> Consensus:
                store = DirectConsensus(await SqliteBackend.open(tmp_path / "c.db"), options)
                opened.push_async_callback(store.close)
                return store

            yield Subject(store=await another(), another=another, rounds=12)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[SqliteBackend]:
    backend = await SqliteBackend.open(tmp_path / "c.db")
    yield backend
    await backend.close()


class TestSqliteBackend(BackendConformance):
    @pytest.fixture
    async def backend(self, backend: SqliteBackend) -> Backend:
        return backend


# ------------------------------------------------------------------------------------- processes

WRITER = """
import asyncio, sys
from pathlib import Path
from penstock import failpoints
from penstock.consensus.sqlite import SqliteBackend
from penstock.consensus.store import CasResult, VersionedData

async def main(path, key, count, failpoint):
    backend = await SqliteBackend.open(Path(path))
    failpoints.arm(failpoint)
    done = 0
    while done < int(count):
        head = await backend.head(key)
        new = VersionedData(head.seqno + 1 if head else 0, b"x" * 100)
        commit = await backend.commit([((key, new),)])
        if commit.outcomes[0] is CasResult.COMMITTED:
            done += 1
            print(new.seqno, commit.revision, flush=True)
    await backend.close()

asyncio.run(main(*sys.argv[1:]))
"""


def writer(path: Path, key: str, count: int, failpoint: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), key, str(count), failpoint]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path, key, acknowledged = tmp_path / "c.db", "k", list[tuple[int, int]]()
    for life in range(3):
        with writer(path, key, 1_000_000) as process:
            assert process.stdout is not None
            for line in process.stdout:
                seqno, revision = map(int, line.split())
                acknowledged.append((seqno, revision))
                if len(acknowledged) >= 40 * (life + 1):
                    os.kill(process.pid, signal.SIGKILL)
                    break
    backend = await SqliteBackend.open(path)
    entries = (await backend.scan(key, 0, SCAN_ALL)).entries
    await backend.close()
    assert [e.seqno for e in entries] == list(range(len(entries)))
    stored = {(e.seqno, e.revision) for e in entries}
    assert set(acknowledged) <= stored
    revisions = [e.revision for e in entries]
    assert revisions == sorted(set(revisions))


@pytest.mark.parametrize(
    ("failpoint", "stored"),
    [
        pytest.param(sqlite.BEFORE_COMMIT, 2, id="dies before COMMIT: rolled back"),
        pytest.param(sqlite.AFTER_COMMIT, 3, id="dies before the answer: committed"),
    ],
)
async def test_a_crash_around_commit_is_all_or_nothing(
    tmp_path: Path, failpoint: str, stored: int
) -> None:
    with writer(tmp_path / "c.db", "k", 10, f"{failpoint}:3") as process:
        output, _ = process.communicate()
    assert process.returncode == 137
    assert len(output.splitlines()) == 2
    backend = await SqliteBackend.open(tmp_path / "c.db")
    assert len((await backend.scan("k", 0, SCAN_ALL)).entries) == stored
    assert await backend.revision() == stored
    await backend.close()


async def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    processes = [writer(path, "k", 40) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    won = sorted(tuple(map(int, line.split())) for out in outputs for line in out.splitlines())
    assert [seqno for seqno, _ in won] == list(range(120))
    assert [revision for _, revision in won] == list(range(1, 121))


async def test_many_openers_of_a_new_file_agree_on_one_store(tmp_path: Path) -> None:
    path = tmp_path / "new" / "c.db"
    backends = await asyncio.gather(*[SqliteBackend.open(path) for _ in range(8)])
    assert len({backend.incarnation for backend in backends}) == 1
    await asyncio.gather(*[backend.close() for backend in backends])
    other = await SqliteBackend.open(tmp_path / "other.db")
    again = await SqliteBackend.open(path)
    assert again.incarnation != other.incarnation
    await other.close()
    await again.close()


# ------------------------------------------------------------------------------------- durability


async def test_acknowledged_means_synced(backend: SqliteBackend) -> None:
    [(mode,), (synchronous,)] = [
        backend._writer.execute(f"PRAGMA {name}").fetchone()
        for name in ("journal_mode", "synchronous")
    ]
    assert (mode, synchronous) == ("wal", 2)


async def test_a_full_disk_is_determinate_and_passes(backend: SqliteBackend) -> None:
    key = new_key()
    assert (await backend.commit([((key, V(0, b"")),)])).outcomes == (COMMITTED,)
    (pages,) = backend._writer.execute("PRAGMA page_count").fetchone()
    backend._writer.execute(f"PRAGMA max_page_count = {pages}")
    error = await refused(backend.commit([((key, V(1, bytes(1 << 20))),)]), ErrorKind.UNAVAILABLE)
    assert "SQLITE_FULL" in error.message
    assert await backend.heads([key]) == {key: 0}
    backend._writer.execute("PRAGMA max_page_count = 1000000")
    assert (await backend.commit([((key, V(1, bytes(1 << 20))),)])).outcomes == (COMMITTED,)


async def test_a_lock_held_too_long_by_another_process_is_a_conflict(
    backend: SqliteBackend, tmp_path: Path
) -> None:
    backend._writer.execute("PRAGMA busy_timeout = 20")
    key = new_key()
    with closing(sqlite3.connect(tmp_path / "c.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await refused(backend.commit([((key, V(0, b"")),)]), ErrorKind.CONFLICT)
        other.execute("ROLLBACK")
    assert (await backend.commit([((key, V(0, b"")),)])).outcomes == (COMMITTED,)


async def test_a_file_that_was_removed_or_replaced_is_not_written_on(
    backend: SqliteBackend, tmp_path: Path
) -> None:
    key = new_key()
    (tmp_path / "c.db").rename(tmp_path / "moved.db")
    await refused(backend.commit([((key, V(0, b"")),)]), ErrorKind.STORE_RESET)
    await refused(backend.head(key), ErrorKind.STORE_RESET)
    (tmp_path / "c.db").touch()
    await refused(backend.truncate(key, 0), ErrorKind.STORE_RESET)


async def test_a_store_made_anew_in_the_same_file_is_not_touched(
    backend: SqliteBackend, tmp_path: Path
) -> None:
    """I7: the handle has not met the gap between the two stores."""
    with closing(sqlite3.connect(tmp_path / "c.db", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        for table in ("meta", "revision", "head", "floor", "log"):
            db.execute(f"DROP TABLE consensus_{table}")
        db.execute("COMMIT")
    new = await SqliteBackend.open(tmp_path / "c.db")
    await new.commit([(("k", V(n, b"new")),) for n in range(3)])
    await expect_another_store(backend)
    assert [e.seqno for e in (await new.scan("k", 0, 10)).entries] == [0, 1, 2]
    assert await new.list_page("", "") == ["k"]
    await new.close()


async def test_missing_tables_are_named(backend: SqliteBackend) -> None:
    backend._writer.execute("DROP TABLE consensus_head")
    error = await refused(backend.commit([((new_key(), V(0, b"")),)]), ErrorKind.UNDEFINED_TABLE)
    assert "consensus_head" in error.message


async def test_every_statement_goes_by_an_index(backend: SqliteBackend) -> None:
    statements = {
        name: text
        for name, text in vars(sqlite).items()
        if isinstance(text, str) and text.strip().startswith(("SELECT", "UPDATE", "DELETE"))
    }
    assert len(statements) >= 13
    for name, text in statements.items():
        values = ["" if "shard" in text.lower() else 0] * text.count("?")
        plan = backend._writer.execute(f"EXPLAIN QUERY PLAN {text}", values).fetchall()
        for *_, step in plan:
            assert not step.startswith("SCAN "), f"{name}: {step}"
            assert "TEMP B-TREE" not in step, f"{name}: {step}"


# -------------------------------------------------------------------------------------- bad input


async def test_a_64_mib_value_comes_back(backend: SqliteBackend) -> None:
    key, data = new_key(), os.urandom(64 << 20)
    assert (await backend.commit([((key, V(0, data)),)])).outcomes == (COMMITTED,)
    assert await backend.head(key) == V(0, data)


async def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is not a database" * 100)
    (tmp_path / "directory.db").mkdir()
    for name in ("text.db", "directory.db", "text.db/inside.db"):
        with pytest.raises(Unavailable) as caught:
            await SqliteBackend.open(tmp_path / name)
        assert name in str(caught.value)
        assert caught.value.why


async def test_a_newer_schema_is_left_alone(tmp_path: Path) -> None:
    await (await SqliteBackend.open(tmp_path / "c.db")).close()
    with closing(sqlite3.connect(tmp_path / "c.db")) as db, db:
        db.execute("UPDATE consensus_meta SET v = '99' WHERE k = 'schema_version'")
    with pytest.raises(UserError, match="schema version 99"):
        await SqliteBackend.open(tmp_path / "c.db")


def test_a_probe_creates_nothing(tmp_path: Path) -> None:
    assert "will be created" in SqliteBackend.probe(tmp_path / "no" / "c.db")
    assert list(tmp_path.iterdir()) == []
    asyncio.run(_open_and_close(tmp_path / "c.db"))
    assert "revision 0" in SqliteBackend.probe(tmp_path / "c.db")
    (tmp_path / "text.db").write_text("this is not a database" * 100)
    with pytest.raises(Unavailable, match=r"text\.db"):
        SqliteBackend.probe(tmp_path / "text.db")


async def _open_and_close(path: Path) -> None:
    await (await SqliteBackend.open(path)).close()


async def test_a_damaged_file_is_reported_at_once_and_not_retried(tmp_path: Path) -> None:
    """Whichever page is damaged: everything is as it was, or the error says what to do."""
    original, page = tmp_path / "c.db", 4096
    store = DirectConsensus(await SqliteBackend.open(original))
    keys = [f"k/{number}" for number in range(40)]
    for key in keys:
        assert await store.compare_and_set(key, V(0, b"x" * 300)) is COMMITTED
    await store.close()
    content = original.read_bytes()
    told: list[ConsensusError | Unavailable] = []
    for at in range(page, len(content), page):
        damaged = tmp_path / f"{at}.db"
        damaged.write_bytes(content[:at] + os.urandom(page) + content[at + page :])
        try:
            store = DirectConsensus(await SqliteBackend.open(damaged))
        except Unavailable as error:
            told.append(error)
            continue
        try:
            for key in keys:
                await store.head(key)
        except ConsensusError as error:
            told.append(error)
        await store.close()
    assert {type(error) for error in told} == {Unavailable, Determinate}
    assert all("docs/backup.md" in str(error) for error in told)
    assert all(error.kind.final for error in told if isinstance(error, ConsensusError))


async def test_a_file_that_another_process_holds_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 50)
    path = tmp_path / "c.db"
    await (await SqliteBackend.open(path)).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(Unavailable, match="another process holds it"):
            await SqliteBackend.open(path)
