"""Where the rows of a journal are now, and what shares their objects."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal.publishing import world
from journal.test_scan import ONE, ack, fragment
from penstock.journal.codec import encode_page
from penstock.journal.committed import CommitReader, VisibleRows
from penstock.journal.planning import Planner
from penstock.journal.state import (
    Append,
    Blob,
    Compact,
    Create,
    Fragment,
    JournalState,
    Page,
    Record,
    Retain,
    Seal,
    apply,
)

CREATE = Create(collection="c", labels=(), key_begin=0, key_end=0xFFFFFFFF)


def sealed(state: JournalState, count: int) -> tuple[JournalState, Page, tuple[Record, ...]]:
    """The state with its first records in a page."""
    records = state.records[:count]
    page = Page(
        path=f"page{records[0].begin}",
        begin=records[0].begin,
        end=records[-1].end,
        records=count,
        rows=sum(r.rows for r in records if isinstance(r, Fragment)),
        bytes=1,
        revision_min=1,
        revision_max=1,
    )
    return apply(state, Seal(page=page), 9), page, records


class Pages:
    """A journal whose records are appended in pairs of a row and its ACK, then compacted, sealed
    and forgotten in places; counts the pages that are read of it."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.state = apply(JournalState(), CREATE, 1)
        self.visible: list[VisibleRows] = []
        self._clock = 10

    def append(self, count: int) -> None:
        committed = CommitReader("j")
        for _ in range(count):
            made = fragment(f"o{self._clock}", ONE, self._clock), ack(ONE, self._clock + 1)
            self._clock += 2
            self.state = apply(self.state, Append(records=made), 2)
            for record in self.state.records[-2:]:
                self.visible += committed.read(record)

    def compact(self, first: int, last: int) -> None:
        inside = [r for r in self.state.records if isinstance(r, Fragment)][first : last + 1]
        if inside:
            begin, end = inside[0].begin, inside[-1].end
            path = f"c{begin}-{end}-{len(self.state.pages)}"
            self.state = apply(self.state, Compact(begin=begin, end=end, path=path, bytes=9), 3)

    def seal(self, count: int) -> None:
        if 0 < count <= len(self.state.records):
            self.state, page, records = sealed(self.state, count)
            self.planner.blobs.write(page.path, encode_page(records))


async def test_rows_are_found_where_compaction_put_them_with_all_that_lies_beside_them(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        planner = Planner(journals=here.journals, blobs=here.blobs, schemas=here.schemas)
        journal = Pages(planner)
        journal.append(6)
        journal.compact(1, 4)
        journal.seal(6)  # which cuts the compacted object in two
        found = await planner.resolve_rows("j", journal.visible[2:3], journal.state)
        (rows,) = found.visible
        assert isinstance(rows.fragment.at, Blob)
        assert rows.fragment.at.row == 1
        assert rows.run == journal.visible[2].run
        path = rows.fragment.at.path
        assert sorted(r.begin for r in found.records) == [2, 4, 6, 8]
        assert {r.at.path for r in found.records if isinstance(r, Fragment)} == {path}  # type: ignore[union-attr]


async def test_looking_for_a_row_reads_no_page_but_its_own(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        planner = Planner(journals=here.journals, blobs=here.blobs, schemas=here.schemas)
        journal = Pages(planner)
        journal.append(40)
        for _ in range(9):
            journal.seal(8)
        for page in journal.state.pages:
            if page.begin != 24:
                here.blobs.delete(page.path)
        found = await planner.resolve_rows("j", journal.visible[13:14], journal.state)
        assert [r.begin for r in found.records] == [26]


@pytest.mark.parametrize("gone", [True, False], ids=["dropped", "forgotten"])
async def test_rows_that_the_journal_no_longer_has_stay_where_they_were(
    gone: bool, tmp_path: Path
) -> None:
    async with world(tmp_path) as here:
        planner = Planner(journals=here.journals, blobs=here.blobs, schemas=here.schemas)
        journal = Pages(planner)
        journal.append(3)
        state = None if gone else apply(journal.state, Retain(offset=4), 4)
        found = await planner.resolve_rows("j", journal.visible, state)
        assert found.visible == tuple(journal.visible)
        assert [r.begin for r in found.records] == ([] if gone else [4])


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 30))
async def test_what_shares_an_object_is_what_a_look_at_all_records_finds(
    seed: int, count: int
) -> None:
    import tempfile

    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        async with world(Path(directory)) as here:
            planner = Planner(journals=here.journals, blobs=here.blobs, schemas=here.schemas)
            journal = Pages(planner)
            journal.append(count)
            first = 0
            while first < count:  # one object after the other: compaction never takes one apart
                last = first + chance.randrange(5)
                if chance.random() < 0.7:
                    journal.compact(first, last)
                first = last + 1
            for _ in range(2):
                journal.seal(chance.randrange(8))
            some = chance.sample(journal.visible, min(3, count))
            found = await planner.resolve_rows("j", some, journal.state)
            everything = await planner.records(journal.state)
            now = {r.begin: r for r in everything if isinstance(r, Fragment)}
            want = {now[rows.fragment.begin].at.path for rows in some}  # type: ignore[union-attr]
            assert {r.begin for r in found.records} == {
                begin
                for begin, r in now.items()
                if r.at.path in want  # type: ignore[union-attr]
            }
            assert [rows.fragment for rows in found.visible] == [
                now[begin] for begin in sorted(rows.fragment.begin for rows in some)
            ]
