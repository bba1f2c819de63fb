"""SPARK: `format("penstock")`, the committed documents of a collection for plain Spark users.

    spark.read.format("penstock").option("collection", "acme/orders").load()
    spark.readStream.format("penstock").option("collection", "acme/orders").load()
    df.write.format("penstock").option("collection", "acme/orders").mode("append").save()
    df.writeStream.format("penstock").option("collection", "acme/orders").start()

Nothing has to be registered: Spark looks for sources in packages whose name begins with `pyspark_`,
and finds `pyspark_penstock`. Options:

    collection          its name
    data, consensus,    where it is, as on the command line; PENSTOCK_… variables count as well
      blob
    selector            journals by their labels: region=eu
    startingOffsets     earliest (default), latest, or a revision: commits of it and later ones;
                        streams only, and only for their first batch
    maxRowsPerTrigger   documents per batch at most, but never part of a revision
    meta                true: with the columns _clock, _producer and _flags
    keepText            true: moments and exact numbers are the texts that write them

Writing has the first two lines of these (`frame_append`).

A schema that is given with `.schema(…)` names the columns to read; others are left alone. A column
whose texts have a meaning (`native.meanings`) may be asked for as that, or as a string. **Filters
are not pushed down:** Spark 4.3 keeps a reader, and with it the filters of one query, for later
queries of the same DataFrame. Use `selector` to leave out partitions.

**Streams.** An offset is a `timeline.TimelinePosition`: the revision, and for each journal the
offset up to which commits were delivered. It alone decides what a batch holds: a batch has the same
documents however often it is planned, by whom, and whatever compaction did meanwhile. Spark keeps
one planning process for a stream; there a thread follows the journals, so a trigger looks at what
is known and lists nothing.

Planning says where rows are as of now. An object that compaction replaces after that stays for the
grace period of garbage collection, which is longer than a batch.

**Errors.** Spark runs all of this in Python processes of its own, and quotes whole tracebacks of
what they raise. Of a user's mistake it quotes the message alone (`_words_for_spark`).
"""

from __future__ import annotations

import asyncio
import difflib
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.consensus.open import open_consensus
from penstock.errors import Bug, PenstockError, UsageError, UserError
from penstock.journal.blobs import BlobStore, open_blobs
from penstock.journal.follower import Follower
from penstock.journal.frame_append import (
    FramePart,
    FrameWrite,
    Stores,
    StreamBatch,
    commit_frame,
    plan_frame,
    stage_rows,
)
from penstock.journal.frames import frame_schema
from penstock.journal.journals import Journals
from penstock.journal.ownership import Ownership
from penstock.journal.planning import Planner
from penstock.journal.rows import row_schema
from penstock.journal.schemas import Schemas, layout
from penstock.journal.selector import LabelSelector
from penstock.journal.splits import Split, pieces, read_split
from penstock.journal.timeline import BEGIN, TimelinePosition
from penstock.model.columns import Column
from penstock.native.meanings import read_rows, read_schema
from penstock.native.spark_types import spark_schema

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.model.spec import CollectionSpec

IDLE_S: Final = 0.2
"""Time that a trigger waits for something new before it reports that there is nothing."""

_PLACE: Final = ("collection", "data", "consensus", "blob")
_OPTIONS: Final = (
    *_PLACE,
    *("selector", "startingOffsets", "maxRowsPerTrigger", "meta", "keepText"),
)
_OF_SPARK: Final = ("path", "checkpointLocation", "queryName")
"""Options that Spark adds, or reads itself."""

_QUERY_ID: Final = "sql.streaming.queryId"
"""The local property in which Spark says which query a task works for."""

