"""From the state of journals to what a scan reads: records, visible rows, and splits for tasks."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from penstock.journal.blobs import BlobStore
from penstock.journal.codec import decode_page
from penstock.journal.committed import Committed, VisibleRows
from penstock.journal.journals import Journals
from penstock.journal.schemas import Schemas
from penstock.journal.selector import EVERYTHING, LabelSelector
from penstock.journal.splits import Piece, Split, schema_of, splits
from penstock.journal.state import Fragment, JournalState, Record
from penstock.journal.timeline import Unit
from penstock.model.columns import Column

_BEGIN: Final = attrgetter("begin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
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
    ) -> tuple[Scanned, ...]:
        """What is committed to the journals of a collection, all as of one revision."""
        scanned: list[Scanned] = []
        for journal in await self.journals.list(collection, selector):
            records = await self.records(journal.state)
            committed = Committed(journal.name)
            visible = tuple(rows for record in records for rows in committed.read(record))
            scanned.append(Scanned(name=journal.name, records=tuple(records), visible=visible))
        return tuple(scanned)

    async def records(self, state: JournalState, offset: int = 0) -> list[Record]:
        """The records of a journal from an offset on, those in pages too."""
        found: list[Record] = []
        for page in state.pages:
            if page.end > offset:
                found += await self._page(page.path)
        found += state.records
        return found[bisect_left(found, max(offset, state.begin), key=_BEGIN) :]

    async def located(
        self, units: Iterable[Unit], states: Mapping[str, JournalState]
    ) -> list[VisibleRows]:
        """The rows of units, each where the newest state of its journal says that it is.

        Compaction may have moved them since their record was read, and sealed the record too.
        """
        found: list[VisibleRows] = []
        pages: dict[str, tuple[Record, ...]] = {}
        for unit in units:
            state = states[unit.journal]
            for rows in unit.visible:
                begin = rows.fragment.begin
                held: Sequence[Record] = state.records
                for page in state.pages:
                    if page.begin <= begin < page.end:
                        if page.path not in pages:
                            pages[page.path] = await self._page(page.path)
                        held = pages[page.path]
                at = bisect_left(held, begin, key=_BEGIN)
                now = held[at] if at < len(held) else None
                if isinstance(now, Fragment) and now.begin == begin:
                    found.append(replace(rows, fragment=now))
                # else it is below what the journal retains: its rows are gone
        return found

    async def layouts(self, pieces: Iterable[Piece]) -> dict[str, Column]:
        """The layouts that pieces were written in, by the fingerprints of their schemas."""
        names = dict.fromkeys(map(schema_of, pieces))
        return {name: await self.schemas.layout(name) for name in names}

    async def splits(self, pieces: Sequence[Piece]) -> tuple[Split, ...]:
        """Pieces for tasks."""
        return splits(pieces, await self.layouts(pieces))

    async def _page(self, path: str) -> tuple[Record, ...]:
        return decode_page(await asyncio.to_thread(self.blobs.read, path))
