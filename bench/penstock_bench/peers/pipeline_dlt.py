"""dlt in two hops: new files appended to a table of clean events, accounts merged by key.

The first load reads files that it has not read before (dlt keeps their names in its state), drops
invalid events and normalises the others in Arrow, and copies them to PostgreSQL as CSV. The second
asks PostgreSQL for the accounts that the first has touched, added up and joined with customers, and
merges them by key. Only touched accounts are computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dlt
import psycopg
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet

REGIONS = ("ap", "eu", "me", "sa", "us")

TOUCHED = """
    WITH latest AS (
        SELECT DISTINCT account FROM clean WHERE _dlt_load_id = ANY(%(loads)s)
        UNION SELECT account FROM customers WHERE _dlt_load_id = ANY(%(loads)s)
    ), events AS (
        SELECT account, count(*) AS events, sum(amount)::BIGINT AS amount, max(amount) AS largest,
               coalesce(sum(amount) FILTER (WHERE region = 'eu'), 0)::BIGINT AS eu
        FROM clean WHERE account IN (SELECT account FROM latest) GROUP BY account
    )
    SELECT account, coalesce(events, 0), coalesce(amount, 0), coalesce(largest, 0),
           coalesce(eu, 0), tier
    FROM latest LEFT JOIN events USING (account) LEFT JOIN customers USING (account)
"""
COLUMNS = ("account", "events", "amount", "largest", "eu", "tier")


def cleaned(events: pyarrow.Table) -> pyarrow.Table:
    region = pc.utf8_lower(pc.utf8_trim_whitespace(events["region"]))
    known = pc.is_in(region, pyarrow.array(REGIONS))
    valid = pc.and_(
        pc.greater(events["amount"], pyarrow.scalar(0)), known
    )  # null if there is no amount
    return events.set_column(3, "region", region).filter(valid)


def new_files(directory: Path) -> Iterator[Path]:
    """Yield files that no earlier load has read."""
    read = dlt.current.resource_state().setdefault("read", [])
    for path in sorted(directory.glob("*.parquet")):
        if path.name not in read:
            read.append(path.name)
            yield path


@dlt.resource(write_disposition="append")  # type: ignore[untyped-decorator]
def clean(directory: Path) -> Iterator[pyarrow.Table]:
    for path in new_files(directory):
        yield cleaned(pyarrow.parquet.read_table(path))


@dlt.resource(write_disposition="merge", primary_key="account")  # type: ignore[untyped-decorator]
def customers(directory: Path) -> Iterator[pyarrow.Table]:
    for path in new_files(directory):
        yield pyarrow.parquet.read_table(path)


@dlt.resource(  # type: ignore[untyped-decorator]
    write_disposition={"disposition": "merge", "strategy": "upsert"}, primary_key="account"
)
def accounts(url: str, loads: list[str]) -> Iterator[pyarrow.Table]:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE INDEX IF NOT EXISTS clean_account ON clean (account)")
        rows = connection.execute(TOUCHED, {"loads": loads}).fetchall()
    yield pyarrow.Table.from_pylist([dict(zip(COLUMNS, row, strict=True)) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="dlt in two hops to PostgreSQL")
    parser.add_argument("--input", type=Path, required=True, help="parent of events/, customers/")
    parser.add_argument("--url", required=True, help="of the database")
    parser.add_argument("--work", required=True, help="directory for the state of the pipeline")
    arguments = parser.parse_args()

    dlt.config["runtime.dlthub_telemetry"] = False
    dlt.config["normalize.parquet_normalizer.add_dlt_load_id"] = True
    began = time.perf_counter()
    pipeline = dlt.pipeline(
        "accounts",
        pipelines_dir=arguments.work,
        destination=dlt.destinations.postgres(arguments.url),
        dataset_name="public",
    )
    sources = [
        clean(arguments.input / "events"),
        customers(arguments.input / "customers"),
    ]
    loaded = pipeline.run(sources, loader_file_format="csv")
    loaded.raise_on_failed_jobs()
    touched = accounts(arguments.url, list(loaded.loads_ids))
    pipeline.run(touched, loader_file_format="csv").raise_on_failed_jobs()
    job_s = time.perf_counter() - began
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3)}) + "\n")


if __name__ == "__main__":
    main()
