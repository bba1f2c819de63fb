"""Spark Declarative Pipelines: a streaming table of clean events, a materialized view of accounts.

This program writes the project (`spark-pipeline.yml`, and one file of definitions), and runs
`spark-pipelines run` in it, as its users do. Tables are Parquet files below `warehouse`, known to
a Hive catalog beside it. A streaming table reads new files only. A materialized view is computed
anew by every update: the open-source engine has no other way, and none to write to PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyspark

SPEC = """\
name: accounts
storage: file://{work}/storage
configuration:
  spark.sql.shuffle.partitions: "{cores}"
libraries:
  - glob:
      include: transformations/**
"""

DEFAULTS = """\
spark.sql.catalogImplementation hive
spark.sql.warehouse.dir {work}/warehouse
spark.hadoop.javax.jdo.option.ConnectionURL jdbc:derby:;databaseName={work}/metastore;create=true
spark.ui.enabled false
spark.ui.showConsoleProgress false
spark.driver.host 127.0.0.1
spark.driver.bindAddress 127.0.0.1
"""

DEFINITIONS = """\
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()

REGIONS = ("ap", "eu", "me", "sa", "us")
FIGURES = ("events", "amount", "largest", "eu")


@dp.table
def clean() -> DataFrame:
    events = spark.readStream.schema(
        "id BIGINT, account BIGINT, amount BIGINT, region STRING"
    ).parquet({events!r})
    region = F.lower(F.trim("region"))
    valid = (F.col("amount") > 0) & region.isin(*REGIONS)
    return events.where(valid).withColumn("region", region)


@dp.materialized_view
def accounts() -> DataFrame:
    events = (
        spark.read.table("clean")
        .groupBy("account")
        .agg(
            F.count("*").alias("events"),
            F.sum("amount").alias("amount"),
            F.max("amount").alias("largest"),
            F.sum(F.when(F.col("region") == "eu", F.col("amount")).otherwise(0)).alias("eu"),
        )
    )
    customers = spark.read.schema("account BIGINT, tier STRING").parquet({customers!r})
    figures = (F.coalesce(name, F.lit(0)).alias(name) for name in FIGURES)
    return events.join(customers, "account", "full").select("account", *figures, "tier")
"""


def write_project(source: Path, work: Path) -> None:
    """Write the project; the same for every update.

    Static settings are in `spark-defaults.conf`: the server that `spark-pipelines` starts does not
    get those of the command line, nor may the specification contain them.
    """
    for directory in ("transformations", "conf"):
        (work / directory).mkdir(parents=True, exist_ok=True)
    spec = SPEC.format(work=work, cores=os.cpu_count())
    (work / "spark-pipeline.yml").write_text(spec)
    (work / "conf" / "spark-defaults.conf").write_text(DEFAULTS.format(work=work))
    definitions = DEFINITIONS.format(
        events=str(source / "events"), customers=str(source / "customers")
    )
    (work / "transformations" / "accounts.py").write_text(definitions)


def update(work: Path) -> None:
    """Run an update. Without `--remote`, Spark would use one core."""
    home = Path(pyspark.__file__).parent
    environ = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_CONF_DIR": str(work / "conf"),
    }
    program, spec = home / "bin" / "spark-pipelines", work / "spark-pipeline.yml"
    subprocess.run(  # noqa: S603 - as its users run it
        [program, "run", "--remote", "local[*]", "--spec", spec],
        check=True,
        cwd=work,
        env=environ,
        stdout=sys.stderr,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Declarative Pipelines over files to Parquet")
    parser.add_argument("--input", type=Path, required=True, help="parent of events/, customers/")
    parser.add_argument("--work", type=Path, required=True, help="directory of the project")
    arguments = parser.parse_args()

    work = arguments.work.resolve()
    write_project(arguments.input.resolve(), work)
    began = time.perf_counter()
    update(work)
    job_s = time.perf_counter() - began
    sys.stdout.write(json.dumps({"job_s": round(job_s, 3)}) + "\n")


if __name__ == "__main__":
    main()
