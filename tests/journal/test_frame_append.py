"""Frames that Spark tasks write: as one transaction, and each batch of a stream once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from journal import frame_crashing
from journal.crashing import DOCUMENTS
from journal.frame_crashing import Job, staged, stores_of
from journal.publishing import ORDERS, World, swept, world
from penstock.errors import UserError
from penstock.journal.frame_append import FramePart, StreamBatch, commit_frame, plan_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Run = Callable[[Job], int]
KILLED = 137


async def ids(here: World) -> Counter[int]:
    return Counter(d["id"] for found in (await here.read()).values() for d in found)


# ----------------------------------------------------------------------------- batches of a stream


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),  # times that Spark sends the batch
            st.integers(0, 2),  # attempts that stage it, and die
            st.booleans(),  # two drivers commit it at once
        ),
        max_size=4,
    )
)
async def test_a_batch_is_appended_once_however_often_it_is_sent(
    batches: list[tuple[int, int, bool]],
) -> None:
    expected: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        async with world(Path(directory)) as here:
            for number, (times, dead, at_once) in enumerate(batches):
                rows: list[dict[str, object]] = [
                    {"id": 10 * number + n, "region": ("eu", "us")[n % 2]} for n in range(4)
                ]
                expected.update(int(str(row["id"])) for row in rows)

                async def parts(rows: list[dict[str, object]] = rows) -> list[FramePart]:
                    write = await plan_frame(stores_of(here), ORDERS, b"")
                    return staged(write, rows[:3], rows[3:], [])

                async def send(number: int = number) -> int:
                    batch = StreamBatch("q", number)
                    return await commit_frame(stores_of(here), ORDERS, await parts(), batch=batch)

                for _ in range(dead):
                    await parts()
                sent = [await send() for _ in range(times - 1)]
                sent += await asyncio.gather(*[send() for _ in range(2 if at_once else 1)])
                assert sorted(sent, reverse=True) == [4] + [0] * (len(sent) - 1)
            assert await ids(here) == expected


async def test_a_batch_before_the_last_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        stores = stores_of(here)
        parts = staged(await plan_frame(stores, ORDERS, b""), [{"id": 1, "region": "eu"}])
        await commit_frame(stores, ORDERS, parts, batch=StreamBatch("q", 7))
        again = staged(await plan_frame(stores, ORDERS, b""), [{"id": 2, "region": "eu"}])
        with pytest.raises(UserError, match="batch 6 of a streaming query") as caught:
            await commit_frame(stores, ORDERS, again, batch=StreamBatch("q", 6))
        assert "checkpoint was turned back" in str(caught.value)
        assert await ids(here) == {1: 1}
        await commit_frame(stores, ORDERS, again, batch=StreamBatch("another", 0))
        assert await ids(here) == {1: 1, 2: 1}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a job in a process of its own; how that ended."""
    with subprocess.Popen(
        [sys.executable, frame_crashing.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        },
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(job: Job) -> int:
            stdin.write(msgspec.json.encode(job) + b"\n")
            stdin.flush()
            return int(stdout.readline())

        yield run
        stdin.close()


@pytest.mark.parametrize(
    "failpoint",
    [
        *(f"staging.object:{n}" for n in (1, 3)),
        *(f"publisher.adopted:{n}" for n in (1, 2, 3)),
        *(f"statelog.after-send:{n}" for n in (1, 2)),
        "publisher.acks",
        "publisher.done",
    ],
)
async def test_a_driver_that_dies_anywhere_leaves_all_of_a_batch_or_nothing(
    tmp_path: Path, run: Run, failpoint: str
) -> None:
    """Before the commit, and after it before Spark has noted it: the batch comes again."""
    url = f"sqlite:///{tmp_path / 'consensus.db'}"
    everything = Counter(int(str(document["id"])) for document in DOCUMENTS)
    assert run(Job(str(tmp_path), url, 0, failpoint)) == KILLED
    async with world(tmp_path, url) as here:
        left = await ids(here)
        assert left in (everything, Counter())
        committed = failpoint in ("publisher.acks", "publisher.done")
        assert left == everything or not committed
    for _ in range(2):
        assert run(Job(str(tmp_path), url, 0, None)) == 0
    async with world(tmp_path, url) as here:
        assert await ids(here) == everything
        await swept(here)
        assert await ids(here) == everything, "what dead drivers left is garbage, and nothing else"
    assert run(Job(str(tmp_path), url, 1, None)) == 0
    async with world(tmp_path, url) as here:
        assert await ids(here) == everything + everything


# ------------------------------------------------------------------------------------------ Spark

CATALOG: dict[str, Any] = {
    "collections": {
        "acme/orders": {
            "key": ["/id"],
            "schema": {
                "type": "object",
                "required": ["id", "region"],
                "properties": {
                    "id": {"type": "integer"},
                    "region": {"type": "string"},
                    "at": {"type": "string", "format": "date-time"},
                    "day": {"type": "string", "format": "date"},
                    "price": {"type": "string", "format": "number"},
                    "mail": {"type": "string", "redact": {"strategy": "block"}},
                },
            },
            "projections": {"region": {"location": "/region", "partition": True}},
        }
    }
}


@pytest.fixture
def p(tmp_path: Path) -> Iterator[penstock.Penstock]:
    (tmp_path / "catalog.yaml").write_text(json.dumps(CATALOG))
    with penstock.open(tmp_path / "data") as opened:
        opened.apply(tmp_path / "catalog.yaml")
        yield opened


def save(frame: DataFrame, directory: Path, **options: str) -> None:
    mode = options.pop("mode", "append")
    given = {"data": str(directory / "data"), "collection": "acme/orders", **options}
    frame.write.format("penstock").mode(mode).options(**given).save()


def numbers(p: penstock.Penstock) -> list[int]:
    return sorted(row["id"] for row in p.read("acme/orders", columns=["id"]).collect())


@pytest.mark.spark
def test_a_frame_is_saved_as_one_transaction(
    spark: SparkSession, tmp_path: Path, p: penstock.Penstock
) -> None:
    frame = spark.range(0, 20, numPartitions=3).selectExpr(
        "id",
        "IF(id % 2 = 0, 'us', 'eu') AS region",
        "IF(id = 3, NULL, TIMESTAMP '2026-01-31 10:00:00 UTC') AS at",
        "DATE '2026-01-31' AS day",
        "CAST('9.50' AS DECIMAL(10, 2)) AS price",
        "'a@b' AS mail",
    )
    save(frame, tmp_path)
    rows = {row["id"]: row.asDict() for row in p.read("acme/orders").collect()}
    assert sorted(rows) == list(range(20))
    assert {Decimal(row["price"]) for row in rows.values()} == {Decimal("9.50")}
    assert {row["mail"] for row in rows.values()} == {None}, "it is blocked"
    assert rows[3]["at"] is None
    lines = [j.state.records[-1].revision for j in p.journals("acme/orders")]
    assert len(lines) == 2
    assert len(set(lines)) == 1, "both partitions in one store transaction"
    save(frame.where("id < 5"), tmp_path)
    assert len(numbers(p)) == 25


@pytest.mark.spark
@pytest.mark.parametrize(
    ("columns", "options", "what"),
    [
        (["id"], {}, "nothing was appended: 20 documents do not fit the schema of acme/orders"),
        (["id", "'eu' region"], {"mode": "overwrite"}, "collections are appended to, and never"),
        (["id", "'eu' region"], {"collection": "acme/order"}, "there is no collection acme/order"),
        (
            ["id", "'eu' region"],
            {"colection": "acme/order"},
            'format("penstock") has no option colection',
        ),
        (["id", "'eu' region"], {"data": "/nowhere"}, "there is no deployment here"),
    ],
)
def test_mistakes_are_told_in_a_few_lines(
    spark: SparkSession,
    tmp_path: Path,
    p: penstock.Penstock,
    columns: list[str],
    options: dict[str, str],
    what: str,
) -> None:
    from pyspark.errors import AnalysisException

    frame = spark.range(0, 20, numPartitions=2).selectExpr(*columns)
    with pytest.raises(AnalysisException) as caught:
        save(frame, tmp_path, **options)
    text = str(caught.value)
    assert f"penstock: {what}" in text.splitlines()[0]
    assert "Traceback" not in text
    assert len(text.splitlines()) < 24
    assert numbers(p) == []


@pytest.mark.spark
def test_mistakes_of_readers_are_told_in_a_few_lines(
    spark: SparkSession, tmp_path: Path, p: penstock.Penstock
) -> None:
    from pyspark.errors import AnalysisException

    source = spark.read.format("penstock").option("data", str(tmp_path / "data"))
    with pytest.raises(AnalysisException) as caught:
        source.load("acme/order")
    assert "penstock: there is no collection acme/order\n  fix   did you mean" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    stream = spark.readStream.format("penstock").option("data", str(tmp_path / "typo"))
    with pytest.raises(AnalysisException) as caught:
        stream.load("acme/orders")
    assert "penstock: there is no deployment here" in str(caught.value).splitlines()[0]
    assert "Traceback" not in str(caught.value)


class Stream:
    """Files of documents that a query takes into the collection."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self._directory = directory
        self.checkpoint = directory / "checkpoint"
        (directory / "in").mkdir()

    def add(self, name: str, *documents: dict[str, Any]) -> None:
        text = "".join(json.dumps(document) + "\n" for document in documents)
        (self._directory / "in" / f"{name}.json").write_text(text)

    def run(self, **options: str) -> None:
        """Run the query until it has read all files; one file is a batch."""
        files = self._spark.readStream.schema("id BIGINT, region STRING")
        frame = files.option("maxFilesPerTrigger", 1).json(str(self._directory / "in"))
        given = {"data": str(self._directory / "data"), "collection": "acme/orders", **options}
        query = (
            frame.writeStream.format("penstock")
            .option("checkpointLocation", str(self.checkpoint))
            .options(**given)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def forget(self, batch: int) -> None:
        """As if the driver had died after its commit, before it noted the end of the batch."""
        for file in (f"{batch}", f".{batch}.crc"):
            (self.checkpoint / "commits" / file).unlink()


@pytest.mark.spark
def test_a_stream_is_saved_exactly_once_through_restarts(
    spark: SparkSession, tmp_path: Path, p: penstock.Penstock
) -> None:
    stream = Stream(spark, tmp_path)
    stream.add("a", {"id": 1, "region": "eu"}, {"id": 2, "region": "us"})
    stream.run()
    assert numbers(p) == [1, 2]
    stream.forget(0)
    stream.add("b", {"id": 3, "region": "eu"})
    stream.run()
    assert numbers(p) == [1, 2, 3], "batch 0 was sent again"
    stream.run()
    assert numbers(p) == [1, 2, 3], "nothing new"
    kept = tmp_path / "kept"
    shutil.copytree(stream.checkpoint, kept)
    stream.add("c", {"id": 4, "region": "eu"})
    stream.run()
    stream.add("d", {"id": 5, "region": "eu"})
    stream.run()
    assert numbers(p) == [1, 2, 3, 4, 5]
    shutil.rmtree(stream.checkpoint)
    kept.rename(stream.checkpoint)
    with pytest.raises(Exception, match="batch 2 of a streaming query was refused") as caught:
        stream.run()
    assert "Traceback" not in str(caught.value)
    assert numbers(p) == [1, 2, 3, 4, 5]


@pytest.mark.spark
def test_a_stream_goes_on_after_its_schema_was_corrected(
    spark: SparkSession, tmp_path: Path, p: penstock.Penstock
) -> None:
    stream = Stream(spark, tmp_path)
    stream.add("a", {"id": 1, "region": "eu"}, {"id": 2})
    for _ in range(2):
        with pytest.raises(Exception, match="nothing was appended: 1 document does not") as caught:
            stream.run()
        assert "row 2: /region: is required but missing" in str(caught.value)
        assert "Traceback" not in str(caught.value)
    assert numbers(p) == []
    wider = json.loads(json.dumps(CATALOG))
    wider["collections"]["acme/orders"]["schema"]["properties"]["region"]["type"] = [
        "string",
        "null",
    ]
    (tmp_path / "catalog.yaml").write_text(json.dumps(wider))
    p.apply(tmp_path / "catalog.yaml")
    stream.run()
    stream.forget(0)
    stream.run()
    assert numbers(p) == [1, 2]
