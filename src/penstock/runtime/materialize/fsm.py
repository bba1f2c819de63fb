"""PURE: how a leader takes a materialization from transaction to transaction.

The head builds a transaction and commits it, the tail finishes the one that was committed before;
so the next transaction is read while the last one still becomes visible. `state.py` draws both;
`runtime/machine.py` and `runtime/tail.py` have what all kinds of leaders share.

What holds here, and why:

- *One record is under way at most.* The head writes only when the tail is done (it flushes no
  earlier), and the tail only while the head builds (a commit is what starts the tail).
- *Nothing visible precedes the hint; nothing that follows from a commit precedes its record.* Both
  wait in a state of their own: what comes next is chained to the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from penstock.errors import Bug
from penstock.model.clock import Clock
from penstock.runtime import tail
from penstock.runtime.connector.materialize import Pattern
from penstock.runtime.machine import (
    AwaitingRecord,
    Done,
    LeaderMachine,
    Stepped,
    Stopped,
    rotate,
    session_clocks,
    unexpected,
)
from penstock.runtime.materialize.messages import (
    Acknowledge,
    CallTrigger,
    Flush,
    Flushed,
    Gather,
    Gathered,
    Store,
    Stored,
    TriggerCalled,
)
from penstock.runtime.materialize.state import (
    Flushing,
    Gathering,
    MaterializeLeader,
    Storing,
    Triggering,
)
from penstock.runtime.materialize.task import LeaderTask, Memory, Plan
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import (
    Acknowledged,
    Action,
    Event,
    IntentsWritten,
    Persisted,
    RecordKind,
    StartedCommit,
    StatsWritten,
    Stop,
    out_of_turn,
)
from penstock.runtime.reading import CheckpointReady, Idle
from penstock.runtime.recovery import Persist, Recovered
from penstock.runtime.tail import Committing, Unfinished, WritingIntents

Turn: TypeAlias = tuple[MaterializeLeader, Action | None]


def start(
    task: LeaderTask, recovered: Recovered, now: Clock, *, seq_no: int = 0
) -> Stepped[MaterializeLeader]:
    """Begin a session from what an earlier one left: its tail is repeated, whatever it did of it.

    `seq_no` is that of the last record before, so that numbers do not repeat in a session.
    """
    resume = recovered.resume
    clock, skew = session_clocks(recovered, now)
    left = Unfinished(acknowledge=Acknowledge(patches=()), intents=recovered.ack_intents)
    unfinished, action = tail.finish(left)
    leader = MaterializeLeader(
        task=task,
        head=Idle(),
        tail=unfinished,
        memory=Memory(
            last_close=recovered.committed_close,
            max_keys=recovered.max_keys,
            last_source_clocks=recovered.last_source_clocks,
        ),
        pending_trigger=recovered.trigger_params,
        replay=resume if resume.unresolved_hints else None,
        seq_no=seq_no,
        clock=clock,
        skew=skew,
        session_start=clock,
        draining=task.drain,
        transactions_max=task.transactions_max,
    )
    return MACHINE.begin(leader, action)


# ----------------------------------------------------------------------------------------- the head


def _head_turn(leader: MaterializeLeader) -> Turn | None:
    """Move an idle head; no other moves of itself."""
    match leader.head:
        case Idle(txn=None):
            return _open(leader)
        case Idle(txn=Transaction() as txn):
            return _extend_or_close(leader, txn)
        case _:
            return None


def _open(leader: MaterializeLeader) -> Turn | None:
    if leader.stopping:
        return (replace(leader, head=Stopped()), Stop()) if leader.tail_done else None
    if leader.held is None:
        return None
    return _extend(leader, Transaction(task=leader.task, before=leader.memory, opened=leader.clock))


def _extend(leader: MaterializeLeader, txn: Transaction) -> Turn | None:
    if leader.held is None:
        return None
    return replace(leader, head=Idle(txn.extend(leader.held)), held=None), None


def _extend_or_close(leader: MaterializeLeader, txn: Transaction) -> Turn | None:
    decision = leader.decide(txn)
    if leader.held is not None and decision.may_extend:
        return _extend(leader, txn)
    if decision.may_close and isinstance(leader.tail, Done):
        return _close(leader, txn, leader.tail.patches)
    if (
        leader.task.plan(tail_done=leader.tail_done) is Plan.OVERLAP
        and decision.ripe
        and not txn.extents.unresolved_hints
        and leader.replay is None
        and not txn.sealed
    ):
        sealed = replace(txn, sealed=True)
        return replace(leader, head=Gathering(sealed)), Gather(sealed)
    return None


def _close(leader: MaterializeLeader, txn: Transaction, acknowledged: Patches) -> Turn:
    if leader.replay is not None:
        txn.check_replay(leader.replay)
        leader = replace(leader, stopping=True)  # a replay is all that its session does
    plan = Plan.OVERLAP if txn.sealed else leader.task.plan(tail_done=True)
    txn = replace(txn, closed=leader.clock, plan=plan)
    return replace(leader, head=Flushing(txn)), Flush(txn, acknowledged)


def _on_flushed(leader: MaterializeLeader, txn: Transaction, event: Flushed) -> Turn:
    """The extents are complete, and are hinted before the transaction is stored or published."""
    txn = replace(txn.fold(event.reports), patches=event.patches)
    if _needs_no_hint(txn):
        published, write = tail.publish(txn)
        return replace(leader, head=published), write
    hint = leader.record(RecordKind.HINT, txn.hint())
    txn = replace(txn, hinted=True)
    if txn.plan.stages:
        published, write = tail.publish(txn)
        return replace(leader, head=AwaitingRecord(write, published)), hint
    return replace(leader, head=AwaitingRecord(Store(txn), Storing(txn))), hint


def _needs_no_hint(txn: Transaction) -> bool:
    """True if nothing at all precedes the commit: then its record says everything."""
    is_silent = txn.task.pattern is Pattern.APPLY and txn.plan.stages and not txn.patches
    return is_silent and txn.task.elide_hints


def _on_stored(leader: MaterializeLeader, txn: Transaction, event: Stored) -> Turn:
    """An endpoint that commits by itself may be ahead: its triggers are durable before."""
    txn = txn.fold(event.reports)
    published, write = tail.publish(txn)
    params = txn.trigger_params()
    if params is None or txn.task.pattern is not Pattern.ENDPOINT:
        return replace(leader, head=published), write
    hint = leader.record(RecordKind.TRIGGER_HINT, Persist(hinted_trigger_params=params))
    return replace(leader, head=AwaitingRecord(write, published)), hint


def _rotate(leader: MaterializeLeader, committed: Committing) -> Turn:
    """The transaction counts. A session that stops leaves what follows to the next one."""
    txn = committed.txn
    if not isinstance(txn, Transaction):
        raise Bug("a materialization committed a transaction of another kind")
    leader = replace(
        rotate(leader, head=Idle()),
        memory=txn.memory(),
        replay=None,
        pending_trigger=txn.trigger_params(),
    )
    if leader.stopping and not leader.draining:
        return replace(leader, tail=Done()), None
    unfinished, action = tail.finish(txn.unfinished(committed.patches))
    return replace(leader, tail=unfinished), action


# ----------------------------------------------------------------------------------------- the tail


def _on_intents_written(leader: MaterializeLeader, event: IntentsWritten) -> Turn:
    done, _ = tail.advance(leader, leader.tail, event)
    params = leader.pending_trigger
    if params is None or not isinstance(leader.tail, WritingIntents):
        return replace(leader, tail=done), None
    patches = leader.tail.patches
    if not leader.task.has_triggers:
        return _forget_trigger(leader, patches)  # they were removed from the task meanwhile
    return replace(leader, tail=Triggering(patches)), CallTrigger(params=params)


def _forget_trigger(leader: MaterializeLeader, patches: Patches) -> Turn:
    record = leader.record(RecordKind.TRIGGER_DONE, Persist(delete_trigger_params=True))
    waiting = AwaitingRecord(None, Done(patches))
    return replace(leader, tail=waiting, pending_trigger=None), record


# ------------------------------------------------------------------------------------------- events


def _receive(leader: MaterializeLeader, event: Event) -> Turn:
    """Give an event to the half that waits for it."""
    match event, leader.head, leader.tail:
        case CheckpointReady(checkpoint), _, _:
            if leader.held is not None:
                raise out_of_turn(event, waits_for="nothing: a checkpoint is held already")
            return replace(leader, held=checkpoint), None
        case Gathered(), Gathering(txn), _:
            return replace(leader, head=Idle(txn)), None
        case Flushed(), Flushing(txn), _:
            return _on_flushed(leader, txn, event)
        case Stored(), Storing(txn), _:
            return _on_stored(leader, txn, event)
        case ((StatsWritten() | StartedCommit()), head, _):
            moved, action = tail.advance(leader, head, event)
            return replace(leader, head=moved), action
        case Persisted(), Committing() as committed, _:
            return _rotate(leader, committed)
        case Acknowledged(), _, at:
            moved, action = tail.advance(leader, at, event)
            return replace(leader, tail=moved), action
        case IntentsWritten(), _, _:
            return _on_intents_written(leader, event)
        case TriggerCalled(), _, Triggering(patches):
            return _forget_trigger(leader, patches)
        case _:
            raise unexpected(leader, event)


MACHINE = LeaderMachine(_head_turn, _receive)
step = MACHINE.step
