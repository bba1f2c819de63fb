"""A crash after every step of a capture's transaction, read by the leader and by Spark.

The capture has committed one transaction; in the next one it dies at the point, and is run again.
The tables behind it must equal what an oracle works out by hand, and every document is counted once
in the statistics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.failpoints import FAILPOINTS
from penstock.runtime import kinds as _kinds  # noqa: F401 - declares the crash points
from runtime.capture.captures import FILES, Capturing, write_csv, write_lines
from runtime.crash_world import CRASHED, sqlite_rows
from runtime.sessions import accounts, reduced

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith(("capture.", "publisher.", "statelog.after"))
    or name
    in {
        "leader.after-epoch",
        "leader.after-stats",
        "leader.after-commit-record",
        "leader.after-intents",
    }
)
BY_TASKS = {"publisher.adopted", "capture.after-publish", "leader.after-commit-record"}
"""Points that are tried with documents that Spark reads, too."""

ONLY_BY_TASKS = {"publisher.adopted"}


@pytest.fixture(scope="module")
def prepared(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Capturing:
    """One transaction behind it, and new files before it."""
    place = Capturing(tmp_path_factory.mktemp("prepared"), spark, ())
    place.prepare(json.dumps(FILES))
    incoming = place.directory / "incoming"
    write_lines(incoming / "accounts-1.jsonl", accounts(0, 30))
    write_csv(incoming / "others-1.csv", accounts(100, 20))
    assert place.run() == 0
    write_lines(incoming / "accounts-2.jsonl", accounts(30, 30))
    write_lines(incoming / "accounts-3.jsonl", accounts(60, 5))
    write_csv(incoming / "others-2.csv", accounts(120, 20))
    return place


@pytest.mark.parametrize(
    ("point", "through_tasks"),
    [(point, False) for point in POINTS if point not in ONLY_BY_TASKS]
    + [(point, True) for point in sorted(BY_TASKS)],
)
def test_a_crash_loses_nothing_and_doubles_nothing(
    prepared: Capturing, tmp_path: Path, point: str, through_tasks: bool
) -> None:
    case = prepared.copy(tmp_path / "case", through_tasks=through_tasks)
    ended = case.run(f"{point}:1")
    if ended != CRASHED:
        pytest.fail(f"{point} is not on the way")
    assert case.run() == 0
    views = case.directory / "views.db"
    assert sqlite_rows(views, "acme/accounts") == reduced(accounts(0, 65))
    assert sqlite_rows(views, "acme/others", "others") == reduced(accounts(100, 40))
    assert case.captured() == 105


@pytest.mark.parametrize(
    "point", ["rename.after-moved", "rename.after-taken", "capture.after-poll"]
)
def test_a_renamed_capture_goes_on_from_where_it_was(
    prepared: Capturing, tmp_path: Path, point: str
) -> None:
    case = prepared.copy(tmp_path / "case")
    (source,) = FILES["captures"].values()
    renamed = {**FILES, "captures": {"acme/new": {**source, "renamedFrom": "acme/source"}}}
    case.prepare(json.dumps(renamed))
    assert case.run(point) == CRASHED
    assert case.run() == 0
    views = case.directory / "views.db"
    assert sqlite_rows(views, "acme/accounts") == reduced(accounts(0, 65))
    assert case.captured() == 105, "no file is read twice"
    case.prepare(json.dumps(FILES))
    assert case.run() == 1, "the old name goes on as the new one"
