"""The desired state of a deployment: the catalog applied last, in a state log.

Tasks run what is recorded here, and a catalog takes effect by one compare-and-set: there is no
moment at which half of it is in effect. Specs are recorded one by one as canonical JSON, so an edit
holds only the differences. Secrets are references in specs, and stay references here.

Applying is declarative: what the given catalog does not define is removed. That removes
definitions, never documents. Tasks and collections are removed only if the caller has agreed to
each of them, because a catalog of several files is easily given without one of them; the files of
the last apply are recorded, to say which one. Whether existing documents allow a change is up to a
`Check` that the caller provides, because the answer needs more than the catalog.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from penstock.consensus.statelog import StateLog
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus
from penstock.errors import Bug, UserError
from penstock.journal.schemas import Schemas
from penstock.model.json_order import canonical_json
from penstock.model.spec import (
    CaptureSpec,
    Catalog,
    CatalogTest,
    Codec,
    CollectionSpec,
    MaterializationSpec,
    fingerprint,
    from_json,
    to_json,
)

CATALOG_KEY: Final = "catalog/main"

_REGISTERED_AT_ONCE: Final = 64

Spec = CollectionSpec | CaptureSpec | MaterializationSpec | CatalogTest


class DefinitionKind(enum.Enum):
    """The kinds of definition; the value is used in the log and in messages."""

    COLLECTION = "collection"
    CAPTURE = "capture"
    MATERIALIZATION = "materialization"
    TEST = "test"


_SPECS: Final[Mapping[DefinitionKind, type[Spec]]] = {
    DefinitionKind.COLLECTION: CollectionSpec,
    DefinitionKind.CAPTURE: CaptureSpec,
    DefinitionKind.MATERIALIZATION: MaterializationSpec,
    DefinitionKind.TEST: CatalogTest,
}

Name = tuple[DefinitionKind, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The recorded state: each spec as canonical JSON. Version 0: nothing was applied yet."""

    version: int = 0
    specs: Mapping[Name, str] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    """The main files it was applied from, as absolute paths; none if they are not known."""

    def catalog(self) -> Catalog:
        """Return the catalog as it was applied."""
        names = sorted(self.specs, key=_by_name)
        built = {name: _read(name[0], self.specs[name]) for name in names}

        def all_of(kind: DefinitionKind) -> tuple[Any, ...]:
            return tuple(spec for (k, _), spec in built.items() if k is kind)

        return Catalog(
            collections=all_of(DefinitionKind.COLLECTION),
            captures=all_of(DefinitionKind.CAPTURE),
            materializations=all_of(DefinitionKind.MATERIALIZATION),
            tests=all_of(DefinitionKind.TEST),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """The changes of one `apply`, valid for the state of one version."""

    version: int
    put: Mapping[Name, str]
    remove: tuple[Name, ...]
    files: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One changed definition; `before` and `after` are not both None."""

    kind: DefinitionKind
    name: str
    before: Spec | None
    after: Spec | None

    @property
    def action(self) -> str:
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """The changes of an apply, and the version that they made, or would make."""

    version: int
    changes: tuple[Change, ...]
    tables: tuple[TableEffect, ...] = ()
    """What it means for tables that were filled before; see `penstock.applying`."""
    files_before: tuple[str, ...] = ()
    """The main files that the catalog before was applied from."""

    @property
    def removed(self) -> tuple[Name, ...]:
        """The tasks and collections that are removed; a derivation has its collection's name.

        A task that is renamed is not removed.
        """
        found = ((c.kind, c.name) for c in self.changes if _removes(c))
        return tuple(name for name in found if name not in self.renamed)

    @property
    def renamed(self) -> Mapping[Name, str]:
        """The new names of tasks that are renamed."""
        return {
            (change.kind, former): change.name
            for change in self.changes
            if (former := getattr(change.after, "renamed_from", None)) is not None
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableEffect:
    """What the next run of a task will do to a table, because its catalog has changed."""

    task: str
    binding: int
    table: str
    column: str | None = None
    """None: it is about all of its rows."""
    was: str | None = None
    now: str | None = None
    """Types of the column."""
    how: str
    """`in place`, `rebuild`, `refused`, `binding disabled` or `task disabled`."""
    says: str
    """For people: "bigint becomes double precision"."""
    fix: str | None = None
    """What to write so that the table can follow."""


Check = Callable[[Change], Awaitable[str | None]]
"""Returns why a change must not be made; None if it may."""


class ChangeRefused(UserError):
    """The catalog is valid, but does not fit the existing documents."""


class RemovalRefused(UserError):
    """The catalog leaves out tasks or collections, and nobody has agreed to remove them."""


class NothingApplied(UserError):
    """This data directory has no catalog yet."""


async def load(store: Consensus) -> Catalog:
    """Load the catalog applied last; raises NothingApplied."""
    replica = await load_log(store, CATALOG_KEY, DesiredMachine())
    if not replica.state.version:
        raise NothingApplied(
            "no catalog has been applied here",
            fix='penstock apply catalog.yaml (in Python: p.apply("catalog.yaml"))',
        )
    return replica.state.catalog()


async def codecs(store: Consensus) -> dict[str, Codec]:
    """Return how the files of collections are compressed, where the catalog says it."""
    recorded = (await load_log(store, CATALOG_KEY, DesiredMachine())).state.catalog()
    return {c.name: c.fragments.codec for c in recorded.collections if c.fragments.codec}


async def apply(
    store: Consensus,
    catalog: Catalog,
    *,
    check: Check | None = None,
    objections: Sequence[str] = (),
    dry_run: bool = False,
    files: Sequence[str] | None = None,
    may_remove: Collection[Name] | None = None,
) -> ApplyResult:
    """Make `catalog` the desired state; return what that changes, which may be nothing.

    One error lists all of `check`'s objections, and those that the caller has of its own. If
    another apply commits between the checks and this commit, the checks run again on the state
    that it left. `files` are the main files of the catalog; None leaves those that are recorded.

    Of tasks and collections, only those in `may_remove` may be removed, or all of them if it is
    None; otherwise `RemovalRefused` is raised. A dry run may plan to remove anything.

    Write schemas are registered first, so that writers find them and need no right to write
    anything but journals.
    """
    schemas = Schemas(store)
    log = await StateLog.open(store, CATALOG_KEY, DesiredMachine())
    while True:
        state = log.state
        changes = plan(state, catalog)
        await _check(changes, check, objections)
        unchanged = not changes and state.version
        result = ApplyResult(
            version=state.version + (not unchanged), changes=changes, files_before=state.files
        )
        if dry_run:
            return result
        check_removals(result, files, may_remove)
        await _register(schemas, catalog)
        if unchanged:
            return result
        edit = _edit(state, changes, state.files if files is None else files)
        try:
            committed = await log.append(partial(_unless_moved, edit))
        except _Moved:
            continue
        if committed is None:
            raise Bug("an edit of the catalog was not written", where=CATALOG_KEY)
        return dataclasses.replace(result, version=committed.state.version)


async def _register(schemas: Schemas, catalog: Catalog) -> None:
    """Register all write schemas, even unchanged ones: older releases left it to writers."""
    specs = iter(catalog.collections)
    while batch := list(islice(specs, _REGISTERED_AT_ONCE)):
        puts = (schemas.put(spec.write_schema) for spec in batch)
        for outcome in await asyncio.gather(*puts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


async def _check(changes: tuple[Change, ...], check: Check | None, others: Sequence[str]) -> None:
    found = [] if check is None else [(c, why) for c in changes if (why := await check(c))]
    objections = [*(f"{c.kind.value} {c.name}: {why}" for c, why in found), *others]
    if objections:
        listed = "\n".join(f"  {each}" for each in objections)
        raise ChangeRefused(f"the catalog cannot be applied\n{listed}")


# ------------------------------------------------------------------------------------- decisions


def plan(state: Desired, catalog: Catalog) -> tuple[Change, ...]:
    """Return how `catalog` differs from the recorded state, sorted by kind and name.

    Specs are equal if their fingerprints are: a test that moved to another line did not change.
    """
    wanted: dict[Name, Spec] = {
        **{(DefinitionKind.COLLECTION, spec.name): spec for spec in catalog.collections},
        **{(DefinitionKind.CAPTURE, spec.name): spec for spec in catalog.captures},
        **{(DefinitionKind.MATERIALIZATION, spec.name): spec for spec in catalog.materializations},
        **{(DefinitionKind.TEST, spec.name): spec for spec in catalog.tests},
    }
    changes = []
    for kind, name in sorted(wanted.keys() | state.specs.keys(), key=_by_name):
        text, after = state.specs.get((kind, name)), wanted.get((kind, name))
        before = None if text is None else _read(kind, text)
        if before is None or after is None or fingerprint(before) != fingerprint(after):
            changes.append(Change(kind=kind, name=name, before=before, after=after))
    return tuple(changes)


def _removes(change: Change) -> bool:
    """True if a change removes a task or a collection."""
    before, after = change.before, change.after
    if isinstance(before, CollectionSpec) and isinstance(after, CollectionSpec):
        return before.derivation is not None and after.derivation is None
    return after is None and isinstance(before, CollectionSpec | CaptureSpec | MaterializationSpec)


def check_removals(
    result: ApplyResult, files: Sequence[str] | None, may_remove: Collection[Name] | None
) -> None:
    """Raise `RemovalRefused` if tasks or collections would be removed that may not be."""
    allowed = set(result.removed if may_remove is None else may_remove)
    names = set(result.removed) - allowed
    if not names:
        return
    refused = [change for change in result.changes if (change.kind, change.name) in names]
    listed = "\n".join(f"  {removed_word(change)} {change.name}" for change in refused)
    count = "1 definition" if len(refused) == 1 else f"{len(refused)} definitions"
    missing = ", ".join(file for file in result.files_before if file not in (files or ()))
    raise RemovalRefused(
        f"nothing was applied: this would remove {count}\n{listed}",
        why=f"the current catalog was also applied from {missing}"
        if files and missing
        else "the current catalog has them, and the given one does not",
        fix="give all files of the catalog together; or, to remove them, penstock apply --yes "
        "(in Python: remove=True)",
    )


def removed_word(change: Change) -> str:
    """Say what a change removes."""
    if not isinstance(change.before, CollectionSpec) or change.before.derivation is None:
        return change.kind.value
    return "derivation" if change.after is not None else "derived collection"


def _edit(state: Desired, changes: tuple[Change, ...], files: Sequence[str]) -> Edit:
    return Edit(
        version=state.version,
        files=tuple(files),
        put={
            (c.kind, c.name): canonical_json(to_json(c.after))
            for c in changes
            if c.after is not None
        },
        remove=tuple((c.kind, c.name) for c in changes if c.after is None),
    )


class _Moved(Exception):
    """Another apply committed first."""


def _unless_moved(edit: Edit, current: Desired) -> Edit:
    if current.version != edit.version:
        raise _Moved
    return edit


def _read(kind: DefinitionKind, text: str) -> Spec:
    return from_json(_SPECS[kind], json.loads(text))


_ORDER: Final = {kind: position for position, kind in enumerate(DefinitionKind)}


def _by_name(name: Name) -> tuple[int, str]:
    return _ORDER[name[0]], name[1]


# --------------------------------------------------------------------------------------- the log

_KINDS: Final = frozenset(kind.value for kind in DefinitionKind)
"""Older releases recorded storage mappings too, which nothing ever read."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class DesiredMachine:
    """The log's machine (`consensus.replica.Machine`): msgpack arrays, specs as JSON text."""

    format = 2
    """From 2 on, with the files of the catalog."""

    def initial(self) -> Desired:
        return Desired()

    def apply(self, state: Desired, diff: Edit, revision: int) -> Desired:
        if diff.version != state.version:
            raise Bug(
                f"an edit for version {diff.version} met version {state.version}", where=CATALOG_KEY
            )
        kept = {name: text for name, text in state.specs.items() if name not in diff.remove}
        return Desired(version=state.version + 1, specs={**kept, **diff.put}, files=diff.files)

    def encode_diff(self, diff: Edit) -> bytes:
        removed = [(kind.value, name) for kind, name in diff.remove]
        return _encode((diff.version, _specs_out(diff.put), removed, diff.files))

    def decode_diff(self, data: bytes, format: int) -> Edit:  # noqa: A002
        version, put, remove, *files = _decode(data)
        removed = tuple((DefinitionKind(kind), name) for kind, name in remove if kind in _KINDS)
        return Edit(version=version, put=_specs_in(put), remove=removed, files=_files_in(files))

    def encode_state(self, state: Desired) -> bytes:
        return _encode((state.version, _specs_out(state.specs), state.files))

    def decode_state(self, data: bytes, format: int, revision: int) -> Desired:  # noqa: A002
        version, specs, *files = _decode(data)
        return Desired(version=version, specs=_specs_in(specs), files=_files_in(files))


def _specs_out(specs: Mapping[Name, str]) -> list[tuple[str, str, str]]:
    return [(kind.value, name, text) for (kind, name), text in specs.items()]


def _specs_in(specs: list[tuple[str, str, str]]) -> dict[Name, str]:
    return {(DefinitionKind(kind), name): text for kind, name, text in specs if kind in _KINDS}


def _files_in(found: list[list[str]]) -> tuple[str, ...]:
    return tuple(found[0]) if found else ()
