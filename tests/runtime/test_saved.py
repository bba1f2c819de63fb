"""Files that one Spark job leaves to the next: a page that was damaged meanwhile is not used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import types as t

from penstock.native.collect import collect_batches
from penstock.runtime.prepared import Queries
from penstock.runtime.spark_tasks import read_handoff, write_handoff

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def flip(file: Path) -> None:
    """One bit within the values of the first column."""
    group = pq.ParquetFile(file).metadata.row_group(0).column(0)
    data = bytearray(file.read_bytes())
    data[group.data_page_offset + group.total_compressed_size * 3 // 4] ^= 8
    file.write_bytes(bytes(data))
    for checksum in file.parent.glob(".*.crc"):  # Hadoop's own, which a local disk may have
        checksum.unlink()


def test_what_was_saved_between_jobs(spark: SparkSession, tmp_path: Path) -> None:
    documents = {0: spark.range(5_000).selectExpr("id * id AS id")}
    write_handoff(documents, str(tmp_path / "saved"))
    kept = read_handoff(spark, documents, str(tmp_path / "saved"))[0]
    right = kept.selectExpr("sum(id)").first()
    flip(next((tmp_path / "saved").glob("*.parquet")))
    with pytest.raises((PySparkException, Py4JJavaError)):
        kept.selectExpr("sum(id)").first()
    assert right is not None


def test_what_was_put_into_a_slot(spark: SparkSession, tmp_path: Path) -> None:
    queries = Queries(spark, tmp_path / "slots")
    schema = t.StructType([t.StructField("id", t.LongType())])
    rows = {0: pa.table({"id": pa.array([n * n for n in range(1000)], pa.int64())})}
    with queries.lend(rows, {0: schema}, lambda frames: frames[0], key="k") as frame:
        with collect_batches(frame) as batches:
            assert sum(batch.num_rows for batch in batches) == 1000
        (slot,) = (tmp_path / "slots").glob("*.parquet")
        flip(slot)
        with pytest.raises((PySparkException, Py4JJavaError)), collect_batches(frame):
            pass
    queries.close()
