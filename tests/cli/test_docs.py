"""What the documents tell people to type exists: every command, and every flag of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from penstock.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.service")])
UNIT = ROOT / "deploy" / "penstock-persistd.service"

_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"(?:^|[\s`|(/])penstock[ \t]+(?P<command>[a-z][a-z-]*)(?P<rest>[^`\n|]*)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def calls(text: str) -> Iterator[tuple[str, str]]:
    """Every command that is written as code, with what follows it."""
    code = [found[0].replace("\\\n", " ") for found in _CODE.finditer(text)]
    for snippet in code:
        for found in _CALL.finditer(snippet):
            yield found["command"], found["rest"].split("#")[0]


def flags_of(command: click.Command) -> set[str]:
    return {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}


def problems(text: str) -> list[str]:
    wrong = []
    for command, rest in calls(text):
        if command not in commands:
            wrong.append(f"penstock {command}")
            continue
        found = commands[command]
        if (below := getattr(found, "commands", None)) is not None:
            name = (rest.split() or [""])[0]
            if name not in below:
                wrong.append(f"penstock {command} {name}")
                continue
            found = below[name]
        known = {*flags_of(found), "--help"}
        wrong += [f"penstock {command} {flag}" for flag in _FLAG.findall(rest) if flag not in known]
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    if document == UNIT:
        given = re.findall(r"(?:^ExecStart|PERSISTD_FLAGS)=(?:.*\\\n)*.*", text, re.MULTILINE)
        text = f"`penstock persistd {' '.join(_FLAG.findall(' '.join(given)))}`"
        assert {"--listen", "--tls-key", "--log-json"} <= set(text.strip("`").split())
    assert problems(text) == []


def test_what_does_not_exist_is_found() -> None:
    assert problems("`penstock fly`") == ["penstock fly"]
    assert problems("```\n$ penstock read a/b --no-such\n```") == ["penstock read --no-such"]
    assert problems("```\npenstock gc \\\n  --nothing\n```") == ["penstock gc --nothing"]
    assert problems("`penstock task fly`") == ["penstock task fly"]
    assert problems("| penstock run of 1,000 events |, `penstock read a/b --limit 3 | head`") == []


def test_the_manual_of_the_committer_names_all_of_its_flags_and_no_other() -> None:
    text = (ROOT / "docs" / "persistd.md").read_text()
    table = "".join(text.split(f"## {name}")[1].split("\n## ")[0] for name in ("Flags", "Limits"))
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in re.findall(r"--[a-z][a-z-]*", row)}
    named |= {f"--no-{flag[2:]}" for flag in named if f"--{flag[2:]}/--no" in table}
    from penstock.cli.frame import _COMMON

    common = {f"--{name.replace('_', '-')}" for name in _COMMON} - {"--consensus"}
    own = flags_of(commands["persistd"]) - common
    positive = {flag for flag in own if not flag.startswith("--no-")}
    assert {flag for flag in named if not flag.startswith("--no-")} == positive


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_has_nothing_to_say_of_the_unit(tmp_path: Path) -> None:
    """With an executable that is there: where Penstock is installed is up to the reader."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/penstock/.venv/bin/penstock", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_unit_says_where_data_is_how_much_memory_and_when_to_start_again() -> None:
    lines = dict(
        line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"[A-Z]\w+=", line)
    )
    assert lines["WorkingDirectory"] == f"/var/lib/{lines['StateDirectory']}"
    assert "PENSTOCK_DATA=/var/lib/penstock" in UNIT.read_text()
    assert {"MemoryHigh", "MemoryMax", "Restart", "RestartPreventExitStatus"} <= lines.keys()
