"""The frame of benchmarks: fair turns, honest figures, the published JSON."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from penstock.bench import frame
from penstock.bench.frame import Bench, Goal, Listed, Report, Result, Samples, seconds_of
from penstock.cli.bench import bench
from penstock.cli.frame import register
from penstock.errors import UsageError

REPORT = Report(
    results=(
        Result(name="[keys] packed", value=1_234_567.8, unit="keys/s"),
        Result(name="reduce", value=0.01234, unit="s"),
    ),
    goals=(
        Goal(name="native against Python", measured=2.5, goal=1.0),
        Goal(name="compiled against written", measured=0.8999, goal=0.9),
    ),
)


def test_peers_take_turns_and_warm_ups_do_not_count() -> None:
    turns: list[str] = []

    def peer(name: str, figures: list[float]) -> Callable[[], float]:
        def run() -> float:
            turns.append(name)
            return figures.pop(0)

        return run

    said: list[str] = []
    samples = Bench(quick=True, say=said.append).interleave(
        "race", {"a": peer("a", [99, 1, 2, 3, 4, 5]), "b": peer("b", [99, 6, 7, 8, 9, 10])}
    )
    assert samples.by_peer == {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10]}
    assert turns == list("ba" + "ab" + "ba" + "ab" + "ba" + "ab")
    assert said == ["race: warm-up", *(f"race: round {n} of 5" for n in range(1, 6))]


def test_a_full_run_has_more_rounds_and_larger_sizes() -> None:
    full, quick = Bench(), Bench(quick=True)
    peers = {"only": lambda: 1.0}
    rounds = [len(run.interleave("x", peers).by_peer["only"]) for run in (full, quick)]
    assert rounds == [7, 5]
    assert (full.size(full=10, quick=1), quick.size(full=10, quick=1)) == (10, 1)


def test_ratios_are_taken_round_by_round() -> None:
    # The second round was ten times slower for both; the ratio of the medians would be 3.
    samples = Samples({"a": [2.0, 20.0, 6.0], "b": [1.0, 10.0, 2.0]})
    assert samples.median("a") == 6
    assert samples.ratio("a", "b") == 2


def test_seconds_are_those_of_the_work_alone() -> None:
    times = iter([10.0, 12.5])
    done: list[str] = []
    timed = seconds_of(lambda: done.append("work"), clock=lambda: next(times))
    assert timed() == 2.5
    assert done == ["work"]


@pytest.mark.parametrize(
    ("measured", "holds"), [(0.9, True), (1.1, True), (0.8999, False), (float("nan"), False)]
)
def test_a_goal_is_a_least_ratio(measured: float, holds: bool) -> None:
    assert Goal(name="g", measured=measured, goal=0.9).holds is holds


def test_json_has_exactly_the_published_members() -> None:
    shown = json.loads(json.dumps(frame.as_json("model", REPORT)))
    assert shown.pop("machine") == frame.machine()
    assert shown == {
        "workload": "model",
        "results": [
            {"name": "[keys] packed", "value": 1234567.8, "unit": "keys/s"},
            {"name": "reduce", "value": 0.01234, "unit": "s"},
        ],
        "goals": [
            {"name": "native against Python", "measured": 2.5, "goal": 1.0, "holds": True},
            {"name": "compiled against written", "measured": 0.8999, "goal": 0.9, "holds": False},
        ],
    }


def test_the_machine_is_described_and_not_named() -> None:
    described = frame.machine()
    assert set(described) == {"cores", "memory_gib", "platform", "python", "spark"}
    assert platform.node() not in map(str, described.values())
    assert not any("/" in str(value) for value in described.values())


def test_the_table_shows_every_figure_and_every_goal() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(frame.as_table("model", REPORT))
    rows = [" ".join(line.split()) for line in shown.get().replace("│", " ").splitlines()]
    assert "[keys] packed 1,234,568 keys/s" in rows
    assert "reduce 0.01234 s" in rows
    assert "native against Python 2.5 1 yes" in rows
    assert "compiled against written 0.8999 0.9 no" in rows


@pytest.mark.parametrize("name", frame.WORKLOADS)
def test_every_listed_workload_can_be_imported(name: str) -> None:
    assert callable(frame.find_workloads([name])[name])


@pytest.mark.parametrize(
    ("name", "fix"),
    [("modl", 'did you mean "model"?'), ("xyz", "known: model")],
)
def test_an_unknown_workload_is_a_usage_error(name: str, fix: str) -> None:
    with pytest.raises(UsageError, match=f'no benchmark is called "{name}"') as refused:
        frame.find_workloads([name])
    assert refused.value.fix is not None
    assert refused.value.fix.startswith(fix)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command, with one workload that is fast."""
    workload = ModuleType("fast_workload")
    workload.run = lambda bench: (bench.say("measuring"), REPORT)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, workload.__name__, workload)
    listed = Listed("fast_workload:run", "nothing that takes time")
    monkeypatch.setattr(frame, "WORKLOADS", {"fast": listed, "again": listed})
    app = typer.Typer()
    register(app, bench)
    return app


def test_the_command_prints_one_json_line_per_workload(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["--json"])
    assert ran.exit_code == 0
    assert [json.loads(line)["workload"] for line in ran.stdout.splitlines()] == ["fast", "again"]
    assert ran.stderr.splitlines() == ["measuring", "measuring"]


def test_the_command_prints_tables_for_people(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["fast"])
    assert ran.exit_code == 0
    assert "1,234,568" in ran.stdout
    assert "cores" in ran.stdout


def test_the_command_refuses_unknown_names(app: typer.Typer) -> None:
    ran = CliRunner().invoke(app, ["fasst"])
    assert ran.exit_code == 2
    assert 'did you mean "fast"?' in ran.stderr
    assert ran.stdout == ""
