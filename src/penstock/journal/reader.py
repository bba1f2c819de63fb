"""Reading a collection without Spark: its documents as Arrow batches, in order, once or for ever.

The records tell which rows are committed (`committed.CommitReader`), so objects are opened only for
rows that will be shown, and one batch of them is in memory.

**Order.** Journal by journal, in the order of their names; in a journal as they were committed,
whatever their clocks say; of one commit by clock. All journals are read as of one revision, so a
transaction is there in all of them or in none. A reader that follows shows what each further
revision committed, and keeps the same promise.

**Where to begin** (`Start`) is about commits, not rows: documents are shown if what *committed*
them is at or behind it. So a reader that remembers the revision or the offsets it has read up
to, and begins there, gets every document once, also those of a transaction that was open then.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import numpy as np
import pyarrow

from penstock.errors import UsageError, UserError
from penstock.journal.blobs import BlobStore, MissingBlob
from penstock.journal.committed import CommitReader, VisibleRows
from penstock.journal.evolve import UnreadableDocument
from penstock.journal.fragments import read_fragment, read_visible
from penstock.journal.integrity import describe_offsets, locate_damage, read_page
from penstock.journal.journals import Journals
from penstock.journal.rows import Stamps, adapt_rows
from penstock.journal.schemas import Schemas
from penstock.journal.selector import EVERYTHING, LabelSelector
from penstock.journal.state import Blob, Fragment, JournalState, Record
from penstock.model.clock import NEVER, Clock, from_rfc3339
from penstock.model.columns import Column

BATCH_ROWS: Final = 32 * 1024

_pa: Any = pyarrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The place to begin at; of several conditions, all must hold."""

    revision: int = 0
    """Commits of this revision of the store, and later ones."""
    offset: int = 0
    """Commits at this offset of a journal, and later ones."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """The same for single journals."""
    clock: Clock = NEVER
    """Documents that were published at this time, and later ones."""

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Start:
        """Parse what a person wrote: a time, `revision=N`, `offset=N`, or `JOURNAL@N`."""
        revision, offset, clock = 0, 0, NEVER
        offsets: dict[str, int] = {}
        for text in texts:
            journal, at, number = text.rpartition("@")
            word, equals, value = text.partition("=")
            if at and number.isdecimal():
                offsets[journal] = int(number)
            elif equals and word == "revision" and value.isdecimal():
                revision = int(value)
            elif equals and word == "offset" and value.isdecimal():
                offset = int(value)
            else:
                clock = _clock_of(text)
        return cls(revision=revision, offset=offset, offsets=offsets, clock=clock)

    def begun(self, journal: str, record: Record) -> bool:
        """True if what a record commits is to be shown."""
        offset = self.offsets.get(journal, self.offset)
        return record.begin >= offset and record.revision >= self.revision


def _clock_of(text: str) -> Clock:
    try:
        return from_rfc3339(text)
    except ValueError as error:
        raise _no_start(text, str(error)) from None


def _no_start(text: str, why: str) -> UsageError:
    return UsageError(
        f"this is not a place to begin: {text!r}",
        why=why,
        fix="write a time like 2026-01-31T08:00:00Z, revision=120, offset=4096, "
        "or acme/orders/pivot=00@4096",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a journal: documents, and the stamps of `rows` behind them."""

    journal: str
    root: Column
    """The layout of the documents."""
    batch: pyarrow.RecordBatch


@dataclass(slots=True, kw_only=True)
class _Cursor:
    """The progress of reading one journal."""

    generation: int
    offset: int = 0
    committed: CommitReader


