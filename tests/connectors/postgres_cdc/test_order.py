"""Documents of one key keep their order, whoever reads them: the leader, or Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from connectors.postgres_cdc.changing import live_rows, ran
from connectors.postgres_cdc.pipeline import Capturing, catalog_of
from connectors.postgres_cdc.test_crash import VIEWS
from penstock.connectors.postgres_cdc import gathering, spool
from penstock.runtime.ops import STATS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(600)]


def test_small_and_large_transactions_of_one_run_keep_their_order(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every transaction is a sequence; those of many documents go through Spark, in parts.
    monkeypatch.setattr(gathering, "JOINED_BYTES", 1)
    monkeypatch.setattr(gathering, "GIVEN_BYTES_MAX", 2000)
    monkeypatch.setattr(spool, "PART_BYTES", 4000)
    ran(url, "CREATE TABLE items (id int PRIMARY KEY, amount int)")
    place = Capturing(tmp_path, spark, ())
    catalog = catalog_of(url, ["items"], materialization=VIEWS)
    # All of them are one transaction here: it stays open until the source has nothing more.
    catalog["captures"]["acme/changes"]["shards"] = {"minTxnDuration": "8s"}
    place.prepare(json.dumps(catalog))
    assert place.run() == 0
    ran(
        url,
        "INSERT INTO items VALUES (1, 1), (2, 1)",
        "BEGIN; INSERT INTO items SELECT i, 0 FROM generate_series(3, 60) i; "
        "UPDATE items SET amount = amount + 1; UPDATE items SET amount = amount + 1; COMMIT",
        "UPDATE items SET amount = amount * 10 WHERE id IN (1, 3)",
        "BEGIN; DELETE FROM items; INSERT INTO items SELECT i, i FROM generate_series(3, 60) i; "
        "COMMIT",
        "DELETE FROM items WHERE id = 5",
    )
    assert place.run() == 0
    captures = [stats for stats in place.read(STATS.name) if stats.get("capture")]
    assert len(captures) == 1, "all of them in one transaction"
    assert place.table("items") == live_rows(url, "items")
