"""`penstock bench journal`: appends, scans, latency and listings, beside plain Parquet.

- Append: one transaction of Arrow batches on SQLite: stamped, routed, counted, made durable,
  committed. The peer is PyArrow, which writes the same batches to a Parquet file with the same
  codec, without waiting for the disk or committing anything; and once more with checksums like
  those of fragments.
- Scan: one aggregate over all columns of clean fragments, including planning. The peer is the same
  aggregate of `spark.read.parquet` over copies of the files. Also through `format("penstock")`,
  whose rows pass through Python; and the cost of checksums: the same scan, and the same fragments
  read by Arrow, without verifying them.
- Latency: from the call that appends one document until a subscriber receives it, on SQLite.
- Listing: CPU time to list 10,000 journals with one append each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from msgspec import structs

from penstock import wall_clock
from penstock.catalog import desired
from penstock.consensus.open import open_consensus
from penstock.journal.blobs import BlobStore, open_blobs
from penstock.journal.fragments import GROUP_ROWS, read_fragment
from penstock.journal.integrity import SUMS_KEY, SummingSink
from penstock.journal.journals import Journals, creation
from penstock.journal.names import JournalName
from penstock.journal.ownership import MARK
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.reader import CollectionReader, Start
from penstock.journal.schemas import Schemas, layout
from penstock.journal.state import AckRecord, Blob, Fragment
from penstock.model.clock import Clock, Producer
from penstock.model.columns import Column
from penstock.model.spec import Catalog, CollectionSpec, Fragments, Frozen
from penstock.native.arrow import to_arrow
from penstock.native.arrow_types import arrow_schema
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, seconds_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_pa: Any = pa
_pq: Any = pyarrow.parquet

BATCH_ROWS: Final = 32 * 1024
JOURNALS: Final = 10_000

SCHEMA: Final = Frozen(
    {
        "type": "object",
        "required": ["id", "region", "total", "note"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "integer"},
            "region": {"type": "string"},
            "total": {"type": "number"},
            "note": {"type": "string"},
        },
    }
)


def run(bench: Bench) -> Report:
    """Measure everything in journals that must be fast."""
    parts = (measure_append, measure_scan, measure_latency, measure_listing)
    return Report.merge(part(bench) for part in parts)


# ------------------------------------------------------------------------------------- deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deployment:
    """A deployment for one measurement."""

    journals: Journals
    blobs: BlobStore
    schemas: Schemas

    def publisher(self, spec: CollectionSpec) -> Publisher:
        return Publisher(
            self.journals,
            self.blobs,
            self.schemas,
            [Mapped(spec=spec)],
            producer=Producer.from_random(os.urandom(6)),
            now=wall_clock.now,
        )


@contextlib.contextmanager
def _open_deployment(data: Path) -> Iterator[tuple[_Deployment, asyncio.Runner]]:
    """Open a deployment and its event loop, for peers that are plain functions."""
    with asyncio.Runner() as loop:
        world = _deployment(data)
        here = loop.run(world.__aenter__())
        try:
            yield here, loop
        finally:
            loop.run(world.__aexit__(None, None, None))


@contextlib.asynccontextmanager
async def _deployment(data: Path) -> AsyncIterator[_Deployment]:
    store = await open_consensus(f"sqlite:///{data}/consensus.db")
    try:
        blobs = open_blobs(str(data / "blobs"))
        yield _Deployment(journals=Journals(store), blobs=blobs, schemas=Schemas(store))
    finally:
        await store.close()


def _collection(name: str, length_bytes: int | None = None) -> CollectionSpec:
    return CollectionSpec(
        name=name,
        key=("/id",),
        write_schema=SCHEMA,
        read_schema=SCHEMA,
        fields=(),
        fragments=Fragments(length_bytes=length_bytes),
    )


def _documents(rows: int) -> list[pa.RecordBatch]:
    """Generate orders with sequential ids, some repeated values, and some unique text."""
    chance = np.random.default_rng(1)
    schema = arrow_schema(layout(SCHEMA.text))
    regions = np.array(["eu", "us", "asia", "africa"])
    batches: list[pa.RecordBatch] = []
    for first in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - first)
        notes = chance.integers(0, 1 << 48, (count, 3))
        columns: dict[str, Any] = {
            "id": np.arange(first, first + count),
            "note": [f"{a:x} to {b:x}, {c:x}" for a, b, c in notes.tolist()],
            "region": regions[chance.integers(0, 4, count)],
            "total": np.round(chance.exponential(90, count), 2),
        }
        arrays: list[Any] = [pa.array(columns[n]).cast(schema.field(n).type) for n in schema.names]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return batches


# ----------------------------------------------------------------------------------------- append


def measure_append(bench: Bench) -> Report:
    """Measure the documents per second of one writer."""
    rows = bench.size(full=2_000_000, quick=500_000)
    bench.say(f"making {rows:,} documents")
    documents = _documents(rows)
    names = iter(range(1000))
    with (
        tempfile.TemporaryDirectory() as temp_dir,
        _open_deployment(Path(temp_dir)) as (here, loop),
    ):
        file = Path(temp_dir) / "plain.parquet"

        def append() -> None:
            spec = _collection(f"bench/n{next(names)}")
            loop.run(_append(here, spec, documents))

        taken = bench.interleave(
            f"append {rows:,} documents",
            {
                "penstock": seconds_of(append),
                "parquet": seconds_of(lambda: _write_parquet(file, documents)),
                "summed": seconds_of(lambda: _write_summed(file, documents)),
            },
        )
    return Report(
        results=(
            _rate("append", "a transaction of Penstock", rows / taken.median("penstock")),
            _rate("append", "plain PyArrow to Parquet", rows / taken.median("parquet")),
            _rate("append", "PyArrow with checksums", rows / taken.median("summed")),
        ),
        goals=(
            Goal(
                name="append: Penstock / plain PyArrow",
                measured=taken.ratio("parquet", "penstock"),
                goal=0.7,
            ),
            Goal(
                name="append: PyArrow with checksums / without",
                measured=taken.ratio("parquet", "summed"),
                goal=0.9,
            ),
        ),
        charts=(
            Chart(
                name="append",
                title=f"Append {rows:,} documents",
                unit="documents/s",
                bars=(
                    (OURS, rows / taken.median("penstock")),
                    ("plain PyArrow to Parquet", rows / taken.median("parquet")),
                ),
                note="A durable transaction, and a file that nobody waits for.",
            ),
        ),
    )


async def _append(
    world: _Deployment, spec: CollectionSpec, documents: Sequence[pa.RecordBatch]
) -> None:
    publisher = world.publisher(spec)
    for batch in documents:
        await publisher.publish(0, batch)
    await publisher.commit_now()


def _write_parquet(file: Path, documents: Sequence[pa.RecordBatch]) -> None:
    with _pq.ParquetWriter(file, documents[0].schema, compression="zstd") as writer:
        step = GROUP_ROWS // BATCH_ROWS
        for at in range(0, len(documents), step):
            writer.write_table(pa.Table.from_batches(documents[at : at + step]))


def _write_summed(file: Path, documents: Sequence[pa.RecordBatch]) -> None:
    with _pa.OSFile(str(file), "wb") as sink:
        summing = SummingSink(sink)
        schema, to = documents[0].schema, _pa.PythonFile(summing, "w")
        with _pq.ParquetWriter(to, schema, compression="zstd", write_page_checksum=True) as writer:
            step = GROUP_ROWS // BATCH_ROWS
            for at in range(0, len(documents), step):
                writer.write_table(pa.Table.from_batches(documents[at : at + step]))
            writer.add_key_value_metadata({SUMS_KEY: summing.end_body().encode()})


# ------------------------------------------------------------------------------------------- scan


def measure_scan(bench: Bench) -> Report:
    """Measure the documents per second of one Spark job over clean fragments."""
    from penstock.journal.scan import read_collection

    rows = bench.size(full=8_000_000, quick=2_000_000)
    appends = 16
    documents = _documents(rows // appends)
    rows = appends * sum(batch.num_rows for batch in documents)
    spec = _collection("bench/scan", length_bytes=16 << 20)
    spark = bench.spark()
    with (
        tempfile.TemporaryDirectory() as temp_dir,
        _open_deployment(Path(temp_dir)) as (here, loop),
    ):
        data, plain = Path(temp_dir), Path(temp_dir) / "plain"
        bench.say(f"appending {rows:,} documents")
        loop.run(desired.apply(here.journals.store, Catalog(collections=(spec,))))
        for _ in range(appends):
            loop.run(_append(here, spec, documents))
        plain.mkdir()
        objects = sorted(info.path for info in here.blobs.list() if info.path != MARK)
        for number, found in enumerate(objects):
            shutil.copyfile(data / "blobs" / found, plain / f"{number:04}.parquet")

        def penstock(*, verify: bool = True) -> DataFrame:
            stores = here.journals, here.blobs, here.schemas
            return loop.run(read_collection(spark, *stores, spec, verify=verify))

        fragments = loop.run(_fragments(here))
        root = layout(SCHEMA.text)

        taken = bench.interleave(
            f"scan {rows:,} documents",
            {
                "penstock": _aggregated(penstock, rows),
                "unverified": _aggregated(lambda: penstock(verify=False), rows),
                "parquet": _aggregated(lambda: spark.read.parquet(str(plain)), rows),
                "source": _aggregated(lambda: _source(spark, data), rows),
            },
            warmups=2,
        )
        read = bench.interleave(
            f"read {rows:,} documents by Arrow",
            {
                "verified": seconds_of(lambda: _read(here.blobs, fragments, root)),
                "unverified": seconds_of(lambda: _read(here.blobs, _undigested(fragments), root)),
            },
        )
    return Report(
        results=(
            _rate("scan", "Penstock's DataFrame", rows / taken.median("penstock")),
            _rate("scan", "plain spark.read.parquet", rows / taken.median("parquet")),
            _rate("scan", 'format("penstock")', rows / taken.median("source")),
            _rate("scan", "without checksums", rows / taken.median("unverified")),
            _rate("read by Arrow", "checksums compared", rows / read.median("verified")),
            _rate("read by Arrow", "without checksums", rows / read.median("unverified")),
        ),
        goals=(
            Goal(
                name="scan: Penstock / spark.read.parquet",
                measured=taken.ratio("parquet", "penstock"),
                goal=0.9,
            ),
            Goal(
                name="scan: with checksums / without",
                measured=taken.ratio("unverified", "penstock"),
                goal=0.9,
            ),
            Goal(
                name="read by Arrow: with checksums / without",
                measured=read.ratio("unverified", "verified"),
                goal=0.9,
            ),
        ),
        charts=(
            Chart(
                name="scan",
                title=f"Scan {rows:,} documents in Spark",
                unit="documents/s",
                bars=(
                    (OURS, rows / taken.median("penstock")),
                    (f'{OURS}, format("penstock")', rows / taken.median("source")),
                    ("plain spark.read.parquet", rows / taken.median("parquet")),
                ),
                note="One aggregate over all columns of the same files, planning included.",
            ),
        ),
    )


async def _fragments(world: _Deployment) -> list[Fragment]:
    return [
        record
        for journal in await world.journals.list()
        for record in journal.state.records
        if isinstance(record, Fragment)
    ]


def _undigested(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Return the fragments without digests, as an old release wrote them."""
    return [
        structs.replace(each, at=structs.replace(each.at, digest=None))
        for each in fragments
        if isinstance(each.at, Blob)
    ]


