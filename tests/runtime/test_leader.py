"""What a leader does, with a real Spark and real endpoints: its transactions, modes and plans."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from penstock.catalog import desired
from penstock.connectors.sqlite.sink import Sqlite
from penstock.consensus.statelog import load as load_log
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas, layout
from penstock.model.clock import Clock, Producer, duration
from penstock.model.json_order import Json
from penstock.model.spec import Endpoint
from penstock.native.arrow import to_arrow
from penstock.runtime import reading
from penstock.runtime.connector.common import ConnectorError, SparkAttempt
from penstock.runtime.connector.materialize import (
    Loader,
    Materialization,
    SinkSession,
    SinkTask,
    Staged,
    Stager,
    Workers,
)
from penstock.runtime.control import Control
from penstock.runtime.job_runner import HANDOFF
from penstock.runtime.materialize import jobs, transaction_jobs
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.pruning import Pruning
from penstock.runtime.recovery import Layout, RecoveryMachine, recovery_key
from penstock.runtime.requests import close_now
from penstock.runtime.session import World
from runtime.crash_world import receiving
from runtime.sessions import ACCOUNTS, Document, Place, accounts, lead, now, reduced, task
from support import endpoints

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SOURCE: Document = {"source": "acme/accounts", "resource": {"table": "accounts"}}

TAGS: Document = {
    "key": ["/account"],
    "schema": {
        "type": "object",
        "required": ["account"],
        "reduce": {"strategy": "merge"},
        "properties": {
            "account": {"type": "integer"},
            "tags": {
                "type": "array",
                "items": {"type": "integer"},
                "reduce": {"strategy": "append"},
            },
        },
    },
}
USERS: Document = {
    "key": ["/id"],
    "schema": {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string"},
            "_meta": {"type": "object", "properties": {"op": {"type": "string"}}},
        },
        "if": {"required": ["_meta"]},
        "then": {"reduce": {"strategy": "lastWriteWins", "delete": True}},
        "else": {"reduce": {"strategy": "lastWriteWins"}},
    },
}
NAMES: Document = {
    "key": ["/id"],
    "schema": {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
    },
}
COLLECTIONS = {
    "acme/accounts": ACCOUNTS,
    "acme/tags": TAGS,
    "acme/users": USERS,
    "acme/names": NAMES,
}


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path, spark)


def no_spark(world: World) -> World:
    def refuse(_: int) -> SparkSession:
        raise AssertionError("a job was to be run")

    return replace(world, spark=refuse)


def tags(start: int, count: int) -> list[Document]:
    return [{"account": i % 5, "tags": [i]} for i in range(start, start + count)]


def appended(docs: Sequence[Document]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for doc in docs:
        found.setdefault(doc["account"], []).extend(doc["tags"])
    return found


def documents_in(place: Place, table: str) -> dict[int, list[int]]:
    rows = place.table(table, "flow_document")
    return {key: json.loads(row["flow_document"])["tags"] for key, row in rows.items()}


# ---------------------------------------------------------------------- what becomes of documents


@pytest.mark.parametrize("shards", [(1, 1), (3, 2)], ids=["one shard", "three, then two"])
def test_every_mode_stores_what_documents_add_up_to_however_many_shards_there_are(
    place: Place, shards: tuple[int, int]
) -> None:
    regions = {
        "source": "acme/accounts",
        "resource": {"table": "regions"},
        "fields": {"recommended": True, "groupBy": ["region"]},
    }
    bindings: list[Document] = [
        SOURCE,
        {"source": "acme/tags", "resource": {"table": "tags"}},
        {"source": "acme/users", "resource": {"table": "users"}},
        {"source": "acme/accounts", "resource": {"table": "events", "delta_updates": True}},
        {"source": "acme/names", "resource": {"table": "names"}},
        regions,
    ]
    config = {"path": place.database(), "hardDelete": True}
    place.apply(COLLECTIONS, {"acme/views": task("sqlite", config, bindings)})

    async def modes() -> list[Mode]:
        async with place.store() as store:
            return [target.mode for target in (await place.built(store, "acme/views")).targets]

    found = asyncio.run(modes())
    assert found[:5] == [Mode.PUSHDOWN, Mode.LOAD, Mode.LOAD, Mode.DELTA, Mode.REPLACE]

    people = [{"id": i % 4, "name": f"n{i}"} for i in range(10)]
    place.append(
        {
            "acme/accounts": accounts(0, 30),
            "acme/tags": tags(0, 20),
            "acme/users": people,
            "acme/names": people,
        }
    )
    first = place.run(shards=shards[0])["acme/views"]
    place.append(
        {
            "acme/accounts": accounts(30, 30),
            "acme/tags": tags(20, 20),
            "acme/users": [{"id": 1, "_meta": {"op": "d"}}, {"id": 2, "name": "last"}],
            "acme/names": [{"id": 0}],
        }
    )
    second = place.run(shards=shards[1])["acme/views"]
    for run in (first, second):
        assert run.error is None, run.error
        assert run.jobs_per_transaction_max == 1, "all bindings are one job"
    assert first.documents == 30 * 3 + 20 + 10 * 2
    assert second.documents == 30 * 3 + 20 + 2 + 1, "none is read again"

    everything = accounts(0, 60)
    assert place.table("accounts") == reduced(everything)
    by_region = place.table("regions", "count", "total", "top", key="region")
    assert by_region == {
        region: {name: row[name] for name in ("count", "total", "top")}
        for region, row in reduced(everything, "region").items()
    }
    assert documents_in(place, "tags") == appended(tags(0, 40))
    assert place.table("users", "name", key="id") == {
        0: {"name": "n8"},
        2: {"name": "last"},
        3: {"name": "n7"},
    }
    assert place.table("names", "name", key="id") == {
        0: {"name": None},
        1: {"name": "n9"},
        2: {"name": "n6"},
        3: {"name": "n7"},
    }
    with contextlib.closing(sqlite3.connect(place.database())) as connection:
        events = connection.execute("SELECT account, total FROM events").fetchall()
    assert sum(total for _, total in events) == sum(doc["total"] for doc in everything)

    assert place.counted("acme/accounts") == 60 * 3, "once for each binding of it"
    assert place.counted("acme/tags") == 40
    assert place.counted("acme/users") == 12
    assert place.counted("acme/tags", "out") == 5 * 2, "rows of each transaction"


def test_a_backfill_empties_its_table_and_reads_its_binding_alone_again(place: Place) -> None:
    counted = {"source": "acme/tags", "resource": {"table": "tags"}}
    place.apply(
        COLLECTIONS, {"acme/views": task("sqlite", {"path": place.database()}, [SOURCE, counted])}
    )
    place.append({"acme/accounts": accounts(0, 30), "acme/tags": tags(0, 20)})
    assert place.run()["acme/views"].documents == 50
    with contextlib.closing(sqlite3.connect(place.database())) as connection, connection:
        connection.execute("UPDATE accounts SET total = -1")
        connection.execute("INSERT INTO accounts (account, region) VALUES (1000, 'nowhere')")

    bindings = [counted, {**SOURCE, "backfill": 1}]  # and in another order
    place.apply(COLLECTIONS, {"acme/views": task("sqlite", {"path": place.database()}, bindings)})
    place.append({"acme/tags": tags(20, 5)})
    run = place.run()["acme/views"]
    assert run.error is None, run.error
    assert run.documents == 30 + 5, "all of one binding, and what is new of the other"
    assert place.table("accounts") == reduced(accounts(0, 30))
    assert documents_in(place, "tags") == appended(tags(0, 25))


# ------------------------------------------------------------------------ what a leader may forget


def test_a_leader_forgets_a_writer_that_died_long_ago_and_none_that_is_at_work(
    place: Place,
) -> None:
    place.apply(COLLECTIONS, {"acme/views": task("sqlite", {"path": place.database()}, [SOURCE])})
    long_ago = Clock(now() - duration(3 * 24 * 3600))

    async def left_open(at: Clock, docs: Sequence[Document]) -> Publisher:
        """Rows of a transaction that is not closed."""
        async with place.store() as store:
            spec = (await desired.load(store)).collection("acme/accounts")
            assert spec is not None
            publisher = Publisher(
                Journals(store),
                open_blobs(place.settings.blob),
                Schemas(store),
                [Mapped(spec=spec)],
                producer=Producer.from_random(os.urandom(6)),
                now=lambda: at,
            )
            await publisher.publish(0, to_arrow(list(docs), layout(spec.write_schema.text)))
            await publisher.flush()
            return publisher

    async def known() -> set[Producer]:
        async with place.store() as store:
            log = await load_log(store, recovery_key("acme/views"), RecoveryMachine())
            recovered = Layout({0: "accounts.v0"}).decode(log.state)
            return {
                each.producer for read in recovered.committed_frontier for each in read.producers
            }

    dead = asyncio.run(left_open(long_ago, accounts(100, 5)))
    working = asyncio.run(left_open(now(), accounts(200, 5)))
    for start in (0, 30):  # what the last transaction has read is not forgotten
        place.append({"acme/accounts": accounts(start, 30)})
        assert place.run()["acme/views"].error is None
    assert {dead.producer, working.producer} <= asyncio.run(known())

    options = Pruning(entries_min=1, prune_bytes=1)
    again = place.run(world=lambda world: replace(world, pruning=options))["acme/views"]
    assert again.error is None, again.error
    left = asyncio.run(known())
    assert dead.producer not in left, "it left a span open, and nobody will close it"
    assert working.producer in left
    place.append({"acme/accounts": accounts(60, 30)})
    assert place.run()["acme/views"].documents == 30, "nothing is read again"
    assert place.table("accounts") == reduced(accounts(0, 90))


# ------------------------------------------------------------------------- what is not worth a job


def test_a_transaction_without_documents_runs_no_job_and_calls_no_webhook(place: Place) -> None:
    with receiving() as receiver:
        past = {**SOURCE, "source": {"name": "acme/accounts", "notAfter": "2020-01-01T00:00:00Z"}}
        hook = {"url": receiver.url, "payloadTemplate": '{"run": {{json run_id}}}'}
        views = task("sqlite", {"path": place.database()}, [past], triggers={"config": [hook]})
        now_ = task(
            "sqlite", {"path": place.database("now")}, [SOURCE], triggers={"config": [hook]}
        )
        place.apply(COLLECTIONS, {"acme/past": views, "acme/now": now_})
        place.append({"acme/accounts": accounts(0, 30)})
        run = place.run("acme/past", world=no_spark)["acme/past"]
        assert run.error is None, run.error
        assert (run.jobs, run.stored) == (0, 0)
        assert place.table("accounts") == {}
        assert receiver.runs == []

        assert place.run("acme/now")["acme/now"].error is None
        assert len(receiver.runs) == 1, "what stored something calls"
        idle = place.run(world=no_spark)
        assert {name: run.jobs for name, run in idle.items()} == {"acme/past": 0, "acme/now": 0}
        assert {run.error for run in idle.values()} == {None}
        assert len(receiver.runs) == 1


# ------------------------------------------------------------------------- what people ask of it


def test_a_transaction_is_closed_on_request_and_sessions_end_after_their_number(
    place: Place,
) -> None:
    views = task(
        "sqlite",
        {"path": place.database()},
        [SOURCE],
        shards={"minTxnDuration": "600s", "maxTxnDuration": "600s"},
    )
    place.apply(COLLECTIONS, {"acme/views": views})
    place.append({"acme/accounts": accounts(0, 30)})

    async def run() -> None:
        async with place.store() as store:
            built = await place.built(store, "acme/views")
            control = Control(transactions_max=1)
            leading = asyncio.create_task(
                lead(lambda: built, place.world(store), control, name="acme/views")
            )
            while not leading.done():  # it is heard by a transaction that is open
                await close_now(store, "acme/views")
                await asyncio.wait([leading], timeout=0.5)
            ended = leading.result()
            assert ended.error is None, ended.error
            assert ended.transactions == 1

    asyncio.run(run())
    assert place.table("accounts") == reduced(accounts(0, 30))


# ----------------------------------------------------------------- attempts that fail, or run twice


def restless(flag: Path) -> Callable[[Endpoint, str], Materialization]:
    """SQLite, whose rows are staged twice over, and whose first stager dies when it has staged.

    Made here, so that Spark sends the classes to its workers, which cannot import tests.
    """

    class TwiceStager:
        def __init__(self, stagers: Sequence[Stager]) -> None:
            self._stagers = stagers

        def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
            for stager in self._stagers:
                stager.store(binding, rows)

        def finish(self) -> Sequence[Staged]:
            staged = [stager.finish() for stager in self._stagers]
            if not flag.exists():
                flag.touch()
                raise RuntimeError("an executor is lost")
            return staged[0]

        def discard(self) -> None:
            """An executor that is lost cleans nothing up."""

    @dataclass(frozen=True)
    class TwiceWorkers:
        real: Workers

        def stager(self, attempt: SparkAttempt) -> Stager:
            copy = replace(attempt, attempt=attempt.attempt + 1000)
            return TwiceStager([self.real.stager(attempt), self.real.stager(copy)])

        def loader(self, attempt: SparkAttempt) -> Loader:
            return self.real.loader(attempt)

    class Restless(Sqlite):
        def open(self, task: SinkTask, *, epoch: int, state: Json) -> Any:  # noqa: ANN401
            session = super().open(task, epoch=epoch, state=state)
            session.workers = TwiceWorkers(session.workers)  # type: ignore[assignment]
            return session

    return lambda endpoint, name: Restless(endpoint.config.value, where=name)


def test_only_what_the_winning_attempts_staged_is_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SMALL_BYTES", 0)
    monkeypatch.setattr(transaction_jobs, "HERE_DOCUMENTS", 0)
    place.apply(COLLECTIONS, {"acme/views": task("sqlite", {"path": place.database()}, [SOURCE])})
    place.connects["acme/views"] = restless(place.directory / "flag")
    place.append({"acme/accounts": accounts(0, 30)})
    run = place.run(shards=2)["acme/views"]
    assert run.error is None, run.error
    assert (place.directory / "flag").exists()
    assert place.table("accounts") == reduced(accounts(0, 30))
    assert place.counted("acme/accounts") == 30
    assert place.counted("acme/accounts", "out") == 7

    staging = Path(f"{place.database()}.staging")
    assert list(staging.rglob("*.arrow")), "what the others staged is still there"
    place.connects.clear()
    assert place.run(world=no_spark)["acme/views"].error is None
    assert not list(staging.rglob("*.arrow")), "and is swept by the next session"


@pytest.mark.parametrize("refused", [False, True], ids=["come", "do not come"])
def test_rows_that_do_not_come_to_the_leader_are_staged_by_tasks(
    place: Place, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Two bindings in one job, one of them twice: Spark refuses answers that are too large."""
    monkeypatch.setattr(reading, "SMALL_BYTES", 0)
    collected, asked = jobs.collect_batches, []

    def collect(frame: DataFrame) -> Any:  # noqa: ANN401
        asked.append(frame)
        if refused:
            raise PySparkException("Total size of serialized results is bigger than allowed")
        return collected(frame)

    monkeypatch.setattr(jobs, "collect_batches", collect)
    again = {"source": "acme/accounts", "resource": {"table": "again"}}
    views = task("sqlite", {"path": place.database()}, [SOURCE, again])
    place.apply(COLLECTIONS, {"acme/views": views})
    place.append({"acme/accounts": accounts(0, 30)})
    run = place.run(shards=2)["acme/views"]
    assert run.error is None, run.error
    assert len(asked) == 1
    assert place.table("accounts") == place.table("again") == reduced(accounts(0, 30))


