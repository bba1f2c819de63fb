"""Sequencing: the decision table, stories, and oracles."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.model.clock import CLOCK_MAX, NEVER, Clock, Flag, Producer, from_unix
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier
from penstock.model.sequence import (
    Bounds,
    Outcome,
    Position,
    ProducerState,
    SequenceError,
    advance,
    begin_replay,
    resume,
    sequence,
    sequence_error,
    sequence_replay,
)
from support.strategies_frontier import Row, Written, journals_written, rows

O, C, A = Flag.OUTSIDE_TXN, Flag.CONTINUE_TXN, Flag.ACK_TXN  # noqa: E741
P1, P2 = (Producer(Producer.MULTICAST | n) for n in (1, 2))
DELIVERED = {Outcome.OUTSIDE_COMMIT, Outcome.CONTINUE_BEGIN_SPAN, Outcome.CONTINUE_EXTEND_SPAN}


def state(last_commit: int, max_continue: int = 0, offset: int = 0) -> ProducerState:
    return ProducerState(
        last_commit=Clock(last_commit), max_continue=Clock(max_continue), offset=offset
    )


def entry(producer: Producer, last_commit: int, offset: int, hint: int = 0) -> ProducerFrontier:
    return ProducerFrontier(
        producer=producer,
        last_commit=Clock(last_commit),
        hinted_commit=Clock(hint),
        offset=offset,
    )


@pytest.mark.parametrize(
    ("kind", "clock", "before", "want", "after"),
    [
        pytest.param(O, 20, (5, 15), Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE, None, id="1"),
        pytest.param(O, 3, (5, 15), Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE, None, id="1 old"),
        pytest.param(O, 5, (10, 0), Outcome.OUTSIDE_DUPLICATE, (10, 0), id="2"),
        pytest.param(O, 10, (10, 0), Outcome.OUTSIDE_DUPLICATE, (10, 0), id="2 equal"),
        pytest.param(O, 10, (5, 0), Outcome.OUTSIDE_COMMIT, (10, 0), id="3"),
        pytest.param(C, 10, (10, 0), Outcome.CONTINUE_DUPLICATE, (10, 0), id="4 committed"),
        pytest.param(C, 8, (5, 10), Outcome.CONTINUE_DUPLICATE, (5, 10), id="4 in the span"),
        pytest.param(C, 10, (5, 10), Outcome.CONTINUE_DUPLICATE, (5, 10), id="4 equal"),
        pytest.param(C, 10, (5, 0), Outcome.CONTINUE_BEGIN_SPAN, (5, 10), id="5"),
        pytest.param(C, 11, (5, 10), Outcome.CONTINUE_EXTEND_SPAN, (5, 11), id="6"),
        pytest.param(A, 10, (10, 0), Outcome.ACK_DUPLICATE, (10, 0), id="7"),
        pytest.param(A, 10, (10, 20), Outcome.ACK_CLEAN_ROLLBACK, (10, 0), id="8"),
        pytest.param(A, 3, (10, 0), Outcome.ACK_DUPLICATE, (10, 0), id="9"),
        pytest.param(A, 3, (10, 20), Outcome.ACK_DEEP_ROLLBACK, (3, 0), id="10"),
        pytest.param(A, 20, (10, 0), Outcome.ACK_EMPTY, (20, 0), id="11"),
        pytest.param(A, 20, (5, 20), Outcome.ACK_COMMIT, (20, 0), id="12 at the last row"),
        pytest.param(A, 30, (5, 20), Outcome.ACK_COMMIT, (30, 0), id="12 after the last row"),
        pytest.param(A, 15, (5, 20), Outcome.ACK_PARTIAL_COMMIT, None, id="13"),
        pytest.param(A, 100, (0, 150), Outcome.ACK_PARTIAL_COMMIT, None, id="13 wrong journal"),
        pytest.param(O, 0, (0, 0), Outcome.ILLEGAL_CLOCK, None, id="clock zero"),
        pytest.param(O, OBSERVED_FLOOR, (0, 0), Outcome.ILLEGAL_CLOCK, None, id="the floor"),
        pytest.param(C, CLOCK_MAX + 1, (0, 0), Outcome.ILLEGAL_CLOCK, None, id="not a BIGINT"),
    ],
)
def test_decision_table(
    kind: Flag, clock: int, before: tuple[int, int], want: Outcome, after: tuple[int, int] | None
) -> None:
    met = state(*before)
    outcome = sequence(met, kind, Clock(clock))
    assert outcome is want
    assert outcome.is_fatal == (after is None)
    if after is None:
        with pytest.raises(ValueError, match="no state after"):
            advance(met, outcome, Clock(clock), 7)
    else:
        moved = advance(met, outcome, Clock(clock), 7)
        assert (moved.last_commit, moved.max_continue) == after


def test_a_refusal_names_everything() -> None:
    met = state(5, 20)
    at = Position(journal="acme/orders/pivot=00", binding=3, offset=42, producer=P1)
    error = sequence_error(Outcome.ACK_PARTIAL_COMMIT, met, A, Clock(15), at)
    assert isinstance(error, SequenceError)
    for fact in (
        "acme/orders/pivot=00",
        "binding 3",
        "offset 42",
        str(P1),
        "0xf",
        "L=0x5",
        "X=0x14",
    ):
        assert fact in str(error)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome.is_fatal])
def test_every_fatal_outcome_has_a_refusal_with_a_fix(outcome: Outcome) -> None:
    at = Position(journal="acme/a", binding=0, offset=0, producer=P1)
    error = sequence_error(outcome, replace(state(5), gapped=True), O, Clock(9), at)
    assert outcome.value in error.what
    assert error.fix
    assert "began before reading resumed" in str(error.why)


STORY = """
    0  C 10 CONTINUE_BEGIN_SPAN   0 10   0 append
    1  C 20 CONTINUE_EXTEND_SPAN  0 20   0 append
    2  C 15 CONTINUE_DUPLICATE    0 20   0
    3  C 20 CONTINUE_DUPLICATE    0 20   0
    4  A 20 ACK_COMMIT           20  0  -5 close
    5  O 30 OUTSIDE_COMMIT       30  0  -6 append close
    6  O 30 OUTSIDE_DUPLICATE    30  0  -6
    7  A 20 ACK_DUPLICATE        30  0  -6
    8  C 40 CONTINUE_BEGIN_SPAN  30 40   8 append
    9  C 50 CONTINUE_EXTEND_SPAN 30 50   8 append
    10 A 30 ACK_CLEAN_ROLLBACK   30  0 -11 close void=8..10
    11 C 60 CONTINUE_BEGIN_SPAN  30 60  11 append
    12 A 70 ACK_COMMIT           70  0 -13 close
    13 A 70 ACK_DUPLICATE        70  0 -13
    14 C 80 CONTINUE_BEGIN_SPAN  70 80  14 append
    15 A 65 ACK_DEEP_ROLLBACK    65  0 -16 close void=14..15
