"""PURE: where the two machines of a leader can be, and what they share.

    head   Idle ⇄ Extending → (Gathering →) Flushing → Persisting → Storing → WritingStats
           → StartingCommit → Committing → Idle, or Persisting → Stopped
    tail   Begin → Acknowledging → (Persisting →) WritingIntents → (Triggering → Persisting →) Done

Each state has what its exit needs, and nothing else. How they follow each other is `fsm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from penstock.journal.transaction import Intents
from penstock.model.clock import NEVER, Clock, delta
from penstock.model.frontier import Frontier
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.runtime.close_policy import Decision, Inputs
from penstock.runtime.materialize.messages import Action
from penstock.runtime.materialize.task import Memory, Task
from penstock.runtime.materialize.transaction import Transaction
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import Kind, PersistRecord
from penstock.runtime.recovery import Persist

S = TypeVar("S")


# ------------------------------------------------------------------------------------ the states


@dataclass(frozen=True, slots=True)
class Idle:
    """Waits for a frontier, or until the open transaction may close."""

    txn: Transaction | None = None


@dataclass(frozen=True, slots=True)
class Extending:
    """Shards take a frontier in."""

    txn: Transaction
    waiting: frozenset[int]


@dataclass(frozen=True, slots=True)
class Gathering:
    """The input of a sealed transaction is put together, while the tail is busy."""

    txn: Transaction


@dataclass(frozen=True, slots=True)
class Flushing:
    """Shards load what is stored, and reduce."""

    txn: Transaction
    patches: Mapping[int, Patches] = field(default_factory=dict)
    """Of the shards that have answered."""


@dataclass(frozen=True, slots=True)
class Persisting(Generic[S]):
    """Waits until a record is durable; then does `then`, and is `next`."""

    then: Action | None
    next: S


@dataclass(frozen=True, slots=True)
class Storing:
    """Shards store, or say what they staged."""

    txn: Transaction
    waiting: frozenset[int]


@dataclass(frozen=True, slots=True)
class WritingStats:
    """The stats document is published; all that was published gets its ACKs drawn up."""

    txn: Transaction


@dataclass(frozen=True, slots=True)
class StartingCommit:
    """Shards do what must precede the commit record; some endpoints commit by it."""

    txn: Transaction
    patches: Mapping[int, Patches] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committing:
    """Waits until the commit is durable; then the transaction is the tail's."""

    txn: Transaction
    patches: Patches
    """Of all shards."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The end."""


Head: TypeAlias = (
    Idle
    | Extending
    | Gathering
    | Flushing
    | Persisting["Head"]
    | Storing
    | WritingStats
    | StartingCommit
    | Committing
    | Stopped
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What is left to do of a committed transaction. All of it is durable, and can be repeated."""

    patches: Patches = ()
    """Of its commit."""
    intents: Intents
    trigger_params: bytes | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction was committed, or a session begins."""

    left: Unfinished


@dataclass(frozen=True, slots=True)
class Acknowledging:
    """Shards make it visible."""

    left: Unfinished
    patches: Mapping[int, Patches] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WritingIntents:
    """What it published becomes visible."""

    left: Unfinished
    patches: Patches
    """Of the acknowledgements."""


@dataclass(frozen=True, slots=True)
class Triggering:
    """Web hooks are called."""

    patches: Patches


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left; the next transaction may close, and tells shards of these patches."""

    patches: Patches = ()


Tail: TypeAlias = Begin | Acknowledging | Persisting["Tail"] | WritingIntents | Triggering | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """A session, as far as it got."""

    task: Task
    head: Head
    tail: Tail
    memory: Memory
    replay: Frontier | None = None
    """The frontier that was resumed from, if one transaction is to be replayed exactly."""
    held: Frontier | None = None
    """A frontier that waits to be loaded."""
    stopping: bool = False
    draining: bool = False
    """The tail of the last transaction is finished before the session stops."""
    close_requested: bool = False
    transactions: int = 0
    seq_no: int = 0
    persisting: bool = False
    """Whether record `seq_no` is under way."""
    clock: Clock
    skew: Clock = NEVER
    """How far the clocks of an earlier session were ahead of the wall when this one began."""
    session_start: Clock

    @property
    def wants_frontier(self) -> bool:
        """Ask the shuffle for its next checkpoint, unless that was done already.

        Only when the head can take it: a checkpoint that waits for a transaction to commit grows
        old, and what comes after it would wait for two. Also when stopping: an open transaction may
        have to extend before it can close.
        """
        return self.held is None and isinstance(self.head, Idle | Extending)

    @property
    def tail_done(self) -> bool:
        return isinstance(self.tail, Done)

    def decide(self, txn: Transaction) -> Decision:
        """What the close policy says of the open transaction."""
        last_close = self.memory.last_close
        since = last_close if last_close > OBSERVED_FLOOR else self.session_start
        return self.task.policy.decide(
            Inputs(
                open_age=delta(self.clock, txn.opened),
                last_close_age=delta(self.clock, since),
                combiner_bytes=max(txn.combiner_bytes.values(), default=0),
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

    def record(self, kind: Kind, record: Persist) -> PersistRecord:
        return PersistRecord(seq_no=self.seq_no + 1, kind=kind, record=record)
