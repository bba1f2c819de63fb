"""Validation on Spark: documents that do not fit become data, and never stop those that do.

Two roads, one meaning:

- `read_json`: raw JSON text, from files or connectors. Parsed, validated, redacted and laid out in
  one pass of Arrow batches. Not with Spark's own JSON functions: `from_json` silently reads NULL
  for 1.0 at an integer, `parse_json` refuses repeated members and rounds long integers.
- `check_rows`: rows that are columns already, such as the output of a derivation. By a compiled
  expression where that is exact, else by the validator over the rows' JSON text. The rare row that
  is refused is explained by the validator either way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql import types as spark

from penstock.garbage import gc_paused
from penstock.model.columns import Column, columns, unstorable
from penstock.model.json_order import Json
from penstock.model.redact import has_redactions, redact
from penstock.model.schema import CompiledSchema, compiled, read_documents
from penstock.model.violations import Violation, is_hidden
from penstock.native import sql
from penstock.native.arrow import to_json, to_struct
from penstock.native.predicate import predicate
from penstock.native.spark_types import spark_schema

DOCUMENT: Final = "document"
REFUSALS: Final = "refusals"
FILE: Final = "file"
LINE: Final = "line"
TEXT: Final = "text"

_REFUSAL: Final = spark.StructType(
    [
        spark.StructField("pointer", spark.StringType()),
        spark.StructField("schema_pointer", spark.StringType()),
        spark.StructField("message", spark.StringType()),
    ]
)
_REFUSAL_ARROW: Final = pa.list_(
    pa.field("element", pa.struct([pa.field(f.name, pa.utf8()) for f in _REFUSAL.fields]))
)

_PATH: Final = (
    "url_decode(replace(regexp_replace(_metadata.file_path, '^file:/+', '/'), '+', '%2B'))"
)
"""A local file as people write it; Spark has a URI, in which a plus is a plus and not a space."""

Batches = Iterator[pa.RecordBatch]


def json_lines(session: SparkSession, *paths: str) -> DataFrame:
    """The lines of text files that are not blank, as `file`, `line` (from 1) and `text`.

    A file is one row while its lines are counted, so this is for files that fit an executor.
    """
    whole = session.read.text(list(paths), wholetext=True)
    lines = whole.select(
        F.expr(_PATH).alias(FILE),
        F.posexplode(F.split("value", "\r?\n")).alias("at", TEXT),
    )
    numbered = lines.select(FILE, (F.col("at") + 1).cast("long").alias(LINE), TEXT)
    return numbered.where(F.trim(TEXT) != "")


def read_json(lines: DataFrame, schema: CompiledSchema, *, salt: bytes = b"") -> DataFrame:
    """Each text with its `document`, laid out in columns, or with its `refusals`; one is NULL.

    `lines` has the JSON in `text`; its other columns are kept. `salt` is for `redact: sha256`.
    """
    kept = [field for field in lines.schema.fields if field.name != TEXT]
    root = columns(schema.shape)
    made = spark.StructType(
        [
            *kept,
            spark.StructField(DOCUMENT, spark_schema(root)),
            spark.StructField(REFUSALS, spark.ArrayType(_REFUSAL)),
        ]
    )
    reader = _Reader(schema=schema.text, names=tuple(f.name for f in kept), salt=salt)
    return lines.mapInArrow(reader, made)


def documents(read: DataFrame) -> DataFrame:
    """The valid documents of `read_json`, as their columns."""
    return read.where(F.col(REFUSALS).isNull()).select(f"{DOCUMENT}.*")


def refusals(read: DataFrame) -> DataFrame:
    """Everything that `read_json` refused: where it came from, pointer and message, row by row."""
    kept = [F.col(name) for name in read.columns if name not in (DOCUMENT, REFUSALS)]
    exploded = read.where(F.col(REFUSALS).isNotNull()).select(*kept, F.explode(REFUSALS).alias("r"))
    return exploded.select(*(c for c in read.columns if c not in (DOCUMENT, REFUSALS)), "r.*")


def check_rows(
    rows: DataFrame, schema: CompiledSchema, root: Column, *, keep: Sequence[str] = ()
) -> tuple[DataFrame, DataFrame]:
    """Rows laid out as `root`, parted into those that are valid and the refusals of the others.

    `keep` names columns that say where a row comes from; refusals have them, too.
    """
    refused = spark.StructType([*(rows.schema[name] for name in keep), *_REFUSAL.fields])
    explain = _Explainer(schema=schema.text, root=root, keep=tuple(keep))
    valid = predicate(schema.schema, root)
    if valid is None:
        keeper = _Keeper(schema=schema.text, root=root)
        return rows.mapInArrow(keeper, rows.schema), rows.mapInArrow(explain, refused)
    refusable = rows.where(sql.negated(valid))
    return rows.where(valid), refusable.mapInArrow(explain, refused)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Turns batches of text into batches of documents and refusals, in a Spark task."""

    schema: str
    names: tuple[str, ...]
    salt: bytes

    def __call__(self, batches: Batches) -> Batches:
        schema = compiled(self.schema)
        root = columns(schema.shape)
        for batch in batches:
            with gc_paused():
                made = self._read(batch, schema, root)
            yield made

    def _read(self, batch: pa.RecordBatch, schema: CompiledSchema, root: Column) -> pa.RecordBatch:
        hiding = has_redactions(schema.shape)
        found: list[dict[str, Json] | None] = []
        wrong: list[list[dict[str, str]] | None] = []
        texts = batch.column(TEXT).cast(pa.binary()).to_pylist()
        for document, violations in read_documents(schema, (text or b"" for text in texts)):
            if violations:
                found.append(None)
                wrong.append([dataclasses.asdict(v) for v in violations])
            else:
                kept = redact(document, schema.shape, self.salt) if hiding else document
                found.append(cast(dict[str, Json], kept))  # as the schema's root is an object
                wrong.append(None)
        struct = _laid_out(found, wrong, schema, root)
        arrays = [batch.column(name) for name in self.names]
        arrays += [struct, pa.array(wrong, _REFUSAL_ARROW)]
        return pa.RecordBatch.from_arrays(arrays, names=[*self.names, DOCUMENT, REFUSALS])


