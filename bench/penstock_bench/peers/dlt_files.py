"""dlt: files into Parquet files, as an append."""

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

CHUNK = 10_000


def rows(directory: Path, kind: str) -> Iterator[Any]:
    """Yield what the files hold: lists of documents, or Arrow tables."""
    for path in sorted(directory.glob(f"*.{kind}")):
        if kind == "csv":
            yield pyarrow.csv.read_csv(path)
        elif kind == "parquet":
            yield pyarrow.parquet.read_table(path)
        else:
            with path.open() as lines:
                some = []
                for line in lines:
                    some.append(json.loads(line))
                    if len(some) == CHUNK:
                        yield some
                        some = []
                if some:
                    yield some


def main() -> None:
    parser = argparse.ArgumentParser(description="dlt load of files to Parquet files")
    parser.add_argument("--input", type=Path, required=True, help="directory of the files")
    parser.add_argument("--format", required=True, help="jsonl, csv or parquet")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    arguments = parser.parse_args()

    dlt.config["runtime.dlthub_telemetry"] = False
    began = time.perf_counter()
    events = dlt.resource(
        rows(arguments.input, arguments.format), name="events", write_disposition="append"
    )
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
