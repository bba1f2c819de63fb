"""The contract of the consensus store: the one place where anything becomes true.

A store holds many independent logs, one per *key*. An entry is appended by compare-and-set: the
caller names the sequence number its entry shall have, and the append commits iff the head of that
key is exactly the one before. Everything durable in Penstock is built from that one operation.

What a caller may rely on, whatever the backend and the transport:

- I1  the live seqnos of a key are one contiguous range [floor, head];
- I2  an entry never changes: two reads of (key, seqno) return the same bytes;
- I3  the head never goes back and, once there, is always there: truncation keeps it;
- I4  a key that was ever created cannot be created again, even when entry 0 was truncated away;
- I5  COMMITTED is answered only after the entry is durable;
- I6  keys are independent: an error on one never affects another;
- I7  a store has a random incarnation, made with its schema: a store that was dropped and created
      anew is a different one, and a caller that remembers the old one notices.

**Linearizable** per key: `compare_and_set` and its two batches, `scan`, `truncate` and
`head(fresh=True)`. `head(fresh=False)` may be stale, but it returns a committed entry, never goes
backwards through one committer, and sees everything committed or returned through it before. A
caller that acts on a stale head loses its compare-and-set and reads again, as after any lost race.

**One revision** orders the whole store. A store transaction that commits at least one entry takes
the next value of one counter, and all its entries carry it. Revision order is commit order over all
writers, without gaps: a reader that saw revision r can see every entry up to r.

**Unknown is not failed.** `Determinate` proves that an operation did not happen; `Indeterminate`
says that it may have happened, or may yet. Whatever is not proven determinate is indeterminate, and
so is every operation a caller stopped waiting for (cancelled, timed out). What may be sent again:

    operation                      after Determinate             after Indeterminate
    list, head, scan, snapshot,
    subscribe, watch               any layer                     any layer: no side effects
    truncate                       any layer                     any layer: idempotent
    compare_and_set*               any layer, identical bytes,   the state log only, which knows its
                                   unless `kind.final`           own entry when it reads it back

Cancelling a caller does not cancel the operation: it runs to its end, and its outcome still reaches
caches and subscribers.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import PenstockError
from penstock.servicekit.secrets import mask

SEQNO_MAX = 2**63 - 1
"""The maximum of a signed 64-bit column, which both databases have."""

SCAN_ALL = SEQNO_MAX
"""The limit of a scan without one."""

KEY_BYTES_MAX = 512
"""Keys are index entries: PostgreSQL's B-tree refuses rows of about 2,700 bytes."""

ENTRY_BYTES_MAX = 64 << 20
"""Default limit of one entry: bulk data belongs in the blob store, and a refusal is clear."""

ATOMIC_ELEMENTS_MAX = 1_000
"""Elements of one `compare_and_set_all`: its row locks are held together until the commit."""

ATOMIC_BYTES_MAX = 4 << 20
"""Bytes of one `compare_and_set_all`: every other commit of the store waits behind it."""

MANY_ELEMENTS_MAX = 10_000
"""Elements of one `compare_and_set_many`: one message, and a fair share of the commit queue."""

LIVENESS_KEY = "LIVENESS"
"""Reserved: health checks read its head, and nothing writes it."""


# ---------------------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True, repr=False)
class VersionedData:
    """One entry of a log. Equal iff seqno and bytes are: an entry has no other identity.

    `revision` is the store's, 0 until committed: callers leave it out, reads carry it.
    """

    seqno: int
    data: bytes
    revision: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        return f"VersionedData({self.seqno}, {len(self.data)} bytes, revision={self.revision})"


Batch = Sequence[tuple[str, VersionedData]]
"""Keys, each with the entry to append to it."""


class CasResult(enum.Enum):
    """The two answers of a compare-and-set; a mismatch does not carry the current state."""

    COMMITTED = "the entry is durable"
    EXPECTATION_MISMATCH = "the head was not the entry before; nothing happened"


class ResyncReason(enum.Enum):
    """Why a stream cannot go on entry by entry."""

    TRUNCATED = "entries that were asked for are gone"
    SLOW = "the reader fell too far behind"
    STORE_RESET = "the store was created again; what was known of it is gone"


@dataclass(frozen=True, slots=True)
class Entry:
    """The next entry of a subscribed log."""

    data: VersionedData


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The stream has delivered the head (None: the key has no entry yet)."""

    seqno: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """The last event of a stream: load the log from its rollup and subscribe again."""

    floor: int
    head: int
    reason: ResyncReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Nothing new, and the stream is alive; at least every 10 s."""

    head: int | None
    incarnation: bytes


SubscribeEvent = Entry | CaughtUp | Resync | Heartbeat


@dataclass(frozen=True, slots=True)
class Entries:
    """All entries of one revision under the watched prefix, by key and then seqno."""

    revision: int
    entries: tuple[tuple[str, VersionedData], ...]


