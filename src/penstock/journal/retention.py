"""PURE: where the journals of a collection are cut, so that what is older than its retention goes.

A journal is cut between two records: what lies before is forgotten, what lies behind stays as it
is. A reader that begins at the cut knows nothing of what was before it, and has to see the same as
one that read all of it. So some records only go together, as a **stretch**:

- the rows of a span, and the ACK that closes it;
- rows and their repetitions, which a reader recognizes by having seen the first;
- a span that is rolled back, and the commit that it is rolled back to.

Stretches that one transaction has closed in several journals of the collection go together, too.
An ACK that is written again is a stretch of its own: to a reader that has not seen the first, it
commits nothing.

**Age** is that of the commit. The clocks of writers may go back, but revisions do not: a commit is
not older than any commit before it, and that includes what was forgotten earlier
(`JournalState.forgotten`). So a clock that goes back forgets nothing early.

**Open spans** stay, and everything behind them, unless their writer is known to be dead
(`abandoned_producers`). What a reader has not read yet stays as well: `needs` says from where on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Final

from penstock.journal.state import (
    NOTHING_FORGOTTEN,
    AckRecord,
    Forgotten,
    Fragment,
    Record,
)
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Flag, Producer, duration, elapsed
from penstock.model.completed import STALENESS_HORIZON
from penstock.model.runs import Run

_NOBODY_GOES_ON: Final = CLOCK_MAX
"""The commit of records that contradict each other: no reader gets past them, and they stay."""

REPEATED_WITHIN: Final = duration(3600)
"""Rows are appended a second time when a first append seemed to fail: long before this is over."""


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Records that only go together."""

    begin: int
    end: int
    clock: Clock = NEVER
    """The commit; NEVER while it is open."""
    revision: int
    """That of its last record."""
    last: Clock
    """The greatest clock in it."""
    commits: set[Clock] = field(default_factory=set)
    """The clocks of the transactions that it is part of."""
    open_by: Producer | None = None

    def take(self, other: Stretch) -> None:
        """Go together with another one of the same producer."""
        self.begin, self.end = min(self.begin, other.begin), max(self.end, other.end)
        self.clock, self.last = max(self.clock, other.clock), max(self.last, other.last)
        self.revision = max(self.revision, other.revision)
        self.commits |= other.commits


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The oldest records of a journal."""

    records: Sequence[Record]
    complete: bool = True
    """These are all that the journal has."""
    forgotten: Forgotten = NOTHING_FORGOTTEN

    @cached_property
    def stretches(self) -> Sequence[Stretch]:
        return stretches(self.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The place at which a journal is cut, and what goes."""

    offset: int
    forgotten: Forgotten
    documents: int
    """Rows before the cut, also those that were never committed."""
    bytes: int


# -------------------------------------------------------------------------------------- stretches


@dataclass(slots=True)
class _Writer:
    """One producer in one journal."""

    last_commit: Clock = NEVER
    open: Stretch | None = None
    closed: list[Stretch] = field(default_factory=list)

    def repeated(self, clock: Clock) -> list[Stretch]:
        """Take out the closed stretches with rows from a clock on."""
        found = [each for each in self.closed if each.last >= clock]
        self.closed = [each for each in self.closed if each.last < clock]
        return found


def stretches(records: Iterable[Record]) -> list[Stretch]:
    """Return what goes together, in no particular order."""
    writers: dict[Producer, _Writer] = {}
    for record in records:
        if isinstance(record, AckRecord):
            _take_ack(writers.setdefault(record.producer, _Writer()), record)
        else:
            for run in record.runs:
                _take_run(writers.setdefault(run.producer, _Writer()), record, run)
    found = [stretch for writer in writers.values() for stretch in writer.closed]
    return found + [writer.open for writer in writers.values() if writer.open is not None]


def _take_run(writer: _Writer, fragment: Fragment, run: Run) -> None:
    taken = Stretch(
        begin=fragment.begin, end=fragment.end, revision=fragment.revision, last=run.clock_max
    )
    seen = max(writer.last_commit, NEVER if writer.open is None else writer.open.last)
    if run.clock_min <= seen and (repeated := writer.repeated(run.clock_min)):
        # These stay together whatever becomes of the rows that are new.
        together = Stretch(
            begin=fragment.begin, end=fragment.end, revision=fragment.revision, last=NEVER
        )
        for each in repeated:
            together.take(each)
        writer.closed.append(together)
    if run.clock_max <= seen:
        if writer.open is not None:
            writer.open.take(taken)  # it may be rows of the open span that are repeated
    elif run.kind is Flag.OUTSIDE_TXN:
        taken.clock = run.clock_max if writer.open is None else _NOBODY_GOES_ON
        writer.closed.append(taken)
        writer.last_commit = run.clock_max
    elif writer.open is not None:
        writer.open.take(taken)
    else:
        taken.open_by = run.producer
        writer.open = taken


def _take_ack(writer: _Writer, ack: AckRecord) -> None:
    taken = Stretch(
        begin=ack.begin, end=ack.end, clock=ack.clock, revision=ack.revision, last=ack.clock
    )
    if writer.open is not None:
        if ack.clock <= writer.last_commit:
            for each in writer.repeated(ack.clock):
                taken.take(each)
        elif ack.clock < writer.open.last:
            taken.clock = _NOBODY_GOES_ON
        else:
            taken.commits.add(ack.clock)
        taken.take(writer.open)
        writer.open = None
        writer.last_commit = ack.clock
    elif ack.clock > writer.last_commit:
        taken.commits.add(ack.clock)
        writer.last_commit = ack.clock
    writer.closed.append(taken)


