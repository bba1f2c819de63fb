"""SPARK: the committed documents of a collection as a DataFrame, at one revision.

Which rows are committed is known from the records, so the question for each object is only whether
Spark's own Parquet reader can read it, which is several times faster than any other way:

    whole     every row is visible: nothing to compare. Nearly all objects of a healthy collection
    partly    some rows are not committed or came twice: a filter by (producer, clock)
    the rest  inline rows; runs that repeat themselves; objects of which the journal has forgotten
              the first rows; many small objects: Arrow batches, read by the code that
              `penstock read` uses, in tasks or, if they are inline and few, where the plan is made

Whole and partly visible objects are one read for each schema they were written under, however many
they are. Planning starts no Spark job: schemas are given. Of each of these objects planning looks
at what Spark's reader would take on trust (`integrity`).

A row that comes later than its clock says (`VisibleRows.level`) is shown with its level on request.
For a whole object an expression over (producer, clock) computes it; others are left to Arrow.
"""

from __future__ import annotations

import asyncio
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import LongType, StructField, StructType

from penstock.errors import UserError
from penstock.garbage import gc_paused
from penstock.journal.blobs import BlobStore, spark_root
from penstock.journal.committed import VisibleRows
from penstock.journal.fragments import COMPACTED
from penstock.journal.frames import adapt_frame, frame_schema
from penstock.journal.integrity import check_skeleton, locate_damage
from penstock.journal.journals import Journals
from penstock.journal.planning import Planner, ScannedJournal
from penstock.journal.rows import STAMPS, row_schema, stamp_names
from penstock.journal.schemas import Schemas, layout
from penstock.journal.selector import EVERYTHING, LabelSelector
from penstock.journal.splits import (
    Piece,
    Split,
    piece_bytes,
    pieces,
    place_of,
    read_split,
    split_bytes,
    splits,
)
from penstock.journal.state import Blob, Fragment, Inline
from penstock.model.columns import Column
from penstock.model.runs import Run
from penstock.native import sql
from penstock.native.meanings import read_frame

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import SparkSession

    from penstock.model.spec import CollectionSpec

_pa: Any = pyarrow  # the published stubs lack some constructors

INTERVALS_MAX: Final = 200
"""Intervals in one filter; an expression with many more costs more than it saves."""

SMALL_BYTES: Final = 128 << 10
SMALL_MAX: Final = 64
"""Small objects that are left to Spark's reader; opening one takes it several times longer than
Arrow, which for a few of them is less than to start Python."""

VERIFY_PAGES: Final = "parquet.page.verify-checksum.enabled"
"""The option by which Spark's Parquet reader compares pages with their checksums."""

CHECKS_AT_ONCE: Final = 8
"""Objects that are looked at by as many threads while a scan is planned."""

LOCAL_ROWS_MAX: Final = 100_000
LOCAL_BYTES_MAX: Final = 1 << 20
LOCAL_PIECES_MAX: Final = 1024
"""Inline rows that the driver decodes itself: far less work than to start Python in a task."""

LOCAL_OBJECTS_MAX: Final = 16
"""Objects that it reads itself as well, if there are no others and all are small together."""

# --------------------------------------------------------------------------------------- planning

Intervals = dict[int, list[tuple[int, int]]]
"""Closed intervals of clocks by producer."""

Steps = tuple[tuple[int, int, int], ...]
"""Ascending (producer, clock, level): rows from this one up to the next have this level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Whole objects, some of whose rows come later than their clocks say."""

    paths: tuple[str, ...]
    steps: Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeScan:
    """Objects of one schema for Spark's reader; of `partly`, the rows that lie in `shown`."""

    whole: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
    shown: Intervals = field(default_factory=dict)
    late: tuple[Late, ...] = ()


