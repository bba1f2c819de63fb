"""`penstock bench crash`: wrong rows after kill -9, at random moments and at the worst ones.

Events become a table of accounts in PostgreSQL. Whoever does it is killed, its JVM and all workers
with it, and started again; when everything is in, the table is compared with what it must be.

- Random kills: files of events come one after the other. A process is started for each and killed
  at a moment that is drawn evenly from how long an undisturbed one works, from when Spark has
  started. Penstock gets half of a file before, and the rest in small transactions while it runs,
  so that kills meet one transaction after the other and not only the first. A process that ends
  before its moment was not killed and does not count as such.
- Aimed kills: Penstock dies at each crash point of its leader and of its connector, in a deployment
  of its own; points that are not on the way of this task are counted as not reached. The peer has
  one such point, and is killed there a few times: PostgreSQL has committed a batch, and Spark has
  not written that down.

The peer is Spark Structured Streaming, one file per batch, that writes in three ways: fenced, which
is right; without a fence; and from each partition by itself.
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

from penstock.bench import processes
from penstock.bench.events import (
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
from penstock.bench.frame import OURS, Bench, Chart, Goal, Report, Result
from penstock.consensus.open import open_consensus
from penstock.errors import Unavailable
from penstock.failpoints import FAILPOINTS
from penstock.testing.postgres import PostgresServer, running_postgres

SEED: Final = 20
CRASHED: Final = 137
"""How a process ends at a crash point."""

TRICKLE_S: Final = 0.1
"""Between two small transactions while Penstock runs."""
TRICKLE: Final = 20
"""Small transactions of half a file."""

PEER_KILLS: Final = 6
"""At the one point that the peer has; each is a batch that counts twice, or does not."""

STREAMING: Final = "Structured Streaming"
WRITES: Final[Mapping[str, str]] = {
    "fenced": f"{STREAMING}, fenced",
    "unfenced": f"{STREAMING}, no fence",
    "partitions": f"{STREAMING}, by partition",
}

BEFORE: Final[Mapping[str, tuple[str, ...]]] = {
    "leader.after-reconcile": ("postgres.after-commit",),
}
"""Points that are only reached by who starts after a crash at others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one contestant and one kind of kills."""

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
        """The share of rows that are what they should be; none, of who was never killed."""
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
    """Who makes the table, and how events come to it."""

    @property
    def name(self) -> str:
        """As it is reported."""

    def give(self, file: int) -> None:
        """A file of events is there, or will be as `trickle` is called."""

    def trickle(self) -> None:
        """Give a little of what was held back, if anything was."""

    def give_rest(self) -> None:
        """Give all that was held back."""

    def command(self) -> Sequence[str | Path]:
        """Processes what is there, and ends."""

    def opening(self) -> Sequence[str | Path]:
        """Does nothing but to start Spark, which tells how long that takes."""


@dataclass(slots=True)
class Deployment:
    """Penstock: a deployment whose collection has the events, and `penstock run`."""

    data: Path
    append: Callable[[pyarrow.RecordBatch], None]
    events: Events
    name: str = OURS
    _held: deque[pyarrow.RecordBatch] = field(default_factory=deque)

    @classmethod
    @contextmanager
    def opened(cls, events: Events, url: str, data: Path) -> Iterator[Deployment]:
        """Within this, events can be appended."""
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

    def opening(self) -> Sequence[str | Path]:
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
        """All files are made, and none is given."""
        events.write_files(directory / "made")
        (directory / "input").mkdir()
        return cls(python=python, writes=writes, url=url, directory=directory)

    def give(self, file: int) -> None:
        name = f"part-{file:05d}.parquet"
        (self.directory / "made" / name).rename(self.directory / "input" / name)

    def trickle(self) -> None:
        """Nothing was held back: what is there when it starts is all that a run takes."""

    def give_rest(self) -> None:
        """Nothing was held back."""

    def command(self, *more: str) -> Sequence[str | Path]:
        return [
            self.python, Path(__file__).parent / "peers" / "structured_streaming.py",
            "--input", self.directory / "input", "--checkpoint", self.directory / "checkpoint",
            "--url", self.url, "--table", TABLE, "--writes", self.writes,
            "--once", "--files-per-trigger", "1", *more,
        ]  # fmt: skip

    def opening(self) -> Sequence[str | Path]:
        start = "SparkSession.builder.master('local[*]').getOrCreate()"
        return [self.python, "-c", f"from pyspark.sql import SparkSession; {start}"]


# --------------------------------------------------------------------------------- random kills


@dataclass(slots=True)
class Moments:
    """When to kill: evenly from `start_s`, when Spark is there, to how long a run takes."""

    start_s: float
    run_s: float

    def draw(self, chance: random.Random) -> float:
        return chance.uniform(min(self.start_s, self.run_s), self.run_s)


def attempt(contestant: Contestant, log: Path, *, start_s: float, kill_s: float | None) -> float:
    """Run it until it ends, or until it is killed after `kill_s`; how long it ran by itself.

    Infinite, if it was killed.
    """
    began = time.monotonic()
    trickled_s = start_s
    with processes.started(contestant.command(), log=log) as process:
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
            raise failed(contestant.name, process.returncode, log)
        return time.monotonic() - began


def kill_at_random(
    contestant: Contestant, log: Path, *, files: int, kills: int, chance: random.Random
) -> int:
    """Give it one file after the other, and kill it so often; how often it really was.

    The first file is for a run that nobody disturbs, and so is what is left when kills are done.
    """
    start_s = processes.run(contestant.opening()).seconds
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
            moments.run_s = ran_s  # the machine is quicker than it was
    for file in range(given, files):
        contestant.give_rest()
        contestant.give(file)
    contestant.give_rest()
    attempt(contestant, log, start_s=start_s, kill_s=None)
    return killed


def failed(name: str, code: int | None, log: Path) -> Unavailable:
    """What a process has to say that should not have ended like that."""
    said = log.read_text(errors="replace").splitlines()[-12:]
    return Unavailable(f"{name} ended with exit code {code}", why="\n".join(said))


# ---------------------------------------------------------------------------------- aimed kills


def crash_points() -> list[str]:
    """Those of the leader and of the connector to PostgreSQL."""
    from penstock.connectors import postgres  # noqa: F401 - declares its points
    from penstock.runtime.materialize import leader  # noqa: F401 - likewise

    return sorted(name for name in FAILPOINTS if name.startswith(("leader.", "postgres.")))


def die_at(point: str, files: Events, url: str, data: Path) -> Outcome | None:
    """A task that dies at a point, and is run again; nothing, if it does not come to that point."""
    with Deployment.opened(files, url, data) as ours:
        ours.give(0)
        ours.give_rest()
        deaths = (*BEFORE.get(point, ()), point)
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
    return judged(OURS, "aimed kills", len(deaths), postgres_table(url), files.oracle)


def pause_and_kill(contestant: Streaming, log: Path, *, kills: int) -> None:
    """Kill it between PostgreSQL's commit and Spark's own, of one batch after the other."""
    for batch in range(kills):
        contestant.give(batch)
        command = contestant.command("--pause-after", f"commit:{batch}")
        with processes.started(command, log=log) as process:
            if not _says(process, "paused"):
                raise failed(contestant.name, process.wait(), log)
    processes.run(contestant.command())


def _says(process: subprocess.Popen[bytes], word: str) -> bool:
    if process.stdout is None:
        raise AssertionError("it is a pipe")
    return any(line.decode().strip() == word for line in process.stdout)


def judged(contestant: str, kind: str, kills: int, table: Table, oracle: Table) -> Outcome:
    """What a table has come to."""
    return Outcome(
        contestant=contestant,
        kind=kind,
        kills=kills,
        rows=len(oracle.account),
        wrong=table.wrong_rows(oracle),
    )


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Outcomes of one contestant, each with a table of its own, as one."""
    return replace(
        outcomes[0],
        kills=sum(each.kills for each in outcomes),
        rows=sum(each.rows for each in outcomes),
        wrong=sum(each.wrong for each in outcomes),
    )


