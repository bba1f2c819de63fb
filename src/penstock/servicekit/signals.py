"""How a service is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def at_stop_signals(stop: Callable[[], None]) -> None:
    """On the running loop, call `stop` at SIGTERM, which supervisors send, and at Ctrl-C."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
