"""`penstock run`: run tasks until everything that is there now has been processed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.apply import Yes
from penstock.cli.catalogs import applied_or_here
from penstock.cli.durations import seconds_of
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.run_view import showing
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.cli.tables import counted, size_text
from penstock.errors import Unavailable, UserError
from penstock.servicekit.secrets import mask_url
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.batch import TaskRun
    from penstock.consensus.store import Consensus
    from penstock.model.spec import Catalog
    from penstock.runtime.introspection import TaskReport
    from penstock.servicekit.admin import Relations

AdminPort = Annotated[
    int | None,
    typer.Option(
        "--admin-port",
        min=0,
        max=65_535,
        help="Serve the state of tasks as JSON on this loopback port; 0 takes a free one.",
        show_default=False,
    ),
]


class IfBusyChoice(enum.StrEnum):
    """What a run does about a task that another run has."""

    wait = "wait"
    refuse = "refuse"


def run(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalogs to apply first; ./catalog.yaml if nothing was applied yet.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="Run this task only; repeatable.", show_default=False),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option("--shards", min=1, help="Shards of each task; by default, as in the catalog."),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="Stop after this long: 90s, 5m.", metavar="TIME")
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Also run tasks that a penstock up runs; it takes them back afterwards.",
        ),
    ] = False,
    if_busy: Annotated[
        IfBusyChoice,
        typer.Option(
            "--if-busy",
            help="If another penstock run has a task: wait until it is done, or refuse the task.",
            metavar="wait|refuse",
        ),
    ] = IfBusyChoice.wait,
    admin_port: AdminPort = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="First install the packages that derivations import."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Run tasks until they have processed everything that was there at the start.

    Documents appended meanwhile may be processed too, or by the next run. A task starts when the
    captures and derivations that it reads from have caught up. Each transaction happens completely
    and once, even if this process is killed: run it again, and it continues where it was. A task
    that fails does not stop the others; the exit code is then 1.

    To keep running, use penstock up; captures that serve or watch something need it. While it runs,
    it processes new documents itself, and its tasks are not run here.

    Ctrl-C, SIGTERM and the timeout let open transactions finish, for at most ten seconds; a second
    Ctrl-C does not wait. A task that waits for longer than two seconds says for what.

    Example: penstock run catalog.yaml --task acme/views
    """
    settings = applied_or_here(settings, catalogs)
    limit_s = None if timeout is None else seconds_of(timeout, "--timeout")
    running = _run(
        settings,
        task or (),
        shards,
        limit_s,
        take_over=take_over,
        if_busy=if_busy,
        install=install,
        admin_port=admin_port,
        yes=yes,
    )
    stops.run(running)


def _print(runs: Sequence[TaskRun], *, as_json: bool) -> None:
    if as_json:
        print_json({"tasks": [_json(run) for run in runs], **_memory()})
    else:
        for run in runs:
            (stdout if run.error is None else stderr).print(_line(run), markup=False)


def _json(run: TaskRun) -> dict[str, object]:
    values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    return {**values, "error": None if run.error is None else str(run.error)}


def _line(run: TaskRun) -> str:
    if run.error is not None:
        return f"{run.task}: failed after {counted(run.transactions, 'transaction')}\n{run.error}"
    stopped = "stopped after " if run.stopped else ""
    if not run.transactions:
        return f"{run.task}: {'stopped before a transaction' if stopped else 'nothing new'}"
    return (
        f"{run.task}: {stopped}{counted(run.documents, 'document')} in "
        f"{counted(run.transactions, 'transaction')}, {counted(run.stored, 'row')} stored, "
        f"{size_text(run.bytes)} read, {run.seconds:.1f} s"
    )


