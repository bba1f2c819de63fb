from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import REFLECTION_COMMAND_NAME
from pyspark.sql import functions as f

from penstock.engine import (
    _NEXT_IMPORTS,
    ARCHIVE_CLASSES,
    EngineOptions,
    Java,
    Lifetime,
    _java_options,
    _java_version,
    _launch_environment,
    _one_process,
    _parallelism,
    find_java,
    open_spark,
)
from penstock.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _java(path: Path, banner: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{banner}' >&2\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_401"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("something else", None),
    ],
)
def test_java_versions_are_read_from_the_banner(
    tmp_path: Path, banner: str, version: int | None
) -> None:
    assert _java_version(_java(tmp_path / "bin" / "java", banner)) == version


def test_java_home_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _java(tmp_path / "bin" / "java", 'openjdk version "21.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java().home == tmp_path


def test_an_old_java_is_refused_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _java(tmp_path / "bin" / "java", 'java version "1.8.0_401"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match="no Java 17") as e:
        find_java()
    assert f"{old} (version 8)" in str(e.value)
    assert "apt-get install" in str(e.value)


def test_classes_come_from_the_archive_if_there_is_one(tmp_path: Path) -> None:
    archive = tmp_path / "with space" / "spark.jsa"
    key = "spark.driver.extraJavaOptions"
    mine = EngineOptions(conf={key: "-Xss8m"})
    assert "SharedArchiveFile" not in _java_options(mine, archive)[key]
    archive.parent.mkdir()
    archive.touch()
    assert f'-XX:SharedArchiveFile="{archive}" -Xss8m' in _java_options(mine, archive)[key]
    made = EngineOptions(conf={key: f"{ARCHIVE_CLASSES}=new.jsa"})
    assert "SharedArchiveFile" not in _java_options(made, archive)[key], "one is made from scratch"


def test_the_jvm_is_told_how_long_a_session_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "spark.driver.extraJavaOptions"

    def told(lifetime: Lifetime, theirs: str = "") -> str:
        options = EngineOptions(lifetime=lifetime, conf={key: theirs})
        return _java_options(options, tmp_path / "none.jsa")[key]

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert "TieredStopAtLevel=1" in told(Lifetime.SHORT)
    assert "TieredStopAtLevel" not in told(Lifetime.BATCH) + told(Lifetime.LONG)
    assert "Tier4InvocationThreshold" in told(Lifetime.LONG)
    assert "Tier4InvocationThreshold" not in told(Lifetime.BATCH) + told(Lifetime.SHORT)
    assert "-Xmn" in told(Lifetime.SHORT)
    assert "-Xmn" not in told(Lifetime.BATCH) + told(Lifetime.LONG)
    assert told(Lifetime.SHORT, "-Xmn1g").rindex("-Xmn1g") > told(Lifetime.SHORT).index("-Xmn")
    assert "UseSerialGC" in told(Lifetime.SHORT)
    assert "UseSerialGC" in told(Lifetime.BATCH)
    assert "UseSerialGC" not in told(Lifetime.LONG)
    assert "UseSerialGC" not in told(Lifetime.BATCH, "-XX:+UseParallelGC"), "theirs is the one"
    assert "-Xmn" not in told(Lifetime.SHORT, "-XX:+UseParallelGC"), "which sizes its generations"
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert "UseSerialGC" not in told(Lifetime.BATCH)


def test_the_launcher_is_quick_unless_somebody_says_how_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    java = Java(version=17, home=None, executable=Path("java"))
    monkeypatch.delenv("SPARK_LAUNCHER_OPTS", raising=False)
    assert "TieredStopAtLevel=1" in _launch_environment({}, java)["SPARK_LAUNCHER_OPTS"]
    monkeypatch.setenv("SPARK_LAUNCHER_OPTS", "-Xmx64m")
    assert _launch_environment({}, java)["SPARK_LAUNCHER_OPTS"] == "-Xmx64m"


def test_what_is_imported_ahead_is_there() -> None:
    assert all(importlib.util.find_spec(name) is not None for name in _NEXT_IMPORTS)


def test_exchanges_have_some_partitions_for_each_core_of_this_machine() -> None:
    def partitions(master: str, lifetime: Lifetime = Lifetime.LONG) -> int | None:
        found = _parallelism(EngineOptions(master=master, lifetime=lifetime))
        return int(found["spark.sql.shuffle.partitions"]) if found else None

    assert partitions("local[6]") == partitions("local[6,3]") == 24
    assert partitions("local[6]", Lifetime.SHORT) == 6
    assert (partitions("local[*]") or 0) >= 4
    assert partitions("spark://127.0.0.1:7077") is None


def test_a_session_of_one_process_lets_no_other_process_in() -> None:
    for master in ("local", "local[2]", "local[*]", "local[2,3]"):
        assert _one_process(master)["spark.authenticate"] == "true"
    for master in ("local-cluster[2,1,1024]", "spark://h:7077", "yarn", "k8s://https://h"):
        assert _one_process(master) == {}


@pytest.mark.spark
def test_the_ports_of_a_session_demand_its_secret(spark: SparkSession) -> None:
    assert spark.conf.get("spark.authenticate") == "true"


@pytest.mark.spark
def test_a_process_has_one_session(spark: SparkSession) -> None:
    assert open_spark(EngineOptions(master="local[7]")) is spark


@pytest.mark.spark
def test_a_session_is_active_in_each_thread_that_opens_it(spark: SparkSession) -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(open_spark).result() is spark
        assert thread.submit(type(spark).getActiveSession).result() is not None


@pytest.mark.spark
def test_functions_of_spark_are_looked_up_once(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    send = GatewayClient.send_command

    def counted(client: GatewayClient, command: str, *others: object) -> object:
        commands.append(command)
        return send(client, command, *others)

    f.upper(f.lit("once"))
    monkeypatch.setattr(GatewayClient, "send_command", counted)
    f.upper(f.lit("twice"))
    looked_up = [command for command in commands if command.startswith(REFLECTION_COMMAND_NAME)]
    assert len(commands) >= 2
    assert looked_up == []


def test_a_session_that_another_thread_opened_is_closed_and_opened_again() -> None:
    script = """
        import threading
        from penstock.engine import close_spark, open_spark

        for _ in range(2):
            opened = []
            thread = threading.Thread(target=lambda: opened.append(open_spark()))
            thread.start()
            thread.join()
            assert open_spark() is opened[0]
            close_spark()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)


@pytest.mark.spark
def test_workers_have_imported_what_tasks_need(spark: SparkSession) -> None:
    def imported(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        names = ["pandas", "penstock.runtime.derive.publish_jobs", "pyarrow.parquet"]
        for batch in batches:
            yield pa.RecordBatch.from_pydict(
                {"there": [all(name in sys.modules for name in names)] * batch.num_rows}
            )

    rows = spark.range(2, numPartitions=2).mapInArrow(imported, "there boolean").collect()
    assert [row["there"] for row in rows] == [True, True]


@pytest.mark.spark
def test_executors_run_this_interpreter_and_see_the_package(spark: SparkSession) -> None:
    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        import penstock

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"at": [f"{sys.executable} {penstock.__name__}"]})

    rows = spark.range(1, numPartitions=1).mapInArrow(where, "at string").collect()
    assert [row["at"] for row in rows] == [f"{sys.executable} penstock"]
