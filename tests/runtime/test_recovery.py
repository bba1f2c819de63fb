"""What a task's recovery log keeps, and how a session starts from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock, Producer, duration
from penstock.model.completed import STALENESS_HORIZON
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.hints import Commit
from penstock.model.producer_frontier import ProducerFrontier
from penstock.runtime.recovery import (
    EndpointCheckpoint,
    EndpointMismatch,
    Entries,
    Layout,
    MalformedLog,
    Persist,
    Recovered,
    RecoveryMachine,
    prune,
    reconcile,
)
from support.strategies_frontier import frontiers

MACHINE = RecoveryMachine()
LAYOUT = Layout({0: "orders.v0", 1: "items.v0"})
P1, P2 = Producer(0x010000000001), Producer(0x010000000002)


def position(producer: Producer, last: int, hinted: int, offset: int) -> ProducerFrontier:
    return ProducerFrontier(
        producer=producer, last_commit=Clock(last), hinted_commit=Clock(hinted), offset=offset
    )


def frontier(**reads: tuple[ProducerFrontier, ...]) -> Frontier:
    return Frontier.gather(
        JournalFrontier(journal=journal, producers=entries) for journal, entries in reads.items()
    )


def persisted(*records: Persist, layout: Layout = LAYOUT, onto: Entries | None = None) -> Entries:
    entries = MACHINE.initial() if onto is None else onto
    for record in records:
        encoded = MACHINE.encode_diff(layout.encode(record, entries))
        entries = MACHINE.apply(entries, MACHINE.decode_diff(encoded, MACHINE.format), 1)
    return MACHINE.decode_state(MACHINE.encode_state(entries), MACHINE.format, 1)


INTENTS = Intents((Commit("acme/stats/pivot=00", P1, Clock(40)),))


def test_everything_that_is_persisted_is_recovered() -> None:
    record = Persist(
        committed_close=Clock(10),
        committed_frontier=frontier(A=(position(P1, 5, 0, -3),)),
        ack_intents=INTENTS,
        hinted_close=Clock(20),
        hinted_frontier=frontier(A=(position(P1, 7, 0, -5),), B=(position(P2, 7, 7, -1),)),
        patches=({"a": 1}, {"b": None, "c": {"d": 2}}),
        max_keys={0: b"\x15\x07", 1: b"\x02a\x00"},
        last_source_clocks={"acme/orders": Clock(7)},
        last_applied=b"spec",
        trigger_params=b"{}",
        hinted_trigger_params=b"[]",
    )
    assert LAYOUT.decode(persisted(record)) == Recovered(
        committed_close=Clock(10),
        committed_frontier=frontier(A=(position(P1, 5, 0, -3),)),
        ack_intents=INTENTS,
        hinted_close=Clock(20),
        hinted_frontier=frontier(A=(position(P1, 7, 0, -5),), B=(position(P2, 7, 7, -1),)),
        connector_state={"a": 1, "c": {"d": 2}},
        max_keys={0: b"\x15\x07", 1: b"\x02a\x00"},
        last_source_clocks={"acme/orders": Clock(7)},
        last_applied=b"spec",
        trigger_params=b"{}",
        hinted_trigger_params=b"[]",
    )


def test_a_task_that_never_ran_recovers_nothing() -> None:
    assert LAYOUT.decode(MACHINE.initial()) == Recovered()


def test_a_record_without_anything_changes_nothing() -> None:
    before = persisted(Persist(committed_close=Clock(10), last_applied=b"spec"))
    assert persisted(Persist(), onto=before) == before


def test_a_hint_replaces_the_one_before_and_a_commit_adds_to_what_is_committed() -> None:
    entries = persisted(
        Persist(hinted_frontier=frontier(A=(position(P1, 5, 0, -3),))),
        Persist(committed_frontier=frontier(A=(position(P1, 5, 0, -3),))),
        Persist(hinted_frontier=frontier(B=(position(P1, 9, 0, -2),))),
        Persist(committed_frontier=frontier(B=(position(P1, 9, 0, -2),))),
    )
    recovered = LAYOUT.decode(entries)
    assert recovered.hinted_frontier == frontier(B=(position(P1, 9, 0, -2),))
    assert recovered.committed_frontier == frontier(
        A=(position(P1, 5, 0, -3),), B=(position(P1, 9, 0, -2),)
    )


def test_a_commit_that_came_from_a_hint_keeps_the_place_that_was_read_before() -> None:
    entries = persisted(
        Persist(committed_frontier=frontier(A=(position(P1, 50, 0, -30),))),
        Persist(committed_frontier=frontier(A=(position(P1, 100, 100, 0),))),
    )
    assert LAYOUT.decode(entries).committed_frontier == frontier(A=(position(P1, 100, 100, -30),))


def test_a_hint_that_was_discharged_is_not_waited_for_after_a_restart() -> None:
    entries = persisted(Persist(committed_frontier=frontier(A=(position(P1, 50, 80, -30),))))
    assert LAYOUT.decode(entries).resume.unresolved_hints == 0


@given(frontiers(), frontiers())
def test_committing_deltas_is_reducing_them(first: Frontier, second: Frontier) -> None:
    bindings = {binding: f"b{binding}" for f in (first, second) for _, binding in f.table.keys}
    layout = Layout(bindings)
    entries = persisted(
        Persist(committed_frontier=first), Persist(committed_frontier=second), layout=layout
    )
    expected = (
        first.clear_discharged_hints().reduce(second).clear_discharged_hints().without_bytes()
    )
    found = layout.decode(entries).committed_frontier
    assert list(found) == [read for read in expected if read.producers]


def test_the_greatest_key_is_kept_in_whatever_order_shards_report() -> None:
    for order in ((5, 9), (9, 5)):
        entries = persisted(*(Persist(max_keys={0: bytes([0x15, key])}) for key in order))
        assert LAYOUT.decode(entries).max_keys == {0: b"\x15\x09"}


def test_the_newest_source_clock_never_goes_back() -> None:
    entries = persisted(
        *(Persist(last_source_clocks={"c": Clock(clock)}) for clock in (20, 300, 15))
    )
    assert LAYOUT.decode(entries).last_source_clocks == {"c": 300}


def test_deletes_come_before_puts() -> None:
    entries = persisted(
        Persist(trigger_params=b"1", hinted_trigger_params=b"2"),
        Persist(
            trigger_params=b"3",
            delete_trigger_params=True,
            hinted_trigger_params=b"4",
            delete_hinted_trigger_params=True,
        ),
    )
    recovered = LAYOUT.decode(entries)
    assert (recovered.trigger_params, recovered.hinted_trigger_params) == (b"3", b"4")
    gone = LAYOUT.decode(
        persisted(
            Persist(delete_trigger_params=True, delete_hinted_trigger_params=True), onto=entries
        )
    )
    assert (gone.trigger_params, gone.hinted_trigger_params) == (None, None)


def test_positions_follow_the_state_key_and_not_the_index_of_a_binding() -> None:
    record = Persist(
        committed_frontier=frontier(A=(position(P1, 5, 0, -3),)), max_keys={0: b"\x14"}
    )
    moved = Layout({0: "items.v0", 1: "orders.v0"}).decode(persisted(record))
    assert [(read.journal, read.binding) for read in moved.committed_frontier] == [("A", 1)]
    assert moved.max_keys == {1: b"\x14"}
    backfilled = Layout({0: "orders.v1"}).decode(persisted(record))
    assert backfilled == Recovered(others_committed=True)


def test_keys_of_a_later_release_are_left_alone() -> None:
    entries = {**persisted(Persist(committed_close=Clock(3))), b"ZZ:new": b"?"}
    assert LAYOUT.decode(entries) == Recovered(committed_close=Clock(3))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(b"FC:A\0orders.v0", b"", id="key too short"),
        pytest.param(b"FC:A\0B\0orders.v0\0" + P1.packed, b"", id="stray NUL"),
        pytest.param(b"committed-close", b"1234567", id="clock of seven bytes"),
        pytest.param(b"connector-state", b"{", id="state that is not JSON"),
    ],
)
def test_what_cannot_be_read_is_refused(key: bytes, value: bytes) -> None:
    with pytest.raises(MalformedLog):
        LAYOUT.decode({key: value})


# ------------------------------------------------------------------------------- reconciliation


def recovered_at(committed: int, hinted: int, **others: bytes) -> Recovered:
    return Recovered(
        committed_close=Clock(committed),
        hinted_close=Clock(hinted),
        committed_frontier=frontier(A=(position(P1, committed, 0, -committed),)),
        hinted_frontier=frontier(A=(position(P1, hinted, 0, -hinted),)),
        trigger_params=others.get("trigger_params"),
        hinted_trigger_params=others.get("hinted_trigger_params"),
    )


@pytest.mark.parametrize(
    ("endpoint", "hinted"),
    [
        pytest.param(None, 30, id="an endpoint without a checkpoint"),
        pytest.param(20, 20, id="all of one mind"),
        pytest.param(20, 30, id="hinted, and not committed by the endpoint"),
    ],
)
def test_nothing_is_to_be_done_if_the_endpoint_is_where_the_log_is(
    endpoint: int | None, hinted: int
) -> None:
    checkpoint = None if endpoint is None else EndpointCheckpoint(close=Clock(endpoint))
    assert (
        reconcile(recovered_at(20, hinted), checkpoint, endpoint_commits=endpoint is not None)
        is None
    )


def test_an_endpoint_ahead_by_the_hinted_transaction_is_believed() -> None:
    recovered = recovered_at(20, 30, trigger_params=b"20", hinted_trigger_params=b"30")
    ahead = EndpointCheckpoint(close=Clock(30), ack_intents=INTENTS)
    record = reconcile(recovered, ahead, endpoint_commits=True)
    assert record is not None
    entries = persisted(
        Persist(
            committed_close=Clock(20),
            committed_frontier=recovered.committed_frontier,
            hinted_close=Clock(30),
            hinted_frontier=recovered.hinted_frontier,
            trigger_params=b"20",
            hinted_trigger_params=b"30",
        ),
        record,
    )
    after = LAYOUT.decode(entries)
    assert (after.committed_close, after.ack_intents) == (Clock(30), INTENTS)
    assert after.committed_frontier == recovered.hinted_frontier
    assert (after.trigger_params, after.hinted_trigger_params) == (b"30", None)
    assert after.resume.unresolved_hints == 0, "nothing is replayed"
    assert reconcile(after, ahead, endpoint_commits=True) is None


@pytest.mark.parametrize("close", [10, 25, 40])
def test_an_endpoint_at_another_transaction_is_refused(close: int) -> None:
    with pytest.raises(EndpointMismatch) as refused:
        reconcile(
            recovered_at(20, 30), EndpointCheckpoint(close=Clock(close)), endpoint_commits=True
        )
    for clock in (close, 20, 30):
        assert f"{clock:#x}" in f"{refused.value.what} {refused.value.why}"


def test_an_endpoint_that_lost_its_checkpoint_is_refused() -> None:
    with pytest.raises(EndpointMismatch, match="lost its checkpoint"):
        reconcile(recovered_at(20, 30), None, endpoint_commits=True)
    assert reconcile(Recovered(), None, endpoint_commits=True) is None, "a task that never ran"


def test_a_hinted_transaction_that_was_not_committed_is_replayed() -> None:
    assert recovered_at(20, 30).resume == frontier(A=(position(P1, 20, 30, -20),))


def of_binding(binding: int, *entries: ProducerFrontier) -> Frontier:
    return Frontier.of([JournalFrontier(journal="A", binding=binding, producers=entries)])


def both(*entries: ProducerFrontier) -> Frontier:
    return of_binding(0, *entries).reduce(of_binding(1, *entries))


IN_FLIGHT = (
    Persist(committed_close=Clock(20), committed_frontier=both(position(P1, 20, 0, -3))),
    Persist(hinted_close=Clock(30), hinted_frontier=both(position(P1, 30, 0, -6))),
)
"""Both bindings read to 30, and the record of the commit is not there."""


@pytest.mark.parametrize(
    "edited",
    [
        pytest.param(Layout({0: "orders.v0"}), id="one is disabled"),
        pytest.param(Layout({0: "items.v0", 1: "orders.v0"}), id="they are reordered"),
        pytest.param(Layout({0: "orders.v0", 1: "things.v0"}), id="one has another table"),
        pytest.param(Layout({0: "orders.v0", 1: "items.v1"}), id="one is backfilled"),
        pytest.param(Layout({0: "others.v0"}), id="none of them is left"),
    ],
)
def test_what_the_endpoint_committed_counts_for_bindings_that_are_gone_too(
    edited: Layout,
) -> None:
    ahead = EndpointCheckpoint(close=Clock(30), ack_intents=INTENTS)
    before = persisted(*IN_FLIGHT)
    record = reconcile(edited.decode(before), ahead, endpoint_commits=True)
    assert record is not None
    after = persisted(record, layout=edited, onto=before)
    assert reconcile(edited.decode(after), ahead, endpoint_commits=True) is None
    hint = Persist(hinted_close=Clock(40), hinted_frontier=EMPTY)
    again = LAYOUT.decode(persisted(hint, layout=edited, onto=after))
    assert again.committed_frontier == both(position(P1, 30, 0, -6))
    assert again.resume.unresolved_hints == 0, "nothing is read twice"


def test_what_nobody_committed_is_replayed_by_whoever_is_left_and_read_by_the_others_later() -> (
    None
):
    edited = Layout({0: "items.v0"})
    before = persisted(*IN_FLIGHT)
    in_sync = EndpointCheckpoint(close=Clock(20))
    recovered = edited.decode(before)
    assert reconcile(recovered, in_sync, endpoint_commits=True) is None
    assert recovered.resume == of_binding(0, position(P1, 20, 30, -3))
    extents = of_binding(0, position(P1, 30, 30, -6))
    again = persisted(
        Persist(hinted_close=Clock(40), hinted_frontier=extents),
        Persist(committed_close=Clock(40), committed_frontier=extents),
        layout=edited,
        onto=before,
    )
    assert LAYOUT.decode(again).resume == of_binding(0, position(P1, 20, 0, -3)).reduce(
        of_binding(1, position(P1, 30, 30, -6))
    )


def test_a_journal_that_is_not_selected_any_more_is_not_replayed() -> None:
    narrowed = Layout(LAYOUT.state_keys, reads=lambda binding, journal: binding == 1)
    assert narrowed.decode(persisted(*IN_FLIGHT)).resume == of_binding(
        0, position(P1, 20, 0, -3)
    ).reduce(of_binding(1, position(P1, 20, 30, -3)))


def test_where_a_transaction_without_commits_has_read_to_is_kept() -> None:
    """The next session says nothing of the span, unless its writer does."""
    entries = persisted(
        Persist(
            committed_close=Clock(20), committed_frontier=frontier(A=(position(P1, 20, 0, -3),))
        ),
        Persist(hinted_close=Clock(30), hinted_frontier=frontier(A=(position(P2, 1, 0, 4),))),
    )
    record = reconcile(LAYOUT.decode(entries), None, endpoint_commits=False)
    assert record is not None
    later = Persist(
        hinted_frontier=frontier(A=(position(P1, 40, 0, -9),)),
        committed_frontier=frontier(A=(position(P1, 40, 0, -9),)),
    )
    after = LAYOUT.decode(persisted(record, later, onto=entries))
    assert after.resume == frontier(A=(position(P1, 40, 0, -9), position(P2, 1, 0, 4)))
    assert reconcile(after, None, endpoint_commits=False) is None


# -------------------------------------------------------------------------------------- backfills

FILLED = Persist(
    committed_close=Clock(20),
    committed_frontier=both(position(P1, 20, 0, -3)),
    max_keys={0: b"\x15\x07", 1: b"\x15\x09"},
)


def superseded(layout: Layout, entries: Entries) -> Entries:
    return MACHINE.apply(entries, layout.supersede(entries), 1)


def test_a_raised_backfill_drops_what_is_known_of_the_table_and_of_no_other() -> None:
    entries = persisted(FILLED)
    assert LAYOUT.supersede(entries) == ()
    raised = Layout({0: "orders.v3", 1: "items.v0"})
    after = superseded(raised, entries)
    assert raised.supersede(after) == (), "once is enough"
    assert LAYOUT.decode(after).committed_frontier == of_binding(1, position(P1, 20, 0, -3))
    assert LAYOUT.decode(after).max_keys == {1: b"\x15\x09"}


@pytest.mark.parametrize("read_some", [False, True])
def test_a_backfill_counter_does_not_go_down(read_some: bool) -> None:
    raised = Layout({0: "orders.v3", 1: "items.v0"})
    entries = superseded(raised, persisted(FILLED))
    if read_some:
        entries = persisted(FILLED, layout=raised, onto=entries)
    for lowered in ("orders.v0", "orders.v2"):
        with pytest.raises(UserError, match="went down") as refused:
            Layout({0: lowered}).supersede(entries)
        assert "backfill: 4" in (refused.value.fix or "")
    Layout({0: "items.v0"}).supersede(entries)


@pytest.mark.parametrize("endpoint", [None, EndpointCheckpoint(close=Clock(7))])
def test_a_replaced_endpoint_is_accepted_once_all_its_tables_are_to_be_filled_anew(
    endpoint: EndpointCheckpoint | None,
) -> None:
    one, all_ = Layout({0: "orders.v1", 1: "items.v0"}), Layout({0: "orders.v1", 1: "items.v1"})
    entries = superseded(one, persisted(FILLED))
    for layout in (one, Layout({0: "orders.v1"})):
        with pytest.raises(EndpointMismatch):
            reconcile(layout.decode(entries), endpoint, endpoint_commits=True)
    entries = superseded(all_, entries)
    assert reconcile(all_.decode(entries), endpoint, endpoint_commits=True) is None


@given(st.integers(1, 2**63 - 1))
def test_a_checkpoint_of_an_endpoint_is_read_as_it_was_written(close: int) -> None:
    checkpoint = EndpointCheckpoint(close=Clock(close), ack_intents=INTENTS)
    assert EndpointCheckpoint.decode(checkpoint.encode()) == checkpoint


@pytest.mark.parametrize("data", [b"", b"\x93\x02\x01\xc4\x00", b"junk"])
def test_a_checkpoint_that_somebody_else_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedLog):
        EndpointCheckpoint.decode(data)


# ---------------------------------------------------------------------------------------- pruning

NEW = int(STALENESS_HORIZON) + int(duration(3600))
FAR = 1 << 31


@pytest.mark.parametrize(
    ("hinted", "forgotten"),
    [
        pytest.param(EMPTY, True, id="far behind"),
        pytest.param(frontier(A=(position(P1, 5, 0, -3),)), False, id="hinted itself"),
        pytest.param(frontier(B=(position(P1, 5, 0, -3),)), True, id="hinted in another journal"),
    ],
)
def test_a_producer_is_forgotten_unless_it_was_hinted(hinted: Frontier, forgotten: bool) -> None:
    committed = frontier(A=(position(P1, 5, 0, -3), position(P2, NEW, 0, -FAR)))
    recovered = Recovered(committed_frontier=committed, hinted_frontier=hinted)
    after = prune(recovered, byte_position=lambda _, offset: offset)
    [read] = after.committed_frontier
    assert [entry.producer for entry in read.producers] == ([P2] if forgotten else [P1, P2])
    entries = persisted(Persist(committed_frontier=committed))
    dropped = MACHINE.apply(entries, LAYOUT.forget(entries, after.committed_frontier), 2)
    assert LAYOUT.decode(dropped).committed_frontier == after.committed_frontier


def test_forgetting_leaves_positions_of_other_bindings_alone() -> None:
    entries = persisted(
        Persist(committed_frontier=frontier(A=(position(P1, 5, 0, -3),))),
        layout=Layout({0: "gone.v0"}),
    )
    assert LAYOUT.forget(entries, EMPTY) == ()


def test_nothing_is_never() -> None:
    assert Recovered().committed_close == NEVER
