"""PURE: what the tasks of this process do now and did lately, in memory and bounded.

The runtime tells an `Activity` what happens to its task; nothing of the data plane ever reads it.
It is shown in two ways:

- `Activity.report` is the little that other processes need to know (`runtime.reports`);
- `Introspection.relations` are for people: tasks, transactions with the time of each
  phase, errors with their causes, Spark jobs. They are served as JSON at the admin address.

Times are Unix times. Of everything that grows, the newest is kept.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, structs

from penstock.errors import PenstockError
from penstock.runtime.awaited import Wait
from penstock.runtime.ops import TaskKindName
from penstock.servicekit.secrets import mask

TRANSACTIONS_MAX: Final = 1_000
"""Kept, per process, as are errors and jobs."""

PHASES_MAX: Final = 64
"""Kept per transaction."""

RATE_S: Final = 60.0
"""Seconds over which rates are averages."""

CAUSES_MAX: Final = 10
TEXT_MAX: Final = 2_000
"""Characters of each text of an error."""

COMMITTING: Final = frozenset({"write stats", "start commit", "record commit"})
AFTER_COMMIT: Final = frozenset(
    {"acknowledge", "write intents", "record ack", "call trigger", "record trigger done"}
)
"""Phases of a transaction that is committed, while the next one may be open."""

START_SPARK: Final = "start spark"
"""The phase in which the first job of a process waits for Spark; it is within another phase."""

Stage = Literal["read", "startSpark", "stage", "commit"]
"""What a transaction is about now, in words for people: one of these at a time."""


def stage_of(phase: str) -> Stage:
    """Return the stage that a phase belongs to."""
    if phase == START_SPARK:
        return "startSpark"
    if phase in COMMITTING or phase in AFTER_COMMIT or phase.startswith("record "):
        return "commit"
    return "stage"


Doing = Literal["queued", "starting", "running", "retrying", "failed", "ended"]

Command = Literal["run", "up"]
"""What tasks are run for: until they have caught up, or on and on."""


class Failure(Struct, frozen=True, kw_only=True):
    """An error of a task, as data."""

    what: str
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    causes: tuple[str, ...] = ()
    """What led to it, the nearest first."""
    at: float
    first: float
    """When the first of these failures was."""
    count: int = 1
    """Sessions in a row that failed."""
    retry_at: float | None = None
    """When it is tried again; None if it is not."""


class TaskReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process says of one of its tasks."""

    kind: TaskKindName
    task: str
    dataflow_id: int | None = None
    """Known if a cluster runs it."""
    doing: Doing
    since: float
    wait: Wait | None = None
    phase: str | None = None
    """What of a transaction is under way."""
    phase_since: float | None = None
    opened: float | None = None
    """Since when a transaction is open."""
    closes: float | None = None
    """When it closes, if time alone decides."""
    committed: float | None = None
    transactions: int = 0
    """Committed by this process; so are the following."""
    documents: int = 0
    bytes: int = 0
    stored: int = 0
    taken: int = 0
    """Documents of committed transactions, and of those that are under way."""
    taken_bytes: int = 0
    expected: int | None = None
    """Documents that this run has to do in all; None if that is not known."""
    expected_bytes: int | None = None
    spark_tasks: tuple[int, int] | None = None
    """Tasks of the Spark job that runs now: those that are done, and all."""
    documents_rate: float = 0.0
    """Per second, over the last minute before this report."""
    bytes_rate: float = 0.0
    failure: Failure | None = None
    producer: str | None = None
    """That of its session, by which its documents can be recognised."""


class PhaseTime(Struct, frozen=True):
    """A phase of a transaction; phases of one transaction may overlap."""

    phase: str
    began: float
    seconds: float


class _Transaction(Struct, kw_only=True):
    opened: float
    phases: list[PhaseTime] = msgspec.field(default_factory=list)
    committed: float | None = None
    documents: int = 0
    bytes: int = 0
    stored: int = 0
    jobs: int = 0


