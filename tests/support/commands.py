"""Commands as processes of their own: what they say, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SOON_S = 20.0
"""Generous: a stop takes a few seconds, on a machine that does much else at once."""


class Command:
    """A command that runs, and what it has said on stderr."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        stdin: int = subprocess.DEVNULL,
        program: Sequence[str] = ("-m", "penstock"),
    ) -> None:
        self._log = directory / f"stderr-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=directory,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "PENSTOCK_LOG_LEVEL": "info"},
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until_it_says(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.said:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def ended_within(self, seconds: float) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds} s: {self.said}") from None
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()

    def stopped(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.ended_within(SOON_S)


def done(directory: Path, *arguments: str, stdin: bytes = b"") -> None:
    subprocess.run(
        [sys.executable, "-m", "penstock", *arguments], cwd=directory, input=stdin, check=True
    )
