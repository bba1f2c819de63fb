"""Large transactions: on disk as they arrive, and read by Spark from there.

One file for each binding, a document in each line. A file is cut into parts for tasks, in order: of
two documents of one key, the one in the later part is the later one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from penstock.runtime.connector.capture import Documents
from penstock.runtime.connector.common import ConnectorError

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

PART_BYTES: Final = 16 << 20
BATCH_ROWS: Final = 8_000
"""Documents that a task takes in at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of whole lines."""

    start: int
    end: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledRead:
    """The documents of one binding in a spooled file (`SparkRead`)."""

    binding: int
    path: str
    parts: tuple[Part, ...]
    about: str

    @property
    def bytes(self) -> int:
        return self.parts[-1].end

    @property
    def rows_max(self) -> tuple[int, ...]:
        return tuple(part.rows for part in self.parts)

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.range(0, len(self.parts), 1, len(self.parts))

    def documents(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Documents]:
        for batch in batches:
            for at in batch.column(0).to_numpy():
                yield from self._of(int(at))

    def _of(self, at: int) -> Iterator[Documents]:
        part = self.parts[at]
        before = sum(each.rows for each in self.parts[:at])
        try:
            with Path(self.path).open("rb") as file:
                file.seek(part.start)
                for first in range(0, part.rows, BATCH_ROWS):
                    count = min(BATCH_ROWS, part.rows - first)
                    texts = [file.readline()[:-1] for _ in range(count)]
                    yield Documents(texts=texts, origin=Origin(self.about, before + first))
        except OSError as error:
            raise ConnectorError(
                "a transaction that was put on disk cannot be read there",
                where=self.path,
                why=error.strerror,
                fix="set `spoolDirectory` to a directory that Spark's executors see as well",
            ) from error


@dataclass(frozen=True, slots=True)
class Origin:
    """Where documents come from: a place, and their numbers there."""

    about: str
    first: int = 0

    def __call__(self, at: int) -> str:
        return f"{self.about}, document {self.first + at + 1}"


class _Lines:
    """One file, while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._parts: list[Part] = []
        self._size = self._start = self._rows = 0

    def add(self, texts: Sequence[bytes]) -> None:
        data = b"\n".join(texts)
        self._file.write(data)
        self._file.write(b"\n")
        self._size += len(data) + 1
        self._rows += len(texts)
        if self._size - self._start >= PART_BYTES:
            self._cut()

    def _cut(self) -> None:
        self._parts.append(Part(self._start, self._size, self._rows))
        self._start, self._rows = self._size, 0

    def finish(self) -> tuple[Part, ...]:
        if self._rows:
            self._cut()
        self._file.close()
        return tuple(self._parts)

    def close(self) -> None:
        self._file.close()


class Spool:
    """A directory with the documents of one sequence."""

    def __init__(self, home: Path | None, owner: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix=_prefix(owner), dir=home))
        self._lines: dict[int, _Lines] = {}

    def add(self, binding: int, texts: Sequence[bytes]) -> None:
        """Append documents of a binding."""
        if not texts:
            return
        if binding not in self._lines:
            self._lines[binding] = _Lines(self._directory / f"{binding}.jsonl")
        self._lines[binding].add(texts)

    def finish(self, about: dict[int, str]) -> tuple[SpooledRead, ...]:
        """Close the files, and return what reads them."""
        return tuple(
            SpooledRead(
                binding=binding, path=str(lines.path), parts=lines.finish(), about=about[binding]
            )
            for binding, lines in self._lines.items()
        )

    def remove(self) -> None:
        for lines in self._lines.values():
            lines.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def sweep(home: Path | None, owner: str) -> None:
    """Remove what sessions of an owner have left behind: only one lives at a time."""
    for left in Path(home or tempfile.gettempdir()).glob(f"{_prefix(owner)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _prefix(owner: str) -> str:
    return f"penstock-changes-{owner}-"
