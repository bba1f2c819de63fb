"""From the state of journals to what a scan reads: records, visible rows, and splits for tasks."""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from penstock.journal.blobs import BlobStore
from penstock.journal.committed import CommitReader, VisibleRows
from penstock.journal.fragments import read_fragment
from penstock.journal.integrity import check_object, locate_damage, read_page
from penstock.journal.journals import Journals
from penstock.journal.schemas import Schemas
from penstock.journal.selector import EVERYTHING, LabelSelector
from penstock.journal.splits import Piece, Split, schema_of, splits
from penstock.journal.state import Blob, Fragment, JournalState, Page, Record
from penstock.journal.timeline import Unit
from penstock.model.columns import Column

_BEGIN: Final = attrgetter("begin")
_END: Final = attrgetter("end")


class ScannedJournal(Struct, frozen=True, kw_only=True, gc=False):
    """One journal as of one revision."""

    name: str
    records: tuple[Record, ...]
    visible: tuple[VisibleRows, ...]
    """Committed rows of these records, in the order in which they were committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The stores that planning looks at. Used on the event loop of `journals`."""

    journals: Journals
    blobs: BlobStore
    schemas: Schemas

    async def scan(
        self, collection: str, selector: LabelSelector = EVERYTHING
    ) -> tuple[ScannedJournal, ...]:
        """Return what is committed to the journals of a collection, all as of one revision."""
        scanned: list[ScannedJournal] = []
        for journal in await self.journals.list(collection, selector):
            records = await self.records(journal.state, journal=journal.name)
            committed = CommitReader(journal.name)
            visible = tuple(rows for record in records for rows in committed.read(record))
            scanned.append(
                ScannedJournal(name=journal.name, records=tuple(records), visible=visible)
            )
        return tuple(scanned)

    async def records(
        self, state: JournalState, offset: int = 0, *, journal: str | None = None
    ) -> list[Record]:
        """The records of a journal from an offset on, those in pages too."""
        found: list[Record] = []
        for page in state.pages:
            if page.end > offset:
                found += await self._page(journal, page)
        found += state.records
        return found[bisect_left(found, max(offset, state.begin), key=_BEGIN) :]

    async def resolve_units(
        self, units: Iterable[Unit], states: Mapping[str, JournalState]
    ) -> list[VisibleRows]:
        """The rows of units, each where the newest state of its journal says that it is.

        Compaction may have moved them since their record was read, and sealed the record too.
        """
        found: list[VisibleRows] = []
        journals: dict[str, _Held] = {}
        for unit in units:
            if unit.journal not in journals:
                journals[unit.journal] = _Held(states[unit.journal], self._pages(unit.journal))
            for rows in unit.visible:
                now = await journals[unit.journal].fragment(rows.fragment.begin)
                if now is not None:  # else it is below what the journal retains: they are gone
                    found += [replace(rows, fragment=now)]
        return found

    async def resolve_rows(
        self, name: str, visible: Iterable[VisibleRows], state: JournalState | None
    ) -> ScannedJournal:
        """Rows of a journal where its newest state has them, and all that shares their objects.

        Costs by these rows and objects, however long the journal is. Rows that it no longer has
        stay where they were: until garbage collection takes the object, they can still be read.
        """
        held = _Held(state or JournalState(), self._pages(name))
        found: list[VisibleRows] = []
        sharing: dict[str, list[Fragment]] = {}
        for rows in visible:
            now = await held.fragment(rows.fragment.begin)
            moved = now is not None and now is not rows.fragment
            found.append(replace(rows, fragment=now or rows.fragment) if moved else rows)
            if now is not None and isinstance(now.at, Blob) and now.at.path not in sharing:
                sharing[now.at.path] = await held.sharing(now, now.at)
        return ScannedJournal(
            name=name,
            records=tuple(fragment for some in sharing.values() for fragment in some),
            visible=tuple(sorted(found, key=_fragment_begin)),
        )

    async def check(
        self, name: str, visible: Iterable[VisibleRows], state: JournalState | None
    ) -> None:
        """Read the objects of these rows as a whole; raises CorruptBlob for the first damaged one.

        Of objects without a digest, it is enough that they can be decoded.
        """
        seen: set[str] = set()
        for rows in (await self.resolve_rows(name, visible, state)).visible:
            fragment = rows.fragment
            if not isinstance(fragment.at, Blob) or fragment.at.path in seen:
                continue
            with locate_damage(name, fragment.begin, fragment.end):
                if fragment.at.digest is not None:
                    seen.add(fragment.at.path)
                    await asyncio.to_thread(check_object, self.blobs, fragment.at)
                else:
                    root = await self.schemas.layout(fragment.schema)
                    await asyncio.to_thread(_read_all, self.blobs, fragment, root)

    async def layouts(self, pieces: Iterable[Piece]) -> dict[str, Column]:
        """The layouts that pieces were written in, by the fingerprints of their schemas."""
        names = dict.fromkeys(map(schema_of, pieces))
        return {name: await self.schemas.layout(name) for name in names}

    async def splits(self, pieces: Sequence[Piece]) -> tuple[Split, ...]:
        """Pieces for tasks."""
        return splits(pieces, await self.layouts(pieces))

    def _pages(self, journal: str) -> Callable[[Page], Awaitable[tuple[Record, ...]]]:
        return functools.partial(self._page, journal)

    async def _page(self, journal: str | None, page: Page) -> tuple[Record, ...]:
        return await asyncio.to_thread(read_page, self.blobs, page, journal)


