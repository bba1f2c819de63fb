"""Hypothesis strategies for clocks, producers, written journals, and frontiers.

Domains are small on purpose: laws break where values coincide, so producers, clocks and offsets
must collide often. `wide=True` draws from the whole range instead, for encodings.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import strategies as st

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Flag, Producer
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.frontier_table import BINDING_MAX
from penstock.model.hints import Commit, Hint
from penstock.model.producer_frontier import OBSERVED_FLOOR, OFFSET_MAX, ProducerFrontier

JOURNALS = ("acme/a", "acme/b", "acme/ü")


def hint_frontier(hints: Iterable[Hint]) -> Frontier:
    """Return the delta of hints alone: the latest of each (journal, binding, producer)."""
    latest: dict[tuple[str, int], dict[Producer, Clock]] = {}
    for hint in hints:
        clocks = latest.setdefault((hint.journal, hint.binding), {})
        clocks[hint.producer] = max(clocks.get(hint.producer, NEVER), hint.clock)
    return Frontier.gather(
        JournalFrontier(
            journal=journal,
            binding=binding,
            producers=tuple(
                ProducerFrontier(producer=producer, last_commit=NEVER, hinted_commit=clock)
                for producer, clock in clocks.items()
            ),
        )
        for (journal, binding), clocks in latest.items()
    )


def clocks(*, least: int = 0, wide: bool = False) -> st.SearchStrategy[Clock]:
    """Clocks that collide, or any that a frontier may hold."""
    return st.integers(least, CLOCK_MAX if wide else 6).map(Clock)


def producers(*, wide: bool = False) -> st.SearchStrategy[Producer]:
    """One of three producers, or any."""
    if wide:
        return st.binary(min_size=6, max_size=6).map(Producer.from_random)
    return st.sampled_from([Producer(Producer.MULTICAST | n) for n in range(1, 4)])


def producer_frontiers(
    *, producer: st.SearchStrategy[Producer] | None = None, wide: bool = False
) -> st.SearchStrategy[ProducerFrontier]:
    """Entries with any last commit, hint and signed offset."""
    reach = OFFSET_MAX if wide else 6
    return st.builds(
        ProducerFrontier,
        producer=producers(wide=wide) if producer is None else producer,
        last_commit=clocks(wide=wide),
        hinted_commit=clocks(wide=wide),
        offset=st.integers(-reach, reach),
    )


@st.composite
def frontiers(draw: st.DrawFn, *, wide: bool = False) -> Frontier:
    """Draw a delta over few journals and bindings, with bytes, LSNs and gap floors."""
    names = st.text(min_size=1, max_size=12) if wide else st.sampled_from(JOURNALS)
    reach = 1 << 62 if wide else 100
    journals = draw(
        st.lists(
            st.tuples(
                names,
                st.integers(0, BINDING_MAX if wide else 1),
                st.integers(0, reach),
                st.integers(-reach, reach),
            ),
            unique_by=lambda journal: journal[:2],
            max_size=3,
        ).map(sorted)
    )
    entries = draw(
        st.lists(
            st.tuples(st.integers(0, len(journals) - 1), producer_frontiers(wide=wide)),
            unique_by=lambda placed: (placed[0], placed[1].producer),
            max_size=7,
        ).map(lambda placed: sorted(placed, key=lambda one: one[1].producer))
        if journals
        else st.just([])
    )
    return Frontier.of(
        (
            JournalFrontier(
                journal=journal,
                binding=binding,
                producers=tuple(entry for place, entry in entries if place == at),
                bytes_read_delta=bytes_read,
                bytes_behind_delta=bytes_behind,
            )
            for at, (journal, binding, bytes_read, bytes_behind) in enumerate(journals)
        ),
        flushed_lsn=tuple(draw(st.lists(st.integers(0, reach), max_size=3))),
        gap_floors=draw(st.dictionaries(st.integers(0, 1), clocks(least=1, wide=wide), max_size=2)),
    )


def transactions() -> st.SearchStrategy[list[Commit]]:
    """The commits of one transaction: each producer at most once per journal."""
    return st.lists(
        st.builds(Commit, st.sampled_from(JOURNALS), producers(), clocks(least=2)),
        unique_by=lambda commit: (commit.journal, commit.producer),
        max_size=8,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One document of a journal; its offset is its position in the list."""

    producer: Producer
    kind: Flag
    clock: Clock


def rows() -> st.SearchStrategy[list[Row]]:
    """Any documents in any order: mostly nonsense that no writer would append."""
    return st.lists(
        st.builds(Row, producer=producers(), kind=st.sampled_from(Flag), clock=clocks(least=2)),
        max_size=24,
    )


class Attempt(enum.Enum):
    """The fate of documents that a writer sent together."""

    OUTSIDE = "appended outside of transactions"
    COMMITTED = "appended, then committed by an ACK"
    ROLLED_BACK = "appended, then discarded by an ACK of the last commit"
    ABANDONED = "appended, and the writer was never heard of again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A journal as correct writers leave it, and the documents that a reader must see once."""

    rows: tuple[Row, ...]
    committed: frozenset[tuple[Producer, Clock]]


@st.composite
def journals_written(draw: st.DrawFn) -> Written:
    """Draw interleaved writers that each append at least once, and fail as writers fail.

    An append may be repeated at once, as by a writer that lost the reply. A writer rolls back only
    if it has committed before, and an abandoned span is the last thing that it wrote.
    """
    lanes: list[list[list[Row]]] = []
    committed: set[tuple[Producer, Clock]] = set()
    for number in range(1, draw(st.integers(1, 3)) + 1):
        producer = Producer(Producer.MULTICAST | number)
        lane: list[list[Row]] = []
        clock, last_commit = int(OBSERVED_FLOOR), 0
        for attempt in draw(st.lists(st.sampled_from(Attempt), max_size=5)):
            if attempt is Attempt.ROLLED_BACK and not last_commit:
                continue
            outside = attempt is Attempt.OUTSIDE
            kind = Flag.OUTSIDE_TXN if outside else Flag.CONTINUE_TXN
            appends = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
            sent: list[Clock] = []
            for size in appends:
                stamps = [Clock(clock + i + 1) for i in range(size)]
                clock += size
                sent += stamps
                lane.append([Row(producer=producer, kind=kind, clock=c) for c in stamps])
            if attempt is Attempt.COMMITTED:
                clock += draw(st.integers(0, 2))
            if attempt in (Attempt.OUTSIDE, Attempt.COMMITTED):
                last_commit = clock
                committed |= {(producer, c) for c in sent}
            if attempt in (Attempt.COMMITTED, Attempt.ROLLED_BACK):
                lane.append([Row(producer=producer, kind=Flag.ACK_TXN, clock=Clock(last_commit))])
            if attempt is Attempt.ABANDONED:
                break
        lanes.append(
            [append for append in lane for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
        )
    return Written(rows=tuple(_interleave(draw, lanes)), committed=frozenset(committed))


def _interleave(draw: st.DrawFn, lanes: list[list[list[Row]]]) -> list[Row]:
    turns = draw(st.permutations([n for n, lane in enumerate(lanes) for _ in lane]))
    iterators = [iter(lane) for lane in lanes]
    return [row for turn in turns for row in next(iterators[turn])]
