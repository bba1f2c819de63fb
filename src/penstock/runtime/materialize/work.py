"""The work of transactions: from the checkpoints that they took to rows that are staged.

How many documents there are, and of what time, is known from records; so a transaction that has
none starts no job, and a task that never has any does not start Spark.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.engine import exchange_partitions, runs_here
from penstock.errors import Bug, PenstockError, Unavailable
from penstock.journal.committed import VisibleRows
from penstock.journal.evolve import UnreadableDocument
from penstock.journal.rows import stamp_names
from penstock.journal.state import JournalState
from penstock.model.clock import NEVER, Clock
from penstock.model.routing import split_shards
from penstock.runtime.connector import Staged, Workers
from penstock.runtime.materialize import refusals
from penstock.runtime.materialize.build import Built
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.materialize.messages import BindingReport
from penstock.runtime.materialize.task import Plan
from penstock.runtime.patches import Patches
from penstock.runtime.recovery import UNKNOWN_KEY
from penstock.runtime.stats import Counts
from penstock.runtime.waiting import INTERRUPT_S, Waits, heard, in_thread
from penstock.shuffle.delivery import Checkpoint, Delivery
from penstock.shuffle.order import Order, arranged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.journal.planning import Planner
    from penstock.model.columns import Column
    from penstock.native.reduce import Reduction
    from penstock.runtime.jobs import Counted, Documents, Identity, Manifest, Work
    from penstock.runtime.prepared import Queries
    from penstock.shuffle.binding import Binding
    from penstock.shuffle.slice import Reading, Slice

_log = logging.getLogger("penstock.runtime")

JOB_ATTEMPTS: Final = 3
"""A job that fails is run again as a whole; what it staged before is garbage."""

SMALL_BYTES: Final = 4 << 20
"""Stored size of documents up to which a transaction is small; combined, it is hardly more."""

HERE_DOCUMENTS: Final = 800_000
HERE_BYTES: Final = 8 << 20
"""Documents and their stored size, for each partition of an exchange, up to which rows may come to
the leader: should no two of them have the same key, then a task answers with so many, from memory,
where it has them twice for a moment."""

_LOCAL: Final = "file://"
_AGAIN_S: Final = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A transaction that is committed, for people."""

    transactions: int
    documents: int
    bytes: int
    stored: int
    jobs: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Transaction:
    """What a transaction has taken, and what became of it."""

    opened: Clock
    checkpoints: list[Checkpoint] = field(default_factory=list)
    works: Sequence[Work] = ()
    gathered: Documents | None = None
    """Combined already, by a job before."""
    saved: Documents | None = None
    """Reduced already, and to be stored by another job."""
    staged: tuple[Staged, ...] = ()
    paths: list[str] = field(default_factory=list)
    """What one job wrote for another."""
    patches: Patches = ()
    jobs: int = 0
    stored: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def bytes(self) -> int:
        return sum(checkpoint.bytes for checkpoint in self.checkpoints)

    @property
    def documents(self) -> int:
        return sum(checkpoint.documents for checkpoint in self.checkpoints)

    def deliveries(self) -> dict[int, list[Delivery]]:
        """Those with rows, by binding."""
        found: dict[int, list[Delivery]] = {}
        for checkpoint in self.checkpoints:
            for delivery in checkpoint.deliveries:
                if delivery.rows:
                    found.setdefault(delivery.binding, []).append(delivery)
        return found

    def progress(self, *, transactions: int) -> Progress:
        return Progress(
            transactions=transactions,
            documents=self.documents,
            bytes=self.bytes,
            stored=self.stored,
            jobs=self.jobs,
            seconds=time.monotonic() - self.began,
        )


