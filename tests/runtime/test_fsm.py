"""The tables of the head and the tail, row by row."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace

import pytest

from penstock.errors import Bug
from penstock.model.clock import Clock
from penstock.model.frontier import Frontier
from penstock.runtime.close_policy import Band, ClosePolicy
from penstock.runtime.connector.materialize import Pattern
from penstock.runtime.machine import Done, Stopped
from penstock.runtime.materialize.messages import (
    Acknowledge,
    BindingReport,
    CallTrigger,
    Flush,
    Flushed,
    Gather,
    Gathered,
    StartCommit,
    Stored,
    TriggerCalled,
)
from penstock.runtime.materialize.task import Plan
from penstock.runtime.protocol import (
    Acknowledged,
    CloseRequested,
    Event,
    IntentsWritten,
    OutOfTurn,
    Persisted,
    Sleep,
    StartedCommit,
    StatsWritten,
    StopRequested,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.reading import Idle
from penstock.runtime.recovery import EndpointCheckpoint, Persist, Recovered
from penstock.runtime.stats import rfc3339
from runtime.leading import (
    Bench,
    a_task,
    at,
    checkpoint,
    frontier,
    intents,
    name,
    ready,
    report,
    without,
)

TRANSACTION = [
    "Flush",
    "Persist(hint)",
    "WriteStats",
    "StartCommit",
    "Persist(commit)",
    "Acknowledge",
    "WriteIntents",
]
"""Of one checkpoint, from Flush to Done, where nobody has patches and there are no triggers."""

TO_THE_COMMIT = TRANSACTION[:5]

STORED = (report(sourced=3, stored=2, clocks=(10, 20), max_key=b"k"),)
SLOW = ClosePolicy.between(10, 60)


def begun(**change: object) -> Bench:
    """A bench whose session has begun: the tail of the last one is repeated, and done."""
    bench = Bench(a_task(**change))
    assert bench.settle() == ["WriteIntents"]
    bench.actions.clear()
    return bench


# ------------------------------------------------------------------------------- whole transactions


@pytest.mark.parametrize("overlaps", [False, True], ids=["barrier", "overlap"])
def test_two_transactions_are_pipelined_and_the_second_stops_t17_t18(overlaps: bool) -> None:
    bench = begun(has_triggers=True, flush_barrier=not overlaps, policy=SLOW)
    store: list[tuple[list[Event], list[str]]] = [] if overlaps else [([Stored()], ["WriteStats"])]
    stage = "WriteStats" if overlaps else "Store"
    gather: list[tuple[list[Event], list[str]]] = [([Gathered()], ["Sleep"])] if overlaps else []

    story: list[tuple[list[Event], list[str]]] = [
        ([ready(10)], ["Sleep"]),
        ([ready(20)], ["Sleep"]),
        ([CloseRequested()], ["Flush"]),
        ([Flushed(patches=({"flushed": 0},), reports=STORED)], ["Persist(hint)"]),
        ([Persisted(1)], [stage]),
        *store,
        ([StatsWritten(intents(1))], ["StartCommit"]),
        ([StartedCommit(({"started": 0},))], ["Persist(commit)"]),
        ([ready(30)], []),
        ([Persisted(2)], ["Acknowledge", "Sleep"]),
        ([Acknowledged(({"acked": 0},))], ["Persist(ack)", "Sleep"]),
        ([Persisted(3)], ["WriteIntents", "Sleep"]),
        ([CloseRequested()], ["Gather"] if overlaps else ["Sleep"]),
        ([IntentsWritten()], ["CallTrigger"] if overlaps else ["CallTrigger", "Sleep"]),
        *gather,
        ([TriggerCalled()], ["Persist(trigger-done)", "Sleep"]),
        ([Persisted(4)], ["Flush"]),
        ([StopRequested()], []),
        ([Flushed()], ["Persist(hint)"]),
        ([Persisted(5)], [stage]),
        *store,
        ([StatsWritten(intents(2))], ["StartCommit"]),
        ([StartedCommit()], ["Persist(commit)"]),
        ([Persisted(6)], ["Stop"]),
    ]
    for events, want in story:
        assert bench.tell(*events) == want, events
    assert isinstance(bench.leader.head, Stopped)

    # Where each patch went: to one record, and to one broadcast.
    flushed, started, acked = (({what: 0},) for what in ("flushed", "started", "acked"))
    routed = [
        (name(action), action.record.patches if hasattr(action, "record") else action.patches)
        for action in bench.actions
        if hasattr(action, "record") or hasattr(action, "patches")
    ]
    assert routed == [
        ("Flush", ()),
        ("Persist(hint)", flushed),
        ("StartCommit", flushed),
        ("Persist(commit)", started),
        ("Acknowledge", started),
        ("Persist(ack)", acked),
        ("Persist(trigger-done)", ()),
        ("Flush", acked),
        ("Persist(hint)", ()),
        ("StartCommit", ()),
        ("Persist(commit)", ()),
    ]


def test_a_transaction_without_documents_runs_every_phase_t25_s4_b9() -> None:
    bench = begun(has_triggers=True, pattern=Pattern.ENDPOINT)
    assert bench.transaction(ready(10)) == TRANSACTION
    stats = bench.last(WriteStats).document
    assert stats["txnCount"] == 1
    assert stats["materialize"] == {}
    commit = bench.records("Persist(commit)")[0]
    assert commit.committed_frontier == frontier(10)
    assert commit.trigger_params is None
    assert not commit.delete_trigger_params


def test_a_transaction_that_sourced_and_stored_nothing_calls_nobody_b10() -> None:
    bench = begun(has_triggers=True)
    sourced = (report(0, sourced=5, clocks=(10, 20)), report(2, sourced=1, clocks=(5, 6)))
    assert "CallTrigger" not in bench.transaction(ready(10), reports=sourced)


def test_records_hold_what_the_design_says() -> None:
    bench = begun(has_triggers=True)
    bench.patches = {"Flush": ({"f": 1},), "StartCommit": ({"s": 1},), "Acknowledge": ({"a": 1},)}
    bench.transaction(ready(10), reports=STORED)
    close = bench.last(Flush).txn.closed
    params = bench.last(CallTrigger).params
    assert bench.records() == [
        Persist(
            hinted_close=close,
            hinted_frontier=frontier(10),
            patches=({"f": 1},),
            max_keys={0: b"k"},
            last_source_clocks={"acme/orders": Clock(20)},
            hinted_trigger_params=params,
            delete_hinted_trigger_params=True,
        ),
        Persist(
            committed_close=close,
            committed_frontier=frontier(10),
            ack_intents=bench.last(WriteIntents).intents,
            patches=({"s": 1},),
            trigger_params=params,
            delete_hinted_trigger_params=True,
        ),
        Persist(patches=({"a": 1},)),
        Persist(delete_trigger_params=True),
    ]
    checkpoint = EndpointCheckpoint(close=close, ack_intents=bench.last(WriteIntents).intents)
    assert bench.last(StartCommit).checkpoint == checkpoint


@pytest.mark.parametrize(
    ("pattern", "stored", "want"),
    [
        pytest.param(Pattern.ENDPOINT, 2, True, id="the endpoint may be ahead: durable before it"),
        pytest.param(Pattern.ENDPOINT, 0, False, id="nothing stored: no triggers"),
        pytest.param(Pattern.DIRECT, 2, False, id="the log commits: with the commit"),
    ],
)
def test_behind_a_barrier_triggers_are_known_late_and_hinted_then(
    pattern: Pattern, stored: int, *, want: bool
) -> None:
    bench = begun(has_triggers=True, pattern=pattern, flush_barrier=True)
    bench.reports = (report(sourced=3, clocks=(10, 20)),)
    bench.tell(ready(10))
    bench.settle(until="Store")
    assert bench.records("Persist(hint)")[0].hinted_trigger_params is None
    assert bench.records("Persist(hint)")[0].delete_hinted_trigger_params
    bench.drop()
    told = bench.tell(Stored(reports=(report(stored=stored), report(shard=1))))
    assert told == (["Persist(trigger-hint)"] if want else ["WriteStats"])
    bench.settle()
    commit = bench.records("Persist(commit)")[0]
    hinted = [record.hinted_trigger_params for record in bench.records("Persist(trigger-hint)")]
    assert hinted == ([commit.trigger_params] if want else [])
    assert (commit.trigger_params is not None) == (stored > 0)


def test_trigger_variables_name_what_was_stored() -> None:
    bench = begun(has_triggers=True)
    bench.transaction(
        ready(10),
        reports=(
            report(2, sourced=1, stored=1, clocks=(300, 400)),
            report(0, sourced=9, stored=2, clocks=(500, 600)),
            report(1, sourced=1, clocks=(1, 900)),
        ),
    )
    params = json.loads(bench.last(CallTrigger).params)
    assert params.pop("run_id").startswith("2023-11-14T22:13:20.")
    assert params == {
        "materialization_name": "acme/view",
        "connector_image": "penstock/materialize-fake",
        "collection_names": ["acme/orders", "acme/stock"],
        "published_at_min": "1970-01-01T00:00:00.000000048Z",
        "published_at_max": "1970-01-01T00:00:00.000000032Z",
    }


@pytest.mark.parametrize("elide", [False, True])
@pytest.mark.parametrize(
    ("change", "patches", "may_elide"),
    [
        pytest.param({}, (), True, id="staged, without patches"),
        pytest.param({}, ({"f": 1},), False, id="patches must be durable"),
        pytest.param({"flush_barrier": True}, (), False, id="barrier"),
        pytest.param({"pattern": Pattern.ENDPOINT}, (), False, id="endpoint may be ahead"),
        pytest.param({"pattern": Pattern.DIRECT}, (), False, id="direct"),
    ],
)
def test_a_hint_is_left_out_only_where_nothing_precedes_the_commit_sp12(
    change: dict[str, object], patches: tuple[dict[str, int], ...], *, may_elide: bool, elide: bool
) -> None:
    bench = begun(elide_hints=elide, **change)
    bench.patches = {"Flush": patches}
    told = bench.transaction(ready(10), reports=STORED)
    assert ("Persist(hint)" not in told) == (elide and may_elide)
    hints, commits = bench.records("Persist(hint)"), bench.records("Persist(commit)")
    with_keys = commits if elide and may_elide else hints
    assert [record.max_keys for record in with_keys] == [{0: b"k"}]
    assert [record.last_source_clocks for record in with_keys] == [{"acme/orders": Clock(20)}]
    assert sum(len(record.max_keys) for record in hints + commits) == 1


# ----------------------------------------------------------------------------------------- the head


def test_h1_a_stop_with_nothing_open_is_immediate() -> None:
    bench = begun()
    assert bench.tell(StopRequested()) == ["Stop"]
    assert isinstance(bench.leader.head, Stopped)


def test_h2_nothing_is_opened_while_stopping() -> None:
    bench = Bench()
    assert bench.tell(StopRequested(), ready(10)) == []  # the first tail is under way
    assert bench.settle() == ["WriteIntents", "Stop"]


def test_a_stop_that_drains_closes_the_open_transaction_and_finishes_its_tail() -> None:
    bench = begun(policy=SLOW)
    bench.tell(ready(10))
    bench.settle()
    bench.tell(StopRequested(drain=True), CloseRequested())
    bench.tell(ready(20))
    told = bench.settle()
    assert told.count("Persist(commit)") == 1
    assert told.index("Acknowledge") < told.index("WriteIntents") < told.index("Stop")
    commit = bench.records("Persist(commit)")[0]
    assert commit.committed_frontier == frontier(10), "what came later is for the next session"


def test_h3_a_request_to_close_without_a_transaction_is_forgotten_t22() -> None:
    bench = begun(policy=SLOW)
    assert bench.tell(CloseRequested(), ready(10)) == ["Sleep"]
    bench.now_s = 5.0
    assert bench.tell(Woken()) == ["Sleep"]
    assert bench.tell(CloseRequested()) == ["Flush"]
    assert bench.tell(CloseRequested()) == []  # after the close: for none
    bench.settle()
    assert bench.tell(ready(20)) == ["Sleep"]


def test_h4_checkpoints_are_taken_in_and_add_up() -> None:
    bench = begun(policy=SLOW)
    bench.tell(ready(10))
    bench.now_s = 1.0
    assert bench.tell(ready(20, journal="acme/orders/pivot=80")) == ["Sleep"]
    assert isinstance(bench.leader.head, Idle)
    txn = bench.leader.head.txn
    assert txn is not None
    assert txn.extents == frontier(10).reduce(frontier(20, journal="acme/orders/pivot=80"))
    assert at(0) < txn.opened < at(0.001)


def test_h4_an_idle_task_opens_however_long_it_slept_b14_cp5() -> None:
    policy = ClosePolicy(last_close_age=Band(max=at(300) - at(0)))
    bench = begun(policy=policy)
    bench.transaction(ready(10))
    bench.now_s = 600.0
    assert [*bench.tell(ready(20)), *bench.settle()] == TRANSACTION


def test_h5_the_close_clock_is_taken_when_it_closes_and_only_grows() -> None:
    bench = begun(policy=ClosePolicy.between(0, 60))
    closes = []
    for seconds in (1.0, 2.0, 2.0, 1.0, 0.0, 3.0):  # whatever the wall says
        bench.now_s = seconds
        bench.transaction(ready(10))
        closes.append(bench.last(Flush).txn.closed)
    assert closes == sorted(set(closes))
    assert closes[-1] >= at(3.0)


def test_h5_close_clocks_grow_over_sessions_and_time_goes_on_if_the_wall_went_back() -> None:
    bench = Bench(a_task(policy=SLOW), Recovered(committed_close=at(100), hinted_close=at(200)))
    bench.settle()
    bench.tell(ready(10))
    bench.settle()
    bench.now_s = 10.1
    assert bench.tell(Woken()) == ["Flush"]
    assert bench.last(Flush).txn.closed >= at(210)


def test_h6_an_open_transaction_sleeps_until_it_may_close_b35() -> None:
    bench = begun(policy=SLOW)
    bench.tell(ready(10))
    bench.settle()
    assert bench.last(Sleep).wake_after == at(10) - at(0) - (bench.leader.clock - opened(bench))
    bench.now_s = 10.1
    assert bench.tell(Woken()) == ["Flush"]


def opened(bench: Bench) -> Clock:
    assert isinstance(bench.leader.head, Idle)
    assert bench.leader.head.txn is not None
    return bench.leader.head.txn.opened


def test_h6_an_idle_leader_has_no_timer() -> None:
    bench = begun(policy=SLOW)
    assert bench.tell(Woken()) == []
    assert bench.leader.wants_more


def test_a_checkpoint_is_asked_for_only_when_the_head_can_take_it() -> None:
    bench = begun()
    assert bench.leader.wants_more
    assert bench.tell(ready(10)) == ["Flush"]
    assert not bench.leader.wants_more, "it would be old when the transaction has committed"
    bench.settle()
    assert bench.leader.wants_more


def test_h7_measures_of_checkpoints_add_up() -> None:
    bench = begun(policy=SLOW)
    bench.tell(ready(10, docs=2, size=20), ready(20, docs=3, size=30))
    assert isinstance(bench.leader.head, Idle)
    txn = bench.leader.head.txn
    assert txn is not None
    assert (txn.read_docs, txn.read_bytes) == (5, 50)


@pytest.mark.parametrize(("size", "want"), [(199, ["Sleep"]), (200, ["Flush"])])
def test_h7_a_full_shard_closes_a_young_transaction_b34(size: int, want: list[str]) -> None:
    bench = begun(policy=replace(SLOW, combiner_bytes=Band(max=100)), shards=2)
    assert bench.tell(ready(10, size=size)) == want


def test_h7_b6_a_requested_close_takes_nothing_more() -> None:
    bench = begun(policy=SLOW)
    assert bench.tell(ready(10), CloseRequested(), ready(20)) == ["Sleep", "Flush"]
    assert bench.last(Flush).txn.extents == frontier(10)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_h8_the_greatest_key_of_all_shards_is_hinted_b5_t21(order: tuple[int, ...]) -> None:
    bench = begun()
    keys = {0: b"\x05", 1: b"\x09"}
    bench.tell(ready(10), Flushed(reports=tuple(report(max_key=keys[shard]) for shard in order)))
    assert bench.records("Persist(hint)")[0].max_keys == {0: b"\x09"}


def test_h8_keys_are_remembered_for_the_loads_of_later_transactions_only_x2() -> None:
    bench = Bench(recovered=Recovered(max_keys={0: b"\x05", 2: b"\xff"}))
    bench.settle()
    grown = (report(0, max_key=b"\x09"), report(1, max_key=b"\x01"), report(2, max_key=b"\x02"))
    bench.transaction(ready(10), reports=grown)
    assert bench.last(Flush).txn.before.max_keys == {0: b"\x05", 2: b"\xff"}
    bench.transaction(ready(20))
    assert bench.last(Flush).txn.before.max_keys == {0: b"\x09", 1: b"\x01", 2: b"\xff"}


def test_h10_a_key_that_was_not_hinted_is_a_bug_x6() -> None:
    bench = begun(flush_barrier=True)
    bench.reports = (report(max_key=b"\x05"),)
    bench.tell(ready(10))
    bench.settle(until="Store")
    known, unknown = report(max_key=b"\x05"), report(max_key=b"\x06", shard=1)
    with pytest.raises(Bug, match=r"shard 1 stored a key .* not announced"):
        bench.tell(Stored(reports=(known, unknown)))


@pytest.mark.parametrize("binding", [-1, 3])
def test_h10_a_binding_that_does_not_exist_is_fatal_b36(binding: int) -> None:
    bench = begun()
    bench.tell(ready(10))
    with pytest.raises(OutOfTurn, match=f"shard 1 reports binding {binding}"):
        bench.tell(Flushed(reports=(report(binding, stored=1, shard=1),)))


def test_h10_stats_are_of_the_transaction_and_the_session_t26_b7() -> None:
    bench = Bench(recovered=Recovered(last_source_clocks={"acme/orders": Clock(1600)}))
    bench.settle()
    bench.transaction(
        ready(10, behind=50),
        reports=(
            report(0, sourced=3, loaded=2, stored=4, clocks=(16, 3200)),
            report(1, sourced=1, clocks=(16, 1616)),
        ),
    )
    first = bench.last(WriteStats).document["materialize"]["acme/orders"]
    assert first == {
        "left": {"docsTotal": 2, "bytesTotal": 20},
        "right": {"docsTotal": 4, "bytesTotal": 40},
        "out": {"docsTotal": 4, "bytesTotal": 40},
        "bytesBehind": 50,
        "lastSourcePublishedAt": "1970-01-01T00:00:00.000000000Z",
    }
    bench.transaction(ready(20, behind=-30), reports=(report(1, sourced=1, clocks=(16, 2400)),))
    assert bench.last(WriteStats).document["materialize"]["acme/orders"]["bytesBehind"] == 20
    assert bench.leader.memory.last_source_clocks == {"acme/orders": Clock(3200)}
    assert [r.last_source_clocks for r in bench.records("Persist(hint)")] == [
        {"acme/orders": Clock(3200)},
        {"acme/orders": Clock(2400)},  # the log keeps the later one
    ]


@pytest.mark.parametrize("order", [(20, 10), (10, 20)], ids=["newest first", "newest last"])
def test_h10_the_newest_source_never_goes_back_not_even_over_sessions_b7(
    order: tuple[int, int],
) -> None:
    def last_source(bench: Bench) -> str:
        stats = bench.last(WriteStats).document["materialize"]
        return str(stats["acme/orders"]["lastSourcePublishedAt"])

    def sourced(binding: int, second: int) -> BindingReport:
        return report(binding, sourced=1, clocks=(at(second), at(second)))

    bench = begun()
    bench.transaction(ready(10), reports=(sourced(0, order[0]), sourced(1, order[1])))
    assert last_source(bench) == rfc3339(at(20))
    bench.transaction(ready(20), reports=(sourced(0, 15),))
    assert last_source(bench) == rfc3339(at(20))

    hinted = [dict(record.last_source_clocks) for record in bench.records("Persist(hint)")]
    restarted = Bench(recovered=Recovered(last_source_clocks=hinted[0]))
    restarted.settle()
    restarted.transaction(ready(30), reports=(sourced(1, 15),))
    assert last_source(restarted) == rfc3339(at(20))


def test_h11_the_acks_of_the_transaction_go_to_the_endpoint_and_into_the_commit() -> None:
    bench = begun(pattern=Pattern.ENDPOINT)
    bench.tell(ready(10))
    bench.settle(until="WriteStats")
    bench.drop()
    bench.tell(StatsWritten(intents(5)))
    bench.settle()
    assert bench.last(StartCommit).checkpoint.ack_intents == intents(5)
    assert bench.records("Persist(commit)")[0].ack_intents == intents(5)
    assert bench.last(WriteIntents).intents == intents(5)


def test_h15_h16_a_ripe_transaction_is_gathered_while_the_tail_is_busy() -> None:
    bench = Bench()
    assert bench.tell(ready(10)) == ["Gather"]
    assert bench.tell(ready(20)) == []
    assert bench.tell(Gathered()) == []  # sealed: it waits for the tail, and takes no more
    bench.unanswered = deque(bench.actions[:1])  # the first acknowledge
    assert bench.settle(until="Flush") == ["WriteIntents", "Flush"]
    assert bench.last(Flush).txn.plan is Plan.OVERLAP
    assert without(bench.settle(), "Sleep")[-1] != "Gather"
    assert [r.committed_frontier for r in bench.records("Persist(commit)")] == [
        frontier(10),
        frontier(20),
    ]


@pytest.mark.parametrize(
    ("change", "events"),
    [
        pytest.param({"flush_barrier": True}, [ready(10)], id="barrier"),
        pytest.param({"policy": SLOW}, [ready(10)], id="not ripe"),
        pytest.param({}, [ready(10, hint=20)], id="hints unresolved"),
    ],
)
def test_h15_otherwise_it_waits_for_the_tail(
    change: dict[str, object], events: list[Event]
) -> None:
    bench = Bench(a_task(**change))
    assert "Gather" not in bench.tell(*events)


def test_h15_a_full_one_is_sealed_even_if_there_is_more() -> None:
    policy = ClosePolicy(read_docs=Band(min=1, max=2))
    bench = Bench(a_task(policy=policy))
    assert bench.tell(ready(10), ready(20, docs=2)) == ["Gather"]
    assert bench.last(Gather).txn.extents == frontier(20)
    assert bench.tell(ready(30)) == []


def test_h14_a_session_that_has_stopped_does_nothing_more() -> None:
    bench = begun()
    bench.tell(StopRequested())
    with pytest.raises(Bug, match="has stopped"):
        bench.tell(Woken())


# -------------------------------------------------------------------------------- hints and replay


def test_a_transaction_with_unresolved_hints_extends_until_they_are_resolved() -> None:
    bench = begun(policy=ClosePolicy(read_docs=Band(max=1)))
    assert bench.tell(ready(10, hint=20, docs=9), CloseRequested()) == []
    assert bench.tell(ready(20, hint=20)) == ["Flush"]
    assert bench.last(Flush).txn.extents.unresolved_hints == 0


def test_hints_that_the_shuffle_gave_up_are_forgotten_with_the_checkpoint() -> None:
    bench = begun()
    given_up = frontier(0, hint=30, journal="acme/orders/pivot=80")
    assert bench.tell(checkpoint(frontier(10).reduce(given_up))) == []
    assert bench.tell(ready(10)) == ["Flush"]


HINTED = Recovered(
    committed_close=at(1),
    hinted_close=at(2),
    committed_frontier=frontier(10),
    hinted_frontier=frontier(20),
)


def test_a_replay_opens_at_once_commits_what_was_hinted_and_stops_b31_rp1_rp3() -> None:
    bench = Bench(a_task(policy=SLOW), HINTED)
    bench.settle()
    bench.actions.clear()
    assert [*bench.tell(ready(20, hint=20)), *bench.settle()] == [*TO_THE_COMMIT, "Stop"]
    hint, commit = bench.records()
    assert hint.hinted_frontier == commit.committed_frontier == frontier(20, hint=20)
    assert commit.committed_close > at(2)


def test_a_replay_waits_for_all_that_was_hinted_rp1() -> None:
    bench = Bench(recovered=HINTED)
    bench.settle()
    assert bench.tell(ready(15, hint=20)) == []
    assert bench.tell(ready(20, hint=20)) == ["Flush"]
    assert bench.settle()[-1] == "Stop"


@pytest.mark.parametrize(
    ("read", "what"),
    [
        pytest.param(frontier(21, hint=20), "past the hinted", id="further than hinted"),
        pytest.param(
            frontier(20, hint=20).reduce(frontier(5, journal="acme/orders/pivot=80")),
            "past the hinted",
            id="another journal",
        ),
        pytest.param(frontier(15), "not read", id="less than hinted"),
    ],
)
def test_a_replay_of_anything_else_is_a_bug_rp2(read: Frontier, what: str) -> None:
    bench = Bench(recovered=HINTED)
    bench.settle()
    with pytest.raises(Bug, match=what):
        bench.tell(checkpoint(read))


def test_a_hint_that_the_commit_covers_is_no_replay_t31() -> None:
    bench = Bench(recovered=replace(HINTED, committed_frontier=frontier(20)))
    bench.settle()
    assert bench.leader.replay is None
    assert bench.transaction(ready(30)) == TRANSACTION


# ----------------------------------------------------------------------------------------- the tail


def test_tl1_a_tail_that_would_begin_while_stopping_is_left_to_the_next_session() -> None:
    bench = begun()
    bench.tell(ready(10))
    bench.settle(until="Persist(commit)")
    assert bench.tell(StopRequested()) == []
    assert bench.settle() == ["Stop"]


def test_tl2_a_session_begins_with_an_acknowledge_without_patches_o1_m5() -> None:
    bench = Bench()
    assert bench.story() == ["Acknowledge"]
    assert bench.last(Acknowledge).patches == ()


@pytest.mark.parametrize(
    ("patches", "want"),
    [
        pytest.param(({"a": 1},), ["Persist(ack)", "WriteIntents"], id="TL-3 patches: durable"),
        pytest.param((), ["WriteIntents"], id="TL-4 none: no record"),
    ],
)
def test_acknowledgements_are_persisted_if_they_say_something(
    patches: tuple[dict[str, int], ...], want: list[str]
) -> None:
    bench = Bench(patches={"Acknowledge": patches})
    assert bench.settle() == want
    assert bench.leader.tail == Done(patches)


RECOVERED = Recovered(ack_intents=intents(3), trigger_params=b'{"run_id":"r"}')


@pytest.mark.parametrize(
    ("has_triggers", "want"),
    [
        pytest.param(True, ["WriteIntents", "CallTrigger", "Persist(trigger-done)"], id="TL-6, 7"),
        pytest.param(False, ["WriteIntents", "Persist(trigger-done)"], id="TL-5 removed meanwhile"),
    ],
)
def test_what_a_session_left_is_finished_by_the_next(
    has_triggers: bool,
    want: list[str],
) -> None:
    bench = Bench(a_task(has_triggers=has_triggers), RECOVERED)
    assert bench.settle() == want
    assert bench.last(WriteIntents).intents == intents(3)
    if has_triggers:
        assert bench.last(CallTrigger).params == RECOVERED.trigger_params


def test_tl8_a_trigger_that_failed_leaves_its_variables_durable() -> None:
    bench = Bench(a_task(has_triggers=True), RECOVERED)
    bench.settle(until="CallTrigger")  # it fails: the session ends here
    assert bench.records() == []


def test_tl9_a_busy_tail_lets_a_transaction_grow_but_not_close_g9() -> None:
    bench = Bench(a_task(has_triggers=True, flush_barrier=True), RECOVERED)
    bench.settle(until="CallTrigger")
    bench.drop()
    for commit in (10, 20, 30):
        assert bench.tell(ready(commit)) == []
        assert bench.leader.wants_more
    assert bench.tell(TriggerCalled()) == ["Persist(trigger-done)"]
    assert bench.answer() == ["Flush"]


# ----------------------------------------------------------------------------------- stop and close


def test_s1_a_requested_close_waits_for_hints_and_for_the_tail() -> None:
    bench = Bench(a_task(policy=SLOW, flush_barrier=True))
    assert bench.tell(ready(10, hint=20), CloseRequested()) == ["Sleep", "Sleep"]
    assert bench.tell(ready(20, hint=20)) == ["Sleep"]  # the tail is slow
    assert bench.settle(until="Flush") == ["WriteIntents", "Sleep", "Flush"]


def test_s2_a_stop_with_an_open_transaction_commits_it_t23() -> None:
    bench = begun(policy=SLOW)
    bench.tell(ready(10))
    assert bench.tell(StopRequested()) == ["Sleep"]  # its minimum still holds
    bench.now_s = 10.1
    assert bench.tell(Woken()) == ["Flush"]
    assert bench.settle() == [*TO_THE_COMMIT[1:], "Stop"]


def test_s2_a_stop_during_the_tail_lets_it_finish_and_opens_nothing_t23() -> None:
    bench = begun()
    bench.tell(ready(10))
    bench.settle(until="WriteIntents")
    assert bench.tell(StopRequested(), ready(20)) == []
    assert bench.settle() == ["Stop"]


def test_s3_no_record_is_under_way_when_a_session_stops() -> None:
    bench = Bench(patches={"Acknowledge": ({"a": 1},)})
    bench.settle(until="Persist(ack)")
    assert bench.tell(StopRequested()) == []
    assert bench.settle() == ["WriteIntents", "Stop"]


@pytest.mark.parametrize(
    ("drain", "want"),
    [
        pytest.param(False, ["Stop"], id="the tail is left to the next session"),
        pytest.param(True, ["Acknowledge", "WriteIntents", "Stop"], id="drained"),
    ],
)
def test_a_session_stops_after_its_last_transaction_t24_pv3(
    drain: bool,
    want: list[str],
) -> None:
    bench = begun(transactions_max=2, drain=drain)
    assert bench.transaction(ready(10)) == TRANSACTION
    assert bench.transaction(ready(20)) == [*TO_THE_COMMIT, *want]


def test_a_drained_stop_finishes_the_tail_of_the_open_transaction() -> None:
    bench = begun(drain=True)
    bench.tell(ready(10), StopRequested())
    assert bench.settle() == [*TRANSACTION[1:], "Stop"]


# --------------------------------------------------------------------------------- out of turn


def in_flush() -> Bench:
    bench = begun()
    assert bench.tell(ready(10)) == ["Flush"]
    return bench


@pytest.mark.parametrize(
    ("events", "where"),
    [
        pytest.param([Stored()], "", id="Stored while in Flush"),
        pytest.param([StartedCommit()], "", id="StartedCommit while in Flush"),
        pytest.param([Acknowledged()], "", id="Acknowledged when done"),
        pytest.param([Flushed()] * 2, "", id="Flushed twice"),
        pytest.param([Flushed(), Persisted(1), Stored()], "", id="Stored of what was staged"),
        pytest.param([Persisted(1)], "record 1", id="Persisted of nothing"),
        pytest.param([Flushed(), Persisted(2)], "record 2", id="wrong seq_no"),
        pytest.param([Gathered()], "", id="Gathered of nothing"),
        pytest.param([StatsWritten(intents(1))], "", id="StatsWritten of nothing"),
        pytest.param([IntentsWritten()], "", id="IntentsWritten of nothing"),
        pytest.param([TriggerCalled()], "", id="TriggerCalled of nothing"),
        pytest.param([ready(20), ready(30)], "", id="two frontiers"),
    ],
)
def test_what_nobody_waits_for_ends_the_session(events: list[Event], where: str) -> None:
    bench = in_flush()
    with pytest.raises(OutOfTurn) as raised:
        bench.tell(*events)
    assert where in (raised.value.where or "")
