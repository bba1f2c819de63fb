"""The output of a run: the published JSON, tables, and files."""

from __future__ import annotations

import json
import math
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock.errors import UserError
from penstock_bench import plots, results
from penstock_bench.frame import Chart, Goal, Lines, Report, Result
from penstock_bench.results import Conditions

CONDITIONS = Conditions(
    machine={"cores": 2, "memory_gib": 15.6, "platform": "Linux x86_64"},
    versions={"penstock": "0.1.0", "python": "3.11.7", "spark": "4.3.0"},
    peers={"duckdb": "2.0.0"},
    date="2026-01-31",
    quick=False,
)

REPORT = Report(
    results=(
        Result(name="[keys] packed", value=1_234_567.8, unit="keys/s"),
        Result(name="reduce", value=0.01234, unit="s"),
    ),
    goals=(
        Goal(name="native against Python", measured=2.5, goal=1.0),
        Goal(name="compiled against written", measured=0.8999, goal=0.9),
    ),
    charts=(
        Chart(name="keys", title="Keys", unit="keys/s", bars=(("Penstock", 2.0), ("peer", 1.0))),
        Lines(
            name="growth",
            title="Growth",
            x_label="journals",
            y_label="s",
            series=(("Penstock", ((10, 1.0), (100, 1.5))),),
        ),
    ),
)


def test_json_has_exactly_the_published_members() -> None:
    shown = json.loads(json.dumps(results.as_json("model", REPORT, CONDITIONS)))
    assert shown == {
        "workload": "model",
        "machine": {"cores": 2, "memory_gib": 15.6, "platform": "Linux x86_64"},
        "versions": {"penstock": "0.1.0", "python": "3.11.7", "spark": "4.3.0"},
        "peers": {"duckdb": "2.0.0"},
        "date": "2026-01-31",
        "quick": False,
        "results": [
            {"name": "[keys] packed", "value": 1234567.8, "unit": "keys/s"},
            {"name": "reduce", "value": 0.01234, "unit": "s"},
        ],
        "goals": [
            {"name": "native against Python", "measured": 2.5, "goal": 1.0, "holds": True},
            {"name": "compiled against written", "measured": 0.8999, "goal": 0.9, "holds": False},
        ],
        "charts": [
            {
                "name": "keys",
                "title": "Keys",
                "unit": "keys/s",
                "bars": [["Penstock", 2.0], ["peer", 1.0]],
                "note": "",
            },
            {
                "name": "growth",
                "title": "Growth",
                "x_label": "journals",
                "y_label": "s",
                "series": [["Penstock", [[10, 1.0], [100, 1.5]]]],
                "note": "",
            },
        ],
    }


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_figures_that_are_not_finite_are_null_in_json(value: float) -> None:
    chart = Chart(name="c", title="C", unit="s", bars=(("Penstock", value),))
    report = Report(results=(Result(name="r", value=value, unit="s"),), charts=(chart,))
    text = json.dumps(results.as_json("model", report, CONDITIONS), allow_nan=False)
    assert json.loads(text)["results"][0]["value"] is None
    assert json.loads(text)["charts"][0]["bars"] == [["Penstock", None]]


def test_the_table_shows_every_figure_and_every_goal() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(results.as_table("model", REPORT))
    rows = [" ".join(line.split()) for line in shown.get().replace("│", " ").splitlines()]
    assert "[keys] packed 1,234,568 keys/s" in rows
    assert "reduce 0.01234 s" in rows
    assert "native against Python 2.5 1 yes" in rows
    assert "compiled against written 0.8999 0.9 no" in rows


def test_conditions_describe_the_machine_without_naming_it() -> None:
    here = Conditions.here(quick=True, peers=None)
    assert set(here.machine) == {"cores", "memory_gib", "platform"}
    assert set(here.versions) == {"penstock", "python", "spark"}
    assert here.peers == {}
    assert platform.node() not in f"{here} {here.machine.values()}"
    assert "/" not in str(here)


def test_conditions_are_one_line_that_says_when_a_run_was_quick() -> None:
    line = (
        "2 cores, 15.6 GiB, Linux x86_64 · Penstock 0.1.0, Spark 4.3.0, Python 3.11.7 · 2026-01-31"
    )
    assert str(CONDITIONS) == line
    assert str(replace(CONDITIONS, quick=True)) == f"{line} · quick run"


def test_versions_of_peers_come_from_their_own_python() -> None:
    # This Python is not the peers', but it has some of their packages.
    found = Conditions.here(quick=False, peers=Path(sys.executable)).peers
    assert found["pyspark"] == results.metadata.version("pyspark")
    assert set(found) <= set(results._requirements(results.PEERS.read_text()))


def test_a_python_for_peers_that_does_not_run_is_a_user_error(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match="the peers' Python does not work"):
        Conditions.here(quick=False, peers=broken)


def test_names_of_requirements_omit_versions_extras_and_comments() -> None:
    text = '# peers\npyspark==4.3.0\ndlt[postgres]>=1\nBytewax<1; python_version < "3.13"\n\n-r x\n'
    assert results._requirements(text) == ["pyspark", "dlt", "bytewax"]


def test_a_run_writes_one_json_file_and_an_svg_per_chart(tmp_path: Path) -> None:
    out = tmp_path / "made" / "when needed"
    written = results.write(out, "model", REPORT, CONDITIONS)
    assert sorted(written) == sorted(out.iterdir())
    assert [file.name for file in written] == ["model.json", "model-keys.svg", "model-growth.svg"]
    assert json.loads(written[0].read_text()) == json.loads(
        json.dumps(results.as_json("model", REPORT, CONDITIONS))
    )
    for chart, file in zip(REPORT.charts, written[1:], strict=True):
        assert file.read_bytes() == plots.draw(chart, caption=str(CONDITIONS))


def test_without_matplotlib_only_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    assert results.write(tmp_path, "model", REPORT, CONDITIONS) == [tmp_path / "model.json"]


def test_a_chart_that_cannot_be_drawn_does_not_lose_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("no ink")

    monkeypatch.setattr(plots, "draw", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        results.write(tmp_path, "model", REPORT, CONDITIONS)
    assert json.loads((tmp_path / "model.json").read_text())["workload"] == "model"
