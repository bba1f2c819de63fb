"""`penstock bench consistency`: does a reader of two tables ever see money missing or doubled?

A writer moves money between accounts of two collections: twenty appends a second of fifty moves.
For Penstock each append is one transaction over both collections, and one task maintains a table
for each of them. Structured Streaming reads files: two for each append, one in the directory of
each collection, both complete before they are renamed into place one after the other, which is the
best that files can offer. Its queries are fenced:

- one for each table, in one session; or
- one over both directories, whose batches write both tables in one transaction.

A reader asks PostgreSQL for the total of both tables, in one snapshot, fifty times a second: while
the contestant works, while it is killed (kill -9, with its JVM) every few seconds, and while it
starts again. A read whose total differs from the initial one is torn. In the end the writer stops,
and every balance is compared with the expected one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable
from penstock.testing.postgres import running_postgres
from penstock_bench import leading, money, processes
from penstock_bench.crash import exit_error
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result
from penstock_bench.money import Append, Moves, Reads, WriterProgress, run_in_background

SEED: Final = 5
STREAMING: Final = "Structured Streaming"
QUERIES: Final[Mapping[str, str]] = {
    "two": f"{STREAMING}, query per table",
    "union": f"{STREAMING}, one query",
}

SHOWS_S_MAX: Final = 300
"""How long a contestant may take to start and to change the tables."""
QUIET_S: Final = 20
"""Tables that have not changed for this long after the last append are final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A contestant: its command, and how it receives moves; both get a directory and a URL."""

    name: str
    command: Callable[[Path, str], Sequence[str | Path]]
    appending: Callable[[Moves, Path, str], AbstractAsyncContextManager[Append]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long the load lasts, from the first read that counts, and how long a process lives."""

    seconds: float
    lives_s: tuple[float, float] = (0.5, 4.0)
    """Range of seconds from its first change to its kill; drawn uniformly."""
    kills_min: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one contestant."""

    contestant: str
    kills: int
    appends: int
    reads: Reads
    rows: int
    wrong: int

    @property
    def results(self) -> tuple[Result, ...]:
        figures = (
            ("reads", self.reads.count, "reads"),
            ("torn reads", self.reads.torn, "reads"),
            ("share of torn reads", 100 * self.reads.torn_share, "%"),
            ("largest error", self.reads.largest_error, f"of {self.reads.total:,} in all"),
            ("states that were seen", self.reads.states, "states"),
            ("appends", self.appends, "appends"),
            ("kills", self.kills, "kills"),
            ("wrong rows at rest", self.wrong, f"of {self.rows:,} rows"),
        )
        return tuple(
            Result(name=f"{self.contestant}: {name}", value=value, unit=unit)
            for name, value, unit in figures
        )


# ---------------------------------------------------------------------------------- contestants


def penstock() -> Contestant:
    """Penstock: one task with two bindings, led by a process that follows appends."""
    return Contestant(
        name=OURS,
        command=lambda here, _: leading.command(here / "data"),
        appending=lambda moves, here, url: money.to_collections(moves, here / "data", url),
    )


def streaming(python: Path, queries: str) -> Contestant:
    """Structured Streaming, with one query or with two."""
    script = Path(__file__).parent / "peers" / "money.py"
    return Contestant(
        name=QUERIES[queries],
        command=lambda here, url: [
            python, script, "--input", here / "files", "--checkpoint", here / "checkpoint",
            "--url", url, "--queries", queries,
        ],
        appending=lambda moves, here, _: money.to_files(moves, here / "files"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ observing


@dataclass(slots=True)
class Observer:
    """Observes one contestant through kills and restarts."""

    contestant: Contestant
    moves: Moves
    here: Path
    url: str
    chance: random.Random
    reads: Reads = field(init=False)
    written: WriterProgress = field(default_factory=WriterProgress)

    def __post_init__(self) -> None:
        self.reads = Reads(self.moves.total)

    def observe(self, plan: Plan) -> Outcome:
        """Start it, kill it, start it again, and finally let it catch up."""
        self.here.mkdir(parents=True)
        appending = self.contestant.appending(self.moves, self.here, self.url)
        write = functools.partial(money.write, appending, self.written)
        read = functools.partial(money.read, self.url, self.reads)
        with run_in_background(write) as writer, run_in_background(read) as reader:
            while not self.written.appends:
                writer.check()
                time.sleep(0.01)
            kills = 0
            ends = math.inf
            while True:
                with self._start() as life:
                    life.wait_for_change()
                    ends = min(ends, time.monotonic() + plan.seconds)
                    dies = time.monotonic() + self.chance.uniform(*plan.lives_s)
                    last = kills >= plan.kills_min and dies >= ends
                    life.let_run_until(ends if last else dies)
                    if last:
                        writer.end()
                        life.wait_until_settled(self.moves.visible(self.written.appends))
                        break
                kills += 1
            reader.end()
        return self._judge(kills)

    @contextlib.contextmanager
    def _start(self) -> Iterator[Life]:
        """Start a process of the contestant; the end of the block kills it."""
        log = self.here / "log"
        command = self.contestant.command(self.here, self.url)
        with processes.running_process(command, log=log) as process:
            yield Life(self.contestant.name, process, self.reads, log)

    def _judge(self, kills: int) -> Outcome:
        expected = self.moves.balances(self.written.appends)
        found = money.balances_in(self.url)
        return Outcome(
            contestant=self.contestant.name,
            kills=kills,
            appends=self.written.appends,
            reads=self.reads,
            rows=sum(map(len, expected)),
            wrong=sum(map(money.wrong_rows, found, expected)),
        )


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a contestant, observed from outside. It must not end on its own."""

    name: str
    process: subprocess.Popen[bytes]
    reads: Reads
    log: Path

    def wait_for_change(self) -> None:
        """Wait until the tables have changed."""
        before, deadline = self.reads.moves, time.monotonic() + SHOWS_S_MAX
        while self.reads.moves == before:
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.name} has changed nothing after {SHOWS_S_MAX} s")
            self._tick()

    def let_run_until(self, moment: float) -> None:
        """Let it work until a moment."""
        while time.monotonic() < moment:
            self._tick()

    def wait_until_settled(self, moves: int) -> None:
        """Wait until the tables hold `moves` moves, or have stopped changing."""
        seen, since = self.reads.moves, time.monotonic()
        while self.reads.moves != moves and time.monotonic() < since + QUIET_S:
            if self.reads.moves != seen:
                seen, since = self.reads.moves, time.monotonic()
            self._tick()

    def _tick(self) -> None:
        if self.process.poll() is not None:
            raise exit_error(self.name, self.process.returncode, self.log)
        time.sleep(0.01)


