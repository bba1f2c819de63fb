"""A store in memory whose calls a test can hold up, fail or count."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from penstock.consensus.backend import CommitOutcome, RevisionPage, ScanPage, Unit
from penstock.consensus.committer.committer import PersistCommitter
from penstock.consensus.committer.inprocess import InProcessConsensus
from penstock.consensus.committer.options import CommitterOptions
from penstock.consensus.committer.recovery import Recover
from penstock.consensus.memory import MemoryBackend
from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    VersionedData,
)

V = VersionedData
COMMITTED = CasResult.COMMITTED
MISMATCH = CasResult.EXPECTATION_MISMATCH
CACHED = CommitterOptions(cache=True)
PATIENCE_S = 30.0
"""Bounds a hang, not a duration."""

T = TypeVar("T")


class ScriptedBackend(MemoryBackend):
    """`before[op]` runs ahead of each call of that operation; `after[op]` when it has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}

    async def _step(self, op: str, call: Awaitable[T]) -> T:
        self.calls[op] += 1
        try:
            if op in self.before:
                await self.before[op]()
            result = await call
        finally:
            if asyncio.iscoroutine(call):
                call.close()
        if op in self.after:
            await self.after[op]()
        return result

    async def revision(self) -> int:
        return await self._step("revision", super().revision())

    async def head(self, key: str) -> VersionedData | None:
        return await self._step("head", super().head(key))

    async def heads(self, keys: Sequence[str]) -> dict[str, int]:
        return await self._step("heads", super().heads(keys))

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int = SCAN_ALL
    ) -> ScanPage:
        return await self._step("scan", super().scan(key, from_, limit, bytes_max=bytes_max))

    async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
        return await self._step("commit", super().commit(units))

    async def truncate(self, key: str, seqno: int) -> int | None:
        return await self._step("truncate", super().truncate(key, seqno))

    async def entries_since(self, prefix: str, revision: int) -> RevisionPage:
        return await self._step("entries_since", super().entries_since(prefix, revision))

    def vanish(self, error: ConsensusError) -> None:
        """From now on no call reaches the store: its tables are missing, or another's."""
        self.before |= {op: failing(error) for op in OPERATIONS}

    async def foreign(self, key: str, seqno: int, data: bytes = b"foreign") -> None:
        """Commit as another process would: behind the committer's back."""
        commit = await MemoryBackend.commit(self, [((key, V(seqno, data)),)])
        assert commit.outcomes == (COMMITTED,)


GONE = Determinate(ErrorKind.UNDEFINED_TABLE, 'relation "consensus_head" does not exist [42P01]')
RESET = Determinate(ErrorKind.STORE_RESET, "another store is there now")
OPERATIONS = ("revision", "head", "heads", "scan", "commit", "truncate", "entries_since")


def failing(error: ConsensusError) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


def until(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await event.wait()

    return wait


@asynccontextmanager
async def committer_on(
    backend: MemoryBackend, options: CommitterOptions = CACHED, recover: Recover | None = None
) -> AsyncIterator[InProcessConsensus]:
    committer = PersistCommitter(backend, options, recover=recover)
    await committer.open()
    store = InProcessConsensus(committer)
    try:
        yield store
    finally:
        await store.close()


def quick(options: CommitterOptions = CACHED, **times_s: float) -> CommitterOptions:
    """The same options with other times of its streams."""
    return replace(options, streams=replace(options.streams, **times_s))


async def fill(store: InProcessConsensus, key: str, count: int, start: int = 0) -> None:
    for n in range(start, start + count):
        assert await store.compare_and_set(key, V(n, b"%d" % n)) is COMMITTED


async def take(stream: AsyncIterator[T], enough: Callable[[list[T]], bool]) -> list[T]:
    """Events until `enough` of them; closes the stream."""
    taken: list[T] = []
    async with aclosing(stream), asyncio.timeout(PATIENCE_S):  # type: ignore[type-var]
        async for event in stream:
            taken.append(event)
            if enough(taken):
                break
    return taken


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - it may be any condition
            await asyncio.sleep(0.005)