# -------------------------------------------------------------------------------------- the writers


def abandoned_producers(
    journals: Mapping[str, Loaded],
    *,
    now: Clock,
    expected: Container[Producer],
    expecting: Container[str],
) -> frozenset[Producer]:
    """Return the producers of open spans that will never be closed.

    A span is given up when its last row was written two days ago, by this clock and by the newest
    commit of the collection: a publisher refuses to close one after a day. The ACKs of `expected`
    producers are still to be written, as are ACKs of anybody to the journals in `expecting`.
    """
    found = {name: loaded.stretches for name, loaded in journals.items()}
    newest = max(
        (
            stretch.clock
            for each in found.values()
            for stretch in each
            if stretch.clock < CLOCK_MAX and stretch.open_by is None
        ),
        default=NEVER,
    )
    dead: set[Producer] = set()
    alive: set[Producer] = set()
    for name, each in found.items():
        for stretch in each:
            producer = stretch.open_by
            if producer is None:
                continue
            old = elapsed(min(now, newest), stretch.last) >= STALENESS_HORIZON
            owed = producer in expected or name in expecting
            (dead if old and journals[name].complete and not owed else alive).add(producer)
    return frozenset(dead - alive)


# --------------------------------------------------------------------------------------- the plan


class _Everybody:
    """Contains every producer."""

    def __contains__(self, producer: object) -> bool:
        return True


EVERYBODY: Final[Container[Producer]] = _Everybody()


def plan_cuts(
    journals: Mapping[str, Loaded],
    *,
    before: Clock,
    needs: Mapping[str, int],
    abandoned: Container[Producer] = (),
) -> dict[str, Cut]:
    """Choose where the journals of a collection are cut; those that are not are left out.

    Commits before `before` are old enough. Of a journal, records that end after `needs` stay.
    """
    found = {name: loaded.stretches for name, loaded in journals.items()}
    too_young = _too_young(journals, found, before)
    cuts: dict[str, int] = {}
    for name, loaded in journals.items():
        if not loaded.records:
            continue
        limit = min(loaded.records[-1].end, needs.get(name, loaded.records[-1].end))
        for stretch in found[name]:
            held = stretch.open_by is not None and stretch.open_by not in abandoned
            if held or too_young(stretch):
                limit = min(limit, stretch.begin)
        cuts[name] = _boundary(loaded.records, limit)
    closed = {
        name: sorted(
            (s for s in found[name] if s.open_by is None or s.open_by not in abandoned),
            key=attrgetter("end"),
            reverse=True,
        )
        for name in cuts
    }
    while _keep_together(cuts, closed):
        pass
    return {
        name: _cut(journals[name].records, found[name], offset)
        for name, offset in cuts.items()
        if offset > journals[name].records[0].begin
    }


class _TooYoung:
    """Decides which closed stretches are not old enough to go."""

    def __init__(self, before: Clock, through: int, since: Mapping[int, Clock]) -> None:
        self._before = before
        self._through = through
        self._since = since

    def __call__(self, stretch: Stretch) -> bool:
        if stretch.open_by is not None:
            return False
        beyond = stretch.revision > self._through
        return beyond or self._since[stretch.revision] >= self._before


def _too_young(
    journals: Mapping[str, Loaded], found: Mapping[str, Sequence[Stretch]], before: Clock
) -> _TooYoung:
    """Age commits: none is older than the latest before it."""
    latest = max((loaded.forgotten.clock for loaded in journals.values()), default=NEVER)
    since: dict[int, Clock] = {}
    every = (stretch for each in found.values() for stretch in each if stretch.open_by is None)
    for stretch in sorted(every, key=attrgetter("revision")):
        since[stretch.revision] = latest = max(latest, stretch.clock)
    # What comes later in a journal that is not read to its end may belong to any transaction.
    through = min(
        (loaded.records[-1].revision for loaded in journals.values() if not loaded.complete),
        default=CLOCK_MAX,
    )
    return _TooYoung(before, through, since)


def _keep_together(cuts: dict[str, int], stretches: Mapping[str, Sequence[Stretch]]) -> bool:
    """Move cuts back to where they take whole stretches and transactions; true if one moved.

    Stretches are given by their ends, the last first: those of one journal need one pass.
    """
    before = dict(cuts)
    for name, each in stretches.items():
        for stretch in each:
            if stretch.begin < cuts[name] < stretch.end:
                cuts[name] = stretch.begin
    staying = {
        clock
        for name, each in stretches.items()
        for stretch in each
        if stretch.end > cuts[name]
        for clock in stretch.commits
    }
    for name, each in stretches.items():
        for stretch in each:
            if stretch.end <= cuts[name] and not staying.isdisjoint(stretch.commits):
                cuts[name] = stretch.begin
    return cuts != before


_BEGIN: Final = attrgetter("begin")


def _boundary(records: Sequence[Record], limit: int) -> int:
    """Return the last place between two records that is not behind `limit`."""
    at = bisect_right(records, limit, key=_BEGIN)
    if at == len(records) and records[-1].end <= limit:
        return records[-1].end
    return records[max(at - 1, 0)].begin


def _cut(records: Sequence[Record], found: Iterable[Stretch], offset: int) -> Cut:
    gone = [record for record in records if record.end <= offset]
    fragments = [record for record in gone if isinstance(record, Fragment)]
    clocks = (s.clock for s in found if s.end <= offset and s.open_by is None)
    return Cut(
        offset=offset,
        forgotten=Forgotten(clock=max(clocks, default=NEVER), revision=gone[-1].revision),
        documents=sum(fragment.rows for fragment in fragments),
        bytes=sum(fragment.bytes for fragment in fragments),
    )
