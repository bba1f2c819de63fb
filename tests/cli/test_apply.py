"""`penstock apply`, as people run it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import penstock as penstock_package
from penstock.catalog.desired import RemovalRefused
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
    assert (first.exit_code, first.stderr) == (0, "1 added; the catalog is now version 1\n")
    assert first.stdout == "create  collection acme/orders\n"
    again = penstock("apply", "catalog.yaml", cwd=here)
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr == "no changes; the catalog is at version 1\n"


def test_a_change_is_shown_by_its_keys(here: Path) -> None:
    penstock("apply", "catalog.yaml", cwd=here)
    changed = CATALOG.replace("total: {type: number}", "total: {type: string, format: number}")
    (here / "catalog.yaml").write_text(changed)
    result = penstock("apply", cwd=here)
    assert result.stdout.splitlines() == [
        "change  collection acme/orders",
        "          schema/properties/total/format: number (new)",
        "          schema/properties/total/type: number → string",
    ]
    assert result.stderr == "1 changed; the catalog is now version 2\n"


def test_lines_fit_a_terminal_and_keys_are_whole(here: Path) -> None:
    penstock("apply", "catalog.yaml", cwd=here)
    names = ", ".join(f"value{n}" for n in range(40))
    (here / "catalog.yaml").write_text(
        CATALOG.replace("total: {type: number}", f"total: {{enum: [{names}]}}")
    )
    result = penstock("apply", cwd=here)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "schema/properties/total/enum: [" in result.stdout
    assert "… (new)" in result.stdout


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
        "keys": [], "rebuilds": [],
    }  # fmt: skip
    assert (real["version"], real["dry_run"], real["removed"]) == (1, False, [])


OTHERS = CATALOG.replace("acme/orders", "acme/others")


@pytest.fixture
def of_two_files(here: Path) -> Path:
    (here / "others.yaml").write_text(OTHERS)
    done = penstock("apply", "catalog.yaml", "others.yaml", cwd=here)
    assert done.exit_code == 0
    return here


def applied(here: Path) -> list[str]:
    shown = penstock("apply", "empty.yaml", "--dry-run", "--json", cwd=here)
    return [each["name"] for each in json.loads(shown.stdout)["removed"]]


@pytest.fixture(autouse=True)
def _an_empty_catalog(here: Path) -> None:
    (here / "empty.yaml").write_text("")


def test_one_of_two_files_removes_nothing_unless_confirmed(of_two_files: Path) -> None:
    refused = penstock("apply", "others.yaml", cwd=of_two_files)
    assert refused.exit_code == 1
    assert refused.stdout == "remove  collection acme/orders\n"
    assert refused.stderr.splitlines() == [
        "penstock: nothing was applied: this would remove 1 definition",
        "  collection acme/orders",
        f"  why   the current catalog was also applied from {of_two_files / 'catalog.yaml'}",
        "  fix   give all files of the catalog together; or, to remove them, penstock apply --yes "
        "(in Python: remove=True)",
    ]
    assert applied(of_two_files) == ["acme/orders", "acme/others"]
    done = penstock("apply", "others.yaml", "--yes", cwd=of_two_files)
    assert (done.exit_code, done.stderr) == (0, "1 removed; the catalog is now version 2\n")
    assert applied(of_two_files) == ["acme/others"]


def answered(here: Path, answer: bytes) -> subprocess.CompletedProcess[str]:
    """Apply one of two files on a terminal, and answer."""
    leader, follower = pty.openpty()
    try:
        os.write(leader, answer)
        return subprocess.run(
            [sys.executable, "-m", "penstock", "apply", "others.yaml"],
            stdin=follower, capture_output=True, text=True, cwd=here, check=False, timeout=60,
        )  # fmt: skip
    finally:
        os.close(leader)
        os.close(follower)


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", 1), (b"n\n", 2), (b"\n", 2), (b"\x04", 2)])
def test_a_terminal_is_asked(of_two_files: Path, answer: bytes, left: int) -> None:
    result = answered(of_two_files, answer)
    assert "Remove collection acme/orders? [y/N]" in result.stderr
    assert result.returncode == (0 if left == 1 else 1)
    assert ("nothing was applied" in result.stderr) == (left == 2)
    assert len(applied(of_two_files)) == left


@pytest.mark.parametrize(
    "command",
    [
        ["append", "acme/others", "--catalog", "others.yaml"],
        ["run", "others.yaml"],
        ["status", "--catalog", "others.yaml"],
        ["controller", "--catalog", "others.yaml"],
        ["up", "others.yaml"],
    ],
    ids=lambda command: command[0],
)
def test_commands_that_apply_first_remove_nothing(of_two_files: Path, command: list[str]) -> None:
    result = penstock(*command, cwd=of_two_files)
    assert result.exit_code == 1
    assert "this would remove 1 definition\n  collection acme/orders\n" in result.stderr
    assert len(applied(of_two_files)) == 2


def test_a_run_removes_what_it_is_allowed_to(of_two_files: Path) -> None:
    result = penstock("run", "others.yaml", "--yes", cwd=of_two_files)
    assert result.exit_code == 0, result.stderr
    assert applied(of_two_files) == ["acme/others"]


def test_python_removes_what_it_is_allowed_to(of_two_files: Path) -> None:
    with penstock_package.open(data=of_two_files / ".penstock") as opened:
        with pytest.raises(RemovalRefused, match="acme/orders"):
            opened.apply(of_two_files / "others.yaml")
        assert len(applied(of_two_files)) == 2
        opened.apply(of_two_files / "others.yaml", remove=True)
    assert applied(of_two_files) == ["acme/others"]


def test_a_rename_is_shown_as_one(here: Path) -> None:
    task = """
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings: [{resource: {table: orders}, source: acme/orders}]
"""
    (here / "catalog.yaml").write_text(CATALOG + task)
    penstock("apply", cwd=here)
    renamed = task.replace("acme/views:", "acme/tables:\n    renamedFrom: acme/views")
    (here / "catalog.yaml").write_text(
        CATALOG + renamed.replace("orders}]", "orders, backfill: 1}]")
    )
    result = penstock("apply", cwd=here)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "rename  materialization acme/views to acme/tables",
        "          bindings/orders/backfill: 1 (new)",
        "          renamedFrom: acme/views (new)",
        "          rebuilds binding orders: backfill was 0, and is 1",
    ]


def test_a_first_run_takes_the_catalog_of_its_directory(here: Path) -> None:
    assert penstock("run", cwd=here).exit_code == 0
    assert applied(here) == ["acme/orders"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param([], 2, "no catalog given, and there is no catalog.yaml", id="no catalog"),
        pytest.param(["wrong.yaml"], 1, "the catalog has 2 errors", id="a catalog with a mistake"),
        pytest.param(["none.yaml"], 1, "none.yaml", id="no such file"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_recorded(
    here: Path, arguments: list[str], code: int, message: str
) -> None:
    (here / "wrong.yaml").write_text(CATALOG.replace("key:", "kye:"))
    (here / "catalog.yaml").unlink()
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
