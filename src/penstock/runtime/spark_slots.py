"""Finds out whether a task waits for a free slot of Spark, and who has them.

Spark knows how many of a job's tasks run, and by group whose jobs they are; the tasks of this
process say here which groups are theirs. Jobs of no group, or of others, are those of "others".
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.engine import is_one_process
from penstock.runtime.awaited import Awaited, spark_slots

if TYPE_CHECKING:
    from pyspark import SparkContext, StatusTracker

OTHERS: Final = "others"

_groups: dict[str, str] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def used_by(task: str, group: str) -> Iterator[None]:
    """Within this, jobs of the group are the task's."""
    with _lock:
        _groups[group] = task
    try:
        yield
    finally:
        with _lock:
            _groups.pop(group, None)


def missing(context: SparkContext, group: str) -> Awaited | None:
    """Return what the jobs of a group wait for, if none of their tasks runs; blocks a moment."""
    tracker = context.statusTracker()
    active = tracker.getActiveStageIds()
    running: Counter[int] = Counter()
    waiting = set()
    for stage in active:
        info = tracker.getStageInfo(stage)
        if info is not None:
            running[stage] = info.numActiveTasks
            if info.numTasks > info.numActiveTasks + info.numCompletedTasks:
                waiting.add(stage)
    ours = _stages(tracker, group)
    if not ours & waiting or any(running[stage] for stage in ours):
        return None
    with _lock:
        groups = dict(_groups)
    owners = {stage: task for other, task in groups.items() for stage in _stages(tracker, other)}
    holders: Counter[str] = Counter()
    for stage, count in running.items():
        if count:
            holders[owners.get(stage, OTHERS)] += count
    if not holders and is_one_process(context.master or ""):
        return None  # its executor is there: the first task is about to be launched
    return spark_slots(dict(holders))


def tasks(tracker: StatusTracker, group: str) -> tuple[int, int] | None:
    """Return how many tasks of a group's newest job are done, and of how many; blocks a moment."""
    jobs = tracker.getJobIdsForGroup(group)
    job = tracker.getJobInfo(max(jobs)) if jobs else None
    found = [tracker.getStageInfo(stage) for stage in job.stageIds] if job is not None else []
    stages = [stage for stage in found if stage is not None]
    if not stages:
        return None
    return sum(s.numCompletedTasks for s in stages), sum(s.numTasks for s in stages)


def _stages(tracker: StatusTracker, group: str) -> set[int]:
    jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group))
    return {stage for job in jobs if job is not None for stage in job.stageIds}
