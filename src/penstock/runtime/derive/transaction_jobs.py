"""The Spark job of a derivation's transaction: from its checkpoints to published documents.

Transforms that keep no state are one native query, or a map in Python workers, over all documents
of the transaction. What they publish is checked, combined by key, redacted, and staged as
fragments, which the leader adopts: by tasks if there is much of it. A small transaction's documents
come to the leader by a query that is planned once (`runtime/prepared.py`).

Transforms that keep state run in one task per shard, over its documents in order
(`row_jobs.sharded`).

Nothing of it is visible before the transaction's ACKs, and nothing is lost if the job is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.engine import runs_here
from penstock.errors import Bug, UserError
from penstock.journal.rows import stamp_names
from penstock.journal.staging import StagedFragments
from penstock.journal.state import JournalState
from penstock.model.clock import NEVER, Clock, DocumentId
from penstock.model.json_order import Json
from penstock.model.routing import split_shards
from penstock.model.spec import CollectionSpec
from penstock.runtime import refusals
from penstock.runtime.control import Control
from penstock.runtime.derive.engine import LambdaFailed, RowEngine
from penstock.runtime.derive.state_files import STATE, BlobStateFiles
from penstock.runtime.derive.transaction import TransformRead
from penstock.runtime.job_runner import JobRunner, Reads
from penstock.runtime.order_columns import order_columns, stamps_for
from penstock.runtime.patches import Patches
from penstock.runtime.stats import Counts
from penstock.shuffle.delivery import Delivery
from penstock.shuffle.order import arranged

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

    from penstock.journal.publisher import Publisher
    from penstock.native.collect import LentFrame
    from penstock.runtime.derive.build import DerivationTask
    from penstock.runtime.derive.publish_jobs import Publishing
    from penstock.runtime.derive.row_jobs import RowSource, RowTarget
    from penstock.runtime.derive.spark_engine import SparkTransform
    from penstock.runtime.derive.transaction import DeriveTransaction
    from penstock.runtime.prepared import Queries
    from penstock.runtime.session import TaskPublisher, World
    from penstock.runtime.spark_tasks import DocumentFailed
    from penstock.shuffle.binding import Binding
    from penstock.shuffle.slice import Reading, Slice

COMBINE_NEXT: Final = 100
"""Small transactions that are combined at once, after one that had several documents of a key."""

HERE_DOCS: Final = 4_000_000
HERE_BYTES: Final = 16 << 20
"""Documents and their stored size up to which what lambdas make of them may come to the leader: a
task has all that it answers in memory."""

APART_MAX: Final = 8_000_000
"""Documents of a transaction whose key hashes the leader compares, at eight bytes each."""

TARGET: Final = 1
"""The derived collection among the bindings of the publisher."""

States = Mapping[str, JournalState]
Deliveries = Mapping[int, Sequence[Delivery]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformOutcome:
    """What the transforms of a transaction have published; nobody sees it yet."""

    batches: Sequence[pyarrow.RecordBatch] = ()
    """Documents at the leader."""
    staged: Sequence[StagedFragments] = ()
    """Fragments that tasks have written."""
    published: int = 0
    """Documents before they were combined, where that is known."""
    patches: Patches = ()

    @property
    def written(self) -> Counts:
        fragments = [
            fragment
            for staged in self.staged
            for made in staged.fragments.values()
            for fragment in made
        ]
        return Counts(
            docs=sum(batch.num_rows for batch in self.batches)
            + sum(fragment.rows for fragment in fragments),
            bytes=sum(batch.nbytes for batch in self.batches)
            + sum(fragment.bytes for fragment in fragments),
        )


@dataclass(slots=True)
class _Opened:
    """Everything that needs Spark, once it has started."""

    slice: Slice
    publishing: Publishing
    queries: Queries | None
    """Where tasks see the files of this machine."""
    transforms: Mapping[int, SparkTransform]

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Around a job: raise `LambdaFailed` for what a lambda did."""
        with contextlib.ExitStack() as stack:
            for transform in self.transforms.values():
                stack.enter_context(transform.errors())
            yield


