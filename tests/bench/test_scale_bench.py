"""What the scale benchmark prepares, computes and checks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.errors import Bug, PenstockError
from penstock.journal.journals import Journals
from penstock.journal.state import AckRecord, Fragment
from penstock.runtime.ops import STATS
from penstock_bench import scale_history, scale_journals, scale_tasks
from penstock_bench.events import (
    TASK,
    Appender,
    Events,
    apply_catalog,
    settings_in,
    sqlite_table,
)
from penstock_bench.frame import Chart, Goal, Report, Result
from penstock_bench.processes import Run, Usage
from penstock_bench.scale_cost import make_events, per_document, report
from penstock_bench.scale_runs import check_documents, open_store, penstock_run, run_until_caught_up
from penstock_bench.stock import Stock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ran(seconds: float, cpu_s: float, peak: int) -> Run:
    return Run(seconds=seconds, usage=Usage(cpu_s=cpu_s, peak_rss_bytes=peak), output={}, code=0)


# -------------------------------------------------------------------------------------- documents


def test_start_up_is_subtracted_before_documents_are_compared() -> None:
    taken = per_document({10: [5.0, 6.0, 7.0], 1000: [8.0, 8.0, 8.0], 2000: [8.0, 9.0, 10.0]})
    assert taken.by_peer == {
        "1000": pytest.approx([0.002] * 3),
        "2000": pytest.approx([0.001, 0.0015, 0.002]),
    }


def test_a_run_that_is_shorter_than_start_up_has_a_cost_above_zero() -> None:
    taken = per_document({10: [5.0], 1000: [4.0]})
    assert taken.by_peer["1000"] == pytest.approx([0.04 / 1000])


def test_a_higher_cost_per_document_at_ten_times_the_data_misses_the_goal() -> None:
    def goals(large_s: float) -> list[bool]:
        runs = {
            10: [ran(5, 5, 100)],
            1_000: [ran(6, 6, 200)],
            10_000: [ran(large_s, large_s, 400)],
        }
        return [goal.holds for goal in report(runs).goals]

    assert goals(5 + 10) == [True, True]
    assert goals(5 + 10.9) == [True, True]
    assert goals(5 + 11.1) == [False, False]


def test_the_memory_of_all_sizes_is_drawn() -> None:
    runs = {size: [ran(5, 5, size * 1_000_000)] for size in (100, 10, 1)}
    *_, lines = report(runs).charts
    assert lines.name == "memory"
    assert getattr(lines, "series")[0][1] == ((1.0, 1.0), (10.0, 10.0), (100.0, 100.0))  # noqa: B009


def test_transactions_have_the_same_size_whatever_their_number() -> None:
    sizes = [make_events(size) for size in (1_000, 100_000, 2_000_000)]
    assert [(each.files, each.count // each.files) for each in sizes] == [
        (1, 1_000),
        (1, 100_000),
        (20, 100_000),
    ]


def test_penstock_run_is_called_as_a_user_would() -> None:
    command = [str(part) for part in penstock_run(Path("here"), "a/b", "a/c")]
    assert command[1:] == [
        *("-m", "penstock", "run", "--data", "here", "--json"),
        *("--task", "a/b", "--task", "a/c"),
    ]


def test_reports_of_parts_are_merged() -> None:
    parts = [
        Report(
            results=(Result(name=name, value=1, unit="s"),),
            goals=(Goal(name=name, measured=1, goal=1),),
            charts=(Chart(name=name, title=name, unit="s", bars=()),),
        )
        for name in ("a", "b")
    ]
    whole = Report.merge(parts)
    assert [each.name for each in (*whole.results, *whole.goals, *whole.charts)] == ["a", "b"] * 3


# --------------------------------------------------------------------------------------- journals


def test_the_last_document_of_each_customer_counts() -> None:
    stock = Stock(documents=200, lots=2, parts=10)
    expected = {int(stock.customers_of(np.array([id_]))[0]): id_ for id_ in range(200)}
    assert dict(scale_journals.last_of_customers(stock).tolist()) == expected


@pytest.mark.parametrize(("by", "journals"), [("lot", 2), ("part", 10)])
def test_a_task_over_any_number_of_journals_is_exact(
    tmp_path: Path, spark: SparkSession, by: str, journals: int
) -> None:
    stock = Stock(documents=200, lots=2, parts=10)
    deployment = scale_journals.JournalDeployment(tmp_path / "data", stock, by, lambda: spark)
    deployment.fill(tasks=1)
    deployment.run()
    deployment.check()

    async def count() -> int:
        async with open_store(settings_in(deployment.data)) as store:
            return len(await Journals(store).list(f"bench/by-{by}"))

    assert asyncio.run(count()) == journals
    deployment.stock = Stock(documents=400, lots=2, parts=10)
    with pytest.raises(Bug, match="not what is in the journals"):
        deployment.check()


# ------------------------------------------------------------------------------------------ tasks


def test_many_tasks_share_the_events_and_one_spark(tmp_path: Path, spark: SparkSession) -> None:
    for tasks in (1, 4):
        deployment = scale_tasks.TaskDeployment(tmp_path / str(tasks), tasks, 400)
        assert sum(share.count for share in deployment.shares) == 400
        deployment.fill(rounds=2)
        deployment.run(lambda: spark)
        deployment.run(lambda: spark)
        deployment.check()
        with pytest.raises(PenstockError, match="no task"):
            deployment.run(lambda: spark)


def test_all_spark_jobs_are_counted(spark: SparkSession) -> None:
    before = scale_tasks.jobs_started()
    spark.range(3).count()
    assert scale_tasks.jobs_started() > before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_idle_tasks_are_measured_after_they_have_caught_up(tmp_path: Path) -> None:
    deployment = scale_tasks.TaskDeployment(tmp_path / "data", 2, 40)
    deployment.fill(rounds=1)
    rest = scale_tasks.watch_idle(deployment, 0.5, settle_s=0.1)
    deployment.check()
    assert rest.jobs == 0
    assert rest.cores >= 0


# ---------------------------------------------------------------------------------------- history


def test_a_history_leaves_what_real_transactions_leave(tmp_path: Path, spark: SparkSession) -> None:
    data, events = tmp_path / "data", scale_history.events_per_transaction(20)
    scale_history.make_history(data, events)
    assert data.is_dir()
    assert not data.is_symlink()
    scale_history.check_table(data, events)
    assert asyncio.run(_records(data, STATS.name)) == (20, 20)
    scale_history.restart(data)
    scale_history.check_table(data, events)

    # With Spark, the task continues where it stopped without Spark.
    more = Events(3, 3, accounts=scale_history.ACCOUNTS, seed=8)
    asyncio.run(_append(data, more))
    check_documents(asyncio.run(run_until_caught_up(data, [TASK], lambda: spark)), 3)
    table = sqlite_table(scale_history.database(data))
    assert table.events.sum() == 23
    assert table.amount.sum() == events.oracle.amount.sum() + more.oracle.amount.sum()


def test_a_restart_that_reads_documents_is_an_error(tmp_path: Path, spark: SparkSession) -> None:
    data = tmp_path / "data"
    scale_history.make_history(data, scale_history.events_per_transaction(1))
    asyncio.run(_append(data, Events(1, 1)))
    with pytest.raises(Bug, match="of 0 documents, 1 were read"):
        check_documents(asyncio.run(run_until_caught_up(data, [TASK], lambda: spark)), 0)


async def _records(data: Path, collection: str) -> tuple[int, int]:
    """Count the fragments and ACKs in the journals of a collection."""
    async with open_store(settings_in(data)) as store:
        records = [
            record
            for journal in await Journals(store).list(collection)
            for record in journal.state.records
        ]
    fragments = sum(isinstance(record, Fragment) for record in records)
    return fragments, sum(isinstance(record, AckRecord) for record in records)


async def _append(data: Path, events: Events) -> None:
    settings = settings_in(data)
    async with open_store(settings) as store:
        spec = await apply_catalog(store, data / "catalog.yaml")
        appender = Appender(store, settings, spec)
        for file in range(events.files):
            await appender.append(events.batch(file))
