"""What a run says of how far it is: which lines, when, and how many."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.progress import (
    FIRST_S,
    LINES_MAX,
    Commits,
    Narrator,
    Paces,
    lines_of,
    said_of,
    share_of,
)
from penstock.runtime.awaited import Wait
from penstock.runtime.control import TransactionSummary
from penstock.runtime.introspection import Failure, TaskReport


def report(task: str = "acme/views", doing: Any = "running", **others: Any) -> TaskReport:  # noqa: ANN401
    return TaskReport(kind="materialization", task=task, doing=doing, since=0.0, **others)


BACKLOG: dict[str, Any] = {
    "taken": 300,
    "taken_bytes": 3000,
    "expected": 300,
    "expected_bytes": 3000,
}


def test_stages_and_counts_are_said_in_words() -> None:
    failure = Failure(what="no such\nhost", at=0.0, first=0.0)
    table = [
        (report(doing="queued"), "waits for the tasks before it"),
        (report(doing="starting"), "starting"),
        (report(doing="starting", wait=Wait("its lock", "", 0.0)), "waits for its lock"),
        (report(phase="start spark", **BACKLOG), "starting Spark"),
        (report(), "reading"),
        (report(taken=5, taken_bytes=50), "reading, 5 documents, 50 B so far"),
        (
            report(phase="flush", spark_tasks=(1, 3), **BACKLOG),
            "staging 100 of 300 documents, 1000 B of 2.9 KiB",
        ),
        (
            report(phase="start commit", **BACKLOG),
            "committing 300 of 300 documents, 2.9 KiB of 2.9 KiB",
        ),
        (report(phase="acknowledge", documents=300, bytes=3000, **BACKLOG), "finishing"),
        (report(doing="ended"), "done: nothing new"),
        (report(doing="ended", transactions=1, documents=1, bytes=7), "done: 1 document, 7 B"),
        (report(doing="failed", failure=failure), "failed: no such host"),
        (report(doing="retrying", failure=failure), "failed, and is tried again: no such host"),
    ]
    for given_report, said in table:
        assert said_of(given_report, None) == said


def test_the_rest_is_estimated_from_the_pace_so_far() -> None:
    paces = Paces()
    assert paces.left_s(report(phase="flush", spark_tasks=(0, 4), **BACKLOG), 0.0) is None
    left_s = paces.left_s(report(phase="flush", spark_tasks=(1, 4), **BACKLOG), 10.0)
    assert left_s == 30.0
    said = said_of(report(phase="flush", spark_tasks=(1, 4), **BACKLOG), left_s)
    assert said.endswith(", about 30s left")


@given(
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000) | st.none(),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_a_share_is_none_or_between_nothing_and_all(
    documents: int, more: int, expected: int | None, done: int, tasks: int
) -> None:
    seen = report(
        documents=documents,
        taken=documents + more,
        expected=expected,
        spark_tasks=(min(done, tasks), tasks),
        phase="flush",
    )
    share = share_of(seen)
    assert share is None or 0.0 <= share <= 1.0
    assert (share is None) == (not expected)


def test_what_is_short_is_not_told_and_the_same_is_told_later_and_later() -> None:
    narrator = Narrator()
    told = [
        (tick / 4, line)
        for tick in range(4 * 60)
        for line in narrator.lines([report(phase="start spark")], tick / 4)
    ]
    assert [at for at, _ in told] == [1.0, 6.0, 16.0, 36.0]
    assert told[0][1] == "acme/views: starting Spark"
    assert Narrator().lines([report()], 0.0) == []


def test_what_a_task_waits_for_is_left_to_the_log() -> None:
    narrator = Narrator()
    waiting = report(doing="starting", wait=Wait("its lock", "", 0.0))
    assert not [line for tick in range(100) for line in narrator.lines([waiting], float(tick))]


@given(
    st.lists(st.lists(st.sampled_from(["start spark", "flush", None]), min_size=20, max_size=20))
)
def test_lines_have_a_bounded_rate_whatever_tasks_do(phases: list[list[str | None]]) -> None:
    narrator = Narrator()
    times: list[tuple[float, str]] = []
    for tick, row in enumerate(phases):
        now = tick / 4
        reports = [report(task=f"acme/{n}", phase=phase) for n, phase in enumerate(row)]
        times += [(now, line.partition(":")[0]) for line in narrator.lines(reports, now)]
    for at, task in times:
        of_it = [t for t, other in times if other == task and at <= t < at + FIRST_S]
        assert of_it == [at]
    for begin in {at for at, _ in times}:
        assert sum(begin <= at < begin + FIRST_S for at, _ in times) <= 2 * LINES_MAX


def test_a_terminal_shows_all_names_whole_in_its_width() -> None:
    long = "acme/" + "x" * 70
    reports = [report(task=long, phase="flush", **BACKLOG), report(task="acme/b", doing="queued")]
    lines = lines_of(reports, Paces(), width=80, height=24, now=0.0)
    assert long in lines
    assert all(len(line) <= 80 for line in lines)
    assert any("━" in line or "─" in line for line in lines)
    few = lines_of(
        [report(task=f"acme/{n}") for n in range(50)], Paces(), width=80, height=5, now=0
    )
    assert len(few) <= 5
    assert few[-1] == "and 46 more"


def summary(documents: int) -> TransactionSummary:
    return TransactionSummary(
        transactions=1, documents=documents, bytes=10, stored=documents, jobs=1, seconds=0.5
    )


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 9)), max_size=40))
def test_every_transaction_is_in_one_line_and_lines_are_a_second_apart(
    steps: list[tuple[float, int]],
) -> None:
    commits, now, told = Commits(), 100.0, list[tuple[float, str]]()
    for number, (wait_s, documents) in enumerate(steps, start=1):
        now += wait_s
        told += [(now, line) for line in commits.add("acme/a", number, summary(documents), now)]
        now += 0.1
        told += [(now, line) for line in commits.due(now)]
    ends = commits.due(float("inf"))
    counted = [int(line.split(": ")[2].split()[0].replace(",", "")) for _, line in told]
    counted += [int(line.split(": ")[2].split()[0].replace(",", "")) for line in ends]
    assert sum(counted) == sum(documents for _, documents in steps)
    assert all(b - a >= FIRST_S for (a, _), (b, _) in itertools.pairwise(told))
    assert len(ends) <= 1