# ------------------------------------------------------------------------------------ measuring


def run(bench: Bench) -> Report:
    """Random kills of everybody, then aimed ones."""
    if bench.peers is None:
        bench.say(f"{STREAMING} is not installed: {OURS} is killed alone")
    with (
        running_postgres() as server,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch,
    ):
        at_random = measure_random(bench, server, Path(scratch) / "random")
        aimed, not_reached = measure_aimed(bench, server, Path(scratch) / "aimed")
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
    """Shares, because tables differ in size."""
    kills = " and ".join(sorted({f"{each.kills}" for each in outcomes}))
    return Chart(
        name=f"wrong-rows-{name}",
        title=f"Wrong rows after {how}",
        unit="% of rows",
        bars=tuple((each.contestant, 100 * each.wrong_share) for each in outcomes),
        note=f"{kills} kills each, every row compared; zero is right.",
    )


def ways(bench: Bench, *writes: str) -> list[tuple[Path, str]]:
    """How the peer is to write, with its interpreter; in no way, if it is not installed."""
    return [] if bench.peers is None else [(bench.peers, each) for each in writes]


def measure_random(bench: Bench, server: PostgresServer, scratch: Path) -> list[Outcome]:
    """Everybody who may be killed at any time, with the same files."""
    events = Events(bench.size(full=2_000_000, quick=100_000), bench.size(full=20, quick=10))
    kills = bench.size(full=8, quick=2)
    kind = "random kills"

    def killed(contestant: Contestant, directory: Path, url: str) -> Outcome:
        bench.say(f"{contestant.name}: {events.count:,} events, {kills} {kind}")
        log, chance = directory / "log", random.Random(SEED)  # noqa: S311 - not a secret
        made = kill_at_random(contestant, log, files=events.files, kills=kills, chance=chance)
        return judged(contestant.name, kind, made, postgres_table(url), events.oracle)

    url = server.create_database()
    with Deployment.opened(events, url, scratch / "penstock" / "data") as ours:
        outcomes = [killed(ours, scratch / "penstock", url)]
    for python, writes in ways(bench, "fenced", "partitions"):
        url, directory = server.create_database(), scratch / writes
        peer = Streaming.prepared(events, url, directory, python=python, writes=writes)
        outcomes.append(killed(peer, directory, url))
    return outcomes


