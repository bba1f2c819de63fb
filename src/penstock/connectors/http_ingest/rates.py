"""PURE: a token bucket."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Lets `rate` requests pass in a second, and as many at once after a second without any."""

    rate: float
    tokens: float
    filled_s: float

    @classmethod
    def full(cls, rate: float, now_s: float) -> TokenBucket:
        return cls(rate, rate, now_s)

    def take(self, now_s: float) -> float:
        """Let one pass and return 0, or return the seconds until one may."""
        self.tokens = min(self.rate, self.tokens + (now_s - self.filled_s) * self.rate)
        self.filled_s = now_s
        if self.tokens < 1:
            return (1 - self.tokens) / self.rate
        self.tokens -= 1
        return 0.0
