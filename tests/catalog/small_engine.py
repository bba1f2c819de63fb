"""A row engine for tests: functions of documents, and a state of one JSON value per shuffle key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.catalog.build import load_catalog
from penstock.catalog.testing.memory import ALL_AT_ONCE, MemoryWorld, Split
from penstock.catalog.testing.run import Variant
from penstock.model.clock import Clock, from_rfc3339
from penstock.model.spec import Catalog, CollectionSpec
from penstock.runtime.derive.engine import (
    Document,
    Finished,
    LambdaFailed,
    ShardContext,
    SourceRead,
)

START: Clock = from_rfc3339("2026-01-31T08:00:00Z")

Transform = Callable[[Any, dict[str, Any]], Iterable[Document]]
"""A function of a document and a state, which it may change."""


@dataclass
class SmallEngine:
    """Transforms by index."""

    transforms: list[Transform]
    stateful: bool = True
    opened: list[ShardContext] = field(default_factory=list)

    def open(self, context: ShardContext) -> SmallProcessor:
        self.opened.append(context)
        return SmallProcessor(self.transforms, context)


class SmallProcessor:
    """Keeps its state in a file, of which the connector state has the name, shard by shard."""

    def __init__(self, transforms: list[Transform], context: ShardContext) -> None:
        self._transforms = transforms
        self._context = context
        state: Any = context.state
        name = state.get(str(context.shard))
        self._state = json.loads(context.files.read(name)) if name else {}

    def process(self, reads: Iterable[SourceRead]) -> Iterator[tuple[int, Document]]:
        for position, read in enumerate(reads):
            assert isinstance(read.document["_meta"], dict)
            assert "uuid" in read.document["_meta"]
            try:
                for document in self._transforms[read.transform](read.document, self._state):
                    yield position, document
            except ZeroDivisionError as error:
                failed = LambdaFailed(f"the lambda raised: {error}", where="line 1")
                failed.read = position
                raise failed from error

    def finish(self) -> Finished:
        name = self._context.files.write(json.dumps(self._state).encode())
        return Finished(patches=({str(self._context.shard): name},))

    def close(self) -> None:
        pass


def built(tmp_path: Path, text: str) -> Catalog:
    """The catalog of this text."""
    path = tmp_path / "catalog.yaml"
    path.write_text(text)
    return load_catalog([path], environ=None)


def world(
    catalog: Catalog,
    directory: Path,
    engines: Mapping[str, list[Transform]],
    *,
    split: Split = ALL_AT_ONCE,
    shards: int = 1,
    stateful: bool = True,
) -> MemoryWorld:
    """A world whose derivations are these functions."""

    def engine(_: Catalog, spec: CollectionSpec) -> SmallEngine:
        return SmallEngine(engines[spec.name], stateful=stateful)

    return MemoryWorld(
        catalog, directory=directory, start=START, split=split, shards=shards, engines=engine
    )


def worlds(
    catalog: Catalog,
    directory: Path,
    engines: Mapping[str, list[Transform]],
    *,
    stateful: bool = True,
) -> Callable[[Variant], MemoryWorld]:
    """New worlds of this kind, for the runs of a test."""
    return lambda variant: world(
        catalog,
        directory,
        engines,
        split=variant.split,
        shards=variant.shards,
        stateful=stateful,
    )
