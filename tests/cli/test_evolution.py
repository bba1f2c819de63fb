"""A catalog that changes after documents were written."""

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
      properties: {id: {type: integer}, total: {type: TOTAL}, EXTRA}
"""


def penstock(*arguments: str, cwd: Path, stdin: str | None = None) -> Result:
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(arguments), input=stdin)


def _write(here: Path, *, total: str, extra: str = "a: {}") -> None:
    text = CATALOG.replace("TOTAL", total).replace("EXTRA", extra)
    (here / "catalog.yaml").write_text(text)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    _write(tmp_path, total="integer")
    assert penstock("apply", "catalog.yaml", cwd=tmp_path).exit_code == 0
    return tmp_path


def _append(here: Path) -> None:
    run = penstock("append", "acme/orders", cwd=here, stdin='{"id": 1, "total": 5}\n')
    assert run.exit_code == 0, run.output


def test_an_incompatible_change_is_refused_with_the_journal_and_the_reason(here: Path) -> None:
    _append(here)
    _write(here, total="boolean")
    for command in ("check", "apply"):
        run = penstock(command, "catalog.yaml", cwd=here)
        assert run.exit_code == 1
        assert "journal acme/orders/pivot=00 has documents" in run.stderr
        assert "/total" in run.stderr
        assert "Traceback" not in run.stderr
    assert json.loads(penstock("check", "catalog.yaml", "--json", cwd=here).stdout)["refused"]


def test_without_documents_any_change_is_fine(here: Path) -> None:
    _write(here, total="boolean")
    assert penstock("check", "catalog.yaml", cwd=here).exit_code == 0
    assert penstock("apply", "catalog.yaml", cwd=here).exit_code == 0


def test_what_was_written_reads_under_a_wider_schema(here: Path) -> None:
    _append(here)
    _write(here, total="number", extra="note: {type: string}")
    assert penstock("apply", "catalog.yaml", cwd=here).exit_code == 0
    later = '{"id": 2, "total": 5.5, "note": "n"}\n'
    assert penstock("append", "acme/orders", cwd=here, stdin=later).exit_code == 0
    lines = penstock("read", "acme/orders", cwd=here).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": 1, "total": 5},
        {"id": 2, "total": 5.5, "note": "n"},
    ]
