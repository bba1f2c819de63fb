"""Reductions as Spark aggregates: what `native.plan` chose, over typed columns.

A `FrameReduction` turns documents into one document per key. Rows may come in any order and any
partitioning: every aggregate is ordered by `ord` itself, or does not care. Nothing is collected to
the driver, and no document passes through Python, except where the plan says *PY fold*.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.model import columns, pointer
from penstock.model.json_order import ABSENT
from penstock.model.reduce import ReductionError, Strategy
from penstock.model.shape import locate
from penstock.native.aggregates import Aggregates, column, hidden
from penstock.native.elements import group_with_elements
from penstock.native.fold import fold_documents
from penstock.native.plan import Barrier, Extreme, Members, ReductionPlan, Value, walk
from penstock.native.spark_types import spark_schema

DELETED = "_delete"
"""In a full reduction: true if the documents of the key end in a deletion."""
RUN = "_run"
"""In a partial reduction: the position of a document among those its key was combined to."""

_FIXED_WIDTH = (t.BooleanType, t.IntegerType, t.LongType, t.DoubleType, t.DecimalType)


def reduce_dataframe(
    plan: ReductionPlan, df: DataFrame, *, order: Sequence[Column], full: bool
) -> DataFrame:
    """Reduce the documents of `df`; see `FrameReduction`. The result is typed as documents are."""
    reduced = FrameReduction(plan, order=order, full=full).apply(df)
    flag_type = t.BooleanType() if full else t.IntegerType()
    fields = [field for field in spark_schema(plan.columns).fields if field.name in reduced.columns]
    flag = t.StructField(flag_column(plan, full=full), flag_type)
    # Expressions forget the metadata of nested fields; the layout gives it back.
    return reduced.to(t.StructType([*fields, flag]))


class FrameReduction:
    """Reduces the documents of each key, in ascending `order`, to one; or, partially, to few.

    Frames hold the columns of documents, as `native.spark_types` lays them out; other columns are
    dropped. A hidden member of the document (`_n`, `_x`) may be left out where it is NULL in every
    row: then it costs nothing. `order` must be total within a key; a single column of fixed width
    lets Spark hash where several make it sort.

    The result has the columns of documents, then `flag_column`: of a full reduction, whether the
    document is deleted (its columns are then those of the deletion); of a partial one, the
    position among the documents of the key. `stored` marks the stored state of a key, which is the
    first row, and no document, so that no rule acts on it again.

    All frames that one `FrameReduction` is applied to have the same columns. Its expressions are
    made for the first of them and kept: each is many calls into the JVM, more work than a small
    frame itself. Those of containers depend on the frame, and are made each time.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        *,
        order: Sequence[Column],
        full: bool,
        stored: Column | None = None,
    ) -> None:
        self._plan = plan
        self._order = order
        self._full = full
        self._stored = f.lit(False) if stored is None else stored
        self._steps: Sequence[_Step] | None = None

    def apply(self, df: DataFrame) -> DataFrame:
        """The documents of `df`, reduced. Nothing is read yet."""
        steps = self._steps or _steps(
            self._plan, df, order=self._order, stored=self._stored, full=self._full
        )
        if not self._plan.has_elements:
            self._steps = steps
        for step in steps:
            df = step(df)
        return df


REDUCTIONS_MAX: Final = 256
"""Kept for one Spark; each has some hundred expressions in its JVM."""

_reductions: WeakKeyDictionary[SparkSession, OrderedDict[Hashable, FrameReduction]] = (
    WeakKeyDictionary()
)
_reductions_lock = threading.Lock()


def shared_reduction(
    spark: SparkSession,
    plan: ReductionPlan,
    *,
    order: Sequence[str],
    full: bool,
    columns: Hashable,
) -> FrameReduction:
    """Return the reduction that all tasks of this process use whose documents are alike.

    `order` are columns by name. `columns` tells frames with other columns apart.
    """
    key = (plan.schema.text, plan.key, tuple(order), full, columns)
    with _reductions_lock:
        known = _reductions.setdefault(spark, OrderedDict())
        if (found := known.pop(key, None)) is None:
            found = FrameReduction(plan, order=[column(name) for name in order], full=full)
            if len(known) >= REDUCTIONS_MAX:
                known.popitem(last=False)
        known[key] = found  # as the one that was used last
        return found


_Step = Callable[[DataFrame], DataFrame]


