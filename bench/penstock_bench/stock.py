"""Journals in stock: documents whose sums are known, put into as many journals as one likes.

Publishers would take minutes to fill 10,000 journals. So fragments are written here by hand, by the
same writer, and appended many at a time. One producer writes a stock in one go: a document's clock
tells its number, and all is committed at one clock behind the last of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.consensus.open import open_consensus
from penstock.journal.blobs import BlobStore, open_blobs
from penstock.journal.fragments import FragmentLayout, FragmentWriter
from penstock.journal.journals import Journals, creation
from penstock.journal.names import JournalName
from penstock.journal.planning import Planner
from penstock.journal.rows import stamp_rows
from penstock.journal.schemas import Schemas, layout
from penstock.journal.state import AckRecord, Fragment, Record
from penstock.journal.transaction import batches
from penstock.model.clock import Clock, Flag, Producer, from_unix
from penstock.model.spec import CollectionSpec, Field, Frozen
from penstock.native.arrow_types import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_pa: Any = pa  # the published stubs lack `Array.from_buffers`

START: Final = from_unix(1_700_000_000)
"""Before the clock of document 0."""

PRODUCER: Final = Producer.from_random(b"stocks")

FILL_AT_ONCE: Final = 500
"""Journals that are written together: their rows are held until they are appended."""

FILL_THREADS: Final = 8
"""Writers mostly wait for the disk."""

SCHEMA: Final = Frozen(
    {
        "type": "object",
        "required": ["customer", "id", "lot", "note", "part"],
        "additionalProperties": False,
        "properties": {
            "customer": {"type": "integer"},
            "id": {"type": "integer"},
            "lot": {"type": "integer"},
            "note": {"type": "string"},
            "part": {"type": "integer"},
        },
    }
)

Integers = npt.NDArray[np.int64]


def collection(name: str, by: str) -> CollectionSpec:
    """Documents by customer, with a journal for each lot or for each part."""
    return CollectionSpec(
        name=name,
        key=("/customer",),
        write_schema=SCHEMA,
        read_schema=SCHEMA,
        fields=(Field(name=by, location=f"/{by}", partition=True),),
    )


# --------------------------------------------------------------------------------------- documents


@dataclass(frozen=True, slots=True)
class Sums:
    """What tells whether documents are the same ones: how many, and a sum over their contents."""

    documents: int = 0
    checksum: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.documents + other.documents, self.checksum + other.checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Documents numbered from 0, which say it all: neighbours share a part, and parts a lot."""

    documents: int
    lots: int
    parts: int
    note_bytes: int = 32

    def __post_init__(self) -> None:
        if self.documents % self.parts or self.documents % self.lots or self.note_bytes % 16:
            raise ValueError(f"{self} cannot be cut into equal pieces")

    @property
    def customers(self) -> int:
        """Each has about ten documents."""
        return max(1, self.documents // 10)

    @property
    def committed_at(self) -> Clock:
        """The clock of every ACK."""
        return Clock(START + self.documents)

    def pieces(self, by: str) -> list[range]:
        """The numbers of documents, lot by lot or part by part."""
        size = self.documents // (self.lots if by == "lot" else self.parts)
        return [range(at, at + size) for at in range(0, self.documents, size)]

    def customers_of(self, ids: Integers) -> Integers:
        """Customers come in no order."""
        return ids * 2_654_435_761 % self.customers

    def made(self, ids: range) -> pa.RecordBatch:
        """Documents with these numbers. Notes do not compress to less than half."""
        count = len(ids)
        numbers = np.arange(ids.start, ids.stop)
        offsets = np.arange(0, count * self.note_bytes + 1, self.note_bytes, dtype=np.int32)
        buffers = [None, _pa.py_buffer(offsets), _pa.py_buffer(_noise(ids, self.note_bytes // 16))]
        columns: dict[str, Any] = {
            "customer": _pa.array(self.customers_of(numbers)),
            "id": _pa.array(numbers),
            "lot": _pa.array(numbers * self.lots // self.documents),
            "note": _pa.Array.from_buffers(_pa.utf8(), count, buffers),
            "part": _pa.array(numbers * self.parts // self.documents),
        }
        schema = arrow_schema(layout(SCHEMA.text))
        arrays = [columns[field.name].cast(field.type) for field in schema]
        batch: pa.RecordBatch = _pa.RecordBatch.from_arrays(arrays, schema=schema)
        return batch

    def rows(self, ids: range, *, batch_bytes: int = 8 << 20) -> Iterator[pa.RecordBatch]:
        """Documents as rows of the producer, by the batch."""
        root = layout(SCHEMA.text)
        step = max(1, batch_bytes // self.note_bytes)
        for first in range(ids.start, ids.stop, step):
            yield stamp_rows(
                self.made(range(first, min(first + step, ids.stop))),
                root,
                producer=PRODUCER,
                first_clock=Clock(START + first),
                flags=Flag.CONTINUE_TXN,
            )


def _noise(ids: range, words: int) -> bytes:
    """Sixteen hexadecimal digits for each word of each document (splitmix64 of its number)."""
    mixed = np.arange(ids.start * words, ids.stop * words, dtype=np.uint64)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).tobytes().hex().encode()


def sums_of(documents: pa.RecordBatch) -> Sums:
    """Of documents before they are written."""
    ids, notes = (documents.column(name).to_pylist() for name in ("id", "note"))
    texts = (f"{number}:{note}".encode() for number, note in zip(ids, notes, strict=True))
    return Sums(documents.num_rows, sum(map(zlib.crc32, texts)))


def read_to_the_end(frame: DataFrame, document: str) -> Sums:
    """Let Spark read every row of a shuffle, in its order, and keep nothing but the sums."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    seen = Observation()
    text = f.concat_ws(":", f.col(f"{document}.id").cast("string"), f.col(f"{document}.note"))
    observed = frame.observe(
        seen,
        f.count(f.lit(1)).alias("documents"),
        # A sum of none is NULL.
        f.coalesce(f.sum(f.crc32(text)), f.lit(0)).alias("checksum"),
    )
    observed.write.format("noop").mode("overwrite").save()
    return Sums(**seen.get)


# ------------------------------------------------------------------------------------------ stores


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A deployment of its own."""

    journals: Journals
    blobs: BlobStore
    schemas: Schemas

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, data: Path, blobs: BlobStore | None = None) -> AsyncIterator[Self]:
        """The one in a directory, made if there is none."""
        store = await open_consensus(f"sqlite:///{data}/consensus.db")
        try:
            yield cls(
                journals=Journals(store),
                blobs=blobs or open_blobs(str(data / "blobs")),
                schemas=Schemas(store),
            )
        finally:
            await store.close()

    @property
    def planner(self) -> Planner:
        return Planner(journals=self.journals, blobs=self.blobs, schemas=self.schemas)


@contextlib.contextmanager
def staged(data: Path, blobs: BlobStore | None = None) -> Iterator[tuple[Stage, asyncio.Runner]]:
    """A stage, and the event loop it lives on, for peers that are plain functions."""
    with asyncio.Runner() as loop:
        stage = Stage.opened(data, blobs)
        here = loop.run(stage.__aenter__())
        try:
            yield here, loop
        finally:
            loop.run(stage.__aexit__(None, None, None))


async def fill(here: Stage, spec: CollectionSpec, stock: Stock) -> Sums:
    """Put a stock into the journals of a collection: what was written, in sum."""
    await here.schemas.put(spec.write_schema)
    (field,) = spec.partitions
    pieces = enumerate(stock.pieces(field.name))
    ack = AckRecord(producer=PRODUCER, clock=stock.committed_at)
    written = Sums()
    with ThreadPoolExecutor(FILL_THREADS) as threads:
        while some := list(islice(pieces, FILL_AT_ONCE)):
            names = [JournalName.of(spec.name, {field.name: number}) for number, _ in some]
            await here.journals.create_all({name: creation(name) for name in names})
            writing = [
                threads.submit(write, here, spec, name, stock, ids)
                for name, (_, ids) in zip(names, some, strict=True)
            ]
            records: dict[str, tuple[Record, ...]] = {}
            for name, each in zip(names, writing, strict=True):
                fragment, sums = each.result()
                records[str(name)] = (fragment, ack)
                written += sums
            for parts in batches(records):
                await here.journals.append_all(parts)
    return written


def write(
    here: Stage, spec: CollectionSpec, name: JournalName, stock: Stock, ids: range
) -> tuple[Fragment, Sums]:
    """Some documents as one fragment that can be appended to a journal."""
    sums: list[Sums] = []

    def rows() -> Iterator[pa.RecordBatch]:
        for batch in stock.rows(ids):
            sums.append(sums_of(batch))
            yield batch

    with FragmentWriter(here.blobs, name.prefix, FragmentLayout.of(spec), "bench") as writer:
        for written in rows():
            writer.write(written)
        made = writer.finish()
    if made is None:
        raise ValueError("a fragment has documents")
    return made, sum(sums, Sums())
