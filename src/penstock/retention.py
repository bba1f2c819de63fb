"""Retention: documents that are older than their collection keeps them are forgotten.

Where journals are cut is decided by `journal.retention`; here is what it decides on. What the tasks
of the applied catalog have not read yet stays, and it is known which tasks these are.

The order in which things are looked at matters: recovery logs first, journals second. Positions
only grow, and ACKs that are still to be written are in a recovery log until they are in a journal.

What happens to a journal is the same as in compaction: objects that lose their name are noted,
then the journals are cut, all journals of a collection under one revision. Whatever a crash leaves
behind is garbage, or cut the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock import failpoints
from penstock.connectors import builtin
from penstock.consensus.statelog import Superseded
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import ATOMIC_ELEMENTS_MAX, Consensus
from penstock.errors import PenstockError
from penstock.journal.integrity import read_page
from penstock.journal.journals import Journal, MissingJournal
from penstock.journal.ownership import Ownership, paths_of
from penstock.journal.planning import Planner
from penstock.journal.retention import (
    EVERYBODY,
    REPEATED_WITHIN,
    Cut,
    Loaded,
    abandoned_producers,
    plan_cuts,
)
from penstock.journal.sealing import write_page
from penstock.journal.state import AckRecord, JournalState, Page, Record, Refused, Retain
from penstock.journal.sweeping import replacement_note
from penstock.model.clock import NEVER, Clock, Producer, duration, elapsed
from penstock.model.completed import STALENESS_HORIZON
from penstock.model.producer_frontier import ProducerFrontier
from penstock.model.spec import Catalog, CollectionSpec, MaterializationSpec
from penstock.runtime.kinds import TaskSpec, kind_of, runnable_tasks
from penstock.runtime.pruning import ExpectedAcks, expected_acks
from penstock.runtime.recovery import (
    Entries,
    Layout,
    RecoveryMachine,
    log_name,
    recovery_key,
)
from penstock.shuffle.binding import Binding, derivation_bindings, materialization_bindings

_PAGED = failpoints.declare("retain.paged", "pages are written for a cut that no journal knows of")
_NOTED = failpoints.declare("retain.noted", "objects are noted as forgotten, but still in use")
_CUT = failpoints.declare("retain.cut", "the journals of a collection are cut, no others yet")

ATTEMPTS_MAX: Final = 4
"""Times that a collection is planned anew because others changed its journals meanwhile."""

# ---------------------------------------------------------------------------------------- readers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How far a binding of a task has read a collection."""

    task: str
    collection: str
    binding: Binding | None
    """None if it cannot be known which journals it reads."""
    positions: Mapping[str, Sequence[ProducerFrontier]] = field(default_factory=dict)

    def needs(self, journal: str, begin: int, abandoned: Iterable[Producer] = ()) -> int | None:
        """Return the offset from which it still needs a journal; None if it does not read it.

        It resumes behind all that it has read, and reads spans that were open there again.
        """
        if self.binding is None:
            return begin
        if not self.binding.reads(journal):
            return None
        spans = [
            entry.offset
            for entry in self.positions.get(journal, ())
            if entry.is_open and entry.offset >= begin and entry.producer not in abandoned
        ]
        return min([self._position(journal), *spans])

    def holds(self, states: Mapping[str, JournalState], before: Clock) -> bool:
        """True if it has not read what was committed before that time, as far as states tell.

        What lies in pages is taken to be as old as the last that it has read.
        """
        return any(self._holds(name, state, before) for name, state in states.items())

    def _holds(self, name: str, state: JournalState, before: Clock) -> bool:
        if self.binding is None or not self.binding.reads(name):
            return False
        position = self._position(name)
        unread = [record for record in state.records if record.end > position]
        if unread and _newest(unread[:1]) < before:
            return True
        paged = bool(state.pages) and position < state.pages[-1].end
        return paged and self._read_through(name) < before

    def _position(self, journal: str) -> int:
        return max((abs(entry.offset) for entry in self.positions.get(journal, ())), default=0)

    def _read_through(self, journal: str) -> Clock:
        """Return the latest commit of a journal that it has read."""
        return max((e.last_commit for e in self.positions.get(journal, ())), default=NEVER)


