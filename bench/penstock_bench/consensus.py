"""`penstock bench consensus`: many clients on one committer, beside one connection each.

On PostgreSQL, with fsync, all on one machine:

- 64 client processes with one outstanding compare-and-set each, and 8 with 64 each, through
  `penstock persistd`; compared with the same processes on a database connection of their own.
- The head of a key: from the committer's cache, through gRPC and in process, and by `SELECT`.

On SQLite, in process: 64 concurrent callers, and one at a time.

The direct peers use the leanest possible statement, one round trip and one transaction per append,
through a blocking driver without an event loop. There are two. The plain one orders nothing across
keys, which is less than the contract of a store requires. The one with revisions numbers its
commits from the store-wide counter, as every store must, and therefore serialises them: a price
that group commit pays once per batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

from penstock.consensus.open import open_consensus
from penstock.consensus.store import CasResult, Consensus, VersionedData
from penstock.testing.postgres import running_postgres
from penstock_bench.fleet import ClientPipe, Fleet, fleet, wait_until
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples
from penstock_bench.persistd_process import PersistdProcess, running_persistd

if TYPE_CHECKING:
    from typing import LiteralString

PAYLOAD: Final = b"x" * 300
"""About as large as the diff of a small transaction."""

_PRELOAD: Final = [
    "penstock_bench.consensus",
    "penstock.consensus.committer.client",
]


def run(bench: Bench) -> Report:
    """Measure everything in consensus that must be fast."""
    with running_postgres() as server, tempfile.TemporaryDirectory() as temp_dir:
        url = server.create_database()
        with running_persistd(url, Path(temp_dir) / "persistd.log") as daemon:
            _create_plain_tables(url)
            parts = [
                measure_clients(bench, url, daemon, processes=64, outstanding=1, goal=1.0),
                measure_clients(bench, url, daemon, processes=8, outstanding=64, goal=5.0),
                measure_heads(bench, url, daemon),
            ]
        parts.append(measure_sqlite(bench, f"sqlite:///{temp_dir}/consensus.db"))
    return Report.merge(parts)


# ------------------------------------------------------------------------------------- appends


def measure_clients(
    bench: Bench,
    url: str,
    daemon: PersistdProcess,
    *,
    processes: int,
    outstanding: int,
    goal: float,
) -> Report:
    """Measure the appends per second of all clients together."""
    seconds = bench.size(full=4, quick=1)
    what = f"{processes} processes x {outstanding} CAS"
    batches: list[float] = []

    def through_committer(clients: Fleet) -> float:
        before = _batches(daemon)
        rate = clients.run(seconds)
        after = _batches(daemon)
        batches.append((after[0] - before[0]) / max(1, after[1] - before[1]))
        return rate

    bench.say(f"starting 3 x {processes} clients")
    with (
        fleet(processes, _plain_client, url, outstanding, preload=_PRELOAD) as plain,
        fleet(processes, _ordered_client, url, outstanding, preload=_PRELOAD) as ordered,
        fleet(processes, _committer_client, daemon.url, outstanding, preload=_PRELOAD) as remote,
    ):
        taken = bench.interleave(
            what,
            {
                "committer": lambda: through_committer(remote),
                "plain": lambda: plain.run(seconds),
                "ordered": lambda: ordered.run(seconds),
            },
        )
    return Report(
        results=(
            _rate(what, "through persistd", taken, "committer"),
            _rate(what, "a direct connection each", taken, "plain"),
            _rate(what, "a direct connection each, with revisions", taken, "ordered"),
            Result(
                name=f"{what}: batch size reached", value=statistics.median(batches), unit="CAS"
            ),
        ),
        goals=(
            Goal(
                name=f"{what}: persistd / direct",
                measured=taken.ratio("committer", "plain"),
                goal=goal,
            ),
            Goal(
                name=f"{what}: persistd / direct, with revisions",
                measured=taken.ratio("committer", "ordered"),
                goal=goal,
            ),
        ),
        charts=(
            Chart(
                name=f"{processes}x{outstanding}",
                title=f"{processes} processes, {outstanding} outstanding compare-and-set each",
                unit="CAS/s",
                bars=(
                    (OURS, taken.median("committer")),
                    ("a direct connection each", taken.median("plain")),
                    ("the same, with revisions", taken.median("ordered")),
                ),
                note="All commit to PostgreSQL with fsync; revisions are what a store must number.",
            ),
        ),
    )


def _committer_client(pipe: ClientPipe, number: int, url: str, outstanding: int) -> None:
    with _reporting(pipe):
        asyncio.run(_append_async(pipe, number, url, outstanding))


async def _append_async(pipe: ClientPipe, number: int, url: str, outstanding: int) -> None:
    store = await open_consensus(url)
    heads = dict.fromkeys(_keys("bench", number, outstanding), -1)

    async def append(key: str) -> None:
        seqno = heads[key] + 1
        if await store.compare_and_set(key, VersionedData(seqno, PAYLOAD)) is not (
            CasResult.COMMITTED
        ):
            raise RuntimeError(f"{key}: {seqno} mismatched, and nobody else writes there")
        heads[key] = seqno

    async def append_until(key: str, deadline: float) -> int:
        done = 0
        while time.monotonic() < deadline:
            await append(key)
            done += 1
        return done

    await asyncio.gather(*(append(key) for key in heads))
    pipe.send(True)
    while True:
        start, seconds = await asyncio.to_thread(pipe.recv)
        await asyncio.sleep(start - time.monotonic())
        done = await asyncio.gather(*(append_until(key, start + seconds) for key in heads))
        pipe.send(sum(done))


def _plain_client(pipe: ClientPipe, number: int, url: str, outstanding: int) -> None:
    create = "INSERT INTO bench_head VALUES (%(key)s, 0)"
    append = """
        WITH moved AS (
            UPDATE bench_head SET seqno = %(seqno)s
            WHERE shard = %(key)s AND seqno = %(seqno)s - 1 RETURNING shard)
        INSERT INTO bench_log SELECT shard, %(seqno)s, %(data)s FROM moved"""
    _direct_client(pipe, number, url, outstanding, create, append)


def _ordered_client(pipe: ClientPipe, number: int, url: str, outstanding: int) -> None:
    create = "INSERT INTO penstock.consensus_head VALUES (%(key)s, 0)"
    append = """
        WITH moved AS (
            UPDATE penstock.consensus_head SET seqno = %(seqno)s
            WHERE shard = %(key)s AND seqno = %(seqno)s - 1 RETURNING shard),
        numbered AS (
            UPDATE penstock.consensus_revision SET r = r + 1
            WHERE EXISTS (SELECT FROM moved) RETURNING r)
        INSERT INTO penstock.consensus_log (shard, seqno, revision, data)
        SELECT shard, %(seqno)s, r, %(data)s FROM moved, numbered"""
    _direct_client(pipe, number, url, outstanding, create, append)


def _direct_client(
    pipe: ClientPipe,
    number: int,
    url: str,
    outstanding: int,
    create: LiteralString,
    append: LiteralString,
) -> None:
    """One connection runs one statement at a time, however many callers wait for it."""
    with _reporting(pipe), psycopg.connect(url, autocommit=True) as connection:
        heads = dict.fromkeys(_keys("direct", number, outstanding), 0)
        for key in heads:
            connection.execute(create, {"key": key})
        pipe.send(True)
        while True:
            start, seconds = pipe.recv()
            wait_until(start)
            done = 0
            while True:
                for key in heads:
                    heads[key] += 1
                    row = {"key": key, "seqno": heads[key], "data": PAYLOAD}
                    if connection.execute(append, row, prepare=True).rowcount != 1:
                        raise RuntimeError(f"{key}: mismatch")
                    done += 1
                    if time.monotonic() >= start + seconds:
                        break
                else:
                    continue
                break
            pipe.send(done)


@contextlib.contextmanager
def _reporting(pipe: ClientPipe) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        pass  # the benchmark is over, and no longer reads
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def _create_plain_tables(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            """
            CREATE TABLE bench_head (
                shard text COLLATE "C" PRIMARY KEY, seqno bigint NOT NULL) WITH (fillfactor = 70);
            CREATE TABLE bench_log (
                shard text COLLATE "C" NOT NULL, seqno bigint NOT NULL, data bytea NOT NULL,
                PRIMARY KEY (shard, seqno))"""
        )


def _batches(daemon: PersistdProcess) -> tuple[float, float]:
    """Return the number of appends committed so far, and of transactions."""
    with urllib.request.urlopen(f"{daemon.admin}/metrics") as page:  # noqa: S310 - our own
        text = page.read().decode()

    def figure(name: str) -> float:
        found = re.search(rf"^\S*coalesce_batch_size_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    return figure("sum"), figure("count")


# --------------------------------------------------------------------------------------- heads


def measure_heads(bench: Bench, url: str, daemon: PersistdProcess) -> Report:
    """Measure the median time to read a head that the committer has cached."""
    calls = bench.size(full=2_000, quick=500)
    key = "head"

    with asyncio.Runner() as loop, psycopg.connect(url, autocommit=True) as connection:
        remote = loop.run(open_consensus(daemon.url))
        local = loop.run(open_consensus(url))
        loop.run(remote.compare_and_set(key, VersionedData(0, PAYLOAD)))

        def select() -> float:
            statement = """
                SELECT l.seqno, l.data FROM penstock.consensus_head h
                JOIN penstock.consensus_log l USING (shard, seqno) WHERE h.shard = %s"""
            return _median_s(
                calls, lambda: connection.execute(statement, (key,), prepare=True).fetchone()
            )

        try:
            taken = bench.interleave(
                "cached head",
                {
                    "gRPC": lambda: loop.run(_median_async_s(calls, lambda: remote.head(key))),
                    "in process": lambda: loop.run(_median_async_s(calls, lambda: local.head(key))),
                    "SELECT": select,
                },
            )
        finally:
            loop.run(remote.close())
            loop.run(local.close())
    names = {"gRPC": "through gRPC", "in process": "in the process", "SELECT": "direct SELECT"}
    return Report(
        results=tuple(
            Result(name=f"cached head, p50, {name}", value=taken.median(peer) * 1e6, unit="µs")
            for peer, name in names.items()
        ),
        goals=(
            Goal(
                name="cached head: direct SELECT / through gRPC",
                measured=taken.ratio("SELECT", "gRPC"),
                goal=1 / 1.5,
            ),
            Goal(
                name="cached head: direct SELECT / in the process",
                measured=taken.ratio("SELECT", "in process"),
                goal=10,
            ),
        ),
    )


def _median_s(calls: int, call: Callable[[], object]) -> float:
    taken = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


async def _median_async_s(calls: int, call: Callable[[], Awaitable[object]]) -> float:
    taken = []
    for _ in range(calls):
        begin = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


# -------------------------------------------------------------------------------------- SQLite


def measure_sqlite(bench: Bench, url: str) -> Report:
    """Measure appends per second in one process, on a file of its own."""
    seconds = bench.size(full=3, quick=1)
    heads: dict[str, int] = {}

    async def append_until(store: Consensus, key: str, deadline: float) -> int:
        done = 0
        while time.monotonic() < deadline:
            seqno = heads.get(key, -1) + 1
            await store.compare_and_set(key, VersionedData(seqno, PAYLOAD))
            heads[key] = seqno
            done += 1
        return done

    async def append(store: Consensus, callers: int) -> float:
        deadline = time.monotonic() + seconds
        keys = _keys("bench", 0, callers)
        done = await asyncio.gather(*(append_until(store, key, deadline) for key in keys))
        return sum(done) / seconds

    with asyncio.Runner() as loop:
        store = loop.run(open_consensus(url))
        try:
            taken = bench.interleave(
                "SQLite",
                {
                    "64": lambda: loop.run(append(store, 64)),
                    "1": lambda: loop.run(append(store, 1)),
                },
            )
        finally:
            loop.run(store.close())
    return Report(
        results=(
            _rate("SQLite in the process", "64 concurrent callers", taken, "64"),
            _rate("SQLite in the process", "one at a time", taken, "1"),
        ),
        goals=(
            Goal(
                name="SQLite: 64 concurrent callers / one at a time",
                measured=taken.ratio("64", "1"),
                goal=5,
            ),
        ),
    )


def _rate(what: str, how: str, taken: Samples, peer: str) -> Result:
    return Result(name=f"{what}: {how}", value=taken.median(peer), unit="CAS/s")


def _keys(prefix: str, process: int, outstanding: int) -> list[str]:
    """Return one key per caller, different for each measurement."""
    return [f"{prefix}/{outstanding}/{process}/{task}" for task in range(outstanding)]
