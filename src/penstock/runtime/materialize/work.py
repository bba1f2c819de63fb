"""The work of transactions: from the checkpoints that they took to rows that are staged.

How many documents there are, and of what time, is known from records; so a transaction that has
none starts no job, and a task that never has any does not start Spark.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.errors import Unavailable
from penstock.journal.rows import stamp_names
from penstock.journal.state import JournalState
from penstock.model.clock import NEVER, Clock, Producer
from penstock.model.routing import split_shards
from penstock.runtime.connector import Staged, Workers
from penstock.runtime.materialize.build import Built
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.materialize.messages import BindingReport
from penstock.runtime.patches import Patches
from penstock.runtime.stats import Counts
from penstock.shuffle.delivery import Checkpoint, Delivery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.journal.planning import Planner
    from penstock.runtime.jobs import Counted, Manifest
    from penstock.shuffle.slice import Slice

_log = logging.getLogger("penstock.runtime")

JOB_ATTEMPTS: Final = 3
"""A job that fails is run again as a whole; what it staged before is garbage."""

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
    staged: tuple[Staged, ...] = ()
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
        self, built: Built, planner: Planner, spark: Callable[[], SparkSession], *, epoch: int
    ) -> None:
        self._built = built
        self._planner = planner
        self._start_spark = spark
        self._epoch = epoch
        self._shards = built.runtime.shards
        self._slice: Slice | None = None
        self._targets = {each.binding.index: each for each in built.targets}

    async def stage(
        self,
        transaction: Transaction,
        workers: Workers,
        *,
        states: Mapping[str, JournalState],
        max_keys: Mapping[int, bytes],
    ) -> Mapping[int, Sequence[BindingReport]]:
        """Put everything aside that a transaction has; what each shard did, by shard."""
        deliveries = transaction.deliveries()
        if not deliveries:
            return {}
        manifest = await self._attempted(
            lambda attempt: self._run(transaction, deliveries, workers, states, max_keys, attempt)
        )
        transaction.staged = manifest.staged
        transaction.stored = sum(counted.stored_docs for counted in manifest.counted)
        return self._reports(deliveries, manifest.counted, max_keys)

    async def _attempted(self, run: Callable[[int], Awaitable[T]]) -> T:
        """Run a job, again if it fails as a whole: an executor was lost, say."""
        for attempt in range(1, JOB_ATTEMPTS):
            try:
                return await run(attempt)
            except _job_failures() as error:
                _log.warning(
                    "%s: job attempt %d failed: %s", self._built.name, attempt, _first_line(error)
                )
        try:
            return await run(JOB_ATTEMPTS)
        except _job_failures() as error:
            raise Unavailable(
                "a Spark job keeps failing",
                where=f"task {self._built.name}",
                why=_first_line(error),
                fix="look at Spark's log; the task goes on from its last transaction",
            ) from error

    async def _run(
        self,
        transaction: Transaction,
        deliveries: Mapping[int, Sequence[Delivery]],
        workers: Workers,
        states: Mapping[str, JournalState],
        max_keys: Mapping[int, bytes],
        attempt: int,
    ) -> Manifest:
        from pyspark.sql import functions as f

        from penstock.runtime import jobs

        if self._slice is None:
            self._spark, self._slice = await self._open()
        slice_ = self._slice
        frames, orders, works = {}, {}, []
        for binding, some in sorted(deliveries.items()):
            bound = self._targets[binding]
            frames[binding] = await slice_.frame(bound.binding, some, states, columns=bound.columns)
            names = stamp_names(bound.plan.columns)
            stamps = (names.clock, names.producer)[: 1 if _has_one_producer(some) else 2]
            orders[binding] = [f.col(name) for name in stamps]
            works.append(
                jobs.Work(
                    target=bound.target,
                    plan=bound.plan,
                    mode=bound.mode,
                    max_key=max_keys.get(binding),
                )
            )
        identity = jobs.Identity(
            task=self._built.name,
            epoch=self._epoch,
            transaction=transaction.opened,
            job_attempt=attempt,
        )
        small = transaction.bytes <= jobs.SMALL_BYTES and not any(
            work.mode is Mode.LOAD for work in works
        )
        run = jobs.stage_small if small else jobs.stage

        def staged() -> Manifest:
            return run(works, frames, orders, workers, identity, shards=self._shards)

        manifest, count = await self._in_spark(staged)
        transaction.jobs += count
        return manifest

    async def _open(self) -> tuple[SparkSession, Slice]:
        from penstock.shuffle.slice import Slice

        spark = await asyncio.to_thread(self._start_spark)
        return spark, Slice(spark, self._planner, self._built.bindings, split_shards(self._shards))

    async def _in_spark(self, work: Callable[[], T]) -> tuple[T, int]:
        """Run `work` in a thread, and count its jobs; if cancelled, end them before going on."""
        context = self._spark.sparkContext
        group = f"{self._built.name}/{self._epoch}/{time.monotonic_ns()}"

        def grouped() -> tuple[T, int]:
            context.setJobGroup(group, f"transaction of {self._built.name}", interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", self._built.name)
            made = work()
            return made, len(context.statusTracker().getJobIdsForGroup(group))

        running = asyncio.ensure_future(asyncio.to_thread(grouped))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            context.cancelJobGroup(group)
            with contextlib.suppress(Exception):
                await running
            raise

    def _reports(
        self,
        deliveries: Mapping[int, Sequence[Delivery]],
        counted: Sequence[Counted],
        max_keys: Mapping[int, bytes],
    ) -> Mapping[int, Sequence[BindingReport]]:
        reports: dict[int, list[BindingReport]] = {}
        for each in counted:
            report = BindingReport(
                binding=each.binding,
                stored=Counts(docs=each.stored_docs, bytes=each.stored_bytes),
                max_key=self._max_key(each, max_keys.get(each.binding, b"")),
            )
            if each.shard == 0:
                report = report.reduce(_sourced(each.binding, deliveries[each.binding]))
            reports.setdefault(each.shard, []).append(report)
        return reports

    def _max_key(self, counted: Counted, known: bytes) -> bytes:
        """The greatest key of a shard, if it is greater than what is known.

        Where nothing is ever loaded keys are not looked at; should the binding load one day, it
        has to load all of them.
        """
        from penstock.runtime.jobs import UNKNOWN_KEY

        found = counted.max_key or b""
        if counted.stored_docs and self._targets[counted.binding].mode is not Mode.LOAD:
            found = UNKNOWN_KEY
        return found if found > known else b""


def _sourced(binding: int, deliveries: Sequence[Delivery]) -> BindingReport:
    """What was read for a binding, from the records alone."""
    runs = [rows.run for delivery in deliveries for rows in delivery.rows]
    return BindingReport(
        binding=binding,
        sourced=Counts(
            docs=sum(run.rows for run in runs), bytes=sum(each.bytes for each in deliveries)
        ),
        clock_min=min((run.clock_min for run in runs), default=NEVER),
        clock_max=max((run.clock_max for run in runs), default=NEVER),
    )


def _has_one_producer(deliveries: Sequence[Delivery]) -> bool:
    """Whether clocks alone order the documents: two producers may have stamped the same one."""
    producers: set[Producer] = {delivery.producer for delivery in deliveries}
    return len(producers) == 1


def _job_failures() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JJavaError


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
