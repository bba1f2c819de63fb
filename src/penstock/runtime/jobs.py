"""SPARK: the job of a transaction, from the documents it reads to rows that are put aside.

A transaction of any number of bindings, journals and shards is **one** Spark job, or two if it is
saved in between:

    scan ─ combine by key ─ (load, reduce) ─ route to shards ─ project ─ stage ─ manifest

The documents of each binding are scanned and combined by native expressions; where stored documents
have to be looked up, a stage asks the connector for them by key and the combination is finished
with them. Rows go to a task of their shard, become rows of the target, and are put aside by the
connector: one task for each of several shards, or one for each partition of a single one. What
comes back is one small manifest from each task.

**Retries are harmless.** Only the last stage has effects, and what it makes carries the name of its
attempt. Manifests travel as result rows, so those of losing attempts are never seen; counts come
from there too, never from accumulators.

**Where tasks are threads of this machine**, Python workers are processes of it too, and cost it
more than they do. There, rows that need no loads come back to the leader, which stages them itself;
those of a small transaction are combined in one task, without an exchange.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow
import pyarrow.compute
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.errors import Bug, PenstockError
from penstock.journal.evolve import UnreadableDocument
from penstock.journal.frames import map_rows
from penstock.journal.scan import VERIFY_PAGES
from penstock.model.clock import Clock
from penstock.model.columns import Column
from penstock.model.schema import CompiledSchema, compiled, read_documents
from penstock.native import sql
from penstock.native.arrow import to_arrow, to_json
from penstock.native.collect import collected
from penstock.native.keys import key_hash, shard_index
from penstock.native.plan import ReductionPlan
from penstock.native.predicate import predicate
from penstock.native.reduce import Reduction, flag_column, reduction_errors
from penstock.native.reduce import key_columns as reduction_keys
from penstock.native.types import arrow_schema, spark_schema
from penstock.runtime.connector import Attempt, ConnectorError, Loader, Staged, Target, Workers
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.materialize.project import project
from penstock.runtime.recovery import UNKNOWN_KEY
from penstock.shuffle.route import key_columns

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession

pa: Any = pyarrow
pc: Any = pyarrow.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One binding in one transaction."""

    target: Target
    plan: ReductionPlan
    mode: Mode
    max_key: bytes | None
    """The greatest packed key ever stored; None if nothing was. Greater ones need not be loaded."""

    @property
    def errand(self) -> _Errand:
        """What of it goes to tasks: a compiled schema stays where it is."""
        delta = self.mode is Mode.DELTA
        return _Errand(
            target=self.target,
            root=self.plan.columns,
            run=flag_column(self.plan, full=False),
            deleted=None if delta else flag_column(self.plan, full=True),
            max_key=self.max_key,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errand:
    """A piece of work as tasks know it."""

    target: Target
    root: Column
    run: str
    """The column of combined documents that orders those of a key."""
    deleted: str | None
    """The column of reduced documents that says whether they are to be removed."""
    max_key: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one shard, or a task of it, did for one binding."""

    binding: int
    shard: int
    stored_docs: int = 0
    stored_bytes: int = 0
    max_key: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a job's winning attempts have put aside."""

    staged: tuple[Staged, ...]
    counted: tuple[Counted, ...]
    """One for each binding and shard, in that order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose job it is; with shard and task attempt, the name of everything it makes."""

    task: str
    epoch: int
    transaction: Clock
    job_attempt: int = 0

    def attempt(self, binding: int, shard: int, attempt: int) -> Attempt:
        return Attempt(
            task=self.task,
            epoch=self.epoch,
            transaction=self.transaction,
            job=f"{self.job_attempt}b{binding}",
            shard=shard,
            attempt=attempt,
        )


_MANIFEST: Final = t.StructType(
    [
        t.StructField("binding", t.IntegerType()),
        t.StructField("shard", t.IntegerType()),
        t.StructField("staged", t.StringType()),
        t.StructField("stored_docs", t.LongType()),
        t.StructField("stored_bytes", t.LongType()),
        t.StructField("max_key", t.BinaryType()),
        t.StructField("error", t.StringType()),
    ]
)
_MANIFEST_ARROW: Final = pa.schema(
    [
        ("binding", pa.int32()),
        ("shard", pa.int32()),
        ("staged", pa.utf8()),
        ("stored_docs", pa.int64()),
        ("stored_bytes", pa.int64()),
        ("max_key", pa.binary()),
        ("error", pa.utf8()),
    ]
)

_MARK: Final = "\N{INVISIBLE SEPARATOR}penstock\N{INVISIBLE SEPARATOR}"
"""Encloses an error that a task sends through Spark's own."""

_REFUSED: Final = f"{_MARK}refused{_MARK}"
_UNREADABLE: Final = f"{UnreadableDocument.__module__}.{UnreadableDocument.__name__}"

_PACKED: Final = "$key"
_SHARD: Final = "$shard"
_ORDER: Final = "$order"
_STORED: Final = 0
"""The order of what is stored: before all documents."""


_Batches = Iterator[pyarrow.RecordBatch]

Documents = Mapping[int, "DataFrame"]
"""Documents of each binding, one or a few per key; nothing is read until a job asks for them."""


class Refused(Exception):
    """A job met a document that its binding's schema does not admit: it is still to be found."""


def checked(frame: DataFrame, schema: CompiledSchema, root: Column) -> DataFrame:
    """The same documents, of which a job stops at the first that the schema does not admit.

    By an expression where that is exact, else by the validator in Python.
    """
    valid = predicate(schema.schema, root)
    if valid is None:
        return map_rows(frame, _checker(schema.text, root), frame.schema)
    refuse = f"CAST(raise_error({sql.text(_REFUSED)}) AS BOOLEAN)"
    return frame.where(f.expr(f"CASE WHEN {valid} THEN true ELSE {refuse} END"))


def _checker(schema: str, root: Column) -> Callable[[_Batches], _Batches]:
    def check(batches: _Batches) -> _Batches:
        for batch in batches:
            if any(wrong for _, wrong in read_documents(compiled(schema), to_json(batch, root))):
                raise RuntimeError(_REFUSED)
            yield batch

    return check


def combination(plan: ReductionPlan, mode: Mode, *, order: Sequence[str]) -> Reduction:
    """Reduces documents of a binding as far as can be without those that are stored.

    That is to one per key, unless some are to be loaded, or all are to be kept as they are.
    """
    whole = mode in (Mode.REPLACE, Mode.PUSHDOWN)
    return Reduction(plan, order=[f.col(_quoted(name)) for name in order], full=whole)


def loaded(
    works: Sequence[Work],
    documents: Documents,
    workers: Workers,
    identity: Identity,
    *,
    shards: int,
) -> Documents:
    """Combined documents, reduced into those that are stored, where they have to be looked up."""
    return {
        work.target.binding: _with_loaded(
            work, documents[work.target.binding], workers, identity, shards
        )
        if work.mode is Mode.LOAD
        else documents[work.target.binding]
        for work in works
    }


def stage(
    works: Sequence[Work],
    documents: Documents,
    workers: Workers,
    identity: Identity,
    *,
    shards: int,
) -> Manifest:
    """Run a job that puts the documents of all bindings aside. Blocks."""
    parts = []
    for work in works:
        routed = _routed(work, documents[work.target.binding], shards)
        stager = _stager(work.errand, workers, identity, shards)
        parts.append(map_rows(routed, stager, _MANIFEST))
    united = functools.reduce(lambda left, right: left.union(right), parts)
    with job_errors():
        rows = united.toArrow().to_pylist()
    return _manifest(works, rows, shards)


def stage_here(
    works: Sequence[Work],
    frame: DataFrame,
    workers: Workers,
    identity: Identity,
    *,
    shards: int,
) -> Manifest:
    """The same without loads and without workers: what `united` made comes to the leader.

    It puts the rows aside as shard 0.
    """
    bindings = [work.target.binding for work in works]
    with contextlib.ExitStack() as rows:
        with job_errors():
            batches = rows.enter_context(collected(frame))
        staging = [
            _Staging(work.errand, workers, identity.attempt(work.target.binding, 0, 0))
            for work in works
        ]
        try:
            for batch in batches:
                for each, some in zip(staging, _apart(batch, bindings), strict=True):
                    each.store(some)
            done = [each.finish() for each in staging]
        except BaseException:
            for each in staging:
                each.discard()
            raise
    return Manifest(
        staged=tuple(each for staged, _ in done for each in staged),
        counted=tuple(
            each for _, counted in done for each in (counted, *_idle(counted.binding, shards))
        ),
    )


def _idle(binding: int, shards: int) -> Iterator[Counted]:
    """What the other shards did, where the first does everything."""
    return (Counted(binding=binding, shard=shard) for shard in range(1, shards))


def _apart(batch: pyarrow.RecordBatch, bindings: Sequence[int]) -> Iterator[pyarrow.RecordBatch]:
    """The rows of each binding."""
    if len(bindings) == 1:
        yield batch
        return
    for binding in bindings:
        structs: Any = batch.column(_name(binding))
        yield pa.RecordBatch.from_struct_array(structs.filter(structs.is_valid()))


def united(documents: Documents) -> DataFrame:
    """The documents of all bindings as one frame, for `stage_here`."""
    return next(iter(documents.values())) if len(documents) == 1 else _together(documents)


def in_order(works: Sequence[Work], documents: Documents) -> Documents:
    """Sorted by key in each partition, so that an index is filled in order."""
    return {
        work.target.binding: documents[work.target.binding].sortWithinPartitions(
            *reduction_keys(work.plan)
        )
        for work in works
    }


def save(documents: Documents, path: str) -> None:
    """Run a job that writes documents of all bindings down, for another job to go on with."""
    with job_errors():
        _together(documents).write.parquet(path)


def saved(spark: SparkSession, documents: Documents, path: str) -> Documents:
    """What `save` wrote, by a frame that looks like what it was given."""
    reader = spark.read.schema(_together(documents).schema).option(VERIFY_PAGES, "true")
    kept = reader.parquet(path)
    return {
        binding: kept.where(f.col(_name(binding)).isNotNull()).select(f"{_name(binding)}.*")
        for binding in documents
    }


def _name(binding: int) -> str:
    return f"b{binding}"


def _nullable(frame: DataFrame) -> list[SparkColumn]:
    """Its columns, none of which is declared to have a value in every row.

    Arrow refuses a struct that is NULL around such a column.
    """
    columns = {field.name: frame[_quoted(field.name)] for field in frame.schema.fields}
    return [
        columns[field.name]
        if field.nullable
        else f.nullif(columns[field.name], f.lit(None).cast(field.dataType)).alias(field.name)
        for field in frame.schema.fields
    ]


def _quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))


