"""Fragments and Spark: it reads what we write, and writes what we read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.journal.blobs import open_blobs
from penstock.journal.codec import decode_page, encode_page
from penstock.journal.fragments import FragmentLayout, FragmentWriter, read_fragment
from penstock.journal.frames import adapt_frame, frame_schema, map_rows
from penstock.journal.rows import stamp_rows, to_lines
from penstock.journal.state import Blob, Fragment
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.columns import columns
from penstock.model.infer import infer
from penstock.model.json_order import canonical_json
from penstock.native.arrow import to_arrow
from support.fragments import write_fragments

pytestmark = pytest.mark.spark

OLD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "a.b`c": {"type": ["string", "null"]},
        "big": {"type": "integer", "maximum": 2**70},
        "never": {"type": "integer"},
        "counts": {"type": "array", "items": {"type": ["integer", "null"]}},
        "in": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}},
        "list": {"type": "array", "items": {"type": ["number", "null"]}},
        "named": {"type": "object", "additionalProperties": {"type": "integer"}},
        "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "text": {},
    },
    "required": ["id"],
}
NEW: dict[str, Any] = {
    **OLD,
    "properties": {
        "id": {"type": "number"},
        "big": {},
        "counts": {"type": "array", "items": {"type": ["integer", "null"]}},
        "in": {"type": "object", "properties": {"w": {"type": "string"}, "x": {}}},
        "list": {"type": "array", "items": {}},
        "map": {"type": "object", "additionalProperties": {}},
        "more": {"type": "string"},
        "never": {"type": "integer"},
        "named": {"type": "object", "additionalProperties": {"type": "integer"}},
        "text": {},
    },
}
WRITTEN, WANTED = columns(infer(OLD)), columns(infer(NEW))
LAYOUT = FragmentLayout(schema="s", root=WRITTEN, key=("/id",))
PRODUCER = Producer(Producer.MULTICAST | 7)


def document(i: int) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "id": i,
        "a.b`c": None if i % 2 else "é",
        "big": 2**65 + i,
        "in": {"x": None if i % 3 else i, "w": "found"},
        "list": [i, None, 0.5],
        "counts": [-i, None, 2**62 - i][: i % 4],
        "named": {str(n): i * n for n in range(i % 3)},
        "map": {"t": True, "f": False},
        "text": [None, {"z": 1.0}] if i % 4 else None,
        "more": f"unknown {i}",
    }
    return {name: value for at, (name, value) in enumerate(whole.items()) if at == 0 or i % 7 != at}


DOCUMENTS = [document(i) for i in range(500)]
TEXTS = [canonical_json(d) for d in DOCUMENTS]


def lines(table: pa.Table, root: Any) -> list[str]:  # noqa: ANN401
    return [line for batch in table.to_batches() for line in to_lines(batch, root)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents in one object."""
    rows = stamp_rows(
        to_arrow(DOCUMENTS, WRITTEN),
        WRITTEN,
        producer=PRODUCER,
        first_clock=Clock(10),
        flags=Flag.CONTINUE_TXN,
    )
    root = tmp_path_factory.mktemp("stored")
    with FragmentWriter(open_blobs(str(root)), "c", LAYOUT, "a") as writer:
        writer.write(rows)
        writer._write_group()
        fragment = writer.finish()
    assert fragment is not None
    assert isinstance(fragment.at, Blob)
    return root / fragment.at.path


def test_spark_reads_fragments_of_this_layout_and_of_an_older_one(
    spark: SparkSession, stored: Path
) -> None:
    frame = spark.read.schema(frame_schema(WRITTEN)).parquet(str(stored))
    read = frame.toArrow()
    assert read["_clock"].to_pylist() == list(range(10, 510))
    assert set(read["_producer"].to_pylist()) == {int(PRODUCER)}
    assert lines(read, WRITTEN) == TEXTS
    assert adapt_frame(frame, WRITTEN, WRITTEN) is frame
    newer = adapt_frame(frame, WRITTEN, WANTED).toArrow()
    assert newer["_clock"].to_pylist() == list(range(10, 510))
    assert lines(newer, WANTED) == TEXTS


def test_tasks_write_fragments_and_what_they_made_comes_back(
    spark: SparkSession, stored: Path, tmp_path: Path
) -> None:
    blobs, layout = open_blobs(str(tmp_path)), replace(LAYOUT, length_bytes=1)
    frame = spark.read.schema(frame_schema(WRITTEN)).parquet(str(stored))

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        made = list(write_fragments(blobs, "acme/orders", layout, batches, "task-0"))
        manifest = encode_page(made)
        yield pa.RecordBatch.from_arrays([pa.array([manifest], pa.binary())], ["manifest"])

    (row,) = map_rows(frame, write, "manifest binary").collect()
    made = [record for record in decode_page(row.manifest) if isinstance(record, Fragment)]
    assert sum(fragment.rows for fragment in made) == 500
    assert all(run.increasing for fragment in made for run in fragment.runs)
    read = [batch for fragment in made for batch in read_fragment(blobs, fragment, WRITTEN)]
    assert lines(pa.Table.from_batches(read), WRITTEN) == TEXTS
