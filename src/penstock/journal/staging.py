"""Fragments that Spark tasks write, before a publisher adopts them.

The leader's publisher hands out a `FragmentStaging`, tasks turn documents into fragments with it,
and the leader adopts what successful attempts report (`Publisher.adopt`). Rows are never written
again: the leader appends the fragments to their journals by reference.

**Every attempt is a producer of its own**, drawn when it starts. So an attempt that died, or that
Spark ran beside another one, left objects that no journal names and a producer that no ACK will
ever name: garbage, which readers never see. A report says which publisher it is for and since
when; one of an earlier transaction, or of another leader, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Self

import msgspec
import pyarrow

from penstock import failpoints
from penstock.errors import Bug
from penstock.journal.blobs import BlobStore
from penstock.journal.codec import decode_page, encode_page
from penstock.journal.fragments import FragmentLayout, FragmentWriter
from penstock.journal.names import KEY_HASH_MAX
from penstock.journal.partition import JournalRouting, PhysicalPartitions
from penstock.journal.rows import stamp_rows
from penstock.journal.state import Fragment
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.spec import CollectionSpec
from penstock.native.arrow_types import arrow_schema

BUFFER_BYTES: Final = 64 << 20
"""Rows of all journals that one task holds in memory; above, the largest fragment ends early."""

_FORMAT: Final = 1

_OBJECT = failpoints.declare("staging.object", "a task has written an object, and not reported it")


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentStaging:
    """All that a task needs to write fragments for one binding of a publisher; picklable."""

    publisher: Producer
    """Whose publisher adopts what is written."""
    binding: int
    since: Clock
    """The clock of the first row of every attempt; above that of every earlier transaction."""
    blobs: BlobStore
    spec: CollectionSpec
    journal: str | None = None
    """The one journal of a fixed binding."""
    covered: Mapping[str, PhysicalPartitions] = field(default_factory=dict)
    """By logical partition, when the staging was made. Others are created on adoption."""
    buffer_bytes: int = BUFFER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFragments:
    """The report of one successful attempt: its fragments by journal, all of one producer."""

    publisher: Producer
    binding: int
    since: Clock
    producer: Producer
    last_clock: Clock
    fragments: Mapping[str, tuple[Fragment, ...]]
    """In the order of their clocks. Empty if the attempt had no documents."""

    def encode(self) -> bytes:
        """Encode it for the way from a task to its leader."""
        fragments = {journal: encode_page(made) for journal, made in self.fragments.items()}
        head = [int(self.publisher), self.binding, self.since, int(self.producer), self.last_clock]
        return msgspec.msgpack.encode([_FORMAT, *head, fragments])

    @classmethod
    def decode(cls, data: bytes) -> StagedFragments:
        """The report that `encode` wrote, by this release: none outlives its transaction."""
        version, publisher, binding, since, producer, last_clock, pages = msgspec.msgpack.decode(
            data, type=tuple[int, int, int, int, int, int, dict[str, bytes]]
        )
        if version != _FORMAT:
            raise Bug(f"a task reports fragments in format {version} instead of {_FORMAT}")
        fragments: dict[str, tuple[Fragment, ...]] = {}
        for journal, page in pages.items():
            fragments[journal] = tuple(r for r in decode_page(page) if isinstance(r, Fragment))
        return cls(
            publisher=Producer(publisher),
            binding=binding,
            since=Clock(since),
            producer=Producer(producer),
            last_clock=Clock(last_clock),
            fragments=fragments,
        )


def stage_fragments(
    staging: FragmentStaging, documents: Iterable[pyarrow.RecordBatch]
) -> StagedFragments:
    """Write documents as fragments: valid ones, as the write schema lays them out.

    Runs in a Spark task. Memory is `buffer_bytes`, and a row group for each of its journals.
    """
    with Stager(staging) as stager:
        for batch in documents:
            stager.write(batch)
        return stager.finish()


class Stager:
    """One attempt at work: a writer for each journal, until its fragment is full."""

    def __init__(self, staging: FragmentStaging) -> None:
        self._staging = staging
        self._layout = FragmentLayout.of(staging.spec)
        self._schema = arrow_schema(self._layout.root)
        self._routing = JournalRouting(staging.spec, self._layout.root, staging.covered)
        self._producer = Producer.from_random(os.urandom(6))
        self._next = staging.since
        self._writers: dict[str, FragmentWriter] = {}
        self._fragments: dict[str, list[Fragment]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for writer in self._writers.values():
            with writer:  # removes what is half written
                pass

    def write(self, documents: pyarrow.RecordBatch) -> None:
        if not documents.num_rows:
            return
        if documents.schema != self._schema:
            documents = documents.select(self._schema.names).cast(self._schema)  # as Spark has them
        rows = stamp_rows(
            documents,
            self._layout.root,
            producer=self._producer,
            first_clock=self._next,
            flags=Flag.CONTINUE_TXN,
        )
        self._next = Clock(self._next + rows.num_rows)
        if self._staging.journal is not None:
            self._add(self._staging.journal, rows)
            return
        for name, part in self._routing.split(rows):
            for journal, piece in self._routing.cover(name, part):
                self._add(journal or str(name), piece)

    def finish(self) -> StagedFragments:
        for journal in list(self._writers):
            self._end(journal)
        return StagedFragments(
            publisher=self._staging.publisher,
            binding=self._staging.binding,
            since=self._staging.since,
            producer=self._producer,
            last_clock=Clock(max(self._next - 1, self._staging.since)),
            fragments={journal: tuple(made) for journal, made in self._fragments.items()},
        )

    def _add(self, journal: str, rows: pyarrow.RecordBatch) -> None:
        writer = self._writers.get(journal)
        if writer is None:
            prefix = journal.rpartition("/")[0] + "/"
            begin, end = self._routing.range_of(journal) or (0, KEY_HASH_MAX)
            layout = replace(self._layout, key_begin=begin, key_end=end)
            attempt = str(self._producer)
            writer = FragmentWriter(self._staging.blobs, prefix, layout, attempt)
            self._writers[journal] = writer
        writer.write(rows)
        if writer.full:
            self._end(journal)
        held = {name: each.held_bytes for name, each in self._writers.items()}
        if sum(held.values()) > self._staging.buffer_bytes:
            self._end(max(held, key=held.__getitem__))

    def _end(self, journal: str) -> None:
        with self._writers.pop(journal) as writer:
            fragment = writer.finish()
        if fragment is not None:
            self._fragments.setdefault(journal, []).append(fragment)
            failpoints.hit(_OBJECT)