def _together(documents: Documents) -> DataFrame:
    """Several frames as one: each is a column of structs, NULL in the rows of the others."""
    parts = [
        frame.select(
            *(
                f.struct(*_nullable(frame)).alias(_name(other))
                if other == binding
                else f.lit(None).cast(documents[other].schema).alias(_name(other))
                for other in documents
            )
        )
        for binding, frame in documents.items()
    ]
    return functools.reduce(lambda left, right: left.union(right), parts)


# -------------------------------------------------------------------------------------- the plan


def _routed(work: Work, documents: DataFrame, shards: int) -> DataFrame:
    """Documents in a partition of their shard, sorted by key, so that an index is filled in order.

    A single shard has as many partitions as the documents had: all of a key are in one of them.
    Where packed keys are asked for, they are the last column.
    """
    plan = work.plan
    if shards == 1 and work.mode is not Mode.LOAD:
        return documents.sortWithinPartitions(*reduction_keys(plan))
    keyed = documents.withColumn(
        _PACKED, key_columns(plan.schema.shape, plan.columns, plan.key).packed
    )
    if shards > 1:
        shard = shard_index(key_hash(f.col(_PACKED)), shards)
        keyed = keyed.withColumn(_SHARD, shard).repartitionById(shards, f.col(_SHARD)).drop(_SHARD)
    return keyed.sortWithinPartitions(_PACKED)


