"""The plainest `Consensus` over a `Backend`: no cache, and streams that poll.

What the suite says of a backend is said through this, with as little in between as possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from penstock.consensus.backend import LIST_PAGE, Backend, Unit
from penstock.consensus.coalesce import GroupCommit, GroupCommitOptions
from penstock.consensus.snapshot import read_page, read_snapshot
from penstock.consensus.store import (
    ENTRY_BYTES_MAX,
    SCAN_ALL,
    CasResult,
    CaughtUp,
    ConsensusError,
    Entries,
    Entry,
    Resync,
    ResyncReason,
    SnapshotEvent,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    WatchProgress,
    WatchResync,
    check_all,
    check_entry,
    check_key,
    check_limit,
    check_many,
    check_prefix,
    check_revision,
    check_seqno,
)

POLL_S = 0.005


class DirectConsensus:
    def __init__(self, backend: Backend, options: GroupCommitOptions | None = None) -> None:
        self.backend = backend
        self.entry_bytes_max = ENTRY_BYTES_MAX
        self._group = GroupCommit(backend, options)

    async def incarnation(self) -> bytes:
        await self.backend.revision()
        return self.backend.incarnation

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        check_prefix(prefix)
        after = ""
        while True:
            page = await self.backend.list_page(prefix, after)
            for key in page:
                yield key
            if len(page) < LIST_PAGE:
                return
            after = page[-1]

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        check_key(key)
        return await self.backend.head(key)

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        check_entry(key, new, entry_bytes_max=self.entry_bytes_max)
        return await self._group.commit(((key, new),))

    async def compare_and_set_many(
        self, batch: Sequence[tuple[str, VersionedData]]
    ) -> list[CasResult | ConsensusError]:
        check_many(batch)
        refused: dict[int, CasResult | ConsensusError] = {}
        units: list[Unit] = []
        for position, element in enumerate(batch):
            try:
                check_entry(*element, entry_bytes_max=self.entry_bytes_max)
                units.append((element,))
            except ConsensusError as error:
                refused[position] = error
        outcomes = iter(await self._group.commit_each(units))
        return [refused[i] if i in refused else next(outcomes) for i in range(len(batch))]

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        check_all(batch, entry_bytes_max=self.entry_bytes_max)
        return await self._group.commit(tuple(batch))

    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        check_key(key)
        check_seqno(from_)
        check_limit(limit)
        return list((await self.backend.scan(key, from_, limit)).entries)

    def snapshot(self, prefix: str) -> AsyncIterator[SnapshotEvent]:
        check_prefix(prefix)
        return read_snapshot(lambda behind: read_page(self.backend, prefix, behind))

    async def truncate(self, key: str, seqno: int) -> int | None:
        check_key(key)
        check_seqno(seqno)
        return await self.backend.truncate(key, seqno)

    async def subscribe(self, key: str, from_: int) -> AsyncIterator[SubscribeEvent]:
        check_key(key)
        check_seqno(from_)
        caught_up = False
        while True:
            page = await self.backend.scan(key, from_, SCAN_ALL)
            if page.entries and page.entries[0].seqno > from_:
                floor, head = page.entries[0].seqno, page.entries[-1].seqno
                yield Resync(floor=floor, head=head, reason=ResyncReason.TRUNCATED)
                return
            for entry in page.entries:
                yield Entry(entry)
                from_ = entry.seqno + 1
            if page.entries or not caught_up:
                caught_up = True
                yield CaughtUp(from_ - 1 if from_ else None)
            await asyncio.sleep(POLL_S)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchEvent]:
        check_prefix(prefix)
        check_revision(from_revision)
        first = True
        while True:
            page = await self.backend.entries_since(prefix, from_revision)
            if page.lost:
                from_revision, heads = await self.backend.heads_under(prefix)
                reason = ResyncReason.TRUNCATED
                yield WatchResync(revision=from_revision, heads=heads, reason=reason)
                continue
            for revision in sorted({entry.revision for _, entry in page.entries}):
                yield Entries(revision, tuple(e for e in page.entries if e[1].revision == revision))
            if first or page.upto > from_revision:
                first = False
                yield WatchProgress(page.upto)
            from_revision = page.upto
            if not page.more:
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        await self._group.close()
        await self.backend.close()
