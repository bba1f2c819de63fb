"""Catalogs with one Python derivation, and the transactions that run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.model.spec import (
    Catalog,
    CollectionSpec,
    DerivationSpec,
    Endpoint,
    Frozen,
    Shards,
    Source,
    Transform,
)
from penstock.runtime.derive.engine import Finished, ShardContext, SourceRead
from penstock.runtime.derive.python_engine import PythonEngine, PythonProcessor
from penstock.runtime.patches import apply_patches

INTS = {
    "type": "object",
    "required": ["Key", "Int"],
    "properties": {"Key": {"type": "string"}, "Int": {"type": "integer"}},
}
SUMS = {
    "type": "object",
    "required": ["Key"],
    "properties": {
        "Key": {"type": "string"},
        "Sum": {"type": "integer"},
        "Count": {"type": "integer"},
        "Note": {"type": ["string", "null"]},
    },
}


class NoFiles:
    """Python derivations keep no files."""

    local_dir = Path("/nowhere")

    def read(self, name: str) -> bytes:
        raise AssertionError(name)

    def write(self, data: bytes) -> str:
        raise AssertionError(data)


def collection(name: str, schema: object, **more: Any) -> CollectionSpec:  # noqa: ANN401
    frozen = Frozen(schema)  # type: ignore[arg-type]
    key = more.pop("key", ("/Key",))
    return CollectionSpec(
        name=name, key=key, write_schema=frozen, read_schema=frozen, fields=(), **more
    )


def engine(
    module: str | None,
    *,
    name: str = "patterns/stateful",
    transforms: Iterable[str] = ("fromInts",),
    source: object = INTS,
    derived: object = SUMS,
    files: tuple[tuple[str, str], ...] = (),
    config: Any = None,  # noqa: ANN401
    config_schema: object = None,
    batch: bool = False,
    packages: str | None = None,
) -> PythonEngine:
    """An engine whose transforms all read one source."""
    derivation = DerivationSpec(
        using="python",
        transforms=tuple(
            Transform(name=t, source=Source(collection="patterns/ints"), shuffle=("/Key",))
            for t in transforms
        ),
        shuffle_key_types=("string",),
        endpoint=Endpoint(
            kind="python",
            config=Frozen(config or {}),
            module=module,
            config_schema=Frozen(config_schema) if config_schema else None,  # type: ignore[arg-type]
        ),
        files=files,
        batch=batch,
        shards=Shards(max_txn_s=1),
    )
    target = collection(name, derived, derivation=derivation)
    catalog = Catalog(collections=(collection("patterns/ints", source), target))
    return PythonEngine.of(catalog, target, packages=packages)


def opened(
    made: PythonEngine,
    state: Any = None,  # noqa: ANN401
    *,
    shard: int = 0,
    shards: int = 1,
) -> PythonProcessor:
    context = ShardContext(shard=shard, shards=shards, state=state or {}, files=NoFiles())
    return made.open(context)


def reads(*documents: dict[str, Any], transform: int = 0) -> list[SourceRead]:
    return [SourceRead(transform=transform, document=d) for d in documents]


def ints(*pairs: tuple[str, int]) -> list[SourceRead]:
    return reads(*({"Key": k, "Int": i, "_meta": {"uuid": f"u{i}"}} for k, i in pairs))


@dataclasses.dataclass
class Task:
    """A task with one shard: transaction after transaction, state committed in between."""

    engine: PythonEngine
    state: Any = dataclasses.field(default_factory=dict)

    def transaction(self, some: Iterable[SourceRead]) -> list[dict[str, Any]]:
        processor = opened(self.engine, self.state)
        try:
            published = [document for _, document in processor.process(some)]
            finished: Finished = processor.finish()
        finally:
            processor.close()
        self.state = apply_patches(self.state, finished.patches)
        return [*published, *finished.documents]
