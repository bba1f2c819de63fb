"""`penstock check`, as people run it."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app

FIVE_MISTAKES = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      reduce: {strategy: merge}
      properties:
        id: {type: integer}
        total: {type: string, reduce: {strategy: sum}}
    projectons: {}

captures:
  acme/files:
    endpoint: {connector: {image: penstock/source-files, config: {path: data}}}
    shards: {disable: true}
    interval: 5 minutes
    bindings:
      - {resource: {path: data}, target: acme/oders}
"""
RIGHT = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: integer}, total: {type: number}}
"""


class Done(NamedTuple):
    """What a command printed, and how it ended."""

    returncode: int
    stdout: str
    stderr: str


def penstock(*arguments: str, cwd: Path) -> Done:
    """The command, inside of this process: a new one takes the better part of a second."""
    with contextlib.chdir(cwd):
        result = CliRunner().invoke(app, list(arguments))
    return Done(result.exit_code, result.stdout, result.stderr)


def penstock_process(*arguments: str, cwd: Path) -> Done:
    """The command as people run it."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    return Done(done.returncode, done.stdout, done.stderr)


def test_five_mistakes_are_five_located_messages(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(FIVE_MISTAKES)
    done = penstock_process("check", "catalog.yaml", cwd=tmp_path)
    assert done.returncode == 1
    located = [line for line in done.stdout.splitlines() if line.startswith("catalog.yaml:")]
    assert [line.rpartition(" ")[2] for line in located] == [
        "[E-KEY-MISSING]",
        "[E-REDUCE-TYPE]",
        "[E-KEY]",
        "[E-TYPE]",
        "[E-REF]",
    ]
    assert located[0] == (
        'catalog.yaml:4:11: /collections/acme~1orders/key/0: key /id may be absent: "id" is not in '
        "required [E-KEY-MISSING]"
    )
    assert done.stdout.splitlines()[-1] == "5 errors"
    assert "Traceback" not in done.stdout + done.stderr


def test_a_right_catalog_is_summarised(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(RIGHT)
    done = penstock("check", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok: 1 collection\n", "")


@pytest.mark.parametrize(("text", "code"), [(RIGHT, 0), (FIVE_MISTAKES, 1)])
def test_json_is_for_machines(tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "catalog.yaml").write_text(text)
    done = penstock("check", "catalog.yaml", "--json", cwd=tmp_path)
    assert done.returncode == code
    result = json.loads(done.stdout)
    assert result["ok"] is (code == 0)
    assert result["summary"]["collections"] == 1
    assert result["summary"]["errors"] == len(result["diagnostics"]) == (5 if code else 0)
    for found in result["diagnostics"]:
        assert found.keys() == {
            "file",
            "line",
            "column",
            "pointer",
            "code",
            "severity",
            "message",
            "hint",
            "see",
        }


def test_explain_shows_columns_and_the_plan(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(RIGHT)
    done = penstock("check", "catalog.yaml", "--explain", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "acme/orders: key /id",
        "  columns",
        "    /id              bigint",
        "    /total           double",
        "    (other members)  json by name",
        "  reduction",
        "    N1 last: the last document is taken whole",
        "",
        "ok: 1 collection",
    ]
    found = json.loads(penstock("check", ".", "--explain", "--json", cwd=tmp_path).stdout)
    assert found["collections"]["acme/orders"]["columns"][0] == {
        "location": "/id",
        "type": "bigint",
    }


def test_secrets_need_not_be_set_where_a_catalog_is_only_checked(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text(
        "captures: {a/b: {endpoint: {ingest: {token: '${env:NOT_SET_ANYWHERE}'}}, bindings: [], "
        "shards: {disable: true}}}"
    )
    asked = penstock("check", ".", cwd=tmp_path)
    assert asked.returncode == 1
    assert "environment variable NOT_SET_ANYWHERE is not set [E-SECRET]" in asked.stdout
    assert penstock("check", ".", "--without-secrets", cwd=tmp_path).returncode == 0


def test_without_a_catalog_the_usage_is_wrong(tmp_path: Path) -> None:
    done = penstock("check", cwd=tmp_path)
    assert done.returncode == 2
    assert "no catalog given" in done.stderr


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = penstock("check", "none.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("none.yaml:1:1: cannot read none.yaml: no such file [E-IMPORT]")


def test_square_brackets_are_not_markup(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text("collections: {'[red]x': {}}")
    done = penstock("check", "catalog.yaml", cwd=tmp_path)
    assert '"[red]x" is not a name' in done.stdout
