from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import engine
from penstock.cli.main import app


def prepared(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prepare", *arguments])
    return result.exit_code, result.output


def test_an_archive_that_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "spark.jsa"
    archive.write_bytes(b"classes")
    monkeypatch.setattr(engine, "class_archive", lambda _: archive)
    code, said = prepared("--json")
    assert (code, json.loads(said)) == (0, {"archive": str(archive), "bytes": 7})
    assert archive.read_bytes() == b"classes"


def test_where_nothing_can_be_written_it_says_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(engine, "class_archive", lambda _: tmp_path / "file" / "spark.jsa")
    code, said = prepared()
    assert code == 1
    assert "cannot write to" in said
    assert "only" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_spark_starts_from_an_archive_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "share" / "spark.jsa"
    monkeypatch.setattr(engine, "class_archive", lambda _: archive)
    code, said = prepared()
    assert code == 0, said
    assert archive.stat().st_size > 10_000_000
    assert list(archive.parent.iterdir()) == [archive]
