"""Lines that a terminal shows while tasks run; and those of `penstock up`: what each task does."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.cli.frame import stderr
from penstock.servicekit import logs
from penstock.settings import Settings

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.runtime.introspection import TaskReport

_HEAD: Final = ("TASK", "KIND", "STATE", "DOCUMENTS", "DOCS/S", "COMMIT")
_RIGHT: Final = frozenset({3, 4, 5})
_LESS_IMPORTANT: Final = (1, 4, 5, 3)
"""Columns that are left out, in this order, where names of tasks need their room."""
_TROUBLE: Final = ("failed", "retrying", "waiting", "stopped")


REFRESH_S: Final = 0.5


@contextlib.contextmanager
def shown_live(
    settings: Settings,
    lines: Callable[[int, int], list[str]],
    keeps: Callable[[logging.LogRecord], bool],
) -> Iterator[None]:
    """Within this, the terminal shows these lines, for a width and a height; above it, the log.

    Of the log, what `keeps` keeps: the lines may say the rest.
    """
    from rich.live import Live
    from rich.text import Text

    def render() -> Text:
        width, height = stderr.size
        return Text("\n".join(lines(width, height - 1)), no_wrap=True, overflow="crop")

    level = "debug" if settings.debug else settings.log_level
    with Live(
        get_renderable=render, console=stderr, refresh_per_second=1 / REFRESH_S, transient=True
    ):
        logs.configure(level=level, as_json=settings.log_json, stream=sys.stderr)  # Live's, now
        if not settings.debug:
            for handler in logging.getLogger().handlers:  # until they are configured again
                handler.addFilter(keeps)
        try:
            yield
        finally:
            logs.configure(level=level, as_json=settings.log_json, stream=sys.__stderr__)


class _Block(NamedTuple):
    """A task's row, and the sentence below it, if it does not go on."""

    row: tuple[str, ...]
    why: str
    urgency: tuple[int, float]

    @property
    def height(self) -> int:
        return 1 + bool(self.why)


def lines_of(reports: Sequence[TaskReport], *, width: int, height: int, now: float) -> list[str]:
    """Return the table: a line per task, and below it why it does not go on, if it does not.

    Of more tasks than there is room for, those in trouble are shown, then the latest to commit.
    """
    if not reports:
        return ["no task runs: penstock apply a catalog that has some"]
    blocks = [_block(report, now) for report in sorted(reports, key=lambda each: each.task)]
    room, left = max(height - 1, 4), 0
    if sum(block.height for block in blocks) > room:
        shown = _most_urgent(blocks, room - 1)
        left = len(blocks) - len(shown)
        blocks = shown
    widths = [max(map(len, column)) for column in zip(_HEAD, *(b.row for b in blocks), strict=True)]
    for column in _LESS_IMPORTANT:
        if _total(widths) > width:
            widths[column] = 0
    widths[0] -= max(min(_total(widths) - width, widths[0] - 1), 0)
    lines = [_line(_HEAD, widths)]
    for block in blocks:
        lines.append(_line(block.row, widths))
        if block.why:
            lines.append(f"  {block.why}")
    if left:
        lines.append(f"and {left:,} more: penstock status")
    return [_cut(line, width) for line in lines]


def _most_urgent(blocks: Sequence[_Block], room: int) -> list[_Block]:
    shown: list[_Block] = []
    for block in sorted(blocks, key=lambda each: each.urgency):
        room -= block.height
        if room < 0:
            break
        shown.append(block)
    return shown


def _block(report: TaskReport, now: float) -> _Block:
    from penstock.runtime.diagnosis import Facts, ProcessFacts, diagnose, duration_text

    here = ProcessFacts(name="this process", alive=True, beat=now)
    facts = Facts(
        task=report.task,
        kind=report.kind,
        stopped=report.since if report.doing == "ended" else None,
        report=report,
        process=here,
        lag=None,
    )
    condition = diagnose(facts, now)
    state, committed, rate = condition.state, report.committed, report.documents_rate
    row = (
        report.task,
        report.kind,
        state.value,
        f"{report.documents:,}",
        f"{rate:,.0f}" if rate >= 10 or not rate else f"{rate:.1f}",
        "-" if committed is None else f"{duration_text(now - committed)} ago",
    )
    rank = _TROUBLE.index(state.value) if state.value in _TROUBLE else len(_TROUBLE)
    why = "" if state.goes_on else " ".join(condition.sentence.split())
    return _Block(row, why, (rank, -(committed or 0.0)))


def _total(widths: Sequence[int]) -> int:
    shown = [width for width in widths if width]
    return sum(shown) + 2 * (len(shown) - 1)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    task, *others = cells
    name = task if len(task) <= widths[0] else f"…{task[-(widths[0] - 1) :]}"
    placed = [
        cell.rjust(width) if at in _RIGHT else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(others, widths[1:], strict=True), 1)
        if width
    ]
    return "  ".join([name.ljust(widths[0]), *placed]).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
