"""Concurrent client processes, real faults, and a verdict on the recorded history.

The default runs are short; `PENSTOCK_CHAOS_SECONDS` sets the length of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import psycopg
import pytest

from chaos import client as client_process
from chaos.client import Config, Evidence
from chaos.nemesis import (
    WITH_POSTGRES,
    WITH_SQLITE,
    Nemesis,
    World,
    kill_committer,
    kill_postgres,
    torment,
)
from chaos.proxy import Proxy
from chaos.workload import Client
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.store import VersionedData
from penstock.testing.postgres import PostgresServer
from penstock_bench.persistd_process import PersistdProcess
from support.history import Cas, Op, Outcome
from support.linearizability import check

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
LONG = SECONDS > 0
PROCESSES, TASKS = (8, 4) if LONG else (3, 4)
ENOUGH = 100 if LONG else 10
"""Appends and followed entries that a verdict needs to mean something, even on a busy machine."""
KEYS = [f"chaos/{n}" for n in range(8)]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + SECONDS * 5)]


class ClientProcess:
    """A running `client.py`."""

    def __init__(self, config: Config, process: asyncio.subprocess.Process) -> None:
        self.config, self.process = config, process

    async def expect(self, line: bytes) -> None:
        assert self.process.stdout is not None
        got = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert got.strip() == line, f"{self.config.name} printed {got!r}, not {line!r}"

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    async def evidence(self) -> Evidence:
        await asyncio.wait_for(self.process.wait(), 120)
        data = await asyncio.to_thread(Path(self.config.history).read_bytes)
        return msgspec.msgpack.decode(data, type=Evidence)


@contextlib.asynccontextmanager
async def clients(
    directory: Path, paths: Sequence[Proxy], *, seed: int
) -> AsyncIterator[list[ClientProcess]]:
    """Start the client processes, and wait until they are ready."""
    started: list[ClientProcess] = []
    try:
        for n in range(PROCESSES):
            config = Config(
                name=f"p{n}",
                committers={f"persistd{i}": f"grpc://{p.listen}" for i, p in enumerate(paths)},
                keys=KEYS,
                subscribed=KEYS[n % len(KEYS) :: 4],
                tasks=TASKS,
                seed=seed + n,
                think_s=0.02,
                history=str(directory / f"p{n}.history"),
            )
            file = directory / f"p{n}.json"
            file.write_bytes(msgspec.json.encode(config))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                client_process.__file__,
                file,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )
            started.append(ClientProcess(config, process))
        for client in started:
            await client.expect(b"ready")
        yield started
    finally:
        for each in started:
            if each.process.returncode is None:
                each.process.kill()
                await each.process.wait()


async def collect(running: list[ClientProcess]) -> list[Evidence]:
    for client in running:
        client.send(b"stop")
    for client in running:
        await client.expect(b"stopped")
    for client in running:
        client.send(b"drain")
    return [await client.evidence() for client in running]


async def read_everything(url: str) -> list[Op]:
    """Read the whole store when all clients have stopped."""
    ops: list[Op] = []
    store = RpcConsensus(url)
    reader = Client(
        name="last", stores=[("persistd0", store)], keys=KEYS, rng=random.Random(0),
        record=ops.append, patience_s=30,
    )  # fmt: skip
    for key in KEYS:
        await reader.scan(key, 0, None)
        await reader.read_head(key, fresh=True)
    await store.close()
    assert len(ops) == 2 * len(KEYS)
    return ops


def judge(evidence: Sequence[Evidence], last: Sequence[Op], summary: str) -> None:
    """Assert that there is no violation, and that enough happened for that to mean something."""
    ops = [op for each in evidence for op in each.ops]
    outcomes = Counter(op.outcome.value for op in ops if isinstance(op.call, Cas))
    print(f"{len(ops)} operations, appends {dict(outcomes)}; {summary}")  # noqa: T201
    assert outcomes[Outcome.OK.value] > ENOUGH, f"{outcomes} {summary}"
    streams = [stream for each in evidence for stream in each.streams]
    assert sum(len(stream.seen) for stream in streams) > ENOUGH, summary
    found = check([*ops, *last], streams)
    assert not found, f"{len(found)} violations, first: {found[0]}; {summary}"


@pytest.mark.postgres
@pytest.mark.parametrize(
    "nemeses",
    [
        pytest.param(WITH_POSTGRES, id="everything"),
        pytest.param(
            (kill_committer, kill_postgres),
            id="kill -9 only",
            marks=pytest.mark.skipif(not LONG, reason="the long run only: make chaos"),
        ),
    ],
)
async def test_two_committers_on_postgres_are_linearizable(
    own_postgres: PostgresServer, tmp_path: Path, seed: int, nemeses: tuple[Nemesis, ...]
) -> None:
    rng = random.Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(Proxy("127.0.0.1", own_postgres.port))
        through = own_postgres.create_database().replace(
            f"127.0.0.1:{own_postgres.port}", database.listen
        )
        daemons = [
            await stack.enter_async_context(daemon(through, tmp_path / f"persistd{n}.log"))
            for n in range(2)
        ]
        paths = [await stack.enter_async_context(Proxy(*address(each))) for each in daemons]
        running = await stack.enter_async_context(clients(tmp_path, paths, seed=seed))
        world = World(rng, tuple(daemons), tuple(paths), own_postgres, database)
        done = await torment(world, nemeses, SECONDS)
        evidence = await collect(running)
        last = await read_everything(daemons[0].url)
    judge(evidence, last, f"seed {seed}, after {done}")


async def test_one_committer_on_sqlite_is_linearizable(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        url = f"sqlite:///{tmp_path / 'consensus.db'}"
        only = await stack.enter_async_context(daemon(url, tmp_path / "persistd.log"))
        path = await stack.enter_async_context(Proxy(*address(only)))
        running = await stack.enter_async_context(clients(tmp_path, [path], seed=seed))
        done = await torment(World(rng, (only,), (path,)), WITH_SQLITE, SECONDS)
        evidence = await collect(running)
        last = await read_everything(only.url)
    judge(evidence, last, f"seed {seed}, after {done}")


@pytest.mark.postgres
async def test_clients_stop_when_the_schema_is_dropped(
    own_postgres: PostgresServer, tmp_path: Path, seed: int
) -> None:
    """The daemon recreates the schema for new clients; clients of the old store get an error."""
    url = own_postgres.create_database()
    async with contextlib.AsyncExitStack() as stack:
        only = await stack.enter_async_context(daemon(url, tmp_path / "persistd.log"))
        path = await stack.enter_async_context(Proxy(*address(only)))
        running = await stack.enter_async_context(clients(tmp_path, [path], seed=seed))
        await asyncio.sleep(1)
        await asyncio.to_thread(drop_schema, url)
        await asyncio.sleep(3)
        evidence = await collect(running)
        newcomer = RpcConsensus(only.url)
        assert await newcomer.head(KEYS[0], fresh=True) is None
        await newcomer.compare_and_set("new", VersionedData(0, b"life"))
        assert [key async for key in newcomer.list_keys()] == ["new"]
        await newcomer.close()
    assert all(each.reset for each in evidence)
    assert check([op for each in evidence for op in each.ops]) == []


def drop_schema(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            try:
                connection.execute("DROP SCHEMA penstock CASCADE")
            except psycopg.errors.DeadlockDetected:
                continue  # with the traffic, which continues
            return


@contextlib.asynccontextmanager
async def daemon(url: str, log: Path) -> AsyncIterator[PersistdProcess]:
    """Run a daemon off the event loop, which may carry the proxy to its database."""
    running = PersistdProcess(url, log)
    try:
        await asyncio.to_thread(running.start)
        yield running
    finally:
        running.kill()


def address(daemon: PersistdProcess) -> tuple[str, int]:
    host, _, port = daemon.listen.rpartition(":")
    return host, int(port)


@pytest.fixture
def seed() -> int:
    """The seed, which a failing assertion prints. `PENSTOCK_CHAOS_SEED` repeats a run, as far as
    runs of real processes can be repeated."""
    return int(os.environ.get("PENSTOCK_CHAOS_SEED", random.SystemRandom().randrange(2**31)))
