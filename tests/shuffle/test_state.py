"""What a session decides: scenarios of the design, from journals to checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Bug
from penstock.model.clock import Clock
from penstock.model.completed import gap_floor
from penstock.model.frontier import EMPTY
from penstock.model.resume import prepare_resume
from penstock.shuffle.binding import lanes
from penstock.shuffle.checkpoint import (
    HINT_TIMEOUT_TICKS,
    Checkpoints,
    Stalled,
)
from penstock.shuffle.history import NeedPages, NeedRows
from penstock.shuffle.rounds import Round, WaitUntil
from penstock.shuffle.state import RecoveryImpossible, RoundLimits
from shuffle.scripts import (
    P1,
    P2,
    P3,
    ROW_BYTES,
    A,
    B,
    C,
    Coordinator,
    Script,
    Seen,
    bindings,
    entries_of,
    frontier,
    read_all,
    region_binding,
)


def taken(coordinator: Coordinator) -> list[Seen]:
    """What comes next, if it is whole."""
    before = len(coordinator.seen)
    checkpoint = coordinator.next()
    assert checkpoint is not None
    assert not checkpoint.is_peek
    return coordinator.seen[before:]


# -------------------------------------------------------------------------------------- reporting


def test_60_flush_not_ready_spans_alone_report_nothing() -> None:
    script = Script(A)
    script.write({A: "C10 C20"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.next() is None
    [planned] = coordinator.rounds
    assert planned.deliveries == ()
    script.write({A: "A30"})
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, A, P1, Clock(10)), Seen(0, A, P1, Clock(20))]


def test_15_first_txn_crash_is_reported_by_the_flush_of_another() -> None:
    script = Script(A, B)
    script.write({A: "C10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.next() is None
    script.write({B: "p2:O5"})
    coordinator.learn()
    checkpoint = coordinator.next()
    assert checkpoint is not None
    assert entries_of(checkpoint.frontier) == {
        (A, 0): {P1: (1, 0, 0)},
        (B, 0): {P2: (5, 0, -1)},
    }


def test_32_build_flush_frontier_leaves_silent_journals_out_and_keeps_their_bytes() -> None:
    script = Script(A, B)
    script.write({B: "O10", A: "O11"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    coordinator.drain()
    script.write({A: "O10"})  # repeats what was committed: B has no news, but grew
    script.write({B: "O20 | O30"})
    coordinator.learn()
    checkpoint = coordinator.next()
    assert checkpoint is not None
    assert [read.journal for read in checkpoint.frontier] == [B]
    script.write({A: "O40"})
    coordinator.learn()
    checkpoint = coordinator.next()
    assert checkpoint is not None
    [read] = checkpoint.frontier
    assert (read.journal, read.bytes_read_delta) == (A, 2 * ROW_BYTES)


def test_32_of_several_hints_the_latest_counts() -> None:
    script = Script(A, B)
    script.write({B: "C90 C190"})
    script.write({A: f"A100>{B} A200>{B}"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    peek = coordinator.next()
    assert peek is not None
    assert entries_of(peek.frontier)[B, 0] == {P1: (1, 200, 0)}


def test_33_same_journal_two_bindings_are_entries_in_the_order_of_bindings() -> None:
    script = Script(A, C)
    script.write({C: "C5"})
    script.write({A: f"O9 A10>{C}"})
    coordinator = Coordinator(script, bindings("a", "c", "a"))
    coordinator.learn()
    peek = coordinator.next()
    assert peek is not None
    assert [(read.journal, read.binding) for read in peek.frontier] == [(A, 0), (A, 2), (C, 1)]
    assert coordinator.clocks(A, 0) == coordinator.clocks(A, 2) == [9]


def test_61_requesting_twice_is_an_error() -> None:
    coordinator = Coordinator(Script(A), bindings("a"))
    coordinator.state.request()
    with pytest.raises(Bug):
        coordinator.state.request()


def test_61_rounds_until_something_is_committed_are_one_checkpoint() -> None:
    script = Script(A)
    coordinator = Coordinator(script, bindings("a"), limits=RoundLimits(records=1))
    for text in ("C10", "C20", "A30"):
        script.write({A: text})
    coordinator.learn()
    checkpoint = coordinator.next()
    assert len(coordinator.rounds) == 3
    assert checkpoint is not None
    assert (checkpoint.bytes, checkpoint.documents) == (2 * ROW_BYTES, 2)


def test_62_progress_without_hints_is_ready_at_once() -> None:
    script = Script(A)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, A, P1, Clock(10))]
    assert coordinator.next() is None


def test_nothing_is_read_that_nobody_asked_for() -> None:
    script = Script(A)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.state.advance(coordinator.now) is None
    coordinator.state.request()
    assert isinstance(coordinator.state.advance(coordinator.now), Round)
    script.write({A: "O20"})
    coordinator.learn()
    assert coordinator.state.advance(coordinator.now) is None, "there is an answer already"


# ------------------------------------------------------------------------------------------ rounds


def test_a_round_takes_whole_revisions_and_at_least_one() -> None:
    script = Script(A, B)
    script.write({A: "O10 O11 O12", B: "O20 O21 O22"})
    script.write({A: "O13"})
    script.write({B: "O23"})
    script.write({B: "O24"})
    limits = RoundLimits(bytes=2 * ROW_BYTES)
    coordinator = Coordinator(script, bindings("a"), limits=limits)
    coordinator.learn()
    coordinator.drain()
    sizes = [
        sum(delivery.bytes for delivery in planned.deliveries) // ROW_BYTES
        for planned in coordinator.rounds
    ]
    assert sizes == [6, 2, 1]
    assert [planned.revisions for planned in coordinator.rounds] == [{0: 3}, {0: 5}, {0: 6}]


def test_rows_of_a_span_count_when_its_close_is_planned() -> None:
    script = Script(A)
    for clock in (10, 20, 30):
        script.write({A: f"C{clock}"})
    script.write({A: "A40"})
    coordinator = Coordinator(script, bindings("a"), limits=RoundLimits(records=1))
    coordinator.learn()
    coordinator.read()
    sizes = [
        sum(delivery.bytes for delivery in planned.deliveries) // ROW_BYTES
        for planned in coordinator.rounds
    ]
    assert sizes == [0, 0, 0, 3]


def test_only_what_is_known_of_every_collection_is_read() -> None:
    script = Script(A, C)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a", "c"))
    coordinator.learn()
    script.write({A: f"C20 A30>{C}", C: f"C20 A30>{A}"})
    coordinator.learn("a")
    coordinator.drain()
    assert coordinator.clocks(A) == [10]
    coordinator.learn("c")
    coordinator.drain()
    assert coordinator.clocks(A) == [10, 20]
    assert coordinator.clocks(C, 1) == [20]


def test_100_initial_listing_gate() -> None:
    script = Script(A)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a", "c"))
    coordinator.learn("a")
    assert coordinator.next() is None
    assert "c" in coordinator.state.waiting_for()
    coordinator.learn("c")  # an empty listing counts
    assert taken(coordinator) == [Seen(0, A, P1, Clock(10))]


def test_99_scale_planning_looks_at_active_journals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.shuffle.history import History

    names = [f"a/pivot={at:04x}" for at in range(2_000)]
    script = Script(*names)
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.next() is None
    looked: list[str] = []
    find = History._find

    def counted(self: History, offset: int) -> object:
        looked.append(self.name)
        return find(self, offset)

    monkeypatch.setattr(History, "_find", counted)
    changed = {}
    for at in (3, 1_000, 1_999):
        script.write({names[at]: "O10"})
        changed[names[at]] = script.states[names[at]]
    coordinator.state.learn("a", script.revision, changed)
    assert coordinator.next() is not None
    assert set(looked) == set(changed)
    assert len(looked) < 30


# --------------------------------------------------------------------------- hints and transactions


def test_38_hint_absent_journal_does_not_hold_the_checkpoint() -> None:
    script = Script(A, B)
    script.write({A: "C10", B: "C11"})
    script.write({A: f"A20>{B}"})
    script.drop(B)
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, A, P1, Clock(10))]


def test_38_a_journal_that_is_dropped_while_its_commit_is_awaited_is_not_awaited() -> None:
    script = Script(A, B)
    script.write({A: "C10", B: "C11"})
    script.write({A: f"A20>{B}"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    peek = coordinator.next()
    assert peek is not None
    assert peek.is_peek
    script.drop(B)
    coordinator.learn()
    assert taken(coordinator) == []
    assert coordinator.clocks(A) == [10]


def test_38_a_commit_that_retention_removed_is_not_awaited() -> None:
    script = Script(A, B)
    script.write({A: "C10", B: "C11"})
    script.write({A: f"A20>{B}"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.next() is not None
    script.write({B: f"A20>{A}"})
    script.write({B: "p2:C30"})
    script.retain(B, 2)
    coordinator.learn()
    assert taken(coordinator) == []
    assert any(B in notice for notice in coordinator.state.take_notices())


def test_38_a_span_that_is_still_there_is_awaited_whatever_was_removed() -> None:
    script = Script(A, B)
    coordinator = Coordinator(script, bindings("a"))
    script.write({B: "p3:O4"})
    coordinator.learn()
    coordinator.drain()
    script.write({B: "p2:O5"})
    script.write({A: "C10", B: "C11"})
    script.write({A: f"A20>{B}"})
    script.retain(B, 2)
    coordinator.learn()
    peek = coordinator.next()
    assert peek is not None
    assert peek.is_peek
    assert coordinator.next() is None
    script.write({B: f"A20>{A}"})
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, B, P1, Clock(11))]


def test_38_a_session_does_not_wait_for_what_the_one_before_found_removed() -> None:
    script = Script(A, B)
    coordinator = Coordinator(script, bindings("a"))
    script.write({A: "C10", B: "C11"})
    coordinator.learn()
    coordinator.drain()
    script.write({B: f"A20>{A}"})
    script.retain(B, 2)
    script.write({B: "p2:O30"})
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, B, P2, Clock(30))]
    script.write({A: f"A20>{B}"})
    resumed = Coordinator(script, bindings("a"), resume=coordinator.frontier)
    resumed.learn()
    assert taken(resumed) == [Seen(0, A, P1, Clock(10))]


def test_38_a_journal_with_nothing_of_the_transaction_is_not_awaited() -> None:
    """Rows come before the first ACK: what is not there when that is read will not come."""
    script = Script(A, B)
    script.write({A: "C10", B: "p2:C11"})
    script.write({A: f"A20>{B}"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, A, P1, Clock(10))]


def test_45_a_gap_met_later_does_not_tear_transactions_of_other_journals() -> None:
    late = "a/pivot=c0"
    script = Script(A, B, late)
    coordinator = Coordinator(script, bindings("a"))
    script.write({late: "p3:O5"})
    coordinator.learn()
    coordinator.drain()
    script.write({late: "p3:O6"})
    script.write({late: "p3:O7"})
    script.retain(late, 2)
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, late, P3, Clock(7))]
    script.write({A: "C10", B: "C11"})
    script.write({A: f"A20>{B}"})
    coordinator.learn()
    peek = coordinator.next()
    assert peek is not None
    assert peek.is_peek
    script.write({B: f"A20>{A}"})
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, B, P1, Clock(11))]


def test_38_what_was_not_awaited_is_not_replayed_by_a_recovery() -> None:
    script = Script(A, B)
    script.write({A: "C10", B: "C11"})
    script.write({A: f"A20>{B}"})
    crashed = Coordinator(script, bindings("a"))
    crashed.learn()
    assert crashed.next() is not None
    script.write({B: f"A20>{A}"})
    script.write({B: "p2:O30"})
    script.retain(B, 2)
    crashed.learn()
    crashed.drain()
    assert entries_of(crashed.frontier)[B, 0][P1] == (1, 0, -2)
    recovery = Coordinator(script, bindings("a"), resume=prepare_resume(EMPTY, crashed.frontier))
    assert recovery.state.recovery
    recovery.learn()
    recovery.drain()
    assert sorted(recovery.seen) == sorted(crashed.seen)


def test_45_gap_floor_at_the_start_discharges_hints() -> None:
    script = Script(A, B)
    script.write({A: "C10", B: "C11 p2:C12"})
    script.write({B: f"A20>{A}"})
    script.write({B: "p3:O40"})
    script.retain(B, 3)
    script.write({A: f"A20>{B}"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    checkpoint = coordinator.next()
    assert checkpoint is not None
    assert not checkpoint.is_peek
    assert checkpoint.frontier.gap_floors == {0: gap_floor(Clock(40))}
    assert coordinator.clocks(A) == [10]


def test_89_closure_counter_example_tears_without_revisions() -> None:
    """Why cuts are what they are: hints alone do not keep these two transactions whole."""
    checkpoints = Checkpoints(lanes(bindings("a")), EMPTY)
    first, second, third = (f"a/pivot={at}" for at in range(3))
    checkpoints.on_progressed(
        0, frontier({(second, 0): {P1: (165, 0, -3)}, (third, 0): {P1: (0, 165, 0)}})
    )
    checkpoints.on_progressed(
        0, frontier({(third, 0): {P1: (165, 0, -9)}, (first, 0): {P1: (0, 150, 0)}})
    )
    checkpoints.request()
    torn = checkpoints.answer()
    assert torn is not None
    assert torn.unresolved_hints == 0
    assert entries_of(torn) == {(second, 0): {P1: (165, 0, -3)}, (third, 0): {P1: (165, 165, 0)}}


def test_89_closure_by_revision_never_tears_the_counter_example() -> None:
    """P commits T1 in A and C, then T2 in B and C; each ACK under a revision of its own."""
    script = Script(A, B, C)
    script.write({A: "C150", C: "C151"})
    script.write({A: f"A155>{C}"})
    script.write({C: f"A155>{A}"})
    script.write({B: "C160", C: "C161"})
    script.write({B: f"A165>{C}"})
    script.write({C: f"A165>{B}"})
    for records in range(1, 7):
        limits = RoundLimits(records=records)
        coordinator = Coordinator(script, bindings("a", "c"), limits=limits)
        coordinator.learn()
        for checkpoint in iter(coordinator.next, None):
            if not checkpoint.is_peek:
                seen = {each.clock for each in coordinator.seen}
                assert seen in ({150, 151}, {150, 151, 160, 161})
        assert len(coordinator.seen) == 4


_TRANSACTIONS = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.sets(st.sampled_from((A, B, C)), min_size=1),
        st.integers(0, 50),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(_TRANSACTIONS, st.integers(1, 6))
def test_88_revision_cut_shows_no_part_of_a_transaction(
    transactions: list[tuple[int, set[str], int, bool]], records: int
) -> None:
    """Writers with skewed clocks, ACKs that are not atomic, rounds of any size."""
    script = Script(A, B, C)
    skew = {1: 0, 2: 1_000}
    whole: list[set[int]] = []
    for at, (who, journals, jitter, atomic) in enumerate(transactions):
        clock = 100 * (at + 1) + skew[who] + jitter
        names = sorted(journals)
        docs = {name: clock + n for n, name in enumerate(names)}
        whole.append(set(docs.values()))
        script.write({name: f"p{who}:C{doc}" for name, doc in docs.items()})
        ack = clock + 10
        acks = {
            name: f"p{who}:A{ack}" + "".join(f">{other}" for other in names if other != name)
            for name in names
        }
        for part in [acks] if atomic else [{name: text} for name, text in acks.items()]:
            script.write(part)
    coordinator = Coordinator(script, bindings("a", "c"), limits=RoundLimits(records=records))
    coordinator.learn()
    for checkpoint in iter(coordinator.next, None):
        if not checkpoint.is_peek:
            seen = {each.clock for each in coordinator.seen}
            for docs_of_one in whole:
                assert docs_of_one <= seen or not docs_of_one & seen
    assert {each.clock for each in coordinator.seen} == set().union(*whole)
    assert len(coordinator.seen) == len({(s.journal, s.clock) for s in coordinator.seen})


def test_17_deep_rollback_within_a_round_delivers_what_was_committed_before_it() -> None:
    script = Script(A)
    script.write({A: "O10 | C20 A30 C40 A10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    coordinator.drain()
    assert coordinator.clocks() == [10, 20]
    assert entries_of(coordinator.frontier) == {(A, 0): {P1: (30, 0, -5)}}
    [notice] = coordinator.state.take_notices()
    assert "lost its write-ahead log" in notice


def test_17_deep_rollback_while_a_checkpoint_waits_does_not_cut_it() -> None:
    """What is written again has clocks below a commit that peeks have shown before."""
    script = Script(A, B, C)
    script.write({A: "O10 | C20 A30", B: "p2:C9", C: "p2:C8"})
    script.write({A: f"p2:A15>{B}>{C}"})
    coordinator = Coordinator(script, bindings("a", "c"))
    coordinator.learn()
    assert coordinator.next() is not None
    script.write({A: "C40 A10 C25 C45 A50"})
    coordinator.learn()
    assert coordinator.next() is None
    script.write({B: f"p2:A15>{A}>{C}"})
    coordinator.learn()
    peek = coordinator.next()
    assert peek is not None
    assert peek.is_peek
    assert coordinator.clocks(A) == [10, 20]
    script.write({C: f"p2:A15>{A}>{B}"})
    coordinator.learn()
    coordinator.drain()
    assert coordinator.clocks(A) == [10, 20, 25, 45]


# ------------------------------------------------------------------------------------------- lanes


def test_69_lanes_a_peek_has_what_other_lanes_have_ready() -> None:
    script = Script(A, C, "d/pivot=00")
    both = bindings("a", "c", "d", priority=(1, 0, 0))
    coordinator = Coordinator(script, both)
    script.write({"d/pivot=00": "C9"})
    script.write({C: "O8 A10>d/pivot=00"})
    coordinator.learn()
    first = coordinator.next()
    assert first is not None
    assert first.is_peek
    assert {read.journal for read in first.frontier} == {C, "d/pivot=00"}
    script.write({A: "O20"})
    coordinator.learn()
    second = coordinator.next()
    assert second is not None
    assert second.is_peek
    assert {read.journal for read in second.frontier} == {A, C, "d/pivot=00"}
    script.write({"d/pivot=00": f"A10>{C}"})
    coordinator.learn()
    third = coordinator.next()
    assert third is not None
    assert not third.is_peek
    assert sorted(seen.clock for seen in coordinator.seen) == [8, 9, 20]


def test_69_a_lane_that_waits_does_not_keep_others_from_being_read() -> None:
    script = Script(A, B, C)
    script.write({B: "C9"})
    script.write({A: f"A10>{B}"})
    script.write({C: "p2:O20"})
    coordinator = Coordinator(script, bindings("a", "c", priority=(1, 0)))
    coordinator.learn()
    hinted, both = coordinator.next(), coordinator.next()
    assert hinted is not None
    assert both is not None
    assert (hinted.is_peek, both.is_peek) == (True, True)
    assert coordinator.seen == [Seen(1, C, P2, Clock(20))]


@pytest.mark.parametrize(
    ("texts", "priority", "delay", "want"),
    [
        pytest.param(("O90", "O95"), (1, 0), (20, 0), [95], id="hi is not due, and does not hold"),
        pytest.param(("O99", "O10"), (1, 0), (0, 0), [99, 10], id="hi is due, and goes first"),
        pytest.param(("O30", "O20"), (0, 0), (0, 15), [30, 20], id="one lane: level by adj_clock"),
        pytest.param(("O30", "O20"), (0, 0), (0, 5), [20, 30], id="one lane: the delay is short"),
    ],
)
def test_83_order_due(
    texts: tuple[str, str], priority: Sequence[int], delay: Sequence[int], want: list[int]
) -> None:
    script = Script(A, C)
    script.write({A: texts[0]})
    script.write({C: texts[1]})
    coordinator = Coordinator(
        script,
        bindings("a", "c", priority=priority, read_delay=delay),
        limits=RoundLimits(records=1),
        now=Clock(100),
    )
    coordinator.learn()
    coordinator.drain()
    assert [seen.clock for seen in coordinator.seen] == want


def test_83_what_is_not_due_says_when_it_will_be() -> None:
    script = Script(A)
    script.write({A: "O90 O95"})
    script.write({A: "O99"})
    coordinator = Coordinator(script, bindings("a", read_delay=(20,)), now=Clock(100))
    coordinator.learn()
    coordinator.state.request()
    assert coordinator.state.advance(Clock(114)) == WaitUntil(clock=Clock(115))
    assert "not due" in coordinator.state.waiting_for()
    planned = coordinator.state.advance(Clock(115))
    assert isinstance(planned, Round)
    assert planned.revisions == {0: 2}


def test_83_without_a_delay_a_clock_ahead_of_time_is_due() -> None:
    script = Script(A)
    script.write({A: "O1000"})
    coordinator = Coordinator(script, bindings("a"), now=Clock(100))
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, A, P1, Clock(1000))]


# ---------------------------------------------------------------------------------------- recovery


def test_70_recovery_exact_then_silence() -> None:
    script = Script(A, B, C)
    script.write({A: "C40 A50 C60", B: "C61", C: "p9:O70"})
    first = read_all(script, "a", "c")
    script.write({A: f"A100>{B}", B: f"A100>{A}"})
    committed = first.frontier
    crashed = Coordinator(script, bindings("a", "c"), resume=committed)
    crashed.learn()
    checkpoint = crashed.next()
    assert checkpoint is not None
    resume = prepare_resume(committed, checkpoint.frontier)
    assert resume.unresolved_hints == 2
    script.write({A: "C110 A140", C: "p9:O80"})
    recovery = Coordinator(script, bindings("a", "c"), resume=resume)
    assert recovery.state.recovery
    recovery.learn()
    again = recovery.next()
    assert again is not None
    if again.is_peek:
        again = recovery.next()
        assert again is not None
    assert not again.is_peek
    assert recovery.seen == crashed.seen
    assert entries_of(again.frontier) == {
        (A, 0): {P1: (100, 100, -4)},
        (B, 0): {P1: (100, 100, -2)},
    }
    assert recovery.next() is None
    assert "done" in recovery.state.waiting_for()


def test_71_recovery_parks_at_the_close_that_resolves_its_last_hint() -> None:
    script = Script(A)
    script.write({A: "O10 | O20"})
    script.write({A: "O30"})
    resume = frontier({(A, 0): {P1: (0, 20, 0)}})
    recovery = Coordinator(script, bindings("a"), resume=resume)
    recovery.learn()
    recovery.drain()
    assert recovery.clocks() == [10, 20]
    [planned] = recovery.rounds
    assert [delivery.commit for delivery in planned.deliveries] == [10, 20]


def test_71_recovery_parks_again_when_its_round_is_planned_anew() -> None:
    """The round has read all of A when it needs a page of B, and comes to nothing."""
    script = Script(A, B)
    script.write({A: "O10 | O20"})
    script.write({B: "O10"})
    script.seal(B, 1)
    resume = frontier({(A, 0): {P1: (0, 10, 0)}, (B, 0): {P1: (0, 10, 0)}})
    recovery = Coordinator(script, bindings("a"), resume=resume)
    recovery.learn()
    recovery.drain()
    assert [type(need) for need in recovery.needs] == [NeedPages]
    assert (recovery.clocks(A), recovery.clocks(B)) == ([10], [10])


def test_72_recovery_ledger_keeps_the_hint_that_only_its_journal_resolves() -> None:
    script = Script(A, B)
    script.write({A: "O500", B: "O100 | O300"})
    resume = frontier({(A, 0): {P1: (500, 0, -1)}, (B, 0): {P1: (100, 300, -1)}})
    recovery = Coordinator(script, bindings("a"), resume=resume)
    recovery.learn()
    checkpoints = recovery.drain()
    assert recovery.seen == [Seen(0, B, P1, Clock(300))]
    assert entries_of(checkpoints[-1].frontier) == {(B, 0): {P1: (300, 300, -2)}}


def test_73_recovery_missing_journal_is_told_at_once() -> None:
    script = Script(A)
    resume = frontier({(B, 0): {P1: (0, 300, 0)}})
    recovery = Coordinator(script, bindings("a"), resume=resume)
    with pytest.raises(RecoveryImpossible, match="gone"):
        recovery.learn()


def test_73_recovery_journal_that_goes_missing_is_told_at_once() -> None:
    script = Script(A, B)
    script.write({B: "O10"})
    resume = frontier({(B, 0): {P1: (0, 300, 0)}})
    recovery = Coordinator(script, bindings("a"), resume=resume)
    recovery.learn()
    peek = recovery.next()
    assert peek is not None
    assert peek.is_peek
    script.drop(B)
    with pytest.raises(RecoveryImpossible):
        recovery.learn()


def test_73_recovery_of_removed_content_is_told_at_once() -> None:
    script = Script(B)
    script.write({B: "O10"})
    script.retain(B, 1)
    recovery = Coordinator(script, bindings("a"), resume=frontier({(B, 0): {P1: (0, 10, 0)}}))
    with pytest.raises(RecoveryImpossible):
        recovery.learn()


def test_recovery_leaves_journals_that_appear_for_the_next_session() -> None:
    script = Script(A)
    script.write({A: "O10"})
    recovery = Coordinator(script, bindings("a"), resume=frontier({(A, 0): {P1: (0, 10, 0)}}))
    recovery.learn()
    script.create(B)
    script.write({B: "O11"})
    recovery.learn()
    recovery.drain()
    assert recovery.seen == [Seen(0, A, P1, Clock(10))]


# ----------------------------------------------------------------------------- journals come and go


def test_57_a_listing_entry_without_a_name_is_an_error() -> None:
    script = Script(A)
    coordinator = Coordinator(script, bindings("a"))
    with pytest.raises(Bug, match="no name"):
        coordinator.state.learn("a", 1, {"": script.states[A]})


def test_57_a_collection_that_nobody_reads_or_that_goes_back_is_an_error() -> None:
    coordinator = Coordinator(Script(A), bindings("a"))
    with pytest.raises(Bug):
        coordinator.state.learn("b", 1, {})
    coordinator.state.learn("a", 5, {})
    with pytest.raises(Bug):
        coordinator.state.learn("a", 4, {})


def test_58_start_read_twice_the_second_has_no_checkpoint() -> None:
    script = Script(A)
    script.write({A: "O10 O20"})
    coordinator = Coordinator(script, bindings("a"), resume=frontier({(A, 0): {P1: (10, 0, -1)}}))
    coordinator.learn()
    coordinator.drain()
    assert coordinator.clocks() == [20]
    script.drop(A)
    script.create(A)
    script.write({A: "O15"})  # below what P1 has committed to the journal that was dropped
    coordinator.learn()
    coordinator.drain()
    assert coordinator.clocks() == [20, 15]
    assert any("created again" in notice for notice in coordinator.state.take_notices())


def test_78_journal_not_found_ends_its_read_and_no_other() -> None:
    script = Script(A, B)
    script.write({A: "O10 | C12", B: "C11"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    coordinator.drain()
    script.write({A: "O9"})
    script.drop(A)
    script.write({B: "A20"})
    coordinator.learn()
    coordinator.drain()
    assert coordinator.clocks(A) == [10]
    assert coordinator.clocks(B) == [11]
    assert any("dropped" in notice for notice in coordinator.state.take_notices())


def test_78_progress_of_a_journal_that_was_dropped_is_still_reported() -> None:
    script = Script(A, B)
    script.write({A: "C10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.next() is None
    script.drop(A)
    script.write({B: "p2:O20"})
    coordinator.learn()
    checkpoint = coordinator.next()
    assert checkpoint is not None
    assert entries_of(checkpoint.frontier)[A, 0] == {P1: (1, 0, 0)}


def test_78_progress_of_both_generations_is_one_entry() -> None:
    script = Script(A)
    script.write({A: "C10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.next() is None
    script.drop(A)
    script.create(A)
    script.write({A: "p2:O20 p3:C30"})
    coordinator.learn()
    checkpoint = coordinator.next()
    assert checkpoint is not None
    assert entries_of(checkpoint.frontier) == {
        (A, 0): {P1: (1, 0, 0), P2: (20, 0, -2), P3: (1, 0, 2)}
    }


def test_78_what_was_read_of_a_journal_that_is_dropped_since_is_handed_out() -> None:
    script = Script(A)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    coordinator.state.request()
    assert isinstance(coordinator.state.advance(coordinator.now), Round)
    script.drop(A)
    coordinator.learn()
    checkpoint = coordinator.state.answer()
    assert checkpoint is not None
    assert checkpoint.documents == 1


def test_80_head_behind_checkpoint_waits() -> None:
    script = Script(A)
    script.write({A: "O10 O20"})
    resume = frontier({(A, 0): {P1: (30, 0, -3), P2: (5, 0, -1)}})
    coordinator = Coordinator(script, bindings("a"), resume=resume)
    coordinator.learn()
    assert coordinator.next() is None
    assert "ends at offset 2" in coordinator.state.waiting_for()
    script.write({A: "O30"})
    coordinator.learn()
    assert coordinator.next() is None
    script.write({A: "p2:O40"})
    coordinator.learn()
    checkpoint = coordinator.next()
    assert checkpoint is not None
    assert checkpoint.documents == 1
    [read] = checkpoint.frontier
    assert (read.bytes_read_delta, read.bytes_behind_delta) == (ROW_BYTES, 0)


def test_truncated_below_the_position_is_told_and_passed_over() -> None:
    script = Script(A)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    coordinator.drain()
    script.write({A: "O20"})
    script.write({A: "O30"})
    script.retain(A, 2)
    coordinator.learn()
    coordinator.drain()
    assert coordinator.clocks() == [10, 30]
    [notice] = coordinator.state.take_notices()
    assert "1 to 2 were removed" in notice


def test_a_binding_reads_the_partitions_that_it_selects() -> None:
    eu, us = "r/region=eu/pivot=00", "r/region=us/pivot=00"
    script = Script(eu, us)
    script.write({eu: "O10", us: "O11"})
    coordinator = Coordinator(script, [region_binding("eu")])
    coordinator.learn()
    coordinator.drain()
    assert [seen.journal for seen in coordinator.seen] == [eu]


# ------------------------------------------------------------------------------ pages and lookups


def test_pages_are_asked_for_one_by_one_as_they_are_reached() -> None:
    script = Script(A)
    for clock in (10, 20, 30, 40):
        script.write({A: f"O{clock}"})
    script.seal(A, 2)
    script.seal(A, 1)
    coordinator = Coordinator(script, bindings("a"), limits=RoundLimits(records=1))
    coordinator.learn()
    assert taken(coordinator) == [Seen(0, A, P1, Clock(10))]
    assert len(coordinator.needs) == 1
    coordinator.drain()
    assert coordinator.clocks() == [10, 20, 30, 40]
    assert [type(need) for need in coordinator.needs] == [NeedPages, NeedPages]


@pytest.mark.parametrize(("journals", "asked"), [((A,), [2]), ((A, B), [1, 1, 1, 1])])
def test_pages_of_a_round_are_asked_for_at_once_as_far_as_others_leave_room(
    journals: tuple[str, ...], asked: list[int]
) -> None:
    """Planning begins again with every answer: a page at a time would take squared time."""
    script = Script(*journals)
    for clock in (10, 20, 30, 40):
        script.write(dict.fromkeys(journals, f"O{clock}"))
    for journal in journals:
        script.seal(journal, 2)
        script.seal(journal, 2)
    limits = RoundLimits(records=4 * len(journals) - (len(journals) > 1))
    coordinator = Coordinator(script, bindings("a"), limits=limits)
    coordinator.learn()
    coordinator.drain()
    assert [len(need.pages) for need in coordinator.needs if isinstance(need, NeedPages)] == asked
    for journal in journals:
        assert coordinator.clocks(journal) == [10, 20, 30, 40]


def test_pages_below_the_checkpoint_are_never_asked_for() -> None:
    script = Script(A)
    for clock in (10, 20, 30):
        script.write({A: f"O{clock}"})
    script.seal(A, 2)
    coordinator = read_all(script, resume=frontier({(A, 0): {P1: (20, 0, -2)}}))
    assert coordinator.clocks() == [30]
    assert coordinator.needs == []


def test_records_that_are_sealed_before_they_are_read_stay_at_hand() -> None:
    script = Script(A)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    script.write({A: "O20"})
    coordinator.learn()
    script.seal(A, 2)
    coordinator.learn()
    coordinator.drain()
    assert coordinator.clocks() == [10, 20]
    assert coordinator.needs == []


def test_resuming_within_a_page_reads_on_from_there() -> None:
    script = Script(A, B)
    for clock in (10, 20, 30):
        script.write({A: f"O{clock}"})
        script.write({B: f"p2:O{clock}"})
    script.seal(A, 3)
    coordinator = read_all(script, resume=frontier({(A, 0): {P1: (20, 0, -2)}}))
    assert coordinator.clocks(A) == [30]
    assert coordinator.clocks(B) == [10, 20, 30]


def test_wrong_answers_are_refused() -> None:
    script = Script(A)
    script.write({A: "O10"})
    script.seal(A, 1)
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    coordinator.state.request()
    need = coordinator.state.advance(coordinator.now)
    assert isinstance(need, NeedPages)
    with pytest.raises(Bug):
        coordinator.state.supply(need, 3)
    with pytest.raises(Bug):
        coordinator.state.supply(need, [])


def test_rows_are_looked_up_where_only_they_tell() -> None:
    script = Script(A)
    script.write({A: "C10 A10"})
    script.write({A: "C10 C20"})
    script.write({A: "p2:O5"})
    coordinator = read_all(script)
    assert [type(need) for need in coordinator.needs] == [NeedRows]
    assert entries_of(coordinator.frontier)[A, 0][P1] == (10, 0, 3)


# ----------------------------------------------------------------------------------------- waiting


def test_77_a_lane_that_is_waited_for_goes_before_one_of_higher_priority() -> None:
    script = Script(A, C, "d/pivot=00")
    script.write({C: "C8", "d/pivot=00": "C9"})
    script.write({C: "A10>d/pivot=00"})
    script.write({"d/pivot=00": f"A10>{C}"})
    limits = RoundLimits(records=1)
    coordinator = Coordinator(script, bindings("a", "c", "d", priority=(1, 0, 0)), limits=limits)
    coordinator.learn()
    peek = coordinator.next()
    assert peek is not None
    assert peek.is_peek
    for clock in range(20, 30):
        script.write({A: f"p2:O{clock}"})
    coordinator.learn()
    assert {seen.clock for seen in taken(coordinator)} == {9}


def test_74_hints_that_never_come_end_the_session() -> None:
    script = Script(A, B)
    script.write({B: "C9"})
    script.write({A: f"O8 A10>{B}"})
    coordinator = Coordinator(script, bindings("a"))
    coordinator.learn()
    assert coordinator.next() is not None
    assert coordinator.next() is None
    assert B in coordinator.state.waiting_for()
    warnings = [coordinator.state.tick() for _ in range(HINT_TIMEOUT_TICKS - 1)]
    assert warnings[0] == []
    assert all(warnings[1:])
    with pytest.raises(Stalled):
        coordinator.state.tick()


def test_settled_through_tells_what_was_handed_out() -> None:
    script = Script(A, B)
    script.write({A: "O10"})
    coordinator = Coordinator(script, bindings("a"))
    assert coordinator.state.settled_through < 0
    coordinator.learn()
    listed = script.revision
    assert coordinator.state.settled_through == listed - 1
    coordinator.read()
    assert coordinator.state.settled_through == listed - 1, "read, and not handed out"
    coordinator.next()
    assert coordinator.state.settled_through == listed
    script.write({B: "C19"})
    script.write({A: f"A20>{B}"})
    coordinator.learn()
    coordinator.next()
    assert coordinator.state.settled_through == listed, "a peek is not the whole of it"
    script.write({B: f"A20>{A}"})
    coordinator.learn()
    coordinator.drain()
    assert coordinator.state.settled_through == script.revision


def test_a_session_without_bindings_waits() -> None:
    coordinator = Coordinator(Script(), ())
    coordinator.learn()
    assert coordinator.next() is None
    assert coordinator.state.tick() == []


def test_a_session_of_nothing_waits() -> None:
    coordinator = Coordinator(Script(), bindings("a"))
    coordinator.learn()
    assert coordinator.next() is None
    assert coordinator.state.waiting_for() == "Nothing new is committed to the 0 journals it reads."
