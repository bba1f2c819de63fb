"""Spark Structured Streaming: two directories of files to two tables, with one query or with two.

Files of `checking` and of `savings` hold changes to the balances of accounts. A batch is summed by
account, collected to the driver as Arrow, copied to a temporary table, and added to the table in
one transaction. That transaction also stores the batch number, and does nothing if it is already
stored: a batch that runs twice changes nothing the second time.

- `two`: a query for each table, both in one session.
- `union`: one query over both directories; each batch writes both tables in one transaction.

It runs until SIGTERM, with trigger interval 0.
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
from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow
import pyarrow.compute
import pyarrow.csv
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's users call it

TABLES = ("checking", "savings")
SCHEMA = "account BIGINT, balance BIGINT, moves BIGINT"
COLUMNS = "account BIGINT PRIMARY KEY, balance BIGINT, moves BIGINT"

UPSERT = """
    INSERT INTO {table} AS old SELECT account, balance, moves FROM {arrived}
    ON CONFLICT (account) DO UPDATE SET
        balance = old.balance + excluded.balance,
        moves = old.moves + excluded.moves
"""

FENCE = """
    INSERT INTO batches AS old VALUES (%s, %s)
    ON CONFLICT (query) DO UPDATE SET batch = excluded.batch WHERE old.batch < excluded.batch
"""


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Structured Streaming, money to two tables")
    parser.add_argument(
        "--input", required=True, help="parent of the directories checking and savings"
    )
    parser.add_argument("--url", required=True, help="of the database")
    parser.add_argument("--checkpoint", required=True, help="directory for Spark's checkpoints")
    parser.add_argument("--queries", choices=("two", "union"), required=True)
    return parser.parse_args()


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


def arrived(table: str) -> sql.Identifier:
    """Return the temporary table for a batch's changes to a table."""
    return sql.Identifier(f"{table}_arrived")


def connect(url: str, tables: Sequence[str]) -> psycopg.Connection:
    connection = psycopg.connect(url)
    with connection.transaction():
        for table in tables:
            connection.execute(
                sql.SQL("CREATE TEMPORARY TABLE {} ({}) ON COMMIT DELETE ROWS").format(
                    arrived(table), sql.SQL(COLUMNS)
                )
            )
    return connection


def create_tables(url: str) -> None:
    with psycopg.connect(url) as connection:
        for table in TABLES:
            connection.execute(
                sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
                    sql.Identifier(table), sql.SQL(COLUMNS)
                )
            )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS batches (query TEXT PRIMARY KEY, batch BIGINT)"
        )


def upsert(connection: psycopg.Connection, table: str, rows: pyarrow.Table) -> None:
    """Add rows to a table; the caller has opened the transaction."""
    text = io.BytesIO()
    pyarrow.csv.write_csv(rows, text, pyarrow.csv.WriteOptions(include_header=False))
    copy_in = sql.SQL("COPY {} FROM STDIN (FORMAT csv)").format(arrived(table))
    with connection.cursor().copy(copy_in) as copy:
        copy.write(text.getbuffer())
    merge = sql.SQL(UPSERT).format(table=sql.Identifier(table), arrived=arrived(table))
    connection.execute(merge)


def added_up(changes: DataFrame) -> pyarrow.Table:
    sums = (F.sum("balance").alias("balance"), F.sum("moves").alias("moves"))
    return changes.groupBy("table", "account").agg(*sums).toArrow()


class Writer:
    """The `foreachBatch` function: writes changes to the tables they belong to."""

    def __init__(self, url: str, query: str, tables: Sequence[str]) -> None:
        self.connection = connect(url, tables)
        self.query = query
        self.tables = tables
        self.batches = 0

    def __call__(self, changes: DataFrame, batch: int) -> None:
        rows = added_up(changes)
        with self.connection.transaction():
            if self.connection.execute(FENCE, (self.query, batch)).rowcount:
                for table in self.tables:
                    own = rows.filter(pyarrow.compute.field("table") == table)
                    upsert(self.connection, table, own.drop_columns(["table"]))
        self.batches += 1


def start(spark: SparkSession, arguments: argparse.Namespace) -> list[tuple[Any, Writer]]:
    def changes(table: str) -> DataFrame:
        files = spark.readStream.schema(SCHEMA).parquet(f"{arguments.input}/{table}")
        return files.withColumn("table", F.lit(table))

    def started(frame: DataFrame, query: str, tables: Sequence[str]) -> tuple[Any, Writer]:
        writer = Writer(arguments.url, query, tables)
        writes = frame.writeStream.foreachBatch(writer)
        writes = writes.option("checkpointLocation", f"{arguments.checkpoint}/{query}")
        return writes.trigger(processingTime="0 seconds").start(), writer

    if arguments.queries == "two":
        return [started(changes(table), table, [table]) for table in TABLES]
    both = changes(TABLES[0]).unionByName(changes(TABLES[1]))
    return [started(both, "both", TABLES)]


def main() -> None:
    arguments = parsed_arguments()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    spark = open_spark()
    began = time.perf_counter()
    create_tables(arguments.url)
    queries = start(spark, arguments)
    while all(query.isActive for query, _ in queries) and not stopping.wait(0.2):
        pass
    for query, writer in queries:
        if (failure := query.exception()) is not None:
            raise failure
        query.stop()
        writer.connection.close()
    job_s = time.perf_counter() - began
    spark.stop()
    batches = sum(writer.batches for _, writer in queries)
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3), "batches": batches}) + "\n")


if __name__ == "__main__":
    main()
