"""`penstock bench`: what it prints and writes, and that one failure does not lose the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.bench import bench
from penstock.cli.frame import register
from penstock.errors import Unavailable
from penstock_bench import frame, plots
from penstock_bench.frame import Bench, Chart, Goal, Report, Result, WorkloadEntry

REPORT = Report(
    results=(Result(name="keys", value=1_234_567.8, unit="keys/s"),),
    goals=(Goal(name="missed", measured=0.5, goal=1.0),),
    charts=(Chart(name="keys", title="Keys", unit="keys/s", bars=(("Penstock", 1.5),)),),
)

seen: list[Bench] = []


def fast(run: Bench) -> Report:
    seen.append(run)
    run.say("measuring")
    return REPORT


def broken(run: Bench) -> Report:
    raise Unavailable("no engine", fix="install one")


def buggy(run: Bench) -> Report:
    raise ZeroDivisionError("by nothing")


class MuteError(Exception):
    """As those of Spark whose JVM is gone."""

    def __str__(self) -> str:
        raise ConnectionRefusedError


def mute(run: Bench) -> Report:
    raise MuteError


def wordy(run: Bench) -> Report:
    raise RuntimeError("An error occurred\n: in Java\n\tat a.b\n\tat c.d\n\tat e.f")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    """The command in an empty directory, with workloads that are fast or fail."""
    seen.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_BENCH_PEERS", raising=False)
    module = ModuleType("tiny_workloads")
    for workload in (fast, broken, buggy, mute, wordy):
        setattr(module, workload.__name__, workload)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    listed = {
        "fast": WorkloadEntry("tiny_workloads:fast", "nothing that takes time"),
        "broken": WorkloadEntry("tiny_workloads:broken", "something that is missing"),
        "buggy": WorkloadEntry("tiny_workloads:buggy", "a mistake of ours"),
        "mute": WorkloadEntry("tiny_workloads:mute", "an engine that has gone"),
        "wordy": WorkloadEntry("tiny_workloads:wordy", "an engine that says much"),
        "absent": WorkloadEntry("no_such_module:run", "what cannot be imported"),
        "again": WorkloadEntry("tiny_workloads:fast", "the same once more"),
    }
    monkeypatch.setattr(frame, "WORKLOADS", listed)
    app = typer.Typer()
    register(app, bench)
    return app


def files(directory: Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*.*"))


def test_one_json_line_and_one_file_per_workload(app: typer.Typer, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["fast", "again", "--json", "--quick"])
    assert ran.exit_code == 0
    shown = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each["workload"] for each in shown] == ["fast", "again"]
    assert [each["quick"] for each in shown] == [True, True]
    results = tmp_path / "bench" / "results"
    assert files(results) == ["again-keys.svg", "again.json", "fast-keys.svg", "fast.json"]
    assert [json.loads((results / f"{n}.json").read_text()) for n in ("fast", "again")] == shown
    assert ran.stderr.splitlines() == [
        "benchmark fast: nothing that takes time",
        "measuring",
        "wrote bench/results/fast.json, bench/results/fast-keys.svg",
        "benchmark again: the same once more",
        "measuring",
        "wrote bench/results/again.json, bench/results/again-keys.svg",
    ]


def test_tables_for_people_and_a_missed_goal_is_no_failure(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["fast", "--out", "elsewhere"])
    assert ran.exit_code == 0
    assert "1,234,568" in ran.stdout
    assert "missed" in ran.stdout
    assert "cores" in ran.stdout
    assert files(Path("elsewhere")) == ["fast-keys.svg", "fast.json"]


def test_what_fails_is_named_and_the_others_go_on(app: typer.Typer, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["--json"])
    assert ran.exit_code == 1
    assert [json.loads(line)["workload"] for line in ran.stdout.splitlines()] == ["fast", "again"]
    assert files(tmp_path / "bench" / "results") == [
        *("again-keys.svg", "again.json", "fast-keys.svg", "fast.json")
    ]
    assert "penstock: benchmark broken failed: no engine\n  fix   install one\n" in ran.stderr
    assert "penstock: benchmark buggy failed: ZeroDivisionError: by nothing\n" in ran.stderr
    assert "penstock: benchmark absent failed: ModuleNotFoundError" in ran.stderr
    assert "penstock: benchmark mute failed: MuteError: (no details)\n" in ran.stderr
    assert "benchmark wordy failed: RuntimeError: An error occurred\n: in Java\n" in ran.stderr
    assert "c.d" not in ran.stderr
    assert "penstock: 5 of 7 benchmarks failed: broken, buggy, mute, wordy, absent\n" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_with_debug_a_failure_shows_its_stack(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["buggy", "--debug"])
    assert ran.exit_code == 1
    assert "in buggy" in ran.stderr


def test_a_workload_leaves_no_session_to_the_next(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(frame.Bench, "close", lambda _: closed.append("closed"))
    CliRunner().invoke(app, ["fast", "broken", "again"])
    assert closed == ["closed"] * 3


def test_a_session_that_cannot_be_closed_does_not_stop_the_next(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Bench) -> None:
        raise ConnectionRefusedError("no JVM")

    monkeypatch.setattr(frame.Bench, "close", refuse)
    ran = CliRunner().invoke(app, ["fast", "again", "--json"])
    assert ran.exit_code == 1
    assert [json.loads(line)["workload"] for line in ran.stdout.splitlines()] == ["fast", "again"]
    assert "penstock: 2 of 2 benchmarks failed: fast, again\n" in ran.stderr


def test_figures_that_cannot_be_written_are_shown(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = CliRunner().invoke(app, ["fast", "--out", "file"])
    assert ran.exit_code == 1
    assert "1,234,568" in ran.stdout
    assert "wrote" not in ran.stderr


def test_unknown_names_are_refused_before_anything_runs(app: typer.Typer, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["fast", "agian"])
    assert ran.exit_code == 2
    assert 'did you mean "again"?' in ran.stderr
    assert ran.stdout == ""
    assert files(tmp_path) == []


def test_the_list_has_a_line_each_and_imports_none(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["--list"])
    assert ran.exit_code == 0
    assert [line.split(maxsplit=1)[0] for line in ran.stdout.splitlines()] == [
        *("name", "fast", "broken", "buggy", "mute", "wordy", "absent", "again")
    ]
    assert "what cannot be imported" in ran.stdout
    shown = json.loads(CliRunner().invoke(app, ["--list", "--json"]).stdout)
    assert shown[0] == {"name": "fast", "about": "nothing that takes time"}
    assert seen == []


def test_without_matplotlib_charts_are_left_out_and_it_is_said_once(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    ran = CliRunner().invoke(app, ["fast", "again"])
    assert ran.exit_code == 0
    assert ran.stderr.count("pip install 'penstock[bench]'") == 1
    assert files(tmp_path / "bench" / "results") == ["again.json", "fast.json"]


@pytest.mark.parametrize("how", ["option", "environment", "directory"])
def test_the_python_of_peers_is_found_and_its_link_not_followed(
    app: typer.Typer, tmp_path: Path, how: str
) -> None:
    python = tmp_path / (".venv-peers/bin/python" if how == "directory" else "other/python")
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    options = ["--peers", str(python)] if how == "option" else []
    environ = {"PENSTOCK_BENCH_PEERS": str(python)} if how == "environment" else {}
    ran = CliRunner().invoke(app, ["fast", "--json", *options], env=environ)
    assert ran.exit_code == 0
    assert [run.peers for run in seen] == [python]


def test_without_peers_there_is_no_python_of_theirs(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["fast", "--json"])
    assert [run.peers for run in seen] == [None]
    assert json.loads(ran.stdout)["peers"] == {}


def test_a_python_of_peers_that_is_not_there_is_a_usage_error(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["fast", "--peers", "nowhere/python"])
    assert ran.exit_code == 2
    assert "nowhere/python" in ran.stderr
    assert seen == []


def test_help_names_the_extra_and_the_variable(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["--help"])
    words = " ".join(ran.stdout.replace("│", " ").split())
    assert "pip install 'penstock[bench]'" in words
    assert "[env: PENSTOCK_BENCH_PEERS]" in words
