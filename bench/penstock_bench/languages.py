"""What a document costs in each language of derivations, beside the same work by hand.

- *Spark SQL*: the first hop of the pipeline, beside a plain `select` by the same Spark session that
  reads Parquet files and writes some.
- *SQLite*: a lambda that keeps a running total for each account in a table, beside a loop over
  `sqlite3` in this process, which reads and writes Parquet files, too.
- *Python*: the first hop once more, beside a loop over pydantic models that does the same.

Spark is started and warm. A derivation is timed from the start of its task until it has caught up:
it reads a collection, transforms and validates, and publishes what it made, durably. It uses all
cores, with a shard on each where it keeps state, and a loop uses one; so figures of SQLite are per
core.

After the last round, the documents of each derivation are compared with those made by hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pydantic
import yaml

from penstock.batch import make_world, run_until, tasks_to_run
from penstock.catalog import desired
from penstock.consensus.open import open_consensus
from penstock.journal.follower import current_revision
from penstock.model.json_order import Json
from penstock_bench.events import REGIONS, pa, pq, settings_in
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, Samples, seconds_of
from penstock_bench.pipeline_events import (
    CLEAN_SCHEMA,
    CLEANED,
    RAW,
    RAW_SCHEMA,
    Deployment,
    RawEvents,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BY_HAND: Final = "by hand"
SPARK: Final = "Spark SQL"
SQLITE: Final = "SQLite"
PYTHON: Final = "Python"

GOALS: Final[Mapping[str, float]] = {SPARK: 0.9, SQLITE: 0.5, PYTHON: 0.5}

FILES: Final = 10
ROUNDS: Final = 3

TASKS: Final[Mapping[str, str]] = {
    SPARK: "bench/by-spark",
    SQLITE: "bench/by-sqlite",
    PYTHON: "bench/by-python",
}

_TOTALS: Final = """\
create table totals (
    account integer primary key not null, amount integer not null, events integer not null
);
"""

_ADD: Final = """\
insert into totals (account, amount, events) select $account, $amount, 1 where $amount > 0
on conflict (account) do update set
    amount = totals.amount + excluded.amount, events = totals.events + 1;
