"""PURE: how a transaction over several journals is put into store transactions, and ends.

A transaction is closed by one ACK per journal and producer. What may happen between two of them
decides what the ACKs have to say:

- *All under one revision.* A reader cuts every journal at one revision, so it meets all of these
  ACKs or none, and no hint is needed. Up to `HINTED_COMMITS_MAX` commits they carry hints all the
  same: a reader that follows a single journal then knows what else there is, for a few kilobytes.
- *Under several revisions*, since one store transaction holds no more. Then hints are all that
  keeps the transaction in one piece, and every ACK names every other commit. That is quadratic:
  `COMMITS_MAX` commits are 100 MB of hints, and more are refused.

So the commits alone decide it, in `close`, and no caller needs to know.

**Intents** are the ACKs before they are written, as a value that its owner keeps: durable first,
written second. Hints follow from the commits, so intents are kept without them, in linear space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import msgspec

from penstock.consensus.store import ATOMIC_BYTES_MAX, ATOMIC_ELEMENTS_MAX
from penstock.errors import Bug, PenstockError, UserError
from penstock.journal.codec import JournalMachine
from penstock.journal.state import AckRecord, Append, Record
from penstock.model.clock import Clock, Producer
from penstock.model.hints import Ack, Commit, write_acks

HINTED_COMMITS_MAX: Final = 64
"""Commits of a transaction up to which ACKs of one revision carry hints: some 100 KB at most."""

COMMITS_MAX: Final = 2_000
"""Commits of one transaction whose ACKs do not fit one store transaction."""

ENTRY_BYTES: Final = 512
"""An upper bound of what an entry of a state log has beside its diff."""

FORMAT: Final = 1

_MACHINE: Final = JournalMachine()

Parts = dict[str, tuple[Record, ...]]
"""Records by journal, to be appended under one revision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The size of one store transaction; tests make it small."""

    journals: int = ATOMIC_ELEMENTS_MAX
    bytes: int = ATOMIC_BYTES_MAX

    def hold(self, parts: Mapping[str, Sequence[Record]]) -> bool:
        """True if all parts fit one store transaction."""
        return len(parts) <= self.journals and sum(map(entry_bytes, parts.values())) <= self.bytes


LIMITS: Final = BatchLimits()


def entry_bytes(records: Sequence[Record]) -> int:
    """An upper bound of the entry that appends these records."""
    return ENTRY_BYTES + len(_MACHINE.encode_diff(Append(records=tuple(records))))


# ---------------------------------------------------------------------------------------- intents


class MalformedIntents(PenstockError):
    """Bytes that are not intents, or those of a newer release."""


@dataclass(frozen=True, slots=True)
class Intents:
    """The commits of one transaction, sorted; none if nothing was written."""

    commits: tuple[Commit, ...] = ()

    @classmethod
    def of(cls, commits: Iterable[Commit], limits: BatchLimits = LIMITS) -> Intents:
        """The intents of a transaction to which several producers may have contributed.

        Refuses what `close` could not write: once durable, intents must be possible.
        """
        intents = cls(tuple(sorted(commits)))
        count = len(intents.commits)
        if count > COMMITS_MAX and not limits.hold(_acks(intents, hinted=False)):
            raise UserError(
                f"a transaction of {count} commits cannot be acknowledged",
                why=f"past {limits.journals} journals every ACK names all the others, which is "
                f"done for {COMMITS_MAX} commits at most",
                fix="close transactions earlier, or partition the collections less",
            )
        return intents

    def __bool__(self) -> bool:
        return bool(self.commits)

    @property
    def journals(self) -> tuple[str, ...]:
        """The journals that get an ACK, in order."""
        return tuple(dict.fromkeys(commit.journal for commit in self.commits))

    def without(self, journals: Iterable[str]) -> Intents:
        """Return the intents without those of some journals."""
        gone = frozenset(journals)
        return Intents(tuple(c for c in self.commits if c.journal not in gone))

    def encode(self) -> bytes:
        """Encode them for the state that keeps them until they are written."""
        stamps: dict[tuple[int, int], list[str]] = {}
        for commit in self.commits:
            stamps.setdefault((int(commit.producer), commit.clock), []).append(commit.journal)
        grouped = [[producer, clock, names] for (producer, clock), names in stamps.items()]
        return msgspec.msgpack.encode([FORMAT, grouped])

    @classmethod
    def decode(cls, data: bytes) -> Intents:
        """The intents that `encode` wrote."""
        try:
            version, grouped = msgspec.msgpack.decode(data, type=tuple[int, list[_Stamped]])
            commits = [
                Commit(journal, Producer(producer), Clock(clock))
                for producer, clock, names in grouped
                for journal in names
            ]
        except (msgspec.MsgspecError, ValueError) as error:
            raise MalformedIntents("these bytes are not ACK intents", why=str(error)) from None
        if version != FORMAT:
            raise MalformedIntents(
                f"ACK intents of format {version}; this release reads {FORMAT}",
                fix="run the release that wrote them",
            )
        return cls(tuple(sorted(commits)))


_Stamped = tuple[int, int, list[str]]


# ----------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The appends that end a transaction, store transaction by store transaction.

    A crash between two of `rows`, or after them, leaves rows without an ACK. A crash
    between two of `acks` leaves ACKs that hint at what is to come.
    """

    rows: tuple[Parts, ...] = ()
    acks: tuple[Parts, ...] = ()
    """With the rows of their journals, if that makes the whole transaction one."""

    @property
    def atomic(self) -> bool:
        """True if readers find all of the transaction or nothing, whatever happens meanwhile."""
        return len(self.acks) <= 1


def close(
    intents: Intents, pending: Mapping[str, Sequence[Record]], limits: BatchLimits = LIMITS
) -> Closing:
    """Plan the end of a transaction of which `pending` is not appended yet."""
    acks = _acks(intents, hinted=len(intents.commits) <= HINTED_COMMITS_MAX)
    if stray := pending.keys() - acks.keys():
        raise Bug(f"rows without an ACK would never be seen: {', '.join(sorted(stray))}")
    if not acks:
        return Closing()
    whole = {journal: (*pending.get(journal, ()), *closing) for journal, closing in acks.items()}
    if limits.hold(whole):
        return Closing(acks=(whole,))
    rows = tuple(batches(pending, limits))
    if limits.hold(acks):
        return Closing(rows=rows, acks=(acks,))
    return Closing(rows=rows, acks=tuple(batches(_acks(intents, hinted=True), limits)))


def batches(parts: Mapping[str, Sequence[Record]], limits: BatchLimits = LIMITS) -> Iterator[Parts]:
    """Records in as few store transactions as they fit, those of a journal in their order."""
    batch: dict[str, list[Record]] = {}
    size = 0
    for journal, records in parts.items():
        for record in records:
            added = entry_bytes([record])
            if batch and (
                size + added > limits.bytes
                or (journal not in batch and len(batch) == limits.journals)
            ):
                yield {name: tuple(batched) for name, batched in batch.items()}
                batch, size = {}, 0
            batch.setdefault(journal, []).append(record)
            size += added
    if batch:
        yield {name: tuple(batched) for name, batched in batch.items()}


def _acks(intents: Intents, *, hinted: bool) -> Parts:
    commits = intents.commits
    acks = write_acks(commits) if hinted else tuple(Ack(commit=commit) for commit in commits)
    return {
        journal: tuple(
            AckRecord(producer=ack.commit.producer, clock=ack.commit.clock, hints=ack.hints)
            for ack in group
        )
        for journal, group in groupby(acks, key=lambda ack: ack.commit.journal)
    }
