"""Tasks that do not go on: `penstock status` names the cause, its object and a remedy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.catalog import desired
from penstock.cluster.runner import Runner
from penstock.cluster.state import Object
from penstock.cluster.wanted import AppliedCatalog
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas, layout
from penstock.model.clock import Producer
from penstock.native.arrow import to_arrow
from penstock.runtime import requests, spark_slots
from penstock.runtime.diagnosis import TaskState
from penstock.runtime.introspection import Introspection
from penstock.runtime.reports import reporting
from penstock.status import TaskStatus, statuses
from runtime.sessions import ACCOUNTS, Document, Place, accounts, now, task

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

    from penstock.consensus.store import Consensus

pytestmark = [pytest.mark.timeout(300)]

SOON_S = 60.0
"""Generous: on a machine that does nothing else, ten seconds are more than enough."""

SOURCE: Document = {"source": "acme/accounts", "resource": {"table": "accounts"}}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    def none(_: int) -> SparkSession:
        raise AssertionError("a job was to be run")

    return Place(tmp_path, none)  # type: ignore[arg-type]


@pytest.fixture
def spark_place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path, spark)


def views(place: Place, **others: object) -> dict[str, object]:
    return task("sqlite", {"path": place.database()}, [SOURCE], **others)


def derived(source: str, **transform: object) -> Document:
    given = {
        "name": "all",
        "source": source,
        "shuffle": "any",
        "lambda": "select $account, $region",
    }
    using: Document = {"sqlite": {}}
    return {**ACCOUNTS, "derive": {"using": using, "transforms": [{**given, **transform}]}}


def nobody_listens(port: int) -> Document:
    """A capture of a database that does not answer."""
    config = {"address": f"127.0.0.1:{port}", "database": "d", "user": "u"}
    return {
        "endpoint": {"connector": {"image": "penstock/source-postgres", "config": config}},
        "bindings": [{"resource": {"table": "t"}, "target": "acme/accounts"}],
    }


@contextlib.asynccontextmanager
async def following(place: Place, *names: str) -> AsyncIterator[Consensus]:
    """Within this, tasks run as `penstock up` runs them: all of them, or those named."""
    async with place.store() as store:
        world, catalog = place.world(store), AppliedCatalog(store)
        applied = asyncio.create_task(catalog.follow())
        await catalog.after(0)
        runners = [
            Runner(Object(kind=p.kind, name=p.name, digest=p.digest, dataflow_id=1), world, catalog)
            for p, _ in catalog.wanted.values()
            if not names or p.name in names
        ]
        async with reporting(store, world.introspection):
            for runner in runners:
                runner.start()
            try:
                yield store
            finally:
                for runner in runners:
                    runner.abort()
                async with asyncio.timeout(SOON_S):
                    await asyncio.gather(*(runner.ended() for runner in runners))
        applied.cancel()


async def status(store: Consensus, name: str) -> TaskStatus:
    (found,) = await statuses(store, await desired.load(store), name)
    return found


async def named(store: Consensus, name: str, state: TaskState, *texts: str) -> TaskStatus:
    """Wait until the status of a task has this state and says this, with a remedy."""
    deadline = time.monotonic() + SOON_S
    while True:
        found = await status(store, name)
        condition = found.condition
        if condition.state is state and all(text in condition.sentence for text in texts):
            assert condition.fix or state is TaskState.IDLE
            assert condition.waits_for or state in (TaskState.IDLE, TaskState.STOPPED)
            return found
        assert time.monotonic() < deadline, condition
        assert state is TaskState.FAILED or condition.state is not TaskState.FAILED, condition
        await asyncio.sleep(0.1)


def test_an_endpoint_that_somebody_has_locked(place: Place) -> None:
    config = {"path": place.database(), "busyTimeout": 600}
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": task("sqlite", config, [SOURCE])})

    async def run() -> None:
        with contextlib.closing(sqlite3.connect(place.database(), isolation_level=None)) as other:
            other.execute("PRAGMA journal_mode = WAL")
            other.execute("BEGIN IMMEDIATE")
            began = time.time()
            async with following(place) as store:
                writes = f"another process that writes to {place.database()}"
                found = await named(store, "acme/views", TaskState.WAITING, f"waits for {writes}")
                assert found.waits_for == writes
                assert found.condition.since == pytest.approx(began, abs=20)
                other.execute("ROLLBACK")
                await named(store, "acme/views", TaskState.IDLE, "has caught up")

    asyncio.run(run())


@pytest.mark.postgres
def test_a_table_that_somebody_has_locked(place: Place, postgres_url: str) -> None:
    given = conninfo_to_dict(postgres_url)
    config = {
        "address": f"{given['host']}:{given['port']}",
        "database": given["dbname"],
        "user": given["user"],
        "password": given["password"],
    }
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": task("postgres", config, [SOURCE])})

    async def run() -> None:
        async with following(place) as store:
            await named(store, "acme/views", TaskState.IDLE, "has caught up")
        with psycopg.connect(postgres_url) as other:
            other.execute("LOCK TABLE penstock_checkpoints")
            async with following(place) as store:
                await named(
                    store,
                    "acme/views",
                    TaskState.WAITING,
                    "waits for a lock on table penstock_checkpoints "
                    f"held by pid {other.info.backend_pid}",
                )
                other.rollback()

    asyncio.run(run())


async def opened_publisher(place: Place, store: Consensus, collection: str) -> Publisher:
    spec = (await desired.load(store)).collection(collection)
    assert spec is not None
    publisher = Publisher(
        Journals(store),
        open_blobs(place.settings.blob),
        Schemas(store),
        [Mapped(spec=spec)],
        producer=Producer.from_random(os.urandom(6)),
        now=now,
    )
    await publisher.publish(0, to_arrow(accounts(0, 5), layout(spec.write_schema.text)))
    await publisher.commit()  # its documents are stored, and its ACKs are not
    return publisher


def test_a_writer_with_an_open_transaction(place: Place) -> None:
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})

    async def run() -> None:
        async with following(place) as store:
            await named(store, "acme/views", TaskState.IDLE)
            publisher = await opened_publisher(place, store, "acme/accounts")
            found = await named(
                store,
                "acme/views",
                TaskState.WAITING,
                "5 documents of acme/accounts are in an open transaction of "
                f"producer {publisher.producer}",
            )
            assert found.condition.since == pytest.approx(time.time(), abs=60)
            assert found.lag_docs == 0, "they do not count before they are committed"

    asyncio.run(run())


def test_a_task_that_writes_is_named_by_its_name(place: Place) -> None:
    """By the producer that its process reports."""
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})

    async def run() -> None:
        async with following(place) as store:
            publisher = await opened_publisher(place, store, "acme/accounts")
            other = Introspection(time.time)
            other.task("capture", "acme/in").runs(str(publisher.producer))
            async with reporting(store, other):
                await named(
                    store, "acme/views", TaskState.WAITING, "in an open transaction of acme/in"
                )

    asyncio.run(run())


def test_an_upstream_task_that_is_disabled_stopped_or_not_run(place: Place) -> None:
    sums = derived("acme/accounts")
    tables = [{"source": "acme/sums", "resource": {"table": "accounts"}}]
    below = {"acme/views": task("sqlite", {"path": place.database()}, tables)}

    def applied(**derive: object) -> None:
        changed = {**sums, "derive": {**sums["derive"], **derive}}
        place.apply({"acme/accounts": ACCOUNTS, "acme/sums": changed}, below)

    async def run(*texts: str) -> TaskStatus:
        async with following(place, "acme/views") as store:
            return await named(store, "acme/views", TaskState.WAITING, *texts)

    async def stopped() -> None:
        async with place.store() as store:
            assert await requests.stop(store, "acme/sums", at=int(time.time()))

    said = "has caught up with acme/sums; acme/sums, which writes it, "
    applied()
    found = asyncio.run(run(said + "is not running"))
    assert "penstock run --task acme/sums" in str(found.condition.fix)
    asyncio.run(stopped())
    found = asyncio.run(run(said + "was stopped by penstock task stop"))
    assert "penstock task start acme/sums" in str(found.condition.fix)
    applied(shards={"disable": True})
    found = asyncio.run(run(said + "is disabled in the catalog"))
    assert "penstock apply" in str(found.condition.fix)
    assert found.waits_for == "acme/sums"


def test_an_upstream_task_that_fails(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        captures = {"acme/in": nobody_listens(port)}
        place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)}, captures)

        async def run() -> None:
            async with following(place) as store:
                found = await named(store, "acme/in", TaskState.RETRYING, "is retried")
                assert found.report is not None
                assert found.report.failure is not None
                assert "Connection refused" in str(found.report.failure.why)
                await named(
                    store, "acme/views", TaskState.WAITING, "acme/in, which writes it, failed"
                )

        asyncio.run(run())


def test_a_read_delay(place: Place) -> None:
    place.apply(
        {"acme/accounts": ACCOUNTS, "acme/late": derived("acme/accounts", readDelay="1h")}, {}
    )
    place.append({"acme/accounts": accounts(0, 4)})

    async def run() -> None:
        async with following(place) as store:
            found = await named(
                store,
                "acme/late",
                TaskState.WAITING,
                "holds 4 documents back by `readDelay`, until",
            )
            assert found.lag is not None
            assert found.lag.due == pytest.approx(time.time() + 3600, abs=120)
            assert found.lag_docs == 0

    asyncio.run(run())


def test_a_consensus_store_that_takes_no_writes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be read: its process is not heard of, and says itself that it waits for the store."""
    monkeypatch.setattr("penstock.consensus.sqlite.BUSY_TIMEOUT_MS", 600_000)
    monkeypatch.setattr("penstock.runtime.reports.SILENT_S", 6.0)
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})
    file = place.settings.data / "consensus.db"

    async def run() -> None:
        async with following(place) as store, place.store() as other_store:
            await named(store, "acme/views", TaskState.IDLE)
            with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                await named(
                    other_store, "acme/views", TaskState.WAITING, f"process {os.getpid()}", "report"
                )
                other.execute("ROLLBACK")
            await named(other_store, "acme/views", TaskState.IDLE)

    asyncio.run(run())


