"""Routing: the shards that a document goes to.

    key ──keys.pack──▶ bytes ──keys.key_hash──▶ 32 bits ──shard_of──▶ shard

A shard owns a rectangle: a range of key hashes times a range of rotated clocks (r-clocks), both 32
bits and inclusive. The shards of a task tile the whole square in two steps: *key groups* tile the
hashes, and the members of a group, which share its key range, tile the r-clocks. So every document
has exactly one group, and within it exactly one shard by r-clock; or all of them, if it is on the
side of a join that must be everywhere. `Routing` checks this once; a route is then two binary
searches. These are the definitions: Spark computes the same in `native.keys` and `shuffle.route`.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from typing import Final

from penstock.errors import UserError

RANGE_MAX: Final = 0xFFFFFFFF
"""The last key hash, and the last r-clock."""

SHARDS_MAX: Final = 65_536
"""More shards than this cost more to plan than they could ever read."""


class InvalidShards(UserError):
    """Shards that do not tile the square: a document would be lost or read twice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The owner of [key_begin, key_end] x [r_begin, r_end]."""

    id: str
    key_begin: int = 0
    key_end: int = RANGE_MAX
    r_begin: int = 0
    r_end: int = RANGE_MAX

    def __post_init__(self) -> None:
        for bound in (self.key_begin, self.key_end, self.r_begin, self.r_end):
            if not 0 <= bound <= RANGE_MAX:
                raise _refuse(f"{bound} is not a bound of a 32-bit range", self)


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """Shards that tile the square, in order of (key_begin, r_begin); anything else is refused."""

    shards: tuple[Shard, ...]
    _group_key_begin: list[int] = dataclasses.field(init=False, repr=False, compare=False)
    _group_first: list[int] = dataclasses.field(init=False, repr=False, compare=False)
    """Index of each group's first shard, followed by the number of shards."""
    _r_begin: list[int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_ids(self.shards)
        groups = [list(g) for _, g in itertools.groupby(self.shards, lambda s: s.key_begin)]
        _check_groups(groups)
        firsts = itertools.accumulate(map(len, groups), initial=0)
        object.__setattr__(self, "_group_key_begin", [group[0].key_begin for group in groups])
        object.__setattr__(self, "_group_first", list(firsts))
        object.__setattr__(self, "_r_begin", [shard.r_begin for shard in self.shards])

    def route(self, key_hash: int, r_clock: int, *, filter_r_clocks: bool) -> range:
        """Return the indices of a document's shards: one with the filter, else its whole group."""
        group = self._group_of(key_hash)
        first, last = self._group_first[group], self._group_first[group + 1]
        if not filter_r_clocks:
            return range(first, last)
        shard = bisect_right(self._r_begin, r_clock, first, last) - 1
        return range(shard, shard + 1)

    def _group_of(self, key_hash: int) -> int:
        return bisect_right(self._group_key_begin, key_hash) - 1


def split_shards(count: int, *, prefix: str = "shard/") -> Routing:
    """Return `count` shards of equal key ranges, to within one hash, each over all r-clocks.

    Shard i begins at floor(i * 2**32 / count); `shard_of` is the inverse.
    """
    if not 1 <= count <= SHARDS_MAX:
        raise UserError(
            f"cannot split into {count} shards",
            why=f"a task has between 1 and {SHARDS_MAX} shards",
            fix="change `shards.count`",
        )
    begins = [(i << 32) // count for i in range(count + 1)]
    return Routing(
        tuple(
            Shard(id=f"{prefix}{begin:08x}-00000000", key_begin=begin, key_end=after - 1)
            for begin, after in itertools.pairwise(begins)
        )
    )


def shard_of(key_hash: int, count: int) -> int:
    """Return the index of the shard of `split_shards(count)` that owns `key_hash`.

    It is the largest i with floor(i * 2**32 / count) <= h, that is i * 2**32 < (h + 1) * count.
    """
    return ((key_hash + 1) * count - 1) >> 32


def _check_ids(shards: tuple[Shard, ...]) -> None:
    if not shards:
        raise InvalidShards("no shards", fix="a task needs at least one")
    prefix = shards[0].id.rpartition("/")[0]
    for shard in shards:
        if not prefix or shard.id.rpartition("/")[0] != prefix:
            raise InvalidShards(
                "shard ids have no common prefix that ends in '/'",
                where=f"{shards[0].id}, {shard.id}",
                why="shards are named by their task, '/', and their range",
            )
    for shard in shards:
        if shard.key_begin > shard.key_end:
            raise _refuse(f"key range {_hex(shard.key_begin, shard.key_end)} is inverted", shard)
        if shard.r_begin > shard.r_end:
            raise _refuse(f"r-clock range {_hex(shard.r_begin, shard.r_end)} is inverted", shard)


def _check_groups(groups: list[list[Shard]]) -> None:
    key_next = 0
    for group in groups:
        r_next = 0
        for shard in group:
            if shard.key_begin != key_next:
                raise _refuse(f"key_begin is {shard.key_begin:08x}, not {key_next:08x}", shard)
            if shard.key_end != group[0].key_end:
                want = f"{group[0].key_end:08x} as in its group"
                raise _refuse(f"key_end is {shard.key_end:08x}, not {want}", shard)
            if shard.r_begin != r_next:
                raise _refuse(f"r_clock_begin is {shard.r_begin:08x}, not {r_next:08x}", shard)
            r_next = shard.r_end + 1
        last = group[-1]
        if last.r_end != RANGE_MAX:
            raise _refuse(f"r_clock_end is {last.r_end:08x}, not {RANGE_MAX:08x}", last)
        key_next = last.key_end + 1
    last = groups[-1][-1]
    if last.key_end != RANGE_MAX:
        raise _refuse(f"key_end is {last.key_end:08x}, not {RANGE_MAX:08x}", last)


def _refuse(what: str, shard: Shard) -> InvalidShards:
    return InvalidShards(
        what,
        where=f"shard {shard.id}",
        why="shards must tile all key hashes and r-clocks without gaps or overlaps",
    )


def _hex(begin: int, end: int) -> str:
    return f"[{begin:08x}, {end:08x}]"
