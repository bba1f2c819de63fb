"""Whether a process can do its work now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """Ready, or why not; what /readyz says."""

    ready: bool
    reason: str = "ready"