class Activity:
    """What one task does. Used on the event loop of its process."""

    def __init__(self, kind: TaskKindName, task: str, process: Introspection) -> None:
        self.kind = kind
        self.task = task
        self.version = 0
        """Grows when a report would differ."""
        self.weight = 0
        """Grows when a report would differ in more than progress."""
        self._process = process
        self._dataflow_id: int | None = None
        self._doing: Doing = "queued"
        self._since = process.now()
        self._wait: Callable[[], Wait | None] = lambda: None
        self._under_way: dict[object, tuple[PhaseTime, _Transaction | None]] = {}
        self._open: _Transaction | None = None
        self._closed: _Transaction | None = None
        """Handed over by the head, and not committed yet."""
        self._last: _Transaction | None = None
        """The last one that was committed: its tail may be under way."""
        self._head_commits = False
        """The head has committed its transaction, and not moved on yet."""
        self._closes: float | None = None
        self._totals = _Totals()
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=TRANSACTIONS_MAX)
        self._failure: Failure | None = None
        self._producer: str | None = None
        self._taken = self._taken_bytes = 0
        self._taken_before = 0
        """When the session began."""
        self._expected: tuple[int, int] | None = None
        self._spark_tasks: tuple[int, int] | None = None
        self._stage_since: tuple[Stage | None, float] = (None, process.now())
        self._stage_s: dict[str, float] = {}
        """Seconds of each stage, since the process runs the task."""
        self._stage_s_told: dict[str, float] = {}

    # ------------------------------------------------------------------- what the runtime reports

    def waits_are(self, longest: Callable[[], Wait | None]) -> None:
        """The task waits for what this returns."""
        self._wait = longest

    def wait_changed(self) -> None:
        """The task begins to wait, or waits no more."""
        self._moved(weighty=True)

    def is_dataflow(self, dataflow_id: int) -> None:
        """A cluster runs the task, and knows this version of it by an id."""
        self._dataflow_id = dataflow_id

    def starts(self) -> None:
        """A session begins, or the task is built for one."""
        if self._doing != "starting":
            self._do("starting")

    def runs(self, producer: str | None = None) -> None:
        """A session takes transactions."""
        self._producer = producer
        self._do("running")

    def fails(self, error: BaseException, *, count: int = 1, retry_in_s: float | None) -> None:
        """A session ended with an error."""
        now = self._process.now()
        retry_at = None if retry_in_s is None else now + retry_in_s
        first = self._failure.first if self._failure is not None and count > 1 else now
        self._failure = failure_of(error, at=now, first=first, count=count, retry_at=retry_at)
        self._process.add_error(self._whose, self._failure)
        self._session_over("failed" if retry_in_s is None else "retrying")

    def ends(self) -> None:
        """The task is not run any more; a failure stays."""
        if self._doing != "failed":
            self._session_over("ended")

    def begins(self, phase: str) -> object:
        """A phase of a transaction begins; what is returned ends it."""
        if phase in AFTER_COMMIT:
            of = self._last
        elif phase in COMMITTING:
            of = self._closed or self._open
        else:
            of = self._open
        token = object()
        self._under_way[token] = (PhaseTime(phase, self._process.now(), 0.0), of)
        self._moved()
        return token

    def completes(self, token: object) -> None:
        """A phase is over."""
        begun, of = self._under_way.pop(token, (None, None))
        if begun is not None:
            took_s = self._process.now() - begun.began
            if of is not None and len(of.phases) < PHASES_MAX:
                of.phases.append(structs.replace(begun, seconds=took_s))
            self._moved()

    def transaction_is(self, *, is_open: bool, closes_in_s: float | None = None) -> None:
        """The head has an open transaction, or none; and in which time it closes of itself."""
        now = self._process.now()
        if not is_open:
            self._head_commits = False
        if is_open and self._open is None and not self._head_commits:
            self._open = _Transaction(opened=now)
            self._moved()
        elif not is_open and self._open is not None:
            self._closed, self._open = self._open, None
            self._moved()
        self._closes = None if closes_in_s is None else now + closes_in_s

    def committed(self, *, documents: int, size: int, stored: int, jobs: int) -> None:
        """A transaction is committed; its tail may still have something to do."""
        now = self._process.now()
        self._totals.add(documents, size, stored)
        self._totals.committed = now
        self._recent.append((now, documents, size))
        if self._closed is None:
            self._closed, self._open, self._head_commits = self._open, None, True
        done = self._closed or _Transaction(opened=now)
        self._last, self._closed = done, None
        done.committed, done.jobs = now, jobs
        done.documents, done.bytes, done.stored = documents, size, stored
        self._process.add_transaction(self._whose, self._totals.transactions, done)
        self._moved(weighty=self._failure is not None)
        self._failure = None

    def takes(self, documents: int, size: int) -> None:
        """Documents are part of the open transaction."""
        self._taken += documents
        self._taken_bytes += size
        self._moved()

    def expects(self, documents: int, size: int) -> None:
        """This is all that a run has to do, those included that are committed."""
        self._expected = (documents, size)
        self._moved()

    def job_is_at(self, tasks: tuple[int, int] | None) -> None:
        """So many tasks of the Spark job that runs now are done, of so many; None: it is over."""
        if self._spark_tasks != tasks:
            self._spark_tasks = tasks
            self._moved()

    def ran_job(self, group: str, began: float, jobs: int, error: str | None) -> None:
        """A call that runs Spark jobs has ended."""
        self._process.add_job(self._whose, group, began, jobs, error)

    # ------------------------------------------------------------------------------ what is shown

    def report(self) -> TaskReport:
        """Return what others need to know."""
        now = self._process.now()
        begun = [phase for phase, _ in list(self._under_way.values())]  # a view has its own thread
        newest = max(begun, key=lambda phase: phase.began, default=None)
        recent = [each for each in list(self._recent) if each[0] > now - RATE_S]
        totals = self._totals
        return TaskReport(
            kind=self.kind,
            task=self.task,
            dataflow_id=self._dataflow_id,
            doing=self._doing,
            since=self._since,
            wait=self._wait(),
            phase=None if newest is None else newest.phase,
            phase_since=None if newest is None else newest.began,
            opened=None if self._open is None else self._open.opened,
            closes=self._closes,
            committed=totals.committed,
            transactions=totals.transactions,
            documents=totals.documents,
            bytes=totals.bytes,
            stored=totals.stored,
            taken=max(self._taken, totals.documents),
            taken_bytes=max(self._taken_bytes, totals.bytes),
            expected=None if self._expected is None else self._expected[0],
            expected_bytes=None if self._expected is None else self._expected[1],
            spark_tasks=self._spark_tasks,
            documents_rate=sum(each[1] for each in recent) / RATE_S,
            bytes_rate=sum(each[2] for each in recent) / RATE_S,
            failure=self._failure,
            producer=self._producer,
        )

    @property
    def has_read(self) -> bool:
        """True if this session has read anything."""
        return self._open is not None or self._taken > self._taken_before

    def stage_seconds(self) -> dict[str, float]:
        """Return how long each stage took, in all transactions so far."""
        self._clock_stage()
        return dict(self._stage_s)

    def untold_stage_seconds(self) -> dict[str, float]:
        """Return the same since the last call of this: for the statistics of a transaction."""
        now = self.stage_seconds()
        told, self._stage_s_told = self._stage_s_told, now
        return {stage: now[stage] - told.get(stage, 0.0) for stage in now}

    def _clock_stage(self) -> None:
        """Count the time since the last call as that of the stage which was under way."""
        stage, since = self._stage_since
        now = self._process.now()
        if stage is not None:
            self._stage_s[stage] = self._stage_s.get(stage, 0.0) + max(0.0, now - since)
        newest = max(
            (phase for phase, _ in self._under_way.values()),
            key=lambda phase: phase.began,
            default=None,
        )
        if newest is not None:
            stage = stage_of(newest.phase)
        else:
            stage = None if self._open is None else "read"
        self._stage_since = (stage, now)

    @property
    def _whose(self) -> dict[str, Any]:
        return {"kind": self.kind, "task": self.task, "dataflow_id": self._dataflow_id}

    def _do(self, doing: Doing) -> None:
        self._doing, self._since = doing, self._process.now()
        self._moved(weighty=True)

    def _session_over(self, doing: Doing) -> None:
        self._under_way.clear()
        self._spark_tasks = None
        self._taken, self._taken_bytes = self._totals.documents, self._totals.bytes
        self._taken_before = self._taken
        self._open = self._closed = self._last = self._closes = None
        self._head_commits = False
        self._producer = None
        self._do(doing)

    def _moved(self, *, weighty: bool = False) -> None:
        self._clock_stage()
        self.version += 1
        self.weight += weighty


