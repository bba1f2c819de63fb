"""Ownership of a blob store: a mark at its root ties it to the one consensus store that names it.

To any other consensus store these objects look like garbage: to that of a second deployment at the
same place, to one that was emptied and filled anew, to an older copy of the right one. So writers
and collectors read the mark first, and are refused under a foreign one.

    =store          the incarnation of the consensus store, and the *turn* of its last collection
    =claim/…        deployments that are about to write the first mark
    blobs/turns     a consensus key: every turn that this store has taken

**The first mark** is written before the first object, once, whatever the file system can do:

    claim, list the claims, look for a mark, write the mark, remove the claim

Of two deployments at least one sees the other's claim, or its mark; it withdraws. An object store
needs to show what was written before, in listings too, and no more: they all do. A store that has
objects already, of a version without marks, is adopted if the journals name some of them. It is
never adopted by journals that name none.

**Turns** distinguish copies of one consensus store, which have the same incarnation: a collection
that removes something takes a turn, in the consensus store first and then in the mark. A copy that
does not know the turn of the mark is older than what was done to the objects since. Until an
operator says that it replaces the other (`seize`), it may only read.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from penstock import failpoints
from penstock.consensus.store import (
    CasResult,
    Consensus,
    ConsensusError,
    ErrorKind,
    Indeterminate,
    VersionedData,
)
from penstock.errors import UserError
from penstock.journal.blobs import BlobInfo, BlobStore, MissingBlob
from penstock.journal.journals import Journals
from penstock.journal.state import Blob, Fragment, Record

MARK: Final = "=store"
_CLAIMS: Final = "=claim"
TURNS_KEY: Final = "blobs/turns"
_VERSION: Final = 1

RECHECK_S: Final = 60
"""Time for which a mark is believed; garbage is spared for hours."""

TURNS_KEPT: Final = 1000
NAMED_TRIED: Final = 100
"""Objects that are looked for before a store without a mark counts as another one."""

_OBJECT: Final = re.compile(
    r".+/[0-9a-f]{32}(?:-[A-Za-z0-9_.-]{1,64}\.parquet|\.page)(?:\.partial)?"
)
_CLAIM: Final = re.compile(rf"{_CLAIMS}/([0-9a-f]{{32}})-[0-9a-f]+")
_INCARNATION: Final = re.compile(r"[0-9a-f]{32}")

_CLAIMED = failpoints.declare("blobs.claimed", "a blob store is claimed, and not marked yet")
_MARKED = failpoints.declare("blobs.marked", "a blob store is marked, there is no object yet")
_TURNED = failpoints.declare("blobs.turned", "a turn is taken, and not in the mark yet")


_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="blob-owner")
"""Threads of their own: a writer waits for its claim in a thread, and such writers may hold all
threads of the common pool."""

T = TypeVar("T")


async def _in_thread(call: Callable[..., T], *arguments: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call, *arguments)


class ForeignBlobs(UserError):
    """The blob store is not that of these journals, by all that is known."""


class StoreMark(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the object `=store`."""

    version: int = _VERSION
    store: str
    """Incarnation of the consensus store, in hex."""
    turn: str = ""
    """The last collection; empty before the first that found garbage."""


# ----------------------------------------------------------------------------------- what is there


def read_mark(blobs: BlobStore) -> StoreMark | None:
    """The mark of a blob store, if it has one."""
    try:
        data = blobs.read(MARK)
    except MissingBlob:
        return None
    if len(data) == 32 and _INCARNATION.fullmatch(data.decode("ascii", "replace")):
        return StoreMark(store=data.decode())  # as garbage collection wrote it once
    try:
        version = msgspec.json.decode(data, type=dict[str, object]).get("version")
        if isinstance(version, int) and version > _VERSION:
            raise ForeignBlobs(
                "the blob store was marked by a later version of Penstock",
                where=blobs.url_of(MARK),
                fix="use that version, or a later one",
            )
        mark = msgspec.json.decode(data, type=StoreMark)
    except (msgspec.DecodeError, UnicodeDecodeError):
        mark = None
    if mark is None or not _INCARNATION.fullmatch(mark.store):
        raise ForeignBlobs(
            "the mark of the blob store cannot be read",
            where=blobs.url_of(MARK),
            why="it was damaged, or written by something else; whose objects these are is unknown",
            fix="if no other deployment uses this place: penstock gc --take-over",
        )
    return mark


