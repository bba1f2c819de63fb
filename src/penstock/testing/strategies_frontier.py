"""Hypothesis strategies for clocks, producers, journals as written, and frontiers.

Domains are small on purpose: laws break where values meet, so producers, clocks and offsets must
collide often. `wide=True` draws from the whole range instead, for encodings.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hypothesis import strategies as st

from penstock.model.clock import CLOCK_MAX, Clock, Flag, Producer
from penstock.model.producer_frontier import OBSERVED_FLOOR, OFFSET_MAX, ProducerFrontier

JOURNALS = ("acme/a", "acme/b", "acme/c", "acme/ü")


def clocks(*, least: int = 0, wide: bool = False) -> st.SearchStrategy[Clock]:
    """Clocks that collide, or any that a frontier may hold."""
    return st.integers(least, CLOCK_MAX if wide else 6).map(Clock)


def producers(*, wide: bool = False) -> st.SearchStrategy[Producer]:
    """One of four producers, or any."""
    if wide:
        return st.binary(min_size=6, max_size=6).map(Producer.from_random)
    return st.sampled_from([Producer(Producer.MULTICAST | n) for n in range(1, 5)])


@st.composite
def producer_frontiers(
    draw: st.DrawFn,
    *,
    producer: st.SearchStrategy[Producer] | None = None,
    wide: bool = False,
) -> ProducerFrontier:
    """An entry with any last commit, hint and signed offset."""
    reach = OFFSET_MAX if wide else 6
    return ProducerFrontier(
        producer=draw(producers(wide=wide) if producer is None else producer),
        last_commit=draw(clocks(wide=wide)),
        hinted_commit=draw(st.just(Clock(0)) | clocks(wide=wide)),
        offset=draw(st.integers(-reach, reach)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One document of a journal; its offset is its place in the list."""

    producer: Producer
    kind: Flag
    clock: Clock


def rows() -> st.SearchStrategy[list[Row]]:
    """Any documents in any order: mostly nonsense that no writer appends."""
    return st.lists(
        st.builds(Row, producer=producers(), kind=st.sampled_from(Flag), clock=clocks(least=2)),
        max_size=24,
    )


class Attempt(enum.Enum):
    """What became of the documents that a writer sent together."""

    OUTSIDE = "appended outside of transactions"
    COMMITTED = "appended, then committed by an ACK"
    ROLLED_BACK = "appended, then discarded by an ACK of the last commit"
    ABANDONED = "appended, and the writer was never heard of again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A journal as sound writers leave it, and the documents that a reader must see, each once."""

    rows: tuple[Row, ...]
    committed: frozenset[tuple[Producer, Clock]]


@st.composite
def journals_written(draw: st.DrawFn) -> Written:
    """Several writers, interleaved, each appending at least once and failing as writers fail.

    An append may be repeated right away, as a writer does that lost the reply. A writer rolls back
    only where it has committed before, and an abandoned span is the last thing it wrote.
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