# ---------------------------------------------------------------------------------------- options


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a read, except where the stores are."""

    collection: str
    selector: LabelSelector
    starting: str | int
    """`earliest`, `latest`, or a revision."""
    rows_max: int | None
    meta: bool
    keep_text: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """The options of a read; names are compared without regard to case, as Spark does."""
        given = _known(options, _OPTIONS)
        starting = given.get("startingoffsets", "earliest").removeprefix("revision=")
        if starting not in ("earliest", "latest") and not starting.isdecimal():
            raise UsageError(
                f"startingOffsets {starting!r} is no place to begin",
                fix="earliest, latest, or a revision of the store: 120",
            )
        return cls(
            collection=_collection(given),
            selector=LabelSelector.parse(given.get("selector", "")),
            starting=int(starting) if starting.isdecimal() else starting,
            rows_max=_positive(given.get("maxrowspertrigger"), "maxRowsPerTrigger"),
            meta=_flag(given.get("meta", "false"), "meta"),
            keep_text=_flag(given.get("keeptext", "false"), "keepText"),
        )


def _known(options: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """Options by their names in lower case, all of which are known."""
    given = {name.lower(): value for name, value in options.items()}
    names = {name.lower() for name in (*known, *_OF_SPARK)}
    if unknown := sorted(given.keys() - names):
        near = difflib.get_close_matches(unknown[0], [name.lower() for name in known], n=1)
        meant = [name for name in known if name.lower() in near]
        raise UsageError(
            f'format("penstock") has no option {unknown[0]} here',
            fix=f"did you mean {meant[0]}?" if meant else f"one of {', '.join(known)}",
        )
    return given


def _collection(given: Mapping[str, str]) -> str:
    collection = given.get("collection") or given.get("path")
    if not collection:
        raise UsageError(
            'format("penstock") needs the name of a collection',
            fix='for example .option("collection", "acme/orders")',
        )
    return collection


def _positive(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise UsageError(f"{option} {text!r} is not a positive number")
    return int(text)


def _flag(text: str, option: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{option} {text!r} is neither true nor false")
    return text.lower() == "true"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrls:
    """The URLs of the stores that hold a collection."""

    consensus: str
    blob: str


class SourceError(Exception):
    """A user's mistake in the words that Spark quotes."""


SourceError.__module__, SourceError.__qualname__ = "__main__", "penstock"  # as Spark prints it


@contextmanager
def _words_for_spark() -> Iterator[None]:
    """Let Spark quote the message of an error, and nothing of the code that raised it.

    This process is one of Spark's own, and it ends with the error.
    """
    try:
        yield
    except PenstockError as error:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise SourceError(str(error)) from None


