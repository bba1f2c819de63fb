"""`penstock run`: run tasks until everything that is there now has been processed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from penstock.cli.append import current_catalog
from penstock.cli.durations import seconds_of
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stores import opened
from penstock.cli.tables import size_text
from penstock.errors import PenstockError, UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.model.spec import Catalog
    from penstock.runtime.materialize.build import Built
    from penstock.runtime.materialize.leader import Control, World
    from penstock.runtime.materialize.work import Progress

FAILURES_MAX: Final = 5
"""Sessions in a row that may fail for want of an endpoint before a batch run gives up."""


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
    results = asyncio.run(_run(settings, task or (), shards, limit_s))
    if settings.json:
        print_json({"tasks": [dataclasses.asdict(result) for result in results], **_memory()})
    else:
        for result in results:
            stdout.print(str(result), markup=False)
    if any(result.error for result in results):
        raise typer.Exit(1)


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """What became of one task."""

    task: str
    transactions: int = 0
    documents: int = 0
    bytes: int = 0
    stored: int = 0
    jobs: int = 0
    jobs_per_transaction_max: int = 0
    seconds: float = 0.0
    error: str | None = None

    def add(self, progress: Progress) -> None:
        self.transactions += 1
        self.documents += progress.documents
        self.bytes += progress.bytes
        self.stored += progress.stored
        self.jobs += progress.jobs
        self.jobs_per_transaction_max = max(self.jobs_per_transaction_max, progress.jobs)

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.task}: failed after {self.transactions} transactions\n{self.error}"
        if not self.transactions:
            return f"{self.task}: nothing new"
        return (
            f"{self.task}: {self.documents:,} documents in {self.transactions} "
            f"transaction{'s' if self.transactions != 1 else ''}, {self.stored:,} rows stored, "
            f"{size_text(self.bytes)} read, {self.seconds:.1f} s"
        )


async def _run(
    settings: Settings, names: Sequence[str], shards: int | None, limit_s: float | None
) -> list[Result]:
    from penstock.journal.follower import current_revision

    async with opened(settings, create=bool(settings.catalog)) as store:
        catalog = await current_catalog(store, settings)
        chosen = _chosen(catalog, names)
        world = make_world(settings, store)
        revision = await current_revision(store)
        with _showing() as shown:
            running = [
                _Running(Result(task=name), shown.add(name), shown, revision) for name in chosen
            ]
            try:
                with _interruptible(running):
                    async with asyncio.timeout(limit_s):
                        await asyncio.gather(
                            *(each.run(catalog, world, shards) for each in running)
                        )
            except TimeoutError:
                stderr.print(f"stopped after {limit_s:g} s, as asked", markup=False)
        return [each.result for each in running]


def _chosen(catalog: Catalog, names: Sequence[str]) -> list[str]:
    known = [spec.name for spec in catalog.materializations if not spec.shards.disable]
    for name in names:
        if name not in known:
            raise UserError(
                f"there is no task {name} to run",
                fix=f"one of {', '.join(known)}" if known else "the catalog has no materialization",
            )
    return list(names) or known


def make_world(settings: Settings, store: Consensus) -> World:
    """Where leaders live, as these settings say."""
    from penstock.engine import EngineOptions, open_spark
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.planning import Planner
    from penstock.journal.schemas import Schemas
    from penstock.model.clock import from_unix
    from penstock.runtime.materialize.leader import World

    options = EngineOptions(master=settings.master, conf=settings.conf)
    return World(
        planner=Planner(
            journals=Journals(store), blobs=open_blobs(settings.blob), schemas=Schemas(store)
        ),
        spark=lambda: open_spark(options),
        now=lambda: from_unix(*divmod(time.time_ns(), 1_000_000_000)),
        entropy=os.urandom,
        between=(settings.data / "between").resolve().as_uri(),
    )


class _Running:
    """One task, its control and its result."""

    def __init__(self, result: Result, bar: TaskID, shown: _Shown, revision: int) -> None:
        from penstock.runtime.materialize.leader import Control

        self.result = result
        self._bar = bar
        self._shown = shown
        self.control: Control = Control(until_revision=revision, on_progress=self._progressed)

    def _progressed(self, progress: Progress) -> None:
        self.result.add(progress)
        self._shown.progressed(self._bar, self.result, progress)

    async def run(self, catalog: Catalog, world: World, shards: int | None) -> None:
        from penstock.runtime.supervise import Patience, supervise

        began = time.monotonic()
        try:
            built = await asyncio.to_thread(build_task, catalog, self.result.task, shards)
            await supervise(built, world, self.control, Patience(failures_max=FAILURES_MAX))
        except PenstockError as error:
            self.result.error = str(error)
        finally:
            self.result.seconds = time.monotonic() - began


def build_task(catalog: Catalog, name: str, shards: int | None) -> Built:
    """A materialization of the catalog, with the connector that it names."""
    from penstock.connectors.builtin import materialization
    from penstock.runtime.materialize.build import build

    spec = next(spec for spec in catalog.materializations if spec.name == name)
    return build(catalog, spec, materialization, shards=shards)


@contextlib.contextmanager
def _interruptible(running: Sequence[_Running]) -> Iterator[None]:
    """The first Ctrl-C stops at the next boundaries; the second is an ordinary one."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stderr.print("finishing what is under way; Ctrl-C again to stop at once", markup=False)
        for each in running:
            each.control.stop()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Shown:
    """Progress: bars on a terminal, a line per transaction elsewhere."""

    def __init__(self, bars: Bars | None) -> None:
        self._bars = bars

    def add(self, task: str) -> TaskID:
        return self._bars.add_task(task, total=None, said="starting") if self._bars else TaskID(0)

    def progressed(self, bar: TaskID, result: Result, progress: Progress) -> None:
        rate = progress.documents / max(progress.seconds, 1e-9)
        if self._bars is not None:
            said = (
                f"{result.transactions} transactions, {result.documents:,} documents, "
                f"{size_text(result.bytes)}, {rate:,.0f}/s"
            )
            self._bars.update(bar, said=said)
            return
        stderr.print(
            f"{result.task}: transaction {result.transactions}: {progress.documents:,} documents, "
            f"{size_text(progress.bytes)}, {progress.stored:,} rows, {progress.jobs} jobs, "
            f"{progress.seconds:.2f} s",
            markup=False,
        )


@contextlib.contextmanager
def _showing() -> Iterator[_Shown]:
    if not stderr.is_terminal:
        yield _Shown(None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=stderr, transient=True) as bars:
        yield _Shown(bars)


def _memory() -> dict[str, int]:
    """Peak resident memory, of this process and of the largest that it started."""
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "peak_rss_child_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit,
    }
