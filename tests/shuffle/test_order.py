"""The order of documents: that of their commits, whatever writers' clocks say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.journal.committed import VisibleRows
from penstock.journal.state import Fragment, Inline
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Flag, Producer
from penstock.model.frontier import EMPTY
from penstock.model.runs import Run
from penstock.shuffle import wire
from penstock.shuffle.delivery import Checkpoint, Delivery
from penstock.shuffle.order import Order, arranged, level_after

ONE, TWO, THREE = (Producer(Producer.MULTICAST | n) for n in (1, 2, 3))


class Commit(NamedTuple):
    """What one producer committed at some revision."""

    revision: int
    producer: Producer
    clocks: tuple[int, ...]


def read(commits: Sequence[Commit], delay: int = 0, *, ahead: int = 0) -> list[Delivery]:
    """Deliveries as a session makes them of commits, after one that was `ahead`."""
    found = []
    level, last = level_after(NEVER, Clock(ahead)), 0
    latest = NEVER
    for commit in commits:
        if commit.revision != last and latest:
            level, latest = level_after(level, Clock(latest + delay)), NEVER
        last = commit.revision
        delivery = delivery_of(commit, level)
        found.append(delivery)
        latest = max(latest, delivery.commit)
    return found


def delivery_of(commit: Commit, level: Clock) -> Delivery:
    """Rows of one run, committed at the last of them."""
    first, last, rows = Clock(commit.clocks[0]), Clock(commit.clocks[-1]), len(commit.clocks)
    run = Run(
        producer=commit.producer,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=rows - 1,
        rows=rows,
        clock_min=first,
        clock_max=last,
        clock_max_offset=rows - 1,
        increasing=True,
    )
    fragment = Fragment(
        rows=rows,
        bytes=10 * rows,
        at=Inline(data=b""),
        schema="schema",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=0,
    )
    return Delivery(
        journal="acme/orders/00",
        binding=0,
        producer=commit.producer,
        commit=last,
        rows=(VisibleRows(fragment=fragment, run=run, clock_gt=NEVER),),
        bytes=10 * rows,
        level=level,
    )


def documents(deliveries: Sequence[Delivery], order: Order, delay: int) -> list[tuple[int, int]]:
    """Clocks and producers in the order that is told."""
    rows = []
    for delivery in deliveries:
        for clock in range(delivery.first, delivery.last + 1):
            level = max(clock + delay, delivery.level)
            key = {
                Order.CLOCK: (clock,),
                Order.STAMP: (clock, delivery.producer),
                Order.COMMIT: (level, clock, delivery.producer),
            }[order]
            rows.append((key, (clock, int(delivery.producer))))
    assert len({key for key, _ in rows}) == len(rows), "the order is total"
    return [row for _, row in sorted(rows)]


@st.composite
def histories(draw: st.DrawFn) -> list[Commit]:
    """Commits of a few writers, each with its own idea of the time, under rising revisions."""
    clocks = {producer: draw(st.integers(1, 60)) for producer in (ONE, TWO, THREE)}
    found = []
    for revision in range(1, 1 + draw(st.integers(1, 8))):
        writers = draw(st.lists(st.sampled_from((ONE, TWO, THREE)), min_size=1, unique=True))
        for producer in writers:
            first = clocks[producer] + draw(st.integers(0, 20))
            last = first + draw(st.integers(0, 5))
            clocks[producer] = last + 1
            found.append(Commit(revision, producer, tuple(range(first, last + 1))))
    return found


@given(histories(), st.integers(0, 30), st.integers(0, 90))
def test_documents_are_in_the_order_of_commits(
    commits: list[Commit], delay: int, ahead: int
) -> None:
    """Also behind a session's earlier commits, of which some may have been ahead of the time."""
    want = [
        (clock, int(producer))
        for _, clock, producer in sorted(
            (commit.revision, clock, commit.producer)
            for commit in commits
            for clock in commit.clocks
        )
    ]
    deliveries = read(commits, delay, ahead=ahead)
    assert documents(deliveries, Order.COMMIT, delay) == want
    among_themselves = arranged(reversed(deliveries), delay=delay)
    assert documents(among_themselves.deliveries, among_themselves.order, delay) == want


@pytest.mark.parametrize(
    ("commits", "order"),
    [
        pytest.param([Commit(1, ONE, (5, 6)), Commit(2, ONE, (7,))], Order.CLOCK, id="a producer"),
        pytest.param(
            [Commit(1, ONE, (5, 6)), Commit(2, TWO, (7,)), Commit(2, THREE, (9,))],
            Order.CLOCK,
            id="one after the other",
        ),
        pytest.param(
            [Commit(1, ONE, (5, 6)), Commit(1, TWO, (6,))], Order.STAMP, id="at the same time"
        ),
        pytest.param(
            [Commit(1, ONE, (5, 6)), Commit(2, TWO, (6,))], Order.COMMIT, id="the same clock later"
        ),
        pytest.param(
            [Commit(1, ONE, (5, 6)), Commit(2, TWO, (3,))], Order.COMMIT, id="a clock behind"
        ),
    ],
)
def test_what_is_needed_to_order_documents(commits: list[Commit], order: Order) -> None:
    assert arranged(read(commits, ahead=50), delay=0).order is order


def test_levels_end_with_clocks() -> None:
    assert level_after(Clock(7), Clock(3)) == 8
    assert level_after(Clock(3), Clock(7)) == 8
    assert level_after(NEVER, CLOCK_MAX) == CLOCK_MAX


def test_a_level_is_told_to_clients_of_the_service() -> None:
    deliveries = tuple(read([Commit(1, ONE, (5, 6)), Commit(2, TWO, (3,))]))
    told = Checkpoint(frontier=EMPTY, deliveries=deliveries)
    assembly = wire.CheckpointAssembly()
    heard = [assembly.add(part) for part in wire.checkpoint_parts(1, told)][-1]
    assert heard is not None
    assert [each.level for each in heard.deliveries] == [each.level for each in deliveries]
    assert heard.deliveries[1].level > NEVER
