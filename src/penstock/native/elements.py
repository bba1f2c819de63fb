"""Containers taken apart: a row per element, one aggregate over elements, one over documents.

Each document becomes a row of its own and one per element of every container. Grouping by key,
container and element reduces elements and documents at once; grouping the results by key puts them
together again. Both groupings are partitioned by the key alone, so there is one exchange, no join,
and no second read of the documents, however many containers there are.

In a set, a document first removes and then adds: an added element counts if no later document
removes it. So the last removal of each element, over a window, says which additions are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from penstock.errors import Bug
from penstock.model import columns
from penstock.native.aggregates import Aggregates, Container, column, sorted_by
from penstock.native.plan import Elements, ElementSet

MakeAggregates = Callable[[str, Column], Aggregates]
"""Aggregates over elements, from a prefix of names and the order of their rows."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A map or an array inside of a container, and the column its elements are exploded to.

    That column is a struct of the element's identity `e`, its position `p` and its value `v`; it is
    NULL in rows that are not of this term.
    """

    value: Column
    layout: columns.Column
    key: tuple[tuple[str, ...], ...]
    name: str

    @property
    def has_row(self) -> Column:
        return f.col(self.name).isNotNull()

    def field(self, name: str) -> Column:
        return f.col(self.name).getField(name)

    def taken_apart(self) -> Column:
        """The elements as an array of structs; NULL where there is no such term."""
        if self.layout.kind is columns.Kind.MAP:
            return f.transform(
                f.map_entries(self.value),
                lambda entry: _element(entry["key"], f.lit(0), entry["value"]),
            )
        return f.transform(
            self.value, lambda item, at: _element(self._identity(item, at), at, item)
        )

    def _identity(self, item: Column, at: Column) -> Column:
        if not self.key:
            return at
        parts = []
        for i, path in enumerate(self.key):
            part = item
            for name in path:
                part = part.getField(name)
            parts.append(part.alias(f"{i}"))
        return f.struct(*parts)

    def together(self) -> Column:
        """The map or array of the reduced elements, which are in `name` by then."""
        if self.layout.kind is columns.Kind.MAP:
            return f.map_from_entries(f.col(self.name))
        return f.transform(f.col(self.name), lambda entry: entry["value"])


def _element(identity: Column, position: Column, value: Column) -> Column:
    return f.struct(identity.alias("e"), position.alias("p"), value.alias("v"))


def group_with_elements(
    rows: DataFrame,
    documents: Aggregates,
    make: MakeAggregates,
    *,
    keys: Sequence[str],
    order: str,
    within: str,
    full: bool,
) -> DataFrame:
    """Group rows by `keys`: the aggregates of `documents`, packed in the struct `within`, and the
    result of each of their containers."""
    parts = [_terms(container, f"{within}x{i}") for i, container in enumerate(documents.containers)]
    which = f"{within}which"
    exploded = _explode(rows.repartition(*keys), parts, which, [*keys, order])
    groups = [*keys, which, *(_identity_of(part) for part in parts)]
    results: dict[str, Column] = {}
    entries: list[Column] = []
    aggregates: list[Column] = []
    for container, part in zip(documents.containers, parts, strict=True):
        if isinstance(container.node, Elements):
            (term,) = part
            position = f.struct(f.col(order), term.field("p")) if term.key else f.col(order)
            elements = make(f"{term.name}a", position)
            element = elements.location(container.node.element, term.field("v"), None)
            some = elements.add(f.max(term.has_row))
            entries.append(_entry(term, part, element.value, some))
            results[container.result] = term.together()
        else:
            elements = make(f"{part[0].name}a", f.col(order))
            if container.node.removed is not None:
                exploded = _with_last_removal(exploded, part[1], groups, order)
            entries += _set_entries(container.node, part, elements, order, full=full)
            results[container.result] = _set_result(container.node, part, documents, full=full)
        aggregates += elements.all
    own = f.struct(f.lit(True), *(f.col(name) for name in documents.names))
    reduced = (
        exploded.groupBy(*groups)
        .agg(*documents.all, *aggregates)
        .select(*keys, f.when(f.col(which) == 0, own).alias(within), *entries)
    )
    collected = [term for part in parts for term in part if term.name in reduced.columns]
    grouped = reduced.groupBy(*keys).agg(
        f.first(within, ignorenulls=True).alias(within),
        *(
            sorted_by(f.collect_list(term.name), "key", term.layout.item).alias(term.name)
            for term in collected
        ),
    )
    return grouped.withColumns(results)


def _terms(container: Container, name: str) -> list[_Term]:
    node, value = container.node, container.rows
    if isinstance(node, Elements):
        return [_Term(value, node.column, node.key, name)]
    return [
        _Term(value.getField(member.name), member.column, (), f"{name}{member.name}")
        for member in node.column.members
        if member.column is not None
    ]


def _identity_of(part: Sequence[_Term]) -> str:
    return f"{part[0].name}e"


def _explode(
    rows: DataFrame, parts: Sequence[Sequence[_Term]], which: str, beside: Sequence[str]
) -> DataFrame:
    """A row per document and per element; what a document has is NULL in rows of its elements."""
    terms = [term for part in parts for term in part]
    apart = rows.select(*(term.taken_apart().alias(term.name) for term in terms)).schema
    nothing = {
        term.name: f.lit(None).cast(apart[term.name].dataType.elementType)  # type: ignore[attr-defined]
        for term in terms
    }

    def row(number: int, held: dict[str, Column]) -> Column:
        values = {**nothing, **held}
        return f.struct(
            f.lit(number).alias(which), *(value.alias(name) for name, value in values.items())
        )

    def rows_of(number: int, term: _Term) -> Column:
        apart = f.transform(term.taken_apart(), lambda element: row(number, {term.name: element}))
        return f.coalesce(apart, f.array().cast(own_type))

    own = f.array(row(0, {}))
    own_type = rows.select(own.alias("own")).schema["own"].dataType
    of_elements = [rows_of(i, term) for i, part in enumerate(parts, start=1) for term in part]
    exploded = rows.withColumn(f"{which}row", f.explode(f.concat(own, *of_elements)))
    found = f.col(f"{which}row")
    documents = [name for name in rows.columns if name not in beside]
    return exploded.select(
        *beside,
        found.getField(which).alias(which),
        *(f.when(found.getField(which) == 0, column(name)).alias(name) for name in documents),
        *(found.getField(term.name).alias(term.name) for term in terms),
        *(
            f.coalesce(*(found.getField(term.name).getField("e") for term in part)).alias(
                _identity_of(part)
            )
            for part in parts
        ),
    )


def _entry(term: _Term, part: Sequence[_Term], value: Column | None, some: Column) -> Column:
    """A reduced element beside its identity, which puts it in its place."""
    if value is None:
        raise Bug("an element without a column")
    entry = f.struct(f.col(_identity_of(part)).alias("key"), value.alias("value"))
    return f.when(some, entry).alias(term.name)


def _with_last_removal(
    exploded: DataFrame, removed: _Term, groups: Sequence[str], order: str
) -> DataFrame:
    removal = f.when(removed.has_row, f.col(order))
    return exploded.withColumn(
        f"{removed.name}last", f.max(removal).over(Window.partitionBy(*groups))
    )


def _set_entries(
    node: ElementSet, part: Sequence[_Term], elements: Aggregates, order: str, *, full: bool
) -> list[Column]:
    """Additions that no later document removes; in a partial reduction, all removals as well."""
    added = part[0]
    kept = added.has_row
    entries: list[Column] = []
    if node.removed is not None:
        removed = part[1]
        last = f.col(f"{removed.name}last")
        kept = kept & (last.isNull() | (f.col(order) >= last))
        if not full:
            gone = elements.location(node.removed, removed.field("v"), removed.has_row)
            some = elements.add(f.max(removed.has_row))
            entries.append(_entry(removed, part, gone.value, some))
    taken = elements.location(node.element, f.when(kept, added.field("v")), kept)
    return [_entry(added, part, taken.value, elements.add(f.max(kept))), *entries]


def _set_result(
    node: ElementSet, part: Sequence[_Term], documents: Aggregates, *, full: bool
) -> Column:
    """The terms that some document had; a full reduction forgets what was removed."""
    fields = []
    for term, member in zip(part, node.column.members, strict=True):
        if full and member.name == "remove":
            fields.append(f.lit(None).alias(member.name))
        else:
            had = documents.add(f.max(term.value.isNotNull()))
            fields.append(f.when(had, term.together()).alias(member.name))
    return f.struct(*fields)
