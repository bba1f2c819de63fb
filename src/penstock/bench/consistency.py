"""`penstock bench consistency`: does a reader of two tables ever see money missing, or twice?

A writer moves money between accounts of two collections, twenty appends a second of fifty moves.
Each append is one transaction over both collections for Penstock, one of whose tasks keeps a table
for each of them. Structured Streaming reads files: two for each append, one in the directory of
each collection, both complete before they are renamed into place one after the other, which is the
best that files offer. Its queries are fenced:

- one for each table, in one session;
- one over both directories, whose batches write both tables in one transaction.

A reader asks PostgreSQL for the total of both tables, in one snapshot, fifty times a second, while
the contestant works, while it is killed (kill -9, with its JVM) every few seconds, and while it
starts again. A read that sees another total than there was in the beginning is torn. In the end
the writer rests, and every balance is compared with what it must be.
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

from penstock.bench import leading, money, processes
from penstock.bench.crash import failed
from penstock.bench.frame import OURS, Bench, Chart, Goal, Report, Result
from penstock.bench.money import Append, Moves, Reads, Written, beside
from penstock.errors import Unavailable
from penstock.testing.postgres import running_postgres

SEED: Final = 5
STREAMING: Final = "Structured Streaming"
QUERIES: Final[Mapping[str, str]] = {
    "two": f"{STREAMING}, query per table",
    "union": f"{STREAMING}, one query",
}

SHOWS_S_MAX: Final = 300
"""How long a contestant may take to start and to show anything new."""
QUIET_S: Final = 20
"""Tables that have not changed for so long, with nothing new to come, are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """What runs it, and how moves come to it; both are given a directory and a database."""

    name: str
    command: Callable[[Path, str], Sequence[str | Path]]
    appending: Callable[[Moves, Path, str], AbstractAsyncContextManager[Append]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long the load lasts, from the first read that counts, and how long a process lives."""

    seconds: float
    lives_s: tuple[float, float] = (0.5, 4.0)
    """Since it has shown something new; drawn evenly for each."""
    kills_min: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was seen of a contestant."""

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
    """One task with two bindings, led by a process that follows what is appended."""
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
    """Follows one contestant through its lives."""

    contestant: Contestant
    moves: Moves
    here: Path
    url: str
    chance: random.Random
    reads: Reads = field(init=False)
    written: Written = field(default_factory=Written)

    def __post_init__(self) -> None:
        self.reads = Reads(self.moves.total)

    def observe(self, plan: Plan) -> Outcome:
        """Start it, kill it, start it again, and in the end let it come to rest."""
        self.here.mkdir(parents=True)
        appending = self.contestant.appending(self.moves, self.here, self.url)
        write = functools.partial(money.write, appending, self.written)
        read = functools.partial(money.read, self.url, self.reads)
        with beside(write) as writer, beside(read) as reader:
            while not self.written.appends:
                writer.check()
                time.sleep(0.01)
            kills = 0
            ends = math.inf
            while True:
                with self._started() as life:
                    life.shows_something_new()
                    ends = min(ends, time.monotonic() + plan.seconds)
                    dies = time.monotonic() + self.chance.uniform(*plan.lives_s)
                    last = kills >= plan.kills_min and dies >= ends
                    life.goes_on_until(ends if last else dies)
                    if last:
                        writer.end()
                        life.comes_to_rest(self.moves.visible(self.written.appends))
                        break
                kills += 1
            reader.end()
        return self._judged(kills)

    @contextlib.contextmanager
    def _started(self) -> Iterator[Life]:
        """A process of the contestant, which is killed at the end of the block."""
        log = self.here / "log"
        command = self.contestant.command(self.here, self.url)
        with processes.started(command, log=log) as process:
            yield Life(self.contestant.name, process, self.reads, log)

    def _judged(self, kills: int) -> Outcome:
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
    """A process of a contestant, as far as it can be seen. It should not end by itself."""

    name: str
    process: subprocess.Popen[bytes]
    reads: Reads
    log: Path

    def shows_something_new(self) -> None:
        """Wait until the tables have changed."""
        before, deadline = self.reads.moves, time.monotonic() + SHOWS_S_MAX
        while self.reads.moves == before:
            if time.monotonic() > deadline:
                raise Unavailable(f"{self.name} shows nothing new after {SHOWS_S_MAX} s")
            self._pass()

    def goes_on_until(self, moment: float) -> None:
        """Let it work."""
        while time.monotonic() < moment:
            self._pass()

    def comes_to_rest(self, moves: int) -> None:
        """Wait until so many moves are in the tables, or it has stopped to change them."""
        seen, since = self.reads.moves, time.monotonic()
        while self.reads.moves != moves and time.monotonic() < since + QUIET_S:
            if self.reads.moves != seen:
                seen, since = self.reads.moves, time.monotonic()
            self._pass()

    def _pass(self) -> None:
        if self.process.poll() is not None:
            raise failed(self.name, self.process.returncode, self.log)
        time.sleep(0.01)


# ------------------------------------------------------------------------------------ measuring


def run(bench: Bench) -> Report:
    """One contestant after the other, under the same load."""
    contestants = [penstock()]
    if bench.peers is None:
        bench.say(f"{STREAMING} is not installed: {OURS} is read alone")
    else:
        contestants += [streaming(bench.peers, queries) for queries in QUERIES]
    plan = Plan(seconds=bench.size(full=60, quick=15))
    outcomes: list[Outcome] = []
    with (
        running_postgres() as server,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch,
    ):
        for number, contestant in enumerate(contestants):
            bench.say(f"{contestant.name}: {plan.seconds:g} s of moves and kills")
            chance = random.Random(SEED)  # noqa: S311 - not a secret
            here, url = Path(scratch, str(number)), server.create_database()
            outcomes.append(Observer(contestant, Moves(), here, url, chance).observe(plan))
    return reported(outcomes)


def reported(outcomes: Sequence[Outcome]) -> Report:
    """All figures; the first contestant is ours, and has the goals."""
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
