"""PURE: how a transaction is published, and finished once it is committed.

    WritingStats → [StartingCommit →] Committing
                                      → [Acknowledging → (AwaitingRecord →)] WritingIntents → Done

A materialization goes through the first line in its head, because its endpoint must commit before
the next transaction may be flushed, and hands over after the commit; the second line is its tail.
A kind that publishes to journals hands over when its transaction closes, and goes through both
lines in its tail: nothing of it is visible before its ACKs.

Everything in the second line is durable, and can be repeated: the next session begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from penstock.journal.transaction import Intents
from penstock.model.json_order import Json
from penstock.runtime.machine import AwaitingRecord, Done, Leader, State, unexpected
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
    WriteIntents,
    WriteStats,
)
from penstock.runtime.recovery import Persist


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """The rest of a committed transaction."""

    acknowledge: Action | None = None
    """Tells the endpoint, or the source; answered by `Acknowledged`."""
    intents: Intents


class ClosedTransaction(Protocol):
    """A transaction that takes nothing more, and whose documents are published or staged."""

    def stats(self) -> dict[str, Json]:
        """Return its statistics document."""
        ...

    def with_intents(self, intents: Intents) -> Self:
        """Return the transaction with the ACKs of what it published."""
        ...

    def start_commit(self) -> Action | None:
        """Return the action before the commit record, answered by `StartedCommit`; None if none."""
        ...

    def commit(self, patches: Patches) -> Persist:
        """Return the record that makes it count. `patches` are those of `StartedCommit`."""
        ...

    def unfinished(self, patches: Patches) -> Unfinished:
        """Return what is left to do once that record is durable."""
        ...


@dataclass(frozen=True, slots=True)
class WritingStats(State):
    """The statistics are published, and the ACKs for all that was published are drawn up."""

    txn: ClosedTransaction


@dataclass(frozen=True, slots=True)
class StartingCommit(State):
    """The step before the commit record is under way; some endpoints commit by it."""

    txn: ClosedTransaction


@dataclass(frozen=True, slots=True)
class Committing(State):
    """The commit record is being written."""

    txn: ClosedTransaction
    patches: Patches
    """Patches of `StartedCommit`."""


@dataclass(frozen=True, slots=True)
class Acknowledging(State):
    """The endpoint makes the transaction visible, or the source forgets what it gave."""

    left: Unfinished


@dataclass(frozen=True, slots=True)
class WritingIntents(State):
    """The transaction's documents become visible."""

    patches: Patches
    """Patches of `Acknowledged`."""


Move: TypeAlias = tuple[State, Action | None]


def publish(txn: ClosedTransaction) -> Move:
    """Begin to publish a transaction."""
    return WritingStats(txn), WriteStats(document=txn.stats())


def finish(left: Unfinished) -> Move:
    """Begin to finish a committed transaction, of this session or of the one before."""
    if left.acknowledge is not None:
        return Acknowledging(left), left.acknowledge
    return _write_intents(left, ())


def advance(leader: Leader, state: State, event: Event) -> Move:
    """Move on from a state of the leader's head or tail, which waits for `event`."""
    match state, event:
        case WritingStats(txn), StatsWritten(intents):
            txn = txn.with_intents(intents)
            start = txn.start_commit()
            return _commit(leader, txn, ()) if start is None else (StartingCommit(txn), start)
        case StartingCommit(txn), StartedCommit(patches):
            return _commit(leader, txn, patches)
        case Committing(txn, patches), Persisted():
            return finish(txn.unfinished(patches))
        case Acknowledging(left), Acknowledged(patches):
            writing, write = _write_intents(left, patches)
            if not patches:
                return writing, write
            return AwaitingRecord(write, writing), leader.record(
                RecordKind.ACK, Persist(patches=patches)
            )
        case WritingIntents(patches), IntentsWritten():
            return Done(patches), None
        case _:
            raise unexpected(leader, event)


def _commit(leader: Leader, txn: ClosedTransaction, patches: Patches) -> Move:
    return Committing(txn, patches), leader.record(RecordKind.COMMIT, txn.commit(patches))


def _write_intents(left: Unfinished, patches: Patches) -> Move:
    return WritingIntents(patches), WriteIntents(intents=left.intents)
