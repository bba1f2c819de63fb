"""`penstock cluster`, `controller`, `local-stack`: what they refuse, and what survives kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cluster.state import ClusterMachine, log_key
from penstock.cluster.unified import MAIN
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import load
from penstock.settings import sqlite_url
from support.commands import SOON_S, Command, done
from support.deployments import EVENTS, capture, write_documents

LONG_S = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))

LATER_S = 150.0
"""Until something has happened that takes a few seconds; generous, as the machine is busy."""


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, package = logging.getLogger(), logging.getLogger("penstock")
    before = (list(root.handlers), root.level, package.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])


# -------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("form", ["--unified-runtime", "--no-unified-runtime"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param(("--listen", "7100"), "cannot listen", id="no host"),
        pytest.param(("--listen", "0.0.0.0:0"), "without both TLS and tokens", id="an open port"),
        pytest.param(("--tls-cert", "x"), "belong together", id="half of TLS"),
        pytest.param(("--tls-client-ca", "x"), "needs --tls-cert", id="client CA alone"),
        pytest.param(("--token-file", "/nowhere"), "cannot read", id="no token file"),
        pytest.param(
            ("--tls-cert", "/nowhere", "--tls-key", "/nowhere"), "cannot read", id="no certificate"
        ),
        pytest.param(("--split-ratio", "1"), "No such option", id="no such flag"),
        pytest.param(("--domain", "storage"), "leave them out", id="half a cluster"),
    ],
)
def test_t46_every_flag_is_checked_in_both_forms(
    tmp_path: Path, form: str, flags: tuple[str, ...], says: str
) -> None:
    arguments = ["cluster", "--data", str(tmp_path), "--admin-port", "0", form, *flags]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        pytest.param("http://127.0.0.1:7100", 2, "it is not grpc://host:port", id="a web address"),
        pytest.param("grpc://me:secret@h:1", 2, "it holds a password", id="a password"),
        pytest.param("grpc://example.com:1?token_file=x", 2, "without TLS", id="a token in clear"),
        pytest.param("grpc://127.0.0.1:7100", 1, "there is nothing here yet", id="no deployment"),
    ],
)
def test_a_controller_is_refused_what_cannot_be_meant(
    tmp_path: Path, url: str, code: int, says: str
) -> None:
    result = CliRunner().invoke(app, ["controller", "--data", str(tmp_path), "--cluster", url])
    assert result.exit_code == code
    assert says in result.output
    assert "secret" not in result.output
    assert "Traceback" not in result.output


def test_a_controller_says_what_it_waits_for_and_ends_when_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(json.dumps(counting()))
    done(tmp_path, "apply", "catalog.yaml")
    nobody = f"grpc://127.0.0.1:{free_port()}"
    controller = Command(tmp_path, "controller", "--cluster", nobody)
    controller.until_it_says(f"waiting for {nobody}")
    assert controller.stopped(signal.SIGTERM) == 0


@pytest.mark.parametrize("form", ["--unified-runtime", "--no-unified-runtime"])
@pytest.mark.parametrize("flag", ["--listen", "--admin-port"])
def test_a_cluster_whose_port_is_taken_says_so_and_takes_nothing_over(
    tmp_path: Path, form: str, flag: str
) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"--listen": "127.0.0.1:0", "--admin-port": "0"}
        ports[flag] = f"127.0.0.1:{port}" if flag == "--listen" else str(port)
        arguments = [word for pair in ports.items() for word in pair]
        cluster = Command(tmp_path, "cluster", form, *arguments)
        assert cluster.ended_within(SOON_S) == 1
    assert str(port) in cluster.said
    assert "fix" in cluster.said
    assert "Traceback" not in cluster.said
    assert asyncio.run(claims(tmp_path)) == 0


async def claims(directory: Path) -> int:
    store = await open_consensus(sqlite_url(directory / ".penstock" / "consensus.db"))
    try:
        return (await load(store, log_key(MAIN), ClusterMachine())).state.claim
    finally:
        await store.close()


def test_a_stack_whose_port_is_taken_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket()) as taken:
        try:
            taken.bind(("127.0.0.1", 6882))
            taken.listen()
        except OSError:
            pytest.skip("another process has the port, which is what is tested elsewhere")
        stack = Command(tmp_path, "local-stack")
        assert stack.ended_within(SOON_S) == 1
    assert "cannot listen on 127.0.0.1:6882" in stack.said
    assert "consensus has not started" in stack.said
    assert "Traceback" not in stack.said


# ---------------------------------------------------------------------------------- real processes


def counting() -> dict[str, Any]:
    """Captured events, counted by a derivation, stored in a table."""
    count = {"type": "integer", "reduce": {"strategy": "sum"}}
    totals = {
        "key": ["/digit"],
        "schema": {
            "type": "object",
            "required": ["digit"],
            "reduce": {"strategy": "merge"},
            "properties": {"digit": {"type": "integer"}, "count": count, "sum": count},
        },
        "derive": {
            "using": {"sqlite": {}},
            "transforms": [
                {
                    "name": "fromEvents",
                    "source": "acme/events",
                    "shuffle": {"key": ["/id"]},
                    "lambda": "SELECT $id % 10 AS digit, 1 AS count, $id AS sum;",
                }
            ],
        },
    }
    endpoint = {"image": "penstock/materialize-sqlite", "config": {"path": "totals.db"}}
    return {
        "collections": {"acme/events": EVENTS, "acme/totals": totals},
        "captures": {"acme/files": capture("events", {})},
        "materializations": {
            "acme/to-totals": {
                "endpoint": {"connector": endpoint},
                "bindings": [{"source": "acme/totals", "resource": {"table": "totals"}}],
            }
        },
    }


def expected(ids: range) -> dict[int, tuple[int, int]]:
    digits = {each % 10 for each in ids}
    return {
        digit: (len(found), sum(found))
        for digit in digits
        if (found := [each for each in ids if each % 10 == digit])
    }


def stored(directory: Path) -> dict[int, tuple[int, int]]:
    file = directory / "totals.db"
    if not file.exists():
        return {}
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        try:
            rows = database.execute('SELECT digit, "count", "sum" FROM totals').fetchall()
        except sqlite3.OperationalError:
            return {}
    return {digit: (count, total) for digit, count, total in rows}


def until(is_so: Callable[[], bool], *running: Command) -> None:
    deadline = time.monotonic() + LATER_S
    said = [each.said for each in running]
    while not is_so():
        said = [each.said for each in running]
        assert all(each.process.poll() is None for each in running), said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(pid: int) -> dict[str, int]:
    """The processes that a process has started, by what follows `penstock.cli.child`."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    found = {}
    for line in listed.splitlines():
        child, _, command = line.strip().partition(" ")
        words = command.split()
        if "penstock.cli.child" in words:
            name = words[words.index("penstock.cli.child") + 1]
            if "--domain" in words:
                name = words[words.index("--domain") + 1]
            found[name] = int(child)
    return found


