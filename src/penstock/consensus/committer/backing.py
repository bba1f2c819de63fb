"""The backend as the committer uses it: timed, watched for failure, and observed.

`Backing` wraps a backend in the backend's own contract. Group commit stands on top of it, so every
transaction passes through `commit` here, with all its units and the revision they share: this is
where caches and followers learn of it, before any caller is answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from penstock.consensus.backend import (
    PAGE_BYTES,
    Backend,
    CommitOutcome,
    LivePage,
    Position,
    RevisionPage,
    ScanPage,
    Traits,
    Unit,
)
from penstock.consensus.committer.metrics import CommitterMetrics
from penstock.consensus.committer.recovery import GONE
from penstock.consensus.store import (
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
)
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.committer")

T = TypeVar("T")


class ConnectionCounts(Protocol):
    """The size of a pool of database connections."""

    @property
    def open_connections(self) -> int: ...

    @property
    def idle_connections(self) -> int: ...


@runtime_checkable
class Pooled(Protocol):
    """A backend that may have a pool of connections."""

    @property
    def pool(self) -> ConnectionCounts | None: ...


class Backing:
    """Measures every call of `inner` and reports every transaction to `observe`.

    A store that turns out to be gone is reported to `lost`, which returns the error to answer with.
    """

    def __init__(
        self,
        inner: Backend,
        metrics: CommitterMetrics,
        *,
        observe: Callable[[Sequence[Unit]], Callable[[CommitOutcome], None]],
        took: Callable[[float], None],
        lost: Callable[[ConsensusError], Awaitable[ConsensusError]],
    ) -> None:
        self.traits: Traits = inner.traits
        self.url: str = inner.url
        self.incarnation: bytes = inner.incarnation
        self._inner = inner
        self._metrics = metrics
        self._observe = observe
        self._took = took
        self._lost = lost
        self.answered_at = 0.0
        """When the backend last answered, by the monotonic clock; a refusal is an answer."""

    async def revision(self) -> int:
        return await self._call("revision", self._inner.revision())

    async def list_page(self, prefix: str, after: str) -> list[str]:
        # Administrative: it must not trigger a recovery.
        return await self._timed("list_keys", self._inner.list_page(prefix, after))

    async def head(self, key: str) -> VersionedData | None:
        return await self._call("head", self._inner.head(key))

    async def heads(self, keys: Sequence[str]) -> dict[str, int]:
        return await self._call("heads", self._inner.heads(keys))

    async def heads_under(self, prefix: str) -> tuple[int, dict[str, int]]:
        return await self._call("watch", self._inner.heads_under(prefix))

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int = PAGE_BYTES
    ) -> ScanPage:
        return await self._call("scan", self._inner.scan(key, from_, limit, bytes_max=bytes_max))

    async def floor(self, key: str) -> int:
        return await self._call("scan", self._inner.floor(key))

    async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
        settled = self._observe(units)
        started = time.perf_counter()
        try:
            commit = await self._call("cas", self._inner.commit(units))
        except Determinate:
            raise
        except Exception:  # a backend that breaks its promise: nothing is known
            unknown = Indeterminate(ErrorKind.INTERNAL, "the backend failed during a commit")
            settled(CommitOutcome(revision=None, outcomes=(unknown,) * len(units)))
            raise
        took = time.perf_counter() - started
        self._metrics.batch_size.observe(len(units))
        self._metrics.batch_seconds.observe(took)
        if commit.revision is None:
            for outcome in commit.outcomes:
                if isinstance(outcome, ConsensusError):
                    self._failed("cas", outcome)
                    break
        settled(commit)
        return commit

    async def truncate(self, key: str, seqno: int) -> int | None:
        return await self._call("truncate", self._inner.truncate(key, seqno))

    async def entries_since(self, prefix: str, revision: int) -> RevisionPage:
        return await self._call("watch", self._inner.entries_since(prefix, revision))

    async def live_page(self, prefix: str, after: Position) -> LivePage:
        return await self._call("snapshot", self._inner.live_page(prefix, after))

    async def close(self) -> None:
        await self._inner.close()

    def connections(self) -> dict[str, int]:
        """Return the number of database connections by state; empty without a pool."""
        pool = self._inner.pool if isinstance(self._inner, Pooled) else None
        if pool is None:
            return {}
        return {
            "open": pool.open_connections,
            "idle": pool.idle_connections,
            "busy": pool.open_connections - pool.idle_connections,
        }

    async def _call(self, op: str, call: Awaitable[T]) -> T:
        try:
            return await self._timed(op, call)
        except Determinate as error:
            if error.kind not in GONE or (answer := await self._lost(error)) is error:
                raise
            raise answer from error

    async def _timed(self, op: str, call: Awaitable[T]) -> T:
        started = time.perf_counter()
        try:
            answer = await call
        except ConsensusError as error:
            self._failed(op, error)
            raise
        finally:
            took = time.perf_counter() - started
            self._metrics.backing_seconds.labels(op).observe(took)
            self._took(took)
        self._answered()
        return answer

    def _answered(self) -> None:
        self.answered_at = time.monotonic()
        self._metrics.up.set(1)

    def _failed(self, op: str, error: ConsensusError) -> None:
        """Warn of unknown outcomes only: conflicts are routine, and would flood the log."""
        if isinstance(error, Indeterminate):
            self._metrics.up.set(0)
            log.warning("backend call failed", extra=fields(op=op, error=cause_chain(error)))
        else:
            self._answered()
            log.debug("backend call refused", extra=fields(op=op, error=cause_chain(error)))