def own_objects(found: Iterable[BlobInfo]) -> Iterator[BlobInfo]:
    """The fragments and pages among all that is listed, without those of stores further inside."""
    listed = list(found)
    inside = tuple(i.path.removesuffix(MARK) for i in listed if i.path.endswith(f"/{MARK}"))
    for info in listed:
        if _OBJECT.fullmatch(info.path) and not (inside and info.path.startswith(inside)):
            yield info


def is_used(blobs: BlobStore) -> bool:
    """True if objects were written here, or a deployment has begun to."""
    listed = list(blobs.list())
    return any(info.path == MARK for info in listed) or any(True for _ in own_objects(listed))


def paths_of(records: Iterable[Record]) -> Iterator[str]:
    """The objects that records name."""
    for record in records:
        if isinstance(record, Fragment) and isinstance(record.at, Blob):
            yield record.at.path


# -------------------------------------------------------------------------------------- ownership


class Ownership:
    """Ownership of a blob store by the journals of a consensus store. Used on one event loop."""

    def __init__(self, journals: Journals, blobs: BlobStore) -> None:
        self._journals = journals
        self._store = journals.store
        self._blobs = blobs
        self._claiming = asyncio.Lock()
        self._checked_s = self._claimed_s = float("-inf")

    async def check(self) -> None:
        """Raise unless the blob store is that of these journals, or can become it."""
        if time.monotonic() - self._checked_s > RECHECK_S:
            await self._is_marked()
            self._checked_s = time.monotonic()

    async def claim(self) -> None:
        """Mark the blob store, unless it is marked, or raise: what comes before any writing."""
        async with self._claiming:
            if self.is_claimed:
                return
            if not await self._is_marked():
                store = (await self._store.incarnation()).hex()
                await _in_thread(_put_first_mark, self._blobs, store)
            self._claimed_s = time.monotonic()

    @property
    def is_claimed(self) -> bool:
        """True if the claim was confirmed a moment ago."""
        return time.monotonic() - self._claimed_s <= RECHECK_S

    async def take_turn(self) -> None:
        """Let the other copies of this consensus store know that objects are about to go."""
        await self.claim()
        await self._turn()

    async def seize(self) -> StoreMark | None:
        """Mark the blob store as that of these journals, whosever it was; what it was before."""
        try:
            before = await _in_thread(read_mark, self._blobs)
        except ForeignBlobs:
            before = None
        await self._turn()
        return before

    async def _turn(self) -> None:
        store, turn = (await self._store.incarnation()).hex(), secrets.token_hex(16)
        await _record_turn(self._store, turn)
        failpoints.hit(_TURNED)
        mark = msgspec.json.encode(StoreMark(store=store, turn=turn))
        await _in_thread(self._blobs.replace, MARK, mark)
        for claim in await _in_thread(_claims, self._blobs):  # which a crash has left
            await _in_thread(self._blobs.delete, claim)

    async def _is_marked(self) -> bool:
        """True if the mark is there, and ours; raises if it is another, or must not be made."""
        mark = await _in_thread(read_mark, self._blobs)
        if mark is None and (why := await self._unknown()) is not None:
            # Unless another process of ours has marked it and written the first object just now.
            mark = await _in_thread(read_mark, self._blobs)
            if mark is None:
                raise _foreign(self._blobs, why)
        if mark is None:
            return False
        store = (await self._store.incarnation()).hex()
        if mark.store != store:
            raise _marked(self._blobs, mark.store, store)
        turns = await _turns(self._store) if mark.turn else None
        if turns is not None and mark.turn not in turns:
            raise ForeignBlobs(
                "the blob store was collected, or taken over, by another copy of this consensus "
                "store",
                where=str(self._blobs),
                why="this copy is older: objects that it does not know would look like garbage",
                fix="use the other one; or give this one a copy of the blob store; or, if it was "
                "restored from a backup and replaces the other: penstock gc --take-over",
            )
        return True

    async def _unknown(self) -> str | None:
        """Why a store without a mark must not become ours; None if it may.

        A token of one prefix cannot ask what journals name. It may take a place that is empty.
        """
        try:
            named = await _some_named(self._journals)
        except ConsensusError as error:
            if error.kind is not ErrorKind.PERMISSION_DENIED:
                raise
            if not await _in_thread(is_used, self._blobs):
                return None
            return "it has objects and no mark, and this token may not read all journals to tell"
        if named:
            for path in named:
                if await _in_thread(self._blobs.exists, path):
                    return None
            return "it has none of the objects that the journals name"
        if await _in_thread(is_used, self._blobs):
            return "it has objects, and the journals name none of them"
        return None


