"""Shards tile the square of key hashes and r-clocks; routing finds the owners."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.model.keys import Key, key_hash, pack
from penstock.model.routing import (
    RANGE_MAX,
    SHARDS_MAX,
    InvalidShards,
    Routing,
    Shard,
    shard_of,
    split_shards,
)

THREE = split_shards(3, prefix="acme/task/")
R_SPLIT = Routing(
    (
        Shard(id="t/00000000-00000000", r_end=0x7FFFFFFF),
        Shard(id="t/00000000-80000000", r_begin=0x80000000),
    )
)
hashes = st.integers(0, RANGE_MAX) | st.sampled_from([0, 1, RANGE_MAX - 1, RANGE_MAX])


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Key groups cut anywhere, each cut by r-clock anywhere."""
    cuts = st.sets(st.integers(1, RANGE_MAX) | st.integers(1, 4), max_size=4)

    def ranges() -> list[tuple[int, int]]:
        begins = [0, *sorted(draw(cuts))]
        return list(zip(begins, [b - 1 for b in begins[1:]] + [RANGE_MAX], strict=True))

    return Routing(
        tuple(
            Shard(id=f"t/{k0:08x}-{r0:08x}", key_begin=k0, key_end=k1, r_begin=r0, r_end=r1)
            for k0, k1 in ranges()
            for r0, r1 in ranges()
        )
    )


def test_three_equal_shards() -> None:
    assert [(s.id, s.key_begin, s.key_end) for s in THREE.shards] == [
        ("acme/task/00000000-00000000", 0, 0x55555554),
        ("acme/task/55555555-00000000", 0x55555555, 0xAAAAAAA9),
        ("acme/task/aaaaaaaa-00000000", 0xAAAAAAAA, 0xFFFFFFFF),
    ]
    assert {(s.r_begin, s.r_end) for s in THREE.shards} == {(0, RANGE_MAX)}


@pytest.mark.parametrize(("key", "shard"), [(("key", 42), 0), ((1,), 1), ((0,), 2)])
def test_keys_route_to_their_shard(key: Key, shard: int) -> None:
    for filtered in (True, False):
        assert list(THREE.route(key_hash(pack(key)), 7, filter_r_clocks=filtered)) == [shard]


@pytest.mark.parametrize(
    ("filtered", "want"),
    [
        pytest.param(True, [1], id="filtered: the one r-split"),
        pytest.param(False, [0, 1], id="unfiltered: every r-split"),
    ],
)
def test_r_splits(filtered: bool, want: list[int]) -> None:
    assert list(R_SPLIT.route(12345, 0x90000000, filter_r_clocks=filtered)) == want


@given(routings(), hashes, hashes)
def test_a_document_has_one_owner_and_its_group_shares_the_key(
    routing: Routing, key: int, r_clock: int
) -> None:
    holds_key = [i for i, s in enumerate(routing.shards) if s.key_begin <= key <= s.key_end]
    owners = [
        i for i in holds_key if routing.shards[i].r_begin <= r_clock <= routing.shards[i].r_end
    ]
    assert list(routing.route(key, r_clock, filter_r_clocks=False)) == holds_key
    assert list(routing.route(key, r_clock, filter_r_clocks=True)) == owners
    assert len(owners) == 1


@given(st.integers(1, 500), hashes)
def test_shard_of_is_routing_without_a_search(count: int, key: int) -> None:
    assert [shard_of(key, count)] == list(split_shards(count).route(key, 0, filter_r_clocks=True))


@given(st.integers(1, 500))
def test_equal_splits_differ_by_at_most_one_hash(count: int) -> None:
    sizes = {s.key_end - s.key_begin for s in split_shards(count).shards}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        pytest.param((), "no shards", id="empty"),
        pytest.param(
            (replace(R_SPLIT.shards[0]), replace(R_SPLIT.shards[1], id="u/1")),
            "no common prefix",
            id="ids of two tasks",
        ),
        pytest.param((Shard(id="alone"),), "no common prefix", id="id without a task"),
        pytest.param(
            (Shard(id="t/0", key_begin=9, key_end=8),),
            "key range [00000009, 00000008] is inverted",
            id="inverted key range",
        ),
        pytest.param(
            (Shard(id="t/0", r_begin=9, r_end=8),),
            "r-clock range [00000009, 00000008] is inverted",
            id="inverted r-clock range",
        ),
        pytest.param(
            (Shard(id="t/0", key_begin=1),),
            "key_begin is 00000001, not 00000000",
            id="key_begin: gap",
        ),
        pytest.param(
            (Shard(id="t/0", key_end=9), Shard(id="t/1", key_begin=9)),
            "key_begin is 00000009, not 0000000a",
            id="key_begin: overlap",
        ),
        pytest.param(
            tuple(reversed(THREE.shards)),
            "key_begin is aaaaaaaa, not 00000000",
            id="key_begin: out of order",
        ),
        pytest.param(
            (Shard(id="t/0", key_end=9),), "key_end is 00000009, not ffffffff", id="key_end: gap"
        ),
        pytest.param(
            (Shard(id="t/0", r_end=9), Shard(id="t/1", key_end=9, r_begin=10)),
            "key_end is 00000009, not ffffffff as in its group",
            id="key_end: differs within a group",
        ),
        pytest.param(
            (Shard(id="t/0", r_begin=1),),
            "r_clock_begin is 00000001, not 00000000",
            id="r_clock_begin: gap",
        ),
        pytest.param(
            (Shard(id="t/0"), Shard(id="t/1")),
            "r_clock_begin is 00000000, not 100000000",
            id="r_clock_begin: twice the same shard",
        ),
        pytest.param(
            (Shard(id="t/0", r_end=9),),
            "r_clock_end is 00000009, not ffffffff",
            id="r_clock_end: gap",
        ),
    ],
)
def test_shards_that_do_not_tile_are_refused(shards: tuple[Shard, ...], what: str) -> None:
    with pytest.raises(InvalidShards) as refused:
        Routing(shards)
    assert what in refused.value.what


def test_a_bound_beyond_32_bits_is_refused() -> None:
    with pytest.raises(InvalidShards, match="4294967296 is not a bound"):
        Shard(id="t/0", key_end=RANGE_MAX + 1)


@pytest.mark.parametrize("count", [-1, 0, SHARDS_MAX + 1])
def test_an_impossible_number_of_shards_is_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"cannot split into {count} shards"):
        split_shards(count)
