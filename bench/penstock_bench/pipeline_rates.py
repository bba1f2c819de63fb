"""Latency through two hops: from an append until its rows are visible in PostgreSQL.

Appends, probes, the schedule and the poller are those of `penstock bench latency`, but an append is
of events as they arrive, and passes both hops. For Penstock one process leads all three tasks; for
Structured Streaming one session runs both queries with trigger interval 0. Customers are there
before the first append. A reader of the whole table counts reads that are empty or torn.

When all appends are visible and nothing arrives, the CPU that a contestant still uses is its cost
when idle. At the end the whole table must match what was appended; otherwise nothing is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psycopg

from penstock.errors import Unavailable
from penstock.testing.postgres import PostgresServer
from penstock_bench import leading, processes
from penstock_bench.events import postgres_endpoint
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples
from penstock_bench.latency import (
    PROBE,
    RATES,
    Poller,
    Schedule,
    Sighting,
    cpu_between,
    latencies,
    quantile,
    run_schedule,
)
from penstock_bench.pipeline_events import (
    EU,
    Deployment,
    RawEvents,
    Row,
    catalog_text,
    customers,
    oracle,
    postgres_rows,
    write_file,
    wrong_rows,
)
from penstock_bench.pipeline_reads import Reader, Reads, Sums, read_postgres

STREAMING: Final = "Structured Streaming"
ROUNDS: Final = 3
SETTLE_S: Final = 3
IDLE_CORES_MAX: Final = 0.05
CORES_MIN: Final = 0.001
"""Less than this cannot be told from nothing."""


# ------------------------------------------------------------------------------------- the load


@dataclass(frozen=True)
class Load(RawEvents):
    """Events in which each file is an append, and has a probe; `count` excludes probes.

    The amount of the probe is one more than the number of the append: zero would not be valid.
    """

    def generate(self, file: int) -> dict[str, Any]:
        """Generate the events of an append, by column; the probe comes last."""
        probe = {
            "id": -1 - file,
            "account": PROBE,
            "amount": file + 1,
            "region": EU,
            "spelling": 0,
            "flaw": 0,
        }
        return {name: np.append(made, probe[name]) for name, made in super().generate(file).items()}

    @property
    def expected(self) -> list[Row]:
        """The expected table when all appends are in it."""
        amount = self.files * (self.files + 1) // 2
        return [(PROBE, self.files, amount, self.files, amount, None), *oracle([self])]

    @property
    def prefixes(self) -> set[Sums]:
        """The sums of all tables that contain all appends up to one, and no others."""
        found, events, amount = set(), 0, 0
        for file in range(self.files):
            made = self.generate(file)
            valid = made["flaw"] == 0
            events += int(valid.sum())
            amount += int(made["amount"][valid].sum())
            found.add(Sums(events, amount))
        return found


# ------------------------------------------------------------------------------- the contestants

Append = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A contestant: its command, and how it receives appends; both are given a directory."""

    name: str
    command: Callable[[Path, str], Sequence[str | Path]]
    """Takes the directory and the URL of the database."""
    appending: Callable[[Path, str, Load], AbstractAsyncContextManager[Append]]


@contextlib.asynccontextmanager
async def _to_collection(here: Path, url: str, load: Load) -> AsyncIterator[Append]:
    """Append to a collection, one transaction each."""
    deployment = Deployment(here / "data")
    deployment.write_catalog(catalog_text(postgres_endpoint(url)))
    await deployment.append_customers(load.accounts)
    batches = [load.batch(number) for number in range(load.files)]
    async with deployment.appending() as appender:

        async def append(number: int) -> None:
            await appender.append(batches[number])

        yield append


@contextlib.asynccontextmanager
async def _to_files(here: Path, url: str, load: Load) -> AsyncIterator[Append]:
    """Append files, each renamed into place when complete."""
    for directory in ("files/events", "files/customers", "work"):
        (here / directory).mkdir(parents=True)
    write_file(customers(load.accounts), here / "files" / "customers", "part-0.parquet")
    tables = [load.rows(number) for number in range(load.files)]

    async def append(number: int) -> None:
        write_file(tables[number], here / "files" / "events", f"part-{number:05d}.parquet")

    yield append


def contestants(bench: Bench) -> list[Contestant]:
    """Return Penstock, and its peer if that is installed."""
    found = [
        Contestant(
            name=OURS,
            command=lambda here, _: leading.command(here / "data"),
            appending=_to_collection,
        )
    ]
    if bench.peers is None:
        bench.say(f"{STREAMING} is not installed: {OURS} is measured alone")
        return found
    python, script = bench.peers, Path(__file__).parent / "peers" / "pipeline_streaming.py"
    found.append(
        Contestant(
            name=STREAMING,
            command=lambda here, url: [
                python, script, "--input", here / "files", "--work", here / "work",
                "--url", url, "--forever",
            ],
            appending=_to_files,
        )
    )  # fmt: skip
    return found


# ------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one contestant at one rate in one round."""

    latencies_s: Sequence[float]
    cores: float
    """In use by the contestant's processes while appends counted, excluding the database."""
    idle_cores: float
    reads: Reads

    def ms(self, q: float) -> float:
        return quantile(self.latencies_s, q) * 1000


