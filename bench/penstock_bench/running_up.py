"""`penstock up` or a cluster as a process, and what its tasks have done, from its admin address."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import Bug, Unavailable
from penstock_bench.processes import Watch, running_process

POLL_S: Final = 0.1
WAIT_S_MAX: Final = 600.0
_ANSWER_S_MAX: Final = 60.0

_ADDRESS: Final = re.compile(r"http://([\d.]+):(\d+)/introspection/v1")
_CLUSTER: Final = re.compile(r"cluster listening on (\S+) admin http://([\d.]+):(\d+)")
_LOG_CHARACTERS: Final = 2_000


def command(data: Path, *options: str) -> list[str | Path]:
    """Return the command that runs what is applied in a directory."""
    return _penstock("up", data, "--admin-port", "0", *options)


def _penstock(name: str, data: Path, *options: str) -> list[str | Path]:
    return [sys.executable, "-m", "penstock", name, "--data", data, *options]


def find_address(log: str) -> tuple[str, int] | None:
    """Return the admin address that a log names, as host and port."""
    found = _ADDRESS.search(log)
    return None if found is None else (found[1], int(found[2]))


@dataclass(slots=True)
class Up:
    """A `penstock up` that runs, or a `penstock cluster`."""

    process: subprocess.Popen[bytes]
    began: float
    """Unix time before it was started, to compare with the times of its commits."""
    log: Path
    _address: tuple[str, int] = ("", 0)

    @classmethod
    @contextlib.contextmanager
    def running(cls, data: Path, *options: str) -> Iterator[Up]:
        """Run it for the duration of the block, which begins when it can be asked.

        The end of the block is its `kill -9`.
        """
        log = data / f"up-{time.time_ns()}.log"
        began = time.time()
        with running_process(command(data, *options), log=log) as process:
            up = cls(process, began, log)
            up.wait(up._has_address, "it has no admin address")
            yield up

    @classmethod
    @contextlib.contextmanager
    def cluster(cls, data: Path, *options: str) -> Iterator[Up]:
        """Run a cluster for the duration of the block, and a controller beside it."""
        log = data / "cluster.log"
        listen = ("--listen", "127.0.0.1:0", "--admin-port", "0")
        began = time.time()
        with running_process(_penstock("cluster", data, *listen, *options), log=log) as process:
            up = cls(process, began, log)
            said = process.stdout.readline().decode() if process.stdout is not None else ""
            if (found := _CLUSTER.search(said)) is None:
                raise up._failed(f"a cluster names no address, but: {said}")
            url, up._address = found[1], (found[2], int(found[3]))
            controller = _penstock("controller", data, "--cluster", url)
            with running_process(controller, log=data / "controller.log"):
                yield up

    def wait_until_read(self, documents: Mapping[str, int], *, poll_s: float = POLL_S) -> None:
        """Wait until each of these tasks has committed this many documents, and not more."""

        def have_read() -> bool:
            read = self.documents
            if any(read.get(task, 0) > count for task, count in documents.items()):
                raise Bug("tasks have read more documents than there are", why=str(read))
            return all(read.get(task, 0) == count for task, count in documents.items())

        self.wait(have_read, "its tasks have not read all documents", poll_s=poll_s)

    def wait(self, is_so: Callable[[], bool], otherwise: str, *, poll_s: float = POLL_S) -> None:
        """Wait until something is so, while the process is alive."""
        deadline = time.monotonic() + WAIT_S_MAX
        while not is_so():
            if self.process.poll() is not None:
                raise self._failed(f"{self._command} has ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self._failed(f"after {WAIT_S_MAX:g} s of {self._command}, {otherwise}")
            time.sleep(poll_s)

    @property
    def documents(self) -> dict[str, int]:
        """Documents that each task has read in this process."""
        return {row["task"]: row.get("documents", 0) for row in self._rows("tasks")}

    def commits(self, task: str | None = None) -> list[float]:
        """Return the Unix times of commits, the newest first; those of one task, or of all."""
        rows = self._rows("transactions")
        return [row["committed"] for row in rows if task is None or row["task"] == task]

    @property
    def cpu_s(self) -> float:
        """CPU seconds that its process tree has used so far."""
        watch = Watch(self.process.pid)
        watch.sample()
        return watch.usage.cpu_s

    @property
    def _command(self) -> str:
        arguments: Any = self.process.args
        return " ".join(arguments[2:4])

    def _has_address(self) -> bool:
        found = find_address(self.log.read_text(errors="replace"))
        if found is not None:
            self._address = found
        return found is not None

    def _failed(self, what: str) -> Unavailable:
        return Unavailable(what, why=self.log.read_text(errors="replace")[-_LOG_CHARACTERS:])

    def _rows(self, relation: str) -> list[dict[str, Any]]:
        connection = http.client.HTTPConnection(*self._address, timeout=_ANSWER_S_MAX)
        try:
            connection.request("GET", f"/introspection/v1/{relation}")
            answer = connection.getresponse().read()
        except OSError as error:
            raise self._failed(f"{self._command} does not answer: {error}") from None
        finally:
            connection.close()
        rows: list[dict[str, Any]] = json.loads(answer)["rows"]
        return rows
