"""A cluster with all its parts, each killed in turn, while documents flow and the catalog changes.

    files ─▶ capture ─▶ derivation ─▶ materialization ─▶ table
    PostgreSQL ◀─ persistd ◀─ cluster ◀─ controller       (each a process, each killed with -9)

In the end the tables hold what the files hold, once; and the cluster's log has the ids and the
state that the same changes of the catalog give when nothing is disturbed.

The default run is one round of everything; `PENSTOCK_CHAOS_SECONDS` sets a length.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

from chaos.process_tree import choose_seed
from cli.test_up import counting, rows, stored_totals, totals_of
from cluster.forms import Remote, first_words
from penstock.catalog import desired
from penstock.catalog.build import build_valid
from penstock.cluster.state import ClusterMachine, ClusterState, Put, log_key, reconcile
from penstock.cluster.unified import MAIN
from penstock.cluster.wanted import wanted
from penstock.connectors.builtin import BUILTIN
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import load
from penstock.consensus.store import Consensus
from penstock.model.domain import Domain, domain_of
from penstock.testing.postgres import PostgresServer, free_port
from penstock_bench.persistd_process import PersistdProcess, running_persistd
from support.commands import Command
from support.deployments import write_documents

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
LONG = SECONDS > 0

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.timeout(900 + 2 * SECONDS),
]

LATER_S = 180.0
"""Until all that was written has arrived; generous: Spark starts anew, and the machine is busy."""

EVERY_S = 0.25
"""Between two files."""


class Load:
    """Writes files with numbers from 0 on, all of them once, until it is stopped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.written = 0
        """All below it are in files."""

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            write_documents(self._directory, "events", range(self.written, self.written + 5))
            self.written += 5

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def catalogs() -> Iterator[dict[str, Any]]:
    """The catalog, and what it is changed to, on and on: one domain at a time."""
    base, two = counting(totals="acme/totals"), counting(totals="acme/totals", events="acme/events")
    more = json.loads(json.dumps(two))
    totals = more["collections"]["acme/totals"]
    totals["derive"]["transforms"][0]["name"] = "fromEvents"
    more["collections"]["acme/doubled"] = json.loads(json.dumps(totals))
    fewer = json.loads(json.dumps(more))
    del fewer["materializations"]["acme/to-events"]
    yield base
    yield from itertools.cycle((two, more, fewer, base))


