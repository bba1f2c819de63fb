"""Changes of PostgreSQL: how fast they are captured, and how soon they are in another table.

Beside it, a bare psycopg loop receives the same changes over the same protocol, and does nothing
with them: no capture could be faster. Then rows are changed one transaction after the other, while
`penstock up` captures them and stores them in a table of the same server; a poller says
when each is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import select
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.batch import make_world, run_until, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors import builtin
from penstock.consensus.open import open_consensus
from penstock.errors import Bug
from penstock.journal.follower import current_revision
from penstock.model.json_order import Json
from penstock.model.spec import Endpoint, Frozen
from penstock.testing.postgres import PostgresServer, free_port
from penstock_bench import processes
from penstock_bench.events import postgres_endpoint, settings_in
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples

LOOP: Final = "bare psycopg loop"
IMAGE: Final = "penstock/source-postgres"
TABLE: Final = "orders"
COLLECTION: Final = "bench/orders"
ROWS_EACH: Final = 100
"""Rows that a transaction changes."""
GOAL: Final = 0.5
WAIT_S: Final = 120.0


@contextlib.contextmanager
def changing_postgres() -> Iterator[PostgresServer]:
    """A server whose log has changes of rows."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", ignore_cleanup_errors=True) as name:
        server = PostgresServer(Path(name), free_port())
        server.initialise()
        with (server.directory / "data" / "postgresql.conf").open("a") as conf:
            conf.write("\nwal_level = logical\n")
        server.start()
        try:
            yield server
        finally:
            server.kill()


def create_table(url: str) -> None:
    """Create the table, without rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            f"CREATE TABLE {TABLE} "
            "(id bigint PRIMARY KEY, customer bigint, total numeric(12, 2), note text)"
        )
        connection.execute(f"CREATE PUBLICATION bench FOR TABLE {TABLE}")


def insert(connection: psycopg.Connection[Any], first: int, count: int) -> None:
    """Insert rows, as one transaction."""
    connection.execute(
        "INSERT INTO orders SELECT n, n %% 1000, n / 100.0, 'order number ' || n "
        "FROM generate_series(%s::bigint, %s::bigint) AS n",
        (first, first + count - 1),
    )


def catalog(url: str, *, table: str | None) -> Json:
    """Return a catalog that captures the table, and perhaps stores it in another one."""
    parts = conninfo_to_dict(url)
    config: Json = {
        "address": f"{parts['host']}:{parts['port']}",
        "database": parts["dbname"],
        "user": parts["user"],
        "password": parts["password"],
        "publication": "bench",
    }
    endpoint: Json = {"connector": {"image": IMAGE, "config": config}}
    asked = Endpoint(kind="connector", image=IMAGE, config=Frozen(config))
    (found,) = builtin.capture(asked, "bench/changes").discover()
    binding: Json = {"resource": found.resource, "target": COLLECTION}
    made: dict[str, Json] = {
        "collections": {COLLECTION: {"key": list(found.key), "schema": found.schema}},
        "captures": {"bench/changes": {"endpoint": endpoint, "bindings": [binding]}},
    }
    if table is not None:
        stored: Json = {"source": COLLECTION, "resource": {"table": table}}
        made["materializations"] = {
            "bench/views": {"endpoint": postgres_endpoint(url), "bindings": [stored]}
        }
    return made


# ------------------------------------------------------------------------------------------- rate


def capture(data: Path) -> int:
    """Run the capture until it has caught up; return the documents that it captured."""

    async def run() -> int:
        settings = settings_in(data)
        store = await open_consensus(settings.consensus)
        try:
            loaded = await desired.load(store)
            world = dataclasses.replace(make_world(settings, store), spark=_no_spark)
            (spec,) = tasks_to_run(loaded)
            done = await run_until(loaded, spec, world, await current_revision(store))
        finally:
            await store.close()
        if done.error is not None:
            raise done.error
        return done.stored

    return asyncio.run(run())


def _no_spark(_: int) -> Any:  # noqa: ANN401 - it returns nothing
    raise Bug("transactions of this size need no Spark")


def apply(data: Path, given: Json) -> None:
    """Apply a catalog to a new deployment."""
    data.mkdir(parents=True)
    (data / "catalog.yaml").write_text(json.dumps(given))

    async def go() -> None:
        store = await open_consensus(settings_in(data).consensus)
        try:
            await desired.apply(store, load_catalog([data / "catalog.yaml"], environ=None))
        finally:
            await store.close()

    asyncio.run(go())


class Loop:
    """A replication slot, and a loop that receives what it has."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True, replication="database")
        self._pgconn = self._connection.pgconn
        self._run("CREATE_REPLICATION_SLOT bare TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT")

    def _run(self, command: str) -> None:
        self._pgconn.exec_(command.encode())

    def receive(self, rows: int) -> None:
        """Receive until so many rows were inserted."""
        self._run(
            "START_REPLICATION SLOT bare LOGICAL 0/0 (proto_version '1', publication_names 'bench')"
        )
        seen = 0
        while seen < rows:
            size, received = self._pgconn.get_copy_data(1)
            data = bytes(received)
            if size == 0:
                select.select([self._pgconn.socket], [], [], 1.0)
                self._pgconn.consume_input()
            elif data[:1] == b"w":
                seen += data[25:26] == b"I"
            elif data[17:18] == b"\x01":
                at = data[1:9]
                self._pgconn.put_copy_data(b"r" + at + at + at + struct.pack("!qB", 0, 0))
                self._pgconn.flush()

    def close(self) -> None:
        self._connection.close()


