"""SPARK: the file of a segment, as tasks write and read it.

A task writes the rows of its shard as they pass by, and holds no more than a batch of them. What it
must not write it reports, and the round fails: rows of another shard, rows out of order, and a
document that came twice, which a strict order does not have either.

Arrow IPC with Zstandard: Parquet of the same size takes about three times the time to write and
twice to read, and its column statistics have nothing to add to what a manifest has.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.errors import Bug, PenstockError
from penstock.model.clock import Clock, Producer
from penstock.native.summed import SummedFile, sum_of
from penstock.shuffle.segments import Clocks, Segment
from penstock.shuffle.slice import ADJUSTED_CLOCK, BINDING, CLOCK, PRIORITY, PRODUCER, SHARD

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import types as t

    Batches = Iterator[pyarrow.RecordBatch]
    Integers = NDArray[np.int64]
    Codes = NDArray[np.uint64]

ORDER: Final = (PRIORITY, ADJUSTED_CLOCK, CLOCK, PRODUCER, BINDING)
"""In which rows are processed: priorities descend, the rest ascends. Total for rows of a shard."""

BATCH_BYTES: Final = 4 << 20
"""About what a batch of a segment takes in memory: a task that reads one holds no more."""

_pa: Any = pyarrow  # the published stubs lack the constructors used here

# ----------------------------------------------------------------------------------------- writing

REPORT: Final = (
    "shard INT, path STRING, rows BIGINT, bytes BIGINT, sum BIGINT, "
    "ranges ARRAY<STRUCT<binding INT, producer BIGINT, first BIGINT, last BIGINT>>, refusal STRING"
)
_REPORT_ARROW: Final = _pa.schema(
    [
        ("shard", _pa.int32()),
        ("path", _pa.string()),
        ("rows", _pa.int64()),
        ("bytes", _pa.int64()),
        ("sum", _pa.int64()),
        (
            "ranges",
            _pa.list_(
                _pa.struct(
                    [
                        ("binding", _pa.int32()),
                        ("producer", _pa.int64()),
                        ("first", _pa.int64()),
                        ("last", _pa.int64()),
                    ]
                )
            ),
        ),
        ("refusal", _pa.string()),
    ]
)


def reported(row: t.Row, lsn: int) -> Segment:
    """What a task has reported of its shard; raises what it refused."""
    if row.refusal is not None:
        raise Bug(f"round {lsn} was not staged: {row.refusal}", where=f"shard {row.shard}")
    return Segment(
        shard=row.shard,
        path=row.path,
        rows=row.rows,
        bytes=row.bytes,
        sum=row["sum"],
        ranges=tuple(
            Clocks(
                binding=each.binding,
                producer=Producer(each.producer),
                first=Clock(each["first"]),
                last=Clock(each.last),
            )
            for each in row.ranges
        ),
    )


def segment_writer(directory: str) -> Callable[[Batches], Batches]:
    """What a task of a round does: write the rows of its shard to a file, and report it."""

    def write(batches: Batches) -> Batches:
        task = TaskContext.get()
        assert task is not None  # noqa: S101 - it runs in one
        shard = task.partitionId()
        report: dict[str, object] = {"shard": shard, "rows": 0, "bytes": 0, "sum": 0, "ranges": []}
        path = Path(directory) / f"{shard}-{uuid.uuid4().hex}.arrow"
        rows = _Rows(shard)
        try:
            sum_ = _write_file(path, rows.checked(batches))
        except _Refused as refused:
            report["refusal"] = str(refused)
            for _ in batches:  # Spark is still sending
                pass
        else:
            if rows.count:
                report |= {
                    "path": f"{path.parent.name}/{path.name}",
                    "rows": rows.count,
                    "bytes": path.stat().st_size,
                    "sum": sum_,
                    "ranges": rows.ranges(),
                }
        yield _pa.RecordBatch.from_pylist([report], schema=_REPORT_ARROW)

    return write


class _Refused(Exception):
    """Rows that must not be staged; reported as data, since trying again would not help."""


def _write_file(path: Path, batches: Batches) -> int:
    """A file of these batches, which is on disk when this returns; none, if there are none.

    What comes back is its sum.
    """
    if (first := next(batches, None)) is None:
        return 0
    options = _pa.ipc.IpcWriteOptions(compression="zstd")
    try:
        with path.open("xb") as file:
            summing = SummedFile(file)
            with _pa.ipc.new_file(summing, first.schema, options=options) as writer:
                writer.write_batch(first)
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())  # a disk that fails or is full must say so before the report
            return summing.sum
    except BaseException:
        path.unlink(missing_ok=True)
        raise


class _Rows:
    """The rows of one shard of a round as they pass: checked, counted, and cut to size."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._last: Integers | None = None
        self._ranges: dict[int, tuple[int, int]] = {}
        self.count = 0

    def checked(self, batches: Iterable[pyarrow.RecordBatch]) -> Batches:
        for batch in batches:
            if not batch.num_rows:
                continue
            self._check_shard(batch)
            self._check_order(batch)
            self._measure(batch)
            self.count += batch.num_rows
            rows_max = max(1, batch.num_rows * BATCH_BYTES // max(batch.nbytes, 1))
            for row in range(0, batch.num_rows, rows_max):
                yield batch.slice(row, rows_max)

    def ranges(self) -> list[dict[str, int]]:
        """By binding and producer, the first clock and the last."""
        return [
            {"binding": code >> 48, "producer": code & _PRODUCER, "first": first, "last": last}
            for code, (first, last) in sorted(self._ranges.items())
        ]

    def _check_shard(self, batch: pyarrow.RecordBatch) -> None:
        """Spark would send a shard that is missing to the first task, and one too many around."""
        if not (_integers(batch, SHARD) == self._shard).all():
            raise _Refused("it has rows of another shard")

    def _check_order(self, batch: pyarrow.RecordBatch) -> None:
        """Strictly: the order is total, so of two equal rows one is there twice."""
        columns = np.stack([_integers(batch, name) for name in ORDER])
        columns[0] = -columns[0]
        if self._last is not None:
            columns = np.concatenate([self._last, columns], axis=1)
        less = np.zeros(columns.shape[1] - 1, bool)
        equal = ~less
        for column in columns:
            less |= equal & (column[:-1] < column[1:])
            equal &= column[:-1] == column[1:]
        if equal.any():
            raise _Refused("a document is there twice")
        if not less.all():
            raise _Refused("its rows are not in processing order")
        self._last = columns[:, -1:]

    def _measure(self, batch: pyarrow.RecordBatch) -> None:
        codes, clocks = _codes(batch), _integers(batch, CLOCK)
        order = np.argsort(codes, kind="stable")
        found, starts = np.unique(codes[order], return_index=True)
        firsts = np.minimum.reduceat(clocks[order], starts)
        lasts = np.maximum.reduceat(clocks[order], starts)
        for code, first, last in zip(found.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            low, high = self._ranges.get(code, (first, last))
            self._ranges[code] = min(low, first), max(high, last)


_PRODUCER: Final = (1 << 48) - 1


def _integers(batch: pyarrow.RecordBatch, name: str) -> Integers:
    column: Any = batch.column(name)
    if column.null_count:
        raise _Refused(f"{name} is NULL")
    integers: Integers = column.to_numpy().astype(np.int64)
    return integers


def _codes(batch: pyarrow.RecordBatch) -> Codes:
    """Binding and producer of each row as one integer: they have 16 and 48 bits."""
    binding = _integers(batch, BINDING).astype(np.uint64)
    return binding << np.uint64(48) | _integers(batch, PRODUCER).astype(np.uint64)


# ----------------------------------------------------------------------------------------- reading


class CorruptSegment(PenstockError):
    """A file of staged rows is not what was written. Nothing is lost: they are read once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Clocks by source, as arrays: one entry for each interval, in order of source and clock."""

    codes: Codes
    firsts: Integers
    lasts: Integers

    @classmethod
    def of(cls, all_of: Iterable[Clocks]) -> Self:
        ordered = sorted(
            (each.binding << 48 | each.producer, each.first, each.last) for each in all_of
        )
        return cls(
            codes=np.array([code for code, _, _ in ordered], np.uint64),
            firsts=np.array([first for _, first, _ in ordered], np.int64),
            lasts=np.array([last for _, _, last in ordered], np.int64),
        )

    def mask(self, codes: Codes, clocks: Integers) -> NDArray[np.bool_]:
        """Which rows lie in an interval.

        The only candidate is the last interval of the row's source that begins at or before its
        clock. Searching for both at once takes numbers that order as (source, begin) do.
        """
        sources, begins = np.unique(self.codes), np.unique(self.firsts)
        width = len(begins) + 1
        mine = np.searchsorted(sources, self.codes) * width
        mine += np.searchsorted(begins, self.firsts, side="right")
        source = np.minimum(np.searchsorted(sources, codes), len(sources) - 1)
        place = source * width + np.searchsorted(begins, clocks, side="right")
        at = np.searchsorted(mine, place, side="right") - 1
        found: NDArray[np.bool_] = (
            (at >= 0) & (self.codes[at] == codes) & (clocks <= self.lasts[at])
        )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A file to read in a task, and what is wanted of it."""

    path: str
    sum: int
    wanted: Wanted | None


def segment_reader(
    by_shard: Mapping[int, Sequence[Read]], schema: t.StructType
) -> Callable[[Batches], Batches]:
    """What a task of a scan does: read the segments of its shard, one after the other."""
    columns: pyarrow.Schema = to_arrow_schema(schema)

    def read(batches: Batches) -> Batches:
        for batch in batches:
            for shard in batch.column(0).to_numpy().tolist():
                for each in by_shard.get(shard, ()):
                    yield from _rows_of(each, columns)

    return read


def _check(read: Read) -> None:
    """Compare a file with the sum of what was written to it.

    Before it is decoded: Arrow believes what a file says of itself.
    """
    with Path(read.path).open("rb") as file:
        found = sum_of(file)
    if found != read.sum:
        raise CorruptSegment(
            f"a segment is damaged: {read.path}",
            why="its checksum is not that of what was written",
            fix="check this disk; the task goes on from its last transaction when it is run again",
        )


def _rows_of(read: Read, columns: pyarrow.Schema) -> Batches:
    _check(read)
    with _pa.OSFile(read.path) as file, _pa.ipc.open_file(file) as segment:
        for number in range(segment.num_record_batches):
            batch = segment.get_batch(number)
            if read.wanted is not None:
                mask = read.wanted.mask(_codes(batch), _integers(batch, CLOCK))
                batch = batch.filter(_pa.array(mask))
            if batch.num_rows:
                yield _arranged(batch, columns)


def _arranged(batch: pyarrow.RecordBatch, columns: pyarrow.Schema) -> pyarrow.RecordBatch:
    """The columns of all rounds; those that this one lacks are NULL."""
    arrays = [
        batch.column(column.name)
        if column.name in batch.schema.names
        else _pa.nulls(batch.num_rows, column.type)
        for column in columns
    ]
    arranged: pyarrow.RecordBatch = _pa.RecordBatch.from_arrays(arrays, names=columns.names)
    return arranged
