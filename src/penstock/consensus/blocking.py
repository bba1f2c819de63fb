"""The store for threads: Spark executors, connectors, anything without an event loop.

A `BlockingConsensus` submits to an event loop that runs in another thread, and waits. It has the
operations of `Consensus`, and the same errors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.consensus.open import ConsensusOptions, open_consensus
from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    Consensus,
    ConsensusError,
    Determinate,
    ErrorKind,
    SnapshotEvent,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
)
from penstock.errors import Bug

T = TypeVar("T")


class BlockingConsensus:
    """`Consensus` by waiting; may be shared by any number of threads."""

    def __init__(self, inner: Consensus, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` runs in another thread, and is the one that `inner` lives on."""
        self._inner = inner
        self._loop = loop

    @classmethod
    @contextmanager
    def open(cls, url: str, options: ConsensusOptions | None = None) -> Iterator[BlockingConsensus]:
        """Open `url` on an event loop of its own, which ends with the block."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="consensus", daemon=True)
        thread.start()
        try:
            inner = asyncio.run_coroutine_threadsafe(open_consensus(url, options), loop).result()
            store = cls(inner, loop)
            try:
                yield store
            finally:
                store.close()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def incarnation(self) -> bytes:
        return self._wait(self._inner.incarnation())

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        return self._each(self._inner.list_keys(prefix))

    def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        return self._wait(self._inner.head(key, fresh=fresh))

    def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        return self._wait(self._inner.compare_and_set(key, new))

    def compare_and_set_many(
        self, batch: Sequence[tuple[str, VersionedData]]
    ) -> list[CasResult | ConsensusError]:
        return self._wait(self._inner.compare_and_set_many(batch))

    def compare_and_set_all(self, batch: Sequence[tuple[str, VersionedData]]) -> CasResult:
        return self._wait(self._inner.compare_and_set_all(batch))

    def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        return self._wait(self._inner.scan(key, from_, limit))

    def snapshot(self, prefix: str) -> Iterator[SnapshotEvent]:
        return self._each(self._inner.snapshot(prefix))

    def truncate(self, key: str, seqno: int) -> int | None:
        return self._wait(self._inner.truncate(key, seqno))

    def subscribe(self, key: str, from_: int) -> Iterator[SubscribeEvent]:
        return self._each(self._inner.subscribe(key, from_))

    def watch(self, prefix: str, from_revision: int) -> Iterator[WatchEvent]:
        return self._each(self._inner.watch(prefix, from_revision))

    def close(self) -> None:
        self._wait(self._inner.close())

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        if _running_loop() is self._loop:
            call.close()
            raise Bug(
                "a blocking call was made on the event loop that would have to serve it",
                fix="await the Consensus itself there",
            )
        if self._loop.is_closed():
            call.close()
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _each(self, stream: AsyncIterator[T]) -> Iterator[T]:
        end = object()

        async def following() -> T | object:
            return await anext(stream, end)

        async def leave() -> None:
            if hasattr(stream, "aclose"):
                await stream.aclose()

        try:
            while (item := self._wait(following())) is not end:
                yield item  # type: ignore[misc]
        finally:
            self._wait(leave())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