async def readings(
    store: Consensus, catalog: Catalog, collections: Iterable[str]
) -> dict[str, list[Reading]]:
    """Return by collection how far tasks have read it, disabled ones and their bindings too."""
    found: dict[str, list[Reading]] = {name: [] for name in collections}
    for spec in runnable_tasks(catalog):
        sources = [each for each in _sources(spec) if each[0] in found]
        if not sources:
            continue
        entries = await _entries(store, spec)
        for collection, alone in sources:
            found[collection].append(_reading(catalog, alone, collection, entries))
    return found


def _sources(spec: TaskSpec) -> Iterator[tuple[str, TaskSpec]]:
    """Yield for each binding what it reads, and the task with it alone, and enabled."""
    if isinstance(spec, MaterializationSpec):
        for binding in spec.bindings:
            alone = replace(spec, bindings=(replace(binding, disable=False),))
            yield binding.source.collection, alone
    elif isinstance(spec, CollectionSpec) and (derivation := spec.derivation) is not None:
        for transform in derivation.transforms:
            only = replace(derivation, transforms=(replace(transform, disable=False),))
            yield transform.source.collection, replace(spec, derivation=only)


async def _entries(store: Consensus, spec: TaskSpec) -> Entries:
    """Return the state of a task's recovery log, under its old name if it has not run since."""
    log = log_name(kind_of(spec), spec.name)
    entries = (await load_log(store, recovery_key(log), RecoveryMachine())).state
    if not entries and isinstance(spec, MaterializationSpec) and spec.renamed_from:
        old = recovery_key(log_name("materialization", spec.renamed_from))
        entries = (await load_log(store, old, RecoveryMachine())).state
    return entries


def _reading(catalog: Catalog, alone: TaskSpec, collection: str, entries: Entries) -> Reading:
    try:
        (binding,) = _bindings(catalog, alone)
    except PenstockError:  # its connector is not installed here, or refuses its configuration
        return Reading(task=alone.name, collection=collection, binding=None)
    frontier = Layout({binding.index: binding.state_key}).decode(entries).committed_frontier
    return Reading(
        task=alone.name,
        collection=collection,
        binding=binding,
        positions={read.journal: read.producers for read in frontier},
    )


def _bindings(catalog: Catalog, spec: TaskSpec) -> Sequence[Binding]:
    if isinstance(spec, MaterializationSpec):
        connector = builtin.materialization(spec.endpoint, spec.name)
        return materialization_bindings(catalog, spec, path=connector.path)
    if isinstance(spec, CollectionSpec):
        return derivation_bindings(catalog, spec)
    return ()


# ----------------------------------------------------------------------------------- what happened


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Documents that are old enough, and stay."""

    documents: int
    bytes: int
    tasks: tuple[str, ...]
    """The tasks that have not read all of them."""
    writers: int
    """Transactions that are still open before some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """What became of a collection's old documents."""

    collection: str
    retention_s: int
    journals: int
    """Journals that are cut."""
    documents: int
    """Documents that are forgotten; those that were never committed are counted, too."""
    bytes: int
    held: Held | None

    @property
    def reason(self) -> str | None:
        """Return why old documents stay, in a sentence."""
        if self.held is None:
            return None
        held = self.held
        why = []
        if held.tasks:
            verb = "has" if len(held.tasks) == 1 else "have"
            why.append(f"{', '.join(held.tasks)} {verb} not read them")
        if held.writers:
            many = f"{held.writers:,} transactions" if held.writers > 1 else "a transaction"
            why.append(f"{many} before them may still be committed")
        return (
            f"{held.documents:,} documents of {self.collection} are older than its retention, and "
            f"stay: {'; '.join(why) or 'transactions that overlap belong together'}"
        )


