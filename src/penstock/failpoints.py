"""Named crash points.

`PENSTOCK_FAILPOINT=name[:n]` makes the process die by `os._exit(137)` at the n-th hit of that
point (the first, by default): no `finally`, no flush, no goodbye, as a kernel or a power cut
would do it. Tests set it to prove that every step may be the last one.
"""

from __future__ import annotations

import os

from penstock.errors import UsageError

_ENV = "PENSTOCK_FAILPOINT"
_EXIT_CODE = 137

FAILPOINTS: dict[str, str] = {}
"""Every declared point with a sentence about where it stands; `penstock failpoints` prints it."""

_hits_left: dict[str, int] = {}


def declare(name: str, where: str) -> str:
    """Declare a crash point at import time; returns its name, to be passed to `hit`."""
    FAILPOINTS[name] = where
    return name


def arm(spec: str | None) -> None:
    """Arm the point that `spec` names; called once, at start-up, with the environment's value."""
    _hits_left.clear()
    if not spec:
        return
    name, _, count = spec.partition(":")
    if count and not (count.isdecimal() and int(count) > 0):
        raise UsageError(
            f"{_ENV}={spec}: the count after the colon is not a positive number",
            fix=f"write {_ENV}={name} or {_ENV}={name}:3",
        )
    _hits_left[name] = int(count or 1)


def hit(name: str) -> None:
    """Die here if this point is armed and its count is reached."""
    if name not in _hits_left:
        return
    _hits_left[name] -= 1
    if _hits_left[name] == 0:
        os._exit(_EXIT_CODE)
