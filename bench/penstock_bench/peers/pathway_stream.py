"""Pathway: a stream of events from files, grouped and reduced, copied to PostgreSQL at the end.

Pathway has no Parquet reader, so a Python connector feeds it rows, as its users would write it. All
events are one batch, because Pathway emits a row again for each batch that changes it. Its own
writer inserts row by row; keeping the rows and copying them at the end is faster. The last region
is part of the largest (seq, region), which needs no second pass over the events.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pathway as pw
import psycopg
import pyarrow
import pyarrow.csv
import pyarrow.parquet

COLUMNS = ("account", "events", "amount", "largest", "region")
CREATE = """
    CREATE TABLE IF NOT EXISTS accounts
    (account BIGINT PRIMARY KEY, events BIGINT, amount BIGINT, largest BIGINT, region TEXT)
"""


class Event(pw.Schema, append_only=True):  # type: ignore[misc, call-arg]
    account: int
    amount: int
    region: str
    seq: int


class Files(pw.io.python.ConnectorSubject):  # type: ignore[misc]
    """Feeds the rows of all files, in order, then ends the stream."""

    deletions_enabled = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def run(self) -> None:
        for path in sorted(self.directory.glob("*.parquet")):
            table = pyarrow.parquet.read_table(path)
            columns = (table[name].to_pylist() for name in ("account", "amount", "region", "seq"))
            for account, amount, region, seq in zip(*columns, strict=True):
                self.next(account=account, amount=amount, region=region, seq=seq)


def by_account(events: pw.Table) -> pw.Table:
    accounts = events.groupby(events.account).reduce(
        events.account,
        events=pw.reducers.count(),
        amount=pw.reducers.sum(events.amount),
        largest=pw.reducers.max(events.amount),
        last=pw.reducers.max(pw.make_tuple(events.seq, events.region)),
    )
    return accounts.select(
        accounts.account,
        accounts.events,
        accounts.amount,
        accounts.largest,
        region=pw.unwrap(accounts.last[1]),
    )


def write(rows: dict[int, dict[str, Any]], url: str) -> None:
    table = pyarrow.Table.from_pylist(list(rows.values())).select(COLUMNS)
    text = io.BytesIO()
    pyarrow.csv.write_csv(table, text, pyarrow.csv.WriteOptions(include_header=False))
    with psycopg.connect(url) as connection:
        connection.execute(CREATE)
        with connection.cursor().copy("COPY accounts FROM STDIN (FORMAT csv)") as copy:
            copy.write(text.getbuffer())


def main() -> None:
    parser = argparse.ArgumentParser(description="Pathway over files to PostgreSQL")
    parser.add_argument("--input", type=Path, required=True, help="directory of Parquet files")
    parser.add_argument("--url", required=True, help="of the database")
    arguments = parser.parse_args()

    began = time.perf_counter()
    rows: dict[int, dict[str, Any]] = {}

    def changed(key: pw.Pointer, row: dict[str, Any], time: int, is_addition: bool) -> None:
        if is_addition:  # accounts change, but are never removed
            rows[row["account"]] = row

    events = pw.io.python.read(Files(arguments.input), schema=Event, autocommit_duration_ms=None)
    pw.io.subscribe(by_account(events), changed)
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)
    write(rows, arguments.url)
    job_s = time.perf_counter() - began
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3)}) + "\n")


if __name__ == "__main__":
    main()