async def measure(
    contestant: Contestant, load: Load, schedule: Schedule, url: str, *, idle_s: float
) -> Outcome:
    """Start a contestant, apply the load, and record when appends become visible."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        here = Path(temp_dir)
        async with contestant.appending(here, url, load) as append, Poller.polling(url) as poller:
            command = contestant.command(here, url)
            with (
                processes.running_process(command, log=here / "log") as process,
                psycopg.connect(url, autocommit=True) as connection,
            ):
                reader = Reader(partial(read_postgres, connection))
                try:
                    await append(0)
                    await poller.wait_until_visible(1, process)
                    with reader.reading():
                        began = time.monotonic() + 1 / schedule.per_s
                        cpu_s = await run_schedule(append, schedule, began, process.pid)
                        await poller.wait_until_visible(schedule.appends, process)
                    since = time.monotonic() + SETTLE_S
                    idle_cpu_s = await cpu_between(process.pid, since, since + idle_s)
                except Unavailable as error:
                    error.where = contestant.name
                    error.why = (here / "log").read_text(errors="replace")[-2000:]
                    raise
                wrong = wrong_rows(postgres_rows(url), load.expected)
    if wrong:
        raise RuntimeError(f"{contestant.name}: {wrong} rows differ from what was appended")
    due = {number: began + schedule.due_s(number) for number in schedule.counted}
    return Outcome(
        latencies_s=latencies(due, appends_seen(poller.seen)),
        cores=cpu_s / schedule.counted_s,
        idle_cores=idle_cpu_s / idle_s,
        reads=Reads.judge(reader.reads, load.prefixes),
    )


def appends_seen(seen: Sequence[Sighting]) -> list[Sighting]:
    """Return sightings of appends, from sightings of the amounts of their probes."""
    return [Sighting(moment, amount - 1) for moment, amount in seen]


def run(bench: Bench, server: PostgresServer) -> Report:
    """Measure latency, its cost, and the cost of waiting, at a low and at a high rate."""
    schedule = Schedule(
        warmup_s=bench.size(full=10, quick=5), counted_s=bench.size(full=30, quick=8)
    )
    idle_s = bench.size(full=15, quick=5)
    return Report.merge(_measure_rate(bench, server, schedule, rate, idle_s) for rate in RATES)


def _measure_rate(
    bench: Bench, server: PostgresServer, schedule: Schedule, rate: int, idle_s: float
) -> Report:
    events = (rate // schedule.per_s - 1) * schedule.appends
    load = Load(events, schedule.appends)
    outcomes: dict[str, list[Outcome]] = {}

    def measured(contestant: Contestant) -> Callable[[], float]:
        def once() -> float:
            url = server.create_database()
            outcome = asyncio.run(measure(contestant, load, schedule, url, idle_s=idle_s))
            outcomes.setdefault(contestant.name, []).append(outcome)
            return outcome.ms(0.5)

        return once

    bench.interleave(
        f"two hops at {rate:,} documents/s",
        {each.name: measured(each) for each in contestants(bench)},
        warmups=0,
        rounds=bench.size(full=ROUNDS, quick=1),
    )
    return build_report(rate, outcomes)


# ----------------------------------------------------------------------------------- the report


def build_report(rate: int, outcomes: Mapping[str, Sequence[Outcome]]) -> Report:
    """Build the report for one rate."""
    at = f"two hops at {rate:,} documents/s"
    figures: Mapping[str, tuple[str, Callable[[Outcome], float]]] = {
        "p50": ("ms", lambda outcome: outcome.ms(0.5)),
        "p99": ("ms", lambda outcome: outcome.ms(0.99)),
        "CPU": ("cores", lambda outcome: outcome.cores),
        "idle CPU": ("cores", lambda outcome: outcome.idle_cores),
    }
    samples = {
        name: Samples({who: [figure(each) for each in some] for who, some in outcomes.items()})
        for name, (_, figure) in figures.items()
    }
    reads = {who: sum((each.reads for each in some), Reads()) for who, some in outcomes.items()}
    results = [
        Result(name=f"{at}: {who}, {name}", value=samples[name].median(who), unit=unit)
        for name, (unit, _) in figures.items()
        for who in outcomes
    ]
    results += [
        Result(name=f"{at}: {who}, {name}", value=count, unit="reads")
        for who, of in reads.items()
        for name, count in (
            ("reads", of.total),
            ("empty reads", of.empty),
            ("torn reads", of.torn),
        )
    ]
    goals = [
        Goal(
            name=f"{at}: {name} of {STREAMING} / {OURS}",
            measured=samples[name].ratio(STREAMING, OURS),
            goal=1 / most,
        )
        for name, most in (("p50", 0.3), ("p99", 0.35))
        if STREAMING in outcomes
    ]
    idle = max(samples["idle CPU"].median(OURS), CORES_MIN)
    goals += [
        Goal(
            name=f"{at}: {IDLE_CORES_MAX:g} cores / idle CPU of {OURS}",
            measured=IDLE_CORES_MAX / idle,
            goal=1.0,
        ),
        Goal(
            name=f"{at}: share of reads that are neither empty nor torn",
            measured=reads[OURS].whole_share,
            goal=1.0,
        ),
    ]
    charts = tuple(
        Chart(
            name=f"{name}-{rate}",
            title=f"From append to visible through two hops at {rate:,} documents/s, {name}",
            unit="ms",
            bars=tuple((who, samples[name].median(who)) for who in outcomes),
            note="Shorter is better.",
        )
        for name in ("p50", "p99")
    )
    return Report(results=tuple(results), goals=tuple(goals), charts=charts)
