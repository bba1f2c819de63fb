"""What a process remembers of its tasks: bounded, without secrets, each phase where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Unavailable
from penstock.runtime import introspection
from penstock.runtime.awaited import STORE, Wait
from penstock.runtime.introspection import Activity, Introspection, failure_of


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def process(clock: Clock) -> Introspection:
    return Introspection(clock)


def commit(activity: Activity, documents: int = 3) -> None:
    activity.committed(documents=documents, size=10 * documents, stored=documents, jobs=1)


def phase(activity: Activity, clock: Clock, name: str, seconds: float) -> None:
    token = activity.begins(name)
    clock.at += seconds
    activity.completes(token)


def phases(process: Introspection) -> list[list[str]]:
    return [
        [each["phase"] for each in row["phases"]] for row in process.relations()["transactions"]()
    ]


def test_a_head_that_commits_and_the_tail_after_it(process: Introspection, clock: Clock) -> None:
    """A materialization: flush, store and commit in the head, then the tail beside the next."""
    activity = process.task("materialization", "acme/views")
    activity.starts()
    activity.runs("0100")
    activity.transaction_is(is_open=True)
    phase(activity, clock, "flush", 2)
    token = activity.begins("record commit")
    assert activity.report().phase == "record commit"
    commit(activity)
    activity.completes(token)
    activity.transaction_is(is_open=True)  # the head has not moved on yet
    activity.transaction_is(is_open=False)
    assert activity.report().opened is None
    activity.transaction_is(is_open=True)
    phase(activity, clock, "acknowledge", 1)
    phase(activity, clock, "gather", 1)
    commit(activity)
    assert phases(process) == [["gather"], ["flush", "record commit", "acknowledge"]]
    [_, first] = process.relations()["transactions"]()
    assert first["phases"][0] == {"phase": "flush", "began": 1000.0, "seconds": 2.0}
    assert (first["number"], first["documents"], first["opened"]) == (1, 3, 1000.0)


def test_a_head_that_hands_over_and_a_tail_that_commits(
    process: Introspection, clock: Clock
) -> None:
    """A derivation: the next transaction opens before the last one is committed."""
    activity = process.task("derivation", "acme/sums")
    activity.runs("0100")
    activity.transaction_is(is_open=True)
    phase(activity, clock, "transform", 2)
    activity.transaction_is(is_open=False)
    token = activity.begins("write stats")
    activity.transaction_is(is_open=True)
    other = activity.begins("transform")
    activity.completes(token)
    token = activity.begins("record commit")
    commit(activity)
    activity.completes(token)
    phase(activity, clock, "write intents", 1)
    activity.completes(other)
    activity.transaction_is(is_open=False)
    commit(activity)
    assert phases(process) == [
        ["transform"],
        ["transform", "write stats", "record commit", "write intents"],
    ]


def test_a_report_has_totals_and_rates(process: Introspection, clock: Clock) -> None:
    activity = process.task("capture", "acme/in")
    activity.runs()
    for _ in range(6):
        clock.at += 20
        commit(activity, 60)
    report = activity.report()
    assert (report.transactions, report.documents, report.bytes) == (6, 360, 3600)
    assert report.documents_rate == pytest.approx(3.0)
    assert report.committed == clock.at


def test_errors_have_their_causes_and_no_secrets(process: Introspection, clock: Clock) -> None:
    activity = process.task("materialization", "acme/views")

    refused = OSError("connection refused")
    silent = ValueError("postgresql://app:hunter2secret@db/x does not answer")
    silent.__cause__ = refused
    error = Unavailable("no endpoint", where="db", why="it is away", fix="start it")
    error.__cause__ = silent
    for count in (1, 2):
        clock.at += 1
        activity.fails(error, count=count, retry_in_s=5)
    report = activity.report()
    failure = report.failure
    assert report.doing == "retrying"
    assert failure is not None
    assert (failure.what, failure.where, failure.fix) == ("no endpoint", "db", "start it")
    assert (failure.first, failure.at, failure.retry_at) == (1001.0, 1002.0, 1007.0)
    assert len(failure.causes) == 2
    assert failure.causes[1] == "OSError: connection refused"
    assert "hunter2secret" not in str(process.relations()["errors"]())
    assert len(process.relations()["errors"]()) == 2
    commit(activity)
    assert activity.report().failure is None


def test_a_failure_stays_when_the_task_ends(process: Introspection) -> None:
    activity = process.task("materialization", "acme/views")
    activity.fails(Unavailable("no endpoint"), retry_in_s=None)
    activity.ends()
    assert activity.report().doing == "failed"
    activity.starts()
    activity.ends()
    assert activity.report().doing == "ended"


def test_a_chain_of_causes_that_goes_in_a_circle_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert failure_of(first, at=0.0).causes == ("ValueError: b",)


def test_what_matters_weighs_more_than_progress(process: Introspection) -> None:
    activity = process.task("materialization", "acme/views")
    waiting: list[Wait] = []
    activity.waits_are(lambda: waiting[0] if waiting else None)
    weight, version = activity.weight, activity.version
    activity.transaction_is(is_open=True)
    assert (activity.weight, activity.version) == (weight, version + 1)
    waiting.append(Wait(*STORE, 5.0))
    activity.wait_changed()
    assert activity.weight == weight + 1
    assert activity.report().wait == waiting[0]
    (row,) = process.relations()["tasks"]()
    assert row["wait"] == {"what": STORE.what, "fix": STORE.fix, "since": 5.0}


def test_nothing_grows_without_bound(
    process: Introspection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introspection, "PHASES_MAX", 4)
    activity = process.task("materialization", "acme/views")
    activity.transaction_is(is_open=True)
    for _ in range(10):
        activity.completes(activity.begins("flush"))
    for _ in range(introspection.TRANSACTIONS_MAX + 5):
        commit(activity)
        activity.fails(ValueError("x" * 10_000), retry_in_s=1)
        activity.ran_job("g", 0.0, 1, None)
    rows: dict[str, list[dict[str, Any]]] = {
        name: relation() for name, relation in process.relations().items()
    }
    assert len(rows["transactions"]) == len(rows["errors"]) == introspection.TRANSACTIONS_MAX
    assert len(rows["jobs"]) == introspection.TRANSACTIONS_MAX
    assert max(len(row["phases"]) for row in rows["transactions"]) <= 4
    assert max(len(row["what"]) for row in rows["errors"]) <= introspection.TEXT_MAX
    assert len(rows["tasks"]) == 1


steps = st.lists(
    st.sampled_from(["open", "shut", "begin", "complete", "commit", "fail", "start", "run", "end"]),
    max_size=30,
)


@given(steps, st.data())
def test_whatever_happens_a_report_can_be_made(done: list[str], data: st.DataObject) -> None:
    """In any order: the runtime may be cancelled anywhere."""
    clock = Clock()
    process = Introspection(clock)
    activity = process.task("derivation", "acme/sums")
    begun: list[object] = []
    commits = 0
    for step in done:
        clock.at += 1
        before = activity.version
        match step:
            case "open" | "shut":
                activity.transaction_is(is_open=step == "open")
            case "begin":
                names = [*sorted(introspection.AFTER_COMMIT | introspection.COMMITTING), "flush"]
                begun.append(activity.begins(data.draw(st.sampled_from(names))))
            case "complete" if begun:
                activity.completes(begun.pop(data.draw(st.integers(0, len(begun) - 1))))
            case "commit":
                commit(activity)
                commits += 1
            case "fail":
                activity.fails(ValueError("x"), retry_in_s=data.draw(st.sampled_from([None, 1.0])))
            case "start":
                activity.starts()
            case "run":
                activity.runs()
            case "end":
                activity.ends()
            case _:
                pass
        report = activity.report()
        assert report.transactions == commits
        assert activity.version >= before
    assert len(process.relations()["transactions"]()) == commits
