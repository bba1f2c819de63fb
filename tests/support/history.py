"""What clients of a consensus store did and saw: the history that a checker judges.

Times are `time.monotonic_ns()`, which all processes of one machine share. The payload of every
write is a unique token, so an entry identifies the operation that wrote it. `msgspec` encodes every
type here, so histories can cross processes.
"""

from __future__ import annotations

import enum

import msgspec


class Outcome(enum.Enum):
    """The answer that the client got."""

    OK = "ok"
    MISMATCH = "mismatch"
    """Of a compare-and-set: lost. Of a truncation: above the head."""
    FAILED = "failed"
    """A determinate error: it did not happen."""
    UNKNOWN = "unknown"
    """It may have happened, or may yet."""


class Version(msgspec.Struct, frozen=True, array_like=True):
    """An entry as a client read it; revision 0 if unknown."""

    seqno: int
    token: str
    revision: int = 0


class Cas(msgspec.Struct, frozen=True, kw_only=True, tag="cas"):
    seqno: int
    token: str
    batch: str | None = None
    """The name that all elements of one atomic batch share."""


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    fresh: bool
    seen: Version | None = None


class Scan(msgspec.Struct, frozen=True, kw_only=True, tag="scan"):
    from_: int
    limit: int | None = None
    seen: tuple[Version, ...] = ()

    @property
    def complete(self) -> bool:
        """True if the scan reached the head, and was not cut short by its limit."""
        return self.limit is None or len(self.seen) < self.limit


class Truncate(msgspec.Struct, frozen=True, kw_only=True, tag="truncate"):
    seqno: int
    deleted: int | None = None


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on one key, from its invocation to its answer."""

    process: str
    key: str
    invoke: int
    back: int
    outcome: Outcome
    call: Cas | Head | Scan | Truncate
    via: str = ""
    """The committer that it used; stale reads are judged per committer."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that one subscription delivered, from `from_` until its end or a resync."""

    process: str
    key: str
    from_: int
    seen: tuple[Version, ...]
    waited_for: int | None = None
    """The committed head at the time by which the subscriber must have received everything."""
