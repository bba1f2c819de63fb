"""DuckDB: aggregates each file in process and upserts it in a transaction: close to the limit."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import psycopg
import pyarrow
import pyarrow.csv

COLUMNS = "account BIGINT PRIMARY KEY, events BIGINT, amount BIGINT, largest BIGINT, region TEXT"

AGGREGATE = """
    SELECT account, count(*) AS events, sum(amount)::BIGINT AS amount, max(amount) AS largest,
           arg_max(region, seq) AS region
    FROM read_parquet(?) GROUP BY account
"""

POSTGRES_UPSERT = """
    INSERT INTO accounts AS old SELECT account, events, amount, largest, region FROM arrived
    ON CONFLICT (account) DO UPDATE SET
        events = old.events + excluded.events,
        amount = old.amount + excluded.amount,
        largest = greatest(old.largest, excluded.largest),
        region = excluded.region
"""

SQLITE_UPSERT = """
    INSERT INTO accounts AS old VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (account) DO UPDATE SET
        events = old.events + excluded.events,
        amount = old.amount + excluded.amount,
        largest = max(old.largest, excluded.largest),
        region = excluded.region
"""


def aggregated(directory: Path) -> Iterator[pyarrow.Table]:
    """Yield a table of accounts for each file, in order: later regions win."""
    with duckdb.connect() as database:
        for path in sorted(directory.glob("*.parquet")):
            yield database.execute(AGGREGATE, [str(path)]).to_arrow_table()


def to_postgres(directory: Path, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE IF NOT EXISTS accounts ({COLUMNS})")
        connection.execute(f"CREATE TEMPORARY TABLE arrived ({COLUMNS}) ON COMMIT DELETE ROWS")
        for rows in aggregated(directory):
            text = io.BytesIO()
            pyarrow.csv.write_csv(rows, text, pyarrow.csv.WriteOptions(include_header=False))
            with connection.transaction():
                with connection.cursor().copy("COPY arrived FROM STDIN (FORMAT csv)") as copy:
                    copy.write(text.getbuffer())
                connection.execute(POSTGRES_UPSERT)


def to_sqlite(directory: Path, path: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE IF NOT EXISTS accounts ({COLUMNS})")
        for rows in aggregated(directory):
            columns = (column.to_pylist() for column in rows.columns)
            with database:
                database.executemany(SQLITE_UPSERT, zip(*columns, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="DuckDB over files to PostgreSQL or SQLite")
    parser.add_argument("--input", type=Path, required=True, help="directory of Parquet files")
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--url", help="of the database")
    to.add_argument("--sqlite", help="path of the database")
    arguments = parser.parse_args()

    began = time.perf_counter()
    if arguments.url is not None:
        to_postgres(arguments.input, arguments.url)
    else:
        to_sqlite(arguments.input, arguments.sqlite)
    job_s = time.perf_counter() - began
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3)}) + "\n")


if __name__ == "__main__":
    main()
