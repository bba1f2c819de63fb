from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Bug, UserError
from penstock.journal.state import AckRecord, Append, Fragment, Inline, Record
from penstock.journal.transaction import (
    COMMITS_MAX,
    HINTED_COMMITS_MAX,
    BatchLimits,
    Intents,
    MalformedIntents,
    batches,
    close,
    entry_bytes,
)
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.hints import Commit
from penstock.model.runs import Run
from support.strategies_journal import appends

P1, P2 = (Producer(Producer.MULTICAST | n) for n in (1, 2))


def intents(journals: int, *producers: Producer) -> Intents:
    return Intents.of(
        Commit(f"c/pivot={n:08x}", producer, Clock(100))
        for n in range(journals)
        for producer in producers or (P1,)
    )


def rows(size: int = 10) -> Fragment:
    run = Run(
        producer=P1,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=0,
        rows=1,
        clock_min=Clock(7),
        clock_max=Clock(7),
        clock_max_offset=0,
        increasing=True,
    )
    return Fragment(
        rows=1,
        bytes=size,
        at=Inline(data=b"x" * size),
        schema="s",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=1,
    )


def hints(parts: dict[str, tuple[Record, ...]]) -> list[int]:
    """How many hints each ACK has."""
    acks = (r for records in parts.values() for r in records if isinstance(r, AckRecord))
    return [len(ack.hints) for ack in acks]


@given(
    st.sets(st.tuples(st.text("abc/=", min_size=1), st.sampled_from([P1, P2])), max_size=20),
    st.integers(2, 1 << 62),
)
def test_intents_survive_their_encoding(pairs: set[tuple[str, Producer]], clock: int) -> None:
    made = Intents.of(Commit(name, producer, Clock(clock)) for name, producer in pairs)
    assert Intents.decode(made.encode()) == made


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, [[5, 7, ["a"]]]]),
        msgspec.msgpack.encode([1, [[int(P1), 7, [""]]]]),
        msgspec.msgpack.encode([2, []]),
    ],
    ids=["nothing", "no msgpack", "no producer", "no name", "a newer format"],
)
def test_other_bytes_are_not_intents(data: bytes) -> None:
    with pytest.raises(MalformedIntents):
        Intents.decode(data)


def test_a_small_transaction_is_one_with_its_rows_and_hints() -> None:
    journals = intents(3).journals
    closing = close(intents(3), {journals[0]: [rows()], journals[2]: [rows(), rows()]})
    assert closing.rows == ()
    [whole] = closing.acks
    assert [len(records) for records in whole.values()] == [2, 1, 3]
    assert hints(whole) == [2, 2, 2]


@pytest.mark.parametrize(
    ("commits", "limits", "acks", "hinted"),
    [
        pytest.param(HINTED_COMMITS_MAX, BatchLimits(), 1, True, id="few: hints cost little"),
        pytest.param(HINTED_COMMITS_MAX + 1, BatchLimits(), 1, False, id="one revision: no hints"),
        pytest.param(1000, BatchLimits(), 1, False, id="as many as one store transaction has"),
        pytest.param(1001, BatchLimits(), 2, True, id="several revisions: hints do the work"),
    ],
)
def test_hints_are_written_where_they_are_few_or_needed(
    commits: int, limits: BatchLimits, acks: int, hinted: bool
) -> None:
    closing = close(intents(commits), {}, limits)
    assert len(closing.acks) >= acks
    assert closing.atomic == (acks == 1)
    wanted = commits - 1 if hinted else 0
    assert {n for parts in closing.acks for n in hints(parts)} == {wanted}
    assert all(limits.hold(parts) for parts in closing.acks)


def test_of_several_producers_the_first_ack_of_a_journal_has_the_hints() -> None:
    [parts] = close(intents(2, P1, P2), {}).acks
    assert hints(parts) == [3, 0, 3, 0]


def test_more_commits_than_can_hint_at_each_other_are_refused_before_they_are_durable() -> None:
    with pytest.raises(UserError, match="cannot be acknowledged"):
        intents(COMMITS_MAX + 1)


def test_rows_that_would_never_be_acknowledged_are_a_bug() -> None:
    with pytest.raises(Bug, match="would never be seen"):
        close(intents(1), {"elsewhere/pivot=00": [rows()]})


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2), st.lists(st.integers(0, 900), max_size=5)
    ),
    st.integers(1, 3),
)
def test_batches_hold_everything_in_order_within_the_limits(
    sizes: dict[str, list[int]], journals: int
) -> None:
    limits = BatchLimits(journals=journals, bytes=3000)
    parts = {name: [rows(size) for size in each] for name, each in sizes.items()}
    made = list(batches(parts, limits))
    assert all(limits.hold(batch) for batch in made)
    for name, records in parts.items():
        assert [r for batch in made for r in batch.get(name, ())] == records


@given(appends())
def test_the_size_of_an_entry_is_not_underestimated(append: Append) -> None:
    from penstock.consensus import entries
    from penstock.journal.codec import JournalMachine

    entry = entries.LogEntry(
        format=1,
        writer=bytes(16),
        writer_seq=2**63 - 1,
        token=bytes(16),
        epoch=2**63 - 1,
        base=2**63 - 1,
        wall_ms=2**63 - 1,
        diff=JournalMachine().encode_diff(append),
    )
    assert len(entries.encode(entry)) <= entry_bytes(append.records)