def _with_loaded(
    work: Work, documents: DataFrame, workers: Workers, identity: Identity, shards: int
) -> DataFrame:
    """Combined documents, reduced into those that are stored."""
    routed = _routed(work, documents, shards)
    layout = spark_schema(work.plan.columns)
    order = t.StructField(_ORDER, t.LongType())
    both = map_rows(
        routed,
        _loader(work.errand, workers, identity, shards),
        t.StructType([*layout.fields, order]),
    )
    reduction = Reduction(
        work.plan, order=[f.col(_ORDER)], full=True, stored=f.col(_ORDER) == _STORED
    )
    return reduction.apply(both)


# ------------------------------------------------------------------------------------- in tasks


def _shard_of_task(shards: int) -> tuple[int, int]:
    """Which shard this task works for, and its attempt.

    A union puts the partitions of its parts one behind the other, or together: the partition of a
    part is the remainder either way. A single shard has any number of tasks.
    """
    context = TaskContext.get()
    if context is None:
        raise Bug("this runs in a Spark task only")
    return context.partitionId() % shards, context.taskAttemptId()


def _loader(
    work: _Errand, workers: Workers, identity: Identity, shards: int
) -> Callable[[_Batches], _Batches]:
    schema = arrow_schema(work.root)
    whole = pa.schema([*schema, pa.field(_ORDER, pa.int64())])

    def load(batches: _Batches) -> _Batches:
        shard, attempt = _shard_of_task(shards)
        last: bytes | None = None
        with (
            _told(),
            contextlib.closing(
                workers.loader(identity.attempt(work.target.binding, shard, attempt))
            ) as loader,
        ):
            for batch in batches:
                order = pc.add(batch.column(work.run).cast(pa.int64()), _STORED + 1)
                documents = batch.select(schema.names)
                yield pa.RecordBatch.from_arrays([*documents.columns, order], schema=whole)
                for stored in _loaded(work, loader, batch, last):
                    rows = to_arrow([json.loads(text) for text in stored], work.root)
                    first = pa.repeat(pa.scalar(_STORED, pa.int64()), rows.num_rows)
                    yield pa.RecordBatch.from_arrays([*rows.columns, first], schema=whole)
                if batch.num_rows:
                    last = batch.column(_PACKED)[-1].as_py()

    return load


