"""SPARK: the rows of a DataFrame appended to a collection as one transaction.

    plan_frame    in the driver: what tasks need (`FrameWrite`); nothing is written yet
    stage_rows    in each task: rows are taken in (validated, redacted, laid out) and become
                  fragments that no journal names; its report is a `FramePart`
    commit_frame  in the driver, in this process or another: the parts are adopted, and committed in
                  all their journals at once

Rows never pass through the driver. A task that dies, or runs twice, leaves garbage: only parts that
Spark hands to the commit count, and a failed write has none. If a document does not fit the schema,
the task says so in its part, and nothing is appended.

**Batches of a stream** are committed once, however often Spark sends them (`StreamBatch`). The log
of a query has the number of its last batch, and it is written in the store transaction of the ACKs:
both happen or neither. Spark sends a batch again, after a crash, until it has noted its end in the
checkpoint, and only the last one: the same number is then done already. A number below that comes
from a checkpoint that was turned back, or from a driver that lives on after its successor has
started. What such a batch holds is not known to be committed, nor to be not: it is refused.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow

from penstock import wall_clock
from penstock.consensus.statelog import Command, StateLog
from penstock.errors import PenstockError, UserError
from penstock.journal.blobs import BlobStore
from penstock.journal.inferred import learn
from penstock.journal.journals import Journals
from penstock.journal.ownership import Ownership
from penstock.journal.publisher import Mapped, Publisher, PublisherOptions
from penstock.journal.schemas import Schemas
from penstock.journal.staging import FragmentStaging, StagedFragments, Stager
from penstock.journal.transaction import ENTRY_BYTES, LIMITS
from penstock.model.clock import Producer
from penstock.model.observed import Observed, observe, widen
from penstock.model.schema import compiled
from penstock.model.spec import CollectionSpec
from penstock.native.arrow import to_json
from penstock.native.arrow_frames import check_names
from penstock.native.take import Taker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pa: Any = pyarrow

REFUSALS_SHOWN: Final = 20
"""Refused rows that are reported; a task that has met as many does not look for more."""

STREAM_PREFIX: Final = "stream/"
"""Where the logs of queries are."""


class DocumentsRefused(UserError):
    """Some documents do not fit the schema, and nothing was appended."""


def documents_refused(collection: str, count: int, lines: Sequence[str]) -> DocumentsRefused:
    """Return the error for documents that keep all of them out; `lines` are about the first."""
    many = "1 document does" if count == 1 else f"{count} documents do"
    more = ", and perhaps others" if count >= REFUSALS_SHOWN else ""
    return DocumentsRefused(
        f"nothing was appended: {many} not fit the schema of {collection}{more}",
        why="\n        ".join("\n".join(lines[:REFUSALS_SHOWN]).splitlines()),
    )


# ------------------------------------------------------------------------------------- in tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameWrite:
    """Everything that the tasks of a write need; picklable."""

    staging: FragmentStaging
    salt: bytes = dataclasses.field(repr=False)
    infers: bool
    """Whether the collection's schema is learnt from its documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePart:
    """The report of one task."""

    staged: bytes
    refused: int = 0
    lines: tuple[str, ...] = ()
    """About the first rows that were refused."""
    seen: Observed | None = None
    """The schema of the documents, if it is to be learnt."""
    error: tuple[str, str | None, str | None, str | None] | None = None
    """What kept the task from its work, as data: Spark would try it again in vain."""
    query: str | None = None
    """The query that the task works for, if it is one of a stream."""

    def encode(self) -> bytes:
        """Encode it for the way from a task to its driver."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> FramePart:
        """The part that `encode` wrote, by this release: none outlives its job."""
        return msgspec.msgpack.decode(data, type=cls)


def stage_rows(
    write: FrameWrite, batches: Iterable[pyarrow.RecordBatch], *, task: int, query: str | None
) -> FramePart:
    """Take rows in and write them as fragments. Runs in a Spark task."""
    spec = write.staging.spec
    taker = Taker(compiled(spec.write_schema.text), salt=write.salt)
    refused, lines, rows, seen = 0, list[str](), 0, None
    try:
        with Stager(write.staging) as stager:
            for batch in batches:
                check_names(batch.schema.names)
                taken = taker.take_columns(batch)
                for each in taken.refused[: REFUSALS_SHOWN - len(lines)]:
                    at = f"partition {task}, row {rows + each.at + 1}"
                    lines += [f"{at}: {violation}" for violation in each.violations]
                refused += len(taken.refused)
                rows += batch.num_rows
                if refused >= REFUSALS_SHOWN:
                    break
                if not refused:
                    stager.write(taken.rows)
                if write.infers and taken.rows.num_rows:
                    texts = to_json(taken.rows, taker.root)
                    some = observe([msgspec.json.decode(text) for text in texts])
                    seen = some if seen is None else widen(seen, some)
            staged = b"" if refused else stager.finish().encode()
    except PenstockError as error:
        told = (error.what, error.where, error.why, error.fix)
        return FramePart(staged=b"", error=told, query=query)
    return FramePart(staged=staged, refused=refused, lines=tuple(lines), seen=seen, query=query)


def stage_frame(frame: DataFrame, write: FrameWrite) -> list[FramePart]:
    """Run the Spark job that stages a frame, and return the report of each task. Blocks."""
    from pyspark import TaskContext
    from pyspark.sql.types import BinaryType, StructField, StructType

    from penstock.journal.frames import map_rows

    def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        part = stage_rows(write, batches, task=task, query=None)
        yield pa.RecordBatch.from_arrays([pa.array([part.encode()], pa.binary())], ["part"])

    reports = map_rows(frame, run, StructType([StructField("part", BinaryType())]))
    rows: list[Any] = reports.toArrow().column("part").to_pylist()
    return [FramePart.decode(row) for row in rows]


# ---------------------------------------------------------------------------------- in the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Where collections are written."""

    journals: Journals
    blobs: BlobStore
    schemas: Schemas
    ownership: Ownership

    def publisher(self, spec: CollectionSpec, producer: Producer) -> Publisher:
        # Room for the log of a stream in the store transaction of the ACKs.
        limits = dataclasses.replace(
            LIMITS, journals=LIMITS.journals - 1, bytes=LIMITS.bytes - 2 * ENTRY_BYTES
        )
        return Publisher(
            self.journals,
            self.blobs,
            self.schemas,
            [Mapped(spec=spec)],
            producer=producer,
            now=wall_clock.now,
            options=PublisherOptions(limits=limits),
            ownership=self.ownership,
        )


