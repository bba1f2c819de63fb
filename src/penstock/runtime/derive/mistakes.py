"""PURE: something that is wrong with a piece of code, found without running it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Something wrong with a piece of code, at an offset in it."""

    code: str
    """The code of the error, such as E-LAMBDA."""
    offset: int
    message: str
    hint: str | None = None
