"""A crash after every step of a capture's transaction, in a snapshot and in the tail of the log.

A capture dies at the point, the source goes on, and the capture is run again: its collections have
every change once, and tables that are made of them equal those of the source.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from connectors.postgres_cdc.changing import live_rows, ran
from connectors.postgres_cdc.pipeline import Capturing, catalog_of
from penstock.failpoints import FAILPOINTS
from penstock.runtime import kinds as _kinds  # noqa: F401 - declares the crash points
from runtime.crash_world import CRASHED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(600)]

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
LONG = "PENSTOCK_CHAOS_SECONDS" in os.environ
IN_SNAPSHOT = ("capture.after-publish", "leader.after-commit-record", "leader.after-intents")
"""Points that a first run is killed at, too; all of them in a long run."""
CASES = [(point, "tail") for point in POINTS] + [
    (point, "snapshot") for point in POINTS if LONG or point in IN_SNAPSHOT
]
TABLES = ("items", "others")
CREATE = [f"CREATE TABLE {name} (id int PRIMARY KEY, amount int)" for name in TABLES]
FILL = [f"INSERT INTO {name} SELECT i, 0 FROM generate_series(1, 20) i" for name in TABLES]  # noqa: S608
CHANGE = (
    "BEGIN; UPDATE items SET amount = amount - 1 WHERE id <= 5; "
    "UPDATE others SET amount = amount + 1 WHERE id <= 5; COMMIT"
)
VIEWS = {
    "image": "penstock/materialize-sqlite",
    "config": {"path": "views.db", "hardDelete": True},
}
BOTH = "BEGIN; DELETE FROM items WHERE id = 20; INSERT INTO others VALUES (21, 0); COMMIT"


@pytest.mark.parametrize(("point", "phase"), CASES)
def test_a_crash_loses_nothing_and_doubles_nothing(
    url: str, spark: SparkSession, tmp_path: Path, point: str, phase: str
) -> None:
    through_tasks = point in ("publisher.adopted", "publisher.rows")
    ran(url, *CREATE, *FILL)
    case = Capturing(tmp_path, spark, (), through_tasks=through_tasks)
    case.prepare(json.dumps(catalog_of(url, TABLES, materialization=VIEWS)))
    if phase == "tail":
        assert case.run() == 0
    ran(url, CHANGE)
    # The first transaction of a first run has the name of its slot, and the second one the tables.
    assert case.run(f"{point}:{2 if phase == 'snapshot' else 1}") == CRASHED
    ran(url, CHANGE, BOTH)
    assert case.run() == 0
    for table in TABLES:
        assert case.table(table) == live_rows(url, table)
        documents = case.read(f"acme/{table}")
        seen = Counter((d["id"], d["_meta"]["op"], d["_meta"]["source"]["lsn"]) for d in documents)
        assert set(seen.values()) == {1}
    if phase == "tail":
        assert case.captured() == 40 + 2 * 10 + 2
