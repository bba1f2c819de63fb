"""Spark Structured Streaming in two hops: files to clean files, and those to PostgreSQL.

The first query drops invalid events, normalises the others, and writes Parquet files. The second
reads those files and the customers. A batch is added up by account in Spark, collected to the
driver as Arrow, copied to a temporary table, and added to the table in one transaction. That
transaction also stores the batch number, and does nothing if it is stored already: a batch that
Spark repeats changes nothing.

With `--once` each query processes the files that exist, one after the other; with `--forever` both
run until SIGTERM, with trigger interval 0. Customers are a stream as well: a customer and an event
each add to the row of their account, whichever comes first.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow
import pyarrow.csv
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's users call it

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

EVENT = "id BIGINT, account BIGINT, amount BIGINT, region STRING"
CUSTOMER = "account BIGINT, tier STRING"
REGIONS = ("ap", "eu", "me", "sa", "us")
COLUMNS = """
    account BIGINT PRIMARY KEY, events BIGINT, amount BIGINT, largest BIGINT, eu BIGINT, tier TEXT
"""

UPSERT = """
    INSERT INTO accounts AS old SELECT account, events, amount, largest, eu, tier FROM arrived
    ON CONFLICT (account) DO UPDATE SET
        events = old.events + excluded.events,
        amount = old.amount + excluded.amount,
        largest = greatest(old.largest, excluded.largest),
        eu = old.eu + excluded.eu,
        tier = coalesce(excluded.tier, old.tier)
"""

FENCE = """
    INSERT INTO batches AS old VALUES ('accounts', %s)
    ON CONFLICT (query) DO UPDATE SET batch = excluded.batch WHERE old.batch < excluded.batch
"""


def open_spark() -> SparkSession:
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


def cleaned(events: DataFrame) -> DataFrame:
    region = F.lower(F.trim("region"))
    valid = (F.col("amount") > 0) & region.isin(*REGIONS)
    return events.where(valid).withColumn("region", region)


def by_account(arrived: DataFrame) -> DataFrame:
    """Add up events and customers; whatever is not an event has no id."""
    amount = F.coalesce("amount", F.lit(0))
    return arrived.groupBy("account").agg(
        F.count("id").alias("events"),
        F.sum(amount).alias("amount"),
        F.max(amount).alias("largest"),
        F.sum(F.when(F.col("region") == "eu", amount).otherwise(0)).alias("eu"),
        F.max("tier").alias("tier"),
    )


class Writer:
    """The `foreachBatch` function of the second hop."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(f"CREATE TABLE IF NOT EXISTS accounts ({COLUMNS})")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS batches (query TEXT PRIMARY KEY, batch BIGINT)"
        )
        self.connection.execute(f"CREATE TEMPORARY TABLE arrived ({COLUMNS}) ON COMMIT DELETE ROWS")
        self.batches = 0

    def __call__(self, arrived: DataFrame, batch: int) -> None:
        text = io.BytesIO()
        rows = by_account(arrived).toArrow()
        pyarrow.csv.write_csv(rows, text, pyarrow.csv.WriteOptions(include_header=False))
        with self.connection.transaction():
            if self.connection.execute(FENCE, (batch,)).rowcount:
                with self.connection.cursor().copy("COPY arrived FROM STDIN (FORMAT csv)") as copy:
                    copy.write(text.getbuffer())
                self.connection.execute(UPSERT)
        self.batches += 1


def trigger(*, once: bool) -> dict[str, Any]:
    return {"availableNow": True} if once else {"processingTime": "0 seconds"}


def start_clean(spark: SparkSession, source: str, work: str, *, once: bool) -> StreamingQuery:
    events = spark.readStream.schema(EVENT).parquet(f"{source}/events")
    return (
        cleaned(events)
        .writeStream.format("parquet")
        .option("checkpointLocation", f"{work}/checkpoints/clean")
        .trigger(**trigger(once=once))
        .start(f"{work}/clean")
    )


def start_accounts(
    spark: SparkSession, source: str, work: str, writer: Writer, *, once: bool
) -> StreamingQuery:
    events = spark.readStream.schema(EVENT).parquet(f"{work}/clean")
    customers = spark.readStream.schema(CUSTOMER).parquet(f"{source}/customers")
    return (
        events.unionByName(customers, allowMissingColumns=True)
        .writeStream.foreachBatch(writer)
        .option("checkpointLocation", f"{work}/checkpoints/accounts")
        .trigger(**trigger(once=once))
        .start()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Structured Streaming in two hops to PostgreSQL")
    parser.add_argument("--input", required=True, help="parent of events/ and customers/")
    parser.add_argument("--url", required=True, help="of the database")
    parser.add_argument("--work", required=True, help="directory for clean files and checkpoints")
    until = parser.add_mutually_exclusive_group(required=True)
    until.add_argument("--once", action="store_true", help="process the existing files, and exit")
    until.add_argument("--forever", action="store_true", help="until SIGTERM")
    arguments = parser.parse_args()
    source, work, once = arguments.input, arguments.work, arguments.once

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    spark = open_spark()
    began = time.perf_counter()
    writer = Writer(arguments.url)
    Path(work, "clean").mkdir(parents=True, exist_ok=True)
    queries: list[Any] = [start_clean(spark, source, work, once=once)]
    if once:
        queries[0].awaitTermination()
    queries.append(start_accounts(spark, source, work, writer, once=once))
    if once:
        queries[1].awaitTermination()
    while not once and all(query.isActive for query in queries) and not stopping.wait(0.2):
        pass
    for query in queries:
        if (failure := query.exception()) is not None:
            raise failure
        query.stop()
    job_s = time.perf_counter() - began
    writer.connection.close()
    spark.stop()
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3), "batches": writer.batches}) + "\n")


if __name__ == "__main__":
    main()
