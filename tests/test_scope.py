"""Whose work it is: threads by domain, and what Spark keeps with a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from penstock.errors import Bug
from penstock.model.domain import Domain
from penstock.scope import SYSTEM, DomainThreads, Work, spark_scope, working_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROPERTIES = (
    "spark.jobGroup.id",
    "spark.job.description",
    "spark.job.interruptOnCancel",
    "spark.scheduler.pool",
)


def _slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    time.sleep(0.1)
    yield from batches


@pytest.fixture
def threads() -> Iterator[DomainThreads]:
    made = DomainThreads(4)
    yield made
    made.shutdown()


@pytest.mark.parametrize("busy", list(Domain))
async def test_a_busy_domain_leaves_the_threads_of_the_other_alone(
    threads: DomainThreads, busy: Domain
) -> None:
    """Two hundred calls that block, and one of the other domain: it is done before any of them."""
    asyncio.get_running_loop().set_default_executor(threads)
    [other] = [domain for domain in Domain if domain is not busy]
    release = threading.Event()

    async def blocked() -> None:
        with working_for(Work(busy)):
            await asyncio.to_thread(release.wait)

    async def quick() -> str:
        with working_for(Work(other)):
            return await asyncio.to_thread(lambda: threading.current_thread().name)

    calls = [asyncio.create_task(blocked()) for _ in range(200)]
    try:
        async with asyncio.timeout(30):
            assert (await quick()).startswith(f"penstock-{other}")
            assert (await asyncio.to_thread(lambda: threading.current_thread().name)).startswith(
                f"penstock-{SYSTEM}"
            )
    finally:
        release.set()
        await asyncio.gather(*calls)


@pytest.mark.spark
def test_nothing_stays_with_a_thread_that_is_used_again(spark: SparkSession) -> None:
    """Also after an error; and each job is its own work's, by group, pool and tags."""
    context = spark.sparkContext

    def left() -> list[str | None]:
        return [*map(context.getLocalProperty, PROPERTIES), *sorted(context.getJobTags())]

    def job(work: Work, group: str, *, fails: bool) -> tuple[list[str | None], list[str | None]]:
        inside: list[str | None] = []
        with (
            working_for(work),
            contextlib.suppress(ZeroDivisionError),
            spark_scope(context, group=group, description="a test"),
        ):
            inside += left()
            spark.range(3).count()
            assert 1 / (0 if fails else 1)
        return inside, left()

    with ThreadPoolExecutor(1) as one:
        storage = one.submit(job, Work(Domain.STORAGE, 7), "a", fails=True).result()
        compute = one.submit(job, Work(Domain.COMPUTE, 8), "b", fails=False).result()
    assert storage[0][0] == "a"
    assert storage[0][3:] == ["storage", "penstock.df.7", "penstock.domain.storage"]
    assert compute[0][3:] == ["compute", "penstock.df.8", "penstock.domain.compute"]
    assert storage[1] == compute[1] == [None] * len(PROPERTIES)
    tracker = context.statusTracker()
    assert len(tracker.getJobIdsForGroup("a")) == len(tracker.getJobIdsForGroup("b")) == 1


@pytest.mark.spark
def test_a_thread_runs_the_jobs_of_one_at_a_time(spark: SparkSession) -> None:
    context = spark.sparkContext
    with (
        spark_scope(context, group="a", description="a"),
        pytest.raises(Bug, match="jobs of a"),
        spark_scope(context, group="b", description="b"),
    ):
        pass
    assert context.getLocalProperty("spark.jobGroup.id") is None


@pytest.mark.spark
@pytest.mark.parametrize("busy", list(Domain))
def test_busy_jobs_of_a_domain_leave_slots_to_the_other(spark: SparkSession, busy: Domain) -> None:
    """Sixteen jobs wait for slots before one of the other domain comes: it is among the first."""
    [other] = [domain for domain in Domain if domain is not busy]
    ended: list[str] = []
    submitted = threading.Barrier(17)

    def job(domain: Domain, name: str) -> None:
        with (
            working_for(Work(domain)),
            spark_scope(spark.sparkContext, group=name, description=name),
        ):
            spark.range(0, 4, 1, 4).mapInArrow(_slowly, "id long").count()
        ended.append(name)

    def busy_job(number: int) -> None:
        submitted.wait(60)
        job(busy, f"busy {number}")

    with ThreadPoolExecutor(17) as pool:
        calls = [pool.submit(busy_job, number) for number in range(16)]
        submitted.wait(60)
        time.sleep(0.5)  # all of their tasks are in the queue by now
        calls.append(pool.submit(job, other, "other"))
        for call in calls:
            call.result()
    assert ended.index("other") < 8


@pytest.mark.spark
def test_the_pools_are_those_of_the_domains(spark: SparkSession) -> None:
    """Spark reads them once, when it starts: one that it does not know would share nothing."""
    pools = spark.sparkContext._jsc.sc().getAllPools()  # type: ignore[union-attr]
    found = {pools.apply(at).name(): pools.apply(at) for at in range(pools.size())}
    assert {*found} >= {*(domain.value for domain in Domain), SYSTEM}
    for domain in Domain:
        assert str(found[domain.value].schedulingMode()) == "FAIR"
        assert found[domain.value].minShare() == 1
