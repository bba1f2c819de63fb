"""`penstock bench crash`: wrong rows after kill -9, at random moments and at the worst ones.

Events become a table of accounts in PostgreSQL. The process that writes it is killed, with its JVM
and all workers, and started again; once all events are in, the table is compared with the oracle.

- Random kills: files of events arrive one after the other. A process is started for each, and
  killed at a random time between the start of Spark and the duration of an undisturbed run.
  Penstock gets half of each file before it starts, and the rest in small transactions while it
  runs, so that kills hit later transactions and not only the first. A process that ends before its
  kill does not count as killed.
- Aimed kills: Penstock dies at each failpoint of its leader and of its connector, in a separate
  deployment; failpoints that this task never reaches are counted as not reached. The peer has one
  such point, and is killed there a few times: after PostgreSQL has committed a batch, and before
  Spark has recorded it.

The peer is Spark Structured Streaming, with one file per batch, which writes in three ways: fenced,
which is correct; without a fence; and from each partition on its own.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow

from penstock.consensus.open import open_consensus
from penstock.errors import Unavailable
from penstock.failpoints import FAILPOINTS
from penstock.testing.postgres import PostgresServer, running_postgres
from penstock_bench import processes
from penstock_bench.events import (
    TABLE,
    Appender,
    Events,
    Table,
    apply_catalog,
    catalog_text,
    postgres_endpoint,
    postgres_table,
    settings_in,
)
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result

SEED: Final = 20
CRASHED: Final = 137
"""Exit code of a process that dies at a failpoint."""

TRICKLE_S: Final = 0.1
"""Seconds between two small transactions while Penstock runs."""
TRICKLE: Final = 20
"""Number of small transactions that half a file is split into."""

PEER_KILLS: Final = 6
"""Kills at the peer's only point; each shows whether a batch counts twice."""

STREAMING: Final = "Structured Streaming"
WRITES: Final[Mapping[str, str]] = {
    "fenced": f"{STREAMING}, fenced",
    "unfenced": f"{STREAMING}, no fence",
    "partitions": f"{STREAMING}, by partition",
}

REACHED_AFTER: Final[Mapping[str, tuple[str, ...]]] = {
    "leader.after-reconcile": ("postgres.after-commit",),
}
"""Failpoints that only a process reaches that starts after a crash at others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one contestant under one kind of kills."""

    contestant: str
    kind: str
    kills: int
    rows: int
    wrong: int

    @property
    def wrong_share(self) -> float:
        return self.wrong / self.rows

    @property
    def right(self) -> float:
        """The share of right rows; zero for a contestant that was never killed."""
        return 1 - self.wrong_share if self.kills else 0.0

    @property
    def results(self) -> tuple[Result, ...]:
        what = f"{self.contestant}, {self.kind}"
        return (
            Result(name=f"{what}: kills", value=self.kills, unit="kills"),
            Result(name=f"{what}: wrong rows", value=self.wrong, unit=f"of {self.rows:,} rows"),
        )


# ---------------------------------------------------------------------------------- contestants


class Contestant(Protocol):
    """A program that builds the table, and the way to give it events."""

    @property
    def name(self) -> str:
        """Its name in the report."""

    def give(self, file: int) -> None:
        """Give it a file of events; it may hold back some of them for `trickle`."""

    def trickle(self) -> None:
        """Give it a few of the events that were held back, if any."""

    def give_rest(self) -> None:
        """Give it all events that were held back."""

    def command(self) -> Sequence[str | Path]:
        """Return the command that processes the given events, and ends."""

    def spark_start_command(self) -> Sequence[str | Path]:
        """Return a command that only starts Spark, to measure how long that takes."""


