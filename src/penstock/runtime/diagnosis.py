"""PURE: the state of a task, from what is known about it: and if it does not go on, why not.

`diagnose` looks at the facts in the order in which they matter, and gives the first that explains
what is seen: a state, one sentence, since when it is so, and what to do about it. It is the same
whether the facts come from this process or from others, and whether anything runs at all.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.runtime.introspection import Failure, TaskReport
from penstock.runtime.ops import TaskKindName

WHY_MAX: Final = 120
"""Characters of an error's reason in a sentence; `penstock status TASK` shows all of it."""

OVERDUE_S: Final = 3.0
"""A read delay that is over by this much is not what a task waits for."""

ABANDONED_S: Final = 600.0
"""A transaction of a writer that nobody knows, and that wrote nothing for so long, is abandoned."""


class TaskState(enum.Enum):
    """What a task does."""

    RUNNING = "running"
    IDLE = "idle"
    WAITING = "waiting"
    RETRYING = "retrying"
    FAILED = "failed"
    STOPPED = "stopped"
    DISABLED = "disabled"
    NOT_RUNNING = "not running"

    @property
    def goes_on(self) -> bool:
        """True if the task does what it can, and readers of its output need not care."""
        return self in (TaskState.RUNNING, TaskState.IDLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSpan:
    """Documents that a writer has not committed yet."""

    collection: str
    producer: str
    documents: int
    since: float
    """When the first of them was written."""
    last: float
    """When the last of them was."""
    writer: str | None = None
    """The task that writes them, if it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """What is committed in the collections that a task reads, and not by the task."""

    documents: int = 0
    bytes: int = 0
    oldest: float | None = None
    """When the oldest of them was committed."""
    exact: bool = True
    """False if it was counted from summaries of records."""
    held: int = 0
    """Documents that a read delay holds back, beside those."""
    held_since: float | None = None
    """When the first of those was written."""
    due: float | None = None
    """When it may be read."""
    open_spans: tuple[OpenSpan, ...] = ()


NO_LAG: Final = Lag()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """The process that runs a task, or has run it."""

    name: str
    """As in "penstock run, process 4711 on db1"."""
    alive: bool
    beat: float
    """When it was last heard of."""
    silent: bool = False
    """It lives, and has not been heard of for longer than it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A task that writes what another one reads, and does not go on."""

    task: str
    collection: str
    state: TaskState
    status: TaskCondition


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known about a task."""

    task: str
    kind: TaskKindName
    disabled: bool = False
    idle_by_design: bool = False
    """All of its bindings or transforms are disabled."""
    stopped: float | None = None
    """Since when it is kept from running (`penstock task stop`)."""
    report: TaskReport | None = None
    process: ProcessFacts | None = None
    """The process that the report is of; None if it ended in order."""
    lag: Lag | None = NO_LAG
    """None if it is not known: of captures."""
    upstream: Sequence[Upstream] = ()
    """Those writers of its sources that do not go on; not those that read its own output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCondition:
    """The state of a task, and why."""

    state: TaskState
    sentence: str
    """Reads on from the name of the task."""
    since: float | None = None
    fix: str | None = None
    waits_for: str | None = None
    """What the sentence is about: the object."""
    brief: str | None = None
    """The sentence for tasks that wait for this one, if it is another."""


def diagnose(facts: Facts, now: float) -> TaskCondition:
    """Return the state of a task: the first of these that holds."""
    return (
        _kept_from_running(facts)
        or _without_process(facts)
        or _troubled(facts)
        or _waiting_itself(facts)
        or _retrying(facts, now)
        or _working(facts, now)
        or _held_back(facts, now)
        or _caught_up(facts)
    )


# ------------------------------------------------------------------------- it does not run at all


def _kept_from_running(facts: Facts) -> TaskCondition | None:
    if facts.disabled or facts.idle_by_design:
        whole = "is disabled" if facts.disabled else "has all of its bindings disabled"
        where = "`shards: {disable: true}`" if facts.disabled else "`disable: true`"
        return TaskCondition(
            state=TaskState.DISABLED,
            sentence=f"{whole} in the catalog",
            fix=f"remove {where} from it, and penstock apply",
        )
    if facts.stopped is None:
        return None
    runs = _runs(facts)
    return TaskCondition(
        state=TaskState.STOPPED,
        sentence="was stopped by penstock task stop"
        + (", and finishes its transaction" if runs else _behind(facts)),
        since=facts.stopped,
        fix=f"penstock task start {facts.task}",
    )


def _runs(facts: Facts) -> bool:
    alive = facts.process is not None and facts.process.alive
    return alive and facts.report is not None and facts.report.doing in ("starting", "running")


def _without_process(facts: Facts) -> TaskCondition | None:
    report, process = facts.report, facts.process
    if process is not None and process.alive and report is not None:
        return None
    if report is not None and report.failure is not None and report.doing == "failed":
        return _failed(report.failure)
    if process is not None and not process.alive:
        return TaskCondition(
            state=TaskState.NOT_RUNNING,
            sentence=f"is not running: {process.name}, ended unexpectedly{_behind(facts)}",
            since=process.beat,
            fix="start it again (penstock up): tasks continue after their last transaction; its "
            "log, or that of the system, may show why it ended",
            waits_for=process.name,
        )
    return TaskCondition(
        state=TaskState.NOT_RUNNING,
        sentence=f"is not running: no process runs it{_behind(facts)}",
        fix=f"penstock up, or penstock run --task {facts.task}",
    )


def _behind(facts: Facts) -> str:
    documents = facts.lag.documents if facts.lag else 0
    return f"; {_documents(documents)} wait{'s' if documents == 1 else ''}" if documents else ""


# ------------------------------------------------------------------------------------ it has errors


def _failed(failure: Failure) -> TaskCondition:
    return TaskCondition(
        state=TaskState.FAILED,
        sentence=f"has failed: {_cause(failure)}",
        since=failure.at,
        fix=failure.fix or "fix the cause, and run it again",
        waits_for=failure.where or failure.what,
        brief=f"has failed: {failure.what}",
    )


def _cause(failure: Failure) -> str:
    where = f", at {failure.where}" if failure.where else ""
    why = failure.why or (failure.causes[0] if failure.causes else None)
    if why is not None and len(why) > WHY_MAX:
        why = f"{why[: WHY_MAX - 1]}…"
    return f"{failure.what}{where}{f' ({why})' if why else ''}"


def _troubled(facts: Facts) -> TaskCondition | None:
    report, process = facts.report, facts.process
    if report is None or process is None:
        return None
    if report.failure is not None and report.doing == "failed":
        return _failed(report.failure)
    if process.silent:
        return TaskCondition(
            state=TaskState.WAITING,
            sentence=f"runs in {process.name}, which does not report",
            since=process.beat,
            fix="check whether that process is suspended, overloaded, or cannot reach the "
            "consensus store; see its log",
            waits_for=process.name,
        )
    return None


def _retrying(facts: Facts, now: float) -> TaskCondition | None:
    report = facts.report
    failure = report.failure if report else None
    # Between two tries a session starts: that is a part of trying again.
    if failure is None or failure.retry_at is None or not report:
        return None
    if report.doing not in ("retrying", "starting"):
        return None
    next_s = max(0.0, failure.retry_at - now)
    times = f"failed {failure.count} times in a row" if failure.count > 1 else "failed"
    return TaskCondition(
        state=TaskState.RETRYING,
        sentence=f"{times}, and is retried"
        + (f" in {duration_text(next_s)}" if next_s else " now")
        + f": {_cause(failure)}",
        since=failure.first,
        fix=failure.fix or "fix the cause: the task continues by itself",
        waits_for=failure.where or failure.what,
        brief=f"{times}, and is retried: {failure.what}",
    )


# ------------------------------------------------------------------------ it runs, and waits or not


def _waiting_itself(facts: Facts) -> TaskCondition | None:
    wait = facts.report.wait if facts.report else None
    if wait is None or not _runs(facts):
        return None
    return TaskCondition(
        state=TaskState.WAITING,
        sentence=f"waits for {wait.what}",
        since=wait.since,
        fix=wait.fix,
        waits_for=wait.what,
    )


def _working(facts: Facts, now: float) -> TaskCondition | None:
    report = facts.report
    if report is None:
        return None
    behind = _behind(facts)
    if report.doing == "queued":
        return TaskCondition(
            state=TaskState.WAITING,
            sentence=f"starts when the tasks before it have caught up{behind}",
            since=report.since,
            fix="the run continues by itself; penstock up runs all tasks at once",
            waits_for="the tasks before it",
        )
    if report.doing == "starting":
        return TaskCondition(
            state=TaskState.RUNNING, sentence=f"starts{behind}", since=report.since
        )
    if report.doing == "ended":
        if not behind:
            return None
        return TaskCondition(
            state=TaskState.NOT_RUNNING,
            sentence=f"has ended in this run{behind}",
            since=report.since,
            fix="run it again, or continuously: penstock up",
        )
    if report.opened is not None:
        if report.phase is not None:
            said = f"is in a transaction: {report.phase}"
        elif report.closes is not None and report.closes > now:
            said = f"has a transaction open for {duration_text(report.closes - now)} more"
        else:
            said = "reads into its open transaction"
        close = f"penstock task close-now {facts.task}" if report.closes is not None else None
        return TaskCondition(
            state=TaskState.RUNNING, sentence=f"{said}{behind}", since=report.opened, fix=close
        )
    if report.phase is not None:
        return TaskCondition(
            state=TaskState.RUNNING,
            sentence=f"finishes a transaction: {report.phase}{behind}",
            since=report.phase_since,
        )
    if behind:
        return TaskCondition(
            state=TaskState.RUNNING, sentence=f"reads{behind}", since=report.committed
        )
    return None


# -------------------------------------------------------------------- it has done all that it could


def _held_back(facts: Facts, now: float) -> TaskCondition | None:
    lag = facts.lag or NO_LAG
    if lag.due is not None and lag.due > now - OVERDUE_S:
        held = _documents(lag.held) if lag.held else "documents"
        return TaskCondition(
            state=TaskState.WAITING,
            sentence=f"holds {held} back by `readDelay`, until {time_text(lag.due)}",
            since=lag.held_since,
            fix="wait until then, or lower `readDelay` in the catalog, and penstock apply",
            waits_for=f"readDelay, until {time_text(lag.due)}",
        )
    if facts.upstream:
        return _behind_others(facts.upstream)
    spans = [
        span for span in lag.open_spans if span.writer is not None or now - span.last < ABANDONED_S
    ]
    if spans:
        return _behind_writer(min(spans, key=lambda span: span.since))
    return None


def _behind_others(upstream: Sequence[Upstream]) -> TaskCondition:
    """Of several writers that do not go on, the worst is named."""
    first = min(upstream, key=lambda each: (_WORST.index(each.state), each.task))
    more = f" (and {len(upstream) - 1} more)" if len(upstream) > 1 else ""
    return TaskCondition(
        state=TaskState.WAITING,
        sentence=f"has caught up with {first.collection}; {first.task}, which writes it, "
        f"{first.status.brief or first.status.sentence}{more}",
        since=first.status.since,
        fix=first.status.fix,
        waits_for=first.task,
    )


_WORST: Final = (
    TaskState.FAILED,
    TaskState.RETRYING,
    TaskState.WAITING,
    TaskState.STOPPED,
    TaskState.DISABLED,
    TaskState.NOT_RUNNING,
    TaskState.RUNNING,
    TaskState.IDLE,
)


def _behind_writer(span: OpenSpan) -> TaskCondition:
    who = span.writer or f"producer {span.producer}"
    fix = (
        f"it commits at the end of its transaction; penstock status {span.writer} says what it does"
        if span.writer
        else "let that writer commit; if it has ended, its documents never count, and there is "
        "nothing to do"
    )
    return TaskCondition(
        state=TaskState.WAITING,
        sentence=f"has caught up; {_documents(span.documents)} of {span.collection} "
        f"{'is' if span.documents == 1 else 'are'} in an open transaction of {who}",
        since=span.since,
        fix=fix,
        waits_for=who,
    )


def _caught_up(facts: Facts) -> TaskCondition:
    report = facts.report
    since = None if report is None else report.committed or report.since
    took = "has taken all that its source had" if facts.kind == "capture" else "has caught up"
    return TaskCondition(state=TaskState.IDLE, sentence=took, since=since)


# -------------------------------------------------------------------------------------------- words


def _documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Return a length of time in one or two units, as 90s is 1m 30s."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    for unit, name, below, small in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit}{name} {rest}{small}" if rest else f"{whole // unit}{name}"
    return f"{whole}s"


def time_text(at: float) -> str:
    """Return an instant in UTC, as people read it."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
