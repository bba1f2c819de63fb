"""What one job leaves to the next: in the blob store, no garbage, swept with its session."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import UserError
from penstock.journal.blobs import open_blobs
from penstock.journal.ownership import is_used, own_objects
from penstock.runtime import job_runner
from penstock.runtime.control import Control
from penstock.runtime.job_runner import HANDOFF, JobRunner
from penstock.runtime.spark_tasks import write_handoff

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def runner(spark: SparkSession, directory: Path, epoch: int, url: str = "") -> JobRunner:
    blobs: Any = open_blobs(url or str(directory / "blobs"))
    return JobRunner(
        "acme/views",
        (),
        SimpleNamespace(blobs=blobs),  # type: ignore[arg-type]
        lambda _: spark,
        epoch=epoch,
        local_dir=directory / "local",
        control=Control(),
    )


async def test_it_lies_in_the_blob_store_is_no_object_of_it_and_goes_with_its_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    first = runner(spark, tmp_path, epoch=1)
    await first.start(0)
    documents = {0: spark.range(10).toDF("id")}
    await first.in_spark(lambda: write_handoff(documents, first.handoff_path("1-gathered-1")))
    assert first.jobs_run == 1
    blobs = open_blobs(str(tmp_path / "blobs"))
    listed = [found.path for found in blobs.list()]
    assert [path for path in listed if path.endswith(".parquet")]
    assert all(path.startswith(f"{HANDOFF}/") for path in listed)
    assert list(own_objects(blobs.list())) == [], "garbage collection does not touch it"
    assert not is_used(blobs)

    again = runner(spark, tmp_path, epoch=1)
    await again.start(0)
    assert len(list(blobs.list())) == len(listed), "a session keeps what is its own"
    await runner(spark, tmp_path, epoch=2).start(0)
    assert list(blobs.list()) == [], "the next one sweeps it"


async def test_it_lies_on_this_machine_where_spark_cannot_name_the_blob_store(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = runner(spark, tmp_path, 1, "s3://bucket/penstock?region=us-east-1")
    await jobs.start(0)
    assert jobs.handoff_path("x").startswith(f"file://{tmp_path}/local/")
    monkeypatch.setattr(job_runner, "runs_here", lambda _: False)
    assert not jobs.can_hand_over
    with pytest.raises(UserError, match="two Spark jobs"):
        jobs.handoff_path("x")
