"""A crash after every step of a derivation's transaction, in every language, with 1 and 3 shards.

The pipeline has committed one transaction; in the next one it dies at the point, and is run again.
The table behind it must equal what an oracle works out by hand, and every document is counted once
in the statistics.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.failpoints import FAILPOINTS
from penstock.runtime import kinds as _kinds  # noqa: F401 - declares the crash points
from runtime.crash_world import CRASHED
from runtime.derive.crash_deployment import (
    LANGUAGES,
    Pipeline,
    catalog_text,
    oracle,
    table,
    transfers,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith(("derive.", "publisher.", "statelog.after"))
    or name
    in {
        "leader.after-epoch",
        "leader.after-load",
        "leader.after-stats",
        "leader.after-commit-record",
        "leader.after-intents",
    }
)


@pytest.fixture(scope="module", params=sorted(LANGUAGES))
def prepared(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Pipeline]:
    """Pipelines with one transaction behind them and one before them, by number of shards."""
    made = {}
    for shards in (1, 3):
        pipeline = Pipeline(
            tmp_path_factory.mktemp("prepared"), spark, (), shards=shards, language=request.param
        )
        pipeline.prepare(catalog_text(request.param))
        pipeline.append({"acme/transfers": transfers(0, 30)})
        assert pipeline.run() == 0
        pipeline.append({"acme/transfers": transfers(30, 30)})
        made[shards] = pipeline
    return made


LONG = "PENSTOCK_CHAOS_SECONDS" in os.environ
ALONE = ("derive.after-publish", "leader.after-commit-record", "leader.after-intents")
"""Points that a single shard is tried at, too; all of them in a long run."""

CASES = [
    (point, shards) for point in POINTS for shards in (1, 3) if shards > 1 or LONG or point in ALONE
]


@pytest.mark.parametrize(("point", "shards"), CASES)
def test_a_crash_loses_nothing_and_doubles_nothing(
    prepared: dict[int, Pipeline], tmp_path: Path, point: str, shards: int
) -> None:
    pipeline = prepared[shards]
    through_tasks = point in ("publisher.adopted", "publisher.rows")
    case = pipeline.copy(tmp_path / "case", shards=shards, through_tasks=through_tasks)
    ended = case.run(f"{point}:1")
    assert ended == CRASHED
    assert case.run() == 0
    wanted = oracle(transfers(0, 60), counts_seen=pipeline.language != "spark")
    assert table(case.directory / "views.db") == wanted
    transforms = 1 if pipeline.language == "spark" else 2
    assert sum(case.inputs()) == 60 * transforms
