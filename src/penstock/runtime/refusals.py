"""Documents that were written under one schema, and are refused by the one they are read under.

Writers validate documents, so those that were written under the very schema they are
read under are not checked again. Records tell which those are: a fragment names its schema. Of
all others, each is checked in the job that reads it, before anything is reduced; a refused one ends
the job, and with it the session, before anything of the transaction is stored.

A job reports only *that* it met one. Which one is found out here, by reading the transaction
once more, with the validator, which can explain it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import PenstockError
from penstock.journal.blobs import BlobStore
from penstock.journal.committed import VisibleRows
from penstock.journal.fragments import read_fragment
from penstock.journal.planning import Planner
from penstock.journal.rows import STAMPS, Stamps, row_schema
from penstock.journal.splits import Piece, Split, pieces, read_split, schema_of
from penstock.journal.state import JournalState
from penstock.model.clock import Clock, DocumentId, Producer
from penstock.model.columns import Column
from penstock.model.schema import compiled, read_documents
from penstock.model.spec import fingerprint
from penstock.native.arrow import to_json
from penstock.shuffle.binding import Binding
from penstock.shuffle.delivery import Delivery

if TYPE_CHECKING:
    import pyarrow


class RefusedDocument(PenstockError):
    """A document that a binding's schema does not admit. The task stops at it."""


def are_foreign(binding: Binding, deliveries: Iterable[Delivery]) -> bool:
    """True if a document was validated by another schema than the one it is read under."""
    schema = fingerprint(binding.collection.read_schema)
    return any(rows.fragment.schema != schema for delivery in deliveries for rows in delivery.rows)


async def find(
    planner: Planner,
    binding: Binding,
    deliveries: Sequence[Delivery],
    states: Mapping[str, JournalState],
) -> RefusedDocument | None:
    """Find the first document of a binding's deliveries that is refused, and why."""
    schema = compiled(binding.collection.read_schema.text)
    async for journal, piece, written in _written(planner, deliveries, states):
        split = Split(pieces=(piece,), layouts={schema_of(piece): written})
        for batch in read_split(planner.blobs, split, written):
            rows = _within(binding, batch)
            for row, (_, violations) in enumerate(read_documents(schema, to_json(rows, written))):
                if violations:
                    stamps = Stamps.of(rows)
                    document = DocumentId(
                        producer=Producer(int(stamps.producer[row])),
                        clock=Clock(int(stamps.clock[row])),
                        flags=int(stamps.flags[row]),
                    )
                    return RefusedDocument(
                        f"a document of {binding.collection.name} is refused: {violations[0]}",
                        where=f"journal {journal}, document {document.uuid}",
                        why="it was written under another schema than the one it is read under"
                        + "".join(f"; {other}" for other in violations[1:]),
                        fix="let the schema it is read under (readSchema) admit it, or read from "
                        "a later time by notBefore; the task continues after its last transaction",
                    )
            await asyncio.sleep(0)  # let others use the event loop
    return None


async def locate(
    planner: Planner,
    deliveries: Iterable[Delivery],
    states: Mapping[str, JournalState],
    *,
    producer: Producer,
    clock: Clock,
) -> tuple[str, int] | None:
    """Return the journal and the offset of the document that a producer wrote at a clock."""
    for delivery in deliveries:
        if delivery.producer != producer or not delivery.first <= clock <= delivery.last:
            continue
        held = [rows for rows in delivery.rows if rows.run.clock_min <= clock <= rows.run.clock_max]
        state = states.get(delivery.journal)
        for rows in (await planner.resolve_rows(delivery.journal, held, state)).visible:
            root = await planner.schemas.layout(rows.fragment.schema)
            find = functools.partial(_offset, planner.blobs, rows, root, producer, clock)
            if (offset := await asyncio.to_thread(find)) is not None:
                return delivery.journal, offset
    return None


def _offset(
    blobs: BlobStore, rows: VisibleRows, root: Column, producer: Producer, clock: Clock
) -> int | None:
    begin = rows.fragment.begin
    for batch in read_fragment(
        blobs, rows.fragment, root, columns=row_schema(root).names[-STAMPS:]
    ):
        stamps = Stamps.of(batch)
        found = np.flatnonzero((stamps.producer == int(producer)) & (stamps.clock == int(clock)))
        if len(found):
            return begin + int(found[0])
        begin += batch.num_rows
    return None


async def _written(
    planner: Planner, deliveries: Sequence[Delivery], states: Mapping[str, JournalState]
) -> AsyncIterator[tuple[str, Piece, Column]]:
    """Yield the pieces of deliveries, journal by journal, with the layout each was written in."""
    for journal, some in _by_journal(deliveries):
        visible = (rows for delivery in some for rows in delivery.rows)
        scanned = await planner.resolve_rows(journal, visible, states.get(journal))
        for piece in pieces(scanned.visible):
            yield journal, piece, await planner.schemas.layout(schema_of(piece))


def _by_journal(deliveries: Sequence[Delivery]) -> Iterator[tuple[str, list[Delivery]]]:
    found: dict[str, list[Delivery]] = {}
    for delivery in deliveries:
        found.setdefault(delivery.journal, []).append(delivery)
    yield from sorted(found.items())


def _within(binding: Binding, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Drop the rows that a binding's bounds leave out."""
    import pyarrow

    kept = np.array([binding.bounds.admit(Clock(int(c))) for c in Stamps.of(rows).clock], np.bool_)
    return rows if kept.all() else rows.filter(pyarrow.array(kept))
