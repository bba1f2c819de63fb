"""`penstock init`: a catalog to start from, and nothing of anybody's overwritten."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.catalog.build import build_catalog
from penstock.catalog.editor_schema import COMMENT, FILE_NAME
from penstock.cli.init import templates
from penstock.cli.main import app

FILES = [
    "catalog.yaml",
    "data/orders.jsonl",
    "data/stock.jsonl",
    "schemas/order.yaml",
    "catalog.schema.json",
]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def penstock(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_what_init_writes_is_right() -> None:
    done = penstock("init", "demo")
    assert done.exit_code == 0, done.stderr
    assert "penstock check demo/catalog.yaml" in done.stdout
    checked = penstock("check", "demo")
    assert checked.exit_code == 0
    found = "ok: 3 collections, 1 derivation, 1 capture, 1 materialization, 2 tests\n"
    assert checked.stdout == found


@pytest.mark.parametrize("template", templates())
def test_every_template_is_right(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "made up")
    assert penstock("init", "acme", "--template", template).exit_code == 0
    written = Path("acme", "catalog.yaml").read_text()
    assert written.startswith(f"{COMMENT}\n")
    assert Path("acme", FILE_NAME).read_text().startswith('{"$schema": ')
    checked = penstock("check", "acme")
    assert checked.exit_code == 0, checked.stdout + checked.stderr


def test_templates_are_listed_and_a_wrong_one_is_said(tmp_path: Path) -> None:
    assert penstock("init", "--list-templates").stdout.split() == templates()
    assert {"demo", "files", "postgres"} <= set(templates())
    done = penstock("init", "--template", "file")
    assert done.exit_code == 2
    assert "there is no template file" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_directory_is_here_unless_told(tmp_path: Path) -> None:
    done = penstock("init", "--json")
    assert json.loads(done.stdout) == {"directory": ".", "catalog": "catalog.yaml", "files": FILES}
    assert build_catalog([tmp_path], environ={}).ok


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "schemas" / "order.yaml"
    mine.parent.mkdir()
    mine.write_text("mine")
    done = penstock("init", ".")
    assert done.exit_code == 1
    assert "schemas/order.yaml already exists" in done.stderr
    assert mine.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["schemas"]


def test_a_file_in_the_place_of_the_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = penstock("init", "taken")
    assert done.exit_code == 1
    assert "cannot write to taken" in done.stderr
    assert "Traceback" not in done.stderr
