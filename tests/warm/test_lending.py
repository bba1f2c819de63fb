"""Warm commands that use the Spark of their host, as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.warm.host import _Gateway
from warm.hosting import CATALOG, SOON_S, Host, Place, eventually, is_running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

STARTS = "starting Spark for this command alone: "

MODULE = """
import os, pathlib, time
from acme.seen import Document, IDerivation

HOLD = pathlib.Path({hold!r})

class Derivation(IDerivation):
    def from_events(self, read):
        if HOLD.exists():
            HOLD.with_name("held").touch()
        while HOLD.exists():
            time.sleep(0.05)
        yield Document(id=read.doc.id, who=os.environ.get("WHO", "nobody"))
"""


def a_place(directory: Path, who: str = "host") -> Place:
    """A derivation in Python workers, which says what they see and can be held up; a table."""
    place = Place(directory)
    place.environment["WHO"] = who
    schema = {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer"}, "who": {"type": "string"}},
    }
    derive = {
        "using": {"python": {"module": MODULE.format(hold=str(directory / "hold"))}},
        "transforms": [{"name": "fromEvents", "source": "acme/events", "shuffle": "any"}],
    }
    table = str(directory / "${env:WHO}.db")
    connector = {"image": "penstock/materialize-sqlite", "config": {"path": table}}
    catalog: dict[str, Any] = {
        "collections": {
            **CATALOG["collections"],
            "acme/seen": {"key": ["/id"], "schema": schema, "derive": derive},
        },
        "materializations": {
            "acme/views": {
                "endpoint": {"connector": connector},
                "bindings": [{"source": "acme/seen", "resource": {"table": "seen"}}],
            }
        },
        "tests": CATALOG["tests"],
    }
    (directory / "catalog.yaml").write_text(json.dumps(catalog))
    done = place.run("apply", "catalog.yaml")
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return a_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def host(place: Place) -> Iterator[Host]:
    """A host that tests leave as it is."""
    with place.host("--spark") as host:
        yield host


def rows(file: Path) -> dict[int, str]:
    with contextlib.closing(sqlite3.connect(file)) as database:
        found = database.execute("SELECT id, who FROM seen").fetchall()
    assert len(found) == len(dict(found))
    return dict(found)


@contextlib.contextmanager
def held(place: Place) -> Iterator[subprocess.Popen[str]]:
    """A run whose Spark job does not end before the block does."""
    hold, is_held = place.directory / "hold", place.directory / "held"
    hold.touch()
    try:
        with place.command("run") as command:
            try:
                eventually(is_held.exists, "no task is held")
                yield command
            finally:
                command.kill()
    finally:
        hold.unlink()
        is_held.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------- borrowing


def test_commands_use_the_spark_of_their_host(place: Place, host: Host) -> None:
    """What they did is there once, whoever did it, and they started no JVM."""
    place.append(*({"id": n} for n in range(3)))
    before = host.handed_over()
    done = place.run("run", "--json")
    assert done.returncode == 0, done.stderr
    assert STARTS not in done.stderr
    found = json.loads(done.stdout)
    assert sum(task["documents"] for task in found["tasks"]) >= 6
    assert found["peak_rss_spark_bytes"] is None
    assert rows(place.directory / "host.db").keys() >= {0, 1, 2}
    preview = place.run(
        "preview",
        "--source",
        "catalog.yaml",
        "--name",
        "acme/seen",
        "--timeout=60s",
        "--sessions",
        "1",
    )
    assert preview.returncode == 0, preview.stderr
    assert '"id":1' in preview.stdout
    tested = place.run("test", "catalog.yaml", "--spark")
    assert tested.returncode == 0, tested.stderr
    assert STARTS not in preview.stderr + tested.stderr
    assert host.handed_over() == before + 3
    assert host.jobs() == 0


def test_two_commands_use_it_at_once(place: Place, host: Host) -> None:
    place.append({"id": 100})
    before = host.handed_over()
    with place.command("run") as first, place.command("run") as second:
        for command in (first, second):  # of which one may wait for the other
            _, said = command.communicate(timeout=4 * SOON_S)
            assert command.returncode == 0, said
            assert STARTS not in said
    third = place.run("run")
    assert third.returncode == 0, third.stderr
    assert host.handed_over() == before + 3
    assert 100 in rows(place.directory / "host.db")


# ---------------------------------------------------------------------------- what does not cross


@pytest.mark.parametrize("who", ["client", None], ids=["another value", "no value"])
def test_environment_and_secrets_are_those_of_the_command(
    tmp_path: Path, place: Place, host: Host, who: str | None
) -> None:
    """The table's name, and what a Python worker sees: of the client, or not at all."""
    data = place.directory / ".penstock"
    place.append({"id": 200})
    mine = Place(place.directory, dict(place.environment))
    if who is None:
        del mine.environment["WHO"]
    else:
        mine.environment["WHO"] = who
    before = rows(place.directory / "host.db") if (place.directory / "host.db").exists() else {}
    task = ("--task", "acme/seen")
    done = mine.run("run", *task)
    assert done.returncode == 0, done.stderr
    assert f"{STARTS}the one that is running has another WHO in its environment" in done.stderr
    read = mine.run("read", "acme/seen", "--data", str(data))
    documents = [json.loads(line) for line in read.stdout.splitlines()]
    assert documents[-1] == {"id": 200, "who": who or "nobody"}
    if (place.directory / "host.db").exists():
        assert rows(place.directory / "host.db") == before


