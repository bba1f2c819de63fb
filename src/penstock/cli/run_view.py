"""What `penstock run` shows while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from penstock.cli.frame import stderr
from penstock.cli.live import shown_live
from penstock.cli.progress import Commits, Narrator, Paces, lines_of, said_of
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.batch import TaskRun
    from penstock.runtime.control import TransactionSummary
    from penstock.runtime.introspection import TaskReport

_LOOK_S: Final = 0.25


@contextlib.asynccontextmanager
async def showing(
    settings: Settings, reports: Callable[[], Sequence[TaskReport]]
) -> AsyncIterator[Callable[[TaskRun, TransactionSummary], None]]:
    """Progress: a line per task on a terminal, lines at a bounded rate elsewhere."""
    view = _View(reports)
    looking = asyncio.create_task(view.look(), name="progress")
    try:
        if stderr.is_terminal:
            with shown_live(settings, view.table, _is_not_in_the_table):
                yield _ignore
        else:
            with _without_failures(settings):
                yield view.committed
    finally:
        looking.cancel()
        view.end()


class _View:
    """Shows what tasks do; failures at once."""

    def __init__(self, reports: Callable[[], Sequence[TaskReport]]) -> None:
        self._reports = reports
        self._paces = Paces()
        self._narrator = Narrator()
        self._failed: set[str] = set()
        self._commits = Commits()

    async def look(self) -> None:
        """Look at tasks again and again, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            reports, now = self._reports(), time.time()
            self._tell_failures(reports)
            if not stderr.is_terminal:
                self._print([*self._commits.due(now), *self._narrator.lines(reports, now)])

    def table(self, width: int, height: int) -> list[str]:
        return lines_of(self._reports(), self._paces, width=width, height=height, now=time.time())

    def committed(self, run: TaskRun, progress: TransactionSummary) -> None:
        self._print(self._commits.add(run.task, run.transactions, progress, time.time()))

    def end(self) -> None:
        self._print(self._commits.due(math.inf))
        self._tell_failures(self._reports())

    def _tell_failures(self, reports: Sequence[TaskReport]) -> None:
        for report in reports:
            if report.doing == "failed" and report.task not in self._failed:
                self._failed.add(report.task)
                self._print([f"{report.task}: {said_of(report, None)}"])

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            stderr.print(line, markup=False)


def _ignore(_: TaskRun, __: TransactionSummary) -> None:
    """The table shows it."""


def _is_not_in_the_table(record: logging.LogRecord) -> bool:
    """False for what the table shows: failures, waits, and what is tried again."""
    from penstock.runtime.awaited import IN_REPORT

    return _is_no_failure(record) and not getattr(record, IN_REPORT, False)


def _is_no_failure(record: logging.LogRecord) -> bool:
    """False for what is shown in other words."""
    from penstock.batch import FAILED_TASK

    return not getattr(record, FAILED_TASK, False)


@contextlib.contextmanager
def _without_failures(settings: Settings) -> Iterator[None]:
    """Within this, the log leaves to people what is shown to them; machines get all of it."""
    handlers = [] if settings.debug or settings.log_json else logging.getLogger().handlers
    for handler in handlers:
        handler.addFilter(_is_no_failure)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_no_failure)
