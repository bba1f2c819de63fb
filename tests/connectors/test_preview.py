"""Previews, for every connector: what a run finds is as if there had been none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.places import (
    SECRET,
    VARIABLE,
    Place,
    PostgresPlace,
    SqlitePlace,
    merging,
    start,
)
from penstock.errors import UserError
from penstock.model.spec import Endpoint, Frozen
from penstock.runtime.connector import ConnectorError, Materialization
from penstock.testing.connector_suite import Bind, Run, built

SUMS = Bind(schema=merging(n={"type": "integer", "reduce": {"strategy": "sum"}}))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    monkeypatch.setenv(VARIABLE, SECRET)
    made: Place = (
        SqlitePlace(tmp_path)
        if request.param == "sqlite"
        else PostgresPlace(tmp_path, request.getfixturevalue("postgres").url())
    )
    yield made
    for run in made.runs:
        run.close()


def connector(place: Place) -> Materialization:
    endpoint = Endpoint(kind="connector", config=Frozen(place.config))
    return place.connect(endpoint, "materialization acme/views")


def paths(place: Place, *binds: Bind) -> list[tuple[str, ...]]:
    return [connector(place).path({"table": bind.table, **bind.resource}) for bind in binds]


def open_preview(place: Place, preview: Materialization, *binds: Bind, epoch: int = 1) -> Run:
    what = built(
        place.directory, binds, lambda *_: preview, config=place.config, name="acme/views/preview"
    )
    return Run.start(what, epoch=epoch)


def everything(place: Place) -> Any:  # noqa: ANN401
    """All that a run would find."""
    if isinstance(place, PostgresPlace):
        tables = place.execute(
            "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1"
        )
        return [(name, place.rows(name)) for (name,) in tables]
    assert isinstance(place, SqlitePlace)
    if not Path(place.config["path"]).exists():
        return None
    return [
        (name, text, place.rows(name))
        for name, text in place.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'")
    ]


def test_a_preview_leaves_nothing_and_a_run_finds_nothing_of_it(place: Place) -> None:
    before = everything(place)
    with connector(place).preview(paths(place, SUMS)) as preview:
        run = open_preview(place, preview, SUMS)
        assert run.session.checkpoint is None
        run.transaction([{"k": 1, "n": 1}])
        run.transaction([{"k": 1, "n": 2}])
        run.close()
        again = open_preview(place, preview, SUMS, epoch=2)
        assert again.session.checkpoint == b"1/2", "sessions of a preview share its state"
        again.close()
        assert place.previews()
        assert everything(place) == before
    assert place.previews() == []
    real = start(place, SUMS)
    assert real.session.checkpoint is None
    real.transaction([{"k": 1, "n": 5}])
    assert [(row["k"], row["n"]) for row in place.rows()] == [(1, 5)]


def test_a_preview_after_a_run_changes_none_of_its_rows(place: Place) -> None:
    run = start(place, SUMS)
    run.transaction([{"k": 1, "n": 1}])
    before = everything(place)
    for _ in range(2):
        with connector(place).preview(paths(place, SUMS)) as preview:
            tried = open_preview(place, preview, SUMS)
            # It starts over, in a table that is empty: nothing is loaded, nothing is added to.
            tried.transaction([{"k": 1, "n": 100}, {"k": 2, "n": 1}])
            assert everything(place) == before
            tried.close()
    assert (everything(place), place.previews()) == (before, [])
    run.transaction([{"k": 1, "n": 1}])
    assert [(row["k"], row["n"]) for row in place.rows()] == [(1, 2)]


def test_documents_are_loaded_from_the_tables_of_the_preview(place: Place) -> None:
    lists = Bind(
        schema=merging(
            v={"type": "array", "items": {"type": "integer"}, "reduce": {"strategy": "append"}}
        )
    )
    run = start(place, lists)
    run.transaction([{"k": 1, "v": [100]}])
    with connector(place).preview(paths(place, lists)) as preview:
        tried = open_preview(place, preview, lists)
        tried.transaction([{"k": 1, "v": [1]}])
        tried.transaction([{"k": 1, "v": [2]}])
        assert tried.load(0, [{"k": 1}]) == [{"k": 1, "v": [1, 2]}]
        tried.close()


def test_many_rows_are_staged_and_their_tables_removed(place: Place) -> None:
    big = Bind(schema=merging(v={"type": "string"}))
    with connector(place).preview(paths(place, big)) as preview:
        run = open_preview(place, preview, big)
        run.stage([{"k": at, "v": "x" * 2000} for at in range(1000)])  # and never committed
        run.close()
    assert place.previews() == []


def test_previews_at_once_are_apart(place: Place) -> None:
    first = connector(place).preview(paths(place, SUMS))
    second = connector(place).preview(paths(place, SUMS))
    with first as one:
        run = open_preview(place, one, SUMS)
        run.transaction([{"k": 1, "n": 1}])
        with second as two:
            other = open_preview(place, two, SUMS)
            assert other.session.checkpoint is None
            other.transaction([{"k": 1, "n": 10}])
            other.close()
        run.transaction([{"k": 1, "n": 1}])
        run.close()
        assert place.previews(), "the end of one removes nothing of the other"
    assert place.previews() == []


def test_a_preview_shows_what_a_run_would_do_to_a_table_that_is_there(place: Place) -> None:
    start(place, SUMS).close()
    more = Bind(
        schema=merging(n=SUMS.schema["properties"]["n"], added={"type": "boolean"}), table="t"
    )
    with connector(place).preview(paths(place, more)) as preview:
        what = built(place.directory, [more], lambda *_: preview, config=place.config, name="x/y")
        said = what.connector.apply(what.task, None, None, epoch=1).description
    assert "added" in said
    assert said.replace('"', "").endswith("t.added")
    assert "preview" not in said
    assert "added" not in place.columns()
    texts = Bind(schema=merging(n={"type": "string"}))
    with connector(place).preview(paths(place, texts)) as preview:
        with pytest.raises(UserError, match="raise `backfill`"):
            open_preview(place, preview, texts)
        again = Bind(schema=texts.schema, backfill=1)
        run = open_preview(place, preview, again)
        run.transaction([{"k": 1, "n": "one"}])
        run.close()
    assert place.previews() == []


def test_what_is_not_a_table_is_refused_as_in_a_run(place: Place) -> None:
    place.execute("CREATE VIEW t AS SELECT 1 AS k, 2 AS n")
    refused = pytest.raises(ConnectorError, match="is not a table")
    with refused, connector(place).preview(paths(place, SUMS)) as preview:
        open_preview(place, preview, SUMS)
    assert place.previews() == []


def test_an_error_removes_the_tables_too(place: Place) -> None:
    def fail() -> None:
        with connector(place).preview(paths(place, SUMS)) as preview:
            run = open_preview(place, preview, SUMS)
            run.transaction([{"k": 1, "n": 1}])
            run.close()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert place.previews() == []


KILLED = """
import json, sys, time
from connectors.places import merging
from connectors.test_preview import SUMS
from penstock.testing.connector_suite import Run, built
from penstock.connectors.postgres import Postgres
from penstock.connectors.sqlite import Sqlite
from pathlib import Path
directory, kind, config = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
connector = {"sqlite": Sqlite, "postgres": Postgres}[kind](config, where="x")
with connector.preview([connector.path({"table": "t"})]) as preview:
    what = built(directory, [SUMS], lambda *_: preview, config=config, name="acme/views/preview")
    run = Run.start(what, epoch=1)
    run.transaction([{"k": 1, "n": 1}])
    print("ready", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_preview_leaves_is_removed_by_the_next(place: Place) -> None:
    kind = "postgres" if isinstance(place, PostgresPlace) else "sqlite"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(place.directory), kind, json.dumps(place.config)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with connector(place).preview(paths(place, SUMS)):
            left = place.previews()
        theirs = [name for name in place.previews() if name in left]
        assert theirs, "it lives: nothing of it is removed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert [name for name in place.previews() if name in theirs]
    for _ in range(100):  # a server notices a lost client in a moment
        with connector(place).preview(paths(place, SUMS)):
            pass
        if not place.previews():
            break
    assert place.previews() == []