async def retain_collections(
    planner: Planner,
    catalog: Catalog,
    *,
    now: Clock,
    only: str | None = None,
    records_max: int | None = None,
    dry_run: bool = False,
    stop: asyncio.Event | None = None,
) -> list[Retained]:
    """Forget what the collections of a catalog keep no longer; `stop` ends it after a collection.

    Collections without retention are left alone, and left out of the answer. With `records_max`,
    about so many of the oldest records of a collection are looked at, and the rest the next time.
    """
    store = planner.journals.store
    specs = {
        each.name: each
        for each in catalog.collections
        if each.fragments.retention_s and only in (None, each.name)
    }
    if not specs:
        return []
    if not dry_run:
        await Ownership(planner.journals, planner.blobs).check()
    reading = await readings(store, catalog, specs)
    expected = await expected_acks(store)
    done: list[Retained] = []
    for name, spec in specs.items():
        if stop is not None and stop.is_set():
            break
        planning = _Planning(planner, spec, reading[name], expected, now, records_max)
        for _ in range(ATTEMPTS_MAX):
            plan = await planning.run()
            if dry_run or not plan.cuts or await _carry_out(planner, plan):
                done.append(plan.retained)
                break
    return done


# --------------------------------------------------------------------------------------- planning


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    states: Mapping[str, JournalState]
    loaded: Mapping[str, Loaded]
    cuts: Mapping[str, Cut]
    retained: Retained


class _Planning:
    """Decides about one collection."""

    def __init__(
        self,
        planner: Planner,
        spec: CollectionSpec,
        readings: Sequence[Reading],
        expected: ExpectedAcks,
        now: Clock,
        records_max: int | None,
    ) -> None:
        self._planner = planner
        self._spec = spec
        self._readings = readings
        self._expected = expected
        self._now = now
        self._records_max = records_max
        self._retention_s = spec.fragments.retention_s or 0
        self._before = elapsed(now, duration(self._retention_s))

    async def run(self) -> _Plan:
        found = await self._planner.journals.list(self._spec.name)
        states = {journal.name: journal.state for journal in found}
        most = None if self._records_max is None else self._records_max // max(len(found), 1)
        loaded = {journal.name: await self._load(journal, most) for journal in found}
        for name in await asyncio.to_thread(self._silent, loaded):
            loaded[name] = await self._load(Journal(name=name, state=states[name]), whole=True)
        return await asyncio.to_thread(self._decide, states, loaded)

    async def _load(
        self, journal: Journal, records_max: int | None = None, *, whole: bool = False
    ) -> Loaded:
        """Read a journal as far as it may be cut, and a little further."""
        state, records = journal.state, list[Record]()
        for page in state.pages:
            blobs = self._planner.blobs
            records += await asyncio.to_thread(read_page, blobs, page, journal.name)
            enough = records_max is not None and len(records) >= records_max
            if not whole and (enough or _newest(records) > self._before + REPEATED_WITHIN):
                return Loaded(records=records, complete=False, forgotten=state.forgotten)
        records += state.records
        return Loaded(records=records, forgotten=state.forgotten)

    def _decide(self, states: Mapping[str, JournalState], loaded: Mapping[str, Loaded]) -> _Plan:
        abandoned = abandoned_producers(
            loaded,
            now=self._now,
            expected=self._expected.producers,
            expecting=self._expected.journals,
        )
        needs = self._needs(states, abandoned)
        cuts = plan_cuts(loaded, before=self._before, needs=needs, abandoned=abandoned)
        if len(cuts) > ATOMIC_ELEMENTS_MAX:  # as many as one store transaction holds
            rest = sorted(cuts)[ATOMIC_ELEMENTS_MAX:]
            needs |= {name: states[name].begin for name in rest}
            cuts = plan_cuts(loaded, before=self._before, needs=needs, abandoned=abandoned)
        return _Plan(
            states=states,
            loaded=loaded,
            cuts=cuts,
            retained=Retained(
                collection=self._spec.name,
                retention_s=self._retention_s,
                journals=len(cuts),
                documents=sum(cut.documents for cut in cuts.values()),
                bytes=sum(cut.bytes for cut in cuts.values()),
                held=self._held(states, loaded, cuts, abandoned),
            ),
        )

    def _old(self, loaded: Mapping[str, Loaded], abandoned: Container[Producer]) -> dict[str, Cut]:
        """Return where journals would be cut if nobody needed anything."""
        return plan_cuts(loaded, before=self._before, needs={}, abandoned=abandoned)

    def _silent(self, loaded: Mapping[str, Loaded]) -> list[str]:
        """Return the journals in which somebody may be dead, which is known by all of it."""
        return [
            name
            for name, cut in self._old(loaded, EVERYBODY).items()
            if not loaded[name].complete
            and any(
                stretch.open_by is not None
                and stretch.begin < cut.offset
                and elapsed(self._now, stretch.last) >= STALENESS_HORIZON
                for stretch in loaded[name].stretches
            )
        ]

    def _needs(
        self, states: Mapping[str, JournalState], abandoned: frozenset[Producer]
    ) -> dict[str, int]:
        needs: dict[str, int] = {}
        for name, state in states.items():
            for reading in self._readings:
                need = reading.needs(name, state.begin, abandoned)
                if need is not None:
                    needs[name] = min(need, needs.get(name, need))
        return needs

    def _held(
        self,
        states: Mapping[str, JournalState],
        loaded: Mapping[str, Loaded],
        cuts: Mapping[str, Cut],
        abandoned: frozenset[Producer],
    ) -> Held | None:
        # Where a journal was not read to its end, a span that looks open may be closed there.
        whole = [each for each in loaded.values() if each.complete]
        open_ = {stretch.open_by for each in whole for stretch in each.stretches}
        old = self._old(loaded, {producer for producer in open_ if producer is not None})
        documents = sum(cut.documents for cut in old.values())
        documents -= sum(cut.documents for cut in cuts.values())
        if documents <= 0:
            return None
        tasks: set[str] = set()
        writers: set[Producer] = set()
        for name, cut in old.items():
            for reading in self._readings:
                need = reading.needs(name, states[name].begin, abandoned)
                if need is not None and need < cut.offset:
                    tasks.add(reading.task)
            for stretch in loaded[name].stretches:
                producer = stretch.open_by
                if producer and producer not in abandoned and stretch.begin < cut.offset:
                    writers.add(producer)
        return Held(
            documents=documents,
            bytes=sum(c.bytes for c in old.values()) - sum(c.bytes for c in cuts.values()),
            tasks=tuple(sorted(tasks)),
            writers=len(writers),
        )


