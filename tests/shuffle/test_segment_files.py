"""Files of segments without Spark: what a task writes, refuses and reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.clock import Clock, Producer
from penstock.shuffle.segment_files import (
    BATCH_BYTES,
    CorruptSegment,
    Read,
    Wanted,
    _Refused,
    _Rows,
    _rows_of,
    _write_file,
)
from penstock.shuffle.segments import Clocks
from shuffle.staging import ONE, THREE, TWO

pa: Any = pyarrow

Row = tuple[int, int, int, int]
"""Priority, adjusted clock, producer, binding."""


def batch(rows: Sequence[Row], *, shard: int | None = 3, text: str = "") -> pyarrow.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    names = ("_priority", "_adj_clock", "_producer", "_binding")
    integers = {
        name: pa.array(column, pa.int64()) for name, column in zip(names, columns, strict=True)
    }
    made: pyarrow.RecordBatch = pa.RecordBatch.from_pydict(
        {
            "_shard": pa.array([shard] * len(rows), pa.int32()),
            **integers,
            "_clock": integers["_adj_clock"],
            "d0": pa.array([text] * len(rows)),
        }
    )
    return made


def clocks(*values: int) -> list[Row]:
    return [(0, value, int(ONE), 0) for value in values]


# ---------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 1, 1, 0), (0, 2, 1, 0)], id="by adjusted clock"),
        pytest.param([(9, 2, 1, 0), (-1, 1, 1, 0)], id="the higher priority first"),
        pytest.param([(0, 1, 1, 1), (0, 1, 2, 0)], id="then by producer"),
        pytest.param([(0, 1, 1, 0), (0, 1, 1, 1)], id="then by binding"),
    ],
)
def test_processing_order(rows: list[Row]) -> None:
    first, second = rows
    assert [each.num_rows for each in _Rows(3).checked([batch(rows)])] == [2]
    assert len(list(_Rows(3).checked([batch([first]), batch([]), batch([second])]))) == 2
    for batches in ([batch([second, first])], [batch([second]), batch([first])]):
        with pytest.raises(_Refused, match="not in processing order"):
            list(_Rows(3).checked(batches))


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        pytest.param([batch(clocks(1, 1))], "there twice", id="a document twice"),
        pytest.param([batch(clocks(1)), batch(clocks(1))], "there twice", id="in two batches"),
        pytest.param([batch(clocks(1), shard=2)], "another shard", id="of another shard"),
        pytest.param([batch(clocks(1), shard=None)], "_shard is NULL", id="of no shard"),
    ],
)
def test_what_must_not_be_staged(batches: list[pyarrow.RecordBatch], why: str) -> None:
    with pytest.raises(_Refused, match=why):
        list(_Rows(3).checked(batches))


def test_ranges_of_clocks_by_binding_and_producer() -> None:
    rows = _Rows(3)
    list(
        rows.checked(
            [
                batch([(0, 10, int(ONE), 0), (0, 11, int(TWO), 65535), (0, 12, int(ONE), 0)]),
                batch([(0, 13, int(ONE), 1), (0, 14, int(ONE), 0)]),
            ]
        )
    )
    assert rows.count == 5
    assert rows.ranges() == [
        {"binding": 0, "producer": int(ONE), "first": 10, "last": 14},
        {"binding": 1, "producer": int(ONE), "first": 13, "last": 13},
        {"binding": 65535, "producer": int(TWO), "first": 11, "last": 11},
    ]


def test_large_documents_are_written_in_small_batches(tmp_path: Path) -> None:
    large = batch(clocks(*range(100)), text="x" * (BATCH_BYTES // 10))
    path = tmp_path / "segment"
    sum_ = _write_file(path, _Rows(3).checked([large]))
    read = list(_rows_of(Read(path=str(path), sum=sum_, wanted=None), large.schema))
    assert pa.Table.from_batches(read).equals(pa.Table.from_batches([large]))
    assert max(each.nbytes for each in read) <= BATCH_BYTES


def test_a_task_holds_a_batch_at_a_time(tmp_path: Path) -> None:
    """A hundred batches of a megabyte, of which no more than a few are ever in memory."""
    before, most = pa.total_allocated_bytes(), 0

    def watched() -> Iterator[pyarrow.RecordBatch]:
        nonlocal most
        for number in range(100):
            yield batch(clocks(*range(100 * number, 100 * number + 100)), text="x" * 10_000)
            most = max(most, pa.total_allocated_bytes() - before)

    path, rows = tmp_path / "segment", 0
    sum_ = _write_file(path, _Rows(3).checked(watched()))
    for each in _rows_of(Read(path=str(path), sum=sum_, wanted=None), batch([]).schema):
        rows += each.num_rows
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == 10_000
    assert most < 10 << 20


def test_no_bit_of_a_segment_can_flip_unnoticed(tmp_path: Path) -> None:
    rows = batch(clocks(*range(50)), text="abc")
    path = tmp_path / "segment"
    read = Read(path=str(path), sum=_write_file(path, _Rows(3).checked([rows])), wanted=None)
    data = path.read_bytes()
    for position in range(0, len(data), 5):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(CorruptSegment, match=str(path)):
            list(_rows_of(read, rows.schema))
    path.write_bytes(data)
    assert sum(each.num_rows for each in _rows_of(read, rows.schema)) == 50


def test_no_rows_no_file(tmp_path: Path) -> None:
    _write_file(tmp_path / "segment", iter(()))
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"other")
    with pytest.raises(FileExistsError):
        _write_file(path, iter([batch(clocks(1))]))


def test_an_attempt_that_fails_takes_its_file_along(tmp_path: Path) -> None:
    def failing() -> Iterator[pyarrow.RecordBatch]:
        yield batch(clocks(1))
        raise OSError("the other side is gone")

    with pytest.raises(OSError, match="is gone"):
        _write_file(tmp_path / "segment", failing())
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- reading

SOURCES = st.tuples(st.sampled_from([0, 1, 65535]), st.sampled_from([ONE, TWO, THREE]))


@st.composite
def intervals(draw: st.DrawFn) -> list[Clocks]:
    """Of each source, intervals that do not overlap."""
    found: list[Clocks] = []
    for binding, producer in draw(st.lists(SOURCES, min_size=1, unique=True)):
        ends = sorted(draw(st.sets(st.integers(1, 30), min_size=2, max_size=8)))
        found += [
            Clocks(binding=binding, producer=producer, first=Clock(first), last=Clock(last))
            for first, last in zip(ends[::2], ends[1::2], strict=False)
        ]
    return draw(st.permutations(found))


@given(intervals())
def test_a_filter_keeps_the_rows_of_its_intervals(some: list[Clocks]) -> None:
    rows = [
        (binding, producer, clock)
        for binding in (0, 1, 7, 65535)
        for producer in (ONE, TWO, THREE, Producer((1 << 48) - 1))
        for clock in range(32)
    ]
    codes = np.array([binding << 48 | producer for binding, producer, _ in rows], np.uint64)
    found = Wanted.of(some).mask(codes, np.array([clock for _, _, clock in rows], np.int64))
    assert found.tolist() == [
        any(
            (binding, producer) == each.source and each.first <= clock <= each.last for each in some
        )
        for binding, producer, clock in rows
    ]
