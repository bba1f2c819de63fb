"""Routing documents to journals: by their partition values, then by the hash of their key.

    FieldLocations      the locations of a key or of partition fields, as columns
    split_by_partition  rows by their partition values, whole columns at a time
    PhysicalPartitions  the ranges of key hashes that journals of one logical partition cover
    JournalRouting      all of it for one collection: rows to journals

Partition values name a *logical* partition, a prefix of journal names; key hashes choose one of its
*physical* partitions, which are ranges. Nearly always there is one, which covers everything, and
then no key is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from penstock.journal.names import KEY_HASH_MAX, JournalName, PartitionValue
from penstock.model import pointer
from penstock.model.columns import Column, Kind
from penstock.model.json_order import ABSENT, Absent, Json
from penstock.model.keys import key_hash, pack_columns
from penstock.model.schema import compiled
from penstock.model.shape import Shape, locate
from penstock.model.spec import CollectionSpec
from penstock.native.arrow import to_json

pa: Any = pyarrow  # the published stubs know few of the kernels used here
pc: Any = pyarrow.compute
Array: TypeAlias = Any

_SCALARS = frozenset({Kind.BOOLEAN, Kind.LONG, Kind.STRING})


# ------------------------------------------------------------------------------------ documents


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldLocations:
    """Locations whose values are booleans, integers, strings or null; missing is the default."""

    root: Column
    locations: tuple[str, ...]
    names: tuple[tuple[str, ...] | None, ...]
    """The names on the way to a location that is a plain column, else None."""
    defaults: tuple[Json | Absent, ...]

    @classmethod
    def of(cls, shape: Shape, root: Column, locations: Iterable[str]) -> FieldLocations:
        """The locations of documents of this shape, which are laid out as `root`."""
        where = tuple(locations)
        return cls(
            root=root,
            locations=where,
            names=tuple(_column_names(root, location) for location in where),
            defaults=tuple(locate(shape, location)[0].default for location in where),
        )

    def columns(self, rows: pyarrow.RecordBatch) -> list[Array | list[Any]]:
        """The values at each location: as Arrow has them, or one by one."""
        return [
            self._column(rows, location, names, default)
            for location, names, default in zip(
                self.locations, self.names, self.defaults, strict=True
            )
        ]

    def _column(
        self,
        rows: pyarrow.RecordBatch,
        location: str,
        names: tuple[str, ...] | None,
        default: Json | Absent,
    ) -> Array | list[Any]:
        if names is not None:
            array: Any = rows.column(names[0])
            for name in names[1:]:
                array = pc.struct_field(array, name)
            if default is ABSENT or not array.null_count:
                return array
        # A column does not show all: items of arrays, huge integers, and whether it was missing.
        tokens = pointer.parse(location)
        found: list[Any] = [
            pointer.get(json.loads(text), tokens) for text in to_json(rows, self.root)
        ]
        missing = None if default is ABSENT else default
        return [missing if value is ABSENT else value for value in found]


def _column_names(root: Column, location: str) -> tuple[str, ...] | None:
    column = root
    tokens = pointer.parse(location)
    for token in tokens:
        member = next((m for m in column.members if m.name == token), None)
        if member is None or member.column is None:
            return None
        column = member.column
    return tokens if tokens and column.kind in _SCALARS else None


def split_by_partition(
    rows: pyarrow.RecordBatch, places: FieldLocations
) -> Iterator[tuple[tuple[PartitionValue, ...], pyarrow.RecordBatch]]:
    """Rows by the values at these places, in that order; each part in its old order."""
    columns = places.columns(rows)
    codes = np.zeros(rows.num_rows, np.int64)
    for column in columns:
        own, count = _codes(column)
        # Renumbered each time, so that the product of many fields cannot overflow.
        codes = np.unique(codes * count + own, return_inverse=True)[1]
    if not codes.any():
        yield tuple(_value(column, 0) for column in columns), rows
        return
    order = np.argsort(codes, kind="stable")
    begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
    ends = np.append(begins[1:], rows.num_rows)
    together = rows.take(pa.array(order))
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        values = tuple(_value(column, int(order[begin])) for column in columns)
        yield values, together.slice(begin, end - begin)


def _codes(column: Array | list[Any]) -> tuple[npt.NDArray[np.int64], int]:
    """A number for each value, the same for the same, and how many there are at most."""
    if isinstance(column, list):
        seen: dict[Any, int] = {}
        numbers = (seen.setdefault(value, len(seen)) for value in column)
        return np.fromiter(numbers, np.int64, len(column)), len(column)
    encoded = column.dictionary_encode()
    null = len(encoded.dictionary)
    return encoded.indices.fill_null(null).to_numpy(zero_copy_only=False), null + 1


def _value(column: Array | list[Any], row: int) -> PartitionValue:
    value: PartitionValue = column[row] if isinstance(column, list) else column[row].as_py()
    return value


def key_hashes(rows: pyarrow.RecordBatch, places: FieldLocations) -> npt.NDArray[np.uint32]:
    """The hash of each row's key."""
    columns = [
        column if isinstance(column, list) else column.to_pylist()
        for column in places.columns(rows)
    ]
    return np.fromiter(map(key_hash, pack_columns(columns)), np.uint32, rows.num_rows)


