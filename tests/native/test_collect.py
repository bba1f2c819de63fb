"""Rows at the driver: all of them, once, in memory or beside it, and errors as Spark has them."""

from __future__ import annotations

import io
import tempfile

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from penstock.errors import Unavailable
from penstock.native import collect
from penstock.native.collect import collect_batches

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "in a file"])
def test_every_row_arrives_once(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    if not in_memory:
        monkeypatch.setattr(collect, "MEMORY_BYTES", 100)
    frame = spark.range(0, 25_000, 1, numPartitions=5).select("id", f.hex("id").alias("text"))
    with collect_batches(frame) as batches:
        found = [(row["id"], row["text"]) for batch in batches for row in batch.to_pylist()]
    assert sorted(found) == [(n, f"{n:X}") for n in range(25_000)]


class Rotten(io.BytesIO):
    """A disk that gives back another bit than it was given."""

    def seek(self, to: int, whence: int = 0) -> int:
        at = self.tell()
        if at > 1000:
            super().seek(at // 2)
            (byte,) = self.read(1)
            super().seek(at // 2)
            self.write(bytes([byte ^ 4]))
        return super().seek(to, whence)


def test_what_a_disk_has_changed_is_not_used(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "MEMORY_BYTES", 100)
    monkeypatch.setattr(tempfile, "TemporaryFile", Rotten)
    with (
        pytest.raises(Unavailable, match="not what was written"),
        collect_batches(spark.range(25_000)),
    ):
        pass


def test_no_rows_are_no_batches_or_empty_ones(spark: SparkSession) -> None:
    with collect_batches(spark.range(10).where("id > 10")) as batches:
        assert sum(batch.num_rows for batch in batches) == 0


def test_a_job_that_fails_raises_what_it_failed_with(spark: SparkSession) -> None:
    frame = spark.range(0, 100, 1, numPartitions=3).select(
        f.when(f.col("id") == 70, f.raise_error(f.lit("no seventy"))).otherwise(f.col("id"))
    )
    with pytest.raises(PySparkException, match="no seventy"), collect_batches(frame):
        pass
    with collect_batches(spark.range(3)) as batches:  # and the next one is not troubled by it
        assert sum(batch.num_rows for batch in batches) == 3


def test_who_stops_in_the_middle_leaves_nothing_behind(spark: SparkSession) -> None:
    with collect_batches(spark.range(50_000)) as batches:
        assert next(batches).num_rows
    with collect_batches(spark.range(3)) as batches:
        assert sum(batch.num_rows for batch in batches) == 3
