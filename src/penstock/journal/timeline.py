"""PURE: what was committed to the journals of a collection, in the order of the store's revisions.

A **unit** is what one record made visible: the documents of a span with its ACK, or documents that
no transaction has. A **position** says how far a reader has taken units: for each journal the
offset behind the last record whose unit was taken. Positions are cut at revisions, never within
one, so a reader that goes from position to position gets a transaction in one helping.

It does not matter where the rows of a unit are, or when they were written: a span that was open at
one position and is acknowledged behind it belongs to the next helping, whole. And since records
keep their offsets and revisions for ever, the units between two positions are always the
same, after a restart or a compaction too.

Not kept together: a transaction of thousands of journals, whose ACKs were appended under several
revisions. It comes in several helpings, each document once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from penstock.errors import Bug, PenstockError
from penstock.journal.committed import CommitReader, VisibleRows
from penstock.journal.state import Record


class MalformedPosition(PenstockError):
    """This is not a position that `TimelinePosition.to_json` made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePosition:
    """How far a reader has taken the units of some journals."""

    revision: int = 0
    """The revision of the last unit that was taken."""
    journals: Mapping[str, int] = field(default_factory=dict)
    """Units of records from this offset on are still to be taken; of other journals, all are."""

    def to_json(self) -> dict[str, Any]:
        return {"revision": self.revision, "journals": dict(sorted(self.journals.items()))}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> TimelinePosition:
        """The position that `to_json` wrote."""
        match value:
            case {"revision": int(revision), "journals": dict(journals)} if all(
                isinstance(name, str) and isinstance(offset, int)
                for name, offset in journals.items()
            ):
                return cls(revision=revision, journals=journals)
            case _:
                raise MalformedPosition(
                    f"this is not an offset of the penstock source: {value}",
                    fix="start the query with a new checkpoint location",
                )


BEGIN: Final = TimelinePosition()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Documents that became visible with one record."""

    journal: str
    revision: int
    begin: int
    end: int
    """The offsets of the record, not of the documents."""
    visible: tuple[VisibleRows, ...]

    @property
    def rows(self) -> int:
        """The number of documents, at most: a run that repeats itself has fewer."""
        return sum(visible.run.rows for visible in self.visible)


@dataclass(slots=True, kw_only=True)
class _Track:
    """One journal, as far as it was read."""

    generation: int
    offset: int = 0
    committed: CommitReader
    units: list[Unit] = field(default_factory=list)
    """In the order of their offsets."""


_REVISION: Final = attrgetter("revision")
_BEGIN: Final = attrgetter("begin")


class Timeline:
    """The units of a set of journals that were not forgotten yet."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._forgotten: dict[str, int] = {}

    def read_through(self, journal: str, generation: int) -> int:
        """The offset from which the records of a journal are wanted next."""
        track = self._tracks.get(journal)
        return track.offset if track is not None and track.generation == generation else 0

    def read(self, journal: str, generation: int, records: Iterable[Record]) -> None:
        """Records from `read_through` on. A new generation begins anew: the old one was dropped."""
        track = self._tracks.get(journal)
        if track is None or track.generation != generation:
            track = _Track(generation=generation, committed=CommitReader(journal))
            self._tracks[journal] = track
        for record in records:
            if record.begin < track.offset:
                raise Bug(f"{journal}: offset {record.begin} is read a second time")
            if visible := track.committed.read(record):
                unit = Unit(
                    journal=journal,
                    revision=record.revision,
                    begin=record.begin,
                    end=record.end,
                    visible=tuple(visible),
                )
                track.units.append(unit)
            track.offset = record.end

    def drop(self, journal: str) -> None:
        """The journal is gone, and its documents with it."""
        self._tracks.pop(journal, None)

    def cut(
        self, start: TimelinePosition, *, rows_max: int | None = None, before: int | None = None
    ) -> TimelinePosition:
        """The furthest position with at most `rows_max` rows behind `start`, but past one revision.

        `before` leaves out the units of that revision and later ones. If there is no unit to take,
        the answer is `start` itself.
        """
        units = sorted(self._from(start), key=_REVISION)
        journals = dict(start.journals)
        revision, rows = start.revision, 0
        for revision_next, group in groupby(units, key=_REVISION):
            some = list(group)
            rows_next = rows + sum(unit.rows for unit in some)
            full = rows_max is not None and rows > 0 and rows_next > rows_max
            if full or (before is not None and revision_next >= before):
                break
            revision, rows = revision_next, rows_next
            for unit in some:
                journals[unit.journal] = max(journals.get(unit.journal, 0), unit.end)
        return TimelinePosition(revision=revision, journals=journals) if rows else start

    def units_between(self, start: TimelinePosition, end: TimelinePosition) -> list[Unit]:
        """The units to take from one position to the next, journal by journal, in order."""
        return [
            unit for unit in self._from(start) if unit.begin < end.journals.get(unit.journal, 0)
        ]

    def forget(self, position: TimelinePosition) -> None:
        """Nobody will ask for units below `position` any more."""
        for journal, offset in position.journals.items():
            self._forgotten[journal] = max(self._forgotten.get(journal, 0), offset)
            if (track := self._tracks.get(journal)) is not None:
                del track.units[: bisect_left(track.units, offset, key=_BEGIN)]

    def _from(self, start: TimelinePosition) -> Iterable[Unit]:
        for journal, track in sorted(self._tracks.items()):
            offset = start.journals.get(journal, 0)
            if offset < self._forgotten.get(journal, 0):
                raise Bug(
                    f"{journal}: units from offset {offset} on are forgotten",
                    why=f"everything below {self._forgotten[journal]} was committed as taken",
                )
            yield from track.units[bisect_left(track.units, offset, key=_BEGIN) :]
