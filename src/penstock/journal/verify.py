"""Verification: everything that a deployment has, read once, and compared with what is said of it.

    state logs   every live entry has its checksum, and they fold to a state
    journals     pages and records lie side by side, and their rows can be sequenced
    objects      every byte is as it was written; there are as many rows as records say, of the
                 producers and with the clocks that they say
    schemas      each is the one it is named after, and those of fragments are there

Nothing is changed and nothing waits: readers, writers, compaction and garbage collection
go on. What seems wrong is looked at again if the journal has changed meanwhile, since compaction
moves rows and removes what it has replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from penstock.consensus import entries
from penstock.consensus.store import Consensus, ConsensusError
from penstock.errors import PenstockError
from penstock.journal.blobs import BlobStore
from penstock.journal.committed import CommitReader
from penstock.journal.fragments import read_fragment
from penstock.journal.integrity import CorruptBlob, check_object, describe_offsets, read_page
from penstock.journal.journals import Journals, MissingJournal
from penstock.journal.names import journal_key, journal_of_key
from penstock.journal.rows import STAMPS, Stamps, row_schema
from penstock.journal.schemas import Schemas, schema_key
from penstock.journal.splits import WholeRows
from penstock.journal.state import Blob, Fragment, Inline, JournalState, Page, Record
from penstock.journal.sweeping import Progress, no_progress
from penstock.model.columns import Column

if TYPE_CHECKING:
    from numpy.typing import NDArray

OBJECTS_AT_ONCE: Final = 4

LOOKS_MAX: Final = 3
"""Times a journal is checked again because it changed meanwhile."""

_RESTORE_OBJECT: Final = "restore the object from a backup of the blob store"
_RESTORE_STORE: Final = "restore the consensus store from a backup"

LogCheck = Callable[[str], Awaitable[object]]
"""Reads the log with this key, and raises if it makes no sense."""

_BROKEN: Final = (PenstockError, msgspec.MsgspecError, ValueError, TypeError, LookupError)
"""Errors that damaged data may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is not as it was written, and what is lost with it."""

    what: str
    journal: str | None = None
    path: str | None = None
    """The object."""
    begin: int | None = None
    end: int | None = None
    """Offsets of the journal."""
    why: str | None = None
    fix: str | None = None

    @property
    def where(self) -> str | None:
        if self.journal is None:
            return None
        if self.begin is None or self.end is None:
            return f"journal {self.journal}"
        return describe_offsets(self.journal, self.begin, self.end)


@dataclass(slots=True, kw_only=True)
class Verified:
    """Counts of what was checked, and the faults found."""

    logs: int = 0
    """State logs of any kind."""
    entries: int = 0
    schemas: int = 0
    journals: int = 0
    records: int = 0
    pages: int = 0
    inline: int = 0
    """Fragments that live in the state of their journal."""
    objects: int = 0
    """Those that hold rows."""
    unsummed: int = 0
    """Objects and pages of a release that took no digests: they were decoded, and that is all."""
    rows: int = 0
    bytes: int = 0
    unnamed: int = 0
    """Objects that no journal names: garbage, or of another deployment."""
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: Verified) -> None:
        """Count what was found in a part."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


async def verify(
    store: Consensus,
    blobs: BlobStore,
    *,
    checks: Mapping[str, LogCheck] | None = None,
    progress: Progress = no_progress,
) -> Verified:
    """Look at everything; what is wrong is part of the answer.

    `checks` are for logs that are no journals, by the begin of their keys.
    """
    listed = await asyncio.to_thread(lambda: {found.path for found in blobs.list()})
    done, names = await _verify_logs(store, checks or {})
    journals, layouts = Journals(store), _Layouts(Schemas(store))
    named: set[str] = set()
    for number, name in enumerate(names):
        progress(number, len(names))
        looked = await _verify_journal(journals, blobs, layouts, name)
        if looked is not None:
            done.add(looked.done)
            named |= looked.named
    progress(len(names), len(names))
    marks = {path for path in listed if path.startswith("=")}  # whose it is, and what is garbage
    done.unnamed = len(listed - named - marks)
    return done


# ------------------------------------------------------------------------------------------- logs


