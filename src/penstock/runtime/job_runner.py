"""Runs the Spark jobs of one session: starts Spark, repeats what failed, explains it, cleans up.

How many documents there are, and of what time, is known from records; so a transaction that has
none starts no job, and a task that never has any does not start Spark.

**What one job leaves to the next** lies in the blob store, under `=handoff/`, where executors of
any machine reach it; garbage collection and verification leave names that begin with `=` alone.
Where Spark cannot name the blob store, a directory of this machine serves, if tasks run on it. What
a session left is removed when the next one starts Spark.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.engine import runs_here
from penstock.errors import Bug, PenstockError, Unavailable, UserError
from penstock.journal.blobs import spark_root
from penstock.journal.committed import VisibleRows
from penstock.journal.evolve import UnreadableDocument
from penstock.journal.integrity import CorruptBlob
from penstock.journal.state import JournalState
from penstock.runtime import refusals, spark_slots
from penstock.runtime.awaited import ENDPOINT, SPARK, SPARK_STARTS, Awaited
from penstock.runtime.control import Control
from penstock.runtime.introspection import START_SPARK
from penstock.runtime.waiting import INTERRUPT_S, blocked, ignore_result, in_thread
from penstock.scope import spark_scope
from penstock.shuffle.delivery import Delivery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.journal.planning import Planner
    from penstock.shuffle.binding import Binding

_log = logging.getLogger("penstock.runtime")

JOB_ATTEMPTS: Final = 3
"""A job that fails is run again as a whole; what it staged before is garbage."""

HANDOFF: Final = "=handoff"
"""The directory of the blob store for what jobs leave to each other; no collection has its name."""

_AGAIN_S: Final = 0.2

_SHOW_S: Final = 0.5
"""Between two looks at how far a job is."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reads:
    """The input of a job, for finding out why it failed."""

    deliveries: Mapping[int, Sequence[Delivery]]
    """Deliveries by binding."""
    states: Mapping[str, JournalState]


