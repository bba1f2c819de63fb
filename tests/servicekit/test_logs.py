"""Log lines are read by people and machines, and hold no secret in either form."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from penstock.servicekit import logs
from penstock.servicekit.logs import fields

HUNTER = "hunter2"
LOG = logging.getLogger("penstock.tests.logs")


@pytest.fixture
def restored() -> Iterator[None]:
    root, package = logging.getLogger(), logging.getLogger("penstock")
    before = (list(root.handlers), root.level, package.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])


@pytest.mark.usefixtures("restored")
def test_a_line_is_the_event_and_then_its_fields() -> None:
    out = io.StringIO()
    logs.configure(level="info", stream=out)
    LOG.info(
        "backend ready", extra=fields(url="postgresql://u:pw@h/d", waited_s=1.23456, why="a b")
    )
    LOG.debug("not at this level")
    line = out.getvalue().rstrip("\n")
    assert line.endswith(
        "INFO penstock.tests.logs: backend ready url=postgresql://u:<redacted>@h/d "
        'waited_s=1.235 why="a b"'
    )
    assert "\n" not in line


@pytest.mark.usefixtures("restored")
def test_json_lines_keep_numbers_and_mask_text_and_exceptions() -> None:
    out = io.StringIO()
    logs.configure(level="debug", as_json=True, stream=out)
    error = ValueError("cannot reach postgresql://u:hunter2@h/d")
    LOG.error("failed", exc_info=error, extra=fields(attempt=3, id=b"\x01\x02", token=HUNTER))
    entry = json.loads(out.getvalue())
    assert entry["event"] == "failed"
    assert entry["level"] == "ERROR"
    assert entry["attempt"] == 3
    assert entry["id"] == "0102"
    assert "hunter2" not in out.getvalue()


@pytest.mark.usefixtures("restored")
def test_configuring_again_replaces_the_output() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure(level="info", stream=first)
    logs.configure(level="info", stream=second)
    LOG.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
