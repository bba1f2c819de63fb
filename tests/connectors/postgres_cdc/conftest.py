"""A server for all tests of changes, and a database for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.postgres_cdc.changing import changing_postgres
from penstock.testing.postgres import PostgresServer


@pytest.fixture(scope="session")
def changing() -> Iterator[PostgresServer]:
    """The process's shared server whose log has changes of rows."""
    with changing_postgres() as server:
        yield server


@pytest.fixture
def url(changing: PostgresServer) -> str:
    """A fresh database there."""
    return changing.create_database()
