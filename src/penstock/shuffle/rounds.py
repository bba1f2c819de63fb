"""PURE: what to read next: a round of one lane, cut at one revision of the store per cohort.

A producer writes nothing of its next transaction before every ACK of the last one is written. So if
all journals of a cohort are read up to the same revision, whatever was committed before anything
that was read was read as well, and a checkpoint never shows a part of one transaction beside the
whole of a later one. Read at unrelated paces, journals would tear transactions
that hints alone cannot keep together.

An `Agenda` has the reads of a cohort in the order of the revisions they come to next. Only those
with something to read are in it, so a round costs what it reads: a hundred thousand silent journals
cost nothing.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.journal.state import AckRecord, Record
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer
from penstock.shuffle.delivery import Delivery
from penstock.shuffle.order import level_after
from penstock.shuffle.reads import Announced, FoldContext, Read, ReadFold, first_clock, last_clock


class Agenda:
    """The reads of one cohort, by the revision of the next record of each."""

    def __init__(self, *, cohort: int, delay: int) -> None:
        self.cohort = cohort
        self.delay = delay
        self._heap: list[tuple[int, int, Read]] = []

    def queue(self, read: Read) -> None:
        """Note where a read goes on from `planned`, wherever it was noted before."""
        revision = None if read.parked else read.history.first_revision(read.planned)
        if revision != read.queued:
            read.queued = revision
            if revision is not None:
                heapq.heappush(self._heap, (revision, read.serial, read))

    @property
    def queued(self) -> int:
        """Upper bound of the reads in it."""
        return len(self._heap)

    @property
    def first(self) -> tuple[int, Read] | None:
        """The next revision, and one of the reads that come to it."""
        heap = self._heap
        while heap:
            revision, _, read = heap[0]
            if read.queued == revision:
                return revision, read
            heapq.heappop(heap)  # it was noted elsewhere since
        return None

    def pop(self, revision: int) -> list[Read]:
        """All reads that come to this revision next; each is to be queued again."""
        popped: list[Read] = []
        while (first := self.first) is not None and first[0] == revision:
            heapq.heappop(self._heap)
            first[1].queued = None
            popped.append(first[1])
        return popped


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitUntil:
    """There is something to read, and none of it is due before this instant."""

    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """Most that a round reads; one revision of the store is read whole, whatever its size."""

    bytes: int = 2 << 30
    """Stored size."""
    records: int = 50_000
    """Planning a round takes time by these."""


Awaited = Mapping[Read, Mapping[Producer, Clock]]
"""Commits that a pending checkpoint waits for, of reads that can be read further."""


class _Step(enum.Enum):
    """The outcome of offering a revision to a round."""

    TAKEN = "is in the round"
    FULL = "does not fit, and the round ends before it"
    LATER = "is not due yet"


class Round:
    """The next reads of one lane: revisions of its cohorts, each taken whole or not at all.

    Its reads are `planned` as it is filled, and are to be unplanned if it comes to nothing. Nothing
    is reported of it before the session commits it.
    """

    def __init__(
        self,
        context: FoldContext,
        *,
        lane: int,
        through: int,
        now: Clock,
        limits: RoundLimits,
    ) -> None:
        self.lane = lane
        self._context = context
        self._through = through
        self._now = now
        self._limits = limits
        self._bytes = 0
        self._records = 0
        self.folds: dict[Read, ReadFold] = {}
        self.revisions: dict[int, int] = {}
        """By cohort, the revision that it is read through; cohorts that are read no further are
        absent."""
        self.levels: dict[int, Clock] = {}
        """By cohort, the level of its next revision."""
        self.announced: dict[Announced, Clock] = {}
        """The levels of commits that were hinted, read or not."""
        self.due = CLOCK_MAX
        """When the first thing that is not due yet will be."""

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        """Everything that its reads found to be committed."""
        return tuple(each for fold in self.folds.values() for each in fold.deliveries)

    def fill(self, agendas: Iterable[Agenda], awaited: Awaited) -> None:
        """Take revisions of these cohorts until the round is full, or nothing is left or due.

        Cohorts are kept level: the one whose next document is the oldest goes first. But what
        pending checkpoints wait for comes before that.
        """
        waiting = _by_cohort(awaited)
        going = list(agendas)
        while going:
            agenda = going[0]
            if len(going) > 1:
                agenda = min(
                    going, key=lambda each: (each.cohort not in waiting, _next_clock(each))
                )
            first = agenda.first
            if first is None or first[0] > self._through:
                going.remove(agenda)
                continue
            step = self._take(agenda, first[0])
            if step is _Step.FULL:
                return
            if agenda.cohort in waiting and self._has_come(waiting[agenda.cohort]):
                del waiting[agenda.cohort]
            if step is _Step.LATER:
                going.remove(agenda)

    def _take(self, agenda: Agenda, revision: int) -> _Step:
        """Read one revision of a cohort, whole, or leave it."""
        reads = agenda.pop(revision)
        try:
            # What is left of the round, shared by all that may have a part in it.
            ahead = (self._limits.records - self._records) // (len(reads) + agenda.queued)
            parts = [
                (read, read.history.at_revision(read.planned, revision, ahead=ahead))
                for read in reads
            ]
            if agenda.delay and not self._is_due(agenda, parts):
                return _Step.LATER
            if not self._fits(parts):
                return _Step.FULL
            level = self._level(agenda.cohort)
            latest = NEVER
            for read, records in parts:
                if records:
                    fold = self._fold(read, records, level)
                    latest = max(latest, fold.latest)
                    self.revisions[agenda.cohort] = revision
            if latest:
                self.levels[agenda.cohort] = level_after(level, Clock(latest + agenda.delay))
        finally:
            for read in reads:
                agenda.queue(read)
        return _Step.TAKEN

    def _level(self, cohort: int) -> Clock:
        """The level of what the next revision of a cohort commits."""
        found = self.levels.get(cohort)
        return self._context.levels.get(cohort, NEVER) if found is None else found

    def _is_due(self, agenda: Agenda, parts: Iterable[tuple[Read, list[Record]]]) -> bool:
        clocks = (last_clock(record) for _, records in parts for record in records)
        due = Clock(max(clocks, default=NEVER) + agenda.delay)
        if due > self._now:
            self.due = min(self.due, due)
        return due <= self._now

    def _fits(self, parts: Iterable[tuple[Read, list[Record]]]) -> bool:
        """True if there is room; there is always room for one revision, whatever its size."""
        size = records = 0
        for read, some in parts:
            records += len(some)
            for record in some:
                if isinstance(record, AckRecord):
                    size += read.held_bytes(record.producer)  # of rounds before: rows come now
                else:
                    size += record.bytes
        size, records = self._bytes + size, self._records + records
        if self.folds and (size > self._limits.bytes or records > self._limits.records):
            return False
        self._bytes, self._records = size, records
        return True

    def _fold(self, read: Read, records: Iterable[Record], level: Clock) -> ReadFold:
        fold = self.folds.get(read)
        if fold is None:
            fold = ReadFold(read, self._context, announced=self.announced)
            self.folds[read] = fold
        for record in records:
            fold.take(record, level=level)
            if fold.parked:
                break
        read.plan(fold)
        return fold

    def _has_come(self, awaited: dict[Read, Mapping[Producer, Clock]]) -> bool:
        for read in [read for read in awaited if read in self.folds]:
            fold = self.folds[read]
            if all(fold.state(p).last_commit >= clock for p, clock in awaited[read].items()):
                del awaited[read]
        return not awaited


def _by_cohort(awaited: Awaited) -> dict[int, dict[Read, Mapping[Producer, Clock]]]:
    cohorts: dict[int, dict[Read, Mapping[Producer, Clock]]] = {}
    for read, commits in awaited.items():
        cohorts.setdefault(read.binding.cohort, {})[read] = commits
    return cohorts


def _next_clock(agenda: Agenda) -> Clock:
    """When the next document of a cohort was written, its delay included."""
    first = agenda.first
    record = first and first[1].history.first(first[1].planned)
    return Clock(first_clock(record) + agenda.delay) if record else CLOCK_MAX
