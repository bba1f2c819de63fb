"""`penstock status` and `penstock task`, as people run them: real processes, also killed ones."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import Result
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app

pytestmark = pytest.mark.timeout(300)

SOON_S = 60.0
CATALOG = """
collections:
  acme/events:
    key: [/account]
    schema: &schema
      type: object
      required: [account]
      properties: {account: {type: integer}}
  acme/copies:
    key: [/account]
    schema: *schema
    derive:
      using: {sqlite: {}}
      transforms: [{name: all, source: acme/events, shuffle: any, lambda: select $account}]
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings: [{source: acme/events, resource: {table: events}}]
"""


def cli(cwd: Path, *arguments: str, stdin: str | None = None) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments), input=stdin)


def state_of(cwd: Path, task: str) -> dict[str, Any]:
    result = cli(cwd, "status", task, "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def until(cwd: Path, task: str, state: str, text: str = "") -> dict[str, Any]:
    deadline = time.monotonic() + SOON_S
    while True:
        found = state_of(cwd, task)
        if found["state"] == state and text in found["sentence"]:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@pytest.fixture
def deployment(tmp_path: Path) -> Path:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    assert cli(tmp_path, "apply", "catalog.yaml").exit_code == 0
    return tmp_path


def append(cwd: Path, count: int) -> None:
    lines = "\n".join(json.dumps({"account": n}) for n in range(count))
    assert cli(cwd, "append", "acme/events", stdin=lines).exit_code == 0


@contextlib.contextmanager
def following(cwd: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Within this, another process runs the tasks; on and on."""
    log = cwd / f"stderr-{time.monotonic_ns()}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "up", *arguments],
            cwd=cwd,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def test_without_a_process_the_lag_is_known_and_what_to_do(deployment: Path) -> None:
    append(deployment, 3)
    result = cli(deployment, "status")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["TASK", "STATE", "DOCS", "BYTES", "LAG", "DOCS/S", "COMMIT", "KIND"]
    assert lines[1].startswith("acme/copies  not running     3 ")
    assert lines[2] == "    is not running: no process runs it; 3 documents wait"
    assert lines[3] == "    -> penstock up, or penstock run --task acme/copies"
    assert all(len(line) <= 80 for line in lines)
    found = state_of(deployment, "acme/views")
    assert (found["lag_documents"], found["lag_exact"], found["process"]) == (3, True, None)
    assert found["lag_bytes"] > 0
    assert found["lag_seconds"] > 0
    assert found["last_commit"] is None


def test_status_of_what_is_not_there(deployment: Path, tmp_path_factory: Any) -> None:  # noqa: ANN401
    result = cli(deployment, "status", "acme/nothing")
    assert result.exit_code == 1
    assert "there is no task acme/nothing" in result.stderr
    assert "acme/copies, acme/views" in result.stderr
    result = cli(tmp_path_factory.mktemp("empty"), "status")
    assert result.exit_code == 1
    assert "there is no deployment here yet" in result.stderr


def test_another_process_is_seen_and_missed_when_it_is_killed(deployment: Path) -> None:
    with following(deployment) as (process, _):
        found = until(deployment, "acme/views", "idle")
        assert f"process {process.pid} on " in found["process"]
        assert "last report" in cli(deployment, "status", "acme/views").stdout
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = until(deployment, "acme/views", "not running", f"process {process.pid} on ")
        assert "ended unexpectedly" in found["sentence"]
        assert found["since"] is not None
    with following(deployment) as (process, _):
        until(deployment, "acme/views", "idle")
        process.send_signal(signal.SIGTERM)
        process.wait(SOON_S)
    assert until(deployment, "acme/views", "not running", "no process runs it")["process"] is None


