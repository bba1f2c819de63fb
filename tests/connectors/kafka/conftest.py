"""One broker for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.kafka.broker import Broker, OutOfReach, running_broker


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """The process's broker. A test that kills it starts it again."""
    try:
        with running_broker() as started:
            yield started
    except OutOfReach as error:
        pytest.skip(f"needs a broker: {error}")
