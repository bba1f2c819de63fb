"""PURE: the meaning of a state log, and every decision about it.

A log is a sequence of diffs; its state is the fold of them. A `Replica` is that fold up to one
sequence number: all that a reader or writer knows. The shell (`statelog.py`) reads, sends and
waits; this module decides what is true, what to send and what an answer means.

**Slots.** A writer whose replica stands at n offers an entry to slot n + 1, and to no other slot
until it has seen n + 1 taken. A slot is taken once, by one entry, for good. So of all attempts to
commit one command at most one can succeed, however many replies were lost on the way.

**Marks.** The entry in a taken slot would show whose it is, but it may be truncated while its
writer is paused. So the state remembers the last command of every writer (`Mark`), rollups carry
the marks, and `fate_of` decides from them. They are bounded: the least recent is forgotten, and up
to `Replica.forgotten` the absence of a mark proves nothing.

**Rollups.** An entry may carry the whole state after itself. Which entries do is a function of the
replica at the slot before, so every writer that competes for a slot agrees, and a rollup cannot
lose a race against commands: it is one. The states are those of journals, tasks and catalogs,
kept to a few megabytes by their own design, and an entry may have 64: so there is no second store
of rollups to keep in step with the log, no claim on writing one, and none that can be missing.

**Revisions.** A machine gets the store's revision of each entry it applies. A writer learns that of
its own entries only by reading them back, so its replica is *unconfirmed* for a while. A rollup is
made from a confirmed replica, since nothing else remains of the entries it replaces.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import msgspec

from penstock.consensus import entries
from penstock.consensus.entries import NO_BASE, CorruptEntry, LogEntry, NewerFormat
from penstock.consensus.store import VersionedData
from penstock.garbage import gc_paused

S = TypeVar("S")
D = TypeVar("D")

MARKS_MAX = 256
"""Writers remembered per log: at most 12 KB, for many more than ever write at once."""


class Machine(Protocol[S, D]):
    """The meaning of one kind of log, defined by its owner. Pure, and never changes a state.

    `decode_diff(encode_diff(d))` must equal `d`, the same for states: the writer's own replica is
    made of decoded bytes too, so that it cannot differ from any other.

    A revision is 0 while it is unknown: for an entry that this process wrote and did not read back,
    and, inside the state of a rollup, for the entry that carries it.
    """

    @property
    def format(self) -> int:
        """The encoding this machine writes; it reads this one and every smaller one."""
        ...

    def initial(self) -> S: ...

    def apply(self, state: S, diff: D, revision: int) -> S: ...

    def encode_diff(self, diff: D) -> bytes: ...

    def decode_diff(self, data: bytes, format: int) -> D: ...  # noqa: A002

    def encode_state(self, state: S) -> bytes: ...

    def decode_state(self, data: bytes, format: int, revision: int) -> S:  # noqa: A002
        """Decode a state; `revision`, of the entry that carried it, replaces 0 in there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RollupPolicy:
    """When an entry carries the state.

    - At every `diffs_min`-th entry since the last rollup, if these are at least as many bytes as
      that rollup was: then rollups cost at most as much as the diffs themselves, and opening a
      log reads at most about twice its state.
    - At every `diffs_min`-th from `diffs_max` on in any case: a bound on rows, for a large state
      with tiny diffs.
    - Never above `bytes_max`: well below what the store takes, diff included.
    """

    diffs_min: int = 128
    diffs_max: int = 1024
    bytes_max: int = 32 << 20

    def may_be_due(self, diffs_since: int) -> bool:
        """True if the next entry may carry the state, whatever its size."""
        return (diffs_since + 1) % self.diffs_min == 0

    def due(self, diffs_since: int, diff_bytes_since: int, base_bytes: int) -> bool:
        ordinal = diffs_since + 1
        return self.may_be_due(diffs_since) and (
            diff_bytes_since >= base_bytes or ordinal >= self.diffs_max
        )


