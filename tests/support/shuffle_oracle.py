"""PURE: what readers of journals owe, by looking at every single row.

The shuffle decides from statistics of runs, from frontiers and from hints. Here the same question,
*which documents are committed?*, is answered the slow and obvious way: one row after the other, one
producer at a time, everything remembered. Nothing is shared with what is judged, not even the
table of outcomes, so a mistake would have to be made twice.

    Sequencer   one journal from its first row on, row by row
    Ledger      what a task has committed so far, and whether it may: each document once, in the
                order of commits, only what is committed, and transactions whole
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.model.clock import NEVER, Clock, Flag, Producer


class Stamp(NamedTuple):
    """A row as its producer stamped it, or an ACK."""

    producer: Producer
    kind: Flag
    clock: Clock


class Doc(NamedTuple):
    """A document. Clocks of a producer are unique in the whole store; a repetition is the same."""

    journal: str
    producer: Producer
    clock: Clock


class Contradiction(Exception):
    """The rows of a journal do not make sense together: its readers must refuse it."""


class Violation(AssertionError):
    """The shuffle broke a promise."""


class Disordered(Violation):
    """Documents came in another order than they were committed in."""


class Torn(Violation):
    """A transaction of a writer was shown in part."""


@dataclass(slots=True)
class _Producer:
    committed: Clock = NEVER
    span: list[Clock] = field(default_factory=list)
    """Clocks of what is pending, which rise."""


class Sequencer:
    """Which rows of one journal are committed."""

    def __init__(self) -> None:
        self._producers: dict[Producer, _Producer] = {}

    def read(self, offset: int, stamp: Stamp) -> Sequence[Clock]:
        """The clocks of the rows that this row, or ACK, commits."""
        producer = self._producers.setdefault(stamp.producer, _Producer())
        clock, span = stamp.clock, producer.span
        newest = span[-1] if span else NEVER
        if stamp.kind is Flag.OUTSIDE_TXN:
            if span:
                raise Contradiction(f"offset {offset}: outside of transactions, within a span")
            if clock <= producer.committed:
                return ()
            producer.committed = clock
            return (clock,)
        if stamp.kind is Flag.CONTINUE_TXN:
            if clock > max(producer.committed, newest):
                span.append(clock)
            return ()
        if clock <= producer.committed:
            if span:  # they are discarded, and perhaps a commit is denied
                producer.committed = clock
                producer.span = []
            return ()
        if clock < newest:
            raise Contradiction(f"offset {offset}: acknowledges a part of a span")
        producer.committed = clock
        producer.span = []
        return span


def contradiction(stamps: Iterable[tuple[int, Stamp]]) -> Contradiction | None:
    """How rows contradict each other to somebody who begins to read at the first of them."""
    sequencer = Sequencer()
    try:
        for offset, stamp in stamps:
            sequencer.read(offset, stamp)
    except Contradiction as found:
        return found
    return None


@dataclass(eq=False, slots=True, kw_only=True)
class Written:
    """A transaction of writers that was committed, or will be: its intents are durable."""

    name: str
    docs: tuple[Doc, ...]
    clock: Clock
    """The earliest of its commits."""
    commits: tuple[Doc, ...]
    """Its ACKs."""
    whole: bool
    """Readers can tell what belongs together: its ACKs share a revision, or have hints."""


class Ledger:
    """What a task has processed, judged as it comes.

    `cohorts` are the bindings by cohort, `reads` whether a binding reads a journal, `committed` the
    documents that were committed so far, and `written` the transactions that they came with.
    `revision` says by which revision of the store a document is ordered, if that is certain. `lost`
    says that a document was removed from its journal, `excused` that a cohort could not know
    what belongs to a transaction.
    """

    def __init__(
        self,
        *,
        cohorts: Mapping[int, Sequence[int]],
        reads: Callable[[int, str], bool],
        committed: Collection[Doc],
        written: Mapping[Doc, Written],
        revision: Callable[[int, Doc], int | None],
        lost: Callable[[Doc], bool],
        excused: Callable[[int, Written], bool],
    ) -> None:
        self._cohorts = cohorts
        self._cohort_of = {b: c for c, bindings in cohorts.items() for b in bindings}
        self._reads = reads
        self._committed = committed
        self._written = written
        self._revision = revision
        self._lost = lost
        self._excused = excused
        self._taken: dict[int, set[Doc]] = {b: set() for b in self._cohort_of}
        self._last: dict[tuple[int, str, Producer], Clock] = {}
        self._places: dict[int, tuple[int, Clock, Producer]] = {}
        """By binding, the revision and the stamp of what was committed last."""

    def taken(self, binding: int) -> Collection[Doc]:
        """What was committed of one binding."""
        return self._taken[binding]

    def check(self, docs: Sequence[tuple[int, Doc]]) -> None:
        """Refuse a transaction, of documents in the order they came, that must not be committed."""
        last: dict[tuple[int, str, Producer], Clock] = {}
        touched: dict[tuple[int, int], Written] = {}
        for binding, doc in docs:
            if doc not in self._committed:
                raise Violation(f"binding {binding}: {doc} was given out and is not committed")
            if doc in self._taken[binding]:
                raise Violation(f"binding {binding}: {doc} was given out twice")
            if not self._reads(binding, doc.journal):
                raise Violation(f"binding {binding}: {doc} is none of its journals")
            key = binding, doc.journal, doc.producer
            before = last.get(key, self._last.get(key, 0))
            if doc.clock <= before:
                raise Violation(f"binding {binding}: {doc} comes after {before:#x}")
            last[key] = doc.clock
            if (written := self._written.get(doc)) is not None:
                touched[self._cohort_of[binding], id(written)] = written
        if touched:
            self._check_whole(frozenset(docs), touched)
        self._check_order(docs)

    def _check_order(self, docs: Sequence[tuple[int, Doc]]) -> None:
        """Documents of a binding come in the order of commits; those of one revision, of stamps."""
        places: dict[int, tuple[int, Clock, Producer]] = {}
        for binding, doc in docs:
            if (place := self.place(binding, doc)) is None:
                continue
            if binding in places and place <= places[binding]:
                raise Disordered(f"binding {binding}: {doc} {place} comes after {places[binding]}")
            if binding in self._places and place[0] < self._places[binding][0]:
                raise Disordered(f"binding {binding}: {doc} {place} was passed over")
            places[binding] = place

    def place(self, binding: int, doc: Doc) -> tuple[int, Clock, Producer] | None:
        """Where a document comes: by the revision of its commit, then by its stamp."""
        revision = self._revision(self._cohort_of[binding], doc)
        return None if revision is None else (revision, doc.clock, doc.producer)

    def _check_whole(
        self, docs: frozenset[tuple[int, Doc]], touched: Mapping[tuple[int, int], Written]
    ) -> None:
        for (cohort, _), written in touched.items():
            if not written.whole:
                continue
            lacking = (
                (binding, doc)
                for binding in self._cohorts[cohort]
                for doc in written.docs
                if (binding, doc) not in docs
                and doc not in self._taken[binding]
                and self._reads(binding, doc.journal)
                and not self._lost(doc)
            )
            first = next(lacking, None)
            if first is not None and not self._excused(cohort, written):
                raise Torn(
                    f"cohort {cohort}: transaction {written.name} is torn, "
                    f"binding {first[0]} lacks {first[1]}"
                )

    def commit(self, docs: Sequence[tuple[int, Doc]]) -> None:
        """Documents that `check` let pass are processed for good."""
        for binding, doc in docs:
            self._taken[binding].add(doc)
            self._last[binding, doc.journal, doc.producer] = doc.clock
            if (place := self.place(binding, doc)) is not None:
                self._places[binding] = place

    def missing(self) -> list[tuple[int, Doc]]:
        """What is committed, still there, and was not processed."""
        return [
            (binding, doc)
            for binding, taken in self._taken.items()
            for doc in self._committed
            if doc not in taken and self._reads(binding, doc.journal) and not self._lost(doc)
        ]
