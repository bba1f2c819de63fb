"""Appending documents to a collection as one transaction: `penstock append` and the Python API.

Documents are validated first. If one does not fit the collection's schema, nothing is appended,
unless the caller skips such documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from penstock import wall_clock
from penstock.catalog.collection_lookup import find_collection, salt_of
from penstock.catalog.intake import Chunk, Intake, RefusedLine
from penstock.journal.blobs import BlobStore
from penstock.journal.frame_append import REFUSALS_SHOWN, documents_refused
from penstock.journal.inferred import learn
from penstock.journal.journals import Journals
from penstock.journal.ownership import Ownership
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas
from penstock.journal.transaction import Intents
from penstock.model.clock import Clock, Producer
from penstock.model.observed import observe
from penstock.model.schema import compiled
from penstock.model.spec import Catalog
from penstock.native.arrow import to_json
from penstock.runtime.waiting import in_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    """One committed append."""

    collection: str
    documents: int
    bytes: int
    """As stored."""
    journals: tuple[str, ...]
    skipped: int
    revision: int | None
    """Store revision at which all of it became visible. None if nothing was appended, or if the
    caller did not ask for it."""


async def append_documents(
    journals: Journals,
    blobs: BlobStore,
    schemas: Schemas,
    ownership: Ownership,
    catalog: Catalog,
    collection: str,
    read: Callable[[Intake], Iterator[Chunk]],
    *,
    redact_salt: str | None = None,
    skip_invalid: bool = False,
    on_refused: Callable[[str], None] = lambda _: None,
    on_chunk: Callable[[Chunk], None] = lambda _: None,
    with_revision: bool = False,
    now: Callable[[], Clock] = wall_clock.now,
) -> AppendResult:
    """Append what `read` yields as one transaction: readers see all of the documents, or none.

    `on_refused` receives a line of text for each of the first refused documents, `on_chunk` each
    chunk once it is published. Raises DocumentsRefused, which lists the same lines.
    """
    spec = find_collection(catalog, collection)
    schema = compiled(spec.write_schema.text)
    intake = Intake(schema, salt=salt_of(spec, catalog, redact_salt))
    await ownership.check()
    publisher = Publisher(
        journals,
        blobs,
        schemas,
        [Mapped(spec=spec)],
        producer=Producer.from_random(os.urandom(6)),
        now=now,
        ownership=ownership,
    )
    refusals = _Refusals(on_refused, skip=skip_invalid)
    chunks = read(intake)
    try:
        # In a thread, so that a stop is heard while a pipe is silent.
        while (chunk := await in_thread(lambda: next(chunks, None))) is not None:
            refusals.add(chunk.refused)
            if refusals.enough:
                break
            if chunk.documents is not None and (skip_invalid or not refusals.count):
                if spec.reads_inferred:
                    texts = to_json(chunk.documents, intake.root)
                    seen = observe([msgspec.json.decode(text) for text in texts])
                    await learn(journals.store, collection, seen=seen)
                await publisher.publish(0, chunk.documents)
            on_chunk(chunk)
        refusals.check(collection)
        intents = await publisher.commit_now()
    except BaseException:
        await publisher.abort()
        raise
    count = publisher.count(0)
    return AppendResult(
        collection=collection,
        documents=count.documents,
        bytes=count.bytes,
        journals=intents.journals,
        skipped=refusals.count,
        revision=await _revision(journals, intents) if with_revision else None,
    )


class _Refusals:
    """Refused documents: the first ones reported, all of them counted."""

    def __init__(self, report: Callable[[str], None], *, skip: bool) -> None:
        self._report = report
        self._skip = skip
        self._shown: list[str] = []
        self.count = 0

    @property
    def enough(self) -> bool:
        """True if there is no use in reading on."""
        return not self._skip and self.count >= REFUSALS_SHOWN

    def add(self, refused: tuple[RefusedLine, ...]) -> None:
        for line in refused:
            if self.count < REFUSALS_SHOWN:
                self._shown.append(line.render())
                self._report(self._shown[-1])
            elif self.count == REFUSALS_SHOWN and self._skip:
                self._report("… and others, which are only counted")
            self.count += 1

    def check(self, collection: str) -> None:
        """Raise if a document is missing from the transaction that must not be."""
        if self.count and not self._skip:
            raise documents_refused(collection, self.count, self._shown)


async def _revision(journals: Journals, intents: Intents) -> int | None:
    """A writer learns the revision of its commit by reading it back."""
    if not intents:
        return None
    commit = intents.commits[0]
    state = await journals.load(commit.journal)
    return next(
        (
            record.revision
            for record in reversed(state.records)
            if getattr(record, "clock", None) == commit.clock
        ),
        None,
    )
