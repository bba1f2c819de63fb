"""`penstock bench materialize`: events to a table of accounts, beside all peers that can do it.

- 2,000,000 events in 20 files to PostgreSQL, by Penstock and all peers. A quick run has 200,000
  events and four contestants, and skips the rest.
- The same to SQLite, beside plain Spark and DuckDB.
- 20,000,000 events in 200 files to PostgreSQL, beside Structured Streaming and plain Spark.

Each contestant runs in a process of its own, started as its user would start it, and is measured
from its start to its end, with its whole process tree. It writes to a new, empty database.
Penstock gets a copy of a deployment whose collection holds all events and whose task has not run
yet; peers get the same events as Parquet files. Copying, applying the catalog, and flushing earlier
writes to disk are not measured.

Job time excludes the start of the interpreter and the engine, as reported by the contestant:
Penstock reports how long its task took, which includes the start of Spark.

After every run, every row is compared with the expected one.
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

from penstock.consensus.open import open_consensus
from penstock.model.json_order import Json
from penstock.testing.postgres import PostgresServer, running_postgres
from penstock_bench import processes
from penstock_bench.events import (
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
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples

STREAMING: Final = "Structured Streaming"
BATCH: Final = "Spark batch"
DUCKDB: Final = "DuckDB per file"

ROUNDS: Final = 3
TRIGGERS: Final = 5
"""The number of batches that Structured Streaming splits all files into."""
TIMEOUT_S: Final = 1_800

PEERS: Final = Path(__file__).with_name("peers")

Command: TypeAlias = Sequence[str | Path]


# ----------------------------------------------------------------------------------- contestants


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A new database: its names in a catalog and on a command line, and a reader of its table."""

    endpoint: Json
    option: tuple[str, str]
    table: Callable[[], Table]


@contextmanager
def postgres_target(server: PostgresServer) -> Iterator[Target]:
    """Create a database, and drop it afterwards, so that no clean-up counts as time of another."""
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
    """Name a file that does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        path = Path(temp_dir) / "accounts.db"
        yield Target(
            endpoint=sqlite_endpoint(path),
            option=("--sqlite", str(path)),
            table=partial(sqlite_table, path),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The same events as a deployment and as files; no contestant modifies them."""

    events: Events
    deployment: Path
    files: Path

    @classmethod
    def write(cls, events: Events, directory: Path) -> Inputs:
        """Write both. The task's endpoint is a placeholder, see `prepare_penstock`."""
        inputs = cls(events=events, deployment=directory / "data", files=directory / "files")
        fill(events, inputs.deployment, catalog_text(sqlite_endpoint(directory / "unused.db")))
        events.write_files(inputs.files)
        return inputs


Prepare: TypeAlias = Callable[[Inputs, Target, Path], Command]
"""Prepares a contestant in a directory of its own, and returns the command to run."""


def prepare_penstock(inputs: Inputs, target: Target, temp_dir: Path) -> Command:
    """Prepare Penstock: a copy of the deployment, whose task writes to this target."""
    data = temp_dir / "data"
    shutil.copytree(inputs.deployment, data)
    (data / "catalog.yaml").write_text(catalog_text(target.endpoint))

    async def apply() -> None:
        store = await open_consensus(settings_in(data).consensus)
        try:
            await apply_catalog(store, data / "catalog.yaml")
        finally:
            await store.close()

    asyncio.run(apply())
    return [sys.executable, "-m", "penstock", "run", "--data", data, "--json"]


def prepare_file_peer(python: Path, script: str) -> Prepare:
    """Prepare a peer whose only arguments are its input files and its target."""

    def prepare(inputs: Inputs, target: Target, _: Path) -> Command:
        return [python, PEERS / script, "--input", inputs.files, *target.option]

    return prepare


def prepare_streaming(python: Path) -> Prepare:
    """Prepare Structured Streaming, fenced: files in order, in `TRIGGERS` batches."""
    read = prepare_file_peer(python, "structured_streaming.py")

    def prepare(inputs: Inputs, target: Target, temp_dir: Path) -> Command:
        per_trigger = str(-(-inputs.events.files // TRIGGERS))
        options = ("--once", "--writes", "fenced", "--files-per-trigger", per_trigger)
        return [*read(inputs, target, temp_dir), *options, "--checkpoint", temp_dir / "checkpoint"]

    return prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer: the module that it needs, and how to prepare it."""

    name: str
    module: str
    prepare: Callable[[Path], Prepare]


ALL_PEERS: Final = (
    Peer(name=STREAMING, module="pyspark", prepare=prepare_streaming),
    Peer(name=BATCH, module="pyspark", prepare=partial(prepare_file_peer, script="spark_batch.py")),
    Peer(
        name="Pathway",
        module="pathway",
        prepare=partial(prepare_file_peer, script="pathway_stream.py"),
    ),
    Peer(
        name="Bytewax",
        module="bytewax",
        prepare=partial(prepare_file_peer, script="bytewax_flow.py"),
    ),
    Peer(name="dlt merge", module="dlt", prepare=partial(prepare_file_peer, script="dlt_merge.py")),
    Peer(
        name=DUCKDB, module="duckdb", prepare=partial(prepare_file_peer, script="duckdb_files.py")
    ),
)


def contestants(bench: Bench, *peers: str) -> dict[str, Prepare]:
    """Return Penstock first, then the named peers that are installed."""
    chosen = [peer for peer in ALL_PEERS if peer.name in peers]
    found: dict[str, Prepare] = {OURS: prepare_penstock}
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
    """True if an interpreter has a module; it is not imported."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", find, module], check=False).returncode == 0  # noqa: S603