def measure_rate(bench: Bench, server: PostgresServer, rows: int) -> Samples:
    """Return documents per second of both."""

    def both() -> dict[str, float]:
        url = server.create_database()
        create_table(url)
        loop = Loop(url)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
            data = Path(temp_dir) / "data"
            apply(data, catalog(url, table=None))
            capture(data)  # begins: makes its slot
            with psycopg.connect(url, autocommit=True) as connection:
                for first in range(0, rows, ROWS_EACH):
                    insert(connection, first, ROWS_EACH)
            began = time.perf_counter()
            captured = capture(data)
            ours = time.perf_counter() - began
        if captured != rows:
            raise RuntimeError(f"{captured} documents were captured instead of {rows}")
        began = time.perf_counter()
        loop.receive(rows)
        bare = time.perf_counter() - began
        loop.close()
        return {OURS: rows / ours, LOOP: rows / bare}

    taken: dict[str, list[float]] = {OURS: [], LOOP: []}
    rounds = bench.size(full=3, quick=1)
    for number in range(rounds):
        bench.say(f"changes of {rows:,} rows: round {number + 1} of {rounds}")
        for who, figure in both().items():
            taken[who].append(figure)
    return Samples(taken)


# ---------------------------------------------------------------------------------------- latency


def measure_latency(bench: Bench, server: PostgresServer, seconds: float) -> list[float]:
    """Return how long each transaction took from its commit until it was in the other table."""
    url = server.create_database()
    create_table(url)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir,
        psycopg.connect(url, autocommit=True) as source,
        psycopg.connect(url, autocommit=True) as target,
    ):
        directory = Path(temp_dir)
        apply(directory / "data", catalog(url, table="copies"))
        command: list[str | Path] = [
            sys.executable, "-m", "penstock", "up", "--data", directory / "data",
        ]  # fmt: skip
        with processes.running_process(command, log=directory / "log"):
            insert(source, 0, 1)
            _until_there(target, 0, WAIT_S)
            bench.say(f"changes, one after the other, for {seconds:g} s")
            for warm in range(1, 20):
                insert(source, warm, 1)
                _until_there(target, warm, WAIT_S)
            took, row, end = [], 20, time.monotonic() + seconds
            while time.monotonic() < end:
                insert(source, row, 1)
                began = time.monotonic()
                _until_there(target, row, WAIT_S)
                took.append(time.monotonic() - began)
                row += 1
    return sorted(took)


def _until_there(target: psycopg.Connection[Any], row: int, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        with contextlib.suppress(psycopg.errors.UndefinedTable):
            if target.execute("SELECT 1 FROM copies WHERE id = %s", (row,)).fetchone():
                return
        time.sleep(0.005)
    raise RuntimeError(f"row {row} did not arrive within {wait_s:g} s")


def run(bench: Bench) -> Report:
    """Measure the rate, then latency."""
    with changing_postgres() as server:
        rates = measure_rate(bench, server, bench.size(full=500_000, quick=50_000))
        took = measure_latency(bench, server, bench.size(full=30, quick=10))
    return build_report(rates, took)


def build_report(rates: Samples, took: list[float]) -> Report:
    """Build the report."""
    figures: Mapping[str, float] = {who: rates.median(who) for who in rates.by_peer}
    results = [
        Result(name=f"changes of PostgreSQL: {who}", value=value, unit="documents/s")
        for who, value in figures.items()
    ]
    results += [
        Result(name="changes of PostgreSQL: p50 to the table", value=_at(took, 50), unit="ms"),
        Result(name="changes of PostgreSQL: p99 to the table", value=_at(took, 99), unit="ms"),
    ]
    goal = Goal(
        name=f"changes of PostgreSQL: documents/s of {OURS} / {LOOP}",
        measured=rates.ratio(OURS, LOOP),
        goal=GOAL,
    )
    chart = Chart(
        name="changes",
        title="Changes of PostgreSQL into a collection",
        unit="documents/s",
        bars=tuple(figures.items()),
        note=f"More is better. The {LOOP} does nothing with what it receives.",
    )
    return Report(results=tuple(results), goals=(goal,), charts=(chart,))


def _at(took: list[float], percent: int) -> float:
    return took[min(len(took) - 1, len(took) * percent // 100)] * 1000
