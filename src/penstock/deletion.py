"""Deletes a task: from the applied catalog, and what only it needs.

What others may need stays: documents of collections, tables at the endpoint, the catalog's files.
It can be repeated from any half-way point: the task is kept from running first, its recovery log is
emptied next, which fences a leader that nobody knew of, and it leaves the catalog last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.catalog import desired
from penstock.consensus.statelog import Command, StateLog, append_all
from penstock.errors import UserError
from penstock.model.spec import CaptureSpec, Catalog, MaterializationSpec
from penstock.runtime import reports, requests
from penstock.runtime.kinds import TaskSpec, kind_of, runnable_tasks, writes_of
from penstock.runtime.ops import TaskKindName
from penstock.runtime.recovery import Entries, Op, RecoveryMachine, log_name, recovery_key
from penstock.runtime.renames import Log
from penstock.runtime.reports import is_alive, load_reports

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A task to be deleted, and what that leaves behind."""

    task: str
    kinds: tuple[TaskKindName, ...]
    """A name that tasks of several kinds share is that of all of them."""
    leaves: tuple[str, ...]
    """In sentences."""


async def plan_deletion(store: Consensus, catalog: Catalog, name: str) -> Deletion:
    """Return what would be deleted; raises `UserError` if it must not be now."""
    specs = _named(catalog, name)
    reported = await load_reports(store)
    for spec in specs:
        process, report = reported.of(kind_of(spec), name)
        runs = report is not None and report.doing not in ("failed", "ended")
        if process is not None and runs and is_alive(process, time.time()):
            raise UserError(
                f"{name} runs, and is not deleted",
                where=process.name,
                fix=f"stop it first: penstock task stop {name}; penstock status {name} shows when "
                "it has stopped",
            )
    return Deletion(
        task=name,
        kinds=tuple(kind_of(spec) for spec in specs),
        leaves=tuple(sentence for spec in specs for sentence in _leaves(spec)),
    )


async def delete(store: Consensus, catalog: Catalog, deletion: Deletion) -> None:
    """Delete a task."""
    name = deletion.task
    await requests.stop(store, name, at=int(time.time()))
    for kind in deletion.kinds:
        log: Log = await StateLog.lead(store, recovery_key(log_name(kind, name)), RecoveryMachine())
        await append_all([Command(log, _emptied, roll_up=True)])
        await reports.forget(store, kind, name)
    await desired.apply(store, _without(catalog, name))
    await requests.start(store, name)  # a task of this name may come again


def _emptied(entries: Entries) -> tuple[Op, ...] | None:
    return (("del-prefix", b"", b""),) if entries else None


def _named(catalog: Catalog, name: str) -> list[TaskSpec]:
    tasks = runnable_tasks(catalog)
    found = [spec for spec in tasks if spec.name == name]
    if not found:
        known = ", ".join(dict.fromkeys(spec.name for spec in tasks))
        raise UserError(
            f"there is no task {name}",
            fix=f"one of {known}" if known else "apply a catalog with tasks",
        )
    return found


def _without(catalog: Catalog, name: str) -> Catalog:
    """The catalog without a task; a derived collection stays, with its documents."""
    return replace(
        catalog,
        captures=tuple(spec for spec in catalog.captures if spec.name != name),
        materializations=tuple(spec for spec in catalog.materializations if spec.name != name),
        collections=tuple(
            replace(spec, derivation=None) if spec.name == name else spec
            for spec in catalog.collections
        ),
    )


def _leaves(spec: TaskSpec) -> Sequence[str]:
    files = (
        "the catalog files still define it: remove it there, too, or the next penstock apply "
        "brings it back, from the beginning"
    )
    if isinstance(spec, MaterializationSpec):
        return (
            "its tables stay at the endpoint, and its row in penstock_checkpoints, where the "
            "endpoint has such a table; drop them there if they are not needed",
            files,
        )
    written = ", ".join(sorted(writes_of(spec)))
    documents = f"the documents of {written} stay; nothing is added to them any more"
    if isinstance(spec, CaptureSpec):
        source = (
            "what it made at its source stays, such as a replication slot of PostgreSQL, which "
            "keeps the server's log until it is dropped"
        )
        return (documents, source, files)
    return (documents, files)