async def _verify_logs(
    store: Consensus, checks: Mapping[str, LogCheck]
) -> tuple[Verified, list[str]]:
    """Every key of the store, and the journals among them that can be looked at."""
    done, names, schemas = Verified(), [], Schemas(store)
    journal, schema = journal_key(""), schema_key("")
    async for key in store.list_keys():
        try:
            if key.startswith(schema):
                done.schemas += 1
                await schemas.text(key.removeprefix(schema))
                continue
            done.logs += 1
            for versioned in await store.scan(key, 0):
                entries.decode(versioned.data, where=f"{key}, entry {versioned.seqno}")
                done.entries += 1
            if key.startswith(journal):
                names.append(journal_of_key(key))
            for prefix, check in checks.items():
                if key.startswith(prefix):
                    await check(key)
        except ConsensusError:
            raise
        except _BROKEN as error:
            name = journal_of_key(key) if key.startswith(journal) else None
            done.faults.append(_fault(error, f"{key} is damaged", journal=name, fix=_RESTORE_STORE))
    return done, names


def _fault(error: Exception, what: str, *, fix: str, **place: Any) -> Fault:  # noqa: ANN401
    """Turn an error into a fault at a place."""
    if isinstance(error, CorruptBlob):
        return Fault(what=what, why=error.why, fix=fix, **place)
    if isinstance(error, PenstockError):
        why = " - ".join(part for part in (error.what, error.where, error.why) if part)
        return Fault(what=what, why=why, fix=fix, **place)
    return Fault(what=what, why=f"{type(error).__name__}: {error}", fix=fix, **place)


