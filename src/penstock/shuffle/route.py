"""SPARK: which shards own a row, as expressions over the columns of its document.

The packed key and its hash are those of `model.keys`, the shard is that of `model.routing`: this
file only says where in a row the key is, and turns the search for its shard into an expression.
Nearly always all of it is native. A key that no column holds (an item of an array, an integer of
more digits than a decimal has, a member that is kept as JSON text) is packed by Python, which then
sees the columns of the key and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pyarrow
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf

from penstock.journal.partition import FieldLocations
from penstock.model import pointer
from penstock.model.columns import Column, Kind, Member
from penstock.model.json_order import ABSENT
from penstock.model.keys import pack, pack_columns
from penstock.model.routing import Routing, Shard, split_shards
from penstock.model.shape import Shape, locate
from penstock.native import keys, sql
from penstock.native.spark_types import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

_pa: Any = pyarrow  # the published stubs lack the constructors used here
_arrow_udf: Any = arrow_udf  # and Spark's own want an argument that warns of itself

# ------------------------------------------------------------------------------------------- keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumns:
    """The packed key of a row, as an expression over its columns."""

    packed: SparkColumn
    """BINARY, never NULL."""
    needs: tuple[str, ...]
    """The columns of the row that it looks at."""


def key_columns(shape: Shape, root: Column, key: Sequence[str]) -> KeyColumns:
    """The key at these locations, of documents of this shape that are laid out as `root`.

    Where a document has no value its default counts, else null.
    """
    tops = [pointer.parse(location)[0] for location in key]
    spots = [_spot(root, pointer.parse(location)) for location in key]
    if None in spots:
        needs = needed_columns(root, tops)
        places = FieldLocations.of(shape, _only(root, needs), key)
        return KeyColumns(packed=_packed_by_python(places, needs), needs=needs)
    parts = [
        _packed(spot, shape, location)
        for spot, location in zip(spots, key, strict=True)
        if spot is not None
    ]
    packed = parts[0] if len(parts) == 1 else f.concat(*parts)
    return KeyColumns(packed=packed, needs=needed_columns(root, tops))


def needed_columns(root: Column, members: Sequence[str]) -> tuple[str, ...]:
    """The columns of rows that hold these members of documents, those that are hidden too."""
    by_name = {member.name: member for member in root.members}
    known = [by_name[name] for name in dict.fromkeys(members) if name in by_name]
    names = [member.name for member in known if member.column is not None]
    if root.nulls is not None and any(member.listed for member in known):
        names.append(root.nulls)
    if root.extra is not None and len(known) < len(set(members)):
        names.append(root.extra)
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """A location that is a column, or a member of one."""

    member: Member
    value: str
    """SQL; NULL where it is missing or null."""
    missing: str
    """SQL: true where documents do not have it."""


_NATIVE: Final = frozenset({Kind.BOOLEAN, Kind.LONG, Kind.DECIMAL, Kind.STRING})


def _spot(root: Column, tokens: Sequence[str]) -> _Spot | None:
    column, value = root, ""
    spot: _Spot | None = None
    for token in tokens:
        at = next((i for i, m in enumerate(column.members) if m.name == token), None)
        member = None if at is None else column.members[at]
        if member is None or member.column is None:
            return None
        inner = _field(value, token)
        if member.required and member.nullable:
            missing = f"({value} IS NULL)" if value else sql.FALSE
        elif member.listed and column.nulls is not None:
            listed = f"array_contains({_field(value, column.nulls)}, {at}S)"
            missing = f"({inner} IS NULL AND NOT coalesce({listed}, false))"
        else:
            missing = f"({inner} IS NULL)"
        spot = _Spot(member=member, value=inner, missing=missing)
        column, value = member.column, inner
    return spot if column.kind in _NATIVE else None


def _field(of: str, name: str) -> str:
    return f"{of}.{sql.name(name)}" if of else sql.name(name)


def _packed(spot: _Spot, shape: Shape, location: str) -> SparkColumn:
    """One component of a key."""
    (field,) = spark_schema(Column(kind=Kind.STRUCT, members=(spot.member,))).fields
    packed = keys.pack_component(f.expr(spot.value), field.dataType)
    default: Any = locate(shape, location)[0].default
    if default is ABSENT or spot.missing == sql.FALSE:
        return packed
    return f.when(f.expr(spot.missing), f.lit(pack([default]))).otherwise(packed)


def _only(root: Column, names: Sequence[str]) -> Column:
    """The layout with no other columns; members keep their positions, by which nulls are listed."""
    return replace(
        root,
        members=tuple(
            member if member.name in names else replace(member, column=None)
            for member in root.members
        ),
        nulls=root.nulls if root.nulls in names else None,
        extra=root.extra if root.extra in names else None,
    )


def _packed_by_python(places: FieldLocations, needs: Sequence[str]) -> SparkColumn:
    # Spark evaluates these hints, and at run time an array has no parameter.
    def packed(*arrays: pyarrow.Array) -> pyarrow.Array:  # type: ignore[type-arg]
        rows = _pa.RecordBatch.from_arrays(list(arrays), names=list(needs))
        values = [
            column if isinstance(column, list) else column.to_pylist()
            for column in places.columns(rows)
        ]
        found: pyarrow.Array[Any] = _pa.array(pack_columns(values), _pa.binary())
        return found

    column: SparkColumn = _arrow_udf(packed, "binary")(*(f.col(sql.name(n)) for n in needs))
    return column


# ----------------------------------------------------------------------------------------- shards


def shard_column(
    routing: Routing, key_hash: SparkColumn, r_clock: SparkColumn, *, filter_r_clocks: bool
) -> SparkColumn:
    """The shard of a row as INT; where several get it, a generator of one row for each of them."""
    shards = routing.shards
    if _ranges(shards) == _ranges(split_shards(len(shards)).shards):
        return keys.shard_index(key_hash, len(shards)) if len(shards) > 1 else f.lit(0)
    groups = [list(group) for _, group in groupby(enumerate(shards), lambda at: at[1].key_begin)]
    begins = [group[0][1].key_begin for group in groups]
    if filter_r_clocks:
        within = [
            _search(r_clock, [shard.r_begin for _, shard in group], [f.lit(at) for at, _ in group])
            for group in groups
        ]
        return _search(key_hash, begins, within)
    first = _search(key_hash, begins, [f.lit(group[0][0]) for group in groups])
    if len(groups) == len(shards):
        return first
    last = _search(key_hash, begins, [f.lit(group[-1][0]) for group in groups])
    return f.explode(f.sequence(first, last))


def _ranges(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    return [(shard.key_begin, shard.r_begin) for shard in shards]


def _search(value: SparkColumn, begins: Sequence[int], found: Sequence[SparkColumn]) -> SparkColumn:
    """Choose the entry of `found` whose range, by its begin, holds a value."""
    if len(found) == 1:
        return found[0]
    half = len(found) // 2
    low = _search(value, begins[:half], found[:half])
    high = _search(value, begins[half:], found[half:])
    return f.when(value < begins[half], low).otherwise(high)


_SWAPS: Final = (
    (1, 0x55555555),
    (2, 0x33333333),
    (4, 0x0F0F0F0F),
    (8, 0x00FF00FF),
    (16, 0x0000FFFF),
)


def r_clock(clock: str) -> str:
    """SQL of `model.clock.rotate` over SQL of a clock."""
    bits = f"((shiftright({clock}, 4) ^ ({clock} & 15L)) & {0xFFFFFFFF}L)"
    for by, mask in _SWAPS:
        low, high = f"({bits} & {mask}L)", f"(shiftright({bits}, {by}) & {mask}L)"
        bits = f"(shiftleft({low}, {by}) | {high})"
    return bits
