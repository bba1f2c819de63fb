from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from penstock.journal.codec import JournalMachine, decode_page, encode_page
from penstock.journal.state import (
    UNKNOWN,
    AckRecord,
    Append,
    Blob,
    Compact,
    Create,
    Diff,
    Digest,
    Drop,
    Forgotten,
    Fragment,
    Inline,
    JournalState,
    Page,
    Record,
    Refused,
    Reseal,
    Retain,
    Seal,
    Status,
    apply,
)
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.hints import Commit
from penstock.model.runs import Run
from support.strategies_journal import appends, digests, records

MACHINE = JournalMachine()
CREATE = Create(collection="c", labels=(("region", "eu"),), key_begin=0, key_end=0xFFFFFFFF)


def _rows(state: JournalState) -> dict[int, object]:
    """Everything a record says but where its rows are stored."""
    return {
        r.begin: replace(r, at=Inline(data=b""), bytes=0) if isinstance(r, Fragment) else r
        for r in state.records
    }


class JournalDiffs(RuleBasedStateMachine):
    """Any diffs, each committed through its encoding, keep the invariants of a journal."""

    def __init__(self) -> None:
        super().__init__()
        self.state = JournalState()
        self.revision = 0
        self.given: dict[int, object] = {}
        self.pages: dict[str, tuple[Record, ...]] = {}

    def commit(self, diff: Diff) -> None:
        self.revision += 1
        decoded = MACHINE.decode_diff(MACHINE.encode_diff(diff), MACHINE.format)
        assert decoded == diff
        self.state = MACHINE.apply(self.state, decoded, self.revision)

    @precondition(lambda self: not self.state.readable)
    @rule()
    def create(self) -> None:
        self.commit(CREATE)

    @precondition(lambda self: self.state.readable)
    @rule(diff=appends())
    def append(self, diff: Append) -> None:
        before = self.state.end
        self.commit(diff)
        assert self.state.status is Status.ACTIVE
        assert all(r.revision == self.revision for r in self.state.records if r.begin >= before)
        self.given |= {o: r for o, r in _rows(self.state).items() if o >= before}

    @precondition(lambda self: self.state.readable)
    @rule(back=st.integers(0, 20))
    def retain(self, back: int) -> None:
        self.commit(Retain(offset=max(self.state.end - back, 0)))

    @precondition(lambda self: self.state.readable and self.state.pages)
    @rule(at=st.integers(0, 3), kept=st.integers(1, 3), clock=st.integers(1, 99))
    def divide(self, at: int, kept: int, clock: int) -> None:
        page = self.state.pages[at % len(self.state.pages)]
        left = self.pages[page.path][-kept:]
        if left[0].begin == page.begin:
            return
        path = f"page{self.revision}"
        self.pages[path] = left
        rest = replace(page, path=path, begin=left[0].begin, records=len(left))
        forgotten = Forgotten(clock=Clock(clock), revision=self.revision)
        before = self.state.forgotten
        self.commit(Retain(offset=left[0].begin, forgotten=forgotten, page=rest))
        assert self.state.begin == left[0].begin
        assert self.state.pages[0] == rest
        assert self.state.forgotten.clock == max(before.clock, clock)

    @precondition(lambda self: self.state.readable)
    @rule(
        first=st.integers(0, 5),
        count=st.integers(1, 4),
        size=st.integers(1, 1000),
        digest=st.none() | digests(),
    )
    def compact(self, first: int, count: int, size: int, digest: Digest | None) -> None:
        chosen = [r for r in self.state.records if isinstance(r, Fragment)][first : first + count]
        if chosen and len({fragment.schema for fragment in chosen}) == 1:
            before = _rows(self.state)
            begin, end = chosen[0].begin, chosen[-1].end
            self.commit(Compact(begin=begin, end=end, path="new", bytes=size, digest=digest))
            assert _rows(self.state) == before
            moved = [r for r in self.state.records if isinstance(r, Fragment)][
                first : first + count
            ]
            assert sum(fragment.bytes for fragment in moved) == size
            expected = 0
            for fragment in moved:
                assert fragment.at == Blob(path="new", row=expected, digest=digest)
                expected += fragment.rows

    @precondition(lambda self: self.state.readable and len(self.state.records) > 2)
    @rule(count=st.integers(1, 3))
    def seal(self, count: int) -> None:
        sealed = self.state.records[:count]
        path = f"page{self.revision}"
        self.pages[path] = decode_page(encode_page(sealed))
        assert self.pages[path] == sealed
        page = Page(
            path=path, begin=sealed[0].begin, end=sealed[-1].end, records=count,
            rows=0, bytes=0, revision_min=sealed[0].revision, revision_max=sealed[-1].revision,
            digest=count if count > 1 else None,
        )  # fmt: skip
        self.commit(Seal(page=page))

    @precondition(lambda self: self.state.readable and self.state.pages)
    @rule(first=st.integers(0, 3), count=st.integers(1, 3))
    def reseal(self, first: int, count: int) -> None:
        chosen = self.state.pages[first : first + count]
        if chosen:
            path = f"page{self.revision}"
            self.pages[path] = tuple(r for page in chosen for r in self.pages[page.path])
            page = replace(
                chosen[0], path=path, end=chosen[-1].end, records=len(self.pages[path]),
                revision_max=chosen[-1].revision_max,
            )  # fmt: skip
            pages = self.state.pages
            self.commit(Reseal(page=page))
            assert self.state.pages == (*pages[:first], page, *pages[first + count :])

    @precondition(lambda self: self.state.readable)
    @rule()
    def drop(self) -> None:
        end = self.state.end
        self.commit(Drop())
        assert (self.state.begin, self.state.end) == (end, end)

    @invariant()
    def records_tile_the_retained_offsets(self) -> None:
        position = self.state.begin
        for part in (*self.state.pages, *self.state.records):
            assert part.begin == position
            position = part.end
        assert position == self.state.end

    @invariant()
    def what_a_record_says_of_its_rows_never_changes(self) -> None:
        assert _rows(self.state).items() <= self.given.items()

    @invariant()
    def a_state_survives_its_encoding(self) -> None:
        encoded = MACHINE.encode_state(self.state)
        assert MACHINE.decode_state(encoded, MACHINE.format, 7) == self.state


