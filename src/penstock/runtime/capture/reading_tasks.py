"""SPARK: the tasks of a read: from what a source has to fragments, in one pass.

Every task reads its partition of the source's frame, takes the documents in, and stages those that
are valid. Its result is one row: what it staged, and what it refused. Nothing of it counts before
the leader adopts it.
"""

from __future__ import annotations

import functools
import itertools
import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow
from pyspark import TaskContext
from pyspark.sql import types as t

from penstock.errors import Bug, PenstockError
from penstock.journal.frames import map_rows
from penstock.journal.schemas import layout
from penstock.journal.staging import FragmentStaging, StagedFragments, Stager
from penstock.model.clock import Clock
from penstock.model.observed import Observed, widen
from penstock.model.schema import compiled
from penstock.native.arrow import to_arrow, to_json
from penstock.native.take import Taker
from penstock.runtime import ops
from penstock.runtime.capture.jobs import (
    PREVIEWED_MAX,
    REFUSALS_SHOWN,
    observed,
    quarantined,
    refusal_lines,
    take,
)
from penstock.runtime.connector.capture import SparkRead
from penstock.runtime.spark_tasks import Batches, error_from_text, error_to_text, job_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.runtime.capture.build import CapturedBinding

pa: Any = pyarrow

_REPORT: Final = t.StructType(
    [
        t.StructField("staged", t.ArrayType(t.BinaryType())),
        t.StructField("facts", t.StringType()),
        t.StructField("error", t.StringType()),
    ]
)
_REPORT_ARROW: Final = pa.schema(
    [("staged", pa.list_(pa.binary())), ("facts", pa.utf8()), ("error", pa.utf8())]
)

_CROWDED: Final = "crowded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingTask:
    """Everything that the tasks of a read need; picklable."""

    read: SparkRead
    binding: CapturedBinding
    staging: FragmentStaging | None
    """None in a preview."""
    quarantine: FragmentStaging | None
    at: Clock
    """When the transaction closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """The outcome of a read; nobody sees it yet."""

    staged: tuple[StagedFragments, ...]
    docs: int
    bytes: int
    refused: int
    lines: tuple[str, ...]
    """About the first documents that were refused."""
    shown: tuple[str, ...]
    """In a preview, the first documents."""
    seen: Observed | None
    """The schema of the documents, if it is inferred."""


def run_read(spark: SparkSession, task: ReadingTask) -> ReadReport:
    """Run a Spark job that reads and stages, and return its report. Blocks."""
    rows = _run(spark, task, in_order=True)
    if rows is None:
        # More rows than a partition was thought to have: then one task reads all, in order.
        rows = _run(spark, task, in_order=False)
    if rows is None:
        raise Bug("one task for all partitions is too crowded")
    staged = [StagedFragments.decode(data) for row in rows for data in row["staged"]]
    facts = [json.loads(row["facts"]) for row in rows]
    made = [fragment for each in staged for some in each.fragments.values() for fragment in some]
    captured = sum(fact["docs"] for fact in facts)
    seen = [fact["seen"] for fact in facts if fact["seen"] is not None]
    return ReadReport(
        staged=tuple(each for each in staged if each.fragments),
        docs=captured,
        bytes=sum(fragment.bytes for fragment in made),
        refused=sum(fact["refused"] for fact in facts),
        seen=functools.reduce(widen, seen) if seen else None,
        lines=tuple(itertools.chain.from_iterable(fact["lines"] for fact in facts))[
            :REFUSALS_SHOWN
        ],
        shown=tuple(itertools.chain.from_iterable(fact["shown"] for fact in facts))[:PREVIEWED_MAX],
    )


def _run(spark: SparkSession, task: ReadingTask, *, in_order: bool) -> list[dict[str, Any]] | None:
    """The result rows; None if a task was too crowded."""
    frame = task.read.frame(spark)
    if not in_order:
        frame = frame.coalesce(1)
    worker = _worker(task, task.read.rows_max if in_order else None)
    with job_errors():
        rows: list[dict[str, Any]] = map_rows(frame, worker, _REPORT).toArrow().to_pylist()
    for row in rows:
        if row["error"] == _CROWDED:
            return None
    for row in rows:
        if row["error"] is not None:
            raise error_from_text(row["error"])
    return rows


def _worker(task: ReadingTask, rows_max: tuple[int, ...] | None) -> Any:  # noqa: ANN401
    def run(batches: Batches) -> Batches:
        try:
            staged, facts = _stage(task, rows_max, batches)
            yield _report(staged, json.dumps(facts), None)
        except _Crowded:
            yield _report([], None, _CROWDED)
        except PenstockError as error:
            # As data: the job has not failed, the source or the blob store has.
            yield _report([], None, error_to_text(error))

    return run


class _Crowded(Exception):
    """A partition has more rows than its source said."""


def _stage(
    task: ReadingTask, rows_max: tuple[int, ...] | None, batches: Batches
) -> tuple[list[bytes], dict[str, Any]]:
    binding = task.binding
    taker = Taker(compiled(binding.collection.write_schema.text), salt=binding.salt)
    refused_root = layout(ops.QUARANTINE.write_schema.text)
    staging, room = _placed(task.staging, rows_max)
    facts: dict[str, Any] = {"docs": 0, "refused": 0, "lines": [], "shown": [], "seen": None}
    with ExitStack() as stack:
        stager = None if staging is None else stack.enter_context(Stager(staging))
        aside = None
        if task.quarantine is not None:
            aside = stack.enter_context(Stager(task.quarantine))
        for documents in task.read.documents(batches):
            taken = take(taker, documents)
            facts["docs"] += taken.rows.num_rows
            if room is not None and facts["docs"] > room:
                raise _Crowded
            if binding.infers and (some := observed(taken, taker)) is not None:
                facts["seen"] = some if facts["seen"] is None else widen(facts["seen"], some)
            if stager is not None:
                stager.write(taken.rows)
            elif len(facts["shown"]) < PREVIEWED_MAX:
                facts["shown"] += to_json(taken.rows.slice(0, PREVIEWED_MAX), taker.root)
            if taken.refused or documents.broken:
                facts["refused"] += len(taken.refused) + len(documents.broken)
                facts["lines"] += refusal_lines(taken, documents)
                if binding.on_invalid == "stop" and facts["refused"] >= REFUSALS_SHOWN:
                    break
                if aside is not None:
                    aside.write(
                        to_arrow(quarantined(binding, taken, documents, task.at), refused_root)
                    )
        done = [each.finish().encode() for each in (stager, aside) if each is not None]
    facts["lines"] = facts["lines"][:REFUSALS_SHOWN]
    return done, facts


def _placed(
    staging: FragmentStaging | None, rows_max: tuple[int, ...] | None
) -> tuple[FragmentStaging | None, int | None]:
    """The staging of this task's partition: its clocks come after those of partitions before it."""
    context = TaskContext.get()
    if staging is None or rows_max is None or context is None:
        return staging, None
    at = context.partitionId()
    before = sum(rows_max[:at])
    return replace(staging, since=Clock(staging.since + before)), rows_max[at]


def _report(staged: list[bytes], facts: str | None, error: str | None) -> pyarrow.RecordBatch:
    """Return the report of one task as a result row."""
    values = [staged, facts, error]
    batch: pyarrow.RecordBatch = pa.RecordBatch.from_arrays(
        [pa.array([v], kind.type) for v, kind in zip(values, _REPORT_ARROW, strict=True)],
        schema=_REPORT_ARROW,
    )
    return batch
