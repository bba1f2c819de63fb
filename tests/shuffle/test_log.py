"""The log of a session on a real Spark: staged once, scanned in order, gone when consumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.shuffle.log import Log
from shuffle.staging import ONE, TWO, Staged, Task, checkpoint, deliveries, wrote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

TASK = Task()


def names_in(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def rows_of(frame: DataFrame, shards: int) -> list[list[Staged]]:
    """Rows by partition, as they come."""
    from pyspark.sql import functions as f

    found: list[list[Staged]] = [[] for _ in range(shards)]
    for row in frame.withColumn("partition", f.spark_partition_id()).collect():
        assert row["_shard"] == row.partition
        staged = Staged(
            -row["_priority"], row["_adj_clock"], row["_producer"], row["_binding"], row["_clock"]
        )
        assert row[f"d{staged.binding}"]["a.b"] == staged.text
        found[row.partition].append(staged)
    return found


async def test_the_example_of_the_design(spark: SparkSession, tmp_path: Path) -> None:
    one, two = wrote(1, ONE, [10, 20]), wrote(1, TWO, [15])
    log = await Log.open(spark, tmp_path, epoch=1, shards=2)
    manifest = await log.stage(1, TASK.frame(spark, [one, two]), deliveries([one, two]))
    assert manifest.rows == 3
    async with log.scan(deliveries([two])) as frame:
        assert rows_of(frame, 2) == TASK.by_shard([two])
    async with log.scan(deliveries([two])) as frame:
        assert rows_of(frame, 2) == [[], []]
    await log.reclaim(checkpoint([two]))
    async with log.scan(deliveries([one])) as frame:
        assert rows_of(frame, 2) == TASK.by_shard([one])
    await log.reclaim(checkpoint([one]))
    assert log.bytes == (0, 0)
    assert names_in(log.directory) == []
    await log.close()
    assert names_in(tmp_path) == []
