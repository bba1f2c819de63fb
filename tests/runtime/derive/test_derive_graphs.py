"""Derivations behind derivations: partitions, whole transactions, delays, and circles."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.batch import StopHandle, TaskRun, run_graph, tasks_to_run
from penstock.catalog import desired
from penstock.journal.publisher import Publisher, PublisherOptions
from penstock.journal.transaction import BatchLimits
from penstock.model.clock import Clock, duration
from penstock.runtime import reading, session
from penstock.runtime.control import TransactionSummary
from penstock.runtime.derive import transaction_jobs
from penstock.runtime.session import World
from runtime.crash_world import CRASHED
from runtime.derive.crash_deployment import Pipeline
from runtime.derive.deriving import caught_up, derived_inputs
from runtime.sessions import Place, now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Document = dict[str, Any]


def schema(required: list[str], **properties: object) -> Document:
    return {
        "type": "object",
        "required": required,
        "additionalProperties": False,
        "reduce": {"strategy": "merge"},
        "properties": properties,
    }


INTEGER = {"type": "integer"}
SUM = {"type": "integer", "reduce": {"strategy": "sum"}}


def derived(key: list[str], shape: Document, transforms: list[Document], **more: object) -> object:
    derive = {"using": {"spark": {}}, "transforms": transforms}
    return {"key": key, "schema": shape, "derive": derive, **more}


def transform(name: str, source: object, code: str, **more: object) -> Document:
    return {"name": name, "source": source, "shuffle": "any", "lambda": code, **more}


ENTRIES: Document = {"key": ["/id"], "schema": schema(["id", "n"], id=INTEGER, n=INTEGER)}
SIDES = derived(
    ["/id", "/side"],
    schema(["id", "side", "n"], id=INTEGER, side={"type": "string"}, n=INTEGER),
    [
        transform(
            "split",
            "acme/entries",
            "select id, 'debit' as side, -n as n from source"
            " union all select id, 'credit', n from source",
        )
    ],
    projections={"side": {"location": "/side", "partition": True}},
)
TOTALS = derived(
    ["/k"],
    schema(["k"], k=INTEGER, sum=SUM, count=SUM),
    [transform("both", "acme/sides", "select 0 as k, n as sum, 1 as count from source")],
)
CREDITS = derived(
    ["/k"],
    schema(["k"], k=INTEGER, sum=SUM, count=SUM),
    [
        transform(
            "credits",
            {"name": "acme/sides", "partitions": {"include": {"side": ["credit"]}}},
            "select 0 as k, n as sum, 1 as count from source",
        )
    ],
)
LEDGER = {
    "acme/entries": ENTRIES,
    "acme/sides": SIDES,
    "acme/totals": TOTALS,
    "acme/credits": CREDITS,
}


def entries(start: int, count: int) -> list[Document]:
    return [{"id": i, "n": i * i % 97 + 1} for i in range(start, start + count)]


def check_ledger(place: Place, docs: list[Document]) -> None:
    sides = sorted((doc["id"], doc["side"], doc["n"]) for doc in place.read("acme/sides"))
    wanted = [
        (d["id"], side, n) for d in docs for side, n in (("credit", d["n"]), ("debit", -d["n"]))
    ]
    assert sides == sorted(wanted)
    totals = place.read("acme/totals")
    assert {doc["sum"] for doc in totals} == {0}, "a reader saw one side of a transaction only"
    assert sum(doc["count"] for doc in totals) == 2 * len(docs)
    selected = place.read("acme/credits")
    assert sum(doc["sum"] for doc in selected) == sum(doc["n"] for doc in docs)


@pytest.mark.parametrize("way", ["small", "large", "through tasks"])
def test_a_derived_collection_has_partitions_and_its_readers_select_them(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way != "small":
        monkeypatch.setattr(reading, "SMALL_BYTES", -1)
    if way == "through tasks":
        monkeypatch.setattr(transaction_jobs, "HERE_BYTES", -1)
    place = Place(tmp_path, spark)
    place.apply(LEDGER, {})
    for start in (0, 30):
        place.append({"acme/entries": entries(start, 30)})
        caught_up(place)
    check_ledger(place, entries(0, 60))
    assert derived_inputs(place, "acme/credits") == 60


def test_a_transaction_whose_acks_are_half_written_is_read_whole(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader dies between two revisions of ACKs; readers wait for the next leader."""
    options = PublisherOptions(limits=BatchLimits(journals=1))
    monkeypatch.setattr(session, "Publisher", partial(Publisher, options=options))
    place, pipeline = Place(tmp_path, spark), Pipeline(tmp_path, spark, ())
    place.apply(LEDGER, {})
    place.append({"acme/entries": entries(0, 10)})
    caught_up(place)
    place.append({"acme/entries": entries(10, 10)})
    # The last transaction's ACKs are written again first: 3 journals, then the first of this one.
    assert pipeline.run("publisher.acks:4") == CRASHED
    runs = place.run()  # all tasks at once
    assert [run.error for run in runs.values()] == [None, None, None]
    caught_up(place)
    check_ledger(place, entries(0, 20))


