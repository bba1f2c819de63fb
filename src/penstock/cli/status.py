"""`penstock status`: what every task does, wherever it runs; and if it does not go on, why not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.live import Live
from rich.text import Text

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.cli.tables import counted, fitting, size_text
from penstock.errors import Unavailable
from penstock.servicekit.secrets import mask_url
from penstock.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.status import TaskStatus

ANSWER_S: Final = 8.0
"""Seconds that the consensus store may take before its silence is the answer."""

WORK_S: Final = 60.0
"""Seconds that it may take to look at everything, if the store answers."""

WATCH_S: Final = 2.0

_COLORS: Final = {
    "running": "green",
    "idle": "green",
    "waiting": "yellow",
    "retrying": "yellow",
    "failed": "red",
    "not running": "red",
}


def status(
    settings: Settings,
    task: Annotated[
        str | None,
        typer.Argument(help="Only this task, in detail.", show_default=False),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every two seconds, until Ctrl-C.")
    ] = False,
) -> None:
    """Show what every task is doing, wherever it runs, and why it makes no progress.

    States: running, idle (has caught up), waiting, retrying, failed, stopped, disabled, not
    running. The lag is what is committed in the collections that a task reads, and not yet
    processed by the task: documents, stored bytes, and the age of the oldest. Below a task, a
    sentence says what it waits for, since when, and what to do about it.

    No task has to run: processes that run tasks report to the consensus store. --json has
    everything; with --watch, one line per refresh.

    Example: penstock status acme/views --watch
    """
    if watch:
        stops.run(_watch(settings, task))
        return
    found = stops.run(_look(settings, task))
    if settings.json:
        print_json([each.as_json() for each in found])
    else:
        _print(found, detailed=task is not None)


async def _look(settings: Settings, task: str | None) -> list[TaskStatus]:
    from penstock.status import statuses

    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(ANSWER_S):
                store = await stack.enter_async_context(opened(settings))
                catalog = await current_catalog(store, settings)
            async with asyncio.timeout(WORK_S):
                return await statuses(store, catalog, task)
        except TimeoutError:
            stops.ends_with(1)
            raise _away(settings) from None


def _away(settings: Settings) -> Unavailable:
    return Unavailable(
        "the consensus store does not answer, so the state of tasks is unknown",
        where=mask_url(settings.consensus),
        why="every task waits for it, and continues by itself when it is back",
        fix="check that its database runs, is reachable and not locked: penstock doctor",
    )


async def _watch(settings: Settings, task: str | None) -> None:
    live = Live(console=stdout, auto_refresh=False, screen=False) if stdout.is_terminal else None
    if live is not None:
        live.start()
    try:
        while True:
            try:
                found = await _look(settings, task)
            except Unavailable as error:
                if live is None:
                    raise
                live.update(Text(str(error)), refresh=True)
            else:
                _show(settings, live, found, detailed=task is not None)
            await asyncio.sleep(WATCH_S)
    finally:
        if live is not None:
            live.stop()


def _show(
    settings: Settings, live: Live | None, found: Sequence[TaskStatus], *, detailed: bool
) -> None:
    if settings.json:
        sys.stdout.write(json.dumps([each.as_json() for each in found]) + "\n")
        sys.stdout.flush()
    elif live is None:
        _print(found, detailed=detailed)
        stdout.print()
    else:
        live.update(_table(found, detailed=detailed), refresh=True)


# ----------------------------------------------------------------------------------------- printing


def _print(found: Sequence[TaskStatus], *, detailed: bool) -> None:
    if found:
        stdout.print(_table(found, detailed=detailed))
    else:
        stderr.print("the catalog has no tasks")


def _table(found: Sequence[TaskStatus], *, detailed: bool) -> Text:
    """Rows in columns of equal widths, and under each row what is to be said of it."""
    rows = [_row(each) for each in found]
    widths = [max(len(row[at]) for row in (_HEADINGS, *rows)) for at in range(len(_HEADINGS))]
    if stdout.is_terminal:
        widths = widths[: fitting(widths, stdout.width)]
    lines = [Text(_line(_HEADINGS, widths), style="bold")]
    for each, row in zip(found, rows, strict=True):
        line = Text(_line(row, widths))
        begin = widths[0] + 2
        line.stylize(_COLORS.get(each.state, ""), begin, begin + len(each.state))
        lines += [line, *_said(each)]
        if detailed:
            lines += [_indented(f"{name:<8} {text}", 13) for name, text in _details(each)]
    return Text("\n").join(lines)


def _indented(text: str, hanging: int = 4) -> Text:
    """Fill a terminal's lines; elsewhere a sentence is one line, for `grep`."""
    if not stdout.is_terminal:
        return Text(f"    {text}")
    width = max(stdout.width, 40)
    filled = textwrap.fill(
        text, width, initial_indent=" " * 4, subsequent_indent=" " * hanging, break_long_words=False
    )
    return Text(filled)


