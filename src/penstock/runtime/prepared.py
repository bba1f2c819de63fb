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

Nothing is lost with a slot: after a crash, queries are planned again. A slot has one session, which
runs one query at a time; a task that outlives its job may read rows of a later one, but its answer
goes nowhere.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow
import pyarrow.parquet

from penstock.journal.scan import parquet_frame
from penstock.native.direct import SmallFrame, executed_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

pa: Any = pyarrow
pq: Any = pyarrow.parquet

SLOT_BYTES: Final = 64 << 10
SLOT_GROWTH: Final = 4
"""Sizes of slots: the least, and how many times larger each next one is."""

QUERIES_MAX: Final = 16
"""Kept at a time; each is for a choice of bindings, of schemas and of sizes."""

_KEEPING: Final = ("Exchange", "Subquery", "InMemoryTableScan")
"""Names of operators that keep what they have made, in part: BroadcastExchange is one of them."""

_FOOTER_END: Final = 8
"""Bytes behind the footer of a Parquet file: its length, and the name of the format."""

Rows = Mapping[int, pyarrow.Table]
"""A transaction's rows, by binding."""


class Queries:
    """The queries of one session, the files of which lie in a directory of its own."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark = spark
        self._directory = directory
        self._known: dict[Hashable, _Query] = {}
        self._once: _Query | None = None
        """The last query, if it must not be run again."""
        self._made = 0

    def frame(
        self,
        rows: Rows,
        schemas: Mapping[int, StructType],
        combined: Callable[[Mapping[int, DataFrame]], DataFrame],
        *,
        key: Hashable,
    ) -> DataFrame | SmallFrame:
        """Return what `combined` makes of frames with these rows; called once for a `key`, mostly.

        Collect it before asking for the next one.

        With the same key, bindings and schemas are the same, and so is what is made of them.
        """
        files = {binding: _parquet(some) for binding, some in rows.items()}
        sizes = {binding: slot_bytes(len(file)) for binding, file in files.items()}
        place = (key, tuple(sizes.items()))
        query = self._known.pop(place, None)
        if self._once is not None:
            self._once.forget()
            self._once = None
        if query is None:
            query, frame = self._query(files, sizes, schemas, combined)
            if _keeps_rows(frame):
                self._once = query
                return frame
            query.frame = SmallFrame(frame, query.answer)
            while len(self._known) >= QUERIES_MAX:
                self._known.pop(next(iter(self._known))).forget()
        else:
            query.put(files, sizes)
        self._known[place] = query  # as the one that was used last
        return query.frame

    def close(self) -> None:
        """Remove the files; none of the queries is run any more."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _query(
        self,
        files: Mapping[int, bytes],
        sizes: Mapping[int, int],
        schemas: Mapping[int, StructType],
        combined: Callable[[Mapping[int, DataFrame]], DataFrame],
    ) -> tuple[_Query, DataFrame]:
        self._made += 1
        self._directory.mkdir(parents=True, exist_ok=True)
        slots = {binding: self._directory / f"{self._made}-{binding}.parquet" for binding in files}
        query = _Query(slots, self._directory / f"{self._made}.answer")
        query.put(files, sizes)
        frames = {
            binding: parquet_frame(self._spark, "file://", [str(slot)], schemas[binding])
            for binding, slot in slots.items()
        }
        return query, combined(frames)


class _Query:
    """A frame, and the files that it reads."""

    frame: SmallFrame

    def __init__(self, slots: Mapping[int, Path], answer: Path) -> None:
        self._slots = slots
        self.answer = answer

    def put(self, files: Mapping[int, bytes], sizes: Mapping[int, int]) -> None:
        """From now on the frame has these rows."""
        for binding, slot in self._slots.items():
            # Beside it and renamed: a task that has the old file open goes on reading that.
            # And not over it: some file systems write a file to disk before it replaces another.
            beside = slot.with_suffix(".next")
            beside.write_bytes(padded(files[binding], sizes[binding]))
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


def padded(file: bytes, size: int) -> bytes:
    """Pad a Parquet file to a size: readers find its footer from the end, and rows from there."""
    footer = int.from_bytes(file[-_FOOTER_END : -_FOOTER_END + 4], "little") + _FOOTER_END
    rows = len(file) - footer
    return b"".join((file[:rows], bytes(size - len(file)), file[rows:]))


def _parquet(rows: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
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
