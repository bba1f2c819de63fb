"""PURE: how far topics were read, what there is to read, and when the two do not fit.

An offset is a position. Between two of them there may be fewer records than numbers: transactions
leave markers, aborted ones leave records that nobody may see, and compaction takes records away. So
a cursor is the offset to go on from, and an end is the offset before which everything is decided
(the last stable offset: a transaction that is still open begins there).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from penstock.model.json_order import Json

K = TypeVar("K")

Start = Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The part of a partition that can be read: from `begin`, up to `end`."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLook:
    """A topic as its cluster describes it."""

    topic_id: str
    """Of this topic, and of no other one that has or had its name."""
    partitions: Mapping[int, Bounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a topic was read: the offset to go on from, by partition."""

    topic_id: str
    partitions: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, state: Any) -> Cursor | None:  # noqa: ANN401 - JSON
        """Read the part of a state that is one binding's; None if it has none."""
        if state is None:
            return None
        offsets = {int(at): int(offset) for at, offset in state["partitions"].items()}
        return cls(topic_id=state["topicId"], partitions=offsets)

    def patch(self, before: Cursor | None) -> Json:
        """Return how the state changes from `before` to this; None if it does not."""
        known = before.partitions if before is not None else {}
        moved: dict[str, Json] = {
            str(at): offset for at, offset in self.partitions.items() if known.get(at) != offset
        }
        if before is not None and not moved and before.topic_id == self.topic_id:
            return None
        return {"topicId": self.topic_id, "partitions": moved}

    def lags(self, look: TopicLook) -> dict[int, int]:
        """Return the distance to the end of each partition that is not at its end."""
        return {
            at: lag
            for at, bounds in look.partitions.items()
            if (lag := bounds.end - self.partitions.get(at, 0)) > 0
        }


# ------------------------------------------------------------------------ cursors and their topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Offsets that are gone, and were not read."""

    partition: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"partition {self.partition}: {self.begin} to {self.end - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """The cursor can be read from, past the gaps."""

    cursor: Cursor
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recreated:
    """The topic is another one than the cursor's."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsBefore:
    """The topic ends before the cursor: it has lost records that were read."""

    partition: int
    cursor: int
    end: int


Verdict: TypeAlias = Fits | Recreated | EndsBefore


def reconcile(cursor: Cursor | None, look: TopicLook, start: Start) -> Verdict:
    """Compare a cursor with its topic.

    Without a cursor, reading begins where `start` says. A partition that a cursor does not know is
    new, and is read from offset 0, whatever `start` says: all of it came after the beginning.
    """
    if cursor is None:
        begin = {
            at: bounds.begin if start == "earliest" else bounds.end
            for at, bounds in look.partitions.items()
        }
        return Fits(cursor=Cursor(topic_id=look.topic_id, partitions=begin))
    if cursor.topic_id != look.topic_id:
        return Recreated(why=f"its id was {cursor.topic_id}, and is {look.topic_id} now")
    if missing := sorted(cursor.partitions.keys() - look.partitions.keys()):
        return Recreated(why=f"it had a partition {missing[0]}, and has none now")
    offsets, gaps = dict[int, int](), list[Gap]()
    for at, bounds in sorted(look.partitions.items()):
        offset = cursor.partitions.get(at, 0)
        if bounds.end < offset:
            return EndsBefore(partition=at, cursor=offset, end=bounds.end)
        if bounds.begin > offset:
            gaps.append(Gap(partition=at, begin=offset, end=bounds.begin))
        offsets[at] = max(offset, bounds.begin)
    moved = Cursor(topic_id=look.topic_id, partitions=offsets)
    return Fits(cursor=moved, gaps=tuple(gaps))


# ------------------------------------------------------------------------------------------ ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Some offsets of a partition, `end` not included."""

    partition: int
    begin: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def split(self, count_max: int) -> Iterator[Range]:
        """Yield consecutive parts, in order, of about the same size."""
        parts = -(-self.count // count_max)
        for part in range(parts):
            yield Range(
                partition=self.partition,
                begin=self.begin + self.count * part // parts,
                end=self.begin + self.count * (part + 1) // parts,
            )


def shares(wanted: Mapping[K, int], total: int) -> dict[K, int]:
    """Divide `total` among those who want some of it: nobody gets more than it wants, or nothing.

    Whoever wants little gets all of it, and the rest is divided evenly.
    """
    left, given = total, dict[K, int]()
    by_want = sorted(wanted, key=lambda each: wanted[each])
    for at, each in enumerate(by_want):
        given[each] = min(wanted[each], max(1, left // (len(by_want) - at)))
        left = max(0, left - given[each])
    return given
