"""PURE: the section of a materialization in the statistics document of a transaction.

Names are those of a reduction: existing documents are its *left* side, new ones its *right*, and
what is stored is the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.model.clock import NEVER, Clock
from penstock.model.json_order import Json
from penstock.runtime.stats import NONE, Counts, rfc3339


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingStats:
    """One transaction's counts for one binding, and how far that binding is behind."""

    collection: str
    loaded: Counts = NONE
    sourced: Counts = NONE
    stored: Counts = NONE
    bytes_behind: int = 0
    """Running, over the session."""
    last_source: Clock = NEVER
    """Newest source document, in this transaction or any that was committed before."""

    @property
    def is_idle(self) -> bool:
        return not (self.loaded or self.sourced or self.stored)


def by_collection(bindings: Iterable[BindingStats]) -> dict[str, Json]:
    """Return the section. Bindings of one collection add up; idle ones are left out."""
    collections: dict[str, list[BindingStats]] = {}
    for binding in bindings:
        collections.setdefault(binding.collection, []).append(binding)
    return {
        name: _collection(parts)
        for name, parts in sorted(collections.items())
        if not all(part.is_idle for part in parts)
    }


def _collection(bindings: list[BindingStats]) -> dict[str, Json]:
    sides = {
        "left": sum((binding.loaded for binding in bindings), NONE),
        "right": sum((binding.sourced for binding in bindings), NONE),
        "out": sum((binding.stored for binding in bindings), NONE),
    }
    stats: dict[str, Json] = {side: counts.to_json() for side, counts in sides.items() if counts}
    stats["bytesBehind"] = sum(max(binding.bytes_behind, 0) for binding in bindings)
    last_source = max(binding.last_source for binding in bindings)
    if last_source != NEVER:
        stats["lastSourcePublishedAt"] = rfc3339(last_source)
    return stats
