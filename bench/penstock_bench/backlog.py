"""A backlog larger than memory through `penstock run`: what it takes of memory and disk.

`penstock run`, in a fresh process with a small Spark, takes a backlog to SQLite: one of the memory
that Spark has, one of 5 and one of 20 times as much, measured as documents are before they are
encoded and compressed. The memory given to Spark is its heap, `HEAP`, which the JVM allocates whole
at its start, so that whatever grows is something else. Meanwhile the whole tree of processes is
sampled (the driver's Python, its JVM, the Python workers of that), and Spark's own files.

Memory is flat if 20 times takes hardly more than 5 times. Once is reported beside them: such a run
is over before the JVM has compiled its code and filled its buffers.

A quick run takes for memory what Spark uses of its heap for rows: of what `RESERVED` leaves, the
`FRACTION`.

Every table is compared with what it must be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from penstock.catalog.collection_lookup import find_collection
from penstock.errors import Bug
from penstock.journal.journals import creation
from penstock.journal.names import JournalName
from penstock.journal.state import AckRecord
from penstock.model.clock import Clock
from penstock_bench.events import settings_in, sqlite_endpoint
from penstock_bench.frame import OURS, Bench, Goal, Lines, Report, Result
from penstock_bench.processes import Run, run
from penstock_bench.scale_runs import (
    apply_catalog_text,
    catalog_of,
    open_store,
    penstock_run,
    task_config,
)
from penstock_bench.stock import PRODUCER, SCHEMA, START, Stage, Stock, write

if TYPE_CHECKING:
    from penstock.model.json_order import Json

HEAP: Final = 512 << 20
RESERVED: Final = 300 << 20
"""What Spark keeps of its heap for other things than rows."""
FRACTION: Final = 0.2
TIMES: Final = (1, 5, 20)

NOTE_BYTES: Final = 2048
TRANSACTION_BYTES: Final = 8 << 20
"""Before encoding; each is one fragment."""
JOURNALS: Final = 4
TIMEOUT_S: Final = 3_600
SAMPLE_S: Final = 0.1

COLLECTION: Final = "bench/backlog"
TASK: Final = "bench/customers"
TABLE: Final = "customers"


def measure(bench: Bench) -> Report:
    """Peaks of memory for backlogs of once, 5 and 20 times the memory that Spark has."""
    memory = bench.size(full=HEAP, quick=int((HEAP - RESERVED) * FRACTION))
    conf = {
        "spark.driver.memory": f"{HEAP >> 20}m",
        "spark.driver.extraJavaOptions": f"-Xms{HEAP >> 20}m -XX:+AlwaysPreTouch",
        **({"spark.memory.fraction": str(FRACTION)} if bench.quick else {}),
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        drained = {
            times: _drained(bench, Path(scratch) / f"{times}x", times * memory, conf)
            for times in TIMES
        }
    return report(memory, drained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A backlog that a task has stored, and what that took."""

    uncompressed: int
    stored: int
    """As it is in journals."""
    run: Run
    spark_files: int
    """The most that Spark's own files took."""

    @property
    def transactions(self) -> int:
        """How many the task took it in."""
        return int(self.run.output["tasks"][0]["transactions"])


def report(memory: int, drained: Mapping[int, Drained]) -> Report:
    """What backlogs of so many times this memory took."""
    results: list[Result] = []
    for times, each in drained.items():
        what = f"penstock run of {times} x {memory >> 20} MiB"
        peak = each.run.usage.peak_rss_bytes
        results += [
            Result(name=what, value=each.uncompressed / each.run.seconds / 1e6, unit="MB/s"),
            Result(name=f"{what}: stored in journals", value=each.stored / 1e6, unit="MB"),
            Result(name=f"{what}: transactions", value=each.transactions, unit="transactions"),
            Result(name=f"{what}: peak of all processes", value=peak / 1e6, unit="MB RSS"),
            Result(name=f"{what}: most in Spark's files", value=each.spark_files / 1e6, unit="MB"),
        ]
    peaks = {times: each.run.usage.peak_rss_bytes for times, each in drained.items()}
    _, some, most = sorted(peaks)
    known = peaks[some] and peaks[most]  # without /proc they are not
    return Report(
        results=tuple(results),
        goals=(
            Goal(
                name=f"peak memory: backlog of {some} x {memory >> 20} MiB / {most} x",
                measured=peaks[some] / peaks[most],
                goal=0.8,
            ),
        )
        if known
        else (),
        charts=(
            Lines(
                name="backlog",
                title=f"Peak memory against backlog, with {HEAP >> 20} MiB of heap",
                x_label="MB of documents",
                y_label="MB RSS",
                series=(
                    (
                        OURS,
                        tuple(
                            (each.uncompressed / 1e6, each.run.usage.peak_rss_bytes / 1e6)
                            for each in drained.values()
                        ),
                    ),
                ),
                note="Of Python, the JVM and its workers together.",
            ),
        ),
    )


