"""PURE: what a task reads: one binding per source, and in which order bindings come.

A **binding** is one source of a task: a transform of a derivation, a binding of a materialization,
or an ad-hoc read. Its `index` is its place in the task as people wrote it, so the bindings that are
disabled leave gaps; what is kept of a binding is kept under its `state_key`, which stays the same
when bindings are added or moved.

Two groupings follow from priorities and delays, and everything else in this package is built on
them. A **cohort** is the bindings of equal priority *and* delay: they see each transaction whole,
or not at all. A **lane** is the bindings of equal priority: they are read, and make progress,
together. A cohort lies in one lane.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.errors import UserError
from penstock.journal.selector import PartitionFilter
from penstock.model.hints import HintIndex, HintTarget
from penstock.model.sequence import Bounds
from penstock.model.spec import CollectionSpec

BINDINGS_MAX: Final = 65_536
SUFFIX_MAX: Final = 512
"""Characters of a read suffix."""


class KeyKind(enum.Enum):
    """Where a document's shuffle key comes from."""

    SOURCE = "is the collection's key, packed when the document was written"
    POINTERS = "is extracted from the document"
    PARTITIONS = "is made of partition fields alone, so a journal's name tells it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One source of a task, with all that reading it needs to know."""

    index: int
    """Its place in the task, disabled neighbours counted: not its place in a list of bindings."""
    collection: CollectionSpec
    read_suffix: str
    """Names this read of the collection, also among those of other tasks."""
    priority: int = 0
    """Documents of higher priority are processed first, whatever their clocks."""
    read_delay: int = 0
    """As a duration of clocks: no document is processed before it is this old."""
    cohort: int = 0
    filter_r_clocks: bool = False
    """Each document goes to one shard of its key group, rather than to all of them."""
    key: tuple[str, ...]
    """Pointers by which documents meet on a shard."""
    key_kind: KeyKind = KeyKind.SOURCE
    partitions: PartitionFilter
    bounds: Bounds = Bounds()
    columns: tuple[str, ...] | None = None
    """Top-level members of documents that the task can need, the key's among them; None is all."""

    def __post_init__(self) -> None:
        where = f"binding {self.index}, of collection {self.collection.name}"
        if not 0 <= self.index < BINDINGS_MAX:
            raise UserError(
                f"{self.index} is not the index of a binding",
                where=where,
                why=f"a task has at most {BINDINGS_MAX} bindings",
                fix="split the task",
            )
        if not 1 <= len(self.read_suffix) <= SUFFIX_MAX or not self.state_key:
            raise UserError(
                f'"{self.read_suffix[:80]}" is not a read suffix',
                where=where,
                why=f"it has 1 to {SUFFIX_MAX} characters, and some after its last slash: "
                "progress is kept under that name",
                fix="name the task, transform or resource, and keep names short",
            )
        if self.read_delay < 0:
            raise UserError(f"a read delay is negative: {self.read_delay}", where=where)

    @property
    def state_key(self) -> str:
        """What progress is kept under; unique in the task, and the same in its next version."""
        return self.read_suffix.rpartition("/")[2]

    def reads(self, journal: str) -> bool:
        """Whether it reads the journal of this full name; raises MisnamedJournal."""
        prefix = self.collection.name + "/"
        return journal.startswith(prefix) and self.partitions.matches(journal[len(prefix) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The bindings of one priority, by index and ascending."""

    priority: int = 0
    bindings: tuple[int, ...] = ()


def with_cohorts(bindings: Iterable[Binding]) -> tuple[Binding, ...]:
    """The same bindings, in order, with equal cohorts where priority and delay are equal."""
    cohorts: dict[tuple[int, int], int] = {}
    return tuple(
        replace(
            binding,
            cohort=cohorts.setdefault((binding.priority, binding.read_delay), len(cohorts)),
        )
        for binding in bindings
    )


def lanes(bindings: Sequence[Binding]) -> tuple[Lane, ...]:
    """Lanes of descending priority; a task without bindings has one, that never has anything."""
    by_priority: dict[int, list[int]] = {}
    for binding in bindings:
        by_priority.setdefault(binding.priority, []).append(binding.index)
    found = tuple(
        Lane(priority=priority, bindings=tuple(sorted(by_priority[priority])))
        for priority in sorted(by_priority, reverse=True)
    )
    return found or (Lane(),)


def hint_index(bindings: Iterable[Binding]) -> HintIndex:
    """Finds the bindings that read a journal which an ACK hints at."""
    return HintIndex(
        HintTarget(
            collection=binding.collection.name,
            binding=binding.index,
            cohort=binding.cohort,
            reads=binding.partitions.matches,
        )
        for binding in bindings
    )
