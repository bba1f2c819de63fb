"""SPARK: queries that are planned once, and run on other rows each time.

Spark plans every frame anew, and for a hundred rows that is more work than to run it. But a frame
that is collected again keeps its plan, and its tasks read their files as they are by then. So the
rows of a small transaction are put into a file that has the same name each time, its **slot**, and
the frame over it is collected once more, mostly without a job (`native.direct`).

A plan must hold nothing of what it was run on before. But Spark keeps what an exchange, a broadcast
or a subquery of a plan has made, and would answer with the rows of an earlier transaction. So a
query whose plan has one of these is planned every time.

A plan knows how long its files are. So slots have fixed sizes: between the rows and the footer of
the Parquet file lies padding that no reader looks at.

Tasks that are alike share their queries: twenty small tasks do not plan twenty times. A query is
lent to one task at a time, until its rows are collected. One that failed is not lent again: what
evaluated it may still be running. A Spark task that outlives its job may read rows of a later
transaction, but its answer goes nowhere.

Nothing is lost with a slot: after a crash, queries are planned again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import pyarrow
import pyarrow.parquet
from pyspark.sql import SparkSession

from penstock.journal.scan import parquet_frame
from penstock.native.direct import SmallFrame, executed_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

pa: Any = pyarrow
pq: Any = pyarrow.parquet

SLOT_BYTES: Final = 64 << 10
SLOT_GROWTH: Final = 4
"""Sizes of slots: the least, and how many times larger each next one is."""

QUERIES_MAX: Final = 256
"""Kinds of queries that are kept: each is for a choice of bindings, of schemas and of sizes."""

ALIKE_MAX: Final = max(2, os.cpu_count() or 1)
"""Queries of one kind, for tasks that run at the same time."""

WAIT_S: Final = 2.0
"""Seconds to wait for a query that other tasks use: longer than it takes to plan another one, and
than to collect few rows. One that is being planned is waited for."""

_KEEPING: Final = ("Exchange", "Subquery", "InMemoryTableScan")
"""Names of operators that keep what they have made, in part: BroadcastExchange is one of them."""

_FOOTER_END: Final = 8
"""Bytes behind the footer of a Parquet file: its length, and the name of the format."""

Rows = Mapping[int, pyarrow.Table]
"""A transaction's rows, by binding."""


Combine = Callable[[Mapping[int, "DataFrame"]], "DataFrame"]
"""Makes one frame of frames by binding."""


class Queries:
    """The queries of all tasks of this process, whose files lie in a directory of their own."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self._directory = directory
        self._changed = threading.Condition()
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        """The one that was used last is the last one."""
        self._made = 0
        self.users = 0

    @contextlib.contextmanager
    def lend(
        self, rows: Rows, schemas: Mapping[int, StructType], combine: Combine, *, key: Hashable
    ) -> Iterator[DataFrame | SmallFrame]:
        """Within this, the frame that `combine` makes of these rows is the caller's to collect.

        `key` says everything that `combine` depends on, besides the schemas.
        """
        files = {binding: _parquet(some) for binding, some in rows.items()}
        sizes = {binding: slot_bytes(file.size) for binding, file in files.items()}
        place = (key, *((at, size, schemas[at].json()) for at, size in sizes.items()))
        kind, query = self._take(place)
        try:
            if query is None:
                try:
                    query, frame = self._plan(files, sizes, schemas, combine)
                finally:
                    with self._changed:
                        kind.planning -= 1
                if _keeps_rows(frame):
                    self._never_again(kind)
                    yield frame
                    query.forget()
                    return
                query.frame = SmallFrame(frame, query.answer)
            else:
                query.put(files, sizes)
            yield query.frame
        except BaseException:
            self._drop(kind, query)
            raise
        self._give_back(place, kind, query)

    def close(self) -> None:
        """Remove the files; none of the queries is run any more."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _take(self, place: Hashable) -> tuple[_Kind, _Query | None]:
        """Take an idle query of this kind; None if the caller is to plan one."""
        with self._changed:
            kind = self._kinds.pop(place, None) or _Kind()
            self._kinds[place] = kind
            while len(self._kinds) > QUERIES_MAX:
                for query in self._kinds.popitem(last=False)[1].idle:
                    query.forget()
            while not self._changed.wait_for(lambda: kind.idle or kind.may_plan, WAIT_S):
                if not kind.planning:
                    break
            if kind.idle:
                return kind, kind.idle.pop()
            kind.planned += 1
            kind.planning += 1
            return kind, None

    def _give_back(self, place: Hashable, kind: _Kind, query: _Query) -> None:
        with self._changed:
            if self._kinds.get(place) is kind:
                kind.idle.append(query)
            else:
                query.forget()
            self._changed.notify_all()

    def _drop(self, kind: _Kind, query: _Query | None) -> None:
        with self._changed:
            kind.planned -= 1
            self._changed.notify_all()
        if query is not None:
            query.forget()

    def _never_again(self, kind: _Kind) -> None:
        with self._changed:
            kind.is_kept = False
            self._changed.notify_all()

    def _plan(
        self,
        files: Mapping[int, pyarrow.Buffer],
        sizes: Mapping[int, int],
        schemas: Mapping[int, StructType],
        combine: Combine,
    ) -> tuple[_Query, DataFrame]:
        with self._changed:
            self._made += 1
            made = self._made
        self._directory.mkdir(parents=True, exist_ok=True)
        slots = {binding: self._directory / f"{made}-{binding}.parquet" for binding in files}
        query = _Query(slots, self._directory / f"{made}.answer")
        query.put(files, sizes)
        frames = {
            binding: parquet_frame(self._spark, "file://", [str(slot)], schemas[binding])
            for binding, slot in slots.items()
        }
        return query, combine(frames)


