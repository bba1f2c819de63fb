"""Signals that stop a service."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable


def at_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on the running loop at SIGTERM, which supervisors send, and at Ctrl-C.

    The second signal ends the process at once: what was acknowledged is durable.
    """
    loop = asyncio.get_running_loop()
    asked = 0

    def ask(number: int) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            os._exit(128 + number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask, number)
