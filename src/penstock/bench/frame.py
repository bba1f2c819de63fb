"""The frame of every benchmark: what a workload is, how peers are measured, what it reports.

A workload is a function from a `Bench` to a `Report`. It measures its subject and its peers in the
same run, interleaved, because a machine's speed drifts: what is compared must have lived through
the same minutes. Absolute figures belong to the machine that is reported beside them; goals are
ratios, arranged so that larger is better, which mean the same everywhere.

A new workload is a module here and a line in `WORKLOADS`.
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
class Listed:
    """A workload as it is listed: where its function is, and a line for who chooses.

    The line stands here and not in the module, because to list workloads must import none.
    """

    place: str
    about: str


WORKLOADS: Mapping[str, Listed] = {
    "model": Listed(
        "penstock.bench.model:run", "frontiers, packed keys and reductions, beside plain code"
    ),
    "consensus": Listed(
        "penstock.bench.consensus:run", "many clients on one committer, beside a connection each"
    ),
    "journal": Listed(
        "penstock.bench.journal:run", "appends, scans, latency and listings, beside plain Parquet"
    ),
    "shuffle": Listed(
        "penstock.bench.shuffle:run", "what journals, fragments, memory and shards cost"
    ),
    "materialize": Listed(
        "penstock.bench.materialize:run",
        "events to PostgreSQL and SQLite, beside Structured Streaming and others",
    ),
    "latency": Listed(
        "penstock.bench.latency:run",
        "from append to visible in PostgreSQL, beside Structured Streaming",
    ),
    "crash": Listed(
        "penstock.bench.crash:run", "wrong rows after kill -9, beside Structured Streaming"
    ),
    "consistency": Listed(
        "penstock.bench.consistency:run",
        "reads of two tables that see half a transaction, beside Structured Streaming",
    ),
    "scale": Listed(
        "penstock.bench.scale:run", "what more documents, journals, tasks and history cost"
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
        """Whether the goal was reached."""
        return self.measured >= self.goal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Figures of the same unit as horizontal bars.

    Ours is the bar called `OURS`; where there are several, their names begin with that and a comma.
    """

    name: str
    """Part of a file's name: lower case, words joined by hyphens, unique in its report."""
    title: str
    unit: str
    bars: tuple[tuple[str, float], ...]
    note: str = ""
    """A sentence below the bars, such as which way is better."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Figures that depend on something, a line per series; ours are called as in a `Chart`."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a workload found."""

    results: tuple[Result, ...]
    goals: tuple[Goal, ...] = ()
    charts: tuple[Chart | Lines, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """Figures by peer, one per round; the n-th of each peer were taken in the same round."""

    by_peer: Mapping[str, Sequence[float]]

    def median(self, peer: str) -> float:
        """The middle figure of one peer."""
        return statistics.median(self.by_peer[peer])

    def ratio(self, of: str, to: str) -> float:
        """The middle of each round's ratio, so that a slow round is slow for both."""
        pairs = zip(self.by_peer[of], self.by_peer[to], strict=True)
        return statistics.median(a / b for a, b in pairs)


@dataclasses.dataclass(kw_only=True)
class Bench:
    """What a workload works with: its size, a SparkSession when it asks for one, and progress."""

    quick: bool = False
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    say: Callable[[str], None] = lambda _: None
    """Tells people what is being measured; a benchmark that is silent for a minute looks dead."""
    peers: Path | None = None
    """The Python that has the peers installed. Without one, a workload leaves out those that need
    it, and the goals that compare with them, and says so."""
    _spark: SparkSession | None = dataclasses.field(default=None, init=False)

    def size(self, *, full: int, quick: int) -> int:
        """How much of something this run should use."""
        return quick if self.quick else full

    def spark(self) -> SparkSession:
        """The session that all workloads of a run share."""
        if self._spark is None:
            self.say("starting Spark")
            self._spark = open_spark(self.engine)
        return self._spark

    def close(self) -> None:
        """End the session, if any workload asked for one."""
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

        The order turns with each round, so that nobody always runs after the same neighbour.
        `rounds` is for work so long that the usual number of them would take an hour.
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
    """A peer for `interleave` that reports how long `work` took, in seconds."""

    def timed() -> float:
        gc.collect()  # or the garbage of one peer is collected on the time of the next
        begin = clock()
        work()
        return clock() - begin

    return timed


def choose(names: Iterable[str]) -> list[str]:
    """The named workloads, once each, or all of them."""
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
    """Import a workload; no other is imported."""
    module, _, function = WORKLOADS[name].place.partition(":")
    workload: Workload = getattr(importlib.import_module(module), function)
    return workload


def significant(value: float) -> str:
    """Four significant digits below a thousand; above it whole numbers, grouped."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
