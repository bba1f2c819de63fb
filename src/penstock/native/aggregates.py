"""One aggregate per location: the expressions of a plan over the rows of documents.

An `Aggregates` collects the aggregates that a tree of plan nodes needs, and hands back, for each
location, an expression over their results. Which rows count for a location, *presence*, is a
column's being non-NULL wherever that says it, and a flag only where a null can be explicit.

Buffers of fixed width let Spark keep groups in a hash map; a buffer of text or structs makes it
sort. Once it sorts anyway, all locations that are always present and take the last (first) value
share one struct: one comparison of `ord` per row instead of one per location.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import Column
from pyspark.sql import functions as f

from penstock.errors import Bug
from penstock.model import columns
from penstock.model.reduce import INTEGER_MAX, INTEGER_MIN, Strategy
from penstock.model.shape import Reduction, of_type
from penstock.native.fold import fold_values
from penstock.native.numerals import numeral_sum, numeric_order
from penstock.native.plan import Elements, ElementSet, Extreme, Fold, Members, Node, Value

_LOW_BITS = 2**32 - 1
_HIGH_MIN, _HIGH_MAX = -(2**31), 2**31 - 1

Get = Callable[[str], Column]
"""The column of a member of the object at hand."""


def member_of(value: Column) -> Get:
    """Members of a STRUCT column."""
    return lambda name: value.getField(name)


def column(name: str) -> Column:
    """A column by its exact name, whatever characters it has."""
    return f.col(f"`{name.replace('`', '``')}`")


@dataclass(frozen=True, slots=True)
class Reduced:
    """The value of a location, as SQL over the results of the aggregates."""

    value: Column | None
    """None: there is no column, as it can only be null."""
    is_null: Column | None = None
    """True if it is an explicit null; known where absence is possible too."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container met on the way: its elements are reduced elsewhere, into `result`."""

    node: Elements | ElementSet
    rows: Column
    result: str


