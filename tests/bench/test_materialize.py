"""The materialize benchmark: the expected table, and the contestants that build it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from penstock_bench import processes
from penstock_bench.events import Events, Table
from penstock_bench.frame import OURS, Bench
from penstock_bench.materialize import (
    BATCH,
    STREAMING,
    Inputs,
    Outcome,
    Outcomes,
    build_report,
    contestants,
    prepare_penstock,
    run_once,
    sqlite_target,
)

pq: Any = pyarrow.parquet

EVENTS = Events(2_000, files=20, accounts=300)


def by_hand(directory: Path) -> list[tuple[int, int, int, int, str]]:
    """Aggregate in a dictionary, one event at a time, in the order of `seq`."""
    rows = [row for path in directory.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    accounts: dict[int, tuple[int, int, int, int, str]] = {}
    for row in sorted(rows, key=lambda row: row["seq"]):
        _, events, amount, largest, _ = accounts.get(row["account"], (0, 0, 0, 0, ""))
        accounts[row["account"]] = (
            row["account"],
            events + 1,
            amount + row["amount"],
            max(largest, row["amount"]),
            row["region"],
        )
    return list(accounts.values())


def test_the_oracle_matches_the_files(tmp_path: Path) -> None:
    EVENTS.write_files(tmp_path)
    expected = by_hand(tmp_path)
    assert sum(events for _, events, *_ in expected) == EVENTS.count
    assert any(events > 1 for _, events, *_ in expected)
    assert EVENTS.oracle._rows() == {row[0]: row for row in expected}


def test_documents_match_the_events_in_the_files(tmp_path: Path) -> None:
    EVENTS.write_files(tmp_path)
    for file, path in enumerate(sorted(tmp_path.glob("*.parquet"))):
        documents: Any = EVENTS.batch(file)
        rows = pq.read_table(path)
        for column in ("account", "amount", "region"):
            assert documents.column(column).to_pylist() == rows[column].to_pylist()
        assert documents.column("largest").to_pylist() == rows["amount"].to_pylist()
        assert set(documents.column("events").to_pylist()) == {1}


def rows_of(table: Table) -> list[tuple[int, int, int, int, str]]:
    columns = (table.account, table.events, table.amount, table.largest, table.region)
    return list(zip(*(column.tolist() for column in columns), strict=True))


ROWS = rows_of(EVENTS.oracle)
ABSENT = next(account for account in range(300) if account not in EVENTS.oracle.account)


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        pytest.param(ROWS, 0, id="as expected"),
        pytest.param(ROWS[::-1], 0, id="in another order"),
        pytest.param(ROWS[1:], 1, id="one is missing"),
        pytest.param([*ROWS, (ABSENT, 1, 1, 1, "eu")], 1, id="one unexpected"),
        pytest.param([*ROWS, ROWS[3]], 1, id="one duplicated"),
        pytest.param([*ROWS[1:], (*ROWS[0][:2], ROWS[0][2] + 1, *ROWS[0][3:])], 1, id="sum is off"),
        pytest.param([*ROWS[1:], (*ROWS[0][:4], "xx")], 1, id="region differs"),
        pytest.param([], len(ROWS), id="nothing"),
    ],
)
def test_wrong_rows_are_counted(rows: list[tuple[int, int, int, int, str]], wrong: int) -> None:
    assert Table.of(rows).wrong_rows(EVENTS.oracle) == wrong


def test_a_doubled_batch_makes_its_accounts_wrong() -> None:
    table = EVENTS.oracle
    touched = np.unique(EVENTS.generate(0)["account"])
    doubled = np.isin(table.account, touched)
    again = dataclasses.replace(table, events=table.events + doubled)
    assert again.wrong_rows(table) == len(touched)


def outcome(wall_s: float, rss_mb: int, wrong: int = 0) -> Outcome:
    usage = processes.Usage(cpu_s=wall_s, peak_rss_bytes=rss_mb * 1_000_000)
    run = processes.Run(seconds=wall_s, usage=usage, output={"job_s": wall_s / 2}, code=0)
    return Outcome(run=run, wrong=wrong, rows=100)


def test_goals_compare_with_the_peers_that_ran() -> None:
    alone = Outcomes("events", 1_000, {OURS: [outcome(10, 800)]})
    assert [goal.name for goal in build_report(alone).goals] == ["events: share of right rows"]

    both = Outcomes(
        "events", 1_000, {OURS: [outcome(10, 800)], STREAMING: [outcome(15, 400, wrong=7)]}
    )
    report = build_report(both)
    assert {goal.name: (goal.measured, goal.goal) for goal in report.goals} == {
        f"events: wall of {STREAMING} / {OURS}": (1.5, 1.3),
        f"events: peak memory of {STREAMING} / {OURS}": (0.5, 1.0),
        "events: share of right rows": (1.0, 1.0),
    }
    assert {result.name: result.value for result in report.results}[
        f"events: {STREAMING}, wrong rows in all rounds"
    ] == 7
    assert all(f"{STREAMING} left 7 wrong rows" in chart.note for chart in report.charts)


def test_wrong_rows_of_penstock_miss_the_goal() -> None:
    wrong = Outcomes("events", 1_000, {OURS: [outcome(10, 800), outcome(10, 800, wrong=1)]})
    (goal,) = build_report(wrong).goals
    assert goal.measured == pytest.approx(0.995)
    assert not goal.holds


def test_a_peer_that_is_not_installed_is_left_out_and_named(tmp_path: Path) -> None:
    said: list[str] = []
    assert list(contestants(Bench(say=said.append), STREAMING)) == [OURS]
    assert "alone" in said.pop()

    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = pyspark ]\n')  # has only that module
    python.chmod(0o755)
    bench = Bench(say=said.append, peers=python)
    assert list(contestants(bench, "Pathway", BATCH)) == [OURS, BATCH]
    assert said == ["Pathway is not installed, and left out"]


@pytest.mark.slow
def test_penstock_builds_the_table_in_a_process_of_its_own(tmp_path: Path) -> None:
    inputs = Inputs.write(EVENTS, tmp_path / "inputs")
    before = sorted(tmp_path.rglob("*"))
    found = run_once(inputs, prepare_penstock, sqlite_target)
    assert (found.wrong, found.rows) == (0, len(ROWS))
    assert found.job_s is not None
    assert 0 < found.job_s < found.run.seconds
    assert found.run.output["tasks"][0]["documents"] == EVENTS.count
    assert sorted(tmp_path.rglob("*")) == before, "a run does not modify the inputs"
