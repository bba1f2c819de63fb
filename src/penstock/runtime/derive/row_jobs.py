"""SPARK: jobs that run a derivation's code on documents one by one, in Python workers.

    mapped    each document by itself, wherever it is: published documents as columns again, with
              the order of the document that published them
    sharded   the documents of a shard in one task, in order: the code keeps state. The same task
              checks what is published, redacts it and stages it, and reports how the state changed

Either way the first document at which the code fails ends the job, as data: which document it was,
and what the code said. The leader finds out where that document is (`refusals.locate`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow
from pyspark.sql import types as t

from penstock.errors import PenstockError
from penstock.garbage import gc_paused
from penstock.journal.frames import map_rows
from penstock.journal.rows import META, UUID, Stamps, uuids
from penstock.journal.schemas import layout
from penstock.journal.staging import FragmentStaging, StagedFragments, stage_fragments
from penstock.model.clock import Clock, Producer
from penstock.model.columns import Column
from penstock.model.json_order import Json
from penstock.model.redact import has_redactions, redact
from penstock.model.schema import CompiledSchema, compiled
from penstock.native.arrow import to_arrow, to_json
from penstock.native.arrow_types import arrow_schema
from penstock.native.spark_types import spark_schema
from penstock.runtime.derive.engine import (
    BatchProcessor,
    Document,
    LambdaFailed,
    Processor,
    RowEngine,
    ShardContext,
    SourceRead,
    StateFiles,
)
from penstock.runtime.derive.publish_jobs import ORDER
from penstock.runtime.patches import Patches
from penstock.runtime.spark_tasks import (
    Batches,
    DocumentFailed,
    job_errors,
    raise_in_task,
    shard_of_task,
)
from penstock.shuffle.slice import BINDING, CLOCK, FLAGS, PRODUCER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.model.spec import CollectionSpec

pa: Any = pyarrow

INLINE_BYTES: Final = 1 << 20
"""Documents of a shard up to this come back to the leader with its report, instead of as objects of
the blob store: the leader appends them with the records."""

CHUNK: Final = 1_000
"""Published documents that are made columns at once."""

_RECENT: Final = 4
"""Batches whose documents can be named in an error; a processor reads little ahead."""

_decode: Final[Callable[[str], Any]] = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """A transform's source, as tasks know it."""

    transform: int
    root: Column
    """The layout of its documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTarget:
    """The derived collection, as tasks know it."""

    name: str
    schema: str
    """The text of its write schema."""
    salt: bytes

    @classmethod
    def of(cls, spec: CollectionSpec, salt: bytes) -> RowTarget:
        return cls(name=spec.name, schema=spec.write_schema.text, salt=salt)


# ------------------------------------------------------------------------------------ one by one


def mapped(
    frame: DataFrame,
    engine: RowEngine,
    source: RowSource,
    target: RowTarget,
    files: StateFiles,
    *,
    ordered: bool,
) -> DataFrame:
    """Return what the documents of a frame publish, in columns, and perhaps `ORDER`.

    The frame has the columns of documents, then those of stamps; and `ORDER`, if asked for.
    """
    root = layout(target.schema)
    fields = list(spark_schema(root).fields)
    if ordered:
        order = frame.schema[ORDER].dataType
        fields.append(
            t.StructField(
                ORDER,
                t.StructType([t.StructField("of", order), t.StructField("at", t.LongType())]),
            )
        )
    return map_rows(frame, _Mapper(engine, source, target, files, ordered), t.StructType(fields))


@dataclass(frozen=True, slots=True)
class _Mapper:
    """Runs code on batches of documents, in a task."""

    engine: RowEngine
    source: RowSource
    target: RowTarget
    files: StateFiles
    ordered: bool

    def __call__(self, batches: Batches) -> Batches:
        context = ShardContext(shard=0, shards=1, state={}, files=self.files)
        with _failures():
            for batch in batches:
                if not batch.num_rows:
                    continue
                with contextlib.closing(self.engine.open(context)) as processor:
                    if isinstance(processor, BatchProcessor) and processor.takes_batches:
                        yield from self._of_batch(processor, batch)
                    else:
                        yield self._of_documents(processor, batch)

    def _of_documents(
        self, processor: Processor, batch: pyarrow.RecordBatch
    ) -> pyarrow.RecordBatch:
        schema = compiled(self.target.schema)
        trail = _Trail([_Rows.of(batch, self.source)])
        found: list[int] = []
        documents: list[Document] = []
        for at, document in trail.published(processor):
            if not _is_valid(schema, document):
                raise trail.located(_refused(self.target, schema, document), at)
            found.append(at)
            documents.append(document)
        return self._ordered(_columns(documents, layout(self.target.schema)), batch, found, 0)

    def _of_batch(
        self, processor: BatchProcessor, batch: pyarrow.RecordBatch
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yield what a batch publishes as a whole: in order behind its last document."""
        schema, last, made_before = arrow_schema(self.source.root), batch.num_rows - 1, 0
        documents = batch.select(schema.names).cast(schema)
        for made in processor.process_batches(self.source.transform, documents):
            yield self._ordered(made, batch, [last] * made.num_rows, made_before)
            made_before += made.num_rows

    def _ordered(
        self, made: pyarrow.RecordBatch, batch: pyarrow.RecordBatch, found: list[int], start: int
    ) -> pyarrow.RecordBatch:
        """Return documents with the order of those that published them, if it is wanted."""
        if not self.ordered:
            return made
        of = batch.column(ORDER).take(pa.array(found, pa.int64()))
        at_each = pa.array(range(start, start + len(found)), pa.int64())
        order = pa.StructArray.from_arrays([of, at_each], names=["of", "at"])
        whole = pa.schema([*made.schema, pa.field(ORDER, order.type)])
        ordered: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(
            [*made.columns, order], schema=whole
        )
        return ordered


