"""Causal hints: what the ACKs of a transaction announce, and what readers wait for."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import Clock, Producer
from penstock.model.hints import (
    Ack,
    Commit,
    Hint,
    HintIndex,
    HintTarget,
    write_acks,
)
from support.strategies_frontier import transactions

P1, P2 = (Producer(Producer.MULTICAST | n) for n in (1, 2))


def commit(journal: str, producer: Producer, clock: int) -> Commit:
    return Commit(journal, producer, Clock(clock))


def test_the_first_ack_of_each_journal_names_all_others() -> None:
    a, b, b2 = commit("A", P1, 100), commit("B", P1, 100), commit("B", P2, 101)
    assert write_acks([b2, a, b]) == (
        Ack(commit=a, hints=(b, b2)),
        Ack(commit=b, hints=(a, b2)),
        Ack(commit=b2),
    )


@given(transactions())
def test_any_first_ack_tells_the_whole_transaction(transaction: list[Commit]) -> None:
    acks = write_acks(transaction)
    assert sorted(ack.commit for ack in acks) == sorted(transaction)
    for _, group in groupby(acks, key=lambda ack: ack.commit.journal):
        first, *rest = group
        assert sorted([first.commit, *first.hints]) == sorted(transaction)
        assert not any(ack.hints for ack in rest)
        assert all(first.commit.producer < ack.commit.producer for ack in rest)


def test_a_journal_is_committed_once_by_a_producer() -> None:
    with pytest.raises(ValueError, match="twice"):
        write_acks([commit("A", P1, 100), commit("A", P1, 101)])


def everywhere(_journal: str) -> bool:
    return True


def target(binding: int, collection: str, cohort: int) -> HintTarget:
    return HintTarget(collection=collection, binding=binding, cohort=cohort)


ORDERS = HintIndex(
    [
        target(3, "acme/orders", 0),
        target(0, "acme/orders", 0),
        target(1, "acme/orders", 1),
        target(2, "acme/orders-two", 0),
    ]
)


def test_hints_stay_in_their_cohort_and_reach_its_other_bindings() -> None:
    ack = Ack(
        commit=commit("acme/orders/pivot=00", P1, 100),
        hints=(commit("acme/orders-two/pivot=00", P1, 101),),
    )
    assert list(ORDERS.extract(ack, binding=0, cohort=0, exists=everywhere)) == [
        Hint(journal="acme/orders-two/pivot=00", binding=2, producer=P1, clock=Clock(101)),
        Hint(journal="acme/orders/pivot=00", binding=3, producer=P1, clock=Clock(100)),
    ]
    assert list(ORDERS.extract(ack, binding=1, cohort=1, exists=everywhere)) == []


def test_bindings_that_share_a_journal_need_not_be_neighbours() -> None:
    index = HintIndex([target(0, "acme/a", 0), target(1, "acme/a", 1), target(2, "acme/a", 0)])
    ack = Ack(commit=commit("acme/a/pivot=00", P1, 9))
    assert [h.binding for h in index.extract(ack, binding=0, cohort=0, exists=everywhere)] == [2]
    assert [h.binding for h in index.extract(ack, binding=2, cohort=0, exists=everywhere)] == [0]
    assert [h.binding for h in index.extract(ack, binding=1, cohort=1, exists=everywhere)] == []


def test_deleted_journals_are_not_waited_for() -> None:
    ack = Ack(
        commit=commit("acme/orders/pivot=00", P1, 100),
        hints=(commit("acme/orders-two/a", P1, 100), commit("acme/orders-two/b", P1, 100)),
    )
    hints = ORDERS.extract(ack, binding=3, cohort=0, exists="acme/orders-two/b".__eq__)
    assert [(hint.journal, hint.binding) for hint in hints] == [
        ("acme/orders-two/b", 2),
        ("acme/orders/pivot=00", 0),
    ]


@pytest.mark.parametrize(
    ("journal", "want"),
    [
        ("acme/orders/pivot=00", [0, 3]),
        ("acme/orders-two/pivot=00", [2]),
        ("acme/orders", []),
        ("acme/orders-", []),
        ("acme/ordersX/pivot=00", []),
        ("aaa", []),
        ("zzz", []),
    ],
)
def test_a_journal_is_read_by_the_bindings_of_its_collection(journal: str, want: list[int]) -> None:
    assert list(ORDERS.bindings(journal, 0)) == want


def test_partition_filters_decide_by_the_rest_of_the_name() -> None:
    europe = HintTarget(
        collection="acme/orders", binding=0, cohort=0, reads="region=eu/pivot=00".__eq__
    )
    index = HintIndex([europe, target(1, "acme/orders", 0)])
    assert list(index.bindings("acme/orders/region=eu/pivot=00", 0)) == [0, 1]
    assert list(index.bindings("acme/orders/region=us/pivot=00", 0)) == [1]
    assert list(HintIndex([]).bindings("acme/orders/pivot=00", 0)) == []


names = st.lists(st.text("ab-/", min_size=1, max_size=4), min_size=1, max_size=4)


@given(names, st.text("ab-/", min_size=1, max_size=8))
def test_the_index_finds_what_a_look_at_every_binding_finds(
    collections: list[str], journal: str
) -> None:
    targets = [target(n, name, n % 2) for n, name in enumerate(collections)]
    nested = any(a != b and b.startswith(a + "/") for a in collections for b in collections)
    if nested:
        with pytest.raises(ValueError, match="lies inside"):
            HintIndex(targets)
        return
    for cohort in (0, 1):
        assert list(HintIndex(targets).bindings(journal, cohort)) == [
            t.binding
            for t in targets
            if t.cohort == cohort and journal.startswith(t.collection + "/")
        ]
