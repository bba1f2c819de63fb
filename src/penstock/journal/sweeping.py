"""Garbage: objects that no state names are put into quarantine, and removed by a later collection.

A young object is spared, since its writer may be about to name it; and what compaction has replaced
is spared for as long, since a reader may be about to open it. The age of an object decides the
first, a *note* the second: before a compactor commits, it writes down which objects it
replaces, under `=replaced/`, which no collection can be called. The order in which garbage
collection looks is what makes it safe:

    objects, then states, then notes

An object that was named after the first look is too young; one that lost its name before the second
has its note before the third.

**Quarantine** is a list as well, under `=quarantine/`: which objects a collection found to be
garbage, as old as the object that says so. They stay where they are, and can be read. A later
collection removes those that have been listed for long enough and are still garbage; those that
some state names after all, it takes off the list. So whatever any state named at some time can be
read for at least as long as the quarantine lasts: that is the time there is to copy objects for a
backup, and to find out that garbage was none. To put it to use, `release` begins all of it anew.

Objects are removed only if they have the names that fragments and pages are given, and only if the
store is known to be that of these journals (`ownership`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock import failpoints
from penstock.journal.blobs import BlobStore, MissingBlob
from penstock.journal.integrity import read_page
from penstock.journal.journals import Journals
from penstock.journal.ownership import ForeignBlobs, Ownership, own_objects, paths_of

GRACE_S: Final = 24 * 3600
GRACE_S_MIN: Final = 2 * 3600
"""A publisher names its objects within an hour."""

QUARANTINE_S: Final = 72 * 3600
"""Over a weekend."""

DELETES_AT_ONCE: Final = 16
_PATHS_PER_LIST: Final = 10_000

_NOTES: Final = "=replaced"
_QUARANTINE: Final = "=quarantine"

_LISTED = failpoints.declare("gc.listed", "garbage is in quarantine, nothing is removed yet")
_REMOVED = failpoints.declare("gc.removed", "garbage is removed, but still in quarantine")
_RELISTED = failpoints.declare("gc.relisted", "a shorter list is written, the longer one is there")

Progress = Callable[[int, int], None]
"""Receives how many are done, and of how many."""


def no_progress(_done: int, _total: int) -> None:
    """Report to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageReport:
    """The result of a collection. `deleted` is less if it was stopped, and 0 in a dry run."""

    listed: int
    garbage: Mapping[str, int]
    """Bytes by path: everything that no state names, whatever becomes of it."""
    due: tuple[str, ...]
    """Those of it that were in quarantine for long enough."""
    deleted: int
    returned: tuple[str, ...]
    """Paths that were in quarantine and are named after all."""

    @property
    def quarantined(self) -> dict[str, int]:
        """Garbage that stays for now, with its bytes."""
        due = set(self.due)
        return {path: size for path, size in self.garbage.items() if path not in due}

    @property
    def bytes(self) -> int:
        """Bytes that are removed."""
        return sum(self.garbage[path] for path in self.due)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePlan:
    """What happens to each object, as decided by `plan_quarantine`."""

    enter: tuple[str, ...]
    due: tuple[str, ...]
    returned: tuple[str, ...]
    lists: Mapping[str, tuple[str, ...] | None]
    """Lists that change: to fewer paths, or None if nothing is left of them."""


def replacement_note(paths: Sequence[str]) -> tuple[str, bytes]:
    """The note that these objects are about to be replaced: its path and content."""
    return _note(_NOTES, paths)