def test_another_directory_or_master_starts_its_own(
    place: Place, host: Host, tmp_path: Path
) -> None:
    place.append({"id": 300})
    data = str(place.directory / ".penstock")
    done = place.run("run", "--task", "acme/seen", "--data", data, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{STARTS}the one that is running is in another directory" in done.stderr
    place.append({"id": 301})
    done = place.run("run", "--task", "acme/seen", "--master", "local[1]")
    assert done.returncode == 0, done.stderr
    assert f"{STARTS}the one that is running has another --master" in done.stderr


# ------------------------------------------------------------------------------------ when one dies


def test_a_killed_client_stops_its_command_and_its_jobs(place: Place, host: Host) -> None:
    place.append({"id": 400})
    with held(place) as command:
        process = host.begun()
        assert host.jobs() > 0
        command.kill()
        eventually(lambda: not is_running(process), "the command goes on")
        eventually(lambda: host.jobs() == 0, "its job goes on")
    done = place.run("run")
    assert done.returncode == 0, done.stderr
    assert 400 in rows(place.directory / "host.db")


def test_a_killed_command_leaves_no_job_behind(place: Place, host: Host) -> None:
    place.append({"id": 500})
    with held(place) as command:
        process = host.begun()
        os.kill(process, signal.SIGKILL)
        assert command.wait(SOON_S) == 128 + signal.SIGKILL
        eventually(lambda: host.jobs() == 0, "its job goes on")
    assert place.run("run").returncode == 0
    assert 500 in rows(place.directory / "host.db")


def test_ctrl_c_ends_a_command_that_uses_it(place: Place, host: Host) -> None:
    """The first one waits for the transaction, which does not end; the second one does not."""
    place.append({"id": 600})
    with held(place) as command:
        process = host.begun()
        command.send_signal(signal.SIGINT)
        assert command.stderr is not None
        assert any("finishing open transactions" in line for line in command.stderr)
        command.send_signal(signal.SIGINT)
        assert command.wait(SOON_S) == 128 + signal.SIGINT
        eventually(lambda: not is_running(process), "the command goes on")
        eventually(lambda: host.jobs() == 0, "its job goes on")
    assert place.run("run").returncode == 0
    assert 600 in rows(place.directory / "host.db")


def test_a_killed_host_fails_its_command_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    place = a_place(tmp_path)
    place.append(*({"id": n} for n in range(50)))
    with place.host("--spark") as host, held(place) as command:
        process = host.begun()
        host.kill()
        _, said = command.communicate(timeout=SOON_S)
        assert command.returncode == 1
        assert "the process whose Spark this command used has ended" in said
        eventually(lambda: not is_running(process), "the command goes on")
    done = place.run("run")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "host.db").keys() == set(range(50))


# ---------------------------------------------------------------------------------------- gateways


def test_a_gateway_has_a_secret_and_a_tag_and_ends(spark: SparkSession) -> None:
    from py4j.clientserver import ClientServer, JavaParameters
    from py4j.protocol import Py4JError

    def tags(port: int, secret: str) -> str:
        # The port of a gateway that has ended may be that of somebody else, who does not answer.
        way = JavaParameters(port=port, auth_token=secret, read_timeout=20)
        client = ClientServer(java_parameters=way)
        try:
            context = client.jvm.org.apache.spark.SparkContext.getOrCreate()
            return str(context.getJobTags().mkString(","))
        finally:
            client.shutdown_callback_server()
            client.close()

    first, second = _Gateway(spark), _Gateway(spark)
    try:
        assert first.secret != second.secret
        assert tags(first.port, first.secret) == first._tag
        assert tags(second.port, second.secret) == second._tag
        assert list(spark.sparkContext.getJobTags()) == []
        with pytest.raises(Py4JError):
            tags(second.port, first.secret)
    finally:
        first.close()
    with pytest.raises((Py4JError, OSError)):
        tags(first.port, first.secret)
    assert tags(second.port, second.secret) == second._tag
    second.close()
    assert spark.range(10).count() == 10