class JobRunner:
    """The Spark jobs of one session of a task."""

    def __init__(
        self,
        task: str,
        bindings: Sequence[Binding],
        planner: Planner,
        start_spark: Callable[[int], SparkSession],
        *,
        epoch: int,
        local_dir: Path,
        control: Control,
        waits_for: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`waits_for` finds out what a Spark task waits for at the endpoint, if it waits."""
        self._task = task
        self._bindings = {binding.index: binding for binding in bindings}
        self._planner = planner
        self._start_spark = start_spark
        self._epoch = epoch
        self._local = local_dir / task.encode().hex()
        self._waits = control.waits
        self._activity = control.activity
        self._waits_for = blocked(waits_for, ENDPOINT)
        self._is_looked_at = control.until_revision is not None
        """Somebody waits for the end of it, and wants to see how far it is."""
        self._spark: SparkSession | None = None
        self.jobs_run = 0

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            raise Bug("a job is run before Spark was started")
        return self._spark

    async def start(self, waiting_bytes: int) -> None:
        """Start Spark, unless that was done, for this many stored bytes."""
        if self._spark is None:
            phase = self._activity.begins(START_SPARK)
            try:
                with self._waits.on(self._task, SPARK_STARTS):
                    spark = await asyncio.to_thread(self._start_spark, waiting_bytes)
            finally:
                self._activity.completes(phase)
            await asyncio.to_thread(self._sweep, spark)
            self._spark = spark

    @property
    def session_dir(self) -> Path | None:
        """A directory of this machine for this session's tasks, if they all run on it."""
        return self._local / str(self._epoch) if runs_here(self.spark) else None

    # ------------------------------------------------------------------------------------ running

    async def attempt(self, run: Callable[[int], Awaitable[T]], reads: Reads | None = None) -> T:
        """Run a job by its attempt's number, again if it fails as a whole: an executor was lost.

        What no other attempt would mend is raised at once: a document that is refused, an object
        that is damaged. A job says in Spark's words that it met one, if it says anything; which,
        and why, is found out here.
        """
        try:
            return await self._attempts(run, reads)
        except CorruptBlob:
            if reads is not None:
                await self._check_blobs(reads)  # which knows whose rows are lost with it
            raise
        except _refusals() as error:
            if reads is not None:
                await self._explain(reads)
            if isinstance(error, PenstockError):
                raise
            raise Bug("a job refuses a document that the validator admits") from error

    async def _attempts(self, run: Callable[[int], Awaitable[T]], reads: Reads | None) -> T:
        for attempt in range(1, JOB_ATTEMPTS):
            try:
                return await run(attempt)
            except _job_failures() as error:
                if attempt == 1 and reads is not None:
                    await self._check_blobs(reads)
                why = summarize_error(error)
                _log.warning("%s: job attempt %d failed: %s", self._task, attempt, why)
        try:
            return await run(JOB_ATTEMPTS)
        except _job_failures() as error:
            raise Unavailable(
                "a Spark job keeps failing",
                where=f"task {self._task}",
                why=summarize_error(error),
                fix="look at Spark's log; the task continues after its last transaction",
            ) from error

    async def _explain(self, reads: Reads) -> None:
        """Raise which document is refused, and why, if one is."""
        for index, deliveries in reads.deliveries.items():
            binding = self._bindings[index]
            found = await refusals.find(self._planner, binding, deliveries, reads.states)
            if found is not None:
                raise found from None

    async def _check_blobs(self, reads: Reads) -> None:
        """Raise CorruptBlob if an object that the job reads is damaged."""
        rows: dict[str, list[VisibleRows]] = {}
        for deliveries in reads.deliveries.values():
            for delivery in deliveries:
                rows.setdefault(delivery.journal, []).extend(delivery.rows)
        for journal, visible in rows.items():
            await self._planner.check(journal, visible, reads.states.get(journal))

    async def in_spark(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread, and count its jobs; if cancelled, end them before going on.

        Tasks of a job may wait for a lock of the endpoint, too.
        """
        context = self.spark.sparkContext
        group = f"{self._task}/{self._epoch}/{time.monotonic_ns()}"

        jobs = 0

        def grouped() -> T:
            nonlocal jobs
            with spark_scope(context, group=group, description=f"transaction of {self._task}"):
                try:
                    return call()
                finally:
                    jobs = len(context.statusTracker().getJobIdsForGroup(group))

        def look() -> Awaited | None:
            return self._waits_for() or spark_slots.missing(context, group)

        began, error = time.time(), None
        running = asyncio.ensure_future(asyncio.to_thread(grouped))
        looking = asyncio.ensure_future(self._show(group)) if self._is_looked_at else None
        try:
            with spark_slots.used_by(self._task, group), self._waits.on(self._task, SPARK, look):
                return await asyncio.shield(running)
        except asyncio.CancelledError:
            await _cancelled(running, functools.partial(_cancel_group, self.spark, group))
            raise
        except Exception as failed:
            error = summarize_error(failed)
            raise
        finally:
            if looking is not None:
                looking.cancel()
            self._activity.job_is_at(None)
            self.jobs_run += jobs
            self._activity.ran_job(group, began, jobs, error)

    async def _show(self, group: str) -> None:
        """Say again and again how far a job is, until cancelled."""
        tracker = self.spark.sparkContext.statusTracker()
        while True:
            await asyncio.sleep(_SHOW_S)
            with contextlib.suppress(Exception):  # the JVM may be gone: the job itself says so
                self._activity.job_is_at(await in_thread(lambda: spark_slots.tasks(tracker, group)))

    # ----------------------------------------------------------------------------- between two jobs

    @property
    def can_hand_over(self) -> bool:
        """True if one job can leave documents to the next."""
        return _handoff(self.spark, self._planner, self._local) is not None

    def handoff_path(self, name: str) -> str:
        """Return where one job leaves something to the next."""
        directory = _handoff(self.spark, self._planner, self._local)
        if directory is None:
            raise UserError(
                "a transaction takes two Spark jobs, and nothing can be left from one to the other",
                where=f"task {self._task}, {self._planner.blobs}",
                why="Spark has no file system for this blob store, and its tasks run elsewhere",
                fix="use a blob store that Spark reaches (file://, hdfs://), or --master local[*]",
            )
        return f"{directory}/{self._epoch}/{name}"

    async def remove(self, paths: Sequence[str]) -> None:
        """Remove what jobs have left to each other."""
        for path in paths:
            await asyncio.to_thread(_remove, self.spark, path)

    def _sweep(self, spark: SparkSession) -> None:
        """Remove what earlier sessions have left, and none will ask for.

        A later one may be at work already, if this one has been fenced and does not know yet.
        """
        if self._local.is_dir():
            for found in self._local.iterdir():
                if _is_before(found.name, self._epoch):
                    shutil.rmtree(found, ignore_errors=True)
        directory = _handoff(spark, self._planner, self._local)
        if directory is not None:
            files, where = _hadoop(spark, directory)
            if files.exists(where):
                for status in files.listStatus(where):
                    if _is_before(status.getPath().getName(), self._epoch):
                        files.delete(status.getPath(), True)


def _is_before(name: str, epoch: int) -> bool:
    """True if a directory is not of this session, nor of a later one."""
    return not name.isdecimal() or int(name) < epoch


def _handoff(spark: SparkSession, planner: Planner, local: Path) -> str | None:
    """Return a task's handoff directory as Spark calls it; None if its tasks reach none."""
    root = spark_root(planner.blobs)
    if root is not None:
        return f"{root.rstrip('/')}/{HANDOFF}/{local.name}"
    return f"file://{local}" if runs_here(spark) else None  # as Hadoop has it: not quoted


def _remove(spark: SparkSession, path: str) -> None:
    files, where = _hadoop(spark, path)
    files.delete(where, True)


def _hadoop(spark: SparkSession, path: str) -> tuple[Any, Any]:
    """Return the file system that a path lies in, and the path as it calls it."""
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark shows file systems nowhere else
    where = jvm.org.apache.hadoop.fs.Path(path)
    configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001
    return where.getFileSystem(configuration), where


async def _cancelled(running: asyncio.Future[T], cancel: Callable[[], None]) -> None:
    """End the jobs of a thread, until it has none; one that does not end is left behind."""
    loop = asyncio.get_running_loop()
    until = loop.time() + INTERRUPT_S
    while not running.done() and loop.time() < until:
        asked = in_thread(cancel)  # a job may be submitted after the jobs were first cancelled
        both: list[asyncio.Future[Any]] = [running, asked]
        await asyncio.wait(both, timeout=INTERRUPT_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([running], timeout=_AGAIN_S)
        asked.add_done_callback(ignore_result)
    running.add_done_callback(ignore_result)


def _cancel_group(spark: SparkSession, group: str) -> None:
    from penstock.native.direct import cancel_group

    cancel_group(spark, group)


def _refusals() -> tuple[type[Exception], ...]:
    from penstock.runtime.spark_tasks import SchemaRefusal

    return UnreadableDocument, SchemaRefusal


def _job_failures() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JJavaError


def summarize_error(error: BaseException) -> str:
    """Return what is worth reading of a Spark error: of a Python traceback, its last line."""
    text = str(error).split("JVM stacktrace", 1)[0].split("\n\tat ", 1)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in text else lines[0]
