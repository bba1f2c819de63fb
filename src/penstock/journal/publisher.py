"""Publishing: documents into journals, in transactions.

A **publisher** is one producer at work. Documents are stamped, go to the journals of their binding,
and stay invisible (CONTINUE_TXN) until an ACK in each of those journals commits them:

    publish     rows are held back, and written to objects of the blob store as they become many
    adopt       fragments that Spark tasks have written, each under a producer of its own, join the
                transaction by reference (`staging`)
    flush       everything published so far is durable and part of its journals, still unseen
    commit      flush, and the ACKs as `Intents`, which the caller makes durable with its own state;
                then `write_intents` appends them: now, or after a crash, as often as it takes
    commit_now  for a caller without a state: rows and ACKs in as few store transactions as they
                fit, which is one if the transaction is not huge; all journals or none

The order is what makes a crash harmless: objects, then rows that name them, then intents, then
ACKs. Before the intents are durable nothing counts; after, everything will. Appending an ACK twice
does nothing to readers (ACK_DUPLICATE), so replaying intents needs to know nothing.

**A producer is never used again after an abort.** Rows it left behind in some journal would be
committed by its next ACK there. So a publisher that fails, or is left with a transaction open, is
retired: every call is refused. For the same reason nothing of the next transaction may be published
before the ACKs of this one are written.

Rows are held in memory up to `PublisherOptions.buffer_bytes`, records of written objects up to
`pending_bytes`; then the publisher writes, and its caller waits. What was written and is named by
no journal is garbage like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow

from penstock import failpoints
from penstock.consensus.statelog import Command
from penstock.errors import Bug, PenstockError, UserError
from penstock.journal.blobs import BlobStore
from penstock.journal.fragments import GROUP_BYTES, FragmentLayout, FragmentWriter
from penstock.journal.journals import Journals, MissingJournal, creation
from penstock.journal.names import KEY_HASH_MAX, JournalName
from penstock.journal.ownership import Ownership
from penstock.journal.partition import JournalRouting, PhysicalPartitions
from penstock.journal.rows import stamp_rows
from penstock.journal.schemas import Schemas
from penstock.journal.sealing import seal_if_long
from penstock.journal.staging import FragmentStaging, StagedFragments
from penstock.journal.state import Fragment
from penstock.journal.transaction import (
    LIMITS,
    BatchLimits,
    Intents,
    Parts,
    batches,
    close,
    entry_bytes,
)
from penstock.model.clock import NEVER, Clock, Flag, Producer, catch_up, duration, elapsed, tick
from penstock.model.hints import Commit
from penstock.model.spec import CollectionSpec

_log = logging.getLogger(__name__)

PARTITIONS_MAX: Final = 100
"""Journals of a collection that are made on demand: a field with more values is a mistake."""

UNLIMITED: Final = "ops/"
"""Collections below may have any number of partitions: one for each task."""

UNNAMED_S_MAX: Final = 3600
"""The age of an object that no journal names, above which garbage collection may have taken it."""

OPEN_S_MAX: Final = 24 * 3600
"""The age of a transaction above which it cannot be closed any more. Readers forget a writer that
has left one open for twice as long."""

_OBJECT = failpoints.declare("publisher.object", "an object is written, no record names it yet")
_ADOPTED = failpoints.declare(
    "publisher.adopted", "fragments of a task are adopted, no record names them yet"
)
_ROWS = failpoints.declare("publisher.rows", "rows are appended, their ACKs are not")
_FLUSHED = failpoints.declare("publisher.flushed", "all rows are appended, there are no intents")
_INTENTS = failpoints.declare("publisher.intents", "intents are made, and not stored yet")
_ACKS = failpoints.declare("publisher.acks", "ACKs are appended, perhaps not yet all of them")
_DONE = failpoints.declare("publisher.done", "a transaction is committed, unknown to its caller")


class Retired(PenstockError):
    """This publisher failed or was aborted; its producer must not write again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A collection: partition values and key decide the journal, which is made if missing."""

    spec: CollectionSpec

    def covers(self, journal: str) -> bool:
        return journal.startswith(f"{self.spec.name}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """One journal, which must exist; its documents are of the collection's schema."""

    spec: CollectionSpec
    journal: str

    def covers(self, journal: str) -> bool:
        return journal == self.journal