"""


def test_the_story_of_one_producer() -> None:
    now = ProducerState()
    story = []
    appended: list[tuple[int, Clock]] = []
    voids: list[range] = []
    visible_after_12: list[Clock] = []
    for line in STORY.strip().splitlines():
        offset_text, kind_text, clock_text = line.split()[:3]
        offset, clock = int(offset_text), Clock(int(clock_text))
        kind = {"O": O, "C": C, "A": A}[kind_text]
        outcome = sequence(now, kind, clock)
        closes = outcome.is_commit or outcome.is_rollback
        notes = ["append"] * (outcome in DELIVERED) + ["close"] * closes
        if outcome in DELIVERED:
            appended.append((offset, clock))
        if outcome.is_rollback:
            voids.append(range(now.offset, offset))
            notes.append(f"void={now.offset}..{offset}")
        now = advance(now, outcome, clock, offset)
        story.append(
            f"{offset} {kind_text} {clock} {outcome.name} "
            f"{now.last_commit} {now.max_continue} {now.offset} {' '.join(notes)}".strip()
        )
        if offset == 12:
            visible_after_12 = [
                c for o, c in appended if c <= now.last_commit and not any(o in v for v in voids)
            ]
    assert story == [" ".join(line.split()) for line in STORY.strip().splitlines()]
    assert visible_after_12 == [10, 20, 30, 60]


@pytest.mark.parametrize(("clock", "append"), [(50, False), (200, True), (500, False)])
def test_bounds_withhold_documents_but_not_their_commits(clock: int, append: bool) -> None:
    bounds = Bounds(not_before=Clock(100), not_after=Clock(500))
    outcome = sequence(ProducerState(), O, Clock(clock))
    assert bounds.admit(Clock(clock)) == append
    assert advance(ProducerState(), outcome, Clock(clock), 0).last_commit == clock


def test_bounds_default_to_everything_since_1970_and_respect_truncation() -> None:
    assert Bounds().admit(from_unix(0))
    assert not Bounds().admit(Clock(from_unix(0) - 1))
    assert not Bounds(truncated_at=from_unix(9)).admit(from_unix(8))
    assert Bounds(truncated_at=from_unix(9)).admit(from_unix(9))


def test_a_span_that_never_commits_reports_the_floor() -> None:
    opened = advance(ProducerState(), Outcome.CONTINUE_BEGIN_SPAN, Clock(10), 4)
    assert opened.report(P1) == entry(P1, OBSERVED_FLOOR, 4)
    assert state(20, 30, 8).report(P1) == entry(P1, 20, 8)
    assert ProducerState().report(P1) == entry(P1, 0, 0)


def test_reading_resumes_at_the_furthest_offset_any_entry_names() -> None:
    assert resume([]).offset == 0
    assert resume([entry(P1, 100, 4), entry(P2, 90, -9)]).offset == 9


@pytest.mark.parametrize(
    ("last_commit", "hint", "offset", "gapped"),
    [
        pytest.param(1, 0, 0, True, id="open at row 0"),
        pytest.param(100, 100, 0, False, id="closed, without a position"),
        pytest.param(0, 50, 0, False, id="known by a hint only"),
        pytest.param(100, 0, 4, True, id="open before the cut floor"),
        pytest.param(100, 0, 11, False, id="open at the cut floor: the read meets its first row"),
        pytest.param(100, 0, -4, False, id="closed"),
    ],
)
def test_a_producer_is_gapped_if_its_span_begins_before_the_floor(
    last_commit: int, hint: int, offset: int, gapped: bool
) -> None:
    recovered = resume([entry(P1, last_commit, offset, hint), entry(P2, 90, -11)])
    assert recovered.offset == 11
    assert recovered.states[P1].gapped == gapped


GAPPED = replace(state(100, offset=4), gapped=True)


@pytest.mark.parametrize(
    ("kind", "clock", "want"),
    [
        pytest.param(C, 100, Outcome.CONTINUE_DUPLICATE, id="old document"),
        pytest.param(C, 101, Outcome.REPLAY_FIRST, id="next document"),
        pytest.param(A, 101, Outcome.REPLAY_FIRST, id="commit"),
        pytest.param(A, 100, Outcome.ACK_CLEAN_ROLLBACK, id="clean rollback"),
        pytest.param(A, 99, Outcome.ACK_DEEP_ROLLBACK, id="deep rollback"),
        pytest.param(O, 101, Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE, id="outside"),
        pytest.param(O, 99, Outcome.OUTSIDE_WITH_PRECEDING_CONTINUE, id="outside, old"),
    ],
)
def test_documents_of_a_gapped_producer(kind: Flag, clock: int, want: Outcome) -> None:
    outcome = sequence(GAPPED, kind, Clock(clock))
    assert outcome is want
    if outcome.is_duplicate:
        assert advance(GAPPED, outcome, Clock(clock), 9) == GAPPED
    if outcome.is_rollback:
        assert advance(GAPPED, outcome, Clock(clock), 9) == state(clock, offset=-10)


def test_a_commit_inside_a_replayed_range_is_fatal() -> None:
    replaying = begin_replay(GAPPED)
    assert sequence_replay(replaying, A, Clock(120)) is Outcome.REPLAY_MEETS_CLOSE
    assert sequence_replay(replaying, O, Clock(120)) is Outcome.REPLAY_MEETS_CLOSE
    assert sequence_replay(replaying, A, Clock(90)) is Outcome.ACK_DUPLICATE
    assert sequence_replay(replaying, C, Clock(120)) is Outcome.CONTINUE_BEGIN_SPAN


def test_a_commit_after_a_replay_that_found_nothing_is_empty() -> None:
    assert sequence(begin_replay(GAPPED), A, Clock(130)) is Outcome.ACK_EMPTY


def test_only_gapped_producers_are_replayed() -> None:
    with pytest.raises(ValueError, match="gapped"):
        begin_replay(state(100, offset=4))


@dataclass
class Reader:
    """A reader of one journal, as simple as can be: it keeps every appended row in memory."""

    states: dict[Producer, ProducerState] = field(default_factory=dict)
    appended: list[tuple[int, Producer, Clock]] = field(default_factory=list)
    voids: list[tuple[Producer, range]] = field(default_factory=list)

    def read(self, journal: Sequence[Row], begin: int, end: int) -> None:
        for offset in range(begin, end):
            self.take(journal, offset)

    def take(self, journal: Sequence[Row], offset: int) -> Outcome:
        row = journal[offset]
        now = self.states.get(row.producer, ProducerState())
        outcome = sequence(now, row.kind, row.clock)
        if outcome is Outcome.REPLAY_FIRST:
            now = self.replay(journal, row.producer, begin_replay(now), offset)
            outcome = sequence(now, row.kind, row.clock)
        self.apply(row, offset, now, outcome)
        return outcome

    def replay(
        self, journal: Sequence[Row], producer: Producer, now: ProducerState, end: int
    ) -> ProducerState:
        for offset in range(now.offset, end):
            row = journal[offset]
            if row.producer == producer:
                now = self.apply(row, offset, now, sequence_replay(now, row.kind, row.clock))
        return now

    def apply(self, row: Row, offset: int, now: ProducerState, outcome: Outcome) -> ProducerState:
        if outcome.is_fatal:
            at = Position(journal="acme/a", binding=0, offset=offset, producer=row.producer)
            raise sequence_error(outcome, now, row.kind, row.clock, at)
        if outcome in DELIVERED:
            self.appended.append((offset, row.producer, row.clock))
        if outcome.is_rollback:
            self.voids.append((row.producer, range(now.offset, offset)))
        self.states[row.producer] = advance(now, outcome, row.clock, offset)
        return self.states[row.producer]

    def visible(self, through: Mapping[Producer, Clock]) -> list[tuple[Producer, Clock]]:
        return [
            (producer, clock)
            for offset, producer, clock in self.appended
            if clock <= through.get(producer, NEVER)
            and not any(producer == p and offset in void for p, void in self.voids)
        ]

    def commits(self) -> dict[Producer, Clock]:
        return {producer: now.last_commit for producer, now in self.states.items()}

    def report(self) -> list[ProducerFrontier]:
        return [now.report(producer) for producer, now in self.states.items()]


def journal_of(*documents: tuple[Producer, Flag, int]) -> list[Row]:
    return [Row(producer=p, kind=kind, clock=Clock(clock)) for p, kind, clock in documents]


def test_a_gapped_span_is_replayed_when_its_producer_commits() -> None:
    other = [(P2, O, n) for n in range(1, 5)]
    journal = journal_of(
        *other, (P1, C, 110), (P1, C, 120), (P2, C, 50), (P2, C, 60), (P2, A, 90), (P1, A, 130)
    )
    recovered = resume([entry(P1, 100, 4), entry(P2, 90, -9)])
    reader = Reader(states=dict(recovered.states))
    assert reader.take(journal, 9) is Outcome.ACK_COMMIT
    assert reader.appended == [(4, P1, 110), (5, P1, 120)]
    assert reader.states[P1] == state(130, offset=-10)

    rolled_back = [*journal[:9], Row(producer=P1, kind=A, clock=Clock(100))]
    reader = Reader(states=dict(recovered.states))
    assert reader.take(rolled_back, 9) is Outcome.ACK_CLEAN_ROLLBACK
    assert reader.appended == []


@given(journals_written())
def test_committed_documents_are_seen_once_and_no_others(written: Written) -> None:
    reader = Reader()
    reader.read(written.rows, 0, len(written.rows))
    seen = reader.visible(reader.commits())
    assert len(seen) == len(set(seen))
    assert set(seen) == written.committed


@dataclass
class Oracle:
    """Sequences one producer by keeping documents instead of clocks: slow, and plain to see."""

    committed: list[Clock] = field(default_factory=list)
    pending: list[Clock] = field(default_factory=list)
    last_close: Clock = NEVER

    def take(self, kind: Flag, clock: Clock) -> bool:
        """Whether the document could be taken."""
        is_new = clock > self.last_close
        if kind is C:
            if is_new and all(clock > waiting for waiting in self.pending):
                self.pending.append(clock)
        elif kind is O:
            if self.pending:
                return False
            if is_new:
                self.committed.append(clock)
                self.last_close = clock
        elif is_new:
            if any(waiting > clock for waiting in self.pending):
                return False
            self.committed += self.pending
            self.pending, self.last_close = [], clock
        elif self.pending:
            self.pending, self.last_close = [], clock
        return True


@given(rows())
def test_any_stream_is_sequenced_as_an_oracle_that_keeps_documents_does(journal: list[Row]) -> None:
    """Nonsense included; a deep rollback lowers what is visible by clock, so count at commit."""
    reader, oracles = Reader(), dict[Producer, Oracle]()
    delivered: dict[Producer, list[Clock]] = {}
    for offset, row in enumerate(journal):
        sound = oracles.setdefault(row.producer, Oracle()).take(row.kind, row.clock)
        if not sound:
            with pytest.raises(SequenceError):
                reader.take(journal, offset)
            break
        before = len(reader.appended)
        outcome = reader.take(journal, offset)
        assert len(reader.appended) - before == (row.kind is not A and not outcome.is_duplicate)
        if outcome.is_commit:
            taken = delivered.setdefault(row.producer, [])
            span = [c for _, p, c in reader.appended if p == row.producer]
            reader.appended = [one for one in reader.appended if one[1] != row.producer]
            taken += span
        if outcome.is_rollback:
            reader.appended = [one for one in reader.appended if one[1] != row.producer]
    for producer, oracle in oracles.items():
        assert delivered.get(producer, []) == oracle.committed
        assert [c for _, p, c in reader.appended if p == producer] == oracle.pending


@given(journals_written(), st.data())
def test_reading_again_from_a_span_boundary_shows_nothing_twice(
    written: Written, data: st.DataObject
) -> None:
    journal = [row for row in written.rows if row.producer == P1]
    reader = Reader()
    boundaries = [0]
    for offset in range(len(journal)):
        reader.take(journal, offset)
        if not reader.states[P1].max_continue:
            boundaries.append(offset + 1)
    end = boundaries[-1]  # an open span is not re-read against itself, but resumed
    reader = Reader()
    reader.read(journal, 0, end)
    commits = reader.commits()
    visible = reader.visible(commits)
    reader.read(journal, data.draw(st.sampled_from(boundaries)), end)
    assert reader.visible(commits) == visible
    assert reader.commits() == commits


@given(journals_written(), st.data())
def test_resuming_from_any_frontier_delivers_every_commit_once(
    written: Written, data: st.DataObject
) -> None:
    """The frontier invariant: crash after any cut, resume at the cut floor, lose nothing."""
    journal = written.rows
    cuts = data.draw(st.lists(st.integers(0, len(journal)), max_size=4).map(sorted))
    checkpoint: dict[Producer, ProducerFrontier] = {}
    delivered: list[tuple[Producer, Clock]] = []
    for end in [*cuts, len(journal)]:
        recovered = resume(checkpoint.values())
        reader = Reader(states=dict(recovered.states))
        reader.read(journal, recovered.offset, end)
        delivered += reader.visible(reader.commits())
        merge(checkpoint, reader.report())
    assert len(delivered) == len(set(delivered))
    assert set(delivered) == written.committed


def merge(checkpoint: dict[Producer, ProducerFrontier], delta: Iterable[ProducerFrontier]) -> None:
    for one in delta:
        known = checkpoint.get(one.producer)
        checkpoint[one.producer] = one if known is None else known.reduce(one)
