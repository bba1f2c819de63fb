"""SPARK: from documents that transforms publish to documents that journals hold.

    published documents ─ checked ─ combined by key ─ redacted ─ staged as fragments ─ reports

The documents are columns, laid out by the write schema of the derived collection, and perhaps a
column that orders those of one key. All of it is native, unless a schema needs the validator, the
reference reducer or the reference redaction; staging writes fragments, in the leader if there are
not too many documents, or else in Python workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.errors import PenstockError
from penstock.journal.frames import map_rows
from penstock.journal.staging import FragmentStaging, StagedFragments, stage_fragments
from penstock.native.collect import arriving_batches
from penstock.native.redact import redact_rows
from penstock.native.reduce import FrameReduction, flag_column
from penstock.native.reduce import key_columns as reduction_keys
from penstock.native.spark_types import spark_schema
from penstock.native.validate import check_rows
from penstock.runtime.derive.target import DerivedTarget
from penstock.runtime.spark_tasks import (
    Batches,
    DocumentFailed,
    SchemaRefusal,
    check_documents,
    error_from_text,
    error_to_text,
    job_errors,
    quoted,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pa: Any = pyarrow

ORDER: Final = "$ord"
"""The column that orders documents of one key; no member of a document is called so by a lambda."""

KEY_HASH: Final = "$key"
"""The column by which repeated keys are found."""

_REPORT: Final = t.StructType(
    [
        t.StructField("staged", t.BinaryType()),
        t.StructField("hashes", t.BinaryType()),
        t.StructField("error", t.StringType()),
    ]
)
_REPORT_ARROW: Final = pa.schema(
    [("staged", pa.binary()), ("hashes", pa.binary()), ("error", pa.utf8())]
)


class RepeatedKeys(Exception):
    """Several documents of one key were staged, in no order."""


class Publishing:
    """The way of published documents, for all transactions of a session.

    Expressions are made for the first frame and kept, as `FrameReduction` has it.
    """

    def __init__(self, target: DerivedTarget) -> None:
        self._target = target
        self._names = [field.name for field in spark_schema(target.root).fields]
        self._reductions: dict[bool, FrameReduction] = {}

    def documents(self, published: DataFrame, *, few: bool) -> DataFrame:
        """Return documents that journals can hold, from those that transforms published.

        With `few`, all of them are in one partition. Those of one key are in one partition, in
        their order, where that matters.
        """
        target = self._target
        ordered = ORDER in published.columns
        frame = check_documents(published, target.schema, target.root)
        if few:
            frame = frame.coalesce(1)
        if target.combines:
            frame = self._combined(frame, ordered=ordered)
        elif ordered:
            frame = self._in_order(frame, few=few)
        return self._stored(frame)

    def apart(self, published: DataFrame) -> DataFrame:
        """Return documents that journals can hold, and `KEY_HASH`: in no order, and as many.

        That is enough if no two are of one key, and spares an exchange of all of them.
        """
        target = self._target
        frame = check_documents(published, target.schema, target.root)
        keyed = frame.withColumn(KEY_HASH, f.xxhash64(*reduction_keys(target.plan)))
        return self._stored(keyed, KEY_HASH)

    def _stored(self, frame: DataFrame, *others: str) -> DataFrame:
        """Return the columns of stored documents, redacted, and then others."""
        target = self._target
        frame = frame.select(
            *(f.col(quoted(name)) for name in (*self._names, *others) if name in frame.columns)
        )
        absent = [x for x in spark_schema(target.root).fields if x.name not in frame.columns]
        if absent:
            frame = frame.withColumns({x.name: f.lit(None).cast(x.dataType) for x in absent})
            frame = frame.select(*(f.col(quoted(name)) for name in (*self._names, *others)))
        return redact_rows(frame, target.schema, target.root, target.salt)

    def _combined(self, frame: DataFrame, *, ordered: bool) -> DataFrame:
        plan = self._target.plan
        if ordered not in self._reductions:
            order = f.col(quoted(ORDER)) if ordered else f.lit(0)
            self._reductions[ordered] = FrameReduction(plan, order=[order], full=False)
        combined = self._reductions[ordered].apply(frame)
        if plan.apart is None:
            return combined
        run = flag_column(plan, full=False)
        return combined.sortWithinPartitions(*reduction_keys(plan), f.col(quoted(run)))

    def _in_order(self, frame: DataFrame, *, few: bool) -> DataFrame:
        keys = reduction_keys(self._target.plan)
        placed = frame if few else frame.repartition(*keys)
        return placed.sortWithinPartitions(*keys, f.col(quoted(ORDER)))

    @contextlib.contextmanager
    def explaining(self, published: Callable[[], DataFrame]) -> Iterator[None]:
        """Around a job: raise which published document is refused, and why, if one is."""
        try:
            yield
        except SchemaRefusal:
            if (refused := self._refused(published())) is not None:
                raise refused from None
            raise

    def _refused(self, published: DataFrame) -> DocumentFailed | None:
        target = self._target
        keys = [column.alias(f"k{at}") for at, column in enumerate(reduction_keys(target.plan))]
        names = [f"k{at}" for at in range(len(keys))]
        frame = published.select("*", *keys)
        _, refusals = check_rows(frame, target.schema, target.root, keep=names)
        with job_errors():
            found = refusals.limit(1).collect()
        if not found:
            return None
        row = found[0]
        return DocumentFailed(
            f"a document published to {target.spec.name} is refused: "
            f"{row['pointer'] or '/'}: {row['message']}",
            why=f"it does not fit the collection's schema; its key is {[row[n] for n in names]}",
            fix="correct the lambda, or let the schema admit it",
        )


def stage(documents: DataFrame, staging: FragmentStaging) -> tuple[StagedFragments, ...]:
    """Run a Spark job that stages documents as fragments, and return its reports. Blocks.

    Raises `RepeatedKeys` if the documents have a `KEY_HASH`, and two of them the same.
    """
    with job_errors():
        rows = map_rows(documents, _stager(staging), _REPORT).toArrow().to_pylist()
    for row in rows:
        if row["error"] is not None:
            raise error_from_text(row["error"])
    _check_distinct([row["hashes"] for row in rows if row["hashes"] is not None])
    reports = (StagedFragments.decode(row["staged"]) for row in rows)
    return tuple(report for report in reports if report.fragments)


def stage_here(documents: DataFrame, staging: FragmentStaging) -> tuple[StagedFragments, ...]:
    """Run a Spark job whose documents come here, and stage them as fragments. Blocks.

    Writing fragments takes a tenth of what it takes to send documents to Python workers. A task has
    all of its documents in memory for a moment. Raises `RepeatedKeys` as `stage` does.
    """
    hashes: list[bytes] = []
    with job_errors(), arriving_batches(documents) as batches:
        staged = stage_fragments(staging, _hashed(batches, hashes))
    _check_distinct(hashes)
    return (staged,) if staged.fragments else ()


def without_hashes(batches: Iterable[pyarrow.RecordBatch]) -> list[pyarrow.RecordBatch]:
    """Return documents without their `KEY_HASH`; raises `RepeatedKeys` if two have the same."""
    hashes: list[bytes] = []
    kept = list(_hashed(batches, hashes))
    _check_distinct(hashes)
    return kept


def _hashed(
    batches: Iterable[pyarrow.RecordBatch], hashes: list[bytes]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield documents without their `KEY_HASH`, if they have one, which goes to `hashes`."""
    for batch in batches:
        if KEY_HASH in batch.schema.names:
            hashes.append(batch.column(KEY_HASH).to_numpy().astype(np.int64).tobytes())
            yield batch.drop_columns([KEY_HASH])
        else:
            yield batch


def _check_distinct(hashes: list[bytes]) -> None:
    if hashes:
        every = np.concatenate([np.frombuffer(some, np.int64) for some in hashes])
        every.sort()
        if (every[1:] == every[:-1]).any():
            raise RepeatedKeys


def _stager(staging: FragmentStaging) -> Callable[[Batches], Batches]:
    def run(batches: Batches) -> Batches:
        hashes: list[bytes] = []
        try:
            staged = stage_fragments(staging, _hashed(batches, hashes))
            yield _report(staged.encode(), b"".join(hashes) if hashes else None, None)
        except PenstockError as error:
            # As data: the job has not failed, the blob store has, and trying again is not Spark's.
            yield _report(None, None, error)

    return run


def _report(
    staged: bytes | None, hashes: bytes | None, error: PenstockError | None
) -> pyarrow.RecordBatch:
    """Return the report of one task as a result row."""
    values = [staged, hashes, None if error is None else error_to_text(error)]
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(
        [pa.array([v], kind.type) for v, kind in zip(values, _REPORT_ARROW, strict=True)],
        schema=_REPORT_ARROW,
    )
    return batch
