"""Clocks, producers and flags: when a document was written, by which writer, in what transaction.

Every document carries a version 1 UUID that is three things at once:

    04afc000-833b-11ee-bc01-010000000001
    └──────┬──────────┘│└┬─┘└────┬─────┘
      clock bits 4..63 │ │    producer: one incarnation of one writer, 48 bits
           clock bits 0..3, then 10 flag bits

A **clock** counts 100 ns since 1582-10-15 in its upper 60 bits; its low 4 bits count documents
within one such interval. The clocks of one producer in one journal only ever grow, which is what
makes duplicates recognizable. Across producers they are wall time: good for ordering reads, and for
nothing else.

Clocks and producers are plain integers, because they are compared by the million, live in Spark
`BIGINT` columns and must sort there as they do here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NewType, Self
from uuid import UUID

from penstock.errors import PenstockError

Clock = NewType("Clock", int)
"""An instant or a duration, in 64 bits."""

NEVER: Final = Clock(0)
"""Before every instant; no document may carry it."""

CLOCK_MAX: Final = Clock((1 << 63) - 1)
"""Stands for "no upper bound": the greatest clock that fits a Spark `BIGINT`, in the year 3409."""

_CLOCK_LIMIT: Final = 1 << 64
_EPOCH: Final = 122_192_928_000_000_000  # 100 ns intervals from 1582-10-15 to 1970-01-01
_INTERVALS_PER_SECOND: Final = 10_000_000
_MICROSECOND: Final = 160


def _checked(clock: int) -> Clock:
    if not 0 <= clock < _CLOCK_LIMIT:
        raise ValueError(f"clock {clock:#x} does not fit 64 bits")
    return Clock(clock)


def from_unix(seconds: int, nanos: int = 0) -> Clock:
    """Convert Unix time to a clock, with its counter at zero."""
    return _checked(((seconds * _INTERVALS_PER_SECOND + nanos // 100) + _EPOCH) << 4)


def from_rfc3339(text: str) -> Clock:
    """Return the first clock of a time such as 2026-01-31T08:00:00Z; raises `ValueError`.

    A time out of range becomes `NEVER` or `CLOCK_MAX`.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("the time has no zone")
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    seconds = since.days * 86_400 + since.seconds
    try:
        return min(from_unix(seconds, since.microseconds * 1_000), CLOCK_MAX)
    except ValueError:
        return NEVER if seconds < 0 else CLOCK_MAX


UNIX_EPOCH: Final = from_unix(0)


def to_unix(clock: Clock) -> tuple[int, int]:
    """Convert to seconds and nanoseconds of Unix time; the counter becomes steps of 4 ns.

    Clocks before 1970, including zero, map to the epoch.
    """
    seconds, intervals = divmod(max((clock >> 4) - _EPOCH, 0), _INTERVALS_PER_SECOND)
    return seconds, intervals * 100 + ((clock & 0xF) << 2)


