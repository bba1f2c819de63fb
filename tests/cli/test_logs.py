"""`penstock logs`, and what a run shows of tasks that fail: as real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.timeout(300)

SOON_S = 120.0

EVENTS = {
    "key": ["/id"],
    "schema": {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}},
}


def capture(path: str) -> dict[str, object]:
    return {
        "endpoint": {"connector": {"image": "penstock/source-files", "config": {"path": path}}},
        "bindings": [{"resource": {"path": "*.jsonl"}, "target": "acme/events"}],
    }


def materialization(image: str, **config: object) -> dict[str, object]:
    return {
        "endpoint": {"connector": {"image": f"penstock/materialize-{image}", "config": config}},
        "bindings": [{"source": "acme/events", "resource": {"table": "events"}}],
    }


def derived(query: str) -> dict[str, object]:
    transform = {"name": "all", "source": "acme/events", "shuffle": "any", "lambda": query}
    return {**EVENTS, "derive": {"using": {"sqlite": {}}, "transforms": [transform]}}


def penstock(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        cwd=here,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )


def applied(here: Path, **catalog: object) -> Path:
    (here / "catalog.yaml").write_text(yaml.safe_dump(catalog))
    done = penstock(here, "apply", "catalog.yaml")
    assert done.returncode == 0, done.stderr
    return here


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of which a task of each kind failed at its very first start, and what it printed."""
    here = tmp_path_factory.mktemp("failed")
    (here / "files").mkdir()
    (here / "files" / "1.jsonl").write_text('{"id": "not a number"}\n')
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    applied(
        here,
        collections={"acme/events": EVENTS, "acme/derived": derived("select $id")},
        captures={"acme/files": capture("files")},
        materializations={
            "acme/pg": materialization("postgres", address=address, database="d", user="u"),
            "acme/unknown": materialization(
                "postgres", address="nosuch.invalid:5432", database="d", user="u"
            ),
            "acme/good": materialization("sqlite", path="good.db"),
        },
    )
    began = time.monotonic()
    done = penstock(here, "run")
    assert time.monotonic() - began < SOON_S
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    return here, done.stderr + done.stdout


def test_what_failed_is_said_at_once_and_other_tasks_finish(failed: tuple[Path, str]) -> None:
    _, said = failed
    at_once = said.index("acme/files: failed: nothing was captured")
    assert at_once < said.rindex("trying again"), "others are still tried"
    assert "acme/pg: failed: PostgreSQL does not listen there" in said
    assert "acme/unknown: failed: the host of `address` is not known" in said
    assert "acme/good: nothing new" in said


@pytest.mark.parametrize(
    ("task", "message", "remedy"),
    [
        ("acme/pg", "PostgreSQL does not listen there", "start it, or correct `address`"),
        ("acme/unknown", "the host of `address` is not known", "check its spelling"),
        ("acme/files", "1.jsonl", ""),
    ],
    ids=["closed port", "unknown host", "capture"],
)
def test_the_log_of_a_task_that_never_ran_says_why(
    failed: tuple[Path, str], task: str, message: str, remedy: str
) -> None:
    shown = penstock(failed[0], "logs", task, "--level", "error")
    assert shown.returncode == 0, shown.stderr
    assert message in shown.stdout
    assert remedy in shown.stdout
    assert "warning" not in shown.stdout
    everything = penstock(failed[0], "logs", task, "--json")
    records = [json.loads(line) for line in everything.stdout.splitlines()]
    assert {record["task"] for record in records} == {task}
    assert records[-1]["level"] == "error"
    assert message in records[-1]["message"]


def test_levels_and_times_select(failed: tuple[Path, str]) -> None:
    here, _ = failed
    warnings = penstock(here, "logs", "acme/pg", "--level", "warn").stdout
    assert "; trying again" in warnings
    assert len(penstock(here, "logs", "acme/pg", "--since", "1h").stdout.splitlines()) == len(
        penstock(here, "logs", "acme/pg").stdout.splitlines()
    )
    none = penstock(here, "logs", "acme/pg", "--since", "2100-01-01T00:00:00Z")
    assert (none.returncode, none.stdout) == (0, "")
    assert "acme/pg has logged nothing" in none.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("acme/pgg",), 1, 'did you mean "acme/pg"?'),
        (("zzz",), 1, "known: "),
        (("acme/pg", "--level", "loud"), 2, "is not a level"),
        (("acme/pg", "--since", "soon"), 2, "not a duration"),
    ],
)
def test_a_mistake_is_explained(
    failed: tuple[Path, str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = penstock(failed[0], "logs", *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_following_shows_what_comes(tmp_path: Path) -> None:
    here = applied(
        tmp_path,
        collections={"acme/events": EVENTS},
        captures={"acme/files": capture("missing")},
    )
    follows = subprocess.Popen(
        [sys.executable, "-m", "penstock", "logs", "acme/files", "--follow"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert penstock(here, "run").returncode == 1
        assert follows.stdout is not None
        assert "files cannot be listed" in follows.stdout.readline()
    finally:
        follows.terminate()
        _, said = follows.communicate(timeout=SOON_S)
    assert "Traceback" not in said


def test_a_renamed_task_keeps_its_log(tmp_path: Path) -> None:
    events = {"acme/events": EVENTS}
    here = applied(tmp_path, collections=events, captures={"acme/files": capture("missing")})
    assert penstock(here, "run").returncode == 1
    renamed = {**capture("missing"), "renamedFrom": "acme/files"}
    applied(tmp_path, collections=events, captures={"acme/inbox": renamed})
    found = penstock(here, "logs", "acme/inbox")
    assert found.returncode == 0, found.stderr
    assert "files cannot be listed" in found.stdout
