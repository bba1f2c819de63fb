"""`penstock up`: run everything of a catalog, continuously."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.apply import Yes
from penstock.cli.catalogs import applied_or_here
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.hosting import deployed, finishing, print_transaction, spark, world_of
from penstock.cli.live import lines_of, shown_live
from penstock.cli.run import AdminPort, administered
from penstock.cli.stopping import stops
from penstock.cli.tables import counted, size_text
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.runtime.control import TransactionSummary
    from penstock.runtime.introspection import TaskReport


def up(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalogs to apply first; ./catalog.yaml if nothing was applied yet.",
            show_default=False,
        ),
    ] = None,
    admin_port: AdminPort = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="First install the packages that derivations import."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Run all tasks of the applied catalog continuously, until Ctrl-C.

    penstock apply, from another terminal, changes what runs: changed tasks are restarted, new ones
    started, deleted and disabled ones stopped; all others keep running. A task that fails does not
    stop the others, and is retried. Compaction and garbage collection run in the background. Every
    transaction happens once, even if this process is killed: start it again.

    Ctrl-C and SIGTERM let open transactions finish, for at most ten seconds; a second Ctrl-C does
    not wait. The exit code is then 0.

    Example: penstock up catalog.yaml
    """
    settings = applied_or_here(settings, catalogs)
    stops.run(_up(settings, install=install, admin_port=admin_port, yes=yes))


async def _up(settings: Settings, *, install: bool, admin_port: int | None, yes: bool) -> None:
    from penstock.cluster.unified import Unified
    from penstock.deployment import is_taken_over

    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            deployed(settings, command="up", create=bool(settings.catalog), yes=yes)
        )
        world = await world_of(settings, store, install=install)
        shows_table = stderr.is_terminal
        unified = Unified(
            world,
            on_progress=_ignore if shows_table else print_transaction,
            is_lent=lambda: is_taken_over(settings),
        )
        if admin_port is not None:
            await stack.enter_async_context(administered(unified.relations(), admin_port))
        try:
            async with spark(settings, world, unified.stop):
                with (
                    _table(settings, lambda: unified.reports, shown=shows_table),
                    finishing(unified.stop),
                ):
                    await unified.run()
        finally:
            _print(unified.reports, as_json=settings.json)
        stops.ends_with(0)


def _ignore(_: TaskReport, __: TransactionSummary) -> None:
    """The table shows it."""


@contextlib.contextmanager
def _table(
    settings: Settings, reports: Callable[[], Sequence[TaskReport]], *, shown: bool
) -> Iterator[None]:
    """Show the table while tasks run, with what is logged above it."""
    if not shown:
        yield
        return
    with shown_live(
        settings,
        lambda width, height: lines_of(reports(), width=width, height=height, now=time.time()),
        _is_not_in_the_table,
    ):
        yield


def _is_not_in_the_table(record: logging.LogRecord) -> bool:
    """False for what tasks log when they start and wait; ops/logs has it, and --debug shows it."""
    return record.name != "penstock.runtime" or record.levelno >= logging.ERROR


def _print(reports: Sequence[TaskReport], *, as_json: bool) -> None:
    if as_json:
        print_json({"tasks": [_json(report) for report in reports]})
        return
    for report in reports:
        stdout.print(_line(report), markup=False)


def _json(report: TaskReport) -> dict[str, object]:
    failure = report.failure
    return {
        "task": report.task,
        "kind": report.kind,
        "transactions": report.transactions,
        "documents": report.documents,
        "bytes": report.bytes,
        "stored": report.stored,
        "error": None if failure is None else failure.what,
    }


def _line(report: TaskReport) -> str:
    done = (
        f"{counted(report.documents, 'document')} in "
        f"{counted(report.transactions, 'transaction')}, {size_text(report.bytes)} read"
        if report.transactions
        else "nothing new"
    )
    return f"{report.task}: {done}" + (f"; {report.failure.what}" if report.failure else "")
