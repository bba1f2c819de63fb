"""`penstock bench materialize`: events to a table of accounts, beside whoever else can do it.

- 2,000,000 events in 20 files to PostgreSQL, Penstock and all peers; a quick run has 200,000 events
  and four contestants, and nothing of what follows.
- The same to SQLite, beside plain Spark and DuckDB.
- 20,000,000 events in 200 files to PostgreSQL, beside Structured Streaming and plain Spark.

Each contestant is a process of its own, as its user would start it, and is measured from before its
start to its end, with everything that it starts. It writes to a new, empty database. Penstock gets
a copy of a deployment whose collection has all events, and whose task has not run yet; peers get
the same events as Parquet files. To copy, to apply the catalog, and to flush what was written
before is on nobody's time.

Job time leaves the start of interpreter and engine out, as far as a contestant tells: Penstock
tells how long its task took, and the start of Spark is part of that.

After every run every row is compared with what it must be.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import psycopg
from psycopg import sql

from penstock.bench import processes
from penstock.bench.events import (
    Events,
    Table,
    apply_catalog,
    catalog_text,
    fill,
    postgres_endpoint,
    postgres_table,
    settings_in,
    sqlite_endpoint,
    sqlite_table,
)
from penstock.bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples
from penstock.consensus.open import open_consensus
from penstock.model.json_order import Json
from penstock.testing.postgres import PostgresServer, running_postgres

STREAMING: Final = "Structured Streaming"
BATCH: Final = "Spark batch"
DUCKDB: Final = "DuckDB per file"

ROUNDS: Final = 3
TRIGGERS: Final = 5
"""How many batches Structured Streaming makes of all files."""
TIMEOUT_S: Final = 1_800

PEERS: Final = Path(__file__).with_name("peers")

Command: TypeAlias = Sequence[str | Path]


# ----------------------------------------------------------------------------------- contestants


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A new database: how a catalog and a command line name it, and what it has."""

    endpoint: Json
    option: tuple[str, str]
    table: Callable[[], Table]


@contextmanager
def postgres_target(server: PostgresServer) -> Iterator[Target]:
    """A database that is gone afterwards, so that nobody's is cleaned up on the time of another."""
    url = server.create_database()
    name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(url)["dbname"]))
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("CHECKPOINT")
        yield Target(
            endpoint=postgres_endpoint(url),
            option=("--url", url),
            table=partial(postgres_table, url),
        )
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@contextmanager
def sqlite_target() -> Iterator[Target]:
    """A file that does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        path = Path(scratch) / "accounts.db"
        yield Target(
            endpoint=sqlite_endpoint(path),
            option=("--sqlite", str(path)),
            table=partial(sqlite_table, path),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """The same events as a deployment and as files; no contestant changes them."""

    events: Events
    deployment: Path
    files: Path

    @classmethod
    def made(cls, events: Events, directory: Path) -> Stock:
        """Written anew. The task has an endpoint only because it must; see `ours`."""
        stock = cls(events=events, deployment=directory / "data", files=directory / "files")
        fill(events, stock.deployment, catalog_text(sqlite_endpoint(directory / "unused.db")))
        events.write_files(stock.files)
        return stock


Prepare: TypeAlias = Callable[[Stock, Target, Path], Command]
"""Makes a contestant ready to run, in a directory of its own; returns what is to be run."""


def ours(stock: Stock, target: Target, scratch: Path) -> Command:
    """Penstock: a copy of the deployment, whose task has this target."""
    data = scratch / "data"
    shutil.copytree(stock.deployment, data)
    (data / "catalog.yaml").write_text(catalog_text(target.endpoint))

    async def apply() -> None:
        store = await open_consensus(settings_in(data).consensus)
        try:
            await apply_catalog(store, data / "catalog.yaml")
        finally:
            await store.close()

    asyncio.run(apply())
    return [sys.executable, "-m", "penstock", "run", "--data", data, "--json"]


def reads_files(python: Path, script: str) -> Prepare:
    """A peer whose only arguments are where events come from and where they go."""

    def prepare(stock: Stock, target: Target, _: Path) -> Command:
        return [python, PEERS / script, "--input", stock.files, *target.option]

    return prepare


def streaming(python: Path) -> Prepare:
    """Structured Streaming, fenced: files in order, as many to a batch as make `TRIGGERS`."""
    read = reads_files(python, "structured_streaming.py")

    def prepare(stock: Stock, target: Target, scratch: Path) -> Command:
        per_trigger = str(-(-stock.events.files // TRIGGERS))
        options = ("--once", "--writes", "fenced", "--files-per-trigger", per_trigger)
        return [*read(stock, target, scratch), *options, "--checkpoint", scratch / "checkpoint"]

    return prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Somebody else: what must be installed for it, and how it is made ready."""

    name: str
    module: str
    prepare: Callable[[Path], Prepare]


