"""Commands that are stopped, wherever they wait: real processes, real locks, real signals."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.testing.postgres import PostgresServer
from support.commands import SOON_S, Command, done

pytestmark = pytest.mark.timeout(300)

COLLECTIONS = {
    "acme/events": {
        "key": ["/account"],
        "schema": {
            "type": "object",
            "required": ["account"],
            "properties": {"account": {"type": "integer"}},
        },
    }
}


def catalog(directory: Path, image: str, config: dict[str, Any]) -> None:
    endpoint = {"connector": {"image": f"penstock/materialize-{image}", "config": config}}
    binding = {"source": "acme/events", "resource": {"table": "events"}}
    tasks = {"acme/views": {"endpoint": endpoint, "bindings": [binding]}}
    text = json.dumps({"collections": COLLECTIONS, "materializations": tasks})
    (directory / "catalog.yaml").write_text(text)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Another process writes to a SQLite file, for long."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN IMMEDIATE")
        yield


Held = Callable[[Path, str], contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def sqlite_endpoint(directory: Path, _: str) -> Iterator[str]:
    catalog(directory, "sqlite", {"path": "views.db", "busyTimeout": 600})
    done(directory, "apply", "catalog.yaml")
    with locked(directory / "views.db"):
        yield "acme/views waits for another process that writes to"


@contextlib.contextmanager
def postgres_endpoint(directory: Path, url: str) -> Iterator[str]:
    """As if another leader were paused inside of a commit, with a server that lets it."""
    given = conninfo_to_dict(url)
    catalog(
        directory,
        "postgres",
        {
            "address": f"{given['host']}:{given['port']}",
            "database": given["dbname"],
            "user": given["user"],
            "password": given["password"],
        },
    )
    done(directory, "apply", "catalog.yaml")
    with psycopg.connect(url) as other:
        other.execute(
            "CREATE TABLE penstock_checkpoints (task text PRIMARY KEY, fence bigint NOT NULL, "
            "checkpoint bytea, updated_at timestamptz)"
        )
        other.commit()
        other.execute("LOCK TABLE penstock_checkpoints")
        pid = other.info.backend_pid
        yield f"acme/views waits for a lock on table penstock_checkpoints held by pid {pid}"
        other.rollback()


@contextlib.contextmanager
def nobody_listens(directory: Path, _: str) -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        port = taken.getsockname()[1]
        address = {"address": f"127.0.0.1:{port}", "database": "d", "user": "u"}
        catalog(directory, "postgres", address)
        done(directory, "apply", "catalog.yaml")
        yield "trying again"


@contextlib.contextmanager
def sqlite_consensus(directory: Path, _: str) -> Iterator[str]:
    catalog(directory, "sqlite", {"path": "views.db"})
    done(directory, "apply", "catalog.yaml")
    with locked(directory / ".penstock" / "consensus.db"):
        yield "waits for the consensus store"


@contextlib.contextmanager
def silent_committer(directory: Path, _: str) -> Iterator[str]:
    catalog(directory, "sqlite", {"path": "views.db"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (directory / "penstock.toml").write_text(f'consensus = "grpc://127.0.0.1:{port}"\n')
        yield "waits for the consensus store"


@contextlib.contextmanager
def postgres_consensus(directory: Path, url: str) -> Iterator[str]:
    catalog(directory, "sqlite", {"path": "views.db"})
    (directory / "penstock.toml").write_text(f'consensus = "{url}"\n')
    done(directory, "apply", "catalog.yaml")
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE penstock.consensus_meta")
        yield "waits for the consensus store"
        other.rollback()


STATES = [
    pytest.param(sqlite_endpoint, id="SQLite endpoint is busy"),
    pytest.param(postgres_endpoint, id="PostgreSQL endpoint is locked"),
    pytest.param(nobody_listens, id="backoff"),
    pytest.param(sqlite_consensus, id="SQLite consensus is busy"),
    pytest.param(silent_committer, id="committer does not answer"),
    pytest.param(postgres_consensus, id="PostgreSQL consensus is locked"),
]


@pytest.mark.parametrize("held", STATES)
def test_a_run_says_what_it_waits_for_and_ends_soon_after_a_stop(
    tmp_path: Path, held: Held, postgres: PostgresServer
) -> None:
    with held(tmp_path, postgres.create_database()) as what:
        interrupted = Command(tmp_path, "run")
        timed = Command(tmp_path, "run", "--timeout", "1s")
        interrupted.until_it_says(what)
        interrupted.stopped()
        timed.ended_within(SOON_S)
        for command in (interrupted, timed):
            assert "Traceback" not in command.said
            assert "replayed" not in command.said


def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    with sqlite_endpoint(tmp_path, "") as what:
        command = Command(tmp_path, "run")
        command.until_it_says(what)
        command.process.send_signal(signal.SIGINT)
        command.process.send_signal(signal.SIGTERM)
        command.ended_within(SOON_S)
        assert "Traceback" not in command.said


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("append", "acme/events"), id="append waits for documents"),
        pytest.param(("read", "--follow", "acme/events"), id="read --follow"),
        pytest.param(("shuffle", "--follow", "--name", "acme/events"), id="shuffle --follow"),
        pytest.param(("shuffle", "--listen", "127.0.0.1:0"), id="shuffle --listen"),
        pytest.param(("persistd", "--listen", "127.0.0.1:0", "--admin-port", "0"), id="persistd"),
    ],
)
def test_a_command_without_an_end_ends_when_it_is_stopped(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    catalog(tmp_path, "sqlite", {"path": "views.db"})
    done(tmp_path, "apply", "catalog.yaml")
    if arguments[0] == "persistd":
        arguments = (*arguments, "--consensus", "sqlite:///other.db")
    numbers = (signal.SIGINT, signal.SIGTERM)
    commands = [Command(tmp_path, *arguments, stdin=subprocess.PIPE) for _ in numbers]
    time.sleep(4)  # they do whatever they do; a stop may come at any moment
    for command, number in zip(commands, numbers, strict=True):
        assert command.process.poll() is None, command.said
        command.stopped(number)
        assert "Traceback" not in command.said
        assert "Fatal" not in command.said
        if arguments[0] == "append":
            assert command.said.endswith("penstock: stopped; nothing was appended\n")


def children(pid: int) -> list[int]:
    """Of a process: its JVM, which it starts by way of a shell."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = each.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(each.parent.name))
    return found


