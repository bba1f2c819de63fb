"""The two domains of work that share one Spark, and must not starve each other."""

from __future__ import annotations

import enum


class Domain(enum.StrEnum):
    """Storage: captures and materializations. Compute: derivations."""

    STORAGE = "storage"
    COMPUTE = "compute"


def domain_of(kind: str) -> Domain:
    """Return the domain of tasks of a kind."""
    return Domain.COMPUTE if kind == "derivation" else Domain.STORAGE
