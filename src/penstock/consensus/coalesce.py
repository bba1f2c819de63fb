"""Group commit: compare-and-sets that wait together share one store transaction.

There is no timer. A transaction starts as soon as a slot is free; units that arrive while all slots
are busy go together in the next one. So batches grow exactly when the store is the bottleneck, and
a lone caller never waits for others.

`plan_batch` chooses (pure), `GroupCommit` acts. What holds:

- **FIFO per key.** A key is in at most one running transaction, and no unit overtakes an earlier
  one of the same key; units of one key may share a transaction (a chain n, n+1, n+2).
- **No unit fails because of another.** If a transaction fails determinately, for a reason that may
  lie in one of its units, each unit is tried again alone, in order.
- **An answer comes after the commit.** A crash between commit and answer loses the answer, which
  callers of any store have to expect, and never the entry.
- **A caller that goes away changes nothing**: its unit still runs.

Merging the *payloads* of several callers would be wrong: what a caller appends depends on the
state it saw. So would be refusing early from the memory of what was last committed here, since
others may write to the same store.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from penstock.consensus.backend import Backend, CommitOutcome, Unit
from penstock.consensus.store import (
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    cause_chain,
)

_STORE_WIDE = frozenset(
    {
        ErrorKind.UNAVAILABLE,
        ErrorKind.OVERLOADED,
        ErrorKind.UNDEFINED_TABLE,
        ErrorKind.STORE_RESET,
    }
)
"""Failures of the store, not of a unit: trying units one by one would only wait n times."""

Outcome = CasResult | ConsensusError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCommitOptions:
    """Limits on one store transaction.

    Past some 128 appends the fixed cost of a commit is amortised, and a larger batch only makes its
    callers wait longer.
    """

    elements_max: int = 128
    """0 turns group commit off: every unit is a transaction of its own (a safety valve)."""
    bytes_max: int = 8 << 20
    concurrency: int | None = None
    """Transactions at once; None takes what the backend recommends."""

    def __post_init__(self) -> None:
        if self.elements_max < 0 or self.bytes_max < 1 or self.concurrency == 0:
            raise ValueError(f"group commit cannot work with {self}")


def plan_batch(
    waiting: Iterable[Unit], busy: Container[str], options: GroupCommitOptions
) -> list[int]:
    """Return the positions of the `waiting` units that the next transaction carries.

    Walks in order of arrival and skips a unit iff it shares a key with a running transaction or
    with an earlier unit that was skipped. Ends at the first unit that would pass a limit, so that
    a large one is not overtaken for ever; a unit alone may be larger than the limits.
    """
    chosen: list[int] = []
    skipped: set[str] = set()
    elements = size = 0
    for position, unit in enumerate(waiting):
        if any(key in busy or key in skipped for key, _ in unit):
            skipped.update(key for key, _ in unit)
            continue
        elements += len(unit)
        size += size_of(unit)
        if chosen and (elements > options.elements_max or size > options.bytes_max):
            break
        chosen.append(position)
    return chosen


def size_of(unit: Unit) -> int:
    """Return the bytes of a unit's payloads."""
    return sum(len(new.data) for _, new in unit)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A unit and the future of its outcome, which is a value even if an error."""

    unit: Unit
    outcome: asyncio.Future[Outcome]


class GroupCommit:
    """Gathers units and commits them; lives on one event loop."""

    def __init__(self, backend: Backend, options: GroupCommitOptions | None = None) -> None:
        self._backend = backend
        self._options = options or GroupCommitOptions()
        self._slots = self._options.concurrency or backend.traits.commit_concurrency
        self._waiting: deque[_Waiter] = deque()
        self._busy: set[str] = set()
        self.bytes_total = 0
        """Bytes of all units that wait or are being committed, even if their callers have left."""
        self._running: set[asyncio.Task[None]] = set()
        self._pump_due = False
        self._closed = False

    @property
    def queue_depth(self) -> int:
        """Number of units that wait for a transaction."""
        return len(self._waiting)

    async def commit(self, unit: Unit) -> CasResult:
        """Commit one unit; raises its `ConsensusError`."""
        outcome = await self._enqueue(unit)
        if isinstance(outcome, ConsensusError):
            raise outcome
        return outcome

    async def commit_each(self, units: Sequence[Unit]) -> list[Outcome]:
        """Commit independent units, in order where they share a key; one outcome each."""
        return await asyncio.gather(*[self._enqueue(unit) for unit in units])

    async def close(self) -> None:
        """Refuse new units, finish those that wait and run."""
        self._closed = True
        while self._running or self._waiting:
            self._pump()
            await asyncio.wait(self._running)

    def _enqueue(self, unit: Unit) -> asyncio.Future[Outcome]:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(unit, loop.create_future())
        if self._closed:
            waiter.outcome.set_result(Determinate(ErrorKind.UNAVAILABLE, "the store is closed"))
            return waiter.outcome
        self._waiting.append(waiter)
        self.bytes_total += size_of(unit)
        if not self._pump_due:  # at the end of this turn of the loop, so that its units go together
            self._pump_due = True
            loop.call_soon(self._pump)
        return waiter.outcome

    def _pump(self) -> None:
        """Start transactions while there are a free slot and a unit that may go."""
        self._pump_due = False
        while self._waiting and len(self._running) < self._slots:
            if not (batch := self._take()):
                return
            self._busy |= (keys := {key for waiter in batch for key, _ in waiter.unit})
            task = asyncio.get_running_loop().create_task(self._run(batch, keys))
            self._running.add(task)
            task.add_done_callback(self._finished)

    def _take(self) -> list[_Waiter]:
        positions = plan_batch((w.unit for w in self._waiting), self._busy, self._options)
        if not positions:
            return []
        walked = [self._waiting.popleft() for _ in range(positions[-1] + 1)]
        chosen = set(positions)
        skipped = [waiter for i, waiter in enumerate(walked) if i not in chosen]
        self._waiting.extendleft(reversed(skipped))
        return [walked[i] for i in positions]

    async def _run(self, batch: list[_Waiter], keys: set[str]) -> None:
        try:
            await self._commit_isolating(batch)
        finally:
            self._busy -= keys
            self.bytes_total -= sum(size_of(waiter.unit) for waiter in batch)
            # Only if the event loop itself is being torn down is any caller left without an answer.
            unknown = Indeterminate(ErrorKind.UNAVAILABLE, "the committer was stopped")
            _answer(batch, [unknown] * len(batch))

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._pump()

    async def _commit_isolating(self, batch: list[_Waiter]) -> None:
        try:
            commit = await self._attempt(batch)
        except Determinate as error:
            if len(batch) == 1 or error.kind in _STORE_WIDE:
                _answer(batch, [error] * len(batch))
                return
        else:
            _answer(batch, commit.outcomes)
            return
        for position, waiter in enumerate(batch):
            try:
                commit = await self._attempt([waiter])
            except Determinate as error:
                if error.kind in _STORE_WIDE:
                    _answer(batch[position:], [error] * (len(batch) - position))
                    return
                _answer([waiter], [error])
            else:
                _answer([waiter], commit.outcomes)

    async def _attempt(self, batch: list[_Waiter]) -> CommitOutcome:
        """Run one transaction. A backend that breaks its promise leaves the outcome unknown."""
        try:
            return await self._backend.commit([waiter.unit for waiter in batch])
        except Determinate:
            raise
        except Exception as error:
            unknown = Indeterminate(ErrorKind.INTERNAL, cause_chain(error))
            unknown.__cause__ = error
            return CommitOutcome(revision=None, outcomes=(unknown,) * len(batch))


def _answer(batch: Sequence[_Waiter], outcomes: Sequence[Outcome]) -> None:
    for waiter, outcome in zip(batch, outcomes, strict=True):
        if not waiter.outcome.done():  # its caller may have left
            waiter.outcome.set_result(outcome)
