"""`penstock apply`, as people run it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli.main import app

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}, total: {type: number}}
"""


def penstock(*arguments: str, cwd: Path) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    return tmp_path


def test_an_applied_catalog_is_recorded_and_its_changes_are_shown(here: Path) -> None:
    first = penstock("apply", "catalog.yaml", cwd=here)
    assert (first.exit_code, first.stderr) == (0, "1 added: the catalog is now version 1\n")
    heading, line = first.stdout.splitlines()
    assert heading.split() == ["CHANGE", "KIND", "NAME", "BEFORE", "AFTER"]
    assert line.split()[:4] == ["added", "collection", "acme/orders", "-"]
    again = penstock("apply", "catalog.yaml", cwd=here)
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr == "no changes: this catalog is version 1\n"


def test_a_dry_run_shows_and_does_nothing(here: Path) -> None:
    runs = [
        penstock("apply", "catalog.yaml", *options, "--json", cwd=here)
        for options in (["--dry-run"], ["--dry-run"], [])
    ]
    assert [run.exit_code for run in runs] == [0, 0, 0]
    dry, again, real = (json.loads(run.stdout) for run in runs)
    assert dry == again
    assert dry["dry_run"]
    assert dry["changes"] == real["changes"]
    [change] = real["changes"]
    assert len(change.pop("after")) == 32
    assert change == {
        "change": "added", "kind": "collection", "name": "acme/orders", "before": None,
    }  # fmt: skip
    assert (real["version"], real["dry_run"]) == (1, False)


def test_what_a_catalog_leaves_out_is_removed(here: Path) -> None:
    penstock("apply", "catalog.yaml", cwd=here)
    (here / "catalog.yaml").write_text(CATALOG.replace("acme/orders", "acme/others"))
    result = penstock("apply", "--catalog", "catalog.yaml", cwd=here)
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:]] == [
        ["removed", "collection", "acme/orders"],
        ["added", "collection", "acme/others"],
    ]
    assert result.stderr == "1 added, 1 removed: the catalog is now version 2\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param([], 2, "no catalog given", id="no catalog"),
        pytest.param(["wrong.yaml"], 1, "the catalog has 2 errors", id="a catalog with a mistake"),
        pytest.param(["none.yaml"], 1, "none.yaml", id="no such file"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_recorded(
    here: Path, arguments: list[str], code: int, message: str
) -> None:
    (here / "wrong.yaml").write_text(CATALOG.replace("key:", "kye:"))
    result = penstock("apply", *arguments, cwd=here)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert not (here / ".penstock").exists()


IDLE = (
    CATALOG
    + """
captures:
  acme/files:
    endpoint: {connector: {image: penstock/capture-files, config: {path: in}}}
    bindings: []
  acme/off:
    endpoint: {connector: {image: penstock/capture-files, config: {path: in}}}
    bindings: []
    shards: {disable: true}
materializations:
  acme/lake:
    endpoint: {local: {command: [./lake]}}
    bindings: [{resource: {table: orders}, source: acme/orders}]
"""
)


def test_tasks_that_cannot_run_here_are_refused(here: Path) -> None:
    (here / "catalog.yaml").write_text(IDLE)
    done = penstock("apply", "catalog.yaml", cwd=here)
    assert done.exit_code == 1
    assert "the catalog has 2 errors" in done.stderr
    assert "/captures/acme~1files/endpoint/connector/image: there is no connector" in done.stderr
    assert "/materializations/acme~1lake/endpoint/local: a materialization" in done.stderr
    assert "acme~1off" not in done.stderr


def test_a_migration_that_was_applied_stays(here: Path) -> None:
    counted = """
  acme/counted:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
    derive:
      using: {sqlite: {migrations: ["create table a (id integer primary key)"]}}
      transforms: [{name: all, source: acme/orders, lambda: "select $id as id"}]
"""
    catalog = here / "catalog.yaml"
    catalog.write_text(CATALOG + counted)
    assert penstock("apply", "catalog.yaml", cwd=here).exit_code == 0
    catalog.write_text((CATALOG + counted).replace("table a", "table b"))
    for command in ("check", "apply"):
        done = penstock(command, "catalog.yaml", cwd=here)
        assert done.exit_code == 1
        said = " ".join(done.stderr.split())
        assert "migrations/0: migration 1 changed since it was applied [E-MIGRATION]" in said
        assert "append a new one" in said
    catalog.write_text((CATALOG + counted).replace('key)"]', 'key)", "create table b (id)"]'))
    assert penstock("check", "catalog.yaml", cwd=here).exit_code == 0
    assert penstock("apply", "catalog.yaml", cwd=here).exit_code == 0