"""

_TOTAL: Final = """\
select $id as id, account, amount as total, events
from totals where account = $account and $amount > 0;
"""

MODULE: Final = '''\
"""Cleans events."""

from collections.abc import AsyncIterator

from bench.by_python import Document, IDerivation, Request

REGIONS = ("ap", "eu", "me", "sa", "us")


class Derivation(IDerivation):
    """Drops invalid events, and spells regions in one way."""

    async def from_raw(self, read: Request.ReadFromRaw) -> AsyncIterator[Document]:
        event = read.doc
        region = event.region.strip().lower()
        if event.amount is not None and event.amount > 0 and region in REGIONS:
            yield Document(id=event.id, account=event.account, amount=event.amount, region=region)
'''

_TOTAL_SCHEMA: Final[Json] = {
    "type": "object",
    "required": ["id", "account", "total", "events"],
    "additionalProperties": False,
    "properties": {name: {"type": "integer"} for name in ("id", "account", "total", "events")},
}


# -------------------------------------------------------------------------------- the derivations


def catalog_text() -> str:
    """Return a catalog with a derivation in each language. Its module is `by_python.py`."""

    def derived(schema: Json, using: Json, transform: Mapping[str, Json], shards: int = 1) -> Json:
        transforms: Json = [{"name": "fromRaw", "source": RAW, **transform}]
        return {
            "key": ["/id"],
            "schema": schema,
            "derive": {"using": using, "transforms": transforms, "shards": {"count": shards}},
        }

    by_account: Json = {"key": ["/account"]}
    collections: Json = {
        RAW: {"key": ["/id"], "schema": RAW_SCHEMA},
        TASKS[SPARK]: derived(CLEAN_SCHEMA, {"spark": {}}, {"shuffle": "any", "lambda": CLEANED}),
        TASKS[SQLITE]: derived(
            _TOTAL_SCHEMA,
            {"sqlite": {"migrations": [_TOTALS]}},
            {"shuffle": by_account, "lambda": _ADD + _TOTAL},
            shards=os.cpu_count() or 1,
        ),
        TASKS[PYTHON]: derived(
            CLEAN_SCHEMA, {"python": {"module": "by_python.py"}}, {"shuffle": "any"}
        ),
    }
    return yaml.safe_dump({"collections": collections}, sort_keys=False)


def fill(events: RawEvents, data: Path) -> None:
    """Create a deployment with all derivations, and all events in it."""
    deployment = Deployment(data)
    deployment.write_catalog(catalog_text())
    (data / "by_python.py").write_text(MODULE)
    deployment.append_events(events)


def derive(data: Path, task: str, spark: SparkSession) -> float:
    """Run one derivation until it has caught up; return the seconds that it took."""

    async def run() -> float:
        settings = settings_in(data)
        store = await open_consensus(settings.consensus)
        try:
            catalog = await desired.load(store)
            world = dataclasses.replace(make_world(settings, store), spark=lambda _: spark)
            (spec,) = tasks_to_run(catalog, [task])
            revision = await current_revision(store)
            began = time.perf_counter()
            done = await run_until(catalog, spec, world, revision)
            seconds = time.perf_counter() - began
        finally:
            await store.close()
        if done.error is not None:
            raise done.error
        return seconds

    return asyncio.run(run())


def derived_documents(data: Path, collection: str) -> dict[int, Json]:
    """Read a derived collection as its users would, by id."""
    command = [sys.executable, "-m", "penstock", "read", collection, "--data", str(data)]
    lines = subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603
    documents = map(json.loads, lines.splitlines())
    return {document["id"]: document for document in documents}


# ----------------------------------------------------------------------------------------- by hand


def select_by_hand(files: Path, out: Path, spark: SparkSession) -> None:
    """Do the work of the Spark lambda: read Parquet files, select, write Parquet files."""
    spark.read.parquet(str(files)).createOrReplaceTempView("source")
    spark.sql(CLEANED).write.parquet(str(out))


def total_by_hand(files: Path, out: Path, _: SparkSession) -> None:
    """Do the work of the SQLite lambda, one event at a time."""
    out.mkdir()
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.execute(_TOTALS)
        database.execute("begin")
        for path in sorted(files.glob("*.parquet")):
            made = []
            for event in pq.read_table(path).to_pylist():
                database.execute(_ADD, event)
                made += database.execute(_TOTAL, event).fetchall()
            columns = zip(*made, strict=True)
            names = ["id", "account", "total", "events"]
            pq.write_table(pa.table([pa.array(c) for c in columns], names=names), out / path.name)
        database.execute("commit")


class Event(pydantic.BaseModel):
    """An event as it arrives."""

    id: int
    account: int
    amount: int | None = None
    region: str


class Cleaned(pydantic.BaseModel):
    """A valid event."""

    id: int
    account: int
    amount: int
    region: str


def clean_by_hand(files: Path, out: Path, _: SparkSession) -> None:
    """Do the work of the Python derivation, one model at a time."""
    out.mkdir()
    for path in sorted(files.glob("*.parquet")):
        made = []
        for row in pq.read_table(path).to_pylist():
            event = Event.model_validate(row)
            region = event.region.strip().lower()
            if event.amount is not None and event.amount > 0 and region in REGIONS:
                cleaned = Cleaned(
                    id=event.id, account=event.account, amount=event.amount, region=region
                )
                made.append(cleaned.model_dump())
        pq.write_table(pa.Table.from_pylist(made), out / path.name)


HANDS: Final[Mapping[str, Callable[[Path, Path, SparkSession], None]]] = {
    SPARK: select_by_hand,
    SQLITE: total_by_hand,
    PYTHON: clean_by_hand,
}


def documents_by_hand(out: Path) -> dict[int, Json]:
    """Read what was made by hand, by id."""
    rows = (row for path in out.glob("*.parquet") for row in pq.read_table(path).to_pylist())
    return {row["id"]: row for row in rows}


# ------------------------------------------------------------------------------------- measuring


def different(language: str, derived: Mapping[int, Json], by_hand: Mapping[int, Json]) -> int:
    """Count documents that differ.

    Running totals depend on the order of an account's events, which is that of no key. There, the
    largest totals by account must agree, and which events have one.
    """
    missing = len(derived.keys() ^ by_hand.keys())
    if language != SQLITE:
        return missing + sum(
            derived[key] != by_hand[key] for key in derived.keys() & by_hand.keys()
        )
    mine, theirs = (_largest_totals(documents.values()) for documents in (derived, by_hand))
    return missing + sum(mine.get(account) != total for account, total in theirs.items())


def _largest_totals(documents: Iterable[Any]) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for each in documents:
        total = (each["total"], each["events"])
        found[each["account"]] = max(total, found.get(each["account"], total))
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Documents per second of one language, by contestant and round."""

    per_s: Samples
    different: int


