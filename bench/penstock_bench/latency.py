"""`penstock bench latency`: how long after an append its documents are visible in PostgreSQL.

Twenty appends a second, of 10 or 100 documents each. For Penstock an append is a transaction on a
collection, and the leader runs in another process. For Spark Structured Streaming it is a Parquet
file that is renamed into place, and the query has trigger interval 0 and a fenced `foreachBatch`.
Both get the same events at the same times, after a warm-up under the same load.

Each append contains a *probe*: an event on a reserved account whose amount is the number of the
append. The largest amount of that account therefore shows which appends are visible, however many
became visible at once. A poller in a separate process reads that row every 2 ms.

Appends are due on a fixed schedule, and latency counts from the time an append is due: an append
that is late because the previous one took long counts as that much slower.

Once the last append is visible, the whole table must match what was appended; otherwise nothing is
reported.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psycopg
import pyarrow.parquet

from penstock.consensus.open import open_consensus
from penstock.errors import Unavailable
from penstock.testing.postgres import PostgresServer, running_postgres
from penstock_bench import leading, processes
from penstock_bench.events import (
    REGIONS,
    TABLE,
    Appender,
    Events,
    Table,
    apply_catalog,
    catalog_text,
    pa,
    postgres_endpoint,
    postgres_table,
    settings_in,
)
from penstock_bench.frame import OURS, Bench, Chart, Goal, Lines, Report, Result, Samples

pq: Any = pyarrow.parquet

STREAMING: Final = "Structured Streaming"

RATES: Final = (200, 2_000)
"""Documents per second."""
APPENDS_PER_S: Final = 20
ROUNDS: Final = 3

PROBE: Final = -1
"""The account of probes; accounts of other events are never negative."""
PROBE_REGION: Final = 0
POLL_S: Final = 0.002
VISIBLE_S_MAX: Final = 300
"""How long an append may take to become visible, including start-up."""

QUANTILES: Final = tuple(percent / 100 for percent in range(101))


# ------------------------------------------------------------------------------------- the load


@dataclass(frozen=True)
class Load(Events):
    """Events in which each file is an append, and has a probe; `count` excludes probes."""

    def generate(self, file: int) -> dict[str, Any]:
        """Generate the events of an append, by column; the probe comes last."""
        probe = {"account": PROBE, "amount": file, "region": PROBE_REGION, "seq": -1 - file}
        return {name: np.append(made, probe[name]) for name, made in super().generate(file).items()}

    @cached_property
    def oracle(self) -> Table:
        """The expected table when all appends are in it."""
        others = Events(self.count, self.files, self.accounts, self.seed).oracle
        return Table(
            account=np.append(PROBE, others.account),
            events=np.append(self.files, others.events),
            amount=np.append(self.files * (self.files - 1) // 2, others.amount),
            largest=np.append(self.files - 1, others.largest),
            region=np.append(REGIONS[PROBE_REGION], others.region),
        )

    def table(self, file: int) -> pyarrow.Table:
        """Return the events of an append as a peer gets them."""
        made = self.generate(file)
        regions = pa.DictionaryArray.from_arrays(made["region"], list(REGIONS)).cast(pa.utf8())
        table: pyarrow.Table = pa.table({**made, "region": regions})
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When appends are due: at even intervals, regardless of earlier appends.

    Append 0 precedes the schedule, and triggers everything that starts with the first documents.
    The next appends only warm up; the rest count.
    """

    per_s: int = APPENDS_PER_S
    warmup_s: int
    counted_s: int

    @property
    def appends(self) -> int:
        return 1 + self.per_s * (self.warmup_s + self.counted_s)

    @property
    def counted(self) -> range:
        return range(1 + self.per_s * self.warmup_s, self.appends)

    def due_s(self, number: int) -> float:
        """Return the seconds from the start of the schedule until an append is due."""
        return (number - 1) / self.per_s


class Sighting(NamedTuple):
    """At this moment, all appends up to this number were visible."""

    moment: float
    number: int


def latencies(due: Mapping[int, float], seen: Sequence[Sighting]) -> list[float]:
    """Return, for each append, the time from when it was due until its first sighting.

    An append without a sighting of its own became visible together with a later one.
    """
    numbers = [sighting.number for sighting in seen]
    found = []
    for number, moment in due.items():
        at = bisect.bisect_left(numbers, number)
        if at == len(numbers):
            raise ValueError(f"append {number} was never seen")
        found.append(seen[at].moment - moment)
    return found


