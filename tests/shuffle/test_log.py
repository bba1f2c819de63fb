"""The log of a session on a real Spark: staged once, scanned in order, gone when consumed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest

from journal.publishing import world
from penstock import failpoints
from penstock.errors import Bug, Unavailable
from penstock.model.routing import split_shards
from penstock.shuffle.log import ATTEMPTS_MAX, POOL, Log, LogClosed, SliceLog
from penstock.shuffle.segment_files import _write_file
from penstock.shuffle.segments import Fenced, session_name
from penstock.shuffle.slice import Slice
from penstock.shuffle.state import Options
from shuffle.following import BOTH, SPLIT, planner, session, write
from shuffle.staging import (
    ONE,
    THREE,
    TWO,
    Staged,
    Task,
    Wrote,
    checkpoint,
    deliveries,
    wrote,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

pytestmark = pytest.mark.spark

TASK = Task()


def names_in(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def bytes_in(directory: Path) -> int:
    return sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())


def partitions(frame: DataFrame, shards: int) -> list[list[Row]]:
    """Whole rows by partition, as they come."""
    from pyspark.sql import functions as f

    found: list[list[Row]] = [[] for _ in range(shards)]
    for row in frame.withColumn("partition", f.spark_partition_id()).collect():
        assert row["_shard"] == row.partition
        found[row.partition].append(row)
    return found


def rows_of(frame: DataFrame, shards: int = TASK.shards) -> list[list[Staged]]:
    return [
        [
            Staged(
                -row["_priority"],
                row["_adj_clock"],
                row["_clock"],
                row["_producer"],
                row["_binding"],
            )
            for row in rows
        ]
        for rows in partitions(frame, shards)
    ]


@asynccontextmanager
async def opened(
    spark: SparkSession, directory: Path, *, epoch: int = 1, shards: int = TASK.shards
) -> AsyncIterator[Log]:
    log = await Log.open(spark, directory, epoch=epoch, shards=shards)
    try:
        yield log
    finally:
        await log.close()


def through(
    frame: DataFrame, act: Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]
) -> DataFrame:
    """The same rows, past something that happens in tasks."""
    return frame.mapInArrow(act, frame.schema)


async def eventually(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.02)


# --------------------------------------------------------------------------------------- scanning


async def test_the_example_of_the_design_passes_every_failpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {name: 1000 for name in failpoints.FAILPOINTS if name.startswith("log.")}
    monkeypatch.setattr(failpoints, "_hits_left", points)
    one, two = wrote(1, ONE, [10, 20]), wrote(1, TWO, [15])
    async with opened(spark, tmp_path) as log:
        manifest = await log.stage(1, TASK.frame(spark, [one, two]), deliveries([one, two]))
        assert (manifest.rows, log.flushed_lsn) == (3, (1, 1))
        assert sum(log.bytes) == manifest.bytes == bytes_in(tmp_path)
        async with log.scan(deliveries([two])) as frame:
            assert rows_of(frame) == TASK.by_shard([two])
        async with log.scan(deliveries([two])) as frame:
            assert rows_of(frame) == [[], []]
        await log.reclaim(checkpoint([two]))
        async with log.scan(deliveries([one])) as frame:
            assert rows_of(frame) == TASK.by_shard([one])
        await log.reclaim(checkpoint([one]))
        assert (log.bytes, names_in(log.directory)) == ((0, 0), [])
    assert names_in(tmp_path) == []
    assert [name for name, left in points.items() if left == 1000] == []


@pytest.mark.parametrize("seed", range(2))
async def test_rows_come_in_processing_order_within_a_round_and_over_several(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Some transactions of each round are held back, and come with those of later rounds."""
    chance = random.Random(seed)
    task = Task(
        shards=3,
        priorities=tuple(chance.randint(-1, 1) for _ in range(3)),
        delays=tuple(chance.choice([0, 0, 25]) for _ in range(3)),
    )
    clock = 1000
    waiting: list[Wrote] = []
    seen: list[list[Staged]] = [[], [], []]
    async with opened(spark, tmp_path, shards=3) as log:
        for lsn in (1, 2, 3):
            some: list[Wrote] = []
            for _ in range(12):
                clocks = sorted(chance.sample(range(clock, clock + 10), chance.randint(1, 6)))
                producer = chance.choice([ONE, TWO, THREE])
                some.append(wrote(lsn, producer, clocks, binding=chance.randrange(3)))
                clock += 10
            await log.stage(lsn, task.frame(spark, some), deliveries(some))
            waiting += some
            chance.shuffle(waiting)
            count = len(waiting) if lsn == 3 else len(waiting) // 2
            taken, waiting = waiting[:count], waiting[count:]
            async with log.scan(deliveries(taken)) as frame:
                found = rows_of(frame, 3)
            assert found == task.by_shard(taken)
            seen = [before + rows for before, rows in zip(seen, found, strict=True)]
            await log.reclaim(checkpoint(taken))
            assert sum(log.bytes) == bytes_in(tmp_path)
        assert (log.bytes, names_in(log.directory)) == ((0, 0, 0), [])
    assert sum(map(len, seen)) == len({row for rows in seen for row in rows})