@dataclass(slots=True)
class Deployment:
    """Penstock: a deployment with the events in its collection, and `penstock run`."""

    data: Path
    append: Callable[[pyarrow.RecordBatch], None]
    events: Events
    name: str = OURS
    _held: deque[pyarrow.RecordBatch] = field(default_factory=deque)

    @classmethod
    @contextmanager
    def opened(cls, events: Events, url: str, data: Path) -> Iterator[Deployment]:
        """Open a deployment that events can be appended to."""
        data.mkdir(parents=True)
        catalog = data / "catalog.yaml"
        catalog.write_text(catalog_text(postgres_endpoint(url)))
        settings = settings_in(data)
        with asyncio.Runner() as loop:
            store = loop.run(open_consensus(settings.consensus))
            try:
                appender = Appender(store, settings, loop.run(apply_catalog(store, catalog)))
                yield cls(data, lambda batch: loop.run(appender.append(batch)), events)
            finally:
                loop.run(store.close())

    def give(self, file: int) -> None:
        batch: Any = self.events.batch(file)
        half = batch.num_rows // 2
        step = -(-(batch.num_rows - half) // TRICKLE)
        self.append(batch.slice(0, half))
        self._held += [batch.slice(at, step) for at in range(half, batch.num_rows, step)]

    def trickle(self) -> None:
        if self._held:
            self.append(self._held.popleft())

    def give_rest(self) -> None:
        while self._held:
            self.trickle()

    def command(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "penstock", "run", "--data", self.data, "--json"]

    def spark_start_command(self) -> Sequence[str | Path]:
        start = "from penstock.engine import EngineOptions, open_spark; open_spark(EngineOptions())"
        return [sys.executable, "-c", start]


@dataclass(slots=True, kw_only=True)
class Streaming:
    """Structured Streaming: a directory that files are renamed into."""

    python: Path
    writes: str
    url: str
    directory: Path

    @property
    def name(self) -> str:
        return WRITES[self.writes]

    @classmethod
    def prepared(
        cls, events: Events, url: str, directory: Path, *, python: Path, writes: str
    ) -> Streaming:
        """Write all files, and give none of them."""
        events.write_files(directory / "made")
        (directory / "input").mkdir()
        return cls(python=python, writes=writes, url=url, directory=directory)

    def give(self, file: int) -> None:
        name = f"part-{file:05d}.parquet"
        (self.directory / "made" / name).rename(self.directory / "input" / name)

    def trickle(self) -> None:
        """Nothing is held back: a run only takes the files that exist when it starts."""

    def give_rest(self) -> None:
        """Nothing is held back."""

    def command(self, *more: str) -> Sequence[str | Path]:
        return [
            self.python, Path(__file__).parent / "peers" / "structured_streaming.py",
            "--input", self.directory / "input", "--checkpoint", self.directory / "checkpoint",
            "--url", self.url, "--table", TABLE, "--writes", self.writes,
            "--once", "--files-per-trigger", "1", *more,
        ]  # fmt: skip

    def spark_start_command(self) -> Sequence[str | Path]:
        start = "SparkSession.builder.master('local[*]').getOrCreate()"
        return [self.python, "-c", f"from pyspark.sql import SparkSession; {start}"]


# --------------------------------------------------------------------------------- random kills


@dataclass(slots=True)
class Moments:
    """When to kill: uniformly between `start_s`, when Spark has started, and the end of a run."""

    start_s: float
    run_s: float

    def draw(self, chance: random.Random) -> float:
        return chance.uniform(min(self.start_s, self.run_s), self.run_s)


def attempt(contestant: Contestant, log: Path, *, start_s: float, kill_s: float | None) -> float:
    """Run it until it ends or is killed after `kill_s`; return how long it ran.

    Infinite if it was killed.
    """
    began = time.monotonic()
    trickled_s = start_s
    with processes.running_process(contestant.command(), log=log) as process:
        while process.poll() is None:
            age_s = time.monotonic() - began
            if kill_s is not None and age_s >= kill_s:
                processes.kill_tree(process)
                return float("inf")
            if age_s >= trickled_s + TRICKLE_S:
                contestant.trickle()
                trickled_s = age_s
            time.sleep(0.005)
        if process.returncode:
            raise exit_error(contestant.name, process.returncode, log)
        return time.monotonic() - began


def kill_at_random(
    contestant: Contestant, log: Path, *, files: int, kills: int, chance: random.Random
) -> int:
    """Give it one file after the other, and kill it up to `kills` times; return the actual number.

    The first file is for an undisturbed run, and so are the files that remain after the kills.
    """
    start_s = processes.run(contestant.spark_start_command()).seconds
    contestant.give(0)
    moments = Moments(start_s, attempt(contestant, log, start_s=start_s, kill_s=None))
    killed, given = 0, 1
    while killed < kills and given < files - 1:
        contestant.give_rest()
        contestant.give(given)
        given += 1
        ran_s = attempt(contestant, log, start_s=start_s, kill_s=moments.draw(chance))
        if ran_s == float("inf"):
            killed += 1
        else:
            moments.run_s = ran_s  # the machine is faster than before
    for file in range(given, files):
        contestant.give_rest()
        contestant.give(file)
    contestant.give_rest()
    attempt(contestant, log, start_s=start_s, kill_s=None)
    return killed


def exit_error(name: str, code: int | None, log: Path) -> Unavailable:
    """Return the error for a process that ended unexpectedly, with its last output."""
    last = log.read_text(errors="replace").splitlines()[-12:]
    return Unavailable(f"{name} ended with exit code {code}", why="\n".join(last))


# ---------------------------------------------------------------------------------- aimed kills


def aimed_failpoints() -> list[str]:
    """Return the failpoints of the leader and of the PostgreSQL connector."""
    from penstock.connectors.postgres import sink  # noqa: F401 - declares its failpoints
    from penstock.runtime.materialize import leader  # noqa: F401 - likewise

    return sorted(name for name in FAILPOINTS if name.startswith(("leader.", "postgres.")))


def die_at(point: str, files: Events, url: str, data: Path) -> Outcome | None:
    """Run a task that dies at a failpoint, then run it again; None if it never gets there."""
    with Deployment.opened(files, url, data) as ours:
        ours.give(0)
        ours.give_rest()
        deaths = (*REACHED_AFTER.get(point, ()), point)
        for each in deaths:
            run = processes.run(ours.command(), environ={"PENSTOCK_FAILPOINT": each}, check=False)
            if run.code == 0:
                return None
            if run.code != CRASHED:
                raise Unavailable(f"{OURS} ended with exit code {run.code} at {each}")
        for file in range(1, files.files):
            ours.give(file)
            ours.give_rest()
        processes.run(ours.command())
    return judge(OURS, "aimed kills", len(deaths), postgres_table(url), files.oracle)


def pause_and_kill(contestant: Streaming, log: Path, *, kills: int) -> None:
    """Kill it between PostgreSQL's commit and Spark's own, for one batch after the other."""
    for batch in range(kills):
        contestant.give(batch)
        command = contestant.command("--pause-after", f"commit:{batch}")
        with processes.running_process(command, log=log) as process:
            if not _prints(process, "paused"):
                raise exit_error(contestant.name, process.wait(), log)
    processes.run(contestant.command())


def _prints(process: subprocess.Popen[bytes], word: str) -> bool:
    if process.stdout is None:
        raise AssertionError("it is a pipe")
    return any(line.decode().strip() == word for line in process.stdout)


def judge(contestant: str, kind: str, kills: int, table: Table, oracle: Table) -> Outcome:
    """Compare a table with the oracle."""
    return Outcome(
        contestant=contestant,
        kind=kind,
        kills=kills,
        rows=len(oracle.account),
        wrong=table.wrong_rows(oracle),
    )


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Combine outcomes of one contestant that each have a table of their own."""
    return replace(
        outcomes[0],
        kills=sum(each.kills for each in outcomes),
        rows=sum(each.rows for each in outcomes),
        wrong=sum(each.wrong for each in outcomes),
    )


# ------------------------------------------------------------------------------------ measuring


def run(bench: Bench) -> Report:
    """Measure random kills of all contestants, then aimed kills."""
    if bench.peers is None:
        bench.say(f"{STREAMING} is not installed: {OURS} is killed alone")
    with (
        running_postgres() as server,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir,
    ):
        at_random = measure_random(bench, server, Path(temp_dir) / "random")
        aimed, not_reached = measure_aimed(bench, server, Path(temp_dir) / "aimed")
    ours = [each for each in (*at_random, *aimed) if each.contestant == OURS]
    return Report(
        results=(
            *(result for each in (*at_random, *aimed) for result in each.results),
            Result(
                name=f"{OURS}, aimed kills: points that are not on the way",
                value=len(not_reached),
                unit="points",
            ),
        ),
        goals=tuple(
            Goal(name=f"{each.kind}: share of right rows", measured=each.right, goal=1.0)
            for each in ours
        ),
        charts=(
            chart("random", "kill -9 at random moments", at_random),
            chart("aimed", "kill -9 between two steps", aimed),
        ),
    )


def chart(name: str, how: str, outcomes: Sequence[Outcome]) -> Chart:
    """Draw shares of wrong rows, because tables differ in size."""
    kills = " and ".join(sorted({f"{each.kills}" for each in outcomes}))
    return Chart(
        name=f"wrong-rows-{name}",
        title=f"Wrong rows after {how}",
        unit="% of rows",
        bars=tuple((each.contestant, 100 * each.wrong_share) for each in outcomes),
        note=f"{kills} kills each, every row compared; zero is right.",
    )


def peer_variants(bench: Bench, *writes: str) -> list[tuple[Path, str]]:
    """Return the peer's interpreter with each way to write; empty if it is not installed."""
    return [] if bench.peers is None else [(bench.peers, each) for each in writes]


def measure_random(bench: Bench, server: PostgresServer, temp_dir: Path) -> list[Outcome]:
    """Kill all contestants at random times, on the same files."""
    events = Events(bench.size(full=2_000_000, quick=100_000), bench.size(full=20, quick=10))
    kills = bench.size(full=8, quick=2)
    kind = "random kills"

    def killed(contestant: Contestant, directory: Path, url: str) -> Outcome:
        bench.say(f"{contestant.name}: {events.count:,} events, {kills} {kind}")
        log, chance = directory / "log", random.Random(SEED)  # noqa: S311 - not a secret
        made = kill_at_random(contestant, log, files=events.files, kills=kills, chance=chance)
        return judge(contestant.name, kind, made, postgres_table(url), events.oracle)

    url = server.create_database()
    with Deployment.opened(events, url, temp_dir / "penstock" / "data") as ours:
        outcomes = [killed(ours, temp_dir / "penstock", url)]
    for python, writes in peer_variants(bench, "fenced", "partitions"):
        url, directory = server.create_database(), temp_dir / writes
        peer = Streaming.prepared(events, url, directory, python=python, writes=writes)
        outcomes.append(killed(peer, directory, url))
    return outcomes


def measure_aimed(
    bench: Bench, server: PostgresServer, temp_dir: Path
) -> tuple[list[Outcome], list[str]]:
    """Kill Penstock at its failpoints and the peer at its only one.

    Also returns the failpoints that were never reached.
    """
    kind, size = "aimed kills", 10_000
    points = aimed_failpoints()
    random.Random(SEED).shuffle(points)  # noqa: S311 - not a secret
    wanted = bench.size(full=len(points), quick=4)
    died: list[Outcome] = []
    not_reached: list[str] = []
    for point in points:
        if len(died) < wanted:
            bench.say(f"{OURS}: {kind}, at {point}")
            url = server.create_database()
            outcome = die_at(point, Events(2 * size, 2), url, temp_dir / point)
            if outcome is None:
                not_reached.append(point)
            else:
                died.append(outcome)
    outcomes = [merge_outcomes(died)]
    kills = min(outcomes[0].kills, PEER_KILLS)
    events = Events(size * kills, kills)
    for python, writes in peer_variants(bench, *WRITES):
        url, directory = server.create_database(), temp_dir / writes
        bench.say(f"{WRITES[writes]}: {events.count:,} events, {events.files} {kind}")
        peer = Streaming.prepared(events, url, directory, python=python, writes=writes)
        pause_and_kill(peer, directory / "log", kills=events.files)
        table = postgres_table(url)
        outcomes.append(judge(peer.name, kind, events.files, table, events.oracle))
    return outcomes, not_reached