def tasks_at(admin_port: int) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{admin_port}/introspection/v1/tasks"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        rows: list[dict[str, Any]] = json.load(answer)["rows"]
        return rows
    return []


@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize(
    "form", ["--unified-runtime", "--no-unified-runtime"][: 2 if LONG_S else 1]
)
def test_t48_a_stack_survives_kill_9_of_each_of_its_parts(tmp_path: Path, form: str) -> None:
    """Destination equals source, whatever is killed: each part once, or again and again."""
    (tmp_path / "catalog.yaml").write_text(json.dumps(counting()))
    write_documents(tmp_path, "events", range(10))
    stack = Command(tmp_path, "local-stack", "catalog.yaml", "--free-ports", form)
    try:
        until(lambda: stored(tmp_path) == expected(range(10)), stack)
        written, ends_at = 10, time.monotonic() + LONG_S
        parts = itertools.cycle(("controller", "cluster", "persistd"))
        for kills, part in enumerate(parts):
            if kills >= 3 and time.monotonic() > ends_at:
                break
            until(lambda: len(children_of(stack.process.pid)) == 3, stack)
            killed = children_of(stack.process.pid)[part]
            write_documents(tmp_path, "events", range(written, written + 7))
            os.kill(killed, signal.SIGKILL)
            written += 7
            until(lambda upto=written: stored(tmp_path) == expected(range(upto)), stack)
            assert children_of(stack.process.pid).get(part) != killed
        left = children_of(stack.process.pid)
        stack.process.send_signal(signal.SIGINT)
        assert stack.ended_within(60) == 0
        assert not any(is_alive(pid) for pid in left.values())
    finally:
        stack.process.kill()
        stack.process.wait()


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_t01_t40_t48_each_domain_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(json.dumps(counting()))
    done(tmp_path, "apply", "catalog.yaml")
    write_documents(tmp_path, "events", range(10))
    port, admin = free_port(), free_port()
    listen = ("--listen", f"127.0.0.1:{port}", "--admin-port", str(admin))
    cluster = Command(tmp_path, "cluster", "--no-unified-runtime", *listen)
    controller = Command(tmp_path, "controller", "--cluster", f"grpc://127.0.0.1:{port}")
    try:
        until(lambda: stored(tmp_path) == expected(range(10)), cluster, controller)
        rows = tasks_at(admin)
        assert {(row["kind"], row["runtime"]) for row in rows} == {
            ("capture", "storage"),
            ("materialization", "storage"),
            ("derivation", "compute"),
        }
        other = Command(tmp_path, "cluster", "--listen", "127.0.0.1:0", "--admin-port", "0")
        assert other.ended_within(60) == 1
        assert "penstock cluster runs here already" in other.said

        halves = children_of(cluster.process.pid)
        os.kill(halves["compute"], signal.SIGKILL)
        write_documents(tmp_path, "events", range(10, 20))
        until(lambda: stored(tmp_path) == expected(range(20)), cluster, controller)
        assert children_of(cluster.process.pid)["storage"] == halves["storage"]
        assert controller.stopped(signal.SIGTERM) == 0
        halves = children_of(cluster.process.pid)
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.ended_within(60) == 0
        assert not any(is_alive(pid) for pid in halves.values())
    finally:
        for each in (cluster, controller):
            each.process.kill()
            each.process.wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