class _Totals:
    """Counts of a task since its process started."""

    __slots__ = ("bytes", "committed", "documents", "stored", "transactions")

    def __init__(self) -> None:
        self.transactions = self.documents = self.bytes = self.stored = 0
        self.committed: float | None = None

    def add(self, documents: int, size: int, stored: int) -> None:
        self.transactions += 1
        self.documents += documents
        self.bytes += size
        self.stored += stored


class Introspection:
    """The tasks of a process, and what they did lately."""

    def __init__(self, now: Callable[[], float], *, command: Command = "run") -> None:
        self.now = now
        self.id = secrets.token_hex(8)
        """Tells it from others, also from those of the same process."""
        self.command = command
        """What the process runs tasks for."""
        self._tasks: dict[tuple[TaskKindName, str], Activity] = {}
        self._transactions: deque[dict[str, Any]] = deque(maxlen=TRANSACTIONS_MAX)
        self._errors: deque[dict[str, Any]] = deque(maxlen=TRANSACTIONS_MAX)
        self._jobs: deque[dict[str, Any]] = deque(maxlen=TRANSACTIONS_MAX)

    @property
    def activities(self) -> list[Activity]:
        return list(self._tasks.values())

    def task(self, kind: TaskKindName, name: str) -> Activity:
        """Return the activity of a task, which is new if nothing was said of it before."""
        found = self._tasks.get((kind, name))
        if found is None:
            found = self._tasks[kind, name] = Activity(kind, name, self)
        return found

    def forget(self, kind: TaskKindName, name: str) -> None:
        """The task is not of this process any more."""
        self._tasks.pop((kind, name), None)

    def relations(self) -> dict[str, Callable[[], list[dict[str, Any]]]]:
        """Return what gives the rows of each relation, newest first where they have a time."""
        return {
            "tasks": lambda: [msgspec.to_builtins(each.report()) for each in self.activities],
            "transactions": lambda: msgspec.to_builtins(_newest(self._transactions)),
            "errors": lambda: _newest(self._errors),
            "jobs": lambda: _newest(self._jobs),
        }

    def add_transaction(self, whose: dict[str, Any], number: int, done: _Transaction) -> None:
        """Keep a committed transaction; its phases are those of `done`, to which the tail adds."""
        row = structs.asdict(done)
        self._transactions.append({**whose, "number": number, **row})

    def add_error(self, whose: dict[str, Any], failure: Failure) -> None:
        """Keep an error."""
        self._errors.append({**whose, **msgspec.to_builtins(failure)})

    def add_job(
        self, whose: dict[str, Any], group: str, began: float, jobs: int, error: str | None
    ) -> None:
        """Keep a call that ran Spark jobs."""
        row = {**whose, "group": group, "jobs": jobs, "began": began}
        self._jobs.append({**row, "seconds": self.now() - began, "error": error})


