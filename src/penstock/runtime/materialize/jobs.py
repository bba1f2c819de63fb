"""SPARK: the job of a materialization's transaction, from the documents it reads to staged rows.

A transaction of any number of bindings, journals and shards is **one** Spark job, or two if it is
handed over in between:

    scan ─ combine by key ─ (load, reduce) ─ route to shards ─ project ─ stage ─ manifest

The documents of each binding are scanned and combined by native expressions; where stored documents
have to be looked up, a stage asks the connector for them by key and the combination is finished
with them. Rows go to a task of their shard, become rows of the target, and are staged by the
connector: one task for each of several shards, or one for each partition of a single one. What
comes back is one small manifest from each task.

Only the last stage has effects, and what it makes carries the name of its attempt. Manifests travel
as result rows, so those of losing attempts are never seen; counts come from there too, never from
accumulators.

**Where tasks are threads of this machine**, Python workers are processes of it too, and cost it
more than they do. There, rows that need no loads come back to the leader, which stages them itself;
those of a small transaction are combined in one task, without an exchange.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow
import pyarrow.compute
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.errors import Bug, PenstockError
from penstock.journal.frames import map_rows
from penstock.model.columns import Column
from penstock.native.arrow import to_arrow
from penstock.native.arrow_types import arrow_schema
from penstock.native.collect import LentFrame, collect_batches
from penstock.native.keys import key_hash, shard_index
from penstock.native.reduce import FrameReduction, flag_column, shared_reduction
from penstock.native.reduce import key_columns as reduction_keys
from penstock.native.spark_types import spark_schema
from penstock.runtime.connector.common import SparkAttempt
from penstock.runtime.connector.materialize import Loader, Staged, Target, Workers
from penstock.runtime.materialize.fields import Mode
from penstock.runtime.materialize.project import project
from penstock.runtime.recovery import UNKNOWN_KEY
from penstock.runtime.spark_tasks import (
    Batches,
    Documents,
    JobIdentity,
    encode_errors,
    error_from_text,
    error_to_text,
    job_errors,
    shard_of_task,
    split_by_binding,
)
from penstock.shuffle.route import key_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.runtime.materialize.build import BoundTarget

pa: Any = pyarrow
pc: Any = pyarrow.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingJob:
    """One binding's part of one transaction."""

    bound: BoundTarget
    max_key: bytes | None
    """The greatest packed key ever stored; None if nothing was. Greater ones need not be loaded."""

    @property
    def binding(self) -> int:
        return self.bound.target.binding

    @property
    def loads(self) -> bool:
        return self.bound.mode is Mode.LOAD

    @property
    def task_spec(self) -> _TaskSpec:
        """Return what Spark tasks get of it: a compiled schema stays on the driver."""
        plan, delta = self.bound.plan, self.bound.mode is Mode.DELTA
        return _TaskSpec(
            target=self.bound.target,
            root=plan.columns,
            run=flag_column(plan, full=False),
            deleted=None if delta else flag_column(plan, full=True),
            max_key=self.max_key,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskSpec:
    """A binding's job as Spark tasks know it."""

    target: Target
    root: Column
    run: str
    """The column of combined documents that orders those of a key."""
    deleted: str | None
    """The column of reduced documents that says whether they are to be removed."""
    max_key: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCounts:
    """Counts of one shard, or of one task of it, for one binding."""

    binding: int
    shard: int
    stored_docs: int = 0
    stored_bytes: int = 0
    max_key: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedManifest:
    """Everything that a job's winning attempts have staged."""

    staged: tuple[Staged, ...]
    counted: tuple[ShardCounts, ...]
    """One for each binding and each shard that worked for it, in that order."""


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

_PACKED: Final = "$key"
_SHARD: Final = "$shard"
_ORDER: Final = "$order"
_STORED: Final = 0
"""The order of stored documents: before all others."""


def combination(
    spark: SparkSession, bound: BoundTarget, *, order: Sequence[str], foreign: bool
) -> FrameReduction:
    """Return the reduction of a binding's documents as far as it goes without stored ones.

    To one document per key, unless some are to be loaded, or all are to be kept as they are.
    `foreign` documents have all columns.
    """
    return shared_reduction(
        spark,
        bound.plan,
        order=order,
        full=_is_full(bound),
        columns=None if foreign else bound.columns,
    )


def combination_kind(bound: BoundTarget, *, foreign: bool) -> Hashable:
    """Return what combinations have in common that differ in their order alone."""
    columns = None if foreign else bound.columns
    return bound.plan.schema.text, bound.plan.key, _is_full(bound), columns, foreign


def _is_full(bound: BoundTarget) -> bool:
    return bound.mode in (Mode.REPLACE, Mode.PUSHDOWN)


def reduce_into_stored(
    jobs: Sequence[BindingJob],
    documents: Documents,
    workers: Workers,
    identity: JobIdentity,
    *,
    shards: int,
) -> Documents:
    """Return combined documents, reduced into the stored ones of bindings that load."""
    return {
        job.binding: _with_stored(job, documents[job.binding], workers, identity, shards)
        if job.loads
        else documents[job.binding]
        for job in jobs
    }


def stage(
    jobs: Sequence[BindingJob],
    documents: Documents,
    workers: Workers,
    identity: JobIdentity,
    *,
    shards: int,
) -> StagedManifest:
    """Run a Spark job that stages the documents of all bindings. Blocks."""
    parts = []
    for job in jobs:
        routed = _routed(job, documents[job.binding], shards)
        stager = _stager(job.task_spec, workers, identity, shards)
        parts.append(map_rows(routed, stager, _MANIFEST))
    united = functools.reduce(lambda left, right: left.union(right), parts)
    with job_errors():
        rows = united.toArrow().to_pylist()
    return _manifest(jobs, rows, shards)


def stage_here(
    jobs: Sequence[BindingJob],
    frame: DataFrame | LentFrame,
    workers: Workers,
    identity: JobIdentity,
) -> StagedManifest:
    """Stage on the leader, as shard 0, what `spark_tasks.union` made. Blocks.

    Without loads, and without Python workers.
    """
    bindings = [job.binding for job in jobs]
    with contextlib.ExitStack() as rows:
        with job_errors():
            batches = rows.enter_context(collect_batches(frame))
        staging = [
            _Staging(job.task_spec, workers, identity.attempt(job.binding, 0, 0)) for job in jobs
        ]
        try:
            for batch in batches:
                for one, part in zip(staging, split_by_binding(batch, bindings), strict=True):
                    one.store(part)
            done = [one.finish() for one in staging]
        except BaseException:
            for one in staging:
                one.discard()
            raise
    return StagedManifest(
        staged=tuple(unit for staged, _ in done for unit in staged),
        counted=tuple(counted for _, counted in done),
    )


def sort_by_key(jobs: Sequence[BindingJob], documents: Documents) -> Documents:
    """Sort by key in each partition, so that an index is filled in order."""
    return {
        job.binding: documents[job.binding].sortWithinPartitions(*reduction_keys(job.bound.plan))
        for job in jobs
    }


# -------------------------------------------------------------------------------------- the plan


def _routed(job: BindingJob, documents: DataFrame, shards: int) -> DataFrame:
    """Move documents to a partition of their shard, sorted by key: an index is filled in order.

    A single shard has as many partitions as the documents had: all of a key are in one of them.
    Where packed keys are asked for, they are the last column.
    """
    plan = job.bound.plan
    if shards == 1 and not job.loads:
        return documents.sortWithinPartitions(*reduction_keys(plan))
    keyed = documents.withColumn(
        _PACKED, key_columns(plan.schema.shape, plan.columns, plan.key).packed
    )
    if shards > 1:
        shard = shard_index(key_hash(f.col(_PACKED)), shards)
        keyed = keyed.withColumn(_SHARD, shard).repartitionById(shards, f.col(_SHARD)).drop(_SHARD)
    return keyed.sortWithinPartitions(_PACKED)


def _with_stored(
    job: BindingJob, documents: DataFrame, workers: Workers, identity: JobIdentity, shards: int
) -> DataFrame:
    """Reduce combined documents into those that are stored."""
    plan = job.bound.plan
    order = t.StructField(_ORDER, t.LongType())
    both = map_rows(
        _routed(job, documents, shards),
        _loader(job.task_spec, workers, identity, shards),
        t.StructType([*spark_schema(plan.columns).fields, order]),
    )
    reduction = FrameReduction(
        plan, order=[f.col(_ORDER)], full=True, stored=f.col(_ORDER) == _STORED
    )
    return reduction.apply(both)


# ------------------------------------------------------------------------------------- in tasks


def _loader(
    spec: _TaskSpec, workers: Workers, identity: JobIdentity, shards: int
) -> Callable[[Batches], Batches]:
    schema = arrow_schema(spec.root)
    whole = pa.schema([*schema, pa.field(_ORDER, pa.int64())])

    def load(batches: Batches) -> Batches:
        shard, attempt = shard_of_task(shards)
        last: bytes | None = None
        with (
            encode_errors(),
            contextlib.closing(
                workers.loader(identity.attempt(spec.target.binding, shard, attempt))
            ) as loader,
        ):
            for batch in batches:
                order = pc.add(batch.column(spec.run).cast(pa.int64()), _STORED + 1)
                documents = batch.select(schema.names)
                yield pa.RecordBatch.from_arrays([*documents.columns, order], schema=whole)
                for stored in _loaded(spec, loader, batch, last):
                    rows = to_arrow([json.loads(text) for text in stored], spec.root)
                    first = pa.repeat(pa.scalar(_STORED, pa.int64()), rows.num_rows)
                    yield pa.RecordBatch.from_arrays([*rows.columns, first], schema=whole)
                if batch.num_rows:
                    last = batch.column(_PACKED)[-1].as_py()

    return load


def _loaded(
    spec: _TaskSpec, loader: Loader, batch: pyarrow.RecordBatch, last: bytes | None
) -> Iterator[list[str]]:
    """Yield the stored documents of a batch's keys; a key beyond all that are stored has none.

    Rows are sorted by key, and a key may have several, also in the next batch. It is asked for at
    its first row (`last` is the key of the row before), since two answers would be reduced twice.
    """
    if spec.max_key is None or not batch.num_rows:
        return
    packed: Any = batch.column(_PACKED)
    first = np.ones(len(packed), bool)
    first[1:] = pc.not_equal(packed[1:], packed[:-1]).to_numpy(zero_copy_only=False)
    first[0] = packed[0].as_py() != last
    wanted: Any = pa.array(first)
    if spec.max_key != UNKNOWN_KEY:
        wanted = pc.and_(wanted, pc.less_equal(packed, pa.scalar(spec.max_key, packed.type)))
    asked: Any = batch.filter(wanted)
    if asked.num_rows:
        keys = project(asked, spec.root, spec.target.key)
        for answer in loader.load(spec.target.binding, keys.select(keys.schema.names[:-1])):
            texts: list[Any] = answer.column(0).to_pylist()
            yield texts


def _stager(
    spec: _TaskSpec, workers: Workers, identity: JobIdentity, shards: int
) -> Callable[[Batches], Batches]:
    def stage(batches: Batches) -> Batches:
        shard, number = shard_of_task(shards)
        binding = spec.target.binding
        attempt = identity.attempt(binding, shard, number)
        try:
            staged, counted = _store(spec, batches, workers, attempt)
            yield _row(counted, staged)
        except PenstockError as error:
            # As data: the job has not failed, the endpoint has, and trying again is not for Spark.
            yield _row(ShardCounts(binding=binding, shard=shard), (), error)

    return stage


def _store(
    spec: _TaskSpec, batches: Batches, workers: Workers, attempt: SparkAttempt
) -> tuple[Sequence[Staged], ShardCounts]:
    """Stage the documents of one task."""
    staging = _Staging(spec, workers, attempt)
    try:
        for batch in batches:
            staging.store(batch)
        return staging.finish()
    except BaseException:
        staging.discard()
        raise


class _Staging:
    """Stages documents of a binding, and counts them."""

    def __init__(self, spec: _TaskSpec, workers: Workers, attempt: SparkAttempt) -> None:
        self._spec = spec
        self._stager = workers.stager(attempt)
        self._counted = ShardCounts(binding=spec.target.binding, shard=attempt.shard)

    def store(self, batch: pyarrow.RecordBatch) -> None:
        if not batch.num_rows:
            return
        spec, so_far = self._spec, self._counted
        deleted = None if spec.deleted is None else batch.column(spec.deleted)
        rows = project(batch, spec.root, spec.target.fields, deleted=deleted)
        self._stager.store(spec.target.binding, rows)
        top = pc.max(batch.column(_PACKED)).as_py() if _PACKED in batch.schema.names else None
        self._counted = replace(
            so_far,
            stored_docs=so_far.stored_docs + rows.num_rows,
            max_key=top if so_far.max_key is None else max(so_far.max_key, top or b""),
        )

    def finish(self) -> tuple[Sequence[Staged], ShardCounts]:
        staged = self._stager.finish()
        return staged, replace(self._counted, stored_bytes=sum(unit.bytes for unit in staged))

    def discard(self) -> None:
        self._stager.discard()


def _row(
    counted: ShardCounts, staged: Sequence[Staged], error: PenstockError | None = None
) -> pyarrow.RecordBatch:
    """Return a task's manifest as a result row."""
    places = json.dumps([[s.binding, s.shard, s.at, s.rows, s.bytes] for s in staged])
    values = [
        counted.binding,
        counted.shard,
        places,
        counted.stored_docs,
        counted.stored_bytes,
        counted.max_key,
        None if error is None else error_to_text(error),
    ]
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(
        [pa.array([v], kind.type) for v, kind in zip(values, _MANIFEST_ARROW, strict=True)],
        schema=_MANIFEST_ARROW,
    )
    return batch


def _manifest(
    jobs: Sequence[BindingJob], rows: Sequence[Mapping[str, Any]], shards: int
) -> StagedManifest:
    """Check and merge a job's result: a row for each shard of a binding, or several of a lone one.

    A binding that Spark found to have no rows ran no task, and has none at all.
    """
    for row in rows:
        if row["error"] is not None:
            raise error_from_text(row["error"])
    by_shard: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_shard.setdefault((row["binding"], row["shard"]), []).append(row)
    heard = {binding for binding, _ in by_shard}
    known = sorted(job.binding for job in jobs)
    expected = [
        (binding, shard) for binding in known if binding in heard for shard in range(shards)
    ]
    found = sorted(by_shard)
    if found != expected or (shards > 1 and len(rows) != len(found)):
        raise Bug(f"a job returned {len(rows)} manifests of {found}, and not of {expected}")
    return StagedManifest(
        staged=tuple(
            Staged(binding=binding, shard=shard, at=at, rows=count, bytes=size)
            for place in found
            for row in by_shard[place]
            for binding, shard, at, count, size in json.loads(row["staged"])
        ),
        counted=tuple(
            ShardCounts(
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