class Mark(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last committed command of one writer."""

    writer_seq: int
    token: bytes
    seqno: int


class _Rollup(msgspec.Struct, frozen=True, array_like=True):
    """`LogEntry.state`: the machine's state, and what the log itself must remember."""

    state: bytes
    forgotten: int
    marks: list[tuple[bytes, int, bytes, int]]  # writer, writer_seq, token, seqno; oldest first


_ROLLUP_DECODER = msgspec.msgpack.Decoder(_Rollup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica(Generic[S, D]):
    """The state of one log after entry `seqno`; -1 and the machine's initial state before any.

    Invariant: once confirmed, equal to what every other reader has at the same `seqno`, whether it
    applied every diff or started from a rollup on the way. It holds because the fold is a function
    of the entries, and a rollup is the fold of the entries below and including its own.
    """

    key: str
    machine: Machine[S, D]
    state: S
    seqno: int = -1
    epoch: int = 0
    base: int = NO_BASE
    marks: Mapping[bytes, Mark]
    """In order of their `seqno`."""
    forgotten: int = -1
    """The greatest seqno of a mark that is no longer remembered."""
    diffs_since: int = 0
    diff_bytes_since: int = 0
    base_bytes: int = 0
    confirmed: bool = field(default=True, compare=False)
    """The revision of every entry below and at `seqno` was known when it was applied."""
    newer: NewerFormat | None = None
    """Set if the next entry cannot be read by this release: the state is right, but not current,
    and nothing may be appended."""

    @classmethod
    def empty(cls, key: str, machine: Machine[S, D]) -> Replica[S, D]:
        return cls(key=key, machine=machine, state=machine.initial(), marks={})

    def advance(self, versioned: VersionedData) -> tuple[Replica[S, D], D | None]:
        """Return the replica after the next entry, and the diff in it, if any."""
        return _fold(self, (versioned,))

    def catch_up(self, scanned: Sequence[VersionedData]) -> Replica[S, D]:
        """Return the replica after `scanned`, contiguous entries read from `seqno + 1` on.

        They begin later than that if truncation went past this replica; then it starts over from
        the newest rollup among them. The floor of a log always carries one: `truncate_to` never
        names another entry.
        """
        replica = self
        if scanned and scanned[0].seqno > self.seqno + 1:
            start, replica = self._restart(scanned)
            scanned = scanned[start:]
        return _fold(replica, [v for v in scanned if v.seqno > replica.seqno])[0]

    def _restart(self, scanned: Sequence[VersionedData]) -> tuple[int, Replica[S, D]]:
        unreadable: NewerFormat | None = None
        index = len(scanned)
        while index > 0:
            index -= 1
            versioned = scanned[index]
            try:
                entry = _decode(self.key, versioned, self.machine.format)
            except NewerFormat as newer:
                unreadable = newer
                continue
            if entry.state is None:
                index = entry.base - scanned[0].seqno + 1  # no entry between them carries one
                continue
            rollup = _ROLLUP_DECODER.decode(entry.state)
            return index + 1, replace(
                Replica.empty(self.key, self.machine),
                state=self.machine.decode_state(rollup.state, entry.format, versioned.revision),
                seqno=versioned.seqno,
                epoch=entry.epoch,
                base=versioned.seqno,
                marks={
                    writer: Mark(writer_seq=seq, token=token, seqno=seqno)
                    for writer, seq, token, seqno in rollup.marks
                },
                forgotten=rollup.forgotten,
                base_bytes=len(versioned.data),
            )
        raise unreadable or CorruptEntry(
            "the log has no rollup to start from",
            where=f"{self.key}, entries {scanned[0].seqno} to {scanned[-1].seqno}",
            why="entries below were truncated by something other than its writers",
        )


def start_of(key: str, head: VersionedData) -> int:
    """Return where to start reading a log; 0, meaning its floor, if a newer release wrote it."""
    try:
        entry = entries.decode(head.data, where=_where(key, head.seqno))
    except NewerFormat:
        return 0
    return head.seqno if entry.state is not None else max(entry.base, 0)


def diff_of(key: str, versioned: VersionedData, machine: Machine[S, D]) -> D | None:
    """Return the diff in an entry, if any."""
    entry = _decode(key, versioned, machine.format)
    return None if entry.diff is None else machine.decode_diff(entry.diff, entry.format)


# ------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """The identity of a command: everything about it but its content."""

    writer: bytes
    writer_seq: int
    token: bytes
    epoch: int
    wall_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Generic[S, D]):
    """One command as one entry, offered to one slot. A resend has identical bytes."""

    author: Author
    new: VersionedData
    diff: D | None
    after: Replica[S, D]
    """The replica if this attempt commits."""
    rollup_skipped: bool
    """A rollup was due but did not fit."""
    truncate_to: int | None
    """Set if it rolls up: truncate to the rollup before it, once it has committed. One generation
    of entries stays, so a reader that is a little behind reads on and needs no rollup."""


@gc_paused()
def compose(
    replica: Replica[S, D],
    author: Author,
    diff: D | None,
    *,
    policy: RollupPolicy,
    bytes_max: int | None = None,
    force_rollup: bool = False,
) -> Attempt[S, D]:
    """Compose the entry that commits `diff` in the slot behind `replica`, with a rollup if due.

    `bytes_max` limits the entry further where several share a batch: the diff always goes in, the
    rollup only if it fits.
    """
    if replica.newer is not None:
        raise replica.newer
    machine = replica.machine
    seqno = replica.seqno + 1
    entry = LogEntry(
        format=machine.format,
        writer=author.writer,
        writer_seq=author.writer_seq,
        token=author.token,
        epoch=author.epoch,
        base=replica.base,
        wall_ms=author.wall_ms,
        diff=None if diff is None else machine.encode_diff(diff),
    )
    new = VersionedData(seqno, entries.encode(entry))
    after, decoded = replica.advance(new)
    due = force_rollup or policy.due(
        replica.diffs_since, replica.diff_bytes_since + len(new.data), replica.base_bytes
    )
    rolled_up = skipped = False
    if due:
        if not replica.confirmed:
            raise ValueError(f"{replica.key}: a rollup is due, and the replica is not confirmed")
        rollup = VersionedData(seqno, entries.encode(_with_state(entry, after)))
        limit = policy.bytes_max if bytes_max is None else min(policy.bytes_max, bytes_max)
        rolled_up = len(rollup.data) <= limit
        skipped = not rolled_up
        if rolled_up:
            new = rollup
            after, decoded = replica.advance(new)
    return Attempt(
        author=author,
        new=new,
        diff=decoded,
        after=after,
        rollup_skipped=skipped,
        truncate_to=replica.base if rolled_up and replica.base > 0 else None,
    )


class Fate(enum.Enum):
    """The fate of an attempt, as far as a replica can tell."""

    LANDED = "its entry is in the log"
    OPEN = "its slot is still free: it may land yet, and may be sent again"
    LOST = "another entry has its slot: it never landed and never will"
    SUPERSEDED = "an abandoned command of the same writer landed instead"
    FORGOTTEN = "its slot is gone, and so is the mark of its writer"


def fate_of(replica: Replica[S, D], author: Author, slot: int) -> Fate:
    """Return the fate of `author`'s attempt on `slot`, from a replica read after it was sent."""
    mark = replica.marks.get(author.writer)
    if mark is not None and mark.writer_seq >= author.writer_seq:
        return Fate.LANDED if mark.token == author.token else Fate.SUPERSEDED
    if replica.seqno < slot:
        return Fate.OPEN
    # Had it landed, there would be a mark; unless that was dropped, which `forgotten` records.
    if mark is None and slot <= replica.forgotten:
        return Fate.FORGOTTEN
    return Fate.LOST


def fate_of_all(fates: Sequence[Fate]) -> Fate:
    """Return the fate of a batch that commits as a whole or not at all.

    The replicas are read one after the other, so an early one may still say OPEN when a later one
    says LANDED: one landed element proves them all, and one lost element disproves them all.
    """
    for decisive in (Fate.LANDED, Fate.SUPERSEDED, Fate.LOST, Fate.FORGOTTEN):
        if decisive in fates:
            return decisive
    return Fate.OPEN


# -------------------------------------------------------------------------------------- details


def _with_state(entry: LogEntry, after: Replica[S, D]) -> LogEntry:
    rollup = _Rollup(
        state=after.machine.encode_state(after.state),
        forgotten=after.forgotten,
        marks=[
            (writer, mark.writer_seq, mark.token, mark.seqno)
            for writer, mark in after.marks.items()
        ],
    )
    return msgspec.structs.replace(entry, state=msgspec.msgpack.encode(rollup))


def _fold(
    replica: Replica[S, D], following: Sequence[VersionedData]
) -> tuple[Replica[S, D], D | None]:
    """Return the replica after entries that follow it, and the diff in the last one, if any.

    Only one replica is made, however many the entries: listing ten thousand logs makes as many.
    """
    if replica.newer is not None:
        return replica, None
    machine = replica.machine
    state, seqno, epoch, base = replica.state, replica.seqno, replica.epoch, replica.base
    marks, forgotten = dict(replica.marks), replica.forgotten
    diffs_since, diff_bytes_since = replica.diffs_since, replica.diff_bytes_since
    base_bytes, confirmed, newer = replica.base_bytes, replica.confirmed, replica.newer
    diff: D | None = None
    for versioned in following:
        if versioned.seqno != seqno + 1:
            raise ValueError(f"{replica.key}: entry {versioned.seqno} does not follow {seqno}")
        diff = None
        try:
            entry = _decode(replica.key, versioned, machine.format)
        except NewerFormat as error:
            newer = error
            break
        if entry.diff is not None:
            diff = machine.decode_diff(entry.diff, entry.format)
            state = machine.apply(state, diff, versioned.revision)
        seqno, epoch = versioned.seqno, entry.epoch
        forgotten = _remember(marks, forgotten, entry, seqno)
        confirmed = confirmed and versioned.revision > 0
        if entry.state is not None:
            base, base_bytes = seqno, len(versioned.data)
            diffs_since = diff_bytes_since = 0
        else:
            diffs_since += 1
            diff_bytes_since += len(versioned.data)
    after = Replica(
        key=replica.key,
        machine=machine,
        state=state,
        seqno=seqno,
        epoch=epoch,
        base=base,
        marks=marks,
        forgotten=forgotten,
        diffs_since=diffs_since,
        diff_bytes_since=diff_bytes_since,
        base_bytes=base_bytes,
        confirmed=confirmed,
        newer=newer,
    )
    return after, diff


def _remember(marks: dict[bytes, Mark], forgotten: int, entry: LogEntry, seqno: int) -> int:
    """Add the mark of an entry to `marks`; return up to where marks are forgotten then."""
    marks.pop(entry.writer, None)  # to the end: order is recency
    marks[entry.writer] = Mark(writer_seq=entry.writer_seq, token=entry.token, seqno=seqno)
    if len(marks) > MARKS_MAX:
        return marks.pop(next(iter(marks))).seqno
    return forgotten


def _decode(key: str, versioned: VersionedData, format_max: int) -> LogEntry:
    entry = entries.decode(versioned.data, where=_where(key, versioned.seqno))
    if entry.format > format_max:
        raise NewerFormat(
            "the log was written by a newer release",
            where=_where(key, versioned.seqno),
            why=f"format {entry.format}; this release reads formats up to {format_max}",
            fix="upgrade this process",
        )
    return entry


def _where(key: str, seqno: int) -> str:
    return f"{key}, entry {seqno}"
