"""`penstock bench pipeline`: events through two hops to a table, beside others that can do it.

Events are cleaned, then added up by account and joined with customers (`pipeline_events`):

- *First load*: 2,000,000 events in 20 files (a quick run: 200,000), from the start of a process to
  its end, with its whole process tree.
- *+ 1 %*: one more file arrives, and a new process brings the table up to date. Meanwhile a reader
  counts reads that are empty or torn (`pipeline_reads`).
- *+ 1 % while penstock up runs*: the same file, with no process to start. The time and the CPU of
  its process tree count from before the append until the table is up to date.
- The same hops at 200 and 2,000 documents/s (`pipeline_rates`).
- What a document costs in each language of derivations (`languages`).

Penstock runs a catalog of two `using: spark` derivations and a materialization by `penstock run`.
Structured Streaming has a query for each hop, files between them, and a fenced `foreachBatch`.
Declarative Pipelines has a streaming table and a materialized view; its table is Parquet files, as
it cannot write to a database. dlt has a load for each hop. Preparing inputs is not measured.

After every run, every row is compared with the expected one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import psycopg
from psycopg import sql

from penstock.testing.postgres import PostgresServer, running_postgres
from penstock_bench import languages, pipeline_rates, processes
from penstock_bench.events import postgres_endpoint, sqlite_endpoint
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples
from penstock_bench.materialize import is_installed
from penstock_bench.pipeline_events import (
    Deployment,
    RawEvents,
    Row,
    catalog_text,
    customers,
    oracle,
    parquet_rows,
    postgres_rows,
    write_file,
    wrong_rows,
)
from penstock_bench.pipeline_reads import Read, Reader, Reads, ReadTable, Sums, read_parquet
from penstock_bench.pipeline_reads import read_postgres as read_database
from penstock_bench.running_up import Up

STREAMING: Final = "Structured Streaming"
DECLARATIVE: Final = "Declarative Pipelines"
DLT: Final = "dlt"

FIRST: Final = "first load"
MORE: Final = "+ 1 %"
FILES: Final = 20
ROUNDS: Final = 3
TIMEOUT_S: Final = 1_800
SETTLE_S: Final = 10.0
"""Time after the first load, for what `penstock up` still has to start and compile."""
READ_S: Final = 0.05
"""Between two looks at a table that is to be brought up to date."""

PEERS: Final = Path(__file__).with_name("peers")

Command: TypeAlias = Sequence[str | Path]


# ----------------------------------------------------------------------------------- contestants


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The events of the first load, as a deployment and as files, and those that follow."""

    first: RawEvents
    more: RawEvents
    deployment: Path
    files: Path
    """Parent of `events` and `customers`."""

    @classmethod
    def write(cls, size: int, directory: Path) -> Inputs:
        """Write both. The task's endpoint is a placeholder, see `prepare_penstock`."""
        inputs = cls(
            first=RawEvents(size, files=FILES),
            more=RawEvents(size // 100, files=1, seed=8, first_id=size),
            deployment=directory / "data",
            files=directory / "files",
        )
        deployment = Deployment(inputs.deployment)
        deployment.write_catalog(catalog_text(sqlite_endpoint(directory / "unused.db")))
        asyncio.run(deployment.append_customers(inputs.first.accounts))
        deployment.append_events(inputs.first)
        write_customers(inputs.files, inputs.first.accounts)
        inputs.first.write_files(inputs.files / "events")
        return inputs


def write_customers(files: Path, accounts: int) -> None:
    """Write the customers as the peers read them."""
    (files / "customers").mkdir(parents=True)
    write_file(customers(accounts), files / "customers", "part-0.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A contestant that is ready to run, in a directory and a database of its own."""

    command: Command
    """Brings the table up to date, and ends."""
    append: Callable[[RawEvents], None]
    """Lets more events arrive."""
    rows: Callable[[], list[Row]]
    read: ReadTable


Prepare: TypeAlias = Callable[[Inputs, str, Path], contextlib.AbstractContextManager[Started]]
"""Takes the inputs, the URL of a new database, and a new directory."""


@contextlib.contextmanager
def prepare_penstock(inputs: Inputs, url: str, here: Path) -> Iterator[Started]:
    """Prepare Penstock: a copy of the deployment, whose task writes to this database."""
    deployment = Deployment(here / "data")
    shutil.copytree(inputs.deployment, deployment.data)
    deployment.write_catalog(catalog_text(postgres_endpoint(url)))
    deployment.apply()
    with psycopg.connect(url, autocommit=True) as connection:
        yield Started(
            command=[sys.executable, "-m", "penstock", "run", "--data", deployment.data, "--json"],
            append=deployment.append_events,
            rows=partial(postgres_rows, url),
            read=partial(read_database, connection),
        )


def prepare_peer(python: Path, script: str, *options: str) -> Prepare:
    """Prepare a peer that reads files and writes to PostgreSQL."""

    @contextlib.contextmanager
    def prepare(inputs: Inputs, url: str, here: Path) -> Iterator[Started]:
        files = _copy_files(inputs, here)
        with psycopg.connect(url, autocommit=True) as connection:
            yield Started(
                command=[
                    python, PEERS / script, "--input", files, "--work", here / "work",
                    "--url", url, *options,
                ],
                append=lambda more: more.write_files(files / "events"),
                rows=partial(postgres_rows, url),
                read=partial(read_database, connection),
            )  # fmt: skip

    return prepare


def prepare_declarative(python: Path) -> Prepare:
    """Prepare Declarative Pipelines, whose table is a directory of Parquet files."""

    @contextlib.contextmanager
    def prepare(inputs: Inputs, url: str, here: Path) -> Iterator[Started]:
        files, work = _copy_files(inputs, here), here / "work"
        table = work / "warehouse" / "accounts"
        program = PEERS / "pipeline_declarative.py"
        yield Started(
            command=[python, program, "--input", files, "--work", work],
            append=lambda more: more.write_files(files / "events"),
            rows=partial(parquet_rows, table),
            read=partial(read_parquet, table),
        )

    return prepare


def _copy_files(inputs: Inputs, here: Path) -> Path:
    """Copy the peers' files, with their times: Structured Streaming reads in that order."""
    (here / "work").mkdir()
    shutil.copytree(inputs.files, here / "files")
    return here / "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer: the modules that it needs, and how to prepare it."""

    name: str
    modules: tuple[str, ...]
    prepare: Callable[[Path], Prepare]


ALL_PEERS: Final = (
    Peer(
        name=STREAMING,
        modules=("pyspark",),
        prepare=lambda python: prepare_peer(python, "pipeline_streaming.py", "--once"),
    ),
    Peer(
        name=DECLARATIVE,
        modules=("pyspark", "grpc_status", "zstandard", "yaml"),
        prepare=prepare_declarative,
    ),
    Peer(
        name=DLT,
        modules=("dlt",),
        prepare=lambda python: prepare_peer(python, "pipeline_dlt.py"),
    ),
)


def contestants(bench: Bench) -> dict[str, Prepare]:
    """Return Penstock first, then the peers that are installed."""
    found: dict[str, Prepare] = {OURS: prepare_penstock}
    if bench.peers is None:
        bench.say(f"peers are not installed: {OURS} is measured alone")
        return found
    for peer in ALL_PEERS:
        if all(is_installed(bench.peers, module) for module in peer.modules):
            found[peer.name] = peer.prepare(bench.peers)
        else:
            bench.say(f"{peer.name} is not installed, and left out")
    return found


# ------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A run that brought the table up to date, and how many of its rows are wrong then."""

    run: processes.Run
    wrong: int
    rows: int
    """Expected rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one contestant in one round."""

    first: Update
    more: Update
    reads: Reads
    """During the second update."""


@contextlib.contextmanager
def new_database(server: PostgresServer) -> Iterator[str]:
    """Create a database, and drop it afterwards, so that no clean-up counts as time of another."""
    url = server.create_database()
    name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(url)["dbname"]))
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("CHECKPOINT")
        try:
            yield url
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def run_once(inputs: Inputs, prepare: Prepare, server: PostgresServer) -> Outcome:
    """Let one contestant load all events, and then one per cent more."""
    before, after = oracle([inputs.first]), oracle([inputs.first, inputs.more])
    with (
        new_database(server) as url,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir,
        prepare(inputs, url, Path(temp_dir)) as started,
    ):
        first = _update(started, before)
        started.append(inputs.more)
        reader = Reader(started.read)
        with reader.reading():
            more = _update(started, after)
        reads = Reads.judge(reader.reads, {Sums.of(before), Sums.of(after)})
    return Outcome(first=first, more=more, reads=reads)


