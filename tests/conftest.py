"""Fixtures live in plugins: fix_spark.py, fix_postgres.py."""

import logging
import os

import pytest
from hypothesis import HealthCheck, settings

import penstock.servicekit.rpc.grpcio  # noqa: F401 - its fork handlers off before anyone forks

os.umask(0o022)  # token files that a group may write are refused, whatever the user's habit is

pytest_plugins = ["fix_spark", "fix_postgres"]
pytest.register_assert_rewrite("penstock.testing.connector_suite")

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", max_examples=10, deadline=None, suppress_health_check=_quiet)
settings.register_profile("fast", max_examples=50, deadline=None, suppress_health_check=_quiet)
settings.register_profile("ci", max_examples=200, deadline=None, suppress_health_check=_quiet)
settings.register_profile("night", max_examples=5000, deadline=None, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def _is_of_this_loop(record: logging.LogRecord) -> bool:
    """gRPC hands answers to calls of an earlier test, whose loop is closed, to the loop of this."""
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_is_of_this_loop)
