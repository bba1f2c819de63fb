"""Leaders in processes of their own, to be killed, frozen and thawed.

A fork has the Spark of the process that it was forked from, since its threads make connections of
their own to the JVM: so it costs no start of one.
"""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock import failpoints
from penstock.journal import ownership
from runtime.sessions import Place

WAIT_S_MAX = 120.0


@dataclass
class Leader:
    """A process that runs a task until it has caught up."""

    pid: int
    said: Path
    """What became of it: the kind of its error, and then its text. Empty if all went well."""
    mark: Path
    """Is there once it has passed where it was to leave a mark."""

    @property
    def ended(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._status = status
        return pid != 0

    def frozen(self, *, within: str | None = None) -> None:
        """Wait until it has stopped itself, in no transaction of SQLite's but `within` this one.

        It would keep everybody out: other threads of it may have to be let out of one.
        """
        while True:
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), f"it ended with {status}: {self._text()}"
            databases = self.said.parent.rglob("*.db")
            if not any(_is_locked(path) for path in databases if path.name != within):
                return
            os.kill(self.pid, signal.SIGCONT)

    def thaw(self) -> None:
        self.said.with_suffix(".thawed").touch()
        os.kill(self.pid, signal.SIGCONT)

    def marked(self) -> None:
        """Wait until it has left its mark."""
        deadline = time.monotonic() + WAIT_S_MAX
        while not self.mark.exists():
            assert time.monotonic() < deadline, "it never came there"
            time.sleep(0.01)

    def outcome(self) -> str:
        """Wait until it has ended."""
        _, status = os.waitpid(self.pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, f"it was ended by {status}"
        return self._text()

    def _text(self) -> str:
        return self.said.read_text() if self.said.exists() else "nothing"


def _is_locked(database: Path) -> bool:
    """Whether somebody writes to it."""
    connection = sqlite3.connect(database, timeout=0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return True
    finally:
        connection.close()
    return False


def begin_anew() -> None:
    """In a fork: let go of what belongs to the threads of its parent."""
    gc.freeze()  # what other tests have left behind is not for this process to destroy
    ownership._THREADS = ThreadPoolExecutor(2)  # type: ignore[misc]


def start(
    place: Place,
    *,
    freeze_at: str | None = None,
    mark_at: str | None = None,
    failures_max: int = 3,
) -> Leader:
    """Run the tasks of a place; at a crash point, once, freeze or leave a mark."""
    number = len(list(place.directory.glob("leader-*.log")))
    said = place.directory / f"leader-{number}.log"
    said.touch()
    mark = place.directory / f"leader-{number}.mark"
    if pid := os.fork():
        return Leader(pid, said, mark)
    begin_anew()

    def hit(name: str) -> None:
        nonlocal freeze_at
        if name == mark_at:
            mark.touch()
        if name == freeze_at:
            freeze_at = None
            while not said.with_suffix(".thawed").exists():
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(0.05)  # for other threads: this one does nothing

    def lead() -> None:
        try:
            errors = [run.error for run in place.run(failures_max=failures_max).values()]
            said.write_text("\n".join(f"{type(e).__name__}: {e}" for e in errors if e is not None))
        except BaseException:
            said.write_text(f"Bug: {traceback.format_exc()}")

    failpoints.hit = hit
    # Of the threads, a fork has this one only, and its connection to the JVM is its parent's.
    thread = threading.Thread(target=lead)
    thread.start()
    thread.join()
    os._exit(0)