async def _some_named(journals: Journals) -> list[str]:
    """Some objects that journals name, if they name any: the newest of each."""
    found: list[str] = []
    for journal in await journals.list():
        state = journal.state
        newest = next(paths_of(reversed(state.records)), None)
        found += [path for path in (newest, *(page.path for page in state.pages[-1:])) if path]
        if len(found) >= NAMED_TRIED:
            break
    return found


def _foreign(blobs: BlobStore, why: str) -> ForeignBlobs:
    return ForeignBlobs(
        "the blob store is not that of these journals",
        where=str(blobs),
        why=why,
        fix="check --data, --consensus and --blob. Was the consensus store lost, or emptied? Then "
        "restore it from a backup. A new deployment needs a blob store, or a prefix, of its own. "
        "If this store was restored, and replaces the other: penstock gc --take-over",
    )


def _marked(blobs: BlobStore, theirs: str, ours: str) -> ForeignBlobs:
    return _foreign(
        blobs,
        f"it is marked as that of the consensus store {theirs[:8]}, and this is {ours[:8]}",
    )


# ------------------------------------------------------------------------------------- first mark


def _claims(blobs: BlobStore) -> list[str]:
    return [info.path for info in blobs.list(_CLAIMS)]


def _put_first_mark(blobs: BlobStore, store: str) -> None:
    """Mark a blob store that has no mark, or raise. See the module for why this is exclusive."""
    claim = f"{_CLAIMS}/{store}-{secrets.token_hex(8)}"
    blobs.write(claim, store.encode())
    failpoints.hit(_CLAIMED)
    claims = {path: found[1] for path in _claims(blobs) if (found := _CLAIM.fullmatch(path))}
    mark = read_mark(blobs)
    others = sorted({by for by in claims.values() if by != store})
    if mark is None and not others:
        blobs.replace(MARK, msgspec.json.encode(StoreMark(store=store)))
        failpoints.hit(_MARKED)
    for path in claims if not others else [claim]:
        blobs.delete(path)
    if mark is not None and mark.store != store:
        raise _marked(blobs, mark.store, store)
    if mark is None and others:
        raise ForeignBlobs(
            "the blob store is claimed by another deployment",
            where=str(blobs),
            why=f"the consensus store {others[0][:8]} is about to mark it, or was when it crashed",
            fix="try again, and see whose it is; if no other deployment uses this place: "
            "penstock gc --take-over",
        )


# ------------------------------------------------------------------------------------------ turns


async def _turns(store: Consensus) -> set[str] | None:
    """The turns that a consensus store has taken; None if the caller may not read them."""
    try:
        return {entry.data.decode() for entry in await store.scan(TURNS_KEY, 0)}
    except ConsensusError as error:
        if error.kind is ErrorKind.PERMISSION_DENIED:
            return None
        raise


async def _record_turn(store: Consensus, turn: str) -> None:
    """Append a turn to those of a consensus store; there may be others that do so as well."""
    while True:
        entries = await store.scan(TURNS_KEY, 0)
        if any(entry.data == turn.encode() for entry in entries):
            return
        seqno = entries[-1].seqno + 1 if entries else 0
        try:
            result = await store.compare_and_set(TURNS_KEY, VersionedData(seqno, turn.encode()))
        except Indeterminate:
            if not any(e.data == turn.encode() for e in await store.scan(TURNS_KEY, seqno)):
                raise
            return
        if result is CasResult.COMMITTED:
            if len(entries) >= 2 * TURNS_KEPT:
                await store.truncate(TURNS_KEY, seqno - TURNS_KEPT)
            return
