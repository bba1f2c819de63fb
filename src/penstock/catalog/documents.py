"""Documents in JSON lines files: read one by one, each accepted or refused by file and line.

A bad line does not stop the good ones beside it; whoever reads decides what a refusal means. Memory
is that of one line, however long the file.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.errors import UserError
from penstock.model.columns import columns, unstorable
from penstock.model.explain import Violation
from penstock.model.json_order import Json
from penstock.model.schema import CompiledSchema, read_documents

LINE_BYTES_MAX = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A document that fits its schema."""

    line: int
    document: Json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A line that is not a document, or one that does not fit its schema."""

    file: str
    line: int
    violations: tuple[Violation, ...]

    def render(self) -> str:
        """A line `file:line: pointer: what is wrong` for each violation."""
        return "\n".join(f"{self.file}:{self.line}: {violation}" for violation in self.violations)


def read_file(path: Path, schema: CompiledSchema) -> Iterator[Accepted | Refused]:
    """The documents of a JSON lines file, in order."""
    try:
        with path.open("rb") as stream:
            yield from read_lines(stream, str(path), schema)
    except OSError as e:
        raise UserError(f"cannot read {path}", why=e.strerror or str(e)) from e


def read_lines(stream: BinaryIO, name: str, schema: CompiledSchema) -> Iterator[Accepted | Refused]:
    """The documents of a stream of JSON lines. Blank lines are skipped, and counted."""
    number = 0
    layout = columns(schema.shape)
    while data := stream.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(data) > LINE_BYTES_MAX:
            _skip_line(stream, data)
            yield _refused(name, number, f"is longer than {LINE_BYTES_MAX} bytes")
            continue
        text = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
        if not text.strip():
            continue
        ((document, violations),) = read_documents(schema, (text,))
        if not violations and (found := unstorable(document, layout)):
            at, why = found
            violations = (Violation(pointer=at, schema_pointer="", message=why),)
        if violations:
            yield Refused(file=name, line=number, violations=violations)
        else:
            yield Accepted(line=number, document=document)


def _skip_line(stream: BinaryIO, data: bytes) -> None:
    while data and not data.endswith(b"\n"):
        data = stream.readline(LINE_BYTES_MAX)


def _refused(name: str, line: int, message: str) -> Refused:
    violation = Violation(pointer="", schema_pointer="", message=message)
    return Refused(file=name, line=line, violations=(violation,))
