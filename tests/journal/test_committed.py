from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.journal.committed import CommitReader, VisibleRows
from penstock.journal.state import AckRecord, Append, Create, Fragment, Inline, JournalState, apply
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.runs import Run
from penstock.model.sequence import ProducerState, SequenceError, advance, sequence

P1, P2 = Producer(Producer.MULTICAST | 1), Producer(Producer.MULTICAST | 2)


@dataclass(frozen=True)
class Doc:
    """One document as it is written: an ACK has no row."""

    producer: Producer
    flag: Flag
    clock: Clock


def _fragment(docs: list[Doc]) -> Fragment:
    """The statistics a writer computes of its rows, the slow and obvious way."""
    runs: list[Run] = []
    for producer in sorted({d.producer for d in docs}):
        stretch: list[tuple[int, Doc]] = []
        mine = [(i, d) for i, d in enumerate(docs) if d.producer == producer]
        for at, doc in [*mine, (-1, None)]:
            if stretch and (doc is None or doc.flag is not stretch[0][1].flag):
                clocks = [d.clock for _, d in stretch]
                top = max(clocks)
                runs.append(
                    Run(
                        producer=producer,
                        kind=stretch[0][1].flag,
                        first_offset=stretch[0][0],
                        last_offset=stretch[-1][0],
                        rows=len(stretch),
                        clock_min=min(clocks),
                        clock_max=top,
                        clock_max_offset=stretch[clocks.index(top)][0],
                        increasing=all(a < b for a, b in itertools.pairwise(clocks)),
                    )
                )
                stretch = []
            if doc is not None:
                stretch.append((at, doc))
    return Fragment(
        rows=len(docs), bytes=1, at=Inline(data=b""), schema="s", runs=tuple(runs),
        key_hash_min=0, key_hash_max=0,
    )  # fmt: skip


def _journal(docs: list[Doc], cuts: set[int]) -> JournalState:
    records: list[Fragment | AckRecord] = []
    batch: list[Doc] = []
    for index, doc in enumerate(docs):
        if batch and (doc.flag is Flag.ACK_TXN or index in cuts):
            records.append(_fragment(batch))
            batch = []
        if doc.flag is Flag.ACK_TXN:
            records.append(AckRecord(producer=doc.producer, clock=doc.clock))
        else:
            batch.append(doc)
    if batch:
        records.append(_fragment(batch))
    created = apply(
        JournalState(), Create(collection="c", labels=(), key_begin=0, key_end=1), revision=1
    )
    return apply(created, Append(records=tuple(records)), revision=2)


def _rows(visible: VisibleRows, docs: list[Doc]) -> list[int]:
    """The offsets that `visible` names, read off the documents."""
    run, begin = visible.run, visible.fragment.begin
    kept, top = [], visible.clock_gt
    for offset in range(begin + run.first_offset, begin + run.last_offset + 1):
        doc = docs[offset]
        if doc.producer == run.producer and doc.flag is run.kind and doc.clock > top:
            kept.append(offset)
            if visible.running_max:
                top = doc.clock
    return kept


def _oracle(docs: list[Doc]) -> list[int]:
    """Committed offsets, document by document."""
    states: dict[Producer, ProducerState] = {}
    spans: dict[Producer, list[int]] = {}
    shown: list[int] = []
    for offset, doc in enumerate(docs):
        state = states.get(doc.producer, ProducerState())
        outcome = sequence(state, doc.flag, doc.clock)
        if outcome.is_fatal:
            raise SequenceError("fatal")
        states[doc.producer] = advance(state, outcome, doc.clock, offset)
        if outcome.is_duplicate:
            continue
        if doc.flag is Flag.CONTINUE_TXN:
            spans.setdefault(doc.producer, []).append(offset)
        elif doc.flag is Flag.OUTSIDE_TXN:
            shown.append(offset)
        else:
            span = spans.pop(doc.producer, [])
            shown += span if outcome.is_commit else []
    return shown


_DOCS = st.lists(
    st.builds(
        Doc,
        producer=st.sampled_from([P1, P2]),
        flag=st.sampled_from(Flag),
        clock=st.integers(1, 9).map(Clock),
    ),
    max_size=14,
)


@given(_DOCS, st.sets(st.integers(0, 14)))
def test_records_tell_what_documents_would(docs: list[Doc], cuts: set[int]) -> None:
    committed = CommitReader("j")
    records = _journal(docs, cuts).records
    try:
        expected = _oracle(docs)
    except SequenceError:
        with pytest.raises(SequenceError, match="journal j"):
            [committed.read(record) for record in records]
        return
    visible = [rows for record in records for rows in committed.read(record)]
    assert sorted(o for rows in visible for o in _rows(rows, docs)) == sorted(expected)
    for rows in visible:
        if rows.whole:
            assert len(_rows(rows, docs)) == rows.run.rows


def test_a_span_shows_with_its_ack_and_not_before() -> None:
    docs = [
        Doc(P1, Flag.CONTINUE_TXN, Clock(10)),
        Doc(P2, Flag.OUTSIDE_TXN, Clock(11)),
        Doc(P1, Flag.ACK_TXN, Clock(12)),
    ]
    first, ack = _journal(docs, set()).records
    committed = CommitReader("j")
    assert [_rows(rows, docs) for rows in committed.read(first)] == [[1]]
    assert [_rows(rows, docs) for rows in committed.read(ack)] == [[0]]
    assert committed.read(ack) == []
