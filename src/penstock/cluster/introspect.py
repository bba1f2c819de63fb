"""What a cluster was told, and what it runs of that, as rows for people.

They are served beside those of its tasks (`runtime.introspection`). Ids are those of the log: rows
of both domains, and of both processes of a split cluster, are told apart by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from penstock.cluster.runner import Runner
from penstock.cluster.sessions import Sessions
from penstock.cluster.state import (
    Claim,
    ClusterMachine,
    ClusterState,
    Command,
    CommandOutcome,
    Compact,
    Diff,
    Open,
    Put,
    Reconcile,
    step,
)
from penstock.runtime.kinds import steps_of
from penstock.scope import Work
from penstock.status import TaskStatus

COMMANDS_MAX: Final = 1_000
"""Kept, the newest of them."""

OPERATOR_BITS: Final = 20
"""An operator's id is that of its dataflow, and its number there in so many bits."""

OF_TASKS: Final = ("dataflows", "operators", "frontiers")
"""Relations of what a process runs; those of what was said are the same everywhere."""

Row = dict[str, Any]
Rows = Callable[[], list[Row] | Awaitable[list[Row]]]


class WitnessedMachine(ClusterMachine):
    """The machine of the log, which keeps what was said in it lately."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=COMMANDS_MAX)
        self._seen = -1
        self._state = ClusterState()

    def apply(self, state: ClusterState, diff: Diff, revision: int) -> ClusterState:
        self._state, outcomes = step(state, diff)
        if revision > self._seen:  # a follower that starts anew reads some of it again
            self._seen = revision
            rows = _rows(diff, self._state, outcomes)
            self._rows.extend({"revision": revision, **row} for row in rows)
        return self._state

    def decode_state(self, data: bytes, format: int, revision: int) -> ClusterState:  # noqa: A002
        self._state = super().decode_state(data, format, revision)
        return self._state

    def commands(self) -> list[Row]:
        """Return what was said lately, and what became of it, the newest first."""
        return list(self._rows)[::-1]

    def sessions(self, sessions: Sessions) -> list[Row]:
        """Return the newest session of each domain, and how far it is in this process."""
        return [
            {
                "domain": domain.value,
                "epoch": newest.epoch,
                "holder": newest.holder,
                "stage": sessions.stage(domain, newest.epoch).name.lower(),
            }
            for domain, newest in self._state.sessions.items()
        ]


def _rows(diff: Diff, after: ClusterState, outcomes: Sequence[CommandOutcome]) -> Iterator[Row]:
    if isinstance(diff, Claim):
        yield {"command": "claim", "holder": diff.holder}
        return
    whose = {"domain": diff.domain.value, "epoch": after.epoch_of(diff.domain)}
    if isinstance(diff, Open):
        yield {"command": "open", **whose, "holder": diff.holder}
        return
    commands = diff.batch if isinstance(diff, Reconcile) else diff.commands
    for command, outcome in zip(commands, outcomes, strict=True):
        word = outcome.name.lower()
        yield {**whose, "epoch": diff.epoch, **_said(command), "outcome": word}


def _said(command: Command) -> Row:
    match command:
        case Put():
            return {"command": "put", "object": command.id, "digest": command.digest}
        case Compact(since=None):
            return {"command": "drop", "object": command.id}
        case Compact():
            return {"command": "compact", "object": command.id, "since": command.since}


def dataflows(runners: Iterable[Runner]) -> list[Row]:
    """Return what runs."""
    return [
        {
            "dataflow_id": runner.wanted.dataflow_id,
            "object": runner.wanted.id,
            "kind": runner.wanted.kind,
            "task": runner.wanted.name,
            "domain": runner.wanted.domain.value,
            "pool": Work(runner.wanted.domain).pool,
            "doing": runner.report.doing,
            "since": runner.report.since,
        }
        for runner in runners
    ]


def frontiers(runners: Iterable[Runner], found: Iterable[TaskStatus]) -> list[Row]:
    """Return how far each of what runs has come, and what lies before it."""
    by_task = {(each.kind, each.task): each for each in found}
    return [
        {
            "dataflow_id": runner.wanted.dataflow_id,
            "object": runner.wanted.id,
            "since": runner.wanted.since,
            "committed": status.last_commit,
            "lag_docs": status.lag_docs,
            "lag_bytes": status.lag_bytes,
            "lag_seconds": status.lag_seconds,
        }
        for runner in runners
        if (status := by_task.get((runner.wanted.kind, runner.wanted.name))) is not None
    ]


def operators(runners: Iterable[Runner]) -> list[Row]:
    """Return the steps of what runs, as its task is declared."""
    return [
        {
            "operator_id": runner.wanted.dataflow_id << OPERATOR_BITS | number,
            "dataflow_id": runner.wanted.dataflow_id,
            "step": word,
            "of": of,
        }
        for runner in runners
        if runner.spec is not None
        for number, (word, of) in enumerate(steps_of(runner.spec))
    ]
