"""PURE: what simulated tasks read: collections by their names, and bindings of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.journal.selector import PartitionFilter
from penstock.model.spec import CollectionSpec, FieldValues, Frozen, Selector
from penstock.shuffle.binding import Binding, with_cohorts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """One binding of a simulated task."""

    collection: str
    priority: int = 0
    read_delay: int = 0
    region: str | None = None
    """The only partition to read, of a collection with such partitions."""


def bindings_of(reads: Sequence[Reads], *, gap: int = 1) -> tuple[Binding, ...]:
    """Bindings, whose indexes are so far apart."""
    return with_cohorts(
        Binding(
            index=at * gap,
            collection=_collection(each.collection),
            read_suffix=f"task/{at}",
            priority=each.priority,
            read_delay=each.read_delay,
            key=("/id",),
            partitions=_partitions(each),
        )
        for at, each in enumerate(reads)
    )


@functools.cache
def _collection(name: str) -> CollectionSpec:
    schema = Frozen({"type": "object"})
    return CollectionSpec(
        name=name, key=("/id",), write_schema=schema, read_schema=schema, fields=()
    )


@functools.cache
def _partitions(reads: Reads) -> PartitionFilter:
    if reads.region is None:
        fields = ["region"] if is_partitioned(reads.collection) else []
        return PartitionFilter.of(fields, Selector())
    include = (FieldValues(field="region", values=(reads.region,)),)
    return PartitionFilter.of(["region"], Selector(include=include))


def is_partitioned(collection: str) -> bool:
    """Collections whose names say so are split by region."""
    return collection.endswith("-by-region")
