"""Small derivations `using: sqlite`, and what runs them without a leader."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.model.json_order import Json
from penstock.model.schema import compiled
from penstock.model.shape import Shape
from penstock.model.spec import (
    Catalog,
    CollectionSpec,
    DerivationSpec,
    Field,
    Frozen,
    Shards,
    Source,
    Transform,
)
from penstock.runtime.derive.engine import Document, RowEngine, ShardContext, SourceRead
from penstock.runtime.derive.sqlite_engine import SqliteEngine
from penstock.runtime.patches import Patches, apply_patches

UUID = "3a5f0e40-1dd2-11b2-8000-0123456789ab"
ANYTHING: dict[str, Any] = {"type": "object"}


def collection(
    name: str, properties: dict[str, Any], derivation: DerivationSpec | None = None
) -> CollectionSpec:
    """A collection with a field for each location that its schema names."""
    schema = Frozen({"type": "object", "properties": properties})
    fields = [
        Field(name="flow_document", location=""),
        Field(name="flow_published_at", location="/_meta/uuid"),
        *_fields(compiled(schema.text).shape, ""),
    ]
    return CollectionSpec(
        name=name,
        key=("/id",),
        write_schema=schema,
        read_schema=schema,
        fields=tuple(fields),
        derivation=derivation,
    )


def _fields(shape: Shape, above: str) -> list[Field]:
    found = []
    for name, _, below in shape.children():
        if name is not None:
            at = f"{above}/{name}"
            found += [Field(name=at[1:], location=at), *_fields(below, at)]
    return found


def engine_of(
    lambdas: str | Sequence[str],
    source: dict[str, Any],
    target: dict[str, Any] | None = None,
    migrations: Sequence[str] = (),
) -> SqliteEngine:
    """The engine of a derivation with a transform for every lambda, all over one source."""
    codes = [lambdas] if isinstance(lambdas, str) else lambdas
    read = collection("acme/source", source)
    derived = collection(
        "acme/derived",
        target or {},
        derivation=DerivationSpec(
            using="sqlite",
            transforms=tuple(
                Transform(
                    name=f"t{i}",
                    source=Source(collection=read.name),
                    shuffle=("/id",),
                    code=code,
                )
                for i, code in enumerate(codes)
            ),
            shuffle_key_types=("integer",),
            migrations=tuple(migrations),
            shards=Shards(max_txn_s=60),
        ),
    )
    return SqliteEngine.of(Catalog(collections=(derived, read)), derived)


@dataclass
class Files:
    """State files in memory, and a directory for local copies."""

    local_dir: Path
    kept: dict[str, bytes] = field(default_factory=dict)

    def read(self, name: str) -> bytes:
        return self.kept[name]

    def write(self, data: bytes) -> str:
        name = secrets.token_hex(8)
        self.kept[name] = data
        return name


def reads(*documents: Document, transform: int = 0) -> list[SourceRead]:
    return [SourceRead(transform=transform, document=document) for document in documents]


def transaction(
    engine: RowEngine,
    documents: Sequence[SourceRead],
    files: Files,
    state: Json = None,
    *,
    shard: int = 0,
    shards: int = 1,
) -> tuple[list[tuple[int, Document]], Patches]:
    """Run one shard's transaction; return what it published, and its patches."""
    context = ShardContext(shard=shard, shards=shards, state=state or {}, files=files)
    processor = engine.open(context)
    try:
        published = list(processor.process(documents))
        finished = processor.finish()
        return published + [(-1, document) for document in finished.documents], finished.patches
    finally:
        processor.close()


def committed(state: Json, patches: Patches) -> Json:
    return apply_patches(state, patches)
