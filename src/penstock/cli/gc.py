"""`penstock gc`: remove the objects that no journal names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.persistd import seconds
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.errors import UsageError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.journal.upkeep import Collected


def gc(
    settings: Settings,
    grace: Annotated[
        str, typer.Option("--grace", help="Spare what is younger, or was replaced since.")
    ] = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed, and remove nothing.")
    ] = False,
) -> None:
    """Remove the objects of the blob store that no journal names; readers and writers go on.

    Lists the removed paths. What is younger than the grace period is spared: its writer may be
    about to name it. What compaction replaced is spared for as long: somebody may be reading it.

    Example: penstock gc --dry-run
    """
    from penstock.journal.upkeep import GRACE_S_MIN

    grace_s = seconds(grace, "--grace")
    if grace_s < GRACE_S_MIN:
        raise UsageError(
            f"--grace {grace} is too short",
            why="an object of a transaction under way may be an hour old before a journal names it",
            fix=f"--grace {GRACE_S_MIN // 3600}h or more",
        )
    found = stops.run(_collect(settings, grace_s, dry_run=dry_run))
    if settings.json:
        print_json(
            {
                "dry_run": dry_run,
                "listed": found.listed,
                "deleted": found.deleted,
                "bytes": found.bytes,
                "garbage": dict(sorted(found.garbage.items())),
            }
        )
        return
    for path in sorted(found.garbage):
        stdout.print(path, markup=False)
    verb = "would remove" if dry_run else "removed"
    stderr.print(
        f"{verb} {len(found.garbage):,} of {found.listed:,} objects, {found.bytes:,} bytes",
        markup=False,
    )


async def _collect(settings: Settings, grace_s: float, *, dry_run: bool) -> Collected:
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.upkeep import collect_garbage

    async with opened(settings) as store:
        with progress_bar("objects") as progress:
            return await collect_garbage(
                Journals(store),
                open_blobs(settings.blob),
                now_s=time.time(),
                grace_s=grace_s,
                dry_run=dry_run,
                progress=progress,
            )


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """How many of how many are done, on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    hidden = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
