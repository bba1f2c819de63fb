"""Looks at the files of a directory, and proposes a binding for each kind of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from penstock.connectors.files.cursor import Found
from penstock.connectors.files.formats import FilePart, FileReading, read_split
from penstock.connectors.files.places import FilePlace
from penstock.connectors.sampling import key_of, schema_of
from penstock.model.json_order import Json
from penstock.native.plain import plain_rows
from penstock.runtime.connector.capture import Discovered
from penstock.runtime.connector.common import ConnectorError

SAMPLE: Final = 1_000
"""Documents of each kind that are looked at."""

META: Final[dict[str, Json]] = {
    "type": "object",
    "required": ["file", "row"],
    "properties": {"file": {"type": "string"}, "row": {"type": "integer"}},
}
"""The schema of `/_meta`."""


def discover(place: FilePlace) -> list[Discovered]:
    """Return a proposal for each directory and suffix."""
    kinds: dict[tuple[str, str], list[Found]] = {}
    reading = FileReading(place=place, format=None)
    for found in sorted(place.list("")):
        try:
            reading.format_of(found.path)
        except ConnectorError:
            continue
        directory, _, name = found.path.rpartition("/")
        suffix = re.sub(r"^[^.]*", "", name)
        kinds.setdefault((directory, suffix), []).append(found)
    return [
        made
        for (directory, suffix), files in sorted(kinds.items())
        if (made := _proposal(reading, directory, suffix, files)) is not None
    ]


def _proposal(
    reading: FileReading, directory: str, suffix: str, files: list[Found]
) -> Discovered | None:
    pattern = f"{directory}/*{suffix}" if directory else f"*{suffix}"
    single = len(files) == 1
    path = files[0].path if single else pattern
    sample = list(_sample(reading, files[-1]))
    if not sample:
        return None
    stem = files[0].path.rpartition("/")[2].split(".", 1)[0] if single else directory
    name = re.sub(r"[^A-Za-z0-9_./-]+", "-", stem or suffix.strip(".").split(".")[0]).strip("-/")
    key = key_of(sample)
    schema = schema_of(sample)
    schema["properties"] = {**schema.get("properties", {}), "_meta": META}
    note = None
    if key is None:
        schema["required"] = [*schema.get("required", []), "_meta"]
        note = "no member looks like a key: documents are identified by file and row"
    return Discovered(
        name=name.lower(),
        resource={"path": path},
        schema=schema,
        key=key or ("/_meta/file", "/_meta/row"),
        note=note,
    )


def _sample(reading: FileReading, file: Found) -> Iterator[Json]:
    """The first documents of a file; of CSV, with texts only."""
    count = 0
    for documents in read_split(reading, FilePart(file=file)):
        rows: list[Any] = (
            plain_rows(documents.columns)
            if documents.columns is not None
            else [json.loads(text) for text in documents.texts or ()]
        )
        yield from rows[: SAMPLE - count]
        count += len(rows)
        if count >= SAMPLE:
            return
