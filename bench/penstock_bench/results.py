"""The output of a run: a table for people, JSON for programs, and charts.

Figures mean little without the machine, the versions and the date they come from, so every output
carries these as `Conditions`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from penstock.errors import UserError
from penstock_bench import plots
from penstock_bench.frame import Report, format_figure

if TYPE_CHECKING:
    from rich.console import RenderableType

PEERS: Final = Path(__file__).parent / "peers" / "requirements.txt"
"""What the peers' Python must have installed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where figures come from, without identifying the machine."""

    machine: Mapping[str, str | int | float]
    versions: Mapping[str, str]
    peers: Mapping[str, str]
    """Versions of the peers; empty if none are installed."""
    date: str
    """The day, in UTC."""
    quick: bool

    @classmethod
    def here(cls, *, quick: bool, peers: Path | None) -> Conditions:
        """Return the conditions of this process, now."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            machine={
                "cores": os.cpu_count() or 1,
                "memory_gib": round(memory_bytes / (1 << 30), 1),
                "platform": f"{platform.system()} {platform.machine()}",
            },
            versions={
                "penstock": metadata.version("penstock"),
                "python": platform.python_version(),
                "spark": metadata.version("pyspark"),
            },
            peers=_peer_versions(peers) if peers else {},
            date=datetime.now(UTC).date().isoformat(),
            quick=quick,
        )

    def __str__(self) -> str:
        machine, versions = self.machine, self.versions
        parts = [
            f"{machine['cores']} cores, {machine['memory_gib']} GiB, {machine['platform']}",
            f"Penstock {versions['penstock']}, Spark {versions['spark']}, "
            f"Python {versions['python']}",
            self.date,
            *(["quick run"] if self.quick else []),
        ]
        return " · ".join(parts)


def _peer_versions(python: Path) -> dict[str, str]:
    """Ask the peers' own Python, since only it knows."""
    ask = "import json, sys; from importlib import metadata; known = {}\n"
    ask += "for d in metadata.distributions(): known[d.metadata['Name'].lower()] = d.version\n"
    ask += "print(json.dumps({n: known[n] for n in sys.argv[1:] if n in known}))"
    command = [str(python), "-c", ask, *_requirements(PEERS.read_text(encoding="utf-8"))]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, timeout=60)  # noqa: S603
        versions: dict[str, str] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as e:
        raise UserError(
            "the peers' Python does not work",
            where=str(python),
            why=str(e),
            fix="create a virtual environment, and in it pip install -r " + str(PEERS),
        ) from e
    return versions


def _requirements(text: str) -> list[str]:
    """Return the names of the packages in a requirements file."""
    return [name.lower() for name in re.findall(r"^[A-Za-z0-9][A-Za-z0-9._-]*", text, re.MULTILINE)]


def as_json(workload: str, report: Report, conditions: Conditions) -> dict[str, object]:
    """Return a report in its published form; figures that are not finite become null."""
    document = {
        "workload": workload,
        **dataclasses.asdict(conditions),
        "results": [dataclasses.asdict(result) for result in report.results],
        "goals": [{**dataclasses.asdict(goal), "holds": goal.holds} for goal in report.goals],
        "charts": [dataclasses.asdict(chart) for chart in report.charts],
    }
    return {name: _finite(value) for name, value in document.items()}


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _finite(member) for name, member in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def as_table(workload: str, report: Report) -> RenderableType:
    """Render a report for people: figures, then goals."""
    figures = Table("measured", title=workload, title_justify="left", title_style="bold")
    figures.add_column("value", justify="right")
    figures.add_column("unit")
    for result in report.results:
        figures.add_row(escape(result.name), format_figure(result.value), escape(result.unit))
    if not report.goals:
        return figures
    goals = Table("goal", title_justify="left")
    goals.add_column("measured", justify="right")
    goals.add_column("at least", justify="right")
    goals.add_column("holds")
    for goal in report.goals:
        holds = "[green]yes[/]" if goal.holds else "[red]no[/]"
        goals.add_row(
            escape(goal.name), format_figure(goal.measured), format_figure(goal.goal), holds
        )
    return Group(figures, goals)


def write(out: Path, workload: str, report: Report, conditions: Conditions) -> list[Path]:
    """Write `<workload>.json`, and `<workload>-<chart>.svg` for each chart that can be drawn.

    Figures are written first, so that a chart that cannot be drawn does not lose them.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{workload}.json"]
    document = json.dumps(as_json(workload, report, conditions), ensure_ascii=False, indent=2)
    written[0].write_text(document + "\n", encoding="utf-8")
    for chart in report.charts if plots.can_draw() else ():
        written.append(out / f"{workload}-{chart.name}.svg")
        written[-1].write_bytes(plots.draw(chart, caption=str(conditions)))
    return written
