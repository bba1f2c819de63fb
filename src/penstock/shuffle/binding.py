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

import difflib
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.errors import UserError
from penstock.journal.names import encode_value
from penstock.journal.selector import MisnamedJournal, PartitionFilter
from penstock.model import pointer
from penstock.model.clock import CLOCK_MAX, UNIX_EPOCH, Clock, duration, from_rfc3339
from penstock.model.columns import Column
from penstock.model.columns import columns as layout
from penstock.model.hints import HintIndex, HintTarget
from penstock.model.json_order import Json
from penstock.model.schema import compiled
from penstock.model.sequence import Bounds
from penstock.model.spec import (
    Catalog,
    CollectionSpec,
    DerivationSpec,
    MaterializationBinding,
    MaterializationSpec,
    Selector,
    Source,
    Transform,
)

BINDINGS_MAX: Final = 65_536
SUFFIX_MAX: Final = 512
"""Characters of a read suffix."""
PRIORITY_MAX: Final = (1 << 31) - 1
"""Priorities are INT columns where documents are sorted."""
READ_DELAY_MAX_S: Final = 100 * 366 * 86_400
"""A century: a document's clock and its delay together stay far inside of 64 bits."""

AD_HOC: Final = "ad-hoc"
UNBOUNDED: Final = Bounds()


class KeyKind(enum.Enum):
    """The source of a document's shuffle key."""

    SOURCE = "is the collection's key, packed when the document was written"
    POINTERS = "is extracted from the document"
    PARTITIONS = "is made of partition fields alone, so a journal's name holds it"


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
    """A duration of clocks: no document is processed before it is this old."""
    cohort: int = 0
    filter_r_clocks: bool = False
    """Each document goes to one shard of its key group, rather than to all of them."""
    key: tuple[str, ...]
    """Pointers by which documents meet on a shard."""
    key_kind: KeyKind = KeyKind.SOURCE
    partitions: PartitionFilter
    bounds: Bounds = UNBOUNDED
    columns: tuple[str, ...] | None = None
    """Top-level columns of the read layout that the task can need, the key's among them; None is
    all. Never fewer than are needed; a caller that knows more may read fewer."""

    def __post_init__(self) -> None:
        where = f'binding {self.index}, which reads {self.collection.name} as "{self._shown}"'
        if not 0 <= self.index < BINDINGS_MAX:
            raise UserError(
                f"{self.index} is not the index of a binding",
                where=where,
                why=f"a task has at most {BINDINGS_MAX} bindings, the first of them 0",
                fix="split the task",
            )
        if not 1 <= len(self.read_suffix) <= SUFFIX_MAX or not self.state_key:
            raise UserError(
                f"a read suffix has 1 to {SUFFIX_MAX} characters, and some of them after its last "
                f"slash; this one has {len(self.read_suffix)}",
                where=where,
                why="progress is kept under that name",
                fix="give the task and its transform or resource names, and short ones",
            )
        if not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise UserError(
                f"{self.priority} is too large for a priority",
                where=where,
                fix=f"use a number up to {PRIORITY_MAX}; only their order counts",
            )
        if not 0 <= self.read_delay <= duration(READ_DELAY_MAX_S):
            raise UserError(
                "a read delay is not between nothing and a century",
                where=where,
                fix="choose a shorter readDelay",
            )

    @property
    def state_key(self) -> str:
        """The key of its progress: unique in the task, and the same in its next version."""
        return self.read_suffix.rpartition("/")[2]

    def at_generation(self, generation: int) -> Binding:
        """Return the same binding, which reads its source from the start for this generation."""
        name = self.read_suffix.rpartition(".v")[0]
        return replace(self, read_suffix=f"{name}.v{generation}")

    @property
    def _shown(self) -> str:
        return self.read_suffix if len(self.read_suffix) <= 80 else f"{self.read_suffix[:80]}…"

    def reads(self, journal: str) -> bool:
        """True if it reads the journal of this full name; raises MisnamedJournal."""
        prefix = self.collection.name + "/"
        if journal in ("", prefix):
            raise MisnamedJournal(f'"{journal}" is not the name of a journal')
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


# -------------------------------------------------------------------------------- from the catalog


def task_bindings(catalog: Catalog, name: str) -> tuple[Binding, ...]:
    """The bindings of a task; the name of a collection is an ad-hoc read of all of it.

    The name of a derived collection is that of its derivation.
    """
    for materialization in catalog.materializations:
        if materialization.name == name:
            return materialization_bindings(catalog, materialization)
    collection = catalog.collection(name)
    if collection is None:
        raise _unknown_task(catalog, name)
    if collection.derivation is not None:
        return derivation_bindings(catalog, collection)
    return ad_hoc_bindings(collection)


