"""Staging in Arrow files: one file per attempt and binding, in a directory per task.

A file counts only if a manifest names it. For sinks whose Spark tasks and leader share a file
system, as those of an embedded database do.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow

from penstock import failpoints
from penstock.runtime.connector.common import ConnectorError, SparkAttempt
from penstock.runtime.connector.materialize import Staged

_pa: Any = pyarrow


@dataclass(frozen=True, slots=True)
class ArrowFiles:
    """A staging area."""

    directory: Path

    def of(self, task: str) -> Path:
        """Return a task's directory: its name is short, and cannot lead elsewhere."""
        return self.directory / hashlib.sha256(task.encode()).hexdigest()

    def stager(self, attempt: SparkAttempt, *, failpoint: str | None = None) -> ArrowStager:
        """Stage for an attempt; `failpoint` is hit when its rows are staged."""
        return ArrowStager(self.of(attempt.task), attempt, failpoint)

    def read(self, staged: Staged) -> Iterator[pyarrow.RecordBatch]:
        """Yield staged rows; raises if some are missing."""
        count = 0
        with (
            _explained(staged.at, "staged rows cannot be read"),
            _pa.memory_map(staged.at) as source,
        ):
            reader = _pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                count += batch.num_rows
                yield batch
        if count != staged.rows:
            raise ConnectorError(
                f"{staged.rows} rows were staged, and {count} are there", where=staged.at
            )

    def discard(self, staged: Iterable[Staged]) -> None:
        for each in staged:
            Path(each.at).unlink(missing_ok=True)

    def sweep(self, tasks: Iterable[str]) -> None:
        """Remove the files of these tasks."""
        for task in tasks:
            for path in self.of(task).glob("*.arrow"):
                path.unlink(missing_ok=True)


class ArrowStager:
    """Writes one Arrow file per binding."""

    def __init__(self, directory: Path, attempt: SparkAttempt, failpoint: str | None) -> None:
        self._directory = directory
        self._attempt = attempt
        self._failpoint = failpoint
        self._files: dict[int, tuple[Path, Any, int]] = {}

    def store(self, binding: int, rows: pyarrow.RecordBatch) -> None:
        with _explained(str(self._directory), "rows cannot be staged"):
            if binding not in self._files:
                self._directory.mkdir(parents=True, exist_ok=True)
                path = self._directory / f"{self._attempt.name}_{binding}.arrow"
                self._files[binding] = (path, _pa.ipc.new_file(str(path), rows.schema), 0)
            path, writer, count = self._files[binding]
            writer.write_batch(rows)
        self._files[binding] = (path, writer, count + rows.num_rows)

    def finish(self) -> list[Staged]:
        staged = []
        for binding, (path, writer, count) in self._files.items():
            with _explained(str(path), "rows cannot be staged"):
                writer.close()
                size = path.stat().st_size
            staged.append(
                Staged(
                    binding=binding,
                    shard=self._attempt.shard,
                    at=str(path),
                    rows=count,
                    bytes=size,
                )
            )
        if self._failpoint is not None:
            failpoints.hit(self._failpoint)
        return staged

    def discard(self) -> None:
        for path, writer, _ in self._files.values():
            with contextlib.suppress(Exception):
                writer.close()
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectorError(
            f"{what}: {error.strerror or error}",
            where=where,
            fix="free some space, and let this user write beside the database",
            transient=True,
        ) from error
