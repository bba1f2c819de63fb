"""A collection, a world to publish it in, and what can be read there."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow

from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import Command, append_all
from penstock.journal.blobs import BlobStore, open_blobs
from penstock.journal.journals import Journals
from penstock.journal.publisher import JournalBinding, Mapped, Publisher, PublisherOptions
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas, layout
from penstock.journal.state import JournalState, Page, Seal
from penstock.journal.sweeping import GarbageReport, collect_garbage
from penstock.model.clock import Clock, Producer, from_unix
from penstock.model.spec import CollectionSpec, Field, Frozen
from penstock.native.arrow import to_arrow

SCHEMA = {
    "type": "object",
    "required": ["id", "region"],
    "properties": {
        "id": {"type": "integer"},
        "region": {"type": ["string", "null"]},
        "text": {"type": "string"},
    },
}

Document = dict[str, Any]


def collection(
    name: str = "acme/orders", *, partitioned: bool = True, schema: Document = SCHEMA
) -> CollectionSpec:
    return CollectionSpec(
        name=name,
        key=("/id",),
        write_schema=Frozen(schema),
        read_schema=Frozen(schema),
        fields=(Field(name="region", location="/region", partition=partitioned),),
    )


ORDERS = collection()


@dataclass
class World:
    """What survives: a store and objects. Everything else is made anew after a crash."""

    journals: Journals
    blobs: BlobStore
    schemas: Schemas

    def publisher(
        self,
        *bindings: JournalBinding,
        options: PublisherOptions = PublisherOptions(),  # noqa: B008 - frozen
        now: Clock | None = None,
    ) -> Publisher:
        ticks = count(0 if now is None else now, 16)
        start = from_unix(1_700_000_000)
        return Publisher(
            self.journals,
            self.blobs,
            self.schemas,
            bindings or (Mapped(spec=ORDERS),),
            producer=Producer.from_random(os.urandom(6)),
            now=lambda: Clock(next(ticks) if now is not None else start + next(ticks)),
            options=options,
        )

    def reader(self, name: str = "acme/orders", **options: Any) -> CollectionReader:  # noqa: ANN401
        return CollectionReader(self.journals, self.blobs, self.schemas, name, **options)

    async def read(
        self,
        name: str = "acme/orders",
        **options: Any,  # noqa: ANN401 - those of the reader
    ) -> dict[str, list[Document]]:
        """Documents by journal, in the order they are shown."""
        reader = self.reader(name, **options)
        found: dict[str, list[Document]] = {}
        async for rows in reader.read():
            lines = to_lines(rows.batch, rows.root)
            found.setdefault(rows.journal, []).extend(map(json.loads, lines))
        return found


@asynccontextmanager
async def world(directory: Path, url: str = "memory:") -> AsyncIterator[World]:
    store = await open_consensus(url)
    try:
        yield World(Journals(store), open_blobs(str(directory / "blobs")), Schemas(store))
    finally:
        await store.close()


def batch(documents: Sequence[Document], spec: CollectionSpec = ORDERS) -> pyarrow.RecordBatch:
    return to_arrow(list(documents), layout(spec.write_schema.text))


async def seal_as(journals: Journals, name: str, page: Page) -> JournalState:
    """Say that the oldest records are in this page."""
    log = journals.log(name)
    await append_all([Command(log, lambda _: Seal(page=page))])
    return log.state


LATER_S = 4e9
"""Long after every object was written."""


async def swept(here: World, now_s: float = LATER_S) -> GarbageReport:
    """What two collections remove, the second of which comes after the quarantine."""
    await collect_garbage(here.journals, here.blobs, now_s=now_s)
    return await collect_garbage(here.journals, here.blobs, now_s=max(now_s, LATER_S))
