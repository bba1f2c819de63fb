"""PURE: the statistics document of a transaction.

It is published as part of its own transaction, and counts when that does: a transaction that is
replayed is counted once. The document is an envelope, alike for all kinds of tasks, around one
section that the kind fills (`materialize/stats.py`); `runtime/ops.py` has its schema.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from penstock.model.clock import Clock, duration, elapsed, to_unix
from penstock.model.json_order import Json
from penstock.runtime.ops import TaskKindName

_SECOND: Final = duration(1)

_LEAST_S: Final = 0.001
"""Seconds of a phase that are worth a word."""

Section = Literal["capture", "derive", "materialize"]
"""The member of the document that a kind fills."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Documents and their bytes."""

    docs: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.docs + other.docs, self.bytes + other.bytes)

    def __bool__(self) -> bool:
        return self.docs > 0 or self.bytes > 0

    def to_json(self) -> dict[str, Json]:
        return {"docsTotal": self.docs, "bytesTotal": self.bytes}


NONE: Final = Counts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardName:
    """The task, and the part of it, that a document is about."""

    kind: TaskKindName
    name: str
    build: str
    key_begin: int = 0
    r_clock_begin: int = 0


def transaction_stats(
    shard: ShardName, *, open_clock: Clock, close_clock: Clock, section: Section, content: Json
) -> dict[str, Json]:
    """Return the document of one transaction. Its UUID is the publisher's to stamp."""
    return {
        "shard": {
            "kind": shard.kind,
            "name": shard.name,
            "keyBegin": f"{shard.key_begin:08x}",
            "rClockBegin": f"{shard.r_clock_begin:08x}",
            "build": shard.build,
        },
        "ts": rfc3339(open_clock),
        "openSecondsTotal": elapsed(close_clock, open_clock) / _SECOND,
        "txnCount": 1,
        section: content,
    }


def with_phases(document: dict[str, Json], seconds: Mapping[str, float]) -> dict[str, Json]:
    """Return the document with where the time went since the one before: by phase, in seconds."""
    phases: dict[str, Json] = {
        phase: round(lasted, 3) for phase, lasted in seconds.items() if lasted >= _LEAST_S
    }
    return {**document, "phases": phases} if phases else document


def rfc3339(clock: Clock) -> str:
    """Return an instant in UTC, to the nanosecond."""
    seconds, nanos = to_unix(clock)
    instant = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{instant:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"