def _newest(rows: deque[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(rows)[::-1]


def failure_of(
    error: BaseException,
    *,
    at: float,
    first: float | None = None,
    count: int = 1,
    retry_at: float | None = None,
) -> Failure:
    """Return an error as data, with what led to it."""
    what = error.what if isinstance(error, PenstockError) else _text(error)
    where, why, fix = (
        (error.where, error.why, error.fix) if isinstance(error, PenstockError) else (None,) * 3
    )
    causes: list[str] = []
    seen = {id(error)}
    link = _cause(error)
    while link is not None and id(link) not in seen and len(causes) < CAUSES_MAX:
        seen.add(id(link))
        text = _text(link)
        if text not in (what, why, *causes):
            causes.append(text)
        link = _cause(link)
    return Failure(
        what=_short(what) or type(error).__name__,
        where=_short(where),
        why=_short(why),
        fix=_short(fix),
        causes=tuple(causes),
        at=at,
        first=at if first is None else first,
        count=count,
        retry_at=retry_at,
    )


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text(error: BaseException) -> str:
    said = error.what if isinstance(error, PenstockError) else " ".join(str(error).split())
    return _short(f"{type(error).__name__}: {said}" if said else type(error).__name__) or ""


def _short(text: str | None) -> str | None:
    if text is None:
        return None
    text = mask(text)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"
