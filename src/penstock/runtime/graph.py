"""PURE: the order in which tasks that read each other's output are run until all have caught up.

A **stage** is a task, or several that read each other's output in a circle, a derivation that reads
its own among them. A stage comes after all stages whose output it reads. A circle has caught up
when running each of its tasks once more does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNode:
    """A task as a node of the graph."""

    name: str
    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Tasks that catch up together."""

    tasks: tuple[int, ...]
    """Positions in the sequence that `stages` was given, ascending."""
    after: frozenset[int]
    """Stages that come before, by position."""
    circular: bool
    """Its tasks read what they write."""


def stages(tasks: Sequence[TaskNode]) -> tuple[Stage, ...]:
    """Return the stages of some tasks, each after those that it depends on."""
    writers: dict[str, list[int]] = {}
    for at, task in enumerate(tasks):
        for collection in task.writes:
            writers.setdefault(collection, []).append(at)
    above = {
        at: [writer for collection in sorted(task.reads) for writer in writers.get(collection, ())]
        for at, task in enumerate(tasks)
    }
    groups = _circles(above)
    stage_of = {at: number for number, group in enumerate(groups) for at in group}
    return tuple(
        Stage(
            tasks=tuple(sorted(group)),
            after=frozenset(stage_of[up] for at in group for up in above[at]) - {number},
            circular=len(group) > 1 or group[0] in above[group[0]],
        )
        for number, group in enumerate(groups)
    )


def _circles(above: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components (Tarjan), upstream ones first."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    path: list[int] = []
    found: list[list[int]] = []

    def visit(at: int) -> None:
        index[at] = low[at] = len(index)
        path.append(at)
        for up in above[at]:
            if up not in index:
                visit(up)
                low[at] = min(low[at], low[up])
            elif up in path:
                low[at] = min(low[at], index[up])
        if low[at] == index[at]:
            start = path.index(at)
            found.append(path[start:])
            del path[start:]

    for at in above:
        if at not in index:
            visit(at)
    return found
