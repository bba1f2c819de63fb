"""Causal hints: how the ACK of one journal tells of the others that its transaction committed.

A transaction that wrote to several journals closes each with an ACK of its own, and a reader may
meet them far apart. The first ACK in each journal therefore names every other commit of the
transaction, so whichever a reader meets first, it knows what to wait for before it shows any of it.

All ACKs of a transaction are logged durably before the first is written, and recovery writes what
is missing. So a hint always resolves, and a transaction that failed never made one.

Readers wait only within a *cohort*, bindings of equal priority and delay. A hint that leads out of
it is dropped on purpose: a delayed read must not hold back one in real time, and the other cohort
meets the transaction's ACKs itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from msgspec import Struct

from penstock.errors import PenstockError
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.producer_frontier import ProducerFrontier


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """One producer's commit of one journal."""

    journal: str
    producer: Producer
    clock: Clock

    def __post_init__(self) -> None:
        if not self.journal:
            raise ValueError("a commit is of a journal, and a journal has a name")


class Ack(Struct, frozen=True, kw_only=True, gc=False):
    """A commit as it is written, with the other commits of its transaction or with none."""

    commit: Commit
    hints: tuple[Commit, ...] = ()


class MalformedHints(PenstockError):
    """An ACK whose hints cannot be read; its transaction cannot be shown whole."""


def write_acks(transaction: Iterable[Commit]) -> tuple[Ack, ...]:
    """The ACKs of a transaction, in the order to write them: by journal, then by producer.

    Invariant: for each journal, the hints of its first ACK and that ACK's own commit are the whole
    transaction. Later ACKs of the journal carry none, because a reader has met the first by then.
    """
    commits = sorted(transaction)
    for before, after in pairwise(commits):
        if (before.journal, before.producer) == (after.journal, after.producer):
            raise ValueError(
                f"a transaction commits {after.journal} twice by producer {after.producer}"
            )
    acks: list[Ack] = []
    for _, group in groupby(commits, key=lambda commit: commit.journal):
        first, *rest = group
        others = tuple(commit for commit in commits if commit != first)
        acks.append(Ack(commit=first, hints=others))
        acks += (Ack(commit=commit) for commit in rest)
    return tuple(acks)


def encode_hints(ack: Ack) -> list[dict[str, str]]:
    """Hints as JSON values; a producer and clock that are the ACK's own are left out."""
    own = (ack.commit.producer, ack.commit.clock)
    return [
        {"j": hint.journal}
        if (hint.producer, hint.clock) == own
        else {"j": hint.journal, "p": str(hint.producer), "c": f"{hint.clock:016x}"}
        for hint in ack.hints
    ]


def decode_hints(commit: Commit, encoded: object) -> Ack:
    """The ACK of a commit with its hints as JSON values; raises MalformedHints."""
    if not isinstance(encoded, list):
        raise _malformed(commit, "hints are a list")
    return Ack(commit=commit, hints=tuple(_decode_hint(commit, hint) for hint in encoded))


def _decode_hint(commit: Commit, hint: object) -> Commit:
    match hint:
        case {"j": str(journal), "p": str(producer), "c": str(clock), **other} if (
            journal and not other
        ):
            return Commit(journal, *_decode_stamp(commit, producer, clock))
        case {"j": str(journal), **other} if journal and not other:
            return Commit(journal, commit.producer, commit.clock)
        case _:
            raise _malformed(
                commit, f"a hint has j, and p and c or neither, unlike {str(hint)[:200]}"
            )


def _decode_stamp(commit: Commit, producer: str, clock: str) -> tuple[Producer, Clock]:
    try:
        stamp = Producer.parse(producer), Clock(int(clock, 16))
    except ValueError as error:
        raise _malformed(commit, str(error)) from None
    if f"{stamp[1]:016x}" != clock or not NEVER < stamp[1] <= CLOCK_MAX:
        raise _malformed(commit, f"a clock is 16 lower-case hex digits, not {clock!r}")
    return stamp


