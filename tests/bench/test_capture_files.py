"""The capture benchmark: what is compared, and with which goals."""

from __future__ import annotations

from penstock_bench import capture_files
from penstock_bench.capture_files import DLT, DLT_TABLES, SPARK
from penstock_bench.frame import OURS, Samples


def test_goals_are_for_plain_spark_and_for_the_readers_of_dlt() -> None:
    rates = {"csv": Samples({OURS: [90.0], SPARK: [100.0], DLT: [30.0], DLT_TABLES: [180.0]})}
    report = capture_files.build_report(1_000, rates, {10: 400_000_000, 100: 1_000_000_000})
    goals = {goal.name: (goal.measured, goal.holds) for goal in report.goals}
    assert goals == {
        f"csv, 1,000 documents: documents/s of {OURS} / {SPARK}": (0.9, True),
        f"csv, 1,000 documents: documents/s of {OURS} / {DLT}": (3.0, True),
        "memory: peak of 10 documents / 100": (0.4, False),
    }
    values = {result.name: result.value for result in report.results}
    assert values[f"csv, 1,000 documents: {DLT_TABLES}"] == 180.0
    (chart,) = report.charts
    assert [who for who, _ in chart.bars] == [OURS, SPARK, DLT, DLT_TABLES]
