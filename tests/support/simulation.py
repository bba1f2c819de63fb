"""PURE: a world of journals, without a store, a file or a process.

Its journals are real `JournalState`s, changed by real diffs under one revision of the whole store.
Beside them it keeps every row that was ever appended, so that who judges need not believe the
statistics. Time is a number, and only its owner moves it.

What happens to a world is a list of *actions*, each a function of the world and of chance. An
action that is not possible just now does nothing, so that every part of a list is a list too: see
`schedules`. Actions on journals themselves are here, those of writers in `simulated_writers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Final, TypeVar

from penstock.journal.state import (
    AckRecord,
    Append,
    Blob,
    Compact,
    Create,
    Diff,
    Drop,
    Fragment,
    JournalState,
    Page,
    Record,
    Retain,
    Seal,
    apply,
)
from penstock.model.clock import Clock, Flag, Producer, duration, from_unix
from penstock.model.runs import Run
from support.shuffle_oracle import (
    Contradiction,
    Doc,
    Sequencer,
    Stamp,
    Written,
    contradiction,
)

START: Final = from_unix(1_700_000_000)

T = TypeVar("T")

# ----------------------------------------------------------------------------------------- rows


def runs_of(stamps: Sequence[Stamp]) -> tuple[Run, ...]:
    """The runs of a fragment's rows, found row by row."""
    stretches: list[list[tuple[int, Stamp]]] = []
    newest: dict[Producer, list[tuple[int, Stamp]]] = {}
    for at, stamp in enumerate(stamps):
        stretch = newest.get(stamp.producer)
        if stretch is None or stretch[0][1].kind is not stamp.kind:
            stretch = newest[stamp.producer] = []
            stretches.append(stretch)
        stretch.append((at, stamp))
    return tuple(map(_run_of, stretches))


def _run_of(stretch: Sequence[tuple[int, Stamp]]) -> Run:
    clocks = [stamp.clock for _, stamp in stretch]
    greatest = max(clocks)
    return Run(
        producer=stretch[0][1].producer,
        kind=stretch[0][1].kind,
        first_offset=stretch[0][0],
        last_offset=stretch[-1][0],
        rows=len(stretch),
        clock_min=min(clocks),
        clock_max=greatest,
        clock_max_offset=stretch[clocks.index(greatest)][0],
        increasing=all(a < b for a, b in pairwise(clocks)),
    )


# ---------------------------------------------------------------------------------------- world


@dataclass(slots=True)
class Journal:
    """A journal and all that ever was in it."""

    state: JournalState = field(default_factory=JournalState)
    stamps: list[Stamp] = field(default_factory=list)
    """By offset, removed ones too: an offset is not given twice."""
    origin: int = 0
    """Where the present generation begins."""
    sequencer: Sequencer = field(default_factory=Sequencer)
    contradiction: Contradiction | None = None
    ends_closed: bool = False
    """Whether the last record has committed rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What the writers of a world do, and how often they do what is rare."""

    rows_max: int = 3
    row_bytes: int = 10
    split: float = 0.4
    """ACKs under several revisions."""
    unhinted: float = 0.0
    """ACKs under several revisions and without hints; no publisher does this."""
    repeat: float = 0.25
    interleave: float = 0.15
    skew: float = 0.3
    skew_s: Sequence[int] = (-40, 20)
    """Seconds by which clocks of writers are wrong, if they are."""
    contradict: float = 0.0
    """What no publisher does, and makes a journal unreadable."""


