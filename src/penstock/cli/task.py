"""`penstock task`: control tasks, wherever they run."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.cli.frame import print_json, stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.errors import UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.deletion import Deletion

T = TypeVar("T")

TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help="Name of the task.", show_default=False)
]


def close_now(settings: Settings, name: TaskName) -> None:
    """Close the open transaction of a running task before its minimum duration.

    The request goes to the process that runs the task now. If there is none, or no transaction is
    open, nothing happens.

    Example: penstock task close-now acme/views
    """
    from penstock.runtime import requests

    stops.run(_on(settings, name, lambda store: requests.close_now(store, name)))
    stderr.print(f"requested: {name} closes its transaction", markup=False)


def stop(settings: Settings, name: TaskName) -> None:
    """Stop a task until it is started again.

    A process that runs it stops it after its current transaction; other tasks keep running.
    `penstock run` skips it. Nothing is lost: it continues after its last transaction.

    Example: penstock task stop acme/views
    """
    from penstock.runtime import requests

    at = int(time.time())
    changed = stops.run(_on(settings, name, lambda store: requests.stop(store, name, at=at)))
    said = "stops after its current transaction" if changed else "is already stopped"
    stderr.print(f"{name} {said}; to start it again: penstock task start {name}", markup=False)


def start(settings: Settings, name: TaskName) -> None:
    """Start a stopped task again.

    A running penstock up or cluster continues it at once; otherwise the next run does.

    Example: penstock task start acme/views
    """
    from penstock.runtime import requests

    changed = stops.run(_on(settings, name, lambda store: requests.start(store, name)))
    said = "may run again" if changed else "was not stopped"
    stderr.print(f"{name} {said}", markup=False)


def delete(
    settings: Settings,
    name: TaskName,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted and what would stay.")
    ] = False,
) -> None:
    """Delete a task from the applied catalog, together with its progress.

    It must not be running. Documents of collections, tables at the endpoint and the catalog's files
    stay. A task of the same name that is applied later starts from the beginning.

    Example: penstock task delete acme/views --dry-run
    """
    deletion = stops.run(_plan(settings, name))
    if settings.json:
        print_json({"task": name, "kinds": deletion.kinds, "leaves": deletion.leaves})
    else:
        for sentence in deletion.leaves:
            stderr.print(f"- {sentence}", markup=False)
    if dry_run:
        stderr.print(f"{_kinds(deletion)} {name} would be deleted", markup=False)
        return
    if not yes and not _agreed(deletion):
        raise UserError(
            f"{name} was not deleted: it was not confirmed",
            fix=f"penstock task delete {name} --yes",
        )
    stops.run(_delete(settings, deletion))
    stderr.print(f"{_kinds(deletion)} {name} was deleted", markup=False)


def _kinds(deletion: Deletion) -> str:
    return " and ".join(deletion.kinds)


def _agreed(deletion: Deletion) -> bool:
    if not sys.stdin.isatty():
        return False
    return typer.confirm(f"delete {_kinds(deletion)} {deletion.task}?", err=True)


async def _plan(settings: Settings, name: str) -> Deletion:
    from penstock.deletion import plan_deletion

    async with opened(settings) as store:
        return await plan_deletion(store, await current_catalog(store, settings), name)


async def _delete(settings: Settings, deletion: Deletion) -> None:
    from penstock.deletion import delete, plan_deletion

    async with opened(settings) as store:
        catalog = await current_catalog(store, settings)
        await delete(store, catalog, await plan_deletion(store, catalog, deletion.task))


async def _on(settings: Settings, name: str, act: Callable[[Consensus], Awaitable[T]]) -> T:
    """Act on a task, which must be in the catalog."""
    from penstock.runtime.kinds import runnable_tasks

    async with opened(settings) as store:
        catalog = await current_catalog(store, settings)
        known = [spec.name for spec in runnable_tasks(catalog)]
        if name not in known:
            raise UserError(
                f"there is no task {name}",
                fix=f"known tasks: {', '.join(known)}" if known else "apply a catalog with tasks",
            )
        return await act(store)
