"""The Spark jobs of transactions: from the checkpoints that they took in to staged rows.

What is read, reduced and staged in which job is the transaction's plan (`task.Plan`). A small
transaction's rows come to the leader, by a query that is planned once (`runtime/prepared.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from penstock.engine import exchange_partitions, runs_here
from penstock.errors import Bug
from penstock.journal.state import JournalState
from penstock.model.clock import NEVER
from penstock.model.routing import split_shards
from penstock.runtime import refusals
from penstock.runtime.connector.materialize import Staged, Workers
from penstock.runtime.control import Control
from penstock.runtime.job_runner import JobRunner, Reads
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.materialize.messages import BindingReport, Reports
from penstock.runtime.materialize.task import Plan
from penstock.runtime.order_columns import order_columns, stamps_for
from penstock.runtime.recovery import UNKNOWN_KEY
from penstock.runtime.stats import Counts
from penstock.shuffle.delivery import Delivery
from penstock.shuffle.order import Order, arranged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.native.collect import LentFrame
    from penstock.runtime.materialize.build import MaterializationTask
    from penstock.runtime.materialize.jobs import BindingJob, ShardCounts, StagedManifest
    from penstock.runtime.materialize.transaction import Transaction
    from penstock.runtime.prepared import Queries
    from penstock.runtime.session import World
    from penstock.runtime.spark_tasks import Documents, JobIdentity
    from penstock.shuffle.binding import Binding
    from penstock.shuffle.slice import Reading, Slice

HERE_DOCUMENTS: Final = 800_000
HERE_BYTES: Final = 8 << 20
"""Documents and their stored size, for each partition of an exchange, up to which rows may come to
the leader: should no two of them have the same key, a task answers with that many, from memory,
where it has them twice for a moment."""

States = Mapping[str, JournalState]


@dataclass(slots=True)
class JobResults:
    """The results of one transaction's jobs so far."""

    gathered: Documents | None = None
    """Combined already, by a job before."""
    reduced: Documents | None = None
    """Reduced already, and to be stored by another job."""
    staged: tuple[Staged, ...] = ()
    handoffs: list[str] = field(default_factory=list)
    """Paths of what one job wrote for another."""
    jobs: int = 0
    stored: int = 0


