"""SPARK: rounds staged on disk ahead of transactions, and scanned by them later.

A session that reads ahead keeps what it has read here until a checkpoint hands it out:

    <directory>/epoch-00000000000000000007/        one session; made by it, deleted with it
        round-00000001/                            made before the job that fills it
            0-9f0c….arrow  1-77ab….arrow           a segment per shard, its name used only once

**Staging** is one job. Each of its tasks is a shard, writes one file, and reports it once its bytes
are on disk; what the finished job returns is the manifest, and nothing else counts. Attempts that
failed, ran twice or finish late have written files that no manifest names, into a directory that
they cannot make again. **Scanning** is one task for each shard, which reads its segments as they
are: no exchange, and a sort only where a transaction takes rows of several rounds.

Nothing here survives a session, on purpose: the next one starts from the task's frontier. A session
is known by its epoch. Opening deletes what older ones have left, however they ended, and a session
that finds itself replaced stops. Tasks must see the directory: a disk of this machine with a local
master, a shared file system with any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock import failpoints
from penstock.errors import Bug, PenstockError, Unavailable
from penstock.shuffle.delivery import Checkpoint, Delivery
from penstock.shuffle.segment_files import (
    ORDER,
    REPORT,
    Read,
    Wanted,
    reported,
    segment_reader,
    segment_writer,
)
from penstock.shuffle.segments import (
    Manifest,
    Segment,
    SegmentRead,
    Segments,
    discarded_name,
    fenced,
    is_discarded,
    outdated,
    session_name,
)
from penstock.shuffle.slice import (
    ADJUSTED_CLOCK,
    BINDING,
    CLOCK,
    FLAGS,
    KEY,
    KEY_HASH,
    PRIORITY,
    PRODUCER,
    SHARD,
    Slice,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.journal.state import JournalState
    from penstock.shuffle.rounds import Round

POOL: Final = "penstock-shuffle"
"""Of Spark's fair scheduler: reading ahead has its share while a transaction runs."""

ATTEMPTS_MAX: Final = 3
"""How often a round is tried before the session fails; each runs the same plan."""

_CLAIMED = failpoints.declare("log.claimed", "a log's directory is made, older ones are there yet")
_OPENED = failpoints.declare("log.opened", "a log is open, older ones are deleted")
_WRITTEN = failpoints.declare("log.written", "a round's segments are written, no manifest has them")
_STAGED = failpoints.declare("log.staged", "a round is staged, its session was not told")
_TAKEN = failpoints.declare("log.taken", "a scan has taken its rows, and not read them")
_CONSUMED = failpoints.declare("log.consumed", "rows are consumed, their segments are there yet")
_DELETED = failpoints.declare("log.deleted", "consumed segments are deleted")
_CLOSED = failpoints.declare("log.closed", "a log is closed, its directory is there yet")

T = TypeVar("T")


class LogClosed(PenstockError):
    """The log was closed, and stages and scans no more."""


