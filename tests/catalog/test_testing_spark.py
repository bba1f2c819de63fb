"""Tests of catalogs whose derivations need Spark, or that run as deployments do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from catalog.small_engine import START, built
from penstock.catalog.testing.memory import Endless, MemoryWorld
from penstock.catalog.testing.run import PLAIN, SPLITS, Outcome, Variant, Worlds, run_test
from penstock.catalog.testing.world import TestWorld as World
from penstock.model.spec import Catalog
from penstock.runtime.derive.engine import LambdaFailed
from penstock.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

BALANCES = """
collections:
  acme/transfers:
    key: [/id]
    schema:
      type: object
      required: [id, sender, recipient, amount]
      properties:
        id: {type: integer}
        sender: {type: string}
        recipient: {type: string}
        amount: {type: number}
  acme/balances:
    key: [/account]
    schema:
      type: object
      required: [account]
      reduce: {strategy: merge}
      properties:
        account: {type: string}
        amount: {type: number, reduce: {strategy: sum}}
        lastTransfer: {type: integer, reduce: {strategy: maximize}}
        seen: {type: array, items: {type: integer}, reduce: {strategy: append}}
    derive:
      using: {spark: {}}
      transforms:
        - name: fromTransfers
          source: acme/transfers
          shuffle: any
          lambda: |
            select recipient as account, amount, id as lastTransfer, array(id) as seen from source
            union all
            select sender, -amount, id, array(id) from source
tests:
  acme/tests/balances:
    - ingest:
        collection: acme/transfers
        documents:
          - {id: 1, sender: a, recipient: b, amount: 3.5}
          - {id: 3, sender: a, recipient: b, amount: 1}
          - {id: 2, sender: b, recipient: a, amount: 0.5}
    - verify:
        collection: acme/balances
        documents:
          - {account: a, amount: -4, seen: [1, 3, 2]}
          - {account: b, amount: 4, lastTransfer: 3, seen: [1, 3, 2]}
"""

COUNTS = """
collections:
  acme/events:
    key: [/id]
    schema:
      type: object
      required: [id, of]
      properties: {id: {type: integer}, of: {type: string}, mail: {redact: {strategy: sha256}}}
    projections: {of: {location: /of, partition: true}}
  acme/counts:
    key: [/of]
    schema:
      type: object
      required: [of]
      reduce: {strategy: merge}
      properties:
        of: {type: string}
        n: {type: integer, reduce: {strategy: sum}}
        running: {type: integer, reduce: {strategy: maximize}}
    derive:
      using: {sqlite: {migrations: ["create table seen (of text primary key, n integer)"]}}
      transforms:
        - name: count
          source: acme/events
          shuffle: {key: [/of]}
          lambda: |
            insert into seen values ($of, 1) on conflict (of) do update set n = n + 1;
            select $of as of, 1 as n, n as running from seen where of = $of;
  acme/late:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: x, source: acme/events, readDelay: 24h, shuffle: any, lambda: select $id as id}
tests:
  acme/tests/counts:
    - ingest:
        collection: acme/events
        documents: [{id: 1, of: a, mail: m}, {id: 2, of: b}, {id: 3, of: a}]
    - verify: {collection: acme/counts, documents: [{of: a, n: 2, running: 2}, {of: b, n: 1}]}
    - ingest: {collection: acme/events, documents: [{id: 4, of: a}]}
    - verify: {collection: acme/counts, documents: [{of: a, n: 3, running: 3}, {of: b, n: 1}]}
    - verify: {collection: acme/late, documents: [{id: 1}, {id: 2}, {id: 3}, {id: 4}]}
    - verify:
        collection: {name: acme/events, partitions: {include: {of: [b]}}}
        documents: [{id: 2}]
"""


def in_memory(catalog: Catalog, directory: Path, spark: SparkSession) -> Worlds:
    from penstock.catalog.testing.spark_frames import FrameDerivation

    def world(variant: Variant) -> World:
        return MemoryWorld(
            catalog,
            directory=directory,
            start=START,
            split=variant.split,
            shards=variant.shards,
            frames=lambda catalog, spec: FrameDerivation(catalog, spec, lambda: spark),
        )

    return world


def deployed(catalog: Catalog, directory: Path) -> Worlds:
    from penstock.testing.deployment_world import DeploymentWorld

    def world(variant: Variant) -> World:
        own = directory / f"deployment-{variant.shards}"
        return DeploymentWorld(catalog, directory=own, settings=Settings(), shards=variant.shards)

    return world


def passed(outcome: Outcome) -> bool:
    assert outcome.failure is None, "\n".join(outcome.failure.lines())
    return True


def test_spark_lambdas_keep_the_order_of_documents(tmp_path: Path, spark: SparkSession) -> None:
    catalog = built(tmp_path, BALANCES)
    (test,) = catalog.tests
    pairs = [Variant(split=split) for split in SPLITS if split.largest == 2]
    assert pairs
    assert passed(run_test(catalog, test, in_memory(catalog, tmp_path, spark), shake=pairs))


def test_a_spark_lambda_that_fails_is_named(tmp_path: Path, spark: SparkSession) -> None:
    catalog = built(tmp_path, BALANCES.replace("-amount,", "-amount / (id - 3),"))
    (test,) = catalog.tests
    outcome = run_test(catalog, test, in_memory(catalog, tmp_path, spark))
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, LambdaFailed)
    assert outcome.failure.number == 0
    assert "Division by zero" in outcome.failure.what
    assert str(outcome.failure.error.where).startswith("transform fromTransfers")


def test_sqlite_with_state_and_delays_is_the_same_in_memory_and_deployed(
    tmp_path: Path, spark: SparkSession
) -> None:
    catalog = built(tmp_path, COUNTS)
    (test,) = catalog.tests
    assert passed(run_test(catalog, test, in_memory(catalog, tmp_path, spark)))
    two = [Variant(shards=2)]
    assert passed(run_test(catalog, test, deployed(catalog, tmp_path), shake=two))


def test_a_deployed_cycle_that_does_not_rest_is_named(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.testing.deployment_world.TRANSACTIONS_MAX", 2)
    catalog = built(
        tmp_path,
        COUNTS[: COUNTS.index("  acme/counts:")]
        + """
  acme/loop:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: x, source: acme/events, shuffle: any, lambda: select $id as id}
        - {name: y, source: acme/loop, shuffle: any, lambda: select $id + 1 as id}
""",
    )
    world = deployed(catalog, tmp_path)(PLAIN)
    try:
        world.ingest("acme/events", [{"id": 1, "of": "a"}])
        with pytest.raises(Endless, match="acme/loop -> acme/loop do not come to rest"):
            world.settle()
    finally:
        world.close()
