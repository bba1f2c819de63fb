"""Readiness of a process; apart from `admin`, so that reporting it needs no web server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """Ready, or the reason why not; the answer of /readyz."""

    ready: bool
    reason: str = "ready"
