"""A real `penstock persistd` process, to be killed at will."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ADDRESS = re.compile(r"persistd listening on (\S+) admin (\S+)")
PATIENCE_S = 60.0


@dataclass
class Daemon:
    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def log(self) -> str:
        return self.err.read_text()

    @property
    def url(self) -> str:
        return f"grpc://{self.address[0]}"

    @property
    def address(self) -> tuple[str, str]:
        """Where it serves clients and its admin page; waits until it does."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := _ADDRESS.search(self.out.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"persistd did not start listening:\n{self.log}")
            time.sleep(0.02)
        return found[1], found[2]

    def get(self, path: str) -> tuple[int, str]:
        return get(self.address[1] + path)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.log}"
            time.sleep(0.02)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 - ours, loopback
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def running_persistd(directory: Path, consensus: str, *flags: str) -> Iterator[Daemon]:
    """The daemon; `--listen 127.0.0.1:0` and a free admin port unless `flags` say otherwise."""
    name = f"persistd-{len(list(directory.glob('persistd-*.out')))}"
    command = [
        sys.executable, "-m", "penstock.cli.main", "persistd", "--consensus", consensus,
        *(() if "--listen" in flags else ("--listen", "127.0.0.1:0")),
        *(() if "--admin-port" in flags else ("--admin-port", "0")), *flags,
    ]  # fmt: skip
    out, err = directory / f"{name}.out", directory / f"{name}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=_environment())
    daemon = Daemon(process, out, err)
    try:
        yield daemon
    finally:
        if process.poll() is None:
            daemon.kill()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