# ------------------------------------------------------------------------------------- by shard

_RESULT: Final = t.StructType(
    [
        t.StructField("shard", t.IntegerType()),
        t.StructField("documents", t.BinaryType()),
        t.StructField("staged", t.BinaryType()),
        t.StructField("docs", t.LongType()),
        t.StructField("patches", t.StringType()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """The outcome of one shard's transaction."""

    shard: int
    documents: pyarrow.Table | None
    """What it published, if that is little."""
    staged: StagedFragments | None
    """Its fragments otherwise; None if it published nothing."""
    docs: int
    patches: Patches


def sharded(
    routed: DataFrame,
    engine: RowEngine,
    sources: Mapping[int, RowSource],
    target: RowTarget,
    staging: FragmentStaging | None,
    *,
    state: Json,
    files: StateFiles,
    shards: int,
) -> list[ShardResult]:
    """Run the job of a transaction: `routed` is what `Slice.exchange` returns. Blocks.

    Without `staging`, however many documents there are come back.
    """
    worker = _Worker(engine, sources, target, staging, state, files, shards, INLINE_BYTES)
    with job_errors():
        rows = map_rows(routed, worker, _RESULT).toArrow().to_pylist()
    return [
        ShardResult(
            shard=row["shard"],
            documents=None
            if row["documents"] is None
            else pa.ipc.open_stream(row["documents"]).read_all(),
            staged=None if row["staged"] is None else StagedFragments.decode(row["staged"]),
            docs=row["docs"],
            patches=tuple(json.loads(row["patches"])),
        )
        for row in sorted(rows, key=lambda row: row["shard"])
    ]


@dataclass(frozen=True, slots=True)
class _Worker:
    """Runs one shard's transaction, in a task."""

    engine: RowEngine
    sources: Mapping[int, RowSource]
    target: RowTarget
    staging: FragmentStaging | None
    state: Json
    files: StateFiles
    shards: int
    inline_bytes: int

    def __call__(self, batches: Batches) -> Batches:
        shard, _ = shard_of_task(self.shards)
        context = ShardContext(shard=shard, shards=self.shards, state=self.state, files=self.files)
        with _failures():
            with contextlib.closing(self.engine.open(context)) as processor:
                output = _Output(self.target)
                made = output.batches(processor, _Trail(self._rows(batches)))
                documents, staged = self._kept(made)
                patches = output.patches
            yield _result(shard, documents, staged, output.docs, patches)

    def _rows(self, batches: Batches) -> Iterator[_Rows]:
        for batch in batches:
            if batch.num_rows:
                yield _Rows.routed(batch, self.sources)

    def _kept(
        self, made: Iterator[pyarrow.RecordBatch]
    ) -> tuple[list[pyarrow.RecordBatch], StagedFragments | None]:
        """Take all batches: as they are while they are few, as fragments otherwise."""
        first: list[pyarrow.RecordBatch] = []
        size = 0
        for batch in made:
            first.append(batch)
            size += batch.nbytes
            if size > self.inline_bytes and self.staging is not None:
                return [], stage_fragments(self.staging, itertools.chain(first, made))
        return first, None


class _Output:
    """What a shard publishes, on its way to columns: checked, and redacted."""

    def __init__(self, target: RowTarget) -> None:
        self._schema = compiled(target.schema)
        self._root = layout(target.schema)
        self._hides = has_redactions(self._schema.shape)
        self._target = target
        self.docs = 0
        self.patches: Patches = ()

    def batches(self, processor: Processor, trail: _Trail) -> Iterator[pyarrow.RecordBatch]:
        """Yield what the processor publishes, in its order; then it has finished."""
        published = trail.published(processor)
        while some := list(itertools.islice(published, CHUNK)):
            yield self._made(some, trail)
        finished = processor.finish()
        if finished.documents:
            yield self._made([(None, document) for document in finished.documents], trail)
        self.patches = finished.patches

    def _made(
        self, published: Sequence[tuple[int | None, Document]], trail: _Trail
    ) -> pyarrow.RecordBatch:
        documents = []
        for at, document in published:
            if not _is_valid(self._schema, document):
                raise trail.located(_refused(self._target, self._schema, document), at)
            documents.append(document)
        if self._hides:
            shape, salt = self._schema.shape, self._target.salt
            documents = [_hidden(redact(document, shape, salt)) for document in documents]
        self.docs += len(documents)
        return _columns(documents, self._root)


def _result(
    shard: int,
    documents: Sequence[pyarrow.RecordBatch],
    staged: StagedFragments | None,
    docs: int,
    patches: Patches,
) -> pyarrow.RecordBatch:
    data: bytes | None = None
    if documents:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, documents[0].schema) as stream:
            for batch in documents:
                stream.write_batch(batch)
        data = sink.getvalue().to_pybytes()
    values: dict[str, Any] = {
        "shard": pa.array([shard], pa.int32()),
        "documents": pa.array([data], pa.binary()),
        "staged": pa.array([None if staged is None else staged.encode()], pa.binary()),
        "docs": pa.array([docs], pa.int64()),
        "patches": pa.array([json.dumps(list(patches))], pa.utf8()),
    }
    made: pyarrow.RecordBatch = pa.RecordBatch.from_pydict(values)
    return made


# ------------------------------------------------------------------------------------- documents


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The documents of a batch, in the order of its rows, and who wrote them."""

    reads: Sequence[SourceRead]
    clock: Any
    producer: Any

    @classmethod
    def of(cls, batch: pyarrow.RecordBatch, source: RowSource) -> _Rows:
        """Return a batch of one source: its columns, then stamps, then perhaps others."""
        at = len(arrow_schema(source.root))
        stamps = Stamps.of(batch.select(batch.schema.names[at : at + 3]))
        transforms = [source.transform] * batch.num_rows
        return cls._stamped(stamps, _documents(batch, source.root), transforms)

    @classmethod
    def routed(cls, batch: pyarrow.RecordBatch, sources: Mapping[int, RowSource]) -> _Rows:
        """Return a batch of `Slice.exchange`: stamps, and a column of documents per source."""
        stamps = Stamps.of(batch.select([CLOCK, PRODUCER, FLAGS]))
        transforms: list[Any] = batch.column(BINDING).to_pylist()
        texts = {
            binding: iter(_documents_of(batch.column(f"d{binding}"), source.root))
            for binding, source in sources.items()
            if f"d{binding}" in batch.schema.names
        }
        return cls._stamped(stamps, (next(texts[at]) for at in transforms), transforms)

    @classmethod
    def _stamped(cls, stamps: Stamps, texts: Iterable[str], transforms: Iterable[int]) -> _Rows:
        reads = []
        with gc_paused():
            for text, uuid, transform in zip(
                texts, uuids(stamps).to_pylist(), transforms, strict=True
            ):
                document = _decode(text)
                document.setdefault(META, {})[UUID] = uuid
                reads.append(SourceRead(transform, document))
        return cls(reads=reads, clock=stamps.clock, producer=stamps.producer)


def _documents(batch: pyarrow.RecordBatch, root: Column) -> list[str]:
    return to_json(batch.select(arrow_schema(root).names), root)


def _documents_of(structs: Any, root: Column) -> list[str]:  # noqa: ANN401 - an Arrow array
    """Return the documents of a column of structs, without those that are NULL."""
    return _documents(pa.RecordBatch.from_struct_array(structs.filter(structs.is_valid())), root)


def _columns(documents: list[Document], root: Column) -> pyarrow.RecordBatch:
    try:
        return to_arrow(documents, root)
    except (OverflowError, ValueError, TypeError) as error:
        raise DocumentFailed(
            "a published document does not fit its columns",
            why=str(error),
            fix="declare minimum and maximum, or a string with format: integer",
        ) from None


class _Trail:
    """Documents on their way to a processor, and who wrote those that came by of late."""

    def __init__(self, rows: Iterable[_Rows]) -> None:
        self._rows = rows
        self._recent: deque[tuple[int, _Rows]] = deque(maxlen=_RECENT)
        """Batches, each with the position of its first document."""

    def published(self, processor: Processor) -> Iterator[tuple[int, Document]]:
        """Yield what the documents publish, each with the position of the one that did."""
        try:
            yield from processor.process(self._reads())
        except LambdaFailed as error:
            failed = DocumentFailed(error.what, where=error.where, why=error.why, fix=error.fix)
            raise self.located(failed, error.read) from None

    def _reads(self) -> Iterator[SourceRead]:
        total = 0
        for rows in self._rows:
            self._recent.append((total, rows))
            total += len(rows.reads)
            yield from rows.reads

    def located(self, error: DocumentFailed, position: int | None) -> DocumentFailed:
        """Return the error, which says now which document it is about, if that is known."""
        for start, rows in self._recent:
            if position is not None and 0 <= position - start < len(rows.reads):
                at = position - start
                error.binding = rows.reads[at].transform
                error.producer = Producer(int(rows.producer[at]))
                error.clock = Clock(int(rows.clock[at]))
        return error


def _refused(target: RowTarget, schema: CompiledSchema, document: Document) -> DocumentFailed:
    return DocumentFailed(
        f"a document published to {target.name} is refused: {_violations(schema, document)}",
        why=f"it does not fit the collection's schema: {_shown(document)}",
        fix="correct the code of the transform, or let the schema admit it",
    )


def _is_valid(schema: CompiledSchema, document: Document) -> bool:
    try:
        return schema.is_valid(document)
    except (ValueError, TypeError, OverflowError):
        return False  # nothing that JSON has


def _violations(schema: CompiledSchema, document: Document) -> str:
    try:
        return "; ".join(map(str, schema.violations(document))) or "it is not JSON"
    except (ValueError, TypeError, OverflowError) as error:
        return f"it is not JSON: {error}"


def _shown(document: Document) -> str:
    text = repr(document)
    return text if len(text) <= 512 else f"{text[:512]}…"


def _hidden(value: Json) -> Document:
    assert isinstance(value, dict)  # noqa: S101 - redaction keeps a document an object
    return value


# ----------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """In a task: send an error through Spark, with the document that it is about."""
    try:
        yield
    except DocumentFailed as error:
        producer = None if error.producer is None else int(error.producer)
        raise_in_task(error, [error.binding, producer, int(error.clock)])
    except LambdaFailed as error:
        raise_in_task(error, [-1, None, 0])
    except PenstockError as error:
        raise_in_task(error)