def test_a_task_keeps_what_it_said_of_its_troubles(place: Place) -> None:
    opened: list[int] = []

    class Shy(Sqlite):
        def open(self, task: SinkTask, *, epoch: int, state: Json) -> Any:  # noqa: ANN401
            opened.append(epoch)
            if len(opened) == 1:
                raise ConnectorError("the endpoint is shy today", transient=True)
            return super().open(task, epoch=epoch, state=state)

    place.apply(COLLECTIONS, {"acme/views": task("sqlite", {"path": place.database()}, [SOURCE])})
    place.connects["acme/views"] = lambda endpoint, name: Shy(endpoint.config.value, where=name)
    assert place.run(world=no_spark)["acme/views"].error is None
    assert len(opened) == 2
    assert opened[0] < opened[1], "each session fences those before it"
    (said,) = [log for log in place.logs() if log["level"] == "warning"]
    assert "shy" in said["message"]
    assert said["shard"] == {"kind": "materialization", "name": "acme/views"}


# ------------------------------------------------------------------ endpoints without transactions


@dataclass
class Gate:
    """Where acknowledging waits, once it is closed."""

    open: threading.Event
    waiting: threading.Event


def gated(gate: Gate, kind: type[endpoints.Files]) -> Callable[[Endpoint, str], Materialization]:
    class Slow(kind):  # type: ignore[misc, valid-type]
        def open(self, task: SinkTask, *, epoch: int, state: Json) -> SinkSession:
            session: SinkSession = super().open(task, epoch=epoch, state=state)
            acknowledge = session.acknowledge

            def slowly(patches: Sequence[Json]) -> Sequence[Json]:
                gate.waiting.set()
                assert gate.open.wait(120)
                return acknowledge(patches)

            session.acknowledge = slowly  # type: ignore[method-assign]
            return session

    return lambda endpoint, name: Slow(endpoint.config.value, where=name)


