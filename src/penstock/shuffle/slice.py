"""SPARK: the documents of a checkpoint, at the shards that own them, in the order to process them.

    frame     the rows of one binding, of any number of journals, as one scan
    routed    with their key, and the shard that owns it
    exchange  all bindings together: partition i holds the rows of shard i, in order

Which rows a checkpoint has was decided from the records alone (`Delivery`), so all that happens
here is lazy: planning starts no job, and one job reads everything.

**Order.** Rows of a shard come by priority, highest first, then by adjusted clock: the time at
which their document was published plus the delay of its binding, or the level of its delivery where
that is later. So what a cohort reads comes in the order of commits (`order`). Clock, producer and
binding break ties. Since a producer never stamps two documents alike, that is total: the same
deliveries give the same rows in the same order, whatever the number of shards, tasks, retries and
attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from msgspec import structs
from pyspark.sql import functions as f

from penstock.errors import Bug
from penstock.garbage import gc_paused
from penstock.journal.blobs import spark_root
from penstock.journal.committed import VisibleRows
from penstock.journal.rows import STAMPS, row_schema, stamp_names
from penstock.journal.scan import plan_scan, rows_at_hand, rows_schema, scan_frame
from penstock.journal.schemas import layout
from penstock.model import pointer
from penstock.model.clock import CLOCK_MAX, Clock
from penstock.model.schema import compiled
from penstock.native import keys, sql
from penstock.shuffle.route import key_columns, needed_columns, r_clock, shard_column

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from penstock.journal.blobs import BlobStore
    from penstock.journal.planning import Planner
    from penstock.journal.scan import ScanPlan
    from penstock.journal.state import JournalState
    from penstock.model.columns import Column
    from penstock.model.routing import Routing
    from penstock.model.sequence import Bounds
    from penstock.shuffle.binding import Binding
    from penstock.shuffle.delivery import Delivery

SHARD: Final = "_shard"
PRIORITY: Final = "_priority"
ADJUSTED_CLOCK: Final = "_adj_clock"
PRODUCER: Final = "_producer"
BINDING: Final = "_binding"
CLOCK: Final = "_clock"
FLAGS: Final = "_flags"
KEY_HASH: Final = "_key_hash"
KEY: Final = "_key"
_R_CLOCK: Final = "_r_clock"

ROUTED: Final = (SHARD, PRIORITY, ADJUSTED_CLOCK, PRODUCER, BINDING, CLOCK, FLAGS, KEY_HASH, KEY)
"""The columns of a routed row, before its document."""

FEW_BYTES: Final = 8 << 20
"""Stored rows up to this are read by one task rather than exchanged, where there is one shard."""


def document_column(binding: Binding) -> str:
    """The name of the struct that holds documents of a binding: no member of them can clash."""
    return f"d{binding.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The rows of a binding."""

    root: Column
    needs: tuple[str, ...]
    """The columns that its key is made of."""

    @classmethod
    def of(cls, binding: Binding) -> _Layout:
        root = layout(binding.collection.read_schema.text)
        tops = [pointer.parse(location)[0] for location in binding.key]
        return cls(root=root, needs=needed_columns(root, tops))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expressions:
    """Expressions shared by all frames of a binding: making one takes many calls into the JVM."""

    packed: Mapping[bool, tuple[SparkColumn, ...]]
    """The columns of a row, leveled or not, under names that no document can have."""
    routed: tuple[SparkColumn, ...]
    """The columns of a routed row, computed from those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A plan to read documents of one binding."""

    spark: SparkSession
    blobs: BlobStore
    plan: ScanPlan
    layouts: Mapping[str, Column]
    root: Column
    columns: tuple[str, ...]
    """Members of documents, then of stamps."""
    leveled: bool
    """Some rows come later than their clocks say; a last column has their level."""
    bounds: Bounds | None
    """The bounds of the binding, if they exclude rows of a run."""

    @property
    def schema(self) -> StructType:
        """The layout of rows."""
        return rows_schema(self.root, self.columns, leveled=self.leveled)

    def frame(self) -> DataFrame:
        """The rows, in no order. Nothing is read yet."""
        frame = scan_frame(
            self.spark,
            self.blobs,
            self.plan,
            self.layouts,
            self.root,
            columns=self.columns,
            leveled=self.leveled,
        )
        if self.bounds is None:
            return frame
        return frame.where(_within(self.bounds, stamp_names(self.root).clock))

    def at_hand(self) -> pyarrow.Table | None:
        """The rows themselves, if all came with the records or lie in few small objects. Blocks."""
        if self.bounds is not None:
            return None
        return rows_at_hand(
            self.blobs,
            self.plan,
            self.layouts,
            self.root,
            columns=self.columns,
            leveled=self.leveled,
        )


