"""Bytes read and bytes remaining, as deltas that add up.

Offsets count rows, but people ask for bytes. A fragment's bytes are spread evenly over its rows;
ACKs are rows without bytes.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from msgspec import Struct
from msgspec.structs import replace


def byte_position(
    offset: int, *, first_offset: int, rows: int, first_byte: int, size_bytes: int
) -> int:
    """Return where the row at `offset` begins, in the fragment that holds it or ends there."""
    if not 0 <= offset - first_offset <= rows:
        raise ValueError(f"offset {offset} is not in the {rows} rows from {first_offset}")
    return first_byte + (offset - first_offset) * size_bytes // max(rows, 1)


class ByteDeltas(NamedTuple):
    """Changes since the last report: bytes read, and growth of the distance to the head."""

    read: int
    behind: int


class ByteProgress(Struct, frozen=True, kw_only=True, gc=False):
    """Byte positions of a read and of its journal's head, now and as last reported.

    The deltas of successive reports sum to the position of the read. Reports may be late, but none
    is lost, so a journal without changes is simply left out of a report.
    """

    read: int
    head: int
    reported_read: int
    reported_head: int

    @classmethod
    def starting_at(cls, position: int) -> Self:
        """A read that begins here, with nothing known to follow."""
        return cls(read=position, head=position, reported_read=position, reported_head=position)

    def moved(self, *, read: int, head: int) -> ByteProgress:
        """Return the same read at later positions."""
        return replace(self, read=read, head=head)

    def report(self) -> tuple[ByteDeltas, ByteProgress]:
        """Return the deltas to report, and the progress after reporting them."""
        behind, was_behind = self.head - self.read, self.reported_head - self.reported_read
        return (
            ByteDeltas(read=self.read - self.reported_read, behind=behind - was_behind),
            replace(self, reported_read=self.read, reported_head=self.head),
        )
