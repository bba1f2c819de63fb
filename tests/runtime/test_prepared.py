"""Queries that are planned once: each run must be of its own rows, whatever ran before."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from penstock.native.collect import LentFrame, collect_batches
from penstock.runtime import prepared
from penstock.runtime.prepared import (
    ALIKE_MAX,
    QUERIES_MAX,
    SLOT_BYTES,
    Queries,
    close_queries,
    open_queries,
    slot_bytes,
    write_padded,
)

pa: Any = pyarrow
pq: Any = pyarrow.parquet

SCHEMA = t.StructType([t.StructField("key", t.LongType()), t.StructField("text", t.StringType())])


def rows(*pairs: tuple[int, str | None]) -> pyarrow.Table:
    table: pyarrow.Table = pa.table(
        {
            "key": pa.array([key for key, _ in pairs], pa.int64()),
            "text": pa.array([text for _, text in pairs], pa.utf8()),
        }
    )
    return table


def counted(frames: Mapping[int, DataFrame]) -> DataFrame:
    parts = [
        frame.coalesce(1).groupBy("key").agg(f.count("*").alias("n"), f.max("text").alias("last"))
        for frame in frames.values()
    ]
    return parts[0] if len(parts) == 1 else parts[0].union(parts[1]).coalesce(1)


def collected(frame: LentFrame) -> pyarrow.Table:
    with collect_batches(frame) as batches:
        kept = list(batches)
    table: pyarrow.Table = pa.Table.from_batches(kept, None if kept else pa.schema([]))
    return table


def found(table: pyarrow.Table) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())


@pytest.mark.spark
def test_a_query_runs_on_the_rows_that_it_is_given_and_is_planned_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    queries, planned = Queries(spark, tmp_path), []

    def combined(frames: Mapping[int, DataFrame]) -> DataFrame:
        planned.append(sorted(frames))
        return counted(frames)

    def collect(*pairs: tuple[int, str | None]) -> list[tuple[object, ...]]:
        return found(collected(queries.lend({0: rows(*pairs)}, {0: SCHEMA}, combined, key="a")))

    assert collect((1, "a"), (1, "b"), (2, None)) == [(1, 2, "b"), (2, 1, None)]
    assert collect((3, "c")) == [(3, 1, "c")]
    assert collect() == []
    assert collect(*((n, "x" * n) for n in range(50))) == [(n, 1, "x" * n) for n in range(50)]
    assert planned == [[0]]


@pytest.mark.spark
def test_a_query_with_an_exchange_is_planned_every_time(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark keeps the rows of an exchange, and would answer with them again."""
    queries = Queries(spark, tmp_path)

    def grouped(frames: Mapping[int, DataFrame]) -> DataFrame:
        return frames[0].groupBy("key").agg(f.count("*").alias("n"))

    for key in (1, 2, 3):
        frame = queries.lend({0: rows((key, "a"))}, {0: SCHEMA}, grouped, key="a")
        assert found(collected(frame)) == [(key, 1)]
    assert list(tmp_path.iterdir()) == [], "files of earlier ones are removed"


