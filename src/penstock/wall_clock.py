"""The time on the wall, as the clock that documents are stamped with."""

from __future__ import annotations

import time

from penstock.model.clock import Clock, from_unix


def now() -> Clock:
    """This moment. It may go back; who stamps documents keeps their clocks growing."""
    return from_unix(*divmod(time.time_ns(), 1_000_000_000))