class World:
    """All that is durable, and the time."""

    def __init__(self, collections: Mapping[str, Sequence[str]], habits: Habits) -> None:
        self.habits = habits
        self.now = START
        self.revision = 0
        self.collections = tuple(collections)
        self.collection_of = {name: c for c, names in collections.items() for name in names}
        """Of the journals that are, or may be."""
        self.journals: dict[str, Journal] = {}
        self.history: dict[str, list[tuple[int, str, JournalState]]] = {
            collection: [] for collection in collections
        }
        """What a follower of each collection is told, in order."""
        self.pages: dict[str, tuple[Record, ...]] = {}
        self.offset_of: dict[Doc, int] = {}
        """Where each document is, committed or not; of repetitions the first."""
        self.committed: dict[Doc, int] = {}
        """With the revision that committed each first."""
        self.acks: dict[Doc, int] = {}
        """ACKs, with the revision of each; of repetitions the first."""
        self.written: dict[Doc, Written] = {}
        """What transaction each document belongs to."""
        self.removed: set[str] = set()
        """Journals of which something was removed, or all."""
        self.unacknowledged: set[str] = set()
        """Journals that were gone when an ACK was due to them; these do not come back."""
        self.on_drop: list[Callable[[str], None]] = []
        self.story: list[str] | None = None
        """What happened, if somebody wants to read it."""
        self._rows: dict[str, tuple[Stamp, ...]] = {}

    def tell(self, event: str) -> None:
        """Add to the story."""
        if self.story is not None:
            self.story.append(event)

    # Changing journals

    def commit(self, diffs: Mapping[str, Diff]) -> None:
        """Change journals under one revision."""
        self.revision += 1
        for name, diff in diffs.items():
            journal = self.journals.setdefault(name, Journal())
            before = journal.state
            journal.state = apply(before, diff, self.revision)
            if isinstance(diff, Append):
                for record in diff.records:
                    self._log(name, journal, record)
            elif isinstance(diff, Retain | Drop):
                self.removed.add(name)
            elif isinstance(diff, Create):
                journal.origin = journal.state.begin
                journal.sequencer = Sequencer()
            self.history[self.collection_of[name]].append((self.revision, name, journal.state))
            if self.story is not None:
                self.tell(f"  r{self.revision} {name}: {self._describe(diff, before.end)}")

    def append(self, records: Mapping[str, Sequence[Record]]) -> None:
        """Append to journals under one revision."""
        self.commit({name: Append(records=tuple(some)) for name, some in records.items()})

    def fragment(self, stamps: Sequence[Stamp]) -> Fragment:
        """A fragment of these rows, to be appended."""
        path = f"f{len(self._rows)}"
        self._rows[path] = tuple(stamps)
        return Fragment(
            rows=len(stamps),
            bytes=len(stamps) * self.habits.row_bytes,
            at=Blob(path=path),
            schema="s",
            runs=runs_of(stamps),
            key_hash_min=0,
            key_hash_max=0xFFFFFFFF,
        )

    def _log(self, name: str, journal: Journal, record: Record) -> None:
        for stamp in self._stamps(record):
            offset = len(journal.stamps)
            journal.stamps.append(stamp)
            doc = Doc(name, stamp.producer, stamp.clock)
            if stamp.kind is Flag.ACK_TXN:
                self.acks.setdefault(doc, self.revision)
            else:
                self.offset_of.setdefault(doc, offset)
            journal.ends_closed = False
            if journal.contradiction is not None:
                continue
            try:
                clocks = journal.sequencer.read(offset, stamp)
            except Contradiction as found:
                journal.contradiction = found
            else:
                journal.ends_closed = bool(clocks)
                for clock in clocks:
                    self.committed.setdefault(Doc(name, stamp.producer, clock), self.revision)

    def _stamps(self, record: Record) -> Sequence[Stamp]:
        if isinstance(record, AckRecord):
            return (Stamp(record.producer, Flag.ACK_TXN, record.clock),)
        assert isinstance(record.at, Blob)
        return self._rows[record.at.path]

    # Asking

    def admits(self, name: str, stamps: Sequence[Stamp]) -> bool:
        """Whether rows make sense also to who reads only what is left of a journal.

        A rollback names a commit. Where retention has removed that commit, a new reader would take
        the rollback for an ACK of a part of the span, and be right to refuse.
        """
        journal = self.journals[name]
        begin = journal.state.begin
        if begin == journal.origin:
            return True
        retained = [*journal.stamps[begin:], *stamps]
        return contradiction(enumerate(retained, begin)) is None

    def is_lost(self, doc: Doc) -> bool:
        """Whether a document was removed, so that nobody owes it any more."""
        return self.offset_of[doc] < self.journals[doc.journal].state.begin

    def readable(self) -> list[str]:
        """Journals that are there."""
        return [n for n, j in self.journals.items() if j.state.readable]

    def _describe(self, diff: Diff, offset: int) -> str:
        if not isinstance(diff, Append):
            return str(diff) if isinstance(diff, Retain) else type(diff).__name__.lower()
        said = []
        for record in diff.records:
            if isinstance(record, AckRecord):
                hints = ", ".join(f"{h.journal} {short(h.producer, h.clock)}" for h in record.hints)
                what = f"ACK {short(record.producer, record.clock)} hints [{hints}]"
            else:
                stamps = self._stamps(record)
                what = " ".join(f"{s.kind.name[0]} {short(s.producer, s.clock)}" for s in stamps)
            said.append(f"@{offset} {what}")
            offset += len(self._stamps(record))
        return "; ".join(said)


