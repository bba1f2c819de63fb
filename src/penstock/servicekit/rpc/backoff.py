"""Waiting between attempts: 4 ms, doubling up to a clamp, jittered so that clients spread out."""

from __future__ import annotations

import asyncio
import logging
import random

INITIAL_S = 0.004
CLAMP_S = 16.0

RECONNECT_CLAMP_S = 2.0
"""Clamp between attempts to connect: dialing costs next to nothing, and a longer wait would delay
clients after the committer or the database is back."""

_INFO_FROM = 3
_WARNING_FROM = 30


class Backoff:
    """Delays between attempts, and the log level for the failures."""

    def __init__(self, *, clamp_s: float = CLAMP_S) -> None:
        self._clamp_s = clamp_s
        self.attempts = 0

    @property
    def level(self) -> int:
        """Quiet at first: most outages are too short to be worth attention."""
        if self.attempts < _INFO_FROM:
            return logging.DEBUG
        return logging.INFO if self.attempts < _WARNING_FROM else logging.WARNING

    def next_s(self) -> float:
        exponent = min(self.attempts, 32)
        self.attempts += 1
        jitter = random.uniform(0.9, 1.1)  # noqa: S311 - spreads load, keeps no secret
        return float(min(INITIAL_S * 2**exponent, self._clamp_s) * jitter)

    def reset(self) -> None:
        self.attempts = 0

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s())