class CollectionSource(DataSource):
    """The data source, but for where things are and what the catalog says (`pyspark_penstock`)."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    @abstractmethod
    def place(self) -> StoreUrls:
        """The stores that the options and the environment name."""

    @abstractmethod
    async def find(self, store: Consensus, collection: str) -> CollectionSpec:
        """The collection as the recorded catalog has it."""

    @abstractmethod
    async def salt(self, store: Consensus, collection: str) -> bytes:
        """The salt of its redacted values."""

    def schema(self) -> StructType:
        with _words_for_spark():
            return asyncio.run(self._schema())

    async def _schema(self) -> StructType:
        async with self.opened() as opened:
            return opened.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return _BatchReader(self, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        with _words_for_spark():
            return _StreamReader(self, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        with _words_for_spark():
            return _BatchWriter(self, asyncio.run(self._plan(overwrite)))

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        with _words_for_spark():
            return _StreamWriter(self, asyncio.run(self._plan(overwrite)))

    async def _plan(self, overwrite: bool) -> FrameWrite:
        if overwrite:
            raise UsageError(
                "collections are appended to, and never overwritten",
                fix='.mode("append") for a batch, .outputMode("append") for a stream',
            )
        async with self.writing() as (stores, spec):
            salt = await self.salt(stores.journals.store, spec.name)
            return await plan_frame(stores, spec, salt)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[_Opened]:
        """Everything that planning needs, until the block ends."""
        place, options = self.place(), SourceOptions.parse(self.options)
        store = await open_consensus(place.consensus)
        try:
            spec = await self.find(store, options.collection)
            blobs = open_blobs(place.blob)
            yield _Opened(
                planner=Planner(journals=Journals(store), blobs=blobs, schemas=Schemas(store)),
                options=options,
                root=layout(spec.read_schema.text),
            )
        finally:
            await store.close()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[tuple[Stores, CollectionSpec]]:
        """The stores, and the collection to write to, until the block ends."""
        collection = _collection(_known(self.options, _PLACE))
        place = self.place()
        store = await open_consensus(place.consensus)
        try:
            spec = await self.find(store, collection)
            journals, blobs = Journals(store), open_blobs(place.blob)
            ownership = Ownership(journals, blobs)
            stores = Stores(
                journals=journals, blobs=blobs, schemas=Schemas(store), ownership=ownership
            )
            yield stores, spec
        finally:
            await store.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """The stores and options that planning works with."""

    planner: Planner
    options: SourceOptions
    root: Column
    """The layout to read under."""

    @property
    def schema(self) -> StructType:
        stored = frame_schema(self.root) if self.options.meta else spark_schema(self.root)
        return stored if self.options.keep_text else read_schema(stored, self.root)

    def partitions(self, splits: Iterable[Split], asked: StructType) -> list[InputPartition]:
        """Splits as Spark hands them to tasks, with the columns that were asked for."""
        stored = frame_schema(self.root)
        texts = {field.name: field.dataType for field in stored.fields}
        known = {field.name: field.dataType for field in read_schema(stored, self.root).fields}
        converted: list[str] = []
        for field in asked.fields:
            if (have := known.get(field.name)) == field.dataType:
                converted.append(field.name)
            elif texts.get(field.name) != field.dataType:
                raise UserError(
                    f"{self.options.collection} has no column {field.name} "
                    f"of type {field.dataType.simpleString()}",
                    why=f"it is {have.simpleString()}" if have else "there is none of that name",
                    fix="leave the schema to the source; start the query anew if it has changed",
                )
        return [
            _SplitPartition(
                split=split,
                blobs=self.planner.blobs,
                root=self.root,
                columns=tuple(asked.names),
                converted=tuple(converted),
            )
            for split in splits
        ]


# ------------------------------------------------------------------------------------------ tasks


class _SplitPartition(InputPartition):
    """One task's work, with all that it needs to know."""

    def __init__(
        self,
        *,
        split: Split,
        blobs: BlobStore,
        root: Column,
        columns: tuple[str, ...],
        converted: tuple[str, ...],
    ) -> None:
        self.split = split
        self.blobs = blobs
        self.root = root
        self.columns = columns
        self.converted = converted
        """Columns whose texts are read as what they write."""