def _update(started: Started, expected: Sequence[Row]) -> Update:
    os.sync()
    run = processes.run(started.command, timeout_s=TIMEOUT_S)
    return Update(run=run, wrong=wrong_rows(started.rows(), expected), rows=len(expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpdate:
    """An update by a process that was running: from before the append until it could be seen."""

    seconds: float
    cpu_s: float
    wrong: int


def update_by_up(inputs: Inputs, server: PostgresServer, *, settle_s: float) -> WarmUpdate:
    """Let `penstock up` load all events, and measure how it brings one per cent more."""
    before, after = oracle([inputs.first]), oracle([inputs.first, inputs.more])
    with (
        new_database(server) as url,
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir,
        prepare_penstock(inputs, url, Path(temp_dir)) as started,
        Up.running(Path(temp_dir) / "data") as up,
    ):

        def wait_for(rows: Sequence[Row]) -> None:
            expected = Read(len(rows), Sums.of(rows))
            up.wait(lambda: started.read() == expected, "a table is not complete", poll_s=READ_S)

        wait_for(before)
        time.sleep(settle_s)
        os.sync()
        cpu_s, began = up.cpu_s, time.perf_counter()
        started.append(inputs.more)
        wait_for(after)
        seconds, cpu_s = time.perf_counter() - began, up.cpu_s - cpu_s
        wrong = wrong_rows(started.rows(), after)
    return WarmUpdate(seconds=seconds, cpu_s=cpu_s, wrong=wrong)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of all contestants, round by round."""

    events: int
    of: Mapping[str, Sequence[Outcome]] = field(default_factory=dict)

    def samples(self, figure: Callable[[Outcome], float]) -> Samples:
        return Samples({who: [figure(each) for each in got] for who, got in self.of.items()})

    def wrong(self, who: str) -> int:
        """Return the wrong rows after all updates."""
        return sum(each.first.wrong + each.more.wrong for each in self.of[who])

    def right_share(self, who: str) -> float:
        """Return the share of expected rows that are right. Unexpected rows count as wrong, too."""
        rows = sum(each.first.rows + each.more.rows for each in self.of[who])
        return max(0.0, 1 - self.wrong(who) / rows)

    def reads(self, who: str) -> Reads:
        return sum((each.reads for each in self.of[who]), Reads())


def measure(
    bench: Bench, inputs: Inputs, who: Mapping[str, Prepare], server: PostgresServer
) -> Outcomes:
    """Measure all contestants in turns. Each run is a new process, so nothing is warmed up."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in who}

    def once(name: str) -> float:
        outcome = run_once(inputs, who[name], server)
        outcomes[name].append(outcome)
        wrong = outcome.first.wrong + outcome.more.wrong
        seconds = (outcome.first.run.seconds, outcome.more.run.seconds)
        bench.say(f"{name}: {seconds[0]:.1f} s, then {seconds[1]:.1f} s, {wrong:,} wrong rows")
        return seconds[0]

    peers = {name: partial(once, name) for name in who}
    rounds = bench.size(full=ROUNDS, quick=1)
    bench.interleave(f"{inputs.first.count:,} events", peers, warmups=0, rounds=rounds)
    return Outcomes(inputs.first.count, outcomes)


def run(bench: Bench) -> Report:
    """Measure updates, then rates, then languages."""
    size = bench.size(full=2_000_000, quick=200_000)
    with running_postgres() as server:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
            bench.say(f"writing {size:,} events")
            inputs = Inputs.write(size, Path(temp_dir))
            updates = measure(bench, inputs, contestants(bench), server)
            rounds = bench.size(full=ROUNDS, quick=1)
            bench.say(f"{MORE} while penstock up runs: {rounds} times")
            warm = [update_by_up(inputs, server, settle_s=SETTLE_S) for _ in range(rounds)]
        rates = pipeline_rates.run(bench, server)
    parts = [build_report(updates), warm_report(size, warm), rates, languages.run(bench)]
    return Report.merge(parts)


# ------------------------------------------------------------------------------------- reporting


def build_report(outcomes: Outcomes) -> Report:
    """Build the report of both updates; goals that compare with a missing peer are left out."""
    what = f"{outcomes.events:,} events"
    figures: Mapping[str, tuple[str, Samples]] = {
        f"{which}, {name}": (unit, outcomes.samples(partial(figure, which)))
        for which in (FIRST, MORE)
        for name, unit, figure in (
            ("wall", "s", lambda which, each: _update_of(which, each).run.seconds),
            ("CPU", "s of CPU", lambda which, each: _update_of(which, each).run.usage.cpu_s),
            ("peak memory", "MB RSS", _peak_mb),
        )
    }
    compared = ((f"{FIRST}, wall", STREAMING, 1.5), (f"{FIRST}, wall", DECLARATIVE, 1.5))
    goals = [
        Goal(
            name=f"{what}: {name} of {peer} / {OURS}",
            measured=figures[name][1].ratio(peer, OURS),
            goal=least,
        )
        for name, peer, least in (*compared, (f"{MORE}, CPU", DECLARATIVE, 5.0))
        if peer in outcomes.of and all(figures[name][1].by_peer[OURS])
    ]
    goals += [
        Goal(name=f"{what}: share of right rows", measured=outcomes.right_share(OURS), goal=1.0),
        Goal(
            name=f"{what}: share of reads during {MORE} that are neither empty nor torn",
            measured=outcomes.reads(OURS).whole_share,
            goal=1.0,
        ),
    ]
    return Report(
        results=tuple(_results(what, outcomes, figures)),
        goals=tuple(goals),
        charts=(
            _chart(
                "first-wall", f"{what} through two hops", outcomes, "s", figures[f"{FIRST}, wall"]
            ),
            _chart("more-wall", f"{what} {MORE}", outcomes, "s", figures[f"{MORE}, wall"]),
            _chart("more-cpu", f"{what} {MORE}", outcomes, "s of CPU", figures[f"{MORE}, CPU"]),
        ),
    )


def warm_report(events: int, updates: Sequence[WarmUpdate]) -> Report:
    """Build the report on updates by a process that was running."""
    what = f"{events:,} events: {OURS}, {MORE} while penstock up runs"
    figures = (
        ("wall", "s", statistics.median(each.seconds for each in updates)),
        ("CPU", "s of CPU", statistics.median(each.cpu_s for each in updates)),
        ("wrong rows in all rounds", "rows", sum(each.wrong for each in updates)),
    )
    return Report(
        results=tuple(
            Result(name=f"{what}, {name}", value=value, unit=unit) for name, unit, value in figures
        )
    )


def _update_of(which: str, outcome: Outcome) -> Update:
    return outcome.first if which == FIRST else outcome.more


def _peak_mb(which: str, outcome: Outcome) -> float:
    return _update_of(which, outcome).run.usage.peak_rss_bytes / 1e6


def _results(
    what: str, outcomes: Outcomes, figures: Mapping[str, tuple[str, Samples]]
) -> Iterator[Result]:
    for who in outcomes.of:
        for name, (unit, samples) in figures.items():
            yield Result(name=f"{what}: {who}, {name}", value=samples.median(who), unit=unit)
        reads = outcomes.reads(who)
        counted = (
            ("wrong rows in all rounds", outcomes.wrong(who), "rows"),
            (f"reads during {MORE}", reads.total, "reads"),
            (f"empty reads during {MORE}", reads.empty, "reads"),
            (f"torn reads during {MORE}", reads.torn, "reads"),
        )
        for name, count, unit in counted:
            yield Result(name=f"{what}: {who}, {name}", value=count, unit=unit)


def _chart(
    name: str, title: str, outcomes: Outcomes, unit: str, figure: tuple[str, Samples]
) -> Chart:
    """Draw a median per contestant; the note names contestants with wrong rows."""
    counts = {who: outcomes.wrong(who) for who in outcomes.of}
    wrong = (f" {who} left {rows:,} wrong rows." for who, rows in counts.items() if rows)
    rounds = len(outcomes.of[OURS])
    to_files = f" {DECLARATIVE} writes to files only." if DECLARATIVE in outcomes.of else ""
    return Chart(
        name=name,
        title=title,
        unit=unit,
        bars=tuple((who, figure[1].median(who)) for who in outcomes.of),
        note=f"Less is better. Median of {rounds} interleaved runs.{to_files}{''.join(wrong)}",
    )