class Slice:
    """Reads what a Session delivers to the bindings of a task."""

    def __init__(
        self,
        spark: SparkSession,
        planner: Planner,
        bindings: Sequence[Binding],
        routing: Routing,
    ) -> None:
        self._spark = spark
        self._planner = planner
        self._bindings = bindings
        self._routing = routing
        self._layouts = {binding.index: _Layout.of(binding) for binding in bindings}
        self._expressions: dict[int, _Expressions] = {}
        """Made for the first frame that is routed: most small transactions route none."""

    async def shuffled(
        self, deliveries: Iterable[Delivery], states: Mapping[str, JournalState]
    ) -> DataFrame:
        """Deliveries of any bindings, at the shards that own them and in order (see `exchange`).

        There is a column of documents for each binding that has deliveries.
        """
        by_binding: dict[int, list[Delivery]] = {}
        stored_bytes = 0
        for delivery in deliveries:
            by_binding.setdefault(delivery.binding, []).append(delivery)
            stored_bytes += delivery.bytes
        if unknown := by_binding.keys() - {binding.index for binding in self._bindings}:
            raise Bug(f"deliveries for bindings {sorted(unknown)}, which the task does not have")
        read = [each for each in self._bindings if each.index in by_binding] or self._bindings[:1]
        frames = [
            self.routed(await self.frame(each, by_binding.get(each.index, ()), states), each)
            for each in read
        ]
        return self.exchange(frames, few=stored_bytes <= FEW_BYTES)

    async def frame(
        self,
        binding: Binding,
        deliveries: Iterable[Delivery],
        states: Mapping[str, JournalState],
    ) -> DataFrame:
        """The documents of a binding, as `Reading.frame` gives them."""
        reading = await self.reading(binding, deliveries, states)
        return await asyncio.to_thread(reading.frame)

    async def reading(
        self,
        binding: Binding,
        deliveries: Iterable[Delivery],
        states: Mapping[str, JournalState],
        *,
        columns: Sequence[str] | None = None,
        stamps: Sequence[str] | None = None,
        few_here: bool = True,
    ) -> Reading:
        """Plan to read documents of a binding.

        `states` are the newest states of the journals: compaction may have moved rows since they
        were sequenced. `columns` are members of documents, by default those of the binding;
        the columns of its key are always there too. `stamps` are columns of their stamps, all by
        default; the clock has to be one of them. With `few_here`, few rows are read by the driver,
        which is worth it if that spares a job.
        """
        known = self._layouts[binding.index]
        visible: dict[str, list[VisibleRows]] = {}
        admitted = True
        leveled = False
        with gc_paused():
            for delivery in deliveries:
                if delivery.binding != binding.index:
                    raise Bug(f"a delivery for binding {delivery.binding} in {binding.index}")
                rows = [rows for rows in delivery.rows if _overlaps(binding.bounds, rows)]
                admitted &= all(_admits(binding.bounds, each) for each in rows)
                level = delivery.level - binding.read_delay
                if delivery.first < level:
                    leveled = True
                    rows = [structs.replace(each, level=Clock(level)) for each in rows]
                visible.setdefault(delivery.journal, []).extend(rows)
        scanned = [
            await self._planner.resolve_rows(journal, rows, states.get(journal))
            for journal, rows in visible.items()
        ]
        with gc_paused():
            native = spark_root(self._planner.blobs) is not None
            plan = plan_scan(scanned, native=native, few_here=few_here)
        schemas = self._planner.schemas
        layouts = {name: await schemas.layout(name) for name in plan.native}
        layouts |= await self._planner.layouts(plan.rest)
        root, wanted = known.root, binding.columns if columns is None else columns
        every = row_schema(root).names
        if wanted is None:
            names = every[:-STAMPS]
        else:
            names = list(dict.fromkeys([*needed_columns(root, wanted), *known.needs]))
        stamp = every[-STAMPS:] if stamps is None else stamps
        return Reading(
            spark=self._spark,
            blobs=self._planner.blobs,
            plan=plan,
            layouts=layouts,
            root=root,
            columns=(*names, *stamp),
            leveled=leveled,
            bounds=None if admitted else binding.bounds,
        )

    def routed(self, frame: DataFrame, binding: Binding) -> DataFrame:
        """Rows of `frame` with where they go: `ROUTED`, then the document as one column."""
        if (made := self._expressions.get(binding.index)) is None:
            made = _expressions(binding, self._routing)
            self._expressions[binding.index] = made
        leveled = stamp_names(self._layouts[binding.index].root).level in frame.columns
        return frame.select(*made.packed[leveled]).select(*made.routed)

    def exchange(self, frames: Sequence[DataFrame], *, few: bool = False) -> DataFrame:
        """Routed rows of several bindings: partition i has those of shard i, in order.

        `ROUTED`, then a column of documents for each frame, which is NULL in rows of others. With
        `few`, the rows are so few that one task may read them all.
        """
        united = reduce(_union, frames)
        count = len(self._routing.shards)
        if count == 1 and few:
            placed = united.coalesce(1)
        else:
            placed = united.repartitionById(count, _checked_shard(count))
        return placed.sortWithinPartitions(*_order(self._bindings))


