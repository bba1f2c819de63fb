"""A test's world in memory: the documents of collections, derivations, and a time of its own.

Time is virtual. It moves by a microsecond with every document, which gives documents clocks that
rise in the order of their commits, and it jumps where a test waits for a delayed read. A test takes
no longer for a read that is delayed by a day.

Derivations run in turns, each after those it reads. In its turn a derivation takes reads that are
due, as many as the split of the run says, in one transaction. Whoever reads its output, itself
included, sees it in a later turn.
"""

from __future__ import annotations

import heapq
import itertools
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.catalog.testing.contents import Contents, Published
from penstock.catalog.testing.graph import Graph
from penstock.catalog.testing.running import DirectoryFiles, Read, RowDerivation, RunningDerivation
from penstock.errors import UserError
from penstock.model.clock import Clock, tick
from penstock.model.spec import Catalog, CollectionSpec, Selector
from penstock.runtime.derive.engine import Document, RowEngine
from penstock.runtime.derive.languages import needs_one_shard, row_engine
from penstock.shuffle.binding import Binding, derivation_bindings

HOPS_MAX: Final = 1000
"""Derivations that a document may come through, one after the other, before a cycle is endless."""

DOCUMENTS_MAX: Final = 200_000
"""Documents that a test may make: a cycle that doubles its documents comes here within seconds."""


class Endless(UserError):
    """Derivations that do not come to rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How reads that are ready at the same time are split into transactions."""

    name: str
    largest: int | None = None
    """Reads of a transaction, at most; None is all that are ready."""
    seed: int | None = None
    """Makes transactions of random size."""

    def sizes(self) -> Iterator[int]:
        """The sizes of transactions; the same every time."""
        largest = self.largest or sys.maxsize
        if self.seed is None:
            return itertools.repeat(largest)
        chance = random.Random(self.seed)  # noqa: S311 - nothing is secret here
        return iter(lambda: chance.randint(1, largest), 0)


ALL_AT_ONCE: Final = Split(name="all at once")

FrameDerivations = Callable[[Catalog, CollectionSpec], RunningDerivation]
"""Makes a derivation in a language that works on frames."""


