"""One producer's progress in one journal: the atom of a frontier, and its join."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer

OBSERVED_FLOOR: Final = Clock(1)
"""The last commit of a producer that was seen, has an open span, and never committed.

Without it, such an entry at row 0 would look like one known only from a hint.
"""

OFFSET_MAX: Final = (1 << 63) - 1


class ProducerFrontier(Struct, frozen=True, kw_only=True, gc=False):
    """The state of a producer at the cut of a frontier.

    The sign of `offset` says whether a span is open there: a positive offset is the begin of the
    open span, a negative one is minus the end of the last close. Zero is a span open at row 0 if
    `last_commit` is `OBSERVED_FLOOR` (a span at row 0 has no commit before it), else no position.
    """

    producer: Producer
    last_commit: Clock
    hinted_commit: Clock = NEVER
    """A commit announced by another journal; zero if none. Unresolved if above `last_commit`."""
    offset: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.last_commit <= CLOCK_MAX and 0 <= self.hinted_commit <= CLOCK_MAX):
            raise ValueError(f"clocks of producer {self.producer} are not within 0..CLOCK_MAX")
        if not -OFFSET_MAX <= self.offset <= OFFSET_MAX:
            raise ValueError(f"offset {self.offset} of producer {self.producer} is out of range")

    @property
    def is_open(self) -> bool:
        """True if the producer has an open span at the cut."""
        return self.offset > 0 or (self.offset == 0 and self.last_commit == OBSERVED_FLOOR)

    @property
    def is_unresolved(self) -> bool:
        """True if a hinted commit has not been read yet."""
        return self.hinted_commit > self.last_commit

    def reduce(self, other: ProducerFrontier) -> ProducerFrontier:
        """Join two entries of one producer: commutative, associative and idempotent.

        The furthest position wins. At equal distance an open begin beats a closed end, because the
        next span usually begins exactly where the last transaction ended. A later commit closes the
        begin: it came from a resolved hint.
        """
        if self.producer != other.producer:
            raise ValueError(
                f"entries of producers {self.producer} and {other.producer} do not join"
            )
        last_commit = max(self.last_commit, other.last_commit)
        furthest = max(abs(self.offset), abs(other.offset))
        stays_open = any(
            entry.offset == furthest and entry.last_commit == last_commit for entry in (self, other)
        )
        return ProducerFrontier(
            producer=self.producer,
            last_commit=last_commit,
            hinted_commit=max(self.hinted_commit, other.hinted_commit),
            offset=furthest if stays_open else -furthest,
        )
