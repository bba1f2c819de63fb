"""Positions that a task need not remember any more, found when it starts.

Every writer that ever was is an entry of the task's frontier, so what a task recovers would grow
with its age. Those that are two days and a gigabyte behind are forgotten (`model.resume`), once
there are many: to know how far behind they are takes a listing of their journals.

**Abandoned writers** have left a span open, and will never close it: they died between their
rows and the ACK. A frontier cannot tell them from writers at work, so other facts decide:

- The span began two days ago, by this clock and by the newest commit of the journal. A publisher
  refuses to close one that is older than a day (`journal.publisher`).
- The ACK is not on its way: no recovery log names the producer in its ACK intents, and the journal
  is not the one that a task writes its statistics to while it is not settled with its endpoint
  whether its last transaction counts; the endpoint may know an ACK that no log does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.consensus.replicas import load_all
from penstock.consensus.store import Consensus
from penstock.journal.integrity import read_page
from penstock.journal.planning import Planner
from penstock.journal.state import AckRecord, Fragment, JournalState, Record
from penstock.model.byte_progress import byte_position
from penstock.model.clock import NEVER, Clock, Producer, elapsed
from penstock.model.completed import STALENESS_HORIZON
from penstock.model.frontier import Frontier
from penstock.model.resume import PRUNE_BYTES, open_spans
from penstock.runtime import ops
from penstock.runtime.recovery import TASKS, Layout, Recovered, RecoveryMachine, prune


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """Thresholds from which on forgetting is worth it."""

    entries_min: int = 1000
    """Fewer than these are not worth a listing."""
    prune_bytes: int = PRUNE_BYTES


async def pruned(
    recovered: Recovered,
    planner: Planner,
    collections: Iterable[str],
    *,
    now: Clock,
    options: Pruning = Pruning(),
) -> Recovered:
    """Return what a task recovers, without the writers that will not be heard of again."""
    committed = recovered.committed_frontier
    if len(committed.table.producer) < options.entries_min:
        return recovered
    states = {
        journal.name: journal.state
        for collection in dict.fromkeys(collections)
        for journal in await planner.journals.list(collection)
    }
    return prune(
        recovered,
        byte_position=positions(states),
        retired=await _abandoned(committed, states, planner, now),
        prune_bytes=options.prune_bytes,
    )


# --------------------------------------------------------------------------------- abandoned spans


async def _abandoned(
    committed: Frontier, states: Mapping[str, JournalState], planner: Planner, now: Clock
) -> Collection[Producer]:
    """Return the producers of open spans that will never be closed."""
    spans = open_spans(committed)
    if not spans:
        return ()
    expected = await expected_acks(planner.journals.store)
    newest = _newest_commits(committed)
    alive: set[Producer] = set()
    for journal, producer, begin in spans:
        if producer in alive or producer in expected.producers or journal in expected.journals:
            alive.add(producer)
            continue
        state = states.get(journal)
        began = None if state is None else await _clock_at(planner, state, producer, begin)
        if began is None or elapsed(min(now, newest[journal]), began) < STALENESS_HORIZON:
            alive.add(producer)
    return {producer for _, producer, _ in spans} - alive


def _newest_commits(committed: Frontier) -> dict[str, Clock]:
    """The newest commit that was read, by journal."""
    newest: dict[str, Clock] = {}
    table = committed.table
    for (journal, _), clock in zip(
        table.keys, table.greatest(table.last_commit).tolist(), strict=True
    ):
        newest[journal] = max(newest.get(journal, NEVER), Clock(clock))
    return newest


async def _clock_at(
    planner: Planner, state: JournalState, producer: Producer, begin: int
) -> Clock | None:
    """Return when a producer began the span it has open at an offset; None if it is not there."""
    records: Iterable[Record] = state.records
    for page in state.pages:
        if page.begin <= begin < page.end:
            records = await asyncio.to_thread(read_page, planner.blobs, page)
    for record in records:
        if isinstance(record, Fragment) and record.begin <= begin < record.end:
            return next(
                (
                    run.clock_max  # not before any row of it
                    for run in record.runs_at()
                    if run.producer == producer and run.first_offset <= begin <= run.last_offset
                ),
                None,
            )
    return None


@dataclass(frozen=True, slots=True)
class ExpectedAcks:
    """ACKs that are still to be written, or may be."""

    producers: frozenset[Producer]
    journals: frozenset[str]
    """Journals to which any producer may still write ACKs."""


async def expected_acks(store: Consensus) -> ExpectedAcks:
    """Read from the recovery logs of all tasks which ACKs are still to come."""
    producers: set[Producer] = set()
    journals: set[str] = set()
    nobody = Layout({})
    loaded = await load_all(store, TASKS, RecoveryMachine())
    for key, replica in loaded.replicas.items():
        recovered = nobody.decode(replica.state)
        producers.update(commit.producer for commit in recovered.ack_intents.commits)
        if recovered.hinted_close > recovered.committed_close:
            task = key.removeprefix(TASKS)
            journals.update(
                str(ops.journal_of(ops.STATS, kind=kind, task=task)) for kind in ops.TASK_KINDS
            )
    return ExpectedAcks(frozenset(producers), frozenset(journals))


# ------------------------------------------------------------------------------------------- bytes


def positions(states: Mapping[str, JournalState]) -> Callable[[str, int], int]:
    """Return a function for the stored bytes before an offset of a journal; 0 if it is gone."""

    def position(journal: str, offset: int) -> int:
        state = states.get(journal)
        return 0 if state is None else _before(state, offset)

    return position


def _before(state: JournalState, offset: int) -> int:
    before = 0
    for part in (*state.pages, *state.records):
        size = 0 if isinstance(part, AckRecord) else part.bytes
        if part.end <= offset:
            before += size
        elif part.begin < offset:
            return byte_position(
                offset,
                first_offset=part.begin,
                rows=part.end - part.begin,
                first_byte=before,
                size_bytes=size,
            )
        else:
            break
    return before