class _Layouts:
    """The layouts that fragments were written in."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._known: dict[str, Column | Exception] = {}

    async def get(self, schema: str) -> Column:
        """Raises again what it has raised before."""
        if schema not in self._known:
            try:
                self._known[schema] = await self._schemas.layout(schema)
            except _BROKEN as error:
                self._known[schema] = error
        found = self._known[schema]
        if isinstance(found, Exception):
            raise found
        return found


# --------------------------------------------------------------------------------------- journals


@dataclass(slots=True, kw_only=True)
class _Looked:
    """Findings in one journal, as of one state."""

    done: Verified = field(default_factory=Verified)
    named: set[str] = field(default_factory=set)


async def _verify_journal(
    journals: Journals, blobs: BlobStore, layouts: _Layouts, name: str
) -> _Looked | None:
    """None if it is gone. Faults count if the journal still is as it was when they were found."""
    looked = None
    for _ in range(LOOKS_MAX):
        try:
            state = await journals.load(name)
        except MissingJournal:
            return None
        except ConsensusError:
            raise
        except _BROKEN as error:
            what = "the journal cannot be loaded"
            looked = _Looked()
            looked.done.faults.append(_fault(error, what, journal=name, fix=_RESTORE_STORE))
            return looked
        looked = await _Look(blobs, layouts, name, state).look()
        if not looked.done.faults or await _still(journals, name, state):
            break
    return looked


async def _still(journals: Journals, name: str, state: JournalState) -> bool:
    """True if everything that a state names is still named: appends take nothing away."""
    try:
        now = await journals.load(name)
    except MissingJournal:
        return False
    return set(state.pages) <= set(now.pages) and set(state.records) <= set(now.records)


class _Look:
    """One look at one journal."""

    def __init__(self, blobs: BlobStore, layouts: _Layouts, name: str, state: JournalState) -> None:
        self._blobs = blobs
        self._layouts = layouts
        self._name = name
        self._state = state
        self._looked = _Looked()
        self._done = self._looked.done

    async def look(self) -> _Looked:
        self._done.journals = 1
        records: list[Record] = []
        for page in self._state.pages:
            records += await self._page(page)
        records += self._state.records
        kept = [record for record in records if record.begin >= self._state.begin]
        self._done.records = len(kept)
        self._tiled(kept)
        self._sequenced(kept)
        await self._rows([record for record in kept if isinstance(record, Fragment)])
        return self._looked

    async def _page(self, page: Page) -> Sequence[Record]:
        self._looked.named.add(page.path)
        self._done.pages += 1
        self._done.unsummed += page.digest is None
        try:
            return await asyncio.to_thread(read_page, self._blobs, page)
        except _BROKEN as error:
            self._wrong(error, "a page is missing or damaged", page.begin, page.end, page.path)
            return ()

    def _tiled(self, records: Sequence[Record]) -> None:
        """Offsets without a record, and such with two; those of pages that are lost are known."""
        parts = [*self._state.pages, *self._state.records] if self._done.faults else records
        ends = [self._state.begin, *(part.end for part in parts)]
        begins = [*(part.begin for part in parts), self._state.end]
        for end, begin in zip(ends, begins, strict=True):
            if end != begin:
                why = f"a record ends at {end}, and the next begins at {begin}"
                self._add("records do not lie side by side", end, begin, None, why)

    def _sequenced(self, records: Sequence[Record]) -> None:
        if self._done.faults:
            return
        committed = CommitReader(self._name)
        for record in records:
            try:
                committed.read(record)
            except _BROKEN as error:
                self._wrong(error, "rows cannot be sequenced", record.begin, record.end, None)
                return

    async def _rows(self, fragments: Sequence[Fragment]) -> None:
        places: dict[object, list[Fragment]] = {}
        for fragment in fragments:
            at = fragment.at
            place = (at.path, at.digest) if isinstance(at, Blob) else fragment.begin
            places.setdefault(place, []).append(fragment)
        some = list(places.values())
        for first in range(0, len(some), OBJECTS_AT_ONCE):
            await asyncio.gather(*map(self._place, some[first : first + OBJECTS_AT_ONCE]))

    async def _place(self, fragments: Sequence[Fragment]) -> None:
        """The fragments that live in one object, or one that lives in the state."""
        at = fragments[0].at
        path = at.path if isinstance(at, Blob) else None
        if isinstance(at, Inline):
            self._done.inline += 1
        else:
            self._looked.named.add(at.path)
            self._done.objects += 1
            self._done.unsummed += at.digest is None
        begin, end = fragments[0].begin, fragments[-1].end
        try:
            root = await self._layouts.get(fragments[0].schema)
            size = await asyncio.to_thread(_compare, self._blobs, fragments, root)
        except _Differs as error:
            self._add("rows are not those of their record", *error.place, path, str(error))
        except _BROKEN as error:
            what = "rows of the state are damaged"
            if path is not None:
                what = f"an object is missing or damaged: {path}"
            self._wrong(error, what, begin, end, path)
        else:
            self._done.bytes += size
            self._done.rows += sum(fragment.rows for fragment in fragments)

    def _wrong(self, error: Exception, what: str, begin: int, end: int, path: str | None) -> None:
        place = {"journal": self._name, "path": path, "begin": begin, "end": end}
        fix = _RESTORE_OBJECT if path else _RESTORE_STORE
        self._done.faults.append(_fault(error, what, fix=fix, **place))

    def _add(self, what: str, begin: int, end: int, path: str | None, why: str) -> None:
        self._wrong(ValueError(why), what, begin, end, path)


class _Differs(Exception):
    """Rows that are not what their record says."""

    def __init__(self, fragment: Fragment, why: str) -> None:
        super().__init__(why)
        self.place = fragment.begin, fragment.end


def _compare(blobs: BlobStore, fragments: Sequence[Fragment], root: Column) -> int:
    """Rows in one place with what records say of them; the bytes that were read."""
    at = fragments[0].at
    size, columns = fragments[0].bytes, row_schema(root).names[-STAMPS:]
    total = fragments[0].rows
    if isinstance(at, Blob):
        total = max(_row(fragment) + fragment.rows for fragment in fragments)
        if at.digest is None:
            columns = row_schema(root).names  # decoding all of it is the only check
            size = sum(fragment.bytes for fragment in fragments)
        else:
            size = check_object(blobs, at)
        at = replace(at, row=0)
    whole = WholeRows(at, total, size, fragments[0].schema)
    stamps = [Stamps.of(rows) for rows in read_fragment(blobs, whole, root, columns=columns)]
    clocks = np.concatenate([each.clock for each in stamps])
    producers = np.concatenate([each.producer for each in stamps])
    for fragment in fragments:
        first = _row(fragment)
        mine = slice(first, first + fragment.rows)
        _compare_runs(fragment, clocks[mine], producers[mine])
    return size


def _row(fragment: Fragment) -> int:
    return fragment.at.row if isinstance(fragment.at, Blob) else 0


def _compare_runs(
    fragment: Fragment, clocks: NDArray[np.int64], producers: NDArray[np.int64]
) -> None:
    for run in fragment.runs:
        within = slice(run.first_offset, run.last_offset + 1)
        mine = clocks[within][producers[within] == int(run.producer)]
        if len(mine) != run.rows:
            why = f"{len(mine)} rows of producer {run.producer} instead of {run.rows}"
            raise _Differs(fragment, why)
        if (int(mine.min()), int(mine.max())) != (run.clock_min, run.clock_max):
            raise _Differs(fragment, f"other clocks of producer {run.producer}")