JournalBinding = Mapped | Fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """Limits of a publisher's memory, and of what it writes at once."""

    feed_bytes: int = 4 << 20
    """Rows of one journal that wait for their writer: a step of it, off the event loop."""
    buffer_bytes: int = 128 << 20
    """Rows of all journals in memory; above, the largest fragment ends early."""
    pending_bytes: int = 1 << 20
    """Records of objects that no journal names yet; above, they are appended."""
    pending_s: int = 1800
    """Time that such records wait at most while documents are published."""
    steps_max: int = 8
    steps_bytes: int = 16 << 20
    """Journals that are written to at once: many that are small, or one that is large. Encoding a
    row group takes several times its size, and one at a time keeps up with the caller."""
    partitions_max: int = PARTITIONS_MAX
    limits: BatchLimits = LIMITS


@dataclass(slots=True)
class Count:
    """Documents and bytes that were appended and are durable; attempts do not count."""

    documents: int = 0
    bytes: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class _Target:
    """A binding in use."""

    binding: JournalBinding
    layout: FragmentLayout
    routing: JournalRouting
    count: Count = field(default_factory=Count)

    @property
    def spec(self) -> CollectionSpec:
        return self.binding.spec

    @property
    def journals(self) -> int:
        return sum(len(covered.journals) for covered in self.routing.covered.values())


@dataclass(slots=True, eq=False, kw_only=True)
class _Part:
    """The rows of the open transaction for one journal, on their way; the oldest are furthest.

    rows, in memory → writer, some of them in an object that is not finished → fragments, durable
    → appended, which nothing needs to remember.
    """

    target: _Target
    prefix: str
    layout: FragmentLayout
    rows: list[pyarrow.RecordBatch] = field(default_factory=list)
    rows_bytes: int = 0
    writer: FragmentWriter | None = None
    fed_bytes: int = 0
    fragments: list[Fragment] = field(default_factory=list)
    producers: set[Producer] = field(default_factory=set)
    """Whose rows these are: each needs an ACK."""
    step: asyncio.Task[None] | None = None
    """The writer at work, in a thread: one step at a time."""

    @property
    def held_bytes(self) -> int:
        """Rows in memory, at most."""
        return self.rows_bytes + min(self.fed_bytes, GROUP_BYTES)

    def write(
        self,
        blobs: BlobStore,
        rows: Iterable[pyarrow.RecordBatch],
        attempt: str,
        claim: Callable[[], None],
        *,
        end: bool,
    ) -> None:
        """Take rows to the writer, and to an end if they are the last, or the fragment is full."""
        for batch in rows:
            if self.writer is None:
                self.writer = FragmentWriter(blobs, self.prefix, self.layout, attempt, claim=claim)
            self.writer.write(batch)
            if self.writer.full:
                self._finish()
        if end:
            self._finish()

    def _finish(self) -> None:
        writer, self.writer, self.fed_bytes = self.writer, None, 0
        if writer is not None:
            with writer:
                fragment = writer.finish()
            if fragment is not None:
                self.fragments.append(fragment)
                failpoints.hit(_OBJECT)

    def discard(self) -> None:
        """Leave nothing half written behind."""
        if self.writer is not None:
            with self.writer:
                pass


