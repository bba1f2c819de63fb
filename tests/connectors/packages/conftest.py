"""Fake packages where installed ones are."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.packages import fakes


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """XDG_DATA_HOME, with a fake package of each protocol."""
    home = tmp_path / "share"
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    fakes.put(home, "airbyte:source-fake", fakes.AIRBYTE)
    fakes.put(home, "singer:tap-fake", fakes.SINGER)
    return home
