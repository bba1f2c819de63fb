"""Hypothesis strategies for journals: records, diffs, and the states that diffs lead to."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.journal.state import AckRecord, Append, Blob, Diff, Digest, Fragment, Inline, Record
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.hints import Commit
from penstock.model.runs import Run

PRODUCERS = tuple(Producer(Producer.MULTICAST | n) for n in (1, 2, 3))

_CLOCKS = st.integers(1, 60).map(Clock)


@st.composite
def _runs(draw: st.DrawFn) -> tuple[Run, ...]:
    """Draw adjacent runs, as a writer of whole batches makes them."""
    runs: list[Run] = []
    begin = 0
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 4))
        low = draw(_CLOCKS)
        increasing = draw(st.booleans())
        runs.append(
            Run(
                producer=draw(st.sampled_from(PRODUCERS)),
                kind=draw(st.sampled_from([Flag.OUTSIDE_TXN, Flag.CONTINUE_TXN])),
                first_offset=begin,
                last_offset=begin + rows - 1,
                rows=rows,
                clock_min=low,
                clock_max=Clock(low + rows - 1),
                clock_max_offset=begin
                + (rows - 1 if increasing else draw(st.integers(0, rows - 1))),
                increasing=increasing,
            )
        )
        begin += rows
    return tuple(runs)


def digests() -> st.SearchStrategy[Digest]:
    sizes, value = st.integers(0, 1 << 40), st.integers(0, (1 << 64) - 1)
    return st.builds(Digest, bytes=sizes, footer=sizes, value=value, rows=sizes)


@st.composite
def fragments(draw: st.DrawFn) -> Fragment:
    """Draw a fragment before it is appended."""
    runs = draw(_runs())
    inline = draw(st.booleans())
    low, high = sorted(draw(st.tuples(*[st.integers(0, 0xFFFFFFFF)] * 2)))
    return Fragment(
        rows=sum(run.rows for run in runs),
        bytes=draw(st.integers(1, 1 << 30)),
        at=Inline(data=draw(st.binary(max_size=8)))
        if inline
        else Blob(
            path=draw(st.text(min_size=1, max_size=8)),
            row=draw(st.integers(0, 9)),
            digest=draw(st.none() | digests()),
        ),
        schema=draw(st.sampled_from(["s1", "s2"])),
        runs=runs,
        key_hash_min=low,
        key_hash_max=high,
    )


@st.composite
def acks(draw: st.DrawFn) -> AckRecord:
    """Draw an ACK before it is appended, with hints of its own stamp and of others."""
    producer, clock = draw(st.sampled_from(PRODUCERS)), draw(_CLOCKS)
    own = st.just((producer, clock))
    other = st.tuples(st.sampled_from(PRODUCERS), _CLOCKS)
    hints = draw(st.lists(st.tuples(st.sampled_from("ab"), own | other), max_size=3))
    return AckRecord(
        producer=producer,
        clock=clock,
        hints=tuple(Commit(journal, *stamp) for journal, stamp in hints),
    )


def records() -> st.SearchStrategy[Record]:
    return fragments() | acks()


def appends() -> st.SearchStrategy[Diff]:
    return st.builds(Append, records=st.lists(records(), min_size=1, max_size=4).map(tuple))
