"""`penstock bench scale`: what more documents, journals, tasks and history cost.

- Documents: `penstock run` of 2,000,000 events and of ten times as many to PostgreSQL, each in a
  fresh process: time and CPU per document without start-up, and peak memory (`scale_cost`).
- Journals: the same documents in 10 and in 10,000, through a whole task (`scale_journals`).
- Tasks: 20 in one process, at work and idle (`scale_tasks`).
- History: the restart of a task after 10 and after 10,000 transactions (`scale_history`).

Every table is checked against what it must be. A quick run has a twentieth of the documents and of
the transactions, and 100 journals: what it says of start-up, noise and flatness is less reliable.
"""

from __future__ import annotations

from typing import Final

from penstock.bench import scale_cost, scale_history, scale_journals, scale_tasks
from penstock.bench.frame import Bench, Report, Workload

PARTS: Final[tuple[Workload, ...]] = (
    scale_cost.measure,
    scale_journals.measure,
    scale_tasks.measure,
    scale_history.measure,
)


def run(bench: Bench) -> Report:
    """Everything that must stay flat, one after the other."""
    return together([part(bench) for part in PARTS])


def together(reports: list[Report]) -> Report:
    """Several reports as one."""
    return Report(
        results=tuple(result for each in reports for result in each.results),
        goals=tuple(goal for each in reports for goal in each.goals),
        charts=tuple(chart for each in reports for chart in each.charts),
    )