_HEADINGS: Final = ("TASK", "STATE", "DOCS", "BYTES", "LAG", "DOCS/S", "COMMIT", "KIND")
_LEFT: Final = {0, 1, 7}


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.ljust(width) if at in _LEFT else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=False))
    )
    return "  ".join(padded).rstrip()


def _row(status: TaskStatus) -> tuple[str, ...]:
    from penstock.runtime.diagnosis import duration_text

    lag = status.lag
    about = "" if lag is None or lag.exact else "~"
    committed = status.last_commit
    return (
        status.task,
        status.state,
        "-" if status.lag_docs is None else f"{about}{status.lag_docs:,}",
        "-" if status.lag_bytes is None else f"{about}{size_text(status.lag_bytes)}",
        "-" if status.lag_seconds is None else duration_text(status.lag_seconds),
        f"{status.rates[0]:,.0f}",
        "-" if committed is None else f"{duration_text(status.at - committed)} ago",
        status.kind,
    )


def _said(status: TaskStatus) -> list[Text]:
    """Return the sentence, with since when, and what to do."""
    from penstock.runtime.diagnosis import TaskState, duration_text, time_text

    condition = status.condition
    if condition.state is TaskState.IDLE:
        return _held(status)
    sentence = condition.sentence
    if condition.since is not None:
        lasted = duration_text(status.at - condition.since)
        sentence += f", since {time_text(condition.since)} ({lasted})"
    lines = [_indented(sentence)]
    if condition.fix is not None:
        lines.append(_indented(f"-> {condition.fix}", 7))
    return lines + _held(status)


def _held(status: TaskStatus) -> list[Text]:
    """Return the sentences about what is kept for the task."""
    from penstock.runtime.diagnosis import duration_text

    return [
        _indented(
            f"has not read documents of {collection} that are older than its retention "
            f"({duration_text(seconds)}): they are kept for it"
        )
        for collection, seconds in sorted(status.holds.items())
    ]


def _details(status: TaskStatus) -> list[tuple[str, str]]:
    """Return all that is known about a task, by name."""
    from penstock.runtime.diagnosis import duration_text, time_text

    report, process = status.report, status.process
    lines: list[tuple[str, str]] = []
    if process is not None:
        heard = duration_text(status.at - process.beat)
        lines.append(("process", f"{process.name}, last report {heard} ago"))
    if report is not None and process is not None and process.alive:
        if report.phase is not None and report.phase_since is not None:
            lines.append(("phase", f"{report.phase}, since {time_text(report.phase_since)}"))
        if report.opened is not None:
            lines.append(("open", f"a transaction, since {time_text(report.opened)}"))
        done = f"{counted(report.transactions, 'transaction')}, "
        done += f"{counted(report.documents, 'document')}, {size_text(report.bytes)}"
        lines.append(("so far", done))
        rate = f"{status.rates[0]:,.1f} documents and {size_text(int(status.rates[1]))} per second"
        lines.append(("rate", rate))
    if status.last_commit is not None:
        lines.append(("commit", f"last at {time_text(status.last_commit)}"))
    for span in status.lag.open_spans if status.lag else ():
        who = span.writer or f"producer {span.producer}"
        since = time_text(span.since)
        said = f"{counted(span.documents, 'document')} of {span.collection} by {who}, since {since}"
        lines.append(("not yet", said))
    failure = None if report is None else report.failure
    if failure is not None:
        lines.append(("error", f"{failure.what}, at {time_text(failure.at)}"))
        lines += [
            (name, text) for name, text in (("where", failure.where), ("why", failure.why)) if text
        ]
        lines += [("cause", cause) for cause in failure.causes]
    return lines
