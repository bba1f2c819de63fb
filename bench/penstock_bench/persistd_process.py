"""`penstock persistd` as a process of its own, to start, pause, kill and start again."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import Unavailable

_START_S_MAX = 60.0


@dataclasses.dataclass
class PersistdProcess:
    """One committer daemon; its address stays the same over restarts."""

    consensus: str
    log: Path
    options: Sequence[str] = ()
    listen: str = "127.0.0.1:0"
    admin: str = ""
    """Address of its admin page, once started; a new one each time."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"grpc://{self.listen}"

    @property
    def pid(self) -> int:
        if self.process is None:
            raise Unavailable("persistd is not running", where=self.listen)
        return self.process.pid

    def start(self) -> None:
        """Start, and wait until clients can connect."""
        command = [
            sys.executable, "-m", "penstock.cli.main", "persistd", "--listen", self.listen,
            "--admin-port", "0", "--consensus", self.consensus, *self.options,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        said = self._announcement(self.process)
        listening = re.match(rb"persistd listening on (\S+) admin (\S+)", said)
        if listening is None:
            self.kill()
            last = self.log.read_text(errors="replace").splitlines()[-20:]
            raise Unavailable("persistd did not start", why="\n".join(last))
        self.listen, self.admin = listening[1].decode(), listening[2].decode()

    def _announcement(self, process: subprocess.Popen[bytes]) -> bytes:
        timer = threading.Timer(_START_S_MAX, process.kill)
        timer.start()
        try:
            return process.stdout.readline() if process.stdout else b""
        finally:
            timer.cancel()

    def kill(self) -> None:
        """kill -9: no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """The graceful end."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(timeout=60)
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None


@contextlib.contextmanager
def running_persistd(
    consensus: str, log: Path, options: Sequence[str] = (), listen: str = "127.0.0.1:0"
) -> Iterator[PersistdProcess]:
    """A daemon that lives as long as the block."""
    daemon = PersistdProcess(consensus, log, options, listen)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()