def duration(seconds: int, nanos: int = 0) -> Clock:
    """Return a length of time, to add to clocks or to compare with `elapsed`."""
    return _checked((seconds * _INTERVALS_PER_SECOND + nanos // 100) << 4)


def catch_up(clock: Clock, other: Clock) -> Clock:
    """Return the later of a clock and `other`, usually wall time: a clock never goes back."""
    return max(clock, other)


def tick(clock: Clock) -> Clock:
    """Return the next microsecond: strictly later, whatever wall time says."""
    return _checked(clock + _MICROSECOND)


def elapsed(later: Clock, earlier: Clock) -> Clock:
    """Return the time from `earlier` to `later`; zero if `later` is not later."""
    return Clock(max(later - earlier, 0))


def rotate(clock: Clock) -> int:
    """Return the r-clock of a clock: neighboring clocks are spread evenly over `[0, 2^32)`.

    The fastest-moving bits become the highest, so shards that split this range share the documents
    of any moment. This is the definition; `shuffle.route` has the Spark expression.
    """
    bits = ((clock >> 4) ^ (clock & 0xF)) & 0xFFFFFFFF
    bits = (bits & 0x55555555) << 1 | (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) << 2 | (bits >> 2) & 0x33333333
    bits = (bits & 0x0F0F0F0F) << 4 | (bits >> 4) & 0x0F0F0F0F
    bits = (bits & 0x00FF00FF) << 8 | (bits >> 8) & 0x00FF00FF
    return (bits & 0x0000FFFF) << 16 | bits >> 16


class Producer(int):
    """One incarnation of a writer: 48 bits, retired with its process and never reused.

    An integer, so that it sorts as its bytes do in Python, numpy and Spark. The multicast bit is
    always set: no network card has such an address, so a producer is never mistaken for one.
    """

    __slots__ = ()

    MULTICAST: Final = 1 << 40

    def __new__(cls, value: int) -> Self:
        if not 0 <= value < 1 << 48:
            raise ValueError(f"producer {value:#x} does not fit 48 bits")
        if not value & cls.MULTICAST:
            raise ValueError(f"producer {value:012x} lacks the multicast bit")
        return super().__new__(cls, value)

    @classmethod
    def from_random(cls, entropy: bytes) -> Self:
        """Make a producer of 6 random bytes, of which 47 bits count."""
        if len(entropy) != 6:
            raise ValueError(f"a producer is made of 6 random bytes, not {len(entropy)}")
        return cls(int.from_bytes(entropy, "big") | cls.MULTICAST)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse 12 lower-case hex digits."""
        if len(text) != 12 or not _HEX_DIGITS.issuperset(text):
            raise ValueError(f"a producer is 12 lower-case hex digits, not {text!r}")
        return cls(int(text, 16))

    @property
    def packed(self) -> bytes:
        """The 6 bytes that end a document's UUID."""
        return self.to_bytes(6, "big")

    def __str__(self) -> str:
        return f"{int(self):012x}"

    def __repr__(self) -> str:
        return f"Producer(0x{self})"


_HEX_DIGITS: Final = frozenset("0123456789abcdef")


class Flag(enum.IntEnum):
    """A document's role in its producer's transaction: the low two flag bits."""

    OUTSIDE_TXN = 0x0
    """A transaction of its own."""
    CONTINUE_TXN = 0x1
    """Part of a transaction, pending until an ACK commits it."""
    ACK_TXN = 0x2
    """Closes what its producer wrote to this journal. Holds no data."""


CONTROL: Final = 0x4
"""Reserved for documents that steer readers; they are sequenced as OUTSIDE_TXN."""

FLAGS_MAX: Final = 0x3FF


class InvalidDocumentId(PenstockError):
    """A UUID that no Penstock publisher can have written."""


def kind_of(flags: int, where: str | None = None) -> Flag:
    """Return the role in a flag word, whatever its other bits are."""
    if flags & 3 == 3:
        raise InvalidDocumentId(
            f"document flags {flags:#x} say both CONTINUE and ACK",
            where=where,
            why="a document is outside any transaction, part of one, or closes one",
            fix="find what wrote this document; its journal cannot be sequenced past it",
        )
    return Flag(flags & 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentId:
    """The three values in a document's UUID. `clock` may be any of 64 bits, `flags` any of 10."""

    producer: Producer
    clock: Clock
    flags: int

    def __post_init__(self) -> None:
        _checked(self.clock)
        if not 0 <= self.flags <= FLAGS_MAX:
            raise ValueError(f"document flags {self.flags:#x} do not fit 10 bits")

    @property
    def uuid(self) -> UUID:
        """The RFC 4122 version 1 UUID, with the counter and flags in its clock sequence."""
        clock = self.clock
        return UUID(
            int=(clock >> 4 & 0xFFFFFFFF) << 96
            | (clock >> 36 & 0xFFFF) << 80
            | (0x1000 | clock >> 52) << 64
            | (0x8000 | (clock & 0xF) << 10 | self.flags) << 48
            | self.producer
        )

    @classmethod
    def parse(cls, text: str | UUID, where: str | None = None) -> Self:
        """Parse a document's UUID. `where`, the journal and offset, is for the error."""
        try:
            value = text if isinstance(text, UUID) else UUID(text)
        except ValueError as error:
            raise InvalidDocumentId(
                f"document id {text!r} is not a UUID", where=where, why=str(error)
            ) from None
        if value.version != 1:
            raise InvalidDocumentId(
                f"document id {value} is not a version 1 UUID",
                where=where,
                why="the document's producer, clock and flags are read from its UUID",
                fix="write to journals with a publisher, which stamps documents",
            )
        try:
            producer = Producer(value.node)
        except ValueError as error:
            raise InvalidDocumentId(
                f"document id {value} was not made by a publisher", where=where, why=str(error)
            ) from None
        bits = value.int
        clock = (bits >> 64 & 0xFFF) << 52 | (bits >> 80 & 0xFFFF) << 36 | (bits >> 96) << 4
        return cls(
            producer=producer, clock=Clock(clock | bits >> 58 & 0xF), flags=bits >> 48 & FLAGS_MAX
        )
