"""`penstock bench scale`: what more documents, journals, tasks and history cost.

- Documents: `penstock run` of 2,000,000 events and of ten times as many to PostgreSQL, each in a
  fresh process: time and CPU per document without start-up, and peak memory (`scale_cost`).
- Journals: the same documents in 10 journals and in 10,000, through a whole task
  (`scale_journals`).
- Tasks: 20 in one process, busy and idle (`scale_tasks`).
- History: the restart of a task after 10 and after 10,000 transactions (`scale_history`).

Every table is checked against an oracle. A quick run has a twentieth of the documents and of the
transactions, and 100 journals; its figures are noisier, and less reliable about flatness.
"""

from __future__ import annotations

from typing import Final

from penstock_bench import scale_cost, scale_history, scale_journals, scale_tasks
from penstock_bench.frame import Bench, Report, Workload

PARTS: Final[tuple[Workload, ...]] = (
    scale_cost.measure,
    scale_journals.measure,
    scale_tasks.measure,
    scale_history.measure,
)


def run(bench: Bench) -> Report:
    """Measure everything that must stay flat, part by part."""
    return Report.merge(part(bench) for part in PARTS)
