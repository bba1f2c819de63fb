"""PURE: how a leader takes a capture from transaction to transaction.

    head   Polling → Publishing → Polling, or Stopped
    tail   WritingStats → Committing → Acknowledging → WritingIntents → Done

The head takes whole sequences in until the transaction closes, and has their documents published,
unseen. Then the tail commits it, tells the source and makes it visible, while the head gathers on.
Documents of the next transaction may be published only when the ACKs of this one are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from penstock.model.clock import Clock, elapsed
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.runtime import tail
from penstock.runtime.capture.task import CaptureLeaderTask, CaptureMemory
from penstock.runtime.capture.transaction import BindingCounts, CaptureTransaction
from penstock.runtime.close_policy import Decision, Inputs
from penstock.runtime.connector.capture import CaptureSequence
from penstock.runtime.machine import (
    Leader,
    LeaderMachine,
    State,
    Stepped,
    Stopped,
    rotate,
    session_clocks,
    unexpected,
)
from penstock.runtime.protocol import Action, Event, Stop, out_of_turn
from penstock.runtime.recovery import Recovered
from penstock.runtime.tail import Unfinished

# ------------------------------------------------------------------------------ events and actions


@dataclass(frozen=True, slots=True)
class SequenceReady(Event):
    """The next sequence of the source. At most one is held: `CaptureLeader.wants_more`."""

    sequence: CaptureSequence


@dataclass(frozen=True, slots=True)
class Publish(Action):
    """Read, check and publish the documents of the transaction, unseen."""

    txn: CaptureTransaction
    """From here on it has a close clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsPublished(Event):
    """All documents of the transaction are published, and none is visible."""

    captured: Mapping[int, BindingCounts] = field(default_factory=dict)
    """By binding."""


# ------------------------------------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class Polling(State):
    """Waits for a sequence, or until the open transaction may close."""

    txn: CaptureTransaction | None = None


@dataclass(frozen=True, slots=True)
class Publishing(State):
    """The documents of a closed transaction are being published."""

    txn: CaptureTransaction


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLeader(Leader):
    """A session of a capture, as far as it got."""

    task: CaptureLeaderTask
    memory: CaptureMemory
    held: CaptureSequence | None = None
    """Waits to be taken in."""

    @property
    def wants_more(self) -> bool:
        """Ask the source for its next sequence, unless that was done already."""
        return self.held is None and isinstance(self.head, Polling) and not self.stopping

    @property
    def is_open(self) -> bool:
        return not isinstance(self.head, Polling) or self.head.txn is not None

    @property
    def wake_after(self) -> Clock | None:
        if isinstance(self.head, Polling) and self.head.txn is not None:
            return self.decide(self.head.txn).wake_after
        return None

    def decide(self, txn: CaptureTransaction) -> Decision:
        """Ask the close policy about the open transaction."""
        last_close = self.memory.last_close
        since = last_close if last_close > OBSERVED_FLOOR else self.session_start
        return self.task.policy.decide(
            Inputs(
                open_age=elapsed(self.clock, txn.opened),
                last_close_age=elapsed(self.clock, since),
                combiner_bytes=txn.read_bytes,
                read_bytes=txn.read_bytes,
                read_docs=txn.read_docs,
                tail_done=self.tail_done,
                close_requested=self.close_requested,
                stopping=self.stopping,
            )
        )


Turn: TypeAlias = tuple[CaptureLeader, Action | None]


def start(
    task: CaptureLeaderTask, recovered: Recovered, now: Clock, *, seq_no: int = 0
) -> Stepped[CaptureLeader]:
    """Begin a session from what an earlier one left: its ACKs are written again."""
    clock, skew = session_clocks(recovered, now)
    unfinished, action = tail.finish(Unfinished(intents=recovered.ack_intents))
    leader = CaptureLeader(
        task=task,
        head=Polling(),
        tail=unfinished,
        memory=CaptureMemory(last_close=recovered.committed_close),
        seq_no=seq_no,
        clock=clock,
        skew=skew,
        session_start=clock,
        transactions_max=task.transactions_max,
    )
    return MACHINE.begin(leader, action)


def _head_turn(leader: CaptureLeader) -> Turn | None:
    """Move a head that gathers; no other moves of itself."""
    match leader.head:
        case Polling(txn=None):
            return _open(leader)
        case Polling(txn=CaptureTransaction() as txn):
            return _extend_or_close(leader, txn)
        case _:
            return None


def _open(leader: CaptureLeader) -> Turn | None:
    if leader.stopping:
        # A sequence that is held was not acknowledged: the next session gets it again.
        return (replace(leader, head=Stopped()), Stop()) if leader.tail_done else None
    if leader.held is None:
        return None
    txn = CaptureTransaction(task=leader.task, opened=leader.clock)
    return replace(leader, head=Polling(txn.extend(leader.held)), held=None), None


def _extend_or_close(leader: CaptureLeader, txn: CaptureTransaction) -> Turn | None:
    decision = leader.decide(txn)
    if leader.held is not None and decision.may_extend:
        return replace(leader, head=Polling(txn.extend(leader.held)), held=None), None
    if not decision.may_close:
        return None
    txn = replace(txn, closed=leader.clock)
    return replace(leader, head=Publishing(txn)), Publish(txn)


def _on_published(
    leader: CaptureLeader, txn: CaptureTransaction, event: DocumentsPublished
) -> Turn:
    """The transaction is complete: the tail commits it, and the head is free."""
    txn = replace(txn, captured=event.captured)
    published, write = tail.publish(txn)
    leader = rotate(leader, head=Polling())
    return replace(leader, tail=published, memory=txn.memory()), write


def _receive(leader: CaptureLeader, event: Event) -> Turn:
    """Give an event to the half that waits for it."""
    match event, leader.head:
        case SequenceReady(sequence), _:
            if leader.held is not None:
                raise out_of_turn(event, waits_for="nothing: a sequence is held already")
            return replace(leader, held=sequence), None
        case DocumentsPublished(), Publishing(txn):
            return _on_published(leader, txn, event)
        case DocumentsPublished(), _:
            raise unexpected(leader, event)
        case _:
            moved, action = tail.advance(leader, leader.tail, event)
            return replace(leader, tail=moved), action


MACHINE = LeaderMachine(_head_turn, _receive)