ALL: Final = (
    Peer(name=STREAMING, module="pyspark", prepare=streaming),
    Peer(name=BATCH, module="pyspark", prepare=partial(reads_files, script="spark_batch.py")),
    Peer(
        name="Pathway", module="pathway", prepare=partial(reads_files, script="pathway_stream.py")
    ),
    Peer(name="Bytewax", module="bytewax", prepare=partial(reads_files, script="bytewax_flow.py")),
    Peer(name="dlt merge", module="dlt", prepare=partial(reads_files, script="dlt_merge.py")),
    Peer(name=DUCKDB, module="duckdb", prepare=partial(reads_files, script="duckdb_files.py")),
)


def contestants(bench: Bench, *peers: str) -> dict[str, Prepare]:
    """Penstock first, then those of the named peers that are installed."""
    chosen = [peer for peer in ALL if peer.name in peers]
    found: dict[str, Prepare] = {OURS: ours}
    if bench.peers is None:
        bench.say(f"peers are not installed: {OURS} is measured alone")
        return found
    for peer in chosen:
        if is_installed(bench.peers, peer.module):
            found[peer.name] = peer.prepare(bench.peers)
        else:
            bench.say(f"{peer.name} is not installed, and left out")
    return found


def is_installed(python: Path, module: str) -> bool:
    """Whether an interpreter has a module; it is not imported."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", find, module], check=False).returncode == 0  # noqa: S603


# ------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run."""

    run: processes.Run
    wrong: int
    rows: int
    """That there must be."""

    @property
    def job_s(self) -> float | None:
        """As the contestant tells it; the total of its tasks for Penstock."""
        said = self.run.said
        if "tasks" in said:
            return sum(float(task["seconds"]) for task in said["tasks"])
        return float(said["job_s"]) if "job_s" in said else None


def attempt(
    stock: Stock, prepare: Prepare, to: Callable[[], AbstractContextManager[Target]]
) -> Outcome:
    """Let one contestant do all of it, once, and see what the table is then."""
    with to() as target, tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        command = prepare(stock, target, Path(scratch))
        os.sync()
        run = processes.run(command, timeout_s=TIMEOUT_S)
        oracle = stock.events.oracle
        return Outcome(run=run, wrong=target.table().wrong_rows(oracle), rows=len(oracle.account))


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of all contestants with the same events and the same kind of target, round by round."""

    what: str
    events: int
    of: Mapping[str, Sequence[Outcome]] = field(default_factory=dict)

    def samples(self, figure: Callable[[Outcome], float]) -> Samples:
        return Samples({who: [figure(each) for each in got] for who, got in self.of.items()})

    @property
    def wall_s(self) -> Samples:
        return self.samples(lambda each: each.run.seconds)

    @property
    def per_s(self) -> Samples:
        """Events of a run by its wall time."""
        return self.samples(lambda each: self.events / each.run.seconds)

    @property
    def rss_mb(self) -> Samples:
        return self.samples(lambda each: each.run.usage.peak_rss_bytes / 1e6)

    @property
    def cpu_s(self) -> Samples:
        return self.samples(lambda each: each.run.usage.cpu_s)

    @property
    def job_s(self) -> Samples:
        """Of contestants that tell it."""
        told = {
            who: [each.job_s for each in got if each.job_s is not None]
            for who, got in self.of.items()
        }
        return Samples({who: figures for who, figures in told.items() if figures})

    @property
    def wrong(self) -> dict[str, int]:
        """Rows that were wrong in any round, by contestant."""
        return {who: sum(each.wrong for each in got) for who, got in self.of.items()}

    def right_share(self, who: str) -> float:
        """Of the rows there had to be. Rows too many count as wrong, too."""
        rows = sum(each.rows for each in self.of[who])
        return max(0.0, 1 - self.wrong[who] / rows)


def measure(
    bench: Bench,
    what: str,
    stock: Stock,
    who: Mapping[str, Prepare],
    to: Callable[[], AbstractContextManager[Target]],
) -> Outcomes:
    """All contestants in turns. Every run is a new process, so there is nothing to warm up."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in who}

    def once(name: str) -> float:
        outcome = attempt(stock, who[name], to)
        outcomes[name].append(outcome)
        seconds = outcome.run.seconds
        bench.say(f"{what}: {name}, {seconds:.1f} s, {outcome.wrong:,} wrong rows")
        return seconds

    peers = {name: partial(once, name) for name in who}
    bench.interleave(what, peers, warmups=0, rounds=ROUNDS)
    return Outcomes(what, stock.events.count, outcomes)


