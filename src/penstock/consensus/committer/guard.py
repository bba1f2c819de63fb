"""What a committer does when the schema is gone from under it.

A schema that vanished took everything with it: somebody dropped it, or the database behind the
address is another one. `SchemaGuard` notices (any error of kind UNDEFINED_TABLE) and asks its
`recover` for a backend to go on with.

The standalone daemon creates the schema again, in place (`Healer`). It has no opinion about
contents, it often fronts disposable stores, and a daemon that exits instead is dead wherever its
supervisor does not restart it. It is safe because nobody goes on by accident: the cache is
cleared, followers are ended, and clients that know the old incarnation get STORE_RESET and stop. A
process that *embeds* a committer runs pipelines and knows that its data should exist; there, an
empty schema would hide a catastrophe, so it has no guard and stays failed.

The operation that met the loss is not repeated here: its caller may have meant the old store, and
a first append would succeed in the new one. It is answered STORE_RESET.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.consensus.backend import (
    Backend,
    Commit,
    LivePage,
    Position,
    RevisionPage,
    ScanPage,
    Traits,
    Unit,
)
from penstock.consensus.committer.backing import ConnectionCounts, Pooled
from penstock.consensus.store import (
    SCAN_ALL,
    ConsensusError,
    Determinate,
    ErrorKind,
    VersionedData,
    cause_chain,
)
from penstock.errors import PenstockError
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.committer")

T = TypeVar("T")

Recover = Callable[[Backend, ConsensusError], Awaitable[Backend]]


class SchemaGuard:
    """A backend whose schema may be lost; `recover` returns a new one, or raises."""

    def __init__(self, inner: Backend, recover: Recover) -> None:
        self.traits: Traits = inner.traits
        self.url: str = inner.url
        self.inner = inner
        self._recover = recover
        self._recovering = asyncio.Lock()

    @property
    def pool(self) -> ConnectionCounts | None:
        return self.inner.pool if isinstance(self.inner, Pooled) else None

    async def incarnation(self) -> bytes:
        return await self._guarded(lambda b: b.incarnation())

    async def revision(self) -> int:
        return await self._guarded(lambda b: b.revision())

    async def list_page(self, prefix: str, after: str) -> list[str]:
        return await self.inner.list_page(prefix, after)  # administrative: looking heals nothing

    async def head(self, key: str) -> VersionedData | None:
        return await self._guarded(lambda b: b.head(key))

    async def heads(self, keys: Sequence[str]) -> dict[str, int]:
        return await self._guarded(lambda b: b.heads(keys))

    async def heads_under(self, prefix: str) -> tuple[int, dict[str, int]]:
        return await self._guarded(lambda b: b.heads_under(prefix))

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int = SCAN_ALL
    ) -> ScanPage:
        return await self._guarded(lambda b: b.scan(key, from_, limit, bytes_max=bytes_max))

    async def floor(self, key: str) -> int:
        return await self._guarded(lambda b: b.floor(key))

    async def commit(self, units: Sequence[Unit]) -> Commit:
        return await self._guarded(lambda b: b.commit(units))

    async def truncate(self, key: str, seqno: int) -> int | None:
        return await self._guarded(lambda b: b.truncate(key, seqno))

    async def entries_since(self, prefix: str, revision: int) -> RevisionPage:
        return await self._guarded(lambda b: b.entries_since(prefix, revision))

    async def live_page(self, prefix: str, after: Position) -> LivePage:
        return await self._guarded(lambda b: b.live_page(prefix, after))

    async def close(self) -> None:
        await self.inner.close()

    async def _guarded(self, call: Callable[[Backend], Awaitable[T]]) -> T:
        used = self.inner
        try:
            return await call(used)
        except ConsensusError as error:
            if error.kind is not ErrorKind.UNDEFINED_TABLE:
                raise
            async with self._recovering:
                if self.inner is used:  # nobody has recovered meanwhile
                    self.inner = await self._recover(used, error)
            what = "the schema was missing and has been created again; its contents are gone"
            raise Determinate(ErrorKind.STORE_RESET, what) from error


class Healer:
    """Creates a lost schema again, by opening the store once more."""

    def __init__(
        self, reopen: Callable[[], Awaitable[Backend]], on_healed: Callable[[bytes], None]
    ) -> None:
        self._reopen = reopen
        self._on_healed = on_healed

    async def __call__(self, lost: Backend, error: ConsensusError) -> Backend:
        if await _still_known(lost):
            # Only a part is gone. To fill it up with empty tables would be a lie about the rest.
            log.error("part of the consensus schema is missing", extra=fields(error=error.message))
            raise error
        try:
            healed = await self._reopen()
            incarnation = await healed.incarnation()
        except (PenstockError, OSError) as failure:
            log.error(  # noqa: TRY400 - the chain says it
                "consensus schema is missing and cannot be created",
                extra=fields(error=cause_chain(failure)),
            )
            raise error from failure
        log.error(
            "consensus schema was missing; recreated, previous contents are gone",
            extra=fields(url=healed.url, incarnation=incarnation, error=error.message),
        )
        self._on_healed(incarnation)
        await lost.close()
        return healed


async def _still_known(backend: Backend) -> bool:
    try:
        await backend.incarnation()
    except ConsensusError:
        return False
    return True
