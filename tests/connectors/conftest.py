"""The endpoints that cases of several sinks run against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.places import SECRET, VARIABLE, PostgresPlace, SqlitePlace
from penstock.testing.postgres import PostgresServer
from penstock.testing.sink_harness import SqlPlace


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Iterator[SqlitePlace]:
    place = SqlitePlace(tmp_path)
    yield place
    place.close()


@pytest.fixture
def postgres_place(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PostgresPlace]:
    monkeypatch.setenv(VARIABLE, SECRET)
    place = PostgresPlace(tmp_path, postgres.url())
    yield place
    place.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest) -> SqlPlace:
    """Every SQL database."""
    found: SqlPlace = request.getfixturevalue(f"{request.param}_place")
    return found
