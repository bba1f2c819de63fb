"""`penstock bench shuffle`: what journals, fragments, memory and shards cost a checkpoint.

- Journals: the same documents in 10,000 journals and in 10, as one checkpoint each: listed,
  sequenced, planned, and read to the end by Spark at two shards. A quick run has 2,000 journals of
  as many documents each. What takes the time is to read them, and nearly the same for both; beside
  it, a journal costs the driver some 0.3 ms, half of it to decode its state.
- Sequencing: a clean backlog of 10 million documents in 10,000 fragments becomes a checkpoint. The
  objects that its records name do not exist, so nobody can have looked into one.
- Memory: a backlog of 20 times the memory of Spark goes through `penstock run`, beside one of 5
  times and one of that memory (`backlog`, in processes of their own).
- Shards: the documents of each key, in the same order at 1, 2 and 8 of them.

All of it is checked: what is read has the number and the checksum of what was written.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow

from penstock.journal.blobs import BlobStore
from penstock.journal.journals import creation
from penstock.journal.names import KEY_HASH_MAX, JournalName
from penstock.journal.ownership import Ownership
from penstock.journal.state import AckRecord, Blob, Fragment, Record
from penstock.journal.upkeep import CompactionOptions, compact_journal
from penstock.model.clock import Clock, Flag
from penstock.model.routing import split_shards
from penstock.model.runs import Run
from penstock.model.spec import CollectionSpec, fingerprint
from penstock.shuffle.binding import ad_hoc_bindings
from penstock.shuffle.session import Session
from penstock.wall_clock import now
from penstock_bench import backlog
from penstock_bench.frame import OURS, Bench, Chart, Goal, Report, Result, seconds_of
from penstock_bench.stock import (
    PRODUCER,
    SCHEMA,
    START,
    Integers,
    Stage,
    Stock,
    Sums,
    collection,
    fill,
    read_to_the_end,
    staged,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_pa: Any = pyarrow  # the published stubs lack the constructors used here

FEW: Final = 10
FRAGMENTS: Final = 10_000
SHARDS: Final = (1, 2, 8)


def run(bench: Bench) -> Report:
    """Everything about a shuffle that must be fast, or flat."""
    parts = [
        measure_journals(bench),
        measure_sequencing(bench),
        backlog.measure(bench),
        measure_shards(bench),
    ]
    return Report(
        results=tuple(result for part in parts for result in part.results),
        goals=tuple(goal for part in parts for goal in part.goals),
        charts=tuple(chart for part in parts for chart in part.charts),
    )


# ---------------------------------------------------------------------------------------- journals


@dataclass(slots=True)
class Spans:
    """How long each of some steps took, every time that they were done."""

    clock: Callable[[], float] = time.perf_counter
    taken: dict[str, list[float]] = field(default_factory=dict)
    _since: float = 0.0

    def begin(self) -> None:
        """The first step begins."""
        self._since = self.clock()

    def end(self, step: str) -> None:
        """A step ends, and the next one begins."""
        before, self._since = self._since, self.clock()
        self.taken.setdefault(step, []).append(self._since - before)

    def median(self, step: str) -> float:
        """The middle one of the last rounds; the first one of all was a warm-up."""
        return statistics.median(self.taken[step][1:] or self.taken[step])


@dataclass(slots=True)
class Reader:
    """Reads a collection that stands still, as one checkpoint, again and again."""

    here: Stage
    spark: SparkSession
    spec: CollectionSpec
    shards: int = 2
    spans: Spans = field(default_factory=Spans)
    jobs: set[int] = field(default_factory=set)
    """How many Spark jobs a checkpoint took; one number, unless they differ."""

    async def read(self, consume: Callable[[DataFrame], Sums]) -> Sums:
        """A session of its own: its first checkpoint, at its shards, as far as `consume` goes."""
        from penstock.shuffle.slice import Slice

        bindings, routing = ad_hoc_bindings(self.spec), split_shards(self.shards)
        slice_ = Slice(self.spark, self.here.planner, bindings, routing)
        before = self._jobs()
        self.spans.begin()
        session = await Session.open(self.here.planner, bindings, now=now)
        try:
            self.spans.end("list")
            checkpoint = await session.next_checkpoint()
            self.spans.end("sequence")
            frame = await slice_.shuffled(checkpoint.deliveries, session.states)
            self.spans.end("plan")
            found = await asyncio.to_thread(consume, frame)
            self.spans.end("read")
        finally:
            await session.close()
        self.jobs.add(len(self._jobs() - before))
        return found

    def _jobs(self) -> set[int]:
        """Those of no group, which is where all of ours are."""
        return set(self.spark.sparkContext.statusTracker().getJobIdsForGroup())


def measure_journals(bench: Bench) -> Report:
    """One checkpoint of many journals, beside the same documents in few."""
    journals = bench.size(full=10_000, quick=2_000)
    documents = 500 * journals
    stock = Stock(documents=documents, lots=FEW, parts=journals)
    spark = bench.spark()
    with tempfile.TemporaryDirectory() as scratch, staged(Path(scratch)) as (here, loop):
        few = Reader(here, spark, collection("bench/few", by="lot"))
        many = Reader(here, spark, collection("bench/many", by="part"))
        bench.say(f"writing {documents:,} documents to {FEW:,} journals, and to {journals:,}")
        written = loop.run(fill(here, few.spec, stock))
        _check(loop.run(fill(here, many.spec, stock)), written)

        def read(reader: Reader) -> Callable[[], None]:
            return lambda: _check(loop.run(reader.read(_to_the_end)), written)

        taken = bench.interleave(
            f"{documents:,} documents as a checkpoint",
            {"few": seconds_of(read(few)), "many": seconds_of(read(many))},
        )
    what = f"a checkpoint of {documents:,} documents"
    return Report(
        results=(
            *_steps(f"{what} in {FEW:,} journals", taken.median("few"), few.spans),
            *_steps(f"{what} in {journals:,} journals", taken.median("many"), many.spans),
            Result(name=f"Spark jobs, {FEW:,} journals", value=max(few.jobs), unit="jobs"),
            Result(name=f"Spark jobs, {journals:,} journals", value=max(many.jobs), unit="jobs"),
        ),
        goals=(
            Goal(
                name=f"Spark jobs: {FEW:,} journals / {journals:,}",
                measured=min(few.jobs) / max(many.jobs),
                goal=1.0,
            ),
            Goal(
                name=f"a checkpoint: time of {FEW:,} journals / {journals:,}",
                measured=taken.ratio("few", "many"),
                goal=0.5,
            ),
        ),
        charts=(
            Chart(
                name="journals",
                title=f"A checkpoint of {documents:,} documents",
                unit="s",
                bars=(
                    (f"{OURS}, in {FEW:,} journals", taken.median("few")),
                    (f"{OURS}, in {journals:,} journals", taken.median("many")),
                ),
                note="Listed, sequenced, planned, and read to the end by Spark; less is better.",
            ),
        ),
    )


def _to_the_end(frame: DataFrame) -> Sums:
    return read_to_the_end(frame, "d0")


def _steps(what: str, total_s: float, spans: Spans, unit: str = "s") -> Iterator[Result]:
    yield Result(name=what, value=total_s, unit=unit)
    for step in spans.taken:
        yield Result(name=f"{what}: to {step} it", value=spans.median(step), unit=unit)


def _check(found: Sums, written: Sums) -> None:
    if found != written:
        raise RuntimeError(f"{written} were written, and {found} found")


# -------------------------------------------------------------------------------------- sequencing


class CountedBlobs(BlobStore):
    """Counts what is opened: pages of records, and anything else, which would be rows."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.pages = 0
        self.others = 0

    def open(self, path: str) -> pyarrow.NativeFile:
        """The object for random access."""
        if path.endswith(".page"):
            self.pages += 1
        else:
            self.others += 1
        return super().open(path)


