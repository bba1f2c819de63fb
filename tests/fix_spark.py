"""One SparkSession per test process: starting Spark costs seconds, a job a few hundred ms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from penstock.engine import EngineOptions, close_spark, open_spark

    yield open_spark(
        EngineOptions(
            master="local[2]",
            app_name="penstock-tests",
            conf={
                "spark.sql.shuffle.partitions": "3",
                "spark.driver.memory": "1g",
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
            log_dir=tmp_path_factory.mktemp("spark"),
        )
    )
    close_spark()