class Jobs:
    """Runs the Spark jobs of one session."""

    def __init__(
        self,
        built: Built,
        planner: Planner,
        spark: Callable[[int], SparkSession],
        *,
        epoch: int,
        between: str,
        waits: Waits,
    ) -> None:
        self._built = built
        self._waits = waits
        self._planner = planner
        self._start_spark = spark
        self._epoch = epoch
        self._left = f"{between.rstrip('/')}/{built.name.encode().hex()}"
        """Where jobs leave something to the next: a directory for each session."""
        self._shards = built.runtime.shards
        self._slice: Slice | None = None
        self._queries: Queries | None = None
        """Where tasks see the files of this machine."""
        self._combinations: dict[tuple[int, bool, Order], Reduction] = {}
        """By binding, whether all columns are read, and what orders documents."""
        self._targets = {each.binding.index: each for each in built.targets}

    async def gather(self, transaction: Transaction, states: Mapping[str, JournalState]) -> None:
        """The first job of an OVERLAP: combine what the transaction has, while others commit it.

        A small one is not worth a job of its own.
        """
        if transaction.bytes > SMALL_BYTES:
            async with self._explaining(transaction, states):
                await self._attempted(
                    lambda attempt: self._gather(transaction, states, attempt),
                    lambda: self._examine(transaction, states),
                )

    async def flush(
        self,
        transaction: Transaction,
        workers: Workers,
        *,
        plan: Plan,
        states: Mapping[str, JournalState],
        max_keys: Mapping[int, bytes],
    ) -> Mapping[int, Sequence[BindingReport]]:
        """Load and reduce; and put aside, but of a BARRIER, whose hint has to come first."""
        transaction.works = self._works(transaction, max_keys)
        if not transaction.works:
            return {}
        async with self._explaining(transaction, states):
            if plan is Plan.BARRIER:
                await self._attempted(
                    lambda attempt: self._load(transaction, workers, states, attempt),
                    lambda: self._examine(transaction, states),
                )
                return self._reports(transaction, (), max_keys)
            manifest = await self._attempted(
                lambda attempt: self._stage(transaction, workers, states, attempt),
                lambda: self._examine(transaction, states),
            )
        return self._staged(transaction, manifest, max_keys)

    async def store(
        self, transaction: Transaction, workers: Workers
    ) -> Mapping[int, Sequence[BindingReport]]:
        """The second job of a BARRIER: store what was saved. Of others, all is staged already."""
        if transaction.saved is None or transaction.staged or not transaction.works:
            return {}
        manifest = await self._attempted(
            lambda attempt: self._stage_saved(transaction, workers, attempt)
        )
        transaction.staged = manifest.staged
        return {
            shard: [replace(report, max_key=b"") for report in reports]
            for shard, reports in self._counts(transaction, manifest.counted, {}).items()
        }

    async def _attempted(
        self,
        run: Callable[[int], Awaitable[T]],
        examine: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Run a job, again if it fails as a whole: an executor was lost, say.

        `examine` then raises what no other attempt would mend.
        """
        for attempt in range(1, JOB_ATTEMPTS):
            try:
                return await run(attempt)
            except _job_failures() as error:
                if attempt == 1 and examine is not None:
                    await examine()
                _log.warning(
                    "%s: job attempt %d failed: %s", self._built.name, attempt, _said(error)
                )
        try:
            return await run(JOB_ATTEMPTS)
        except _job_failures() as error:
            raise Unavailable(
                "a Spark job keeps failing",
                where=f"task {self._built.name}",
                why=_said(error),
                fix="look at Spark's log; the task goes on from its last transaction",
            ) from error

    @contextlib.asynccontextmanager
    async def _explaining(
        self, transaction: Transaction, states: Mapping[str, JournalState]
    ) -> AsyncIterator[None]:
        """Around jobs that read documents: which one is refused, and why, if one is."""
        try:
            yield
        except _refusals() as error:
            for binding, some in transaction.deliveries().items():
                bound = self._targets[binding].binding
                if (found := await refusals.find(self._planner, bound, some, states)) is not None:
                    raise found from None
            if isinstance(error, PenstockError):
                raise
            raise Bug("a job refuses a document that the validator admits") from error

    async def _examine(self, transaction: Transaction, states: Mapping[str, JournalState]) -> None:
        """Raise CorruptBlob if an object that the transaction reads is damaged.

        A job fails because of it, and says so in Spark's words if it says anything.
        """
        rows: dict[str, list[VisibleRows]] = {}
        for some in transaction.deliveries().values():
            for delivery in some:
                rows.setdefault(delivery.journal, []).extend(delivery.rows)
        for journal, visible in rows.items():
            await self._planner.check(journal, visible, states.get(journal))

    def forget(self, transaction: Transaction) -> None:
        """Remove what jobs of a transaction have left to each other."""
        if not transaction.paths:
            return
        for path in transaction.paths:
            files, where = _hadoop(self._spark, path)
            files.delete(where, True)

    def close(self) -> None:
        """No more jobs are run."""
        if self._queries is not None:
            self._queries.close()

    # ----------------------------------------------------------------------------------- the jobs

    def _works(self, transaction: Transaction, max_keys: Mapping[int, bytes]) -> list[Work]:
        from penstock.runtime.jobs import Work

        return [
            Work(
                target=self._targets[binding].target,
                plan=self._targets[binding].plan,
                mode=self._targets[binding].mode,
                max_key=max_keys.get(binding),
            )
            for binding in sorted(transaction.deliveries())
        ]

    async def _combined(
        self, transaction: Transaction, states: Mapping[str, JournalState], *, small: bool = False
    ) -> Documents:
        """Documents of a transaction, combined by key; in one task, if they are few."""
        readings, deliveries = await self._readings(transaction, states), transaction.deliveries()

        def combine() -> Documents:
            return {
                binding: self._combine(binding, deliveries[binding], reading.frame(), small=small)
                for binding, reading in readings.items()
            }

        return await asyncio.to_thread(combine)

    async def _readings(
        self, transaction: Transaction, states: Mapping[str, JournalState]
    ) -> Mapping[int, Reading]:
        if self._slice is None:
            self._spark, self._slice = await self._open(transaction.bytes)
        readings = {}
        for binding, some in transaction.deliveries().items():
            bound = self._targets[binding]
            placed = arranged(some, delay=bound.binding.read_delay)
            foreign = refusals.are_foreign(bound.binding, some)
            readings[binding] = await self._slice.reading(
                bound.binding,
                placed.deliveries,
                states,
                columns=None if foreign else bound.columns,
                stamps=_stamps(bound.plan.columns, placed.order),
            )
        return readings

    def _combine(
        self, binding: int, deliveries: Sequence[Delivery], frame: DataFrame, *, small: bool
    ) -> DataFrame:
        from penstock.runtime import jobs

        bound = self._targets[binding]
        foreign, order = _kind(bound.binding, deliveries)
        if foreign:
            frame = jobs.checked(frame, bound.plan.schema, bound.plan.columns)
        if (combination := self._combinations.get((binding, foreign, order))) is None:
            by = _order(bound.plan.columns, order)
            combination = jobs.combination(bound.plan, bound.mode, order=by)
            self._combinations[binding, foreign, order] = combination
        return combination.apply(frame.coalesce(1) if small else frame)

    async def _gather(
        self, transaction: Transaction, states: Mapping[str, JournalState], attempt: int
    ) -> None:
        from penstock.runtime import jobs

        documents = await self._combined(transaction, states)
        path = self._path(transaction, "gathered", attempt)
        await self._in_spark(transaction, lambda: jobs.save(documents, path))
        transaction.gathered = jobs.saved(self._spark, documents, path)
        transaction.paths.append(path)

    async def _load(
        self,
        transaction: Transaction,
        workers: Workers,
        states: Mapping[str, JournalState],
        attempt: int,
    ) -> None:
        from penstock.runtime import jobs

        documents = jobs.loaded(
            transaction.works,
            await self._combined(transaction, states),
            workers,
            self._identity(transaction, attempt),
            shards=self._shards,
        )
        path = self._path(transaction, "loaded", attempt)
        await self._in_spark(transaction, lambda: jobs.save(documents, path))
        transaction.saved = jobs.saved(self._spark, documents, path)
        transaction.paths.append(path)

    async def _stage(
        self,
        transaction: Transaction,
        workers: Workers,
        states: Mapping[str, JournalState],
        attempt: int,
    ) -> Manifest:
        from penstock.runtime import jobs

        works, identity = transaction.works, self._identity(transaction, attempt)
        few, shards = transaction.bytes <= SMALL_BYTES, self._shards
        loads = any(work.mode is Mode.LOAD for work in works)
        if few and not loads:
            readings = await self._readings(transaction, states)

            def stage_small() -> Manifest:
                frame = self._small_frame(transaction.deliveries(), readings)
                return jobs.stage_here(works, frame, workers, identity, shards=shards)

            return await self._in_spark(transaction, stage_small)
        documents = transaction.gathered or await self._combined(transaction, states, small=few)

        def stage() -> Manifest:
            # A job that failed may have answered with too much for Spark: tasks do it then.
            if attempt == 1 and self._fits_here(transaction) and not loads:
                frame = jobs.united(jobs.in_order(works, documents))
                return jobs.stage_here(works, frame, workers, identity, shards=shards)
            loaded = jobs.loaded(works, documents, workers, identity, shards=shards)
            return jobs.stage(works, loaded, workers, identity, shards=shards)

        return await self._in_spark(transaction, stage)

    def _fits_here(self, transaction: Transaction) -> bool:
        """Whether the leader may take the rows of a transaction itself, however many are combined.

        What a task answers with is in memory as a whole.
        """
        partitions = exchange_partitions(self._spark)
        return (
            runs_here(self._spark)
            and transaction.documents <= HERE_DOCUMENTS * partitions
            and transaction.bytes <= HERE_BYTES * partitions
        )

    def _small_frame(
        self, deliveries: Mapping[int, Sequence[Delivery]], readings: Mapping[int, Reading]
    ) -> DataFrame:
        """The combined rows of a small transaction, in one partition.

        Those that all came with records are read by a query that is planned already.
        """
        from penstock.runtime import jobs

        def united(frames: Mapping[int, DataFrame]) -> DataFrame:
            documents = {
                binding: self._combine(binding, deliveries[binding], frame, small=True)
                for binding, frame in frames.items()
            }
            frame = jobs.united(documents)
            return frame if len(documents) == 1 else frame.coalesce(1)

        rows = {binding: reading.at_hand() for binding, reading in readings.items()}
        known = {binding: some for binding, some in rows.items() if some is not None}
        if self._queries is None or len(known) < len(rows):
            return united({binding: reading.frame() for binding, reading in readings.items()})
        kinds = (
            (binding, *_kind(self._targets[binding].binding, some))
            for binding, some in deliveries.items()
        )
        schemas = {binding: reading.schema for binding, reading in readings.items()}
        return self._queries.frame(known, schemas, united, key=tuple(kinds))

    async def _stage_saved(
        self, transaction: Transaction, workers: Workers, attempt: int
    ) -> Manifest:
        from penstock.runtime import jobs

        saved, works = transaction.saved, transaction.works
        if saved is None:
            raise Bug("a transaction is stored that was not loaded")
        identity = self._identity(transaction, attempt)
        return await self._in_spark(
            transaction,
            lambda: jobs.stage(works, saved, workers, identity, shards=self._shards),
        )

    def _identity(self, transaction: Transaction, attempt: int) -> Identity:
        from penstock.runtime.jobs import Identity

        return Identity(
            task=self._built.name,
            epoch=self._epoch,
            transaction=transaction.opened,
            job_attempt=attempt,
        )

    def _path(self, transaction: Transaction, what: str, attempt: int) -> str:
        return f"{self._left}/{self._epoch}/{transaction.opened:x}-{what}-{attempt}"

    async def _open(self, waiting_bytes: int) -> tuple[SparkSession, Slice]:
        from penstock.runtime.prepared import Queries
        from penstock.shuffle.slice import Slice

        with self._waits.on(self._built.name, "Spark to start"):
            spark = await asyncio.to_thread(self._start_spark, waiting_bytes)
        await asyncio.to_thread(self._sweep, spark)
        if runs_here(spark) and self._left.startswith(_LOCAL):
            here = Path(self._left.removeprefix(_LOCAL)) / str(self._epoch)
            self._queries = Queries(spark, here / "slots")
        return spark, Slice(spark, self._planner, self._built.bindings, split_shards(self._shards))

    def _sweep(self, spark: SparkSession) -> None:
        """Remove what jobs of earlier sessions have left to others, and nobody will ask for."""
        files, where = _hadoop(spark, self._left)
        if files.exists(where):
            for found in files.listStatus(where):
                if found.getPath().getName() != str(self._epoch):
                    files.delete(found.getPath(), True)

    async def _in_spark(self, transaction: Transaction, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and count its jobs; if cancelled, end them before going on.

        Tasks of a job may wait for a lock of the endpoint, too.
        """
        context = self._spark.sparkContext
        group = f"{self._built.name}/{self._epoch}/{time.monotonic_ns()}"

        def grouped() -> T:
            context.setJobGroup(group, f"transaction of {self._built.name}", interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", self._built.name)
            return work()

        running = asyncio.ensure_future(asyncio.to_thread(grouped))
        connector = self._built.connector
        try:
            with self._waits.on(self._built.name, "Spark", connector.waits_for):
                return await asyncio.shield(running)
        except asyncio.CancelledError:
            await _cancelled(running, functools.partial(context.cancelJobGroup, group))
            raise
        finally:
            transaction.jobs += len(context.statusTracker().getJobIdsForGroup(group))

    # ---------------------------------------------------------------------------------- the counts

    def _staged(
        self, transaction: Transaction, manifest: Manifest, max_keys: Mapping[int, bytes]
    ) -> Mapping[int, Sequence[BindingReport]]:
        transaction.staged = manifest.staged
        return self._reports(transaction, manifest.counted, max_keys)

    def _reports(
        self,
        transaction: Transaction,
        counted: Sequence[Counted],
        max_keys: Mapping[int, bytes],
    ) -> Mapping[int, Sequence[BindingReport]]:
        """What was read, which the first shard reports, and what each shard has stored of it."""
        reports = self._counts(transaction, counted, max_keys)
        reports.setdefault(0, []).extend(
            self._sourced(binding, some, max_keys, stores=not counted)
            for binding, some in transaction.deliveries().items()
        )
        return reports

    def _counts(
        self, transaction: Transaction, counted: Sequence[Counted], max_keys: Mapping[int, bytes]
    ) -> dict[int, list[BindingReport]]:
        transaction.stored = sum(each.stored_docs for each in counted)
        reports: dict[int, list[BindingReport]] = {}
        for each in counted:
            report = BindingReport(
                binding=each.binding,
                stored=Counts(docs=each.stored_docs, bytes=each.stored_bytes),
                max_key=self._max_key(each, max_keys.get(each.binding, b"")),
            )
            reports.setdefault(each.shard, []).append(report)
        return reports

    def _sourced(
        self,
        binding: int,
        deliveries: Sequence[Delivery],
        max_keys: Mapping[int, bytes],
        *,
        stores: bool,
    ) -> BindingReport:
        """What was read for a binding, from the records alone.

        If its rows are stored later, keys are not known yet, and all are to be loaded from then on.
        """
        runs = [rows.run for delivery in deliveries for rows in delivery.rows]
        unknown = stores and max_keys.get(binding) != UNKNOWN_KEY
        return BindingReport(
            binding=binding,
            sourced=Counts(
                docs=sum(run.rows for run in runs), bytes=sum(each.bytes for each in deliveries)
            ),
            clock_min=min((run.clock_min for run in runs), default=NEVER),
            clock_max=max((run.clock_max for run in runs), default=NEVER),
            max_key=UNKNOWN_KEY if unknown else b"",
        )

    def _max_key(self, counted: Counted, known: bytes) -> bytes:
        """The greatest key of a shard, if it is greater than what is known.

        Where nothing is ever loaded keys are not looked at; should the binding load one day, it
        has to load all of them.
        """
        found = counted.max_key or b""
        if counted.stored_docs and self._targets[counted.binding].mode is not Mode.LOAD:
            found = UNKNOWN_KEY
        return found if found > known else b""


def _kind(binding: Binding, deliveries: Sequence[Delivery]) -> tuple[bool, Order]:
    """Whether documents are foreign, and what orders them."""
    order = arranged(deliveries, delay=binding.read_delay).order
    return refusals.are_foreign(binding, deliveries), order


def _stamps(root: Column, order: Order) -> tuple[str, ...]:
    """The columns of stamps that the order is told from."""
    names = stamp_names(root)
    return (names.clock,) if order is Order.CLOCK else (names.clock, names.producer)


def _order(root: Column, order: Order) -> tuple[str, ...]:
    """The columns that order documents."""
    stamps = _stamps(root, order)
    return (stamp_names(root).level, *stamps) if order is Order.COMMIT else stamps


async def _cancelled(running: asyncio.Future[T], cancel: Callable[[], None]) -> None:
    """End the jobs of a thread, until it has none; one that does not end is left behind."""
    loop = asyncio.get_running_loop()
    until = loop.time() + INTERRUPT_S
    while not running.done() and loop.time() < until:
        asked = in_thread(cancel)  # a job may be submitted after the jobs were first cancelled
        both: list[asyncio.Future[Any]] = [running, asked]
        await asyncio.wait(both, timeout=INTERRUPT_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([running], timeout=_AGAIN_S)
        asked.add_done_callback(heard)
    running.add_done_callback(heard)


def _refusals() -> tuple[type[Exception], ...]:
    from penstock.runtime.jobs import Refused

    return UnreadableDocument, Refused


def _hadoop(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """The file system that a path lies in, and the path as it calls it."""
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark shows file systems nowhere else
    where = jvm.org.apache.hadoop.fs.Path(path)
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001
    return where.getFileSystem(configuration), where


def _job_failures() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JJavaError


def _said(error: BaseException) -> str:
    """What is worth reading of a Spark error: of a Python worker's traceback, its last line."""
    text = str(error).split("JVM stacktrace", 1)[0].split("\n\tat ", 1)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in text else lines[0]