def _malformed(commit: Commit, why: str) -> MalformedHints:
    return MalformedHints(
        "an ACK carries malformed hints",
        where=f"journal {commit.journal}, producer {commit.producer}, clock {commit.clock:#x}",
        why=why,
        fix="find what wrote this ACK; its journal cannot be read past it",
    )


class Hint(Struct, frozen=True, kw_only=True, gc=False):
    """A commit to wait for, as one binding will read it."""

    journal: str
    binding: int
    producer: Producer
    clock: Clock


def _any_partition(_suffix: str) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class HintTarget:
    """What hints need to know of a binding: the journals it reads, and its cohort."""

    collection: str
    binding: int
    cohort: int
    reads: Callable[[str], bool] = _any_partition
    """Whether the binding's partition filter admits a journal, by its name after the collection."""


class HintIndex:
    """Finds the bindings that read a hinted journal.

    At most one collection matches a journal, because no collection's name continues another's after
    a slash.
    """

    __slots__ = ("_prefixes", "_shared", "_targets")

    def __init__(self, targets: Iterable[HintTarget]) -> None:
        by_prefix: dict[str, list[HintTarget]] = {}
        for target in sorted(targets, key=lambda target: target.binding):
            by_prefix.setdefault(target.collection + "/", []).append(target)
        self._prefixes = sorted(by_prefix)
        for outer, inner in pairwise(self._prefixes):
            if inner.startswith(outer):
                raise ValueError(f"collection {inner[:-1]} lies inside of collection {outer[:-1]}")
        self._targets: Mapping[str, Sequence[HintTarget]] = by_prefix
        # Bindings that share journals need not be neighbours: cohorts may come as 0, 1, 0.
        readers = Counter((p, one.cohort) for p, ones in by_prefix.items() for one in ones)
        self._shared = frozenset(pair for pair, count in readers.items() if count > 1)

    def bindings(self, journal: str, cohort: int) -> Iterator[int]:
        """The bindings of the cohort that read this journal, ascending."""
        prefix = self._prefix_of(journal)
        if prefix is None:
            return
        suffix = journal[len(prefix) :]
        for target in self._targets[prefix]:
            if target.cohort == cohort and target.reads(suffix):
                yield target.binding

    def _prefix_of(self, journal: str) -> str | None:
        at = bisect_right(self._prefixes, journal) - 1
        if at >= 0 and journal.startswith(self._prefixes[at]):
            return self._prefixes[at]
        return None

    def extract(
        self, ack: Ack, *, binding: int, cohort: int, exists: Callable[[str], bool]
    ) -> Iterator[Hint]:
        """What must be waited for when `binding` of `cohort` reads this ACK.

        Every hinted journal that the cohort reads, under each binding that reads it; and this very
        commit under the cohort's *other* bindings of this journal, which read it at their own pace.
        `exists` is asked of the metadata that the read was planned from. That is at least as new as
        the ACK, so a hinted journal which is not there was deleted and will not come.
        """
        for hint in ack.hints:
            if exists(hint.journal):
                for reader in self.bindings(hint.journal, cohort):
                    yield Hint(
                        journal=hint.journal,
                        binding=reader,
                        producer=hint.producer,
                        clock=hint.clock,
                    )
        own = ack.commit
        if (self._prefix_of(own.journal), cohort) in self._shared:
            for reader in self.bindings(own.journal, cohort):
                if reader != binding:
                    yield Hint(
                        journal=own.journal, binding=reader, producer=own.producer, clock=own.clock
                    )


def hint_frontier(hints: Iterable[Hint]) -> Frontier:
    """Hints as a delta to reduce: of each (journal, binding, producer), the latest."""
    latest: dict[tuple[str, int], dict[Producer, Clock]] = {}
    for hint in hints:
        clocks = latest.setdefault((hint.journal, hint.binding), {})
        clocks[hint.producer] = max(clocks.get(hint.producer, NEVER), hint.clock)
    return Frontier.gather(
        JournalFrontier(
            journal=journal,
            binding=binding,
            producers=tuple(
                ProducerFrontier(producer=producer, last_commit=NEVER, hinted_commit=clock)
                for producer, clock in clocks.items()
            ),
        )
        for (journal, binding), clocks in latest.items()
    )
