"""Plans that are evaluated without a job: the same rows, the same errors, and nothing is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.native import direct
from penstock.native.collect import collect_batches
from penstock.native.direct import SmallFrame, cancel_group

pa: Any = pyarrow
pq: Any = pyarrow.parquet

pytestmark = pytest.mark.spark

QUERIES = {
    "projection": "select k, upper(t) as t, d * 2 as d from source where k % 2 = 0",
    "hash aggregate": "select k % 3 as g, count(*) as n, max(d) as m from source group by 1",
    "sort aggregate": "select k % 3 as g, max(t) as t, min_by(t, k) as f from source group by 1",
    "collected": "select k % 2 as g, sort_array(collect_list(t)) as all from source group by 1",
    "window": "select k, row_number() over (partition by k % 3 order by d desc) as n from source",
    "exploded": "select k, each from source lateral view explode(split(t, '-')) as each",
    "json": "select k, from_json(concat('{\"a\":', k, '}'), 'a bigint') as j from source",
    "map": "select k, map_from_arrays(array('a', 'a'), array(k, k + 1)) as m from source",
    "time": "select k, cast(timestamp_micros(k) as string) as at from source",
    "decimal": "select cast(k as decimal(38, 0)) as big, cast(t as binary) as raw from source",
    "nothing": "select k from source where k < 0",
}


def write(path: Path, first: int, count: int) -> None:
    keys = list(range(first, first + count))
    table = pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            "t": pa.array([None if k % 7 == 0 else f"t-{k}" for k in keys], pa.utf8()),
            "d": pa.array([k / 4 for k in keys], pa.float64()),
        }
    )
    beside = path.with_suffix(".next")
    pq.write_table(table, beside, compression="none", use_dictionary=False)
    beside.rename(path)


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> tuple[Path, DataFrame]:
    path = tmp_path / "rows.parquet"
    write(path, 1, 50)
    return path, spark.read.parquet(str(path)).coalesce(1)


def query(frame: DataFrame, text: str) -> DataFrame:
    frame.createOrReplaceTempView("source")
    return frame.sparkSession.sql(text)


def answer(small: SmallFrame) -> list[str]:
    found = small.evaluate()
    assert found is not None, "it took a job"
    return sorted(repr(row) for batch in found for row in batch.to_pylist())


def by_job(frame: DataFrame) -> list[str]:
    return sorted(map(repr, frame.toArrow().to_pylist()))


@pytest.mark.parametrize("name", QUERIES)
def test_the_rows_are_those_of_a_job_again_and_again(
    source: tuple[Path, DataFrame], tmp_path: Path, name: str
) -> None:
    path, frame = source
    found = query(frame, QUERIES[name])
    small = SmallFrame(found, tmp_path / "answer")
    for _ in range(3):
        assert answer(small) == by_job(found), "a job between two of them disturbs neither"
    size = path.stat().st_size
    write(path, 101, 50)
    if path.stat().st_size == size:  # which a plan relies on
        other = query(frame.sparkSession.read.parquet(str(path)).coalesce(1), QUERIES[name])
        assert answer(small) == by_job(other), "of what its file holds by now"


def test_python_in_a_plan_takes_a_job(source: tuple[Path, DataFrame], tmp_path: Path) -> None:
    _, frame = source
    mapped = frame.select("k").mapInArrow(lambda batches: batches, "k bigint")
    assert SmallFrame(mapped, tmp_path / "answer").evaluate() is None
    with collect_batches(SmallFrame(mapped, tmp_path / "answer")) as batches:
        assert sum(batch.num_rows for batch in batches) == 50


def test_several_partitions_take_a_job(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(0, 10, 1, numPartitions=3)
    small = SmallFrame(frame, tmp_path / "answer")
    assert small.evaluate() is None
    with collect_batches(small) as batches:
        assert sum(batch.num_rows for batch in batches) == 10


def test_an_error_is_told_as_a_job_tells_it(source: tuple[Path, DataFrame], tmp_path: Path) -> None:
    _, frame = source
    failing = query(frame, "select 1 / (k - 7) as x from source")
    with (
        pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"),
        collect_batches(SmallFrame(failing, tmp_path / "answer")),
    ):
        pass
    fine = query(frame, "select k from source")
    assert len(answer(SmallFrame(fine, tmp_path / "fine"))) == 50, "nothing is left behind"


def test_no_job_is_run_and_no_memory_is_kept(
    spark: SparkSession, source: tuple[Path, DataFrame], tmp_path: Path
) -> None:
    _, frame = source
    small = SmallFrame(query(frame, QUERIES["window"]), tmp_path / "answer")
    spark.sparkContext.setJobGroup("direct-test", "none")
    for _ in range(20):
        answer(small)
    tracker = spark.sparkContext.statusTracker()
    assert tracker.getJobIdsForGroup("direct-test") == []
    assert direct._direct_plans(spark).memoryUsed() == 0


def test_it_can_be_cancelled(
    spark: SparkSession, source: tuple[Path, DataFrame], tmp_path: Path
) -> None:
    _, frame = source
    slow = query(frame, "select java_method('java.lang.Thread', 'sleep', 60000L * k) from source")
    small = SmallFrame(slow, tmp_path / "answer")
    found: list[object] = []

    def run() -> None:
        spark.sparkContext.setJobGroup("slow", "test")
        found.append(small.evaluate())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 40  # less than the first row takes
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.2)
        cancel_group(spark, "slow")
    assert small._plan is not None
    assert found == [None]
    assert len(answer(SmallFrame(query(frame, QUERIES["projection"]), tmp_path / "next"))) == 25


def test_what_tasks_know_of_the_session_is_known(
    spark: SparkSession, source: tuple[Path, DataFrame], tmp_path: Path
) -> None:
    """A pattern that is no literal is compiled in the task, as its settings say."""
    _, frame = source
    policy = "spark.sql.legacy.timeParserPolicy"
    text = "select date_format(timestamp_micros(k), concat('aaa', if(k < 0, 'x', ''))) as d"
    spark.conf.set(policy, "LEGACY")  # others do not know so many letters
    try:
        found = query(frame, f"{text} from source")
        assert answer(SmallFrame(found, tmp_path / "answer")) == by_job(found)
    finally:
        spark.conf.unset(policy)
