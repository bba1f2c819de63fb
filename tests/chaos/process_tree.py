"""`penstock run` as processes that are killed, whatever they do, and all of them at once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.sessions import Place

CHUNKS = 100
"""Number of appends while a process runs."""


def choose_seed() -> int:
    return int(os.environ.get("PENSTOCK_CHAOS_SEED", random.SystemRandom().randrange(2**31)))


class Tree:
    """`penstock run` with its JVM and Python workers, as one session of processes."""

    def __init__(self, place: Place, *options: str) -> None:
        command: list[str | Path] = [
            Path(sys.executable).parent / "penstock", "run", "--data", place.settings.data,
            "--master", "local[2]", *options,
        ]  # fmt: skip
        self._log = (place.directory / "run.log").open("ab")
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, start_new_session=True
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        code = self._process.wait(timeout=600)
        self._log.close()
        return code

    def kill(self) -> None:
        """Kill all of them: any survivor could finish what the others began."""
        while members := list(self._members()):
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)
        self.wait()

    def _members(self) -> Iterator[int]:
        """Yield the session's processes. Python workers are in a process group of their own."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._process.pid and state != "Z":
                    yield int(entry.name)


@dataclass(slots=True, kw_only=True)
class Fire:
    """What a deployment went through."""

    seed: int
    kills: int = 0
    runs: int = 0
    appended: int = 0
    usual_s: float = 0.0
    """Seconds that a run takes that nobody kills."""
    transactions: int = 0
    interrupted: int = 0
    """Transactions of runs that were killed."""

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.kills} kills in {self.runs} runs of {self.usual_s:.1f} s, "
            f"{self.transactions} transactions seen, {self.interrupted} of them in runs that were "
            f"killed, {self.appended} documents"
        )


def under_fire(
    place: Place, append: Callable[[int, int], None], *, documents: int, kills: int
) -> Fire:
    """Append documents, in parts, and kill `penstock run` again and again meanwhile.

    Then it runs until all is done. `append` is given the first document, and how many. They are
    this many at least: a run that ends before it is killed takes its part of them along.
    """
    fire = Fire(seed=choose_seed())
    rng = random.Random(fire.seed)
    log = place.directory / "run.log"

    def append_some(count: int) -> None:
        if count > 0:
            append(fire.appended, count)
            fire.appended += count

    share = documents // (kills + 2)
    append_some(share)
    began = time.monotonic()
    assert Tree(place).wait() == 0, log.read_text()
    fire.usual_s = time.monotonic() - began
    warm = False
    while fire.kills < kills:
        append_some(share // 2)
        seen = _transactions(log)
        began = time.monotonic()
        tree = Tree(place)
        # Half of the kills mostly come before anything is committed; the others while transactions
        # follow each other.
        until = began + rng.uniform(0.3, 0.95) * fire.usual_s if not warm else None
        chunks = CHUNKS
        while tree.alive and (until is None or time.monotonic() < until):
            if until is None and _transactions(log) > seen:
                until = time.monotonic() + rng.uniform(0, max(1.5, fire.usual_s / 3))
            if warm and chunks and time.monotonic() - began > fire.usual_s / 2:
                append_some(share // 2 // CHUNKS)
                chunks -= 1
            time.sleep(0.02)
        alive = tree.alive
        fire.kills += alive
        fire.runs += 1
        tree.kill()
        fire.interrupted += _transactions(log) - seen
        # Most runs that are too quick to be killed are warm ones.
        warm = not warm if alive else False
    append_some(documents - fire.appended)
    assert Tree(place).wait() == 0, log.read_text()
    fire.transactions = _transactions(log)
    print(fire)  # noqa: T201
    return fire


def _transactions(log: Path) -> int:
    return log.read_bytes().count(b": transaction ")