class MemoryWorld:
    """Collections and derivations of a catalog, for one test.

    State that derivations keep in files is below `directory` until the world is closed.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        directory: Path,
        start: Clock,
        split: Split = ALL_AT_ONCE,
        shards: int = 1,
        engines: Callable[[Catalog, CollectionSpec], RowEngine | None] = row_engine,
        frames: FrameDerivations | None = None,
    ) -> None:
        self._catalog = catalog
        self._now = start
        self._sizes = split.sizes()
        self._shards = shards
        self._engines = engines
        self._frames = frames
        self._graph = Graph.of(catalog)
        self._contents = {spec.name: Contents(spec, catalog) for spec in catalog.collections}
        self._derivations = [self._derivation(name) for name in self._graph.in_order()]
        self._documents = 0
        self._directory = directory
        self._states: list[Path] = []

    @property
    def now(self) -> Clock:
        """The virtual time."""
        return self._now

    def ingest(self, collection: str, documents: Sequence[Document]) -> None:
        self._publish(
            collection,
            [
                Published(document=document, origin=f"document {i} of the step")
                for i, document in enumerate(documents)
            ],
        )

    def settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for derivation in self._derivations:
                if reads := derivation.take(self._now, self._sizes):
                    self._run(derivation, reads)
                    moved = True

    def advance_to_next_due(self, collection: str) -> bool:
        writers = self._graph.writers_of(collection)
        due = [
            derivation.next_due()
            for derivation in self._derivations
            if derivation.target.spec.name in writers
        ]
        times = [time for time in due if time is not None]
        if not times:
            return False
        self._now = Clock(max(self._now, min(times)))
        return True

    def read(self, collection: str, selector: Selector) -> list[Document]:
        return self._contents[collection].select(selector)

    def close(self) -> None:
        for path in self._states:
            shutil.rmtree(path, ignore_errors=True)

    def _derivation(self, name: str) -> _Derivation:
        target = self._contents[name]
        bindings = derivation_bindings(self._catalog, target.spec)
        sources = {each.index: self._contents[each.collection.name] for each in bindings}
        return _Derivation(target, bindings, sources)

    def _run(self, derivation: _Derivation, reads: Sequence[Read]) -> None:
        name = derivation.target.spec.name
        if derivation.running is None:
            derivation.running = self._started(derivation.target.spec)
        made = derivation.running.run(reads)
        hops_max = max(read.stored.hops for read in reads)
        self._publish(
            name,
            [
                Published(
                    document=document,
                    origin=derivation.describe(None if at is None else reads[at]),
                    hops=1 + (hops_max if at is None else reads[at].stored.hops),
                )
                for at, document in made
            ],
        )

    def _started(self, spec: CollectionSpec) -> RunningDerivation:
        engine = self._engines(self._catalog, spec)
        if engine is not None:
            self._states.append(Path(tempfile.mkdtemp(prefix="state-", dir=self._directory)))
            files = DirectoryFiles(self._states[-1])
            shards = 1 if needs_one_shard(spec, engine) else self._shards
            return RowDerivation(engine, self._contents[spec.name], shards=shards, files=files)
        if self._frames is None:
            raise UserError(
                f"{spec.name} needs Spark, which this test runs without",
                fix="run it by `penstock test`",
            )
        return self._frames(self._catalog, spec)

    def _publish(self, collection: str, published: Iterable[Published]) -> None:
        contents = self._contents[collection]
        for each in contents.prepare(published):
            self._check_ends(collection, each)
            self._now = tick(self._now)
            contents.append(each, self._now)

    def _check_ends(self, collection: str, published: Published) -> None:
        self._documents += 1
        if published.hops <= HOPS_MAX and self._documents <= DOCUMENTS_MAX:
            return
        cycle = self._graph.cycle_through(collection) or self._cycle_above(collection)
        why = (
            f"a document came through {published.hops} derivations, one after the other"
            if published.hops > HOPS_MAX
            else f"the test has made {self._documents} documents"
        )
        raise Endless(
            f"the derivations of {' -> '.join(cycle)} do not come to rest"
            if cycle
            else f"there are too many documents in {collection} for a test",
            why=why,
            fix="let a transform of the cycle publish nothing once nothing changes"
            if cycle
            else "ingest fewer documents",
        )

    def _cycle_above(self, collection: str) -> list[str]:
        cycles = map(self._graph.cycle_through, sorted(self._graph.writers_of(collection)))
        return next((cycle for cycle in cycles if cycle), [])


class _Derivation:
    """What a derivation has not read yet."""

    def __init__(
        self, target: Contents, bindings: Sequence[Binding], sources: dict[int, Contents]
    ) -> None:
        self.target = target
        self.running: RunningDerivation | None = None
        """Made for its first transaction: until then, its language need not be there."""
        self._bindings = bindings
        self._sources = sources
        self._positions = dict.fromkeys(sources, 0)
        self._delayed: list[tuple[int, int, Read]] = []
        self._ready: list[tuple[tuple[int, int, int, int], Read]] = []
        self._count = itertools.count()

    def take(self, now: Clock, sizes: Iterator[int]) -> list[Read]:
        """Take the reads of the next transaction; none if nothing is ready."""
        self._follow()
        while self._delayed and self._delayed[0][0] <= now:
            read = heapq.heappop(self._delayed)[2]
            heapq.heappush(self._ready, (read.order, read))
        if not self._ready:
            return []
        size = min(next(sizes), len(self._ready))
        return [heapq.heappop(self._ready)[1] for _ in range(size)]

    def next_due(self) -> int | None:
        """When the next delayed read is due; None if there is none."""
        self._follow()
        return self._delayed[0][0] if self._delayed else None

    def _follow(self) -> None:
        for binding in self._bindings:
            source = self._sources[binding.index]
            for stored in source.log[self._positions[binding.index] :]:
                if not binding.partitions.matches(stored.partition):
                    continue
                if not binding.bounds.admit(stored.clock):
                    continue
                source.check_read(stored.document)
                read = Read(binding=binding, source=source, stored=stored)
                heapq.heappush(self._delayed, (read.due, next(self._count), read))
            self._positions[binding.index] = len(source.log)

    def describe(self, read: Read | None) -> str:
        """Name where a document comes from, in messages."""
        name = f"derivation {self.target.spec.name}"
        if read is None or self.target.spec.derivation is None:
            return f"{name}, at the end of a transaction"
        transform = self.target.spec.derivation.transforms[read.binding.index]
        return f"{name}, transform {transform.name}, {read.describe()}"
