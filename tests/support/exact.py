"""An exact search for a linearization of one key (after Wing and Gong, with Lowe's memoization).

Is there an order of the operations, consistent with real time, in which each answer is what the
store's specification requires? The search walks orders, remembers the states it has visited, and
relies on three facts that keep it small:

- An operation that changes nothing and is possible now may be taken now: taking it early leaves
  every other choice open. So only writes branch.
- Versions have known tokens, so a slot that was ever read has one possible writer.
- A write without an answer is optional, and useful at most once: of several that were never read,
  the one that was invoked first can stand for all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from support.history import Cas, Head, Op, Outcome, Scan, Truncate, Version

_STATES_MAX = 200_000
"""Visited states after which the search gives up, without a verdict against the history."""


@dataclass(frozen=True, slots=True)
class _State:
    """`done`: answered operations that are already ordered: all below `low`, and those in the bit
    set above it."""

    low: int
    done: int
    head: int
    floor: int


def explain(ops: Sequence[Op], versions: Mapping[int, Version]) -> bool:
    """True if an order exists, or if there are too many to try."""
    search = _Search(ops, versions)
    stack = [_State(0, 0, -1, 0)]
    visited: set[_State] = set()
    while stack:
        state = search.settle(stack.pop())
        if state.low == len(search.answered):
            return True
        if state in visited:
            continue
        visited.add(state)
        if len(visited) > _STATES_MAX:
            return True
        stack.extend(search.branches(state))
    return False


class _Search:
    def __init__(self, ops: Sequence[Op], versions: Mapping[int, Version]) -> None:
        self.answered = sorted(filter(_constrains, ops), key=lambda op: op.invoke)
        self.versions = versions
        self.maybe_appended: dict[int, float] = defaultdict(lambda: math.inf)
        """Maps a slot to the instant from which an unanswered write may fill it."""
        self.maybe_truncated: list[tuple[int, int]] = []
        """(instant, floor) of unanswered truncations, likewise."""
        for op in ops:
            match op.outcome, op.call:
                case Outcome.UNKNOWN, Cas(seqno=seqno, token=token):
                    if seqno not in versions or versions[seqno].token == token:
                        self.maybe_appended[seqno] = min(self.maybe_appended[seqno], op.invoke)
                case Outcome.UNKNOWN, Truncate(seqno=seqno):
                    self.maybe_truncated.append((op.invoke, seqno))
                case _:
                    pass

    def window(self, state: _State) -> tuple[list[int], float]:
        """Return the answered operations that may be next, and the instant by which one must be."""
        horizon = math.inf
        mine: list[int] = []
        for index in range(state.low, len(self.answered)):
            op = self.answered[index]
            if op.invoke > horizon:
                break
            if not state.done >> (index - state.low) & 1:
                mine.append(index)
                horizon = min(horizon, op.back)
        return [index for index in mine if self.answered[index].invoke <= horizon], horizon

    def settle(self, state: _State) -> _State:
        """Take every operation that is possible now and changes nothing."""
        while True:
            window, _ = self.window(state)
            taken = 0
            for index in window:
                if self._holds(self.answered[index], state):
                    taken |= 1 << (index - state.low)
            if not taken:
                return state
            state = _shift(state.low, state.done | taken, state.head, state.floor)

    def branches(self, state: _State) -> Iterator[_State]:
        """Yield every state that one more write leads to."""
        window, horizon = self.window(state)
        if self.maybe_appended.get(state.head + 1, math.inf) <= horizon:
            yield _State(state.low, state.done, state.head + 1, state.floor)
        for invoke, floor in self.maybe_truncated:
            if invoke <= horizon and state.floor < floor <= state.head:
                yield _State(state.low, state.done, state.head, floor)
        for index in window:
            op = self.answered[index]
            done = state.done | 1 << (index - state.low)
            match op.outcome, op.call:
                case Outcome.OK, Cas(seqno=seqno, token=token):
                    expected = self.versions.get(seqno)
                    if seqno == state.head + 1 and expected and expected.token == token:
                        yield _shift(state.low, done, seqno, state.floor)
                case Outcome.OK, Truncate(seqno=seqno, deleted=deleted):
                    counted = deleted is None or deleted == seqno - state.floor
                    if state.floor < seqno <= state.head and counted:
                        yield _shift(state.low, done, state.head, seqno)
                case _:
                    pass

    def _holds(self, op: Op, state: _State) -> bool:
        """True if `op` gets its answer in `state`, and does not change the state."""
        match op.outcome, op.call:
            case Outcome.OK, Head(seen=seen):
                return (-1 if seen is None else seen.seqno) == state.head
            case Outcome.OK, Scan(from_=from_, limit=limit, seen=seen):
                start = max(from_, state.floor)
                size = max(0, state.head + 1 - start)
                size = size if limit is None else min(size, limit)
                return [v.seqno for v in seen] == list(range(start, start + size))
            case Outcome.OK, Truncate(seqno=seqno, deleted=deleted):
                return seqno <= state.floor and seqno <= state.head and deleted in (None, 0)
            case Outcome.MISMATCH, Cas(seqno=seqno):
                return seqno != state.head + 1
            case Outcome.MISMATCH, Truncate(seqno=seqno):
                return seqno > state.head
            case _:
                return False


def _constrains(op: Op) -> bool:
    """False for a failed operation, which did not happen, and for a stale head or a lost batch,
    which may be right whatever the state of this key."""
    match op.outcome, op.call:
        case Outcome.OK, Head(fresh=fresh):
            return fresh
        case Outcome.MISMATCH, Cas(batch=batch):
            return batch is None
        case outcome, _:
            return outcome in (Outcome.OK, Outcome.MISMATCH)


def _shift(low: int, done: int, head: int, floor: int) -> _State:
    while done & 1:
        low, done = low + 1, done >> 1
    return _State(low, done, head, floor)