def _steps(
    plan: ReductionPlan, df: DataFrame, *, order: Sequence[Column], stored: Column, full: bool
) -> Sequence[_Step]:
    known = set(df.columns)
    scratch = _Scratch(plan)
    names = [field.name for field in spark_schema(plan.columns).fields if field.name in known]
    keys = [key.alias(name) for key, name in zip(key_columns(plan), scratch.keys, strict=True)]
    ordered = order[0] if len(order) == 1 else f.struct(*order)
    beside = [*keys, ordered.alias(scratch.order)]
    selecting = _selecting([*map(column, names), *beside])
    if plan.apart is not None and not full:
        return [_numbering(plan, [*map(column, names)], keys, ordered)]
    if plan.fold is not None or plan.barrier is not None:
        selecting = _selecting([*map(column, names), *beside, stored.alias(scratch.stored)])
    if plan.fold is not None:
        return [selecting, _folding(plan, scratch, full=full)]
    types = df.select(*beside).schema
    extremes = any(isinstance(node, Extreme) for node in walk(plan.root))
    if plan.barrier is not None or plan.has_elements or extremes:
        order_, groups = f.col(scratch.order), [f.col(name) for name in scratch.keys]
        return [
            selecting,
            *_native_steps(plan, types, scratch, set(names), order_, groups, full=full),
        ]
    # Rows are looked at once, and need no names for what they are grouped and ordered by.
    return _native_steps(plan, types, scratch, set(names), ordered, keys, full=full)


def _folding(plan: ReductionPlan, scratch: _Scratch, *, full: bool) -> _Step:
    flag = flag_column(plan, full=full)
    return lambda rows: fold_documents(
        plan,
        _completed(rows, plan),
        keys=scratch.keys,
        order=scratch.order,
        stored=scratch.stored,
        flag=flag,
        full=full,
    )


def _numbering(
    plan: ReductionPlan, names: Sequence[Column], keys: Sequence[Column], order: Column
) -> _Step:
    """Documents as they are, each with its position among those of its key."""
    position = f.row_number().over(Window.partitionBy(*keys).orderBy(order)) - 1
    return _selecting([*names, position.alias(flag_column(plan, full=False))])


def _selecting(columns: Sequence[Column]) -> _Step:
    return lambda df: df.select(*columns)


def flag_column(plan: ReductionPlan, *, full: bool) -> str:
    """The name of the last column of a result; it yields to members by growing underscores."""
    name = DELETED if full else RUN
    while name in _taken(plan):
        name = f"_{name}"
    return name


def key_columns(plan: ReductionPlan) -> list[Column]:
    """The key of each row; an absent location counts as its default."""
    found = []
    for part in plan.key:
        value = _value_at(pointer.parse(part))
        default = locate(plan.schema.shape, part)[0].default
        found.append(value if default in (ABSENT, None) else f.coalesce(value, f.lit(default)))
    return found


@contextlib.contextmanager
def reduction_errors() -> Iterator[None]:
    """Around the action that runs a reduction: raises its `ReductionError`, not Spark's account."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as e:
        found = re.search(r"while reducing [^\n]*", str(e))
        if found is None:
            raise
        raise ReductionError(
            found.group(),
            fix="correct the document at its source, or the reduce annotation in the schema",
        ) from None


def _taken(plan: ReductionPlan) -> set[str]:
    return {field.name for field in spark_schema(plan.columns).fields}


def _completed(rows: DataFrame, plan: ReductionPlan) -> DataFrame:
    """Rows with the hidden members that were left out, which are NULL."""
    fields = spark_schema(plan.columns).fields
    absent = [field for field in fields if field.name not in rows.columns]
    return rows.withColumns({field.name: f.lit(None).cast(field.dataType) for field in absent})


class _Scratch:
    """Names of columns beside those of documents: none of them is a document's."""

    def __init__(self, plan: ReductionPlan) -> None:
        prefix = "$"
        while any(name.startswith(prefix) for name in _taken(plan)):
            prefix += "$"
        self.prefix = prefix
        self.order = f"{prefix}ord"
        self.stored = f"{prefix}stored"
        self.deletes = f"{prefix}deletes"
        self.keys = [f"{prefix}k{i}" for i in range(len(plan.key))]


def _native_steps(
    plan: ReductionPlan,
    types: t.StructType,
    scratch: _Scratch,
    names: set[str],
    order: Column,
    groups: Sequence[Column],
    *,
    full: bool,
) -> list[_Step]:
    """From rows to reduced documents; `types` are those of their keys and their order."""
    root = plan.root
    steps: list[_Step] = []
    if (barrier := plan.barrier) is not None:
        steps.append(lambda rows: _from_barrier(_completed(rows, plan), barrier, scratch))
    masks: dict[str, Column] = {}
    for at, node in enumerate(node for node in walk(root) if isinstance(node, Extreme)):
        # A window may stand neither in a filter nor in an aggregate: its outcome is a column first.
        mask = f"{scratch.prefix}extreme{at}"
        masks[node.at] = f.col(mask)
        steps.append(_adding(mask, _is_extreme(node, scratch)))
    if isinstance(root, Extreme):
        extreme = masks[root.at]
        steps.append(lambda rows: rows.where(extreme))
        root = root.body
    key_text = _key_text(types, scratch.keys)
    known = _known(plan, scratch.keys)
    within = f"{scratch.prefix}m" if plan.has_elements else None
    aggregates = Aggregates(
        prefix=f"{scratch.prefix}a",
        order=order,
        hashes=_hashes(root, names, known, types[scratch.order].dataType),
        full=full,
        key_text=key_text,
        within=within,
        masks=masks,
        known=known,
    )
    if root is None:
        fields = [aggregates.take(column(name), "last").alias(name) for name in sorted(names)]
    else:
        fields = aggregates.members(root, column, None, hidden(root) & names)
    deleted = f.lit(False)
    if barrier is not None:
        deleted = aggregates.add(f.max(scratch.deletes))
    if within is not None:
        steps.append(_grouping_elements(aggregates, scratch, within, key_text, full=full))
    else:
        steps.append(_grouping(groups, aggregates.all))
    steps += (_adding(name, folded) for name, folded in aggregates.folds)
    flag = deleted if full else f.lit(0)
    steps.append(_selecting([*fields, flag.alias(flag_column(plan, full=full))]))
    return steps


