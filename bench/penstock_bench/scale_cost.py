"""Documents: what each costs, and how much memory a run needs, at ten times the data.

`penstock run`, each time in a fresh process, takes events to PostgreSQL, and then ten times as
many. A run of very few events measures start-up: of Python, of Spark, of a first job. That is
subtracted from both; otherwise the smaller run would look too expensive per document.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from penstock.errors import Bug
from penstock.testing.postgres import running_postgres
from penstock_bench.events import (
    TASK,
    Events,
    catalog_text,
    fill,
    postgres_endpoint,
    postgres_table,
)
from penstock_bench.frame import OURS, Bench, Chart, Goal, Lines, Report, Result, Samples
from penstock_bench.processes import Run, run
from penstock_bench.scale_runs import penstock_run

ROUNDS: Final = 3
TIMES: Final = 10
START_UP: Final = 1_000
"""Events in the run that measures start-up."""
FILE: Final = 100_000
"""Events per transaction."""
FLOOR: Final = 0.01
"""At least this share of a run is not start-up: figures of short runs are then little more than
noise, but never zero."""


def measure(bench: Bench) -> Report:
    """Measure seconds and CPU seconds per document, for some events and ten times as many."""
    small = bench.size(full=2_000_000, quick=100_000)
    sizes = (START_UP, small, TIMES * small)
    with (
        running_postgres() as server,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as dir_,
    ):
        deployments = []
        for size in sizes:
            bench.say(f"writing {size:,} events")
            urls = [server.create_database() for _ in range(ROUNDS)]
            deployments.append(SizedDeployment(Path(dir_) / str(size), make_events(size), urls))
            deployments[-1].fill()

        def runs(deployment: SizedDeployment) -> Callable[[], float]:
            return lambda: deployment.run().seconds

        bench.interleave(
            "penstock run",
            {f"{deployment.events.count:,}": runs(deployment) for deployment in deployments},
            warmups=0,
            rounds=ROUNDS,
        )
        for deployment in deployments:
            deployment.check()
    return report({deployment.events.count: deployment.runs for deployment in deployments})


def make_events(size: int) -> Events:
    """Make `size` events, in transactions of equal size."""
    return Events(size, max(1, size // FILE))


@dataclass(slots=True)
class SizedDeployment:
    """A deployment with a task for each round, each with a database of its own."""

    data: Path
    events: Events
    urls: Sequence[str]
    runs: list[Run] = field(default_factory=list)

    def fill(self) -> None:
        """Append the events, and apply the tasks."""
        catalog = yaml.safe_load(catalog_text(postgres_endpoint(self.urls[0])))
        made = catalog["materializations"][TASK]
        catalog["materializations"] = {
            f"{TASK}-{number}": {**made, "endpoint": postgres_endpoint(url)}
            for number, url in enumerate(self.urls)
        }
        fill(self.events, self.data, yaml.safe_dump(catalog, sort_keys=False))

    def run(self) -> Run:
        """Run the next task, in a process of its own."""
        done = run(penstock_run(self.data, f"{TASK}-{len(self.runs)}"))
        self.runs.append(done)
        return done

    def check(self) -> None:
        """Raise if a table differs from the oracle."""
        for url in self.urls[: len(self.runs)]:
            if wrong := postgres_table(url).wrong_rows(self.events.oracle):
                raise Bug(f"{wrong:,} rows of {self.events.count:,} events are wrong")


def per_document(taken: Mapping[int, Sequence[float]]) -> Samples:
    """Turn figures by run size into figures per document, without those of the smallest size."""
    least = min(taken)
    start_up = statistics.median(taken[least])
    return Samples(
        {
            str(size): [max(each - start_up, FLOOR * each) / size for each in figures]
            for size, figures in taken.items()
            if size != least
        }
    )


def report(runs: Mapping[int, Sequence[Run]]) -> Report:
    """Build the report from runs of several sizes; the smallest measures start-up."""
    _, small, large = sorted(runs)
    seconds = per_document({size: [run.seconds for run in some] for size, some in runs.items()})
    cpu = per_document({size: [run.usage.cpu_s for run in some] for size, some in runs.items()})
    peaks = {
        size: statistics.median(run.usage.peak_rss_bytes for run in some) / 1e6
        for size, some in runs.items()
    }
    results = [
        Result(
            name=f"penstock run of {size:,} events",
            value=statistics.median(run.seconds for run in runs[size]),
            unit="s",
        )
        for size in sorted(runs)
    ]
    for size in (small, large):
        what = f"{size:,} events without start-up"
        results += [
            Result(name=what, value=seconds.median(str(size)) * 1e6, unit="us/document"),
            Result(name=what, value=cpu.median(str(size)) * 1e6, unit="us of CPU/document"),
        ]
    results += [
        Result(name=f"peak memory of {size:,} events", value=peaks[size], unit="MB RSS")
        for size in sorted(runs)
    ]
    results.append(
        Result(
            name=f"peak memory: {small:,} events / {large:,}",
            value=peaks[small] / peaks[large] if peaks[large] else float("nan"),
            unit="ratio",
        )
    )
    return Report(
        results=tuple(results),
        goals=(
            Goal(
                name=f"time per document: {small:,} events / {large:,}",
                measured=seconds.ratio(str(small), str(large)),
                goal=1 / 1.1,
            ),
            Goal(
                name=f"CPU per document: {small:,} events / {large:,}",
                measured=cpu.ratio(str(small), str(large)),
                goal=1 / 1.1,
            ),
        ),
        charts=(
            Chart(
                name="cost",
                title=f"Cost of an event, {small:,} and {large:,} of them to PostgreSQL",
                unit="us",
                bars=tuple(
                    (f"{OURS}, {size:,} events, {of}", taken.median(str(size)) * 1e6)
                    for of, taken in (("time", seconds), ("CPU", cpu))
                    for size in (small, large)
                ),
                note="Without start-up; less is better, and ten times the data should cost no more "
                "each.",
            ),
            Lines(
                name="memory",
                title="Peak memory against data",
                x_label="events",
                y_label="MB RSS",
                series=((OURS, tuple((float(size), peaks[size]) for size in sorted(runs))),),
                note="Of Python, the JVM and its workers together.",
            ),
        ),
    )
