"""Sequencing: is a document new, a duplicate, a commit or a rollback?

Writers append at least once and may die at any point, so a journal holds duplicates, spans that
were never closed, and spans that were closed by discarding them. Readers see each committed
document once, because every reader keeps the state below per (binding, journal, producer) and asks
one question of each document:

    outcome = sequence(state, kind, clock)          # decides, changes nothing
    state = advance(state, outcome, clock, offset)  # changes, decides nothing

States are values: a reader whose append fails keeps the one it had.

A **span** is a sequence of CONTINUE documents with no ACK of their producer among them. Three
clocks decide everything: the document's, L (`last_commit`) and X (`max_continue`). L only falls on
a *deep rollback*, by which a writer admits that it lost its write-ahead log.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from msgspec import Struct
from msgspec.structs import replace

from penstock.errors import PenstockError
from penstock.model.clock import CLOCK_MAX, NEVER, UNIX_EPOCH, Clock, Flag, Producer
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier


class ProducerState(Struct, frozen=True, kw_only=True, gc=False):
    """One reader's state of one producer in one journal.

    A span is open if `max_continue` is not zero, or if `gapped`. `offset` is signed as in
    `ProducerFrontier`.
    """

    last_commit: Clock = NEVER
    max_continue: Clock = NEVER
    """Greatest clock of the open span; zero if none. Not persisted: spans are read again."""
    offset: int = 0
    gapped: bool = False
    """The span begins before the offset where reading resumed: its rows must be replayed."""

    def report(self, producer: Producer) -> ProducerFrontier:
        """Return the frontier entry; an open span without a commit reports the floor."""
        observed = self.max_continue != NEVER and self.last_commit == NEVER
        return ProducerFrontier(
            producer=producer,
            last_commit=OBSERVED_FLOOR if observed else self.last_commit,
            offset=self.offset,
        )


class Outcome(enum.Enum):
    """What a document is to the state it meets. A sound journal never has the last four."""

    OUTSIDE_DUPLICATE = "is covered by an earlier commit"
    OUTSIDE_COMMIT = "commits itself"
    CONTINUE_DUPLICATE = "is covered by an earlier commit or by the open span"
    CONTINUE_BEGIN_SPAN = "begins a span"
    CONTINUE_EXTEND_SPAN = "extends the open span"
    ACK_DUPLICATE = "closes what was closed before"
    ACK_EMPTY = "commits an empty span"
    ACK_COMMIT = "commits the open span"
    ACK_CLEAN_ROLLBACK = "discards the open span, back to the last commit"
    ACK_DEEP_ROLLBACK = "discards the open span, back to before the last commit"
    REPLAY_FIRST = "continues or closes a span whose first rows were not read since resuming"
    OUTSIDE_WITH_PRECEDING_CONTINUE = "is outside any transaction, but a span is open"
    ACK_PARTIAL_COMMIT = "would commit part of the open span"
    REPLAY_MEETS_CLOSE = "commits a span that the checkpoint says is open here"
    ILLEGAL_CLOCK = "has a clock that no publisher stamps"

    @property
    def is_duplicate(self) -> bool:
        """The document changes nothing."""
        return self in _DUPLICATES

    @property
    def is_rollback(self) -> bool:
        """The rows of the open span are void."""
        return self in _ROLLBACKS

    @property
    def is_commit(self) -> bool:
        """A committing close: of itself, of a span, or of an empty span."""
        return self in _COMMITS

    @property
    def is_fatal(self) -> bool:
        """The journal contradicts itself: raise `sequence_error`."""
        return self in _FATAL


_DUPLICATES: Final = frozenset(
    {Outcome.OUTSIDE_DUPLICATE, Outcome.CONTINUE_DUPLICATE, Outcome.ACK_DUPLICATE}
)
_ROLLBACKS: Final = frozenset({Outcome.ACK_CLEAN_ROLLBACK, Outcome.ACK_DEEP_ROLLBACK})
_COMMITS: Final = frozenset({Outcome.OUTSIDE_COMMIT, Outcome.ACK_EMPTY, Outcome.ACK_COMMIT})
_FATAL: Final = frozenset(
    {
        Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE,
        Outcome.ACK_PARTIAL_COMMIT,
        Outcome.REPLAY_MEETS_CLOSE,
        Outcome.ILLEGAL_CLOCK,
    }
)


def sequence(state: ProducerState, kind: Flag, clock: Clock) -> Outcome:
    """Decide the outcome of a document of this kind and clock for its producer's state.

    No document has the observed floor as its clock: it stands for "never committed".
    """
    if not OBSERVED_FLOOR < clock <= CLOCK_MAX:
        return Outcome.ILLEGAL_CLOCK
    match kind:
        case Flag.OUTSIDE_TXN:
            return _sequence_outside(state, clock)
        case Flag.CONTINUE_TXN:
            return _sequence_continue(state, clock)
        case Flag.ACK_TXN:
            return _sequence_ack(state, clock)
        case _:
            assert_never(kind)


def _sequence_outside(state: ProducerState, clock: Clock) -> Outcome:
    if state.max_continue or state.gapped:
        return Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE  # whatever the clock
    if clock <= state.last_commit:
        return Outcome.OUTSIDE_DUPLICATE
    return Outcome.OUTSIDE_COMMIT


def _sequence_continue(state: ProducerState, clock: Clock) -> Outcome:
    if clock <= state.last_commit or clock <= state.max_continue:
        return Outcome.CONTINUE_DUPLICATE
    if state.gapped:
        return Outcome.REPLAY_FIRST
    if state.max_continue == NEVER:
        return Outcome.CONTINUE_BEGIN_SPAN
    return Outcome.CONTINUE_EXTEND_SPAN


def _sequence_ack(state: ProducerState, clock: Clock) -> Outcome:
    is_open = state.max_continue != NEVER or state.gapped
    if clock == state.last_commit:
        return Outcome.ACK_CLEAN_ROLLBACK if is_open else Outcome.ACK_DUPLICATE
    if clock < state.last_commit:
        return Outcome.ACK_DEEP_ROLLBACK if is_open else Outcome.ACK_DUPLICATE
    if state.gapped:
        return Outcome.REPLAY_FIRST
    if not is_open:
        return Outcome.ACK_EMPTY
    if clock >= state.max_continue:
        return Outcome.ACK_COMMIT
    return Outcome.ACK_PARTIAL_COMMIT


def advance(state: ProducerState, outcome: Outcome, clock: Clock, offset: int) -> ProducerState:
    """Return the state after the document at `offset`, whose outcome `sequence` decided."""
    match outcome:
        case Outcome.CONTINUE_BEGIN_SPAN:
            return ProducerState(last_commit=state.last_commit, max_continue=clock, offset=offset)
        case Outcome.CONTINUE_EXTEND_SPAN:
            return ProducerState(
                last_commit=state.last_commit, max_continue=clock, offset=state.offset
            )
        case (
            Outcome.OUTSIDE_COMMIT
            | Outcome.ACK_COMMIT
            | Outcome.ACK_EMPTY
            | Outcome.ACK_CLEAN_ROLLBACK
            | Outcome.ACK_DEEP_ROLLBACK
        ):
            return ProducerState(last_commit=clock, offset=-(offset + 1))
        case Outcome.OUTSIDE_DUPLICATE | Outcome.CONTINUE_DUPLICATE | Outcome.ACK_DUPLICATE:
            return state
        case (
            Outcome.REPLAY_FIRST
            | Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE
            | Outcome.ACK_PARTIAL_COMMIT
            | Outcome.REPLAY_MEETS_CLOSE
            | Outcome.ILLEGAL_CLOCK
        ):
            raise ValueError(f"there is no state after a document that {outcome.value}")
        case _:
            assert_never(outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The clocks that a binding wants: `not_before <= clock < not_after`, and not truncated.

    Documents outside the bounds are sequenced, but not delivered.
    """

    not_before: Clock = UNIX_EPOCH
    not_after: Clock = CLOCK_MAX
    truncated_at: Clock = NEVER

    def admit(self, clock: Clock) -> bool:
        """True if a document of this clock is delivered."""
        return self.not_before <= clock < self.not_after and clock >= self.truncated_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The offset to read a journal from, and the state of each producer there."""

    offset: int
    states: dict[Producer, ProducerState]


def resume(entries: Iterable[ProducerFrontier]) -> Resume:
    """Resume one (journal, binding) from its checkpoint entries.

    Reading starts at the cut floor, the furthest offset that any entry names, and not at the oldest
    open span: one abandoned span would make every restart read everything after it. The span of a
    *gapped* producer begins before the floor, and is replayed if that producer writes again.
    """
    entries = tuple(entries)
    floor = max((abs(entry.offset) for entry in entries), default=0)
    return Resume(
        offset=floor,
        states={
            entry.producer: ProducerState(
                last_commit=entry.last_commit,
                offset=entry.offset,
                gapped=entry.is_open and entry.offset < floor,
            )
            for entry in entries
        },
    )


def begin_replay(state: ProducerState) -> ProducerState:
    """Return the state to replay a gapped span with, after `REPLAY_FIRST`.

    Replay the producer's rows from `state.offset` up to the document with that outcome, deciding
    each with `sequence_replay`; then sequence that document again. If nothing is left of the span,
    it was removed with its fragments, and the document meets a state without a span.
    """
    if not state.gapped:
        raise ValueError("only a gapped producer can be replayed")
    return replace(state, gapped=False)


def sequence_replay(state: ProducerState, kind: Flag, clock: Clock) -> Outcome:
    """Like `sequence`, for a row in a replayed range, where the checkpoint says no commit is."""
    outcome = sequence(state, kind, clock)
    return Outcome.REPLAY_MEETS_CLOSE if outcome.is_commit else outcome


class SequenceError(PenstockError):
    """A journal's documents contradict each other or the checkpoint. The session must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The document that an error is about."""

    journal: str
    binding: int
    offset: int
    producer: Producer


_FIX: Final = {
    Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE: "one writer per producer: find the other writer",
    Outcome.ACK_PARTIAL_COMMIT: (
        "roll back to the producer's last commit in this journal, "
        "or not at all where it never committed"
    ),
    Outcome.REPLAY_MEETS_CLOSE: "the checkpoint is of another journal: reset this binding",
    Outcome.ILLEGAL_CLOCK: "write to journals with a publisher, which stamps documents",
}


def sequence_error(
    outcome: Outcome, state: ProducerState, kind: Flag, clock: Clock, at: Position
) -> SequenceError:
    """Return the error of a fatal outcome, with what helps to find the document and its cause."""
    return SequenceError(
        f"{kind.name} document cannot be sequenced: it {outcome.value}",
        where=(
            f"journal {at.journal}, binding {at.binding}, offset {at.offset}, "
            f"producer {at.producer}"
        ),
        why=(
            f"clock {clock:#x} after last commit L={state.last_commit:#x} "
            f"and open span X={state.max_continue:#x}"
            + (", which began before reading resumed" if state.gapped else "")
        ),
        fix=_FIX[outcome],
    )
