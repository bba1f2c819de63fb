"""Endpoints that make a session wait: it can be asked for what, interrupted, and succeeded."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest

from connectors.places import SECRET, VARIABLE, PostgresPlace, SqlitePlace
from penstock import failpoints
from penstock.connectors.postgres.dialect import PostgresDialect
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import FencedEndpoint
from penstock.testing.postgres import PostgresServer
from penstock.testing.sink_harness import Bind, SinkRun, merging_schema, start

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(180)]

SOON_S = 20.0
SUMS = Bind(schema=merging_schema(n={"type": "integer", "reduce": {"strategy": "sum"}}))


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)


@pytest.fixture
def place(tmp_path: Path, postgres: PostgresServer) -> Iterator[PostgresPlace]:
    made = PostgresPlace(tmp_path, postgres.url())
    yield made
    for run in made.runs:
        run.close()


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def interrupted(run: SinkRun, future: Future[Any]) -> BaseException | None:
    """Interrupt it as a leader does: until it has ended."""
    deadline = time.monotonic() + SOON_S
    while not future.done() and time.monotonic() < deadline:
        run.built.connector.interrupt()
        time.sleep(0.2)
    assert future.done(), "an interrupted call ends"
    return future.exception()


def waits_for(run: SinkRun, future: Future[Any]) -> str:
    deadline = time.monotonic() + SOON_S
    while (found := run.built.connector.waits_for()) is None:
        assert not future.done(), future.exception()
        assert time.monotonic() < deadline, "no call waits"
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "lock",
    [
        pytest.param("LOCK TABLE {role}.t", id="table"),
        pytest.param("UPDATE {role}.t SET n = n WHERE k = 1", id="row"),
    ],
)
def test_postgres_says_who_holds_the_lock_and_the_commit_can_be_interrupted(
    place: PostgresPlace, lock: str
) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    assert run.built.connector.waits_for() is None
    with psycopg.connect(place.admin_url) as other:
        other.execute(lock.format(role=place.role).encode())
        commit = in_thread(lambda: run.transaction([{"k": 1, "n": 1}]))
        found = waits_for(run, commit)
        assert f"a lock on table t held by pid {other.info.backend_pid}" in found
        error = interrupted(run, commit)
        assert isinstance(error, ConnectorError)
        assert error.transient
        other.rollback()
    assert place.rows() == [{"k": 1, "n": 1}]
    start(place, SUMS, epoch=2, last=run).transaction([{"k": 1, "n": 1}])
    assert place.rows() == [{"k": 1, "n": 2}]


def test_a_commit_waits_for_a_lock_that_is_released(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for longer than one wait may last: it is tried again."""
    impatient = PostgresDialect.begin.replace("'15s'", "'500ms'")
    assert impatient != PostgresDialect.begin
    monkeypatch.setattr(PostgresDialect, "begin", impatient)
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    with psycopg.connect(place.admin_url) as other:
        other.execute(f"LOCK TABLE {place.role}.t".encode())
        commit = in_thread(lambda: run.transaction([{"k": 1, "n": 1}]))
        time.sleep(0.8)
        assert not commit.done()
        other.rollback()
    commit.result(SOON_S)
    assert place.rows() == [{"k": 1, "n": 2}]
    with psycopg.connect(place.admin_url) as other:
        other.execute(f"LOCK TABLE {place.role}.t".encode())
        with pytest.raises(ConnectorError, match="lock timeout") as refused:
            run.transaction([{"k": 1, "n": 1}])
        assert refused.value.transient
        assert "pg_blocking_pids" in str(refused.value)


def test_a_leader_that_is_paused_inside_of_a_commit_does_not_block_its_successor(
    place: PostgresPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends its transaction; when it goes on, it finds that it was succeeded."""
    first = start(place, SUMS, epoch=1)
    first.transaction([{"k": 1, "n": 1}])
    paused, go_on, hit = threading.Event(), threading.Event(), failpoints.hit

    def pause(name: str) -> None:
        if name == "postgres.before-commit" and not paused.is_set():
            paused.set()
            go_on.wait()
        hit(name)

    monkeypatch.setattr(failpoints, "hit", pause)
    commit = in_thread(lambda: first.transaction([{"k": 1, "n": 10}]))
    assert paused.wait(SOON_S)
    second = in_thread(lambda: start(place, SUMS, epoch=2, last=first))
    try:
        run = second.result(2 * SOON_S)
    finally:
        go_on.set()
    assert isinstance(commit.exception(SOON_S), FencedEndpoint)
    run.transaction([{"k": 1, "n": 100}])
    assert place.rows() == [{"k": 1, "n": 101}]


def test_the_connection_of_a_server_that_does_not_answer_is_shut(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    place = PostgresPlace(tmp_path, own_postgres.url())
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    assert own_postgres.process is not None
    group = own_postgres.process.pid
    backend = run.session._connection.info.backend_pid  # type: ignore[attr-defined]
    os.kill(backend, signal.SIGSTOP)
    os.killpg(group, signal.SIGSTOP)
    try:
        commit = in_thread(lambda: run.transaction([{"k": 1, "n": 1}]))
        time.sleep(0.5)
        deadline = time.monotonic() + SOON_S
        while not commit.done() and time.monotonic() < deadline:
            run.built.connector.interrupt()
            time.sleep(0.1)
        assert isinstance(commit.exception(0), ConnectorError)
    finally:
        os.killpg(group, signal.SIGCONT)
        os.kill(backend, signal.SIGCONT)
    run.close()


def test_sqlite_says_what_it_waits_for_and_can_be_interrupted(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    run = start(place, SUMS, busyTimeout=600)
    run.transaction([{"k": 1, "n": 1}])
    path = place.config["path"]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        commit = in_thread(lambda: run.transaction([{"k": 1, "n": 1}]))
        assert waits_for(run, commit) == f"another process that writes to {path}"
        error = interrupted(run, commit)
        assert isinstance(error, ConnectorError)
        assert error.transient
        other.execute("ROLLBACK")
    run.close()
    again = start(place, SUMS, epoch=2, last=run)
    again.transaction([{"k": 1, "n": 1}])
    assert place.rows() == [{"k": 1, "n": 2}]
    again.close()


def test_sqlite_waits_for_busy_timeout_and_no_longer(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    run = start(place, SUMS, busyTimeout=1)
    path = place.config["path"]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(ConnectorError, match="locked"):
            run.transaction([{"k": 1, "n": 1}])
        assert time.monotonic() - began > 0.9
        commit = in_thread(lambda: run.transaction([{"k": 1, "n": 1}]))
        waits_for(run, commit)
        other.execute("ROLLBACK")
    commit.result(SOON_S)
    assert place.rows() == [{"k": 1, "n": 1}]
    run.close()
