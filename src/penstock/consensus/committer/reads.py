"""Sharing reads of one key: one running, one waiting.

A caller may share a read that *starts after* its own call. Joining one that is already running
could answer with a head older than a commit acknowledged in between, and `fresh` would no longer be
linearizable. So however many callers there are, the backend sees one read of a key at a time, and
no caller waits for more than two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.consensus.store import (
    ConsensusError,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
)

Found = VersionedData | None


class HeadReads:
    """Reads of heads, coalesced per key."""

    def __init__(self, read: Callable[[str], Awaitable[Found]]) -> None:
        self._read = read
        self._waiting: dict[str, asyncio.Future[Found | ConsensusError]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    async def get(self, key: str) -> Found:
        """Return the head, by a read that starts now or later and survives its callers."""
        waiting = self._waiting.get(key)
        if waiting is None:
            loop = asyncio.get_running_loop()
            waiting = self._waiting[key] = loop.create_future()
            if key not in self._running:
                self._running[key] = loop.create_task(self._run(key), name=f"read {key}")
        answer = await asyncio.shield(waiting)
        if isinstance(answer, ConsensusError):
            raise answer
        return answer

    async def close(self) -> None:
        """Wait for the reads that are under way."""
        if self._running:
            await asyncio.wait(self._running.values())

    async def _run(self, key: str) -> None:
        answer: Found | ConsensusError
        try:
            while (waiting := self._waiting.pop(key, None)) is not None:
                try:
                    answer = await self._read(key)
                except ConsensusError as error:
                    answer = error
                except Exception as error:  # a bug; callers must not hang because of it
                    answer = Indeterminate(ErrorKind.INTERNAL, cause_chain(error))
                    answer.__cause__ = error
                waiting.set_result(answer)
        finally:
            del self._running[key]
