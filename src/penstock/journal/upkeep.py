"""Upkeep: small fragments into large objects, old records into pages, and garbage out.

Both are planned by pure functions and then done, beside any number of writers and readers.

**Compaction** copies the rows of neighbouring small fragments of one schema into one object, and
says so in the journal's state. Offsets, runs and revisions stay, so readers do not notice. Whoever
lost a race has written an object that nobody names, and plans again. Records are never merged:
when they become many, the oldest move into a page (`sealing`). Writers do that too, and do not wait
for compaction; so pages, when they become many, are compacted into one, and the rows of their
records with them.

**Garbage** is an object that no state names. What is young is spared, since its writer may be about
to name it; and what compaction has replaced is spared for as long, since somebody may be about to
read it. The first is told by the age of the object. The second is told by a *note*: before a
compactor commits, it writes down which objects it replaces, under `=replaced/`, which no collection
can be called. The order in which garbage collection looks is what makes it safe:

    objects, then states, then notes

An object that was named after the first look is too young; one that lost its name before the second
has its note before the third.

Objects are removed from a store only if they have the names that fragments and pages are given, and
only if the store is known to be that of these journals: a mark ties the two together.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock import failpoints
from penstock.consensus.statelog import Superseded
from penstock.errors import Bug, UserError
from penstock.journal.blobs import BlobStore, MissingBlob
from penstock.journal.fragments import FragmentLayout, FragmentWriter, read_fragment
from penstock.journal.integrity import CorruptBlob, located, read_page
from penstock.journal.journals import Journals, MissingJournal
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
from penstock.model.columns import Column

GRACE_S: Final = 24 * 3600
GRACE_S_MIN: Final = 2 * 3600
"""A publisher names its objects within an hour."""

ATTEMPTS_MAX: Final = 8
"""How often a journal is planned anew, within one run, because others changed it meanwhile."""

DELETES_AT_ONCE: Final = 16

_WRITTEN = failpoints.declare("compact.written", "an object is rewritten, no journal names it yet")
_NOTED = failpoints.declare("compact.noted", "replaced objects are noted, but still in use")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """What is worth rewriting."""

    target_bytes: int = 128 << 20
    """Up to here objects grow; those of half the size are left alone."""
    inputs_min: int = 8
    """Neighbours that are rewritten together: fewer are left to wait for more."""
    page_records: int = 4096
    """Up to here pages grow; those of half the size are left alone."""
    records_max: int = RECORDS_MAX
    """Records in a state; above, all but a quarter of that are sealed."""


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
    """Which fragments to rewrite; nothing of what it says overlaps.

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


def _path(fragment: Fragment) -> str | None:
    return fragment.at.path if isinstance(fragment.at, Blob) else None


def _unit(place: Sequence[Fragment]) -> _Unit:
    return _Unit(fragments=tuple(place), bytes=sum(fragment.bytes for fragment in place))