def test_a_suspended_process_is_not_heard_of(
    deployment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.reports.SILENT_S", 7.0)
    with following(deployment) as (process, _):
        until(deployment, "acme/views", "idle")
        process.send_signal(signal.SIGSTOP)
        until(deployment, "acme/views", "waiting", f"process {process.pid}")
        process.send_signal(signal.SIGCONT)
        until(deployment, "acme/views", "idle")


def test_a_task_is_stopped_and_started_again(deployment: Path) -> None:
    with following(deployment) as (process, log):
        until(deployment, "acme/views", "idle")
        result = cli(deployment, "task", "stop", "acme/views")
        assert result.exit_code == 0
        assert "penstock task start acme/views" in result.stderr
        found = until(deployment, "acme/views", "stopped", "was stopped by penstock task stop")
        assert found["fix"] == "penstock task start acme/views"
        until(deployment, "acme/copies", "idle")
        deadline = time.monotonic() + SOON_S
        while "acme/views: not run: it was stopped at" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert "is already stopped" in cli(deployment, "task", "stop", "acme/views").stderr
        assert process.poll() is None
        assert "may run again" in cli(deployment, "task", "start", "acme/views").stderr
        until(deployment, "acme/views", "idle")
    assert "was not stopped" in cli(deployment, "task", "start", "acme/views").stderr


def test_a_run_leaves_a_stopped_task_out(deployment: Path) -> None:
    assert cli(deployment, "task", "stop", "acme/views").exit_code == 0
    result = cli(deployment, "run")
    assert result.exit_code == 0, result.output
    assert "acme/views: stopped before a transaction" in result.stdout
    assert "acme/copies: nothing new" in result.stdout
    result = cli(deployment, "run", "--task", "acme/views")
    assert result.exit_code == 1
    assert "acme/views is stopped since" in result.stderr
    assert "penstock task start acme/views" in result.stderr


@pytest.mark.parametrize("command", ["stop", "start", "close-now", "delete"])
def test_a_task_that_is_not_there_cannot_be_controlled(deployment: Path, command: str) -> None:
    result = cli(deployment, "task", command, "acme/nothing")
    assert result.exit_code == 1
    assert "there is no task acme/nothing" in result.stderr
    assert "acme/views" in result.stderr


def test_deleting_needs_a_yes_says_what_stays_and_can_be_repeated(deployment: Path) -> None:
    append(deployment, 1)
    tried = cli(deployment, "task", "delete", "acme/views", "--dry-run")
    assert tried.exit_code == 0
    assert "materialization acme/views would be deleted" in tried.stderr
    refused = cli(deployment, "task", "delete", "acme/views")
    assert refused.exit_code == 1
    assert "it was not confirmed" in refused.stderr
    deleted = cli(deployment, "task", "delete", "acme/views", "--yes", "--json")
    assert deleted.exit_code == 0
    said = json.loads(deleted.stdout)
    assert said["kinds"] == ["materialization"]
    assert any("tables stay at the endpoint" in sentence for sentence in said["leaves"])
    assert any("catalog files still define it" in sentence for sentence in said["leaves"])
    assert "acme/views" not in cli(deployment, "status").stdout
    assert cli(deployment, "task", "delete", "acme/views", "--yes").exit_code == 1
    assert cli(deployment, "apply", "catalog.yaml").exit_code == 0
    found = state_of(deployment, "acme/views")
    assert (found["state"], found["lag_documents"]) == ("not running", 1), "not stopped, and new"


def test_deleting_a_derivation_leaves_its_collection(deployment: Path) -> None:
    assert cli(deployment, "task", "delete", "acme/copies", "--yes").exit_code == 0
    assert "acme/copies" not in cli(deployment, "status").stdout
    stdin = '{"account": 1}'
    assert cli(deployment, "append", "acme/copies", stdin=stdin).exit_code == 0, "a collection"


def test_a_task_that_runs_is_not_deleted(deployment: Path) -> None:
    with following(deployment) as (process, _):
        until(deployment, "acme/views", "idle")
        result = cli(deployment, "task", "delete", "acme/views", "--yes")
        assert result.exit_code == 1
        assert "acme/views runs, and is not deleted" in result.stderr
        assert f"process {process.pid}" in result.stderr
        cli(deployment, "task", "stop", "acme/views")
        deadline = time.monotonic() + SOON_S
        while cli(deployment, "task", "delete", "acme/views", "--yes").exit_code:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        until(deployment, "acme/copies", "idle")


def test_a_store_that_does_not_answer_is_the_answer(
    deployment: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.status.ANSWER_S", 3.0)
    consensus = ("--consensus", postgres_url)
    assert cli(deployment, "apply", "catalog.yaml", *consensus).exit_code == 0
    with psycopg.connect(postgres_url) as other:
        other.execute("LOCK TABLE penstock.consensus_meta")
        began = time.monotonic()
        result = cli(deployment, "status", *consensus)
        assert result.exit_code == 1
        assert "the consensus store does not answer" in result.stderr
        assert "penstock doctor" in result.stderr
        assert time.monotonic() - began < SOON_S
        other.rollback()


def test_what_tasks_do_is_served_on_loopback(deployment: Path) -> None:
    with following(deployment, "--admin-port", "0") as (_, log):
        until(deployment, "acme/views", "idle")
        (address,) = [
            line.removeprefix("state of tasks: ")
            for line in log.read_text().splitlines()
            if line.startswith("state of tasks: ")
        ]
        assert address.startswith("http://127.0.0.1:")

        def get(path: str) -> dict[str, Any]:
            with urllib.request.urlopen(address + path, timeout=10) as reply:  # noqa: S310
                found = json.load(reply)
                assert isinstance(found, dict)
                return found

        of_tasks = ["errors", "jobs", "tasks", "transactions"]
        of_log = ["commands", "dataflows", "frontiers", "operators", "sessions"]
        assert get("") == {"relations": sorted(of_tasks + of_log)}
        tasks = get("/tasks")
        assert {row["task"] for row in tasks["rows"]} == {"acme/views", "acme/copies"}
        assert tasks["truncated"] is False
        assert get("/tasks?limit=1")["truncated"] is True
        assert get("/transactions")["rows"] == []


def test_watching_prints_a_line_of_json_for_each_look(deployment: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "status", "--watch", "--json"],
        cwd=deployment,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SOON_S)
    assert [each["task"] for each in looks[1]] == ["acme/copies", "acme/views"]


def test_the_status_from_python(deployment: Path) -> None:
    append(deployment, 2)
    with penstock.open(data=deployment / ".penstock") as opened:
        found = {row.task: row for row in opened.status()}
    assert found["acme/views"].lag_docs == 2
    assert found["acme/views"].state == "not running"
    assert found["acme/views"].waits_for is None
