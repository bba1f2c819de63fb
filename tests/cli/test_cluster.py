"""`penstock cluster`, `controller`, `local-stack`: what they refuse, and what survives kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.child import command
from penstock.cli.main import app
from penstock.cluster.state import ClusterMachine, log_key
from penstock.cluster.unified import MAIN
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import load
from penstock.settings import Settings, sqlite_url
from support.commands import SOON_S, Command, done
from support.deployments import catalog_of, write_documents

PS = shutil.which("ps") or "ps"

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


def test_t46_a_process_of_one_domain_has_every_setting_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CATALOG", "applied by the parent")
    conf = {"spark.driver.memory": "2g", "spark.sql.shuffle.partitions": "3"}
    settings = Settings(
        data=tmp_path / "data",
        consensus="sqlite:/somewhere.db",
        blob=str(tmp_path / "blobs"),
        master="local[3]",
        conf=conf,
        log_level="debug",
        log_json=True,
    )
    made = command("half", settings, "cluster", "--domain", "storage")
    asked = made.command[made.command.index("penstock.cli.child") + 1 :]
    assert asked[:3] == ["cluster", "--domain", "storage"]
    given = [value for flag, value in itertools.pairwise(asked) if flag == "--conf"]
    assert Settings.resolve({"conf": given}, made.env, ()) == settings  # and no catalog


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        pytest.param("http://127.0.0.1:7100", 2, "it is not grpc://host:port", id="a web address"),
        pytest.param("grpc://me:secret@h:1", 2, "it holds a password", id="a password"),
        pytest.param("grpc://example.com:1?token_file=x", 2, "without TLS", id="a token in clear"),
        pytest.param(
            "grpc://127.0.0.1:7100", 1, "there is no deployment here yet", id="no deployment"
        ),
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
    asyncio.run(claims(tmp_path))  # it makes the stores, and applies nothing
    (tmp_path / "catalog.yaml").write_text(json.dumps(catalog_of("a")))
    nobody = ("controller", "--cluster", f"grpc://127.0.0.1:{free_port()}")
    first = Command(tmp_path, *nobody)
    first.until_it_says("waiting for a catalog: penstock apply")
    second = Command(tmp_path, *nobody, "--catalog", "catalog.yaml")
    second.until_it_says(f"waiting for {nobody[-1]}")
    for each in (first, second):
        assert each.stopped(signal.SIGTERM) == 0


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
    (directory / ".penstock").mkdir(exist_ok=True)
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


@pytest.fixture
def without_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures of files need none: a process that finds no Java runs them all the same."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(pid: int) -> dict[str, tuple[int, list[str]]]:
    """The processes that a process has started, with their arguments, by command or domain."""
    listed = subprocess.run(
        [PS, "-ww", "-o", "pid=,args=", "--ppid", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found = {}
    for line in listed.splitlines():
        child, _, command = line.strip().partition(" ")
        words = command.split()
        if "penstock.cli.child" in words:
            name = words[words.index("penstock.cli.child") + 1]
            if "--domain" in words:
                name = words[words.index("--domain") + 1]
            found[name] = (int(child), words)
    return found


def documents_at(admin_port: str) -> int:
    """Documents that the process which runs tasks now has read."""
    url = f"http://127.0.0.1:{admin_port}/introspection/v1/tasks"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return sum(row.get("documents", 0) for row in json.load(answer)["rows"])
    return -1


def until(is_so: Callable[[], bool], *running: Command) -> None:
    deadline = time.monotonic() + LATER_S
    while not is_so():
        said = [each.said for each in running]
        assert all(each.process.poll() is None for each in running), said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("without_spark")
def test_a_stack_survives_kill_9_of_each_of_its_parts(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(json.dumps(catalog_of("a")))
    write_documents(tmp_path, "a", range(5))
    stack = Command(tmp_path, "local-stack", "catalog.yaml", "--free-ports")
    try:
        until(lambda: len(children_of(stack.process.pid)) == 3, stack)
        words = children_of(stack.process.pid)["cluster"][1]
        admin = words[words.index("--admin-port") + 1]
        until(lambda: documents_at(admin) == 5, stack)
        read = 5
        for part in ("controller", "persistd", "cluster"):
            killed, _ = children_of(stack.process.pid)[part]
            os.kill(killed, signal.SIGKILL)
            write_documents(tmp_path, "a", range(7))
            read = 7 if part == "cluster" else read + 7  # those before are not read again
            until(lambda read=read: documents_at(admin) == read, stack)
            until(lambda: len(children_of(stack.process.pid)) == 3, stack)
            assert children_of(stack.process.pid)[part][0] != killed
        left = children_of(stack.process.pid).values()
        stack.process.send_signal(signal.SIGINT)
        assert stack.ended_within(60) == 0
        assert not any(is_alive(pid) for pid, _ in left)
    finally:
        stack.process.kill()
        stack.process.wait()


@pytest.mark.usefixtures("without_spark")
def test_each_domain_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(json.dumps(catalog_of("a")))
    done(tmp_path, "apply", "catalog.yaml")
    write_documents(tmp_path, "a", range(5))
    port, admin = free_port(), str(free_port())
    listen = ("--listen", f"127.0.0.1:{port}", "--admin-port", admin)
    cluster = Command(tmp_path, "cluster", "--no-unified-runtime", *listen)
    controller = Command(tmp_path, "controller", "--cluster", f"grpc://127.0.0.1:{port}")
    try:
        until(lambda: documents_at(admin) == 5, cluster, controller)
        other = Command(tmp_path, "cluster", "--listen", "127.0.0.1:0", "--admin-port", "0")
        assert other.ended_within(60) == 1
        assert "penstock cluster runs here already" in other.said

        halves = children_of(cluster.process.pid)
        os.kill(halves["storage"][0], signal.SIGKILL)
        write_documents(tmp_path, "a", range(7))
        until(lambda: documents_at(admin) == 7, cluster, controller)
        assert children_of(cluster.process.pid)["compute"] == halves["compute"]
        assert controller.stopped(signal.SIGTERM) == 0
        left = children_of(cluster.process.pid).values()
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.ended_within(60) == 0
        assert not any(is_alive(pid) for pid, _ in left)
    finally:
        for each in (cluster, controller):
            each.process.kill()
            each.process.wait()
