"""A store in memory: for tests and previews, and the plainest reading of the contract.

Everything happens under one lock. Every call first yields to the event loop, so that concurrent
callers interleave here as they would with a store that takes time.
"""

from __future__ import annotations

import asyncio
import bisect
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace

from penstock.consensus.backend import (
    LIST_PAGE,
    PAGE_BYTES,
    PAGE_ENTRIES,
    CommitOutcome,
    LivePage,
    Position,
    RevisionPage,
    ScanPage,
    Traits,
    Unit,
    judge,
    page_end,
    settle,
    truncate_bound,
)
from penstock.consensus.store import (
    SCAN_ALL,
    Determinate,
    ErrorKind,
    VersionedData,
)


class MemoryBackend:
    """Entries in a dict; gone with the process."""

    traits = Traits(name="memory", cache_heads=False, foreign_poll_s=0.05, commit_concurrency=1)
    url = "memory:"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.incarnation = secrets.token_bytes(16)
        self._logs: dict[str, list[VersionedData]] = {}
        self._lost: dict[str, int] = {}
        """Greatest revision that truncation removed, by key."""
        self._order: list[tuple[int, str, int]] = []
        """(revision, key, seqno) of every live entry."""
        self._revision = 0
        self._closed = False

    async def revision(self) -> int:
        await self._turn()
        return self._revision

    async def list_page(self, prefix: str, after: str) -> list[str]:
        await self._turn()
        with self._lock:
            found = sorted(key for key in self._logs if key.startswith(prefix) and key > after)
        return found[:LIST_PAGE]

    async def head(self, key: str) -> VersionedData | None:
        await self._turn()
        with self._lock:
            log = self._logs.get(key)
            return log[-1] if log else None

    async def heads(self, keys: Sequence[str]) -> dict[str, int]:
        await self._turn()
        with self._lock:
            return {key: self._logs[key][-1].seqno for key in keys if key in self._logs}

    async def heads_under(self, prefix: str) -> tuple[int, dict[str, int]]:
        await self._turn()
        with self._lock:
            heads = {k: log[-1].seqno for k, log in self._logs.items() if k.startswith(prefix)}
            return self._revision, heads

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int = SCAN_ALL
    ) -> ScanPage:
        await self._turn()
        with self._lock:
            log = self._logs.get(key, [])
            found = log[max(0, from_ - log[0].seqno) :][:limit] if log else []
        size = 0
        for count, entry in enumerate(found, start=1):
            size += len(entry.data)
            if size > bytes_max and count < len(found):
                return ScanPage(entries=tuple(found[:count]), more=True)
        return ScanPage(entries=tuple(found), more=False)

    async def floor(self, key: str) -> int:
        await self._turn()
        with self._lock:
            log = self._logs.get(key)
            return log[0].seqno if log else 0

    async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
        await self._turn()
        with self._lock:
            keys = {key for unit in units for key, _ in unit}
            heads = {key: self._logs[key][-1].seqno for key in keys if key in self._logs}
            verdict = judge(heads, units)
            if not any(verdict.wins):
                return settle(verdict, None)
            self._revision += 1
            for key, new in verdict.entries:
                entry = replace(new, revision=self._revision)
                self._logs.setdefault(key, []).append(entry)
                bisect.insort(self._order, (self._revision, key, new.seqno))
            return settle(verdict, self._revision)

    async def truncate(self, key: str, seqno: int) -> int | None:
        await self._turn()
        with self._lock:
            log = self._logs.get(key)
            if log is None or seqno > log[-1].seqno:
                raise truncate_bound(key, seqno, log[-1].seqno if log else None)
            gone = [entry for entry in log if entry.seqno < seqno]
            if gone:
                del log[: len(gone)]
                self._lost[key] = gone[-1].revision
                dead = {(entry.revision, key, entry.seqno) for entry in gone}
                self._order = [mark for mark in self._order if mark not in dead]
            return len(gone)

    async def entries_since(self, prefix: str, revision: int) -> RevisionPage:
        await self._turn()
        with self._lock:
            start = bisect.bisect_right(self._order, revision, key=lambda mark: mark[0])
            found = [
                (key, self._logs[key][seqno - self._logs[key][0].seqno])
                for _, key, seqno in self._order[start:]
                if key.startswith(prefix)
            ]
            lost = any(r > revision for key, r in self._lost.items() if key.startswith(prefix))
            end = page_end([(entry.revision, len(entry.data)) for _, entry in found])
            upto = max(self._revision, revision) if end is None else end
            return RevisionPage(
                entries=tuple(item for item in found if item[1].revision <= upto),
                upto=upto,
                more=end is not None,
                lost=lost,
            )

    async def live_page(self, prefix: str, after: Position) -> LivePage:
        await self._turn()
        with self._lock:
            found = [
                (key, entry)
                for key in sorted(key for key in self._logs if key.startswith(prefix))
                if key >= after[0]
                for entry in self._logs[key]
                if (key, entry.seqno) > after
            ]
            revision = self._revision
        size = count = 0
        while count < min(len(found), PAGE_ENTRIES) and size <= PAGE_BYTES:
            size += len(found[count][1].data)
            count += 1
        return LivePage(entries=tuple(found[:count]), revision=revision, more=count < len(found))

    async def close(self) -> None:
        self._closed = True

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")
