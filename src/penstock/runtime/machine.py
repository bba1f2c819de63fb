"""PURE: the machine of a leader, whatever kind of task it leads.

Two halves take turns. The **head** builds a transaction; the **tail** finishes the one before it.
`LeaderMachine.step` gives a leader an event, lets the head run until it waits, and returns what is
to be done. It looks at no clock: `now` is an argument. A kind supplies what its head does of itself
(`head_turn`) and what it does with an event (`receive`); how transactions are published is shared
as well (`runtime/tail.py`).

What holds at all times:

- *One record is under way at most.* Whichever half wants to write a second one is wrong.
- *What follows from a record waits for it.* `AwaitingRecord` has the next action and state.
- *Clocks only grow*, over sessions too, wherever the wall clock goes: they guard endpoints against
  transactions that arrive late.
- *A session stops at a boundary*, with nothing under way, and does nothing more.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from penstock.errors import Bug
from penstock.model.clock import NEVER, Clock, catch_up, elapsed, tick
from penstock.runtime.patches import Patches
from penstock.runtime.protocol import (
    Action,
    CloseRequested,
    Event,
    OutOfTurn,
    Persisted,
    PersistRecord,
    RecordKind,
    Sleep,
    Stop,
    StopRequested,
    Woken,
    out_of_turn,
)
from penstock.runtime.recovery import Persist, Recovered


class State:
    """Where a head or a tail is. A state has what its exit needs, and nothing else."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AwaitingRecord(State):
    """A record is being written; then `then` is done, and the state is `next`."""

    then: Action | None
    next: State


@dataclass(frozen=True, slots=True)
class Stopped(State):
    """The end of a head."""


@dataclass(frozen=True, slots=True)
class Done(State):
    """The end of a tail: the next transaction may follow."""

    patches: Patches = ()
    """Patches of the acknowledgement, which the next transaction hands to the connector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader(abc.ABC):
    """A session, as far as it got: what leaders of every kind have."""

    head: State
    tail: State
    clock: Clock
    skew: Clock = NEVER
    """The lead of an earlier session's clocks over the wall clock when this session began."""
    session_start: Clock
    stopping: bool = False
    draining: bool = False
    """The tail of the last transaction is finished before the session stops."""
    close_requested: bool = False
    transactions: int = 0
    transactions_max: int = 0
    """After which the session stops; zero is never."""
    seq_no: int = 0
    persisting: bool = False
    """True while record `seq_no` is under way."""

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """True if there is a transaction that a request to close is about."""

    @property
    def wake_after(self) -> Clock | None:
        """When time alone changes what the head would do."""
        return None

    @property
    def tail_done(self) -> bool:
        return isinstance(self.tail, Done)

    def record(self, kind: RecordKind, record: Persist) -> PersistRecord:
        """Return the action that writes the next record."""
        return PersistRecord(seq_no=self.seq_no + 1, kind=kind, record=record)


L = TypeVar("L", bound=Leader)
Turn: TypeAlias = tuple[L, Action | None]
Stepped: TypeAlias = tuple[L, tuple[Action, ...]]


def session_clocks(recovered: Recovered, now: Clock) -> tuple[Clock, Clock]:
    """Return the first clock of a session, later than any of an earlier one, and its skew."""
    clock = tick(catch_up(now, max(recovered.committed_close, recovered.hinted_close)))
    return clock, elapsed(clock, now)


def rotate(leader: L, *, head: State) -> L:
    """Hand a transaction over to the tail, which must be done: the head is free for the next."""
    if not leader.tail_done:
        raise Bug("a transaction was handed over before the tail of the last one was done")
    transactions = leader.transactions + 1
    return replace(
        leader,
        head=head,
        close_requested=False,  # it was for this one, or for none
        stopping=leader.stopping or transactions == leader.transactions_max,
        transactions=transactions,
    )


def unexpected(leader: Leader, event: Event) -> OutOfTurn:
    """Return the error for an event that neither half waits for."""
    states = f"head {type(leader.head).__name__}, tail {type(leader.tail).__name__}"
    return out_of_turn(event, waits_for=f"nothing of the kind ({states})")


@dataclass(frozen=True, slots=True)
class LeaderMachine(Generic[L]):
    """The transitions of one kind of leader."""

    head_turn: Callable[[L], Turn[L] | None]
    """Moves a head that waits for nothing; None if it waits."""
    receive: Callable[[L, Event], Turn[L]]
    """Takes an event of the kind, an answer that the tail waits for, or a `Persisted` that no
    `AwaitingRecord` waits for. Raises `unexpected`."""

    def begin(self, leader: L, action: Action | None) -> Stepped[L]:
        """Begin a session with this action, if any."""
        return self._settle(*_emit(leader, action, []))

    def step(self, leader: L, event: Event, now: Clock) -> Stepped[L]:
        """Return the leader after an event, and what is to be done because of it, in order."""
        if isinstance(leader.head, Stopped):
            raise Bug(f"a session that has stopped receives {type(event).__name__}")
        clock = catch_up(tick(leader.clock), Clock(now + leader.skew))
        leader, action = self._receive(replace(leader, clock=clock), event)
        return self._settle(*_emit(leader, action, []))

    def _settle(self, leader: L, actions: list[Action]) -> Stepped[L]:
        """Let the head run until it waits."""
        while (turn := self.head_turn(leader)) is not None:
            leader, actions = _emit(*turn, actions)
        if (wake_after := leader.wake_after) is not None:
            actions.append(Sleep(wake_after))
        return leader, tuple(actions)

    def _receive(self, leader: L, event: Event) -> Turn[L]:
        match event:
            case StopRequested(drain):
                return replace(leader, stopping=True, draining=leader.draining or drain), None
            case CloseRequested():
                # Without an open transaction it is forgotten, now or when the next one is.
                return replace(leader, close_requested=leader.is_open), None
            case Woken():
                return leader, None
            case Persisted():
                return self._on_persisted(leader, event)
            case _:
                return self.receive(leader, event)

    def _on_persisted(self, leader: L, event: Persisted) -> Turn[L]:
        if not leader.persisting or event.seq_no != leader.seq_no:
            expected = f"record {leader.seq_no}" if leader.persisting else "no record"
            raise out_of_turn(event, waits_for=expected, where=f"record {event.seq_no}")
        leader = replace(leader, persisting=False)
        match leader.head, leader.tail:
            case AwaitingRecord(then, head), _:
                return replace(leader, head=head), then
            case _, AwaitingRecord(then, tail):
                return replace(leader, tail=tail), then
            case _:
                return self.receive(leader, event)


def _emit(leader: L, action: Action | None, actions: list[Action]) -> tuple[L, list[Action]]:
    """Hand an action out, and keep the books that both halves share."""
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