def measure_aimed(
    bench: Bench, server: PostgresServer, scratch: Path
) -> tuple[list[Outcome], list[str]]:
    """Penstock at its crash points, its peer at the one it has; and points that nobody came to."""
    kind, size = "aimed kills", 10_000
    points = crash_points()
    random.Random(SEED).shuffle(points)  # noqa: S311 - not a secret
    wanted = bench.size(full=len(points), quick=4)
    died: list[Outcome] = []
    not_reached: list[str] = []
    for point in points:
        if len(died) < wanted:
            bench.say(f"{OURS}: {kind}, at {point}")
            url = server.create_database()
            outcome = die_at(point, Events(2 * size, 2), url, scratch / point)
            if outcome is None:
                not_reached.append(point)
            else:
                died.append(outcome)
    outcomes = [together(died)]
    kills = min(outcomes[0].kills, PEER_KILLS)
    events = Events(size * kills, kills)
    for python, writes in ways(bench, *WRITES):
        url, directory = server.create_database(), scratch / writes
        bench.say(f"{WRITES[writes]}: {events.count:,} events, {events.files} {kind}")
        peer = Streaming.prepared(events, url, directory, python=python, writes=writes)
        pause_and_kill(peer, directory / "log", kills=events.files)
        table = postgres_table(url)
        outcomes.append(judged(peer.name, kind, events.files, table, events.oracle))
    return outcomes, not_reached