_shared: WeakKeyDictionary[SparkSession, Queries] = WeakKeyDictionary()
_shared_lock = threading.Lock()


def open_queries(spark: SparkSession) -> Queries:
    """Return the queries that tasks of this process share; each calls `close_queries` later."""
    with _shared_lock:
        if (queries := _shared.get(spark)) is None:
            jvm: Any = spark._jvm  # noqa: SLF001 - pyspark has no public way to a class of Spark
            # Spark removes it when it ends, also if this process was killed.
            root = jvm.org.apache.spark.SparkFiles.getRootDirectory()
            queries = Queries(spark, Path(tempfile.mkdtemp(prefix="penstock-slots-", dir=root)))
            _shared[spark] = queries
        queries.users += 1
        return queries


def close_queries(queries: Queries) -> None:
    """Say that a task needs them no more; the last one removes their files."""
    with _shared_lock:
        queries.users -= 1
        if queries.users == 0:
            for spark in [spark for spark, shared in _shared.items() if shared is queries]:
                del _shared[spark]
            queries.close()


@dataclass(slots=True, eq=False)
class _Kind:
    """Queries that differ in nothing but their rows."""

    idle: list[_Query] = field(default_factory=list)
    planned: int = 0
    """Idle or lent ones, and those that are being planned."""
    planning: int = 0
    is_kept: bool = True
    """Its plans may be run again."""

    @property
    def may_plan(self) -> bool:
        return self.planned < ALIKE_MAX or not self.is_kept


class _Query:
    """A frame, and the files that it reads."""

    frame: SmallFrame

    def __init__(self, slots: Mapping[int, Path], answer: Path) -> None:
        self._slots = slots
        self.answer = answer

    def put(self, files: Mapping[int, pyarrow.Buffer], sizes: Mapping[int, int]) -> None:
        """From now on the frame has these rows."""
        for binding, slot in self._slots.items():
            # Beside it and renamed: a task that has the old file open goes on reading that.
            # And not over it: some file systems write a file to disk before it replaces another.
            beside = slot.with_suffix(".next")
            write_padded(beside, files[binding], sizes[binding])
            slot.unlink(missing_ok=True)
            beside.rename(slot)

    def forget(self) -> None:
        for file in (*self._slots.values(), self.answer):
            file.unlink(missing_ok=True)


def _keeps_rows(frame: DataFrame) -> bool:
    """True if a frame that is collected again may have rows of the first time."""
    plan = executed_plan(frame)
    return any(name in plan for name in _KEEPING)


def slot_bytes(needed: int) -> int:
    """Return the size of the smallest slot with room for this many bytes."""
    size = SLOT_BYTES
    while size < needed:
        size *= SLOT_GROWTH
    return size


def write_padded(path: Path, file: pyarrow.Buffer, size: int) -> None:
    """Write a Parquet file of this size: readers find its footer from the end, and rows from there.

    What is between them is a hole, which costs nothing; and nothing is copied, as other threads of
    Python would have to wait for that.
    """
    content = memoryview(file)
    footer = int.from_bytes(content[-_FOOTER_END : -_FOOTER_END + 4], "little") + _FOOTER_END
    with path.open("wb") as out:
        out.write(content[:-footer])
        out.seek(size - footer)
        out.write(content[-footer:])


def _parquet(rows: pyarrow.Table) -> pyarrow.Buffer:
    sink = pyarrow.BufferOutputStream()
    pq.write_table(
        rows,
        sink,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
        row_group_size=max(1, rows.num_rows),
    )
    return sink.getvalue()