def materialization_bindings(
    catalog: Catalog,
    spec: MaterializationSpec,
    *,
    path: Callable[[Json], Sequence[str]] | None = None,
) -> tuple[Binding, ...]:
    """The active bindings of a materialization.

    Documents meet by the key of their row: the collection's, or the fields of `groupBy`. They are
    never delayed, and are read whole: which fields are stored, whether the root document is among
    them, and what reductions and deletions look at, is settled with the connector.

    `path` is how the connector names a resource. Without it, a resource is named by its texts in
    the order of their members: {table: orders, schema: public} is public, orders.
    """
    task = f"materialization {spec.name}"
    bindings = []
    for index, binding in enumerate(spec.bindings):
        if binding.disable:
            continue
        where = f"{task}, binding {index}"
        collection = _collection(catalog, binding.source, where)
        key = _group_key(binding, collection, where)
        resource = (path or _texts)(binding.resource.value) or (collection.name,)
        name = f"{resource_name(resource)}.v{binding.backfill}"
        bindings.append(
            Binding(
                index=index,
                collection=collection,
                read_suffix=f"materialize/{spec.name}/{name}",
                priority=binding.priority,
                key=key,
                key_kind=key_kind(collection, key),
                partitions=_partitions(collection, binding.source.selector),
                bounds=_bounds(binding.source.not_before, binding.source.not_after, where),
            )
        )
    return _of_task(task, bindings)


def resource_name(path: Sequence[str]) -> str:
    """Return the name under which the progress of a resource is kept."""
    return ",".join(map(encode_value, path))


def derivation_bindings(catalog: Catalog, collection: CollectionSpec) -> tuple[Binding, ...]:
    """The active transforms of a derived collection.

    Documents are read whole: what a lambda looks at is known to the engine that compiles it.
    """
    task = f"derivation {collection.name}"
    derivation = collection.derivation
    if derivation is None:
        raise UserError(f"collection {collection.name} is not derived", fix="read it ad hoc")
    bindings = []
    for index, transform in enumerate(derivation.transforms):
        if transform.disable:
            continue
        where = f"{task}, transform {transform.name}"
        source = _collection(catalog, transform.source, where)
        name = f"{encode_value(transform.name)}.v{transform.backfill}"
        bindings.append(
            Binding(
                index=index,
                collection=source,
                read_suffix=f"derive/{collection.name}/{name}",
                priority=transform.priority,
                read_delay=duration(min(transform.read_delay_s, READ_DELAY_MAX_S + 1)),
                filter_r_clocks=_is_read_only(derivation, transform),
                key=transform.shuffle,
                key_kind=key_kind(source, transform.shuffle),
                partitions=_partitions(source, transform.source.selector),
                bounds=_bounds(transform.source.not_before, transform.source.not_after, where),
            )
        )
    return _of_task(task, bindings)


def ad_hoc_bindings(
    collection: CollectionSpec,
    selector: Selector = Selector(),  # noqa: B008 - a frozen value
    not_before: str | None = None,
    not_after: str | None = None,
    *,
    columns: Iterable[str] | None = None,
) -> tuple[Binding, ...]:
    """A read of one collection that is no task's; times are RFC 3339, columns all by default."""
    where = f"an ad-hoc read of {collection.name}"
    fields = [field.name for field in collection.partitions]
    for each in (*selector.include, *selector.exclude):
        if each.field not in fields:
            raise UserError(
                f'"{each.field}" is not a partition of {collection.name}',
                where=where,
                fix=_instead(each.field, fields, "partitions"),
            )
    return _of_task(
        where,
        [
            Binding(
                index=0,
                collection=collection,
                read_suffix=AD_HOC,
                key=collection.key,
                partitions=_partitions(collection, selector),
                bounds=_bounds(not_before, not_after, where),
                columns=None if columns is None else _chosen(collection, columns, where),
            )
        ],
    )


def key_kind(collection: CollectionSpec, key: Sequence[str]) -> KeyKind:
    """Return the most specific kind of a shuffle key of these pointers."""
    if tuple(key) == collection.key:
        return KeyKind.SOURCE
    locations = {field.location for field in collection.partitions}
    return KeyKind.PARTITIONS if locations.issuperset(key) else KeyKind.POINTERS


def columns_of(collection: CollectionSpec, locations: Iterable[str]) -> tuple[str, ...] | None:
    """The top-level columns, in their order, that hold these locations; None if it takes all.

    A member that the read schema does not name is in the column of extra members, and an explicit
    null of one that may be missing is in the column of nulls.
    """
    root = layout(compiled(collection.read_schema.text).shape)
    members = {member.name: member for member in root.members}
    wanted: set[str | None] = set()
    for location in locations:
        if not location:
            return None
        name = pointer.parse(location)[0]
        member = members.get(name)
        if member is None:
            wanted.add(root.extra)
            continue
        if member.column is not None:
            wanted.add(name)
        if member.listed:
            wanted.add(root.nulls)
    return tuple(name for name in _column_names(root) if name in wanted)


