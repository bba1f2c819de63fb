"""`penstock up` as a process, with Spark: catalogs change, tasks fail, signals and kill -9 come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.state import ClusterMachine, ClusterState, log_key
from penstock.cluster.unified import MAIN
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import load
from penstock.settings import sqlite_url
from support.commands import SOON_S, Command, done
from support.deployments import EVENTS, capture, write_documents

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

LATER_S = 120.0
"""Until something has happened that takes a few seconds; generous, as the machine is busy."""


def counting(**tables: str) -> dict[str, Any]:
    """Captured events, counted by a derivation, stored in tables: each of a name, from a source."""
    count = {"type": "integer", "reduce": {"strategy": "sum"}}
    total = {
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
    return {
        "collections": {"acme/events": EVENTS, "acme/totals": total},
        "captures": {"acme/files": capture("events", {})},
        "materializations": {
            f"acme/to-{table}": {
                "endpoint": {
                    "connector": {
                        "image": "penstock/materialize-sqlite",
                        "config": {"path": f"{table}.db", "busyTimeout": 600},
                    }
                },
                "bindings": [{"source": source, "resource": {"table": table}}],
            }
            for table, source in tables.items()
        },
    }


def write_catalog(directory: Path, catalog: dict[str, Any]) -> None:
    (directory / "catalog.yaml").write_text(json.dumps(catalog))


def rows(directory: Path, table: str) -> list[tuple[Any, ...]]:
    file = directory / f"{table}.db"
    if not file.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        try:
            names = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
            kept = ", ".join(
                name for name in names if name not in ("flow_document", "flow_published_at")
            )
            return database.execute(f"SELECT {kept} FROM {table} ORDER BY 1").fetchall()  # noqa: S608
        except sqlite3.OperationalError:
            return []


def until(is_so: Callable[[], bool], up: Command) -> None:
    deadline = time.monotonic() + LATER_S
    while not is_so():
        assert up.process.poll() is None, up.said
        assert time.monotonic() < deadline, up.said
        time.sleep(0.05)


async def cluster_state(directory: Path) -> ClusterState:
    store = await open_consensus(sqlite_url(directory / ".penstock" / "consensus.db"))
    try:
        return (await load(store, log_key(MAIN), ClusterMachine())).state
    finally:
        await store.close()


def totals_of(ids: range) -> dict[int, tuple[int, int]]:
    return {
        digit: (len(found), sum(found))
        for digit in range(10)
        if (found := [each for each in ids if each % 10 == digit])
    }


def stored_totals(directory: Path) -> dict[int, tuple[int, int]]:
    return {digit: (count, total) for digit, count, total in rows(directory, "totals")}


@contextlib.contextmanager
def running(directory: Path, *arguments: str) -> Iterator[Command]:
    up = Command(directory, "up", *arguments)
    try:
        yield up
    finally:
        up.process.kill()
        up.process.wait()


def said_by(directory: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=LATER_S,
    )
    return done.returncode, done.stderr


def test_a_catalog_that_changes_while_everything_runs(tmp_path: Path) -> None:
    """Documents flow through; only what changed restarts; a bad task stops no other."""
    write_documents(tmp_path, "events", range(100))
    write_catalog(tmp_path, counting(totals="acme/totals"))
    with running(tmp_path, "catalog.yaml") as up:
        until(lambda: stored_totals(tmp_path) == totals_of(range(100)), up)

        # Nothing of this process is in the way of others, which say what is to be known.
        code, said = said_by(tmp_path, "up")
        assert code == 1
        assert f"process {up.process.pid}" in said
        code, said = said_by(tmp_path, "run")
        assert code == 1
        assert "penstock up runs acme/files and 2 more" in said
        done(tmp_path, "append", "acme/events", stdin=b'{"id": 100}\n')
        until(lambda: stored_totals(tmp_path) == totals_of(range(101)), up)

        # A second table is added. Its endpoint is a directory: the task fails, and no other does.
        (tmp_path / "bad.db").mkdir()
        write_catalog(
            tmp_path, counting(totals="acme/totals", events="acme/events", bad="acme/events")
        )
        before = len(up.said)
        done(tmp_path, "apply", "catalog.yaml")
        until(lambda: len(rows(tmp_path, "events")) == 101, up)
        up.until_it_says("acme/to-bad: failed, and is retried")
        write_documents(tmp_path, "events", range(101, 200))
        until(lambda: len(rows(tmp_path, "events")) == 200, up)
        until(lambda: stored_totals(tmp_path) == totals_of(range(200)), up)
        started = re.findall(r"(\S+): (?:starts|has changed)", up.said[before:])
        assert sorted(started) == ["acme/to-bad", "acme/to-events"]

        # What was wrong is mended elsewhere, and a catalog that cannot be applied changes nothing.
        (tmp_path / "bad.db").rmdir()
        (tmp_path / "broken.yaml").write_text("collections: {acme/events: {key: []}}")
        assert said_by(tmp_path, "apply", "broken.yaml")[0] == 1
        until(lambda: len(rows(tmp_path, "bad")) == 200, up)

        write_catalog(tmp_path, counting(totals="acme/totals"))
        done(tmp_path, "apply", "catalog.yaml")
        up.until_it_says("acme/to-events: is not wanted any more")
        write_documents(tmp_path, "events", range(200, 210))
        until(lambda: stored_totals(tmp_path) == totals_of(range(210)), up)
        assert len(rows(tmp_path, "events")) == 200
        assert up.stopped() == 0, up.said
        assert "finishing open transactions" in up.said


def test_killed_at_any_moment_and_started_again_it_is_exact(tmp_path: Path) -> None:
    write_catalog(tmp_path, counting(totals="acme/totals"))
    write_documents(tmp_path, "events", range(50))
    count = 50

    def all_stored() -> bool:
        return sum(each for each, _ in stored_totals(tmp_path).values()) >= count

    for kill in range(2):
        with running(tmp_path, "catalog.yaml") as up:
            until(all_stored, up)
            for _ in range(kill + 1):
                write_documents(tmp_path, "events", range(count, count + 37))
                count += 37
                time.sleep(0.13 * kill)
            up.process.kill()  # somewhere between a file and a table
    with running(tmp_path, "catalog.yaml") as up:
        until(all_stored, up)
        assert stored_totals(tmp_path) == totals_of(range(count))
        assert up.stopped(signal.SIGTERM) == 0, up.said
    state = asyncio.run(cluster_state(tmp_path))
    assert sorted(each.dataflow_id for each in state.objects.values()) == [1, 2, 3]
    assert state.next_id == 4  # as if nothing had been killed


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """The endpoint is locked by another process, for ever."""
    write_catalog(tmp_path, counting(totals="acme/totals"))
    write_documents(tmp_path, "events", range(10))
    with running(tmp_path, "catalog.yaml") as up:
        until(lambda: stored_totals(tmp_path) == totals_of(range(10)), up)
        with contextlib.closing(
            sqlite3.connect(tmp_path / "totals.db", isolation_level=None)
        ) as other:
            other.execute("BEGIN IMMEDIATE")
            write_documents(tmp_path, "events", range(10, 20))
            time.sleep(1)
            up.process.send_signal(signal.SIGINT)
            up.until_it_says("finishing open transactions")
            assert up.stopped() == 128 + signal.SIGINT
        assert stored_totals(tmp_path) == totals_of(range(10))


def test_a_terminal_has_a_table(tmp_path: Path) -> None:
    """80 columns and 24 lines: every line fits, and what is logged comes above it."""
    write_catalog(tmp_path, counting(totals="acme/totals"))
    write_documents(tmp_path, "events", range(1234))
    leader, follower = pty.openpty()
    environ = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "up", "catalog.yaml"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env=environ,
    )
    os.close(follower)
    seen = b""
    try:
        deadline = time.monotonic() + LATER_S
        while b"1,234" not in seen or not stored_totals(tmp_path):
            assert time.monotonic() < deadline, seen.decode()
            seen += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # its end is an error of the terminal
            while chunk := os.read(leader, 65536):
                seen += chunk
        assert process.wait(SOON_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    rows_shown = [line for line in re.split(r"[\r\n]+", text) if line.startswith(("TASK", "acme/"))]
    assert any(
        re.match(r"TASK +KIND +STATE +DOCUMENTS +DOCS/S +COMMIT", line) for line in rows_shown
    )
    assert any(re.match(r"acme/files +capture +\w+ +1,234 ", line) for line in rows_shown)
    assert max(map(len, rows_shown)) <= 80
