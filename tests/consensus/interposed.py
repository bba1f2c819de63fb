"""A store whose every call may meet a fate that a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.consensus.open import open_consensus
from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    Consensus,
    Determinate,
    ErrorKind,
    Indeterminate,
    SubscribeEvent,
    VersionedData,
)

T = TypeVar("T")


class Crash(BaseException):
    """The process is gone; only the supervisor may catch this."""


class Fate(enum.Enum):
    PASSES = "nothing happens"
    REFUSE = "a determinate error"
    REFUSE_FOR_GOOD = "a determinate error that will come again"
    LOSE_REQUEST = "it does not happen, and there is no answer"
    LOSE_REPLY = "it happens, and there is no answer"
    LATE = "there is no answer, and it happens a while later"
    CRASH_BEFORE = "the caller dies before it happens"
    CRASH_AFTER = "the caller dies when it has happened"


class Interposed:
    """`Consensus`, as far as state logs use it, with a fate for the n-th call."""

    def __init__(
        self, inner: Consensus, fate: Callable[[int, str], Fate] = lambda _, __: Fate.PASSES
    ) -> None:
        self.inner = inner
        self.fate = fate
        self.calls: list[str] = []
        self.entries_read = 0
        self.late: list[asyncio.Task[object]] = []
        self.sent = asyncio.Event()
        """Set once a call has met another fate than passing."""
        self.resume = asyncio.Event()
        """A caller without an answer waits as long as this is not set: it is paused."""
        self.resume.set()

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        found = await self._meet("head", lambda: self.inner.head(key, fresh=fresh))
        self.entries_read += found is not None
        return found

    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        found = await self._meet("scan", lambda: self.inner.scan(key, from_, limit))
        self.entries_read += len(found)
        return found

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        return await self._meet("cas", lambda: self.inner.compare_and_set(key, new))

    async def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        return await self._meet("cas", lambda: self.inner.compare_and_set_all(batch))

    async def truncate(self, key: str, seqno: int) -> int | None:
        return await self._meet("truncate", lambda: self.inner.truncate(key, seqno))

    def subscribe(self, key: str, from_: int) -> AsyncIterator[SubscribeEvent]:
        return self.inner.subscribe(key, from_)

    async def settle(self) -> None:
        """Let what is late happen."""
        await asyncio.gather(*self.late)

    async def _meet(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        number = len(self.calls)
        self.calls.append(name)
        fate = self.fate(number, name)
        if fate is Fate.CRASH_BEFORE:
            raise Crash
        if fate is Fate.REFUSE:
            raise Determinate(ErrorKind.UNAVAILABLE, "refused")
        if fate is Fate.REFUSE_FOR_GOOD:
            raise Determinate(ErrorKind.PERMISSION_DENIED, "refused for good")
        if fate is Fate.LATE:
            self.late.append(asyncio.create_task(_later(call)))
        if fate not in (Fate.LOSE_REQUEST, Fate.LATE):
            answer = await call()
            if fate is Fate.PASSES:
                return answer
            if fate is Fate.CRASH_AFTER:
                raise Crash
        self.sent.set()
        await self.resume.wait()
        raise Indeterminate(ErrorKind.TIMEOUT, "no answer")


async def _later(call: Callable[[], Awaitable[object]]) -> object:
    await asyncio.sleep(0.006)  # about one backoff: beside, before or behind the second attempt
    return await call()


@contextlib.asynccontextmanager
async def memory_store() -> AsyncIterator[Consensus]:
    store = await open_consensus("memory:")
    try:
        yield store
    finally:
        await store.close()
