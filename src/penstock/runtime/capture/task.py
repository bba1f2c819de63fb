"""PURE: a capture as its leader's machine sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.model.clock import Clock
from penstock.runtime.close_policy import ClosePolicy
from penstock.runtime.stats import ShardName

KIND: Final = "capture"

_DEFAULT_POLICY: Final = ClosePolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLeaderTask:
    """A capture as its leader's machine sees it; it does not change during a session."""

    name: str
    build: str = ""
    targets: tuple[str, ...]
    """The collections that it fills, by binding."""
    policy: ClosePolicy = _DEFAULT_POLICY
    transactions_max: int = 0
    """After which the session stops; zero is never."""

    @property
    def shard_name(self) -> ShardName:
        return ShardName(kind=KIND, name=self.name, build=self.build)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureMemory:
    """Facts that a session remembers from one transaction to the next."""

    last_close: Clock
