"""`penstock run`, `preview` and `task`, as people run them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from penstock import wall_clock
from penstock.cli.main import app
from penstock.connectors.sqlite.sink import Sqlite
from penstock.model.clock import Clock, duration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CATALOG = """
collections:
  acme/events:
    key: [/account]
    schema:
      type: object
      required: [account]
      additionalProperties: false
      reduce: {strategy: merge}
      properties:
        account: {type: integer}
        amount: {type: integer, reduce: {strategy: sum}}
        note: {type: string}
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings:
      - {source: acme/events, resource: {table: events}}
  acme/broken:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: no/such/place.db}}}
    bindings:
      - {source: acme/events, resource: {table: events}}
"""


def penstock(*arguments: str, cwd: Path, stdin: str | None = None) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments), input=stdin)


def append(cwd: Path, start: int, count: int) -> None:
    lines = (
        json.dumps({"account": i % 3, "amount": i, "note": f"n{i}"})
        for i in range(start, start + count)
    )
    assert penstock("append", "acme/events", cwd=cwd, stdin="\n".join(lines)).exit_code == 0


def table(cwd: Path) -> dict[int, tuple[int, str]]:
    with contextlib.closing(sqlite3.connect(cwd / "views.db")) as database:
        rows = database.execute("SELECT account, amount, note FROM events")
        return {account: (amount, note) for account, amount, note in rows}


def expected(count: int) -> dict[int, tuple[int, str]]:
    return {
        account: (sum(range(account, count, 3)), f"n{max(range(account, count, 3))}")
        for account in range(3)
    }


@pytest.fixture
def here(tmp_path: Path, spark: SparkSession) -> Iterator[Path]:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    assert penstock("apply", "catalog.yaml", cwd=tmp_path).exit_code == 0
    yield tmp_path
    spark.catalog.clearCache()


@pytest.mark.spark
@pytest.mark.parametrize("between", [False, True], ids=["one run", "a run in between"])
def test_the_last_append_wins_whatever_the_clock_of_its_writer_says(
    here: Path, monkeypatch: pytest.MonkeyPatch, between: bool
) -> None:
    def note(text: str) -> None:
        line = json.dumps({"account": 1, "amount": 1, "note": text})
        assert penstock("append", "acme/events", cwd=here, stdin=line).exit_code == 0

    def run() -> None:
        assert penstock("run", "--task", "acme/views", cwd=here).exit_code == 0

    note("first")
    if between:
        run()
    now = wall_clock.now
    monkeypatch.setattr(wall_clock, "now", lambda: Clock(now() - duration(3600)))
    note("an hour behind, and last")
    monkeypatch.undo()
    run()
    assert table(here) == {1: (2, "an hour behind, and last")}
    read = penstock("read", "acme/events", cwd=here).stdout
    assert [json.loads(line)["note"] for line in read.splitlines()] == [
        "first",
        "an hour behind, and last",
    ]


@pytest.mark.spark
def test_a_run_stores_what_is_there_and_the_next_one_what_is_new(here: Path) -> None:
    append(here, 0, 30)
    first = penstock("run", "--task", "acme/views", "--json", cwd=here)
    assert first.exit_code == 0, first.stderr
    [told] = json.loads(first.stdout)["tasks"]
    assert (told["documents"], told["transactions"], told["stored"]) == (30, 1, 3)
    assert told["jobs_per_transaction_max"] <= 2
    assert json.loads(first.stdout)["peak_rss_bytes"] > 0
    assert json.loads(first.stdout)["peak_rss_spark_bytes"] > 0
    assert table(here) == expected(30)

    append(here, 30, 30)
    second = penstock("run", "--task", "acme/views", cwd=here)
    assert "30 documents in 1 transaction, 3 rows stored" in second.stdout
    assert "acme/views: transaction 1: 30 documents" in second.stderr
    assert table(here) == expected(60)

    third = penstock("run", "--task", "acme/views", cwd=here)
    assert (third.exit_code, third.stdout) == (0, "acme/views: nothing new\n")

    stats = penstock("read", "ops/stats", cwd=here)
    counts = [json.loads(line)["materialize"]["acme/events"] for line in stats.stdout.splitlines()]
    assert [each["right"]["docsTotal"] for each in counts] == [30, 30]


@pytest.mark.spark
def test_a_task_that_fails_does_not_stop_another(here: Path) -> None:
    append(here, 0, 9)
    done = penstock("run", cwd=here)
    assert done.exit_code == 1
    assert "acme/broken: failed" in done.stderr
    assert "no/such/place.db" in done.stderr
    assert "Traceback" not in done.output
    assert "acme/views: 9 documents" in done.stdout
    assert table(here) == expected(9)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("run", "--task", "acme/view"), "there is no task acme/view", id="task"),
        pytest.param(("run", "--timeout", "soon"), "not a duration", id="timeout"),
        pytest.param(("task", "close-now", "acme/x"), "there is no task acme/x", id="close-now"),
        pytest.param(
            ("preview", "--source", "catalog.yaml"), "choose one with --name", id="no name"
        ),
        pytest.param(
            ("preview", "--source", "catalog.yaml", "--name", "x"),
            "there is no task x",
            id="name",
        ),
        pytest.param(
            ("preview", "--source", "catalog.yaml", "--sessions", "2,x"), "sessions", id="sessions"
        ),
    ],
)
def test_a_mistake_is_explained(here: Path, arguments: tuple[str, ...], said: str) -> None:
    done = penstock(*arguments, cwd=here)
    assert done.exit_code in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.spark
def test_closing_now_is_asked_of_a_task_that_is_there(here: Path) -> None:
    done = penstock("task", "close-now", "acme/views", cwd=here)
    assert (done.exit_code, done.stderr) == (0, "requested: acme/views closes its transaction\n")


def lines(done: Result) -> list[tuple[str, Any]]:
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def previewed(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, tuple[int, str]]]:
    """What the tables of previews held at their ends, looked at before they are removed."""
    seen: list[dict[int, tuple[int, str]]] = []
    real = Sqlite.preview

    @contextlib.contextmanager
    def watched(self: Sqlite, paths: Any) -> Iterator[Sqlite]:  # noqa: ANN401
        with real(self, paths) as connector:
            yield connector
            [file] = [
                path
                for path in Path.cwd().glob("views.db.preview-*")
                if not path.suffix.endswith((".lock", ".staging"))
                and not path.name.endswith(("-wal", "-shm"))
            ]
            with contextlib.closing(sqlite3.connect(file)) as database:
                rows = database.execute("SELECT account, amount, note FROM events")
                seen.append({account: (amount, note) for account, amount, note in rows})

    monkeypatch.setattr(Sqlite, "preview", watched)
    return seen


@pytest.mark.spark
def test_a_preview_of_several_sessions_ends_where_one_run_would(
    here: Path, previewed: list[dict[int, tuple[int, str]]]
) -> None:
    for start in range(0, 12, 3):
        append(here, start, 3)
    done = penstock(
        *("preview", "--source", "catalog.yaml", "--name", "acme/views", "--sessions", "1,1"),
        *("--shards", "3", "--timeout", "60s", "--output-state", "--output-apply"),
        cwd=here,
    )
    assert done.exit_code == 0, done.stderr
    kinds = [kind for kind, _ in lines(done)]
    assert kinds.count("applied") == 2, "each session applies"
    assert kinds[0] == "applied"
    first = lines(done)[0][1]
    assert first["image"] == "penstock/materialize-sqlite"
    assert kinds.count("connectorState") >= 1
    assert "created" in first["action"]
    assert previewed == [expected(12)]
    assert not list(here.glob("views.db*")), "nothing is left of it"
    assert not penstock("journals", "ops", cwd=here).stdout.count("ops/stats"), "nothing published"


@pytest.mark.spark
def test_a_preview_forgets_its_state_and_leaves_the_task_alone(here: Path) -> None:
    append(here, 0, 6)
    asked = ("preview", "--source", "catalog.yaml", "--name", "acme/views", "--sessions", "1")
    for _ in range(2):
        tried = penstock(*asked, "--timeout", "60s", "--output-state", cwd=here)
        assert (tried.exit_code, tried.stdout) == (0, '["connectorState",[]]\n'), tried.stderr
    run = penstock("run", "--task", "acme/views", cwd=here)
    assert "6 documents in 1 transaction" in run.stdout
    assert table(here) == expected(6)
    append(here, 6, 3)
    for _ in range(2):
        assert penstock(*asked, "--timeout", "60s", cwd=here).exit_code == 0
        assert table(here) == expected(6)
    run = penstock("run", "--task", "acme/views", cwd=here)
    assert "3 documents in 1 transaction" in run.stdout
    assert table(here) == expected(9)
    assert not list(here.glob("*preview*"))


@pytest.mark.spark
def test_a_preview_calls_no_webhook_and_an_error_leaves_nothing(here: Path) -> None:
    append(here, 0, 3)
    hook = {"url": "http://127.0.0.1:9/", "payloadTemplate": "{}", "maxAttempts": 1}
    task: dict[str, Any] = yaml.safe_load(CATALOG)
    task["materializations"]["acme/views"]["triggers"] = {"config": [hook]}
    (here / "hooked.yaml").write_text(yaml.safe_dump(task))
    asked = ("--name", "acme/views", "--sessions", "1", "--timeout", "60s")
    done = penstock("preview", "--source", "hooked.yaml", *asked, cwd=here)
    assert done.exit_code == 0, done.stderr
    task["collections"]["acme/events"]["schema"]["properties"]["note"] = {"type": "integer"}
    (here / "wrong.yaml").write_text(yaml.safe_dump(task))
    done = penstock("preview", "--source", "wrong.yaml", *asked, cwd=here)
    assert done.exit_code != 0
    assert not list(here.glob("views.db*"))