class Stack:
    """All parts, as processes."""

    def __init__(
        self, directory: Path, form: str, postgres: PostgresServer, persistd: PersistdProcess
    ) -> None:
        self.directory = directory
        self.postgres = postgres
        self.persistd = persistd
        self._form = form
        self._consensus = ("--consensus", persistd.url)
        self._port, self._admin = free_port(), free_port()
        self.cluster = self._start_cluster()
        self.controller = self._start_controller()

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self._port}"

    @property
    def said(self) -> str:
        return f"cluster: {self.cluster.said}\ncontroller: {self.controller.said}"

    def _start_cluster(self) -> Command:
        form = "--unified-runtime" if self._form == "unified" else "--no-unified-runtime"
        at = ("--listen", f"127.0.0.1:{self._port}", "--admin-port", str(self._admin))
        return Command(self.directory, "cluster", form, *at, *self._consensus)

    def _start_controller(self) -> Command:
        return Command(self.directory, "controller", "--cluster", self.url, *self._consensus)

    def kill_cluster(self) -> None:
        self.cluster.process.kill()
        self.cluster.process.wait()
        self.cluster = self._start_cluster()

    async def kill_spark(self) -> None:
        """One JVM: its process ends, and is started again, by its parent if it has one."""
        await until(self._uses_spark, self)  # one that dies while it starts is replaced
        killed = _java_below(self.cluster.process.pid)[:1]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        if killed and self._form == "unified":
            code = await asyncio.to_thread(self.cluster.process.wait, LATER_S)
            assert code == 5, self.cluster.said
            assert "Spark's JVM has ended" in self.cluster.said
            self.cluster = self._start_cluster()

    def kill_controller(self) -> None:
        self.controller.process.kill()
        self.controller.process.wait()
        self.controller = self._start_controller()

    def kill_persistd(self) -> None:
        self.persistd.kill()
        self.persistd.start()

    def kill_postgres(self) -> None:
        self.postgres.kill()
        for _ in range(20):  # what its backends share is freed when the last of them is gone
            time.sleep(0.3)
            with contextlib.suppress(psycopg.OperationalError):
                self.postgres.start()
                return
        self.postgres.start()

    async def stop(self) -> None:
        """End what a person would end, and as they would, when it has started."""
        await until(self._is_controlled, self)
        for command in (self.controller, self.cluster):
            command.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(command.ended_within, 60) == 0, command.said

    def kill(self) -> None:
        for command in (self.controller, self.cluster):
            command.process.kill()
            command.process.wait()

    async def storm(self) -> None:
        """Sessions of both domains, one after the other; then the controller is back."""
        await until(self._is_controlled, self)
        remotes = [
            Remote(self.url, *first_words(domain, f"{n} {time.monotonic_ns() % 10**9}")[:1])
            for n in range(10)
            for domain in Domain
        ]
        for remote in remotes:
            await remote.heard()
        for remote in remotes:
            await remote.leaves()
        await asyncio.to_thread(self.controller.process.wait, LATER_S)
        assert "another controller speaks to this cluster now" in self.controller.said
        self.controller = self._start_controller()

    async def _uses_spark(self) -> bool:
        with contextlib.suppress(OSError):
            found = await asyncio.to_thread(self.rows, "tasks")
            return any(r["kind"] != "capture" and r.get("transactions") for r in found)
        return False

    async def _is_controlled(self) -> bool:
        """True if our controller has said everything."""
        serving = f"process {self.controller.process.pid} on "
        with contextlib.suppress(OSError):
            found = await asyncio.to_thread(self.rows, "sessions")
            held = [row for row in found if row["holder"].startswith(serving)]
            return [row["stage"] for row in held] == ["serving"] * len(Domain)
        return False

    def rows(self, relation: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self._admin}/introspection/v1/{relation}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["rows"]
            return found


@contextlib.asynccontextmanager
async def stores(persistd: PersistdProcess) -> AsyncIterator[Consensus]:
    store = await open_consensus(persistd.url)
    try:
        yield store
    finally:
        await store.close()


class Changes:
    """Changes the catalog, and knows what the log says of that when nobody disturbs it."""

    def __init__(self, directory: Path, store: Consensus) -> None:
        self._file = directory / "catalog.yaml"
        self._store = store
        self._catalogs = catalogs()
        self._expected: ClusterState | None = None
        self._wanted: dict[str, Put] = {}
        self.made = 0

    async def change(self) -> None:
        self._file.write_text(json.dumps(next(self._catalogs)))
        catalog = build_valid([self._file], environ=None, connectors=BUILTIN).catalog
        await desired.apply(self._store, catalog)
        self._wanted = {id_: put for id_, (put, _) in wanted(catalog).items()}
        self.made += 1

    async def is_known(self) -> bool:
        """True when the log has what the catalog wants; it has the ids that it must have."""
        state = (await load(self._store, log_key(MAIN), ClusterMachine())).state
        digests = {id_: put.digest for id_, put in self._wanted.items()}
        if {id_: each.digest for id_, each in state.objects.items()} != digests:
            return False
        if self._expected is None:  # which of both domains was first is nobody's business
            assert sorted(each.dataflow_id for each in state.objects.values()) == [1, 2, 3]
            self._expected = state
        for domain in Domain:
            batch = [put for put in self._wanted.values() if domain_of(put.kind) is domain]
            self._expected, _ = reconcile(self._expected, domain, batch)
        assert state.objects == self._expected.objects
        assert state.next_id == self._expected.next_id
        assert state.dropped == self._expected.dropped
        return True