def _newest(records: Sequence[Record]) -> Clock:
    """Return a clock of the last records: when they were committed, or written."""
    last = records[-1]
    if isinstance(last, AckRecord):
        return last.clock
    return max(run.clock_max for run in last.runs)


# ---------------------------------------------------------------------------------------- cutting


async def _carry_out(planner: Planner, plan: _Plan) -> bool:
    """Cut the journals of a collection; false if others changed them meanwhile."""
    cuts: dict[str, Retain] = {}
    divided: dict[str, Page] = {}
    forgotten: list[str] = []
    for name, cut in plan.cuts.items():
        state, records = plan.states[name], plan.loaded[name].records
        page = next((p for p in state.pages if p.begin < cut.offset < p.end), None)
        stays = None
        if page is not None:
            divided[name] = page
            stays = await _divide(planner, name, page, records, cut.offset)
        cuts[name] = Retain(offset=cut.offset, forgotten=cut.forgotten, page=stays)
        forgotten += paths_of(record for record in records if record.end <= cut.offset)
        forgotten += [each.path for each in state.pages if each.begin < cut.offset]
    failpoints.hit(_PAGED)
    if forgotten:
        await asyncio.to_thread(planner.blobs.write, *replacement_note(forgotten))
    failpoints.hit(_NOTED)
    try:
        await planner.journals.retain_all(cuts, divided)
    except (Refused, Superseded, MissingJournal):
        return False
    failpoints.hit(_CUT)
    return True


async def _divide(
    planner: Planner, name: str, page: Page, records: Sequence[Record], offset: int
) -> Page:
    """Write a page of what stays of one."""
    await Ownership(planner.journals, planner.blobs).claim()
    return await write_page(
        planner.blobs, name, [r for r in records if offset <= r.begin and r.end <= page.end]
    )
