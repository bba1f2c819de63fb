"""Cursors, topics and ranges: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.kafka.offsets import (
    Bounds,
    Cursor,
    EndsBefore,
    Fits,
    Gap,
    Range,
    Recreated,
    TopicLook,
    reconcile,
    shares,
)
from penstock.model.json_order import Json
from penstock.runtime.patches import apply_patches

CURSOR = Cursor(topic_id="A", partitions={0: 10, 1: 20})
LOOK = TopicLook(topic_id="A", partitions={0: Bounds(5, 15), 1: Bounds(0, 20)})


def look(partitions: dict[int, Bounds], topic_id: str = "A") -> TopicLook:
    return TopicLook(topic_id=topic_id, partitions=partitions)


@pytest.mark.parametrize(
    ("cursor", "seen", "start", "want"),
    [
        pytest.param(CURSOR, LOOK, "earliest", Fits(cursor=CURSOR), id="everything fits"),
        pytest.param(
            None,
            LOOK,
            "earliest",
            Fits(cursor=Cursor(topic_id="A", partitions={0: 5, 1: 0})),
            id="no cursor: from what is kept",
        ),
        pytest.param(
            None,
            LOOK,
            "latest",
            Fits(cursor=Cursor(topic_id="A", partitions={0: 15, 1: 20})),
            id="no cursor, and only what comes is wanted",
        ),
        pytest.param(
            CURSOR,
            look({**LOOK.partitions, 2: Bounds(0, 3)}),
            "latest",
            Fits(cursor=Cursor(topic_id="A", partitions={0: 10, 1: 20, 2: 0})),
            id="a new partition is read from offset 0",
        ),
        pytest.param(
            CURSOR,
            look({**LOOK.partitions, 0: Bounds(12, 15)}),
            "earliest",
            Fits(
                cursor=Cursor(topic_id="A", partitions={0: 12, 1: 20}),
                gaps=(Gap(partition=0, begin=10, end=12),),
            ),
            id="retention passed the cursor",
        ),
        pytest.param(
            CURSOR,
            look({**LOOK.partitions, 0: Bounds(10, 15)}),
            "earliest",
            Fits(cursor=CURSOR),
            id="retention came up to the cursor",
        ),
        pytest.param(
            CURSOR,
            look({**LOOK.partitions, 1: Bounds(0, 19)}),
            "earliest",
            EndsBefore(partition=1, cursor=20, end=19),
            id="the topic ends before the cursor",
        ),
    ],
)
def test_a_cursor_is_compared_with_its_topic(
    cursor: Cursor | None, seen: TopicLook, start: str, want: object
) -> None:
    assert reconcile(cursor, seen, start) == want  # type: ignore[arg-type]


def test_another_topic_of_the_same_name_is_told_by_its_id() -> None:
    found = reconcile(CURSOR, look(dict(LOOK.partitions), "B"), "earliest")
    assert found == Recreated(why="its id was A, and is B now")


def test_a_partition_that_is_gone_makes_it_another_topic() -> None:
    assert isinstance(reconcile(CURSOR, look({0: Bounds(0, 15)}), "earliest"), Recreated)


cursors = st.builds(
    lambda topic_id, partitions: Cursor(topic_id=topic_id, partitions=partitions),
    st.sampled_from("AB"),
    st.dictionaries(st.integers(0, 4), st.integers(0, 9), max_size=5),
)


@given(st.lists(cursors, min_size=1, max_size=5))
def test_patches_add_up_to_the_last_cursor(steps: list[Cursor]) -> None:
    """If no partition goes away, which `reconcile` refuses."""
    state: Json = {}
    before: Cursor | None = None
    for step in steps:
        kept = {**(before.partitions if before else {}), **step.partitions}
        step = Cursor(topic_id=step.topic_id, partitions=kept)
        patch = step.patch(before)
        assert (patch is None) == (before == step)
        if patch is not None:
            state = apply_patches(state, [{"key": patch}])
        before = step
    assert isinstance(state, dict)
    assert Cursor.from_json(state["key"]) == before


def test_no_state_is_no_cursor() -> None:
    assert Cursor.from_json(None) is None


def test_lags_are_distances_that_are_left() -> None:
    assert CURSOR.lags(look({0: Bounds(5, 15), 1: Bounds(0, 20), 2: Bounds(0, 4)})) == {0: 5, 2: 4}


@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 20))
def test_parts_of_a_range_are_the_range(begin: int, count: int, count_max: int) -> None:
    parts = list(Range(partition=3, begin=begin, end=begin + count).split(count_max))
    assert [at for part in parts for at in range(part.begin, part.end)] == list(
        range(begin, begin + count)
    )
    assert all(0 < part.count <= count_max for part in parts)
    assert max(p.count for p in parts) - min(p.count for p in parts) <= 1


wants = st.dictionaries(st.integers(0, 9), st.integers(1, 50), min_size=1, max_size=10)


@given(wants, st.integers(1, 300))
def test_shares_are_fair(wanted: dict[int, int], total: int) -> None:
    given_ = shares(wanted, total)
    assert given_.keys() == wanted.keys()
    assert all(1 <= given_[each] <= wanted[each] for each in wanted)
    assert sum(given_.values()) <= max(total, len(wanted))
    if total >= len(wanted):
        assert sum(given_.values()) >= min(total, sum(wanted.values())) - len(wanted)
    short = [given_[each] for each in wanted if given_[each] < wanted[each]]
    assert not short or max(short) - min(short) <= len(wanted), "who gets less gets about the same"
