"""Sessions of captures in Python, read as the runtime reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.catalog.build import load_catalog
from penstock.connectors.python_source.source import PythonSource
from penstock.model.json_order import Json
from penstock.model.spec import Frozen
from penstock.native.plain import plain_rows
from penstock.runtime.connector.capture import (
    CaptureSequence,
    CaptureSession,
    Documents,
    Idle,
    Opening,
    SourceBinding,
)
from penstock.runtime.patches import apply_patches

SCHEMA = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}


def bindings(
    directory: Path, streams: Sequence[str], version: int = 0
) -> tuple[SourceBinding, ...]:
    file = directory / "collections.json"
    collections = {f"acme/{name}": {"key": ["/id"], "schema": SCHEMA} for name in streams}
    file.write_text(json.dumps({"collections": collections}))
    catalog = load_catalog([file], environ=None)
    made = []
    for index, name in enumerate(streams):
        spec = catalog.collection(f"acme/{name}")
        assert spec is not None
        made.append(
            SourceBinding(
                index=index,
                state_key=f"{name}.v{version}",
                resource=Frozen({"stream": name}),
                collection=spec,
            )
        )
    return tuple(made)


@dataclass
class Reading:
    """Reads sequences, and commits them."""

    directory: Path
    module: str
    config: Json = field(default_factory=dict)
    streams: Sequence[str] = ("orders", "items")
    state: Json = field(default_factory=dict)
    documents: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sequences: list[CaptureSequence] = field(default_factory=list)
    version: int = 0

    def source(self) -> PythonSource:
        return PythonSource(
            self.config, where="capture acme/in", module=self.module, file="orders.py"
        )

    def open(self) -> CaptureSession:
        made = bindings(self.directory, self.streams, self.version)
        return self.source().open(Opening(task="acme/in", bindings=made, state=self.state))

    def run(self, *, sequences_max: int | None = None) -> Reading:
        """Read to the end, or so many sequences; what is left is lost, as by a crash."""
        session = self.open()
        try:
            taken = 0
            while sequences_max is None or taken < sequences_max:
                polled = session.poll(0.5)
                if polled is Idle.END:
                    break
                if isinstance(polled, CaptureSequence):
                    self.commit(polled)
                    session.acknowledge(1)
                    taken += 1
        finally:
            session.close()
        return self

    def commit(self, sequence: CaptureSequence) -> None:
        self.sequences.append(sequence)
        for given in sequence.given:
            rows = rows_of([given.documents])
            self.documents += [(self.streams[given.binding], row) for row in rows]
        for read in sequence.reads:
            numbers = range(len(read.rows_max or ()))
            for number in numbers:
                rows = rows_of(read.documents(iter([_number(number)])))
                self.documents += [(self.streams[read.binding], row) for row in rows]
        self.state = apply_patches(self.state, sequence.patches)

    def ids(self, stream: str = "orders") -> list[int]:
        return [row["id"] for name, row in self.documents if name == stream]


def _number(number: int) -> Any:  # noqa: ANN401 - a batch
    import pyarrow as pa

    return pa.RecordBatch.from_pydict({"part": [number]})


def rows_of(documents: Sequence[Documents] | Iterator[Documents]) -> Iterator[dict[str, Any]]:
    for some in documents:
        if some.texts is not None:
            yield from (json.loads(text) for text in some.texts)
        elif some.columns is not None:
            yield from plain_rows(some.columns)