class Aggregates:
    """The aggregates of one tree of plan nodes, under names that begin with `prefix`.

    `within` names a struct that the results will be packed in. `hashes` says that every buffer is
    of fixed width. `masks` says which rows count for an `Extreme`, by pointer, and `known` holds
    locations that need no aggregate. `key_text` shows the key of a group in errors.
    """

    def __init__(
        self,
        *,
        prefix: str,
        order: Column,
        hashes: bool,
        full: bool,
        key_text: Column,
        within: str | None = None,
        masks: Mapping[str, Column] | None = None,
        known: Mapping[str, Column] | None = None,
    ) -> None:
        self._prefix = prefix
        self._order = order
        self._hashes = hashes
        self._full = full
        self._key_text = key_text
        self._within = within
        self._masks = masks or {}
        self._known = known or {}
        self._plain: list[Column] = []
        self._shared: dict[str, list[Column]] = {"last": [], "first": []}
        self.containers: list[Container] = []
        self.folds: list[tuple[str, Column]] = []
        """Python to run over the results, by the name of the column that must hold its outcome."""

    @property
    def all(self) -> list[Column]:
        """Every aggregate; to be asked when all locations have been visited."""
        shared = [
            pick(f.struct(*values), self._order).alias(f"{self._prefix}{name}")
            for name, pick in (("last", f.max_by), ("first", f.min_by))
            if (values := self._shared[name])
        ]
        return [*self._plain, *shared]

    @property
    def names(self) -> list[str]:
        """The names of `all`."""
        plain = [f"{self._prefix}{i}" for i in range(len(self._plain))]
        return plain + [f"{self._prefix}{name}" for name, taken in self._shared.items() if taken]

    def add(self, aggregate: Column) -> Column:
        """Take one more aggregate; the answer is its result."""
        name = f"{self._prefix}{len(self._plain)}"
        self._plain.append(aggregate.alias(name))
        return self._result(name)

    def _result(self, name: str) -> Column:
        return f.col(name) if self._within is None else f.col(self._within).getField(name)

    def take(self, value: Column, name: str) -> Column:
        """The value of the "last" or "first" row, for a location that every row has."""
        pick = f.max_by if name == "last" else f.min_by
        if self._hashes:
            return self.add(pick(value, self._order))
        field = f"{len(self._shared[name])}"
        self._shared[name].append(value.alias(field))
        return self._result(f"{self._prefix}{name}").getField(field)

    def members(self, node: Members, get: Get, above: Column | None, own: set[str]) -> list[Column]:
        """The columns of an object that merges, hidden ones included, in the order of its layout.

        `above` says which rows have the object (None: all). `own` names the hidden members that
        the rows have at all.
        """
        layout = node.column
        fields: list[Column] = []
        nulls: list[Column] = []
        for at, member in enumerate(layout.members):
            value = None if member.column is None else get(member.name)
            null = None
            if member.listed and layout.nulls is not None and layout.nulls in own:
                listed = f.array_contains(get(layout.nulls), f.lit(at).cast("smallint"))
                null = f.coalesce(listed, f.lit(False))
            present = above if member.required else _present(value, null)
            reduced = self.location(node.members[member.name], value, present, null is not None)
            if reduced.value is not None:
                fields.append(reduced.value.alias(member.name))
            if null is not None and reduced.is_null is not None:
                nulls.append(f.when(reduced.is_null, f.lit(at).cast("smallint")))
        if layout.nulls is not None and layout.nulls in own:
            found = f.array_compact(f.array(*nulls))
            fields.append(f.when(f.size(found) > 0, found).alias(layout.nulls))
        if layout.extra is not None and layout.extra in own:
            fields.append(self._unknown(get(layout.extra)).alias(layout.extra))
        return fields

    def location(
        self, node: Node, value: Column | None, present: Column | None, listed: bool = False
    ) -> Reduced:
        """Reduce one location. `present` says which rows have it (None: all), null included;
        `listed`, that null and absent are both possible, and only that distinguishes them."""
        if node.at in self._known:
            return Reduced(self._known[node.at])
        match node:
            case Value():
                return self._value(node, value, present, listed)
            case Members() if value is not None:
                struct = f.struct(*self.members(node, member_of(value), present, hidden(node)))
                if present is None:
                    return Reduced(struct)
                return Reduced(f.when(self.add(f.max(present)), struct))
            case Elements() | ElementSet() if value is not None:
                result = f"{self._prefix}c{len(self.containers)}"
                self.containers.append(Container(node, value, result))
                if present is None:
                    return Reduced(f.col(result))
                return Reduced(f.when(self.add(f.max(present)), f.col(result)))
            case Extreme() if value is not None:
                masked = f.when(self._masks[node.at], value)
                return self.location(node.body, masked, masked.isNotNull())
            case Fold() if value is not None:
                return self._fold(node, value, present)
            case _:
                raise Bug(f"{node.at} has no aggregate")

    def _value(
        self, node: Value, value: Column | None, present: Column | None, listed: bool
    ) -> Reduced:
        """One aggregate, or two where null and absent must be distinguished."""
        if value is None or node.column is None:
            return Reduced(None, self.add(f.max(present)) if present is not None else None)
        # JSON text writes null as text: a value as any other.
        nullable = node.column.nullable and node.column.kind is not columns.Kind.JSON
        match node.strategy:
            case Strategy.LAST_WRITE_WINS | Strategy.FIRST_WRITE_WINS:
                name = "last" if node.strategy is Strategy.LAST_WRITE_WINS else "first"
                if present is None:
                    return Reduced(self.take(value, name))
                pick = f.max_by if name == "last" else f.min_by
                taken = self.add(pick(value, f.when(present, self._order)))
                if not listed or present is None:
                    return Reduced(taken)
                return Reduced(taken, self.add(f.max(present)) & taken.isNull())
            case Strategy.MAXIMIZE:
                greatest = self._extreme(f.max, value, node.column)
                if not listed or present is None:
                    return Reduced(greatest)
                return Reduced(greatest, self.add(f.max(present)) & greatest.isNull())
            case Strategy.MINIMIZE:
                least = self._extreme(f.min, value, node.column)
                if not nullable:
                    return Reduced(least)
                is_null = value.isNull() if present is None else present & value.isNull()
                some_null = self.add(f.max(is_null))
                return Reduced(f.when(~some_null, least), some_null)
            case Strategy.SUM:
                return Reduced(self._sum(node, node.column, value))
            case Strategy.APPEND:
                batches = f.transform(self._in_order(value, node.column), lambda row: row["v"])
                some = self.add(f.max(value.isNotNull()))
                return Reduced(f.when(some, f.flatten(batches)))
            case _:
                raise Bug(f"{node.strategy.value} has no aggregate")

    def _extreme(
        self, pick: Callable[[Column], Column], value: Column, layout: columns.Column
    ) -> Column:
        if not layout.is_numeric_text:
            return self.add(pick(value))
        return self.add(pick(f.when(value.isNotNull(), numeric_order(value)))).getField("text")

    def _sum(self, node: Value, layout: columns.Column, value: Column) -> Column:
        match layout.kind:
            case columns.Kind.STRING:
                return self._sum_of_texts(node, layout, value)
            case columns.Kind.LONG:
                return self._sum_of_longs(node, value)
            case columns.Kind.DECIMAL:
                total = self.add(f.sum(value))
                kind = f"decimal({layout.precision},{layout.scale})"
                fits = total.try_cast(kind).isNotNull()
                if not layout.scale:
                    fits = fits & total.between(_decimal(INTEGER_MIN), _decimal(INTEGER_MAX))
                return self._checked(node, fits | total.isNull(), total.cast(kind), total)
            case _:
                if node.ordered:
                    rows = self._in_order(value)
                    some = f.size(rows) > 0
                    total = f.when(
                        some, f.aggregate(rows, f.lit(0.0), lambda sum_, row: sum_ + row["v"])
                    )
                else:
                    total = self.add(f.sum(value))
                finite = ~f.isnan(total) & (f.abs(total) != f.lit(float("inf")))
                return self._checked(node, finite | total.isNull(), total, total)

    def _sum_of_texts(self, node: Value, layout: columns.Column, value: Column) -> Column:
        added = numeral_sum(value, self.add)
        rule = Reduction(annotation={"strategy": Strategy.SUM.value}, depth=0, always=True)
        shape = replace(of_type("string"), reductions=(rule,))
        fold = Fold(at=node.at, why="many digits", column=layout, shape=shape)
        name = f"{self._prefix}f{len(self.folds)}"
        self.folds.append((name, fold_values(fold, full=self._full)(added.others, self._key_text)))
        return f.coalesce(added.total, f.col(name).getField("value"))

    def _sum_of_longs(self, node: Value, value: Column) -> Column:
        """An exact sum of BIGINT: high and low halves apart, so that only the total can overflow.

        Spark's own sum raises as soon as a partial total leaves 64 bits, in whatever order it adds.
        """
        high = self.add(f.sum(f.shiftright(value, 32)))
        low = self.add(f.sum(value.bitwiseAND(_LOW_BITS)))
        top = high + f.shiftright(low, 32)
        total = f.shiftleft(top, 32).bitwiseOR(low.bitwiseAND(_LOW_BITS))
        exact = high.cast("decimal(38,0)") * _decimal(2**32) + low
        return self._checked(node, top.between(_HIGH_MIN, _HIGH_MAX) | low.isNull(), total, exact)

    def _checked(self, node: Value, fits: Column, total: Column, exact: Column) -> Column:
        """The total, if it fits (or there is none), else an error."""
        message = f.concat(
            f.lit(f"while reducing {node.at} of key "),
            self._key_text,
            f.lit(": sum overflow; LHS "),
            exact.cast("string"),
            f.lit(", RHS nothing"),
        )
        return f.when(fits, total).otherwise(f.raise_error(message))

    def _in_order(self, value: Column, layout: columns.Column | None = None) -> Column:
        """The values that are there, in read order, as structs of `ord` and `v`."""
        row = f.struct(self._order.alias("ord"), value.alias("v"))
        rows = self.add(f.collect_list(f.when(value.isNotNull(), row)))
        return sorted_by(rows, "ord", layout)

    def _unknown(self, value: Column) -> Column:
        """Members without a column: the last of each name. Spark keeps the later of equal names."""
        batches = f.transform(self._in_order(f.map_entries(value)), lambda row: row["v"])
        return f.when(f.size(batches) > 0, f.map_from_entries(f.flatten(batches)))

    def _fold(self, node: Fold, value: Column, present: Column | None) -> Reduced:
        row = f.struct(self._order.alias("ord"), value.alias("v"))
        rows = self.add(f.collect_list(row if present is None else f.when(present, row)))
        values = f.transform(sorted_by(rows, "ord", node.column), lambda row: row["v"])
        name = f"{self._prefix}f{len(self.folds)}"
        self.folds.append((name, fold_values(node, full=self._full)(values, self._key_text)))
        return Reduced(f.col(name).getField("value"), f.col(name).getField("is_null"))


def sorted_by(rows: Column, name: str, layout: columns.Column | None) -> Column:
    """Structs sorted by their field `name`, which is unique and comes first.

    Spark refuses to compare structs that hold a map anywhere (`layout` says what they hold), and
    comparing by a function of ours is slower than by its own.
    """
    inside = [] if layout is None else [inner for _, inner in columns.walk_columns(layout)]
    if any(inner.kind is columns.Kind.MAP or inner.extra is not None for inner in inside):
        return f.array_sort(
            rows, lambda a, b: f.when(a[name] < b[name], -1).when(a[name] > b[name], 1).otherwise(0)
        )
    return f.array_sort(rows)


def hidden(node: Members) -> set[str]:
    """The hidden members of an object."""
    return {name for name in (node.column.nulls, node.column.extra) if name is not None}


def _present(value: Column | None, null: Column | None) -> Column:
    """A condition: the row has this optional member."""
    if null is None:
        return f.lit(False) if value is None else value.isNotNull()
    return null if value is None else null | value.isNotNull()


def _decimal(value: int) -> Column:
    return f.lit(str(value)).cast("decimal(38,0)")