def _stretches(units: Iterable[_Unit], target_bytes: int) -> Iterator[list[_Unit]]:
    """Neighbours that are small, of one schema, and together not above the target."""
    stretch: list[_Unit] = []
    for unit in units:
        large = unit.bytes * 2 > target_bytes
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
    """Which pages to make one of: neighbours that are small, and together not above the limit.

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
    """What compaction did."""

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


Progress = Callable[[int, int], None]
"""Told how many of how many are done."""


def _unseen(_done: int, _total: int) -> None:
    """Nobody looks."""


async def compact_all(
    journals: Journals,
    blobs: BlobStore,
    schemas: Schemas,
    collection: str | None = None,
    *,
    options: CompactionOptions = DEFAULTS,
    progress: Progress = _unseen,
    stop: asyncio.Event | None = None,
) -> Compacted:
    """Compact the journals of a collection, or all there are; `stop` ends it after a journal.

    A journal that is damaged is left as it is, and told of when the others are done.
    """
    done = Compacted()
    corrupt: CorruptBlob | None = None
    found = await journals.list(collection)
    due = [journal.name for journal in found if _is_due(journal.state, options)]
    for number, name in enumerate(due):
        if stop is not None and stop.is_set():
            break
        progress(number, len(due))
        try:
            done += await compact_journal(journals, blobs, schemas, name, options)
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
                done += await _rewrite(journals, blobs, name, rewrite, root)
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
    journals: Journals, blobs: BlobStore, name: str, rewrite: Rewrite, root: Column
) -> Compacted:
    compact = await _moved(blobs, name, rewrite, root)
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
    read = [await asyncio.to_thread(read_page, blobs, page, name) for page in pages]
    held = JournalState(
        status=Status.ACTIVE, records=tuple(record for page in read for record in page)
    )
    done, replaced = Compacted(pages=1), [page.path for page in pages]
    for rewrite in plan_rewrites(held, options):
        root = await schemas.layout(rewrite.fragments[0].schema)
        compact = await _moved(blobs, name, rewrite, root)
        held = apply(held, compact, UNKNOWN)
        done += _compacted(rewrite, compact)
        replaced += rewrite.paths
    await _replaces(blobs, replaced)
    await reseal(journals, blobs, name, pages, held.records)
    return done


async def _moved(blobs: BlobStore, name: str, rewrite: Rewrite, root: Column) -> Compact:
    """The rows of a rewrite as one object, which nobody names yet."""
    written = await asyncio.to_thread(_copy, blobs, name, rewrite, root)
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
        await asyncio.to_thread(blobs.write, *_note(paths))
    failpoints.hit(_NOTED)


def _compacted(rewrite: Rewrite, compact: Compact) -> Compacted:
    return Compacted(
        objects=1,
        fragments=len(rewrite.fragments),
        rows=sum(fragment.rows for fragment in rewrite.fragments),
        bytes_before=rewrite.bytes,
        bytes_after=compact.bytes,
    )


def _copy(blobs: BlobStore, name: str, rewrite: Rewrite, root: Column) -> Fragment:
    layout = FragmentLayout(schema=rewrite.fragments[0].schema, root=root, key=())
    prefix = name.rpartition("/")[0]
    # Always an object, however small: the diff can name nothing else.
    with FragmentWriter(blobs, prefix, layout, "compacted", inline=False) as writer:
        for fragment in rewrite.fragments:
            with located(name, fragment.begin, fragment.end):
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


# --------------------------------------------------------------------------------------- garbage

_NOTES: Final = "=replaced"
_MARK: Final = "=store"
_OURS: Final = re.compile(r".+/[0-9a-f]{32}(?:-[A-Za-z0-9_.-]{1,64}\.parquet|\.page)(?:\.partial)?")


class ForeignBlobs(UserError):
    """The objects are not those of these journals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What garbage there was. `deleted` is less if somebody stopped it, and 0 in a dry run."""

    listed: int
    garbage: Mapping[str, int]
    """Bytes by path."""
    deleted: int

    @property
    def bytes(self) -> int:
        return sum(self.garbage.values())


def _note(paths: Sequence[str]) -> tuple[str, bytes]:
    """The note that these objects are about to be replaced: its path and content."""
    return f"{_NOTES}/{secrets.token_hex(16)}", "\n".join(paths).encode()


async def collect_garbage(
    journals: Journals,
    blobs: BlobStore,
    *,
    now_s: float,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    progress: Progress = _unseen,
    stop: asyncio.Event | None = None,
) -> Collected:
    """Remove the objects that no journal names and nobody is about to.

    `now_s` is unix time by the clock of the blob store. With a grace period below `GRACE_S_MIN` the
    objects of transactions under way are lost; only who knows that nobody writes may give less.
    """
    young, old = await asyncio.to_thread(_list, blobs, now_s - grace_s)
    named = await _named(journals, blobs)
    spared, outdated = await asyncio.to_thread(_read_notes, blobs, now_s - grace_s)
    known = named | spared
    garbage = {path: size for path, size in old.items() if path not in known}
    if garbage:
        found = not named.isdisjoint(young) or not named.isdisjoint(old)
        await _belong_together(journals, blobs, found=found)
    deleted = 0
    if not dry_run:
        paths = sorted(garbage)
        for begin in range(0, len(paths), DELETES_AT_ONCE):
            if stop is not None and stop.is_set():
                break
            progress(begin, len(paths))
            some = paths[begin : begin + DELETES_AT_ONCE]
            await asyncio.gather(*(asyncio.to_thread(blobs.delete, path) for path in some))
            deleted += len(some)
        else:
            progress(len(paths), len(paths))
            for note in outdated:  # last: until its objects are gone, a note may be needed again
                await asyncio.to_thread(blobs.delete, note)
    return Collected(listed=len(young) + len(old), garbage=garbage, deleted=deleted)


def _list(blobs: BlobStore, before_s: float) -> tuple[set[str], dict[str, int]]:
    """Our objects: those that are too young, and the size of each that is old enough."""
    young: set[str] = set()
    old: dict[str, int] = {}
    for found in blobs.list():
        if not _OURS.fullmatch(found.path):
            continue
        if found.modified_s <= before_s:
            old[found.path] = found.bytes
        else:
            young.add(found.path)
    return young, old


async def _named(journals: Journals, blobs: BlobStore) -> set[str]:
    """Every object that some state names, or some page of it."""
    named: set[str] = set()
    for journal in await journals.list():
        named.update(_paths(journal.state.records))
        for page in journal.state.pages:
            named.add(page.path)
            named.update(_paths(await asyncio.to_thread(read_page, blobs, page, journal.name)))
    return named


def _paths(records: Iterable[Record]) -> Iterator[str]:
    for record in records:
        if isinstance(record, Fragment) and isinstance(record.at, Blob):
            yield record.at.path


def _read_notes(blobs: BlobStore, before_s: float) -> tuple[set[str], list[str]]:
    """The objects that were replaced of late, and the notes that nobody needs any more."""
    spared: set[str] = set()
    outdated: list[str] = []
    for note in blobs.list(_NOTES):
        if note.modified_s <= before_s:
            outdated.append(note.path)
            continue
        with contextlib.suppress(MissingBlob):  # somebody else collects as well
            spared.update(blobs.read(note.path).decode().splitlines())
    return spared, outdated


async def _belong_together(journals: Journals, blobs: BlobStore, *, found: bool) -> None:
    """Refuse to collect in a blob store that belongs to other journals.

    With the wrong `--consensus` everything would look like garbage. The first collection therefore
    needs to have `found` an object that these journals name, and marks the store as theirs.
    """
    incarnation = (await journals.store.incarnation()).hex()
    try:
        mark = (await asyncio.to_thread(blobs.read, _MARK)).decode()
    except MissingBlob:
        mark = None
    if mark == incarnation:
        return
    if mark is not None or not found:
        raise ForeignBlobs(
            "the blob store is not that of these journals",
            where=str(blobs),
            why="it is marked as that of another consensus store"
            if mark
            else "it has objects, and the journals name none of them",
            fix="check --blob and --consensus",
        )
    await asyncio.to_thread(blobs.write, _MARK, incarnation.encode())


# ------------------------------------------------------------------------------------ background


async def keep_tidy(
    journals: Journals,
    blobs: BlobStore,
    schemas: Schemas,
    *,
    stop: asyncio.Event,
    now: Callable[[], float],
    every_s: float = 60.0,
    garbage_every_s: float = 3600.0,
    options: CompactionOptions = DEFAULTS,
) -> None:
    """Compact and collect, over and over, until `stop`."""
    collected_s = float("-inf")
    while not stop.is_set():
        await compact_all(journals, blobs, schemas, options=options, stop=stop)
        if now() - collected_s >= garbage_every_s and not stop.is_set():
            collected_s = now()
            await collect_garbage(journals, blobs, now_s=collected_s, stop=stop)
        try:
            await asyncio.wait_for(stop.wait(), every_s)
        except TimeoutError:
            continue