def measure_sequencing(bench: Bench) -> Report:
    """CPU seconds from opening a session to a checkpoint of 10,000 fragments."""
    at_once = bench.size(full=1, quick=10)
    backlogs = {
        f"bench/{journals}": Unwritten(
            journals=journals, transactions=FRAGMENTS // journals, at_once=at_once
        )
        for journals in (1, 100)
    }
    with tempfile.TemporaryDirectory() as scratch:
        blobs = CountedBlobs(Path(scratch, "blobs").as_uri())
        with staged(Path(scratch), blobs) as (here, loop):
            for name, each in backlogs.items():
                bench.say(f"appending {each.fragments:,} fragments to {each.journals:,} journals")
                loop.run(each.append(here, collection(name, by="part")))
            blobs.pages = blobs.others = 0
            sequencers = {
                name: Sequencer(here=here, spec=collection(name, by="part"), backlog=each)
                for name, each in backlogs.items()
            }

            def sequence(name: str) -> Callable[[], None]:
                return lambda: loop.run(sequencers[name].sequence())

            taken = bench.interleave(
                f"sequence {FRAGMENTS:,} fragments",
                {name: seconds_of(sequence(name), clock=time.process_time) for name in backlogs},
            )
    results: list[Result] = []
    goals: list[Goal] = []
    for name, each in backlogs.items():
        what = f"sequence {each.documents:,} documents of {each.journals:,} journals"
        results += _steps(what, taken.median(name), sequencers[name].spans, unit="s of CPU")
        per_10_000 = taken.median(name) * 10_000 / each.fragments
        goals.append(Goal(name=f"{what}: 1 s / CPU time", measured=1 / per_10_000, goal=1.0))
    results += (
        Result(name="sequence: pages of records read", value=blobs.pages, unit="objects"),
        Result(name="sequence: objects of rows read", value=blobs.others, unit="objects"),
    )
    unread = Goal(
        name="sequence: 1 / (1 + objects of rows read)", measured=1 / (1 + blobs.others), goal=1.0
    )
    return Report(results=tuple(results), goals=(*goals, unread))


