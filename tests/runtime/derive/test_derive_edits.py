"""Catalogs that are edited between runs, where the run before was cut short.

Tables add up what derivations publish: a document that is read again, or not at all, is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.crash_world import CRASHED
from runtime.derive.crash_deployment import (
    SOURCE,
    Pipeline,
    catalog_text,
    oracle,
    table,
    transfers,
)
from runtime.derive.deriving import derived_inputs
from runtime.sessions import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Document = dict[str, Any]

CREDITS = """
        - name: credits
          source: acme/transfers
          shuffle: any
          lambda: select recipient as account, amount, 1L as count from source
"""
DEBITS = """
        - name: debits
          source: acme/transfers
          shuffle: any
          lambda: select sender as account, -amount as amount, 1L as count from source
"""


def spark_text(*transforms: str) -> str:
    return SOURCE % "".join(("\n      using: {spark: {}}\n      transforms:", *transforms))


def edited(text: str, transform: str, line: str) -> str:
    """Return a catalog with one more line in a transform."""
    changed = text.replace(f"- name: {transform}\n", f"- name: {transform}\n          {line}\n")
    assert changed != text
    return changed


def sums(rows: dict[str, Document], *names: str) -> dict[str, Document]:
    return {account: {name: row[name] for name in names} for account, row in rows.items()}


def times(docs: Sequence[Document], count: int) -> list[Document]:
    return [doc for doc in docs for _ in range(count)]


@pytest.mark.parametrize(
    ("point", "counted"),
    [
        pytest.param("leader.after-stats", 1, id="not committed"),
        pytest.param("leader.after-commit-record", 2, id="committed without ACKs"),
    ],
)
def test_a_raised_backfill_reads_everything_once_more(
    tmp_path: Path, spark: SparkSession, point: str, counted: int
) -> None:
    """What was committed before is counted as well: its ACKs are written, whatever was edited."""
    pipeline = Pipeline(tmp_path, spark, ())
    pipeline.prepare(catalog_text("spark"))
    pipeline.append({"acme/transfers": transfers(0, 30)})
    assert pipeline.run(f"{point}:1") == CRASHED
    pipeline.prepare(edited(catalog_text("spark"), "fromTransfers", "backfill: 1"))
    pipeline.append({"acme/transfers": transfers(30, 10)})
    assert pipeline.run() == 0
    wanted = oracle([*times(transfers(0, 30), counted), *transfers(30, 10)], counts_seen=False)
    assert sums(table(tmp_path / "views.db"), "amount", "count") == sums(wanted, "amount", "count")


def test_a_transform_that_was_disabled_goes_on_where_it_was(
    tmp_path: Path, spark: SparkSession
) -> None:
    """The state of the derivation is that of both transforms, all the time."""
    pipeline, text = Pipeline(tmp_path, spark, (), language="sqlite"), catalog_text("sqlite")
    pipeline.prepare(text)
    pipeline.append({"acme/transfers": transfers(0, 20)})
    assert pipeline.run() == 0
    pipeline.prepare(edited(text, "debits", "disable: true"))
    pipeline.append({"acme/transfers": transfers(20, 20)})
    assert pipeline.run("leader.after-commit-record:1") == CRASHED
    pipeline.prepare(text)
    pipeline.append({"acme/transfers": transfers(40, 20)})
    assert pipeline.run("derive.after-publish:1") == CRASHED
    assert pipeline.run() == 0
    wanted = oracle(transfers(0, 60), counts_seen=True)
    names = ("amount", "count", "seen")
    assert sums(table(tmp_path / "views.db"), *names) == sums(wanted, *names)
    assert sum(pipeline.inputs()) == 120


def test_transforms_that_are_added_and_moved_read_what_they_have_not(
    tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = Pipeline(tmp_path, spark, ())
    pipeline.prepare(spark_text(CREDITS))
    pipeline.append({"acme/transfers": transfers(0, 20)})
    assert pipeline.run("leader.after-commit-record:1") == CRASHED
    pipeline.prepare(spark_text(DEBITS, CREDITS))
    pipeline.append({"acme/transfers": transfers(20, 20)})
    assert pipeline.run("leader.after-stats:1") == CRASHED
    assert pipeline.run() == 0
    wanted = oracle(transfers(0, 40), counts_seen=False)
    assert sums(table(tmp_path / "views.db"), "amount", "count") == sums(wanted, "amount", "count")
    assert sum(pipeline.inputs()) == 80


def test_another_number_of_shards_is_refused_where_state_is_split_over_them(
    tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = Pipeline(tmp_path, spark, (), language="sqlite")
    place = Place(tmp_path, spark)
    pipeline.prepare(catalog_text("sqlite"))
    pipeline.append({"acme/transfers": transfers(0, 20)})
    assert place.run("acme/balances", shards=2)["acme/balances"].error is None
    before = place.read("acme/balances")
    pipeline.append({"acme/transfers": transfers(20, 20)})
    error = str(place.run("acme/balances", shards=3)["acme/balances"].error)
    assert "the state of acme/balances is split over 2 shards, not 3" in error
    assert "shards: {count: 2}" in error
    assert place.read("acme/balances") == before
    assert place.run("acme/balances", shards=2)["acme/balances"].error is None
    assert derived_inputs(place, "acme/balances") == 80
    seen: dict[str, int] = {}
    for doc in place.read("acme/balances"):
        seen[doc["account"]] = max(seen.get(doc["account"], 0), doc["seen"])
    wanted = oracle(transfers(0, 40), counts_seen=True)
    assert seen == {account: row["seen"] for account, row in wanted.items()}