async def test_files_and_the_exchange_itself_give_the_same_rows_in_the_same_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also if rounds have documents of different bindings: the columns are those of both."""
    task = Task(shards=2, priorities=(0, 1), delays=(7, 0))
    rounds = [
        [wrote(1, ONE, range(10, 40, 2)), wrote(1, TWO, range(11, 40, 3))],
        [wrote(2, TWO, range(41, 90, 5), binding=1), wrote(2, ONE, range(5, 9), binding=1)],
    ]
    every = rounds[0] + rounds[1]
    direct = task.frame(spark, every)
    async with opened(spark, tmp_path) as log:
        for lsn, some in enumerate(rounds, 1):
            await log.stage(lsn, task.frame(spark, some), deliveries(some))
        async with log.scan(deliveries(every)) as staged:
            assert staged.schema == direct.schema
            assert partitions(staged, 2) == partitions(direct, 2)


async def test_a_session_that_reads_ahead_hands_out_what_its_journals_have(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One revision a round, and an ACK a revision: every transaction is scanned of many rounds."""
    routing = split_shards(2)
    async with world(tmp_path) as here:
        for first in (0, 20):
            await write(here, *range(first, first + 20), options=SPLIT)
        direct = Slice(spark, planner(here), BOTH, routing)
        log = await Log.open(spark, tmp_path / "log", epoch=1, shards=2)
        ahead = Options(read_ahead=True, round_max_fragments=1)
        staging = SliceLog(log, direct)
        seen: list[tuple[int, int]] = []
        async with session(here, log=staging, options=ahead) as following:
            while len(seen) < 2 * 40:
                taken = await following.next_checkpoint()
                wanted = await direct.shuffled(taken.deliveries, following.states)
                async with log.scan(taken.deliveries) as staged:
                    found = partitions(staged, 2)
                    for rows in found:  # the second transaction has the clocks of the first
                        writes = [row[f"d{row['_binding']}"]["id"] // 20 for row in rows]
                        assert writes == sorted(writes)
                    assert sorted(staged.columns) == sorted(wanted.columns)
                    assert found == partitions(wanted.select(*staged.columns), 2)
                seen += [
                    (row["_binding"], row["d0" if row["_binding"] == 0 else "d1"]["id"])
                    for rows in found
                    for row in rows
                ]
                following.consumed(taken)
            assert log.flushed_lsn > (3, 3)
        assert sorted(seen) == [(index, i) for index in (0, 1) for i in range(40)]
        assert names_in(tmp_path / "log") == []


async def test_a_round_may_turn_out_to_have_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    """All of them out of bounds: Spark then runs no task, and no shard reports."""
    some = [wrote(1, ONE, [10])]
    async with opened(spark, tmp_path) as log:
        manifest = await log.stage(1, TASK.frame(spark, []), deliveries(some))
        assert [segment.path for segment in manifest.segments] == [None, None]
        async with log.scan(deliveries(some)) as frame:
            assert rows_of(frame) == [[], []]
        await log.reclaim(checkpoint(some))
        assert names_in(log.directory) == []


# ---------------------------------------------------------------------------------------- retries


async def test_a_round_is_staged_by_one_attempt(spark: SparkSession, tmp_path: Path) -> None:
    """The first attempt of the job fails in one shard when the other shard's file is there."""
    some = [wrote(1, ONE, range(10, 40))]
    marks = tmp_path / "marks"
    marks.mkdir()

    def fail_once(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 0 and not (marks / "failed").exists():
            while not list(tmp_path.rglob("1-*.arrow")):
                time.sleep(0.02)
            (marks / "failed").write_text(str(context.getLocalProperty("spark.scheduler.pool")))
            raise OSError("the disk has a bad day")
        yield from batches

    async with opened(spark, tmp_path / "log") as log:
        manifest = await log.stage(1, through(TASK.frame(spark, some), fail_once), deliveries(some))
        assert (marks / "failed").read_text() == POOL
        assert sorted(
            f"round-00000001/{name}" for name in names_in(next(log.directory.iterdir()))
        ) == sorted(str(segment.path) for segment in manifest.segments)
        zombie = log.directory / "round-00000001" / "0-late.arrow"
        batch: Any = pyarrow.RecordBatch.from_pydict({"_shard": [0]})
        _write_file(zombie, iter([batch]))
        async with log.scan(deliveries(some)) as frame:
            assert rows_of(frame) == TASK.by_shard(some)
        await log.reclaim(checkpoint(some))
        assert names_in(log.directory) == []
        with pytest.raises(FileNotFoundError):
            _write_file(zombie, iter([batch]))


async def test_a_round_that_keeps_failing_fails_and_leaves_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    some = [wrote(1, ONE, [10, 20, 30])]
    count = tmp_path / "count"

    def fail(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        with count.open("a") as file:
            file.write(".")
        yield from batches
        raise OSError("no space left on device")

    alone = Task(shards=1)
    async with opened(spark, tmp_path / "log", shards=1) as log:
        with pytest.raises(Unavailable, match="round 1 could not be staged") as caught:
            await log.stage(1, through(alone.frame(spark, some), fail), deliveries(some))
        assert caught.value.why == "OSError: no space left on device"
        assert count.read_text() == "." * ATTEMPTS_MAX
        assert names_in(log.directory) == []
        await log.stage(1, alone.frame(spark, some), deliveries(some))


async def test_what_tasks_refuse_is_not_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql import functions as f

    some = [wrote(1, ONE, range(10, 40))]
    astray = TASK.frame(spark, some).repartitionById(2, f.lit(1) - f.col("_shard"))
    async with opened(spark, tmp_path) as log:
        with pytest.raises(Bug, match="it has rows of another shard"):
            await log.stage(1, astray, deliveries(some))
        assert names_in(log.directory) == []
        with pytest.raises(Bug, match="rows that no delivery of it has"):
            await log.stage(1, TASK.frame(spark, some), deliveries([wrote(1, ONE, [10])]))
        assert names_in(log.directory) == []
        await log.stage(1, TASK.frame(spark, some), deliveries(some))


# ---------------------------------------------------------------------------------------- fencing


async def test_a_newer_session_takes_the_place_of_an_older_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    first, second = [wrote(1, ONE, [10, 20])], [wrote(2, ONE, [30, 40])]
    alone = Task(shards=1)
    async with opened(spark, tmp_path, epoch=1, shards=1) as old:
        await old.stage(1, alone.frame(spark, first), deliveries(first))
        async with opened(spark, tmp_path, epoch=2, shards=1) as new:
            assert names_in(tmp_path) == [session_name(2)]
            with pytest.raises(Fenced, match="epoch 1 was replaced"):
                await old.stage(2, alone.frame(spark, second), deliveries(second))
            await new.stage(1, alone.frame(spark, first), deliveries(first))
            for epoch in (1, 2):
                with pytest.raises(Fenced, match=f"epoch {epoch} was replaced"):
                    await Log.open(spark, tmp_path, epoch=epoch, shards=1)
            assert names_in(tmp_path) == [session_name(2)]
            await old.close()
            async with new.scan(deliveries(first)) as frame:
                assert rows_of(frame, 1) == alone.by_shard(first)


async def test_a_session_that_is_replaced_while_its_tasks_write_is_not_tried_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    some = [wrote(1, ONE, [10, 20])]
    alone = Task(shards=1)
    root = tmp_path / "log"

    def replace(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        (root / session_name(1)).rename(tmp_path / "gone")
        yield from batches

    async with opened(spark, root, shards=1) as log:
        with pytest.raises(Fenced, match="epoch 1 was replaced"):
            await log.stage(1, through(alone.frame(spark, some), replace), deliveries(some))


async def test_a_directory_that_cannot_be_made_is_named(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot make a directory for the shuffle"):
        await Log.open(spark, tmp_path / "file", epoch=1, shards=1)


# --------------------------------------------------------------------------------------- teardown


def waiting_for(go: Path, there: Path) -> Callable[..., Iterator[pyarrow.RecordBatch]]:
    """Tasks that say they are there, then wait."""

    def wait(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            yield batch
            there.touch()
            while not go.exists():
                time.sleep(0.02)

    return wait


async def test_closing_ends_the_round_waits_for_scans_and_leaves_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    first, second = [wrote(1, ONE, range(10, 20))], [wrote(2, ONE, range(30, 40))]
    log = await Log.open(spark, tmp_path / "log", epoch=1, shards=2)
    await log.stage(1, TASK.frame(spark, first), deliveries(first))
    there = tmp_path / "there"
    endless = through(TASK.frame(spark, second), waiting_for(tmp_path / "never", there))
    staging = asyncio.create_task(log.stage(2, endless, deliveries(second)))
    async with log.scan(deliveries(first)) as frame:
        await eventually(there.exists)
        closing = asyncio.create_task(log.close())
        await asyncio.wait([staging])
        with pytest.raises(LogClosed):
            staging.result()
        assert not closing.done()
        assert rows_of(frame) == TASK.by_shard(first), "a running scan has lost its files"
    await closing
    assert names_in(tmp_path / "log") == []
    await log.close()
    with pytest.raises(LogClosed):
        await log.stage(3, endless, ())
    with pytest.raises(LogClosed):
        async with log.scan(()):
            pass


async def test_cancelling_a_round_ends_its_job_and_the_round_can_be_staged_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    some = [wrote(1, ONE, range(10, 20))]
    there = tmp_path / "there"
    endless = through(TASK.frame(spark, some), waiting_for(tmp_path / "never", there))
    async with opened(spark, tmp_path / "log") as log:
        staging = asyncio.create_task(log.stage(1, endless, deliveries(some)))
        await eventually(there.exists)
        staging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await staging
        active = spark.sparkContext.statusTracker().getActiveJobsIds
        await eventually(lambda: active() == [])  # Spark tells a moment after it has ended one
        assert names_in(log.directory) == []
        await log.stage(1, TASK.frame(spark, some), deliveries(some))
        async with log.scan(deliveries(some)) as frame:
            assert rows_of(frame) == TASK.by_shard(some)


async def test_opening_that_is_cancelled_leaves_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    for epoch in range(1, 20):
        (tmp_path / session_name(epoch) / "round-00000001").mkdir(parents=True)
    opening = asyncio.create_task(Log.open(spark, tmp_path, epoch=20, shards=1))
    await asyncio.sleep(0)  # it has begun
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert names_in(tmp_path) == []


CHILD = """
import asyncio, sys
from pathlib import Path
from penstock.engine import EngineOptions, open_spark
from penstock.shuffle.log import Log
from shuffle.staging import ONE, Task, deliveries, wrote
from shuffle.test_log import through, waiting_for

async def main(directory):
    spark = open_spark(EngineOptions(master="local[1]", conf={"spark.driver.memory": "512m"}))
    log = await Log.open(spark, directory / "log", epoch=1, shards=1)
    task = Task(shards=1)
    first, second = [wrote(1, ONE, [10])], [wrote(2, ONE, range(20, 25))]
    await log.stage(1, task.frame(spark, first), deliveries(first))
    endless = through(task.frame(spark, second), waiting_for(directory / "go", directory / "there"))
    await log.stage(2, endless, deliveries(second))

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_what_a_killed_process_has_left_goes_with_the_next_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Killed while a task of it writes, which may go on for a while: its place is gone."""
    tests = Path(__file__).parents[1]
    child = subprocess.Popen(  # noqa: ASYNC220 - it is killed
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tests)},
        stderr=subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: (tmp_path / "there").exists() or child.poll() is not None)
        assert child.poll() is None, "it has ended by itself"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert names_in(tmp_path / "log" / session_name(1)) == ["round-00000001", "round-00000002"]
    async with opened(spark, tmp_path / "log", epoch=2, shards=1):
        (tmp_path / "go").touch()
        assert names_in(tmp_path / "log") == [session_name(2)]
    assert names_in(tmp_path / "log") == []
