"""Client processes that all do the same work at the same time.

A fork server that has imported everything once starts them: 64 separate interpreters would take
longer to start than the measurement takes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import Bug

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

T = TypeVar("T")

ClientPipe = Connection
"""To a client: (start, seconds) of the next run. From a client: True when it is ready, then the
count of each run, or a text that says why it failed."""

_LEAD_S = 0.3
"""From sending the command to the start, so that every client has received it."""

_READY_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Waiting clients; `run` lets them work and count."""

    pipes: list[ClientPipe]

    def run(self, seconds: float) -> float:
        """Return the operations per second of all clients together."""
        start = time.monotonic() + _LEAD_S
        for pipe in self.pipes:
            pipe.send((start, seconds))
        counted = 0
        for pipe in self.pipes:
            counted += _receive(pipe, int)
        return counted / seconds


@contextlib.contextmanager
def fleet(
    size: int, client: Callable[..., None], *arguments: object, preload: list[str]
) -> Iterator[Fleet]:
    """Start `size` processes, each running `client(pipe, number, *arguments)`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    processes: list[ForkServerProcess] = []
    pipes: list[ClientPipe] = []
    try:
        for number in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=client, args=(theirs, number, *arguments), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        for pipe in pipes:
            if not pipe.poll(_READY_S_MAX):
                raise Bug("a benchmark client did not start")
            _receive(pipe, bool)
        yield Fleet(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def _receive(pipe: ClientPipe, expected: type[T]) -> T:
    """Return a client's answer; raise if it is the reason of a failure."""
    try:
        answer = pipe.recv()
    except EOFError:
        answer = "it ended"
    if not isinstance(answer, expected):
        raise Bug("a benchmark client failed", why=str(answer))
    return answer


def wait_until(start: float) -> None:
    time.sleep(max(0.0, start - time.monotonic()))