async def _run(
    settings: Settings,
    names: Sequence[str],
    shards: int | None,
    limit_s: float | None,
    *,
    take_over: bool,
    if_busy: IfBusyChoice,
    install: bool,
    admin_port: int | None,
    yes: bool,
) -> None:
    from penstock.batch import StopHandle, open_world, run_graph, tasks_to_run
    from penstock.deployment import refuse_beside_up, taking_over
    from penstock.runtime.kinds import shards_of
    from penstock.runtime.leadership import IfBusy
    from penstock.scope import DomainThreads

    loop = asyncio.get_running_loop()
    loop.set_default_executor(DomainThreads())
    until = None if limit_s is None else loop.time() + limit_s
    async with contextlib.AsyncExitStack() as stack:
        async with _answering(settings, until, limit_s):
            store = await stack.enter_async_context(opened(settings, create=bool(settings.catalog)))
            catalog = await current_catalog(store, settings, yes=yes)
            specs = tasks_to_run(catalog, names)
            await _check_not_stopped(store, names)
            if take_over:
                stack.enter_context(taking_over(settings))
            else:
                led = [spec.name for spec in specs if not shards_of(spec).disable]
                refuse_beside_up(settings, led)
            world = await open_world(settings, store, ends=True)
        if admin_port is not None:
            relations = world.introspection.relations()
            await stack.enter_async_context(administered(relations, admin_port))
        if install:
            await install_imports(catalog)
        handle = StopHandle()

        def stop() -> None:
            if not handle.stopping:
                stderr.print("finishing open transactions; Ctrl-C again to stop at once")
            handle.stop()

        def reports() -> list[TaskReport]:
            return [activity.report() for activity in world.introspection.activities]

        async with showing(settings, reports) as shown:
            with stops.finishing(stop):
                running = asyncio.create_task(
                    run_graph(
                        catalog,
                        specs,
                        world,
                        shards=shards,
                        stop=handle,
                        if_busy=IfBusy(if_busy.value),
                        takes_from_up=take_over,
                        on_progress=shown,
                    )
                )
                left_s = None if until is None else max(0.0, until - loop.time())
                _, late = await asyncio.wait([running], timeout=left_s)
                if late:
                    stderr.print(f"stopping after {limit_s:g} s (--timeout)", markup=False)
                    handle.stop()
                runs = await running
        _print(runs, as_json=settings.json)
        failed = any(run.error for run in runs)
        if any(run.stopped for run in runs):
            stops.ends_with(int(failed))  # whatever it was that did not answer
    if failed:
        raise typer.Exit(1)


async def _check_not_stopped(store: Consensus, names: Sequence[str]) -> None:
    """A task that is named must be allowed to run; of all tasks, others are left out."""
    from penstock.runtime.diagnosis import time_text
    from penstock.runtime.requests import stopped_since

    for name in names:
        if (since := await stopped_since(store, name)) is not None:
            raise UserError(
                f"{name} is stopped since {time_text(since)}",
                fix=f"penstock task start {name}",
            )


@contextlib.asynccontextmanager
async def administered(relations: Relations, port: int) -> AsyncIterator[str]:
    """Within this, the admin address, which it gets, shows what tasks do."""
    from penstock.servicekit import admin
    from penstock.servicekit.metrics import Registry
    from penstock.servicekit.readiness import Readiness

    app = admin.application(Registry("penstock"), lambda: Readiness(ready=True), relations)
    async with contextlib.AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(admin.serving(app, port))
        except OSError as error:
            raise Unavailable(
                f"cannot listen on admin port {port}",
                why=str(error),
                fix="choose another one with --admin-port; 0 takes a free one",
            ) from None
        address = f"http://{admin.LOOPBACK}:{bound}"
        stderr.print(f"state of tasks: {address}/introspection/v1", markup=False)
        yield address


async def install_imports(catalog: Catalog) -> None:
    """Install the packages that derivations import."""
    from penstock.runtime.derive.languages import install_packages

    stderr.print("installing the packages that derivations import")
    found = await asyncio.to_thread(install_packages, catalog)
    stderr.print(
        f"installed for {', '.join(found)}" if found else "no packages are needed", markup=False
    )


@contextlib.asynccontextmanager
async def _answering(
    settings: Settings, until: float | None, limit_s: float | None
) -> AsyncIterator[None]:
    """Within this, the store is asked what there is to do, and not for longer than a run may."""
    try:
        async with asyncio.timeout_at(until):
            yield
    except TimeoutError:
        stops.ends_with(1)
        raise Unavailable(
            f"the consensus store did not answer within {limit_s:g} s; nothing was run",
            where=mask_url(settings.consensus),
            fix="check that it is reachable and not locked: penstock doctor",
        ) from None


def _memory() -> dict[str, int | None]:
    """Peak resident memory, of this process and of its JVM."""
    from penstock.engine import peak_rss_bytes, peak_rss_of

    return {
        "peak_rss_bytes": peak_rss_of("self"),
        "peak_rss_spark_bytes": peak_rss_bytes() if "pyspark" in sys.modules else None,
    }