# ------------------------------------------------------------------------------------- journals


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalPartitions:
    """The physical partitions of one logical partition, as ranges of key hashes."""

    journals: tuple[str, ...] = ()
    """Sorted, and so are their ranges: a name ends with where its range begins."""
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    """Inclusive, as begins are."""

    @classmethod
    def of(cls, ranges: Iterable[tuple[str, int, int]]) -> PhysicalPartitions:
        """From names and their ranges, in any order."""
        ordered = sorted(ranges)
        return cls(
            journals=tuple(name for name, _, _ in ordered),
            begins=tuple(begin for _, begin, _ in ordered),
            ends=tuple(end for _, _, end in ordered),
        )

    @property
    def everything(self) -> str | None:
        """The one journal that covers every hash, if there is one."""
        if len(self.journals) == 1 and (self.begins[0], self.ends[0]) == (0, KEY_HASH_MAX):
            return self.journals[0]
        return None

    def route(
        self, rows: pyarrow.RecordBatch, hashes: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[str | None, pyarrow.RecordBatch]]:
        """Rows by the journal that covers them, each part in its old order."""
        at = np.searchsorted(np.array(self.ends, np.int64), hashes.astype(np.int64))
        for index in np.unique(at).tolist():
            among = at == index
            begin = self.begins[index] if index < len(self.begins) else KEY_HASH_MAX + 1
            for journal, mask in (
                (self.journals[index] if index < len(self.journals) else None, hashes >= begin),
                (None, hashes < begin),
            ):
                if (taken := among & mask).any():
                    yield journal, rows.filter(pa.array(taken))


class JournalRouting:
    """Routes rows of a collection to journals, by what is known of its partitions."""

    def __init__(
        self, spec: CollectionSpec, root: Column, covered: Mapping[str, PhysicalPartitions]
    ) -> None:
        shape = compiled(spec.write_schema.text).shape
        locations = [partition.location for partition in spec.partitions]
        self.covered = covered
        """By logical partition; replaced when journals are created."""
        self._spec = spec
        self._partitions = FieldLocations.of(shape, root, locations)
        self._key = FieldLocations.of(shape, root, spec.key)

    def split(self, rows: pyarrow.RecordBatch) -> list[tuple[JournalName, pyarrow.RecordBatch]]:
        """Rows by logical partition, each under the name of the journal that covers all of it."""
        names = [field.name for field in self._spec.partitions]
        return [
            (JournalName.of(self._spec.name, dict(zip(names, values, strict=True))), part)
            for values, part in split_by_partition(rows, self._partitions)
        ]

    def cover(
        self, name: JournalName, rows: pyarrow.RecordBatch
    ) -> Iterator[tuple[str | None, pyarrow.RecordBatch]]:
        """Rows of one logical partition by the journal that covers them; None where none does."""
        covered = self.covered.get(name.prefix)
        if covered is None:
            yield None, rows
        elif (journal := covered.everything) is not None:
            yield journal, rows
        else:
            yield from covered.route(rows, key_hashes(rows, self._key))

    def range_of(self, journal: str) -> tuple[int, int] | None:
        """The key hashes that a journal covers, both ends inclusive; None if it is not known."""
        covered = self.covered.get(journal.rpartition("/")[0] + "/")
        if covered is None or journal not in covered.journals:
            return None
        at = covered.journals.index(journal)
        return covered.begins[at], covered.ends[at]
