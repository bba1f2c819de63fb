"""dlt: a resource that is merged by key, in one load.

A merge replaces rows and cannot add to them, so the resource is the whole table: the files,
aggregated into one Arrow table. dlt loads it as CSV, which it copies to PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import dlt
import pyarrow
import pyarrow.dataset


def by_account(directory: Path) -> pyarrow.Table:
    """Aggregate all files. Rows are ordered by `seq`, and `last` needs one thread."""
    files = [str(path) for path in sorted(directory.glob("*.parquet"))]
    accounts = (
        pyarrow.dataset.dataset(files)
        .to_table()
        .group_by("account", use_threads=False)
        .aggregate([("amount", "count"), ("amount", "sum"), ("amount", "max"), ("region", "last")])
    )
    return accounts.rename_columns(["account", "events", "amount", "largest", "region"])


def main() -> None:
    parser = argparse.ArgumentParser(description="dlt merge of files to PostgreSQL")
    parser.add_argument("--input", type=Path, required=True, help="directory of Parquet files")
    parser.add_argument("--url", required=True, help="of the database")
    arguments = parser.parse_args()

    dlt.config["runtime.dlthub_telemetry"] = False
    began = time.perf_counter()
    accounts = dlt.resource(
        by_account(arguments.input),
        name="accounts",
        primary_key="account",
        write_disposition="merge",
    )
    with tempfile.TemporaryDirectory() as temp_dir:
        pipeline = dlt.pipeline(
            "accounts",
            pipelines_dir=temp_dir,
            destination=dlt.destinations.postgres(arguments.url),
            dataset_name="public",
        )
        pipeline.run(accounts, loader_file_format="csv").raise_on_failed_jobs()
    job_s = time.perf_counter() - began
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3)}) + "\n")


if __name__ == "__main__":
    main()
