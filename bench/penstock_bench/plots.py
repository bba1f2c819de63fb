"""Draw the charts of a report as SVG: a white card with a thin border, for any background.

The same chart gives the same bytes, so unchanged figures make no diff in a repository. Text stays
text: it can be searched, selected and read aloud.

Matplotlib draws them. It comes with the extra `bench`, and is imported only for drawing.
"""

from __future__ import annotations

import importlib.util
import io
import math
import textwrap
from typing import TYPE_CHECKING, Any, Final

from penstock_bench.frame import OURS, Chart, Lines, format_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL: Final = "pip install 'penstock[bench]'"

ACCENT: Final = "#0b7285"
OTHERS: Final = ("#adb5bd", "#e8963e", "#7c6fb0", "#6a994e", "#c8553d", "#495057")
"""Colours of the peers' lines, in turn; all bars of peers have the first."""
INK: Final = "#1f2933"
FAINT: Final = "#6b7780"
BORDER: Final = "#dfe3e8"
GRID: Final = "#eceff1"

_STYLE: Final[dict[Any, object]] = {
    "svg.hashsalt": "penstock",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": BORDER,
}

# In inches, at 72 points each.
_WIDTH: Final = 9.0
_MARGIN: Final = 0.3
_BAR: Final = 0.4
_LINES_HEIGHT: Final = 3.2
_TITLE_LINE, _NOTE_LINE = 0.26, 0.19
_TITLE_CHARACTERS, _NOTE_CHARACTERS = 78, 112
_FEW_TICKS: Final = 8
_FEW_POINTS: Final = 24
_DECADES: Final = 50
"""A scale is logarithmic if its maximum is at least this many times its minimum."""


def can_draw() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart | Lines, *, caption: str) -> bytes:
    """Draw a chart as SVG; the caption says in small print where its figures come from."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with mpl.rc_context(_STYLE):
        figure = _bars(chart, caption) if isinstance(chart, Chart) else _lines(chart, caption)
        FigureCanvasSVG(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()


def is_ours(name: str) -> bool:
    """True if a bar or line is Penstock's: it is named `OURS`, or `OURS`, a comma and more."""
    return name == OURS or name.startswith(f"{OURS},")


def _bars(chart: Chart, caption: str) -> Figure:
    figure, axes = _card(chart.title, [chart.note, caption], height=_BAR * len(chart.bars))
    lengths = [value if math.isfinite(value) else 0.0 for _, value in chart.bars]
    places = range(len(lengths))
    colours = [ACCENT if is_ours(name) else OTHERS[0] for name, _ in chart.bars]
    axes.barh(places, lengths, height=0.66, color=colours)
    names = [
        axes.annotate(
            name,
            (0, place),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            weight="bold" if is_ours(name) else "normal",
        )
        for place, (name, _) in zip(places, chart.bars, strict=True)
    ]
    values = [
        axes.annotate(
            f"{format_figure(value)} {chart.unit}" if math.isfinite(value) else "not known",
            (length, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            weight="bold" if is_ours(name) else "normal",
            color=INK if is_ours(name) else FAINT,
        )
        for place, length, (name, value) in zip(places, lengths, chart.bars, strict=True)
    ]
    axes.set_axis_off()
    axes.set_ylim(len(lengths) - 0.5, -0.5)
    axes.set_xlim(0, max(lengths, default=0) or 1)
    # Names are left of the bars, values right: bars get the width that the longest ones leave.
    points = figure.dpi * _WIDTH
    left = max((text.get_window_extent().width for text in names), default=0) / points
    right = max((text.get_window_extent().width for text in values), default=0) / points
    box, gap = axes.get_position(), 0.015
    axes.set_position(
        (box.x0 + left + gap, box.y0, max(0.1, box.width - left - right - 2 * gap), box.height)
    )
    return figure


def _lines(chart: Lines, caption: str) -> Figure:
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = _card(chart.title, [chart.note, caption], height=_LINES_HEIGHT)
    others = iter(OTHERS[1:] * len(chart.series))
    for name, points in chart.series:
        ours = is_ours(name)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=ACCENT if ours else next(others),
            linewidth=2.4 if ours else 1.6,
            marker="o" if len(points) <= _FEW_POINTS else None,
            markersize=5,
            zorder=3 if ours else 2,
        )
    grouped = FuncFormatter(lambda value, _: f"{value:,.6g}")
    places = sorted({x for _, points in chart.series for x, _ in points})
    if places and places[0] > 0 and places[-1] / places[0] >= _DECADES:
        axes.set_xscale("log")
    if len(places) <= _FEW_TICKS:
        axes.set_xticks(places)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(grouped)
    axes.yaxis.set_major_formatter(grouped)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(color=GRID, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if len(chart.series) > 1:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    box = axes.get_position()
    above = 0.3 if len(chart.series) > 1 else 0.05
    height = figure.get_figheight()
    axes.set_position(
        (
            box.x0 + 0.55 / _WIDTH,
            box.y0 + 0.44 / height,
            box.width - 0.65 / _WIDTH,
            box.height - (0.44 + above) / height,
        )
    )
    return figure


def _card(title: str, notes: list[str], *, height: float) -> tuple[Figure, Axes]:
    """Create a figure with its text, and axes that fill the remaining space."""
    from matplotlib.figure import Figure

    heading = textwrap.wrap(title, _TITLE_CHARACTERS)
    small = [line for note in notes for line in textwrap.wrap(note, _NOTE_CHARACTERS)]
    above = _MARGIN + _TITLE_LINE * len(heading) + 0.08
    below = _MARGIN + _NOTE_LINE * len(small) + 0.02
    total = above + height + below
    figure = Figure(figsize=(_WIDTH, total), facecolor="white", edgecolor=BORDER, linewidth=2)
    left = _MARGIN / _WIDTH
    for number, line in enumerate(heading):
        top = 1 - (_MARGIN + _TITLE_LINE * number) / total
        figure.text(left, top, line, size=13, weight="bold", va="top")
    for number, line in enumerate(reversed(small)):
        bottom = (_MARGIN - 0.08 + _NOTE_LINE * number) / total
        figure.text(left, bottom, line, size=8, color=FAINT, va="bottom")
    axes = figure.add_axes((left, below / total, 1 - 2 * left, height / total))
    axes.set_facecolor("white")
    return figure, axes