def measure(bench: Bench, language: str, events: RawEvents, directory: Path) -> Outcome:
    """Let a derivation and the same work by hand take turns; compare what the last round made."""
    made = {OURS: directory / "derived", BY_HAND: directory / "by-hand"}

    def ours() -> float:
        shutil.rmtree(made[OURS], ignore_errors=True)
        shutil.copytree(directory / "data", made[OURS])
        return events.count / derive(made[OURS], TASKS[language], bench.spark())

    def hand() -> float:
        shutil.rmtree(made[BY_HAND], ignore_errors=True)
        work = seconds_of(
            lambda: HANDS[language](directory / "files", made[BY_HAND], bench.spark())
        )
        return events.count / work()

    per_s = bench.interleave(
        f"{language}, {events.count:,} documents",
        {OURS: ours, BY_HAND: hand},
        rounds=bench.size(full=ROUNDS, quick=1),
    )
    derived = derived_documents(made[OURS], TASKS[language])
    return Outcome(
        per_s=per_s, different=different(language, derived, documents_by_hand(made[BY_HAND]))
    )


def run(bench: Bench) -> Report:
    """Measure all languages."""
    outcomes = {}
    small = bench.size(full=500_000, quick=50_000)
    for language, size in {SPARK: 4 * small, SQLITE: small, PYTHON: small}.items():
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temp_dir:
            directory = Path(temp_dir)
            events = RawEvents(size, files=FILES)
            fill(events, directory / "data")
            events.write_files(directory / "files")
            outcomes[language] = measure(bench, language, events, directory)
    return build_report(outcomes, cores=os.cpu_count() or 1)


# ------------------------------------------------------------------------------------- reporting


def build_report(outcomes: Mapping[str, Outcome], *, cores: int) -> Report:
    """Build the report; a goal of SQLite is per core, of the others as they are."""
    results, goals = [], []
    for language, outcome in outcomes.items():
        for who in outcome.per_s.by_peer:
            name = f"{language}: {who}"
            value = outcome.per_s.median(who)
            results.append(Result(name=name, value=value, unit="documents/s"))
        results.append(
            Result(
                name=f"{language}: documents that differ", value=outcome.different, unit="documents"
            )
        )
        ratio = outcome.per_s.ratio(OURS, BY_HAND)
        each = language == SQLITE
        goals.append(
            Goal(
                name=f"{language}: documents/s{' and core' if each else ''} of {OURS} / {BY_HAND}",
                # What is wrong is not fast.
                measured=0.0 if outcome.different else ratio / (cores if each else 1),
                goal=GOALS[language],
            )
        )
    charts = tuple(
        Chart(
            name=f"language-{language.lower().replace(' ', '-')}",
            title=f"{language}: a derivation, and the same work by hand",
            unit="documents/s",
            bars=tuple((who, outcome.per_s.median(who)) for who in outcome.per_s.by_peer),
            note="More is better."
            + ("" if language == SPARK else f" By hand: one core; {OURS}: {cores}."),
        )
        for language, outcome in outcomes.items()
    )
    return Report(results=tuple(results), goals=tuple(goals), charts=charts)
