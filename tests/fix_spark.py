"""One SparkSession per test process: starting Spark costs seconds, a job a few hundred ms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from penstock.engine import EngineOptions, close_spark, open_spark

    # Python workers of Spark import what tests give them (`support.endpoints`), and inherit this.
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    yield open_spark(
        EngineOptions(
            master="local[2]",
            app_name="penstock-tests",
            conf={
                "spark.sql.shuffle.partitions": "3",
                # What forks that crash hold of the JVM stays there until it ends.
                "spark.driver.memory": "2g",
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
            log_dir=tmp_path_factory.mktemp("spark"),
        )
    )
    close_spark()
