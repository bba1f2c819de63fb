"""`penstock gc`: remove the objects that no journal names, and say whose a blob store is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.persistd import seconds
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import counted
from penstock.errors import UsageError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.journal.sweeping import GarbageReport, TakenOver


def gc(
    settings: Settings,
    grace: Annotated[
        str, typer.Option("--grace", help="Keep objects that are younger, or were replaced since.")
    ] = "24h",
    quarantine: Annotated[
        str,
        typer.Option("--quarantine", help="Remove objects that have been in quarantine this long."),
    ] = "72h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed; change nothing.")
    ] = False,
    restore: Annotated[
        bool,
        typer.Option("--restore", help="Take all objects out of quarantine, and do nothing else."),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Assign the blob store to this consensus store, which was restored from a backup, "
            "and do nothing else; the exit code is 1 if objects are missing.",
        ),
    ] = False,
) -> None:
    """Remove unreferenced objects from the blob store, while readers and writers continue.

    This takes two passes. The first puts an object into quarantine, where it stays readable. A
    later pass removes it, if it has been in quarantine for long enough and still no journal
    references it. The removed paths are listed.

    Objects younger than the grace period are kept: their writer may be about to reference them.
    Objects that compaction replaced are kept for as long: a reader may be using them.

    A blob store that belongs to another deployment, or to a newer copy of this one, is left alone.

    Example: penstock gc --dry-run
    """
    if restore + take_over + dry_run > 1:
        raise UsageError("choose one of --dry-run, --restore and --take-over")
    if restore:
        _restore(settings)
    elif take_over:
        _take_over(settings)
    else:
        _collect(settings, grace, quarantine, dry_run=dry_run)


def _collect(settings: Settings, grace: str, quarantine: str, *, dry_run: bool) -> None:
    from penstock.journal.sweeping import GRACE_S_MIN

    grace_s, quarantine_s = seconds(grace, "--grace"), seconds(quarantine, "--quarantine")
    if grace_s < GRACE_S_MIN:
        raise UsageError(
            f"--grace {grace} is too short",
            why="an object of an open transaction may be an hour old before it is referenced",
            fix=f"--grace {GRACE_S_MIN // 3600}h or more",
        )
    found = stops.run(_collected(settings, grace_s, quarantine_s, dry_run=dry_run))
    if settings.json:
        print_json(
            {
                "dry_run": dry_run,
                "listed": found.listed,
                "deleted": found.deleted,
                "bytes": found.bytes,
                "garbage": {path: found.garbage[path] for path in found.due},
                "quarantined": dict(sorted(found.quarantined.items())),
                "returned": found.returned,
            }
        )
        return
    for path in found.due:
        stdout.print(path, markup=False)
    verb = "would remove" if dry_run else "removed"
    summary = (
        f"{verb} {len(found.due):,} of {counted(found.listed, 'object')}, "
        f"{counted(found.bytes, 'byte')}"
    )
    if waiting := found.quarantined:
        kept = f"{counted(len(waiting), 'object')}, {counted(sum(waiting.values()), 'byte')}"
        summary += f"; would quarantine {kept}" if dry_run else f"; in quarantine: {kept}"
        summary += "" if dry_run else f", for {quarantine}"
    if found.returned:
        summary += f"; back from quarantine: {counted(len(found.returned), 'object')}"
    stderr.print(summary, markup=False)


async def _collected(
    settings: Settings, grace_s: float, quarantine_s: float, *, dry_run: bool
) -> GarbageReport:
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.sweeping import collect_garbage

    async with opened(settings) as store:
        with progress_bar("objects") as progress:
            return await collect_garbage(
                Journals(store),
                open_blobs(settings.blob),
                now_s=time.time(),
                grace_s=grace_s,
                quarantine_s=quarantine_s,
                dry_run=dry_run,
                progress=progress,
            )


def _restore(settings: Settings) -> None:
    from penstock.journal.blobs import open_blobs
    from penstock.journal.sweeping import release

    released = release(open_blobs(settings.blob))
    if settings.json:
        print_json({"restored": released})
        return
    for path in released:
        stdout.print(path, markup=False)
    stderr.print(f"{counted(len(released), 'object')} back from quarantine", markup=False)


def _take_over(settings: Settings) -> None:
    done = stops.run(_taken_over(settings))
    if settings.json:
        print_json(dataclasses.asdict(done))
    else:
        _tell_taken_over(done)
    if done.missing:
        raise typer.Exit(1)


def _tell_taken_over(done: TakenOver) -> None:
    before = f"; it belonged to {done.before[:8]}" if done.before else ""
    stderr.print(f"the blob store now belongs to this consensus store{before}", markup=False)
    stderr.print(
        f"{done.unnamed:,} of {counted(done.objects, 'object')} not in any journal; penstock gc "
        "will quarantine them",
        markup=False,
    )
    for path in done.missing:
        stdout.print(path, markup=False)
    if done.missing:
        stderr.print(
            f"missing: {counted(len(done.missing), 'object')} named by journals; their documents "
            "cannot be read; restore them from a backup",
            markup=False,
        )


async def _taken_over(settings: Settings) -> TakenOver:
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.sweeping import take_over

    async with opened(settings) as store:
        return await take_over(Journals(store), open_blobs(settings.blob))


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    hidden = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
