from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.runtime.join import (
    AllJoined,
    Disagreement,
    InvalidJoin,
    Join,
    Joined,
    Labels,
    Outcome,
    Parked,
    Pending,
    ReadTopologyAt,
    TopologyMember,
    after_joined,
    await_assignment,
    register,
)


def topology(count: int, *, name: str = "s") -> tuple[TopologyMember, ...]:
    return tuple(
        TopologyMember(
            id=f"{name}{index}",
            host=f"host-{index}",
            create_revision=3,
            labels=Labels(task="acme/orders-view", build="b1", key_begin=index << 16),
        )
        for index in range(count)
    )


def join(index: int, count: int = 3, *, revision: int = 7, name: str = "s") -> Join:
    return Join(
        revision=revision,
        shards=topology(count, name=name),
        shard_index=index,
        work_dir="work",
    )


def arrive(*joins: Join) -> tuple[Parked | None, list[Outcome]]:
    parked, outcomes = None, []
    for each in joins:
        parked, outcome = register(parked, each)
        outcomes.append(outcome)
    return parked, outcomes


FIRST, *OTHERS = topology(3)
SOUND = join(1)


@pytest.mark.parametrize(
    "sound",
    [
        pytest.param(SOUND, id="well formed"),
        pytest.param(replace(SOUND, endpoint="e:1", leader_endpoint="l:1"), id="with addresses"),
    ],
)
def test_a_sound_join_is_registered(sound: Join) -> None:
    assert arrive(sound)[1] == [Pending(filled=1, target=3)]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        pytest.param(replace(SOUND, shards=()), "without shards", id="no shards"),
        pytest.param(replace(SOUND, shard_index=3), "shard 3 of", id="index out of range"),
        pytest.param(replace(SOUND, shard_index=-1), "shard -1 of", id="negative index"),
        pytest.param(replace(SOUND, work_dir=""), "working directory", id="no work dir"),
        pytest.param(
            replace(SOUND, shards=(*OTHERS, replace(FIRST, labels=None))),
            "without labels",
            id="a shard without labels",
        ),
        pytest.param(
            replace(SOUND, shards=(*OTHERS, replace(FIRST, id=""))),
            "without an id",
            id="a shard without id",
        ),
        pytest.param(
            replace(SOUND, shards=(*OTHERS, replace(FIRST, host=""))),
            "without a host",
            id="a shard without host",
        ),
        pytest.param(
            replace(SOUND, shards=(replace(FIRST, labels=Labels(task="")), *OTHERS)),
            "without a task",
            id="empty task name",
        ),
        pytest.param(
            replace(SOUND, shards=(*OTHERS, replace(FIRST, labels=Labels(task="acme/other")))),
            "acme/orders-view and acme/other",
            id="two tasks",
        ),
    ],
)
def test_a_bad_join_is_refused_and_nothing_is_parked(bad: Join, what: str) -> None:
    with pytest.raises(InvalidJoin, match=what):
        register(None, bad)
    parked, _ = arrive(join(0))
    with pytest.raises(InvalidJoin):
        register(parked, bad)


def test_a_single_shard_agrees_with_itself_at_once() -> None:
    only = join(0, 1)
    assert arrive(only) == (None, [AllJoined(joins=(only,))])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_shards_agree_in_any_order_and_are_handed_over_by_index(
    order: tuple[int, ...],
) -> None:
    joins = {index: join(index, revision=7 + index) for index in range(3)}
    parked, outcomes = arrive(*(joins[index] for index in order))
    assert parked is None
    assert outcomes == [
        Pending(filled=1, target=3),
        Pending(filled=2, target=3),
        AllJoined(joins=(joins[0], joins[1], joins[2])),
    ]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(join(2, revision=12), id="the slot is taken"),
        pytest.param(join(3, 4, revision=12), id="index out of range of the parked topology"),
        pytest.param(join(1, revision=12, name="t"), id="same size, other ids"),
        pytest.param(
            replace(join(1, revision=12), shards=(replace(FIRST, host="moved"), *OTHERS)),
            id="another host",
        ),
        pytest.param(
            replace(join(1, revision=12), shards=(replace(FIRST, create_revision=9), *OTHERS)),
            id="another incarnation",
        ),
        pytest.param(
            replace(
                join(1, revision=12),
                shards=(
                    replace(FIRST, labels=Labels(task="acme/orders-view", flags=(("x", "y"),))),
                    *OTHERS,
                ),
            ),
            id="other flags",
        ),
    ],
)
def test_a_disagreement_releases_everybody_to_the_newest_revision(second: Join) -> None:
    first = join(2, revision=7)
    parked, outcomes = arrive(first, second)
    assert parked is None
    assert outcomes[-1] == Disagreement(joins=(first, second))
    assert isinstance(outcomes[-1], Disagreement)
    assert outcomes[-1].max_revision == 12


def test_a_shard_that_dropped_and_came_back_makes_everybody_retry_once() -> None:
    parked, outcomes = arrive(join(0), join(1), join(0))
    assert isinstance(outcomes[-1], Disagreement)
    assert len(outcomes[-1].joins) == 3
    assert parked is None
    assert isinstance(arrive(*map(join, range(3)))[1][-1], AllJoined)


def test_a_shard_waits_until_all_are_assigned() -> None:
    unassigned = (replace(FIRST, host=""), *OTHERS)
    assert await_assignment(unassigned, 41) == ReadTopologyAt(revision=42)
    assert await_assignment((FIRST, *OTHERS), 41) is None


def test_a_shard_that_is_sent_away_reads_again_and_hears_nothing_more() -> None:
    assert after_joined(Joined()) is None
    assert after_joined(Joined(max_revision=12)) == ReadTopologyAt(revision=12)
    with pytest.raises(PenstockError, match="went on talking"):
        after_joined(Joined(max_revision=12), [Joined()])


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("st"), st.integers(1, 4)), max_size=9))
def test_every_join_is_answered_exactly_once_or_still_parked(
    arrivals: list[tuple[int, str, int]],
) -> None:
    joins = [
        join(index, count, name=name, revision=n)
        for n, (index, name, count) in enumerate(arrivals)
        if index < count
    ]
    parked, outcomes = arrive(*joins)
    released = [
        each for outcome in outcomes if not isinstance(outcome, Pending) for each in outcome.joins
    ]
    waiting = list(parked.joins) if parked else []
    assert sorted(each.revision for each in released + waiting) == [j.revision for j in joins]
    for outcome in outcomes:
        if isinstance(outcome, AllJoined):
            assert [each.shard_index for each in outcome.joins] == list(range(len(outcome.joins)))
            assert len({each.shards for each in outcome.joins}) == 1