@dataclass(slots=True, kw_only=True)
class Sequencer:
    """Asks for the first checkpoint of a backlog, which has all of it, and reads no document."""

    here: Stage
    spec: CollectionSpec
    backlog: Unwritten
    spans: Spans = field(default_factory=lambda: Spans(clock=time.process_time))

    async def sequence(self) -> None:
        """A session of its own, and its checkpoint."""
        bindings = ad_hoc_bindings(self.spec)
        self.spans.begin()
        session = await Session.open(self.here.planner, bindings, now=now)
        try:
            self.spans.end("list")
            checkpoint = await session.next_checkpoint()
            self.spans.end("sequence")
        finally:
            await session.close()
        fragments = sum(len(each.rows) for each in checkpoint.deliveries)
        if (fragments, checkpoint.documents) != (self.backlog.fragments, self.backlog.documents):
            raise RuntimeError(
                f"{checkpoint.documents:,} documents of {fragments:,} fragments were found"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritten:
    """A backlog of records: transactions of one fragment each, whose object was never written."""

    journals: int
    transactions: int
    """In each of them."""
    rows: int = 1_000
    """In a fragment."""
    at_once: int = 1
    """Transactions that share a revision of the store; others have one of their own."""

    @property
    def fragments(self) -> int:
        return self.journals * self.transactions

    @property
    def documents(self) -> int:
        return self.fragments * self.rows

    def records(self, spec: CollectionSpec, number: int) -> tuple[Record, ...]:
        """What a publisher would say of rows that it has written and committed."""
        first = START + number * (self.rows + 1)
        run = Run(
            producer=PRODUCER,
            kind=Flag.CONTINUE_TXN,
            first_offset=0,
            last_offset=self.rows - 1,
            rows=self.rows,
            clock_min=Clock(first),
            clock_max=Clock(first + self.rows - 1),
            clock_max_offset=self.rows - 1,
            increasing=True,
        )
        fragment = Fragment(
            rows=self.rows,
            bytes=100_000,
            at=Blob(path=f"{spec.name}/{number}.parquet"),
            schema=fingerprint(SCHEMA),
            runs=(run,),
            key_hash_min=0,
            key_hash_max=KEY_HASH_MAX,
        )
        return fragment, AckRecord(producer=PRODUCER, clock=Clock(first + self.rows))

    async def append(self, here: Stage, spec: CollectionSpec) -> None:
        """Append it to new journals; old records are sealed into pages, as compaction does it."""
        names = [JournalName.of(spec.name, {"part": number}) for number in range(self.journals)]
        await here.schemas.put(spec.write_schema)
        await Ownership(here.journals, here.blobs).claim()  # before it names what is not there
        await here.journals.create_all({name: creation(name) for name in names})
        seal = CompactionOptions(target_bytes=1)  # everything is large enough to be left alone
        records = (self.records(spec, number) for number in range(self.transactions))
        unsealed = 0
        while some := tuple(itertools.chain(*itertools.islice(records, self.at_once))):
            await here.journals.append_all({str(name): some for name in names})
            unsealed += len(some)
            if unsealed > seal.records_max:
                unsealed = seal.records_max // 2
                for name in names:
                    await compact_journal(here.journals, here.blobs, here.schemas, str(name), seal)


# ------------------------------------------------------------------------------------------ shards


def measure_shards(bench: Bench) -> Report:
    """The same order of each key's documents at any number of shards, and what it takes."""
    documents = bench.size(full=4_000_000, quick=500_000)
    stock = Stock(documents=documents, lots=FEW, parts=FEW)
    expected = ordered(stock.customers_of(np.arange(documents)), np.arange(documents))
    spark = bench.spark()
    with tempfile.TemporaryDirectory() as scratch, staged(Path(scratch)) as (here, loop):
        spec = collection("bench/keys", by="lot")
        bench.say(f"writing {documents:,} documents")
        loop.run(fill(here, spec, stock))

        def read(shards: int) -> Callable[[], None]:
            reader = Reader(here, spark, spec, shards=shards)
            return lambda: _check(loop.run(reader.read(_order_of)), expected)

        taken = bench.interleave(
            f"{documents:,} documents by key",
            {str(shards): seconds_of(read(shards)) for shards in SHARDS},
        )
    return Report(
        results=tuple(
            Result(
                name=f"{documents:,} documents in order, at {shards} shards",
                value=documents / taken.median(str(shards)),
                unit="documents/s",
            )
            for shards in SHARDS
        )
    )


def ordered(keys: Integers, ids: Integers) -> Sums:
    """Depends on which documents a key has, and on their order, and on nothing else.

    A document counts by its key, its number, and how many of its key came before it.
    """
    by_key = np.argsort(keys, kind="stable")
    sorted_keys = keys[by_key]
    first = np.searchsorted(sorted_keys, sorted_keys)
    place = np.arange(len(keys)) - first
    mixed = np.stack([sorted_keys, place, ids[by_key]]).astype(np.uint64)
    total = np.zeros(len(keys), np.uint64)
    for each in mixed:
        total = (total ^ each) * np.uint64(0x9E3779B97F4A7C15)
        total ^= total >> np.uint64(29)
    return Sums(len(keys), int((total & np.uint64(0xFFFFFFFF)).sum()))


def _order_of(frame: DataFrame) -> Sums:
    """Every shard by itself: a key that came to two of them would be counted from zero in both."""
    columns = frame.select("d0.customer", "d0.id")
    rows = columns.mapInArrow(_order_in_task, "documents BIGINT, checksum BIGINT").collect()
    return sum((Sums(row.documents, row.checksum) for row in rows), Sums())


def _order_in_task(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    keys, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in batches:
        keys.append(batch.column(0).to_numpy())
        ids.append(batch.column(1).to_numpy())
    found = ordered(np.concatenate(keys), np.concatenate(ids))
    yield _pa.RecordBatch.from_pylist(
        [{"documents": found.documents, "checksum": found.checksum}],
        schema=_pa.schema([("documents", _pa.int64()), ("checksum", _pa.int64())]),
    )
