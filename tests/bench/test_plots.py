"""Charts contain their text and figures, highlight Penstock, and are reproducible."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from penstock_bench import plots
from penstock_bench.frame import Chart, Lines

BARS = Chart(
    name="wall",
    title="2,000,000 events to PostgreSQL",
    unit="s",
    bars=(("Penstock", 11.25), ("Structured Streaming", 17.0), ("cost in $: <a> & $b$", 1234.5)),
    note="Less is better.",
)
LINES = Lines(
    name="journals",
    title="A checkpoint by journals",
    x_label="journals",
    y_label="seconds",
    series=(
        ("Penstock", ((10, 1.0), (100, 1.1), (10_000, 1.9))),
        ("a peer", ((10, 2.0), (100, 3.0), (10_000, 9.0))),
    ),
)
CAPTION = "2 cores, 15.6 GiB · 2026-01-31"
SVG = "{http://www.w3.org/2000/svg}"


def words(svg: bytes) -> list[str]:
    """Return the texts of an SVG, in file order."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314 - our own


def fills(svg: bytes) -> list[str]:
    """Return the fill colours of an SVG, in file order."""
    styles = [path.get("style", "") for path in ElementTree.fromstring(svg).iter(f"{SVG}path")]  # noqa: S314 - our own
    return [style.partition("fill: ")[2].partition(";")[0] for style in styles]


def test_bars_have_their_names_values_title_note_and_caption() -> None:
    assert sorted(words(plots.draw(BARS, caption=CAPTION))) == sorted(
        [
            *("Penstock", "Structured Streaming", "cost in $: <a> & $b$"),
            *("11.25 s", "17 s", "1,234 s"),
            *("2,000,000 events to PostgreSQL", "Less is better.", CAPTION),
        ]
    )


def test_lines_have_their_names_axes_and_points() -> None:
    shown = words(plots.draw(LINES, caption=CAPTION))
    for word in ("Penstock", "a peer", "journals", "seconds", LINES.title, CAPTION):
        assert word in shown
    assert [word for word in shown if word in ("10", "100", "10,000")] == ["10", "100", "10,000"]


@pytest.mark.parametrize("chart", [BARS, LINES], ids=lambda chart: chart.name)
def test_the_same_chart_is_the_same_bytes_in_another_process(chart: Chart | Lines) -> None:
    program = f"""
import sys
from penstock_bench import plots
from penstock_bench.frame import Chart, Lines
sys.stdout.buffer.write(plots.draw({chart!r}, caption={CAPTION!r}))
"""
    drawn = plots.draw(chart, caption=CAPTION)
    assert plots.draw(chart, caption=CAPTION) == drawn
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert again.stdout == drawn


def test_only_our_bars_have_our_colour() -> None:
    names = ("Penstock", "Penstock, SQLite", "Penstock's peer", "peer")
    chart = Chart(name="c", title="C", unit="s", bars=tuple((name, 1.0) for name in names))
    bars = [f for f in fills(plots.draw(chart, caption="")) if f in (plots.ACCENT, plots.OTHERS[0])]
    assert bars == [plots.ACCENT, plots.ACCENT, plots.OTHERS[0], plots.OTHERS[0]]


def test_charts_without_figures_are_drawn_too() -> None:
    chart = Chart(
        name="wrong",
        title="Wrong rows",
        unit="rows",
        bars=(("Penstock", 0), ("peer", float("nan"))),
    )
    shown = words(plots.draw(chart, caption=""))
    assert "0 rows" in shown
    assert "not known" in shown


@pytest.mark.parametrize("chart", [BARS, LINES], ids=lambda chart: chart.name)
def test_the_card_is_white_on_any_background(chart: Chart | Lines) -> None:
    assert fills(plots.draw(chart, caption=CAPTION))[0] == "#ffffff"


def test_long_titles_wrap() -> None:
    title = " ".join(f"word{n}" for n in range(30))
    chart = Chart(name="c", title=title, unit="s", bars=(("Penstock", 1.0),))
    shown = words(plots.draw(chart, caption=""))
    lines = [line for line in shown if line.startswith("word")]
    assert len(lines) == 3
    assert " ".join(lines) == title


def test_matplotlib_is_imported_only_for_drawing() -> None:
    program = (
        "import sys, penstock.cli.bench, penstock_bench.results; print('matplotlib' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.strip() == b"False"
