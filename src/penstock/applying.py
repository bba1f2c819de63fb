"""Applies catalogs: records one as the desired state if what is stored allows it.

A change is refused before anything is recorded if documents in journals could not be read any more
(`catalog.evolution`), or if a table cannot follow it and its binding says `abort`. What is known of
a table is the target as it was applied last, from the task's recovery log; no endpoint is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.catalog import desired
from penstock.catalog.desired import ApplyResult, Name, NothingApplied, TableEffect
from penstock.catalog.evolution import fits_stored
from penstock.connectors import builtin
from penstock.errors import PenstockError
from penstock.model.spec import Catalog, MaterializationSpec, OnIncompatible, fingerprint
from penstock.runtime.history import load_history
from penstock.runtime.kinds import Outlook, outlooks, reads_of, refill_fix

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from penstock.catalog.build import BuildResult
    from penstock.consensus.store import Consensus

_HOW: Final[Mapping[OnIncompatible, str]] = {
    "abort": "refused",
    "backfill": "rebuild",
    "disableBinding": "binding disabled",
    "disableTask": "task disabled",
}


async def apply(
    store: Consensus,
    built: BuildResult,
    *,
    dry_run: bool = False,
    files: Sequence[str] | None = None,
    may_remove: Collection[Name] | None = None,
) -> ApplyResult:
    """Make a catalog the desired state; raises `ChangeRefused` with everything that is against it.

    The result says what happens to tables when their tasks run next. `files` and `may_remove` are
    as for `desired.apply`.
    """
    effects = await table_effects(store, built.catalog)
    applied = await desired.apply(
        store,
        built.catalog,
        check=fits_stored(store, built.collections),
        objections=[_objection(each) for each in effects if each.how == "refused"],
        dry_run=dry_run,
        files=files,
        may_remove=may_remove,
    )
    return dataclasses.replace(applied, tables=tuple(effects))


async def table_effects(store: Consensus, catalog: Catalog) -> list[TableEffect]:
    """Return what a changed catalog means for tables that were filled before."""
    found: list[TableEffect] = []
    for spec in await _changed(store, catalog):
        history = await load_history(store, spec.name, spec.renamed_from)
        if history.last_applied is None:
            continue
        try:
            connector = builtin.materialization(spec.endpoint, spec.name)
            expected = outlooks(catalog, spec, connector, history)
        except PenstockError:
            continue  # its connector is not installed, or a secret is not set: the run says so
        for outlook in expected:
            found += _effects(spec.name, outlook)
    return found


async def _changed(store: Consensus, catalog: Catalog) -> list[MaterializationSpec]:
    """Return the materializations that differ from the recorded ones, or that read what does."""
    try:
        before = await desired.load(store)
    except NothingApplied:
        return []
    known = {fingerprint(spec) for spec in (*before.materializations, *before.collections)}
    changed = {each.name for each in catalog.collections if fingerprint(each) not in known}
    return [
        spec
        for spec in catalog.materializations
        if not spec.shards.disable and (fingerprint(spec) not in known or reads_of(spec) & changed)
    ]


def _effects(task: str, outlook: Outlook) -> Iterator[TableEffect]:
    if outlook.refilled:
        yield TableEffect(
            task=task,
            binding=outlook.binding,
            table=outlook.table,
            how="rebuild",
            says="it is filled again: its backfill was raised, or somebody asked for it",
        )
    fix = refill_fix(outlook.binding, outlook.table, outlook.backfill)
    for change in outlook.changes:
        in_place = not change.rebuild or outlook.refilled
        yield TableEffect(
            task=task,
            binding=outlook.binding,
            table=outlook.table,
            column=change.column,
            was=change.was,
            now=change.now,
            how="in place" if in_place else _HOW[outlook.on_incompatible],
            says=change.says,
            fix=None if in_place else fix,
        )


def _objection(effect: TableEffect) -> str:
    column = "" if effect.column is None else f", column {effect.column}"
    return (
        f"materialization {effect.task}: table {effect.table}{column}: {effect.says}, which the "
        f"table cannot follow (onIncompatibleSchemaChange: abort)\n    hint: {effect.fix}"
    )
