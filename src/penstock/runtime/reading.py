"""PURE: leaders of tasks that read collections: what a transaction has read, and when it closes.

A head that is `Idle` asks for a checkpoint while it holds none, takes what it holds into the open
transaction as long as the close policy lets it, and closes the transaction then. What closing leads
to is the kind's.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Self, TypeVar

from penstock.model.clock import NEVER, Clock, elapsed
from penstock.model.frontier import EMPTY, Frontier
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.runtime.close_policy import ClosePolicy, Decision, Inputs
from penstock.runtime.machine import Leader, State
from penstock.runtime.protocol import Event
from penstock.shuffle.delivery import Checkpoint, Delivery

SMALL_DOCS: Final = 100_000
SMALL_BYTES: Final = 4 << 20
"""Documents and their stored size up to which a transaction is small: more than one task would cost
more than they save."""


@dataclass(frozen=True, slots=True)
class CheckpointReady(Event):
    """The next checkpoint of the shuffle. At most one is held: `ReadingLeader.wants_more`."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTransaction:
    """A transaction, as far as it is about reading."""

    opened: Clock
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints taken in so far."""
    extents: Frontier = field(default_factory=lambda: EMPTY)
    read_docs: int = 0
    read_bytes: int = 0
    sealed: bool = False
    """Its input is gathered already."""
    closed: Clock = NEVER

    def extend(self, checkpoint: Checkpoint) -> Self:
        """Take one more checkpoint in.

        A checkpoint without unresolved hints completes the peeks before it: hints of theirs that it
        does not resolve were given up by the shuffle.
        """
        extents = self.extents.reduce(checkpoint.frontier)
        if not checkpoint.is_peek:
            extents = extents.clear_discharged_hints()
        return replace(
            self,
            checkpoints=(*self.checkpoints, checkpoint),
            extents=extents,
            read_docs=self.read_docs + checkpoint.documents,
            read_bytes=self.read_bytes + checkpoint.bytes,
        )

    @property
    def is_small(self) -> bool:
        return self.read_docs <= SMALL_DOCS and self.read_bytes <= SMALL_BYTES

    def deliveries(self) -> dict[int, list[Delivery]]:
        """Return the rows it reads, by binding."""
        found: dict[int, list[Delivery]] = {}
        for checkpoint in self.checkpoints:
            for delivery in checkpoint.deliveries:
                found.setdefault(delivery.binding, []).append(delivery)
        return found


X = TypeVar("X", bound=ReadTransaction)


@dataclass(frozen=True, slots=True)
class Idle(State, Generic[X]):
    """Waits for a checkpoint, or until the open transaction may close."""

    txn: X | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLeader(Leader):
    """A session of a task that reads collections, as far as it got."""

    held: Checkpoint | None = None
    """Waits to be taken in."""
    replay: Frontier | None = None
    """The frontier that was resumed from, if one transaction is to be replayed exactly."""

    @property
    @abc.abstractmethod
    def policy(self) -> ClosePolicy:
        """When transactions close."""

    @property
    @abc.abstractmethod
    def shards(self) -> int:
        """The number of shards of the task."""

    @property
    @abc.abstractmethod
    def last_close(self) -> Clock:
        """When the last transaction closed, in this session or before."""

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

    def decide(self, txn: ReadTransaction) -> Decision:
        """Ask the close policy about the open transaction."""
        last_close = self.last_close
        since = last_close if last_close > OBSERVED_FLOOR else self.session_start
        return self.policy.decide(
            Inputs(
                open_age=elapsed(self.clock, txn.opened),
                last_close_age=elapsed(self.clock, since),
                combiner_bytes=txn.read_bytes // self.shards,
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
