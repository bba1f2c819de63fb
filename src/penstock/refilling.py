"""Asks that tables of a materialization are filled again: `penstock backfill`, `task takeover`.

A request is recorded beside the task's other requests (`runtime.requests`). The next session of the
task meets it, exactly once, whoever runs it; one that runs now ends at its transaction boundary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.connectors import builtin
from penstock.errors import UserError
from penstock.model.spec import Catalog, MaterializationSpec
from penstock.runtime import requests
from penstock.runtime.kinds import kind_of, runnable_tasks
from penstock.shuffle.binding import resource_name

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """A table that is to be filled again."""

    binding: int
    table: str
    collection: str
    resource: str
    """Under which its progress is kept."""


def plan_refills(catalog: Catalog, task: str, bindings: Sequence[int] = ()) -> list[Refill]:
    """Return the tables of a task, or of some of its bindings; raises `UserError`."""
    spec = _materialization(catalog, task)
    found = _refills(spec)
    known = [each.binding for each in found]
    for binding in bindings:
        if binding not in known:
            is_disabled = binding < len(spec.bindings)
            raise UserError(
                f"binding {binding} of {task} is disabled"
                if is_disabled
                else f"{task} has no binding {binding}",
                fix="bindings: " + ", ".join(f"{each.binding} ({each.table})" for each in found),
            )
    return [each for each in found if not bindings or each.binding in bindings]


def plan_takeover(catalog: Catalog, task: str, tables: Sequence[str] = ()) -> list[Refill]:
    """Return the tables of a task, or those named; raises `UserError`."""
    found = _refills(_materialization(catalog, task))
    for table in tables:
        if not any(_is_called(each, table) for each in found):
            raise UserError(
                f"{task} has no table {table}",
                fix="tables: " + ", ".join(each.table for each in found),
            )
    return [each for each in found if not tables or any(_is_called(each, name) for name in tables)]


async def request(
    store: Consensus, task: str, refills: Sequence[Refill], *, takeover: bool = False
) -> None:
    """Ask for it, durably."""
    await requests.refill(
        store,
        task,
        [each.resource for each in refills],
        at=time.time_ns(),
        takeover=takeover,
    )


def _is_called(refill: Refill, name: str) -> bool:
    """True if a table is called so, with its schema or without."""
    return name in (refill.table, refill.table.rpartition(".")[2])


def _materialization(catalog: Catalog, task: str) -> MaterializationSpec:
    for spec in catalog.materializations:
        if spec.name == task:
            return spec
    others = [spec for spec in runnable_tasks(catalog) if spec.name == task]
    if others:
        raise UserError(
            f"{task} is a {kind_of(others[0])}, and fills no tables",
            fix="raise `backfill` of its bindings or transforms to read their sources again",
        )
    known = ", ".join(spec.name for spec in catalog.materializations)
    raise UserError(
        f"there is no materialization {task}",
        fix=f"one of {known}" if known else "apply a catalog with materializations",
    )


def _refills(spec: MaterializationSpec) -> list[Refill]:
    connector = builtin.materialization(spec.endpoint, spec.name)
    found = []
    for index, each in enumerate(spec.bindings):
        if not each.disable:
            path = connector.path(each.resource.value)
            found.append(
                Refill(
                    binding=index,
                    table=".".join(path),
                    collection=each.source.collection,
                    resource=resource_name(path),
                )
            )
    return found
