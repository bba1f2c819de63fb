"""A store that fails on purpose, and is honest about what it knows.

A caller that appends must cope with four outcomes, and with a fifth that is the nastiest: the
append that was given up and happens later, perhaps after the caller has read the log again.

    happened, and answered                   not happened, and certainly so (`Determinate`)
    happened, answer lost                    not happened, answer lost
    happens later, answer lost
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    Consensus,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    SnapshotEvent,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
)

T = TypeVar("T")


class UnreliableConsensus:
    """Wraps a store; the same seed and the same calls give the same failures.

    `p_happen` is the probability that an operation is passed on, `p_timeout` that its answer is
    lost, and `p_late` that an operation with a lost answer happens only later. 1, 0, 0 never fails.
    """

    def __init__(
        self,
        inner: Consensus,
        *,
        p_happen: float = 0.95,
        p_timeout: float = 0.05,
        p_late: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.inner = inner
        self.p_happen = p_happen
        self.p_timeout = p_timeout
        self.p_late = p_late
        self._random = random.Random(seed)
        self._late: set[asyncio.Task[object]] = set()

    def heal(self) -> None:
        """Stop failing."""
        self.p_happen, self.p_timeout, self.p_late = 1.0, 0.0, 0.0

    async def settle(self) -> None:
        """Wait until every late operation has happened."""
        await asyncio.gather(*self._late, return_exceptions=True)

    async def incarnation(self) -> bytes:
        return await self._perhaps(self.inner.incarnation)

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        self._perhaps_unavailable()
        async for key in self.inner.list_keys(prefix):
            yield key

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        return await self._perhaps(lambda: self.inner.head(key, fresh=fresh))

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        return await self._perhaps(lambda: self.inner.compare_and_set(key, new))

    async def compare_and_set_many(
        self, batch: Sequence[tuple[str, VersionedData]]
    ) -> list[CasResult | ConsensusError]:
        return await self._perhaps(lambda: self.inner.compare_and_set_many(batch))

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        return await self._perhaps(lambda: self.inner.compare_and_set_all(batch))

    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        return await self._perhaps(lambda: self.inner.scan(key, from_, limit))

    async def snapshot(self, prefix: str) -> AsyncIterator[SnapshotEvent]:
        self._perhaps_unavailable()
        async for event in self.inner.snapshot(prefix):
            yield event

    async def truncate(self, key: str, seqno: int) -> int | None:
        return await self._perhaps(lambda: self.inner.truncate(key, seqno))

    async def subscribe(self, key: str, from_: int) -> AsyncIterator[SubscribeEvent]:
        self._perhaps_unavailable()
        async for event in self.inner.subscribe(key, from_):
            yield event

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchEvent]:
        self._perhaps_unavailable()
        async for event in self.inner.watch(prefix, from_revision):
            yield event

    async def close(self) -> None:
        await self.settle()
        await self.inner.close()

    async def _perhaps(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        happens = self._random.random() < self.p_happen
        lost = self._random.random() < self.p_timeout
        late = self._random.random() < self.p_late
        if not happens and not lost:
            raise Determinate(ErrorKind.UNAVAILABLE, "refused on purpose")
        if happens and lost and late:
            task: asyncio.Task[object] = asyncio.create_task(operation())
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        elif happens:
            result = await operation()
            if not lost:
                return result
        raise Indeterminate(ErrorKind.TIMEOUT, "the answer was lost on purpose")

    def _perhaps_unavailable(self) -> None:
        if self._random.random() >= self.p_happen:
            raise Determinate(ErrorKind.UNAVAILABLE, "refused on purpose")
