"""SPARK: what the jobs of every kind of task share.

**Retries are harmless.** A task may run twice, at once, or die anywhere: everything it makes
carries the name of its attempt (`JobIdentity.attempt`), and only the manifests of winning attempts,
which travel as result rows, are ever used.

**Errors are data.** A Spark error says where a job failed. `encode_errors` in a task and
`job_errors` around the job carry what went wrong, in Penstock's words.

**Between two jobs** of one transaction, documents lie in a handoff directory (`write_handoff`,
`read_handoff`), which executors on any machine must reach.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pyarrow
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from penstock.errors import Bug, PenstockError, UserError
from penstock.journal.evolve import UnreadableDocument
from penstock.journal.frames import map_rows
from penstock.journal.scan import VERIFY_PAGES
from penstock.model.clock import NEVER, Clock, Producer
from penstock.model.columns import Column
from penstock.model.schema import CompiledSchema, compiled, read_documents
from penstock.native import sql
from penstock.native.arrow import to_json
from penstock.native.predicate import predicate
from penstock.native.reduce import reduction_errors
from penstock.runtime.connector.common import ConnectorError, SparkAttempt

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame, SparkSession

pa: Any = pyarrow

Batches = Iterator[pyarrow.RecordBatch]

Documents = Mapping[int, "DataFrame"]
"""Documents by binding. Nothing is read until a job asks for them."""


# --------------------------------------------------------------------------------------- attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """One attempt at a job; with shard and task attempt, the name of everything the job makes."""

    task: str
    epoch: int
    transaction: Clock
    job_attempt: int = 0

    def attempt(self, binding: int, shard: int, attempt: int) -> SparkAttempt:
        return SparkAttempt(
            task=self.task,
            epoch=self.epoch,
            transaction=self.transaction,
            job=f"{self.job_attempt}b{binding}",
            shard=shard,
            attempt=attempt,
        )


def shard_of_task(shards: int) -> tuple[int, int]:
    """Return the shard that this Spark task works for, and the number of its attempt.

    A union appends the partitions of its parts, or merges them: the partition of a part is the
    remainder either way. A single shard has any number of tasks.
    """
    context = TaskContext.get()
    if context is None:
        raise Bug("this runs in a Spark task only")
    return context.partitionId() % shards, context.taskAttemptId()


# ----------------------------------------------------------------------------------------- errors

_MARK: Final = "\N{INVISIBLE SEPARATOR}penstock\N{INVISIBLE SEPARATOR}"
"""Encloses an error that a task sends through Spark's own."""

_REFUSED: Final = f"{_MARK}refused{_MARK}"
_UNREADABLE: Final = f"{UnreadableDocument.__module__}.{UnreadableDocument.__name__}"


class SchemaRefusal(Exception):
    """A job met a document that its binding's schema refuses; `refusals.find` says which."""


def check_documents(frame: DataFrame, schema: CompiledSchema, root: Column) -> DataFrame:
    """Return the same documents; a job over them stops at the first that the schema refuses.

    By an expression where that is exact, else by the validator in Python.
    """
    valid = predicate(schema.schema, root)
    if valid is None:
        return map_rows(frame, _checker(schema.text, root), frame.schema)
    refuse = f"CAST(raise_error({sql.text(_REFUSED)}) AS BOOLEAN)"
    return frame.where(f.expr(f"CASE WHEN {valid} THEN true ELSE {refuse} END"))


def _checker(schema: str, root: Column) -> Callable[[Batches], Batches]:
    def check(batches: Batches) -> Batches:
        for batch in batches:
            if any(wrong for _, wrong in read_documents(compiled(schema), to_json(batch, root))):
                raise RuntimeError(_REFUSED)
            yield batch

    return check


@contextlib.contextmanager
def encode_errors() -> Iterator[None]:
    """In a task: send an endpoint's error through Spark as text, for `job_errors` to find."""
    try:
        yield
    except PenstockError as error:
        raise_in_task(error)