async def plan_frame(stores: Stores, spec: CollectionSpec, salt: bytes) -> FrameWrite:
    """Return what tasks need to write a frame."""
    await stores.ownership.check()
    publisher = stores.publisher(spec, Producer.from_random(os.urandom(6)))
    staging = await publisher.staging(0)
    return FrameWrite(staging=staging, salt=salt, infers=spec.reads_inferred)


async def commit_frame(
    stores: Stores,
    spec: CollectionSpec,
    parts: Sequence[FramePart],
    *,
    batch: StreamBatch | None = None,
) -> int:
    """Append what the tasks of a write have staged, and return the number of documents.

    A batch of a stream that is committed already is left alone: 0.
    """
    for part in parts:
        if part.error is not None:
            what, where, why, fix = part.error
            raise PenstockError(what, where=where, why=why, fix=fix)
    if refused := sum(part.refused for part in parts):
        raise documents_refused(spec.name, refused, [line for part in parts for line in part.lines])
    decoded = [StagedFragments.decode(part.staged) for part in parts]
    staged = [each for each in decoded if each.fragments]
    if not staged:
        return 0
    also: list[Command[int, int]] = []
    if batch is not None:
        log = await StateLog.open(stores.journals.store, batch.key, _BatchNumbers())
        if log.state == batch.number:
            return 0
        also = [Command(log, batch.decide)]
    if seen := [part.seen for part in parts if part.seen is not None]:
        await learn(stores.journals.store, spec.name, seen=reduce(widen, seen))
    await stores.ownership.check()
    publisher = stores.publisher(spec, staged[0].publisher)
    try:
        for each in staged:
            await publisher.adopt(each)
        await publisher.commit_now(also=also)
    except BatchCommitted:
        return 0
    return publisher.count(0).documents


# ---------------------------------------------------------------------------- batches of a stream

_NONE: Final = -1


class BatchCommitted(Exception):
    """Another process has committed the same batch."""


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """One batch of a streaming query, by the id that its checkpoint keeps."""

    query: str
    number: int

    @property
    def key(self) -> str:
        return f"{STREAM_PREFIX}{self.query}"

    def decide(self, last: int) -> int:
        """Return the number of the last batch after this one is committed."""
        if last == self.number:
            raise BatchCommitted
        if last > self.number:
            raise UserError(
                f"batch {self.number} of a streaming query was refused",
                where=f"query {self.query}",
                why=f"its batch {last} is committed: the checkpoint was turned back, or an older "
                "run of the query still goes on",
                fix="stop the other run; with a new checkpointLocation, everything that the source "
                "has is written again",
            )
        return self.number


class _BatchNumbers:
    """The log of a query (`consensus.replica.Machine`): the number of its last batch."""

    format = 1

    def initial(self) -> int:
        return _NONE

    def apply(self, state: int, diff: int, revision: int) -> int:
        return max(state, diff)

    def encode_diff(self, diff: int) -> bytes:
        return msgspec.msgpack.encode(diff)

    def decode_diff(self, data: bytes, format: int) -> int:  # noqa: A002
        return msgspec.msgpack.decode(data, type=int)

    def encode_state(self, state: int) -> bytes:
        return msgspec.msgpack.encode(state)

    def decode_state(self, data: bytes, format: int, revision: int) -> int:  # noqa: A002
        return msgspec.msgpack.decode(data, type=int)
