"""Rows of a sequence: a few are kept in memory, many in a file that Spark tasks read.

The frames are written to the file as they came. A part of it is some frames in a row of one stream,
and one Spark task reads a part.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow

from penstock.connectors import file_previews
from penstock.connectors.python_source.frames import Frame, FrameKind
from penstock.runtime.connector.capture import (
    GIVEN_BYTES_MAX,
    Documents,
    Given,
    SourceBinding,
    SparkRead,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pa: Any = pyarrow

PART_BYTES: Final = 16 << 20
"""About the size of what one Spark task reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One frame of a file."""

    offset: int
    bytes: int
    kind: FrameKind
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledRows:
    """Rows in a file, for Spark to read (`SparkRead`)."""

    binding: int
    path: str
    stream: str
    read_at: str
    parts: tuple[tuple[Piece, ...], ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for part in self.parts for piece in part)

    @property
    def rows_max(self) -> tuple[int, ...] | None:
        return tuple(sum(piece.rows for piece in part) + 1 for part in self.parts)

    def frame(self, spark: SparkSession) -> DataFrame:
        count = len(self.parts)
        return spark.range(0, count, 1, numPartitions=count).toDF("part")

    def documents(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Documents]:
        numbers: list[Any] = [at for batch in batches for at in batch.column(0).to_pylist()]
        with Path(self.path).open("rb") as file:
            for piece in (piece for at in numbers for piece in self.parts[at]):
                file.seek(piece.offset)
                payload = file.read(piece.bytes)
                yield from documents_of(piece.kind, payload, self.stream, self.read_at)


def documents_of(kind: FrameKind, payload: bytes, stream: str, read_at: str) -> Iterator[Documents]:
    """The rows of a frame."""

    def origin(at: int) -> str:
        return f"stream {stream}, a row read at {read_at}"

    if kind is FrameKind.ROWS:
        texts = payload.split(b"\n")
        meta = _meta(stream, read_at, len(texts))
        yield Documents(texts=texts, meta=meta, origin=origin)
        return
    with pa.ipc.open_stream(pa.py_buffer(payload)) as found:
        for batch in found:
            meta = _meta(stream, read_at, batch.num_rows)
            yield Documents(columns=batch, meta=meta, origin=origin)


_META: Final = pa.schema([("source", pa.struct([("stream", pa.utf8()), ("readAt", pa.utf8())]))])


def _meta(stream: str, read_at: str, rows: int) -> pyarrow.RecordBatch:
    row = {"source": {"stream": stream, "readAt": read_at}}
    made: pyarrow.RecordBatch = pa.RecordBatch.from_pylist([row] * rows, schema=_META)
    return made


def count_rows(frame: Frame) -> int:
    """The number of rows of a frame."""
    if frame.kind is FrameKind.ROWS:
        return frame.payload.count(b"\n") + 1
    with pa.ipc.open_stream(pa.py_buffer(frame.payload)) as found:
        return sum(batch.num_rows for batch in found)


@dataclass(slots=True)
class Gathered:
    """The rows since the last state."""

    directory: Path
    number: int
    """Of the sequence."""
    bindings: dict[str, SourceBinding]
    """By stream."""
    read_at: str
    kept: list[Frame] = field(default_factory=list)
    kept_bytes: int = 0
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """In the file, by stream."""
    file: IO[bytes] | None = None

    @property
    def path(self) -> Path:
        return self.directory / f"{self.number}.rows"

    @property
    def is_empty(self) -> bool:
        return not self.kept and not self.pieces

    def add(self, frame: Frame) -> None:
        """Take the rows of a frame; to the file, if there are many already."""
        self.kept.append(frame)
        self.kept_bytes += len(frame.payload)
        if self.kept_bytes > GIVEN_BYTES_MAX:
            self._spool()

    def _spool(self) -> None:
        if self.file is None:
            self.file = self.path.open("wb")
        for frame in self.kept:
            piece = Piece(
                offset=self.file.tell(),
                bytes=len(frame.payload),
                kind=frame.kind,
                rows=count_rows(frame),
            )
            self.file.write(frame.payload)
            self.pieces.setdefault(frame.stream, []).append(piece)
        self.kept, self.kept_bytes = [], 0

    def finish(self) -> tuple[tuple[Given, ...], tuple[SparkRead, ...]]:
        """Return all rows: in memory, or in the file, since their order counts."""
        if self.file is None:
            return tuple(self._given()), ()
        self._spool()
        self.file.close()
        reads = tuple(
            SpooledRows(
                binding=self.bindings[stream].index,
                path=str(self.path),
                stream=stream,
                read_at=self.read_at,
                parts=tuple(_parts(pieces)),
            )
            for stream, pieces in self.pieces.items()
        )
        return (), reads

    def _given(self) -> Iterator[Given]:
        for frame in self.kept:
            size = len(frame.payload)
            for some in documents_of(frame.kind, frame.payload, frame.stream, self.read_at):
                yield Given(binding=self.bindings[frame.stream].index, documents=some, bytes=size)

    def discard(self) -> None:
        """Remove the file."""
        if self.file is not None:
            self.file.close()
            self.path.unlink(missing_ok=True)


def _parts(pieces: list[Piece]) -> Iterator[tuple[Piece, ...]]:
    part: list[Piece] = []
    size = 0
    for piece in pieces:
        if part and size + piece.bytes > PART_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(piece)
        size += piece.bytes
    yield tuple(part)


# ------------------------------------------------------------------------------- the directory


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Yield a directory for files of this session; removes what dead ones left behind."""
    with file_previews.beside(
        Path(tempfile.gettempdir()) / f"penstock-python-{os.getuid()}"
    ) as made:
        made.mkdir(mode=0o700)
        yield made
