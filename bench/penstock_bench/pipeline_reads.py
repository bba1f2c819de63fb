"""A reader of the table of accounts during an update: is a read ever empty or torn?

A read is *whole* if the sums over the whole table are those of a table that should exist: with all
events of an update or none, or with all events up to some append. It is *empty* if there is no row,
and *torn* in all other cases, also if the files that it reads vanish meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import psycopg

from penstock_bench.pipeline_events import TABLE, Row, parquet_rows

READ_EVERY_S: Final = 0.25


class Sums(NamedTuple):
    """The number and the amount of all events in a table."""

    events: int
    amount: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Sums:
        rows = list(rows)
        return cls(sum(row[1] for row in rows), sum(row[2] for row in rows))


class Read(NamedTuple):
    """One read: the number of rows, and their sums; without either if it failed."""

    rows: int | None
    sums: Sums | None


FAILED: Final = Read(None, None)

ReadTable = Callable[[], Read]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Reads of one contestant, counted."""

    total: int = 0
    empty: int = 0
    torn: int = 0

    @classmethod
    def judge(cls, reads: Sequence[Read], whole: Collection[Sums]) -> Reads:
        """Count reads; `whole` are the sums of tables that should exist."""
        empty = sum(1 for read in reads if read.rows == 0)
        torn = sum(1 for read in reads if read.rows != 0 and read.sums not in whole)
        return cls(total=len(reads), empty=empty, torn=torn)

    def __add__(self, other: Reads) -> Reads:
        return Reads(
            total=self.total + other.total,
            empty=self.empty + other.empty,
            torn=self.torn + other.torn,
        )

    @property
    def whole_share(self) -> float:
        """The share of reads that were neither empty nor torn; NaN without reads."""
        if not self.total:
            return float("nan")
        return 1 - (self.empty + self.torn) / self.total


def read_postgres(connection: psycopg.Connection) -> Read:
    """Read the table in one statement, which sees one snapshot."""
    query = f"SELECT count(*), sum(events)::bigint, sum(amount)::bigint FROM {TABLE}"  # noqa: S608
    try:
        row = connection.execute(query).fetchone()
    except psycopg.errors.UndefinedTable:
        return Read(0, None)
    return FAILED if row is None else Read(row[0], Sums(row[1] or 0, row[2] or 0))


def read_parquet(directory: Path) -> Read:
    """Read the files that are there."""
    try:
        rows = parquet_rows(directory)
    except (OSError, ValueError):  # a file has vanished, or is not complete
        return FAILED
    return Read(len(rows), Sums.of(rows))


@dataclass(slots=True)
class Reader:
    """Reads again and again in a thread; `reads` is what it saw."""

    read: ReadTable
    reads: list[Read] = field(default_factory=list)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read for the duration of the block; an error of a read ends it, and is raised."""
        done = threading.Event()
        failures: list[Exception] = []

        def loop() -> None:
            try:
                while not done.wait(READ_EVERY_S):
                    self.reads.append(self.read())
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=loop, name="reader", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if failures:
            raise failures[0]
