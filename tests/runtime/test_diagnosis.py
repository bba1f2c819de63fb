"""The state of a task, and why it does not go on: case by case, and what holds for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.awaited import STORE, Wait, spark_slots
from penstock.runtime.diagnosis import (
    ABANDONED_S,
    WHY_MAX,
    Facts,
    Lag,
    OpenSpan,
    ProcessFacts,
    TaskCondition,
    TaskState,
    Upstream,
    diagnose,
    duration_text,
    time_text,
)
from penstock.runtime.introspection import Doing, Failure, TaskReport

NOW = 1_800_000_000.0


def report(doing: Doing = "running", **others: object) -> TaskReport:
    return TaskReport(  # type: ignore[arg-type]
        **{"kind": "materialization", "task": "acme/views", "doing": doing, "since": NOW - 60}
        | others
    )


def failure(**others: object) -> Failure:
    return Failure(  # type: ignore[arg-type]
        **{"what": "the table is gone", "at": NOW - 5, "first": NOW - 50} | others
    )


LIVE = ProcessFacts(name="process 7 on db1", alive=True, beat=NOW - 1)
DEAD = replace(LIVE, alive=False)
IDLE = Facts(task="acme/views", kind="materialization", report=report(), process=LIVE)
BEHIND = Lag(documents=3, bytes=300, oldest=NOW - 9)
SPAN = OpenSpan(
    collection="acme/orders", producer="0100", documents=2, since=NOW - 40, last=NOW - 30
)
DISABLED = diagnose(replace(IDLE, disabled=True), NOW)
BROKEN = diagnose(replace(IDLE, report=report("failed", failure=failure(fix="bring it back"))), NOW)


def upstream(task: str, condition: TaskCondition) -> Upstream:
    return Upstream(task=task, collection="acme/orders", state=condition.state, status=condition)


Said = tuple[Facts, TaskState, str, float | None, str | None]

CASES: dict[str, Said] = {
    "all is well": (IDLE, TaskState.IDLE, "has caught up", NOW - 60, None),
    "a capture": (
        replace(IDLE, kind="capture", lag=None),
        TaskState.IDLE,
        "has taken all that its source had",
        NOW - 60,
        None,
    ),
    "disabled": (
        replace(IDLE, disabled=True, stopped=NOW),
        TaskState.DISABLED,
        "is disabled in the catalog",
        None,
        "remove `shards: {disable: true}`",
    ),
    "nothing to do": (
        replace(IDLE, idle_by_design=True),
        TaskState.DISABLED,
        "has all of its bindings disabled",
        None,
        "remove `disable: true`",
    ),
    "stopped": (
        replace(IDLE, stopped=NOW - 3, process=None, report=None, lag=BEHIND),
        TaskState.STOPPED,
        "was stopped by penstock task stop; 3 documents wait",
        NOW - 3,
        "penstock task start acme/views",
    ),
    "stopping": (
        replace(IDLE, stopped=NOW - 3),
        TaskState.STOPPED,
        "finishes its transaction",
        NOW - 3,
        "penstock task start",
    ),
    "nobody runs it": (
        replace(IDLE, report=None, process=None, lag=replace(BEHIND, documents=1)),
        TaskState.NOT_RUNNING,
        "no process runs it; 1 document waits",
        None,
        "penstock run --task acme/views",
    ),
    "a process that says nothing of it": (
        replace(IDLE, report=None, lag=BEHIND),
        TaskState.NOT_RUNNING,
        "no process runs it; 3 documents wait",
        None,
        "penstock run",
    ),
    "killed": (
        replace(IDLE, process=DEAD),
        TaskState.NOT_RUNNING,
        "process 7 on db1, ended unexpectedly",
        NOW - 1,
        "start it again",
    ),
    "failed, and the process has ended": (
        replace(IDLE, report=report("failed", failure=failure()), process=None),
        TaskState.FAILED,
        "has failed: the table is gone",
        NOW - 5,
        "fix the cause",
    ),
    "failed, and others go on": (
        replace(
            IDLE,
            report=report(
                "failed",
                failure=failure(where="table views", why="it was dropped", fix="backfill"),
            ),
        ),
        TaskState.FAILED,
        "has failed: the table is gone, at table views (it was dropped)",
        NOW - 5,
        "backfill",
    ),
    "failed for a long reason": (
        replace(IDLE, report=report("failed", failure=failure(why="why " * 99))),
        TaskState.FAILED,
        f"{'why ' * (WHY_MAX // 4 - 1)}why…",
        NOW - 5,
        "fix the cause",
    ),
    "tried again": (
        replace(
            IDLE,
            report=report(
                "retrying", failure=failure(count=4, retry_at=NOW + 8, causes=("refused",))
            ),
        ),
        TaskState.RETRYING,
        "failed 4 times in a row, and is retried in 8s: the table is gone (refused)",
        NOW - 50,
        "the task continues by itself",
    ),
    "being tried again": (
        replace(IDLE, report=report("starting", failure=failure(retry_at=NOW - 1))),
        TaskState.RETRYING,
        "failed, and is retried now",
        NOW - 50,
        "the task continues by itself",
    ),
    "tried again, and waits": (
        replace(
            IDLE,
            report=report(
                "starting",
                failure=failure(retry_at=NOW - 1),
                wait=Wait("a lock on table views held by pid 4", "end it", NOW - 8),
            ),
        ),
        TaskState.WAITING,
        "waits for a lock on table views held by pid 4",
        NOW - 8,
        "end it",
    ),
    "an error of the past": (
        replace(IDLE, report=report(failure=failure(retry_at=NOW - 4))),
        TaskState.IDLE,
        "has caught up",
        NOW - 60,
        None,
    ),
    "waits for the store": (
        replace(IDLE, report=report(wait=Wait(*STORE, NOW - 8)), lag=BEHIND),
        TaskState.WAITING,
        "waits for the consensus store",
        NOW - 8,
        "penstock doctor",
    ),
    "waits for a slot": (
        replace(IDLE, report=report(wait=Wait(*spark_slots({"acme/big": 2}), NOW - 8))),
        TaskState.WAITING,
        "waits for a free slot of Spark: all are taken, 2 of acme/big",
        NOW - 8,
        "--master",
    ),
    "not heard of": (
        replace(IDLE, process=replace(LIVE, silent=True, beat=NOW - 99), lag=BEHIND),
        TaskState.WAITING,
        "process 7 on db1, which does not report",
        NOW - 99,
        "suspended",
    ),
    "its turn comes": (
        replace(IDLE, report=report("queued"), lag=BEHIND),
        TaskState.WAITING,
        "starts when the tasks before it have caught up",
        NOW - 60,
        "penstock up",
    ),
    "starts": (
        replace(IDLE, report=report("starting")),
        TaskState.RUNNING,
        "starts",
        NOW - 60,
        None,
    ),
    "works": (
        replace(
            IDLE, report=report(opened=NOW - 2, phase="flush", phase_since=NOW - 1), lag=BEHIND
        ),
        TaskState.RUNNING,
        "is in a transaction: flush; 3 documents wait",
        NOW - 2,
        None,
    ),
    "holds a transaction open": (
        replace(IDLE, report=report(opened=NOW - 20, closes=NOW + 40)),
        TaskState.RUNNING,
        "has a transaction open for 40s more",
        NOW - 20,
        "penstock task close-now acme/views",
    ),
    "finishes": (
        replace(IDLE, report=report(phase="acknowledge", phase_since=NOW - 1)),
        TaskState.RUNNING,
        "finishes a transaction: acknowledge",
        NOW - 1,
        None,
    ),
    "reads": (
        replace(IDLE, report=report(committed=NOW - 7), lag=BEHIND),
        TaskState.RUNNING,
        "reads; 3 documents wait",
        NOW - 7,
        None,
    ),
    "is over, in a run": (
        replace(IDLE, report=report("ended"), lag=BEHIND),
        TaskState.NOT_RUNNING,
        "has ended in this run; 3 documents wait",
        NOW - 60,
        "penstock up",
    ),
    "a read delay": (
        replace(IDLE, lag=Lag(held=2, held_since=NOW - 10, due=NOW + 50)),
        TaskState.WAITING,
        f"holds 2 documents back by `readDelay`, until {time_text(NOW + 50)}",
        NOW - 10,
        "lower `readDelay`",
    ),
    "upstream is disabled": (
        replace(IDLE, upstream=[upstream("acme/in", DISABLED)]),
        TaskState.WAITING,
        "has caught up with acme/orders; acme/in, which writes it, is disabled in the catalog",
        None,
        "remove `shards: {disable: true}`",
    ),
    "upstreams are disabled and broken": (
        replace(IDLE, upstream=[upstream("acme/a", DISABLED), upstream("acme/in", BROKEN)]),
        TaskState.WAITING,
        "acme/in, which writes it, has failed: the table is gone (and 1 more)",
        NOW - 5,
        "bring it back",
    ),
    "a writer has not committed": (
        replace(IDLE, lag=Lag(open_spans=(SPAN,))),
        TaskState.WAITING,
        "has caught up; 2 documents of acme/orders are in an open transaction of producer 0100",
        NOW - 40,
        "let that writer commit",
    ),
    "a task has not committed": (
        replace(IDLE, lag=Lag(open_spans=(replace(SPAN, writer="acme/in", last=0.0),))),
        TaskState.WAITING,
        "are in an open transaction of acme/in",
        NOW - 40,
        "penstock status acme/in",
    ),
    "a writer died long ago": (
        replace(IDLE, lag=Lag(open_spans=(replace(SPAN, last=NOW - ABANDONED_S),))),
        TaskState.IDLE,
        "has caught up",
        NOW - 60,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_explains_it(case: str) -> None:
    facts, state, sentence, since, fix = CASES[case]
    found = diagnose(facts, NOW)
    assert found.state is state
    assert sentence in found.sentence
    assert found.since == since
    assert (fix or "") in (found.fix or "")
    assert (found.fix is None) == (fix is None)


def test_tasks_that_wait_name_their_object_and_a_remedy() -> None:
    for facts, *_ in CASES.values():
        found = diagnose(facts, NOW)
        if found.state in (TaskState.WAITING, TaskState.RETRYING, TaskState.FAILED):
            assert found.waits_for, found
            assert found.fix, found


# ------------------------------------------------------------------------------------- all facts

rarely = st.sampled_from([False] * 7 + [True])
times = st.floats(NOW - 1000, NOW + 1000)
maybe = st.none() | times
waits = st.builds(Wait, st.just("a thing"), st.just("do it"), times)
failures = st.builds(
    Failure,
    what=st.just("it broke"),
    where=st.none() | st.just("there"),
    why=st.none() | st.just("so"),
    fix=st.none() | st.just("mend it"),
    at=times,
    first=times,
    count=st.integers(1, 9),
    retry_at=maybe,
)
reports = st.builds(
    TaskReport,
    kind=st.just("materialization"),
    task=st.just("acme/views"),
    doing=st.sampled_from(["queued", "starting", "running", "retrying", "failed", "ended"]),
    since=times,
    wait=st.none() | waits,
    phase=st.none() | st.just("flush"),
    phase_since=times,
    opened=maybe,
    closes=maybe,
    committed=maybe,
    failure=st.none() | failures,
)
lags = st.builds(
    Lag,
    documents=st.integers(0, 2),
    held=st.integers(0, 2),
    held_since=maybe,
    due=maybe,
    open_spans=st.lists(
        st.builds(
            OpenSpan,
            collection=st.just("acme/orders"),
            producer=st.just("01"),
            documents=st.integers(1, 3),
            since=times,
            last=times,
            writer=st.none() | st.just("acme/in"),
        ),
        max_size=2,
    ).map(tuple),
)
facts = st.builds(
    Facts,
    task=st.just("acme/views"),
    kind=st.sampled_from(["capture", "derivation", "materialization"]),
    disabled=rarely,
    idle_by_design=rarely,
    stopped=rarely.flatmap(lambda stopped: times if stopped else st.none()),
    report=st.none() | reports,
    process=st.none()
    | st.builds(
        ProcessFacts,
        name=st.just("process 7"),
        alive=rarely.map(lambda dead: not dead),
        beat=times,
        silent=rarely,
    ),
    lag=st.none() | lags,
    upstream=st.lists(
        st.sampled_from([upstream("a", DISABLED), upstream("b", BROKEN)]), max_size=2
    ),
)


@given(facts)
def test_every_task_has_a_state_and_one_sentence(given_facts: Facts) -> None:
    found = diagnose(given_facts, NOW)
    assert found.sentence
    assert "\n" not in found.sentence
    assert found.fix or found.state in (TaskState.RUNNING, TaskState.IDLE)


@given(facts)
def test_what_does_not_run_is_never_said_to_run(given_facts: Facts) -> None:
    found = diagnose(given_facts, NOW)
    alive = given_facts.process is not None and given_facts.process.alive
    if not alive:
        assert not found.state.goes_on
        assert found.state is not TaskState.RETRYING
    if given_facts.disabled:
        assert found.state is TaskState.DISABLED
    elif given_facts.stopped is not None and not given_facts.idle_by_design:
        assert found.state is TaskState.STOPPED


@given(facts)
def test_idle_means_that_nothing_is_left_and_nobody_is_to_blame(given_facts: Facts) -> None:
    if diagnose(given_facts, NOW).state is not TaskState.IDLE:
        return
    assert not given_facts.upstream
    assert given_facts.lag is None or given_facts.lag.documents == 0
    assert (
        given_facts.report is None
        or given_facts.report.wait is None
        or given_facts.report.doing not in ("starting", "running")
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (0.4, "0s"),
        (59, "59s"),
        (60, "1m"),
        (90, "1m 30s"),
        (3600, "1h"),
        (5400, "1h 30m"),
        (86_400, "1d"),
        (90_000, "1d 1h"),
        (86_400 * 40 + 60, "40d"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