TestJournalDiffs = JournalDiffs.TestCase


@given(st.lists(records(), min_size=1, max_size=3))
def test_unknown_revisions_are_filled_in_when_a_rollup_is_read(appended: list[Record]) -> None:
    state = apply(apply(JournalState(), CREATE, 1), Append(records=tuple(appended)), UNKNOWN)
    decoded = MACHINE.decode_state(MACHINE.encode_state(state), MACHINE.format, 42)
    assert {record.revision for record in decoded.records} == {42}
    assert len(decoded.records) == len(appended)


P7 = Producer(Producer.MULTICAST | 7)
ROWS = Fragment(
    rows=2, bytes=3, at=Inline(data=b"abc"), schema="s", key_hash_min=1, key_hash_max=2,
    runs=(
        Run(
            producer=P7, kind=Flag.CONTINUE_TXN, first_offset=0, last_offset=1, rows=2,
            clock_min=Clock(160), clock_max=Clock(161), clock_max_offset=1, increasing=True,
        ),
    ),
)  # fmt: skip
CLOSED = AckRecord(producer=P7, clock=Clock(162), hints=(Commit("b", P7, Clock(162)),))
PAGE = Page(
    path="p", begin=0, end=2, records=1, rows=2, bytes=3, revision_min=5, revision_max=5
)  # fmt: skip
OPEN = apply(
    apply(
        JournalState(),
        Create(collection="a", labels=(("region", "eu"),), key_begin=0, key_end=9),
        1,
    ),
    Append(records=(ROWS, CLOSED)),
    5,
)
SEALED = apply(OPEN, Seal(page=PAGE), 6)


def test_what_the_first_release_wrote_is_still_read() -> None:
    diff = (
        "9201929a000000020391c403616263a1739199cf000001000000000701000102cca0cca101c30102"
        "96010000cf0000010000000007cca29191a162"
    )
    state = (
        "9aa6616374697665a1619192a6726567696f6ea2657500090100039198a1700002010203050591"
        "96010205cf0000010000000007cca29191a162"
    )
    page = "9201919a000005020391c403616263a1739199cf000001000000000701000102cca0cca101c30102"
    assert MACHINE.decode_diff(bytes.fromhex(diff), 1) == Append(records=(ROWS, CLOSED))
    assert MACHINE.decode_state(bytes.fromhex(state), 1, 7) == SEALED
    assert decode_page(bytes.fromhex(page)) == OPEN.records[:1]


def test_what_has_digests_is_encoded_for_good() -> None:
    digest = Digest(bytes=9, footer=4, value=1 << 63, rows=5)
    rows = replace(ROWS, at=Blob(path="p", row=1, digest=digest))
    fragment = (
        "9a000000020396a170010904cf800000000000000005a1739199cf0000010000000007"
        "01000102cca0cca101c30102"
    )
    encoded = {
        Append(records=(rows,)): f"920191{fragment}",
        Compact(
            begin=0, end=2, path="q", bytes=9, digest=digest
        ): "99050002a171090904cf800000000000000005",
        Seal(page=replace(PAGE, digest=7)): "920699a1700002010203050507",
    }
    for diff, text in encoded.items():
        assert MACHINE.encode_diff(diff).hex() == text
        assert MACHINE.decode_diff(bytes.fromhex(text), 3) == diff
    assert encode_page([rows]).hex() == f"920291{fragment}"
    assert decode_page(bytes.fromhex(f"920291{fragment}")) == (rows,)


@pytest.mark.parametrize(
    ("state", "diff", "message"),
    [
        pytest.param(JournalState(), Append(records=()), "absent", id="append before create"),
        pytest.param(JournalState(), Drop(), "absent", id="drop before create"),
        pytest.param(apply(JournalState(), CREATE, 1), CREATE, "active", id="create twice"),
        pytest.param(
            apply(JournalState(), CREATE, 1),
            Compact(begin=0, end=5, path="p", bytes=1),
            "not whole fragments",
            id="compact what is not there",
        ),
        pytest.param(
            SEALED, Reseal(page=replace(PAGE, end=3)), "not whole pages", id="reseal half a page"
        ),
        pytest.param(
            SEALED, Reseal(page=replace(PAGE, records=2)), "not whole pages", id="of other records"
        ),
        pytest.param(
            apply(JournalState(), CREATE, 1),
            Reseal(page=PAGE),
            "not whole pages",
            id="reseal what was forgotten",
        ),
    ],
)
def test_a_diff_that_does_not_fit_the_state_is_refused(
    state: JournalState, diff: Diff, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        apply(state, diff, 2)
