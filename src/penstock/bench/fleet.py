"""Client processes that all do the same thing at the same time.

They come from a fork server that has imported everything once: 64 interpreters that start on their
own would take longer than the measurement.
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

Orders = Connection
"""Towards a client: (start, seconds) of the next run. Back from it: True when it is ready, then
what it counted each time, or a text that says why it failed."""

_LEAD_S = 0.3
"""Between the order and the start, so that everybody has heard it."""

_READY_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Clients that wait; `run` lets them count for a while."""

    orders: list[Orders]

    def run(self, seconds: float) -> float:
        """What they did per second, all together."""
        start = time.monotonic() + _LEAD_S
        for each in self.orders:
            each.send((start, seconds))
        counted = 0
        for each in self.orders:
            counted += _heard(each, int)
        return counted / seconds


@contextlib.contextmanager
def fleet(
    size: int, client: Callable[..., None], *arguments: object, preload: list[str]
) -> Iterator[Fleet]:
    """`size` processes, each running `client(orders, number, *arguments)`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    processes: list[ForkServerProcess] = []
    ours: list[Orders] = []
    try:
        for number in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=client, args=(theirs, number, *arguments), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ours.append(mine)
        for each in ours:
            if not each.poll(_READY_S_MAX):
                raise Bug("a benchmark client did not start")
            _heard(each, bool)
        yield Fleet(ours)
    finally:
        for each in ours:
            each.close()
        for process in processes:
            process.terminate()
            process.join()


def _heard(orders: Orders, expected: type[T]) -> T:
    """What a client answers, unless it is why it failed."""
    try:
        answer = orders.recv()
    except EOFError:
        answer = "it ended"
    if not isinstance(answer, expected):
        raise Bug("a benchmark client failed", why=str(answer))
    return answer


def wait_until(start: float) -> None:
    time.sleep(max(0.0, start - time.monotonic()))
