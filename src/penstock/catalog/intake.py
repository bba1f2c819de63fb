"""Validate documents on their way in: JSON lines are parsed, checked, redacted and made columns.

This is where `penstock append` and `Penstock.append` validate. Text is taken a chunk of lines at a
time. Most chunks hold only valid documents, so a chunk is first read as a whole: parse every line,
ask the validator for yes or no, convert. Only a chunk with something wrong in it is read again line
by line (`read_lines`), at six times the cost, to say what is wrong where. Memory is that of one
chunk, however long the file. What "valid" means is `model.schema`.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow

from penstock.errors import Bug
from penstock.garbage import gc_paused
from penstock.model.columns import Column, columns, unstorable
from penstock.model.json_order import Json
from penstock.model.redact import has_redactions, redact
from penstock.model.schema import CompiledSchema, read_documents
from penstock.model.violations import Violation
from penstock.native.arrow import to_arrow

CHUNK_BYTES: Final = 1 << 20
"""Text parsed at once: enough for Arrow to work in columns, little enough to stay in a cache."""

LINE_BYTES_MAX: Final = 16 << 20

_decode: Final[Callable[[bytes], Json]] = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedLine:
    """A document that fits its schema."""

    line: int
    document: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLine:
    """A line that is not a document, or a document that does not fit its schema."""

    file: str
    line: int
    violations: tuple[Violation, ...]

    def render(self) -> str:
        """One line `file:line: pointer: what is wrong` per violation."""
        return "\n".join(f"{self.file}:{self.line}: {violation}" for violation in self.violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some lines of a file: the valid documents as columns, and the lines that were refused."""

    documents: pyarrow.RecordBatch | None
    """None if no document is valid."""
    refused: tuple[RefusedLine, ...]
    bytes: int
    """Size of the text, to show progress by."""


class Intake:
    """Reads documents for one collection."""

    def __init__(self, schema: CompiledSchema, *, salt: bytes = b"") -> None:
        self.root: Column = columns(schema.shape)
        self._schema = schema
        self._salt = salt
        self._hides = has_redactions(schema.shape)

    def read(self, stream: BinaryIO, name: str) -> Iterator[Chunk]:
        """Read a stream of JSON lines; `name` is the file's, for messages."""
        line = 1
        while data := stream.read(CHUNK_BYTES):
            if not data.endswith(b"\n"):
                data += stream.readline(LINE_BYTES_MAX + 1)
            with gc_paused():
                chunk = self._read_valid(data, line) or self._read_by_line(data, name, line)
            yield chunk
            line += data.count(b"\n")
            if not data.endswith(b"\n") and _skip_line(stream):
                line += 1

    def _read_valid(self, data: bytes, line: int) -> Chunk | None:
        """The chunk if every line of it is a valid document, else None."""
        if len(data) > LINE_BYTES_MAX:  # a line may be too long
            return None
        lines = _without_mark(data, line).split(b"\n")
        if not lines[-1]:
            lines.pop()
        try:
            documents: list[Any] = list(map(_decode, lines))
            if not all(map(self._schema.is_valid, documents)):
                return None
            return Chunk(documents=self._to_arrow(documents), refused=(), bytes=len(data))
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
            return None  # ArrowInvalid is a ValueError: a number that does not fit its column

    def _read_by_line(self, data: bytes, name: str, line: int) -> Chunk:
        read = list(read_lines(io.BytesIO(data), name, self._schema, first_line=line))
        valid: list[Any] = [one.document for one in read if isinstance(one, AcceptedLine)]
        refused = tuple(one for one in read if isinstance(one, RefusedLine))
        try:
            documents = self._to_arrow(valid) if valid else None
        except (ValueError, OverflowError) as error:
            raise Bug(
                "valid documents do not fit their columns",
                where=f"{name}, {data.count(10)} lines from line {line} on",
                why=str(error),
            ) from error
        return Chunk(documents=documents, refused=refused, bytes=len(data))

    def _to_arrow(self, documents: list[Any]) -> pyarrow.RecordBatch:
        if self._hides:
            shape, salt = self._schema.shape, self._salt
            documents = [redact(document, shape, salt) for document in documents]
        return to_arrow(documents, self.root)


def read_lines(
    stream: BinaryIO, name: str, schema: CompiledSchema, *, first_line: int = 1
) -> Iterator[AcceptedLine | RefusedLine]:
    """Read JSON lines one by one. A bad line does not stop the good ones beside it.

    Blank lines are skipped, and counted. `first_line` is the number of the first line in its file.
    """
    number = first_line - 1
    layout = columns(schema.shape)
    while data := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(data) > LINE_BYTES_MAX:
            if not data.endswith(b"\n"):
                _skip_line(stream)
            violations = _document_violation(f"is longer than {LINE_BYTES_MAX} bytes")
            yield RefusedLine(file=name, line=number, violations=violations)
            continue
        text = _without_mark(data, number)
        if not text.strip():
            continue
        ((document, violations),) = read_documents(schema, (text,))
        if not violations and (found := unstorable(document, layout)):
            violations = _document_violation(found[1], at=found[0])
        if violations:
            yield RefusedLine(file=name, line=number, violations=violations)
        else:
            yield AcceptedLine(line=number, document=document)


def _document_violation(message: str, at: str = "") -> tuple[Violation, ...]:
    return (Violation(pointer=at, schema_pointer="", message=message),)


def _without_mark(data: bytes, line: int) -> bytes:
    """A byte order mark belongs to the first line of a file; anywhere else it is not JSON."""
    return data.removeprefix(codecs.BOM_UTF8) if line == 1 else data


def _skip_line(stream: BinaryIO) -> bool:
    """Pass over the rest of a line that is too long; False if the stream ended in it."""
    while rest := stream.readline(LINE_BYTES_MAX):
        if rest.endswith(b"\n"):
            return True
    return False
