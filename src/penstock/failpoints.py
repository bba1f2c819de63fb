"""Named crash points.

`PENSTOCK_FAILPOINT=name[:n]` makes the process die by `os._exit(137)` at the n-th hit of that
point (the first, by default): no `finally`, no flush, as if the kernel killed it or power failed.
Tests use it to prove that a crash after any step is harmless.
"""

from __future__ import annotations

import os

from penstock.errors import UsageError

_ENV = "PENSTOCK_FAILPOINT"
_EXIT_CODE = 137

FAILPOINTS: dict[str, str] = {}
"""Every declared point, and a sentence on where it is; `penstock failpoints` prints them."""

_hits_left: dict[str, int] = {}


def declare(name: str, where: str) -> str:
    """Declare a crash point at import time; return its name, to be passed to `hit`."""
    FAILPOINTS[name] = where
    return name


def arm(spec: str | None) -> None:
    """Arm the point that `spec` names; called once at startup, with the environment's value."""
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
    """Exit here if this point is armed and its count is reached."""
    if name not in _hits_left:
        return
    _hits_left[name] -= 1
    if _hits_left[name] == 0:
        os._exit(_EXIT_CODE)
