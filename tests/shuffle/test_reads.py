"""One journal, read from its records: outcomes, resuming, replay, and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from penstock.journal.state import AckRecord, Fragment
from penstock.model.clock import NEVER, Clock, Flag, Producer
from penstock.model.completed import gap_floor
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier
from penstock.model.sequence import (
    Bounds,
    ProducerState,
    SequenceError,
    advance,
    sequence,
    sequence_error,
)
from penstock.model.sequence import Position as At
from penstock.shuffle.binding import Binding, hint_index
from penstock.shuffle.history import History, Needed, NeedPages, NeedRows
from penstock.shuffle.reads import FoldContext, Read, ReadFold, row_key
from shuffle.scripts import (
    EARLY,
    P1,
    P2,
    ROW_BYTES,
    A,
    Entry,
    Row,
    Script,
    bindings,
    producer,
)

[BINDING] = bindings("a")


@dataclass(slots=True)
class Reader:
    """Folds the records of journal A, one round at a time."""

    script: Script
    resume: Sequence[ProducerFrontier] = ()
    binding: Binding = BINDING
    read: Read = field(init=False)
    cumulative: Frontier = field(default_factory=lambda: EMPTY)
    seen: list[tuple[Producer, int]] = field(default_factory=list)
    needs: list[NeedPages | NeedRows] = field(default_factory=list)
    rows: dict[tuple[str, int, int, Clock], int] = field(default_factory=dict)
    last: ReadFold = field(init=False)

    def __post_init__(self) -> None:
        history = History(A, self.script.states[A])
        self.read = Read(history, self.binding, entries=self.resume)
        if self.resume:
            entries = JournalFrontier(journal=A, producers=tuple(self.resume))
            self.cumulative = Frontier.of([entries])

    def fold(self, records: int | None = None) -> ReadFold:
        """What the next records make of the read; it is not adopted."""
        context = FoldContext(hints=hint_index([self.binding]), exists=bool, rows=self.rows)
        while True:
            fold = ReadFold(self.read, context)
            try:
                self._take(fold, records)
            except Needed as needed:
                self.needs.append(needed.need)
                self._supply(needed.need)
            else:
                return fold

    def _take(self, fold: ReadFold, records: int | None) -> None:
        taken = 0
        while records is None or taken < records:
            record = self.read.history.first(fold.position)
            if record is None:
                break
            fold.take(record)
            taken += 1

    def _supply(self, need: NeedPages | NeedRows) -> None:
        if isinstance(need, NeedRows):
            self.rows[row_key(need)] = self.script.span_begin(need)
        else:
            held = [record for page in need.pages for record in self.script.pages[page.path]]
            self.read.history.supply(need.pages, held)

    def go(self, records: int | None = None) -> ReadFold:
        """ReadFold, and adopt; and report, if there is anything that others should know."""
        self.read.history.move(self.script.states[A])
        self.last = fold = self.fold(records)
        self.read.adopt(fold)
        if fold.closed:
            self.cumulative = self.cumulative.reduce(Frontier.of([self.read.report()]))
        self.seen += [
            (seen.producer, seen.clock)
            for delivery in fold.deliveries
            for seen in self.script.seen(delivery)
        ]
        return fold

    @property
    def clocks(self) -> list[int]:
        """Of what was delivered."""
        return [clock for _, clock in self.seen]

    def state(self, who: Producer = P1) -> tuple[int, int, int]:
        """L, X and the offset."""
        state = self.read.state(who)
        return state.last_commit, state.max_continue, state.offset

    @property
    def entries(self) -> tuple[ProducerFrontier, ...]:
        found = self.cumulative.find(A, 0)
        return () if found is None else found.producers


def script_of(*texts: str) -> Script:
    """Journal A, with each text under a revision of its own."""
    script = Script(A)
    for text in texts:
        script.write({A: text})
    return script


def entries_of(given: Mapping[Producer, Entry]) -> list[ProducerFrontier]:
    return [
        ProducerFrontier(
            producer=who, last_commit=Clock(last), hinted_commit=Clock(hint), offset=offset
        )
        for who, (last, hint, offset) in sorted(given.items())
    ]


# ------------------------------------------------------------------------------------ sequencing

TRACE = [
    # row, L, X, offset
    ("C10", 0, 10, 0),
    ("C20", 0, 20, 0),
    ("C15", 0, 20, 0),
    ("C20", 0, 20, 0),
    ("A20", 20, 0, -5),
    ("O30", 30, 0, -6),
    ("O30", 30, 0, -6),
    ("A20", 30, 0, -6),
    ("C40", 30, 40, 8),
    ("C50", 30, 50, 8),
    ("A30", 30, 0, -11),
    ("C60", 30, 60, 11),
    ("A70", 70, 0, -13),
    ("A70", 70, 0, -13),
    ("C80", 70, 80, 14),
    ("A65", 65, 0, -16),
]
"""The worked example A of the design, row by row."""


def test_11_sequence_trace_row_by_row() -> None:
    reader = Reader(script_of(*(row for row, *_ in TRACE)))
    for row, *state in TRACE:
        reader.go(1)
        assert [*reader.state()] == state, row
    assert reader.clocks == [10, 20, 30, 60]


def test_16_rollback_then_commit_same_producer_never_shows_what_was_rolled_back() -> None:
    reader = Reader(script_of("C10 A20 C40 C50 A20 C60 A70"))
    reader.go()
    assert reader.clocks == [10, 60]
    assert [delivery.commit for delivery in reader.last.deliveries] == [20, 70]


def test_17_deep_rollback_is_told_and_the_cumulative_commit_stays() -> None:
    reader = Reader(script_of("C10 A70", "C80 A65"))
    reader.go()
    [notice] = reader.last.notices
    assert str(P1) in notice
    assert "0x46" in notice
    assert reader.state() == (65, 0, -4)
    [entry] = reader.entries
    assert (entry.last_commit, entry.offset) == (70, -4), "also within one report"
    reader = Reader(script_of("C10 A70", "C80 A65"))
    reader.go(2)
    reader.go()
    [entry] = reader.entries
    assert (entry.last_commit, entry.offset) == (70, -4)


@pytest.mark.parametrize(
    ("bounds", "delivered"),
    [
        pytest.param(EARLY, [50, 200, 500], id="no bounds"),
        pytest.param(Bounds(not_before=Clock(100), not_after=Clock(500)), [200], id="both"),
        pytest.param(Bounds(not_before=NEVER, truncated_at=Clock(300)), [500], id="truncated"),
        pytest.param(Bounds(), [], id="before 1970"),
    ],
)
def test_13_bounds_hold_back_rows_and_nothing_else(bounds: Bounds, delivered: list[int]) -> None:
    reader = Reader(script_of("O50", "O200", "O500"), binding=replace(BINDING, bounds=bounds))
    for last_commit in (50, 200, 500):
        assert reader.go(1).closed
        assert reader.state()[0] == last_commit
    assert reader.clocks == delivered


def test_13_bounds_within_a_span_leave_out_whole_runs() -> None:
    bounds = Bounds(not_before=Clock(15), not_after=Clock(35))
    script = script_of("C10 | C20 C40 | C50 A60")
    reader = Reader(script, binding=replace(BINDING, bounds=bounds))
    [delivery] = reader.go().deliveries
    assert [rows.run.clock_min for rows in delivery.rows] == [20]
    assert (delivery.commit, delivery.bytes) == (60, 2 * ROW_BYTES)


def test_14_speculative_state_a_fold_that_is_not_adopted_leaves_no_trace() -> None:
    reader = Reader(script_of("C10 C20", "C30 A40 p2:O5"))
    reader.go(1)
    before = reader.state(), reader.state(P2), reader.read.position
    first = reader.fold()
    assert (reader.state(), reader.state(P2), reader.read.position) == before
    second = reader.fold()
    assert first.deliveries == second.deliveries
    assert first.states == second.states
    reader.go()
    assert reader.clocks == [10, 20, 30, 5]


def test_15_first_txn_crash_stays_open_and_is_reported_with_the_floor() -> None:
    reader = Reader(script_of("C10 C20", "p2:O5"))
    assert not reader.go(1).closed
    assert reader.read.unreported == {P1}
    reader.go()
    by_producer = {entry.producer: entry for entry in reader.entries}
    assert by_producer[P1].last_commit == OBSERVED_FLOOR
    assert (by_producer[P1].offset, by_producer[P1].is_open) == (0, True)
    assert reader.clocks == [5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("C150 A100", "offset 1", id="15 rollback_wrong_journal: partial commit"),
        pytest.param("C10 O20", "offset 1", id="outside of transactions within a span"),
        pytest.param("C10 | O20", "offset 1", id="the same, in two fragments"),
    ],
)
def test_errors_name_journal_binding_offset_and_producer(text: str, says: str) -> None:
    reader = Reader(script_of(text))
    with pytest.raises(SequenceError) as caught:
        reader.go()
    where = caught.value.where or ""
    for part in (f"journal {A}", "binding 0", says, f"producer {P1}"):
        assert part in where
    assert reader.state() == (0, 0, 0), "a failed fold changed the read"


def test_87_multi_producer_fragment_reads_as_if_it_were_split() -> None:
    rows = "C10 p2:C11 C20 p2:O5"  # the OUTSIDE row of P2 contradicts its span
    with pytest.raises(SequenceError):
        Reader(script_of(rows)).go()
    together = Reader(script_of("C10 p2:C11 C20 p2:C12 p3:O7 A20 p2:A12"))
    apart = Reader(script_of("C10 | p2:C11 | C20 | p2:C12 | p3:O7 A20 p2:A12"))
    together.go()
    apart.go()
    assert sorted(together.clocks) == sorted(apart.clocks) == [7, 10, 11, 12, 20]
    assert together.entries == apart.entries


# ------------------------------------------------------------------------- resuming and replaying


def test_18_gapped_replay_appends_the_span_when_its_producer_is_heard_of() -> None:
    script = script_of("p3:O1 p3:O2 p3:O3 p3:O4", "C110 C120", "p3:O5 p3:O6", "p2:A90")
    resume = entries_of({P1: (100, 0, 4), P2: (90, 0, -9)})
    script.write({A: "A130"})
    reader = Reader(script, resume)
    assert reader.read.position == 9
    assert reader.read.state(P1).gapped
    reader.go()
    assert reader.clocks == [110, 120]
    assert reader.state() == (130, 0, -10)


def test_18_gapped_clean_rollback_replays_nothing() -> None:
    script = script_of("p3:O1 p3:O2 p3:O3 p3:O4", "C110 C120", "p3:O5 p3:O6", "p2:A90", "A100")
    reader = Reader(script, entries_of({P1: (100, 0, 4), P2: (90, 0, -9)}))
    reader.go()
    assert reader.clocks == []
    assert reader.state() == (100, 0, -10)
    assert not reader.read.state(P1).gapped


def test_18_gapped_producer_that_stays_silent_is_never_replayed() -> None:
    script = script_of("C110 C120", "p2:O5", "p2:O6", "p2:O7 C90")
    script.seal(A, 1)
    reader = Reader(script, entries_of({P1: (1, 0, 0), P2: (5, 0, -3)}))
    reader.go(1)
    assert reader.needs == []
    assert reader.read.state(P1).gapped
    reader.go()
    assert [type(need) for need in reader.needs] == [NeedPages]


def test_18_gapped_replay_goes_on_with_a_continuing_row() -> None:
    script = script_of("C110 C120", "p2:O5", "C120 C130 A140")
    reader = Reader(script, entries_of({P1: (1, 0, 0), P2: (5, 0, -3)}))
    reader.go(1)
    assert reader.state() == (1, 130, 0), "the begin of the span is kept"
    reader.go()
    assert reader.clocks == [110, 120, 130]


def test_19_gapped_outside_is_an_error() -> None:
    script = script_of("C110", "p2:O5", "O200")
    reader = Reader(script, entries_of({P1: (1, 0, 0), P2: (5, 0, -2)}))
    with pytest.raises(SequenceError, match="a span is open"):
        reader.go()


def test_20_gapped_at_m_is_read_and_not_replayed() -> None:
    script = script_of("p2:O5 p2:O6", "C110 A120")
    reader = Reader(script, entries_of({P1: (100, 0, 2), P2: (6, 0, -2)}))
    assert not reader.read.state(P1).gapped
    reader.go()
    assert reader.clocks == [110]
    assert reader.state() == (120, 0, -4)


def test_21_offset_zero_rule() -> None:
    script = script_of("p9:O1")
    resume = entries_of(
        {P1: (1, 0, 0), P2: (100, 100, 0), producer(3): (0, 50, 0), producer(4): (7, 0, -11)}
    )
    read = Reader(script, resume).read
    assert read.position == 11
    assert [read.state(producer(n)).gapped for n in (1, 2, 3)] == [True, False, False]


def test_22_replay_ack_inside_is_fatal() -> None:
    script = script_of("C110 A120", "p2:O5", "C130")
    reader = Reader(script, entries_of({P1: (1, 0, 0), P2: (5, 0, -3)}))
    with pytest.raises(SequenceError, match="that the checkpoint says is open"):
        reader.go()


def test_22_replay_outside_inside_is_fatal() -> None:
    script = script_of("O110", "p2:O5", "C130")
    reader = Reader(script, entries_of({P1: (1, 0, 0), P2: (5, 0, -2)}))
    with pytest.raises(SequenceError, match="that the checkpoint says is open") as caught:
        reader.go()
    assert "offset 0" in (caught.value.where or "")


def test_23_replay_removed_leaves_an_empty_commit() -> None:
    script = script_of("C110", "p2:O5", "A130")
    script.retain(A, 1)
    reader = Reader(script, entries_of({P1: (1, 0, 0), P2: (5, 0, -2)}))
    reader.go()
    assert reader.clocks == []
    assert reader.state() == (130, 0, -3)


def test_23_replay_of_a_span_that_is_left_in_part_appends_that_part() -> None:
    script = script_of("C110", "C120", "p2:O5", "A130")
    script.retain(A, 1)
    reader = Reader(script, entries_of({P1: (1, 0, 0), P2: (5, 0, -3)}))
    reader.go()
    assert reader.clocks == [120]


def test_a_span_that_is_open_where_content_was_removed_goes_on_with_what_is_left() -> None:
    script = script_of("C110", "C120", "A130")
    script.retain(A, 1)
    reader = Reader(script, entries_of({P1: (1, 0, 0)}))
    assert reader.read.position == 1
    reader.go()
    assert reader.clocks == [120]


def test_a_span_whose_close_may_have_been_removed_is_forgotten_and_told_to_be_closed() -> None:
    script = script_of("C110", "A130", "p2:O5", "O140")
    script.retain(A, 2)
    reader = Reader(script, entries_of({P1: (1, 0, 0)}))
    reader.go(1)
    assert not any(entry.is_open for entry in reader.entries)
    reader.go()
    assert reader.clocks == [5, 140]


def test_a_span_is_forgotten_also_if_content_is_removed_while_it_is_read() -> None:
    script = script_of("C110", "A130", "O140")
    reader = Reader(script)
    reader.go(1)
    script.retain(A, 2)
    reader.read.history.move(script.states[A])
    assert reader.read.skip_removed()
    reader.go()
    assert reader.clocks == [140]


def test_a_span_that_opens_after_a_deep_rollback_is_still_open_where_it_is_resumed() -> None:
    reader = Reader(script_of("C10 A60", "C65 A70", "C80 A60", "C90", "p2:O5"))
    reader.go(2)
    reader.go()
    by_producer = {entry.producer: entry for entry in reader.entries}
    assert (by_producer[P1].last_commit, by_producer[P1].offset) == (70, 6)
    assert by_producer[P1].is_open


def test_reading_resumes_within_a_record_whose_rows_were_read_in_part() -> None:
    script = script_of("O10 p2:C20 p2:C21", "O30 p2:A40")
    reader = Reader(script, entries_of({P1: (10, 0, -1), P2: (1, 0, 1)}))
    reader.go()
    assert reader.clocks == [30, 20, 21]


def test_the_begin_of_a_span_within_repeated_rows_is_looked_up() -> None:
    """A lower bound would be lost: reducing takes the further of two offsets."""
    script = script_of("C10 A10", "C10 C20 C30", "p2:O5")
    reader = Reader(script)
    reader.go()
    [need] = reader.needs
    assert isinstance(need, NeedRows)
    assert need.clock_gt == 10
    assert reader.state() == (10, 30, 3)
    by_producer = {entry.producer: entry for entry in reader.entries}
    assert (by_producer[P1].offset, by_producer[P1].is_open) == (3, True)
    lower_bound = structs.replace(by_producer[P1], offset=2)
    closed = ProducerFrontier(producer=P1, last_commit=Clock(10), offset=-2)
    assert closed.reduce(by_producer[P1]).is_open
    assert closed.reduce(lower_bound).is_open
    further = structs.replace(closed, offset=-3)
    assert not further.reduce(lower_bound).is_open


def test_the_begin_of_a_span_that_was_resumed_from_needs_no_lookup() -> None:
    script = script_of("C10 A10", "C10 C20 C30 p2:O5", "A40")
    reader = Reader(script, entries_of({P1: (10, 0, 3), P2: (5, 0, -6)}))
    reader.go()
    assert reader.needs == []
    assert reader.clocks == [20, 30]


def test_45_gap_floor_is_that_of_the_first_record_left() -> None:
    script = script_of("O10", "O20", "p2:A30")
    script.retain(A, 1)
    reader = Reader(script, entries_of({P1: (5, 0, 0)}))
    assert reader.go(1).floor == gap_floor(Clock(20))
    assert reader.go(1).floor == NEVER
    script.retain(A, 3)
    assert not Reader(script, entries_of({P1: (20, 0, -3)})).read.gap
    assert Reader(script, entries_of({P1: (10, 0, -1)})).read.gap


def test_45_a_gap_met_later_raises_no_floor() -> None:
    script = script_of("O10", "O20", "O30")
    reader = Reader(script)
    reader.go(1)
    script.retain(A, 2)
    reader.read.history.move(script.states[A])
    assert reader.read.skip_removed()
    assert reader.go().floor == NEVER
    assert reader.clocks == [10, 30]


# ------------------------------------------------------------------------------------------ bytes


def test_31_bytes_deltas_of_the_design() -> None:
    script = script_of(" ".join(f"O{n}" for n in range(2, 302)))
    script.write({A: " ".join(f"O{n}" for n in range(302, 502))})
    reader = Reader(script)
    reader.go(1)
    assert _bytes_of(reader.cumulative) == (3000, 2000)
    reader.go()
    assert _bytes_of(reader.cumulative) == (5000, 0)


def _bytes_of(frontier: Frontier) -> tuple[int, int]:
    [read] = frontier
    return read.bytes_read_delta, read.bytes_behind_delta


def test_31_bytes_are_about_what_remains_also_after_compaction() -> None:
    script = script_of("O10 O11", "O20 O21", "O30 O31")
    reader = Reader(script)
    reader.go(1)
    script.compact(A, 2, 6, 12)
    reader.go()
    read, behind = _bytes_of(reader.cumulative)
    assert behind == 0
    assert read == 6 * ROW_BYTES, "as it was when it was learned of"


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=8))
def test_31_bytes_telescope(appends: list[tuple[int, bool]]) -> None:
    script, reader, clock = Script(A), None, 1
    for rows, reads in appends:
        script.write({A: " ".join(f"O{clock + n + 1}" for n in range(rows))})
        clock += rows
        if reader is None:
            reader = Reader(script)
        if reads:
            reader.go()
    assert reader is not None
    reader.read.history.move(script.states[A])
    reader.go()
    if reader.cumulative:
        assert _bytes_of(reader.cumulative)[1] == 0


def test_resuming_within_a_record_counts_the_rest_of_it() -> None:
    script = script_of("O10 p2:C20 p2:C21 p2:C22", "O30")
    reader = Reader(script, entries_of({P1: (10, 0, -1), P2: (1, 0, 1)}))
    reader.go()
    assert _bytes_of(reader.cumulative) == (4 * ROW_BYTES, -4 * ROW_BYTES + 4 * ROW_BYTES)


# ------------------------------------------------------------------------------------- properties


@dataclass(slots=True)
class _Model:
    """The same, one row after the other, by the table of outcomes."""

    states: dict[Producer, ProducerState] = field(default_factory=dict)
    spans: dict[Producer, list[int]] = field(default_factory=dict)
    delivered: list[tuple[Producer, int]] = field(default_factory=list)

    def take_all(self, script: Script) -> None:
        for offset, row in enumerate(script.rows[A]):
            self.take(row, offset)

    def take(self, row: Row, offset: int) -> None:
        state = self.states.get(row.producer, ProducerState())
        outcome = sequence(state, row.kind, row.clock)
        if outcome.is_fatal:
            at = At(journal=A, binding=0, offset=offset, producer=row.producer)
            raise sequence_error(outcome, state, row.kind, row.clock, at)
        self.states[row.producer] = advance(state, outcome, row.clock, offset)
        if outcome.is_duplicate:
            return
        span = self.spans.setdefault(row.producer, [])
        if row.kind is not Flag.ACK_TXN:
            span.append(row.clock)
        if outcome.is_commit:
            self.delivered += [(row.producer, clock) for clock in span]
        if outcome.is_commit or outcome.is_rollback:
            span.clear()


_ROWS = st.builds(
    lambda who, kind, clock: f"p{who}:{kind}{clock}",
    st.integers(1, 2),
    st.sampled_from("CCCAO"),
    st.integers(2, 12),
)


@st.composite
def streams(draw: st.DrawFn) -> list[str]:
    """Texts to append, rows of any kind and clock, and often a contradiction."""
    return draw(st.lists(st.lists(_ROWS, min_size=1, max_size=6).map(" ".join), max_size=6))


def _refuses(read: Callable[[], None]) -> bool:
    try:
        read()
    except SequenceError:
        return True
    return False


def _sound(texts: list[str]) -> bool:
    return not _refuses(lambda: _Model().take_all(script_of(*texts)))


sound_streams = streams().filter(_sound)


@given(streams(), st.data())
def test_85_fold_equals_rows_errors_included(texts: list[str], data: st.DataObject) -> None:
    script = script_of(*texts)
    model = _Model()
    refused = _refuses(lambda: model.take_all(script))
    reader = Reader(script)

    def read_all() -> None:
        while reader.read.position < len(script.rows[A]):
            reader.go(data.draw(st.integers(1, 3)))

    assert _refuses(read_all) == refused
    if refused:
        return
    for who in (P1, P2):
        assert reader.read.state(who) == model.states.get(who, ProducerState())
        got = [clock for p, clock in reader.seen if p == who]
        assert got == [clock for p, clock in model.delivered if p == who]


@given(
    sound_streams,
    st.lists(st.lists(st.integers(1, 3), max_size=4), max_size=4),
    st.integers(0, 6),
)
@example(["p1:O2 p1:C3 p2:C2"], [[1]], 0)
def test_30_frontier_invariant_resuming_at_any_cut_delivers_everything_once(
    texts: list[str], sessions: list[list[int]], sealed: int
) -> None:
    """Sessions of rounds of some records each, then one that reads everything."""
    script = script_of(*texts)
    whole = Reader(script)
    whole.go()
    if sealed and script.states[A].records:
        script.seal(A, min(sealed, len(script.states[A].records)))
    delivered: list[tuple[Producer, int]] = []
    entries: tuple[ProducerFrontier, ...] = ()
    for rounds in (*sessions, [None]):
        reader = Reader(script, entries)
        for records in rounds:
            reader.go(records)
        delivered += reader.seen
        entries = reader.entries
    if not whole.last.notices:  # a deep rollback delivers at least once
        assert sorted(delivered) == sorted(whole.seen)


def _rolls_back_deep(script: Script) -> bool:
    again = Reader(script)
    return bool(again.fold().notices)


@given(sound_streams, st.data())
def test_12_sequence_reread_appends_nothing_twice(texts: list[str], data: st.DataObject) -> None:
    """The same records once more, from any record on at which no span is open.

    Unless that is a deep rollback, which delivers at least once. A clean one becomes deep if
    something was committed between it and its repetition.
    """
    script = script_of(*texts)
    first = Reader(script)
    boundaries, records = [0], 0
    while first.read.position < len(script.rows[A]):
        first.go(1)
        records += 1
        if all(first.read.state(who).max_continue == NEVER for who in (P1, P2)):
            boundaries.append(records)
    if boundaries[-1] != records:
        return
    commits = [first.state(who)[0] for who in (P1, P2)]
    clocks = list(first.clocks)
    begin = data.draw(st.sampled_from(boundaries))
    for record in script.states[A].records[begin:]:
        rows = script.rows[A][record.begin : record.end]
        script.write({A: " ".join(_text(row) for row in rows)})
        assert isinstance(record, Fragment | AckRecord)
    if _rolls_back_deep(script):
        return
    first.go()
    assert first.clocks == clocks
    assert [first.state(who)[0] for who in (P1, P2)] == commits


def _text(row: Row) -> str:
    return f"p{row.producer & 0xFF}:{row.kind.name[0]}{row.clock}"