# ------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one run."""

    run: processes.Run
    wrong: int
    rows: int
    """Expected rows."""

    @property
    def job_s(self) -> float | None:
        """Job time as the contestant reports it; for Penstock, the total of its tasks."""
        output = self.run.output
        if "tasks" in output:
            return sum(float(task["seconds"]) for task in output["tasks"])
        return float(output["job_s"]) if "job_s" in output else None


def run_once(
    inputs: Inputs, prepare: Prepare, to: Callable[[], AbstractContextManager[Target]]
) -> Outcome:
    """Let one contestant process all events once, and check its table."""
    with to() as target, tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
        command = prepare(inputs, target, Path(temp_dir))
        os.sync()
        run = processes.run(command, timeout_s=TIMEOUT_S)
        oracle = inputs.events.oracle
        return Outcome(run=run, wrong=target.table().wrong_rows(oracle), rows=len(oracle.account))


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of all contestants with the same events and kind of target, round by round."""

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
        """Events per second of wall time."""
        return self.samples(lambda each: self.events / each.run.seconds)

    @property
    def rss_mb(self) -> Samples:
        return self.samples(lambda each: each.run.usage.peak_rss_bytes / 1e6)

    @property
    def cpu_s(self) -> Samples:
        return self.samples(lambda each: each.run.usage.cpu_s)

    @property
    def job_s(self) -> Samples:
        """Job times of the contestants that report them."""
        reported = {
            who: [each.job_s for each in got if each.job_s is not None]
            for who, got in self.of.items()
        }
        return Samples({who: figures for who, figures in reported.items() if figures})

    @property
    def wrong(self) -> dict[str, int]:
        """Wrong rows in all rounds, by contestant."""
        return {who: sum(each.wrong for each in got) for who, got in self.of.items()}

    def right_share(self, who: str) -> float:
        """Return the share of expected rows that are right. Unexpected rows count as wrong, too."""
        rows = sum(each.rows for each in self.of[who])
        return max(0.0, 1 - self.wrong[who] / rows)


def measure(
    bench: Bench,
    what: str,
    inputs: Inputs,
    who: Mapping[str, Prepare],
    to: Callable[[], AbstractContextManager[Target]],
) -> Outcomes:
    """Measure all contestants in turns. Each run is a new process, so nothing is warmed up."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in who}

    def once(name: str) -> float:
        outcome = run_once(inputs, who[name], to)
        outcomes[name].append(outcome)
        seconds = outcome.run.seconds
        bench.say(f"{what}: {name}, {seconds:.1f} s, {outcome.wrong:,} wrong rows")
        return seconds

    peers = {name: partial(once, name) for name in who}
    bench.interleave(what, peers, warmups=0, rounds=ROUNDS)
    return Outcomes(what, inputs.events.count, outcomes)


def run(bench: Bench) -> Report:
    """Measure PostgreSQL, SQLite, and ten times as many events."""
    size = bench.size(full=2_000_000, quick=200_000)
    events = f"{size:,} events"
    with (
        running_postgres() as server,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir,
    ):
        to_postgres = partial(postgres_target, server)
        bench.say(f"writing {events}")
        inputs = Inputs.write(Events(size, files=20), Path(temp_dir) / "events")
        if bench.quick:
            who = contestants(bench, STREAMING, BATCH, DUCKDB)
            return build_report(measure(bench, f"{events} to PostgreSQL", inputs, who, to_postgres))
        everybody = contestants(bench, *(peer.name for peer in ALL_PEERS))
        postgres = measure(bench, f"{events} to PostgreSQL", inputs, everybody, to_postgres)
        without_server = {who: everybody[who] for who in (OURS, BATCH, DUCKDB) if who in everybody}
        sqlite = measure(bench, f"{events} to SQLite", inputs, without_server, sqlite_target)
        shutil.rmtree(Path(temp_dir) / "events")

        events = f"{10 * size:,} events"
        bench.say(f"writing {events}")
        inputs = Inputs.write(Events(10 * size, files=200), Path(temp_dir) / "more")
        large = {who: everybody[who] for who in (OURS, STREAMING, BATCH) if who in everybody}
        more = measure(bench, f"{events} to PostgreSQL", inputs, large, to_postgres)
    return build_report(postgres, sqlite=sqlite, more=more)


# ------------------------------------------------------------------------------------- reporting

START_TO_END: Final = "From the start of the process to its end."


def build_report(
    postgres: Outcomes, *, sqlite: Outcomes | None = None, more: Outcomes | None = None
) -> Report:
    """Build the report; goals that compare with a missing peer are left out."""
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
    """Divide each measured peer's figure by Penstock's; a figure of zero is unknown."""
    for peer, least in peers.items():
        if peer in outcomes.of and all(samples.by_peer[OURS]):
            yield Goal(
                name=f"{outcomes.what}: {what} of {peer} / {OURS}",
                measured=samples.ratio(peer, OURS),
                goal=least,
            )


def _chart(name: str, outcomes: Outcomes, unit: str, samples: Samples, note: str) -> Chart:
    """Draw a median per contestant; the note names contestants with wrong rows."""
    wrong = (f" {who} left {rows:,} wrong rows." for who, rows in outcomes.wrong.items() if rows)
    rounds = len(outcomes.of[OURS])
    return Chart(
        name=name,
        title=outcomes.what,
        unit=unit,
        bars=tuple((who, samples.median(who)) for who in outcomes.of),
        note=f"{note} Median of {rounds} interleaved runs.{''.join(wrong)}",
    )