def _note(kind: str, paths: Sequence[str]) -> tuple[str, bytes]:
    return f"{kind}/{secrets.token_hex(16)}", "\n".join(paths).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Some paths, written down at some time."""

    path: str
    modified_s: float
    paths: tuple[str, ...]


def plan_quarantine(
    garbage: Collection[str], used: Collection[str], lists: Iterable[Note], before_s: float
) -> QuarantinePlan:
    """Decide which garbage enters quarantine, which has waited since `before_s`, and what is none.

    `used` is what must not go: a list that has some of it is replaced by one without, so that the
    rest of it waits anew.
    """
    since: dict[str, float] = {}
    changed: dict[str, tuple[str, ...] | None] = {}
    returned: set[str] = set()
    for each in lists:
        some = [path for path in each.paths if path in used]
        kept = [path for path in each.paths if path in garbage]
        returned.update(some)
        if some or not kept:
            changed[each.path] = tuple(kept) or None
            kept = []
        for path in kept:
            since[path] = min(since.get(path, each.modified_s), each.modified_s)
    waiting = {path for paths in changed.values() for path in paths or ()}
    return QuarantinePlan(
        enter=tuple(sorted(path for path in garbage if path not in since and path not in waiting)),
        due=tuple(sorted(path for path, at_s in since.items() if at_s <= before_s)),
        returned=tuple(sorted(returned)),
        lists=changed,
    )


async def collect_garbage(
    journals: Journals,
    blobs: BlobStore,
    *,
    now_s: float,
    grace_s: float = GRACE_S,
    quarantine_s: float = QUARANTINE_S,
    dry_run: bool = False,
    progress: Progress = no_progress,
    stop: asyncio.Event | None = None,
) -> GarbageReport:
    """Quarantine the objects that no journal names or is about to name, and remove the old ones.

    `now_s` is unix time by the clock of the blob store. With a grace period below `GRACE_S_MIN` the
    objects of transactions under way are lost; less is safe only while there are no writers.
    """
    ownership = Ownership(journals, blobs)
    await ownership.check()
    young, old = await asyncio.to_thread(_list, blobs, now_s - grace_s)
    named, missing = await _named(journals, blobs)
    if missing:
        raise MissingBlob(
            "a page of records is missing, and nothing is collected",
            where=blobs.url_of(min(missing)),
            why="which objects its records name is unknown",
            fix="restore it from a backup",
        )
    notes = await asyncio.to_thread(_read_notes, blobs, _NOTES)
    fresh = [note for note in notes if note.modified_s > now_s - grace_s]
    used = named.union(*(note.paths for note in fresh))
    garbage = {path: size for path, size in old.items() if path not in used}
    lists = await asyncio.to_thread(_read_notes, blobs, _QUARANTINE)
    plan = plan_quarantine(garbage, used, lists, now_s - quarantine_s)
    deleted = 0
    if not dry_run:
        if plan.enter or plan.due or plan.lists:
            await ownership.take_turn()
            await asyncio.to_thread(_relist, blobs, plan)
        deleted = await _remove(blobs, plan.due, progress, stop)
        if deleted == len(plan.due):
            # Last: until its objects are gone, a list or note may be needed again.
            left = garbage.keys() - set(plan.due)
            ended = [each.path for each in lists if left.isdisjoint(each.paths)]
            ended += [note.path for note in notes if note not in fresh]
            for path in ended:
                await asyncio.to_thread(blobs.delete, path)
    return GarbageReport(
        listed=len(young) + len(old),
        garbage=garbage,
        due=plan.due,
        deleted=deleted,
        returned=plan.returned,
    )


def _relist(blobs: BlobStore, plan: QuarantinePlan) -> None:
    """Bring the lists up to date: what enters, and what is left of those that change."""
    for begin in range(0, len(plan.enter), _PATHS_PER_LIST):
        blobs.write(*_note(_QUARANTINE, plan.enter[begin : begin + _PATHS_PER_LIST]))
    failpoints.hit(_LISTED)
    for path, left in plan.lists.items():
        if left:
            blobs.write(*_note(_QUARANTINE, left))
            failpoints.hit(_RELISTED)
        blobs.delete(path)


async def _remove(
    blobs: BlobStore, paths: Sequence[str], progress: Progress, stop: asyncio.Event | None
) -> int:
    """Remove objects, some at a time; return how many were removed before `stop`."""
    for begin in range(0, len(paths), DELETES_AT_ONCE):
        if stop is not None and stop.is_set():
            return begin
        progress(begin, len(paths))
        some = paths[begin : begin + DELETES_AT_ONCE]
        await asyncio.gather(*(asyncio.to_thread(blobs.delete, path) for path in some))
        failpoints.hit(_REMOVED)
    progress(len(paths), len(paths))
    return len(paths)


def release(blobs: BlobStore) -> tuple[str, ...]:
    """End the quarantine of everything that is in it; what that was.

    What is still garbage enters anew with the next collection, and stays as long as if it were new.
    Anybody may do that: it harms nothing.
    """
    lists = _read_notes(blobs, _QUARANTINE)
    for each in lists:
        blobs.delete(each.path)
    return tuple(sorted({path for each in lists for path in each.paths}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """A blob store that is now that of these journals."""

    before: str | None
    """The incarnation of the consensus store that it was marked with."""
    objects: int
    unnamed: int
    """Objects that no journal names; garbage collection will find them."""
    missing: tuple[str, ...]
    """Objects that journals name, and that are not there."""


async def take_over(journals: Journals, blobs: BlobStore) -> TakenOver:
    """Make a blob store that of these journals, whosever it was, and end its quarantine.

    For a consensus store that was restored from a backup. Refused if the journals name none of the
    objects: then all of them would be garbage, and it cannot be the right store.
    """
    young, old = await asyncio.to_thread(_list, blobs, float("inf"))
    objects = young | old.keys()
    named, missing = await _named(journals, blobs)
    if objects and named.isdisjoint(objects):
        raise ForeignBlobs(
            "the blob store cannot be that of these journals, and is not taken over",
            where=str(blobs),
            why=f"it has {len(objects):,} objects, and the consensus store names none of them",
            fix="restore the consensus store that does; a new deployment needs a blob store, or a "
            "prefix, of its own",
        )
    before = await Ownership(journals, blobs).seize()
    await asyncio.to_thread(release, blobs)
    return TakenOver(
        before=before.store if before else None,
        objects=len(objects),
        unnamed=len(objects - named),
        missing=tuple(sorted((named - objects) | missing)),
    )


# ---------------------------------------------------------------------------------------- looking


def _list(blobs: BlobStore, before_s: float) -> tuple[set[str], dict[str, int]]:
    """Our objects: those that are too young, and the size of each that is old enough."""
    young: set[str] = set()
    old: dict[str, int] = {}
    for found in own_objects(blobs.list()):
        if found.modified_s <= before_s:
            old[found.path] = found.bytes
        else:
            young.add(found.path)
    return young, old


async def _named(journals: Journals, blobs: BlobStore) -> tuple[set[str], set[str]]:
    """Every object that some state names, or some page of it; and the pages that are missing."""
    named: set[str] = set()
    missing: set[str] = set()
    for journal in await journals.list():
        named.update(paths_of(journal.state.records))
        for page in journal.state.pages:
            named.add(page.path)
            try:
                records = await asyncio.to_thread(read_page, blobs, page, journal.name)
            except MissingBlob:
                missing.add(page.path)
            else:
                named.update(paths_of(records))
    return named, missing


def _read_notes(blobs: BlobStore, kind: str) -> list[Note]:
    found: list[Note] = []
    for note in blobs.list(kind):
        with contextlib.suppress(MissingBlob):  # another process collects as well
            paths = tuple(blobs.read(note.path).decode(errors="replace").splitlines())
            found.append(Note(path=note.path, modified_s=note.modified_s, paths=paths))
    return found
