"""Journals written as text, and a coordinator that reads them.

    write({A: "C10 C20 A20>B", B: "p2:O15"})

appends, under one revision, to journal A a fragment of two rows that continue a span of producer 1
and an ACK at clock 20 that hints at journal B, and to journal B a row of producer 2 that is outside
of transactions. `|` begins another fragment. A hint is `>B`, or `>B:p2@30` of another commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.journal.committed import VisibleRows
from penstock.journal.selector import PartitionFilter
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
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Flag, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.hints import Commit
from penstock.model.producer_frontier import ProducerFrontier
from penstock.model.runs import Run
from penstock.model.sequence import Bounds
from penstock.model.spec import CollectionSpec, FieldValues, Frozen, Selector
from penstock.shuffle.binding import Binding, with_cohorts
from penstock.shuffle.delivery import Checkpoint, Delivery
from penstock.shuffle.history import Need, NeedPages, NeedRows
from penstock.shuffle.rounds import Round, WaitUntil
from penstock.shuffle.state import RoundLimits, SessionState

A, B, C = "a/pivot=00", "a/pivot=80", "c/pivot=00"
"""Two journals of collection a, and one of collection c."""

ROW_BYTES = 10

EARLY = Bounds(not_before=NEVER)
"""Clocks here are small numbers, long before 1970."""

Entry = tuple[int, int, int]
"""Last commit, hinted commit and offset."""


def producer(number: int) -> Producer:
    return Producer(Producer.MULTICAST | number)


P1, P2, P3 = producer(1), producer(2), producer(3)


class Row(NamedTuple):
    """A row, or an ACK, at one offset."""

    producer: Producer
    kind: Flag
    clock: Clock


class Seen(NamedTuple):
    """A document that was delivered."""

    binding: int
    journal: str
    producer: Producer
    clock: Clock


_KINDS = {"O": Flag.OUTSIDE_TXN, "C": Flag.CONTINUE_TXN, "A": Flag.ACK_TXN}


def parse(text: str) -> tuple[Row, tuple[Commit, ...]]:
    """One row, or an ACK with its hints."""
    head, *hints = text.split(">")
    who, _, what = head.rpartition(":")
    row = Row(producer(int(who[1:] or 1) if who else 1), _KINDS[what[0]], Clock(int(what[1:])))
    return row, tuple(_hint(row, hint) for hint in hints)


def _hint(row: Row, text: str) -> Commit:
    name, _, stamp = text.partition("@")
    if not stamp:
        return Commit(name, row.producer, row.clock)
    name, _, who = name.rpartition(":")
    return Commit(name, producer(int(who[1:])), Clock(int(stamp)))


def runs_of(rows: Sequence[Row]) -> tuple[Run, ...]:
    """The runs of a fragment."""
    stretches: list[list[tuple[int, Row]]] = []
    newest: dict[Producer, list[tuple[int, Row]]] = {}
    for at, row in enumerate(rows):
        stretch = newest.get(row.producer)
        if stretch is None or stretch[0][1].kind is not row.kind:
            stretch = newest[row.producer] = []
            stretches.append(stretch)
        stretch.append((at, row))
    return tuple(_run(stretch) for stretch in stretches)


def _run(stretch: Sequence[tuple[int, Row]]) -> Run:
    clocks = [row.clock for _, row in stretch]
    return Run(
        producer=stretch[0][1].producer,
        kind=stretch[0][1].kind,
        first_offset=stretch[0][0],
        last_offset=stretch[-1][0],
        rows=len(stretch),
        clock_min=min(clocks),
        clock_max=max(clocks),
        clock_max_offset=stretch[clocks.index(max(clocks))][0],
        increasing=all(a < b for a, b in pairwise(clocks)),
    )


def fragment_of(rows: Sequence[Row]) -> Fragment:
    return Fragment(
        rows=len(rows),
        bytes=ROW_BYTES * len(rows),
        at=Blob(path="somewhere"),
        schema="s",
        runs=runs_of(rows),
        key_hash_min=0,
        key_hash_max=0xFFFFFFFF,
    )


def records_of(text: str) -> tuple[tuple[Record, ...], list[Row]]:
    """Records to append, and what is at each of their offsets."""
    records: list[Record] = []
    rows: list[Row] = []
    pending: list[Row] = []

    def flush() -> None:
        if pending:
            records.append(fragment_of(pending))
            pending.clear()

    for word in text.split():
        if word == "|":
            flush()
            continue
        row, hints = parse(word)
        rows.append(row)
        if row.kind is Flag.ACK_TXN:
            flush()
            records.append(AckRecord(producer=row.producer, clock=row.clock, hints=hints))
        else:
            pending.append(row)
    flush()
    return tuple(records), rows


class Script:
    """Journals, and everything that was ever written to them."""

    def __init__(self, *names: str) -> None:
        self.revision = 0
        self.states: dict[str, JournalState] = {}
        self.rows: dict[str, list[Row]] = {}
        self.pages: dict[str, tuple[Record, ...]] = {}
        for name in names:
            self.create(name)

    def commit(self, diffs: Mapping[str, Diff]) -> None:
        self.revision += 1
        for name, diff in diffs.items():
            before = self.states.get(name, JournalState())
            self.states[name] = apply(before, diff, self.revision)

    def create(self, name: str) -> None:
        collection = name.partition("/")[0]
        self.rows.setdefault(name, [])
        create = Create(collection=collection, labels=(), key_begin=0, key_end=0xFFFFFFFF)
        self.commit({name: create})

    def write(self, texts: Mapping[str, str]) -> None:
        diffs: dict[str, Diff] = {}
        for name, text in texts.items():
            records, rows = records_of(text)
            diffs[name] = Append(records=records)
            self.rows[name] += rows
        self.commit(diffs)

    def retain(self, name: str, offset: int) -> None:
        self.commit({name: Retain(offset=offset)})

    def drop(self, name: str) -> None:
        self.commit({name: Drop()})

    def compact(self, name: str, begin: int, end: int, size: int) -> None:
        self.commit({name: Compact(begin=begin, end=end, path="compacted", bytes=size)})

    def seal(self, name: str, count: int) -> None:
        sealed = self.states[name].records[:count]
        fragments = [record for record in sealed if isinstance(record, Fragment)]
        page = Page(
            path=f"page-{self.revision}",
            begin=sealed[0].begin,
            end=sealed[-1].end,
            records=len(sealed),
            rows=sum(fragment.rows for fragment in fragments),
            bytes=sum(fragment.bytes for fragment in fragments),
            revision_min=sealed[0].revision,
            revision_max=sealed[-1].revision,
        )
        self.pages[page.path] = sealed
        self.commit({name: Seal(page=page)})

    def visible(self, journal: str, rows: VisibleRows) -> list[Clock]:
        """The clocks of the rows that count."""
        found: list[Clock] = []
        above = rows.clock_gt
        begin = rows.fragment.begin
        for at in range(begin + rows.run.first_offset, begin + rows.run.last_offset + 1):
            row = self.rows[journal][at]
            if (row.producer, row.kind) == (rows.run.producer, rows.run.kind) and row.clock > above:
                found.append(row.clock)
                if rows.running_max:
                    above = row.clock
        return found

    def seen(self, delivery: Delivery) -> list[Seen]:
        return [
            Seen(delivery.binding, delivery.journal, delivery.producer, clock)
            for rows in delivery.rows
            for clock in self.visible(delivery.journal, rows)
        ]

    def supply(self, state: SessionState, need: Need) -> None:
        """Look up what planning needs to know."""
        match need:
            case NeedPages():
                records = [record for page in need.pages for record in self.pages[page.path]]
                state.supply(need, records)
            case NeedRows():
                state.supply(need, self.span_begin(need))

    def span_begin(self, need: NeedRows) -> int:
        first = need.fragment.begin + need.run.first_offset
        return next(
            at
            for at, row in enumerate(self.rows[need.journal][first:], first)
            if row.producer == need.run.producer and row.clock > need.clock_gt
        )


def collection(name: str) -> CollectionSpec:
    schema = Frozen({"type": "object"})
    return CollectionSpec(
        name=name, key=("/id",), write_schema=schema, read_schema=schema, fields=()
    )


def bindings(*collections: str, **each: Sequence[Any]) -> tuple[Binding, ...]:
    """A binding of each collection; `priority=(1, 0)` and the like say what they differ in."""
    return with_cohorts(
        Binding(
            index=at,
            collection=collection(name),
            read_suffix=f"task/{at}",
            key=("/id",),
            partitions=PartitionFilter.of((), Selector()),
            **{"bounds": EARLY} | {field: values[at] for field, values in each.items()},
        )
        for at, name in enumerate(collections)
    )


def region_binding(region: str) -> Binding:
    """A binding of the partitions of collection r with this region."""
    include = (FieldValues(field="region", values=(region,)),)
    return Binding(
        index=0,
        collection=collection("r"),
        read_suffix="task/0",
        key=("/id",),
        partitions=PartitionFilter.of(["region"], Selector(include=include)),
        bounds=EARLY,
    )


def frontier(entries: Mapping[tuple[str, int], Mapping[Producer, Entry]]) -> Frontier:
    return Frontier.gather(
        JournalFrontier(
            journal=journal,
            binding=binding,
            producers=tuple(
                ProducerFrontier(
                    producer=who,
                    last_commit=Clock(last),
                    hinted_commit=Clock(hint),
                    offset=offset,
                )
                for who, (last, hint, offset) in producers.items()
            ),
        )
        for (journal, binding), producers in entries.items()
    )


def entries_of(frontier: Frontier) -> dict[tuple[str, int], dict[Producer, Entry]]:
    """The inverse of `frontier`."""
    return {
        (read.journal, read.binding): {
            entry.producer: (entry.last_commit, entry.hinted_commit, entry.offset)
            for entry in read.producers
        }
        for read in frontier
    }


@dataclass(slots=True)
class Coordinator:
    """Reads a script as a leader does, and keeps what it has read."""

    script: Script
    bindings: Sequence[Binding]
    resume: Frontier = field(default_factory=lambda: EMPTY)
    limits: RoundLimits = field(default_factory=RoundLimits)
    now: Clock = CLOCK_MAX
    state: SessionState = field(init=False)
    frontier: Frontier = field(init=False)
    seen: list[Seen] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    requested: bool = False
    known: dict[str, JournalState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = SessionState(self.bindings, resume=self.resume, limits=self.limits)
        self.frontier = self.resume

    def learn(self, *collections: str) -> None:
        """Some collections, by default all, are known as they are now.

        What the state says needs nothing done leaves nothing to do.
        """
        for name in collections or self.state.collections:
            changed = {
                journal: state
                for journal, state in self.script.states.items()
                if journal.startswith(name + "/") and self.known.get(journal) != state
            }
            self.known |= changed
            if not self.state.learn(name, self.script.revision, changed):
                assert self.state.advance(self.now) is None

    def advance(self) -> Round | WaitUntil | None:
        """Read the next round, after looking up whatever it takes."""
        while isinstance(step := self.state.advance(self.now), NeedPages | NeedRows):
            self.needs.append(step)
            self.script.supply(self.state, step)
        return step

    def read(self) -> int:
        """Read all there is for the request; how many rounds it took."""
        if not self.requested:
            self.state.request()
            self.requested = True
        count = 0
        while isinstance(step := self.advance(), Round):
            self.rounds.append(step)
            count += 1
        return count

    def next(self) -> Checkpoint | None:
        """The next checkpoint; None if there is none for now."""
        self.read()
        checkpoint = self.state.answer()
        if checkpoint is None:
            return None
        self.requested = False
        self.frontier = self.frontier.reduce(checkpoint.frontier)
        if not checkpoint.is_peek:
            self.frontier = self.frontier.clear_discharged_hints()
        self.seen += [seen for each in checkpoint.deliveries for seen in self.script.seen(each)]
        return checkpoint

    def drain(self) -> list[Checkpoint]:
        """All checkpoints that come."""
        found = []
        while (checkpoint := self.next()) is not None:
            found.append(checkpoint)
        return found

    def clocks(self, journal: str = A, binding: int = 0) -> list[int]:
        """Clocks of the documents of one journal, in the order they came."""
        return [s.clock for s in self.seen if (s.journal, s.binding) == (journal, binding)]


def read_all(script: Script, *collections: str, **other: Any) -> Coordinator:  # noqa: ANN401
    """A coordinator that has read everything."""
    coordinator = Coordinator(script, bindings(*collections or ("a",)), **other)
    coordinator.learn()
    coordinator.drain()
    return coordinator
