"""Causal hints: the ACK in one journal names the other journals that its transaction committed.

A transaction that wrote to several journals closes each with an ACK of its own, and a reader may
meet those ACKs far apart. The first ACK in each journal therefore names every other commit of the
transaction: whichever a reader meets first, it knows what to wait for before it shows any of it.

All ACKs of a transaction are logged durably before the first is written, and recovery writes the
missing ones. So a hint always resolves, and a failed transaction never leaves one behind.

Readers wait only within a *cohort*: bindings of equal priority and delay. A hint that leads out of
the cohort is dropped on purpose, because a delayed read must not hold back a real-time one; the
other cohort meets the transaction's ACKs itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from msgspec import Struct

from penstock.model.clock import Clock, Producer


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """One producer's commit in one journal."""

    journal: str
    producer: Producer
    clock: Clock

    def __post_init__(self) -> None:
        if not self.journal:
            raise ValueError("a commit needs the name of its journal")


class Ack(Struct, frozen=True, kw_only=True, gc=False):
    """A commit as written: with the other commits of its transaction, or with none."""

    commit: Commit
    hints: tuple[Commit, ...] = ()


def write_acks(transaction: Iterable[Commit]) -> tuple[Ack, ...]:
    """Return the ACKs of a transaction in the order to write them: by journal, then by producer.

    Invariant: in each journal, the first ACK's own commit and its hints are the whole transaction.
    Later ACKs of the journal carry none, because a reader has met the first by then.
    """
    commits = sorted(transaction)
    for before, after in pairwise(commits):
        if (before.journal, before.producer) == (after.journal, after.producer):
            raise ValueError(
                f"producer {after.producer} commits {after.journal} twice in one transaction"
            )
    acks: list[Ack] = []
    for _, group in groupby(commits, key=lambda commit: commit.journal):
        first, *rest = group
        others = tuple(commit for commit in commits if commit != first)
        acks.append(Ack(commit=first, hints=others))
        acks += (Ack(commit=commit) for commit in rest)
    return tuple(acks)


class Hint(Struct, frozen=True, kw_only=True, gc=False):
    """A commit that one binding must wait for."""

    journal: str
    binding: int
    producer: Producer
    clock: Clock


def _any_partition(_suffix: str) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class HintTarget:
    """A binding as far as hints are concerned: the journals it reads, and its cohort."""

    collection: str
    binding: int
    cohort: int
    reads: Callable[[str], bool] = _any_partition
    """True if the partition filter admits a journal, given its name after the collection."""


class HintIndex:
    """Finds the bindings that read a hinted journal.

    At most one collection matches a journal, because no collection's name is another's plus a slash
    and more.
    """

    __slots__ = ("_prefixes", "_shared", "_targets")

    def __init__(self, targets: Iterable[HintTarget]) -> None:
        by_prefix: dict[str, list[HintTarget]] = {}
        for target in sorted(targets, key=lambda target: target.binding):
            by_prefix.setdefault(target.collection + "/", []).append(target)
        self._prefixes = sorted(by_prefix)
        for outer, inner in pairwise(self._prefixes):
            if inner.startswith(outer):
                raise ValueError(f"collection {inner[:-1]} lies inside collection {outer[:-1]}")
        self._targets: Mapping[str, Sequence[HintTarget]] = by_prefix
        # Bindings that share journals need not be adjacent: cohorts may come as 0, 1, 0.
        readers = Counter((p, t.cohort) for p, targets in by_prefix.items() for t in targets)
        self._shared = frozenset(pair for pair, count in readers.items() if count > 1)

    def bindings(self, journal: str, cohort: int) -> Iterator[int]:
        """Yield the bindings of the cohort that read this journal, in ascending order."""
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
        """Yield what to wait for when `binding` of `cohort` reads this ACK.

        That is every hinted journal that the cohort reads, under each binding that reads it; and
        this very commit under the cohort's *other* bindings of this journal, which read at their
        own pace. `exists` consults the metadata that the read was planned from. It is at least as
        new as the ACK, so a hinted journal missing from it was deleted and will not appear.
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
