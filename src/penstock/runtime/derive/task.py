"""PURE: a derivation as its leader's machine sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.model.clock import Clock
from penstock.runtime.close_policy import ClosePolicy
from penstock.runtime.stats import ShardName

KIND: Final = "derivation"

_DEFAULT_POLICY: Final = ClosePolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderTransform:
    """A transform: addressed by index here, and by its state key in storage."""

    name: str
    source: str
    """The collection that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveLeaderTask:
    """A derivation as its leader's machine sees it; it does not change during a session."""

    name: str
    """That of the collection it derives."""
    build: str = ""
    transforms: tuple[LeaderTransform, ...]
    shards: int = 1
    policy: ClosePolicy = _DEFAULT_POLICY
    transactions_max: int = 0
    """After which the session stops; zero is never."""

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError("a task has a shard at least")

    @property
    def shard_name(self) -> ShardName:
        return ShardName(kind=KIND, name=self.name, build=self.build)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveMemory:
    """Facts that a session remembers from one transaction to the next."""

    last_close: Clock
    last_source_clocks: Mapping[str, Clock] = field(default_factory=dict)
    """Newest source document ever reported, by collection."""
    bytes_behind: Mapping[int, int] = field(default_factory=dict)
    """Gauge by transform, since the session began."""