def _laid_out(
    found: list[dict[str, Json] | None],
    wrong: list[list[dict[str, str]] | None],
    schema: CompiledSchema,
    root: Column,
) -> Any:  # noqa: ANN401 - an Arrow array
    """Valid documents as columns; those with a number that no column holds join the refused."""
    try:
        return to_struct(found, root)
    except (OverflowError, pa.ArrowInvalid):
        for row, document in enumerate(found):
            misfit = None if document is None else unstorable(document, root)
            if misfit is not None:
                found[row] = None
                wrong[row] = [dataclasses.asdict(_out_of_range(schema, *misfit))]
        return to_struct(found, root)


def _out_of_range(schema: CompiledSchema, at: str, why: str) -> Violation:
    if is_hidden(schema.shape, at):
        why = "a number, which is secret, does not fit its column"
    hint = "declare minimum and maximum, or a string with format: integer"
    return Violation(pointer=at, schema_pointer="", message=f"{why} ({hint}) [E-INT-RANGE]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Keeper:
    """Keeps the rows that are valid."""

    schema: str
    root: Column

    def __call__(self, batches: Batches) -> Batches:
        schema = compiled(self.schema)
        for batch in batches:
            verdicts = read_documents(schema, to_json(batch, self.root))
            yield batch.filter(pa.array([not wrong for _, wrong in verdicts], pa.bool_()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Explainer:
    """Says what is wrong with the rows that are not valid."""

    schema: str
    root: Column
    keep: tuple[str, ...]

    def __call__(self, batches: Batches) -> Batches:
        schema = compiled(self.schema)
        for batch in batches:
            verdicts = read_documents(schema, to_json(batch, self.root))
            found = [(row, v) for row, (_, wrong) in enumerate(verdicts) for v in wrong]
            at = pa.array([row for row, _ in found], pa.int64())
            arrays = [batch.column(name).take(at) for name in self.keep]
            arrays += [
                pa.array([getattr(v, field) for _, v in found], pa.utf8())
                for field in _REFUSAL.fieldNames()
            ]
            names = [*self.keep, *_REFUSAL.fieldNames()]
            yield pa.RecordBatch.from_arrays(arrays, names=names)