class DeriveJobs:
    """Runs the Spark jobs of one session's transactions, one at a time."""

    def __init__(
        self,
        task: DerivationTask,
        world: World,
        control: Control,
        publisher: TaskPublisher,
        *,
        epoch: int,
    ) -> None:
        self._task = task
        self._planner = world.planner
        self._publisher: Publisher | None = publisher.publisher
        """None in a preview."""
        self._bindings = {binding.index: binding for binding in task.bindings}
        self.files = BlobStateFiles(
            blobs=world.planner.blobs, task=task.name, epoch=epoch, beside=world.local_dir / STATE
        )
        self._runner = JobRunner(
            task.name,
            task.bindings,
            world.planner,
            world.spark,
            epoch=epoch,
            local_dir=world.local_dir,
            control=control,
        )
        self._opened: _Opened | None = None
        self._combine_next = 0
        """Small transactions that are combined without trying whether they must be."""
        self._repeats_keys = False
        """A transaction of this session published several documents of one key."""

    def finish(self) -> int:
        """Return the number of jobs of the last transaction, and count anew."""
        jobs, self._runner.jobs_run = self._runner.jobs_run, 0
        return jobs

    def close(self) -> None:
        """Release local files: no more jobs are run."""
        if self._opened is not None and self._opened.queries is not None:
            from penstock.runtime.prepared import close_queries

            queries, self._opened.queries = self._opened.queries, None
            close_queries(queries)

    async def transform(
        self, txn: DeriveTransaction, states: States, state: Json
    ) -> TransformOutcome:
        """Run the transforms over what a transaction has read."""
        from penstock.runtime.spark_tasks import DocumentFailed

        deliveries = txn.deliveries()
        if not deliveries:
            return TransformOutcome()
        engine = self._task.engine
        reads = Reads(deliveries, states)
        try:
            if engine is not None and engine.stateful:
                return await self._runner.attempt(
                    lambda _: self._sharded(txn, states, state, engine), reads
                )
            return await self._runner.attempt(lambda _: self._mapped(txn, states), reads)
        except DocumentFailed as failed:
            raise await self._explained(failed, deliveries, states) from None
        except LambdaFailed as failed:
            found = await self._blamed(failed, txn, states)
            raise await self._explained(found, deliveries, states) from None

    async def publish(self, outcome: TransformOutcome) -> None:
        """Publish an outcome as part of the publisher's transaction."""
        if self._publisher is None:
            return
        for batch in outcome.batches:
            await self._publisher.publish(TARGET, batch)
        for staged in outcome.staged:
            await self._publisher.adopt(staged)

    # ------------------------------------------------------------------------------------ reading

    async def _open(self, txn: DeriveTransaction) -> _Opened:
        """Start Spark, unless that was done."""
        if self._opened is not None:
            return self._opened
        from penstock.runtime.derive.publish_jobs import Publishing
        from penstock.runtime.derive.spark_engine import make_ready
        from penstock.runtime.prepared import open_queries
        from penstock.shuffle.slice import Slice

        await self._runner.start(txn.read_bytes)
        spark = self._runner.spark
        make_ready(spark, self._task.lambdas.values())
        if runs_here(spark):
            self.files.beside.mkdir(parents=True, exist_ok=True)
        routing = split_shards(self._task.leader_task.shards)
        self._opened = _Opened(
            slice=Slice(spark, self._planner, self._task.bindings, routing),
            publishing=Publishing(self._task.target),
            queries=open_queries(spark) if runs_here(spark) else None,
            transforms=self._transforms(),
        )
        return self._opened

    def _transforms(self) -> dict[int, SparkTransform]:
        from penstock.runtime.derive.spark_engine import SparkTransform

        task = self._task
        return {
            at: SparkTransform(
                lambda_,
                self._bindings[at].collection,
                task.target.spec,
                nulls="explicit" if task.explicit_nulls else "missing",
                name=task.leader_task.transforms[at].name,
            )
            for at, lambda_ in task.lambdas.items()
            if at in self._bindings
        }

    async def _reading(
        self,
        reader: Slice,
        binding: Binding,
        deliveries: Sequence[Delivery],
        states: States,
        *,
        among: bool,
        few: bool,
    ) -> Reading:
        """Plan to read the documents of one binding, with the stamps that order them."""
        columns = self._task.columns.get(binding.index)
        if refusals.are_foreign(binding, deliveries):
            columns = None
        if among or self._task.engine is not None:
            return await reader.reading(binding, deliveries, states, columns=columns, few_here=few)
        placed = arranged(deliveries, delay=binding.read_delay)
        return await reader.reading(
            binding,
            placed.deliveries,
            states,
            columns=columns,
            stamps=stamps_for(self._task.source_root(binding), placed.order),
            few_here=few,
        )

    def _checked(
        self, binding: Binding, deliveries: Sequence[Delivery], frame: DataFrame
    ) -> DataFrame:
        """Return the documents, checked if they were written under another schema."""
        from penstock.model.schema import compiled
        from penstock.runtime.spark_tasks import check_documents

        if not refusals.are_foreign(binding, deliveries):
            return frame
        schema = compiled(binding.collection.read_schema.text)
        return check_documents(frame, schema, self._task.source_root(binding))

    # ------------------------------------------------------------------------------ without state

    async def _mapped(self, txn: DeriveTransaction, states: States) -> TransformOutcome:
        opened = await self._open(txn)
        deliveries = txn.deliveries()
        among = len(self._task.bindings) > 1
        few = txn.is_small and runs_here(self._runner.spark)
        readings = {
            at: await self._reading(
                opened.slice, self._bindings[at], some, states, among=among, few=few
            )
            for at, some in deliveries.items()
        }
        publisher = self._publisher
        if few or publisher is None:
            batches = await self._runner.in_spark(
                lambda: self._collected(opened, deliveries, readings, few=few)
            )
            return TransformOutcome(batches=batches)
        staging = await publisher.staging(TARGET)
        here = (
            txn.read_docs <= HERE_DOCS
            and txn.read_bytes <= HERE_BYTES
            and self._task.engine is None
            and not any(self._task.lambdas[at].multiplies for at in deliveries)
            and runs_here(self._runner.spark)
        )

        def staged(*, apart: bool) -> TransformOutcome:
            from penstock.runtime.derive import publish_jobs

            published = self._published(opened, deliveries, _frames(readings))
            way = opened.publishing
            documents = way.apart(published) if apart else way.documents(published, few=False)
            stage = publish_jobs.stage_here if here else publish_jobs.stage
            with opened.errors(), way.explaining(lambda: published):
                return TransformOutcome(staged=stage(documents, staging))

        if not self._may_be_apart(txn, among=among):
            return await self._runner.in_spark(lambda: staged(apart=False))
        from penstock.runtime.derive.publish_jobs import RepeatedKeys

        try:
            return await self._runner.in_spark(lambda: staged(apart=True))
        except RepeatedKeys:
            self._repeats_keys = True  # as the next transactions will
            return await self._runner.in_spark(lambda: staged(apart=False))

    def _may_be_apart(self, txn: DeriveTransaction, *, among: bool) -> bool:
        """True if it is worth a try to publish documents in no order: see `Publishing.apart`."""
        return (
            not among
            and not self._repeats_keys
            and self._task.target.keeps_documents
            and txn.read_docs <= APART_MAX
        )

    def _collected(
        self,
        opened: _Opened,
        deliveries: Deliveries,
        readings: Mapping[int, Reading],
        *,
        few: bool,
    ) -> list[pyarrow.RecordBatch]:
        """Return the documents that transforms publish, which are few; by a job, if it takes one.

        Most small transactions publish one document for a key, and then there is nothing to
        combine. That is tried first, until it fails, and later now and then.
        """
        from penstock.runtime.derive.publish_jobs import RepeatedKeys, without_hashes

        self._combine_next = max(0, self._combine_next - 1)
        alone = self._task.engine is None and self._task.target.leaves_one_alone
        if few and alone and not self._combine_next:
            try:
                with self._collecting(opened, deliveries, readings, few=few, apart=True) as found:
                    return without_hashes(found)
            except RepeatedKeys:
                self._combine_next = COMBINE_NEXT
        with self._collecting(opened, deliveries, readings, few=few, apart=False) as found:
            return [batch for batch in found if batch.num_rows]

    @contextlib.contextmanager
    def _collecting(
        self,
        opened: _Opened,
        deliveries: Deliveries,
        readings: Mapping[int, Reading],
        *,
        few: bool,
        apart: bool,
    ) -> Iterator[Iterator[pyarrow.RecordBatch]]:
        from penstock.native.collect import collect_batches
        from penstock.runtime.spark_tasks import job_errors

        way = opened.publishing

        def placed(frames: Mapping[int, DataFrame]) -> Mapping[int, DataFrame]:
            # In one partition before the lambda, whose own aggregates then need no exchange.
            return {at: frame.coalesce(1) if few else frame for at, frame in frames.items()}

        def published() -> DataFrame:
            return self._published(opened, deliveries, placed(_frames(readings)))

        def documents(united: DataFrame) -> DataFrame:
            return way.apart(united).coalesce(1) if apart else way.documents(united, few=few)

        def prepared(frames: Mapping[int, DataFrame]) -> DataFrame:
            return documents(self._published(opened, deliveries, placed(frames)))

        rows = {at: reading.at_hand() for at, reading in readings.items()}
        known = {at: some for at, some in rows.items() if some is not None}
        frame: DataFrame | LentFrame
        if opened.queries is None or not few or len(known) < len(rows):
            frame = documents(published())
        else:
            schemas = {at: reading.schema for at, reading in readings.items()}
            kinds = (self._query_kind(at, some, readings[at]) for at, some in deliveries.items())
            key = (self._task_kind, apart, *kinds)
            frame = opened.queries.lend(known, schemas, prepared, key=key)
        with (
            opened.errors(),
            way.explaining(published),
            job_errors(),
            collect_batches(frame) as batches,
        ):
            yield batches

    def _query_kind(self, at: int, deliveries: Sequence[Delivery], reading: Reading) -> Hashable:
        """Return all that the query over a binding's documents depends on, in whatever task.

        Rows may be leveled because of other bindings, and then not be out of order by themselves.
        """
        binding = self._bindings[at]
        order = arranged(deliveries, delay=binding.read_delay).order
        foreign = refusals.are_foreign(binding, deliveries)
        placed = at, binding.priority, binding.read_delay, len(self._bindings)
        source = _without_names(binding.collection)
        return *placed, source, foreign, order, reading.columns, reading.leveled

    @functools.cached_property
    def _task_kind(self) -> Hashable:
        """What queries of tasks that are alike have in common; lambdas of Spark alone are shared.

        Other code is run by Python workers, which are given the code of this very task.
        """
        task = self._task
        if task.engine is not None:
            return object()  # alike to no other
        target = _without_names(task.target.spec)
        lambdas = tuple(sorted(task.lambdas.items()))
        return target, task.target.salt, lambdas, task.explicit_nulls, task.ordered

    def _published(
        self, opened: _Opened, deliveries: Deliveries, frames: Mapping[int, DataFrame]
    ) -> DataFrame:
        """Return what the transforms publish, of all bindings together."""
        made = [
            self._transformed(opened, self._bindings[at], deliveries[at], frame)
            for at, frame in frames.items()
        ]
        united: DataFrame = functools.reduce(lambda left, right: left.unionByName(right), made)
        return united

    def _transformed(
        self, opened: _Opened, binding: Binding, deliveries: Sequence[Delivery], frame: DataFrame
    ) -> DataFrame:
        from penstock.runtime.derive import row_jobs
        from penstock.runtime.derive.publish_jobs import ORDER

        task, at = self._task, binding.index
        frame = self._checked(binding, deliveries, frame)
        if task.ordered:
            frame = frame.withColumn(ORDER, self._order(binding, deliveries, frame))
        if task.engine is not None:
            source = self._row_source(binding)
            return row_jobs.mapped(
                frame, task.engine, source, self._row_target(), self.files, ordered=task.ordered
            )
        return opened.transforms[at].apply(
            frame, order=ORDER if task.ordered else None, uniform=len(task.bindings) > 1
        )

    def _order(
        self, binding: Binding, deliveries: Sequence[Delivery], frame: DataFrame
    ) -> SparkColumn:
        """Return what orders a document among all that the transaction reads.

        A single column of fixed width, if that is enough: it lets Spark hash.
        """
        from pyspark.sql import functions as f

        from penstock.runtime.spark_tasks import quoted

        root = self._task.source_root(binding)
        names = stamp_names(root)

        def column(name: str) -> SparkColumn:
            return f.col(quoted(name))

        if len(self._task.bindings) == 1:
            order = arranged(deliveries, delay=binding.read_delay).order
            by = order_columns(root, order)
            return column(by[0]) if len(by) == 1 else f.struct(*map(column, by))
        placed = names.level if names.level in frame.columns else names.clock
        return f.struct(
            f.lit(-binding.priority).alias("priority"),
            (column(placed) + f.lit(binding.read_delay).cast("long")).alias("adjusted"),
            column(names.clock).alias("clock"),
            column(names.producer).alias("producer"),
            f.lit(binding.index).alias("binding"),
        )

    # --------------------------------------------------------------------------------- with state

    async def _sharded(
        self, txn: DeriveTransaction, states: States, state: Json, engine: RowEngine
    ) -> TransformOutcome:
        from penstock.runtime.derive import row_jobs

        opened = await self._open(txn)
        deliveries = txn.deliveries()
        reader, shards = opened.slice, self._task.leader_task.shards
        frames = []
        for at, some in deliveries.items():
            binding = self._bindings[at]
            frame = await reader.frame(binding, some, states)
            frames.append(reader.routed(self._checked(binding, some, frame), binding))
        staging = None if self._publisher is None else await self._publisher.staging(TARGET)
        sources = {at: self._row_source(self._bindings[at]) for at in deliveries}

        def run() -> list[row_jobs.ShardResult]:
            return row_jobs.sharded(
                reader.exchange(frames, few=txn.is_small),
                engine,
                sources,
                self._row_target(),
                staging,
                state=state,
                files=self.files,
                shards=shards,
            )

        results = await self._runner.in_spark(run)
        found = [result.shard for result in results]
        if found != list(range(shards)):
            raise Bug(f"a job returned results of shards {found}, and not of {shards}")
        return TransformOutcome(
            batches=[
                batch
                for result in results
                if result.documents is not None
                for batch in result.documents.to_batches()
            ],
            staged=[result.staged for result in results if result.staged is not None],
            published=sum(result.docs for result in results),
            patches=tuple(patch for result in results for patch in result.patches),
        )

    def _row_source(self, binding: Binding) -> RowSource:
        from penstock.runtime.derive.row_jobs import RowSource

        return RowSource(transform=binding.index, root=self._task.source_root(binding))

    def _row_target(self) -> RowTarget:
        from penstock.runtime.derive.row_jobs import RowTarget

        return RowTarget.of(self._task.target.spec, self._task.target.salt)

    # ------------------------------------------------------------------------------------- errors

    async def _blamed(
        self, failed: LambdaFailed, txn: DeriveTransaction, states: States
    ) -> DocumentFailed:
        """Find the first document at which a query fails, by running it on fewer and fewer."""
        from penstock.runtime.derive.blame import first_failing
        from penstock.runtime.spark_tasks import DocumentFailed

        blamed = DocumentFailed(failed.what, where=failed.where, why=failed.why, fix=failed.fix)
        opened = await self._open(txn)
        for at, some in txn.deliveries().items():
            binding = self._bindings[at]
            if at not in opened.transforms or not self._task.lambdas[at].linear:
                continue
            reading = await opened.slice.reading(binding, some, states)
            stamps = stamp_names(self._task.source_root(binding))
            frame = await asyncio.to_thread(reading.frame)
            found = await self._runner.in_spark(
                functools.partial(first_failing, opened.transforms[at], frame, stamps)
            )
            if found is not None:
                blamed.binding, (blamed.clock, blamed.producer) = at, found
                break
        return blamed

    async def _explained(
        self, failed: DocumentFailed, deliveries: Deliveries, states: States
    ) -> UserError:
        """Return the error of a transform, with the place of the document it failed at."""
        task = self._task
        where = [f"derivation {task.name}"]
        if failed.where:
            where.append(failed.where)
        some = deliveries.get(failed.binding)
        if some is not None and failed.producer is not None:
            clock = Clock(failed.clock)
            binding = self._bindings[failed.binding]
            place = await refusals.locate(
                self._planner, some, states, producer=failed.producer, clock=clock
            )
            document = f"a document of {binding.collection.name}"
            if place is not None:
                document += f", journal {place[0]} at offset {place[1]}"
            where += [
                f"transform {task.leader_task.transforms[failed.binding].name}",
                f"{document} ({DocumentId(producer=failed.producer, clock=clock, flags=0).uuid})",
            ]
        return TransformFailed(
            failed.what,
            where="; ".join(dict.fromkeys(where)),
            why=failed.why,
            fix=failed.fix
            or "correct the code, and run again: the task continues after its last transaction",
        )


class TransformFailed(UserError):
    """The code of a transform failed, or published something that its collection refuses."""


def transform_reads(deliveries: Deliveries) -> dict[int, TransformRead]:
    """Return what each transform reads, from the records alone."""
    found = {}
    for at, some in deliveries.items():
        runs = [rows.run for delivery in some for rows in delivery.rows]
        found[at] = TransformRead(
            counts=Counts(
                docs=sum(run.rows for run in runs), bytes=sum(delivery.bytes for delivery in some)
            ),
            newest=max((run.clock_max for run in runs), default=NEVER),
        )
    return found


def _frames(readings: Mapping[int, Reading]) -> dict[int, DataFrame]:
    return {at: reading.frame() for at, reading in readings.items()}


def _without_names(spec: CollectionSpec) -> CollectionSpec:
    """Return what a query can depend on of a collection."""
    return CollectionSpec(
        name="",
        key=spec.key,
        write_schema=spec.write_schema,
        read_schema=spec.read_schema,
        fields=spec.fields,
    )
