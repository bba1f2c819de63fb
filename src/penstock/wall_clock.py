"""Wall time, as the clock that documents are stamped with."""

from __future__ import annotations

import time

from penstock.model.clock import Clock, from_unix


def now() -> Clock:
    """Return the current time. It may go back; publishers keep their clocks growing."""
    return from_unix(*divmod(time.time_ns(), 1_000_000_000))
