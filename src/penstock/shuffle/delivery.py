"""PURE: rows that were read and sequenced, until a checkpoint hands them out.

Sequencing finds, at each close, the rows that it committed: a **delivery**. A delivery waits in the
`Outbox` until the checkpoint pipeline lets a frontier pass that covers its commit, and is then part
of exactly one checkpoint.

Invariant: the commits of a frontier lie on closes. So a delivery is handed out whole or not at all,
and what a frontier hands out depends on nothing but the frontiers before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from penstock.errors import Bug
from penstock.journal.committed import VisibleRows
from penstock.model.clock import NEVER, Clock, Producer
from penstock.model.frontier import Frontier


class Delivery(Struct, frozen=True, kw_only=True, gc=False):
    """Rows of one producer in one journal that one close committed, as one binding reads them."""

    journal: str
    binding: int
    producer: Producer
    commit: Clock
    """The clock of the close. No row here is later, and none of the next delivery is earlier."""
    rows: tuple[VisibleRows, ...]
    """In the order of their clocks; a commit without any makes no delivery."""
    bytes: int
    """Their share of what is stored."""
    again: bool = False
    """Its producer went back behind a commit, so that clocks that were passed may come again."""
    level: Clock = NEVER
    """No row comes before this adjusted clock, because its cohort committed others before it: equal
    for what one revision of the store committed, and rising from one to the next (see `order`)."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError(f"the commit at {self.commit:#x} has no rows to deliver")

    @property
    def first(self) -> Clock:
        """The clock of its first row, or an earlier one.

        Not that behind the commit before: that is of this journal, and between the two the same
        producer may have committed to another one, which the same binding reads.
        """
        return max(self.rows[0].run.clock_min, Clock(self.rows[0].clock_gt + 1))

    @property
    def last(self) -> Clock:
        """The clock of its last row, or a later one."""
        return self.rows[-1].run.clock_max


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Documents that a task may process next, and the frontier that they bring it to.

    A *peek* has unresolved hints: its rows may be read ahead, and the transaction that takes them
    must take further checkpoints, up to one without, before it commits.
    """

    frontier: Frontier
    deliveries: tuple[Delivery, ...]
    """Deliveries that no earlier checkpoint had."""

    @property
    def is_peek(self) -> bool:
        return self.frontier.unresolved_hints > 0

    @property
    def bytes(self) -> int:
        """Stored size."""
        return sum(delivery.bytes for delivery in self.deliveries)

    @property
    def documents(self) -> int:
        """An upper bound: only its rows show whether a run repeats itself."""
        return sum(rows.run.rows for each in self.deliveries for rows in each.rows)


class Outbox:
    """Deliveries that no checkpoint has handed out yet."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], dict[Producer, deque[Delivery]]] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Stored size of everything that waits."""
        return self._bytes

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Add what a round has read; of each producer in the order of commits."""
        for delivery in deliveries:
            producers = self._waiting.setdefault((delivery.journal, delivery.binding), {})
            producers.setdefault(delivery.producer, deque()).append(delivery)
            self._bytes += delivery.bytes

    def take(self, frontier: Frontier) -> tuple[Delivery, ...]:
        """Everything that the commits of `frontier` cover, in its order; it is handed out now."""
        taken: list[Delivery] = []
        for read in frontier:
            producers = self._waiting.get((read.journal, read.binding))
            if producers is None:
                continue
            for entry in read.producers:
                queue = producers.get(entry.producer)
                while queue and queue[0].commit <= entry.last_commit:
                    taken.append(queue.popleft())
                if queue and _is_cut(queue[0], entry.last_commit):
                    raise Bug(
                        f"a checkpoint ends within what was committed at {queue[0].commit:#x}",
                        where=f"journal {read.journal}, producer {entry.producer}",
                        why=f"its last commit is {entry.last_commit:#x}",
                    )
                if queue is not None and not queue:
                    del producers[entry.producer]
            if not producers:
                del self._waiting[read.journal, read.binding]
        self._bytes -= sum(delivery.bytes for delivery in taken)
        return tuple(taken)


def _is_cut(delivery: Delivery, last_commit: Clock) -> bool:
    first = delivery.rows[0]
    return (
        not delivery.again and last_commit > first.clock_gt and last_commit >= first.run.clock_min
    )
