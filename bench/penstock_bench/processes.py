"""Run contestants as processes, and measure the time, CPU and memory of their process trees.

A Spark program is a Python process, a JVM and Python workers. Only the operating system knows what
they use together, so we sample it twenty times a second (on Linux; elsewhere memory and CPU are
unknown).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.errors import Unavailable

_PROC: Final = Path("/proc")
_SAMPLE_S: Final = 0.05
_STAT_PARENT, _STAT_USER, _STAT_SYSTEM, _STAT_RSS = 1, 11, 12, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds and peak memory of a process tree."""

    cpu_s: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished process."""

    seconds: float
    """From before it was started until it had ended."""
    usage: Usage
    output: Mapping[str, Any]
    """The JSON object on its standard output, or on the last line of it; empty without one."""
    code: int


@dataclass(slots=True)
class Watch:
    """Samples a process tree, from its root down."""

    root: int
    _cpu_ticks: dict[tuple[int, int], int] = field(default_factory=dict)
    _peak: int = 0

    def sample(self) -> None:
        """Take one sample."""
        pages = 0
        for (pid, began), (ticks, resident) in _tree(self.root).items():
            # A process that is new in this sample may be between fork and exec: until then its
            # memory is its parent's, which must not be counted twice.
            pages += resident if (pid, began) in self._cpu_ticks else 0
            self._cpu_ticks[pid, began] = ticks
        self._peak = max(self._peak, pages)

    @property
    def usage(self) -> Usage:
        """Usage so far, including processes that have ended since they were last seen."""
        return Usage(
            cpu_s=sum(self._cpu_ticks.values()) / os.sysconf("SC_CLK_TCK"),
            peak_rss_bytes=self._peak * os.sysconf("SC_PAGE_SIZE"),
        )


def _tree(root: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Map (pid, start time) to (CPU ticks, resident pages), for a process and its descendants."""
    parents: dict[int, int] = {}
    figures: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.parent.name)
            # The second field is a name in parentheses, which may contain anything.
            stat = entry.read_text().rpartition(")")[2].split()
            parents[pid] = int(stat[_STAT_PARENT])
            ticks = int(stat[_STAT_USER]) + int(stat[_STAT_SYSTEM])
            figures[pid] = ((pid, int(stat[19])), (ticks, int(stat[_STAT_RSS])))
    return dict(figures[pid] for pid in figures if _is_below(pid, root, parents))


def _is_below(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = parents.get(pid, 0)
    return False


@contextlib.contextmanager
def watching(pid: int) -> Iterator[Watch]:
    """Sample a process tree in the background for the duration of the block."""
    watch, done = Watch(pid), threading.Event()

    def look() -> None:
        while not done.wait(_SAMPLE_S):
            watch.sample()

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def running_process(
    command: Sequence[str | Path], *, environ: Mapping[str, str] | None = None, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own; the end of the block kills its whole tree.

    The caller reads its standard output from `stdout`; standard error goes to `log`.
    """
    with log.open("ab") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own programs and peers
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_tree(process)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything it has started with SIGKILL, even in other groups."""
    below = [pid for pid, _ in _tree(process.pid)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def run(
    command: Sequence[str | Path],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 900,
    check: bool = True,
) -> Run:
    """Run a program to its end. With `check`, raise on failure, with its last output."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        log = Path(temp_dir) / "log"
        began = time.perf_counter()
        with running_process(command, environ=environ, log=log) as process:
            with watching(process.pid) as watch:
                try:
                    output, _ = process.communicate(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    raise Unavailable(
                        f"a contestant is still running after {timeout_s:g} s",
                        where=_label(command),
                        why=_tail(log),
                    ) from None
            seconds = time.perf_counter() - began
        if check and process.returncode:
            raise Unavailable(
                f"a contestant failed with exit code {process.returncode}",
                where=_label(command),
                why=_tail(log) or output.decode(errors="replace")[-2000:],
            )
        return Run(
            seconds=seconds, usage=watch.usage, output=_last_json(output), code=process.returncode
        )


def _label(command: Sequence[str | Path]) -> str:
    return " ".join(Path(part).name for part in command[:3])


def _last_json(output: bytes) -> Mapping[str, Any]:
    text = output.decode(errors="replace")
    for part in (text, *reversed(text.splitlines())):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(part)
            return value if isinstance(value, dict) else {}
    return {}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
