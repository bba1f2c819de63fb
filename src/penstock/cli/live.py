"""The table of running tasks: how each is, as lines for a terminal of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.cluster.runner import TaskStatus

_HEAD: Final = ("TASK", "KIND", "STATE", "DOCUMENTS", "PER S", "LAST COMMIT")
_RIGHT: Final = frozenset({3, 4, 5})
_TASK_MIN: Final = 12
_TROUBLE: Final = ("failed", "elsewhere", "retrying", "waiting")
_AGO: Final = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def lines_of(statuses: Sequence[TaskStatus], *, width: int, height: int, now: float) -> list[str]:
    """Return the table: a line per task, and below it why it does not run, if it does not.

    Of more tasks than there is room for, those in trouble come first, then the latest to commit.
    """
    if not statuses:
        return ["no task runs: penstock apply a catalog that has some"]
    blocks = [(each, _why(each)) for each in sorted(statuses, key=lambda each: each.task)]
    room = max(height - 2, 4)
    if sum(1 + bool(why) for _, why in blocks) > room:
        blocks, left = _most_urgent(blocks, room - 1)
    else:
        left = 0
    cells = [_cells(status, now) for status, _ in blocks]
    widths = [max(map(len, column)) for column in zip(_HEAD, *cells, strict=True)]
    others = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = max(min(widths[0], width - others), _TASK_MIN)
    lines = [_line(_HEAD, widths)]
    for (_, why), row in zip(blocks, cells, strict=True):
        lines.append(_line(row, widths))
        if why:
            lines.append(f"  {why}")
    if left:
        lines.append(f"and {left:,} more")
    return [_cut(line, width) for line in lines]


def _most_urgent(
    blocks: Sequence[tuple[TaskStatus, str]], room: int
) -> tuple[list[tuple[TaskStatus, str]], int]:
    def urgency(block: tuple[TaskStatus, str]) -> tuple[int, float]:
        status = block[0]
        word = status.condition.value
        rank = _TROUBLE.index(word) if word in _TROUBLE else len(_TROUBLE)
        return rank, -(status.committed_at or 0.0)

    shown: list[tuple[TaskStatus, str]] = []
    for block in sorted(blocks, key=urgency):
        room -= 1 + bool(block[1])
        if room < 0:
            break
        shown.append(block)
    return shown, len(blocks) - len(shown)


def _cells(status: TaskStatus, now: float) -> tuple[str, ...]:
    rate = status.rate(now)
    return (
        status.task,
        status.kind,
        status.condition.value,
        f"{status.documents:,}",
        f"{rate:,.0f}" if rate >= 10 or not rate else f"{rate:.1f}",
        "-" if status.committed_at is None else _ago(now - status.committed_at),
    )


def _why(status: TaskStatus) -> str:
    """Return why a task does not run, in one line."""
    word, reason = status.condition.value, status.reason
    if word in ("failed", "retrying") and status.error is not None:
        said = " ".join(status.error.what.split())
        why = f" ({' '.join(status.error.why.split())})" if status.error.why else ""
        return f"{said}{why}" if reason is None else f"{reason}: {said}{why}"
    if word == "waiting" and reason is not None:
        return f"waits for {reason}"
    return reason if word == "elsewhere" and reason is not None else ""


def _ago(seconds: float) -> str:
    for unit, letter in _AGO:
        if seconds >= unit:
            return f"{seconds // unit:.0f} {letter} ago"
    return "now"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    placed = [
        _cut(cell, width).rjust(width) if at in _RIGHT else _cut(cell, width).ljust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(placed).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
