"""How a committer behaves; the defaults are those of `penstock persistd`."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.consensus.coalesce import GroupCommitOptions
from penstock.consensus.committer.admission import Limits
from penstock.consensus.committer.streams import StreamOptions
from penstock.consensus.store import ENTRY_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitterOptions:
    """What an operator may choose."""

    cache: bool | None = None
    """Answer heads from memory; None: where the backend's traits recommend it."""
    cached_shards_max: int = 10_000
    cached_bytes_max: int = 256 << 20
    entry_bytes_max: int = ENTRY_BYTES_MAX
    group: GroupCommitOptions = field(default_factory=GroupCommitOptions)
    limits: Limits = field(default_factory=Limits)
    streams: StreamOptions = field(default_factory=StreamOptions)
    verify_s: float = 10.0
    """How often to look whether the store is there, and still the same, if nobody else asks it."""
