"""Deliveries wait for the checkpoint that covers their commit, and are handed out once."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.errors import Bug
from penstock.journal.committed import VisibleRows
from penstock.journal.state import Blob, Fragment
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.producer_frontier import ProducerFrontier
from penstock.model.runs import Run
from penstock.shuffle.delivery import Checkpoint, Delivery, Outbox

P1, P2 = (Producer(Producer.MULTICAST | n) for n in (1, 2))
JOURNALS = ("A", "B")


def visible(
    producer: Producer, first: int, last: int, *, clock_gt: int = 0, rows: int = 0
) -> VisibleRows:
    """Rows of one run, of these clocks; by default one of each."""
    count = rows or last - first + 1
    run = Run(
        producer=producer,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=count - 1,
        rows=count,
        clock_min=Clock(first),
        clock_max=Clock(last),
        clock_max_offset=count - 1,
        increasing=True,
    )
    fragment = Fragment(
        rows=count,
        bytes=10 * count,
        at=Blob(path="x"),
        schema="s",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=1,
    )
    return VisibleRows(fragment=fragment, run=run, clock_gt=Clock(clock_gt))


def delivery(
    journal: str, producer: Producer, commit: int, *rows: VisibleRows, binding: int = 0
) -> Delivery:
    return Delivery(
        journal=journal,
        binding=binding,
        producer=producer,
        commit=Clock(commit),
        rows=rows,
        bytes=sum(each.fragment.bytes for each in rows),
    )


def span(journal: str, producer: Producer, first: int, commit: int, **more: int) -> Delivery:
    return delivery(journal, producer, commit, visible(producer, first, commit - 1), **more)


def frontier(*commits: tuple[str, Producer, int], binding: int = 0, hint: int = 0) -> Frontier:
    return Frontier.gather(
        JournalFrontier(
            journal=journal,
            binding=binding,
            producers=tuple(
                ProducerFrontier(
                    producer=producer, last_commit=Clock(commit), hinted_commit=Clock(hint)
                )
                for name, producer, commit in commits
                if name == journal
            ),
        )
        for journal in JOURNALS
    )


def outbox(*deliveries: Delivery) -> Outbox:
    box = Outbox()
    box.put(deliveries)
    return box


FIRST, SECOND = span("A", P1, 10, 20), span("A", P1, 21, 30)
OTHER_PRODUCER, OTHER_JOURNAL = span("A", P2, 10, 20), span("B", P1, 10, 20)
OTHER_BINDING = span("A", P1, 10, 20, binding=1)
ALL = (OTHER_JOURNAL, FIRST, SECOND, OTHER_PRODUCER, OTHER_BINDING)


@pytest.mark.parametrize(
    ("covers", "taken"),
    [
        pytest.param(EMPTY, (), id="nothing"),
        pytest.param(frontier(("A", P1, 9)), (), id="a commit before all of them"),
        pytest.param(frontier(("A", P1, 1)), (), id="a span that is open"),
        pytest.param(frontier(("A", P1, 20)), (FIRST,), id="exactly a commit"),
        pytest.param(frontier(("A", P1, 30)), (FIRST, SECOND), id="two commits of a producer"),
        pytest.param(frontier(("A", P1, 99)), (FIRST, SECOND), id="a commit without rows"),
        pytest.param(frontier(("A", P2, 20)), (OTHER_PRODUCER,), id="one of two producers"),
        pytest.param(frontier(("A", P1, 20), binding=1), (OTHER_BINDING,), id="one binding"),
        pytest.param(frontier(("A", P1, 0), hint=30), (), id="a hint is no commit"),
        pytest.param(
            frontier(("B", P1, 20), ("A", P2, 20), ("A", P1, 20)),
            (FIRST, OTHER_PRODUCER, OTHER_JOURNAL),
            id="several, in the order of the frontier",
        ),
        pytest.param(frontier(("B", P2, 99)), (), id="somebody unknown"),
    ],
)
def test_a_frontier_takes_what_its_commits_cover(
    covers: Frontier, taken: tuple[Delivery, ...]
) -> None:
    box = outbox(*ALL)
    assert box.take(covers) == taken
    assert box.bytes == sum(each.bytes for each in ALL if each not in taken)
    assert box.take(covers) == (), "it is handed out once"


def test_what_comes_later_follows_what_was_taken() -> None:
    box = outbox(FIRST)
    assert box.take(frontier(("A", P1, 20))) == (FIRST,)
    assert box.bytes == 0
    box.put([SECOND])
    assert box.take(frontier(("A", P1, 20))) == ()
    assert box.take(frontier(("A", P1, 30))) == (SECOND,)


@pytest.mark.parametrize("last_commit", [10, 15, 19])
def test_a_checkpoint_that_ends_within_a_delivery_is_a_bug(last_commit: int) -> None:
    with pytest.raises(Bug, match="ends within what was committed at 0x14") as caught:
        outbox(FIRST).take(frontier(("A", P1, last_commit)))
    assert "journal A, producer 010000000001" in str(caught.value.where)


def test_rows_that_were_seen_before_do_not_count_as_cut() -> None:
    """A run is read again from its begin, and only what is above the last commit is delivered."""
    again = delivery("A", P1, 30, visible(P1, 10, 29, clock_gt=20))
    box = outbox(again)
    assert box.take(frontier(("A", P1, 20))) == ()
    assert box.take(frontier(("A", P1, 30))) == (again,)


def test_what_comes_again_after_a_deep_rollback_is_not_cut_by_the_commit_before_it() -> None:
    again = replace(delivery("A", P1, 30, visible(P1, 16, 29, clock_gt=15)), again=True)
    box = outbox(FIRST, again)
    assert box.take(frontier(("A", P1, 20))) == (FIRST,)
    assert box.take(frontier(("A", P1, 30))) == (again,)


def test_a_delivery_has_rows() -> None:
    with pytest.raises(ValueError, match="no rows"):
        delivery("A", P1, 20)


def test_a_checkpoint_knows_its_size_and_whether_it_may_be_committed() -> None:
    taken = Checkpoint(frontier=frontier(("A", P1, 30)), deliveries=(FIRST, SECOND))
    assert (taken.documents, taken.bytes, taken.is_peek) == (19, 190, False)
    peek = Checkpoint(frontier=frontier(("A", P1, 30), hint=40), deliveries=())
    assert (peek.documents, peek.bytes, peek.is_peek) == (0, 0, True)


@st.composite
def commits(draw: st.DrawFn) -> list[Delivery]:
    """Of each producer in each journal, spans that follow each other; interleaved."""
    ordered: list[Delivery] = []
    ends: dict[tuple[str, Producer], int] = {}
    for journal, producer, gap, rows in draw(
        st.lists(
            st.tuples(
                st.sampled_from(JOURNALS),
                st.sampled_from([P1, P2]),
                st.integers(1, 2),
                st.integers(1, 3),
            ),
            max_size=12,
        )
    ):
        first = ends.get((journal, producer), 1) + gap
        ends[journal, producer] = first + rows
        ordered.append(span(journal, producer, first, first + rows))
    return ordered


def in_order(deliveries: Iterable[Delivery]) -> list[Delivery]:
    return sorted(deliveries, key=lambda one: (one.journal, one.producer, one.commit))


@given(commits(), st.data())
def test_every_delivery_is_handed_out_once_by_the_first_frontier_that_covers_it(
    deliveries: list[Delivery], data: st.DataObject
) -> None:
    box, waiting, taken = Outbox(), list(deliveries), []
    reached: dict[tuple[str, Producer], int] = {}
    while waiting:
        batch = [waiting.pop(0) for _ in range(data.draw(st.integers(1, len(waiting))))]
        box.put(batch)
        for one in data.draw(st.lists(st.sampled_from(batch), unique_by=id)):
            where = one.journal, one.producer
            reached[where] = max(reached.get(where, 0), one.commit)
        taken += box.take(frontier(*((*where, commit) for where, commit in reached.items())))
        offered = deliveries[: len(deliveries) - len(waiting)]
        assert in_order(taken) == in_order(
            one for one in offered if one.commit <= reached.get((one.journal, one.producer), 0)
        )
        assert box.bytes == sum(one.bytes for one in offered) - sum(one.bytes for one in taken)
