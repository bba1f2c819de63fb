"""The table of `penstock up`, as lines of a terminal."""

from __future__ import annotations

import pytest

from penstock.cli.live import lines_of
from penstock.errors import UserError
from penstock.runtime.awaited import Wait
from penstock.runtime.introspection import Activity, Introspection

NOW = 1_000_000.0


class Clock:
    """Time as the tasks see it."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def process() -> Introspection:
    return Introspection(Clock())


def busy(process: Introspection, name: str, documents: int = 0) -> Activity:
    task = process.task("materialization", name)
    task.starts()
    task.runs()
    if documents:
        task.committed(documents=documents, size=10, stored=1, jobs=1)
    return task


def shown(process: Introspection, *, width: int = 80, height: int = 24) -> list[str]:
    reports = [each.report() for each in process.activities]
    return lines_of(reports, width=width, height=height, now=NOW + 3)


def test_a_line_for_each_task_and_a_sentence_for_trouble(process: Introspection) -> None:
    busy(process, "acme/views", 12_345)
    waits = busy(process, "acme/b")
    waits.waits_are(lambda: Wait("another process that writes to views.db", "end it", NOW))
    failed = process.task("capture", "acme/files")
    failed.starts()
    error = UserError("a file cannot be read", where="data/1.csv", why="it is no CSV")
    failed.fails(error, count=3, retry_in_s=8)
    process.task("derivation", "acme/stopped").ends()
    assert shown(process) == [
        "TASK          KIND             STATE     DOCUMENTS  DOCS/S  COMMIT",
        "acme/b        materialization  waiting           0       0       -",
        "  waits for another process that writes to views.db",
        "acme/files    capture          retrying          0       0       -",
        "  failed 3 times in a row, and is retried in 5s: a file cannot be read, at data…",
        "acme/stopped  derivation       stopped           0       0       -",
        "  was stopped by penstock task stop",
        "acme/views    materialization  idle         12,345     206  3s ago",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("tasks", [1, 3, 500])
def test_it_fits_any_terminal(process: Introspection, width: int, tasks: int) -> None:
    for number in range(tasks):
        busy(process, f"acme/{'long/' * 20}{number:03}", number * 10**6)
    lines = shown(process, width=width, height=24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    assert len({len(line) for line in lines[1:4]}) == 1 or tasks < 3


def test_names_need_room_before_other_columns(process: Introspection) -> None:
    name = "acme/a-materialization-with-quite-a-long-name"
    busy(process, name, 12)
    lines = shown(process, width=64)
    assert lines[0].split() == ["TASK", "STATE", "DOCUMENTS"]
    assert lines[1].split() == [name, "idle", "12"]
    assert max(map(len, lines)) <= 64


def test_of_a_name_longer_than_the_terminal_the_end_is_shown(process: Introspection) -> None:
    busy(process, "acme/" + "long/" * 20 + "end", 12)
    assert shown(process, width=40)[1].endswith("long/end  idle")


def test_of_too_many_those_in_trouble_are_shown(process: Introspection) -> None:
    for number in range(100):
        busy(process, f"acme/{number:03}", 1)
    process.task("capture", "acme/zzz").fails(UserError("broken"), retry_in_s=1)
    lines = shown(process, height=10)
    assert lines[1].startswith("acme/zzz")
    assert lines[-1] == "and 94 more: penstock status"


def test_nothing_to_run_is_said(process: Introspection) -> None:
    assert shown(process) == ["no task runs: penstock apply a catalog that has some"]