@pytest.mark.parametrize(
    "form",
    [
        "unified",
        pytest.param(
            "split", marks=pytest.mark.skipif(not LONG, reason="only in long runs: make chaos")
        ),
    ],
)
async def test_t48_every_part_is_killed_and_everything_is_exact(
    tmp_path: Path, form: str, own_postgres: PostgresServer
) -> None:
    seed = choose_seed()
    chance = random.Random(seed)
    consensus = own_postgres.create_database()
    counts = dict[str, int]()
    with running_persistd(consensus, tmp_path / "persistd.log") as persistd:
        async with stores(persistd) as store:
            changes = Changes(tmp_path, store)
            (tmp_path / "data" / "events").mkdir(parents=True)
            await changes.change()
            stack = Stack(tmp_path, form, own_postgres, persistd)

            def disturbances() -> list[Callable[[], object]]:
                some: list[Callable[[], object]] = [
                    stack.kill_controller, stack.kill_persistd, stack.kill_postgres,
                    stack.storm, stack.kill_cluster, *([stack.kill_spark] if LONG else []),
                ]  # fmt: skip
                chance.shuffle(some)
                return some

            try:
                with Load(tmp_path) as load_:
                    await until(changes.is_known, stack)
                    deadline = time.monotonic() + SECONDS
                    while True:
                        for disturb in disturbances():
                            await changes.change()
                            await asyncio.sleep(chance.uniform(0, 0.5))
                            await done(disturb)
                            counts[disturb.__name__] = counts.get(disturb.__name__, 0) + 1
                            await until(changes.is_known, stack)
                            if LONG:
                                await until(arrived(tmp_path, load_.written), stack)
                        if time.monotonic() >= deadline:
                            break
                    load_.stop()
                    count = load_.written
                    while "acme/to-events" not in (tmp_path / "catalog.yaml").read_text():
                        await changes.change()
                        await until(changes.is_known, stack)
                await until(arrived(tmp_path, count), stack)
                events = tmp_path / "events.db"

                async def all_events() -> bool:
                    return events.exists() and len(rows(tmp_path, "events")) >= count

                await until(all_events, stack)
                assert stored_totals(tmp_path) == totals_of(range(count))
                assert [each[0] for each in rows(tmp_path, "events")] == list(range(count))
                jobs = stack.rows("jobs")
                assert all(row["dataflow_id"] for row in jobs)  # T42: none is nobody's
                known = {row["dataflow_id"] for row in stack.rows("dataflows")}
                assert len(known) in (4, 5)  # with one derivation, or with both
                await stack.stop()
            except BaseException:
                print(f"seed {seed}: {counts}\n{stack.said[-8000:]}")  # noqa: T201
                raise
            finally:
                stack.kill()
    print(f"seed {seed}: {count} documents, {changes.made} catalogs, {counts}")  # noqa: T201


def _java_below(pid: int) -> list[int]:
    """The JVMs that a process, or one that it has started, has started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name, _, rest = (entry / "stat").read_text().rpartition(")")
            parents[int(entry.name)] = (int(rest.split()[1]), name.endswith("(java"))
    found = []
    for each, (_, is_java) in parents.items():
        above = each
        while above in parents and above != pid:
            above = parents[above][0]
        if above == pid and is_java:
            found.append(each)
    return sorted(found)


def arrived(directory: Path, count: int) -> Callable[[], Awaitable[bool]]:
    async def have() -> bool:
        return sum(each for each, _ in stored_totals(directory).values()) >= count

    return have


async def done(disturb: Callable[[], object]) -> None:
    if asyncio.iscoroutinefunction(disturb):
        await disturb()
    else:
        await asyncio.to_thread(disturb)


async def until(is_so: Callable[[], Awaitable[bool]], stack: Stack) -> None:
    deadline = time.monotonic() + LATER_S
    while not await is_so():
        for command in (stack.cluster, stack.controller):
            assert command.process.poll() is None, command.said[-4000:]
        assert time.monotonic() < deadline, "it takes too long"
        await asyncio.sleep(0.05)
