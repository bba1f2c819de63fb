"""A server for all tests of changes, and a database for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
import pytest

from connectors.postgres_cdc.changing import changing_postgres
from penstock.testing.postgres import PostgresServer


@pytest.fixture(scope="session")
def changing() -> Iterator[PostgresServer]:
    """The process's shared server whose log has changes of rows."""
    with changing_postgres() as server:
        yield server


@pytest.fixture
def url(changing: PostgresServer) -> Iterator[str]:
    """A fresh database there. Slots that a test leaves would be missing in the end."""
    made = changing.create_database()
    yield made
    with contextlib.suppress(psycopg.Error), psycopg.connect(made, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
            "WHERE database = current_database() AND NOT active"
        )