def _read_all(blobs: BlobStore, fragment: Fragment, root: Column) -> None:
    for _ in read_fragment(blobs, fragment, root):
        pass


def _fragment_begin(rows: VisibleRows) -> int:
    return rows.fragment.begin


class _Held:
    """The records that a journal holds, by offset; pages are read when a record of theirs is."""

    def __init__(
        self, state: JournalState, page: Callable[[Page], Awaitable[tuple[Record, ...]]]
    ) -> None:
        self._state = state
        self._page = page
        self._pages: dict[int, tuple[Record, ...]] = {}

    async def fragment(self, begin: int) -> Fragment | None:
        """The fragment that begins at an offset."""
        records = await self._part(self._part_of(begin))
        at = bisect_left(records, begin, key=_BEGIN)
        now = records[at] if at < len(records) else None
        return now if isinstance(now, Fragment) and now.begin == begin else None

    async def sharing(self, fragment: Fragment, blob: Blob) -> list[Fragment]:
        """All fragments of the object that one of them lies in.

        Compaction takes fragments that follow each other, so they still do, with ACKs between.
        """
        found = [fragment]
        for step in (-1, 1) if blob.row else (1,):
            beside = await self._beside(fragment, step)
            while beside is not None:
                if isinstance(beside, Fragment):
                    if not isinstance(beside.at, Blob) or beside.at.path != blob.path:
                        break
                    found.append(beside)
                    if step < 0 and not beside.at.row:
                        break
                beside = await self._beside(beside, step)
        return found

    async def _beside(self, record: Record, step: int) -> Record | None:
        """Return the record before or after another one."""
        part = self._part_of(record.begin)
        records = await self._part(part)
        at = bisect_left(records, record.begin, key=_BEGIN) + step
        while not 0 <= at < len(records):
            part += step
            if not 0 <= part <= len(self._state.pages):
                return None
            records = await self._part(part)
            at = 0 if step > 0 else len(records) - 1
        return records[at]

    def _part_of(self, offset: int) -> int:
        """The index of the page of an offset; that behind the last page is the state itself."""
        return bisect_right(self._state.pages, offset, key=_END)

    async def _part(self, part: int) -> tuple[Record, ...]:
        if part == len(self._state.pages):
            return self._state.records
        if part not in self._pages:
            self._pages[part] = await self._page(self._state.pages[part])
        return self._pages[part]