def run(bench: Bench) -> Report:
    """To PostgreSQL, to SQLite, and ten times as much."""
    size = bench.size(full=2_000_000, quick=200_000)
    events = f"{size:,} events"
    with (
        running_postgres() as server,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch,
    ):
        to_postgres = partial(postgres_target, server)
        bench.say(f"writing {events}")
        stock = Stock.made(Events(size, files=20), Path(scratch) / "events")
        if bench.quick:
            who = contestants(bench, STREAMING, BATCH, DUCKDB)
            return reported(measure(bench, f"{events} to PostgreSQL", stock, who, to_postgres))
        everybody = contestants(bench, *(peer.name for peer in ALL))
        postgres = measure(bench, f"{events} to PostgreSQL", stock, everybody, to_postgres)
        without_server = {who: everybody[who] for who in (OURS, BATCH, DUCKDB) if who in everybody}
        sqlite = measure(bench, f"{events} to SQLite", stock, without_server, sqlite_target)
        shutil.rmtree(Path(scratch) / "events")

        events = f"{10 * size:,} events"
        bench.say(f"writing {events}")
        stock = Stock.made(Events(10 * size, files=200), Path(scratch) / "more")
        large = {who: everybody[who] for who in (OURS, STREAMING, BATCH) if who in everybody}
        more = measure(bench, f"{events} to PostgreSQL", stock, large, to_postgres)
    return reported(postgres, sqlite=sqlite, more=more)


# ------------------------------------------------------------------------------------- reporting

START_TO_END: Final = "From the start of the process to its end."


def reported(
    postgres: Outcomes, *, sqlite: Outcomes | None = None, more: Outcomes | None = None
) -> Report:
    """Goals that compare with a peer are left out without it."""
    goals = [
        *_goals(postgres, "wall", postgres.wall_s, {STREAMING: 1.3, BATCH: 1.0}),
        *_goals(postgres, "peak memory", postgres.rss_mb, {STREAMING: 1.0}),
    ]
    charts = [
        _chart("wall", postgres, "s", postgres.wall_s, f"{START_TO_END} Less is better."),
        _chart(
            "memory",
            postgres,
            "MB",
            postgres.rss_mb,
            "Peak memory of all its processes together. Less is better.",
        ),
    ]
    if sqlite is not None:
        note = f"{START_TO_END} Less is better."
        charts.append(_chart("wall-sqlite", sqlite, "s", sqlite.wall_s, note))
    if more is not None:
        goals += _goals(more, "wall", more.wall_s, {STREAMING: 1.2, BATCH: 0.8})
        goals += _goals(more, "peak memory", more.rss_mb, {STREAMING: 1.0})
        note = f"{START_TO_END} More is better."
        charts.append(_chart("throughput", more, "events/s", more.per_s, note))
    all_of_them = [each for each in (postgres, sqlite, more) if each is not None]
    goals += [
        Goal(name=f"{each.what}: share of right rows", measured=each.right_share(OURS), goal=1.0)
        for each in all_of_them
    ]
    return Report(
        results=tuple(result for each in all_of_them for result in _results(each)),
        goals=tuple(goals),
        charts=tuple(charts),
    )


def _results(outcomes: Outcomes) -> Iterator[Result]:
    figures: tuple[tuple[str, str, Samples], ...] = (
        ("wall", "s", outcomes.wall_s),
        ("job", "s", outcomes.job_s),
        ("throughput", "events/s", outcomes.per_s),
        ("CPU", "s of CPU", outcomes.cpu_s),
        ("peak memory", "MB RSS", outcomes.rss_mb),
    )
    for who in outcomes.of:
        for name, unit, samples in figures:
            if who in samples.by_peer:
                value = samples.median(who)
                yield Result(name=f"{outcomes.what}: {who}, {name}", value=value, unit=unit)
        yield Result(
            name=f"{outcomes.what}: {who}, wrong rows in all rounds",
            value=outcomes.wrong[who],
            unit="rows",
        )


def _goals(
    outcomes: Outcomes, what: str, samples: Samples, peers: Mapping[str, float]
) -> Iterator[Goal]:
    """A peer's figure by ours, of each peer that was there; a figure of zero is not known."""
    for peer, least in peers.items():
        if peer in outcomes.of and all(samples.by_peer[OURS]):
            yield Goal(
                name=f"{outcomes.what}: {what} of {peer} / {OURS}",
                measured=samples.ratio(peer, OURS),
                goal=least,
            )


def _chart(name: str, outcomes: Outcomes, unit: str, samples: Samples, note: str) -> Chart:
    """A median per contestant; who had wrong rows is named below."""
    wrong = (f" {who} left {rows:,} wrong rows." for who, rows in outcomes.wrong.items() if rows)
    rounds = len(outcomes.of[OURS])
    return Chart(
        name=name,
        title=outcomes.what,
        unit=unit,
        bars=tuple((who, samples.median(who)) for who in outcomes.of),
        note=f"{note} Median of {rounds} interleaved runs.{''.join(wrong)}",
    )
