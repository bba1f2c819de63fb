from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import penstock
from penstock.cli.frame import _COMMON, register
from penstock.cli.list_failpoints import DECLARED_IN
from penstock.cli.main import app
from penstock.errors import UsageError, UserError
from penstock.settings import Settings
from penstock.warm.client import COMMON_FLAGS, COMMON_VALUES

COMMANDS = [command.name for command in app.registered_commands]


def penstock_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *arguments],
        capture_output=True, text=True, check=False, cwd=cwd,
    )  # fmt: skip


def _failing(settings: Settings, how: str) -> None:
    """Fail as asked.

    Example: penstock failing user
    """
    match how:
        case "user":
            raise UserError("no such thing", where="here", why="because", fix="make one")
        case "usage":
            raise UsageError("cannot be meant")
        case "bug":
            raise RuntimeError("surprise")
        case "interrupt":
            raise KeyboardInterrupt
        case _:
            typer.echo(f"{settings.master} {settings.json} {how}")


@pytest.fixture
def failing() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    register(app, _failing, "failing")
    return app


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("user", 1, "penstock: no such thing\n  where here\n  why   because\n  fix   make one\n"),
        ("usage", 2, "penstock: cannot be meant\n"),
        ("bug", 1, "penstock: internal error: RuntimeError: surprise\n"),
        ("interrupt", 130, ""),
    ],
)
def test_errors_become_messages_and_exit_codes(
    failing: typer.Typer, how: str, code: int, message: str
) -> None:
    result = CliRunner().invoke(failing, [how])
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr


def test_debug_shows_the_stack(failing: typer.Typer) -> None:
    result = CliRunner().invoke(failing, ["bug", "--debug"])
    assert "Traceback" in result.stderr


def test_common_options_reach_the_command(failing: typer.Typer) -> None:
    result = CliRunner().invoke(failing, ["fine", "--master", "local[1]", "--json"])
    assert result.stdout == "local[1] True fine\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert re.search(r"Example:|Examples:", result.stdout)
    assert "--json" in result.stdout


def test_help_and_version_import_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys, penstock.cli.main\n"
        "heavy = ('pyspark', 'pyarrow', 'grpc', 'psycopg', 'pandas')\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    version = penstock_command("--version", cwd=tmp_path)
    assert version.stdout == f"penstock {penstock.__version__}\n"


def test_bad_usage_exits_with_2(tmp_path: Path) -> None:
    assert penstock_command("nonsense", cwd=tmp_path).returncode == 2
    assert penstock_command("check", "--nonsense", cwd=tmp_path).returncode == 2


def test_every_failpoint_is_listed(tmp_path: Path) -> None:
    run = penstock_command("failpoints", "--json", cwd=tmp_path)
    listed = {point["name"] for point in json.loads(run.stdout)}
    root = Path(penstock.__file__).parent
    declared = {
        path: re.findall(r'\bdeclare\(\s*"([^"]+)"', path.read_text())
        for path in root.rglob("*.py")
        if "testing" not in path.parts
    }
    assert listed == {name for names in declared.values() for name in names}
    modules = {
        "penstock." + ".".join(path.relative_to(root).with_suffix("").parts)
        for path, names in declared.items()
        if names
    }
    assert modules == set(DECLARED_IN)


ALL_COMMANDS: list[list[Any]] = [
    *([name] for name in COMMANDS),
    *(
        [group.typer_instance.info.name, command.name]
        for group in app.registered_groups
        if group.typer_instance is not None
        for command in group.typer_instance.registered_commands
    ),
]


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=" ".join)
def test_help_fits_a_terminal_and_speaks_of_no_types(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"<\w+|\[x|list\[|\{[A-Z]", shown)
    names = re.findall(r"^│ \*? *(--?\S+)", shown, re.MULTILINE)
    assert names
    assert not [name for name in names if "…" in name]
    assert shown.count("Common options") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data", "elsewhere", "status"],
        ["--data=elsewhere", "--debug", "status"],
        ["status", "--data", "elsewhere"],
        ["--json", "--data", "elsewhere", "task", "start", "a"],
        ["--data", "nowhere", "status", "--data", "elsewhere"],
    ],
)
def test_common_options_may_stand_before_the_command(tmp_path: Path, arguments: list[str]) -> None:
    run = penstock_command(*arguments, cwd=tmp_path)
    assert run.returncode == 1
    assert "elsewhere/consensus.db" in run.stderr


def test_options_that_may_stand_before_the_command_are_the_common_ones() -> None:
    names = {f"--{name.replace('_', '-')}" for name in _COMMON}
    assert names == COMMON_VALUES | COMMON_FLAGS


@pytest.mark.parametrize(
    ("word", "suggested"),
    [("stauts", "'status'"), ("start", "'task start'"), ("aply", "'apply'"), ("xyzw", "")],
)
def test_only_a_command_that_fits_is_suggested(word: str, suggested: str) -> None:
    result = CliRunner().invoke(app, [word])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert (f"did you mean {suggested}?" in said) if suggested else ("did you mean" not in said)