def raise_in_task(error: PenstockError, document: list[int | None] | None = None) -> NoReturn:
    """In a task: raise an error for `job_errors` to find.

    `document` says which document it is about: binding, producer and clock.
    """
    raise RuntimeError(f"{_MARK}{error_to_text(error, document)}{_MARK}") from None


class DocumentFailed(UserError):
    """The code of a task failed at a document, or published one that is refused."""

    binding: int = -1
    producer: Producer | None = None
    """Of the document; None if no single one is to blame."""
    clock: Clock = NEVER


@contextlib.contextmanager
def job_errors() -> Iterator[None]:
    """Around a job: raise what went wrong in a task, rather than Spark's account of it."""
    try:
        with reduction_errors():
            yield
    except (PySparkException, Py4JJavaError) as error:
        text = str(error)
        if _REFUSED in text or _UNREADABLE in text:
            raise SchemaRefusal from error
        parts = text.split(_MARK)
        if len(parts) < 3:
            raise
        raise error_from_text(parts[1]) from None


def error_to_text(error: PenstockError, document: list[int | None] | None = None) -> str:
    transient = isinstance(error, ConnectorError) and error.transient
    return json.dumps([error.what, error.where, error.why, error.fix, transient, document])


def error_from_text(text: str) -> PenstockError:
    what, where, why, fix, transient, document = json.loads(text)
    if document is None:
        return ConnectorError(what, where=where, why=why, fix=fix, transient=transient)
    failed = DocumentFailed(what, where=where, why=why, fix=fix)
    failed.binding, producer, failed.clock = document
    failed.producer = None if producer is None else Producer(producer)
    return failed


# ------------------------------------------------------------------------------- several bindings


def union(documents: Documents) -> DataFrame:
    """Return the documents of all bindings as one frame, which `split_by_binding` reverses."""
    return next(iter(documents.values())) if len(documents) == 1 else union_as_structs(documents)


def split_by_binding(
    batch: pyarrow.RecordBatch, bindings: Sequence[int]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of each binding, from a batch of what `union` made."""
    if len(bindings) == 1:
        yield batch
        return
    for binding in bindings:
        structs: Any = batch.column(_name(binding))
        yield pa.RecordBatch.from_struct_array(structs.filter(structs.is_valid()))


def union_as_structs(documents: Documents) -> DataFrame:
    """Return several frames as one: each is a column of structs, NULL in the others' rows."""
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


def _nullable(frame: DataFrame) -> list[SparkColumn]:
    """Return the frame's columns, none of them declared to have a value in every row.

    Arrow refuses a struct that is NULL around such a column.
    """
    columns = {field.name: frame[quoted(field.name)] for field in frame.schema.fields}
    return [
        columns[field.name]
        if field.nullable
        else f.nullif(columns[field.name], f.lit(None).cast(field.dataType)).alias(field.name)
        for field in frame.schema.fields
    ]


def quoted(name: str) -> str:
    """Return a column's name as Spark's parser takes it."""
    return "`{}`".format(name.replace("`", "``"))


def _name(binding: int) -> str:
    return f"b{binding}"


# ------------------------------------------------------------------------------- from job to job


def write_handoff(documents: Documents, path: str) -> None:
    """Run a job that writes the documents of all bindings, for another job to continue with."""
    with job_errors():
        union_as_structs(documents).write.parquet(path)


def read_handoff(spark: SparkSession, documents: Documents, path: str) -> Documents:
    """Return what `write_handoff` wrote, as frames that look like those it was given."""
    reader = spark.read.schema(union_as_structs(documents).schema).option(VERIFY_PAGES, "true")
    kept = reader.parquet(path)
    return {
        binding: kept.where(f.col(_name(binding)).isNotNull()).select(f"{_name(binding)}.*")
        for binding in documents
    }
