"""Contestants as processes of their own: how long one took, and what its whole tree used.

A Spark program is a Python process, a JVM and Python workers. Only the system knows what they use
together, so it is asked twenty times a second (on Linux; elsewhere memory and CPU are not known).
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
    """What a tree of processes has used: CPU seconds in all, and memory at its greatest."""

    cpu_s: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a process went."""

    seconds: float
    """From before it was started until it had ended."""
    usage: Usage
    said: Mapping[str, Any]
    """The JSON object that is its output, or the last line of it, if there is one."""
    code: int


@dataclass(slots=True)
class Watch:
    """Samples a tree of processes, from its root down."""

    root: int
    _cpu_ticks: dict[tuple[int, int], int] = field(default_factory=dict)
    _peak: int = 0

    def sample(self) -> None:
        """Look once."""
        pages = 0
        for (pid, began), (ticks, resident) in _tree(self.root).items():
            # One that was not there before may be about to become another program, and until then
            # have the memory of its parent, which is not to be counted twice.
            pages += resident if (pid, began) in self._cpu_ticks else 0
            self._cpu_ticks[pid, began] = ticks
        self._peak = max(self._peak, pages)

    @property
    def usage(self) -> Usage:
        """Used so far, also by processes that have ended since they were last seen."""
        return Usage(
            cpu_s=sum(self._cpu_ticks.values()) / os.sysconf("SC_CLK_TCK"),
            peak_rss_bytes=self._peak * os.sysconf("SC_PAGE_SIZE"),
        )


def _tree(root: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(process, when it began) to (CPU ticks, resident pages), of a process and all below it."""
    parents: dict[int, int] = {}
    figures: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.parent.name)
            # The second field is a name in parentheses that may contain anything.
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
    """Sample a tree in the background for as long as the block lasts."""
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
def started(
    command: Sequence[str | Path], *, environ: Mapping[str, str] | None = None, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, all of which is killed at the end of the block.

    Its standard output is to be read from `stdout`; what it says on standard error goes to `log`.
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
    """kill -9 of a process and of everything that it has started, also of other groups."""
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
    """Run a program to its end. With `check`, one that fails raises what it last said."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        log = Path(scratch) / "log"
        began = time.perf_counter()
        with started(command, environ=environ, log=log) as process:
            with watching(process.pid) as watch:
                try:
                    output, _ = process.communicate(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    raise Unavailable(
                        f"a contestant has not ended after {timeout_s:g} s",
                        where=_named(command),
                        why=_tail(log),
                    ) from None
            seconds = time.perf_counter() - began
        if check and process.returncode:
            raise Unavailable(
                f"a contestant failed with exit code {process.returncode}",
                where=_named(command),
                why=_tail(log) or output.decode(errors="replace")[-2000:],
            )
        return Run(seconds=seconds, usage=watch.usage, said=_said(output), code=process.returncode)


def _named(command: Sequence[str | Path]) -> str:
    return " ".join(Path(part).name for part in command[:3])


def _said(output: bytes) -> Mapping[str, Any]:
    text = output.decode(errors="replace")
    for part in (text, *reversed(text.splitlines())):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(part)
            return value if isinstance(value, dict) else {}
    return {}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