def stored_in(directory: Path, table: str) -> dict[int, Document]:
    rows = endpoints.Table(directory / f"{table}.db").rows()
    return {row["account"]: json.loads(row["flow_document"]) for row in rows}


def as_documents(docs: Sequence[Document]) -> dict[int, Document]:
    return {key: {"account": key, **row} for key, row in reduced(docs).items()}


def test_the_next_transaction_is_gathered_while_the_last_one_is_applied(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SMALL_BYTES", 0)
    views = place.directory / "views"
    gate = Gate(threading.Event(), threading.Event())
    gate.open.set()
    place.connects["acme/views"] = gated(gate, endpoints.Files)
    place.apply(COLLECTIONS, {"acme/views": task("files", {"path": str(views)}, [SOURCE])})
    place.append({"acme/accounts": accounts(0, 30)})
    jobs: list[int] = []

    async def run() -> None:
        async with place.store() as store:
            built = await place.built(store, "acme/views", shards=2)
            committed = asyncio.Event()
            control = Control(transactions_max=2, drain=True)

            def told(run: Any) -> None:  # noqa: ANN401
                jobs.append(run.jobs)
                if len(jobs) == 1:
                    gate.open.clear()
                    gate.waiting.clear()
                    committed.set()

            world = place.world(store)
            leading = asyncio.create_task(supervised(built, world, control, told))
            try:
                await asyncio.wait_for(committed.wait(), 120)
                await asyncio.to_thread(gate.waiting.wait, 120)
                await place.appended({"acme/accounts": accounts(30, 30)})
                while not gathered(place):
                    assert not leading.done()
                    await asyncio.sleep(0.05)
                assert len(jobs) == 1, "the second transaction waits for the first to be applied"
                assert stored_in(views, "accounts") == {}
            finally:
                gate.open.set()
            await leading

    asyncio.run(run())
    assert jobs[1:] == [2], "it took two: to gather, and to load and stage"
    assert stored_in(views, "accounts") == as_documents(accounts(0, 60))
    left = handoff_dir(place).rglob("*")
    assert not [path for path in left if path.is_file()], "nothing is left between jobs"


def gathered(place: Place) -> bool:
    """Whether what a job gathered is complete; it is removed when its transaction commits."""
    # Not `rglob`: it would stumble over what Spark moves while it looks.
    return any(handoff_dir(place).glob("*/*/*-gathered-*/_SUCCESS"))


def handoff_dir(place: Place) -> Path:
    """Where jobs leave something to each other: in the blob store."""
    return place.directory / "data" / "blobs" / HANDOFF


async def supervised(
    built: Any,  # noqa: ANN401
    world: World,
    control: Control,
    told: Callable[[Any], None],
) -> None:
    from penstock.runtime.supervise import Patience, supervise

    control.on_progress = told
    await supervise(built, world, control, Patience(failures_max=1))


@pytest.mark.parametrize("kind", [endpoints.Files, endpoints.Direct])
def test_endpoints_without_transactions_have_what_documents_add_up_to(
    place: Place, kind: type[endpoints.Files | endpoints.Direct]
) -> None:
    views = place.directory / "views"
    place.connects["acme/views"] = lambda endpoint, name: kind(endpoint.config.value, where=name)
    place.apply(COLLECTIONS, {"acme/views": task("test", {"path": str(views)}, [SOURCE])})
    jobs = []
    for start in (0, 30):
        place.append({"acme/accounts": accounts(start, 30)})
        run = place.run(shards=2)["acme/views"]
        assert run.error is None, run.error
        jobs.append(run.jobs_per_transaction_max)
    assert jobs == ([2, 2] if kind is endpoints.Direct else [1, 1])
    assert stored_in(views, "accounts") == as_documents(accounts(0, 60))
    assert place.counted("acme/accounts") == 60
