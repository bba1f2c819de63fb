"""Bytewax: files aggregated by Arrow, folded by account, copied to PostgreSQL at the end.

A step for each event would run Python for each event. So each file is first reduced to one item
per account, and the stateful step folds those.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import bytewax.operators as op
import psycopg
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.testing import TestingSource, run_main

Fold: TypeAlias = tuple[int, int, int, int, str]
"""Number of events, sum and maximum of amounts, last seq and its region."""

CREATE = """
    CREATE TABLE IF NOT EXISTS accounts
    (account BIGINT PRIMARY KEY, events BIGINT, amount BIGINT, largest BIGINT, region TEXT)
"""


def aggregated(path: Path) -> Iterator[tuple[str, Fold]]:
    """Aggregate a file by account. Its rows are ordered by `seq`, and `last` needs one thread."""
    accounts = (
        pyarrow.parquet.read_table(path)
        .group_by("account", use_threads=False)
        .aggregate(
            [
                ("amount", "count"),
                ("amount", "sum"),
                ("amount", "max"),
                ("seq", "last"),
                ("region", "last"),
            ]
        )
    )
    names = ("amount_count", "amount_sum", "amount_max", "seq_last", "region_last")
    folds = zip(*(accounts[name].to_pylist() for name in names), strict=True)
    return zip(map(str, accounts["account"].to_pylist()), folds, strict=True)


def added(one: Fold, other: Fold) -> Fold:
    events, amount, largest, seq, region = one
    events_2, amount_2, largest_2, seq_2, region_2 = other
    if seq_2 > seq:
        seq, region = seq_2, region_2
    return events + events_2, amount + amount_2, max(largest, largest_2), seq, region


class Copied(DynamicSink):  # type: ignore[misc]
    """Copies all rows of a worker in one transaction when the flow ends."""

    def __init__(self, url: str) -> None:
        self.url = url

    def build(self, step_id: str, worker_index: int, worker_count: int) -> CopiedPartition:
        return CopiedPartition(self.url)


class CopiedPartition(StatelessSinkPartition):  # type: ignore[misc]
    def __init__(self, url: str) -> None:
        self.url = url
        self.rows: list[tuple[str, Fold]] = []

    def write_batch(self, items: Sequence[tuple[str, Fold]]) -> None:
        self.rows.extend(items)

    def close(self) -> None:
        rows = pyarrow.Table.from_pylist(
            [
                {
                    "account": int(key),
                    "events": n,
                    "amount": sum_,
                    "largest": max_,
                    "region": region,
                }
                for key, (n, sum_, max_, _, region) in self.rows
            ]
        )
        text = io.BytesIO()
        pyarrow.csv.write_csv(rows, text, pyarrow.csv.WriteOptions(include_header=False))
        with psycopg.connect(self.url) as connection:
            connection.execute(CREATE)
            with connection.cursor().copy("COPY accounts FROM STDIN (FORMAT csv)") as copy:
                copy.write(text.getbuffer())


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytewax over files to PostgreSQL")
    parser.add_argument("--input", type=Path, required=True, help="directory of Parquet files")
    parser.add_argument("--url", required=True, help="of the database")
    arguments = parser.parse_args()

    began = time.perf_counter()
    flow = Dataflow("accounts")
    files = op.input("files", flow, TestingSource(sorted(arguments.input.glob("*.parquet"))))
    accounts = op.reduce_final("fold", op.flat_map("aggregate", files, aggregated), added)
    op.output("postgres", accounts, Copied(arguments.url))
    run_main(flow)
    job_s = time.perf_counter() - began
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3)}) + "\n")


if __name__ == "__main__":
    main()