def short(producer: Producer, clock: int) -> str:
    """`P3+17`: a producer, and a clock since the start of the world."""
    return f"P{producer & 0xFFFF}{clock - START:+}"


def chance(seed: int) -> Random:
    """What is random, and yet always the same."""
    return Random(seed)


def some(rng: Random, items: Sequence[T], most: int = 1) -> list[T]:
    """At least one of the items, if there are any, and at most so many."""
    return rng.sample(items, min(len(items), rng.randint(1, most))) if items else []


# -------------------------------------------------------------------------------------- actions

Action = Callable[[World, Random], None]


def create(world: World, rng: Random) -> None:
    """A journal that was not there comes, or one that was dropped comes back."""
    known = {*world.readable(), *world.unacknowledged}
    gone = [name for name in world.collection_of if name not in known]
    for name in some(rng, gone):
        create_journal(world, name)


def create_journal(world: World, name: str) -> None:
    """This journal comes, or comes back."""
    collection = world.collection_of[name]
    world.commit({name: Create(collection=collection, labels=(), key_begin=0, key_end=0xFFFFFFFF)})


def drop(world: World, rng: Random) -> None:
    """A journal goes, with all that is in it."""
    for name in some(rng, world.readable()):
        world.commit({name: Drop()})
        for listener in world.on_drop:
            listener(name)


def retain(world: World, rng: Random) -> None:
    """Remove the oldest records of a journal, whether they were read or not."""
    for name in some(rng, world.readable()):
        journal = world.journals[name]
        ends = [record.end for record in (*journal.state.pages, *journal.state.records)]
        for offset in some(rng, ends):
            if contradiction(enumerate(journal.stamps[offset:], offset)) is None:
                world.commit({name: Retain(offset=offset)})


def compact(world: World, rng: Random) -> None:
    """Move rows to another object."""
    for name in some(rng, world.readable()):
        fragments = [r for r in world.journals[name].state.records if isinstance(r, Fragment)]
        if fragments:
            first = rng.randrange(len(fragments))
            last = rng.randrange(first, len(fragments))
            diff = Compact(
                begin=fragments[first].begin,
                end=fragments[last].end,
                path=f"c{world.revision}",
                bytes=sum(each.bytes for each in fragments[first : last + 1]),
            )
            world.commit({name: diff})


def seal(world: World, rng: Random) -> None:
    """Put the oldest records of a journal into a page."""
    for name in some(rng, world.readable()):
        records = world.journals[name].state.records
        if not records:
            continue
        sealed = records[: rng.randint(1, len(records))]
        fragments = [record for record in sealed if isinstance(record, Fragment)]
        page = Page(
            path=f"p{world.revision}",
            begin=sealed[0].begin,
            end=sealed[-1].end,
            records=len(sealed),
            rows=sum(fragment.rows for fragment in fragments),
            bytes=sum(fragment.bytes for fragment in fragments),
            revision_min=min(record.revision for record in sealed),
            revision_max=max(record.revision for record in sealed),
        )
        world.pages[page.path] = sealed
        world.commit({name: Seal(page=page)})


def wait(world: World, rng: Random) -> None:
    """Time passes: moments mostly, days rarely."""
    seconds = rng.choice((0, 0, 1, 1, 5, 60, 700, 50 * 3600))
    world.now = Clock(world.now + duration(seconds, rng.randrange(1_000_000_000)))
    world.tell(f"  it is {world.now - START:+}")
