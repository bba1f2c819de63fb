"""Spark Structured Streaming: a query over files, whose batches are upserted by `foreachBatch`.

A batch is aggregated by account in Spark, collected to the driver as Arrow, copied to a temporary
table, and added to the table. There are three ways to write it:

- `fenced`: one transaction that also stores the batch number, and does nothing if it is stored
  already. Spark repeats a batch if it died before its own checkpoint; that changes nothing.
- `unfenced`: one transaction, regardless of the batch number: a repeated batch counts twice.
- `partitions`: one transaction per partition, a common mistake: even a batch that failed half-way
  has changed the table.

CSV text, written by Arrow, reaches PostgreSQL faster than rows or binary tuples from Python. Files
are read in the order of their modification times, so the region of a later batch is the last one.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow
import pyarrow.csv
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's users call it

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

SCHEMA = "account BIGINT, amount BIGINT, region STRING, seq BIGINT"
COLUMNS = "account BIGINT PRIMARY KEY, events BIGINT, amount BIGINT, largest BIGINT, region TEXT"

UPSERT = """
    INSERT INTO {table} AS old SELECT account, events, amount, largest, region FROM arrived
    ON CONFLICT (account) DO UPDATE SET
        events = old.events + excluded.events,
        amount = old.amount + excluded.amount,
        largest = greatest(old.largest, excluded.largest),
        region = excluded.region
"""

FENCE = """
    INSERT INTO batches AS old VALUES (%s, %s)
    ON CONFLICT (query) DO UPDATE SET batch = excluded.batch WHERE old.batch < excluded.batch
"""


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Structured Streaming over files to PostgreSQL")
    parser.add_argument("--input", required=True, help="directory of Parquet files")
    parser.add_argument("--url", required=True, help="of the database")
    parser.add_argument("--table", default="accounts")
    parser.add_argument("--checkpoint", required=True, help="directory for Spark's checkpoints")
    parser.add_argument("--files-per-trigger", type=int, default=None)
    until = parser.add_mutually_exclusive_group(required=True)
    until.add_argument("--once", action="store_true", help="process the existing files, and exit")
    until.add_argument("--forever", action="store_true", help="until SIGTERM")
    parser.add_argument("--writes", choices=("fenced", "unfenced", "partitions"), default="fenced")
    parser.add_argument(
        "--pause-after",
        metavar="commit:N",
        default=None,
        help="print `paused` and sleep when PostgreSQL has committed batch N, and Spark has not",
    )
    return parser.parse_args()


def open_spark() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # so that workers find psycopg, too
    spark = (
        SparkSession.builder.master("local[*]")
        .appName("structured-streaming")
        .config("spark.sql.shuffle.partitions", str(os.cpu_count()))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def by_account(events: DataFrame) -> DataFrame:
    return events.groupBy("account").agg(
        F.count("*").alias("events"),
        F.sum("amount").alias("amount"),
        F.max("amount").alias("largest"),
        F.max_by("region", "seq").alias("region"),
    )


def connect(url: str) -> psycopg.Connection:
    connection = psycopg.connect(url)
    columns = sql.SQL(COLUMNS)
    with connection.transaction():
        connection.execute(
            sql.SQL("CREATE TEMPORARY TABLE arrived ({}) ON COMMIT DELETE ROWS").format(columns)
        )
    return connection


def create_tables(connection: psycopg.Connection, table: str) -> None:
    with connection.transaction():
        connection.execute(
            sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
                sql.Identifier(table), sql.SQL(COLUMNS)
            )
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS batches (query TEXT PRIMARY KEY, batch BIGINT)"
        )


def upsert(connection: psycopg.Connection, table: str, rows: pyarrow.Table) -> None:
    """Upsert rows; the caller has opened the transaction."""
    text = io.BytesIO()
    pyarrow.csv.write_csv(rows, text, pyarrow.csv.WriteOptions(include_header=False))
    with connection.cursor().copy("COPY arrived FROM STDIN (FORMAT csv)") as copy:
        copy.write(text.getbuffer())
    connection.execute(sql.SQL(UPSERT).format(table=sql.Identifier(table)))


class Writer:
    """The `foreachBatch` function."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.url: str = arguments.url
        self.table: str = arguments.table
        self.connection = connect(self.url)
        create_tables(self.connection, self.table)
        self.batches = 0
        self.write: Callable[[DataFrame, int], None] = getattr(self, arguments.writes)
        self.pause_after: int | None = None
        if arguments.pause_after is not None:
            self.pause_after = int(arguments.pause_after.removeprefix("commit:"))

    def __call__(self, events: DataFrame, batch: int) -> None:
        self.write(by_account(events), batch)
        self.batches += 1
        if batch == self.pause_after:
            say("paused")
            threading.Event().wait()

    def fenced(self, accounts: DataFrame, batch: int) -> None:
        rows = accounts.toArrow()
        with self.connection.transaction():
            if self.connection.execute(FENCE, (self.table, batch)).rowcount:
                upsert(self.connection, self.table, rows)

    def unfenced(self, accounts: DataFrame, batch: int) -> None:
        rows = accounts.toArrow()
        with self.connection.transaction():
            upsert(self.connection, self.table, rows)

    def partitions(self, accounts: DataFrame, batch: int) -> None:
        write = functools.partial(write_partition, self.url, self.table)
        accounts.mapInArrow(write, "written BIGINT").collect()


def write_partition(
    url: str, table: str, batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    rows = list(batches)
    if rows:
        with connect(url) as connection, connection.transaction():
            upsert(connection, table, pyarrow.Table.from_batches(rows))
    yield from ()


def start(spark: SparkSession, arguments: argparse.Namespace, writer: Writer) -> StreamingQuery:
    files = spark.readStream.schema(SCHEMA).format("parquet")
    if arguments.files_per_trigger is not None:
        files = files.option("maxFilesPerTrigger", arguments.files_per_trigger)
    writes = (
        files.load(arguments.input)
        .writeStream.foreachBatch(writer)
        .option("checkpointLocation", arguments.checkpoint)
    )
    if arguments.once:
        return writes.trigger(availableNow=True).start()
    return writes.trigger(processingTime="0 seconds").start()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    arguments = parsed_arguments()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    spark = open_spark()
    began = time.perf_counter()
    writer = Writer(arguments)
    query: Any = start(spark, arguments, writer)
    if arguments.once:
        query.awaitTermination()
    else:
        while query.isActive and not stopping.wait(0.2):
            pass
        if (failure := query.exception()) is not None:
            raise failure
        query.stop()
    job_s = time.perf_counter() - began
    writer.connection.close()
    spark.stop()
    say(json.dumps({"job_s": round(job_s, 3), "batches": writer.batches}))


if __name__ == "__main__":
    main()