class Log:
    """The staged rows of one session, made by `open`; lives on one event loop."""

    def __init__(
        self, spark: SparkSession, directory: Path, segments: Segments, *, epoch: int
    ) -> None:
        self.directory = directory
        self._spark = spark
        self._segments = segments
        self._epoch = epoch
        self._schema = t.StructType(_STAMP.fields)
        self._staging: asyncio.Task[Manifest] | None = None
        self._scans = 0
        self._scanned = asyncio.Event()
        self._scanned.set()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, spark: SparkSession, directory: Path, *, epoch: int, shards: int) -> Self:
        """An empty log of a new session, in a directory that belongs to its task.

        What sessions of older epochs have left there is deleted. Raises `Fenced` if there is one of
        this epoch or of a newer one. If opening fails or is cancelled, nothing of it is left.
        """
        segments = Segments(shards)
        opening = asyncio.ensure_future(asyncio.to_thread(_claim, directory, epoch))
        try:
            own = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await _ended(opening)
            if opening.exception() is None:
                await asyncio.to_thread(_discard, opening.result())
            raise
        return cls(spark, own, segments, epoch=epoch)

    @property
    def bytes(self) -> tuple[int, ...]:
        """By shard, what is staged and not yet consumed, as it is on disk."""
        return self._segments.bytes

    @property
    def flushed_lsn(self) -> tuple[int, ...]:
        """By shard, the last round that is staged."""
        return self._segments.flushed_lsn

    # ------------------------------------------------------------------------------------- staging

    async def stage(self, lsn: int, frame: DataFrame, deliveries: Iterable[Delivery]) -> Manifest:
        """Stage a round: the rows of these deliveries, as `Slice.exchange` gives them.

        They are on disk when it returns. One round at a time. If it is cancelled, the job has ended
        before it returns; if it fails, the round was not staged.
        """
        self._check_open()
        self._segments.begin(lsn, deliveries)
        self._staging = asyncio.ensure_future(self._stage(lsn, frame))
        try:
            return await self._staging
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closing is not None and task is not None and not task.cancelling():
                raise _closed() from None
            raise
        finally:
            self._staging = None

    async def _stage(self, lsn: int, frame: DataFrame) -> Manifest:
        directory = self.directory / _round_name(lsn)
        try:
            schema = _united(self._schema, frame.schema)
            await self._on_disk(functools.partial(directory.mkdir, exist_ok=True))
            written = await self._write(lsn, frame, directory)
            failpoints.hit(_WRITTEN)
            manifest = Manifest.of(lsn, written, shards=self._segments.shards)
            used = {Path(each.path).name for each in manifest.segments if each.path is not None}
            await self._on_disk(_sweep, directory, used)
            self._segments.commit(manifest)
        except BaseException:
            self._segments.abandon(lsn)
            await _ended(asyncio.ensure_future(asyncio.to_thread(_discard, directory)))
            raise
        self._schema = schema
        failpoints.hit(_STAGED)
        return manifest

    async def _write(self, lsn: int, frame: DataFrame, directory: Path) -> list[Segment]:
        """Run the job of a round, again if it fails; what its tasks report."""

        def job() -> list[t.Row]:
            # A new frame each time: adaptive execution would answer with the error it remembers.
            return frame.mapInArrow(segment_writer(str(directory)), REPORT).collect()

        attempt = 1
        while True:
            try:
                rows = await _run_job(self._spark, f"{self.directory.name}/{lsn}", job)
            except (PySparkException, Py4JError) as error:
                if not await asyncio.to_thread(self.directory.is_dir):
                    raise self._replaced() from None
                if attempt == ATTEMPTS_MAX:
                    raise Unavailable(
                        f"round {lsn} could not be staged",
                        where=str(self.directory),
                        why=_reason(error),
                        fix="see what Spark logged; the task resumes from what it committed",
                    ) from error
                attempt += 1
            else:
                # Spark runs no task over what turned out to be empty. Every row goes through a
                # task, and every task reports: no report, no row.
                return [reported(row, lsn) for row in rows] or [
                    Segment(shard=shard, path=None) for shard in range(self._segments.shards)
                ]

    # ------------------------------------------------------------------------------------ scanning

    @contextlib.asynccontextmanager
    async def scan(self, deliveries: Iterable[Delivery]) -> AsyncIterator[DataFrame]:
        """The rows of deliveries, for the length of the block; partition and shard are the same.

        Each shard has its rows in processing order: by priority, highest first, then by adjusted
        clock, clock, producer and binding; the columns are those of `Slice.shuffled`. What another
        scan has taken before is not among them. Jobs over them end before the block does: closing
        waits for it.
        """
        self._check_open()
        deliveries = tuple(deliveries)
        reads = self._segments.take(deliveries)
        schema = _of_bindings(self._schema, {delivery.binding for delivery in deliveries})
        failpoints.hit(_TAKEN)
        self._scans += 1
        self._scanned.clear()
        try:
            yield await asyncio.to_thread(self._frame, reads, schema)
        finally:
            self._scans -= 1
            if not self._scans:
                self._scanned.set()

    def _frame(self, reads: Sequence[SegmentRead], schema: t.StructType) -> DataFrame:
        by_shard: dict[int, list[Read]] = {}
        for each in reads:
            wanted = None if each.wanted is None else Wanted.of(each.wanted)
            read = Read(path=str(self.directory / each.path), sum=each.sum, wanted=wanted)
            by_shard.setdefault(each.shard, []).append(read)
        count = self._segments.shards
        shards = self._spark.range(0, count, 1, numPartitions=count)
        frame = shards.mapInArrow(segment_reader(by_shard, schema), schema)
        if any(len(some) > 1 for some in by_shard.values()):
            return frame.sortWithinPartitions(f.desc(PRIORITY), *ORDER[1:])
        return frame

    async def reclaim(self, checkpoint: Checkpoint) -> None:
        """The rows of a checkpoint are processed: segments that only they needed are deleted."""
        self._check_open()
        reclaimed = self._segments.reclaim(checkpoint.deliveries)
        failpoints.hit(_CONSUMED)
        await self._on_disk(
            _delete,
            [self.directory / path for path in reclaimed.paths],
            [self.directory / _round_name(lsn) for lsn in reclaimed.rounds],
        )
        failpoints.hit(_DELETED)

    # ------------------------------------------------------------------------------------- the end

    async def close(self) -> None:
        """End the job under way, wait for running scans, delete everything; twice is harmless."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._tear_down(), name="log teardown")
        await asyncio.shield(self._closing)

    async def _tear_down(self) -> None:
        if self._staging is not None:
            self._staging.cancel()
            await asyncio.wait([self._staging])
        await self._scanned.wait()
        failpoints.hit(_CLOSED)
        await self._on_disk(_discard, self.directory)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise _closed()

    async def _on_disk(self, act: Callable[..., T], *arguments: object) -> T:
        """Do something in a thread to files of this session; without its directory it is over."""
        try:
            return await asyncio.to_thread(act, *arguments)
        except OSError as error:
            if not await asyncio.to_thread(self.directory.is_dir):
                raise self._replaced() from None
            raise Unavailable(
                "the shuffle's disk does not work", where=str(self.directory), why=str(error)
            ) from error

    def _replaced(self) -> PenstockError:
        return fenced(self._epoch, why="its directory is gone")


class SliceLog:
    """A log as a session fills it: with what a slice reads of the rounds that it plans."""

    def __init__(self, log: Log, slice_: Slice) -> None:
        self.log = log
        self._slice = slice_

    async def stage(self, round_: Round, states: Mapping[str, JournalState]) -> None:
        """Read the rows of a round and stage them; there may be none."""
        if round_.deliveries:
            frame = await self._slice.shuffled(round_.deliveries, states)
            await self.log.stage(round_.lsn, frame, round_.deliveries)

    async def reclaim(self, checkpoint: Checkpoint) -> None:
        """The rows of a checkpoint are processed."""
        await self.log.reclaim(checkpoint)

    async def close(self) -> None:
        """Remove everything that was staged."""
        await self.log.close()


def _closed() -> LogClosed:
    return LogClosed("the log of this session is closed")


# -------------------------------------------------------------------------------------------- jobs


async def _run_job(spark: SparkSession, name: str, job: Callable[[], T]) -> T:
    """Run a blocking job; cancelling the caller cancels it, and waits until it has ended."""
    context = spark.sparkContext
    tag = f"penstock-{uuid.uuid4().hex}"

    def tagged() -> T:
        # These belong to the thread, which others use afterwards.
        context.addJobTag(tag)
        context.setInterruptOnCancel(True)
        context.setLocalProperty("spark.scheduler.pool", POOL)
        context.setJobDescription(f"stage {name}")
        try:
            return job()
        finally:
            context.removeJobTag(tag)
            context.setInterruptOnCancel(False)
            for name_ in ("spark.scheduler.pool", "spark.job.description"):
                context.setLocalProperty(name_, None)  # type: ignore[arg-type]

    running = asyncio.ensure_future(asyncio.to_thread(tagged))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await _ended(running, again=lambda: context.cancelJobsWithTag(tag))
        raise


async def _ended(
    running: asyncio.Future[Any], *, again: Callable[[], object] = lambda: None
) -> None:
    """Wait for something in a thread, which cannot be left alone, and however often cancelled.

    `again` asks it to stop, over and over: a job may be submitted after the first time.
    """
    while not running.done():
        again()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running], timeout=0.2)
    running.exception()  # it is known to have failed, or does not matter


_ERROR_LINE: Final = re.compile(r"^\w[\w.]*(?:Error|Exception|Exit)\b.*", re.MULTILINE)


def _reason(error: BaseException) -> str:
    """The last error in the text of one of Spark's, which is that of the task."""
    found = _ERROR_LINE.findall(str(error))
    return str(found[-1] if found else str(error).strip().splitlines()[0])


