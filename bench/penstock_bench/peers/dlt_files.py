"""dlt: files into Parquet files, as an append, by its own readers or as Arrow tables."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dlt
import pyarrow.csv
import pyarrow.parquet
from dlt.sources.filesystem import filesystem, read_csv, read_jsonl, read_parquet

READERS = {"jsonl": read_jsonl, "csv": read_csv, "parquet": read_parquet}


def tables(directory: Path, kind: str) -> Iterator[Any]:
    """Yield what the files hold as Arrow tables, which dlt passes on as they are."""
    read = pyarrow.csv.read_csv if kind == "csv" else pyarrow.parquet.read_table
    for path in sorted(directory.glob(f"*.{kind}")):
        yield read(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="dlt load of files to Parquet files")
    parser.add_argument("--input", type=Path, required=True, help="directory of the files")
    parser.add_argument("--format", required=True, help="jsonl, csv or parquet")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--arrow", action="store_true", help="read CSV or Parquet by pyarrow")
    arguments = parser.parse_args()
    directory, kind = arguments.input, arguments.format

    dlt.config["runtime.dlthub_telemetry"] = False
    began = time.perf_counter()
    events = (
        dlt.resource(tables(directory, kind))
        if arguments.arrow
        else filesystem(directory.as_uri(), file_glob=f"*.{kind}") | READERS[kind]()
    ).with_name("events")
    events.apply_hints(write_disposition="append")
    with tempfile.TemporaryDirectory() as temp_dir:
        pipeline = dlt.pipeline(
            "events",
            pipelines_dir=temp_dir,
            destination=dlt.destinations.filesystem(bucket_url=str(arguments.out)),
            dataset_name="bench",
        )
        pipeline.run(events, loader_file_format="parquet").raise_on_failed_jobs()
    job_s = time.perf_counter() - began
    made = arguments.out.rglob("events/*.parquet")
    count = sum(pyarrow.parquet.read_metadata(path).num_rows for path in made)
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3), "rows": count}) + "\n")


if __name__ == "__main__":
    main()
