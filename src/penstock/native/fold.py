"""The reference reducer over Spark rows, for what no Spark expression says.

`fold_documents` streams whole documents, sorted by key and order, through Python: its memory is one
document per key at a time, however many there are. `fold_values` reduces one location, whose values
an aggregate has gathered, and leaves the rest of the document in Spark.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as t
from pyspark.sql.pandas.functions import arrow_udf

from penstock.model import pointer
from penstock.model.columns import Column as Layout
from penstock.model.columns import Kind, Member, unstorable
from penstock.model.json_order import ABSENT, Json
from penstock.model.reduce import Active, ReductionError, Rule, State, combine, reduce_full
from penstock.model.schema import compiled
from penstock.model.shape import Reduction, Shape
from penstock.native.arrow import to_arrow, to_json
from penstock.native.plan import Fold, ReductionPlan
from penstock.native.spark_types import spark_schema

BATCH_ROWS = 1024
"""Documents per Arrow batch that leaves Python."""


def fold_documents(
    plan: ReductionPlan,
    rows: DataFrame,
    *,
    keys: list[str],
    order: str,
    stored: str,
    flag: str,
    full: bool,
) -> DataFrame:
    """Fold the documents of each key; the last column is `flag`, as `reduce_dataframe` says.

    `stored` is the column that marks the stored state among documents.
    """
    text, layout = plan.schema.text, plan.columns
    flag_type = t.BooleanType() if full else t.IntegerType()
    schema = t.StructType([*spark_schema(layout).fields, t.StructField(flag, flag_type)])

    ordered = rows.repartition(*keys).sortWithinPartitions(*keys, order).drop(order)
    names = ordered.columns

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        lookup = compiled(text).active_rules
        named = (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)
        outcomes = (
            outcome
            for key, group in itertools.groupby(_documents(named, layout, keys, stored), _key_of)
            for outcome in _outcomes(group, key, lookup, full=full)
        )
        while chunk := list(itertools.islice(outcomes, BATCH_ROWS)):
            yield _batch(chunk, layout, flag, full=full)

    # Spark looks its columns up by name again, and reads `a.b` as a member of a.
    by_position = ordered.toDF(*(f"c{i}" for i in range(len(names))))
    return by_position.mapInArrow(run, schema)


_Row = tuple[tuple[Any, ...], bool, Json]
"""A key, whether this is its stored state, and that or a document."""


def _documents(
    batches: Iterator[pa.RecordBatch], layout: Layout, keys: list[str], stored: str
) -> Iterator[_Row]:
    for batch in batches:
        parts = [[_json(v) for v in batch.column(name).to_pylist()] for name in keys]
        yield from zip(
            zip(*parts, strict=True),
            batch.column(stored).to_pylist(),
            map(json.loads, to_json(batch, layout)),
            strict=True,
        )


def _json(value: Any) -> Any:  # noqa: ANN401
    return int(value) if isinstance(value, Decimal) else value


def _key_of(row: _Row) -> tuple[Any, ...]:
    return row[0]


def _outcomes(
    rows: Iterator[_Row], key: tuple[Any, ...], lookup: Callable[[Json], Active], *, full: bool
) -> Iterator[tuple[Json, bool | int, tuple[Any, ...]]]:
    """The document that a key comes to, with its flag."""
    _, is_stored, first = next(rows)
    documents: Iterator[Json] = (document for _, _, document in rows)
    if not is_stored:
        documents = itertools.chain([first], documents)
    if not full:
        yield combine(documents, lookup, list(key)), 0, key
        return
    last: Json = None

    def remembered() -> Iterator[Json]:
        nonlocal last
        for document in documents:
            last = document
            yield document

    state = reduce_full(remembered(), lookup, list(key), stored=first if is_stored else ABSENT)
    yield (last, True, key) if state is ABSENT else (state, False, key)


def _batch(
    chunk: list[tuple[Any, bool | int, tuple[Any, ...]]], layout: Layout, flag: str, *, full: bool
) -> pa.RecordBatch:
    documents = _storable([row[0] for row in chunk], [list(row[2]) for row in chunk], layout)
    flags = pa.array([value for _, value, _ in chunk], pa.bool_() if full else pa.int32())
    columns: list[Any] = [*documents.columns, flags]
    return pa.RecordBatch.from_arrays(columns, names=[*documents.schema.names, flag])


def _storable(
    documents: Sequence[Any], keys: Sequence[Any], layout: Layout, shown: Callable[[str], str] = str
) -> pa.RecordBatch:
    """Documents as columns. A total that JSON can write may still be too large for its column."""
    try:
        return to_arrow(documents, layout)
    except (OverflowError, pa.ArrowInvalid):
        for document, key in zip(documents, keys, strict=True):
            if (found := unstorable(document, layout)) is not None:
                at, why = found
                total = pointer.get(document, at)
                raise ReductionError.at(
                    shown(at), f"sum overflow, {why}", total, ABSENT, key
                ) from None
        raise


def fold_values(node: Fold, *, full: bool) -> Callable[[Column, Column], Column]:
    """Reduce arrays of the values of one location, each with the text of its key.

    A NULL among the values is an explicit null. The result is a struct of the value and of whether
    that is an explicit null.
    """
    layout = Layout(
        kind=Kind.STRUCT,
        members=(Member(name="value", column=node.column, required=False, nullable=False),),
    )
    field = spark_schema(layout).fields[0]
    result = t.StructType([t.StructField("value", field.dataType), _IS_NULL])
    lookup, at = static_rules(node.shape, node.at), node.at

    # Spark finds out what kind of function this is from its annotations, in exactly this form.
    def run(lists: pa.Array, key_texts: pa.Array) -> pa.Array:  # type: ignore[type-arg]
        gathered: Any = lists
        flat = pa.RecordBatch.from_arrays([gathered.values], names=["value"])
        values = [json.loads(text).get("value") for text in to_json(flat, layout)]
        keys = [json.loads(str(text)) for text in key_texts.to_pylist()]
        spans = itertools.pairwise(gathered.offsets.to_pylist())
        states = [
            _state(values[begin:end], lookup, key, at, full=full)
            for (begin, end), key in zip(spans, keys, strict=True)
        ]
        wrapped = [{} if state is ABSENT else {"value": state} for state in states]
        stored = _storable(wrapped, keys, layout, lambda inner: at + inner.removeprefix("/value"))
        nulls = pa.array([state is None for state in states])
        return pa.StructArray.from_arrays([stored.column(0), nulls], names=["value", "is_null"])

    return arrow_udf(run, result)  # type: ignore[call-overload, no-any-return]


def _state(
    values: list[Json], lookup: Callable[[Json], Active], key: Json, at: str, *, full: bool
) -> State:
    if full or not values:
        return reduce_full(values, lookup, key, at)
    return combine(values, lookup, key, at)


_IS_NULL = t.StructField("is_null", t.BooleanType())


def static_rules(shape: Shape, at: str) -> Callable[[Json], Active]:
    """The active rules of values of a shape in which no condition decides: no need to validate."""

    def visit(value: Json, shape: Shape, at: str, active: dict[str, Rule]) -> None:
        fixed = shape.fixed_reduction()
        if isinstance(fixed, Reduction):
            active[at] = Rule.of(fixed).on(shape)
        if isinstance(value, dict):
            for name, member in value.items():
                visit(member, shape.objects.member(name), pointer.child(at, name), active)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                visit(item, shape.arrays.item(i), pointer.child(at, i), active)

    def lookup(value: Json) -> Active:
        active: dict[str, Rule] = {}
        visit(value, shape, at, active)
        return active

    return lookup
