"""What processes say of the tasks that they run, for others to read: one state log for all of them.

A process appends what has changed of its tasks: at once what matters (it waits, it failed), every
`PROGRESS_S` what is mere progress, and nothing while nothing happens but a heartbeat every
`BEAT_S`. So two hundred idle tasks cost one small entry in five seconds, and a run that is over
within a second leaves no entry at all, unless a task failed.

A process that ends takes its reports away, except those of tasks that failed, which stay until the
task is run again. A process that is killed leaves its reports: on its own machine it is known at
once that it is gone, elsewhere when it has not been heard of for `SILENT_S`.

Nothing depends on these reports but what people are shown. A store that refuses them, or does not
answer, changes nothing for the tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from penstock.consensus.statelog import StateLog
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus
from penstock.errors import PenstockError
from penstock.runtime.introspection import Command, Introspection, TaskReport
from penstock.runtime.ops import TaskKindName

_log = logging.getLogger("penstock.runtime")

REPORTS_KEY: Final = "status/processes"

LOOK_S: Final = 1.0
"""Between two looks at what has changed; at most one entry is written in this time."""

PROGRESS_S: Final = 5.0
BEAT_S: Final = 5.0
SILENT_S: Final = 15.0
"""A process that was not heard of for so long is gone, or as good as."""

ENDING_S: Final = 2.0
"""Seconds that a process that ends may take to say so."""

PROCESSES_MAX: Final = 256
TASKS_MAX: Final = 10_000
"""Of more, those that were heard of longest ago are forgotten."""

Key = tuple[TaskKindName, str]


class ProcessReport(Struct, frozen=True, kw_only=True):
    """A process that runs tasks."""

    id: str
    host: str
    pid: int
    machine: str
    """Where `pid` means something: processes of equal machines see each other."""
    started: str
    """Tells it from a later process with the same pid."""
    since: float
    beat: float
    command: Command = "run"

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"


class Said(Struct, frozen=True, kw_only=True, tag="said"):
    """A process lives, and these tasks of it have changed."""

    process: ProcessReport
    tasks: tuple[TaskReport, ...] = ()
    gone: tuple[Key, ...] = ()
    """Tasks that it does not run any more."""


class Left(Struct, frozen=True, kw_only=True, tag="left"):
    """A process has ended, or a task is gone: all reports of it go, but those of failures."""

    process: str | None = None
    failed: tuple[TaskReport, ...] = ()
    forget: tuple[Key, ...] = ()


class Reported(Struct, frozen=True, kw_only=True):
    """All that processes have said."""

    processes: dict[str, ProcessReport] = msgspec.field(default_factory=dict)
    tasks: dict[str, tuple[str, TaskReport]] = msgspec.field(default_factory=dict)
    """By `task_key`: the process, which may have ended, and its report."""

    def of(self, kind: TaskKindName, task: str) -> tuple[ProcessReport | None, TaskReport | None]:
        """Return the report of a task, and the process that it is of, unless that has ended."""
        process, report = self.tasks.get(task_key(kind, task), ("", None))
        return self.processes.get(process), report


def task_key(kind: TaskKindName, task: str) -> str:
    """Return the key of a task among all: tasks of several kinds may share a name."""
    return f"{kind} {task}"


def _key_of(task: Key) -> str:
    return task_key(*task)


_encode = msgspec.msgpack.Encoder().encode
_Diff = Said | Left
_diffs: msgspec.msgpack.Decoder[_Diff] = msgspec.msgpack.Decoder(_Diff)
_decode_state = msgspec.msgpack.Decoder(Reported).decode


class ReportsMachine:
    """The meaning of the log (`consensus.replica.Machine`)."""

    format = 1

    def initial(self) -> Reported:
        return Reported()

    def apply(self, state: Reported, diff: Said | Left, revision: int) -> Reported:
        processes, tasks = dict(state.processes), dict(state.tasks)
        match diff:
            case Said(process=process, tasks=changed, gone=gone):
                processes[process.id] = process
                for each in map(_key_of, gone):
                    if each in tasks and tasks[each][0] == process.id:
                        del tasks[each]
                for report in changed:
                    _put(tasks, process.id, report)
            case Left(process=left, failed=failed, forget=forget):
                if left is not None:
                    processes.pop(left, None)
                    tasks = {key: each for key, each in tasks.items() if each[0] != left}
                for report in failed:
                    _put(tasks, left or "", report)
                for each in map(_key_of, forget):
                    tasks.pop(each, None)
        return Reported(processes=_newest(processes), tasks=_bounded(tasks))

    def encode_diff(self, diff: Said | Left) -> bytes:
        return _encode(diff)

    def decode_diff(self, data: bytes, format: int) -> Said | Left:  # noqa: A002
        return _diffs.decode(data)

    def encode_state(self, state: Reported) -> bytes:
        return _encode(state)

    def decode_state(self, data: bytes, format: int, revision: int) -> Reported:  # noqa: A002
        return _decode_state(data)


def _put(tasks: dict[str, tuple[str, TaskReport]], process: str, report: TaskReport) -> None:
    key = task_key(report.kind, report.task)
    tasks.pop(key, None)  # the newest are last
    tasks[key] = (process, report)


def _newest(processes: dict[str, ProcessReport]) -> dict[str, ProcessReport]:
    if len(processes) <= PROCESSES_MAX:
        return processes
    kept = sorted(processes.values(), key=lambda each: (each.beat, each.id))[-PROCESSES_MAX:]
    return {each.id: each for each in kept}


def _bounded(tasks: dict[str, tuple[str, TaskReport]]) -> dict[str, tuple[str, TaskReport]]:
    if len(tasks) <= TASKS_MAX:
        return tasks
    return dict(list(tasks.items())[-TASKS_MAX:])


# ----------------------------------------------------------------------------------------- reading


async def load_reports(store: Consensus) -> Reported:
    """Return what processes have said."""
    return (await load_log(store, REPORTS_KEY, ReportsMachine())).state


async def forget(store: Consensus, kind: TaskKindName, task: str) -> None:
    """Remove the report of a task that is gone."""
    log = await StateLog.open(store, REPORTS_KEY, ReportsMachine())
    await log.append(
        lambda state: Left(forget=((kind, task),)) if task_key(kind, task) in state.tasks else None
    )


def is_alive(process: ProcessReport, now: float) -> bool:
    """True unless the process is known to have ended, or has not been heard of for long."""
    if process.machine == _machine():
        return _started(process.pid) == process.started
    return not is_silent(process, now)


def runs_tasks_here(process: ProcessReport) -> bool | None:
    """Return whether a process of this machine runs tasks, as the system knows without a clock.

    None if it is of another machine, or suspended: then its heartbeat tells.
    """
    if process.machine != _machine() or _is_suspended(process.pid):
        return None
    if process.pid == os.getpid() and process.started == _started(process.pid):
        return process.id in _reporting_here
    return _started(process.pid) == process.started


def is_silent(process: ProcessReport, now: float) -> bool:
    """True if the process should have been heard of since."""
    return now - process.beat > SILENT_S


# ----------------------------------------------------------------------------------------- writing


@contextlib.asynccontextmanager
async def reporting(store: Consensus, introspection: Introspection) -> AsyncIterator[None]:
    """Within this, other processes can see what the tasks of this one do."""
    reporter = _Reporter(store, introspection)
    running = asyncio.create_task(reporter.run(), name="reports")
    _reporting_here.add(introspection.id)
    try:
        yield
    finally:
        _reporting_here.discard(introspection.id)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await reporter.leave()


_reporting_here: Final = set[str]()
"""Those of this process that run tasks now: a process may do so several times."""


def process_of(introspection: Introspection, since: float | None = None) -> ProcessReport:
    """Return who runs the tasks that this shows, as of now."""
    now = introspection.now()
    return ProcessReport(
        id=introspection.id,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started=_started(os.getpid()),
        since=now if since is None else since,
        beat=now,
        command=introspection.command,
    )


class _Reporter:
    """Appends what has changed."""

    def __init__(self, store: Consensus, introspection: Introspection) -> None:
        self._store = store
        self._introspection = introspection
        self._since = introspection.now()
        self._log: StateLog[Reported, Said | Left] | None = None
        self._sent: dict[Key, tuple[int, int]] = {}
        """Version and weight of what was sent."""
        self._wrote_at: float | None = None
        self._began_to_write = False
        self._refused = False

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while not self._refused:
            await asyncio.sleep(LOOK_S)
            if self._is_due(self._introspection.now()):
                await self._write()

    def _is_due(self, now: float) -> bool:
        since_s = LOOK_S if self._wrote_at is None else now - self._wrote_at
        if self._wrote_at is None or since_s >= BEAT_S:
            return True
        versions = {(a.kind, a.task): (a.version, a.weight) for a in self._introspection.activities}
        if versions == self._sent:
            return False
        if since_s >= PROGRESS_S or versions.keys() != self._sent.keys():
            return True
        return any(weight != self._sent[key][1] for key, (_, weight) in versions.items())

    async def _write(self) -> None:
        """Append what has changed; waits for the store as long as it takes."""
        changed, versions = [], {}
        for activity in self._introspection.activities:
            key, version = (activity.kind, activity.task), (activity.version, activity.weight)
            versions[key] = version
            if self._sent.get(key) != version:
                changed.append(activity.report())
        gone = tuple(key for key in self._sent if key not in versions)
        self._began_to_write = True
        process = process_of(self._introspection, self._since)
        await self._append(Said(process=process, tasks=tuple(changed), gone=gone))
        self._sent = versions
        self._wrote_at = self._introspection.now()

    async def leave(self) -> None:
        """Say that this process ends; failures stay."""
        reports = (activity.report() for activity in self._introspection.activities)
        failed = tuple(report for report in reports if report.doing == "failed")
        if self._refused or not (self._began_to_write or failed):
            return
        self._log = None  # a write that was cancelled may have landed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await self._append(Left(process=self._introspection.id, failed=failed))

    async def _append(self, diff: Said | Left) -> None:
        try:
            if self._log is None:
                self._log = await StateLog.open(self._store, REPORTS_KEY, ReportsMachine())
            await self._log.append(lambda _: diff)
        except PenstockError as error:
            self._log = None
            if not self._refused:
                _log.info("penstock status will not show this process: %s", error.what)
            self._refused = True


def _machine() -> str:
    """Return what processes share that see each other's pids."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def _is_suspended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _started(pid: int) -> str:
    """Return what tells a process from others with its pid; empty if there is none now."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return ""
    except OSError:
        pass
    else:
        fields = stat.rpartition(")")[2].split()  # the name before may hold anything
        return "" if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
