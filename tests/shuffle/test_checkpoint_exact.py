"""Whatever is written, and however it is read, checkpoints have every commit once and whole.

A small world of writers and readers around the real sequencing, hints and checkpoints: two bindings
that share a lane and a cohort, and a third in a lane of its own, all reading the same journals.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.model.clock import NEVER, Clock, Flag, Producer
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.hints import Ack, Commit, Hint, HintIndex, HintTarget, write_acks
from penstock.model.producer_frontier import OBSERVED_FLOOR
from penstock.model.resume import prepare_resume
from penstock.model.sequence import (
    Outcome,
    ProducerState,
    advance,
    begin_replay,
    resume,
    sequence,
    sequence_replay,
)
from penstock.shuffle.binding import Lane
from penstock.shuffle.checkpoint import Checkpoints
from support.strategies_frontier import hint_frontier

JOURNALS = ("acme/a", "acme/b", "acme/c")
LANES = (Lane(priority=1, bindings=(0, 1)), Lane(priority=0, bindings=(2,)))
COHORTS = {0: 0, 1: 0, 2: 1}
HINTS = HintIndex(
    HintTarget(collection="acme", binding=binding, cohort=cohort)
    for binding, cohort in COHORTS.items()
)

Entry = tuple[str, int, Producer]
"""Journal, binding, producer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """A document, or the ACK of a transaction that has committed, too, what its hints say."""

    journal: str
    producer: Producer
    kind: Flag
    clock: Clock
    hints: tuple[Commit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What was appended, in the order of revisions."""

    appends: tuple[Append, ...]
    transactions: tuple[tuple[Commit, ...], ...]
    """That were committed, each with all its commits."""

    def journal(self, name: str) -> list[tuple[int, Append]]:
        return [(at, one) for at, one in enumerate(self.appends, start=1) if one.journal == name]


@st.composite
def writers_of(draw: st.DrawFn, number: int) -> tuple[list[Append], list[tuple[Commit, ...]]]:
    """What one writer appends, and the transactions that it commits by that.

    They span journals, and their ACKs are appended one by one. Some are rolled back where there is
    something to roll back to, and some stay open, for the next one to commit or for ever.
    """
    producer = Producer(Producer.MULTICAST | number)
    clock = draw(st.integers(1, 40))
    appends: list[Append] = []
    transactions: list[tuple[Commit, ...]] = []
    committed: dict[str, Clock] = {}

    def append(journal: str, kind: Flag, at: int, *hints: Commit) -> None:
        appends.append(
            Append(journal=journal, producer=producer, kind=kind, clock=Clock(at), hints=hints)
        )

    for _ in range(draw(st.integers(2, 4))):
        journals = draw(st.sets(st.sampled_from(JOURNALS), min_size=1).map(sorted))
        for journal in journals:
            clock += 1
            append(journal, Flag.CONTINUE_TXN, clock)
        match draw(st.sampled_from(["commit", "commit", "commit", "roll back", "stay open"])):
            case "commit":
                clock += 1
                commits = tuple(Commit(journal, producer, Clock(clock)) for journal in journals)
                for ack in write_acks(commits):
                    append(ack.commit.journal, Flag.ACK_TXN, clock, *ack.hints)
                committed |= dict.fromkeys(journals, Clock(clock))
                transactions.append(commits)
            case "roll back":
                for journal in journals:
                    if journal in committed:
                        append(journal, Flag.ACK_TXN, committed[journal])
    return appends, transactions


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Writers whose clocks have nothing to do with each other, interleaved."""
    writers = [draw(writers_of(number)) for number in range(1, draw(st.integers(2, 3)) + 1)]
    turns = draw(st.permutations([n for n, (written, _) in enumerate(writers) for _ in written]))
    appends = [iter(written) for written, _ in writers]
    return World(
        appends=tuple(next(appends[turn]) for turn in turns),
        transactions=tuple(one for _, committed in writers for one in committed),
    )


class Read:
    """One journal, read by one binding."""

    def __init__(
        self, world: World, journal: str, binding: int, checkpoint: JournalFrontier | None
    ) -> None:
        entries = checkpoint.producers if checkpoint else ()
        resumed = resume(entries)
        self.journal, self.binding = journal, binding
        self.records = world.journal(journal)
        self.offset, self.states = resumed.offset, resumed.states
        self.hinted = {one.producer: one.hinted_commit for one in entries if one.is_unresolved}
        self._bytes = 0

    def through_revision(self, revision: int) -> int:
        return sum(at <= revision for at, _ in self.records)

    def read(self, through: int, *, park: bool) -> tuple[JournalFrontier, list[Commit], list[Hint]]:
        """Go on through this offset; with `park`, at most up to the last commit that was hinted."""
        touched: set[Producer] = set()
        commits: list[Commit] = []
        hints: list[Hint] = []
        while self.offset < through and not (park and self._has_hinted()):
            _, one = self.records[self.offset]
            outcome = self._meet(one)
            if not outcome.is_duplicate:
                touched.add(one.producer)
            if outcome.is_commit:
                commits.append(Commit(one.journal, one.producer, one.clock))
                hints += HINTS.extract(
                    Ack(commit=commits[-1], hints=one.hints),
                    binding=self.binding,
                    cohort=COHORTS[self.binding],
                    exists=lambda _: True,
                )
            self.offset += 1
            self._bytes += 1
        report = JournalFrontier(
            journal=self.journal,
            binding=self.binding,
            producers=tuple(self.states[producer].report(producer) for producer in touched),
            bytes_read_delta=self._bytes,
        )
        if touched:
            self._bytes = 0
        return report, commits, hints

    def _meet(self, one: Append) -> Outcome:
        state = self.states.get(one.producer, ProducerState())
        outcome = sequence(state, one.kind, one.clock)
        if outcome is Outcome.REPLAY_FIRST:
            state = self._replay(state, one.producer)
            outcome = sequence(state, one.kind, one.clock)
        self.states[one.producer] = advance(state, outcome, one.clock, self.offset)
        return outcome

    def _replay(self, state: ProducerState, producer: Producer) -> ProducerState:
        begin, state = state.offset, begin_replay(state)
        for offset in range(begin, self.offset):
            _, one = self.records[offset]
            if one.producer == producer:
                outcome = sequence_replay(state, one.kind, one.clock)
                state = advance(state, outcome, one.clock, offset)
        return state

    def _has_hinted(self) -> bool:
        return all(self.states[p].last_commit >= clock for p, clock in self.hinted.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Some lane reads on; then, perhaps, the task asks for a checkpoint."""

    lane: int
    revisions: int
    """By how much the revision grows at which all journals are cut."""
    paces: Mapping[str, int]
    """By how much each journal goes on if they are not cut together."""
    ask: bool


rounds = st.lists(
    st.builds(
        Round,
        lane=st.integers(0, len(LANES) - 1),
        revisions=st.integers(1, 5),
        paces=st.fixed_dictionaries(dict.fromkeys(JOURNALS, st.integers(0, 2))),
        ask=st.sampled_from([True, True, False]),
    ),
    min_size=6,
    max_size=14,
)


class Task:
    """A session, and the task that consumes its checkpoints.

    With `together`, all journals of a lane are cut at one revision. With `park`, reads of a
    recovery end where the last commit is that they were hinted of.
    """

    def __init__(
        self, world: World, resumed: Frontier = EMPTY, *, together: bool, park: bool = False
    ) -> None:
        self.world = world
        self.together, self.park = together, park
        self.checkpoints = Checkpoints(LANES, resumed)
        pairs = [(journal, binding) for journal in JOURNALS for binding in COHORTS]
        reads = [Read(world, *pair, resumed.find(*pair)) for pair in pairs]
        self.reads = [read for read in reads if read.hinted or not self.checkpoints.recovery]
        self.seen = commits_of(resumed)  # the last commit of each entry that was handed out
        self.reported = EMPTY
        self.takes: list[Frontier] = []
        self._commits_read = set(self.seen.items())
        self._revisions = [0] * len(LANES)

    def run(self, schedule: Iterable[Round]) -> None:
        """As scheduled, and then to the end of everything."""
        for one in schedule:
            self._revisions[one.lane] += one.revisions
            self._read(one.lane, one.paces)
            if one.ask:
                self.ask()
        for lane in range(len(LANES)):
            self._revisions[lane] = len(self.world.appends)
            self._read(lane, dict.fromkeys(JOURNALS, len(self.world.appends)))
        while self.ask():
            pass

    def _read(self, lane: int, paces: Mapping[str, int]) -> None:
        reports, hints = [], []
        for read in self.reads:
            if read.binding not in LANES[lane].bindings:
                continue
            through = read.through_revision(self._revisions[lane])
            if not self.together:
                through = min(read.offset + paces[read.journal], len(read.records))
            report, commits, found = read.read(through, park=self.park)
            reports.append(report)
            hints += found
            for commit in commits:
                entry = commit.journal, read.binding, commit.producer
                self._commits_read.add((entry, commit.clock))
        delta = Frontier.gather(reports).reduce(hint_frontier(hints))
        self.reported = self.reported.reduce(delta)
        self.checkpoints.on_progressed(lane, delta)

    def ask(self) -> bool:
        """Ask for a checkpoint, and check what the answer must always be."""
        if not self.checkpoints.requested:
            self.checkpoints.request()
        willing = self.checkpoints.would_answer()
        answer = self.checkpoints.answer()
        assert willing == (answer is not None)
        if answer is None:
            return False
        self._consume(answer)
        return True

    def _consume(self, answer: Frontier) -> None:
        assert len(answer) > 0
        for entry, clock, _ in entries_of(answer):
            if clock:
                assert clock >= self.seen.get(entry, NEVER), "commits are never taken back"
                assert (entry, clock) in self._commits_read, "read before it is shown"
                self.seen[entry] = clock
        counts = any(read.bytes_read_delta for read in answer)
        if answer.unresolved_hints:
            assert not counts, "a peek tells no bytes, for they would be told twice"
        else:
            # What a recovery read beyond its hints is read again, and its bytes are told then.
            assert counts or self.checkpoints.recovery
            self.takes.append(answer)
            if self.together:
                self.assert_whole()

    def assert_whole(self) -> None:
        """Each transaction is visible in all of a cohort, or in none of it."""
        for transaction in self.world.transactions:
            for cohort in set(COHORTS.values()):
                shown = {
                    self.seen.get((journal, binding, producer), NEVER) >= clock
                    for journal, producer, clock in map(_parts, transaction)
                    for binding in COHORTS
                    if COHORTS[binding] == cohort
                }
                assert len(shown) == 1, f"{transaction} is torn"

    def assert_all_seen(self) -> None:
        for transaction in self.world.transactions:
            for journal, producer, clock in map(_parts, transaction):
                for binding in COHORTS:
                    assert self.seen[journal, binding, producer] >= clock


def _parts(commit: Commit) -> tuple[str, Producer, Clock]:
    return commit.journal, commit.producer, commit.clock


def entries_of(frontier: Frontier) -> Iterator[tuple[Entry, Clock, int]]:
    """Each entry with its last commit and offset; an open span has committed nothing."""
    for read in frontier:
        for one in read.producers:
            entry = read.journal, read.binding, one.producer
            clock = one.last_commit if one.last_commit > OBSERVED_FLOOR else NEVER
            yield entry, clock, one.offset


def sum_of(frontiers: Iterable[Frontier]) -> Frontier:
    total = EMPTY
    for one in frontiers:
        total = total.reduce(one)
    return total


def bytes_of(frontier: Frontier) -> dict[tuple[str, int], int]:
    return {(read.journal, read.binding): read.bytes_read_delta for read in frontier}


def commits_of(frontier: Frontier) -> dict[Entry, Clock]:
    return {entry: clock for entry, clock, _ in entries_of(frontier) if clock}


@pytest.mark.parametrize("together", [True, False], ids=["cut at revisions", "at any pace"])
@given(world=worlds(), schedule=rounds)
def test_what_is_taken_is_what_was_read(
    together: bool, world: World, schedule: list[Round]
) -> None:
    task = Task(world, together=together)
    task.run(schedule)
    taken = sum_of(task.takes)
    assert task.reported.unresolved_hints == taken.unresolved_hints == 0
    assert list(entries_of(taken)) == list(entries_of(task.reported))
    assert bytes_of(taken) == bytes_of(task.reported)
    task.assert_all_seen()
    assert not task.checkpoints.would_answer()
    assert task.checkpoints.unresolved() == EMPTY


@given(worlds(), st.booleans(), rounds, rounds, rounds, st.data())
def test_a_transaction_that_was_prepared_is_replayed_exactly(
    world: World,
    together: bool,
    schedule: list[Round],
    replay: list[Round],
    rest: list[Round],
    data: st.DataObject,
) -> None:
    crashed = Task(world, together=together)
    crashed.run(schedule)
    assume(crashed.takes)
    at = data.draw(st.integers(0, len(crashed.takes) - 1), label="crashed in transaction")
    committed = sum_of(crashed.takes[:at]).clear_discharged_hints()
    hinted = crashed.takes[at]

    resumed = prepare_resume(committed, hinted)
    if resumed.unresolved_hints:
        parks = data.draw(st.booleans(), label="reads park")
        recovery = Task(world, resumed, together=together, park=parks)
        assert recovery.checkpoints.recovery
        recovery.run(replay)
        assert len(recovery.takes) == 1, "one checkpoint, and then silence"
        replayed = committed.reduce(recovery.takes[0]).clear_discharged_hints()
        assert commits_of(replayed) == commits_of(committed.reduce(hinted))
    else:
        replayed = resumed.clear_discharged_hints()

    after = Task(world, replayed, together=together)
    assert not after.checkpoints.recovery
    after.run(rest)
    after.assert_all_seen()
    assert commits_of(replayed.reduce(sum_of(after.takes))) == commits_of(crashed.reported)