# ------------------------------------------------------------------------------------ measuring


def run(bench: Bench) -> Report:
    """Measure one contestant after the other, under the same load."""
    contestants = [penstock()]
    if bench.peers is None:
        bench.say(f"{STREAMING} is not installed: {OURS} is read alone")
    else:
        contestants += [streaming(bench.peers, queries) for queries in QUERIES]
    plan = Plan(seconds=bench.size(full=60, quick=15))
    outcomes: list[Outcome] = []
    with (
        running_postgres() as server,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir,
    ):
        for number, contestant in enumerate(contestants):
            bench.say(f"{contestant.name}: {plan.seconds:g} s of moves and kills")
            chance = random.Random(SEED)  # noqa: S311 - not a secret
            here, url = Path(temp_dir, str(number)), server.create_database()
            outcomes.append(Observer(contestant, Moves(), here, url, chance).observe(plan))
    return build_report(outcomes)


def build_report(outcomes: Sequence[Outcome]) -> Report:
    """Build the report; the first contestant is Penstock, which has the goals."""
    ours = outcomes[0]
    return Report(
        results=tuple(result for each in outcomes for result in each.results),
        goals=(
            Goal(
                name="share of reads that are whole", measured=1 - ours.reads.torn_share, goal=1.0
            ),
            Goal(name="share of right rows at rest", measured=1 - ours.wrong / ours.rows, goal=1.0),
        ),
        charts=(
            Chart(
                name="torn-reads",
                title="Reads that see money missing or doubled",
                unit="% of reads",
                bars=tuple((each.contestant, 100 * each.reads.torn_share) for each in outcomes),
                note="Fifty reads a second, under load and kill -9; less is better.",
            ),
        ),
    )
