"""Hosts of warm commands and their clients, as processes; `python hosting.py` is a host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOON_S = 120.0
"""Generous, on a machine that does much else."""

CATALOG: dict[str, Any] = {
    "collections": {
        "acme/events": {
            "key": ["/id"],
            "schema": {
                "type": "object",
                "required": ["id"],
                "properties": {"id": {"type": "integer"}, "text": {"type": "string"}},
            },
        }
    },
    "tests": {
        "acme/tests/events": [
            {"ingest": {"collection": "acme/events", "documents": [{"id": 1}]}},
            {"verify": {"collection": "acme/events", "documents": [{"id": 1}]}},
        ]
    },
}


def eventually(found: Callable[[], object], what: str) -> None:
    until = time.monotonic() + SOON_S
    while not found():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found = list[int]()
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@dataclass
class Place:
    """A deployment, and the processes that work on it from one directory."""

    directory: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
    )

    def command(
        self, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a command, with these variables besides those of the place."""
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=cwd or self.directory,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with self.command(*arguments, cwd=cwd, **environment) as process:
            out, err = process.communicate(timeout=4 * SOON_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def append(self, *documents: Mapping[str, Any]) -> None:
        file = self.directory / "documents.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in documents))
        done = self.run("append", "acme/events", str(file))
        assert done.returncode == 0, done.stderr

    @contextlib.contextmanager
    def host(self, *options: str) -> Iterator[Host]:
        log = self.directory / f"host-{time.monotonic_ns()}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), *options],
                cwd=self.directory,
                env=self.environment,
                stdout=file,
                stderr=file,
            )
        host = Host(process, log)
        try:
            eventually(lambda: "hosting" in host.log() or process.poll() is not None, host.log())
            yield host
        finally:
            host.stop()


@dataclass
class Host:
    process: subprocess.Popen[bytes]
    _log: Path

    def log(self) -> str:
        return self._log.read_text()

    @property
    def forker(self) -> int | None:
        return next(
            (
                pid
                for pid in children_of(self.process.pid)
                if b"penstock.cli.forker" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ),
            None,
        )

    @property
    def commands(self) -> list[int]:
        """The processes of commands that run now."""
        forker = self.forker
        return [] if forker is None else [p for p in children_of(forker) if is_running(p)]

    def begun(self) -> int:
        """Wait for one command to be there, and return its process."""
        eventually(lambda: self.commands, self.log())
        return self.commands[0]

    def handed_over(self) -> int:
        """How many commands were run for others so far."""
        return self.log().count("runs penstock ")

    def jobs(self) -> int:
        """How many Spark jobs run now."""
        before = self.log().count("active jobs: ")
        self.process.send_signal(signal.SIGUSR1)
        eventually(lambda: self.log().count("active jobs: ") > before, "it does not answer")
        return int(self.log().rpartition("active jobs: ")[2].split()[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(SOON_S)
        finally:
            self.process.kill()
            self.process.wait()


async def _host(data: Path, master: str, *, changed: bool, spark: bool) -> None:
    from penstock.engine import EngineOptions, open_spark
    from penstock.settings import Settings
    from penstock.warm import wire
    from penstock.warm.host import WarmHost

    if changed:
        stamp = wire.code_stamp()
        wire.code_stamp = lambda: [stamp[0] + 1, *stamp[1:]]
    settings = Settings.resolve({"data": data, "master": master}, {}, ())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    async with WarmHost(settings):
        if spark:
            context = open_spark(EngineOptions(master=master)).sparkContext

            def count() -> None:
                active = len(context.statusTracker().getActiveJobsIds())
                sys.stdout.write(f"active jobs: {active} \n")
                sys.stdout.flush()

            loop.add_signal_handler(signal.SIGUSR1, count)
        sys.stdout.write(f"hosting as {os.getpid()}\n")
        sys.stdout.flush()
        await stop.wait()


if __name__ == "__main__":
    import argparse
    import logging

    logging.basicConfig(level="DEBUG", stream=sys.stderr)
    for noisy in ("py4j", "asyncio"):
        logging.getLogger(noisy).setLevel("WARNING")
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(".penstock"))
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--spark", action="store_true")
    given = parser.parse_args()
    asyncio.run(_host(given.data, given.master, changed=given.changed, spark=given.spark))