# ----------------------------------------------------------------------------------------- columns

_STAMP: Final = t.StructType(
    [
        t.StructField(SHARD, t.IntegerType()),
        t.StructField(PRIORITY, t.IntegerType()),
        t.StructField(ADJUSTED_CLOCK, t.LongType()),
        t.StructField(PRODUCER, t.LongType()),
        t.StructField(BINDING, t.IntegerType()),
        t.StructField(CLOCK, t.LongType()),
        t.StructField(FLAGS, t.ShortType()),
        t.StructField(KEY_HASH, t.LongType()),
        t.StructField(KEY, t.BinaryType()),
    ]
)
"""`ROUTED`, the columns before those of documents."""


def _united(known: t.StructType, staged: t.StructType) -> t.StructType:
    """The columns of all rounds: a round may lack those of bindings that it has no rows of."""
    fields = {field.name: field for field in known}
    for field in staged:
        before = fields.setdefault(field.name, field)
        if before.dataType != field.dataType:
            raise Bug(
                f"column {field.name} is staged with another type than before",
                why=f"{before.dataType.simpleString()}, now {field.dataType.simpleString()}",
            )
    if missing := [name for name in _STAMP.names if name not in staged.names]:
        raise Bug(f"a round lacks the column {missing[0]}")
    documents = sorted(fields.keys() - set(_STAMP.names), key=lambda name: int(name[1:]))
    return t.StructType([*_STAMP.fields, *(_nullable(fields[name]) for name in documents)])


