"""PURE: one journal as one binding reads it: records in, committed rows and progress out.

A **read** knows, of every producer it has met, what `model.sequence` says it must, and of every
open span the rows that its close would commit. Nothing of that is read before the close is: a span
that is rolled back costs nothing, and an open one is no more than a list.

A **fold** is what a round would make of a read: it looks at the read, keeps to itself whatever is
different, and is adopted when the rows that it found are safe, or forgotten as if it never was. Its
size is that of what the round met, however many producers the journal has.

Reports to the frontier are made here, so its invariant is kept here:

- A report has *every* producer that changed since the report before it, open ones included.
- The begin of an open span is exact. A lower bound will not do: a span often begins within a
  fragment whose earlier rows are committed, and reducing takes the further of two offsets, so a
  begin that lies before the last close of the same producer would be lost, and the span with it.
- Reading resumes with the record that holds the cut floor, which is sequenced again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.errors import PenstockError
from penstock.journal.committed import VisibleRows
from penstock.journal.state import AckRecord, Fragment, Record
from penstock.model.byte_progress import ByteProgress
from penstock.model.clock import NEVER, Clock, Flag, Producer
from penstock.model.completed import gap_floor
from penstock.model.frontier import JournalFrontier
from penstock.model.hints import Ack, Commit, Hint, HintIndex
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier
from penstock.model.runs import (
    Run,
    RunOutcome,
    advance_run,
    fatal_outcome,
    seen_through,
    sequence_run,
)
from penstock.model.sequence import (
    Bounds,
    Outcome,
    Position,
    ProducerState,
    advance,
    begin_replay,
    resume,
    sequence,
    sequence_error,
    sequence_replay,
)
from penstock.shuffle.binding import Binding
from penstock.shuffle.delivery import Delivery
from penstock.shuffle.history import History, Needed, NeedRows, bytes_after


class RecoveryImpossible(PenstockError):
    """A transaction was prepared before a crash, and what it read is not there any more."""


@dataclass(slots=True)
class _Span:
    """Rows of an open span, in the order of their clocks."""

    rows: list[VisibleRows] = field(default_factory=list)
    bytes: int = 0
    continues: bool = False
    """In a fold: these follow the rows that the read already has."""


_NEW = ProducerState()


class Read:
    """One (journal, binding), as far as committed rounds have read it."""

    __slots__ = (
        "_begun",
        "_bytes",
        "_bytes_read",
        "_denied",
        "_spans",
        "_states",
        "binding",
        "gap",
        "goals",
        "history",
        "lossy",
        "parked",
        "planned",
        "position",
        "queued",
        "serial",
        "unreported",
    )

    def __init__(
        self,
        history: History,
        binding: Binding,
        *,
        serial: int = 0,
        entries: Iterable[ProducerFrontier] = (),
        goals: Mapping[Producer, Clock] | None = None,
    ) -> None:
        """Resume from the entries of a checkpoint, or from the first offset that is retained.

        `goals` are the commits that a recovery must read up to, and not beyond.
        """
        resumed = resume(entries)
        self.history = history
        self.binding = binding
        self.serial = serial
        """Orders reads, in no particular way."""
        self.position = resumed.offset
        """Records that end after it are still to be read."""
        self.planned = self.position
        """The same, if what is being planned were committed."""
        self.queued: int | None = None
        """The revision under which it waits to be planned."""
        self.lossy = False
        """Content was removed before this could read it."""
        self.gap = False
        """Content was missing when reading began, and no floor was raised for that yet."""
        self.goals = dict(goals or {})
        self.parked = False
        """A recovery has read what it must."""
        self.unreported: set[Producer] = set()
        self._begun = False
        self._states = resumed.states
        self._denied: dict[Producer, Clock] = {}
        """Commits that producers have rolled back behind. They were delivered, and stay reported:
        a last commit that went down would hold deliveries back, and lose the begin of a span."""
        self._spans: dict[Producer, _Span] = {}
        self.place_bytes()
        self.skip_removed()

    def place_bytes(self) -> None:
        """Count bytes from here on. What lies behind the known end of the journal has none yet."""
        self._bytes_read = self.history.bytes_end - self.history.bytes_from(self.position)
        self._bytes = ByteProgress.starting_at(self._bytes_read)

    @property
    def key(self) -> tuple[str, int]:
        return self.history.name, self.binding.index

    def state(self, producer: Producer) -> ProducerState:
        """The state of a producer; one that was not met is new."""
        return self._states.get(producer, _NEW)

    def held_bytes(self, producer: Producer) -> int:
        """Size of the rows that a commit of this producer would bring, beside those to be read."""
        span = self._spans.get(producer)
        return 0 if span is None else span.bytes

    def plan(self, fold: ReadFold) -> None:
        """Planning goes on behind what `fold` has taken."""
        self.planned, self.parked = fold.position, fold.parked

    def unplan(self) -> None:
        """Planning starts again where committed rounds have ended."""
        self.planned = self.position
        self.parked = bool(self.goals) and _reached(self.goals, self.state)

    def adopt(self, fold: ReadFold) -> None:
        """Take over what a round has found. A round that comes to nothing leaves no trace."""
        self._states.update(fold.states)
        self._denied.update(fold.denied)
        self.unreported.update(fold.states)
        for producer, span in fold.spans.items():
            held = self._spans.get(producer)
            if span.continues and held is not None:
                held.rows += span.rows
                held.bytes += span.bytes
            elif span.rows:
                self._spans[producer] = span
            elif held is not None:
                del self._spans[producer]
        self.position = fold.position
        self._bytes_read += fold.bytes
        self.unplan()
        self.gap = False
        self._begun = True

    def skip_removed(self) -> bool:
        """Go past content that was removed before it was read; true if there was any.

        If nothing was read yet, there is a gap before where reading begins, for which a floor is
        raised. One that is met later raises none: it would release hints in other journals.
        """
        begin = self.history.state.begin
        if self.position >= begin:
            return False
        self.lossy = True
        self.gap = self.gap or not self._begun
        self.position = self.planned = begin
        self._bytes_read = self.history.bytes_end - self.history.bytes_from(self.position)
        self._close_spans()
        return True

    def _close_spans(self) -> None:
        """Forget spans that were open before a gap.

        Their rows were removed, and perhaps their closes with them. Nothing distinguishes a span
        that goes on behind the gap from one that was rolled back within it.
        """
        for producer, state in self._states.items():
            if self.is_open(producer):
                last_commit = max(state.last_commit, OBSERVED_FLOOR)
                self._states[producer] = ProducerState(
                    last_commit=last_commit, offset=-self.position
                )
                self.unreported.add(producer)
        self._spans.clear()

    def open_producers(self) -> list[Producer]:
        """The producers that have written what they have not committed."""
        return [producer for producer in self._states if self.is_open(producer)]

    def is_open(self, producer: Producer) -> bool:
        """True if there are rows of a producer that its next ACK would commit."""
        state = self.state(producer)
        return state.gapped or state.report(producer).is_open

    def report(self) -> JournalFrontier:
        """Every producer that changed since the last report, and how far reading has come.

        A journal of which nothing is reported keeps its bytes for the next time.
        """
        head = self.history.bytes_end
        if self.position >= self.history.state.end:  # whatever compaction and pages made of it
            self._bytes_read = max(self._bytes_read, head)
        moved = self._bytes.moved(read=self._bytes_read, head=max(self._bytes_read, head))
        deltas, self._bytes = moved.report()
        producers = sorted(self.unreported)
        self.unreported = set()
        return JournalFrontier(
            journal=self.history.name,
            binding=self.binding.index,
            producers=tuple(map(self._entry, producers)),
            bytes_read_delta=deltas.read,
            bytes_behind_delta=deltas.behind,
        )

    def _entry(self, producer: Producer) -> ProducerFrontier:
        entry = self._states[producer].report(producer)
        denied = self._denied.get(producer, NEVER)
        return entry if denied <= entry.last_commit else replace(entry, last_commit=denied)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldContext:
    """What the folds of one session share."""

    hints: HintIndex
    exists: Callable[[str], bool]
    """True if a journal exists, by metadata at least as new as anything that is folded."""
    rows: Mapping[tuple[str, int, int, Clock], int]
    """Answers to `NeedRows`, by `row_key`."""
    levels: Mapping[int, Clock] = field(default_factory=dict)
    """By cohort, the level of the next revision (`order`)."""
    announced: Mapping[Announced, Clock] = field(default_factory=dict)
    """The levels of commits that were hinted and not read yet."""


def row_key(need: NeedRows) -> tuple[str, int, int, Clock]:
    """Identify a question whose answer stays true if the fragment is moved."""
    return need.journal, need.fragment.begin, need.run.first_offset, need.clock_gt


Announced = tuple[str, int, Producer, Clock]
"""A commit as one binding will read it: journal, binding, producer and clock."""


class ReadFold:
    """The effect of one round on one read, until it is adopted."""

    __slots__ = (
        "_announced",
        "_context",
        "_level",
        "_read",
        "bytes",
        "closed",
        "deliveries",
        "denied",
        "floor",
        "hints",
        "latest",
        "notices",
        "parked",
        "position",
        "spans",
        "states",
    )

    def __init__(
        self,
        read: Read,
        context: FoldContext,
        *,
        announced: dict[Announced, Clock] | None = None,
    ) -> None:
        """`announced` are the hinted commits of this round, which its folds share."""
        self._read = read
        self._context = context
        self._announced = {} if announced is None else announced
        self._level = NEVER
        self.latest = NEVER
        """The latest clock of what was committed here, or announced."""
        self.states: dict[Producer, ProducerState] = {}
        self.spans: dict[Producer, _Span] = {}
        self.position = read.planned
        self.bytes = 0
        self.deliveries: list[Delivery] = []
        self.hints: list[Hint] = []
        self.closed = False
        """Something was committed or rolled back: there is progress for others to know of."""
        self.denied: dict[Producer, Clock] = {}
        """Commits that a deep rollback went back from; their rows were delivered all the same."""
        self.floor = NEVER
        self.notices: list[str] = []
        self.parked = False

    def state(self, producer: Producer) -> ProducerState:
        """The state of a producer, this round included."""
        found = self.states.get(producer)
        return self._read.state(producer) if found is None else found

    def take(self, record: Record, *, level: Clock = NEVER) -> None:
        """Sequence the next record; raises `SequenceError`, or `Needed`.

        What it commits has this `level`, unless it was announced before.
        """
        self._level = level
        if self._read.gap and self.floor == NEVER:
            self.floor = gap_floor(first_clock(record))
        if isinstance(record, AckRecord):
            self._take_ack(record)
        else:
            for run in record.runs:
                # Reading may resume within a record: runs before that place were taken then.
                if record.begin + run.last_offset >= self.position:
                    self._take_run(record, run)
        self.bytes += bytes_after(record, self.position)
        self.position = record.end
        if goals := self._read.goals:
            self.parked = _reached(goals, self.state)

    # ------------------------------------------------------------------------------------- rows

    def _take_run(self, fragment: Fragment, run: Run) -> None:
        producer = run.producer
        state = self.state(producer)
        outcome = sequence_run(state, run)
        if outcome is RunOutcome.REPLAY_FIRST:
            state = self._replay(producer, state, fragment.begin + run.first_offset)
            outcome = sequence_run(state, run)
        if outcome is not RunOutcome.NONE:
            self._append(fragment, run, state, outcome)

    def _append(
        self, fragment: Fragment, run: Run, state: ProducerState, outcome: RunOutcome
    ) -> None:
        """Take the rows of a run that are new."""
        placed = run.moved(fragment.begin)
        if fatal := fatal_outcome(outcome):
            raise self._refusal(fatal, state, run.kind, run.clock_min, placed.first_offset, run)
        begin = None
        if outcome is RunOutcome.READ_ROWS:
            begin = self._span_begin(fragment, run, placed, state)
        self.states[run.producer] = after = advance_run(state, outcome, placed, begin)
        self._check_goal(run.producer, state, after)

        rows, size = None, 0
        if _admits(self._read.binding.bounds, run):
            rows = VisibleRows(
                fragment=fragment,
                run=run,
                clock_gt=seen_through(state),
                running_max=not run.increasing,
            )
            size = fragment.bytes * run.rows // fragment.rows
        if run.kind is Flag.OUTSIDE_TXN:
            self.closed = True
            if rows is not None:
                self._deliver(run.producer, run.clock_max, (rows,), size, self._level)
            return
        span = self.spans.get(run.producer)
        if span is None:
            span = self.spans[run.producer] = _Span(continues=True)
        if rows is not None:
            span.rows.append(rows)
            span.bytes += size

    def _span_begin(self, fragment: Fragment, run: Run, placed: Run, state: ProducerState) -> int:
        """The offset of a span's begin within a run that repeats earlier rows."""
        if state.offset > 0 and placed.first_offset <= state.offset <= placed.last_offset:
            return state.offset  # resumed from, and exact
        need = NeedRows(
            journal=self._read.history.name,
            fragment=fragment,
            run=run,
            clock_gt=seen_through(state),
        )
        begin = self._context.rows.get(row_key(need))
        if begin is None:
            raise Needed(need)
        return begin

    def _check_goal(self, producer: Producer, before: ProducerState, after: ProducerState) -> None:
        """A recovery meets the very close that it must read up to, or that was removed."""
        goal = self._read.goals.get(producer)
        if goal is not None and before.last_commit < goal < after.last_commit:
            raise RecoveryImpossible(
                f"journal {self._read.history.name} lacks what an unfinished transaction has read",
                where=f"binding {self._read.binding.index}, producer {producer}",
                why=f"the commit {goal:#x} was removed before the transaction was replayed",
                fix="reset this binding, which reads its source again",
            )

    # ------------------------------------------------------------------------------------- ACKs

    def _take_ack(self, ack: AckRecord) -> None:
        producer = ack.producer
        state = self.state(producer)
        outcome = sequence(state, Flag.ACK_TXN, ack.clock)
        if outcome is Outcome.REPLAY_FIRST:
            state = self._replay(producer, state, ack.begin)
            outcome = sequence(state, Flag.ACK_TXN, ack.clock)
        if outcome.is_duplicate:
            return
        if outcome.is_fatal:
            raise self._refusal(outcome, state, Flag.ACK_TXN, ack.clock, ack.begin, ack)
        self.states[producer] = after = advance(state, outcome, ack.clock, ack.begin)
        self._check_goal(producer, state, after)
        self.closed = True
        announced = self._announced_level(ack)
        level = self._level if announced is None else announced
        if outcome.is_commit:
            self._deliver_span(producer, ack.clock, level)
        elif outcome is Outcome.ACK_DEEP_ROLLBACK:
            self.denied[producer] = max(self._denied(producer), state.last_commit)
            self.notices.append(
                f"journal {self._read.history.name}: producer {producer} has lost its write-ahead "
                f"log and went back from commit {state.last_commit:#x} to {ack.clock:#x}, at "
                f"offset {ack.begin}; what it writes again may be delivered again"
            )
        self.spans[producer] = _Span()
        hints = self._hints(ack)
        self.hints += hints
        if announced is None:  # else the ACK that announced it has announced these too
            self._announce(hints)

    def _announced_level(self, ack: AckRecord) -> Clock | None:
        """The level of this commit, if another ACK of its transaction has announced it.

        ACKs of one transaction may have had to be appended under several revisions. A checkpoint
        that shows the first waits for the others, and not for what was committed between them.
        """
        key = (self._read.history.name, self._read.binding.index, ack.producer, ack.clock)
        known = self._context.announced.get(key)
        return self._announced.get(key) if known is None else known

    def _announce(self, hints: Iterable[Hint]) -> None:
        for hint in hints:
            self.latest = max(self.latest, hint.clock)
            key = (hint.journal, hint.binding, hint.producer, hint.clock)
            self._announced.setdefault(key, self._level)

    def _deliver_span(self, producer: Producer, commit: Clock, level: Clock) -> None:
        rows, size = self._span(producer)
        if rows:
            self._deliver(producer, commit, rows, size, level)

    def _span(self, producer: Producer) -> tuple[tuple[VisibleRows, ...], int]:
        added = self.spans.get(producer)
        if added is not None and not added.continues:
            return tuple(added.rows), added.bytes
        held = self._read._spans.get(producer)  # noqa: SLF001 - a fold is the other half of a read
        both = [span for span in (held, added) if span is not None]
        return tuple(rows for span in both for rows in span.rows), sum(s.bytes for s in both)

    def _deliver(
        self,
        producer: Producer,
        commit: Clock,
        rows: tuple[VisibleRows, ...],
        size: int,
        level: Clock,
    ) -> None:
        self.latest = max(self.latest, commit)
        self.deliveries.append(
            Delivery(
                journal=self._read.history.name,
                binding=self._read.binding.index,
                producer=producer,
                commit=commit,
                rows=rows,
                bytes=size,
                again=rows[0].clock_gt < self._denied(producer),
                level=level,
            )
        )

    def _denied(self, producer: Producer) -> Clock:
        found = self.denied.get(producer)
        return self._read._denied.get(producer, NEVER) if found is None else found  # noqa: SLF001

    def _hints(self, ack: AckRecord) -> list[Hint]:
        binding = self._read.binding
        commit = Commit(self._read.history.name, ack.producer, ack.clock)
        return list(
            self._context.hints.extract(
                Ack(commit=commit, hints=ack.hints),
                binding=binding.index,
                cohort=binding.cohort,
                exists=self._context.exists,
            )
        )

    # ----------------------------------------------------------------------------------- replay

    def _replay(self, producer: Producer, state: ProducerState, end: int) -> ProducerState:
        """Find the rows of a span that began before reading resumed; the state with them.

        What was removed meanwhile is passed over. If nothing is left of the span, there is none.
        """
        begin = state.offset
        self.states[producer] = begin_replay(state)
        for record in self._read.history.between(begin, end):
            if isinstance(record, AckRecord):
                if record.producer == producer and begin <= record.begin:
                    self._replay_ack(record)
                continue
            for run in record.runs:
                first, last = record.begin + run.first_offset, record.begin + run.last_offset
                if run.producer == producer and begin <= last and first < end:
                    self._replay_run(record, run)
        return self.states[producer]

    def _replay_run(self, fragment: Fragment, run: Run) -> None:
        state = self.states[run.producer]
        outcome = sequence_run(state, run)
        if outcome is RunOutcome.NONE:
            return
        if run.kind is Flag.OUTSIDE_TXN and fatal_outcome(outcome) is None:
            raise self._refusal(
                Outcome.REPLAY_MEETS_CLOSE,
                state,
                run.kind,
                run.clock_max,
                fragment.begin + run.first_offset,
                run,
            )
        self._append(fragment, run, state, outcome)

    def _replay_ack(self, ack: AckRecord) -> None:
        state = self.states[ack.producer]
        outcome = sequence_replay(state, Flag.ACK_TXN, ack.clock)
        if outcome.is_fatal:
            raise self._refusal(outcome, state, Flag.ACK_TXN, ack.clock, ack.begin, ack)
        if not outcome.is_duplicate:
            self.states[ack.producer] = advance(state, outcome, ack.clock, ack.begin)
            self.spans[ack.producer] = _Span()

    def _refusal(
        self,
        outcome: Outcome,
        state: ProducerState,
        kind: Flag,
        clock: Clock,
        offset: int,
        of: Run | AckRecord,
    ) -> Exception:
        at = Position(
            journal=self._read.history.name,
            binding=self._read.binding.index,
            offset=offset,
            producer=of.producer,
        )
        return sequence_error(outcome, state, kind, clock, at)


def _reached(goals: Mapping[Producer, Clock], state: Callable[[Producer], ProducerState]) -> bool:
    return all(state(producer).last_commit >= goal for producer, goal in goals.items())


def _admits(bounds: Bounds, run: Run) -> bool:
    """True if a run may have rows within the bounds; scans check each row if it may have others."""
    return (
        run.clock_min < bounds.not_after
        and run.clock_max >= bounds.not_before
        and run.clock_max >= bounds.truncated_at
    )


def first_clock(record: Record) -> Clock:
    """The clock of a record's first document, or an earlier one."""
    if isinstance(record, AckRecord):
        return record.clock
    return min(run.clock_min for run in record.runs if run.first_offset == 0)


def last_clock(record: Record) -> Clock:
    """The greatest clock of a record."""
    if isinstance(record, AckRecord):
        return record.clock
    return max(run.clock_max for run in record.runs)
