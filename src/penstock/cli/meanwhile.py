"""Signs of life of commands whose output is no terminal, where nothing can be overwritten."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from penstock.cli.frame import stderr

FIRST_S: Final = 2.0
"""Seconds until the first line; then twice as many each time."""

AGAIN_S_MAX: Final = 30.0


@contextlib.contextmanager
def said_meanwhile(text: Callable[[], str]) -> Iterator[None]:
    """Within this, stderr says now and then how far it is: less and less often.

    `text` is called in another thread.
    """
    if stderr.is_terminal:
        yield
        return
    ended = threading.Event()

    def say() -> None:
        wait_s = FIRST_S
        while not ended.wait(wait_s):
            stderr.print(text(), markup=False)
            wait_s = min(2 * wait_s, AGAIN_S_MAX)

    saying = threading.Thread(target=say, name="penstock-progress", daemon=True)
    saying.start()
    try:
        yield
    finally:
        ended.set()
        saying.join()
