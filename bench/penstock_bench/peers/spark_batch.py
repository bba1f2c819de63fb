"""Plain Spark: all files in one batch, one aggregate, one transaction; nothing is incremental."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sqlite3
import sys
import time

import psycopg
import pyarrow
import pyarrow.csv
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's users call it

SCHEMA = "account BIGINT, amount BIGINT, region STRING, seq BIGINT"
CREATE = """
    CREATE TABLE IF NOT EXISTS accounts
    (account BIGINT PRIMARY KEY, events BIGINT, amount BIGINT, largest BIGINT, region TEXT)
"""


def open_spark() -> SparkSession:
    spark = (
        SparkSession.builder.master("local[*]")
        .appName("spark-batch")
        .config("spark.sql.shuffle.partitions", str(os.cpu_count()))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def by_account(spark: SparkSession, directory: str) -> pyarrow.Table:
    events = spark.read.schema(SCHEMA).parquet(directory)
    accounts = events.groupBy("account").agg(
        F.count("*").alias("events"),
        F.sum("amount").alias("amount"),
        F.max("amount").alias("largest"),
        F.max_by("region", "seq").alias("region"),
    )
    return accounts.toArrow()


def to_postgres(rows: pyarrow.Table, url: str) -> None:
    text = io.BytesIO()
    pyarrow.csv.write_csv(rows, text, pyarrow.csv.WriteOptions(include_header=False))
    with psycopg.connect(url) as connection:
        connection.execute(CREATE)
        with connection.cursor().copy("COPY accounts FROM STDIN (FORMAT csv)") as copy:
            copy.write(text.getbuffer())


def to_sqlite(rows: pyarrow.Table, path: str) -> None:
    columns = (column.to_pylist() for column in rows.columns)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(CREATE)
        database.executemany(
            "INSERT INTO accounts VALUES (?, ?, ?, ?, ?)", zip(*columns, strict=True)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Spark over files to PostgreSQL or SQLite")
    parser.add_argument("--input", required=True, help="directory of Parquet files")
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--url", help="of the database")
    to.add_argument("--sqlite", help="path of the database")
    arguments = parser.parse_args()

    spark = open_spark()
    began = time.perf_counter()
    rows = by_account(spark, arguments.input)
    if arguments.url is not None:
        to_postgres(rows, arguments.url)
    else:
        to_sqlite(rows, arguments.sqlite)
    job_s = time.perf_counter() - began
    spark.stop()
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3)}) + "\n")


if __name__ == "__main__":
    main()
