"""The crash benchmark: kills at random moments and at failpoints, and wrong rows after them."""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock_bench import crash
from penstock_bench.crash import (
    Deployment,
    Moments,
    Outcome,
    aimed_failpoints,
    chart,
    die_at,
    judge,
    kill_at_random,
    merge_outcomes,
)
from penstock_bench.events import Events, Table

# Counts a file twice if it dies between its two commits; sleeps there, so that kills hit it.
PROGRAM = """
import pathlib, sqlite3, sys, time
work = pathlib.Path(sys.argv[1])
database = sqlite3.connect(work / "db", isolation_level=None)
for file in sorted(work.glob("*.given")):
    database.execute("INSERT INTO counted VALUES (?)", (file.name,))
    time.sleep(float(sys.argv[2]))
    file.rename(file.with_suffix(".done"))
"""


@dataclass
class Careless:
    """A contestant without Spark that makes a known mistake."""

    work: Path
    lingers_s: float
    given: list[int] = field(default_factory=list)
    held: int = 0
    name: str = "careless"

    def __post_init__(self) -> None:
        sqlite3.connect(self.work / "db").execute("CREATE TABLE counted (file TEXT)").close()

    def give(self, file: int) -> None:
        self.given.append(file)
        self.held += 1
        (self.work / f"{file:03d}.given").touch()

    def trickle(self) -> None:
        self.give_rest()

    def give_rest(self) -> None:
        self.held = 0

    def command(self) -> Sequence[str | Path]:
        return [sys.executable, "-c", PROGRAM, self.work, str(self.lingers_s)]

    def spark_start_command(self) -> Sequence[str | Path]:
        return [sys.executable, "-c", "pass"]

    def counted(self) -> list[str]:
        rows = sqlite3.connect(self.work / "db").execute("SELECT file FROM counted").fetchall()
        return [file for (file,) in rows]


def test_random_kills_expose_a_contestant_that_commits_twice(tmp_path: Path) -> None:
    careless = Careless(tmp_path, lingers_s=0.6)
    killed = kill_at_random(careless, tmp_path / "log", files=9, kills=3, chance=random.Random(3))
    assert 1 <= killed <= 3
    assert careless.given == list(range(9))
    assert careless.held == 0, "everything was given before the last run"
    assert not list(tmp_path.glob("*.given")), "the last run finished"
    counted = careless.counted()
    assert set(counted) == {f"{file:03d}.given" for file in range(9)}
    assert len(counted) > 9


def test_a_process_that_fails_on_its_own_raises_with_its_last_output(tmp_path: Path) -> None:
    careless = Careless(tmp_path, lingers_s=0)
    (tmp_path / "db").unlink()
    with pytest.raises(Unavailable, match="careless ended with exit code 1") as raised:
        kill_at_random(careless, tmp_path / "log", files=3, kills=1, chance=random.Random(1))
    assert "no such table: counted" in (raised.value.why or "")


def test_kills_are_uniform_between_the_start_of_spark_and_the_end() -> None:
    chance = random.Random(2)
    drawn = [Moments(6.0, 10.0).draw(chance) for _ in range(400)]
    assert 6 <= min(drawn) <= max(drawn) <= 10
    assert 80 < sum(moment < 7 for moment in drawn) < 120
    assert Moments(6.0, 5.0).draw(chance) == 5, "a run may be faster than the start of Spark"


def test_aimed_failpoints_are_those_of_the_leader_and_of_the_endpoint() -> None:
    points = aimed_failpoints()
    assert {"leader.after-hint-record", "postgres.before-commit", *crash.REACHED_AFTER} <= set(
        points
    )
    assert {point.partition(".")[0] for point in points} == {"leader", "postgres"}


def test_outcomes_of_many_tables_are_merged() -> None:
    table = Table.of([(1, 1, 5, 5, "eu"), (2, 1, 6, 6, "us")])
    doubled = Table.of([(1, 2, 10, 5, "eu"), (2, 1, 6, 6, "us")])
    right = judge("Penstock", "aimed kills", 1, table, table)
    wrong = judge("Penstock", "aimed kills", 2, doubled, table)
    both = merge_outcomes([right, wrong])
    assert (both.kills, both.rows, both.wrong, both.right) == (3, 4, 1, 0.75)
    assert [result.value for result in both.results] == [3, 1]
    assert chart("aimed", "kill", [right, wrong]).bars == (("Penstock", 0), ("Penstock", 50))
    unharmed = judge("Penstock", "aimed kills", 0, table, table)
    assert unharmed.right == 0, "a contestant that was never killed has shown nothing"


def test_events_are_held_back_until_they_trickle(tmp_path: Path) -> None:
    sizes: list[int] = []
    events = Events(90, 1, accounts=10)
    ours = Deployment(tmp_path, lambda batch: sizes.append(batch.num_rows), events)
    ours.give(0)
    assert sizes == [45]
    ours.trickle()
    assert sizes == [45, 3]
    ours.give_rest()
    assert sum(sizes) == 90


@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_a_task_that_dies_after_its_endpoints_commit_has_no_wrong_row(
    tmp_path: Path, postgres_url: str
) -> None:
    events = Events(2_000, 2, accounts=300)
    outcome = die_at("postgres.after-commit", events, postgres_url, tmp_path / "data")
    assert outcome == Outcome(
        contestant="Penstock",
        kind="aimed kills",
        kills=1,
        rows=len(events.oracle.account),
        wrong=0,
    )
