"""What docs/backup.md says, done as it says: while others append, run, compact and collect."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import Result
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs/backup.md"
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
        append: {type: integer, reduce: {strategy: maximize}}
        text: {type: string}
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings:
      - {source: acme/events, resource: {table: events}, backfill: 0}
"""
PER_APPEND = 3


def command(*arguments: str, cwd: Path) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments))


def shell(heading: str) -> str:
    """The commands of a section of the page."""
    section = PAGE.read_text().partition(f"# {heading}\n")[2]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found, heading
    return found[1]


def do(heading: str, cwd: Path, **variables: str | Path) -> None:
    """Run the commands of a section, where `penstock` is ours."""
    ours = cwd / "bin"
    ours.mkdir(exist_ok=True)
    (ours / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    (ours / "penstock").chmod(0o755)
    given = {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        ["bash", "-euc", shell(heading)],
        cwd=cwd,
        env={**os.environ, "PATH": f"{ours}:{os.environ['PATH']}", **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def documents(number: int) -> list[dict[str, object]]:
    """An append, which is an object every other time, and inline otherwise."""
    text = secrets.token_hex(4096) if number % 2 else ""
    return [
        {"account": n % 4, "amount": number, "append": number, "text": text}
        for n in range(PER_APPEND)
    ]


def expected(appends: range) -> dict[int, int]:
    sums = Counter[int]()
    for number in appends:
        for document in documents(number):
            sums[document["account"]] += number  # type: ignore[index]
    return dict(sums)


def table(database: Path) -> dict[int, int]:
    with contextlib.closing(sqlite3.connect(database)) as opened:
        return dict(opened.execute("SELECT account, amount FROM events"))


def appends_in(cwd: Path, *options: str) -> range:
    """The appends that can be read, which must be whole, and all up to some."""
    read = command("read", "acme/events", *options, cwd=cwd)
    assert read.exit_code == 0, read.stderr
    counts = Counter(json.loads(line)["append"] for line in read.stdout.splitlines())
    assert set(counts.values()) <= {PER_APPEND}, "no append is there in part"
    assert set(counts) == set(range(len(counts))), "none is missing before one that is there"
    return range(len(counts))


class Busy:
    """A deployment that is appended to, compacted and collected, all the time."""

    def __init__(self, data: Path, consensus: str | None = None) -> None:
        self.acknowledged = self.quarantined = 0
        self._open = lambda: penstock.open(data, consensus=consensus)
        self._stop = threading.Event()
        options = ["--data", str(data), *(["--consensus", consensus] if consensus else [])]
        self._options, self._data = options, data

    @contextlib.contextmanager
    def at_work(self, *more: Callable[[penstock.Penstock], object]) -> Iterator[None]:
        with self._open() as opened, ThreadPoolExecutor(4) as pool:
            running = [
                pool.submit(self._repeat, work)
                for work in (
                    lambda: self.append(opened),
                    self._tidy,
                    *((lambda work=work: work(opened)) for work in more),  # type: ignore[misc]
                )
            ]
            try:
                yield
            finally:
                self._stop.set()
            for each in running:
                each.result()

    def reached(self, count: int) -> None:
        while not self._stop.is_set() and (self.acknowledged < count or not self.quarantined):
            time.sleep(0.01)

    def _repeat(self, work: Callable[[], object]) -> None:
        try:
            while not self._stop.is_set():
                work()
        finally:
            self._stop.set()

    def append(self, opened: penstock.Penstock) -> None:
        opened.append("acme/events", documents(self.acknowledged))
        self.acknowledged += 1

    def _tidy(self) -> None:
        """Compact and collect as if hours had passed: also what is about to be named is garbage."""
        blobs = self._data / "blobs"
        for file in [*(blobs / "acme").rglob("*.parquet"), *(blobs / "=replaced").rglob("*")]:
            with contextlib.suppress(FileNotFoundError):
                os.utime(file, (time.time() - 3 * 3600,) * 2)
        for arguments in (["compact"], ["gc", "--grace", "2h", "--json"]):
            done = CliRunner().invoke(app, [*arguments, *self._options])
            assert done.exit_code == 0, done.stderr
        self.quarantined += len(json.loads(done.stdout)["quarantined"])


def backed_up(here: Path, busy: Busy, heading: str, **variables: str | Path) -> int:
    """A backup in the midst of things; how many appends were acknowledged before it began."""
    busy.reached(10)
    before = busy.acknowledged
    (here / "backup").mkdir()
    do(heading, here, DATA=here / "data", BACKUP=here / "backup", **variables)
    busy.reached(busy.acknowledged + 10)
    assert busy.quarantined, "garbage was collected beside it"
    return before


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    return tmp_path


AGAIN = """
  acme/again:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: again.db}}}
    bindings:
      - {source: acme/events, resource: {table: events}}
"""


@pytest.mark.spark
def test_a_restored_deployment_has_all_of_its_documents_and_runs(
    here: Path, spark: SparkSession
) -> None:
    data, elsewhere = here / "data", here / "elsewhere"
    elsewhere.mkdir()
    with contextlib.chdir(here):
        assert command("apply", "catalog.yaml", "--data", "data", cwd=here).exit_code == 0
        busy = Busy(data)
        with busy.at_work(lambda opened: opened.run()):
            before = backed_up(here, busy, "With SQLite")
        with penstock.open(data) as opened:
            opened.run()
    assert table(here / "views.db") == expected(range(busy.acknowledged))

    do("From SQLite", elsewhere, DATA=elsewhere / ".penstock", BACKUP=here / "backup")
    do("Then", elsewhere)
    appends = appends_in(elsewhere)
    assert before <= len(appends) < busy.acknowledged
    (elsewhere / "catalog.yaml").write_text(CATALOG + AGAIN)
    done = command("run", "catalog.yaml", "--task", "acme/again", cwd=elsewhere)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert table(elsewhere / "again.db") == expected(appends)
    with penstock.open(elsewhere / ".penstock") as opened:
        for number in range(len(appends), len(appends) + 4):
            opened.append("acme/events", documents(number))
    assert command("run", "--task", "acme/again", cwd=elsewhere).exit_code == 0
    assert table(elsewhere / "again.db") == expected(range(len(appends) + 4))
    assert appends_in(here, "--data", "data") == range(busy.acknowledged), "it goes on as before"
    spark.catalog.clearCache()


@pytest.mark.spark
@pytest.mark.parametrize(
    ("endpoint", "known"),
    [
        pytest.param("went on", "which this task does not know", id="ahead of the backup"),
        pytest.param("is new", "is gone, and acme/views had filled it", id="empty"),
    ],
)
def test_an_endpoint_that_does_not_fit_is_refused_and_filled_anew_by_a_backfill(
    here: Path, spark: SparkSession, endpoint: str, known: str
) -> None:
    assert command("apply", "catalog.yaml", "--data", "data", cwd=here).exit_code == 0
    (here / "backup").mkdir()
    for number in range(4):
        with penstock.open(here / "data") as opened:
            opened.append("acme/events", documents(number))
        if number % 2:
            done = command("run", "--data", "data", cwd=here)
            assert done.exit_code == 0, done.stdout + done.stderr
        if number == 1:
            do("With SQLite", here, DATA=here / "data", BACKUP=here / "backup")
    assert table(here / "views.db") == expected(range(4))
    do("From SQLite", here, DATA=here / "copy", BACKUP=here / "backup")
    do("Then", here, PENSTOCK_DATA="copy")
    if endpoint == "is new":
        (here / "views.db").unlink()
    refused = command("run", "--data", "copy", cwd=here)
    assert refused.exit_code == 1
    assert known in refused.stderr
    assert "backfill" in refused.stderr
    (here / "catalog.yaml").write_text(CATALOG.replace("backfill: 0", "backfill: 1"))
    done = command("run", "catalog.yaml", "--data", "copy", cwd=here)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert table(here / "views.db") == expected(range(2))
    spark.catalog.clearCache()


def test_a_consensus_store_in_postgres_is_restored_into_another_database(
    here: Path, postgres_url: str, postgres: object
) -> None:
    restored = postgres.create_database()  # type: ignore[attr-defined]
    there = ("--data", "data", "--consensus", postgres_url)
    assert command("apply", "catalog.yaml", *there, cwd=here).exit_code == 0
    busy = Busy(here / "data", postgres_url)
    with busy.at_work():
        before = backed_up(here, busy, "With PostgreSQL", CONSENSUS=postgres_url)
    where = {"DATA": here / "copy", "BACKUP": here / "backup", "CONSENSUS": restored}
    do("From PostgreSQL", here, **where)
    do("Then", here, PENSTOCK_DATA="copy", PENSTOCK_CONSENSUS=restored)
    copy = ("--data", "copy", "--consensus", restored)
    appends = appends_in(here, *copy)
    assert before <= len(appends) < busy.acknowledged
    with penstock.open(here / "copy", consensus=restored) as opened:
        opened.append("acme/events", documents(len(appends)))
    assert len(appends_in(here, *copy)) == len(appends) + 1
    assert appends_in(here, *there) == range(busy.acknowledged)


def test_objects_that_were_copied_before_the_snapshot_are_not_enough(here: Path) -> None:
    """Why the page insists on an order; and that what is missing is named."""
    data = here / "data"
    assert command("apply", "catalog.yaml", "--data", "data", cwd=here).exit_code == 0
    with penstock.open(data) as opened:
        for number in range(4):
            opened.append("acme/events", documents(number))
        vacuum, tar = shell("With SQLite").splitlines()
        (here / "backup").mkdir()
        for step in (tar, vacuum):
            subprocess.run(
                ["bash", "-euc", step],
                env={**os.environ, "DATA": str(data), "BACKUP": str(here / "backup")},
                check=True,
            )
            opened.append("acme/events", documents(5))
    do("From SQLite", here, DATA=here / "copy", BACKUP=here / "backup")
    taken = command("gc", "--take-over", "--data", "copy", cwd=here)
    assert taken.exit_code == 1
    assert len(taken.stdout.splitlines()) == 1
    assert "missing: 1 object named by journals" in taken.stderr


def test_the_page_names_commands_and_options_that_exist() -> None:
    text = PAGE.read_text()
    options = set(re.findall(r"penstock gc\s+(--[a-z-]+)", text))
    assert options == {"--take-over", "--restore"}
    shown = CliRunner().invoke(app, ["gc", "--help"], env={"COLUMNS": "200"}).stdout
    for option in (*options, "--quarantine"):
        assert option in shown
    assert "72 hours" in text
    assert "72h" in shown
