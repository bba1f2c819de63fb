"""Files into a collection: JSON lines, CSV and Parquet, beside plain Spark and dlt.

Plain Spark reads the files with the same schema and writes Parquet: it validates nothing, keeps no
order, knows no transaction and reads everything again the next time. dlt loads them into Parquet
files by its readers at their defaults, which make a dictionary of each row; and, where pyarrow can
read them, as Arrow tables, of which it looks at no row. Penstock and plain Spark share a session,
which is warm; dlt is a process of its own, timed from the moment at which it has been imported.

Memory is that of `penstock run` as a process, for files and for ten times as many.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.csv

from penstock.batch import make_world, run_until, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.consensus.open import open_consensus
from penstock.journal.follower import current_revision
from penstock.model.json_order import Json
from penstock_bench import processes
from penstock_bench.events import pa, pq, settings_in
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples, seconds_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK: Final = "plain Spark"
DLT: Final = "dlt"
DLT_TABLES: Final = "dlt, Arrow tables"
FORMATS: Final = ("jsonl", "csv", "parquet")
FILES: Final = 8
ROUNDS: Final = 3
COLLECTION: Final = "bench/events"
TIMEOUT_S: Final = 1_800

GOALS: Final[Mapping[str, float]] = {SPARK: 0.7, DLT: 2.0}

PEER: Final = Path(__file__).with_name("peers") / "dlt_files.py"

SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["id", "account", "at"],
    "properties": {
        "id": {"type": "integer"},
        "account": {"type": "integer"},
        "amount": {"type": "number"},
        "region": {"type": "string"},
        "at": {"type": "string", "format": "date-time"},
        "note": {"type": "string"},
    },
}


def write_files(directory: Path, kind: str, count: int) -> None:
    """Write so many events, in `FILES` files."""
    directory.mkdir(parents=True)
    each = count // FILES
    for file in range(FILES):
        table = events(file * each, each)
        path = directory / f"events-{file}.{kind}"
        match kind:
            case "jsonl":
                with path.open("w") as out:
                    out.writelines(f"{json.dumps(row)}\n" for row in table.to_pylist())
            case "csv":
                pyarrow.csv.write_csv(table, path)
            case _:
                pq.write_table(table, path)


def events(first: int, count: int) -> Any:  # noqa: ANN401 - an Arrow table
    """Return some events."""
    ids = range(first, first + count)
    return pa.table(
        {
            "id": list(ids),
            "account": [at * 7919 % 100_003 for at in ids],
            "amount": [at % 10_007 / 100 for at in ids],
            "region": [("eu", "us", "ap")[at % 3] for at in ids],
            "at": [f"2026-01-{at % 28 + 1:02}T10:{at % 60:02}:00Z" for at in ids],
            "note": [f"event number {at}" for at in ids],
        }
    )


def catalog(files: Path) -> Json:
    """Return a catalog that captures the files of a directory."""
    endpoint: Json = {
        "connector": {
            "image": "penstock/source-files",
            "config": {"path": str(files), "settle": 0},
        }
    }
    binding: Json = {"resource": {"path": "*"}, "target": COLLECTION}
    return {
        "collections": {COLLECTION: {"key": ["/id"], "schema": SCHEMA}},
        "captures": {"bench/files": {"endpoint": endpoint, "bindings": [binding]}},
    }


def write_catalog(data: Path, files: Path) -> None:
    """Apply the catalog to a new deployment."""
    data.mkdir(parents=True)
    (data / "catalog.yaml").write_text(json.dumps(catalog(files)))

    async def apply() -> None:
        store = await open_consensus(settings_in(data).consensus)
        try:
            await desired.apply(store, load_catalog([data / "catalog.yaml"], environ=None))
        finally:
            await store.close()

    asyncio.run(apply())


def capture(data: Path, spark: SparkSession, count: int) -> float:
    """Run the capture of a deployment until it has caught up; return the seconds that it took."""

    async def run() -> float:
        settings = settings_in(data)
        store = await open_consensus(settings.consensus)
        try:
            loaded = await desired.load(store)
            world = dataclasses.replace(make_world(settings, store), spark=lambda _: spark)
            (spec,) = tasks_to_run(loaded)
            revision = await current_revision(store)
            began = time.perf_counter()
            done = await run_until(loaded, spec, world, revision)
            seconds = time.perf_counter() - began
        finally:
            await store.close()
        if done.error is not None:
            raise done.error
        if done.stored != count:
            raise RuntimeError(f"{done.stored} documents were captured instead of {count}")
        return seconds

    return asyncio.run(run())


def plain_spark(files: Path, kind: str, out: Path, spark: SparkSession) -> None:
    """Read the files with the same schema, and write Parquet."""
    reader = spark.read.schema(
        "id BIGINT, account BIGINT, amount DOUBLE, region STRING, at STRING, note STRING"
    )
    frame = (
        reader.json(str(files))
        if kind == "jsonl"
        else reader.option("header", "true").csv(str(files))
        if kind == "csv"
        else reader.parquet(str(files))
    )
    frame.write.parquet(str(out))


def measure(bench: Bench, kind: str, count: int, directory: Path) -> Samples:
    """Return documents per second of each contestant."""
    files, made = directory / "files", directory / "made"
    write_files(files, kind, count)

    def fresh() -> None:
        shutil.rmtree(made, ignore_errors=True)

    def ours() -> float:
        fresh()
        write_catalog(made, files)
        return count / capture(made, bench.spark(), count)

    def spark() -> float:
        fresh()
        return count / seconds_of(lambda: plain_spark(files, kind, made, bench.spark()))()

    contestants: dict[str, Callable[[], float]] = {OURS: ours, SPARK: spark}
    python = bench.peers
    if python is not None:

        def dlt(*options: str) -> float:
            fresh()
            given: list[str | Path] = ["--input", files, "--format", kind, "--out", made, *options]
            done = processes.run([python, PEER, *given], timeout_s=TIMEOUT_S)
            if done.code or done.output.get("rows") != count:
                raise RuntimeError(f"dlt ended with {done.code} and {done.output}")
            return count / float(done.output["job_s"])

        contestants[DLT] = dlt
        if kind != "jsonl":
            contestants[DLT_TABLES] = lambda: dlt("--arrow")
    return bench.interleave(
        f"{kind}, {count:,} documents", contestants, rounds=bench.size(full=ROUNDS, quick=1)
    )


def peak_bytes(files: Path, data: Path) -> int:
    """Return the peak memory of `penstock run`, and all of its processes."""
    write_catalog(data, files)
    command: list[str | Path] = [
        sys.executable, "-m", "penstock", "run", "--data", data, "--json",
    ]  # fmt: skip
    done = processes.run(command, timeout_s=TIMEOUT_S)
    if done.code:
        raise RuntimeError(f"penstock run ended with {done.code}")
    return done.usage.peak_rss_bytes


def run(bench: Bench) -> Report:
    """Measure all formats, and memory."""
    count = bench.size(full=2_000_000, quick=200_000)
    rates = {}
    peaks = {}
    for kind in FORMATS:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
            rates[kind] = measure(bench, kind, count, Path(temp_dir))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        directory = Path(temp_dir)
        few = bench.size(full=500_000, quick=100_000)
        for many in (few, 10 * few):
            bench.say(f"memory, {many:,} documents")
            write_files(directory / f"files-{many}", "jsonl", many)
            peaks[many] = peak_bytes(directory / f"files-{many}", directory / f"data-{many}")
    return build_report(count, rates, peaks)


def build_report(count: int, rates: Mapping[str, Samples], peaks: Mapping[int, int]) -> Report:
    """Build the report."""
    results, goals, charts = [], [], []
    for kind, samples in rates.items():
        name = f"{kind}, {count:,} documents"
        for who in samples.by_peer:
            value = samples.median(who)
            results.append(Result(name=f"{name}: {who}", value=value, unit="documents/s"))
            if who in GOALS:
                goals.append(
                    Goal(
                        name=f"{name}: documents/s of {OURS} / {who}",
                        measured=samples.ratio(OURS, who),
                        goal=GOALS[who],
                    )
                )
        charts.append(
            Chart(
                name=f"files-{kind}",
                title=f"{kind} files into a collection",
                unit="documents/s",
                bars=tuple((who, samples.median(who)) for who in samples.by_peer),
                note="More is better.",
            )
        )
    for many, peak in peaks.items():
        results.append(
            Result(name=f"memory, {many:,} documents: peak", value=peak / 1e6, unit="MB RSS")
        )
    few, most = min(peaks), max(peaks)
    goals.append(
        Goal(
            name=f"memory: peak of {few:,} documents / {most:,}",
            measured=peaks[few] / peaks[most],
            goal=0.5,
        )
    )
    return Report(results=tuple(results), goals=tuple(goals), charts=tuple(charts))
