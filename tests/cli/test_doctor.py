from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import doctor
from penstock.cli.main import app
from penstock.journal.blobs import open_blobs
from support.s3 import SECRET_KEY, running_s3


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without starting a second Spark beside the one of the test process."""
    without = {name: check for name, check in doctor._CHECKS.items() if name != "spark"}
    monkeypatch.setattr(doctor, "_CHECKS", without)


@pytest.mark.usefixtures("quick")
def test_a_fit_machine_passes(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--data", str(tmp_path / "new")])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"]) == (0, True), report
    assert {"java", "disk", "data", "consensus"} <= {check["name"] for check in report["checks"]}
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("quick")
def test_what_is_wrong_comes_with_a_fix_and_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(
        app,
        ["doctor", "--data", str(tmp_path / "file" / "data"),
         "--consensus", "postgresql://app:hunter2@127.0.0.1:1/db"],
    )  # fmt: skip
    assert result.exit_code == 1
    assert "FAIL data" in result.stdout
    assert "FAIL consensus" in result.stdout
    assert "FAIL blob" in result.stdout
    assert result.stdout.count("fix:") == 3
    assert "hunter2" not in result.output


@pytest.fixture
def only_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", {"blob": doctor._blob})


@pytest.mark.usefixtures("only_blob")
def test_a_remote_blob_store_is_tried(tmp_path: Path) -> None:
    with running_s3() as url:
        data = ["--data", str(tmp_path / "new")]
        good = CliRunner().invoke(app, ["doctor", *data, "--blob", url])
        assert good.exit_code == 0, good.output
        assert "an object was written, read and deleted" in good.stdout
        assert list(open_blobs(url).list()) == []
        bad = CliRunner().invoke(app, ["doctor", *data, "--blob", url.replace("bucket?", "none?")])
    assert bad.exit_code == 1
    assert "FAIL blob" in bad.stdout
    assert "fix: check the address" in bad.stdout
    assert SECRET_KEY not in good.output + bad.output


@pytest.mark.usefixtures("only_blob")
def test_a_directory_that_cannot_hold_blobs_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["doctor", "--blob", str(tmp_path / "file" / "blobs")])
    assert result.exit_code == 1
    assert f"{tmp_path / 'file'} is not a writable directory" in result.stdout


@pytest.mark.spark
def test_spark_is_tried_with_a_real_job(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "from penstock.cli.doctor import _spark\n"
        "from penstock.settings import Settings\n"
        "print(_spark(Settings(master='local[1]')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "a job ran" in run.stdout, run.stderr
