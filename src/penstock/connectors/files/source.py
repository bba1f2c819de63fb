"""`source-files`: the session lists files, and gives those that are new, once.

Few bytes are read by the leader; many by Spark tasks, each some files or a part of one. A sequence
is some whole files, and its checkpoint remembers them by size and time. A file that is another one
than it was when it was read is named, and not read again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.connectors.files.cursor import Changed, Cursor, Found, settled, take
from penstock.connectors.files.formats import CsvOptions, FilePart, FileReading, read_split
from penstock.connectors.files.places import FilePlace
from penstock.connectors.files.splits import Group, plan
from penstock.connectors.files.watching import Watch
from penstock.errors import UserError
from penstock.journal.schemas import layout
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.runtime.connector.capture import (
    GIVEN_BYTES_MAX,
    CaptureSequence,
    Discovered,
    Documents,
    Given,
    Idle,
    Opening,
    Polled,
    SourceBinding,
)
from penstock.runtime.secrets import resolve

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("penstock.runtime")

SEQUENCE_BYTES_MAX: Final = 2 << 30
SEQUENCE_FILES_MAX: Final = 10_000


class Files:
    """The connector (`Capture`)."""

    config_schema = ConfigSchema(
        {
            "path": {
                "type": "string",
                "minLength": 1,
                "path": True,
                "title": "a directory, or the URL of one",
                "description": "Where the files are: a directory, or s3://bucket/prefix.",
                "examples": ["data", "s3://bucket/incoming?region=eu-central-1"],
            },
            "pollInterval": {
                "type": "number",
                "exclusiveMinimum": 0,
                "title": "a number of seconds",
                "description": "Time between two listings: by default 30, or 10 for a URL. Changes "
                "of a local directory are noticed at once.",
                "examples": [30],
            },
            "settle": {
                "type": "number",
                "minimum": 0,
                "default": 1,
                "title": "a number of seconds",
                "description": "A file is read once it has not changed for this long.",
                "examples": [1],
            },
            "onChanged": {
                "enum": ["stop", "ignore"],
                "default": "stop",
                "title": "stop or ignore",
                "description": "What to do if a file changed after it was read: stop the capture, "
                "or warn and keep what was read.",
                "examples": ["ignore"],
            },
            "monotonic": {
                "type": "boolean",
                "default": False,
                "title": "true or false",
                "description": "Set it if no new file is ever older than one that was read: then "
                "less is remembered.",
                "examples": [True],
            },
        },
        required=("path",),
    )
    resource_schema = ConfigSchema(
        {
            "path": {
                "type": "string",
                "pattern": "^(?!/)",
                "title": "a path or a pattern; below the path of the endpoint, so without a slash "
                "at its beginning",
                "description": "A file, a directory with all that is in it, or a pattern: `*` is "
                "any part of a name, `**` any directories.",
                "examples": ["orders/*.jsonl"],
            },
            "format": {
                "enum": ["jsonl", "csv", "parquet"],
                "title": "a format",
                "description": "jsonl, csv or parquet; by default the names of the files tell.",
                "examples": ["csv"],
            },
            "csv": {
                "type": "object",
                "title": "options of CSV files",
                "description": "How CSV files are written.",
                "examples": [{"delimiter": ";"}],
                "additionalProperties": False,
                "properties": {
                    "delimiter": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": 1,
                        "title": "one character",
                        "description": "Between fields: a comma by default, a tab in .tsv files.",
                    },
                    "quote": {
                        "type": "string",
                        "maxLength": 1,
                        "default": '"',
                        "title": "one character",
                        "description": "Around fields; inside of them it is doubled.",
                    },
                    "header": {
                        "type": "boolean",
                        "default": True,
                        "title": "true or false",
                        "description": "The first line has the names of the columns.",
                    },
                    "columns": {
                        "type": "array",
                        "items": {"type": "string"},
                        "title": "a list of names",
                        "description": "The names of the columns, if there is no header.",
                    },
                    "nulls": {
                        "type": "array",
                        "items": {"type": "string"},
                        "title": "a list of texts",
                        "description": "Fields that mean absent; by default, empty ones.",
                    },
                },
            },
        },
        required=("path",),
    )

    def __init__(self, config: Json, *, where: str) -> None:
        given = self.config_schema.read(resolve(config, where=where), where=f"{where}: config")
        self._where = where
        self._place = FilePlace.of(given["path"])
        self._poll_s = float(given.get("pollInterval", 30 if self._place.is_local else 10))
        self._settle_s = float(given.get("settle", 1))
        self._stops_at_change = given.get("onChanged", "stop") == "stop"
        self._monotonic = bool(given.get("monotonic", False))
        self.stopping = threading.Event()
        self._session: FilesSession | None = None

    def __repr__(self) -> str:
        return f"Files({self._place})"

    def check(self) -> None:
        """Raise if the directory cannot be listed."""
        self._place.list("")

    def discover(self) -> Sequence[Discovered]:
        from penstock.connectors.files.discover import discover

        return discover(self._place)

    def open(self, opening: Opening) -> FilesSession:
        self.stopping.clear()
        bindings = [
            _Binding(
                source=binding,
                pattern=str(_resource(binding)["path"]),
                reading=_reading(self._place, binding),
                cursor=Cursor.decode(
                    opening.state.get(binding.state_key)
                    if isinstance(opening.state, dict)
                    else None,
                    monotonic=self._monotonic,
                ),
            )
            for binding in opening.bindings
        ]
        self._session = FilesSession(self, bindings, opening)
        return self._session

    def interrupt(self) -> None:
        self.stopping.set()
        if self._session is not None:
            self._session.wake()

    def waits_for(self) -> str | None:
        return None

    # What its sessions ask of it

    @property
    def place(self) -> FilePlace:
        return self._place

    @property
    def poll_s(self) -> float:
        return self._poll_s

    @property
    def settle_s(self) -> float:
        return self._settle_s

    def changed(self, changed: Sequence[Changed]) -> None:
        """Name files that are others than they were."""
        first = changed[0]
        name = self._place.name(first.path)
        many = f" ({len(changed)} files)" if len(changed) > 1 else ""
        what = f"a file changed after it was read{many}"
        why = f"it had {first.size_then:,} bytes when it was read, and has {first.size_now:,} now"
        if self._stops_at_change:
            raise UserError(
                what,
                where=name,
                why=why,
                fix="write new documents to new files; to read all files again raise the binding's "
                "backfill; to leave it as it is set onChanged: ignore [E-FILE-CHANGED]",
            )
        _log.warning("%s: %s: %s; it is not read again", name, what, why)


def _resource(binding: SourceBinding) -> dict[str, Any]:
    value = binding.resource.value
    if not isinstance(value, dict):
        raise UserError("a resource is a mapping", fix="resource: {path: orders/*.jsonl}")
    return value


def _reading(place: FilePlace, binding: SourceBinding) -> FileReading:
    resource = _resource(binding)
    csv = resource.get("csv", {})
    return FileReading(
        place=place,
        format=resource.get("format"),
        csv=CsvOptions(
            delimiter=csv.get("delimiter"),
            quote=csv.get("quote", '"'),
            header=csv.get("header", True),
            columns=tuple(csv.get("columns", ())),
            nulls=tuple(csv.get("nulls", ("",))),
        ),
        meta=binding.wants_meta,
        root=layout(binding.collection.write_schema.text),
    )


@dataclass(slots=True)
class _Binding:
    """A binding at work."""

    source: SourceBinding
    pattern: str
    reading: FileReading
    cursor: Cursor


class FilesSession:
    """A session (`CaptureSession`)."""

    def __init__(self, files: Files, bindings: Sequence[_Binding], opening: Opening) -> None:
        self._files = files
        self._bindings = bindings
        self._opening = opening
        self._waiting: dict[int, list[Found]] = {}
        """New files by binding, which were listed and are not given yet."""
        self._named: set[str] = set()
        """Changed files that were named already."""
        self._next_s = 0.0
        """When to list again."""
        self._listed = False
        watches = files.place.is_local and not opening.ends
        self._watch = Watch(files.place.local) if watches else None

    def poll(self, wait_s: float) -> Polled:
        until = time.monotonic() + wait_s
        while not self._files.stopping.is_set():
            if not any(self._waiting.values()):
                if self._opening.ends and self._listed:
                    return Idle.NOTHING
                self._pause(until)
                if time.monotonic() >= self._next_s:
                    self._list()
            if (sequence := self._sequence()) is not None:
                return sequence
            if time.monotonic() >= until:
                waits = any(self._waiting.values()) or not self._listed
                return Idle.PENDING if waits else Idle.NOTHING
            if any(self._waiting.values()):
                time.sleep(0.05)  # until they are settled
        return Idle.PENDING

    def wake(self) -> None:
        """Let a poll that waits look whether it is to stop."""
        if self._watch is not None:
            self._watch.wake()

    def _pause(self, until: float) -> None:
        """Wait for the next listing, or until something changes."""
        left = min(until, self._next_s) - time.monotonic()
        if left <= 0:
            return
        if self._watch is None:
            self._files.stopping.wait(left)
        elif self._watch.wait(left):
            self._next_s = 0.0

    def _list(self) -> None:
        self._next_s = time.monotonic() + self._files.poll_s
        changed: list[Changed] = []
        for at, binding in enumerate(self._bindings):
            listed = self._files.place.list(binding.pattern)
            for each in listed:
                binding.reading.format_of(each.path)
            changed += [c for c in binding.cursor.changed(listed) if c.path not in self._named]
            self._waiting[at] = binding.cursor.fresh(listed)
        self._listed = True
        if changed:
            self._named.update(each.path for each in changed)
            self._files.changed(changed)

    def _sequence(self) -> CaptureSequence | None:
        """The next files of the first binding that has some."""
        for at, waiting in self._waiting.items():
            ready = settled(waiting, now_ns=time.time_ns(), settle_s=self._files.settle_s)
            files = take(ready, bytes_max=SEQUENCE_BYTES_MAX, files_max=SEQUENCE_FILES_MAX)
            if files:
                self._waiting[at] = waiting[len(files) :]
                return self._given(self._bindings[at], self._fresh_sizes(at, files))
        return None

    def _fresh_sizes(self, at: int, files: list[Found]) -> list[Found]:
        """Look at files again that were listed before they were settled."""
        place = self._files.place
        if not place.is_local:
            return files
        found = [place.look(each.path) for each in files]
        kept = [each for each in found if each is not None]
        limit = time.time_ns() - int(self._files.settle_s * 1e9)
        late = [each for each in kept if each.version > limit]
        if late:
            self._waiting[at] = sorted([*late, *self._waiting[at]])
        return [each for each in kept if each.version <= limit]

    def _given(self, binding: _Binding, files: list[Found]) -> CaptureSequence | None:
        if not files:
            return None
        after, patch = binding.cursor.read(files)
        size = sum(each.size for each in files)
        index = binding.source.index
        key = binding.source.state_key
        if size <= GIVEN_BYTES_MAX and not any(_is_dense(each.path) for each in files):
            given = tuple(
                Given(binding=index, documents=documents, bytes=0)
                for file in files
                for documents in read_split(binding.reading, FilePart(file=file))
            )
            given = tuple(
                replace(each, bytes=size if at == 0 else 0) for at, each in enumerate(given)
            )
            sequence = CaptureSequence(given=given, patches=({key: patch},))
        else:
            groups = tuple(plan(binding.reading, files))
            read = FileRead(binding=index, bytes=size, reading=binding.reading, groups=groups)
            sequence = CaptureSequence(reads=(read,), patches=({key: patch},))
        binding.cursor = after
        return sequence

    def acknowledge(self, sequences: int) -> None:
        """Files are not told."""

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


def _is_dense(path: str) -> bool:
    """True if a few bytes of a file may stand for many."""
    return path.endswith((".gz", ".zst", ".bz2", ".parquet", ".pq"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """Files that Spark reads (`SparkRead`): a task for each group, in order."""

    binding: int
    bytes: int
    reading: FileReading
    groups: tuple[Group, ...]

    @property
    def rows_max(self) -> tuple[int, ...]:
        return tuple(group.rows_max for group in self.groups)

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.range(0, len(self.groups), 1, len(self.groups))

    def documents(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Documents]:
        for batch in batches:
            ids: list[int] = batch.to_pydict()["id"]
            for at in ids:
                for split in self.groups[at].splits:
                    yield from read_split(self.reading, split)
