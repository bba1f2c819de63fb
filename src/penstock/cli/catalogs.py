"""Which catalog files a command means."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import UsageError
from penstock.settings import Settings


def main_files(settings: Settings, given: Sequence[Path] | None, command: str) -> list[Path]:
    """Return the given catalogs, or the one in this directory; raises if there is none."""
    if mains := [*(given or ()), *settings.catalog]:
        return mains
    if (here := _here()) is not None:
        return [here]
    raise UsageError(
        "no catalog given, and there is no catalog.yaml in this directory",
        fix=f"penstock {command} path/to/catalog.yaml",
    )


def applied_or_here(settings: Settings, given: Sequence[Path] | None) -> Settings:
    """Return the settings with the catalogs to apply before tasks run.

    None are applied if none are given, but for the one in this directory if nothing was ever
    applied.
    """
    from penstock.deployment import is_there

    mains = [*(given or ()), *settings.catalog]
    if not mains and not is_there(settings) and (here := _here()) is not None:
        mains = [here]
    return dataclasses.replace(settings, catalog=tuple(mains))


def _here() -> Path | None:
    from penstock.catalog.load import MAIN_NAMES

    return next((Path(name) for name in MAIN_NAMES if Path(name).is_file()), None)