# ----------------------------------------------------------------------------------------- details


def _of_task(task: str, bindings: Sequence[Binding]) -> tuple[Binding, ...]:
    first: dict[str, Binding] = {}
    for binding in bindings:
        other = first.setdefault(binding.state_key, binding)
        if other is not binding:
            raise UserError(
                f'bindings {other.index} and {binding.index} are both called "{binding.state_key}"',
                where=task,
                why="progress is kept under that name, so it is one binding's only",
                fix="give them different names, resources or backfill counters",
            )
    return with_cohorts(bindings)


def _collection(catalog: Catalog, source: Source, where: str) -> CollectionSpec:
    collection = catalog.collection(source.collection)
    if collection is None:
        raise UserError(
            f"there is no collection {source.collection}",
            where=where,
            why="the binding reads it",
            fix=_instead(source.collection, [c.name for c in catalog.collections], "collections"),
        )
    return collection


def _unknown_task(catalog: Catalog, name: str) -> UserError:
    if any(capture.name == name for capture in catalog.captures):
        return UserError(
            f"{name} is a capture, and reads no collection",
            fix="name a derivation, a materialization, or a collection that it fills",
        )
    known = [task.name for task in catalog.materializations]
    known += [collection.name for collection in catalog.collections]
    return UserError(f"there is no task or collection {name}", fix=_instead(name, known, "known"))


def _instead(name: str, known: Sequence[str], listed: str) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{listed}: {', '.join(sorted(known)[:10]) or 'none'}"


def _group_key(
    binding: MaterializationBinding, collection: CollectionSpec, where: str
) -> tuple[str, ...]:
    """All documents of a row must meet, whatever the collection's own key is."""
    if not binding.fields.group_by:
        return collection.key
    locations = []
    for name in binding.fields.group_by:
        field = collection.field(name)
        if field is None:
            raise UserError(
                f'"{name}" is not a field of {collection.name}',
                where=where,
                why="groupBy names it",
                fix=_instead(name, [f.name for f in collection.fields], "fields"),
            )
        locations.append(field.location)
    return tuple(locations)


def _texts(resource: Json) -> Sequence[str]:
    """Options such as `delta_updates` are no text: changing them does not read everything again."""
    members = sorted(resource.items()) if isinstance(resource, dict) else ()
    return [text for _, text in members if isinstance(text, str) and text]


def _is_read_only(derivation: DerivationSpec, transform: Transform) -> bool:
    """True if a document may be seen by a single shard of its key group.

    It may if it changes nothing that later documents of its key have to find there: nothing has to
    meet, or the derivation keeps no state at all.
    """
    stateless = derivation.using == "spark" or (
        derivation.using == "sqlite" and not derivation.migrations
    )
    return transform.shuffle_any or stateless


def _partitions(collection: CollectionSpec, selector: Selector) -> PartitionFilter:
    return PartitionFilter.of((field.name for field in collection.partitions), selector)


def _bounds(not_before: str | None, not_after: str | None, where: str) -> Bounds:
    bounds = Bounds(
        not_before=_clock(not_before, where) if not_before else UNIX_EPOCH,
        not_after=_clock(not_after, where) if not_after else CLOCK_MAX,
    )
    if bounds.not_before > bounds.not_after:
        raise UserError(
            f"notAfter {not_after} is earlier than notBefore {not_before}",
            where=where,
            why="no document is published between them",
            fix="exchange them",
        )
    return bounds


def _clock(text: str, where: str) -> Clock:
    try:
        return from_rfc3339(text)
    except ValueError:
        raise UserError(
            f'"{text}" is not a time with a zone',
            where=where,
            fix="write RFC 3339, for example 2026-01-31T08:00:00Z",
        ) from None


def _chosen(collection: CollectionSpec, columns: Iterable[str], where: str) -> tuple[str, ...]:
    """The columns that a reader names, and those of the key, by which documents are routed."""
    known = _column_names(layout(compiled(collection.read_schema.text).shape))
    wanted = {*columns, *(columns_of(collection, collection.key) or known)}
    for name in sorted(wanted.difference(known)):
        raise UserError(
            f"{collection.name} has no column {name}",
            where=where,
            fix=_instead(name, known, "columns"),
        )
    return tuple(name for name in known if name in wanted)


def _column_names(root: Column) -> list[str]:
    """Names in stored order: members by name, then the hidden ones."""
    names = [member.name for member in root.members if member.column is not None]
    return [*names, *(name for name in (root.nulls, root.extra) if name is not None)]
