"""What clients of a consensus store did and saw: the evidence that a checker judges.

Times are `time.monotonic_ns()`, which all processes of one machine share. Every write has a unique
token as its payload, so whoever reads an entry knows which operation wrote it. All of it can cross
processes: `msgspec` encodes every type here.
"""

from __future__ import annotations

import enum

import msgspec


class Outcome(enum.Enum):
    """What the client was told."""

    OK = "ok"
    MISMATCH = "mismatch"
    """Compare-and-set: lost. Truncation: above the head."""
    FAILED = "failed"
    """A determinate error: it did not happen."""
    UNKNOWN = "unknown"
    """It may have happened, or may yet."""


class Version(msgspec.Struct, frozen=True, array_like=True):
    """An entry, as somebody read it; revision 0 if not known."""

    seqno: int
    token: str
    revision: int = 0


class Cas(msgspec.Struct, frozen=True, kw_only=True, tag="cas"):
    seqno: int
    token: str
    batch: str | None = None
    """Elements of one atomic batch share this name."""


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    fresh: bool
    seen: Version | None = None


class Scan(msgspec.Struct, frozen=True, kw_only=True, tag="scan"):
    from_: int
    limit: int | None = None
    seen: tuple[Version, ...] = ()

    @property
    def complete(self) -> bool:
        """It reached the head: the limit did not cut it short."""
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
    """The committer it went through; stale reads are judged per committer."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """What one subscription delivered, from `from_` until it ended or was resynchronised."""

    process: str
    key: str
    from_: int
    seen: tuple[Version, ...]
    waited_for: int | None = None
    """The head that was committed when the subscriber had been given all the time it needs."""