class TransactionJobs:
    """Runs the Spark jobs of one session's transactions, of which one is open at a time."""

    def __init__(
        self, task: MaterializationTask, world: World, control: Control, *, epoch: int
    ) -> None:
        self._task = task
        self._planner = world.planner
        self._epoch = epoch
        self._runner = JobRunner(
            task.name,
            task.bindings,
            world.planner,
            world.spark,
            epoch=epoch,
            local_dir=world.local_dir,
            control=control,
            waits_for=task.connector.waits_for,
        )
        self._shards = task.leader_task.shards
        self._slice: Slice | None = None
        self._queries: Queries | None = None
        """Where tasks see the files of this machine."""
        self._targets = {target.binding.index: target for target in task.targets}
        self._results = JobResults()

    @property
    def staged(self) -> tuple[Staged, ...]:
        """Units that the open transaction has staged."""
        return self._results.staged

    async def gather(self, txn: Transaction, states: States) -> None:
        """Run the first job of an OVERLAP: combine the transaction's input, while others commit.

        A small one is not worth a job of its own, and none is if its result cannot be handed over.
        """
        if not txn.is_small:
            await self._open(txn)
            if self._runner.can_hand_over:
                await self._runner.attempt(
                    lambda attempt: self._gather(txn, states, attempt),
                    Reads(txn.deliveries(), states),
                )

    async def flush(self, txn: Transaction, workers: Workers, states: States) -> Reports:
        """Load and reduce; and stage, unless it is a BARRIER, whose hint has to come first."""
        deliveries = txn.deliveries()
        if not deliveries:
            return ()
        reads = Reads(deliveries, states)
        if txn.plan is Plan.BARRIER:
            await self._runner.attempt(
                lambda attempt: self._load(txn, workers, states, attempt), reads
            )
            return self._sourced(txn, stores_later=True)
        manifest = await self._runner.attempt(
            lambda attempt: self._stage(txn, workers, states, attempt), reads
        )
        return (*self._take(txn, manifest), *self._sourced(txn, stores_later=not manifest.counted))

    async def store(self, txn: Transaction, workers: Workers) -> Reports:
        """Run the second job of a BARRIER: store what was loaded and reduced."""
        if self._results.reduced is None:
            return ()
        manifest = await self._runner.attempt(
            lambda attempt: self._stage_reduced(txn, workers, attempt)
        )
        return tuple(replace(report, max_key=b"") for report in self._take(txn, manifest))

    def finish(self) -> JobResults:
        """Return what the jobs of a committed transaction have made; the next one is open now."""
        results, self._results = self._results, JobResults()
        results.jobs, self._runner.jobs_run = self._runner.jobs_run, 0
        return results

    async def remove(self, handoffs: Sequence[str]) -> None:
        """Remove what jobs of a committed transaction have left to each other."""
        await self._runner.remove(handoffs)

    def close(self) -> None:
        """Release local files: no more jobs are run."""
        if self._queries is not None:
            from penstock.runtime.prepared import close_queries

            queries, self._queries = self._queries, None
            close_queries(queries)

    # ----------------------------------------------------------------------------------- the jobs

    def _jobs(self, txn: Transaction) -> list[BindingJob]:
        from penstock.runtime.materialize.jobs import BindingJob

        return [
            BindingJob(bound=self._targets[binding], max_key=txn.before.max_keys.get(binding))
            for binding in sorted(txn.deliveries())
        ]

    async def _open(self, txn: Transaction) -> Slice:
        """Return what reads documents; Spark is started for it if it must."""
        if self._slice is not None:
            return self._slice
        from penstock.runtime.prepared import open_queries
        from penstock.shuffle.slice import Slice

        await self._runner.start(txn.read_bytes)
        spark = self._runner.spark
        if runs_here(spark):
            self._queries = open_queries(spark)
        routing = split_shards(self._shards)
        self._slice = Slice(spark, self._planner, self._task.bindings, routing)
        return self._slice

    async def _readings(self, txn: Transaction, states: States) -> Mapping[int, Reading]:
        reader = await self._open(txn)
        readings = {}
        for binding, deliveries in txn.deliveries().items():
            bound = self._targets[binding]
            placed = arranged(deliveries, delay=bound.binding.read_delay)
            foreign = refusals.are_foreign(bound.binding, deliveries)
            readings[binding] = await reader.reading(
                bound.binding,
                placed.deliveries,
                states,
                columns=None if foreign else bound.columns,
                stamps=stamps_for(bound.plan.columns, placed.order),
            )
        return readings

    async def _combined(
        self, txn: Transaction, states: States, *, small: bool = False
    ) -> Documents:
        """Return a transaction's documents, combined by key; in one task, if they are few."""
        readings, deliveries = await self._readings(txn, states), txn.deliveries()

        def combine() -> Documents:
            return {
                binding: self._combine(binding, deliveries[binding], reading.frame(), small=small)
                for binding, reading in readings.items()
            }

        return await asyncio.to_thread(combine)

    def _combine(
        self, binding: int, deliveries: Sequence[Delivery], frame: DataFrame, *, small: bool
    ) -> DataFrame:
        from penstock.runtime.materialize import jobs
        from penstock.runtime.spark_tasks import check_documents

        bound = self._targets[binding]
        foreign, order = _kind(bound.binding, deliveries)
        if foreign:
            frame = check_documents(frame, bound.plan.schema, bound.plan.columns)
        by = order_columns(bound.plan.columns, order)
        combination = jobs.combination(self._runner.spark, bound, order=by, foreign=foreign)
        return combination.apply(frame.coalesce(1) if small else frame)

    async def _gather(self, txn: Transaction, states: States, attempt: int) -> None:
        documents = await self._combined(txn, states)
        self._results.gathered = await self._hand_over(txn, documents, f"gathered-{attempt}")

    async def _load(self, txn: Transaction, workers: Workers, states: States, attempt: int) -> None:
        from penstock.runtime.materialize import jobs

        documents = jobs.reduce_into_stored(
            self._jobs(txn),
            await self._combined(txn, states),
            workers,
            self._identity(txn, attempt),
            shards=self._shards,
        )
        self._results.reduced = await self._hand_over(txn, documents, f"loaded-{attempt}")

    async def _hand_over(self, txn: Transaction, documents: Documents, name: str) -> Documents:
        """Run a job that writes documents, and return them as the next job reads them."""
        from penstock.runtime.spark_tasks import read_handoff, write_handoff

        path = self._runner.handoff_path(f"{txn.opened:x}-{name}")
        await self._runner.in_spark(lambda: write_handoff(documents, path))
        self._results.handoffs.append(path)
        return read_handoff(self._runner.spark, documents, path)

    async def _stage(
        self, txn: Transaction, workers: Workers, states: States, attempt: int
    ) -> StagedManifest:
        from penstock.runtime.materialize import jobs as spark
        from penstock.runtime.spark_tasks import union

        jobs, identity = self._jobs(txn), self._identity(txn, attempt)
        few, shards = txn.is_small, self._shards
        loads = any(job.loads for job in jobs)
        if few and not loads:
            readings = await self._readings(txn, states)

            def stage_small() -> StagedManifest:
                frame = self._small_frame(txn.deliveries(), readings)
                return spark.stage_here(jobs, frame, workers, identity)

            return await self._runner.in_spark(stage_small)
        documents = self._results.gathered or await self._combined(txn, states, small=few)

        def stage() -> StagedManifest:
            # A job that failed may have answered with too much for Spark: tasks do it then.
            if attempt == 1 and self._fits_here(txn) and not loads:
                frame = union(spark.sort_by_key(jobs, documents))
                return spark.stage_here(jobs, frame, workers, identity)
            reduced = spark.reduce_into_stored(jobs, documents, workers, identity, shards=shards)
            return spark.stage(jobs, reduced, workers, identity, shards=shards)

        return await self._runner.in_spark(stage)

    def _fits_here(self, txn: Transaction) -> bool:
        """True if the leader may take a transaction's rows itself, however few are combined.

        What a task answers with is in memory as a whole.
        """
        spark = self._runner.spark
        partitions = exchange_partitions(spark)
        return (
            runs_here(spark)
            and txn.read_docs <= HERE_DOCUMENTS * partitions
            and txn.read_bytes <= HERE_BYTES * partitions
        )

    def _small_frame(
        self, deliveries: Mapping[int, Sequence[Delivery]], readings: Mapping[int, Reading]
    ) -> DataFrame | LentFrame:
        """Return the combined rows of a small transaction, in one partition.

        Those that all came with records are read by a query that is planned already.
        """
        from penstock.runtime.spark_tasks import union

        def united(frames: Mapping[int, DataFrame]) -> DataFrame:
            documents = {
                binding: self._combine(binding, deliveries[binding], frame, small=True)
                for binding, frame in frames.items()
            }
            frame = union(documents)
            return frame if len(documents) == 1 else frame.coalesce(1)

        rows = {binding: reading.at_hand() for binding, reading in readings.items()}
        known = {binding: some for binding, some in rows.items() if some is not None}
        if self._queries is None or len(known) < len(rows):
            return united({binding: reading.frame() for binding, reading in readings.items()})
        kinds = tuple(self._query_kind(binding, some) for binding, some in deliveries.items())
        schemas = {binding: reading.schema for binding, reading in readings.items()}
        return self._queries.lend(known, schemas, united, key=("combine", *kinds))

    def _query_kind(self, binding: int, deliveries: Sequence[Delivery]) -> Hashable:
        """Return all that combining a binding's documents depends on, in whatever task."""
        from penstock.runtime.materialize import jobs

        bound = self._targets[binding]
        foreign, order = _kind(bound.binding, deliveries)
        return binding, order, jobs.combination_kind(bound, foreign=foreign)

    async def _stage_reduced(
        self, txn: Transaction, workers: Workers, attempt: int
    ) -> StagedManifest:
        from penstock.runtime.materialize import jobs as spark

        reduced, jobs = self._results.reduced, self._jobs(txn)
        if reduced is None:
            raise Bug("a transaction is stored that was not loaded")
        identity = self._identity(txn, attempt)
        return await self._runner.in_spark(
            lambda: spark.stage(jobs, reduced, workers, identity, shards=self._shards)
        )

    def _identity(self, txn: Transaction, attempt: int) -> JobIdentity:
        from penstock.runtime.spark_tasks import JobIdentity

        return JobIdentity(
            task=self._task.name, epoch=self._epoch, transaction=txn.opened, job_attempt=attempt
        )

    # ---------------------------------------------------------------------------------- the counts

    def _take(self, txn: Transaction, manifest: StagedManifest) -> Reports:
        """Keep what a job has staged, and report what each shard has stored."""
        self._results.staged = manifest.staged
        self._results.stored = sum(counts.stored_docs for counts in manifest.counted)
        return tuple(
            BindingReport(
                binding=counts.binding,
                shard=counts.shard,
                stored=Counts(docs=counts.stored_docs, bytes=counts.stored_bytes),
                max_key=self._max_key(counts, txn.before.max_keys.get(counts.binding, b"")),
            )
            for counts in manifest.counted
        )

    def _sourced(self, txn: Transaction, *, stores_later: bool) -> Reports:
        """Report what was read, from the records alone.

        If rows are stored later, keys are not known yet, and all are to be loaded from then on.
        """
        reports = []
        for binding, deliveries in txn.deliveries().items():
            runs = [rows.run for delivery in deliveries for rows in delivery.rows]
            unknown = stores_later and txn.before.max_keys.get(binding) != UNKNOWN_KEY
            sourced = Counts(
                docs=sum(run.rows for run in runs),
                bytes=sum(delivery.bytes for delivery in deliveries),
            )
            reports.append(
                BindingReport(
                    binding=binding,
                    sourced=sourced,
                    clock_min=min((run.clock_min for run in runs), default=NEVER),
                    clock_max=max((run.clock_max for run in runs), default=NEVER),
                    max_key=UNKNOWN_KEY if unknown else b"",
                )
            )
        return tuple(reports)

    def _max_key(self, counts: ShardCounts, known: bytes) -> bytes:
        """Return the greatest key of a shard, if it is greater than what is known.

        Where nothing is ever loaded keys are not looked at; should the binding load one day, it
        has to load all of them.
        """
        found = counts.max_key or b""
        if counts.stored_docs and self._targets[counts.binding].mode is not Mode.LOAD:
            found = UNKNOWN_KEY
        return found if found > known else b""


def _kind(binding: Binding, deliveries: Sequence[Delivery]) -> tuple[bool, Order]:
    """Return whether documents are foreign, and what orders them."""
    order = arranged(deliveries, delay=binding.read_delay).order
    return refusals.are_foreign(binding, deliveries), order