def _expressions(binding: Binding, routing: Routing) -> _Expressions:
    schema = binding.collection.read_schema.text
    root = layout(schema)
    key = key_columns(compiled(schema).shape, root, binding.key)
    stamps = stamp_names(root)
    clock = sql.name(stamps.clock)

    def pack(*, leveled: bool) -> tuple[SparkColumn, ...]:
        adjusted = sql.name(stamps.level if leveled else stamps.clock)
        if binding.read_delay:
            latest = sql.bigint(CLOCK_MAX)
            adjusted = f"coalesce(try_add({adjusted}, {sql.bigint(binding.read_delay)}), {latest})"
        beside = [stamps.clock, stamps.producer, stamps.flags, *([stamps.level] * leveled)]
        hidden = ", ".join(map(sql.name, beside))
        packed = [
            f.lit(binding.priority).alias(PRIORITY),
            f.expr(adjusted).alias(ADJUSTED_CLOCK),
            f.expr(sql.name(stamps.producer)).alias(PRODUCER),
            f.lit(binding.index).alias(BINDING),
            f.expr(clock).alias(CLOCK),
            f.expr(sql.name(stamps.flags)).alias(FLAGS),
            key.packed.alias(KEY),
            f.expr(f"struct(* EXCEPT ({hidden}))").alias(document_column(binding)),
        ]
        if binding.filter_r_clocks:
            packed.append(f.expr(r_clock(clock)).alias(_R_CLOCK))
        return tuple(packed)

    key_hash = keys.key_hash(f.col(KEY))
    made = {
        SHARD: shard_column(
            routing, key_hash, f.col(_R_CLOCK), filter_r_clocks=binding.filter_r_clocks
        ),
        KEY_HASH: key_hash,
    }
    routed = [
        made[name].alias(name) if name in made else f.col(name)
        for name in (*ROUTED, document_column(binding))
    ]
    packed = {leveled: pack(leveled=leveled) for leveled in (False, True)}
    return _Expressions(packed=packed, routed=tuple(routed))


def _order(bindings: Sequence[Binding]) -> tuple[SparkColumn, ...]:
    order = [f.col(ADJUSTED_CLOCK).asc(), f.col(CLOCK).asc(), f.col(PRODUCER).asc()]
    # A sort compares the first column by its bits: it had better not be the same in all rows.
    if len({binding.priority for binding in bindings}) > 1:
        order.insert(0, f.col(PRIORITY).desc())
    if len(bindings) > 1:
        order.append(f.col(BINDING).asc())
    return tuple(order)


def _union(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.unionByName(right, allowMissingColumns=True)


def _checked_shard(count: int) -> SparkColumn:
    """Spark would take a row without a shard for one of the first, and wrap one beyond the last."""
    shard = f.col(SHARD)
    wrong = f.concat(
        f.lit("a row is for shard "),
        f.coalesce(shard.cast("string"), f.lit("NULL")),
        f.lit(f" of {count}"),
    )
    return f.when(shard.between(0, count - 1), shard).otherwise(f.raise_error(wrong).cast("int"))


def _column(name: str) -> SparkColumn:
    return f.col(sql.name(name))


# ----------------------------------------------------------------------------------------- bounds


def _overlaps(bounds: Bounds, rows: VisibleRows) -> bool:
    """True if some row of a run may be within bounds."""
    run = rows.run
    low = max(bounds.not_before, bounds.truncated_at)
    return run.clock_max >= low and run.clock_min < bounds.not_after


def _admits(bounds: Bounds, rows: VisibleRows) -> bool:
    """True if every row of a run is within bounds."""
    return bounds.admit(rows.run.clock_min) and bounds.admit(rows.run.clock_max)


def _within(bounds: Bounds, clock: str) -> SparkColumn:
    low = max(bounds.not_before, bounds.truncated_at)
    return (_column(clock) >= f.lit(low)) & (_column(clock) < f.lit(bounds.not_after))
