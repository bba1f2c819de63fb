"""PURE: how a leader takes a derivation from transaction to transaction.

    head   Idle → Transforming → Idle, or Stopped
    tail   WritingStats → Committing → WritingIntents → Done

The head reads checkpoints until the transaction closes, and has the transforms run. Then the tail
publishes it, commits it and makes it visible, while the head reads on. The next transaction's
transforms wait for that: they may publish only when the ACKs of this one are written, and they
start from the state that it commits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.model.clock import Clock
from penstock.runtime import tail
from penstock.runtime.close_policy import ClosePolicy
from penstock.runtime.derive.task import DeriveLeaderTask, DeriveMemory
from penstock.runtime.derive.transaction import DeriveTransaction, TransformRead
from penstock.runtime.machine import (
    LeaderMachine,
    State,
    Stepped,
    Stopped,
    rotate,
    session_clocks,
    unexpected,
)
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import Action, Event, Stop, out_of_turn
from penstock.runtime.reading import CheckpointReady, Idle, ReadingLeader
from penstock.runtime.recovery import Recovered
from penstock.runtime.stats import NONE, Counts
from penstock.runtime.tail import Unfinished

# ------------------------------------------------------------------------------ events and actions


@dataclass(frozen=True, slots=True)
class Transform(Action):
    """Run the transforms over what the transaction has read, and publish the outcome, unseen."""

    txn: DeriveTransaction
    """From here on it has a close clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformed(Event):
    """All documents of the transaction are published, and none is visible."""

    reads: dict[int, TransformRead]
    published: Counts = NONE
    written: Counts = NONE
    patches: Patches = ()


# ------------------------------------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class Transforming(State):
    """The transforms run over the input of a closed transaction."""

    txn: DeriveTransaction


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveLeader(ReadingLeader):
    """A session of a derivation, as far as it got."""

    task: DeriveLeaderTask
    memory: DeriveMemory

    @property
    def policy(self) -> ClosePolicy:
        return self.task.policy

    @property
    def shards(self) -> int:
        return self.task.shards

    @property
    def last_close(self) -> Clock:
        return self.memory.last_close


Turn: TypeAlias = tuple[DeriveLeader, Action | None]


def start(
    task: DeriveLeaderTask, recovered: Recovered, now: Clock, *, seq_no: int = 0
) -> Stepped[DeriveLeader]:
    """Begin a session from what an earlier one left: its ACKs are written again."""
    clock, skew = session_clocks(recovered, now)
    unfinished, action = tail.finish(Unfinished(intents=recovered.ack_intents))
    leader = DeriveLeader(
        task=task,
        head=Idle(),
        tail=unfinished,
        memory=DeriveMemory(
            last_close=recovered.committed_close,
            last_source_clocks=recovered.last_source_clocks,
        ),
        seq_no=seq_no,
        clock=clock,
        skew=skew,
        session_start=clock,
        transactions_max=task.transactions_max,
    )
    return MACHINE.begin(leader, action)


def _head_turn(leader: DeriveLeader) -> Turn | None:
    """Move an idle head; no other moves of itself."""
    match leader.head:
        case Idle(txn=None):
            return _open(leader)
        case Idle(txn=DeriveTransaction() as txn):
            return _extend_or_close(leader, txn)
        case _:
            return None


def _open(leader: DeriveLeader) -> Turn | None:
    if leader.stopping:
        return (replace(leader, head=Stopped()), Stop()) if leader.tail_done else None
    if leader.held is None:
        return None
    txn = DeriveTransaction(task=leader.task, before=leader.memory, opened=leader.clock)
    return replace(leader, head=Idle(txn.extend(leader.held)), held=None), None


def _extend_or_close(leader: DeriveLeader, txn: DeriveTransaction) -> Turn | None:
    decision = leader.decide(txn)
    if leader.held is not None and decision.may_extend:
        return replace(leader, head=Idle(txn.extend(leader.held)), held=None), None
    if not decision.may_close:
        return None
    txn = replace(txn, closed=leader.clock)
    return replace(leader, head=Transforming(txn)), Transform(txn)


def _on_transformed(leader: DeriveLeader, txn: DeriveTransaction, event: Transformed) -> Turn:
    """The transaction is complete: the tail publishes and commits it, and the head is free."""
    txn = replace(
        txn,
        reads=event.reads,
        published=event.published,
        written=event.written,
        patches=event.patches,
    )
    published, write = tail.publish(txn)
    leader = rotate(leader, head=Idle())
    return replace(leader, tail=published, memory=txn.memory()), write


def _receive(leader: DeriveLeader, event: Event) -> Turn:
    """Give an event to the half that waits for it."""
    match event, leader.head:
        case CheckpointReady(checkpoint), _:
            if leader.held is not None:
                raise out_of_turn(event, waits_for="nothing: a checkpoint is held already")
            return replace(leader, held=checkpoint), None
        case Transformed(), Transforming(txn):
            return _on_transformed(leader, txn, event)
        case Transformed(), _:
            raise unexpected(leader, event)
        case _:
            moved, action = tail.advance(leader, leader.tail, event)
            return replace(leader, tail=moved), action


MACHINE = LeaderMachine(_head_turn, _receive)