@dataclass(frozen=True, slots=True)
class WatchProgress:
    """Everything up to `revision` has been delivered, also when none of it was watched."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchResync:
    """Replaces everything up to `revision` of which a part is gone; the stream goes on behind it.

    `heads` has the head seqno, as of `revision`, of every key under the prefix.
    """

    revision: int
    heads: Mapping[str, int]
    reason: ResyncReason


WatchEvent = Entries | WatchProgress | WatchResync


@dataclass(frozen=True, slots=True)
class Live:
    """Some of the entries that are live under a prefix, in any order of their keys.

    Entries of one key come in the order of their seqnos, in this event and over all of them. If one
    does not follow the one before, truncation went past that: the log begins with it.
    """

    entries: tuple[tuple[str, VersionedData], ...]


SnapshotEvent = Live | WatchProgress


# ---------------------------------------------------------------------------------------- errors


class ErrorKind(enum.Enum):
    """The cause of an error. `final` kinds are never retried: the same call fails the same way."""

    INVALID_ARGUMENT = "invalid argument"
    TOO_LARGE = "too large"
    TRUNCATE_BOUND = "truncation above the head"
    CONFLICT = "conflict with a concurrent transaction"
    UNDEFINED_TABLE = "the store's schema is missing"
    OVERLOADED = "overloaded"
    UNAUTHENTICATED = "not authenticated"
    PERMISSION_DENIED = "permission denied"
    STORE_RESET = "the store was created again"
    DAMAGED = "the store is damaged; restore it from a backup (docs/backup.md)"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "no answer in time"
    INTERNAL = "internal error"

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset(
    {
        ErrorKind.INVALID_ARGUMENT,
        ErrorKind.TOO_LARGE,
        ErrorKind.TRUNCATE_BOUND,
        ErrorKind.UNAUTHENTICATED,
        ErrorKind.PERMISSION_DENIED,
        ErrorKind.STORE_RESET,
        ErrorKind.DAMAGED,
    }
)


_FIXES = {
    ErrorKind.UNAUTHENTICATED: "name a file with a valid token in the URL of the committer: "
    "?token_file=FILE",
    ErrorKind.PERMISSION_DENIED: "use a token whose role and prefix cover it",
}


class ConsensusError(PenstockError):
    """An operation without an answer; always one of `Determinate` and `Indeterminate`.

    `message` holds the whole chain of causes, since the chain itself does not cross a process.
    """

    def __init__(self, kind: ErrorKind, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{kind.value}: {message}", fix=_FIXES.get(kind))
        self.kind = kind
        self.message = message
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self), self.kind, self.message, self.retry_after_ms)


def _rebuild_error(
    cls: type[ConsensusError], kind: ErrorKind, message: str, retry_after_ms: int | None
) -> ConsensusError:
    return cls(kind, message, retry_after_ms=retry_after_ms)


class Determinate(ConsensusError):
    """The operation did not happen and will not."""


class Indeterminate(ConsensusError):
    """The operation may have happened, or may yet."""


def cause_chain(error: BaseException) -> str:
    """Join the messages of `error` and of its causes, outermost first, with ": ".

    SQLSTATEs and SQLite error names are kept: without them a chain says "db error". A driver's
    message may repeat its input, so secrets are masked.
    """
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = link.message if isinstance(link, ConsensusError) else " ".join(str(link).split())
        text = text or type(link).__name__
        code = getattr(link, "sqlstate", None) or getattr(link, "sqlite_errorname", None)
        if code:
            text = f"{text} [{code}]"
        if not any(text in part for part in parts):  # a message often repeats its cause already
            parts.append(text)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return mask(": ".join(parts))


# -------------------------------------------------------------------------------------- contract


class Consensus(Protocol):
    """The interface of every caller, in the committer's process and over the network alike.

    Arguments are checked before anything is sent: a bad one is `Determinate`, of kind
    INVALID_ARGUMENT or TOO_LARGE. After `close`, every call is `Determinate(UNAVAILABLE)`.
    """

    async def incarnation(self) -> bytes:
        """Return the 16 random bytes made with this store's schema."""
        ...

    def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        """Yield every key under `prefix` that was ever created, once each, in any order.

        Administrative; keys created meanwhile may be missed.
        """
        ...

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        """Return the newest entry, None if the key was never created; linearizable iff `fresh`."""
        ...

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        """Append `new` iff the head is `new.seqno - 1`, or, for seqno 0, if the key never was.

        There is no success by equal content: sending the same entry twice mismatches.
        """
        ...

    async def compare_and_set_many(self, batch: Batch) -> list[CasResult | ConsensusError]:
        """Append independent elements, one outcome each, in order; none fails because of another.

        Elements of one key are judged in list order: a chain n, n+1 may commit as a whole.
        """
        ...

    async def compare_and_set_all(self, batch: Batch) -> CasResult:
        """Append every element, under one revision, or none; each names a different key.

        At most `ATOMIC_ELEMENTS_MAX` elements and `ATOMIC_BYTES_MAX` bytes.
        """
        ...

    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        """Return entries from `from_` on, ascending and contiguous, at most `limit`.

        Starts at the floor if `from_` is below it; empty if the key is absent or `from_` is above
        the head.
        """
        ...

    def snapshot(self, prefix: str) -> AsyncIterator[SnapshotEvent]:
        """Yield every live entry of every key under `prefix`, once, as of one revision.

        The last event is the `WatchProgress` that names that revision: every log is whole up to
        there, and `watch(prefix, revision)` goes on without a gap or a repetition. Writers and
        truncation may go on meanwhile.
        """
        ...

    async def truncate(self, key: str, seqno: int) -> int | None:
        """Delete the entries below `seqno`; return their number, None if it is not known.

        `Determinate(TRUNCATE_BOUND)` if the key is absent or `seqno` is above its head.
        """
        ...

    def subscribe(self, key: str, from_: int) -> AsyncIterator[SubscribeEvent]:
        """Yield every entry of `key` from `from_` on without a gap, as it is committed.

        `CaughtUp` each time the head is reached. An absent key waits for its entry 0. If entries
        that are due were truncated, `Resync` is the last event. Repeated entries are allowed:
        consumers drop what they have.
        """
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchEvent]:
        """Yield every entry committed after `from_revision` under `prefix`, once, in that order.

        `WatchProgress` follows each batch at once, and comes now and then when idle. Where
        truncation took entries that are due, one `WatchResync` stands for them and the stream
        goes on.
        """
        ...

    async def close(self) -> None:
        """Finish what is under way, release everything; closing twice is fine."""
        ...


