"""The consistency benchmark: moves that keep the total, torn reads, and one real kill."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pyarrow.parquet
import pytest

from penstock_bench.consistency import Observer, Outcome, Plan, build_report, penstock
from penstock_bench.money import (
    OPENED,
    TABLES,
    Moves,
    Reads,
    run_in_background,
    to_files,
    wrong_rows,
)

MOVES = Moves(accounts=40, per_append=50)


def test_the_total_is_the_same_after_every_append() -> None:
    for appends in range(1, 12):
        checking, savings = MOVES.balances(appends)
        assert sum(checking.values()) + sum(savings.values()) == MOVES.total
    assert set(MOVES.balances(1)[0].values()) == {OPENED}
    assert MOVES.total == 2 * 40 * OPENED


def test_each_append_moves_money_in_both_directions() -> None:
    checking, savings = MOVES.generate(3)
    assert (checking.balance + savings.balance == 0).all()
    assert 0 < (checking.balance > 0).sum() < MOVES.per_append
    assert abs(checking.balance.sum()) > 0, "half of an append would show in the total"
    assert (MOVES.generate(3)[0].balance == checking.balance).all()
    assert (MOVES.generate(4)[0].balance != checking.balance).any()


@pytest.mark.parametrize(("appends", "visible"), [(0, 0), (1, 0), (2, 100), (5, 400)])
def test_the_number_of_moves_shows_how_many_appends_are_visible(appends: int, visible: int) -> None:
    parts = [part for number in range(appends) for part in MOVES.generate(number)]
    assert MOVES.visible(appends) == visible == sum(part.moves.sum() for part in parts)


def test_documents_and_files_hold_the_generated_moves() -> None:
    part = MOVES.generate(2)[1]
    assert part.batch().to_pylist() == part.table().to_pylist()
    assert [row["account"] for row in part.table().to_pylist()] == part.account.tolist()


def test_an_append_is_a_file_in_each_directory(tmp_path: Path) -> None:
    async def append_two() -> None:
        async with to_files(MOVES, tmp_path) as append:
            await append(0)
            await append(1)

    asyncio.run(append_two())
    names = {str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/*")}
    assert names == {f"{table}/part-00000{n}.parquet" for table in TABLES for n in (0, 1)}
    savings = pyarrow.parquet.read_table(tmp_path / "savings" / "part-000001.parquet")
    assert savings.to_pylist() == MOVES.generate(1)[1].table().to_pylist()


def test_a_read_is_torn_if_money_is_missing_or_doubled() -> None:
    reads = Reads(100)
    for total, moves in [(0, 0), (0, 0), (100, 0), (100, 4), (70, 6), (100, 8), (100, 8), (125, 9)]:
        reads.count_read(total, moves)
    assert (reads.count, reads.torn, reads.largest_error, reads.states) == (6, 2, 30, 5)
    assert reads.torn_share == pytest.approx(1 / 3)
    reads.count_read(0, 0)
    assert (reads.count, reads.largest_error) == (7, 100), "money that was seen before is missing"


def test_a_reader_that_has_seen_nothing_misses_the_goal() -> None:
    outcome = Outcome(contestant="x", kills=1, appends=1, reads=Reads(100), rows=10, wrong=0)
    assert [goal.holds for goal in build_report([outcome]).goals] == [False, True]


@pytest.mark.parametrize(
    ("found", "wrong"), [({1: 5, 2: 6}, 0), ({1: 5}, 1), ({1: 5, 2: 7}, 1), ({1: 5, 2: 6, 3: 0}, 1)]
)
def test_rows_are_wrong_if_missing_different_or_unexpected(
    found: dict[int, int], wrong: int
) -> None:
    assert wrong_rows(found, {1: 5, 2: 6}) == wrong


def test_an_error_in_a_thread_is_raised_in_its_waiter() -> None:
    def fail(done: threading.Event) -> None:
        done.wait()
        raise RuntimeError("it broke")

    def wait() -> None:
        with run_in_background(fail) as thread:
            thread.check()
            thread.end()

    with pytest.raises(RuntimeError, match="it broke"):
        wait()


@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_reads_of_two_tables_of_a_killed_task_are_never_torn(
    tmp_path: Path, postgres_url: str
) -> None:
    plan = Plan(seconds=0.5, lives_s=(0.2, 1.0), kills_min=1)
    observer = Observer(penstock(), MOVES, tmp_path / "here", postgres_url, random.Random(1))
    outcome = observer.observe(plan)
    assert (outcome.kills, outcome.reads.torn, outcome.wrong) == (1, 0, 0)
    assert outcome.rows == 80
    assert outcome.reads.count > outcome.reads.states >= 2
    assert outcome.reads.moves == MOVES.visible(outcome.appends)
    assert all(goal.holds for goal in build_report([outcome]).goals)
