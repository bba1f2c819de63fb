"""The seam between the committer and a durable store.

A `Backend` knows how to keep entries; it does not know callers. Caching, subscriptions, watches,
admission and group commit exist once, in the committer, on top of the few operations here:

    callers → Consensus (committer: checks, admission, cache, hub) → GroupCommit → Backend

Arguments that arrive here have been checked (`store.check_*`). Writes have one shape: a *unit* is
one or more appends, to distinct keys, that commit together or not at all. A single compare-and-set
is a unit of one, a `compare_and_set_all` a larger one, and a store transaction carries any number
of units, each with an outcome of its own.

**Who wins is decided in one place**, `judge`, for every backend: it takes the heads that the
transaction has locked and walks the units in order. A backend's part is to hold those heads still
from the reading to the commit, and to write what was decided.

**A handle is bound to one store**, the incarnation it found when it was opened, and proves it
inside every transaction, reading or writing (`prove`). So an operation that was meant for one store
cannot happen in another that took its place, however long it waited: it is
`Determinate(STORE_RESET)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.consensus.store import (
    SCAN_ALL,
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    VersionedData,
)
from penstock.errors import UserError

Unit = tuple[tuple[str, VersionedData], ...]
"""Appends that commit together or not at all; keys are distinct."""

Position = tuple[str, int]
"""The position of an entry in the store: its key and seqno."""

SCHEMA_VERSION = 1
"""Version of the tables of both databases, written with the incarnation."""

LIST_PAGE = 1_000
"""Keys per page of `list_keys`: some ten milliseconds of work, at most half a megabyte."""

PAGE_BYTES = 8 << 20
"""Soft limit of one page of entries; the entry that passes it is still in the page."""

PAGE_ENTRIES = 2_048
"""Soft limit of one page of a revision read; a page ends only between revisions."""

_LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the committer has to know about a kind of backend."""

    name: str
    cache_heads: bool
    """True if foreign writers are rare enough for a head cache to be on by default."""
    foreign_poll_s: float
    """Interval of polls of `revision()`, which notice commits of other processes."""
    commit_concurrency: int
    """Store transactions worth running at once; commits are serial, their preparation is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """Limits of a pool of database connections, each with what it protects."""

    connections_max: int = 8
    """Commits are serial and reads short: more connections only add work for the server."""
    commit_connections: int = 2
    """Connections of these that no read may take: readers cannot keep commits waiting."""
    wait_s: float = 10.0
    """How long a caller may wait for a free connection before it is refused."""
    lifetime_s: float = 300.0
    """Connections are replaced, so that they spread over servers behind an address again."""
    connect_timeout_s: int = 5
    statement_timeout_s: float = 30.0
    call_timeout_s: float = 40.0
    """How long to wait for a server that neither answers nor hangs up."""
    idle_in_transaction_s: float = 10.0
    """A committer that was paused in a transaction holds row locks: the server ends it."""
    lock_s: float = 15.0
    """Waiting for a lock; longer than it takes to end a committer that was paused."""
    close_s: float = 5.0
    """How long closing waits for calls that are under way before it hangs up on the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOutcome:
    """The outcomes of the units of one transaction, in their order.

    `revision` is None iff no unit is COMMITTED. An unknown outcome is an `Indeterminate` in
    `outcomes`; losers that lose against the committed heads too are mismatches even then.
    """

    revision: int | None
    outcomes: tuple[CasResult | ConsensusError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPage:
    """Entries of one key; `more`: the limit in bytes ended the page before `limit` or the head."""

    entries: tuple[VersionedData, ...]
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionPage:
    """Entries with `after < revision <= upto` under a prefix, ordered by revision, key, seqno.

    Complete: every entry of that range still in the store is here. `more`: the store has later
    revisions, read on from `upto`. `lost`: truncation took entries of the range asked for.
    """

    entries: tuple[tuple[str, VersionedData], ...]
    upto: int
    more: bool
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePage:
    """Live entries behind a position, by key and then seqno, as of `revision`; `more`: read on."""

    entries: tuple[tuple[str, VersionedData], ...]
    revision: int
    more: bool


class Backend(Protocol):
    """A durable store. Every method raises `ConsensusError` only; reads are linearizable."""

    traits: Traits
    url: str
    """Masked, for messages."""
    incarnation: bytes
    """Incarnation of the store this handle was opened on; every call checks that it exists."""

    async def revision(self) -> int:
        """The greatest committed revision, 0 in an empty store; cheap, made to be polled."""
        ...

    async def list_page(self, prefix: str, after: str) -> list[str]:
        """At most `LIST_PAGE` keys under `prefix` above `after`, in order; short iff the last."""
        ...

    async def head(self, key: str) -> VersionedData | None: ...

    async def heads(self, keys: Sequence[str]) -> dict[str, int]:
        """Head seqnos of those of `keys` that exist, without their data."""
        ...

    async def heads_under(self, prefix: str) -> tuple[int, dict[str, int]]:
        """The revision, and as of it the head seqno of every key under `prefix`."""
        ...

    async def scan(
        self, key: str, from_: int, limit: int, *, bytes_max: int = SCAN_ALL
    ) -> ScanPage:
        """Contiguous entries, from one snapshot, from `from_` or the floor, the greater of them.

        At most `limit`; ends early behind the entry that passes `bytes_max`. A caller that pages
        must see each page begin where the last one ended, and start over if truncation came
        between.
        """
        ...

    async def floor(self, key: str) -> int:
        """The smallest seqno still stored; 0 if the key is absent."""
        ...

    async def commit(self, units: Sequence[Unit]) -> CommitOutcome:
        """Run `units`, in order, in one transaction.

        Raises `Determinate` only, and then nothing of any unit happened. Must not be cancelled:
        run it in a task of its own and shield it.
        """
        ...

    async def truncate(self, key: str, seqno: int) -> int | None: ...

    async def entries_since(self, prefix: str, revision: int) -> RevisionPage:
        """The next page of entries above `revision` under `prefix`, from one snapshot.

        Whole revisions only; at least one, and up to about `PAGE_ENTRIES` and `PAGE_BYTES`.
        """
        ...

    async def live_page(self, prefix: str, after: Position) -> LivePage:
        """The next page of entries under `prefix` behind `after`, from one snapshot.

        Up to `PAGE_ENTRIES`; ends early behind the entry that passes `PAGE_BYTES`.
        """
        ...

    async def close(self) -> None: ...


# ------------------------------------------------------------------------------------- decisions


def prove(bound: bytes, found: bytes | None) -> None:
    """Raise unless the incarnation `found` is the one that a handle or caller is `bound` to."""
    if found != bound:
        now = "none" if found is None else found.hex()
        what = f"knew {bound.hex()}, found {now}: its contents are gone"
        raise Determinate(ErrorKind.STORE_RESET, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about a batch, before anything is written.

    `final[i]` is true for a losing unit that loses against the committed heads too, so that its
    answer stands whatever becomes of the transaction; false for winners.
    """

    wins: tuple[bool, ...]
    final: tuple[bool, ...]
    heads: Mapping[str, int]
    """New head of every key that moves."""
    entries: Unit
    """The appends of the winning units, in order."""


def judge(heads: Mapping[str, int], units: Sequence[Unit]) -> Verdict:
    """Decide which `units` win if they run in order against the locked `heads`, without others.

    A key that is not in `heads` has never been created. For each key the result is the same as
    running its appends sequentially at commit time, so I1 to I4 hold by induction over batches.
    """
    moved: dict[str, int] = {}
    entries: list[tuple[str, VersionedData]] = []
    wins: list[bool] = []
    final: list[bool] = []
    for unit in units:
        won = all(new.seqno == moved.get(k, heads.get(k, -1)) + 1 for k, new in unit)
        if won:
            moved.update((key, new.seqno) for key, new in unit)
            entries += unit
        wins.append(won)
        # The transaction commits as a whole or not at all, so a loser faces one of two states:
        # the one it was judged in, or the untouched one.
        final.append(not won and any(new.seqno != heads.get(k, -1) + 1 for k, new in unit))
    return Verdict(wins=tuple(wins), final=tuple(final), heads=moved, entries=tuple(entries))


def settle(verdict: Verdict, revision: int | None) -> CommitOutcome:
    """Return the outcomes of a transaction that committed, or had nothing to commit."""
    return CommitOutcome(
        revision=revision,
        outcomes=tuple(
            CasResult.COMMITTED if won else CasResult.EXPECTATION_MISMATCH for won in verdict.wins
        ),
    )


def unsettled(verdict: Verdict, error: ConsensusError) -> CommitOutcome:
    """Return the outcomes of a transaction whose COMMIT was sent and not answered."""
    return CommitOutcome(
        revision=None,
        outcomes=tuple(
            CasResult.EXPECTATION_MISMATCH if final else error for final in verdict.final
        ),
    )


def page_end(
    rows: Sequence[tuple[int, int]],
    *,
    entries_max: int = PAGE_ENTRIES,
    bytes_max: int = PAGE_BYTES,
) -> int | None:
    """Return the last revision of a page of `(revision, bytes)` rows; None if all rows fit.

    Rows are ordered by revision. The page ends with the last revision that fits whole, but has at
    least one, so that a reader makes progress.
    """
    size_total = 0
    for index, (revision, size) in enumerate(rows):
        size_total += size
        if index == entries_max or size_total > bytes_max:
            whole = [earlier for earlier, _ in rows[:index] if earlier < revision]
            return whole[-1] if whole else rows[0][0]
    return None


def prefix_range(prefix: str) -> tuple[str, str]:
    """Return the smallest and greatest key under a prefix, both inclusive, in UTF-8 byte order.

    A key has at most 512 bytes, so 128 times the last character (4 bytes) is behind all of them.
    """
    return prefix, prefix + _LAST_CHARACTER * 128


def truncate_bound(key: str, seqno: int, head: int | None) -> Determinate:
    """Return the refusal to truncate above the head, which would delete it (I3)."""
    state = "does not exist" if head is None else f"has its head at {head}"
    return Determinate(
        ErrorKind.TRUNCATE_BOUND, f"cannot truncate {key!r} below {seqno}: it {state}"
    )


def check_schema_version(found: int) -> None:
    """Refuse a store whose tables have a version that this release does not know."""
    if found != SCHEMA_VERSION:
        raise UserError(
            f"the consensus store has schema version {found}, this release knows {SCHEMA_VERSION}",
            fix="run the release that wrote it, or a newer one",
        )
