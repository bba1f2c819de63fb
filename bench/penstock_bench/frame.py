"""What every benchmark shares: workloads, interleaved measurement, and reports.

A workload is a function from a `Bench` to a `Report`. It interleaves its subject and its peers in
one run, because a machine's speed drifts: only figures from the same minutes can be compared.
Absolute figures are valid only for the machine reported beside them. Goals are ratios, arranged so
that larger is better, and mean the same on every machine.

To add a workload, write a module here and add a line to `WORKLOADS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from penstock.engine import EngineOptions, close_spark, open_spark
from penstock.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPETITIONS = 7
REPETITIONS_QUICK = 5

OURS = "Penstock"


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadEntry:
    """Where a workload's function is, and one line that describes it.

    The description is here rather than in the module, so that listing workloads imports none.
    """

    place: str
    about: str


WORKLOADS: Mapping[str, WorkloadEntry] = {
    "model": WorkloadEntry(
        "penstock_bench.model:run", "frontiers, packed keys and reductions, beside plain code"
    ),
    "consensus": WorkloadEntry(
        "penstock_bench.consensus:run", "many clients on one committer, beside a connection each"
    ),
    "journal": WorkloadEntry(
        "penstock_bench.journal:run", "appends, scans, latency and listings, beside plain Parquet"
    ),
    "shuffle": WorkloadEntry(
        "penstock_bench.shuffle:run", "what journals, fragments, memory and shards cost"
    ),
    "materialize": WorkloadEntry(
        "penstock_bench.materialize:run",
        "events to PostgreSQL and SQLite, beside Structured Streaming and others",
    ),
    "latency": WorkloadEntry(
        "penstock_bench.latency:run",
        "from append to visible in PostgreSQL, beside Structured Streaming",
    ),
    "pipeline": WorkloadEntry(
        "penstock_bench.pipeline:run",
        "events through two hops, beside Declarative Pipelines and others",
    ),
    "capture": WorkloadEntry(
        "penstock_bench.capture:run",
        "files, changes and HTTP into collections, beside plain Spark and others",
    ),
    "crash": WorkloadEntry(
        "penstock_bench.crash:run", "wrong rows after kill -9, beside Structured Streaming"
    ),
    "consistency": WorkloadEntry(
        "penstock_bench.consistency:run",
        "reads of two tables that see half a transaction, beside Structured Streaming",
    ),
    "scale": WorkloadEntry(
        "penstock_bench.scale:run", "what more documents, journals, tasks and history cost"
    ),
    "operate": WorkloadEntry(
        "penstock_bench.operate:run", "penstock up: idle and busy tasks, apply, restart, warm runs"
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure; `unit` says what it counts, and per what."""

    name: str
    value: float
    unit: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A ratio of two figures of the same run, and the least it should be."""

    name: str
    measured: float
    goal: float

    @property
    def holds(self) -> bool:
        """True if the goal was reached."""
        return self.measured >= self.goal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Figures of one unit, as horizontal bars.

    Penstock's bar is called `OURS`; if there are several, their names begin with that and a comma.
    """

    name: str
    """Part of a file name: lower case, words joined by hyphens, unique in its report."""
    title: str
    unit: str
    bars: tuple[tuple[str, float], ...]
    note: str = ""
    """A sentence below the bars, such as which direction is better."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Figures over a variable, one line per series; Penstock's are named as in a `Chart`."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one workload."""

    results: tuple[Result, ...]
    goals: tuple[Goal, ...] = ()
    charts: tuple[Chart | Lines, ...] = ()

    @classmethod
    def merge(cls, parts: Iterable[Report]) -> Report:
        """Combine the reports of a workload's parts."""
        parts = list(parts)
        return cls(
            results=tuple(result for part in parts for result in part.results),
            goals=tuple(goal for part in parts for goal in part.goals),
            charts=tuple(chart for part in parts for chart in part.charts),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """Figures by peer, one per round; the n-th figures of all peers come from the same round."""

    by_peer: Mapping[str, Sequence[float]]

    def median(self, peer: str) -> float:
        """Return the median figure of one peer."""
        return statistics.median(self.by_peer[peer])

    def ratio(self, of: str, to: str) -> float:
        """Return the median of the rounds' ratios, so that a slow round is slow for both."""
        pairs = zip(self.by_peer[of], self.by_peer[to], strict=True)
        return statistics.median(a / b for a, b in pairs)


@dataclasses.dataclass(kw_only=True)
class Bench:
    """What a workload gets: its size, a SparkSession on demand, and a way to report progress."""

    quick: bool = False
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    say: Callable[[str], None] = lambda _: None
    """Tells people what is being measured; a benchmark that is silent for a minute looks hung."""
    peers: Path | None = None
    """The Python interpreter that has the peers installed. Without it, a workload leaves out those
    peers and the goals that compare with them, and says so."""
    _spark: SparkSession | None = dataclasses.field(default=None, init=False)

    def size(self, *, full: int, quick: int) -> int:
        """Return the size for this kind of run."""
        return quick if self.quick else full

    def spark(self) -> SparkSession:
        """Return the session that all workloads of a run share."""
        if self._spark is None:
            self.say("starting Spark")
            self._spark = open_spark(self.engine)
        return self._spark

    def close(self) -> None:
        """End the session, if a workload started one."""
        running, self._spark = self._spark, None
        if running is not None:
            close_spark()

    def interleave(
        self,
        what: str,
        peers: Mapping[str, Callable[[], float]],
        *,
        warmups: int = 1,
        rounds: int | None = None,
    ) -> Samples:
        """Let peers take turns, each returning one figure; the first rounds only warm up.

        The order rotates with each round, so that no peer always runs after the same neighbour.
        Pass `rounds` for work so long that the usual number of rounds would take an hour.
        """
        rounds = rounds or (REPETITIONS_QUICK if self.quick else REPETITIONS)
        names = list(peers)
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-warmups, rounds):
            which = f"round {number + 1} of {rounds}" if number >= 0 else "warm-up"
            self.say(f"{what}: {which}")
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                figure = peers[name]()
                if number >= 0:
                    taken[name].append(figure)
        return Samples(taken)


Workload: TypeAlias = Callable[[Bench], Report]


def seconds_of(
    work: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Make a peer for `interleave` that reports how long `work` took, in seconds."""

    def timed() -> float:
        gc.collect()  # or collecting the garbage of one peer counts as time of the next
        begin = clock()
        work()
        return clock() - begin

    return timed


def choose(names: Iterable[str]) -> list[str]:
    """Return the named workloads, once each, or all of them."""
    chosen = list(dict.fromkeys(names)) or list(WORKLOADS)
    for name in chosen:
        if name not in WORKLOADS:
            near = difflib.get_close_matches(name, WORKLOADS, n=1)
            raise UsageError(
                f'no benchmark is called "{name}"',
                fix=f'did you mean "{near[0]}"?' if near else f"known: {', '.join(WORKLOADS)}",
            )
    return chosen


def load(name: str) -> Workload:
    """Import one workload, and no other."""
    module, _, function = WORKLOADS[name].place.partition(":")
    workload: Workload = getattr(importlib.import_module(module), function)
    return workload


def format_figure(value: float) -> str:
    """Format with four significant digits below a thousand, as grouped whole numbers above."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
