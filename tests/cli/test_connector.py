"""`penstock connector`, as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from connectors.packages import fakes
from connectors.packages.test_environments import write_wheel
from penstock.cli.connector import DESCRIPTIONS
from penstock.cli.main import app
from penstock.connectors.builtin import CONNECTORS, PACKAGES


def penstock(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "share"


# ------------------------------------------------------------------------------------------- list


def test_every_connector_is_listed_with_what_it_is(home: Path) -> None:
    named = {name for images in CONNECTORS.values() for name in images}
    assert set(DESCRIPTIONS) == named | set(PACKAGES) | {"python"}
    fakes.put(home, "airbyte:source-fake", fakes.AIRBYTE, version="3.4")
    code, out, _ = penstock("connector", "list")
    assert code == 0
    assert all(f"penstock/{name}" in out for name in named)
    assert "needs pip install 'penstock[kafka]'" in out
    assert out.splitlines()[-1].split() == ["airbyte:source-fake", "airbyte-source-fake", "3.4"]
    code, out, _ = penstock("connector", "list", "--json")
    listed = json.loads(out)
    assert {"kind": "materialization", "image": "penstock/materialize-sqlite",
            "description": "tables in an SQLite file"} in listed["connectors"]  # fmt: skip
    assert [each["version"] for each in listed["installed"]] == ["3.4"]


@pytest.mark.usefixtures("home")
def test_a_list_without_packages_has_one_table() -> None:
    _, out, _ = penstock("connector", "list")
    assert "INSTALLED" not in out


@pytest.mark.parametrize("command", ["list", "install", "remove", "check"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, out, _ = penstock("connector", command, "--help")
    assert code == 0
    assert "Example:" in out


def test_listing_imports_neither_spark_nor_a_connector() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom penstock.cli.main import app\n"
        "assert CliRunner().invoke(app, ['connector', 'list']).exit_code == 0\n"
        "print([m for m in sys.modules if m in ('pyspark', 'pyarrow', 'psycopg')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# ---------------------------------------------------------------------------------------- install


@pytest.mark.slow
def test_install_and_remove(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    write_wheel(tmp_path / "wheels", "tap-tiny", "1.0", "tap-tiny")
    place = home / "penstock" / "connectors" / "singer-tap-tiny"
    code, out, err = penstock("connector", "install", "singer:tap-tiny")
    assert (code, out) == (0, f"installed singer:tap-tiny 1.0 in {place}\n")
    assert "installing tap-tiny" in err
    code, out, err = penstock("connector", "install", "tap-tiny", "--json")
    assert json.loads(out) == {"image": "singer:tap-tiny", "version": "1.0", "path": str(place)}
    assert "is installed already" in err
    code, out, _ = penstock("connector", "remove", "singer:tap-tiny")
    assert (code, out) == (0, "removed singer:tap-tiny\n")
    code, out, err = penstock("connector", "remove", "singer:tap-tiny")
    assert code == 1
    assert "singer:tap-tiny is not installed" in err
    code, _, err = penstock("connector", "install", "singer:tap-none")
    assert code == 1
    assert "pip could not install tap-none" in err
    assert "No matching distribution found" in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("home")
def test_a_name_that_is_no_package_is_refused() -> None:
    code, _, err = penstock("connector", "install", "requests")
    assert code == 1
    assert "requests is not the name of a package" in err


# ------------------------------------------------------------------------------------------ check


def catalog(path: Path, **captures: Any) -> Path:  # noqa: ANN401
    tasks = {
        f"acme/{name}": {
            "endpoint": {"connector": {"image": image, "config": {"config": config}}},
            "bindings": [{"resource": {"stream": "items"}, "target": "acme/items"}],
            "shards": {"disable": name == "off"},
        }
        for name, (image, config) in captures.items()
    }
    sink = {
        "endpoint": {
            "connector": {"image": "penstock/materialize-sqlite", "config": {"path": "views.db"}}
        },
        "bindings": [{"source": "acme/items", "resource": {"table": "items"}}],
    }
    file = path / "catalog.yaml"
    file.write_text(
        json.dumps(
            {
                "collections": {"acme/items": {"key": ["/id"], "schema": fakes.ITEMS}},
                "captures": tasks,
                "materializations": {"acme/views": sink},
            }
        )
    )
    return file


def test_check_tries_every_endpoint(tmp_path: Path, home: Path) -> None:
    fakes.put(home, "airbyte:source-fake", fakes.AIRBYTE)
    broken = {"check": [{"exit": 1}]}
    file = catalog(
        tmp_path,
        good=("airbyte:source-fake", {}),
        bad=("airbyte:source-fake", broken),
        none=("singer:tap-none", {}),
        off=("singer:tap-none", {}),
    )
    code, out, err = penstock("connector", "check", str(file))
    assert code == 1
    assert out.splitlines() == [
        "FAIL capture acme/bad (airbyte:source-fake)",
        "       airbyte:source-fake ended with exit code 1",
        "         where capture acme/bad",
        "ok   capture acme/good (airbyte:source-fake)",
        "FAIL capture acme/none (singer:tap-none)",
        "       singer:tap-none is not installed",
        "         where capture acme/none",
        "         fix   penstock connector install singer:tap-none",
        "ok   materialization acme/views (penstock/materialize-sqlite)",
    ]
    assert err == ""
    code, out, _ = penstock("connector", "check", str(file), "--json")
    assert code == 1
    found = json.loads(out)
    assert not found["ok"]
    assert {each["task"]: each["ok"] for each in found["checks"]} == {
        "acme/bad": False, "acme/good": True, "acme/none": False, "acme/views": True,
    }  # fmt: skip


def test_check_of_one_task(tmp_path: Path, home: Path) -> None:
    fakes.put(home, "airbyte:source-fake", fakes.AIRBYTE)
    file = catalog(tmp_path, good=("airbyte:source-fake", {}), off=("singer:tap-none", {}))
    code, out, _ = penstock("connector", "check", str(file), "--task", "acme/good")
    assert (code, out) == (0, "ok   capture acme/good (airbyte:source-fake)\n")
    code, _, _ = penstock("connector", "check", str(file), "--task", "acme/off")
    assert code == 1, "a task that is named is tried though it is disabled"
    code, _, err = penstock("connector", "check", str(file), "--task", "acme/other")
    assert code == 1
    assert "there is no capture or materialization acme/other" in err
    assert "one of acme/good, acme/views" in err


@pytest.mark.usefixtures("home")
def test_check_without_a_catalog_is_a_mistake() -> None:
    code, _, err = penstock("connector", "check")
    assert code == 2
    assert "no catalog given" in err


def test_a_secret_is_not_printed(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TOKEN", "geheim-4711")
    fakes.put(home, "airbyte:source-fake", fakes.AIRBYTE)
    config = {"where": "${env:PENSTOCK_TEST_TOKEN}", "check": [
        {"error": "cannot log in with geheim-4711"}, {"exit": 1}]}  # fmt: skip
    file = catalog(tmp_path, bad=("airbyte:source-fake", config))
    code, out, err = penstock("connector", "check", str(file))
    assert code == 1
    assert "cannot log in with <redacted>" in out
    assert "geheim" not in out + err
