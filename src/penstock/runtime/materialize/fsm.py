"""PURE: how a leader takes a materialization from transaction to transaction.

Two machines take turns. The **head** builds a transaction and commits it, the **tail** finishes the
one that was committed before; so the next transaction is read while the last one still becomes
visible. `state.py` draws both. `step` gives a leader an event, lets the machines run until both
wait, and returns what is to be done. It does not look at a clock: `now` is an argument.

What holds at all times, and why:

- *One record is under way at most.* The head writes only when the tail is done (it flushes no
  earlier), and the tail only while the head builds (a commit is what starts the tail).
- *Every shard takes part in every phase, once.* A second answer, or one that nobody waits for, ends
  the session.
- *Nothing visible precedes the hint; nothing that follows from a commit precedes its record.* Both
  wait in a state of their own: what comes next is chained to the answer.
- *Close clocks only grow*, over sessions too, wherever the wall clock goes: they guard endpoints
  against transactions that arrive late.

The ids in the comments are those of the tables in the design of the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from penstock.errors import Bug
from penstock.model.clock import Clock, delta, tick, update
from penstock.model.frontier import Frontier
from penstock.runtime.connector import Pattern
from penstock.runtime.materialize.messages import (
    Acknowledge,
    Acknowledged,
    Action,
    CallTrigger,
    CloseRequested,
    Event,
    Flush,
    Flushed,
    FrontierReady,
    Gather,
    Gathered,
    IntentsWritten,
    Load,
    Loaded,
    Rotate,
    ShardMessage,
    Sleep,
    StartCommit,
    StartedCommit,
    StatsWritten,
    Stop,
    StopRequested,
    Store,
    Stored,
    TriggerCalled,
    Woken,
    WriteIntents,
    WriteStats,
)
from penstock.runtime.materialize.state import (
    Acknowledging,
    Begin,
    Committing,
    Done,
    Extending,
    Flushing,
    Gathering,
    Idle,
    Leader,
    Persisting,
    StartingCommit,
    Stopped,
    Storing,
    Triggering,
    Unfinished,
    WritingIntents,
    WritingStats,
)
from penstock.runtime.materialize.task import Memory, Plan, Task
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.patches import Patches, in_shard_order
from penstock.runtime.protocol import Kind, OutOfTurn, Persisted, PersistRecord, out_of_turn
from penstock.runtime.recovery import Persist, Recovered

Turn: TypeAlias = tuple[Leader, Action | None]
Stepped: TypeAlias = tuple[Leader, tuple[Action, ...]]


# ---------------------------------------------------------------------------------------- the turns


def start(task: Task, recovered: Recovered, now: Clock, *, seq_no: int = 0) -> Stepped:
    """Begin a session from what an earlier one left: its tail is repeated, whatever it did of it.

    `seq_no` is that of the last record before, so that numbers do not repeat in a session.
    """
    latest = max(recovered.committed_close, recovered.hinted_close)
    resume = recovered.resume
    clock = tick(update(now, latest))
    leader = Leader(
        task=task,
        head=Idle(),
        tail=Begin(
            Unfinished(intents=recovered.ack_intents, trigger_params=recovered.trigger_params)
        ),
        memory=Memory(
            last_close=recovered.committed_close,
            max_keys=recovered.max_keys,
            last_source_clocks=recovered.last_source_clocks,
        ),
        replay=resume if resume.unresolved_hints else None,
        seq_no=seq_no,
        clock=clock,
        skew=delta(clock, now),
        session_start=clock,
        draining=task.drain,
    )
    return _settle(leader, [])


def step(leader: Leader, event: Event, now: Clock) -> Stepped:
    """The leader after an event, and what is to be done because of it, in order."""
    if isinstance(leader.head, Stopped):
        raise Bug(f"a session that has stopped is told of {type(event).__name__}")
    clock = update(tick(leader.clock), Clock(now + leader.skew))
    leader, action = _receive(replace(leader, clock=clock), event)
    return _settle(*_emit(leader, action, []))


def _settle(leader: Leader, actions: list[Action]) -> Stepped:
    """Let both machines run until they wait; the tail goes first."""
    while (turn := _tail_turn(leader) or _head_turn(leader)) is not None:
        leader, actions = _emit(*turn, actions)
    if isinstance(leader.head, Idle) and leader.head.txn is not None:
        wake_after = leader.decide(leader.head.txn).wake_after  # H-6
        if wake_after is not None:
            actions.append(Sleep(wake_after))
    return leader, tuple(actions)


def _emit(
    leader: Leader, action: Action | None, actions: list[Action]
) -> tuple[Leader, list[Action]]:
    """Hand an action out, and keep the books that both machines share."""
    match action:
        case None:
            return leader, actions
        case PersistRecord(seq_no=seq_no):
            if leader.persisting:
                raise Bug(f"record {seq_no} was to be written while another one is under way")
            leader = replace(leader, persisting=True, seq_no=seq_no)
        case Stop() if leader.persisting:
            raise Bug("a session was to stop while a record is under way")
        case _:
            pass
    return leader, [*actions, action]


# --------------------------------------------------------------------------- turns without an event


def _head_turn(leader: Leader) -> Turn | None:
    """What the head does of itself; only an idle one does anything."""
    match leader.head:
        case Idle(txn=None):
            return _open(leader)
        case Idle(txn=Transaction() as txn):
            return _extend_or_close(leader, txn)
        case _:
            return None


def _open(leader: Leader) -> Turn | None:
    if leader.stopping:
        if not leader.tail_done:
            return None  # H-2
        return replace(leader, head=Stopped()), Stop()  # H-1
    if leader.held is None:
        return None
    return _load(leader, Transaction(opened=leader.clock), leader.held)  # H-4


def _extend_or_close(leader: Leader, txn: Transaction) -> Turn | None:
    decision = leader.decide(txn)
    if leader.held is not None and decision.may_extend:
        return _load(leader, txn, leader.held)  # H-4
    if decision.may_close and isinstance(leader.tail, Done):
        return _close(leader, txn, leader.tail.patches)  # H-5
    if (
        leader.task.plan(tail_done=leader.tail_done) is Plan.OVERLAP
        and decision.ripe
        and not txn.extents.unresolved_hints
        and leader.replay is None
        and not txn.sealed
        and (leader.held is None or not decision.room)
    ):
        sealed = replace(txn, sealed=True)
        return replace(leader, head=Gathering(sealed)), Gather(transaction=txn.opened)  # H-15
    return None  # H-6


def _load(leader: Leader, txn: Transaction, frontier: Frontier) -> Turn:
    extending = Extending(txn.extend(frontier), frozenset(range(leader.task.shards)))
    action = Load(transaction=txn.opened, frontier=frontier)
    return replace(leader, head=extending, held=None), action


def _close(leader: Leader, txn: Transaction, acknowledged: Patches) -> Turn:
    if leader.replay is not None:
        txn.check_replay(leader.replay)
        leader = replace(leader, stopping=True)  # a replay is all that its session does
    plan = Plan.OVERLAP if txn.sealed else leader.task.plan(tail_done=True)
    txn = replace(txn, closed=leader.clock, plan=plan)
    return replace(leader, head=Flushing(txn)), Flush(
        transaction=txn.opened,
        close=txn.closed,
        plan=plan,
        max_keys=leader.memory.max_keys,
        patches=acknowledged,
    )


def _tail_turn(leader: Leader) -> Turn | None:
    """What the tail does of itself: it begins."""
    match leader.tail:
        case Begin() if leader.stopping and not leader.draining:
            return replace(leader, tail=Done()), None  # TL-1: the next session repeats it
        case Begin(left):
            return replace(leader, tail=Acknowledging(left)), Acknowledge(
                patches=left.patches
            )  # TL-2
        case _:
            return None


# ------------------------------------------------------------------------------------------ events


def _receive(leader: Leader, event: Event) -> Turn:
    """Give an event to whoever waits for it."""
    match event:
        case StopRequested(drain):
            return replace(leader, stopping=True, draining=leader.draining or drain), None
        case CloseRequested():
            # H-3: without an open transaction it is forgotten, now or when the next one is.
            is_open = not isinstance(leader.head, Idle) or leader.head.txn is not None
            return replace(leader, close_requested=is_open), None
        case Woken():
            return leader, None
        case FrontierReady(frontier):
            if leader.held is not None:
                raise out_of_turn(event, waits_for="nothing: a frontier is held already")
            return replace(leader, held=frontier), None
        case Persisted():
            return _on_persisted(leader, event)
        case Acknowledged():
            return _on_acknowledged(leader, event)
        case IntentsWritten():
            return _on_intents_written(leader, event)
        case TriggerCalled():
            return _on_trigger_called(leader, event)
        case Loaded():
            return _on_loaded(leader, event)
        case Gathered():
            return _on_gathered(leader, event)
        case Flushed():
            return _on_flushed(leader, event)
        case Stored():
            return _on_stored(leader, event)
        case StatsWritten():
            return _on_stats_written(leader, event)
        case StartedCommit():
            return _on_started_commit(leader, event)


def _on_persisted(leader: Leader, event: Persisted) -> Turn:
    if not leader.persisting or event.seq_no != leader.seq_no:
        expected = f"record {leader.seq_no}" if leader.persisting else "no record"
        raise out_of_turn(event, waits_for=expected, where=f"record {event.seq_no}")
    leader = replace(leader, persisting=False)
    match leader.head, leader.tail:
        case Committing(txn, patches), _:
            return _rotate(leader, txn, patches)
        case Persisting(then=then, next=then_head), _:
            return replace(leader, head=then_head), then  # H-9
        case _, Persisting(then=then, next=then_tail):
            return replace(leader, tail=then_tail), then
        case _:
            raise Bug("a record was written for nobody")


# The head


def _on_loaded(leader: Leader, event: Loaded) -> Turn:
    if not isinstance(leader.head, Extending):
        raise _unexpected(leader, event)
    txn, waiting = leader.head.txn, leader.head.waiting
    waiting = _answered(waiting, event)
    txn = txn.measure(event).fold(event.shard, event.reports, leader.task)
    return replace(leader, head=Extending(txn, waiting) if waiting else Idle(txn)), None  # H-7


def _on_gathered(leader: Leader, event: Gathered) -> Turn:
    if not isinstance(leader.head, Gathering):
        raise _unexpected(leader, event)
    return replace(leader, head=Idle(leader.head.txn)), None  # H-16


def _on_flushed(leader: Leader, event: Flushed) -> Turn:
    """H-8: when all shards have, the extents are complete, and are hinted."""
    if not isinstance(leader.head, Flushing):
        raise _unexpected(leader, event)
    task = leader.task
    patches = _and_of(leader.head.patches, event, task)
    txn = leader.head.txn.fold(event.shard, event.reports, task)
    if len(patches) < task.shards:
        return replace(leader, head=Flushing(txn, patches)), None
    txn = replace(txn, patches=in_shard_order(patches))
    store = Store(transaction=txn.opened)
    everyone = frozenset(range(task.shards))
    if _needs_no_hint(txn, task):
        return replace(leader, head=Storing(txn, everyone)), store
    storing = Storing(replace(txn, hinted=True), everyone)
    hint = leader.record(Kind.HINT, txn.hint(task))
    return replace(leader, head=Persisting(store, storing)), hint


def _needs_no_hint(txn: Transaction, task: Task) -> bool:
    """Whether nothing at all precedes the commit: then its record says everything."""
    is_silent = task.pattern is Pattern.APPLY and txn.plan.stages and not txn.patches
    return is_silent and task.elide_hints


def _on_stored(leader: Leader, event: Stored) -> Turn:
    """H-10. An endpoint that commits by itself may be ahead: its triggers are durable before."""
    if not isinstance(leader.head, Storing):
        raise _unexpected(leader, event)
    task = leader.task
    waiting = _answered(leader.head.waiting, event)
    txn = leader.head.txn.fold(event.shard, event.reports, task)
    if waiting:
        return replace(leader, head=Storing(txn, waiting)), None
    write = WriteStats(document=txn.stats(leader.memory, task))
    params = None if txn.plan.stages else txn.trigger_params(task)
    if params is None or task.pattern is not Pattern.ENDPOINT:
        return replace(leader, head=WritingStats(txn)), write
    hint = leader.record(Kind.TRIGGER_HINT, Persist(hinted_trigger_params=params))
    return replace(leader, head=Persisting(write, WritingStats(txn))), hint


def _on_stats_written(leader: Leader, event: StatsWritten) -> Turn:
    """H-11: what is published is durable, and the ACKs for it go into the commit."""
    if not isinstance(leader.head, WritingStats):
        raise _unexpected(leader, event)
    txn = replace(leader.head.txn, intents=event.intents)
    return replace(leader, head=StartingCommit(txn)), StartCommit(
        close=txn.closed, checkpoint=txn.checkpoint, patches=txn.patches
    )


def _on_started_commit(leader: Leader, event: StartedCommit) -> Turn:
    """H-12, H-13: the commit. What follows it is left to the next session if this one stops."""
    if not isinstance(leader.head, StartingCommit):
        raise _unexpected(leader, event)
    task, txn = leader.task, leader.head.txn
    patches = _and_of(leader.head.patches, event, task)
    if len(patches) < task.shards:
        return replace(leader, head=StartingCommit(txn, patches)), None
    aggregated = in_shard_order(patches)
    commit = leader.record(Kind.COMMIT, txn.commit(task, aggregated))
    if leader.stopping and not leader.draining:
        return replace(leader, head=Persisting(Stop(), Stopped())), commit
    return replace(leader, head=Committing(txn, aggregated)), commit


def _rotate(leader: Leader, txn: Transaction, patches: Patches) -> Turn:
    """The transaction counts: the head is free for the next one, and its tail begins."""
    task = leader.task
    if not leader.tail_done:
        raise Bug("a transaction was committed before the tail of the last one was done")
    transactions = leader.transactions + 1
    left = Unfinished(patches=patches, intents=txn.intents, trigger_params=txn.trigger_params(task))
    return replace(
        leader,
        head=Idle(),
        tail=Begin(left),
        memory=txn.after(leader.memory, task),
        replay=None,
        close_requested=False,  # H-3: it was for this one, or for none
        stopping=leader.stopping or transactions == task.transactions_max,
        transactions=transactions,
    ), Rotate(close=txn.closed, transactions=transactions)


# The tail


def _on_acknowledged(leader: Leader, event: Acknowledged) -> Turn:
    if not isinstance(leader.tail, Acknowledging):
        raise _unexpected(leader, event)
    left = leader.tail.left
    by_shard = _and_of(leader.tail.patches, event, leader.task)
    if len(by_shard) < leader.task.shards:
        return replace(leader, tail=Acknowledging(left, by_shard)), None
    patches = in_shard_order(by_shard)
    writing, write = WritingIntents(left, patches), WriteIntents(intents=left.intents)
    if not patches:
        return replace(leader, tail=writing), write  # TL-4
    record = leader.record(Kind.ACK, Persist(patches=patches))
    return replace(leader, tail=Persisting(write, writing)), record  # TL-3


def _on_intents_written(leader: Leader, event: IntentsWritten) -> Turn:
    if not isinstance(leader.tail, WritingIntents):
        raise _unexpected(leader, event)
    patches, params = leader.tail.patches, leader.tail.left.trigger_params
    if params is None:
        return replace(leader, tail=Done(patches)), None  # TL-5
    if not leader.task.has_triggers:
        return _forget_trigger(leader, patches)  # TL-5: they were removed from the task meanwhile
    return replace(leader, tail=Triggering(patches)), CallTrigger(params=params)  # TL-6


def _on_trigger_called(leader: Leader, event: TriggerCalled) -> Turn:
    if not isinstance(leader.tail, Triggering):
        raise _unexpected(leader, event)
    return _forget_trigger(leader, leader.tail.patches)  # TL-7


def _forget_trigger(leader: Leader, patches: Patches) -> Turn:
    record = leader.record(Kind.TRIGGER_DONE, Persist(delete_trigger_params=True))
    return replace(leader, tail=Persisting(None, Done(patches))), record


# Answers of shards


def _answered(waiting: frozenset[int], event: ShardMessage) -> frozenset[int]:
    """Who is still to answer."""
    if event.shard not in waiting:
        raise _unknown_or_twice(event)
    return waiting - {event.shard}


def _and_of(
    patches: Mapping[int, Patches], event: Flushed | StartedCommit | Acknowledged, task: Task
) -> dict[int, Patches]:
    """The patches of who has answered, with one more."""
    if event.shard in patches or not 0 <= event.shard < task.shards:
        raise _unknown_or_twice(event)
    return {**patches, event.shard: event.patches}


def _unknown_or_twice(event: ShardMessage) -> OutOfTurn:
    return out_of_turn(
        event, waits_for="one answer of each shard", where=f"from shard {event.shard}"
    )


def _unexpected(leader: Leader, event: Event) -> OutOfTurn:
    """Neither machine waits for this."""
    where = None
    if isinstance(event, Loaded | Flushed | Stored | StartedCommit | Acknowledged):
        where = f"from shard {event.shard}"
    states = f"head {type(leader.head).__name__}, tail {type(leader.tail).__name__}"
    return out_of_turn(event, waits_for=f"nothing of the kind ({states})", where=where)
