"""`penstock init`, as people run it."""

import json
import subprocess
import sys
from pathlib import Path

from penstock.catalog.build import build_catalog

FILES = ["catalog.yaml", "data/orders.jsonl", "data/stock.jsonl", "schemas/order.yaml"]


def penstock(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_init_writes_is_right(tmp_path: Path) -> None:
    done = penstock("init", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "penstock check demo/catalog.yaml" in done.stdout
    checked = penstock("check", "demo", cwd=tmp_path)
    assert checked.returncode == 0
    assert checked.stdout == (
        "ok: 3 collections, 1 derivation, 1 capture, 1 materialization, 2 tests\n"
    )


def test_the_directory_is_here_unless_told(tmp_path: Path) -> None:
    done = penstock("init", "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == {"directory": ".", "catalog": "catalog.yaml", "files": FILES}
    assert build_catalog([tmp_path], environ={}).ok


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    mine = tmp_path / "schemas" / "order.yaml"
    mine.write_text("mine")
    done = penstock("init", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "schemas/order.yaml is there already" in done.stderr
    assert mine.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["schemas"]


def test_a_file_in_the_place_of_the_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = penstock("init", "taken", cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot write to taken" in done.stderr
    assert "Traceback" not in done.stderr
