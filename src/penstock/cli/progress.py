"""PURE: how far a run is, in words: lines for a terminal, and lines for everything else.

Both are made from the reports of tasks (`runtime.introspection`), and from nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cli.tables import size_text

if TYPE_CHECKING:
    from penstock.runtime.control import TransactionSummary
    from penstock.runtime.introspection import TaskReport

FIRST_S: Final = 1.0
"""Seconds that something takes before it is told, and between two lines about one task."""

AGAIN_S: Final = 5.0
AGAIN_S_MAX: Final = 30.0
"""Seconds until the same is told again: at first, and at most."""

LINES_MAX: Final = 10
"""Lines in a second, however many tasks there are; the most urgent are told."""

_BAR: Final = 12
_LEAST_SHARE: Final = 0.02
"""What must be done before it can be said how long the rest takes."""

_ORDER: Final = ("failed", "retrying", "running", "starting", "queued", "ended")
_STAGES: Final = {
    "startSpark": "starting Spark",
    "read": "reading",
    "stage": "staging",
    "commit": "committing",
}


@dataclass(slots=True)
class _Pace:
    since: float
    share: float


class Paces:
    """How fast tasks are, for saying how long they will take."""

    def __init__(self) -> None:
        self._begun: dict[str, _Pace] = {}

    def left_s(self, report: TaskReport, now: float) -> float | None:
        """Return how many seconds a task will take, at the pace that it had so far."""
        share = share_of(report)
        if share is None:
            return None
        begun = self._begun.setdefault(report.task, _Pace(now, share))
        if share < begun.share:  # there is more to do than it seemed
            begun.since, begun.share = now, share
        done, took_s = share - begun.share, now - begun.since
        if done < _LEAST_SHARE or took_s < FIRST_S:
            return None
        return took_s * (1 - share) / done


def share_of(report: TaskReport) -> float | None:
    """Return how much of what there is to do is done, up to 1; None if that is not known.

    Of a transaction that is under way, as much is done as of the tasks of its Spark job.
    """
    if not report.expected:
        return None
    return min(_done(report, report.documents, report.taken) / report.expected, 1.0)


def _done(report: TaskReport, committed: int, taken: int) -> int:
    under_way = max(taken - committed, 0)
    if _stage(report) == "commit":
        return committed + under_way
    done, tasks = report.spark_tasks or (0, 0)
    return committed + (under_way * done // tasks if tasks else 0)


def _stage(report: TaskReport) -> str:
    from penstock.runtime.introspection import stage_of

    return "read" if report.phase is None else stage_of(report.phase)


def said_of(report: TaskReport, left_s: float | None) -> str:
    """Return what a task does now and how far it is, without its name."""
    match report.doing:
        case "queued":
            return "waits for the tasks before it"
        case "failed" | "retrying":
            what = report.failure.what if report.failure else ""
            again = "failed" if report.doing == "failed" else "failed, and is tried again"
            return f"{again}: {' '.join(what.split())}"
        case "ended":
            return f"done: {_counted(report)}" if report.transactions else "done: nothing new"
        case _ if report.wait is not None:
            return f"waits for {report.wait.what}"
        case "starting":
            return "starting"
        case "running":
            return _work(report, left_s)


def _work(report: TaskReport, left_s: float | None) -> str:
    stage = _stage(report)
    if report.expected is not None and report.documents >= report.expected > 0:
        return "finishing"
    said = _STAGES[stage]
    if stage == "startSpark" or not report.taken:
        return said
    if report.expected is None:
        return f"{said}, {report.taken:,} documents, {size_text(report.taken_bytes)} so far"
    documents, left, size = _far(report, left_s)
    return ", ".join(
        filter(None, (f"{said} {documents} documents", size, left and f"about {left}"))
    )


def _far(report: TaskReport, left_s: float | None) -> tuple[str, str, str]:
    """Return how many documents of all are done, how long the rest takes, and how many bytes."""
    from penstock.runtime.diagnosis import duration_text

    all_documents, all_bytes = report.expected or 0, report.expected_bytes or 0
    done = min(_done(report, report.documents, report.taken), all_documents)
    left = "" if left_s is None or left_s < FIRST_S else f"{duration_text(left_s)} left"
    size = int((share_of(report) or 0.0) * all_bytes)
    return (
        f"{done:,} of {all_documents:,}",
        left,
        f"{size_text(size)} of {size_text(all_bytes)}",
    )


def _counted(report: TaskReport) -> str:
    return f"{_many(report.documents, 'document')}, {size_text(report.bytes)}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# -------------------------------------------------------------------------------- on a terminal


def lines_of(
    reports: Sequence[TaskReport], paces: Paces, *, width: int, height: int, now: float
) -> list[str]:
    """Return a line for each task, with a bar if it is known how much there is to do.

    A name is never cut: where it does not fit, the rest has a line of its own. Of more tasks than
    there is room for, those are shown that do something.
    """
    names = max((len(report.task) for report in reports), default=0)
    beside = names <= width // 3
    lines: list[str] = []
    shown = 0
    for report in sorted(reports, key=_urgency):
        rest = _detail(report, paces, now, width - 2 - (names if beside else 0))
        block = [f"{report.task:<{names}}  {rest}"] if beside else [report.task, f"  {rest}"]
        if len(lines) + len(block) > max(height - 1, 1):
            break
        lines += block
        shown += 1
    if left := len(reports) - shown:
        lines.append(f"and {left:,} more")
    return lines


def _urgency(report: TaskReport) -> tuple[int, str]:
    return _ORDER.index(report.doing), report.task


def _detail(report: TaskReport, paces: Paces, now: float, room: int) -> str:
    """What a task does, in so many characters: what is left out is what matters least."""
    left_s = paces.left_s(report, now)
    share = share_of(report)
    if share is None or report.doing != "running" or report.wait is not None:
        return said_of(report, left_s)[:room]
    filled = int(share * _BAR)
    text = f"{'━' * filled}{'─' * (_BAR - filled)} {share:>4.0%} {_STAGES[_stage(report)]}"
    documents, left, size = _far(report, left_s)
    for piece in filter(None, (f" {documents}", left and f", {left}", f", {size}")):
        if len(text) + len(piece) <= room:
            text += piece
    return text[:room]


# ------------------------------------------------------------------------------------- elsewhere


@dataclass(slots=True)
class _Told:
    first: float
    """When the task was seen to do anything."""
    stage: str
    at: float | None = None
    """When it was told last."""
    again_s: float = AGAIN_S


class Narrator:
    """Decides which lines are worth printing, where nothing can be overwritten.

    What takes less than a second is not told; the same is told again later and later; and of many
    tasks, a few at a time. What tasks wait for, and their failures, are in the log already.
    """

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}
        self._paces = Paces()
        self._window: tuple[float, int] = (0.0, 0)

    def lines(self, reports: Sequence[TaskReport], now: float) -> list[str]:
        """Return what is to be told now."""
        lines = []
        for report in sorted(reports, key=_urgency):
            if report.doing not in ("starting", "running"):
                self._told.pop(report.task, None)
                continue
            left_s = self._paces.left_s(report, now)
            if report.wait is None and self._is_due(report, now) and self._has_room(now):
                lines.append(f"{report.task}: {said_of(report, left_s)}")
        return lines

    def _is_due(self, report: TaskReport, now: float) -> bool:
        stage = report.doing if report.doing == "starting" else _stage(report)
        told = self._told.setdefault(report.task, _Told(now, stage))
        new = told.at is None or stage != told.stage
        since = told.first if told.at is None else told.at
        if now - since < (FIRST_S if new else told.again_s):
            return False
        told.again_s = AGAIN_S if new else min(2 * told.again_s, AGAIN_S_MAX)
        told.stage, told.at = stage, now
        return True

    def _has_room(self, now: float) -> bool:
        since, lines = self._window
        if now - since >= FIRST_S:
            since, lines = now, 0
        self._window = (since, lines + 1)
        return lines < LINES_MAX


class Commits:
    """A line for each transaction, or one for all of a task that were committed within a second."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, int, TransactionSummary]] = {}
        """By task: the first and the last of those that wait, and what they add up to."""
        self._at: dict[str, float] = {}

    def add(self, task: str, number: int, done: TransactionSummary, now: float) -> list[str]:
        """Take a transaction, which is this one of its task, and return what is to be told now."""
        first, _, before = self._held.get(task, (number, number, None))
        total = done if before is None else _sum(before, done)
        self._held[task] = (first, number, total)
        return self._take(task, now)

    def due(self, now: float) -> list[str]:
        """Return what was not told before, and is to be told now."""
        return [line for task in list(self._held) for line in self._take(task, now)]

    def _take(self, task: str, now: float) -> list[str]:
        if now - self._at.get(task, -FIRST_S) < FIRST_S:
            return []
        first, last, done = self._held.pop(task)
        self._at[task] = now
        which = f"transaction {first}" if first == last else f"transactions {first} to {last}"
        return [
            f"{task}: {which}: {_many(done.documents, 'document')}, {size_text(done.bytes)}, "
            f"{_many(done.stored, 'row')}, {_many(done.jobs, 'job')}, {done.seconds:.2f} s"
        ]


def _sum(one: TransactionSummary, other: TransactionSummary) -> TransactionSummary:
    return dataclasses.replace(
        other,
        documents=one.documents + other.documents,
        bytes=one.bytes + other.bytes,
        stored=one.stored + other.stored,
        jobs=one.jobs + other.jobs,
        seconds=one.seconds + other.seconds,
    )
