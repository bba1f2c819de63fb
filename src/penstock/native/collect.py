"""SPARK: rows of a frame at the driver, without having all of them in memory.

`DataFrame.toArrow` gathers everything in a list before it returns. Here batches are read as tasks
finish, and put down: in memory up to a limit, beyond it in a file. They are taken from Spark at
once, whatever becomes of them later, because Spark's scheduler, which all jobs share, waits for
whoever takes results. What was in a file is compared with what was written before it is used.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow
from pyspark.errors.exceptions.captured import unwrap_spark_exception
from pyspark.sql.pandas.serializers import ArrowStreamSerializer
from pyspark.util import _load_from_socket

from penstock.errors import Unavailable
from penstock.native.summed import SummedFile, sum_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pa: Any = pyarrow

MEMORY_BYTES: Final = 16 << 20
"""Rows up to this stay in memory."""


@contextlib.contextmanager
def collected(frame: DataFrame) -> Iterator[Iterator[pyarrow.RecordBatch]]:
    """Run a job, and give its rows, in no order; for the length of the block."""
    with tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES) as rows:
        writer: Any = None
        summed = SummedFile(rows)
        for batch in _arriving(frame):
            if writer is None:
                writer = pa.ipc.new_stream(summed, batch.schema)
            writer.write_batch(batch)
        if writer is None:
            yield iter(())
            return
        writer.close()
        if rows.tell() > MEMORY_BYTES:
            rows.seek(0)
            if sum_of(rows) != summed.sum:
                raise Unavailable(
                    "rows that were put aside in a file are not what was written",
                    where=tempfile.gettempdir(),
                    why="their checksum is wrong",
                    fix="check this disk, or point TMPDIR elsewhere",
                )
        rows.seek(0)
        yield iter(pa.ipc.open_stream(rows))


def _arriving(frame: DataFrame) -> Iterator[pyarrow.RecordBatch]:
    """Batches as Spark sends them: whole partitions, in the order in which their tasks finish."""
    # PySpark has this within `toArrow` only.
    port, secret, server = frame._jdf.collectAsArrowToPython()  # noqa: SLF001
    try:
        with _load_from_socket((port, secret), _Unordered()) as batches:
            yield from batches
    finally:
        with unwrap_spark_exception():
            server.getResult()  # what the job failed with is raised here


class _Unordered(ArrowStreamSerializer):
    """Reads batches as they come, and passes over the order in which they should have."""

    def load_stream(self, stream: IO[bytes]) -> Iterator[pyarrow.RecordBatch]:
        yield from super().load_stream(stream)
        stream.read()  # or an error, which the job's result has too