def _read(blobs: BlobStore, fragments: Sequence[Fragment], root: Column) -> None:
    for fragment in fragments:
        for _ in read_fragment(blobs, fragment, root):
            pass


def _source(spark: SparkSession, data: Path) -> DataFrame:
    options = {"data": str(data), "collection": "bench/scan"}
    return spark.read.format("penstock").options(**options).load()


def _aggregated(frame: Callable[[], DataFrame], rows: int) -> Callable[[], float]:
    """Make a peer that reads every column of every row, and does little else."""
    from pyspark.sql import functions as f

    def work() -> None:
        columns = (
            f.count("id"),
            f.sum("total"),
            f.max("id"),
            f.sum(f.length("note")),
            f.sum(f.length("region")),
        )
        [row] = frame().agg(*columns).collect()
        if row[0] != rows:
            raise RuntimeError(f"{row[0]} of {rows} documents were read")

    return seconds_of(work)


# ---------------------------------------------------------------------------------------- latency


def measure_latency(bench: Bench) -> Report:
    """Measure the milliseconds from an append to a subscriber."""
    appends = bench.size(full=2_000, quick=500)
    bench.say(f"latency: {appends} appends of one document")
    with tempfile.TemporaryDirectory() as temp_dir:
        taken = asyncio.run(_latencies(Path(temp_dir), appends))
    centiles = statistics.quantiles(taken, n=100)
    return Report(
        results=tuple(
            Result(
                name=f"one document, append to subscriber, SQLite: p{n}",
                value=centiles[n - 1] * 1000,
                unit="ms",
            )
            for n in (50, 99)
        )
    )


