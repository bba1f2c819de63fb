"""PURE: the records of a journal, as far as a session holds them.

The newest records are in the journal's state. Older ones were sealed into pages, which are objects
of the blob store: a `History` says which page it lacks, and its caller supplies it.
Only pages that are about to be read are asked for, and none is kept once every reader is past it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from penstock.errors import Bug
from penstock.journal.state import Fragment, JournalState, Page, Record
from penstock.model.byte_progress import byte_position
from penstock.model.clock import Clock
from penstock.model.runs import Run

_BEGIN: Final = attrgetter("begin")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedPages:
    """Planning goes on when the records of these pages, one after the other, are supplied."""

    journal: str
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedRows:
    """Planning goes on when rows were looked at.

    The answer is the *journal's* offset of the first row of `run` with a clock above `clock_gt`.
    The run has offsets relative to its fragment, as its fragment has it.
    """

    journal: str
    fragment: Fragment
    run: Run
    clock_gt: Clock


Need = NeedPages | NeedRows


class Needed(Exception):
    """Ends planning, which has changed nothing yet, and starts again with the answer."""

    def __init__(self, need: Need) -> None:
        super().__init__(need)
        self.need = need


class History:
    """One generation of one journal."""

    __slots__ = ("_loaded", "bytes_end", "name", "state")

    def __init__(self, name: str, state: JournalState) -> None:
        self.name = name
        self.state = state
        self.bytes_end = 0
        """Grows by what is appended. Where it starts does not matter: only differences are used."""
        self._loaded: dict[str, Sequence[Record]] = {}

    @property
    def holds_anything(self) -> bool:
        """True if a hint of an ACK elsewhere at this journal is worth waiting for.

        The rows of a transaction are appended before its first ACK is. So where there is nothing,
        there is nothing of that transaction, whether it was removed or never was.
        """
        return self.state.readable and self.state.begin < self.state.end

    def move(self, state: JournalState) -> None:
        """The journal is further on. What was sealed meanwhile stays at hand until `forget`."""
        before, self.state = self.state, state
        self.bytes_end += self.bytes_from(before.end)
        if not (before.records and state.pages):
            return
        for page in reversed(state.pages):
            if page.begin < before.records[0].begin:
                break
            at = bisect_right(before.records, page.begin, key=_BEGIN) - 1
            held = before.records[at : at + page.records]
            if held[0].begin == page.begin and held[-1].end == page.end:
                self._loaded[page.path] = held

    # ---------------------------------------------------------------------------------- reading

    def first_revision(self, offset: int) -> int | None:
        """The revision of the first record that ends after `offset`; None if there is no such.

        A lower bound of it, where the page of that record is not at hand.
        """
        found = self._find(offset)
        if found is None:
            return None
        return found.revision_min if isinstance(found, Page) else found[0][found[1]].revision

    def first(self, offset: int) -> Record | None:
        """The first record that ends after `offset`."""
        found = self._find(offset)
        if found is None:
            return None
        if isinstance(found, Page):
            raise Needed(NeedPages(journal=self.name, pages=(found,)))
        return found[0][found[1]]

    def at_revision(self, offset: int, revision: int, *, ahead: int = 0) -> list[Record]:
        """The records that end after `offset`, if their revision is this one, up to the next.

        If a page is needed for them, the next ones are too, up to `ahead` records: planning
        begins again with each answer.
        """
        records: list[Record] = []
        while (found := self._find(offset)) is not None:
            if isinstance(found, Page):
                if found.revision_min > revision:
                    break
                raise Needed(NeedPages(journal=self.name, pages=self._from(found, ahead)))
            held, at = found
            while at < len(held) and held[at].revision == revision:
                records.append(held[at])
                at += 1
            if at < len(held):
                break
            offset = held[-1].end
        return records

    def _from(self, page: Page, records: int) -> tuple[Page, ...]:
        """A page, and those after it that are not at hand, up to a number of records."""
        pages = self.state.pages
        found = [page]
        records -= page.records
        for each in pages[bisect_right(pages, page.begin, key=_BEGIN) :]:
            records -= each.records
            if records < 0:
                break
            if each.path not in self._loaded:
                found.append(each)
        return tuple(found)

    def between(self, begin: int, end: int) -> Iterator[Record]:
        """The retained records with offsets in `[begin, end)`."""
        lacking = tuple(
            page
            for page in self.state.pages
            if page.begin < end and page.end > begin and page.path not in self._loaded
        )
        if lacking:
            raise Needed(NeedPages(journal=self.name, pages=lacking))
        while begin < end and (found := self._find(begin)) is not None:
            if isinstance(found, Page):
                raise Bug(f"{self.name}: page {found.path} lies outside of {begin} to {end}")
            held, at = found
            for record in held[at:]:
                if record.begin >= end:
                    return
                yield record
            begin = held[-1].end

    def _find(self, offset: int) -> tuple[Sequence[Record], int] | Page | None:
        """The records at hand, and which of them is the first to end after `offset`."""
        state = self.state
        if offset < state.begin:
            offset = state.begin
        if offset >= state.end:
            return None
        held: Sequence[Record] = state.records
        if not held or offset < held[0].begin:
            page = state.pages[bisect_right(state.pages, offset, key=_BEGIN) - 1]
            loaded = self._loaded.get(page.path)
            if loaded is None:
                return page
            held = loaded
        return held, bisect_right(held, offset, key=_BEGIN) - 1

    # ------------------------------------------------------------------------------------ pages

    def supply(self, pages: Iterable[Page], records: Sequence[Record]) -> None:
        """The records of some pages, one page after the other."""
        at = 0
        for page in pages:
            held = records[at : at + page.records]
            if not held or (held[0].begin, held[-1].end) != (page.begin, page.end):
                raise Bug(
                    f"{self.name}: what was supplied is not the records of page {page.path}",
                    why=f"it has offsets {page.begin} to {page.end}",
                )
            self._loaded[page.path] = held
            at += page.records

    @property
    def has_pages(self) -> bool:
        """True if pages are at hand, to `forget`."""
        return bool(self._loaded)

    def forget(self, offset: int) -> None:
        """Nobody is about to read what lies before `offset`."""
        if self._loaded:
            wanted = {page.path for page in self.state.pages if page.end > offset}
            self._loaded = {path: held for path, held in self._loaded.items() if path in wanted}

    # ------------------------------------------------------------------------------------ bytes

    def bytes_from(self, offset: int) -> int:
        """Bytes stored from `offset` on; an estimate within a page that is not at hand."""
        total = 0
        for record in reversed(self.state.records):
            if record.end <= offset:
                return total
            total += bytes_after(record, offset)
        for page in reversed(self.state.pages):
            if page.end <= offset:
                break
            total += page.bytes * (page.end - max(offset, page.begin)) // (page.end - page.begin)
        return total


def bytes_after(record: Record, offset: int) -> int:
    """Bytes of a record stored from `offset` on; ACKs have none."""
    if not isinstance(record, Fragment):
        return 0
    if offset <= record.begin:
        return record.bytes
    return record.bytes - byte_position(
        offset, first_offset=record.begin, rows=record.rows, first_byte=0, size_bytes=record.bytes
    )
