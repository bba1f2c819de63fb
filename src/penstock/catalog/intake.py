"""JSON lines into columns: parsed, validated, redacted, a chunk of lines at a time.

Most chunks hold nothing but good documents, so a chunk is first taken as a whole: parse every line,
ask the validator for yes or no, convert. Only if something in it is wrong is it gone through line
by line (`documents.read_lines`), which is six times the work, to find out what. Memory is that of a
chunk, however long the file.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow

from penstock.catalog.documents import LINE_BYTES_MAX, Refused, read_lines
from penstock.errors import Bug
from penstock.garbage import uncollected
from penstock.model.columns import Column, columns
from penstock.model.json_order import Json
from penstock.model.redact import hides, redact
from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_arrow

CHUNK_BYTES: Final = 1 << 20
"""Text that is parsed at once: long enough for Arrow to work in columns, and still in a cache."""

_decode: Final[Callable[[bytes], Json]] = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some lines of a file: their good documents as columns, and the lines that were refused."""

    documents: pyarrow.RecordBatch | None
    """None if there is none."""
    refused: tuple[Refused, ...]
    bytes: int
    """Of the text, to show progress by."""


class Intake:
    """Reads documents for one collection."""

    def __init__(self, schema: CompiledSchema, *, salt: bytes = b"") -> None:
        self.root: Column = columns(schema.shape)
        self._schema = schema
        self._salt = salt
        self._hides = hides(schema.shape)

    def read(self, stream: BinaryIO, name: str) -> Iterator[Chunk]:
        """The documents of a stream of JSON lines; `name` is the file's, for messages."""
        line = 1
        while data := stream.read(CHUNK_BYTES):
            if not data.endswith(b"\n"):
                data += stream.readline(LINE_BYTES_MAX + 1)
            text = data.removeprefix(codecs.BOM_UTF8) if line == 1 else data
            with uncollected():
                chunk = self._take_whole(text, len(data)) or self._take_apart(data, name, line)
            yield chunk
            line += data.count(b"\n")
            if not data.endswith(b"\n") and _skip_line(stream):
                line += 1

    def _take_whole(self, text: bytes, size: int) -> Chunk | None:
        """The chunk, if there is nothing at all to say about it."""
        if size > LINE_BYTES_MAX:  # a line may be too long
            return None
        lines = text.split(b"\n")
        if not lines[-1]:
            lines.pop()
        try:
            documents: list[Any] = list(map(_decode, lines))
            if not all(map(self._schema.is_valid, documents)):
                return None
            return Chunk(documents=self._to_arrow(documents), refused=(), bytes=size)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
            return None  # ArrowInvalid is a ValueError: a number that does not fit its column

    def _take_apart(self, data: bytes, name: str, line: int) -> Chunk:
        good: list[Any] = []
        refused: list[Refused] = []
        # A byte order mark belongs to the first line of a file; elsewhere it is not JSON.
        marked = data if line == 1 or not data.startswith(codecs.BOM_UTF8) else b" " + data
        for read in read_lines(io.BytesIO(marked), name, self._schema):
            if isinstance(read, Refused):
                refused.append(
                    Refused(file=name, line=read.line + line - 1, violations=read.violations)
                )
            else:
                good.append(read.document)
        try:
            documents = self._to_arrow(good) if good else None
        except (ValueError, OverflowError) as error:
            raise Bug(
                "documents are valid, and yet do not fit their columns",
                where=f"{name}, {data.count(10)} lines from line {line} on",
                why=str(error),
            ) from error
        return Chunk(documents=documents, refused=tuple(refused), bytes=len(data))

    def _to_arrow(self, documents: list[Any]) -> pyarrow.RecordBatch:
        if self._hides:
            shape, salt = self._schema.shape, self._salt
            documents = [redact(document, shape, salt) for document in documents]
        return to_arrow(documents, self.root)


def _skip_line(stream: BinaryIO) -> bool:
    """Pass over the rest of a line that is too long; whether it ended before the file did."""
    while rest := stream.readline(LINE_BYTES_MAX):
        if rest.endswith(b"\n"):
            return True
    return False