async def _latencies(data: Path, appends: int) -> list[float]:
    spec = _collection("bench/one")
    document = to_arrow(
        [{"id": 1, "region": "eu", "total": 9.5, "note": "one"}], layout(SCHEMA.text)
    )
    taken: list[float] = []
    async with _deployment(data) as here:
        publisher = here.publisher(spec)
        await publisher.publish(0, document)
        await publisher.commit_now()
        reader = CollectionReader(here.journals, here.blobs, here.schemas, spec.name, start=Start())
        async with aclosing(reader.follow()) as seen:
            await anext(seen)
            for number in range(-appends // 10, appends):
                begin = time.perf_counter()
                await publisher.publish(0, document)
                await publisher.commit_now()
                await anext(seen)
                if number >= 0:
                    taken.append(time.perf_counter() - begin)
    return taken


# ---------------------------------------------------------------------------------------- listing


def measure_listing(bench: Bench) -> Report:
    """Measure the CPU seconds to list 10,000 journals."""
    bench.say(f"making {JOURNALS:,} journals")
    with (
        tempfile.TemporaryDirectory() as temp_dir,
        _open_deployment(Path(temp_dir)) as (here, loop),
    ):
        loop.run(_make_journals(here.journals))

        def listed() -> None:
            if len(loop.run(here.journals.list())) != JOURNALS:
                raise RuntimeError("not all journals were listed")

        work = {"list": seconds_of(listed, clock=time.process_time)}
        taken = bench.interleave(f"list {JOURNALS:,} journals", work)
    cpu_s = taken.median("list")
    return Report(
        results=(Result(name=f"list {JOURNALS:,} journals", value=cpu_s, unit="s of CPU"),),
        goals=(
            Goal(name=f"list {JOURNALS:,} journals: 1 s / CPU time", measured=1 / cpu_s, goal=1.0),
        ),
    )


async def _make_journals(journals: Journals) -> None:
    names = [JournalName.of("bench/many", {"n": n}) for n in range(JOURNALS)]
    await journals.create_all({name: creation(name) for name in names})
    ack = AckRecord(producer=Producer.from_random(bytes(6)), clock=Clock(1 << 40))
    for at in range(0, JOURNALS, 1000):
        await journals.append_all({str(name): (ack,) for name in names[at : at + 1000]})


def _rate(what: str, how: str, value: float) -> Result:
    return Result(name=f"{what}: {how}", value=value, unit="documents/s")
