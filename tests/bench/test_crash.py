"""Kills at random moments and at chosen ones, and rows that are wrong after them."""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.bench import crash
from penstock.bench.crash import (
    Deployment,
    Moments,
    Outcome,
    chart,
    crash_points,
    die_at,
    judged,
    kill_at_random,
    together,
)
from penstock.bench.events import Events, Table
from penstock.errors import Unavailable

# Counts files twice if it dies between its two commits; sleeps, so that kills meet it.
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
    """A contestant without Spark, whose kind of mistake is known."""

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

    def opening(self) -> Sequence[str | Path]:
        return [sys.executable, "-c", "pass"]

    def counted(self) -> list[str]:
        rows = sqlite3.connect(self.work / "db").execute("SELECT file FROM counted").fetchall()
        return [file for (file,) in rows]


def test_who_commits_twice_is_found_out_by_random_kills(tmp_path: Path) -> None:
    careless = Careless(tmp_path, lingers_s=0.6)
    killed = kill_at_random(careless, tmp_path / "log", files=9, kills=3, chance=random.Random(3))
    assert 1 <= killed <= 3
    assert careless.given == list(range(9))
    assert careless.held == 0, "all of it was given before the last run"
    assert not list(tmp_path.glob("*.given")), "the last run came to its end"
    counted = careless.counted()
    assert set(counted) == {f"{file:03d}.given" for file in range(9)}
    assert len(counted) > 9


def test_a_process_that_fails_by_itself_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    careless = Careless(tmp_path, lingers_s=0)
    (tmp_path / "db").unlink()
    with pytest.raises(Unavailable, match="careless ended with exit code 1") as raised:
        kill_at_random(careless, tmp_path / "log", files=3, kills=1, chance=random.Random(1))
    assert "no such table: counted" in (raised.value.why or "")


def test_moments_are_drawn_evenly_from_when_spark_is_there() -> None:
    chance = random.Random(2)
    drawn = [Moments(6.0, 10.0).draw(chance) for _ in range(400)]
    assert 6 <= min(drawn) <= max(drawn) <= 10
    assert 80 < sum(moment < 7 for moment in drawn) < 120
    assert Moments(6.0, 5.0).draw(chance) == 5, "it was quicker than the start of Spark once"


def test_points_are_those_of_the_leader_and_of_the_endpoint() -> None:
    points = crash_points()
    assert {"leader.after-hint-record", "postgres.before-commit", *crash.BEFORE} <= set(points)
    assert {point.partition(".")[0] for point in points} == {"leader", "postgres"}


def test_outcomes_of_many_tables_are_one() -> None:
    table = Table.of([(1, 1, 5, 5, "eu"), (2, 1, 6, 6, "us")])
    doubled = Table.of([(1, 2, 10, 5, "eu"), (2, 1, 6, 6, "us")])
    right = judged("Penstock", "aimed kills", 1, table, table)
    wrong = judged("Penstock", "aimed kills", 2, doubled, table)
    both = together([right, wrong])
    assert (both.kills, both.rows, both.wrong, both.right) == (3, 4, 1, 0.75)
    assert [result.value for result in both.results] == [3, 1]
    assert chart("aimed", "kill", [right, wrong]).bars == (("Penstock", 0), ("Penstock", 50))
    unharmed = judged("Penstock", "aimed kills", 0, table, table)
    assert unharmed.right == 0, "nothing was shown by who was never killed"


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
def test_a_task_that_dies_behind_its_endpoints_commit_has_no_wrong_row(
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