@pytest.mark.spark
@pytest.mark.parametrize("master", ["local[1]", "spark://127.0.0.1:1"])
def test_a_run_that_starts_spark_ends_soon_after_a_stop(tmp_path: Path, master: str) -> None:
    """One that is here, and one that nobody serves, which Spark looks for during a minute."""
    catalog(tmp_path, "sqlite", {"path": "views.db"})
    done(tmp_path, "apply", "catalog.yaml")
    done(tmp_path, "append", "acme/events", stdin=b'{"account": 1}')
    command = Command(tmp_path, "run", "--master", master)
    deadline = time.monotonic() + 60
    while not (started := children(command.process.pid)):
        assert time.monotonic() < deadline, command.said
        time.sleep(0.05)
    if master.startswith("spark:"):
        command.until_it_says("acme/views waits for Spark to start")
    command.stopped()
    assert "Traceback" not in command.said
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline, "the JVM goes with its process"
        time.sleep(0.1)


def test_a_run_from_python_can_be_interrupted(tmp_path: Path) -> None:
    script = "import penstock\nwith penstock.open(data='.penstock') as p: p.run()"
    with sqlite_endpoint(tmp_path, ""):
        command = Command(tmp_path, program=("-c", script))
        time.sleep(6)
        assert command.process.poll() is None, command.said
        command.stopped()
        assert "KeyboardInterrupt" in command.said
        assert "was destroyed" not in command.said


def test_a_committer_that_waits_for_its_database_ends_when_it_is_stopped(
    tmp_path: Path, postgres_url: str
) -> None:
    with postgres_consensus(tmp_path, postgres_url):
        command = Command(tmp_path, "persistd", "--listen", "127.0.0.1:0", "--admin-port", "0")
        command.until_it_says("persistd starting")
        time.sleep(1)
        assert command.stopped(signal.SIGTERM) == 0
        assert "Traceback" not in command.said


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("append", "acme/events"), id="append"),
        pytest.param(("gc",), id="gc"),
        pytest.param(("compact", "acme/events"), id="compact"),
        pytest.param(("journals",), id="journals"),
    ],
)
def test_a_command_that_waits_for_a_locked_store_ends_when_it_is_stopped(
    tmp_path: Path, arguments: tuple[str, ...], postgres_url: str
) -> None:
    with postgres_consensus(tmp_path, postgres_url) as what:
        command = Command(tmp_path, *arguments)
        command.until_it_says(what)
        assert command.stopped() == 128 + signal.SIGINT
        assert "Traceback" not in command.said
        assert command.said.splitlines()[-1].startswith("penstock: stopped; ")


_DROPPED = """
import ctypes, signal, time
from penstock.cli.stopping import stops

stops.own_process()
interrupted = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
failed = ctypes.CFUNCTYPE(None)(lambda: 1 / 0)
try:
    failed()
    interrupted()
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_native_code_drops_is_not_lost() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _DROPPED], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == "interrupted\n"
    assert "KeyboardInterrupt" not in ran.stderr
    assert "ZeroDivisionError" in ran.stderr, "other errors are shown as before"


@pytest.mark.parametrize("after_s", [0.15, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        pytest.param(("check", "large.yaml"), "nothing was changed", id="check"),
        pytest.param(("apply", "large.yaml", "--yes"), "applied", id="apply"),
        pytest.param(("test", "large.yaml"), "nothing was changed", id="test"),
    ],
)
def test_a_command_says_at_any_moment_what_became_of_it(
    tmp_path: Path, arguments: tuple[str, ...], outcome: str, after_s: float
) -> None:
    many = {f"acme/events{n}": COLLECTIONS["acme/events"] for n in range(800)}
    (tmp_path / "large.yaml").write_text(json.dumps({"collections": many}))
    command = Command(tmp_path, *arguments)
    time.sleep(after_s)
    code = command.stopped()
    assert "Traceback" not in command.said
    if code == -signal.SIGINT:
        return  # before Python could listen: nothing was begun
    last = command.said.splitlines()[-1] if command.said else ""
    if code == 128 + signal.SIGINT:
        assert last.startswith("penstock: stopped; ")
        assert outcome in last or "nothing was begun" in last
    else:
        assert code == 0, "it was done"
