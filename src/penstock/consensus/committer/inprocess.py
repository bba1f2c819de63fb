"""The committer for the process that hosts it: coroutine calls, no sockets.

A process that dials its own gRPC server deadlocks under load: a blocking stub on the loop thread
blocks the very loop that must serve it, and even asynchronous calls queue behind the traffic they
are part of. So the process that hosts a committer calls it through this class.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.consensus.committer.committer import IN_PROCESS, PersistCommitter
from penstock.consensus.snapshot import read_snapshot
from penstock.consensus.store import (
    SCAN_ALL,
    Batch,
    CasResult,
    ConsensusError,
    SnapshotEvent,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
)


class InProcessConsensus:
    """`Consensus` by direct calls; closing it closes its committer."""

    def __init__(self, committer: PersistCommitter) -> None:
        self.committer = committer

    async def incarnation(self) -> bytes:
        return self.committer.serving(IN_PROCESS).incarnation

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        after, more = "", True
        while more:
            keys, more = await self.committer.list_page(prefix, after)
            for after in keys:
                yield after

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        return await self.committer.head(key, fresh=fresh)

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        return await self.committer.compare_and_set(key, new)

    async def compare_and_set_many(self, batch: Batch) -> list[CasResult | ConsensusError]:
        return await self.committer.compare_and_set_many(batch)

    async def compare_and_set_all(self, batch: Batch) -> CasResult:
        return await self.committer.compare_and_set_all(batch)

    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        page = await self.committer.scan(key, from_, limit, bytes_max=SCAN_ALL)
        return list(page.entries)

    def snapshot(self, prefix: str) -> AsyncIterator[SnapshotEvent]:
        return read_snapshot(lambda behind: self.committer.snapshot_page(prefix, behind))

    async def truncate(self, key: str, seqno: int) -> int | None:
        return await self.committer.truncate(key, seqno)

    def subscribe(self, key: str, from_: int) -> AsyncIterator[SubscribeEvent]:
        return self.committer.subscribe(key, from_)

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchEvent]:
        return self.committer.watch(prefix, from_revision)

    async def close(self) -> None:
        await self.committer.close()