def _read(partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a partition, in its columns."""
    assert isinstance(partition, _SplitPartition)  # noqa: S101 - Spark hands back what it got
    columns = partition.columns
    schema = pyarrow.schema([row_schema(partition.root).field(name) for name in columns])
    with _words_for_spark():
        for rows in read_split(partition.blobs, partition.split, partition.root, columns=columns):
            stored = rows if rows.schema.equals(schema) else rows.cast(schema)
            yield read_rows(stored, partition.root, partition.converted)


# ------------------------------------------------------------------------------------------ batch


class _BatchReader(DataSourceReader):
    """Everything that is committed when the query is planned."""

    def __init__(self, source: CollectionSource, schema: StructType) -> None:
        self._source = source
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        with _words_for_spark():
            return asyncio.run(self._plan())

    async def _plan(self) -> list[InputPartition]:
        async with self._source.opened() as opened:
            planner, options = opened.planner, opened.options
            scanned = await planner.scan(options.collection, options.selector)
            found = list(pieces(rows for journal in scanned for rows in journal.visible))
            return opened.partitions(await planner.splits(found), self._schema)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return _read(partition)


# ----------------------------------------------------------------------------------------- stream


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream in its planning process. Made for every batch as well, so making it is free."""

    def __init__(self, source: CollectionSource, schema: StructType) -> None:
        self._source = source
        self._schema = schema
        self._options = SourceOptions.parse(source.options)
        self._until: int | None = None
        self._follower: Follower | None = None
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_follower": None, "_opened": None}

    def initialOffset(self) -> dict[str, object]:  # noqa: N802 - Spark's
        starting = self._options.starting
        if starting == "earliest":
            return BEGIN.to_json()
        with self._following() as follower:
            before = None if starting == "latest" else int(starting)
            return follower.cut(BEGIN, before=before).to_json()

    def latestOffset(  # noqa: N802 - Spark's
        self, start: dict[str, object], limit: ReadLimit
    ) -> dict[str, object]:
        with self._following() as follower:
            end = follower.cut(
                TimelinePosition.of_json(start),
                rows_max=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
                before=self._until,
                idle_s=IDLE_S if self._until is None else 0.0,
            )
            return end.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's
        rows_max = self._options.rows_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def reportLatestOffset(self) -> dict[str, object]:  # noqa: N802 - Spark's
        with self._following() as follower:
            return follower.latest().to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
        with self._following() as follower:
            self._until = follower.now() + 1

    def partitions(
        self, start: dict[str, object], end: dict[str, object]
    ) -> Sequence[InputPartition]:
        with self._following() as follower:
            found = follower.plan(TimelinePosition.of_json(start), TimelinePosition.of_json(end))
            assert self._opened is not None  # noqa: S101 - by the follower
            return self._opened.partitions(found, self._schema)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return _read(partition)

    def commit(self, end: dict[str, object]) -> None:
        with self._following() as follower:
            follower.forget(TimelinePosition.of_json(end))

    def stop(self) -> None:
        if self._follower is not None:
            self._follower.close()

    @contextmanager
    def _following(self) -> Iterator[Follower]:
        with _words_for_spark():
            if self._follower is None:
                options = self._options
                self._follower = Follower(self._open, options.collection, options.selector)
            yield self._follower

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Planner]:
        async with self._source.opened() as opened:
            self._opened = opened
            yield opened.planner


# ---------------------------------------------------------------------------------------- writing


class _Message(WriterCommitMessage):
    """The report of one task, on its way to the driver."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _write(write: FrameWrite, rows: Iterator[pyarrow.RecordBatch]) -> _Message:
    """The work of a task."""
    context = TaskContext.get()
    if context is None:
        raise Bug("this runs in a Spark task only")
    query = context.getLocalProperty(_QUERY_ID)
    return _Message(stage_rows(write, rows, task=context.partitionId(), query=query).encode())


async def _commit(
    source: CollectionSource, messages: Sequence[WriterCommitMessage | None], number: int | None
) -> None:
    """Commit what all tasks have staged; `number` is that of the batch in a stream."""
    parts = [FramePart.decode(m.data) for m in messages if isinstance(m, _Message)]
    if len(parts) < len(messages):
        raise Bug("Spark commits a write without the reports of all its tasks")
    batch = None
    if number is not None and parts:
        if (query := parts[0].query) is None:
            raise Bug(f"Spark does not say which query this is: {_QUERY_ID} is not set")
        batch = StreamBatch(query, number)
    async with source.writing() as (stores, spec):
        await commit_frame(stores, spec, parts, batch=batch)


class _BatchWriter(DataSourceArrowWriter):
    """A frame as one transaction."""

    def __init__(self, source: CollectionSource, write: FrameWrite) -> None:
        self._source = source
        self._write = write

    def write(  # type: ignore[override]
        self, iterator: Iterator[pyarrow.RecordBatch]
    ) -> WriterCommitMessage:
        return _write(self._write, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        with _words_for_spark():
            asyncio.run(_commit(self._source, messages, None))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What tasks have written is garbage, and is collected as such."""


class _StreamWriter(DataSourceStreamArrowWriter):
    """Each batch as one transaction, however often Spark commits it."""

    def __init__(self, source: CollectionSource, write: FrameWrite) -> None:
        self._source = source
        self._write = write

    def write(  # type: ignore[override]
        self, iterator: Iterator[pyarrow.RecordBatch]
    ) -> WriterCommitMessage:
        return _write(self._write, iterator)

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's
    ) -> None:
        with _words_for_spark():
            asyncio.run(_commit(self._source, messages, batchId))

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's
    ) -> None:
        """What tasks have written is garbage, and is collected as such."""