def _adding(name: str, value: Column) -> _Step:
    return lambda rows: rows.withColumn(name, value)


def _grouping(groups: Sequence[Column], made: Sequence[Column]) -> _Step:
    """Aggregate the rows of each group; there may be nothing in a document but its key."""
    if not made:
        return lambda rows: rows.select(*groups).distinct()
    return lambda rows: rows.groupBy(*groups).agg(*made)


def _grouping_elements(
    aggregates: Aggregates, scratch: _Scratch, within: str, key_text: Column, *, full: bool
) -> _Step:
    def over_elements(prefix: str, order: Column) -> Aggregates:
        return Aggregates(prefix=prefix, order=order, hashes=False, full=full, key_text=key_text)

    return lambda rows: group_with_elements(
        rows,
        aggregates,
        over_elements,
        keys=scratch.keys,
        order=scratch.order,
        within=within,
        full=full,
    )


def _from_barrier(rows: DataFrame, barrier: Barrier, scratch: _Scratch) -> DataFrame:
    """Drop what is before the last document that starts over, and that one too if it deletes.

    A deletion that nothing follows stays, alone, so that its key is not forgotten.
    """
    order = f.col(scratch.order)
    deletes = f.expr(barrier.deletes) & ~f.col(scratch.stored)
    rows = rows.withColumn(scratch.deletes, deletes)
    starts = f.col(scratch.deletes) | f.expr(barrier.replaces)
    window = Window.partitionBy(*scratch.keys)
    start, end = f"{scratch.prefix}start", f"{scratch.prefix}end"
    rows = rows.withColumns(
        {start: f.max(f.when(starts, order)).over(window), end: f.max(order).over(window)}
    )
    after = f.col(start).isNull() | (order > f.col(start))
    first = (order == f.col(start)) & (~f.col(scratch.deletes) | (f.col(end) == f.col(start)))
    return rows.where(after | first)


def _is_extreme(node: Extreme, scratch: _Scratch) -> Column:
    """The condition that a row has the extreme key at a location; not NULL where it has one.

    Spark orders NULL below all values, as absent and null are here.
    """
    parts = [_value_at(pointer.parse(node.at) + path) for path in node.key]
    key: Column = f.struct(*(part.alias(f"{i}") for i, part in enumerate(parts)))
    if node.at:
        key = f.when(_value_at(pointer.parse(node.at)).isNotNull(), key)
    best = f.max if node.greatest else f.min
    return key == best(key).over(Window.partitionBy(*scratch.keys))


def _value_at(path: Sequence[str]) -> Column:
    value = column(path[0])
    for name in path[1:]:
        value = value.getField(name)
    return value


def _known(plan: ReductionPlan, keys: Sequence[str]) -> Mapping[str, Column]:
    """Locations that need no aggregate: parts of the key, which are equal in all of its rows."""
    nodes = {node.at: node for node in walk(plan.root)}
    known: dict[str, Column] = {}
    for part, name in zip(plan.key, keys, strict=True):
        shape, exists = locate(plan.schema.shape, part)
        node = nodes.get(part)
        winner = isinstance(node, Value) and node.strategy is not Strategy.SUM
        if winner and exists and shape.default is ABSENT and not shape.nullable:
            known[part] = f.col(name)
    return known


def _hashes(
    root: Members | None, names: set[str], known: Mapping[str, Column], order: t.DataType
) -> bool:
    """True if every aggregate has a buffer of fixed width: then Spark hashes, else it sorts."""
    if root is None or not isinstance(order, _FIXED_WIDTH) or root.column.extra in names:
        return False
    return all(
        isinstance(node, Value)
        and (node.column is None or node.column.kind in _FIXED_KINDS)
        and not node.ordered
        for node in walk(root)
        if node.at not in known
    )


_FIXED_KINDS = (
    columns.Kind.BOOLEAN,
    columns.Kind.LONG,
    columns.Kind.DECIMAL,
    columns.Kind.DOUBLE,
)


def _key_text(types: t.StructType, keys: Sequence[str]) -> Column:
    """The key as a JSON array."""
    parts = []
    for name in keys:
        value = f.col(name)
        if isinstance(types[name].dataType, t.StringType):
            array = f.to_json(f.array(value))
            value = f.substring(array, f.lit(2), f.length(array) - 2)
        parts.append(f.coalesce(value.cast("string"), f.lit("null")))
    text = parts[0] if len(parts) == 1 else f.concat_ws(",", *parts)
    return f.concat(f.lit("["), text, f.lit("]"))
