"""Upkeep: small fragments into large objects, old records into pages; garbage is for `sweeping`.

It is planned by pure functions and then done, beside any number of writers and readers.

Compaction copies the rows of neighbouring small fragments of one schema into one object, and says
so in the journal's state. Offsets, runs and revisions stay, so readers do not notice. The loser of
a race has written an object that no state names, and plans again. Records are never merged: when
they become many, the oldest move into a page (`sealing`). Writers do that too, and do not wait for
compaction; so pages, when they become many, are compacted into one, and the rows of their records
with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock import failpoints
from penstock.consensus.statelog import Superseded
from penstock.errors import Bug
from penstock.journal.blobs import BlobStore, MissingBlob
from penstock.journal.fragments import COMPACTION, FragmentLayout, FragmentWriter, read_fragment
from penstock.journal.integrity import CorruptBlob, locate_damage, read_page
from penstock.journal.journals import Journals, MissingJournal
from penstock.journal.ownership import Ownership
from penstock.journal.schemas import Schemas
from penstock.journal.sealing import plan_page, reseal, seal
from penstock.journal.state import (
    RECORDS_MAX,
    UNKNOWN,
    Blob,
    Compact,
    Fragment,
    JournalState,
    Page,
    Record,
    Refused,
    Status,
    apply,
)
from penstock.journal.sweeping import Progress, no_progress, replacement_note
from penstock.model.columns import Column
from penstock.model.spec import Codec

ATTEMPTS_MAX: Final = 8
"""Times a journal is planned anew within one run because others changed it meanwhile."""

_WRITTEN = failpoints.declare("compact.written", "an object is rewritten, no journal names it yet")
_NOTED = failpoints.declare("compact.noted", "replaced objects are noted, but still in use")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """Sizes at which rewriting is worth it."""

    target_bytes: int = 128 << 20
    """Up to here objects grow; those of half the size are left alone."""
    inputs_min: int = 8
    """Neighbours that are rewritten together: fewer are left to wait for more."""
    page_records: int = 4096
    """Up to here pages grow; those of half the size are left alone."""
    records_max: int = RECORDS_MAX
    """Records in a state; above, all but a quarter of that are sealed."""
    codec: Codec = "ZSTANDARD"
    """How objects are compressed."""


DEFAULTS: Final = CompactionOptions()

# ------------------------------------------------------------------------------------ compaction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Neighbouring fragments in one place: one object, or one inline fragment."""

    fragments: tuple[Fragment, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Fragments of one schema, in order, that are to become one object."""

    fragments: tuple[Fragment, ...]

    @property
    def begin(self) -> int:
        return self.fragments[0].begin

    @property
    def end(self) -> int:
        return self.fragments[-1].end

    @property
    def bytes(self) -> int:
        return sum(fragment.bytes for fragment in self.fragments)

    @property
    def paths(self) -> tuple[str, ...]:
        """The objects that it replaces."""
        return tuple(dict.fromkeys(f.at.path for f in self.fragments if isinstance(f.at, Blob)))


def plan_rewrites(
    state: JournalState, options: CompactionOptions = DEFAULTS
) -> tuple[Rewrite, ...]:
    """Choose the fragments to rewrite; rewrites do not overlap.

    A place is not rewritten for the sake of little: those at either end that have more than twice
    the bytes of all others together are left out. So a row is rewritten when its object grows by
    half, or more, which is a logarithm of times, however often this is asked.
    """
    rewrites: list[Rewrite] = []
    for stretch in _stretches(_units(state.records), options.target_bytes):
        units = _balanced(stretch)
        if len(units) >= options.inputs_min:
            rewrites.append(Rewrite(fragments=tuple(f for unit in units for f in unit.fragments)))
    return tuple(rewrites)


def _units(records: Iterable[Record]) -> Iterator[_Unit]:
    """The places of fragments in the order of their rows; ACKs between them do not count."""
    place: list[Fragment] = []
    for record in records:
        if not isinstance(record, Fragment):
            continue
        if place and _path(record) != _path(place[0]):
            yield _unit(place)
            place = []
        if _path(record) is None:
            yield _unit([record])
        else:
            place.append(record)
    if place:
        yield _unit(place)


def _row(fragment: Fragment) -> int:
    return fragment.at.row if isinstance(fragment.at, Blob) else 0


def _path(fragment: Fragment) -> str | None:
    return fragment.at.path if isinstance(fragment.at, Blob) else None


def _unit(place: Sequence[Fragment]) -> _Unit:
    return _Unit(fragments=tuple(place), bytes=sum(fragment.bytes for fragment in place))


def _stretches(units: Iterable[_Unit], target_bytes: int) -> Iterator[list[_Unit]]:
    """Neighbours that are small, of one schema, and together not above the target."""
    stretch: list[_Unit] = []
    for unit in units:
        # The first rows of its object are in a page: they would be left behind beside dead ones.
        cut = _row(unit.fragments[0]) > 0
        large = cut or unit.bytes * 2 > target_bytes
        other = bool(stretch) and stretch[-1].fragments[0].schema != unit.fragments[0].schema
        full = sum(u.bytes for u in stretch) + unit.bytes > target_bytes
        if stretch and (large or other or full):
            yield stretch
            stretch = []
        if not large:
            stretch.append(unit)
    if stretch:
        yield stretch


def _balanced(units: Sequence[_Unit]) -> Sequence[_Unit]:
    total = sum(unit.bytes for unit in units)
    first, end = 0, len(units)
    while end - first > 1 and units[first].bytes * 3 > total * 2:
        total -= units[first].bytes
        first += 1
    while end - first > 1 and units[end - 1].bytes * 3 > total * 2:
        end -= 1
        total -= units[end].bytes
    return units[first:end]


def plan_pages(
    state: JournalState, options: CompactionOptions = DEFAULTS
) -> tuple[tuple[Page, ...], ...]:
    """Choose pages to merge: neighbours that are small, and together not above the limit.

    Writers seal some two hundred records at a time, so a page that was made of eight is large after
    the next time at the latest: a record is moved twice at most.
    """
    found: list[tuple[Page, ...]] = []
    stretch: list[Page] = []
    for page in (*state.pages, None):
        large = page is None or page.records * 2 > options.page_records
        size = sum(each.records for each in stretch) + (page.records if page else 0)
        if large or size > options.page_records:
            if len(stretch) >= options.inputs_min:
                found.append(tuple(stretch))
            stretch = []
        if page is not None and not large:
            stretch.append(page)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The result of compaction."""

    journals: int = 0
    objects: int = 0
    fragments: int = 0
    """Fragments whose rows were moved into these objects."""
    rows: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    pages: int = 0

    def __add__(self, other: Compacted) -> Compacted:
        return Compacted(
            journals=self.journals + other.journals,
            objects=self.objects + other.objects,
            fragments=self.fragments + other.fragments,
            rows=self.rows + other.rows,
            bytes_before=self.bytes_before + other.bytes_before,
            bytes_after=self.bytes_after + other.bytes_after,
            pages=self.pages + other.pages,
        )


async def compact_all(
    journals: Journals,
    blobs: BlobStore,
    schemas: Schemas,
    collection: str | None = None,
    *,
    options: CompactionOptions = DEFAULTS,
    progress: Progress = no_progress,
    stop: asyncio.Event | None = None,
    codecs: Mapping[str, Codec] | None = None,
) -> Compacted:
    """Compact the journals of a collection, or all there are; `stop` ends it after a journal.

    `codecs` are those of collections that do not have the one of `options`.
    A journal that is damaged is left as it is; its error is raised when the others are done.
    """
    done = Compacted()
    corrupt: CorruptBlob | None = None
    found = await journals.list(collection)
    due = [journal for journal in found if _is_due(journal.state, options)]
    for number, journal in enumerate(due):
        if stop is not None and stop.is_set():
            break
        progress(number, len(due))
        try:
            codec = (codecs or {}).get(journal.state.collection, options.codec)
            chosen = replace(options, codec=codec)
            done += await compact_journal(journals, blobs, schemas, journal.name, chosen)
        except CorruptBlob as error:
            corrupt = corrupt or error
    else:
        progress(len(due), len(due))
    if corrupt is not None:
        raise corrupt
    return done


def _is_due(state: JournalState, options: CompactionOptions) -> bool:
    planned = plan_rewrites(state, options) or plan_page(state, options.records_max)
    return bool(planned or plan_pages(state, options))


async def compact_journal(
    journals: Journals,
    blobs: BlobStore,
    schemas: Schemas,
    name: str,
    options: CompactionOptions = DEFAULTS,
) -> Compacted:
    """Do everything that is planned for one journal, planning again when others were faster."""
    done = Compacted(journals=1)
    for _ in range(ATTEMPTS_MAX):
        try:
            state = await journals.load(name)
            rewrites = plan_rewrites(state, options)
            for rewrite in rewrites:
                root = await schemas.layout(rewrite.fragments[0].schema)
                done += await _rewrite(journals, blobs, name, rewrite, root, options.codec)
            if rewrites:
                state = await journals.load(name)
            if records := plan_page(state, options.records_max):
                await seal(journals, blobs, name, records)
                done += Compacted(pages=1)
                state = await journals.load(name)
            for pages in plan_pages(state, options):
                done += await _merge(journals, blobs, schemas, name, pages, options)
        except MissingJournal:
            return done  # dropped meanwhile
        except (Refused, Superseded, MissingBlob):
            continue  # compacted, sealed or forgotten meanwhile, perhaps collected as well
        return done
    return done


async def _rewrite(
    journals: Journals, blobs: BlobStore, name: str, rewrite: Rewrite, root: Column, codec: Codec
) -> Compacted:
    await Ownership(journals, blobs).claim()
    compact = await _moved(blobs, name, rewrite, root, codec)
    await _replaces(blobs, rewrite.paths)
    await journals.compact(name, compact)
    return _compacted(rewrite, compact)


async def _merge(
    journals: Journals,
    blobs: BlobStore,
    schemas: Schemas,
    name: str,
    pages: Sequence[Page],
    options: CompactionOptions,
) -> Compacted:
    """Make one page of several, with the rows of their records in as few objects as there can be.

    Its records are those of a state of their own, to which the same happens as to any other.
    """
    await Ownership(journals, blobs).claim()
    read = [await asyncio.to_thread(read_page, blobs, page, name) for page in pages]
    held = JournalState(
        status=Status.ACTIVE, records=tuple(record for page in read for record in page)
    )
    done, replaced = Compacted(pages=1), [page.path for page in pages]
    for rewrite in plan_rewrites(held, options):
        root = await schemas.layout(rewrite.fragments[0].schema)
        compact = await _moved(blobs, name, rewrite, root, options.codec)
        held = apply(held, compact, UNKNOWN)
        done += _compacted(rewrite, compact)
        replaced += rewrite.paths
    await _replaces(blobs, replaced)
    await reseal(journals, blobs, name, pages, held.records)
    return done


async def _moved(
    blobs: BlobStore, name: str, rewrite: Rewrite, root: Column, codec: Codec
) -> Compact:
    """The rows of a rewrite as one object, which no state names yet."""
    written = await asyncio.to_thread(_copy, blobs, name, rewrite, root, codec)
    failpoints.hit(_WRITTEN)
    assert isinstance(written.at, Blob)  # noqa: S101 - nothing was inlined
    return Compact(
        begin=rewrite.begin,
        end=rewrite.end,
        path=written.at.path,
        bytes=written.bytes,
        digest=written.at.digest,
    )


async def _replaces(blobs: BlobStore, paths: Sequence[str]) -> None:
    """Note which objects are about to be replaced."""
    if paths:
        await asyncio.to_thread(blobs.write, *replacement_note(paths))
    failpoints.hit(_NOTED)


def _compacted(rewrite: Rewrite, compact: Compact) -> Compacted:
    return Compacted(
        objects=1,
        fragments=len(rewrite.fragments),
        rows=sum(fragment.rows for fragment in rewrite.fragments),
        bytes_before=rewrite.bytes,
        bytes_after=compact.bytes,
    )


def _copy(blobs: BlobStore, name: str, rewrite: Rewrite, root: Column, codec: Codec) -> Fragment:
    layout = FragmentLayout(schema=rewrite.fragments[0].schema, root=root, key=(), codec=codec)
    prefix = name.rpartition("/")[0]
    # Always an object, however small: the diff can name nothing else.
    with FragmentWriter(blobs, prefix, layout, COMPACTION, inline=False) as writer:
        for fragment in rewrite.fragments:
            with locate_damage(name, fragment.begin, fragment.end):
                for batch in read_fragment(blobs, fragment, root):
                    writer.write(batch)
        written = writer.finish()
    rows = sum(fragment.rows for fragment in rewrite.fragments)
    if written is None or written.rows != rows:
        raise Bug(
            "compaction has read another number of rows than the journal has",
            where=f"journal {name}, offsets {rewrite.begin} to {rewrite.end}",
            why=f"{written.rows if written else 0} instead of {rows}",
        )
    return written
