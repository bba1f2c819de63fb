"""Documents on their way in: JSON lines of `penstock append`, and frames of `Penstock.append`.

Text is taken a chunk of lines at a time, so memory is that of one chunk, however long the file; and
a frame batch by batch. What becomes of them is `native.take`, as it is for captures.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import pyarrow

from penstock.model.columns import Column
from penstock.model.schema import CompiledSchema
from penstock.model.violations import Violation
from penstock.native.take import TEXT_MAX, Taker

CHUNK_BYTES: Final = 1 << 20
"""Text parsed at once: enough for Arrow to work in columns, little enough to stay in a cache."""

CHUNK_ROWS: Final = 1 << 14
"""Rows of a frame that are taken at once."""


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
    """Some of the input: the valid documents as columns, and what was refused."""

    documents: pyarrow.RecordBatch | None
    """None if no document is valid."""
    refused: tuple[RefusedLine, ...]
    bytes: int
    """Size of the text, to show progress by."""


class Intake:
    """Reads documents for one collection."""

    def __init__(self, schema: CompiledSchema, *, salt: bytes = b"") -> None:
        self._taker = Taker(schema, salt=salt)

    @property
    def root(self) -> Column:
        """The layout of the documents."""
        return self._taker.root

    def read(self, stream: BinaryIO, name: str) -> Iterator[Chunk]:
        """Read a stream of JSON lines; `name` is the file's, for messages.

        A bad line does not stop the good ones beside it. Blank lines are skipped, and counted.
        """
        line = 1
        while data := stream.read(CHUNK_BYTES):
            if not data.endswith(b"\n"):
                data += stream.readline(TEXT_MAX + 1)
            yield self._chunk(data, name, line)
            line += data.count(b"\n")
            if not data.endswith(b"\n") and _skip_line(stream):
                line += 1

    def read_frame(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[Chunk]:
        """Read a frame, whose columns are members (`native.plain`); the first row is row 1."""
        before = 0
        for batch in batches:
            for begin in range(0, batch.num_rows, CHUNK_ROWS):
                some = batch.slice(begin, CHUNK_ROWS)
                taken = self._taker.take_columns(some)
                yield Chunk(
                    documents=taken.rows if taken.rows.num_rows else None,
                    refused=tuple(
                        RefusedLine(
                            file="row", line=before + each.at + 1, violations=each.violations
                        )
                        for each in taken.refused
                    ),
                    bytes=some.nbytes,
                )
                before += some.num_rows

    def _chunk(self, data: bytes, name: str, first: int) -> Chunk:
        lines = enumerate(_without_mark(data, first).split(b"\n"), start=first)
        numbered = [(number, text) for number, text in lines if text.strip()]
        taken = self._taker.take_texts([text for _, text in numbered])
        return Chunk(
            documents=taken.rows if taken.rows.num_rows else None,
            refused=tuple(
                RefusedLine(file=name, line=numbered[each.at][0], violations=each.violations)
                for each in taken.refused
            ),
            bytes=len(data),
        )


def _without_mark(data: bytes, line: int) -> bytes:
    """A byte order mark belongs to the first line of a file; anywhere else it is not JSON."""
    return data.removeprefix(codecs.BOM_UTF8) if line == 1 else data


def _skip_line(stream: BinaryIO) -> bool:
    """Pass over the rest of a line that is too long; False if the stream ended in it."""
    while rest := stream.readline(TEXT_MAX):
        if rest.endswith(b"\n"):
            return True
    return False