# ------------------------------------------------------------------------------------- read delays

WINDOW = {
    "acme/entries": ENTRIES,
    "acme/window": derived(
        ["/k"],
        schema(["k"], k=INTEGER, sum=SUM),
        [
            transform("enter", "acme/entries", "select 0 as k, n as sum from source"),
            transform(
                "leave", "acme/entries", "select 0 as k, -n as sum from source", readDelay="24h"
            ),
        ],
    ),
    "acme/seen": derived(
        ["/k"],
        schema(["k"], k=INTEGER, count=SUM),
        [transform("count", "acme/window", "select k, 1 as count from source")],
    ),
}


def later(world: World) -> World:
    return replace(world, now=lambda: Clock(now() + duration(25 * 3600)))


def test_a_run_ends_before_documents_that_are_delayed_and_a_later_one_reads_them(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    place.apply(WINDOW, {})

    def total() -> int:
        return sum(doc["sum"] for doc in place.read("acme/window"))

    place.append({"acme/entries": entries(0, 10)})
    assert caught_up(place)["acme/window"].documents == 10
    assert total() == sum(doc["n"] for doc in entries(0, 10))
    assert caught_up(place)["acme/window"].transactions == 0
    place.append({"acme/entries": entries(10, 5)})
    assert caught_up(place)["acme/window"].documents == 5
    assert caught_up(place, world=later)["acme/window"].documents == 15
    assert total() == 0
    assert caught_up(place, world=later)["acme/window"].transactions == 0
    assert sum(doc["count"] for doc in place.read("acme/seen")) == 3


# ----------------------------------------------------------------------------------------- circles

COUNTDOWN: Document = {
    "acme/entries": ENTRIES,
    "acme/steps": derived(
        ["/id", "/n"],
        schema(["id", "n"], id=INTEGER, n=INTEGER),
        [
            transform("begin", "acme/entries", "select id, n from source"),
            transform("step", "acme/steps", "select id, n - 1 as n from source where n > 0"),
        ],
    ),
    "acme/done": derived(
        ["/id"],
        schema(["id"], id=INTEGER, count=SUM),
        [transform("count", "acme/steps", "select id, 1 as count from source")],
    ),
}


def test_a_derivation_that_reads_itself_runs_until_nothing_is_new_also_after_a_crash(
    tmp_path: Path, spark: SparkSession
) -> None:
    place, pipeline = Place(tmp_path, spark), Pipeline(tmp_path, spark, ())
    place.apply(COUNTDOWN, {})
    docs = [{"id": i, "n": i % 4} for i in range(6)]
    place.append({"acme/entries": docs})
    assert pipeline.run("leader.after-commit-record:2") == CRASHED
    caught_up(place)
    steps = sorted((doc["id"], doc["n"]) for doc in place.read("acme/steps"))
    assert steps == sorted((doc["id"], n) for doc in docs for n in range(doc["n"] + 1))
    done = {doc["id"]: 0 for doc in docs}
    for doc in place.read("acme/done"):
        done[doc["id"]] += doc["count"]
    assert done == {doc["id"]: doc["n"] + 1 for doc in docs}
    assert [run.transactions for run in caught_up(place).values()] == [0, 0]


# ------------------------------------------------------------------------------------------- stops


def test_a_stop_is_also_for_tasks_that_have_not_begun(tmp_path: Path, spark: SparkSession) -> None:
    """They wait for others, whose output they read."""
    place = Place(tmp_path, spark)
    place.apply(LEDGER, {})
    place.append({"acme/entries": entries(0, 10)})
    stop = StopHandle()

    async def run() -> list[TaskRun]:
        async with place.store() as store:
            catalog = await desired.load(store)
            tasks, world = tasks_to_run(catalog), place.world(store)
            stopping = partial(_stopped_by, stop)
            return await run_graph(catalog, tasks, world, stop=stop, on_progress=stopping)

    runs = {run.task: run for run in asyncio.run(run())}
    assert {name: (run.transactions, run.stopped) for name, run in runs.items()} == {
        "acme/sides": (1, True),
        "acme/totals": (0, True),
        "acme/credits": (0, True),
    }
    caught_up(place)
    check_ledger(place, entries(0, 10))


def _stopped_by(stop: StopHandle, run: TaskRun, summary: TransactionSummary) -> None:
    stop.stop()
