"""PURE: which rows are staged on disk, where they are, and until when.

A round of reading leaves one *segment* per shard: a file that holds, in processing order, what that
shard gets of the round's deliveries. Only what a finished job reports in its *manifest* is a
segment; other files are garbage. A checkpoint takes deliveries of one round or of several, and not
always all of a round, so a scan is segments, and for each the clocks that are wanted of it:

    segment 1: P1 at 10 and 20, P2 at 15
    take P2 through 15      P2 15..15 of segment 1                      kept, for P1
    take P1 through 20      P1 10..20 of segment 1                      then deleted

Invariant: a delivery is taken by one scan, and a segment lives until every delivery that may have
rows in it is consumed. So what is on disk follows what is unconsumed, and nothing is read twice.

(binding, producer, clock) identifies a row. Two deliveries of one producer interleave their clocks
only where one transaction wrote to several journals, and the hints of its ACKs hand those out
together. A scan that is asked to tell them apart cannot, and refuses.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from penstock.errors import Bug, PenstockError
from penstock.model.clock import Clock, Producer
from penstock.shuffle.delivery import Delivery

Source = tuple[int, Producer]
"""A binding, and a producer whose rows it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Clocks of one producer as one binding reads it, from `first` through `last`."""

    binding: int
    producer: Producer
    first: Clock
    last: Clock

    @property
    def source(self) -> Source:
        return self.binding, self.producer

    def overlaps(self, other: Clocks) -> bool:
        """Of the same source: whether a row can lie in both."""
        return self.first <= other.last and other.first <= self.last

    def covers(self, other: Clocks) -> bool:
        """Of the same source: whether every row of `other` lies in this."""
        return self.first <= other.first and other.last <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one shard got of one round."""

    shard: int
    path: str | None
    """Relative to the session's directory; None if the shard got nothing."""
    rows: int = 0
    bytes: int = 0
    sum: int = 0
    """CRC-32 of its file."""
    ranges: tuple[Clocks, ...] = ()
    """The clocks of its rows; one for each source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a round has staged: the segments of every shard, in their order."""

    lsn: int
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, lsn: int, reported: Iterable[Segment], *, shards: int) -> Manifest:
        """What the tasks of one finished job have reported: each shard, and each once."""
        segments = tuple(sorted(reported, key=attrgetter("shard")))
        if [segment.shard for segment in segments] != list(range(shards)):
            raise Bug(
                f"round {lsn} was staged for shards {[s.shard for s in segments]}",
                why=f"each of {shards} shards reports once: partition and shard are the same",
            )
        return cls(lsn=lsn, segments=segments)

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRead:
    """What a scan wants of one segment."""

    lsn: int
    shard: int
    path: str
    sum: int
    """CRC-32 of the file."""
    wanted: tuple[Clocks, ...] | None
    """None: every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed:
    """What nobody will read again."""

    paths: tuple[str, ...]
    rounds: tuple[int, ...]
    """Of which nothing is left at all."""


# -------------------------------------------------------------------------------------- the ledger


class _Stage(enum.Enum):
    STAGED = "is on disk"
    TAKEN = "belongs to a scan"
    CONSUMED = "was processed"


@dataclass(slots=True, kw_only=True)
class _Staged:
    """A delivery on disk."""

    clocks: Clocks
    journal: str
    stage: _Stage = _Stage.STAGED


_Key = tuple[str, int, Producer, Clock]


@dataclass(slots=True, kw_only=True)
class _Round:
    deliveries: dict[_Key, _Staged]
    segments: list[Segment] = field(default_factory=list)
    """Those that are on disk."""


class Segments:
    """The segments of one session.

    One round is staged at a time, and rounds are numbered upward: their number, the LSN, says how
    far a shard's log goes.
    """

    def __init__(self, shards: int) -> None:
        if shards < 1:
            raise ValueError(f"a log of {shards} shards stages nothing")
        self.shards = shards
        self._rounds: dict[int, _Round] = {}
        self._flushed = 0
        self._in_flight: tuple[int, _Round] | None = None
        self._bytes = [0] * shards

    @property
    def flushed_lsn(self) -> tuple[int, ...]:
        """By shard, the last round that is on disk; all shards of a round are staged at once."""
        return (self._flushed,) * self.shards

    @property
    def bytes(self) -> tuple[int, ...]:
        """By shard, what its segments take on disk."""
        return tuple(self._bytes)

    # ----------------------------------------------------------------------------------- staging

    def begin(self, lsn: int, deliveries: Iterable[Delivery]) -> None:
        """Start to stage a round, which read these deliveries."""
        if self._in_flight is not None:
            raise Bug(f"round {lsn} was staged while round {self._in_flight[0]} was")
        if lsn <= self._flushed:
            raise Bug(f"round {lsn} was staged after round {self._flushed}")
        staged: dict[_Key, _Staged] = {}
        for delivery in deliveries:
            if delivery.lsn != lsn:
                raise Bug(f"round {lsn} was staged with a delivery of round {delivery.lsn}")
            staged[_key(delivery)] = _Staged(clocks=clocks_of(delivery), journal=delivery.journal)
        if not staged:
            raise Bug(f"round {lsn} has nothing to stage")
        self._in_flight = lsn, _Round(deliveries=staged)

    def abandon(self, lsn: int) -> None:
        """The round was not staged after all; it may be tried again."""
        self._staged(lsn)
        self._in_flight = None

    def commit(self, manifest: Manifest) -> None:
        """The round is on disk: its deliveries can be taken."""
        if len(manifest.segments) != self.shards:
            raise Bug(f"a manifest has {len(manifest.segments)} of {self.shards} shards")
        staged = self._staged(manifest.lsn)
        _check_owned(manifest, staged.deliveries.values())
        self._in_flight = None
        staged.segments += [each for each in manifest.segments if each.path is not None]
        for segment in staged.segments:
            self._bytes[segment.shard] += segment.bytes
        self._rounds[manifest.lsn] = staged
        self._flushed = manifest.lsn

    def _staged(self, lsn: int) -> _Round:
        if self._in_flight is None or self._in_flight[0] != lsn:
            raise Bug(f"round {lsn} was reported, and is not being staged")
        return self._in_flight[1]

    # ---------------------------------------------------------------------------------- scanning

    def take(self, deliveries: Iterable[Delivery]) -> tuple[SegmentRead, ...]:
        """Where to read these deliveries, round by round; they are taken now.

        What was taken before is passed over: a repeated scan yields nothing.
        """
        reads: list[SegmentRead] = []
        taken: list[_Staged] = []
        for lsn, keys in self._by_round(deliveries).items():
            staged = self._rounds[lsn]
            fresh = [key for key in keys if staged.deliveries[key].stage is _Stage.STAGED]
            taken += [staged.deliveries[key] for key in fresh]
            if fresh:
                wanted = _wanted(staged.deliveries, set(fresh))
                reads += _reads(lsn, staged.segments, wanted)
        for each in taken:
            each.stage = _Stage.TAKEN
        return tuple(reads)

    def reclaim(self, deliveries: Iterable[Delivery]) -> Reclaimed:
        """These deliveries were processed: what to delete."""
        paths: list[str] = []
        rounds: list[int] = []
        for lsn, keys in self._by_round(deliveries).items():
            staged = self._rounds[lsn]
            for key in keys:
                if staged.deliveries[key].stage is _Stage.STAGED:
                    raise Bug(
                        "rows were consumed before they were scanned",
                        where=f"journal {key[0]}, binding {key[1]}, round {lsn}",
                    )
                staged.deliveries[key].stage = _Stage.CONSUMED
            paths += self._drop_consumed(staged)
            if all(each.stage is _Stage.CONSUMED for each in staged.deliveries.values()):
                del self._rounds[lsn]
                rounds.append(lsn)
        return Reclaimed(paths=tuple(paths), rounds=tuple(rounds))

    def _drop_consumed(self, staged: _Round) -> Iterator[str]:
        needed = _by_source(
            each.clocks for each in staged.deliveries.values() if each.stage is not _Stage.CONSUMED
        )
        kept: list[Segment] = []
        for segment in staged.segments:
            if any(
                clocks.overlaps(range_)
                for range_ in segment.ranges
                for clocks in needed.get(range_.source, ())
            ):
                kept.append(segment)
            elif segment.path is not None:
                self._bytes[segment.shard] -= segment.bytes
                yield segment.path
        staged.segments = kept

    def _by_round(self, deliveries: Iterable[Delivery]) -> dict[int, list[_Key]]:
        """What is asked for, by the rounds that still have anything, in their order."""
        found: dict[int, list[_Key]] = {}
        for delivery in deliveries:
            lsn, key = delivery.lsn, _key(delivery)
            if not 1 <= lsn <= self._flushed:
                raise Bug(
                    f"rows of round {lsn} were asked for, and rounds are staged up to "
                    f"{self._flushed}",
                    where=f"journal {delivery.journal}, binding {delivery.binding}",
                )
            if (staged := self._rounds.get(lsn)) is None:
                continue  # all of it was consumed
            if key not in staged.deliveries:
                raise Bug(
                    f"round {lsn} has staged no such rows",
                    where=f"journal {delivery.journal}, binding {delivery.binding}, "
                    f"producer {delivery.producer}, commit {delivery.commit:#x}",
                )
            found.setdefault(lsn, []).append(key)
        return dict(sorted(found.items()))


def clocks_of(delivery: Delivery) -> Clocks:
    """From the first row of a delivery through its last, and no further."""
    return Clocks(
        binding=delivery.binding,
        producer=delivery.producer,
        first=delivery.first,
        last=delivery.last,
    )


def _key(delivery: Delivery) -> _Key:
    return delivery.journal, delivery.binding, delivery.producer, delivery.commit


def _by_source(all_of: Iterable[Clocks]) -> dict[Source, list[Clocks]]:
    found: dict[Source, list[Clocks]] = {}
    for clocks in all_of:
        found.setdefault(clocks.source, []).append(clocks)
    return found


def _check_owned(manifest: Manifest, staged: Iterable[_Staged]) -> None:
    """Rows of no delivery would stay for ever: nobody asks for them, nothing deletes them."""
    known = {
        source: (min(each.first for each in clocks), max(each.last for each in clocks))
        for source, clocks in _by_source(each.clocks for each in staged).items()
    }
    for segment in manifest.segments:
        for range_ in segment.ranges:
            first, last = known.get(range_.source, (range_.last, range_.first))
            if range_.source not in known or range_.first < first or range_.last > last:
                raise Bug(
                    f"round {manifest.lsn} has staged rows that no delivery of it has",
                    where=f"shard {segment.shard}, binding {range_.binding}, producer "
                    f"{range_.producer}, clocks {range_.first:#x} to {range_.last:#x}",
                )


def _wanted(staged: Mapping[_Key, _Staged], fresh: set[_Key]) -> dict[Source, list[Clocks]] | None:
    """By source, the clocks of these deliveries and of no others; None if there are no others.

    Neighbours are joined where no other delivery lies between them.
    """
    if len(fresh) == len(staged):
        return None
    sources: dict[Source, list[tuple[_Staged, bool]]] = {}
    for key, each in staged.items():
        sources.setdefault(each.clocks.source, []).append((each, key in fresh))
    found: dict[Source, list[Clocks]] = {}
    for source, deliveries in sources.items():
        if any(chosen for _, chosen in deliveries):
            deliveries.sort(key=lambda each: (each[0].clocks.first, each[0].clocks.last))
            found[source] = list(_joined(source, deliveries))
    return found


def _joined(source: Source, ordered: Sequence[tuple[_Staged, bool]]) -> Iterator[Clocks]:
    binding, producer = source
    first, last, before = ordered[0][0].clocks.first, Clock(0), ordered[0]
    for each, chosen in ordered:
        if chosen is not before[1]:
            if each.clocks.first <= last:
                raise Bug(
                    "a checkpoint wants some of the rows that a producer wrote at the same time",
                    where=f"binding {binding}, producer {producer}, journals "
                    f"{before[0].journal} and {each.journal}",
                    why="staged rows are told apart by their clocks, and these interleave",
                    fix="run the task without reading ahead, and report this",
                )
            if before[1]:
                yield Clocks(binding=binding, producer=producer, first=first, last=last)
            first = each.clocks.first
        last, before = max(last, each.clocks.last), (each, chosen)
    if before[1]:
        yield Clocks(binding=binding, producer=producer, first=first, last=last)


def _reads(
    lsn: int, segments: Iterable[Segment], wanted: Mapping[Source, Sequence[Clocks]] | None
) -> Iterator[SegmentRead]:
    """The segments that have wanted rows, by what is known of their clocks."""
    for segment in segments:
        if segment.path is None:
            continue
        if wanted is None:
            yield _read(lsn, segment, segment.path, None)
            continue
        found: list[Clocks] = []
        whole = True
        for range_ in segment.ranges:
            near = [each for each in wanted.get(range_.source, ()) if each.overlaps(range_)]
            whole = whole and any(each.covers(range_) for each in near)
            found += near
        if found:
            yield _read(lsn, segment, segment.path, None if whole else tuple(found))


def _read(lsn: int, segment: Segment, path: str, wanted: tuple[Clocks, ...] | None) -> SegmentRead:
    return SegmentRead(lsn=lsn, shard=segment.shard, path=path, sum=segment.sum, wanted=wanted)


# ----------------------------------------------------------------------------- session directories


class Fenced(PenstockError):
    """Another session of the same task is newer: this one must not go on."""


_SESSION: Final = re.compile(r"epoch-(\d{20})")
_DISCARDED: Final = ".discarded-"


def session_name(epoch: int) -> str:
    """The directory of a session. One name for each epoch: making it is what claims the epoch."""
    if not 0 <= epoch < 10**20:
        raise ValueError(f"{epoch} is no epoch")
    return f"epoch-{epoch:020}"


def discarded_name(name: str, unique: str) -> str:
    """What a directory is called while it is deleted: whoever still writes to it fails."""
    return f"{name}{_DISCARDED}{unique}"


def is_discarded(name: str) -> bool:
    """Whether a directory is about to be deleted."""
    return _DISCARDED in name


def outdated(names: Iterable[str], epoch: int) -> list[str]:
    """Of the names beside that of `epoch`, those to delete; raises `Fenced` if one is newer."""
    found: list[str] = []
    for name in sorted(names):
        session, mark, _ = name.partition(_DISCARDED)
        if (match := _SESSION.fullmatch(session)) is None:
            continue  # not ours
        if mark:
            found.append(name)
        elif int(match[1]) > epoch:
            raise fenced(epoch, why=f"a session of epoch {int(match[1])} has begun")
        elif int(match[1]) < epoch:
            found.append(name)
    return found


def fenced(epoch: int, *, why: str) -> Fenced:
    """The error of a session that was replaced."""
    return Fenced(
        f"the shuffle session of epoch {epoch} was replaced by another one",
        why=why,
        fix="nothing: the newer session has taken over, and resumes from what was committed",
    )
