"""SPARK: rows of a frame at the driver, without having all of them in memory.

`DataFrame.toArrow` gathers everything in a list before it returns. `arriving_batches` are read as
tasks finish, and taken at once. If it is not known what becomes of them, `collect_batches` keeps
them as they are up to a limit; the rest goes to a file, which is compared with what was written
before any of it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow
from pyspark.errors.exceptions.captured import unwrap_spark_exception
from pyspark.sql.pandas.serializers import ArrowStreamSerializer
from pyspark.util import _load_from_socket

from penstock.errors import PenstockError, Unavailable
from penstock.native.direct import SmallFrame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pa: Any = pyarrow

_STEP_BYTES: Final = 4 << 20
MEMORY_BYTES: Final = 16 << 20
"""Rows up to this stay in memory, as Arrow has them."""


LentFrame: TypeAlias = "AbstractContextManager[DataFrame | SmallFrame]"
"""A frame that others collect too, and is the caller's for a while (`runtime.prepared`)."""


@contextlib.contextmanager
def collect_batches(
    frame: DataFrame | SmallFrame | LentFrame,
) -> Iterator[Iterator[pyarrow.RecordBatch]]:
    """Run a job, and yield its rows, in no order; they are there until the block ends.

    A small frame needs no job, mostly. One that is lent is given back before the block begins.
    """
    with contextlib.ExitStack() as files:
        if isinstance(frame, AbstractContextManager):
            with frame as lent:
                batches = _collect(lent, files)
        else:
            batches = _collect(frame, files)
        yield batches


def _collect(
    frame: DataFrame | SmallFrame, files: contextlib.ExitStack
) -> Iterator[pyarrow.RecordBatch]:
    if isinstance(frame, SmallFrame):
        if (batches := frame.evaluate()) is not None:
            return iter(batches)
        frame = frame.frame
    kept: list[pyarrow.RecordBatch] = []
    kept_bytes = 0
    file: _OverflowFile | None = None
    with arriving_batches(frame) as arriving:
        for batch in arriving:
            kept_bytes += batch.nbytes
            if kept_bytes <= MEMORY_BYTES:
                kept.append(batch)
                continue
            if file is None:
                overflow = files.enter_context(_temporary_file())
                file = _OverflowFile(overflow, batch.schema)
            file.write(batch)
    return iter(kept) if file is None else itertools.chain(kept, file.read())


@contextlib.contextmanager
def _temporary_file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


class _OverflowFile:
    """Batches in a temporary file."""

    def __init__(self, file: IO[bytes], schema: pyarrow.Schema) -> None:
        self._file = file
        self._summed = _SummedFile(file)
        self._writer = pa.ipc.new_stream(self._summed, schema)

    def write(self, batch: pyarrow.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def read(self) -> Iterator[pyarrow.RecordBatch]:
        """Everything that was written, after comparing it."""
        self._writer.close()
        self._file.seek(0)
        if _sum_of(self._file) != self._summed.sum:
            raise Unavailable(
                "rows in a temporary file are not what was written",
                where=tempfile.gettempdir(),
                why="their checksum is wrong",
                fix="check this disk, or point TMPDIR elsewhere",
            )
        self._file.seek(0)
        return iter(pa.ipc.open_stream(self._file))


@contextlib.contextmanager
def arriving_batches(frame: DataFrame) -> Iterator[Iterator[pyarrow.RecordBatch]]:
    """Run a job, and yield its rows: whole partitions, in the order in which their tasks finish.

    They are to be taken at once: Spark's scheduler, which all jobs share, waits until they are.
    """
    # PySpark has this within `toArrow` only.
    port, secret, server = frame._jdf.collectAsArrowToPython()  # noqa: SLF001
    refused = False
    try:
        with _load_from_socket((port, secret), _Unordered()) as batches:
            yield batches
    except PenstockError:
        refused = True  # the caller takes no more rows, and the job fails for that
        raise
    finally:
        with contextlib.suppress(Exception) if refused else unwrap_spark_exception():
            server.getResult()  # what the job failed with is raised here


class _Unordered(ArrowStreamSerializer):
    """Reads batches as they come, and passes over the order in which they should have."""

    def load_stream(self, stream: IO[bytes]) -> Iterator[pyarrow.RecordBatch]:
        yield from super().load_stream(stream)
        stream.read()  # or an error, which the job's result has too


class _SummedFile:
    """A file that is written from its begin to its end, and the CRC-32 of what was."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = 0

    def write(self, data: bytes) -> int:
        self.sum = zlib.crc32(data, self.sum)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()


def _sum_of(file: IO[bytes]) -> int:
    """The CRC-32 of what a file has from here on."""
    found = 0
    while some := file.read(_STEP_BYTES):
        found = zlib.crc32(some, found)
    return found