# --------------------------------------------------------------------------------------- with Spark


@pytest.mark.spark
def test_a_document_that_is_refused(spark_place: Place) -> None:
    """It fits the schema it was written under, and not the one it is read under."""
    place = spark_place
    schema: Mapping[str, Any] = ACCOUNTS["schema"]
    stricter = {
        **schema,
        "properties": {**schema["properties"], "count": {"type": "integer", "maximum": 0}},
    }
    both = {"key": ["/account"], "writeSchema": schema, "readSchema": stricter}
    place.apply({"acme/accounts": both}, {"acme/views": views(place)})
    place.append({"acme/accounts": accounts(0, 3)})

    async def run() -> None:
        async with following(place) as store:
            found = await named(store, "acme/views", TaskState.FAILED, "has failed", "count")
            assert found.lag_docs == 3
        async with place.store() as store:  # also when the process is gone
            await named(store, "acme/views", TaskState.FAILED, "has failed", "count")

    asyncio.run(run())


@pytest.mark.spark
def test_spark_without_free_slots(spark_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # As few documents as these need no slot.
    monkeypatch.setattr("penstock.native.direct.SmallFrame.evaluate", lambda _: None)
    place, spark = spark_place, spark_place.spark
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})
    place.append({"acme/accounts": accounts(0, 3)})
    slots = spark.sparkContext.defaultParallelism
    group = "somebody else"

    def occupy() -> None:
        spark.sparkContext.setJobGroup(group, group, interruptOnCancel=True)
        sleep = "java_method('java.lang.Thread', 'sleep', 120000L)"
        with contextlib.suppress(Exception):  # it is cancelled
            spark.range(0, slots, 1, slots).selectExpr(sleep).collect()

    async def run() -> None:
        tracker = spark.sparkContext.statusTracker()
        others = threading.Thread(target=occupy, daemon=True)
        others.start()
        try:
            async with asyncio.timeout(SOON_S):
                while tasks_running(tracker) < slots:  # noqa: ASYNC110 - of another thread
                    await asyncio.sleep(0.1)
            async with following(place) as store:
                found = await named(
                    store,
                    "acme/views",
                    TaskState.WAITING,
                    "waits for a free slot of Spark",
                    "others",
                )
                assert found.report is not None
                assert found.report.phase == "flush"
                spark.sparkContext.cancelJobGroup(group)
                await named(store, "acme/views", TaskState.IDLE, "has caught up")
        finally:
            spark.sparkContext.cancelJobGroup(group)
            others.join(SOON_S)

    asyncio.run(run())
    assert len(place.table("accounts")) == 3


def tasks_running(tracker: StatusTracker) -> int:
    found = map(tracker.getStageInfo, tracker.getActiveStageIds())
    return max((info.numActiveTasks for info in found if info is not None), default=0)


@pytest.mark.spark
def test_tasks_that_run_do_not_wait_for_a_slot(spark: SparkSession) -> None:
    context, group = spark.sparkContext, "one task too many"
    tasks = context.defaultParallelism + 1

    def occupy() -> None:
        context.setJobGroup(group, group, interruptOnCancel=True)
        sleep = "java_method('java.lang.Thread', 'sleep', 120000L)"
        with contextlib.suppress(Exception):  # it is cancelled
            spark.range(0, tasks, 1, tasks).selectExpr(sleep).collect()

    tracker = context.statusTracker()
    thread = threading.Thread(target=occupy, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + SOON_S
        while not tracker.getActiveStageIds() and time.monotonic() < until:
            time.sleep(0.01)
        while not tasks_running(tracker) and time.monotonic() < until:
            assert spark_slots.missing(context, group) is None  # nor while the first is launched
        assert spark_slots.missing(context, group) is None
    finally:
        context.cancelJobGroup(group)
        thread.join(SOON_S)