@pytest.mark.spark
def test_tasks_that_run_at_the_same_time_share_few_queries(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the answer to its own rows, whoever ran the query before."""
    monkeypatch.setattr(prepared, "WAIT_S", 60.0)  # on a machine that does much else
    queries, planned, wrong = Queries(spark, tmp_path), [], []

    def combined(frames: Mapping[int, DataFrame]) -> DataFrame:
        planned.append(1)
        return counted(frames)

    def run(task: int) -> None:
        for turn in range(5):
            key = 100 * task + turn
            lent = queries.lend({0: rows((key, "a"))}, {0: SCHEMA}, combined, key="alike")
            if found(collected(lent)) != [(key, 1, "a")]:
                wrong.append(key)

    threads = [threading.Thread(target=run, args=[task]) for task in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 <= len(planned) <= ALIKE_MAX


@pytest.mark.spark
def test_a_query_that_failed_is_not_lent_again(spark: SparkSession, tmp_path: Path) -> None:
    queries, planned = Queries(spark, tmp_path), []

    def combined(frames: Mapping[int, DataFrame]) -> DataFrame:
        planned.append(1)
        return counted(frames)

    for attempt in range(3):
        lent = queries.lend({0: rows((1, "a"))}, {0: SCHEMA}, combined, key="a")
        with pytest.raises(RuntimeError, match="stop"), lent:
            raise RuntimeError("stop")
        assert len(planned) == attempt + 1
    assert found(collected(queries.lend({0: rows((1, "a"))}, {0: SCHEMA}, combined, key="a")))
    assert len(list(tmp_path.glob("*.parquet"))) == 1


@pytest.mark.spark
def test_frames_with_other_schemas_are_other_queries(spark: SparkSession, tmp_path: Path) -> None:
    queries = Queries(spark, tmp_path)
    wider = t.StructType([*SCHEMA.fields, t.StructField("more", t.LongType())])
    for schema in (SCHEMA, wider, SCHEMA):
        lent = queries.lend({0: rows((1, "a"))}, {0: schema}, lambda given: given[0], key="a")
        assert len(collected(lent).column_names) == len(schema.fields)


@pytest.mark.spark
def test_tasks_of_a_process_have_the_same_queries_until_the_last_has_ended(
    spark: SparkSession,
) -> None:
    one, other = open_queries(spark), open_queries(spark)
    assert one is other
    assert found(collected(one.lend({0: rows((1, "a"))}, {0: SCHEMA}, counted, key="a")))
    directory = one._directory
    close_queries(one)
    assert list(directory.iterdir())
    close_queries(other)
    assert not directory.exists()
    again = open_queries(spark)
    assert again is not one
    close_queries(again)


@pytest.mark.spark
def test_several_bindings_are_one_query(spark: SparkSession, tmp_path: Path) -> None:
    queries = Queries(spark, tmp_path)
    schemas = {0: SCHEMA, 4: SCHEMA}
    for turn in range(3):
        given_ = {0: rows((turn, "a")), 4: rows((turn, "b"), (9, "c"))}
        answer = found(collected(queries.lend(given_, schemas, counted, key="both")))
        assert answer == sorted([(turn, 1, "a"), (turn, 1, "b"), (9, 1, "c")])


@pytest.mark.spark
def test_more_rows_than_a_slot_holds_get_a_larger_one(spark: SparkSession, tmp_path: Path) -> None:
    queries = Queries(spark, tmp_path)
    few, many = rows((1, "a")), rows(*((n, "y" * 100) for n in range(2_000)))
    for table, want in ((few, 1), (many, 2_000), (few, 1), (many, 2_000)):
        answer = collected(queries.lend({0: table}, {0: SCHEMA}, counted, key="a"))
        assert answer.num_rows == want
    assert sorted(p.stat().st_size for p in tmp_path.glob("*.parquet")) == [
        SLOT_BYTES,
        4 * SLOT_BYTES,
    ]


@pytest.mark.spark
def test_queries_that_were_not_used_for_long_are_forgotten(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "QUERIES_MAX", 2)
    queries = Queries(spark, tmp_path)
    for key in ("a", "b", "a", "c", "b", "a"):
        assert found(
            collected(queries.lend({0: rows((1, key))}, {0: SCHEMA}, counted, key=key))
        ) == [(1, 1, key)]
        assert len(list(tmp_path.glob("*.parquet"))) <= 2
    assert QUERIES_MAX > 2


@pytest.mark.spark
def test_nested_columns_and_names_with_dots_survive(spark: SparkSession, tmp_path: Path) -> None:
    schema = t.StructType(
        [
            t.StructField("a.b", t.DecimalType(38, 0)),
            t.StructField("in", t.StructType([t.StructField("x", t.ArrayType(t.DoubleType()))])),
            t.StructField("map", t.MapType(t.StringType(), t.LongType())),
            t.StructField("raw", t.BinaryType()),
            t.StructField("yes", t.BooleanType()),
            t.StructField("flags", t.ShortType()),
        ]
    )
    kinds = pa.schema(
        [
            ("a.b", pa.decimal128(38, 0)),
            ("in", pa.struct([("x", pa.list_(pa.float64()))])),
            ("map", pa.map_(pa.utf8(), pa.int64())),
            ("raw", pa.binary()),
            ("yes", pa.bool_()),
            ("flags", pa.int16()),
        ]
    )
    queries = Queries(spark, tmp_path / "a [b] {c} %20 d")
    for turn in range(2):
        made = [
            {"a.b": Decimal(10**30 + turn), "in": {"x": [0.5, None]}, "map": [("k", turn)],
             "raw": b"\0", "yes": True, "flags": turn},
            {"a.b": None, "in": None, "map": None, "raw": None, "yes": None, "flags": None},
        ]  # fmt: skip
        table = pa.Table.from_pylist(made, kinds)
        answer = collected(queries.lend({0: table}, {0: schema}, lambda frames: frames[0], key="a"))
        assert answer.to_pylist() == table.to_pylist()


@given(st.integers(0, 1 << 24))
def test_a_slot_has_room_and_little_more(needed: int) -> None:
    size = slot_bytes(needed)
    assert needed <= size
    assert size == SLOT_BYTES or size < 4 * needed


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 5000))
def test_a_padded_file_is_as_long_as_was_asked_and_the_same_to_readers(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], more: int
) -> None:
    table = rows(*((key, str(key)) for key in keys))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    written = sink.getvalue()
    path = tmp_path_factory.getbasetemp() / "padded.parquet"
    write_padded(path, written, written.size + more)
    assert path.stat().st_size == written.size + more
    assert pq.read_table(path).equals(table)
