"""PURE: all decisions of a session: what to read, when, and what to hand out.

The shell around it (`session.py`) follows collections and passes on what it learns, lets it
read, looks up what it needs to know, and hands out its answers:

    learn(collection, revision, changed)    a followed collection is known this far
    request()                               the coordinator wants the next checkpoint
    advance(now)     -> Round               it was read; there may be more
                     -> NeedRows, NeedPages to be looked up, then supply(need, answer)
                     -> WaitUntil           something is due then
                     -> None                nothing to do, until something is learned or requested
    answer()         -> Checkpoint          the answer to the request, as soon as there is one
    tick()                                  every `TICK_S`; warns, and raises when nothing can move

A round is read from records alone, so it is planned and committed in one step; one that needs more
than the records at hand has no effect, and is planned anew once that is supplied. Any error ends
the session; the next one starts from the coordinator's checkpoint, and this state is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from msgspec import structs

from penstock.errors import Bug
from penstock.journal.state import JournalState, Record
from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.hints import Hint
from penstock.model.producer_frontier import ProducerFrontier
from penstock.shuffle.binding import Binding, hint_index, lanes
from penstock.shuffle.checkpoint import Checkpoints, Stalled
from penstock.shuffle.delivery import Checkpoint, Outbox
from penstock.shuffle.history import Need, Needed, NeedPages, NeedRows
from penstock.shuffle.reads import Announced, FoldContext, Read, RecoveryImpossible, row_key
from penstock.shuffle.rounds import Agenda, Awaited, Round, RoundLimits, WaitUntil
from penstock.shuffle.topology import Topology

__all__ = [
    "Need",
    "NeedPages",
    "NeedRows",
    "RecoveryImpossible",
    "Round",
    "RoundLimits",
    "SessionState",
    "WaitUntil",
]


class _Lane:
    """Bindings of one priority, which are read together."""

    __slots__ = ("agendas", "index", "unreported")

    def __init__(self, index: int, agendas: Sequence[Agenda]) -> None:
        self.index = index
        self.agendas = agendas
        self.unreported: dict[Read, None] = {}
        """Reads with producers that were not reported yet, in the order they were met."""


class SessionState:
    """The state of a session, without IO."""

    def __init__(
        self,
        bindings: Sequence[Binding],
        *,
        resume: Frontier = EMPTY,
        limits: RoundLimits = RoundLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._limits = limits
        grouped = lanes(bindings)
        self._checkpoints = Checkpoints(grouped, resume)
        self._topology = Topology(bindings, resume, recovery=self._checkpoints.recovery)
        self._agendas = {
            binding.cohort: Agenda(cohort=binding.cohort, delay=binding.read_delay)
            for binding in bindings
        }
        by_index = {binding.index: binding for binding in bindings}
        self._lanes = []
        self._lane_of: dict[int, _Lane] = {}
        for at, group in enumerate(grouped):
            cohorts = dict.fromkeys(by_index[index].cohort for index in group.bindings)
            lane = _Lane(at, [self._agendas[cohort] for cohort in cohorts])
            self._lanes.append(lane)
            self._lane_of |= dict.fromkeys(group.bindings, lane)
        self._rows: dict[tuple[str, int, int, Clock], int] = {}
        self._levels: dict[int, Clock] = {}
        self._announced: dict[Announced, Clock] = {}
        self._context = FoldContext(
            hints=hint_index(bindings),
            exists=self._topology.holds_anything,
            rows=self._rows,
            levels=self._levels,
            announced=self._announced,
        )
        self._outbox = Outbox()
        self._due: Clock | None = None
        self._settled_through = -1

    def take_notices(self) -> list[str]:
        """Take the notices about journals, for people."""
        taken, self._topology.notices = self._topology.notices, []
        return taken

    @property
    def collections(self) -> tuple[str, ...]:
        """Collections to follow; each is listed before anything is read."""
        return self._topology.collections

    @property
    def recovery(self) -> bool:
        """This session replays one transaction, and then nothing more."""
        return self._topology.recovery

    # --------------------------------------------------------------------------------- learning

    def learn(self, collection: str, revision: int, changed: Mapping[str, JournalState]) -> bool:
        """The journals of a collection are known up to `revision`; these differ from before.

        The first call for a collection lists all its journals, also if there are none. False means
        that nothing is to be done for it: mostly, others have committed, and nothing is awaited.
        """
        listed = collection not in self._topology.unlisted
        for read in self._topology.learn(collection, revision, changed):
            self._agendas[read.binding.cohort].queue(read)
            self._due = None  # it may be due already
        self._discharge()
        awaits = any(agenda.first for agenda in self._agendas.values()) or bool(
            self.recovery or self._checkpoints.unresolved()
        )
        return bool(changed) or not listed or awaits

    def request(self) -> None:
        """The coordinator wants the next checkpoint; it may ask for one at a time."""
        self._checkpoints.request()

    # ---------------------------------------------------------------------------------- reading

    def advance(self, now: Clock) -> Round | Need | WaitUntil | None:
        """Read one round, if a checkpoint is requested and none is ready.

        Lanes go by priority; one with nothing due does not hold back the others.
        """
        self._due = None
        wanted = self._checkpoints.requested and not self._checkpoints.would_answer()
        if self._topology.unlisted or not wanted:
            return None
        awaited = self._awaited()
        hinted = {self._lane_of[read.binding.index].index for read in awaited}
        due = CLOCK_MAX
        for lane in sorted(self._lanes, key=lambda lane: lane.index not in hinted):
            planned = Round(
                self._context,
                lane=lane.index,
                through=self._topology.revision,
                now=now,
                limits=self._limits,
            )
            try:
                planned.fill(lane.agendas, awaited)
            except Needed as needed:
                self._unplan(planned.folds)
                return needed.need
            if planned.folds:
                self._commit(lane, planned)
                return planned
            due = min(due, planned.due)
        if due == CLOCK_MAX:
            return None
        self._due = due
        return WaitUntil(clock=due)

    def supply(self, need: Need, answer: int | Sequence[Record]) -> None:
        """Supply what was looked up: an offset for `NeedRows`, records for `NeedPages`."""
        match need:
            case NeedRows() if isinstance(answer, int):
                self._rows[row_key(need)] = answer
            case NeedPages() if not isinstance(answer, int):
                history = self._topology.histories[need.journal]
                history.supply(need.pages, answer)
                for read in self._topology.readers(need.journal):
                    self._agendas[read.binding.cohort].queue(read)
            case NeedRows() | NeedPages():
                raise Bug(f"{answer!r} is no answer to {type(need).__name__}")
            case _:
                assert_never(need)

    def _awaited(self) -> Awaited:
        """Commits that pending checkpoints wait for, of reads that have more to read."""
        if len(self._agendas) == 1:
            return {}  # there is nothing to put first
        awaited: dict[Read, dict[Producer, Clock]] = {}
        for journal in self._checkpoints.unresolved():
            read = self._topology.reads.get((journal.journal, journal.binding))
            if read and read.queued is not None and read.queued <= self._topology.revision:
                awaited[read] = {each.producer: each.hinted_commit for each in journal.producers}
        return awaited

    def _unplan(self, reads: Iterable[Read]) -> None:
        for read in reads:
            read.unplan()
            self._agendas[read.binding.cohort].queue(read)

    def _commit(self, lane: _Lane, planned: Round) -> None:
        """Adopt what the round found, and report what it closed."""
        self._rows.clear()
        hints: list[Hint] = []
        floors: dict[int, Clock] = {}
        closed = False
        for read, fold in planned.folds.items():
            read.adopt(fold)
            if read.unreported:
                lane.unreported[read] = None
            if read.history.has_pages:
                self._topology.forget_pages(read.history)
            hints += fold.hints
            closed = closed or fold.closed
            if fold.floor != NEVER:
                binding = read.binding.index
                floors[binding] = max(floors.get(binding, NEVER), fold.floor)
            self._topology.notices += fold.notices
        self._levels |= planned.levels
        self._announce(planned.announced)
        self._outbox.put(planned.deliveries)
        if closed:
            reads, lane.unreported = lane.unreported, {}
            delta = _delta((read.report() for read in reads), self._awaitable(hints), floors)
            self._checkpoints.on_progressed(lane.index, delta)
        elif floors:
            self._checkpoints.on_progressed(lane.index, Frontier.of((), gap_floors=floors))
        self._discharge()

    def _announce(self, announced: Mapping[Announced, Clock]) -> None:
        """Keep the levels of commits that are still to be read; mostly, these are none."""
        known = {**announced, **self._announced}
        self._announced.clear()
        for (journal, binding, producer, clock), level in known.items():
            read = self._topology.reads.get((journal, binding))
            if read is not None and read.state(producer).last_commit < clock:
                self._announced[journal, binding, producer, clock] = level

    def _awaitable(self, hints: Iterable[Hint]) -> Iterable[Hint]:
        """The hints that are worth waiting for, now that the whole cohort was read as far.

        A recovery reads only a part of it, and waits for all.
        """
        if self.recovery:
            return hints
        may_commit = self._topology.may_commit
        return [hint for hint in hints if may_commit(hint.journal, hint.binding, hint.producer)]

    def _discharge(self) -> None:
        """Stop waiting for commits that were removed, with everything that they committed."""
        if self._topology.lossy and not self.recovery:
            while removed := self._removed():
                self._checkpoints.discharge(removed)

    def _removed(self) -> Frontier:
        """Commits that pending checkpoints wait for, and that can no longer come."""
        return Frontier.gather(
            structs.replace(
                journal,
                producers=tuple(
                    ProducerFrontier(producer=entry.producer, last_commit=entry.hinted_commit)
                    for entry in journal.producers
                    if not self._topology.may_commit(
                        journal.journal, journal.binding, entry.producer
                    )
                ),
            )
            for journal in self._checkpoints.unresolved()
        )

    # -------------------------------------------------------------------------------- answering

    def answer(self) -> Checkpoint | None:
        """The answer to the request that is outstanding, as soon as there is one."""
        frontier = self._checkpoints.answer()
        if frontier is None:
            return None
        return Checkpoint(frontier=frontier, deliveries=self._outbox.take(frontier))

    def tick(self) -> list[str]:
        """Count a tick without progress; return warnings for people. Raises `Stalled`."""
        try:
            return self._checkpoints.tick()
        except Stalled as stalled:
            if self.recovery and self._topology.lossy:
                raise RecoveryImpossible(
                    "journals lack what an unfinished transaction has read",
                    why=f"content was removed before the transaction was replayed\n{stalled.why}",
                    fix="reset the bindings of these journals, which reads their sources again",
                ) from stalled
            raise

    # ------------------------------------------------------------------------------- reporting

    @property
    def settled_through(self) -> int:
        """A revision, everything committed up to which was handed out; the last that is known.

        A transaction that is acknowledged in some of its journals is committed, and waited for.
        Documents that a read delay holds back are not. A recovery reads a part only, and knows of
        no such revision.
        """
        pending = (
            self.recovery or self._checkpoints.would_answer() or self._checkpoints.unresolved()
        )
        if not pending:
            nexts = (agenda.first for agenda in self._agendas.values() if not self._is_held(agenda))
            unread = min((first[0] - 1 for first in nexts if first), default=CLOCK_MAX)
            self._settled_through = min(self._topology.revision, unread)
        return self._settled_through

    def _is_held(self, agenda: Agenda) -> bool:
        """True if nothing else is left to read, and a read delay holds a cohort back."""
        return self._due is not None and agenda.delay > 0

    @property
    def reads(self) -> Iterable[Read]:
        """Every journal, as every binding has read it."""
        return self._topology.reads.values()

    def waiting_for(self) -> str:
        """The reasons why nothing comes, in sentences."""
        if unlisted := self._topology.unlisted:
            return f"The journals of {', '.join(unlisted)} are not listed yet."
        if self._checkpoints.would_answer():
            return "A checkpoint is ready."
        reasons = []
        if unresolved := self._checkpoints.unresolved().describe_unresolved():
            reasons.append(f"Commits were announced that are not read yet:\n{unresolved}")
        if self._due is not None:
            reasons.append("What is there to read is not due, because of a read delay.")
        behind = [
            f"{read.history.name} ends at offset {read.history.state.end}, and was read through "
            f"{read.position} before."
            for read in self._topology.reads.values()
            if read.position > read.history.state.end
        ]
        reasons += behind[:20]
        count = len(self._topology.reads)
        if self.recovery and not reasons:
            reasons.append("The unfinished transaction was replayed; this session is done.")
        return "\n".join(reasons) or f"Nothing new is committed to the {count} journals it reads."


def _delta(
    reports: Iterable[JournalFrontier], hints: Iterable[Hint], floors: Mapping[int, Clock]
) -> Frontier:
    """Reports of the reads of a lane, and the hints that they met, as one frontier."""
    found: dict[tuple[str, int], JournalFrontier] = {}
    for report in reports:
        key = (report.journal, report.binding)
        before = found.get(key)  # of a journal that was dropped, and created again
        found[key] = report if before is None else _join(before, report)
    latest: dict[tuple[str, int], dict[Producer, Clock]] = {}
    for hint in hints:
        clocks = latest.setdefault((hint.journal, hint.binding), {})
        clocks[hint.producer] = max(clocks.get(hint.producer, NEVER), hint.clock)
    for (journal, binding), clocks in latest.items():
        hinted = JournalFrontier(
            journal=journal,
            binding=binding,
            producers=tuple(
                ProducerFrontier(producer=producer, last_commit=NEVER, hinted_commit=clock)
                for producer, clock in sorted(clocks.items())
            ),
        )
        before = found.get((journal, binding))
        found[journal, binding] = hinted if before is None else _join(before, hinted)
    return Frontier.of((found[key] for key in sorted(found)), gap_floors=floors)


def _join(a: JournalFrontier, b: JournalFrontier) -> JournalFrontier:
    producers = {entry.producer: entry for entry in a.producers}
    for entry in b.producers:
        before = producers.get(entry.producer)
        producers[entry.producer] = entry if before is None else before.reduce(entry)
    return structs.replace(
        a,
        producers=tuple(producers[producer] for producer in sorted(producers)),
        bytes_read_delta=a.bytes_read_delta + b.bytes_read_delta,
        bytes_behind_delta=a.bytes_behind_delta + b.bytes_behind_delta,
    )
