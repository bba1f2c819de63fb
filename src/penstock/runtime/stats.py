"""PURE: the statistics document of a transaction.

It is published as part of its own transaction, and counts when that does: a transaction that is
replayed is counted once. Names are those of a reduction: existing documents are its *left* side,
new ones its *right*, and what is stored is the outcome.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from penstock.model.clock import NEVER, Clock, delta, duration, to_unix
from penstock.model.json_order import Json

_SECOND: Final = duration(1)


@dataclass(frozen=True, slots=True)
class Counts:
    """Documents and their bytes."""

    docs: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.docs + other.docs, self.bytes + other.bytes)

    def __bool__(self) -> bool:
        return self.docs > 0 or self.bytes > 0


NONE: Final = Counts()


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingStats:
    """What one transaction did for one binding, and how far that binding is behind."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardName:
    """Who says so."""

    kind: Literal["capture", "derivation", "materialization"]
    name: str
    build: str
    key_begin: int = 0
    r_clock_begin: int = 0


def materialization_stats(
    shard: ShardName, *, open_clock: Clock, close_clock: Clock, bindings: Iterable[BindingStats]
) -> dict[str, Json]:
    """The document of one transaction. Bindings of one collection add up; idle ones are left out.

    The publisher stamps it; its UUID is no part of the document.
    """
    collections: dict[str, list[BindingStats]] = {}
    for binding in bindings:
        collections.setdefault(binding.collection, []).append(binding)
    return {
        "shard": {
            "kind": shard.kind,
            "name": shard.name,
            "keyBegin": f"{shard.key_begin:08x}",
            "rClockBegin": f"{shard.r_clock_begin:08x}",
            "build": shard.build,
        },
        "ts": rfc3339(open_clock),
        "openSecondsTotal": delta(close_clock, open_clock) / _SECOND,
        "txnCount": 1,
        "materialize": {
            name: _collection(parts)
            for name, parts in sorted(collections.items())
            if not all(part.is_idle for part in parts)
        },
    }


def _collection(bindings: list[BindingStats]) -> dict[str, Json]:
    sides = {
        "left": sum((binding.loaded for binding in bindings), NONE),
        "right": sum((binding.sourced for binding in bindings), NONE),
        "out": sum((binding.stored for binding in bindings), NONE),
    }
    stats: dict[str, Json] = {
        side: {"docsTotal": counts.docs, "bytesTotal": counts.bytes}
        for side, counts in sides.items()
        if counts
    }
    stats["bytesBehind"] = sum(max(binding.bytes_behind, 0) for binding in bindings)
    last_source = max(binding.last_source for binding in bindings)
    if last_source != NEVER:
        stats["lastSourcePublishedAt"] = rfc3339(last_source)
    return stats


def rfc3339(clock: Clock) -> str:
    """An instant in UTC, to the nanosecond."""
    seconds, nanos = to_unix(clock)
    instant = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{instant:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"
