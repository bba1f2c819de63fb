"""Tasks that are stopped, and runs that end: whatever the task waits for, whoever writes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.batch import TaskRun
from penstock.connectors.sqlite.sink import Sqlite
from penstock.model.json_order import Json
from penstock.runtime.connector.common import Applied, ConnectorError
from penstock.runtime.connector.materialize import SinkTask
from penstock.runtime.control import Control
from penstock.runtime.materialize import jobs
from penstock.runtime.session import World
from runtime.sessions import ACCOUNTS, Document, Place, accounts, lead, reduced, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.consensus.store import Consensus

pytestmark = [pytest.mark.timeout(300)]

SOON_S = 20.0
SOURCE: Document = {"source": "acme/accounts", "resource": {"table": "accounts"}}


def views(place: Place, **others: object) -> dict[str, object]:
    return task("sqlite", {"path": place.database()}, [SOURCE], **others)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    def none(_: int) -> SparkSession:
        raise AssertionError("a job was to be run")

    return Place(tmp_path, none)  # type: ignore[arg-type]


@pytest.fixture
def spark_place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path, spark)


@contextlib.asynccontextmanager
async def running(
    place: Place, control: Control, world: Callable[[World], World] = lambda world: world
) -> AsyncIterator[tuple[asyncio.Task[TaskRun], Consensus]]:
    async with place.store() as store:
        built = await place.built(store, "acme/views")
        leading = asyncio.create_task(
            lead(lambda: built, world(place.world(store)), control, name="acme/views")
        )
        yield leading, store
        assert leading.done()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.05)


async def stopped(leading: asyncio.Task[TaskRun], control: Control, times: int = 1) -> TaskRun:
    for _ in range(times):
        control.stop()
    async with asyncio.timeout(SOON_S):
        return await leading


def said(caplog: pytest.LogCaptureFixture, text: str) -> Callable[[], bool]:
    return lambda: text in caplog.text


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")


# -------------------------------------------------------------------------- what a stop is given to


@pytest.mark.parametrize("when", ["in the session", "in the backoff"])
def test_a_stop_outlives_the_session_that_it_was_given_to(
    place: Place, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    control = Control()
    tries: list[float] = []

    class Failing(Sqlite):
        def apply(
            self, task: SinkTask, last: SinkTask | None, state: Json, *, epoch: int
        ) -> Applied:
            tries.append(time.monotonic())
            if when == "in the session":
                loop.call_soon_threadsafe(control.stop)
                time.sleep(0.2)
            raise ConnectorError("out of order for now", transient=True)

    place.connects["acme/views"] = lambda e, w: Failing(e.config.value, where=w)
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})
    loop: Any = None

    async def run() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with running(place, control) as (leading, _):
            if when == "in the backoff":
                await until(lambda: len(tries) == 3)
                await asyncio.sleep(0.1)
                control.stop()
            async with asyncio.timeout(SOON_S):
                ended = await leading
            assert ended.error is None, ended.error

    asyncio.run(run())
    assert len(tries) == (1 if when == "in the session" else 3)
    assert "replayed" not in caplog.text


def test_a_task_that_waits_for_the_consensus_store_says_so_and_stops(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.consensus.sqlite.BUSY_TIMEOUT_MS", 600_000)
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})
    file = place.settings.data / "consensus.db"

    async def run() -> None:
        control = Control()
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
            async with place.store() as store:
                built = await place.built(store, "acme/views")
                other.execute("BEGIN IMMEDIATE")
                leading = asyncio.create_task(
                    lead(lambda: built, place.world(store), control, name="acme/views")
                )
                await until(said(caplog, "acme/views waits for the consensus store"))
                await stopped(leading, control)
                other.execute("ROLLBACK")

    asyncio.run(run())


def test_a_connector_that_waits_is_interrupted_and_its_thread_has_ended(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.apply(
        {"acme/accounts": ACCOUNTS},
        {"acme/views": task("sqlite", {"path": place.database(), "busyTimeout": 600}, [SOURCE])},
    )

    async def run() -> None:
        control = Control()
        with contextlib.closing(sqlite3.connect(place.database(), isolation_level=None)) as other:
            other.execute("PRAGMA journal_mode = WAL")
            async with place.store() as store:
                built = await place.built(store, "acme/views")
                other.execute("BEGIN IMMEDIATE")
                leading = asyncio.create_task(
                    lead(lambda: built, place.world(store), control, name="acme/views")
                )
                await until(said(caplog, "acme/views waits for another process that writes to"))
                await stopped(leading, control)
        names = [thread.name for thread in threading.enumerate()]
        assert "penstock-call" not in names

    asyncio.run(run())


# --------------------------------------------------------------------------------- with Spark


@pytest.mark.spark
@pytest.mark.parametrize("times", [1, 2])
def test_a_spark_job_is_cancelled(
    spark_place: Place, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """One stop lets a transaction that works go on for a while, and two do not."""
    place, spark = spark_place, spark_place.spark
    monkeypatch.setattr("penstock.runtime.control.GRACE_S", 3.0)
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})
    place.append({"acme/accounts": accounts(0, 10)})
    begun = threading.Event()

    def endless(*_: object, **__: object) -> None:
        begun.set()
        spark.range(1).selectExpr("java_method('java.lang.Thread', 'sleep', 120000L)").collect()

    async def run() -> None:
        control = Control()
        monkeypatch.setattr(jobs, "stage_here", endless)
        async with running(place, control) as (leading, _):
            await until(begun.is_set)
            await asyncio.sleep(1)
            ended = await stopped(leading, control, times)
            assert ended.transactions == 0
            assert ended.error is None
        tracker = spark.sparkContext.statusTracker()
        await until(lambda: not tracker.getActiveJobsIds(), SOON_S)

    asyncio.run(run())
    monkeypatch.undo()
    place.run()
    assert place.table("accounts") == reduced(accounts(0, 10))


@pytest.mark.spark
def test_a_spark_that_starts_is_not_waited_for(
    spark_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place, starts = spark_place, threading.Event()
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})
    place.append({"acme/accounts": accounts(0, 10)})

    def start(_: int) -> SparkSession:
        starts.wait(120)
        return place.spark

    async def run() -> None:
        control = Control()
        async with running(place, control, lambda w: replace(w, spark=start)) as (leading, _):
            await until(said(caplog, "acme/views waits for Spark to start"))
            await stopped(leading, control)
            starts.set()

    asyncio.run(run())


@pytest.mark.spark
def test_a_webhook_that_does_not_answer_is_not_waited_for(
    spark_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place = spark_place
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        hook = {"url": url, "payloadTemplate": "x", "timeout": "120s"}
        place.apply(
            {"acme/accounts": ACCOUNTS},
            {"acme/views": views(place, triggers={"config": [hook]})},
        )
        place.append({"acme/accounts": accounts(0, 10)})

        async def run() -> None:
            control = Control()
            async with running(place, control) as (leading, _):
                await until(said(caplog, "acme/views waits for its webhooks"))
                ended = await stopped(leading, control)
                assert ended.transactions == 1

        asyncio.run(run())
    assert place.table("accounts") == reduced(accounts(0, 10))


# --------------------------------------------------------------------------------- how runs end


@pytest.mark.spark
def test_a_run_ends_beside_a_steady_writer_with_what_was_there_at_its_start(
    spark_place: Place,
) -> None:
    """It took transaction after transaction, as long as somebody wrote."""
    place = spark_place
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": views(place)})
    place.append({"acme/accounts": accounts(0, 30)})

    written, ended = 30, threading.Event()

    async def write() -> None:
        nonlocal written
        async with place.writing("acme/accounts") as append:
            while not ended.is_set():
                await append(accounts(written, 3))
                written += 3

    writer = threading.Thread(target=lambda: asyncio.run(write()))
    writer.start()

    async def run() -> None:
        await until(lambda: written > 60)
        before = written
        async with asyncio.timeout(120):
            runs = await place.ran()
        assert runs["acme/views"].error is None
        assert runs["acme/views"].documents >= before

    try:
        asyncio.run(run())
    finally:
        ended.set()
        writer.join()
    place.run()
    assert place.table("accounts") == reduced(accounts(0, written)), "and none twice"


@pytest.mark.spark
def test_a_run_that_has_caught_up_does_not_wait_for_a_minimum_duration(
    spark_place: Place,
) -> None:
    place = spark_place
    hook_less = views(place, shards={"minTxnDuration": "600s", "maxTxnDuration": "600s"})
    place.apply({"acme/accounts": ACCOUNTS}, {"acme/views": hook_less})
    place.append({"acme/accounts": accounts(0, 30)})

    async def run() -> None:
        async with asyncio.timeout(120):
            runs = await place.ran()
        assert runs["acme/views"].transactions == 1

    asyncio.run(run())
    assert place.table("accounts") == reduced(accounts(0, 30))
