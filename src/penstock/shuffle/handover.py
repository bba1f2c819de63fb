"""Hands checkpoints from their maker to a caller: one at a time, and none lost.

A session needs it, and so does its image in another process: a caller may be cancelled at any
moment, also between being answered and running again; the checkpoint then waits for the next call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.errors import Bug
from penstock.shuffle.delivery import Checkpoint


class Handover:
    """A slot for one checkpoint, on one event loop.

    It ends once, with an error, which every present and later caller gets.
    """

    def __init__(self) -> None:
        self.requested = False
        """A checkpoint was asked for, and not given yet."""
        self.ended: BaseException | None = None
        self._asking = False
        self._answer: Checkpoint | None = None
        self._news = asyncio.Event()

    @property
    def empty(self) -> bool:
        """True if every checkpoint that was given has been taken."""
        return self._answer is None

    def give(self, checkpoint: Checkpoint) -> None:
        """Answer the request."""
        self.requested = False
        self._answer = checkpoint
        self.notify()

    def end(self, why: BaseException) -> None:
        """End it: no more checkpoints come. Of several reasons, the first counts."""
        if self.ended is None:
            self.ended = why
            self.notify()

    async def take(self, request: Callable[[], None]) -> Checkpoint:
        """The next checkpoint; `request` is called unless an earlier caller has asked for it."""
        if self._asking:
            raise Bug("a checkpoint was asked for while another call waits for it")
        self._asking = True
        try:
            if self.empty and not self.requested and self.ended is None:
                request()
                self.requested = True
            await self.until(lambda: not self.empty)
            answer, self._answer = self._answer, None
            assert answer is not None  # noqa: S101 - it was waited for
            self.notify()
            return answer
        finally:
            self._asking = False

    def notify(self) -> None:
        """Wake every waiter, to check its condition."""
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for a condition; raises the error that ended the handover instead."""
        while True:
            if self.ended is not None:
                raise self.ended
            if happened():
                return
            await self._news.wait()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that came first and cancelled the other tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
