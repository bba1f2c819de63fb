"""Derivations at work in a test: the real code of each language, over documents in memory."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from penstock.catalog.testing.contents import Contents, Stored
from penstock.model.json_order import Json, canonical_json, sort_key
from penstock.model.keys import KeyValue, key_hash, pack
from penstock.model.routing import shard_of
from penstock.runtime.derive.engine import (
    Document,
    LambdaFailed,
    Processor,
    RowEngine,
    ShardContext,
    SourceRead,
)
from penstock.runtime.patches import Patches, apply_patches
from penstock.shuffle.binding import Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A document that a transform is to read."""

    binding: Binding
    source: Contents
    stored: Stored

    @property
    def due(self) -> int:
        """The clock before which it is not read."""
        return self.stored.clock + self.binding.read_delay

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Reads of one derivation happen in this order."""
        return -self.binding.priority, self.due, self.stored.clock, self.binding.index

    def describe(self) -> str:
        """Name the document in messages."""
        key = self.source.key_of(self.stored.document)
        return f"document {canonical_json(list(key))} of {self.source.spec.name}"


Output: TypeAlias = tuple[int | None, Document]
"""A document and the position of its read; None if no single one is its origin."""


class RunningDerivation(Protocol):
    """One derivation, with its state."""

    def run(self, reads: Sequence[Read]) -> list[Output]:
        """Run one transaction: return what it publishes, in order, and keep the new state."""
        ...


@dataclass(frozen=True, slots=True)
class DirectoryFiles:
    """Files of state in a directory that ends with its test."""

    root: Path

    @property
    def local_dir(self) -> Path:
        local = self.root / "local"
        local.mkdir(exist_ok=True)
        return local

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, data: bytes) -> str:
        name = secrets.token_hex(16)
        (self.root / name).write_bytes(data)
        return name


class RowDerivation:
    """A derivation whose code works on documents: routed to shards by key, processed in order.

    With several shards, documents are published in an order that a deployment may give them. Code
    that keeps state publishes shard by shard. Other code keeps the order of each key, and no other.
    """

    def __init__(
        self, engine: RowEngine, target: Contents, *, shards: int, files: DirectoryFiles
    ) -> None:
        self._engine = engine
        self._target = target
        self._shards = shards
        self._files = files
        self._state: Json = {}

    def run(self, reads: Sequence[Read]) -> list[Output]:
        by_shard: dict[int, list[int]] = {}
        for position, read in enumerate(reads):
            by_shard.setdefault(self._shard_of(read), []).append(position)
        published: list[Output] = []
        patches: Patches = ()
        for shard, positions in sorted(by_shard.items()):
            context = ShardContext(
                shard=shard, shards=self._shards, state=self._state, files=self._files
            )
            some = [reads[position] for position in positions]
            try:
                processor = self._engine.open(context)
                try:
                    made = _process(processor, some)
                    published += ((positions[at], document) for at, document in made)
                    finished = processor.finish()
                finally:
                    processor.close()
            except LambdaFailed as failed:
                raise _explained(failed, some) from failed
            published += ((None, document) for document in finished.documents)
            patches += tuple(finished.patches)
        self._state = apply_patches(self._state, patches)
        if self._shards > 1 and not self._engine.stateful:
            published.sort(key=_position)  # stable: what one document publishes stays in order
            published.sort(key=self._key)
        return published

    def _key(self, output: Output) -> tuple[object, ...]:
        return tuple(map(sort_key, self._target.key_of(output[1])))

    def _shard_of(self, read: Read) -> int:
        if self._shards == 1:
            return 0
        key: tuple[KeyValue, ...] = read.source.values_at(  # type: ignore[assignment]
            read.stored.document, read.binding.key
        )
        return shard_of(key_hash(pack(key)), self._shards)


def _process(processor: Processor, reads: Sequence[Read]) -> list[tuple[int, Document]]:
    given = (
        SourceRead(transform=read.binding.index, document=read.stored.with_uuid()) for read in reads
    )
    return list(processor.process(given))


def _position(output: Output) -> int:
    return sys.maxsize if output[0] is None else output[0]


def _explained(failed: LambdaFailed, reads: Sequence[Read]) -> LambdaFailed:
    """The same error, with the document that it is about."""
    if failed.read is None:
        return failed
    where = ", ".join(filter(None, (failed.where, reads[failed.read].describe())))
    explained = LambdaFailed(failed.what, where=where, why=failed.why, fix=failed.fix)
    explained.read = failed.read
    return explained
