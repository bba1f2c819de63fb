"""A crash after every step of a transaction, and what a table holds after the task is run again.

For each crash point: the task has committed one transaction; in the next one it dies there, at the
first hit, the second, and so on until it lives; each time it is run again. The table must equal
what an oracle works out by hand, each document counted once in the statistics, and every
transaction's webhook called at least once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.connectors.sqlite import sink as _sqlite  # noqa: F401 - declares its crash points
from penstock.failpoints import FAILPOINTS
from penstock.runtime.materialize import leader as _leader  # noqa: F401 - likewise
from runtime.crash_world import (
    CRASHED,
    Deployment,
    Receiver,
    catalog_text,
    documents,
    oracle,
    receiving,
    sqlite_rows,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

HITS_MAX = 2
BOTH = ("acme/accounts", "acme/tags")

POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith(("leader.", "sqlite.", "publisher.", "statelog.after"))
    and not name.startswith("sqlite.commit")
)

NEVER_REACHED = {
    "leader.after-supersede": "no backfill was raised",
    "leader.after-gather": "nothing is gathered ahead where the tail is quick",
    "leader.after-store": "everything is staged before it is hinted",
    "publisher.adopted": "Spark tasks publish nothing here",
    "leader.after-trigger-hint-record": "only direct stores learn of triggers so late",
    "leader.after-ack-record": "this endpoint acknowledges without patches",
    "leader.after-apply-record": "the spec was applied before",
    "leader.after-reconcile": "the endpoint is not ahead",
}


@dataclass
class Prepared:
    """A task with one transaction behind it and one before it."""

    deployment: Deployment
    fresh: Deployment
    """The same before its first transaction."""
    receiver: Receiver


@pytest.fixture(scope="module", params=[("acme/accounts",), BOTH], ids=["one table", "two tables"])
def prepared(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prepared]:
    collections: tuple[str, ...] = request.param
    with receiving() as receiver:
        made = Deployment(tmp_path_factory.mktemp("prepared"), spark, collections)
        made.prepare(
            catalog_text(
                collections,
                image="penstock/materialize-sqlite",
                config={"path": "views.db"},
                webhook=receiver.url,
            )
        )
        made.append({name: documents(name, 0, 30) for name in collections})
        fresh = made.copy(tmp_path_factory.mktemp("fresh") / "copy")
        assert made.run() == 0
        made.append({name: documents(name, 30, 30) for name in collections})
        yield Prepared(made, fresh, receiver)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_loses_nothing_and_doubles_nothing(
    prepared: Prepared, tmp_path: Path, point: str, shards: int
) -> None:
    crashes = 0
    for hits in range(1, HITS_MAX + 1):
        case = prepared.deployment.copy(tmp_path / str(hits), shards=shards)
        told = len(prepared.receiver.runs)
        ended = case.run(f"{point}:{hits}")
        assert ended in (0, CRASHED)
        crashes += ended == CRASHED
        assert case.run() == 0
        for name in case.collections:
            expected = oracle(name, documents(name, 0, 60))
            assert sqlite_rows(case.directory / "views.db", name) == expected
        stats = case.read_stats()
        for name in case.collections:
            right = [s["materialize"][name]["right"]["docsTotal"] for s in stats]
            assert sum(right) == 60
        assert len(prepared.receiver.runs) > told, "the webhook of the transaction was called"
        if ended == 0:
            break
    # Loads are staged by Spark's tasks, which are other processes.
    in_tasks = point == "sqlite.after-stage" and "acme/tags" in prepared.deployment.collections
    assert crashes or in_tasks or point in NEVER_REACHED, "every transaction passes it"


@pytest.mark.parametrize(
    "point", ["leader.after-epoch", "leader.after-apply", "leader.after-apply-record"]
)
def test_a_crash_before_the_first_transaction_is_as_if_it_had_not_started(
    prepared: Prepared, tmp_path: Path, point: str
) -> None:
    case = prepared.fresh.copy(tmp_path / "case")
    assert case.run(point) == CRASHED
    assert case.run() == 0
    for name in case.collections:
        expected = oracle(name, documents(name, 0, 30))
        assert sqlite_rows(case.directory / "views.db", name) == expected


def test_a_crash_after_the_endpoint_was_believed_changes_nothing(
    prepared: Prepared, tmp_path: Path
) -> None:
    case = prepared.deployment.copy(tmp_path / "case")
    assert case.run("sqlite.after-commit") == CRASHED, "the endpoint is ahead"
    assert case.run("leader.after-reconcile") == CRASHED
    assert case.run() == 0
    for name in case.collections:
        expected = oracle(name, documents(name, 0, 60))
        assert sqlite_rows(case.directory / "views.db", name) == expected


@pytest.mark.parametrize("point", ["leader.after-hint-record", "leader.after-start-commit"])
def test_a_crash_of_a_replay_is_followed_by_another(
    prepared: Prepared, tmp_path: Path, point: str
) -> None:
    case = prepared.deployment.copy(tmp_path / "case", shards=3, through_tasks=True)
    assert case.run("leader.after-hint-record") == CRASHED
    assert case.run(point) == CRASHED, "in the replay"
    assert case.run() == 0
    for name in case.collections:
        expected = oracle(name, documents(name, 0, 60))
        assert sqlite_rows(case.directory / "views.db", name) == expected
