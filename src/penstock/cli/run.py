"""`penstock run`: run tasks until everything that is there now has been processed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli.append import current_catalog
from penstock.cli.durations import seconds_of
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stores import opened
from penstock.cli.tables import size_text
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.batch import Reins, TaskRun
    from penstock.runtime.materialize.work import Progress


def run(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(help="Catalogs to apply first.", show_default=False),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="Run this task only; repeatable.", show_default=False),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards", min=1, help="Shards of each task; as the catalog says by default."
        ),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="Stop after so long: 90s, 5m.", metavar="TIME")
    ] = None,
) -> None:
    """Run tasks until every source is exhausted and every reader has caught up.

    Each transaction happens completely and once, also if this process is killed in between: run it
    again, and it goes on where it was. One task that fails does not stop another; the exit code is
    1 then. Ctrl-C finishes the transactions that are under way, a second one does not wait.

    Example: penstock run catalog.yaml --task acme/views
    """
    settings = dataclasses.replace(settings, catalog=(*(catalogs or ()), *settings.catalog))
    limit_s = None if timeout is None else seconds_of(timeout, "--timeout")
    runs = asyncio.run(_run(settings, task or (), shards, limit_s))
    if settings.json:
        print_json({"tasks": [_json(run) for run in runs], **_memory()})
    else:
        for run in runs:
            stdout.print(_line(run), markup=False)
    if any(run.error for run in runs):
        raise typer.Exit(1)


def _json(run: TaskRun) -> dict[str, object]:
    told = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return {**told, "error": None if run.error is None else str(run.error)}


def _line(run: TaskRun) -> str:
    if run.error is not None:
        return f"{run.task}: failed after {run.transactions} transactions\n{run.error}"
    if not run.transactions:
        return f"{run.task}: nothing new"
    return (
        f"{run.task}: {run.documents:,} documents in {run.transactions} "
        f"transaction{'s' if run.transactions != 1 else ''}, {run.stored:,} rows stored, "
        f"{size_text(run.bytes)} read, {run.seconds:.1f} s"
    )


async def _run(
    settings: Settings, names: Sequence[str], shards: int | None, limit_s: float | None
) -> list[TaskRun]:
    from penstock.batch import Reins, materializations, open_world, run_until
    from penstock.journal.follower import current_revision

    async with opened(settings, create=bool(settings.catalog)) as store:
        catalog = await current_catalog(store, settings)
        specs = materializations(catalog, names)
        world = await open_world(settings, store, ends=True)
        revision = await current_revision(store)
        reins = Reins()
        with _showing([spec.name for spec in specs]) as shown, _interruptible(reins):
            running = [
                asyncio.create_task(
                    run_until(
                        catalog, spec, world, revision, shards=shards, reins=reins, told=shown
                    )
                )
                for spec in specs
            ]
            if running:
                _, late = await asyncio.wait(running, timeout=limit_s)
                if late:
                    stderr.print(f"stopping after {limit_s:g} s, as asked", markup=False)
                    reins.stop()
            return list(await asyncio.gather(*running))


@contextlib.contextmanager
def _interruptible(reins: Reins) -> Iterator[None]:
    """The first Ctrl-C stops at the next boundaries; the second is an ordinary one."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stderr.print("finishing what is under way; Ctrl-C again to stop at once", markup=False)
        reins.stop()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def _showing(tasks: Sequence[str]) -> Iterator[Callable[[TaskRun, Progress], None]]:
    """Progress: a line per task on a terminal, a line per transaction elsewhere."""
    if not stderr.is_terminal:
        yield _print_transaction
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=stderr, transient=True) as bars:
        ids = {task: bars.add_task(task, total=None, said="starting") for task in tasks}

        def show(run: TaskRun, progress: Progress) -> None:
            said = (
                f"{run.transactions} transactions, {run.documents:,} documents, "
                f"{size_text(run.bytes)}, {_rate(progress):,.0f}/s"
            )
            bars.update(ids[run.task], said=said)

        yield show


def _print_transaction(run: TaskRun, progress: Progress) -> None:
    stderr.print(
        f"{run.task}: transaction {run.transactions}: {progress.documents:,} documents, "
        f"{size_text(progress.bytes)}, {progress.stored:,} rows, {progress.jobs} jobs, "
        f"{progress.seconds:.2f} s",
        markup=False,
    )


def _rate(progress: Progress) -> float:
    return progress.documents / max(progress.seconds, 1e-9)


def _memory() -> dict[str, int | None]:
    """Peak resident memory, of this process and of its JVM."""
    from penstock.engine import peak_rss_bytes, peak_rss_of

    return {
        "peak_rss_bytes": peak_rss_of("self"),
        "peak_rss_spark_bytes": peak_rss_bytes() if "pyspark" in sys.modules else None,
    }