class CollectionReader:
    """One read of a collection. Without `root`, every batch is in the layout it was written in."""

    def __init__(
        self,
        journals: Journals,
        blobs: BlobStore,
        schemas: Schemas,
        collection: str,
        *,
        start: Start = Start(),
        selector: LabelSelector = EVERYTHING,
        uncommitted: bool = False,
        root: Column | None = None,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self._journals = journals
        self._blobs = blobs
        self._schemas = schemas
        self._collection = collection
        self._start = start
        self._selector = selector
        self._uncommitted = uncommitted
        self._root = root
        self._batch_rows = batch_rows
        self._cursors: dict[str, _Cursor] = {}

    async def read(self) -> AsyncGenerator[Rows, None]:
        """Everything there is now."""
        found = await self._journals.list(self._collection, self._selector)
        unknown = self._start.offsets.keys() - {journal.name for journal in found}
        if unknown:
            raise UserError(
                f"{self._collection} has no journal {min(unknown)}",
                fix=f"list them: penstock journals {self._collection}",
            )
        for journal in found:
            async with aclosing(self._advance(journal.name, journal.state)) as rows:
                async for each in rows:
                    yield each

    async def follow(self) -> AsyncGenerator[Rows, None]:
        """Everything there is, and what is committed from now on, also in journals to come."""
        async with aclosing(self._journals.follow(self._collection)) as moves:
            async for moved in moves:
                for name, state in sorted(moved.changed.items()):
                    if not state.readable:
                        self._cursors.pop(name, None)
                    elif self._selector.matches(state.labels):
                        async with aclosing(self._advance(name, state)) as rows:
                            async for each in rows:
                                yield each

    # ----------------------------------------------------------------------------------- details

    async def _advance(self, name: str, state: JournalState) -> AsyncGenerator[Rows, None]:
        """Yield what a journal has beyond its cursor."""
        cursor = self._cursors.get(name)
        if cursor is None or cursor.generation != state.generation:
            cursor = _Cursor(generation=state.generation, committed=CommitReader(name))
            self._cursors[name] = cursor
        async with aclosing(self._records(name, state, cursor.offset)) as records:
            async for record in records:
                shown = self._shown(name, cursor.committed, record)
                cursor.offset = record.end
                for rows in shown:
                    async with aclosing(self._rows(name, state, rows)) as batches:
                        async for batch in batches:
                            yield batch

    async def _records(
        self, name: str, state: JournalState, offset: int
    ) -> AsyncGenerator[Record, None]:
        """The records from an offset on; old ones are in pages, of which one is in memory."""
        for page in state.pages:
            if page.end > offset:
                for record in await asyncio.to_thread(read_page, self._blobs, page, name):
                    if record.begin >= max(offset, state.begin):
                        yield record
        for record in state.records[bisect_left(state.records, offset, key=_BEGIN) :]:
            yield record

    def _shown(
        self, name: str, committed: CommitReader, record: Record
    ) -> Iterable[VisibleRows | Fragment]:
        """Return what to show because of a record, in order."""
        if self._uncommitted:
            visible: Iterable[VisibleRows | Fragment] = (
                [record] if isinstance(record, Fragment) else []
            )
        else:
            visible = committed.read(record)
        return visible if self._start.begun(name, record) else ()

    async def _rows(
        self, name: str, state: JournalState, rows: VisibleRows | Fragment
    ) -> AsyncGenerator[Rows, None]:
        """The rows of a run that are to be shown, or all of a fragment."""
        fragment = rows if isinstance(rows, Fragment) else rows.fragment
        runs = fragment.runs if isinstance(rows, Fragment) else (rows.run,)
        if max(run.clock_max for run in runs) < self._start.clock:
            return
        root = await self._schemas.layout(fragment.schema)
        current = _moved(fragment, state)
        if isinstance(rows, Fragment):
            batches = read_fragment(self._blobs, current, root, batch_rows=self._batch_rows)
        else:
            visible = VisibleRows(
                fragment=current,
                run=rows.run,
                clock_gt=rows.clock_gt,
                running_max=rows.running_max,
            )
            batches = read_visible(self._blobs, visible, root, batch_rows=self._batch_rows)
        with _explained(name, current):
            async for batch in _in_threads(batches):
                later = self._since(batch)
                if later.num_rows:
                    yield self._laid_out(name, root, later)

    def _since(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        if self._start.clock == NEVER:
            return batch
        later = Stamps.of(batch).clock >= np.int64(self._start.clock)
        return batch if later.all() else batch.filter(_pa.array(later))

    def _laid_out(self, name: str, written: Column, batch: pyarrow.RecordBatch) -> Rows:
        root = self._root or written
        return Rows(journal=name, root=root, batch=adapt_rows(batch, written, root))


_BEGIN: Final = attrgetter("begin")


def _moved(fragment: Fragment, state: JournalState) -> Fragment:
    """The fragment as the newest state has it: compaction may have moved its rows meanwhile."""
    at = bisect_left(state.records, fragment.begin, key=_BEGIN)
    found = state.records[at] if at < len(state.records) else None
    same = isinstance(found, Fragment) and found.begin == fragment.begin
    return found if same and isinstance(found, Fragment) else fragment


async def _in_threads(
    batches: Iterator[pyarrow.RecordBatch],
) -> AsyncIterator[pyarrow.RecordBatch]:
    """Files are read in threads, one batch at a time."""
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        yield batch


@contextlib.contextmanager
def _explained(journal: str, fragment: Fragment) -> Iterator[None]:
    """Say which rows of which journal an error is about."""
    where = describe_offsets(journal, fragment.begin, fragment.end)
    try:
        with locate_damage(journal, fragment.begin, fragment.end):
            yield
    except MissingBlob as error:
        path = fragment.at.path if isinstance(fragment.at, Blob) else "inline"
        raise MissingBlob(
            f"an object is missing: {path}",
            where=where,
            why=f"{error.where}: {error.why}" if error.where else error.why,
            fix="check --blob: it must be the store that the journal was written to",
        ) from None
    except UnreadableDocument as error:
        raise UnreadableDocument(
            error.what, where=f"{where}: {error.where}", why=error.why, fix=error.fix
        ) from None