def _of_bindings(schema: t.StructType, bindings: set[int]) -> t.StructType:
    """The columns of rows of these bindings."""
    documents = {f"d{binding}" for binding in bindings}
    return t.StructType(
        [each for each in schema if each.name in _STAMP.names or each.name in documents]
    )


def _nullable(field: t.StructField) -> t.StructField:
    return t.StructField(field.name, field.dataType, True, field.metadata)


# ------------------------------------------------------------------------------------- directories


def _round_name(lsn: int) -> str:
    return f"round-{lsn:08}"


def _claim(directory: Path, epoch: int) -> Path:
    """Make the directory of an epoch, then delete those of older ones.

    In this order: of two that begin at once, at least one sees the other.
    """
    own = directory.absolute() / session_name(epoch)
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        try:
            own.mkdir()
        except FileExistsError:
            raise fenced(epoch, why="a session of the same epoch has begun") from None
        failpoints.hit(_CLAIMED)
        try:
            for name in outdated((each.name for each in own.parent.iterdir()), epoch):
                _discard(own.parent / name)
        except BaseException:
            _discard(own)
            raise
    except OSError as error:
        raise Unavailable(
            "cannot make a directory for the shuffle", where=str(own.parent), why=str(error)
        ) from error
    failpoints.hit(_OPENED)
    return own


def _discard(directory: Path) -> None:
    """Delete a directory, if it is there. Who still writes there fails: it loses its name first."""
    if not is_discarded(directory.name):
        doomed = directory.with_name(discarded_name(directory.name, uuid.uuid4().hex))
        try:
            directory = directory.rename(doomed)
        except FileNotFoundError:
            return
    with contextlib.suppress(OSError):  # a file that was made in it meanwhile
        shutil.rmtree(directory)
    shutil.rmtree(directory, ignore_errors=True)  # what is left, the next session deletes


def _sweep(directory: Path, used: set[str]) -> None:
    """Delete what failed attempts have written for a round."""
    for file in directory.iterdir():
        if file.name not in used:
            file.unlink(missing_ok=True)


def _delete(files: Sequence[Path], directories: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    for directory in directories:
        _discard(directory)
