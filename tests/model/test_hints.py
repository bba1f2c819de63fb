"""Causal hints: what the ACKs of a transaction say, and what a reader makes of it."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import Clock, Producer
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.hints import (
    Ack,
    Commit,
    Hint,
    HintIndex,
    HintTarget,
    MalformedHints,
    decode_hints,
    encode_hints,
    hint_frontier,
    write_acks,
)
from penstock.model.producer_frontier import ProducerFrontier
from penstock.testing.strategies_frontier import transactions

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
        read = decode_hints(first.commit, encode_hints(first))
        assert read == first
        assert sorted([read.commit, *read.hints]) == sorted(transaction)
        assert not any(ack.hints for ack in rest)
        assert all(first.commit.producer < ack.commit.producer for ack in rest)


def test_a_journal_is_committed_once_by_a_producer() -> None:
    with pytest.raises(ValueError, match="twice"):
        write_acks([commit("A", P1, 100), commit("A", P1, 101)])


def test_hints_leave_out_what_the_ack_says() -> None:
    ack = Ack(
        commit=commit("A", P1, 100),
        hints=(commit("B", P1, 100), commit("C", P1, 101), commit("D", P2, 100)),
    )
    assert encode_hints(ack) == [
        {"j": "B"},
        {"j": "C", "p": "010000000001", "c": "0000000000000065"},
        {"j": "D", "p": "010000000002", "c": "0000000000000064"},
    ]


@pytest.mark.parametrize(
    "encoded",
    [
        pytest.param({}, id="not a list"),
        pytest.param(["B"], id="not an object"),
        pytest.param([{}], id="no journal"),
        pytest.param([{"j": ""}], id="empty journal"),
        pytest.param([{"j": 7}], id="a number for a journal"),
        pytest.param([{"j": "B", "p": "010000000001"}], id="a producer alone"),
        pytest.param([{"j": "B", "c": "0000000000000065"}], id="a clock alone"),
        pytest.param([{"j": "B", "x": 1}], id="an unknown member"),
        pytest.param([{"j": "B", "p": "01000000000g", "c": "0" * 15 + "5"}], id="bad producer"),
        pytest.param([{"j": "B", "p": "000000000001", "c": "0" * 15 + "5"}], id="no multicast"),
        pytest.param([{"j": "B", "p": "010000000001", "c": "65"}], id="short clock"),
        pytest.param([{"j": "B", "p": "010000000001", "c": "0" * 15 + "x"}], id="bad clock"),
        pytest.param([{"j": "B", "p": "010000000001", "c": "0" * 15 + "F"}], id="upper case"),
        pytest.param([{"j": "B", "p": "010000000001", "c": "0" * 16}], id="clock zero"),
        pytest.param([{"j": "B", "p": "010000000001", "c": "f" * 16}], id="clock too large"),
        pytest.param([{"j": "B", "p": None, "c": None}], id="nulls"),
    ],
)
def test_malformed_hints_are_refused_and_name_the_journal(encoded: object) -> None:
    with pytest.raises(MalformedHints) as caught:
        decode_hints(commit("acme/a", P1, 100), encoded)
    assert "journal acme/a" in str(caught.value.where)


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


def test_the_latest_hint_of_each_entry_counts() -> None:
    def hint(journal: str, binding: int, producer: Producer, clock: int) -> Hint:
        return Hint(journal=journal, binding=binding, producer=producer, clock=Clock(clock))

    def waiting(producer: Producer, clock: int) -> ProducerFrontier:
        return ProducerFrontier(producer=producer, last_commit=Clock(0), hinted_commit=Clock(clock))

    hints = [
        hint("B", 0, P2, 100),
        hint("A", 1, P1, 7),
        hint("B", 0, P1, 200),
        hint("B", 0, P1, 100),
    ]
    assert hint_frontier(hints) == Frontier.of(
        [
            JournalFrontier(journal="A", binding=1, producers=(waiting(P1, 7),)),
            JournalFrontier(journal="B", binding=0, producers=(waiting(P1, 200), waiting(P2, 100))),
        ]
    )


def test_a_hint_keeps_its_place_between_bindings_that_were_read() -> None:
    read = ProducerFrontier(producer=P1, last_commit=Clock(9), offset=-1)
    delta = Frontier.gather(
        [
            JournalFrontier(journal="J", binding=2, producers=(read,)),
            JournalFrontier(journal="J", binding=0, producers=(read,)),
        ]
    ).reduce(hint_frontier([Hint(journal="J", binding=1, producer=P1, clock=Clock(9))]))
    assert [journal.binding for journal in delta] == [0, 1, 2]
    assert delta.unresolved_hints == 1