def _loaded(
    work: _Errand, loader: Loader, batch: pyarrow.RecordBatch, last: bytes | None
) -> Iterator[list[str]]:
    """The stored documents of a batch's keys; a key beyond all that are stored has none.

    Rows are sorted by key, and a key may have several, also in the next batch. It is asked for at
    its first row (`last` is the key of the row before), since two answers would be reduced twice.
    """
    if work.max_key is None or not batch.num_rows:
        return
    packed: Any = batch.column(_PACKED)
    first = np.ones(len(packed), bool)
    first[1:] = pc.not_equal(packed[1:], packed[:-1]).to_numpy(zero_copy_only=False)
    first[0] = packed[0].as_py() != last
    wanted: Any = pa.array(first)
    if work.max_key != UNKNOWN_KEY:
        wanted = pc.and_(wanted, pc.less_equal(packed, pa.scalar(work.max_key, packed.type)))
    some: Any = batch.filter(wanted)
    if some.num_rows:
        keys = project(some, work.root, work.target.key)
        for answer in loader.load(work.target.binding, keys.select(keys.schema.names[:-1])):
            texts: list[Any] = answer.column(0).to_pylist()
            yield texts


def _stager(
    work: _Errand, workers: Workers, identity: Identity, shards: int
) -> Callable[[_Batches], _Batches]:
    def stage(batches: _Batches) -> _Batches:
        shard, number = _shard_of_task(shards)
        binding = work.target.binding
        attempt = identity.attempt(binding, shard, number)
        try:
            staged, counted = _store(work, batches, workers, attempt)
            yield _row(counted, staged)
        except PenstockError as error:
            # As data: the job has not failed, the endpoint has, and trying again is not for Spark.
            yield _row(Counted(binding=binding, shard=shard), (), error)

    return stage


def _store(
    work: _Errand, batches: _Batches, workers: Workers, attempt: Attempt
) -> tuple[Sequence[Staged], Counted]:
    """Put the documents of one task aside."""
    staging = _Staging(work, workers, attempt)
    try:
        for batch in batches:
            staging.store(batch)
        return staging.finish()
    except BaseException:
        staging.discard()
        raise