# -------------------------------------------------------------------------------------- one backlog


def _drained(bench: Bench, data: Path, size: int, conf: Mapping[str, str]) -> Drained:
    bench.say(f"writing a backlog of {size >> 20:,} MiB")
    table, spark = data / "customers.db", data / "spark"
    stock = stock_of(size)
    data.mkdir(parents=True)
    stored = asyncio.run(_fill(data, stock, sqlite_endpoint(table)))
    bench.say(f"penstock run of {size >> 20:,} MiB with {HEAP >> 20} MiB of heap")
    settings = {**conf, "spark.local.dir": str(spark)}
    pairs = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    with Growing(spark) as files:
        done = run([*penstock_run(data, TASK), *pairs], timeout_s=TIMEOUT_S)
    check(table, stock)
    return Drained(
        uncompressed=stock.documents * NOTE_BYTES,
        stored=stored,
        run=done,
        spark_files=files.peak,
    )


def stock_of(size: int) -> Stock:
    """Documents of this size in all, in transactions of one size, with as many for each journal."""
    parts = JOURNALS * max(1, -(-size // (JOURNALS * TRANSACTION_BYTES)))
    documents = parts * (TRANSACTION_BYTES // NOTE_BYTES)
    return Stock(documents=documents, lots=JOURNALS, parts=parts, note_bytes=NOTE_BYTES)


async def _fill(data: Path, stock: Stock, endpoint: Json) -> int:
    """Write a backlog of many transactions, one after the other; its size as it is stored."""
    declared: Json = {
        "key": ["/customer"],
        "schema": SCHEMA.value,
        "projections": {"lot": {"location": "/lot", "partition": True}},
    }
    catalog = catalog_of({COLLECTION: declared}, {TASK: task_config(endpoint, COLLECTION, TABLE)})
    async with open_store(settings_in(data)) as store:
        spec = find_collection(await apply_catalog_text(store, data, catalog), COLLECTION)
    names = [JournalName.of(spec.name, {"lot": number}) for number in range(JOURNALS)]
    stored = 0
    async with Stage.opened(data) as here:
        await here.schemas.put(spec.write_schema)
        await here.journals.create_all({name: creation(name) for name in names})
        for number, ids in enumerate(stock.pieces("part")):
            name = names[number * JOURNALS // stock.parts]
            fragment, _ = await asyncio.to_thread(write, here, spec, name, stock, ids)
            ack = AckRecord(producer=PRODUCER, clock=Clock(START + ids.stop - 1))
            await here.journals.append(str(name), [fragment, ack])
            stored += fragment.bytes
    return stored


def check(table: Path, stock: Stock) -> None:
    """Refuse a table that does not have the last document of every customer, and nothing else."""
    ids = np.arange(stock.documents)
    last = np.zeros(stock.customers, np.int64)
    last[stock.customers_of(ids)] = ids  # of equal indices, the last one counts
    expected = dict(enumerate(last.tolist()))
    with contextlib.closing(sqlite3.connect(table)) as database:
        query = f'SELECT customer, id, note FROM "{TABLE}"'  # noqa: S608
        for customer, number, note in database.execute(query):
            made = stock.made(range(number, number + 1)).column("note")[0].as_py()
            if expected.pop(customer, None) != number or note != made:
                raise Bug(f"customer {customer} is wrong: it has document {number}")
    if expected:
        raise Bug(f"{len(expected):,} of {stock.customers:,} customers are missing")


class Growing:
    """Samples the size of a directory in the background, for as long as the block lasts."""

    def __init__(self, directory: Path) -> None:
        self.peak = 0
        self._directory = directory
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="growing", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.peak = max(self.peak, bytes_below(self._directory))


def bytes_below(directory: Path) -> int:
    """Of all files in a directory and below; those that go meanwhile do not count."""
    total = 0
    for above, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(above) / name).stat().st_size
    return total