def quantile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that a share `q` of them does not exceed: one that occurred."""
    return float(np.quantile(values, q, method="inverted_cdf"))


# ------------------------------------------------------------------------------------ the poller


def poll(url: str) -> None:
    """Print time and number whenever a larger number is visible, until stdin is closed."""
    query = f"SELECT largest FROM {TABLE} WHERE account = {PROBE}"  # noqa: S608
    last = -1
    with psycopg.connect(url, autocommit=True) as connection:
        while not select.select([sys.stdin], [], [], POLL_S)[0]:
            try:
                row = connection.execute(query, prepare=True).fetchone()
            except psycopg.errors.UndefinedTable:
                continue
            if row is not None and row[0] > last:
                last = row[0]
                sys.stdout.write(f"{time.monotonic()} {last}\n")
                sys.stdout.flush()


@dataclass(slots=True)
class Poller:
    """The sightings so far."""

    seen: list[Sighting] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    @contextlib.asynccontextmanager
    async def polling(cls, url: str) -> AsyncIterator[Poller]:
        """Run a polling process for the duration of the block."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock_bench.latency", url,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both are pipes")
        poller = cls()
        listening = asyncio.create_task(poller._listen(process.stdout))
        try:
            yield poller
        finally:
            process.stdin.close()
            await process.wait()
            await listening

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            moment, number = line.split()
            self.seen.append(Sighting(float(moment), int(number)))
            self._news.set()

    async def wait_until_visible(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until an append is visible, while its contestant is alive."""
        deadline = time.monotonic() + VISIBLE_S_MAX
        while not self.seen or self.seen[-1].number < number:
            if process.poll() is not None:
                raise Unavailable(f"a contestant has ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise Unavailable(f"append {number} is not visible after {VISIBLE_S_MAX} s")
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1)


# ------------------------------------------------------------------------------- the contestants

Append = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A contestant: its command, and how it receives appends; both are given a directory."""

    name: str
    command: Callable[[Path, str], Sequence[str | Path]]
    """Takes the directory and the URL of the database."""
    appending: Callable[[Path, str, Load], AbstractAsyncContextManager[Append]]


def _leader_command(here: Path, url: str) -> Sequence[str | Path]:
    return leading.command(here / "data")


@contextlib.asynccontextmanager
async def _to_collection(here: Path, url: str, load: Load) -> AsyncIterator[Append]:
    """Append to a collection, one transaction each."""
    data = here / "data"
    data.mkdir()
    catalog = data / "catalog.yaml"
    catalog.write_text(catalog_text(postgres_endpoint(url)))
    settings = settings_in(data)
    batches = [load.batch(number) for number in range(load.files)]
    store = await open_consensus(settings.consensus)
    try:
        appender = Appender(store, settings, await apply_catalog(store, catalog))

        async def append(number: int) -> None:
            await appender.append(batches[number])

        yield append
    finally:
        await store.close()


def _streaming_command(peers: Path) -> Callable[[Path, str], Sequence[str | Path]]:
    script = Path(__file__).parent / "peers" / "structured_streaming.py"
    return lambda here, url: [
        peers, script, "--input", here / "files", "--url", url, "--table", TABLE,
        "--checkpoint", here / "checkpoint", "--forever", "--writes", "fenced",
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def _to_files(here: Path, url: str, load: Load) -> AsyncIterator[Append]:
    """Append files, each renamed into place when complete."""
    files = here / "files"
    files.mkdir()
    tables = [load.table(number) for number in range(load.files)]

    async def append(number: int) -> None:
        hidden = files / f".part-{number:05d}"
        pq.write_table(tables[number], hidden, compression="zstd")
        hidden.rename(files / f"part-{number:05d}.parquet")

    yield append


def contestants(bench: Bench) -> list[Contestant]:
    """Return Penstock, and its peer if that is installed."""
    found = [Contestant(name=OURS, command=_leader_command, appending=_to_collection)]
    if bench.peers is None:
        bench.say(f"{STREAMING} is not installed: Penstock is measured alone")
    else:
        streaming = _streaming_command(bench.peers)
        found.append(Contestant(name=STREAMING, command=streaming, appending=_to_files))
    return found


# ------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one contestant at one rate in one round."""

    latencies_s: Sequence[float]
    cpu_per_s: float
    """Cores in use by the contestant's processes, excluding the database."""
    commits_per_s: float
    """Transactions or batches; each contains a probe, so each is a sighting."""

    def ms(self, q: float) -> float:
        return quantile(self.latencies_s, q) * 1000


async def measure(contestant: Contestant, load: Load, schedule: Schedule, url: str) -> Outcome:
    """Start a contestant, apply the load, and record when appends become visible."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        here = Path(temp_dir)
        async with contestant.appending(here, url, load) as append, Poller.polling(url) as poller:
            command = contestant.command(here, url)
            with processes.running_process(command, log=here / "log") as process:
                try:
                    await append(0)
                    await poller.wait_until_visible(0, process)
                    began = time.monotonic() + 1 / schedule.per_s
                    cpu_s = await run_schedule(append, schedule, began, process.pid)
                    await poller.wait_until_visible(schedule.appends - 1, process)
                except Unavailable as error:
                    error.where = contestant.name
                    error.why = (here / "log").read_text(errors="replace")[-2000:]
                    raise
                wrong = postgres_table(url).wrong_rows(load.oracle)
    if wrong:
        raise RuntimeError(f"{contestant.name}: {wrong} rows differ from what was appended")
    due = {number: began + schedule.due_s(number) for number in schedule.counted}
    since, until = due[schedule.counted[0]], due[schedule.counted[-1]]
    sightings = sum(since <= moment < until for moment, _ in poller.seen)
    return Outcome(
        latencies_s=latencies(due, poller.seen),
        cpu_per_s=cpu_s / schedule.counted_s,
        commits_per_s=sightings / (until - since),
    )


async def run_schedule(append: Append, schedule: Schedule, began: float, pid: int) -> float:
    """Append on schedule; return the CPU seconds of the process while appends counted."""
    first = schedule.counted[0]
    async with asyncio.TaskGroup() as tasks:
        using = tasks.create_task(
            cpu_between(
                pid, began + schedule.due_s(first), began + schedule.due_s(schedule.appends)
            )
        )
        for number in range(1, schedule.appends):
            await sleep_until(began + schedule.due_s(number))
            await append(number)
    return using.result()


async def cpu_between(pid: int, since: float, until: float) -> float:
    watch = processes.Watch(pid)
    used = []
    for moment in (since, until):
        await sleep_until(moment)
        await asyncio.to_thread(watch.sample)
        used.append(watch.usage.cpu_s)
    return used[1] - used[0]


async def sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


# ----------------------------------------------------------------------------------- the report


def run(bench: Bench) -> Report:
    """Measure latency and its cost, at a low and at a high rate."""
    schedule = Schedule(
        warmup_s=bench.size(full=10, quick=5), counted_s=bench.size(full=30, quick=8)
    )
    with running_postgres() as server:
        parts = [_measure_rate(bench, server, schedule, rate) for rate in RATES]
    return Report.merge(parts)


def _measure_rate(bench: Bench, server: PostgresServer, schedule: Schedule, rate: int) -> Report:
    events = (rate // schedule.per_s - 1) * schedule.appends
    load = Load(events, schedule.appends)
    outcomes: dict[str, list[Outcome]] = {}

    def measured(contestant: Contestant) -> Callable[[], float]:
        def once() -> float:
            url = server.create_database()
            outcome = asyncio.run(measure(contestant, load, schedule, url))
            outcomes.setdefault(contestant.name, []).append(outcome)
            return outcome.ms(0.5)

        return once

    bench.interleave(
        f"{rate:,} documents/s",
        {each.name: measured(each) for each in contestants(bench)},
        warmups=0,
        rounds=bench.size(full=ROUNDS, quick=1),
    )
    return report(rate, outcomes)


def report(rate: int, outcomes: Mapping[str, Sequence[Outcome]]) -> Report:
    """Build the report for one rate."""
    at = f"{rate:,} documents/s"
    figures: Mapping[str, tuple[str, Callable[[Outcome], float]]] = {
        "p50": ("ms", lambda outcome: outcome.ms(0.5)),
        "p99": ("ms", lambda outcome: outcome.ms(0.99)),
        "CPU": ("cores", lambda outcome: outcome.cpu_per_s),
        "commits": ("commits/s", lambda outcome: outcome.commits_per_s),
    }
    samples = {
        name: Samples({who: [figure(each) for each in some] for who, some in outcomes.items()})
        for name, (_, figure) in figures.items()
    }
    results = tuple(
        Result(name=f"{at}: {who}, {name}", value=samples[name].median(who), unit=unit)
        for name, (unit, _) in figures.items()
        for who in outcomes
    )
    goals = tuple(
        Goal(
            name=f"{at}: {name} of {STREAMING} / {OURS}",
            measured=samples[name].ratio(STREAMING, OURS),
            goal=least,
        )
        for name, least in (("p50", 2.5), ("p99", 2.5), ("CPU", 1.0))
        if STREAMING in outcomes
    )
    bars = tuple(
        Chart(
            name=f"{name}-{rate}",
            title=f"From append to visible at {at}, {name}",
            unit="ms",
            bars=tuple((who, samples[name].median(who)) for who in outcomes),
            note="Shorter is better.",
        )
        for name in ("p50", "p99")
    )
    lines = Lines(
        name=f"distribution-{rate}",
        title=f"From append to visible at {at}",
        x_label="share of appends, %",
        y_label="latency, ms",
        series=tuple((who, _distribution(some)) for who, some in outcomes.items()),
    )
    return Report(results=results, goals=goals, charts=(*bars, lines))


def _distribution(outcomes: Sequence[Outcome]) -> tuple[tuple[float, float], ...]:
    """Return the median over all rounds of each quantile."""
    return tuple(
        (100 * q, statistics.median(outcome.ms(q) for outcome in outcomes)) for q in QUANTILES
    )


if __name__ == "__main__":
    poll(sys.argv[1])
