"""PURE: a task that reads a simulated world through a real `SessionState`.

It does what the leader of a task does, in the smallest steps there are, and in whatever order
chance has them: listings arrive collection by collection; checkpoints are requested, folded and
drained; a transaction is prepared (its frontier is durable, as hints) and committed (its documents
are), and between any two of these everything that is not durable may be forgotten. What comes out
is handed to a `Ledger`, which knows better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

from penstock.errors import PenstockError
from penstock.journal.committed import VisibleRows
from penstock.journal.state import JournalState
from penstock.model import frontier_codec
from penstock.model.clock import NEVER, Clock, Flag
from penstock.model.completed import STALENESS_HORIZON
from penstock.model.frontier import EMPTY, Frontier
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier
from penstock.model.resume import prepare_resume, prune_producers
from penstock.model.sequence import SequenceError
from penstock.shuffle.binding import Binding
from penstock.shuffle.checkpoint import HINT_TIMEOUT_TICKS, Stalled
from penstock.shuffle.delivery import Checkpoint, Delivery
from penstock.shuffle.history import Need, NeedRows
from penstock.shuffle.order import arranged
from penstock.shuffle.rounds import Round, WaitUntil
from penstock.shuffle.state import RecoveryImpossible, RoundLimits, SessionState
from support.shuffle_oracle import Doc, Ledger, Violation, Written
from support.simulated_writers import Writers
from support.simulation import START, World, chance, short, some

T = TypeVar("T")

STEPS_MAX: Final = 2_000
"""Steps that must be enough to hand out everything, when nothing more is written."""


IDLE_STEPS: Final = 6
"""Steps of reading without effect, after which nothing more will come."""

RESTARTS_MAX: Final = 5
"""Sessions that may rightly end because nothing moves."""


class Ended(Exception):
    """The task has rightly refused to go on."""


# ----------------------------------------------------------------------------------------- task


@dataclass(slots=True)
class _Open:
    """A transaction of the task that is not prepared yet."""

    frontier: Frontier = field(default_factory=lambda: EMPTY)
    deliveries: list[Delivery] = field(default_factory=list)
    closable: bool = False


@dataclass(frozen=True, slots=True)
class _Prepared:
    frontier: Frontier
    docs: tuple[tuple[int, Doc], ...]


OpenSession = Callable[..., SessionState]


class Bytes:
    """What the checkpoints of a session say was read, and remains."""

    def __init__(self, world: World, resume: Frontier) -> None:
        self._world = world
        self._start = {(read.journal, read.binding): read.cut_floor for read in resume}
        self._told: dict[tuple[str, int], tuple[int, int]] = {}

    def add(self, checkpoint: Checkpoint) -> None:
        """Bytes are told once, by checkpoints that are no peeks, and add up."""
        table = checkpoint.frontier.table
        if checkpoint.is_peek and (table.bytes_read.any() or table.bytes_behind.any()):
            raise Violation("a peek tells bytes")
        for key, read, behind in zip(
            table.keys, table.bytes_read.tolist(), table.bytes_behind.tolist(), strict=True
        ):
            before = self._told.get(key, (0, 0))
            self._told[key] = told = before[0] + read, before[1] + behind
            if min(told) < 0 and key[0] not in self._world.removed:
                raise Violation(f"{key}: {told} bytes were read, and remain")

    def check_end(self) -> None:
        """Everything was read: nothing remains, and all of it was told, if the end was."""
        for (name, binding), told in self._told.items():
            journal = self._world.journals[name]
            if name in self._world.removed or journal.state.pages or not journal.ends_closed:
                continue
            rows = journal.stamps[self._start.get((name, binding), 0) :]
            size = self._world.habits.row_bytes * sum(r.kind is not Flag.ACK_TXN for r in rows)
            if told != (size, 0):
                raise Violation(f"{name}, binding {binding}: of {size} bytes {told} were told")


class Task:
    """The leader of a task, with what it keeps durable; its methods are actions."""

    def __init__(
        self,
        world: World,
        writers: Writers,
        bindings: Sequence[Binding],
        limits: RoundLimits,
        *,
        later: int = 0,
        open_session: OpenSession = SessionState,
        paces: bool = False,
    ) -> None:
        """So many of the bindings come `later`, with a new version of the task.

        With `paces`, listings lie: some journals are shown older than their revision.
        """
        self.world = world
        self.writers = writers
        self.bindings = bindings
        self._active = bindings[: len(bindings) - later]
        self._upgraded = False
        self.limits = limits
        self.transactions = 0
        self.recoveries = 0
        self._open_session = open_session
        self._paces = paces
        self._by_index = {binding.index: binding for binding in bindings}
        self._reads = {
            (binding.index, name): binding.reads(name)
            for binding in bindings
            for name in world.collection_of
        }
        cohorts: dict[int, list[int]] = {}
        for binding in bindings:
            cohorts.setdefault(binding.cohort, []).append(binding.index)
        self._cohorts = cohorts
        self.ledger = Ledger(
            cohorts=cohorts,
            reads=self._is_read,
            committed=world.committed,
            written=world.written,
            revision=self._revision,
            lost=world.is_lost,
            excused=self._excused,
        )
        self._restarts = 0
        self._committed = EMPTY
        self._prepared: _Prepared | None = None
        self._restart(chance(0))

    # Sessions

    def _restart(self, rng: Random) -> None:
        """Forget everything that is not durable, and begin anew."""
        resume = self._committed
        if self._prepared is not None:
            resume = prepare_resume(resume, self._prepared.frontier)
            if not resume.unresolved_hints:
                self._require(not self._prepared.docs, "a transaction with documents has no commit")
                self._committed, self._prepared = resume, None
        if rng.random() < 0.3:
            resume = frontier_codec.decode(frontier_codec.encode(resume))
        if rng.random() < 0.3:
            resume = self._pruned(resume)
        self.recovers = resume.unresolved_hints > 0
        if self._upgraded and not self.recovers:  # which replays what an older version has read
            self._active = self.bindings
        self.session = self._open_session(self._active, resume=resume, limits=self.limits)
        self._floors = dict(resume.gap_floors)
        self._bytes = Bytes(self.world, resume)
        self._known = dict.fromkeys(self._collections(), -1)
        self._slow = rng.choice(list(self._known))
        self._withheld: dict[str, JournalState] = {}
        self._need: Need | None = None
        self._requested = False
        self._open = _Open()
        if self.world.story is not None:
            what = "recovery" if self.recovers else "session"
            self.world.tell(f"  a {what} opens from {_frontier(resume)}")

    def _pruned(self, resume: Frontier) -> Frontier:
        """Forget producers, if it is true of all of them that they are not heard of again."""
        retired = {w.producer for w in self.writers.all if w.retired and w.closing is None}
        size = self.world.habits.row_bytes
        pruned = prune_producers(
            resume, byte_position=lambda _, offset: offset * size, retired=retired, prune_bytes=1
        )
        for before, after in zip(resume, pruned, strict=True):
            forgotten = {e.producer for e in before.producers} - {
                e.producer for e in after.producers
            }
            unread = self.world.journals[before.journal].stamps[before.cut_floor :]
            if not forgotten <= retired or forgotten & {stamp.producer for stamp in unread}:
                return resume
        return pruned

    def _collections(self) -> list[str]:
        return sorted({binding.collection.name for binding in self._active})

    def _is_read(self, binding: int, journal: str) -> bool:
        return self._reads[binding, journal] and any(b.index == binding for b in self._active)

    def crash(self, rng: Random) -> None:
        """The process dies."""
        self.world.tell("  the task crashes")
        self._upgraded = self._upgraded or rng.random() < 0.5
        self._restart(rng)

    # Listings

    def learn(self, rng: Random) -> None:
        """A listing arrives, or moves."""
        behind = [c for c, known in self._known.items() if known < self.world.revision]
        if len(self._known) > 1 and self._known[self._slow] >= 0 and rng.random() < 0.8:
            behind = [collection for collection in behind if collection != self._slow]
        for collection in some(rng, behind):
            known = self._known[collection]
            through = self.world.revision
            if rng.random() < 0.4 and (known >= 0 or not self.recovers):
                through = rng.randint(known + 1, through)
            lies = self._paces and (known >= 0 or not self.recovers)
            self._learn(collection, through, self._withheld_of(collection), rng if lies else None)

    def _learn(
        self,
        collection: str,
        through: int,
        changed: dict[str, JournalState],
        withhold: Random | None = None,
    ) -> None:
        known = self._known[collection]
        changed = {
            **changed,
            **{n: state for r, n, state in self.world.history[collection] if known < r <= through},
        }
        if withhold is not None:
            for name in list(changed):
                if withhold.random() < 0.5:
                    self._withheld[name] = changed.pop(name)
        self._known[collection] = through
        if self.world.story is not None:
            self.world.tell(f"  {collection} is known up to r{through}: {', '.join(changed)}")
        self._guarded(lambda: self.session.learn(collection, through, changed))

    def _withheld_of(self, collection: str) -> dict[str, JournalState]:
        mine = [n for n in self._withheld if self.world.collection_of[n] == collection]
        return {name: self._withheld.pop(name) for name in mine}

    # Rounds

    def request(self, rng: Random) -> None:
        """Ask for a checkpoint."""
        if not self._requested:
            self.session.request()
            self._requested = True

    def advance(self, rng: Random) -> None:
        """Read a round, or answer what reading it needs to know."""
        self._advance()

    def _advance(self) -> Round | WaitUntil | None:
        if self._need is not None:
            need, self._need = self._need, None
            self._supply(need)
            return None
        step = self._guarded(lambda: self.session.advance(self.world.now))
        for notice in self.session.take_notices():
            self.world.tell(f"  notice: {notice}")
        if isinstance(step, Round):
            for read, fold in step.folds.items():
                binding = read.binding.index
                self._floors[binding] = max(self._floors.get(binding, NEVER), fold.floor)
            if self.world.story is not None:
                self.world.tell(f"  round of lane {step.lane}: {self._told(step)}")
        elif isinstance(step, Need):
            self._need = step
            return None
        return step

    def _supply(self, need: Need) -> None:
        if isinstance(need, NeedRows):
            self.session.supply(need, self._span_begin(need))
            return
        held = {page.path for page in self.world.journals[need.journal].state.pages}
        if {page.path for page in need.pages} <= held:  # or the journal has moved on
            records = [record for page in need.pages for record in self.world.pages[page.path]]
            self.session.supply(need, records)

    def _span_begin(self, need: NeedRows) -> int:
        stamps = self.world.journals[need.journal].stamps
        first, last = need.run.first_offset, need.run.last_offset
        begin = need.fragment.begin
        return next(
            at
            for at in range(begin + first, begin + last + 1)
            if stamps[at].producer == need.run.producer and stamps[at].clock > need.clock_gt
        )

    # Checkpoints

    def answer(self, rng: Random) -> None:
        """Take a checkpoint, if there is one, into the open transaction."""
        self._answer()

    def _answer(self) -> bool:
        if not self._requested:
            return False
        checkpoint = self._guarded(self.session.answer)
        if checkpoint is None:
            return False
        self._requested = False
        if self.world.story is not None:
            self.world.tell(
                f"  {'peek' if checkpoint.is_peek else 'checkpoint'} "
                f"{_frontier(checkpoint.frontier)}: {self._told(checkpoint)}"
            )
        open_ = self._open
        open_.frontier = open_.frontier.reduce(checkpoint.frontier)
        open_.deliveries += checkpoint.deliveries
        open_.closable = not checkpoint.is_peek
        self._bytes.add(checkpoint)
        if not checkpoint.is_peek:
            open_.frontier = open_.frontier.clear_discharged_hints()
            if not self.recovers:  # which is to be what was judged before the crash
                self.ledger.check(self._docs(open_.deliveries))
        return True

    def _docs(self, deliveries: Sequence[Delivery]) -> list[tuple[int, Doc]]:
        """Documents in the order of a slice; or, of one binding by itself, of what combines it."""
        rng = chance(len(deliveries))
        if rng.random() < 0.5:
            deliveries = [
                delivery
                for index, binding in self._by_index.items()
                for delivery in arranged(
                    (each for each in deliveries if each.binding == index),
                    delay=binding.read_delay,
                ).deliveries
            ]
        docs = []
        for delivery in deliveries:
            delay = self._by_index[delivery.binding].read_delay
            due = self.world.now - delay
            for rows in delivery.rows:
                for clock in self._clocks(delivery.journal, rows):
                    doc = Doc(delivery.journal, rows.run.producer, clock)
                    place = max(clock + delay, delivery.level), clock, doc.producer
                    docs.append((place, (delivery.binding, doc)))
                    self._require(clock <= delivery.commit, "a delivery has a row above its commit")
                    self._require(
                        clock <= due or due == self.world.now, "a document comes before it is due"
                    )
        return [doc for _, doc in sorted(docs)]

    def _revision(self, cohort: int, doc: Doc) -> int | None:
        """The first revision that told this cohort of the commit of a document.

        Not certain if what told it was removed, or stale, or read by an older version of the task;
        of what was removed, a repetition may count later.
        """
        if doc.journal in self.world.removed:
            return None
        own, written = self.world.committed[doc], self.world.written.get(doc)
        if written is None or not written.whole:
            return own
        told = min(
            [own]
            + [
                self.world.acks[ack]
                for ack in written.commits
                if ack in self.world.acks
                and any(self._is_read(binding, ack.journal) for binding in self._cohorts[cohort])
            ]
        )
        certain = (
            not self._upgraded
            and not self._excused(cohort, written)
            and self.world.removed.isdisjoint(ack.journal for ack in written.commits)
        )
        return told if told == own or certain else None

    def _clocks(self, journal: str, rows: VisibleRows) -> list[Clock]:
        """Read rows as a slice does: by producer and kind, above a clock, perhaps rising."""
        run, begin = rows.run, rows.fragment.begin
        stamps = self.world.journals[journal].stamps[
            begin + run.first_offset : begin + run.last_offset + 1
        ]
        clocks = [s.clock for s in stamps if s.producer == run.producer and s.kind is run.kind]
        if not rows.running_max:
            return [clock for clock in clocks if clock > rows.clock_gt]
        shown = []
        seen = rows.clock_gt
        for clock in clocks:
            if clock > seen:
                shown.append(clock)
                seen = clock
        return shown

    # Transactions

    def prepare(self, rng: Random) -> None:
        """Make the frontier of a transaction durable, as hints."""
        if self._prepared is None and self._open.closable:
            docs = tuple(self._docs(self._open.deliveries))
            self._prepared = _Prepared(self._open.frontier, docs)
            self._open = _Open()
            self.world.tell("  the transaction is prepared")

    def commit(self, rng: Random) -> None:
        """Commit what is prepared; or, in a recovery, what was prepared before the crash."""
        if self.recovers:
            if self._open.closable:
                self._commit_recovery(rng)
        elif self._prepared is not None:
            self._commit(self._prepared)

    def _commit(self, prepared: _Prepared) -> None:
        self._committed = self._committed.reduce(prepared.frontier).clear_discharged_hints()
        self.ledger.commit(prepared.docs)
        self._prepared = None
        self.transactions += 1
        self.world.tell("  the transaction is committed")

    def _commit_recovery(self, rng: Random) -> None:
        prepared = self._prepared
        assert prepared is not None
        docs = tuple(self._docs(self._open.deliveries))
        recovered, crashed = set(docs), set(prepared.docs)
        self._require(not recovered - crashed, f"recovery adds {recovered - crashed}")
        lacking = {each for each in crashed - recovered if not self.world.is_lost(each[1])}
        self._require(not lacking, f"recovery lacks {lacking}")
        self._commit(_Prepared(self._open.frontier, docs))
        self.recoveries += 1
        self._restart(rng)

    def tick(self, rng: Random) -> None:
        """A minute passes, as far as the session counts minutes."""
        self._guarded(self.session.tick)

    # The end

    def drain(self, rng: Random) -> None:
        """Process all there is; fails if that does not come to an end, or something is left."""
        if rng.random() < 0.5:
            self.limits = RoundLimits()
            self.crash(rng)
        if not self.recovers:
            self.commit(rng)
        if self._active is not self.bindings:
            self._upgraded = True
            self._restart(rng)
        idle = 0
        for _ in range(STEPS_MAX):
            self.learn_through(self.world.revision)
            self.request(rng)
            step = self._advance()
            moved = isinstance(step, Round) or self._need is not None
            moved = self._answer() or moved
            if isinstance(step, WaitUntil) and not moved and self.world.now < step.clock:
                self.world.now = step.clock
                self.world.tell(f"  it is {self.world.now - START:+}")
                continue
            before = self.transactions
            if not self.recovers:
                self.prepare(rng)
            if moved and self._prepared is not None and rng.random() < 0.1:
                self.crash(rng)
            self.commit(rng)
            idle = 0 if moved or self.transactions > before else idle + 1
            if idle == IDLE_STEPS and self.ledger.missing():
                self._wait_in_vain()
                idle = 0
            elif idle == IDLE_STEPS:
                self._bytes.check_end()
                return
        raise Violation(f"{STEPS_MAX} steps do not bring it to an end")

    def learn_through(self, revision: int) -> None:
        """Learn everything there is to know up to a revision."""
        for collection, known in self._known.items():
            withheld = self._withheld_of(collection)
            if withheld or known < revision:
                self._learn(collection, revision, withheld)

    def _wait_in_vain(self) -> None:
        """Nothing comes: let minutes pass until the session says why, and begins anew."""
        restarts = self._restarts
        for _ in range(HINT_TIMEOUT_TICKS):
            self.tick(chance(0))
            if self._restarts > restarts:
                return
        missing = self.ledger.missing()
        raise Violation(
            f"{len(missing)} documents do not come, {missing[:1]}; "
            f"the session says: {self.session.waiting_for()}"
        )

    # Judging

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Tell errors that the journals deserve from those they do not."""
        try:
            return call()
        except SequenceError as error:
            if any(journal.contradiction for journal in self.world.journals.values()):
                raise Ended(str(error)) from None
            raise Violation(f"journals are sound, and were refused: {error}") from error
        except RecoveryImpossible as error:
            if self.world.removed:
                raise Ended(str(error)) from None
            raise Violation(f"nothing was removed, and yet: {error}") from error
        except Stalled as error:
            unfinished = any(writer.closing is not None for writer in self.writers.all)
            if not unfinished and not self.world.removed:
                raise Violation(f"nothing is missing, and yet: {error}") from error
            self._begin_anew(error)
        except PenstockError as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        return None

    def _begin_anew(self, why: PenstockError) -> None:
        self.world.tell(f"  {why}")
        self._restarts += 1
        if self._restarts > RESTARTS_MAX:
            raise Violation(f"it does not help to begin anew: {why}")
        self._restart(chance(0))

    def _excused(self, cohort: int, written: Written) -> bool:
        """Whether a transaction may be torn, by what `model.completed` says."""
        bindings = self._cohorts[cohort]
        if any(written.clock < self._floors.get(binding, NEVER) for binding in bindings):
            return True
        newest = 0
        prepared = EMPTY if self._prepared is None else self._prepared.frontier
        for frontier in (self._committed, prepared, self._open.frontier):
            for read in frontier:
                if read.binding in bindings:
                    newest = max(newest, *(entry.last_commit for entry in read.producers), 0)
        return written.clock + STALENESS_HORIZON <= newest

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(otherwise)

    def _told(self, what: Round | Checkpoint) -> str:
        return "; ".join(
            f"{binding} {doc.journal} {short(doc.producer, doc.clock)}"
            for binding, doc in self._docs(what.deliveries)
        )


def _frontier(frontier: Frontier) -> str:
    """A frontier as the design writes it: `{last commit, hinted commit, offset}`."""
    return "; ".join(
        f"{read.journal} {read.binding} " + " ".join(map(_entry, read.producers))
        for read in frontier
    )


def _entry(entry: ProducerFrontier) -> str:
    last, hinted = (
        f"{clock - START:+}" if clock > OBSERVED_FLOOR else str(clock)
        for clock in (entry.last_commit, entry.hinted_commit)
    )
    return f"P{entry.producer & 0xFFFF}{{{last},{hinted},{entry.offset:+}}}"