# --------------------------------------------------------------------------------------- checks


def check_key(key: str) -> None:
    """Raise unless `key` is 1 to 512 bytes of UTF-8 without NUL, which every backend can index."""
    if not key:
        raise Determinate(ErrorKind.INVALID_ARGUMENT, "the key is empty")
    check_prefix(key)


def check_prefix(prefix: str) -> None:
    """Raise unless `prefix` is the beginning of a key; it may be empty."""
    try:
        size = len(prefix.encode())
    except UnicodeEncodeError as error:
        what = f"key {prefix!r} is not valid Unicode: {error.reason}"
        raise Determinate(ErrorKind.INVALID_ARGUMENT, what) from error
    if size > KEY_BYTES_MAX:
        what = f"key {prefix[:40]!r}… has {size} bytes, {KEY_BYTES_MAX} is the limit"
        raise Determinate(ErrorKind.INVALID_ARGUMENT, what)
    if "\0" in prefix:
        raise Determinate(ErrorKind.INVALID_ARGUMENT, f"key {prefix!r} contains a NUL character")


def check_seqno(seqno: int) -> None:
    _check_range("sequence number", seqno)


def check_limit(limit: int) -> None:
    _check_range("limit", limit)


def check_revision(revision: int) -> None:
    _check_range("revision", revision)


def _check_range(name: str, value: int) -> None:
    if not 0 <= value <= SEQNO_MAX:
        raise Determinate(ErrorKind.INVALID_ARGUMENT, f"{name} {value} is outside 0 … 2^63-1")


def check_position(key: str, seqno: int) -> None:
    """Check the position of an entry; -1 stands before the first one of its key."""
    check_prefix(key)
    if not -1 <= seqno <= SEQNO_MAX:
        what = f"sequence number {seqno} is outside -1 … 2^63-1"
        raise Determinate(ErrorKind.INVALID_ARGUMENT, what)


def check_entry(key: str, new: VersionedData, *, entry_bytes_max: int = ENTRY_BYTES_MAX) -> None:
    """Check one element of any compare-and-set."""
    check_key(key)
    check_seqno(new.seqno)
    if len(new.data) > entry_bytes_max:
        what = f"the entry for {key!r} has {len(new.data)} bytes, {entry_bytes_max} is the limit"
        raise Determinate(ErrorKind.TOO_LARGE, what)


def check_many(batch: Batch) -> None:
    """Check the size of a `compare_and_set_many`; its elements are checked one by one."""
    if len(batch) > MANY_ELEMENTS_MAX:
        what = f"the batch has {len(batch)} elements, {MANY_ELEMENTS_MAX} is the limit"
        raise Determinate(ErrorKind.TOO_LARGE, what)


def check_all(batch: Batch, *, entry_bytes_max: int = ENTRY_BYTES_MAX) -> None:
    """Check a `compare_and_set_all`: not empty, keys distinct, within its limits."""
    if not batch:
        raise Determinate(ErrorKind.INVALID_ARGUMENT, "an atomic batch needs an element")
    if len(batch) > ATOMIC_ELEMENTS_MAX:
        what = f"the atomic batch has {len(batch)} elements, {ATOMIC_ELEMENTS_MAX} is the limit"
        raise Determinate(ErrorKind.INVALID_ARGUMENT, what)
    seen: set[str] = set()
    size = 0
    for key, new in batch:
        check_entry(key, new, entry_bytes_max=entry_bytes_max)
        if key in seen:
            what = f"key {key!r} appears twice in one atomic batch"
            raise Determinate(ErrorKind.INVALID_ARGUMENT, what)
        seen.add(key)
        size += len(new.data)
    if size > ATOMIC_BYTES_MAX:
        what = f"the atomic batch has {size} bytes, {ATOMIC_BYTES_MAX} is the limit"
        raise Determinate(ErrorKind.TOO_LARGE, what)