class _Staging:
    """Puts documents of a binding aside, and counts them."""

    def __init__(self, work: _Errand, workers: Workers, attempt: Attempt) -> None:
        self._work = work
        self._stager = workers.stager(attempt)
        self._counted = Counted(binding=work.target.binding, shard=attempt.shard)

    def store(self, batch: pyarrow.RecordBatch) -> None:
        if not batch.num_rows:
            return
        work, so_far = self._work, self._counted
        deleted = None if work.deleted is None else batch.column(work.deleted)
        rows = project(batch, work.root, work.target.fields, deleted=deleted)
        self._stager.store(work.target.binding, rows)
        top = pc.max(batch.column(_PACKED)).as_py() if _PACKED in batch.schema.names else None
        self._counted = replace(
            so_far,
            stored_docs=so_far.stored_docs + rows.num_rows,
            max_key=top if so_far.max_key is None else max(so_far.max_key, top or b""),
        )

    def finish(self) -> tuple[Sequence[Staged], Counted]:
        staged = self._stager.finish()
        return staged, replace(self._counted, stored_bytes=sum(each.bytes for each in staged))

    def discard(self) -> None:
        self._stager.discard()


def _row(
    counted: Counted, staged: Sequence[Staged], error: PenstockError | None = None
) -> pyarrow.RecordBatch:
    said = None if error is None else _error_out(error)
    places = json.dumps([[s.binding, s.shard, s.at, s.rows, s.bytes] for s in staged])
    values = [
        counted.binding,
        counted.shard,
        places,
        counted.stored_docs,
        counted.stored_bytes,
        counted.max_key,
        said,
    ]
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(
        [pa.array([v], kind.type) for v, kind in zip(values, _MANIFEST_ARROW, strict=True)],
        schema=_MANIFEST_ARROW,
    )
    return batch


def _manifest(works: Sequence[Work], rows: Sequence[Mapping[str, Any]], shards: int) -> Manifest:
    """What a finished job returned: a row for each shard of a binding, or several of a single one.

    Or none at all of a binding, if Spark found out that it has no rows, and ran no task.
    """
    for row in rows:
        if row["error"] is not None:
            raise _error_in(row["error"])
    by_shard: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_shard.setdefault((row["binding"], row["shard"]), []).append(row)
    heard = {binding for binding, _ in by_shard}
    known = sorted(work.target.binding for work in works)
    expected = [
        (binding, shard) for binding in known if binding in heard for shard in range(shards)
    ]
    found = sorted(by_shard)
    if found != expected or (shards > 1 and len(rows) != len(found)):
        raise Bug(f"a job returned {len(rows)} manifests of {found}, and not of {expected}")
    return Manifest(
        staged=tuple(
            Staged(binding=binding, shard=shard, at=at, rows=count, bytes=size)
            for place in found
            for row in by_shard[place]
            for binding, shard, at, count, size in json.loads(row["staged"])
        ),
        counted=tuple(
            Counted(
                binding=binding,
                shard=shard,
                stored_docs=sum(row["stored_docs"] for row in by_shard[binding, shard]),
                stored_bytes=sum(row["stored_bytes"] for row in by_shard[binding, shard]),
                max_key=max(
                    (row["max_key"] for row in by_shard[binding, shard] if row["max_key"]),
                    default=None,
                ),
            )
            for binding, shard in found
        ),
    )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """In a task: an error of the endpoint goes through Spark as text, for `job_errors` to find."""
    try:
        yield
    except PenstockError as error:
        raise RuntimeError(f"{_MARK}{_error_out(error)}{_MARK}") from None


@contextlib.contextmanager
def job_errors() -> Iterator[None]:
    """Around a job: what went wrong in it, rather than Spark's account of that."""
    try:
        with reduction_errors():
            yield
    except (PySparkException, Py4JJavaError) as error:
        text = str(error)
        if _REFUSED in text or _UNREADABLE in text:
            raise Refused from error
        parts = text.split(_MARK)
        if len(parts) < 3:
            raise
        raise _error_in(parts[1]) from None


def _error_out(error: PenstockError) -> str:
    transient = isinstance(error, ConnectorError) and error.transient
    return json.dumps([error.what, error.where, error.why, error.fix, transient])


def _error_in(text: str) -> ConnectorError:
    what, where, why, fix, transient = json.loads(text)
    return ConnectorError(what, where=where, why=why, fix=fix, transient=transient)
