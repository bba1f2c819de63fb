"""PURE: where a materialization's head can be, and what its leader has beside every leader's.

    head   Idle → (Gathering → Idle →) Flushing → AwaitingRecord → (Storing →) WritingStats
           → StartingCommit → Committing → Idle, or Stopped
    tail   Acknowledging → (AwaitingRecord →) WritingIntents → (Triggering → AwaitingRecord →) Done

How they follow each other is `fsm.py`; the states that are not here are `runtime/tail.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.clock import Clock, elapsed
from penstock.model.frontier import Frontier
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.runtime.close_policy import Decision, Inputs
from penstock.runtime.machine import Leader, State
from penstock.runtime.materialize.task import LeaderTask, Memory
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.patches import Patches
from penstock.shuffle.delivery import Checkpoint


@dataclass(frozen=True, slots=True)
class Idle(State):
    """Waits for a checkpoint, or until the open transaction may close."""

    txn: Transaction | None = None


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
class MaterializeLeader(Leader):
    """A session of a materialization, as far as it got."""

    task: LeaderTask
    memory: Memory
    replay: Frontier | None = None
    """The frontier that was resumed from, if one transaction is to be replayed exactly."""
    held: Checkpoint | None = None
    """Waits to be taken in."""
    pending_trigger: bytes | None = None
    """Variables of the last committed transaction that web hooks are still to be called with."""

    @property
    def wants_more(self) -> bool:
        """Ask the shuffle for its next checkpoint, unless that was done already.

        Only when the head can take it: a checkpoint that waits for a transaction to commit grows
        old, and what comes after it would wait for two. Also when stopping: an open transaction may
        have to extend before it can close.
        """
        return self.held is None and isinstance(self.head, Idle)

    @property
    def is_open(self) -> bool:
        return not isinstance(self.head, Idle) or self.head.txn is not None

    @property
    def wake_after(self) -> Clock | None:
        if isinstance(self.head, Idle) and self.head.txn is not None:
            return self.decide(self.head.txn).wake_after
        return None

    def decide(self, txn: Transaction) -> Decision:
        """Ask the close policy about the open transaction."""
        last_close = self.memory.last_close
        since = last_close if last_close > OBSERVED_FLOOR else self.session_start
        return self.task.policy.decide(
            Inputs(
                open_age=elapsed(self.clock, txn.opened),
                last_close_age=elapsed(self.clock, since),
                combiner_bytes=txn.read_bytes // self.task.shards,
                read_bytes=txn.read_bytes,
                read_docs=txn.read_docs,
                unresolved_hints=txn.extents.unresolved_hints > 0,
                replay=self.replay is not None,
                sealed=txn.sealed,
                tail_done=self.tail_done,
                close_requested=self.close_requested,
                stopping=self.stopping,
            )
        )
