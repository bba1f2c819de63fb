"""`format("penstock")`: committed documents only, each once, in batches and in streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from journal.publishing import ORDERS, World, batch, swept, world
from penstock.catalog import desired
from penstock.errors import UsageError
from penstock.journal.publisher import Mapped, PublisherOptions
from penstock.journal.source import SourceOptions
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.model.spec import Catalog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

EAGER = CompactionOptions(inputs_min=2)

# ---------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "what"),
    [
        pytest.param({}, "needs the name of a collection", id="no collection"),
        pytest.param({"collection": "a", "fom": "x"}, "no option fom", id="unknown option"),
        pytest.param({"collection": "a", "startingOffsets": "soon"}, "place to begin", id="start"),
        pytest.param({"collection": "a", "maxRowsPerTrigger": "0"}, "positive", id="no rows"),
        pytest.param({"collection": "a", "meta": "1"}, "neither true nor false", id="meta"),
        pytest.param({"collection": "a", "keepText": "no"}, "keepText 'no' is neither", id="text"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        SourceOptions.parse(options)


def test_options_have_no_case_and_a_path_is_a_collection() -> None:
    options = SourceOptions.parse({"PATH": "a", "maxrowspertrigger": "7", "startingOffsets": "120"})
    assert (options.collection, options.rows_max, options.starting) == ("a", 7, 120)


# ------------------------------------------------------------------------------------------ stage


@contextlib.asynccontextmanager
async def deployed(data: Path) -> AsyncIterator[World]:
    """A data directory with a catalog in it."""
    async with world(data, f"sqlite:///{data}/consensus.db") as here:
        await desired.apply(here.journals.store, Catalog(collections=(ORDERS,)))
        yield here


async def publish(here: World, numbers: Sequence[int], *, commit: bool = True) -> None:
    """Documents of two partitions in one transaction; every seventh is too large to be inline."""
    publisher = here.publisher(Mapped(spec=ORDERS), options=PublisherOptions())
    documents = [
        {
            "id": n,
            "region": "eu" if n % 2 else "us",
            "text": os.urandom(4096).hex() if n % 7 == 0 else "",
        }
        for n in numbers
    ]
    await publisher.publish(0, batch(documents))
    if commit:
        await publisher.commit_now()
    else:
        await publisher.flush()


def read(spark: SparkSession, data: Path, **options: str) -> DataFrame:
    return (
        spark.read.format("penstock")
        .options(data=str(data), collection="acme/orders", **options)
        .load()
    )


def ids(frame: DataFrame) -> list[int]:
    return sorted(row["id"] for row in frame.select("id").collect())


# ------------------------------------------------------------------------------------------ batch


@pytest.mark.spark
def test_a_batch_has_what_is_committed_and_nothing_else(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def write() -> None:
        async with deployed(tmp_path) as here:
            await publish(here, range(20))
            await publish(here, range(100, 120), commit=False)
            await publish(here, range(20, 30))
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            await publish(here, range(30, 40))

    asyncio.run(write())
    everything = read(spark, tmp_path)
    assert ids(everything) == list(range(40))
    assert everything.where("id < 7 AND region = 'us'").count() == 4
    assert ids(everything) == list(range(40)), "a filter of one query is not that of the next"
    assert ids(read(spark, tmp_path, selector="region=eu")) == list(range(1, 40, 2))
    stamped = read(spark, tmp_path, meta="true")
    assert stamped.columns[-3:] == ["_clock", "_producer", "_flags"]
    assert stamped.select("_producer", "_clock").distinct().count() == 40
    some = spark.read.format("penstock").schema("text STRING, id BIGINT")
    frame = some.options(data=str(tmp_path), collection="acme/orders").load()
    assert frame.columns == ["text", "id"]
    assert ids(frame) == list(range(40))


# ----------------------------------------------------------------------------------------- stream


class Sink:
    """What a query's batches were, by number: the last delivery of a batch counts."""

    def __init__(self) -> None:
        self.batches: dict[int, list[int]] = {}

    def take(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = ids(frame)

    @property
    def ids(self) -> list[int]:
        return sorted(n for batch in self.batches.values() for n in batch)


@contextlib.contextmanager
def streaming(
    spark: SparkSession, data: Path, sink: Sink, *, once: bool = False, **options: str
) -> Iterator[StreamingQuery]:
    stream = spark.readStream.format("penstock").options(
        data=str(data), collection="acme/orders", **options
    )
    writer = stream.load().writeStream.foreachBatch(sink.take)
    writer = writer.option("checkpointLocation", str(data / "checkpoint"))
    query = (writer.trigger(availableNow=True) if once else writer).start()
    try:
        yield query
    finally:
        query.stop()


@pytest.mark.spark
def test_a_stream_delivers_every_commit_once_through_restarts(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A span is open over a restart, its rows are moved by compaction, and garbage is collected."""
    sink = Sink()

    async def first() -> None:
        async with deployed(tmp_path) as here:
            for n in range(0, 30, 10):
                await publish(here, range(n, n + 10))
            spanning = here.publisher()
            await spanning.publish(0, batch([{"id": 1000, "region": "eu"}]))
            await spanning.flush()
            await asyncio.to_thread(run_once, 12)
            assert sink.ids == list(range(30))
            await publish(here, range(30, 40))
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            await swept(here)
            await spanning.commit_now()
            await asyncio.to_thread(run_once, 12)
            assert sink.ids == [*range(40), 1000]
            await asyncio.to_thread(run_once, 12)
            assert sink.ids == [*range(40), 1000], "nothing new: nothing delivered"

    def run_once(rows_max: int) -> None:
        with streaming(spark, tmp_path, sink, once=True, maxRowsPerTrigger=str(rows_max)) as query:
            query.awaitTermination()

    asyncio.run(first())
    assert all(len(batch) <= 12 for batch in sink.batches.values())
    offsets = json.loads((tmp_path / "checkpoint/offsets/0").read_text().splitlines()[-1])
    assert offsets.keys() == {"revision", "journals"}
    assert set(offsets["journals"]) <= {
        "acme/orders/region=eu/pivot=00",
        "acme/orders/region=us/pivot=00",
    }


@pytest.mark.spark
def test_a_stream_may_begin_with_what_is_committed_from_now_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink = Sink()

    async def story() -> None:
        async with deployed(tmp_path) as here:
            await publish(here, range(10))
            with streaming(spark, tmp_path, sink, startingOffsets="latest") as query:
                await asyncio.to_thread(query.processAllAvailable)
                await publish(here, range(10, 20))
                await asyncio.to_thread(query.processAllAvailable)

    asyncio.run(story())
    assert sink.ids == list(range(10, 20))


# ------------------------------------------------------------------------------------------ proof

SCRIPT = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession

data, out = Path(sys.argv[1]), Path(sys.argv[2])
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .getOrCreate()
)

def count(frame, number):
    (out / f"{number}.tmp").write_text(str(frame.count()))
    (out / f"{number}.tmp").rename(out / f"{number}.count")

query = (
    spark.readStream.format("penstock")
    .option("data", str(data))
    .option("collection", "acme/orders")
    .load()
    .writeStream.option("checkpointLocation", str(data / "checkpoint"))
    .foreachBatch(count)
    .start()
)
sys.stdin.readline()
query.processAllAvailable()
query.stop()
"""


def counted(out: Path) -> int:
    return sum(int(file.read_text()) for file in out.glob("*.count"))


@pytest.mark.spark
@pytest.mark.slow
def test_a_plain_script_counts_what_is_committed_while_everything_goes_on(tmp_path: Path) -> None:
    """Writers, compaction and garbage collection beside a stream that knows of none of them."""
    script, out = tmp_path / "count.py", tmp_path / "counts"
    script.write_text(SCRIPT)
    out.mkdir()
    committed = 0

    async def write(here: World, stop: asyncio.Event, calm: asyncio.Lock) -> None:
        nonlocal committed
        first = 0
        while not stop.is_set():
            async with calm:
                size = 1 + first % 40
                await publish(here, range(first, first + size))
                committed += size
                await publish(here, range(100_000, 100_003), commit=False)
                first += size
            await asyncio.sleep(0.02)

    async def reached(count: int) -> None:
        while counted(out) < count:
            assert process.poll() is None, (tmp_path / "stderr").read_text()[-4000:]
            await asyncio.sleep(0.1)

    async def story() -> None:
        async with deployed(tmp_path) as here, asyncio.TaskGroup() as writers:
            stop, calm = asyncio.Event(), asyncio.Lock()
            for _ in range(2):
                writers.create_task(write(here, stop, calm))
            await reached(1)
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            await reached(committed)
            # Collecting as if days had passed: nobody may have an object that is not named yet.
            async with calm:
                await reached(committed)
                gone = await swept(here)
                assert gone.deleted
            await reached(committed + 50)
            stop.set()
        assert process.stdin is not None
        process.stdin.write("stop\\n")
        process.stdin.close()

    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    with (tmp_path / "stderr").open("w") as stderr:
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(out)],
            stdin=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
        try:
            asyncio.run(story())
            assert process.wait(timeout=120) == 0, (tmp_path / "stderr").read_text()[-4000:]
        finally:
            process.kill()
            process.wait()
    assert counted(out) == committed
