"""Blocking calls that are interrupted."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

from penstock.runtime.waiting import interruptible


async def test_a_call_that_is_cancelled_twice_leaves_no_error_behind() -> None:
    """Else its stack trace is printed when the process ends."""
    left: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: left.append(about))
    begun, interrupted, over = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        over.wait()
        raise OSError("interrupted")

    waiting = asyncio.create_task(interruptible(call, interrupted.set))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    await asyncio.to_thread(interrupted.wait)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    over.set()
    await asyncio.sleep(0.1)
    del waiting
    gc.collect()
    assert left == []
