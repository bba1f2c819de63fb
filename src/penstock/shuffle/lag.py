"""PURE: how far a reader is behind, and which documents nobody may read yet.

It is counted by a session that hands out everything at once, so it is what a task would get: only
what is committed, each document once, and nothing before its read delay is over. Where records lie
in pages that are not at hand, their summaries are counted instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.journal.state import Fragment, JournalState
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Flag, Producer
from penstock.model.frontier import Frontier
from penstock.shuffle.binding import Binding
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.history import Needed, NeedPages, NeedRows
from penstock.shuffle.reads import Read, first_clock
from penstock.shuffle.rounds import WaitUntil
from penstock.shuffle.state import SessionState

_NEWEST: Final = (1 << 62) - 1
"""A revision that is not before any: all that was loaded is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncommitted:
    """Documents of one producer in one collection that it has not committed yet."""

    collection: str
    producer: Producer
    documents: int
    first: Clock
    last: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLag:
    """What a reader has before it."""

    documents: int = 0
    bytes: int = 0
    """As they are stored."""
    oldest: Clock | None = None
    exact: bool = True
    held: int = 0
    """Documents that read delays hold back, beside those."""
    held_since: Clock | None = None
    due: Clock | None = None
    """When the first of them may be read."""
    uncommitted: tuple[Uncommitted, ...] = ()


def reading_lag(
    bindings: Sequence[Binding],
    resume: Frontier,
    journals: Mapping[str, Mapping[str, JournalState]],
    now: Clock,
) -> ReadingLag:
    """Return how far a reader that resumes here is behind journals, given by collection."""
    state = SessionState(bindings, resume=resume)
    for collection in state.collections:
        state.learn(collection, _NEWEST, journals.get(collection, {}))
    taken, due, exact = _take_all(state, now)
    deliveries = [delivery for each in taken for delivery in each.deliveries]
    documents = sum(each.documents for each in taken)
    stored = sum(each.bytes for each in taken)
    held, held_since = 0, None
    for read in state.reads:
        if not exact:
            documents += _rows_left(read)
            stored += read.history.bytes_from(read.position)
        elif due is not None and read.binding.read_delay:
            held += _rows_left(read)
            held_since = _earlier(held_since, _next_clock(read))
    return ReadingLag(
        documents=documents,
        bytes=stored,
        oldest=min((delivery.commit for delivery in deliveries), default=None),
        exact=exact,
        held=held,
        held_since=held_since,
        due=due,
        uncommitted=_uncommitted(state),
    )


def _take_all(state: SessionState, now: Clock) -> tuple[list[Checkpoint], Clock | None, bool]:
    """Return all checkpoints, when more is due, and false if something has to be looked up."""
    taken: list[Checkpoint] = []
    state.request()
    while True:
        step = state.advance(now)
        if isinstance(step, NeedPages | NeedRows):
            return taken, None, False
        if (checkpoint := state.answer()) is not None:
            taken.append(checkpoint)
            state.request()
        elif isinstance(step, WaitUntil):
            return taken, step.clock, True
        elif step is None:
            return taken, None, True


def _rows_left(read: Read) -> int:
    end = read.history.state.end
    try:
        records = list(read.history.between(read.position, end))
    except Needed:
        return end - read.position  # ACKs take offsets, too, but few
    return sum(
        record.end - max(record.begin, read.position)
        for record in records
        if isinstance(record, Fragment)
    )


def _next_clock(read: Read) -> Clock | None:
    try:
        record = read.history.first(read.position)
    except Needed:
        return None
    return None if record is None else first_clock(record)


def _earlier(a: Clock | None, b: Clock | None) -> Clock | None:
    return b if a is None else a if b is None else min(a, b)


def _uncommitted(state: SessionState) -> tuple[Uncommitted, ...]:
    """Return what is open; a collection that two bindings read counts once."""
    found: dict[tuple[str, Producer], dict[str, tuple[int, Clock, Clock]]] = {}
    for read in state.reads:
        for producer in read.open_producers():
            key = (read.binding.collection.name, producer)
            found.setdefault(key, {})[read.history.name] = _span(read, producer)
    return tuple(
        Uncommitted(
            collection=collection,
            producer=producer,
            documents=sum(each[0] for each in spans.values()),
            first=min(each[1] for each in spans.values()),
            last=max(each[2] for each in spans.values()),
        )
        for (collection, producer), spans in sorted(found.items())
        if any(each[0] for each in spans.values())
    )


def _span(read: Read, producer: Producer) -> tuple[int, Clock, Clock]:
    """Return the rows of an open span, and its first and last clock; none if they lie in pages."""
    begin = max(read.state(producer).offset, 0)
    rows, first, last = 0, CLOCK_MAX, NEVER
    try:
        for record in read.history.between(begin, read.history.state.end):
            for run in record.runs if isinstance(record, Fragment) else ():
                is_open = run.producer == producer and run.kind is Flag.CONTINUE_TXN
                if is_open and record.begin + run.last_offset >= begin:
                    rows += run.rows
                    first, last = min(first, run.clock_min), max(last, run.clock_max)
    except Needed:
        pass
    return rows, first, last
