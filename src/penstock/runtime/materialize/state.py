"""PURE: where a materialization's head can be, and what its leader has beside every leader's.

    head   Idle → (Gathering → Idle →) Flushing → AwaitingRecord → (Storing →) WritingStats
           → StartingCommit → Committing → Idle, or Stopped
    tail   Acknowledging → (AwaitingRecord →) WritingIntents → (Triggering → AwaitingRecord →) Done

How they follow each other is `fsm.py`; the states that are not here are those of
`runtime/tail.py` and `runtime/reading.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.clock import Clock
from penstock.runtime.close_policy import ClosePolicy
from penstock.runtime.machine import State
from penstock.runtime.materialize.task import LeaderTask, Memory
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.patches import Patches
from penstock.runtime.reading import ReadingLeader


@dataclass(frozen=True, slots=True)
class Gathering(State):
    """The input of a sealed transaction is read and combined, while the tail is busy."""

    txn: Transaction


@dataclass(frozen=True, slots=True)
class Flushing(State):
    """Stored documents are loaded, and reduced with new ones."""

    txn: Transaction


@dataclass(frozen=True, slots=True)
class Storing(State):
    """Documents become visible, one by one."""

    txn: Transaction


@dataclass(frozen=True, slots=True)
class Triggering(State):
    """Web hooks are called."""

    patches: Patches
    """Patches of the acknowledgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterializeLeader(ReadingLeader):
    """A session of a materialization, as far as it got."""

    task: LeaderTask
    memory: Memory
    pending_trigger: bytes | None = None
    """Variables of the last committed transaction that web hooks are still to be called with."""

    @property
    def policy(self) -> ClosePolicy:
        return self.task.policy

    @property
    def shards(self) -> int:
        return self.task.shards

    @property
    def last_close(self) -> Clock:
        return self.memory.last_close
