"""The intake, shared by threads: requests come on an event loop, and are taken by `poll`."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterable
from typing import Final

from penstock.connectors.http_ingest.intake import (
    Conflict,
    Group,
    Intake,
    Outcome,
    Published,
    Refused,
    Stopped,
    Ticket,
)

RETRY_S_MAX: Final = 60
"""Seconds after which a client that was turned away may come again, at most."""


class Desk:
    """All methods may be called by any thread, but those that say otherwise."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._changed = threading.Condition()
        self._woken = False
        self.loop: asyncio.AbstractEventLoop | None = None
        """On which requests wait."""

    @property
    def stopping(self) -> bool:
        return self._intake.stopping

    @property
    def admitted(self) -> int:
        return self._intake.admitted

    @property
    def admitted_bytes(self) -> int:
        return self._intake.admitted_bytes

    @property
    def retry_s(self) -> int:
        """After how many seconds there may be room again: a commit takes as long."""
        return max(1, min(RETRY_S_MAX, math.ceil(self._intake.commit_s)))

    # --------------------------------------------------------------------------- on the event loop

    def admit(self, ticket: Ticket) -> Ticket | Published | Stopped | Conflict:
        """Let a request in, with something to wait on; or return what it repeats."""
        ticket.waiter = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._intake.stopping:
                return Stopped()
            return self._intake.admit(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Let it be taken into a sequence."""
        with self._changed:
            if self._intake.stopping:
                self._intake.leave(ticket)
                self._settle([ticket], Stopped())
                return
            self._intake.wait(ticket, time.monotonic())
            self._changed.notify()

    def refuse(self, ticket: Ticket, outcome: Refused | Stopped) -> None:
        """Settle a request that is not taken into a sequence."""
        with self._changed:
            self._intake.leave(ticket)
        self._settle([ticket], outcome)

    # ---------------------------------------------------------------------------- in other threads

    def take(self, wait_s: float) -> Group | None:
        """Return the requests of the next sequence; None if there are none for so long."""
        until = time.monotonic() + wait_s
        with self._changed:
            while not self._woken:
                now = time.monotonic()
                delay_s = self._intake.delay_s(now)
                if delay_s is not None and delay_s <= 0:
                    return self._intake.take(time.time_ns() // 1_000_000)
                left_s = until - now
                if left_s <= 0:
                    return None
                self._changed.wait(left_s if delay_s is None else min(left_s, delay_s))
            self._woken = False
            return None

    def wake(self) -> None:
        """Let `take` return soon."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def commit(self, sequences: int) -> None:
        """Answer the requests of the next sequences."""
        with self._changed:
            settled = self._intake.commit(sequences, time.monotonic())
        self._settle(settled, None)

    def stop(self) -> None:
        """Turn everybody away whose sequence is not committed, and whoever comes."""
        with self._changed:
            left = self._intake.stop()
            self._woken = True
            self._changed.notify_all()
        self._settle(left, Stopped())

    def _settle(self, tickets: Iterable[Ticket], outcome: Outcome | None) -> None:
        """Give requests their outcome; without one, that they are published."""
        settled = [(each.waiter, outcome or Published(len(each.texts))) for each in tickets]

        def settle() -> None:
            for waiter, found in settled:
                if not waiter.done():
                    waiter.set_result(found)

        if settled and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)
