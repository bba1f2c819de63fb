"""What a document means to its producer: new, a duplicate, a commit, or a failure undone.

Writers append at least once and may die at any point, so a journal holds duplicates, spans that
were never closed, and spans that were closed by discarding them. Readers see each committed
document once because every reader keeps, per (binding, journal, producer), the state below and asks
one question of each document:

    outcome = sequence(state, kind, clock)                       # decides, changes nothing
    effects = effects_of(state, outcome, clock, offset, bounds)  # what the reader does about it
    state = advance(state, outcome, clock, offset)               # changes, decides nothing

States are values: a reader whose append fails simply keeps the one it had.

A **span** is a run of CONTINUE documents with no ACK of their producer among them. Three clocks
decide everything: the document's, L (`last_commit`) and X (`max_continue`). L only falls on a *deep
rollback*, by which a writer admits that it lost its write-ahead log.
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
    """What one reader knows of one producer in one journal.

    A span is open iff `max_continue` is not zero, or `gapped`. `offset` is signed as in
    `ProducerFrontier`.
    """

    last_commit: Clock = NEVER
    max_continue: Clock = NEVER
    """Greatest clock of the open span; zero if there is none. Not persisted: spans are re-read."""
    offset: int = 0
    gapped: bool = False
    """The span begins before the offset that reading resumed at: its rows are to be replayed."""

    def report(self, producer: Producer) -> ProducerFrontier:
        """The frontier entry of this state; an open span without a commit reports the floor."""
        observed = self.max_continue != NEVER and self.last_commit == NEVER
        return ProducerFrontier(
            producer=producer,
            last_commit=OBSERVED_FLOOR if observed else self.last_commit,
            offset=self.offset,
        )


class Outcome(enum.Enum):
    """What a document is to the state it met. The last four are never met in a sound journal."""

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
    OUTSIDE_WITH_PRECEDING_CONTINUE = "is outside of transactions, but its producer has a span open"
    ACK_PARTIAL_COMMIT = "would commit a part of the open span"
    REPLAY_MEETS_CLOSE = "commits a span which the checkpoint says was open here"
    ILLEGAL_CLOCK = "has a clock that no publisher stamps"

    @property
    def is_duplicate(self) -> bool:
        """The document changes nothing at all."""
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
        """The journal contradicts itself; `refusal` says how."""
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
    """What a document of this kind and clock is to its producer's state.

    The observed floor is not a clock of documents: it stands for having committed nothing.
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
    """The state after the document at `offset`, which `sequence` gave this outcome."""
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
    """Which clocks a binding wants: `not_before <= clock < not_after`, and none truncated away.

    Documents outside of the bounds are not delivered, and are sequenced all the same.
    """

    not_before: Clock = UNIX_EPOCH
    not_after: Clock = CLOCK_MAX
    truncated_at: Clock = NEVER

    def admit(self, clock: Clock) -> bool:
        """Whether a document of this clock is delivered."""
        return self.not_before <= clock < self.not_after and clock >= self.truncated_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What a reader does about a document, beside storing the state after it."""

    append: bool = False
    """Deliver the document, once its span commits."""
    close: bool = False
    """Progress was made that others may be told of: flush, and extract hints if it is an ACK."""
    extract_hints: bool = False
    void: range | None = None
    """Offsets at which rows of this producer were appended, and must never become visible.

    Visibility compares clocks, and a producer that commits after a rollback passes the clocks of
    the rows it discarded.
    """


NOTHING: Final = Effects()


def effects_of(
    state: ProducerState, outcome: Outcome, clock: Clock, offset: int, bounds: Bounds
) -> Effects:
    """The effects of the document at `offset` that met `state` with this outcome."""
    match outcome:
        case Outcome.OUTSIDE_COMMIT:
            return Effects(append=bounds.admit(clock), close=True)
        case Outcome.CONTINUE_BEGIN_SPAN | Outcome.CONTINUE_EXTEND_SPAN:
            return Effects(append=bounds.admit(clock))
        case Outcome.ACK_COMMIT | Outcome.ACK_EMPTY:
            return Effects(close=True, extract_hints=True)
        case Outcome.ACK_CLEAN_ROLLBACK | Outcome.ACK_DEEP_ROLLBACK:
            return Effects(close=True, extract_hints=True, void=range(state.offset, offset))
        case _:
            return NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where to read a journal from, and the state of each producer there."""

    offset: int
    states: dict[Producer, ProducerState]


def resume(entries: Iterable[ProducerFrontier]) -> Resume:
    """Resume one (journal, binding) from its checkpoint entries.

    Reading starts at the cut floor, the furthest offset that any entry names, and not at the oldest
    open span: one abandoned span would make every restart read everything after it. The span of a
    *gapped* producer begins before the floor, and is replayed if that producer is heard of again.
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
    """The state to replay a gapped span with, after `REPLAY_FIRST`.

    Replay the producer's rows from `state.offset` up to the document that asked for it, judging
    each with `sequence_replay`; then sequence that document again. If nothing is left of the span,
    it was removed with its fragments, and the document meets a state without a span.
    """
    if not state.gapped:
        raise ValueError("only a gapped producer is replayed")
    return replace(state, gapped=False)


def sequence_replay(state: ProducerState, kind: Flag, clock: Clock) -> Outcome:
    """As `sequence`, for a row within a replayed range, where the checkpoint says no commit is."""
    outcome = sequence(state, kind, clock)
    return Outcome.REPLAY_MEETS_CLOSE if outcome.is_commit else outcome


class SequenceError(PenstockError):
    """A journal's documents contradict each other, or the checkpoint; the session must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The document an error is about."""

    journal: str
    binding: int
    offset: int
    producer: Producer


_FIX: Final = {
    Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE: "one writer per producer: find who else uses this one",
    Outcome.ACK_PARTIAL_COMMIT: (
        "roll back with the producer's last commit in this journal, "
        "and not at all where it never committed"
    ),
    Outcome.REPLAY_MEETS_CLOSE: "the checkpoint is not of this journal; reset this binding",
    Outcome.ILLEGAL_CLOCK: "write to journals with a publisher, which stamps documents",
}


def refusal(
    outcome: Outcome, state: ProducerState, kind: Flag, clock: Clock, at: Position
) -> SequenceError:
    """The error of a fatal outcome, with everything needed to find the document and its cause."""
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