class Publisher:
    """One producer, and its open transaction. Used by one coroutine at a time."""

    def __init__(
        self,
        journals: Journals,
        blobs: BlobStore,
        schemas: Schemas,
        bindings: Sequence[JournalBinding],
        *,
        producer: Producer,
        now: Callable[[], Clock],
        options: PublisherOptions = PublisherOptions(),
        ownership: Ownership | None = None,
    ) -> None:
        self.producer = producer
        self._journals = journals
        self._blobs = blobs
        self._ownership = ownership or Ownership(journals, blobs)
        self._schemas = schemas
        self._bindings = tuple(bindings)
        self._now = now
        self._options = options
        self._targets: dict[int, _Target] = {}
        self._clock = NEVER
        self._parts: dict[str, _Part] = {}
        self._unnamed_since: Clock | None = None
        """Not after the first object was finished that no journal names."""
        self._open_since: Clock | None = None
        """When the transaction was begun."""
        self._adopted: set[Producer] = set()
        """Producers of tasks whose fragments are in the transaction."""
        self._closed = NEVER
        """The clock of the last transaction's ACKs."""
        self._unwritten: Intents | None = None
        self._retired = False

    def count(self, binding: int) -> Count:
        """Return what was appended for a binding so far."""
        return self._targets[binding].count if binding in self._targets else Count()

    # ------------------------------------------------------------------------------ transactions

    async def publish(self, binding: int, documents: pyarrow.RecordBatch) -> None:
        """Add documents to the transaction: valid ones, as the write schema lays them out.

        Waits while too much is held back.
        """
        async with self._working():
            self._check_acknowledged()
            if not documents.num_rows:
                return
            target = await self._target(binding)
            now = self._fresh()
            self._open_since = self._open_since or now
            first = catch_up(Clock(self._clock + 1), now)
            self._clock = Clock(first + documents.num_rows - 1)
            rows = stamp_rows(
                documents,
                target.layout.root,
                producer=self.producer,
                first_clock=first,
                flags=Flag.CONTINUE_TXN,
            )
            async for journal, routed in self._routed(target, rows):
                part = self._part(target, journal)
                part.producers.add(self.producer)
                part.rows.append(routed)
                part.rows_bytes += routed.nbytes
            await self._relieve(now)

    async def staging(self, binding: int) -> FragmentStaging:
        """Return what tasks need to write fragments of this transaction (`stage_fragments`)."""
        async with self._working():
            self._check_acknowledged()
            target = await self._target(binding)
            await self._ownership.claim()  # before tasks write objects
            now = self._fresh()
            self._open_since = self._open_since or now
            self._clock = catch_up(Clock(self._clock + 1), now)
            return FragmentStaging(
                publisher=self.producer,
                binding=binding,
                since=self._clock,
                blobs=self._blobs,
                spec=target.spec,
                journal=target.binding.journal if isinstance(target.binding, Fixed) else None,
                covered=target.routing.covered,
            )

    async def adopt(self, staged: StagedFragments) -> None:
        """Add fragments that a task has written to the transaction, by reference.

        Journals of partition values that are new are created. The producer of the fragments gets an
        ACK beside this publisher's own, so both are seen at once. Only for what a successful
        attempt reports: each producer once, and for the transaction it was staged in.
        """
        async with self._working():
            self._check_acknowledged()
            if staged.publisher != self.producer or staged.since <= self._closed:
                raise Bug(
                    f"fragments of producer {staged.producer} were staged for another transaction",
                    why="their task outlived it, and its work was done again or given up",
                )
            if staged.producer in self._adopted:
                raise Bug(f"fragments of producer {staged.producer} are adopted twice")
            self._adopted.add(staged.producer)
            # Objects may be as old as the staging: garbage collection spares them only so long.
            self._unnamed_since = min(self._unnamed_since or staged.since, staged.since)
            now = self._fresh()
            target = await self._target(staged.binding)
            await self._create_adopted(target, staged)
            for journal, fragments in staged.fragments.items():
                _check_covered(target, journal, fragments)
                part = self._part(target, journal)
                part.producers.add(staged.producer)
                part.fragments += fragments
            self._clock = max(self._clock, staged.last_clock)
            failpoints.hit(_ADOPTED)
            await self._relieve(now)

    async def flush(self) -> None:
        """Make all that was published durable, and part of its journals."""
        async with self._working():
            self._fresh()
            await self._write_out()
            await self._append_fragments()

    async def commit(self) -> Intents:
        """Close the transaction: its ACKs, which have to be durable before they are written.

        If nothing was published there are none.
        """
        async with self._working():
            self._fresh()
            await self._write_out()
            await self._append_fragments()
            failpoints.hit(_FLUSHED)
            self._unwritten = intents = self._intents()
            self._end_transaction()
            failpoints.hit(_INTENTS)
            return intents

    async def commit_now(self, *, also: Sequence[Command[Any, Any]] = ()) -> Intents:
        """Close the transaction and commit it, in all its journals at once; its ACKs, written.

        For a caller without a state of its own: after a crash, it has happened or not. `also` are
        commands on other logs that happen with it, in the same store transaction; one that refuses
        keeps all of it from happening. They are left out if nothing was published.
        """
        async with self._working():
            self._fresh()
            await self._write_out()
            intents = self._intents()
            pending = {name: part.fragments for name, part in self._parts.items()}
            closing = close(intents, pending, self._options.limits)
            if not closing.atomic:
                raise UserError(
                    f"the transaction writes to {len(intents.journals)} journals",
                    why=f"at most {self._options.limits.journals} can be committed at once",
                    fix="append in smaller pieces, or partition the collection less",
                )
            for parts in closing.rows:
                await self._append(parts)
                failpoints.hit(_ROWS)
            for parts in closing.acks:
                await self._append(parts, also)
                failpoints.hit(_ACKS)
            self._end_transaction()
            failpoints.hit(_DONE)
            await self._seal(intents)
            return intents

    async def write_intents(self, intents: Intents) -> None:
        """Append ACKs to all their journals; doing it again changes nothing for readers.

        They may be those of an earlier publisher, whose transaction was cut short by a crash, and
        of journals that no binding covers any more. If such a journal is gone, so is its ACK.
        """
        async with self._working():
            for parts in close(intents, {}, self._options.limits).acks:
                await self._acknowledge(parts)
                failpoints.hit(_ACKS)
            if self._unwritten and set(self._unwritten.commits) <= set(intents.commits):
                self._unwritten = None
            failpoints.hit(_DONE)
            await self._seal(intents)

    async def abort(self) -> None:
        """Give up the transaction, and with it the producer: no row of it will be seen."""
        self._retired = True
        parts, self._parts = self._parts, {}
        steps = [part.step for part in parts.values() if part.step is not None]
        await asyncio.gather(*steps, return_exceptions=True)
        for part in parts.values():
            await asyncio.to_thread(part.discard)

    @contextlib.asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        """One call. If it fails or is cancelled, the transaction is lost, and the producer."""
        if self._retired:
            raise Retired(
                f"producer {self.producer} is retired",
                why="its last transaction was aborted, and some of it may be in journals",
                fix="start over with a new publisher",
            )
        try:
            yield
        except BaseException:
            await self.abort()
            raise

    def _check_acknowledged(self) -> None:
        if self._unwritten:
            raise Bug(
                "publishing before the ACKs of the last transaction are written",
                why="after a crash, they would commit some of this one too",
            )

    def _fresh(self) -> Clock:
        """The time, unless it is too late for this transaction."""
        now = self._now()
        if self._unnamed_since and elapsed(now, self._unnamed_since) > duration(UNNAMED_S_MAX):
            raise PenstockError(
                "the transaction stood still for too long",
                why="objects that no journal names within an hour may be taken for garbage",
                fix="flush, or commit, before waiting for anything",
            )
        if self._open_since and elapsed(now, self._open_since) > duration(OPEN_S_MAX):
            raise PenstockError(
                "the transaction has been open for more than a day",
                why="readers take its writer for dead, and would not see what it commits",
                fix="append again, in smaller transactions",
            )
        return now

    def _intents(self) -> Intents:
        """The ACKs of everything that is published, under a clock above all of it."""
        self._clock = tick(self._clock)
        commits = (
            Commit(name, producer, self._clock)
            for name, part in self._parts.items()
            for producer in part.producers
        )
        return Intents.of(commits, self._options.limits)

    def _end_transaction(self) -> None:
        """Forget what is appended."""
        self._parts, self._unnamed_since, self._open_since = {}, None, None
        self._adopted, self._closed = set(), self._clock

    # ------------------------------------------------------------------------------------ writing

    async def _relieve(self, now: Clock) -> None:
        """Write while there is too much of anything."""
        options = self._options
        for part in self._parts.values():
            if part.rows_bytes >= options.feed_bytes:
                await self._step(part)
        while sum(part.held_bytes for part in self._parts.values()) > options.buffer_bytes:
            largest = max(self._parts.values(), key=lambda part: part.held_bytes)
            await self._step(largest, end=True)
            await _ended(largest)
        pending = [part.fragments for part in self._parts.values() if part.fragments]
        old = elapsed(now, self._unnamed_since or now) > duration(options.pending_s)
        if pending and (old or sum(map(entry_bytes, pending)) > options.pending_bytes):
            await self._append_fragments()

    async def _write_out(self) -> None:
        """Everything into fragments that are durable."""
        for part in self._parts.values():
            await self._step(part, end=True)
        for part in self._parts.values():
            await _ended(part)

    async def _step(self, part: _Part, *, end: bool = False) -> None:
        """Start to write what waits for a journal, when its last step has ended and others may."""
        await _ended(part)
        self._unnamed_since = self._unnamed_since or self._now()
        while running := self._in_the_way(part):
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        rows, part.rows = part.rows, []
        part.fed_bytes, part.rows_bytes = part.fed_bytes + part.rows_bytes, 0
        claim = functools.partial(self._claim, asyncio.get_running_loop())
        attempt = str(self.producer)
        written = asyncio.to_thread(part.write, self._blobs, rows, attempt, claim, end=end)
        part.step = asyncio.create_task(written)

    def _claim(self, loop: asyncio.AbstractEventLoop) -> None:
        """See that the blob store may be written to; called by threads, before each object."""
        if not self._ownership.is_claimed:
            asyncio.run_coroutine_threadsafe(self._ownership.claim(), loop).result()

    def _in_the_way(self, part: _Part) -> list[asyncio.Task[None]]:
        """The steps of which one has to end before another may begin."""
        running = [(p, p.step) for p in self._parts.values() if p.step and not p.step.done()]
        size = part.held_bytes + sum(other.held_bytes for other, _ in running)
        full = len(running) >= self._options.steps_max or size > self._options.steps_bytes
        return [step for _, step in running] if full else []

    async def _append_fragments(self) -> None:
        """Every fragment that is durable becomes part of its journal."""
        for part in self._parts.values():
            await _ended(part)
        pending = {name: part.fragments for name, part in self._parts.items() if part.fragments}
        for parts in batches(pending, self._options.limits):
            await self._append(parts)
            failpoints.hit(_ROWS)
        for part in self._parts.values():
            part.fragments = []
        self._unnamed_since = None

    async def _append(self, parts: Parts, also: Sequence[Command[Any, Any]] = ()) -> None:
        """Append, under one revision, and count what was appended."""
        await self._journals.append_all(parts, also=also)
        for journal, records in parts.items():
            count = self._parts[journal].target.count
            for record in records:
                if isinstance(record, Fragment):
                    count.documents += record.rows
                    count.bytes += record.bytes

    async def _acknowledge(self, parts: Parts) -> None:
        try:
            await self._journals.append_all(parts)
        except MissingJournal:
            gone = [name for name in parts if not await self._journals.exists(name)]
            if not gone or any(b.covers(name) for b in self._bindings for name in gone):
                raise
            _log.warning("ACKs of journals that are gone were dropped: %s", ", ".join(gone))
            await self._acknowledge({n: acks for n, acks in parts.items() if n not in gone})

    async def _seal(self, intents: Intents) -> None:
        """Keep the journals of a transaction small, now that it is committed and seen."""
        for name in intents.journals:
            await seal_if_long(self._journals, self._blobs, name)

    # ------------------------------------------------------------------------------------ routing

    async def _target(self, binding: int) -> _Target:
        """A binding's target; the first time, its schema is registered and its journals listed."""
        if binding not in self._targets:
            bound = self._bindings[binding]
            spec = bound.spec
            layout = FragmentLayout.of(spec)
            routing = JournalRouting(spec, layout.root, {})
            target = _Target(binding=bound, layout=layout, routing=routing)
            await self._schemas.put(spec.write_schema)
            match bound:
                case Mapped():
                    await self._list(target)
                case Fixed():
                    if not await self._journals.exists(bound.journal):
                        await self._journals.load(bound.journal)  # which says what there is instead
            self._targets[binding] = target
        return self._targets[binding]

    def _part(self, target: _Target, journal: str) -> _Part:
        if (part := self._parts.get(journal)) is None:
            layout, covered = target.layout, target.routing.range_of(journal)
            if covered is not None:
                layout = replace(layout, key_begin=covered[0], key_end=covered[1])
            prefix = journal.rpartition("/")[0] + "/"
            part = self._parts[journal] = _Part(target=target, prefix=prefix, layout=layout)
        return part

    async def _routed(
        self, target: _Target, rows: pyarrow.RecordBatch
    ) -> AsyncIterator[tuple[str, pyarrow.RecordBatch]]:
        """Rows by journal; journals that are missing are made."""
        if isinstance(target.binding, Fixed):
            yield target.binding.journal, rows
            return
        routing = target.routing
        parts = routing.split(rows)
        await self._create(target, [n for n, _ in parts if n.prefix not in routing.covered])
        for name, part in parts:
            for journal, piece in routing.cover(name, part):
                if journal is not None:
                    yield journal, piece
                    continue
                await self._create(target, [name])
                for found, covered in routing.cover(name, piece):
                    if found is None:
                        raise Bug(f"no partition under {name.prefix} covers every key hash")
                    yield found, covered

    async def _create(self, target: _Target, names: Sequence[JournalName]) -> None:
        """Make partitions that cover everything; others may be making the same ones."""
        if not names:
            return
        limit, spec = self._options.partitions_max, target.spec
        if target.journals + len(names) > limit and not spec.name.startswith(UNLIMITED):
            fields = ", ".join(partition.name for partition in spec.partitions)
            raise UserError(
                f"{spec.name} would have more than {limit} partitions",
                where=str(names[0]),
                why=f"every combination of values of {fields or 'its partition fields'} is one",
                fix="partition by a field with few values",
            )
        await self._journals.create_all({name: creation(name) for name in names})
        # Whoever was first, what counts is what is there now.
        await self._list(target)

    async def _create_adopted(self, target: _Target, staged: StagedFragments) -> None:
        """Create the journals that tasks have written for and that do not exist yet."""
        if isinstance(target.binding, Mapped):
            unknown = [j for j in staged.fragments if target.routing.range_of(j) is None]
            names = [JournalName.parse(journal, target.spec.name) for journal in unknown]
            await self._create(target, names)

    async def _list(self, target: _Target) -> None:
        found: dict[str, list[tuple[str, int, int]]] = {}
        for journal in await self._journals.list(target.spec.name):
            state = journal.state
            prefix = JournalName.parse(journal.name, target.spec.name).prefix
            found.setdefault(prefix, []).append((journal.name, state.key_begin, state.key_end))
        target.routing.covered = {
            prefix: PhysicalPartitions.of(ranges) for prefix, ranges in found.items()
        }


def _check_covered(target: _Target, journal: str, fragments: Iterable[Fragment]) -> None:
    """Refuse rows that their journal does not cover."""
    begin, end = target.routing.range_of(journal) or (0, KEY_HASH_MAX)
    if any(f.key_hash_min < begin or f.key_hash_max > end for f in fragments):
        raise PenstockError(
            "a task has written rows for a journal that does not cover them",
            where=journal,
            why="its partition was divided while the task ran",
            fix="the transaction is given up, and starts over",
        )


async def _ended(part: _Part) -> None:
    """Wait for a journal's writer, and raise what it met."""
    if part.step is not None:
        await part.step
        part.step = None