class Trusted(NamedTuple):
    """An object of which Spark's reader compares no more than the content of pages."""

    blob: Blob
    journal: str
    begin: int
    end: int
    """Offsets of the rows that would be lost with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPlan:
    """The plan of reading a collection."""

    native: Mapping[str, NativeScan]
    """By the fingerprint of the schema."""
    rest: tuple[Piece, ...]
    trusted: tuple[Trusted, ...] = ()
    """The objects of `native`."""
    here: bool = False
    """The driver reads all of `rest`."""


@dataclass(slots=True)
class _Object:
    """An object of the blob store, and what is visible of it."""

    path: str
    journal: str
    fragments: list[Fragment] = field(default_factory=list)
    visible: list[VisibleRows] = field(default_factory=list)

    @property
    def schema(self) -> str:
        return self.fragments[0].schema

    @property
    def trusted(self) -> Trusted:
        begin = min(fragment.begin for fragment in self.fragments)
        end = max(fragment.end for fragment in self.fragments)
        return Trusted(self._at, self.journal, begin, end)

    @property
    def small(self) -> bool:
        """True if opening it takes Spark longer than reading it."""
        return self.bytes < SMALL_BYTES

    @property
    def bytes(self) -> int:
        return sum(fragment.bytes for fragment in self.fragments)

    @property
    def known(self) -> bool:
        """True if fragments account for every row of it.

        Of a retained journal the first may be lost. The last may have been moved on: a page names
        the first rows of an object, and compaction took the others, which stood in the state. They
        are still there, and Spark would read them once more.
        """
        row = 0
        for fragment in sorted(self.fragments, key=_row):
            if _row(fragment) != row:
                return False
            row += fragment.rows
        digest = self._at.digest
        if digest is None:  # its size is unknown, but only compaction makes one of many
            return not self.path.endswith(COMPACTED)
        return row == digest.rows

    @property
    def _at(self) -> Blob:
        at = self.fragments[0].at
        assert isinstance(at, Blob)  # noqa: S101 - it is one of an object
        return at

    @property
    def whole(self) -> bool:
        rows = sum(fragment.rows for fragment in self.fragments)
        shown = sum(visible.run.rows for visible in self.visible)
        return shown == rows and all(visible.whole for visible in self.visible)

    @property
    def late(self) -> bool:
        """True if rows of it come later than their clocks say."""
        return any(rows.level for rows in self.visible)

    def levels(self) -> list[_Level]:
        """The level of rows by their stamps."""
        return [
            (int(rows.run.producer), rows.run.clock_min, rows.run.clock_max, int(rows.level))
            for rows in self.visible
        ]

    def intervals(self) -> tuple[Intervals, Intervals]:
        """The clocks of visible rows, and those of rows that must not be shown."""
        shown: Intervals = {}
        hidden: Intervals = {}
        above: dict[tuple[int, Run], int] = {
            (rows.fragment.begin, rows.run): rows.clock_gt for rows in self.visible
        }
        for fragment in self.fragments:
            for run in fragment.runs:
                limit = above.get((fragment.begin, run), run.clock_max)
                if run.clock_min <= limit:
                    _add(hidden, run, run.clock_min, min(limit, run.clock_max))
                if limit < run.clock_max:
                    _add(shown, run, max(run.clock_min, limit + 1), run.clock_max)
        return shown, hidden


_Level = tuple[int, int, int, int]
"""Producer, first and last clock, and the level of rows between them."""


def _row(fragment: Fragment) -> int:
    assert isinstance(fragment.at, Blob)  # noqa: S101 - it is one of an object
    return fragment.at.row


def _add(to: Intervals, run: Run, low: int, high: int) -> None:
    to.setdefault(int(run.producer), []).append((low, high))


@gc_paused()
def plan_scan(
    scanned: Iterable[ScannedJournal], *, native: bool = True, few_here: bool = False
) -> ScanPlan:
    """Sort the visible rows of journals by how they are best read.

    With `few_here`, the driver reads rows itself that are few.
    """
    readable: list[_Object] = []
    rest: list[VisibleRows] = []
    for journal in scanned:
        objects, others = _objects(journal)
        rest += others
        for each in objects.values():
            if not native or not each.known or any(rows.running_max for rows in each.visible):
                rest += each.visible
            elif each.visible:
                readable.append(each)
    here = few_here and _is_few(readable, rest)
    if here:
        rest += [rows for each in readable for rows in each.visible]
        readable = []
    if sum(each.small for each in readable) > SMALL_MAX:
        rest += [rows for each in readable if each.small for rows in each.visible]
        readable = [each for each in readable if not each.small]
    whole: dict[str, list[str]] = {}
    partly: dict[str, list[_Object]] = {}
    late: dict[str, list[_Object]] = {}
    for each in readable:
        if each.late:
            late.setdefault(each.schema, []).append(each)
        elif each.whole:
            whole.setdefault(each.schema, []).append(each.path)
        else:
            partly.setdefault(each.schema, []).append(each)
    found: dict[str, NativeScan] = {}
    trusted = [each.trusted for each in readable if each.whole and not each.late]
    for schema in sorted(whole.keys() | partly.keys() | late.keys()):
        kept, shown = _filterable(partly.get(schema, []))
        scans = _late_scans(late.get(schema, []))
        native_paths = {*kept, *(path for scan in scans for path in scan.paths)}
        rest += [
            rows
            for each in (*partly.get(schema, []), *late.get(schema, []))
            if each.path not in native_paths
            for rows in each.visible
        ]
        trusted += [
            each.trusted
            for each in (*partly.get(schema, []), *late.get(schema, []))
            if each.path in native_paths
        ]
        scan = NativeScan(
            whole=tuple(whole.get(schema, ())), partly=tuple(kept), shown=shown, late=scans
        )
        if scan != NativeScan():
            found[schema] = scan
    return ScanPlan(native=found, rest=tuple(pieces(rest)), trusted=tuple(trusted), here=here)


def _is_few(objects: Sequence[_Object], others: Sequence[VisibleRows]) -> bool:
    """True if the driver may read objects itself, beside others that it has at hand."""
    return (
        len(objects) <= LOCAL_OBJECTS_MAX
        and len(others) <= LOCAL_PIECES_MAX
        and all(isinstance(rows.fragment.at, Inline) for rows in others)
        and sum(each.bytes for each in objects) + sum(rows.fragment.bytes for rows in others)
        <= LOCAL_BYTES_MAX
        and sum(rows.run.rows for each in objects for rows in each.visible)
        + sum(rows.run.rows for rows in others)
        <= LOCAL_ROWS_MAX
    )


def _objects(journal: ScannedJournal) -> tuple[dict[str, _Object], list[VisibleRows]]:
    """The objects that the records account for, and rows that lie in none of them."""
    objects: dict[str, _Object] = {}
    others: list[VisibleRows] = []
    for record in journal.records:
        if isinstance(record, Fragment) and isinstance(record.at, Blob):
            path = record.at.path
            objects.setdefault(path, _Object(path, journal.name)).fragments.append(record)
    for rows in journal.visible:
        at = rows.fragment.at
        found = objects.get(at.path) if isinstance(at, Blob) else None
        (others if found is None else found.visible).append(rows)
    return objects, others


def _filterable(objects: Sequence[_Object]) -> tuple[list[str], Intervals]:
    """The objects that one filter of intervals can serve, and that filter.

    It cannot serve one that hides a row which lies in what is shown of any of them: a document that
    came twice, or, of a transaction over several journals, its rows in one that has no ACK yet.
    Leaving such an object out leaves less to be shown, so what was asked of others still holds.
    """
    intervals = {each.path: each.intervals() for each in objects}
    every = _merged(shown for shown, _ in intervals.values())
    kept = [
        path
        for path, (_, hidden) in intervals.items()
        if not any(
            _overlaps(every.get(producer, []), low, high)
            for producer, closed in hidden.items()
            for low, high in closed
        )
    ]
    shown = _merged(intervals[path][0] for path in kept)
    if sum(map(len, shown.values())) > INTERVALS_MAX:
        return [], {}
    return kept, shown


def _late_scans(objects: Sequence[_Object]) -> tuple[Late, ...]:
    """Scans of those objects for which an expression can compute the level of each row."""
    groups: list[list[_Object]] = []
    size = INTERVALS_MAX + 1
    for each in objects:
        own = len(_steps(each.levels()) or ()) if each.whole else 0
        if not 0 < own <= INTERVALS_MAX:
            continue
        if size + own > INTERVALS_MAX:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += own
    together = [each for group in groups for each in group]
    steps = _steps(level for each in together for level in each.levels())
    if steps is not None and len(steps) <= INTERVALS_MAX:
        groups = [together] if together else []
    scans = []
    for group in groups:
        steps = _steps(level for each in group for level in each.levels())
        if steps is not None:
            scans.append(Late(paths=tuple(each.path for each in group), steps=steps))
    return tuple(scans)


def _steps(levels: Iterable[_Level]) -> Steps | None:
    """The stamps at which levels change; None if stamps do not determine the level."""
    steps: list[tuple[int, int, int]] = []
    last = (-1, -1, -1)
    for producer, low, high, level in sorted(levels):
        if last[0] == producer and low <= last[1]:
            if level != last[2]:
                return None
            high = max(high, last[1])
        if not steps or level != last[2]:
            steps.append((producer, low, level))
        last = producer, high, level
    return tuple(steps)


def _merged(all_of: Iterable[Intervals]) -> Intervals:
    """The union of intervals: sorted, and apart from each other."""
    union: Intervals = {}
    for intervals in all_of:
        for producer, closed in intervals.items():
            union.setdefault(producer, []).extend(closed)
    for producer, closed in union.items():
        apart: list[tuple[int, int]] = []
        for low, high in sorted(closed):
            if apart and low <= apart[-1][1]:
                apart[-1] = apart[-1][0], max(apart[-1][1], high)
            else:
                apart.append((low, high))
        union[producer] = apart
    return union


def _overlaps(apart: Sequence[tuple[int, int]], low: int, high: int) -> bool:
    at = bisect_right(apart, high, key=lambda interval: interval[0]) - 1
    return at >= 0 and apart[at][1] >= low


# ---------------------------------------------------------------------------------------- frames


async def read_collection(
    spark: SparkSession,
    journals: Journals,
    blobs: BlobStore,
    schemas: Schemas,
    collection: CollectionSpec,
    *,
    selector: LabelSelector = EVERYTHING,
    columns: Sequence[str] | None = None,
    meta: bool = False,
    keep_text: bool = True,
    verify: bool = True,
) -> DataFrame:
    """Read what is committed to a collection now, in the layout of its read schema.

    `columns` are top-level columns, all by default; with `meta`, the stamp of each document follows
    (`_clock`, `_producer`, `_flags`). Unless `keep_text`, texts that write moments and numbers are
    these (`native.meanings`). The rows have no order. Without `verify`, what Spark's reader gives
    is believed: this is for measuring what checksums cost.
    """
    wanted = layout(collection.read_schema.text)
    names = _names(wanted, columns, meta=meta)
    planner = Planner(journals=journals, blobs=blobs, schemas=schemas)
    root = spark_root(blobs)
    plan = plan_scan(await planner.scan(collection.name, selector), native=root is not None)
    layouts = {name: await schemas.layout(name) for name in plan.native}
    layouts |= await planner.layouts(plan.rest)

    def frame() -> DataFrame:
        rows = scan_frame(spark, blobs, plan, layouts, wanted, columns=names, verify=verify)
        return rows if keep_text else read_frame(rows, wanted)

    return await asyncio.to_thread(frame)


@gc_paused()
def scan_frame(
    spark: SparkSession,
    blobs: BlobStore,
    plan: ScanPlan,
    layouts: Mapping[str, Column],
    wanted: Column,
    *,
    columns: Sequence[str],
    leveled: bool = False,
    verify: bool = True,
) -> DataFrame:
    """These columns of a plan's rows, stamps among them. No row is read before an action.

    If they are `leveled`, the last column is `StampNames.level`. What Spark's reader takes on trust
    is looked at here; raises CorruptBlob.
    """
    if verify:
        check_trusted(blobs, plan.trusted)
    root = spark_root(blobs)
    frames = []
    for frame, steps in _native_frames(spark, root, plan.native, layouts, wanted, verify=verify):
        made = [_level_column(steps, wanted)] if leveled else []
        frames.append(frame.select(*map(_column, columns), *made))
    local, distributed = _split_local(plan)
    if distributed:
        size = split_bytes(distributed, spark.sparkContext.defaultParallelism)
        some = splits(distributed, layouts, size)
        frames.append(_arrow_frame(spark, blobs, some, wanted, columns, leveled=leveled))
    if local or not frames:
        split = Split(pieces=tuple(local), layouts=layouts)
        frames.append(_local_frame(spark, blobs, split, wanted, columns, leveled=leveled))
    return reduce(DataFrame.union, frames)


def check_trusted(blobs: BlobStore, objects: Sequence[Trusted]) -> None:
    """Compare of each object what Spark's reader does not.

    HDFS compares what it reads itself, and to ask it for some bytes takes long: of its objects
    footers are enough.
    """
    headers = (spark_root(blobs) or "").startswith("file:")

    def check(each: Trusted) -> None:
        with locate_damage(each.journal, each.begin, each.end):
            check_skeleton(blobs, each.blob, headers=headers)

    if len(objects) < CHECKS_AT_ONCE:
        for each in objects:
            check(each)
        return
    with ThreadPoolExecutor(CHECKS_AT_ONCE, "penstock-check") as threads:
        for _ in threads.map(check, objects):
            pass


def rows_at_hand(
    blobs: BlobStore,
    plan: ScanPlan,
    layouts: Mapping[str, Column],
    wanted: Column,
    *,
    columns: Sequence[str],
    leveled: bool = False,
) -> pyarrow.Table | None:
    """These columns of a plan's rows, if the driver has them all; None if tasks are to read.

    They look as `rows_schema` says.
    """
    local, distributed = _split_local(plan)
    if plan.native or distributed:
        return None
    split = Split(pieces=tuple(local), layouts=layouts)
    return _local_rows(blobs, split, wanted, columns, leveled=leveled)


def _names(wanted: Column, columns: Sequence[str] | None, *, meta: bool) -> list[str]:
    known = row_schema(wanted).names
    documents, stamps = known[:-STAMPS], known[-STAMPS:]
    for name in columns or ():
        if name not in documents:
            raise UserError(
                f"there is no column {name}", fix=f"one of {', '.join(map(str, documents))}"
            )
    return [*(documents if columns is None else columns), *(stamps if meta else ())]


def _column(name: str) -> SparkColumn:
    """A column by its name, whatever is in it."""
    return f.col("`{}`".format(name.replace("`", "``")))


def _native_frames(
    spark: SparkSession,
    root: str | None,
    native: Mapping[str, NativeScan],
    layouts: Mapping[str, Column],
    wanted: Column,
    *,
    verify: bool,
) -> Iterator[tuple[DataFrame, Steps]]:
    for schema, scan in native.items():
        written = layouts[schema]
        if scan.whole:
            whole = parquet_frame(spark, root, scan.whole, frame_schema(written), verify=verify)
            yield adapt_frame(whole, written, wanted), ()
        if scan.partly:
            partly = parquet_frame(spark, root, scan.partly, frame_schema(written), verify=verify)
            yield adapt_frame(partly.where(_shown(scan.shown, written)), written, wanted), ()
        for late in scan.late:
            frame = parquet_frame(spark, root, late.paths, frame_schema(written), verify=verify)
            yield adapt_frame(frame, written, wanted), late.steps


def parquet_frame(
    spark: SparkSession,
    root: str | None,
    paths: Sequence[str],
    schema: StructType,
    *,
    verify: bool = True,
) -> DataFrame:
    """Objects by name: nothing is inferred from them, nor from their paths.

    The content of pages is compared with the checksums in their headers, if they have any.
    """
    return (
        spark.read.schema(schema)
        .option("recursiveFileLookup", "true")  # field=value in a path is no column
        .option("__globPaths__", "false")  # and [a] is no pattern
        .option(VERIFY_PAGES, str(verify).lower())
        .parquet(*(f"{root}{path}" for path in paths))
    )


def _shown(shown: Intervals, written: Column) -> SparkColumn:
    names = stamp_names(written)
    clock, producer = _column(names.clock), _column(names.producer)
    return reduce(
        or_,
        (
            (producer == f.lit(of)) & reduce(or_, (clock.between(*each) for each in closed))
            for of, closed in sorted(shown.items())
        ),
    )


def _level_column(steps: Steps, wanted: Column) -> SparkColumn:
    names = stamp_names(wanted)
    clock, producer = sql.name(names.clock), sql.name(names.producer)

    def search(some: Steps) -> str:
        """A tree of comparisons: the last step at or before a row, after few of them."""
        if len(some) < 2:
            level = some[0][2] if some else 0
            return f"greatest({clock}, {sql.bigint(level)})" if level else clock
        middle = len(some) // 2
        of, at, _ = some[middle]
        before = f"{producer} < {sql.bigint(of)} OR "
        before += f"({producer} = {sql.bigint(of)} AND {clock} < {sql.bigint(at)})"
        return f"CASE WHEN {before} THEN {search(some[:middle])} ELSE {search(some[middle:])} END"

    return f.expr(search(steps)).alias(names.level)


def _split_local(plan: ScanPlan) -> tuple[Sequence[Piece], Sequence[Piece]]:
    """Split pieces into those the driver has at hand and reads itself, and those for tasks."""
    rest = plan.rest
    if plan.here:
        return rest, ()
    inline = [piece for piece in rest if isinstance(place_of(piece), Inline)]
    if len(inline) > LOCAL_PIECES_MAX or sum(map(piece_bytes, inline)) > LOCAL_BYTES_MAX:
        return (), rest
    return inline, [piece for piece in rest if isinstance(place_of(piece), Blob)]


def _local_frame(
    spark: SparkSession,
    blobs: BlobStore,
    split: Split,
    wanted: Column,
    columns: Sequence[str],
    *,
    leveled: bool,
) -> DataFrame:
    """Rows that go to Spark with the query: no task reads them, and no Python starts for them."""
    rows = _local_rows(blobs, split, wanted, columns, leveled=leveled)
    return spark.createDataFrame(rows, rows_schema(wanted, columns, leveled=leveled))


def _local_rows(
    blobs: BlobStore, split: Split, wanted: Column, columns: Sequence[str], *, leveled: bool
) -> pyarrow.Table:
    schema = _arrow_schema(wanted, columns, leveled=leveled)
    read = read_split(blobs, split, wanted, columns=columns, leveled=leveled)
    rows = [_as(batch, schema) for batch in read]
    # Spark does not take a table without batches.
    return pyarrow.Table.from_batches(rows or [_pa.RecordBatch.from_pylist([], schema)], schema)


def _arrow_frame(
    spark: SparkSession,
    blobs: BlobStore,
    all_splits: Sequence[Split],
    wanted: Column,
    columns: Sequence[str],
    *,
    leveled: bool,
) -> DataFrame:
    """A task for each split, which reads it by Arrow."""
    # Packed one by one, so that a task unpacks its own and not those of all the others.
    shared = spark.sparkContext.broadcast([pickle.dumps(split) for split in all_splits])
    schema = _arrow_schema(wanted, columns, leveled=leveled)

    def read(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        pyarrow.set_cpu_count(1)  # as many as Spark gives to a task
        for batch in batches:
            for number in batch.column(0).to_numpy():
                split: Split = pickle.loads(shared.value[int(number)])  # noqa: S301 - ours
                for rows in read_split(blobs, split, wanted, columns=columns, leveled=leveled):
                    yield _as(rows, schema)

    count = len(all_splits)
    numbers = spark.range(0, count, 1, numPartitions=count)
    return numbers.mapInArrow(read, rows_schema(wanted, columns, leveled=leveled))


def _arrow_schema(wanted: Column, columns: Sequence[str], *, leveled: bool) -> pyarrow.Schema:
    """These columns of rows, for Arrow."""
    schema = row_schema(wanted)
    fields = [schema.field(name) for name in columns]
    if leveled:
        fields.append(_pa.field(stamp_names(wanted).level, _pa.int64()))
    return pyarrow.schema(fields)


def rows_schema(wanted: Column, columns: Sequence[str], *, leveled: bool = False) -> StructType:
    """The same, for Spark."""
    schema = frame_schema(wanted)
    fields = [schema[name] for name in columns]
    if leveled:
        fields.append(StructField(stamp_names(wanted).level, LongType()))
    return StructType(fields)


def _as(rows: pyarrow.RecordBatch, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    return rows if rows.schema.equals(schema) else rows.cast(schema)
