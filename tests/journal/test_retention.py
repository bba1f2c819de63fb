"""Where journals are cut: whatever writers do, a reader that begins at the cut misses nothing."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.journal.committed import CommitReader
from penstock.journal.retention import (
    EVERYBODY,
    Loaded,
    abandoned_producers,
    plan_cuts,
)
from penstock.journal.state import (
    AckRecord,
    Append,
    Create,
    Fragment,
    Inline,
    JournalState,
    Record,
    Retain,
    apply,
)
from penstock.model.clock import Clock, Flag, Producer, duration
from penstock.model.runs import Run

NAMES = ("c/a", "c/b")
DAY = duration(24 * 3600)


def producer(number: int) -> Producer:
    return Producer(Producer.MULTICAST | number)


def rows(number: int, first: int, count: int = 1, *, kind: Flag = Flag.CONTINUE_TXN) -> Fragment:
    """Rows of a producer with clocks that count up from `first`."""
    run = Run(
        producer=producer(number),
        kind=kind,
        first_offset=0,
        last_offset=count - 1,
        rows=count,
        clock_min=Clock(first),
        clock_max=Clock(first + count - 1),
        clock_max_offset=count - 1,
        increasing=True,
    )
    return Fragment(
        rows=count,
        bytes=10 * count,
        at=Inline(data=b""),
        schema="s",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=0,
    )


def ack(number: int, clock: int) -> AckRecord:
    return AckRecord(producer=producer(number), clock=Clock(clock))


@dataclass
class World:
    """Journals of one collection, and everything that was ever appended to them."""

    states: dict[str, JournalState] = field(default_factory=dict)
    history: dict[str, list[Record]] = field(default_factory=dict)
    revision: int = 1

    def append(self, parts: dict[str, list[Record]]) -> None:
        """One store transaction."""
        self.revision += 1
        for name, records in parts.items():
            state = self.states.get(name) or apply(
                JournalState(),
                Create(collection="c", labels=(), key_begin=0, key_end=9),
                self.revision,
            )
            after = apply(state, Append(records=tuple(records)), self.revision)
            self.history.setdefault(name, []).extend(after.records[len(state.records) :])
            self.states[name] = after

    @property
    def loaded(self) -> dict[str, Loaded]:
        return {
            name: Loaded(records=state.records, forgotten=state.forgotten)
            for name, state in self.states.items()
        }

    def retain(
        self, before: int, *, needs: dict[str, int] | None = None, dead: frozenset[Producer]
    ) -> None:
        cuts = plan_cuts(self.loaded, before=Clock(before), needs=needs or {}, abandoned=dead)
        self.revision += 1
        for name, cut in cuts.items():
            diff = Retain(offset=cut.offset, forgotten=cut.forgotten)
            self.states[name] = apply(self.states[name], diff, self.revision)
            assert self.states[name].begin == cut.offset


def shown(name: str, records: list[Record], begin: int) -> list[tuple[int, int]]:
    """The rows that records from an offset on make visible: the offset of that record, and theirs.

    What lies before is read as well, if it is among the records.
    """
    reader = CommitReader(name)
    found = []
    for record in records:
        for visible in reader.read(record):
            run, first = visible.run, visible.fragment.begin + visible.run.first_offset
            found += [
                (record.begin, first + row)
                for row in range(run.rows)
                if run.clock_min + row > visible.clock_gt and record.begin >= begin
            ]
    return found


@dataclass
class Writer:
    """A writer that follows the rules of publishers: see `journal.publisher`."""

    number: int
    clock: int = 0
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    sent: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    commits: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)


def steps() -> st.SearchStrategy[list[tuple[str, int, int, int]]]:
    usual = ["rows", "commit"] * 3
    rare = ["again", "again", "ack again", "roll back", "outside", "die", "retain"]
    what = st.sampled_from(usual + rare)
    number, small = st.integers(1, 2), st.integers(0, 5)
    return st.lists(st.tuples(what, number, small, small), min_size=8, max_size=30)


@settings(max_examples=250, deadline=None)
@given(steps(), st.lists(st.integers(-30, 0), min_size=1, max_size=4), st.integers(1, 90))
def test_a_reader_that_begins_at_the_cut_sees_what_is_behind_it(
    script: list[tuple[str, int, int, int]], skews: list[int], keep: int
) -> None:
    world, time, fresh = World(), 100, 4
    writers = {number: Writer(number) for number in (1, 2)}
    dead: set[Producer] = set()
    closes: list[tuple[int, dict[str, int]]] = []
    for what, number, a, b in script:
        time += 5
        writer = writers[number]
        writer.clock = max(writer.clock + 1, time + skews[number % len(skews)])
        names = NAMES[a % 2 :]
        match what:
            case "rows":
                for name in names:
                    world.append({name: [rows(writer.number, writer.clock, 1 + b % 3)]})
                    writer.spans.setdefault(name, []).append((writer.clock, 1 + b % 3))
                writer.clock += 3
            case "commit" if writer.spans:
                parts: dict[str, list[Record]] = {
                    name: [ack(writer.number, writer.clock)] for name in writer.spans
                }
                world.append(parts)
                closes.append(
                    (writer.clock, {name: world.states[name].records[-1].begin for name in parts})
                )
                writer.sent, writer.spans = writer.spans, {}
                writer.commits.append((writer.clock, tuple(parts)))
            case "again":
                # An append whose outcome was not known, before anything else happens.
                for name, sent in (writer.spans or writer.sent).items():
                    first, count = sent[-1]
                    if world.states[name].forgotten.clock >= first:
                        break  # no append takes as long as documents are kept
                    world.append({name: [rows(writer.number, first, count)]})
                    break
            case "ack again" if writer.commits and not writer.spans:
                clock, where = writer.commits[-1]
                world.append({name: [ack(writer.number, clock)] for name in where})
            case "roll back" if writer.commits:
                clock, where = writer.commits[-1]
                if any(world.states[name].forgotten.clock >= clock for name in where):
                    continue  # publishers never roll back; this is about what is there
                back: dict[str, list[Record]] = {
                    name: [ack(writer.number, clock)] for name in writer.spans if name in where
                }
                if back and len(back) == len(writer.spans):
                    world.append(back)
                    writer.spans = {}
            case "outside" if not writer.spans:
                world.append({names[0]: [rows(writer.number, writer.clock, kind=Flag.OUTSIDE_TXN)]})
            case "die":
                if writer.spans:
                    dead.add(producer(writer.number))
                writers[number] = Writer(fresh)
                fresh += 1
            case "retain":
                world.retain(time - keep, dead=frozenset(dead))
                _check(world, closes, time - keep)
            case _:
                pass
    world.retain(time - keep, dead=frozenset(dead))
    _check(world, closes, time - keep)


def _check(world: World, closes: list[tuple[int, dict[str, int]]], before: int) -> None:
    for name, state in world.states.items():
        begin = state.begin
        everything = shown(name, world.history[name], begin)
        assert shown(name, list(state.records), begin) == everything
    latest = 0
    for clock, places in closes:
        gone = {world.states[name].begin > offset for name, offset in places.items()}
        assert len(gone) == 1, "a transaction goes as a whole"
        latest = max(latest, clock)
        if gone == {True}:
            assert latest < before, "nor does anything that was committed after what is young"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3)), min_size=1, max_size=12))
def test_everything_that_is_old_and_closed_goes(script: list[tuple[int, int]]) -> None:
    world = World()
    for number, (at, count) in enumerate(script):
        clock = 100 + 10 * number
        for name in NAMES[at:]:
            world.append({name: [rows(1, clock, count)]})
        world.append({name: [ack(1, clock + 5)] for name in NAMES[at:]})
    documents = sum(r.rows for rs in world.history.values() for r in rs if isinstance(r, Fragment))
    cuts = plan_cuts(world.loaded, before=Clock(10_000), needs={})
    assert sum(cut.documents for cut in cuts.values()) == documents
    world.retain(10_000, dead=frozenset())
    assert all(state.begin == state.end for state in world.states.values())


def _died_with_a_span_open(world: World) -> None:
    world.append({"c/a": [rows(1, 100), ack(1, 110)]})
    world.append({"c/a": [rows(2, 120)]})
    world.append({"c/a": [rows(3, 130), ack(3, 140)]})
    world.append({"c/a": [rows(3, 130 + 3 * DAY), ack(3, 131 + 3 * DAY)]})


def test_an_open_span_holds_until_its_writer_is_known_to_be_dead() -> None:
    world = World()
    _died_with_a_span_open(world)

    def plan(abandoned: Container[Producer] = ()) -> int:
        cuts = plan_cuts(world.loaded, before=Clock(200), needs={}, abandoned=abandoned)
        return cuts["c/a"].offset

    assert plan() == 2
    assert plan({producer(2)}) == 5

    late = Clock(140 + 3 * DAY)
    dead = abandoned_producers(world.loaded, now=late, expected=(), expecting=())
    assert dead == {producer(2)}
    for alive in (
        {"now": Clock(140 + DAY), "expected": (), "expecting": ()},
        {"now": late, "expected": {producer(2)}, "expecting": ()},
        {"now": late, "expected": (), "expecting": {"c/a"}},
    ):
        assert not abandoned_producers(world.loaded, **alive)  # type: ignore[arg-type]
    partly = {"c/a": Loaded(records=world.states["c/a"].records, complete=False)}
    assert not abandoned_producers(partly, now=late, expected=(), expecting=())


def test_a_clock_ahead_of_time_does_not_make_a_writer_dead() -> None:
    """By the newest commit, nobody was silent for two days."""
    world = World()
    world.append({"c/a": [rows(2, 120)]})
    world.append({"c/a": [rows(3, 130), ack(3, 140)]})
    late = Clock(140 + 3 * DAY)
    assert not abandoned_producers(world.loaded, now=late, expected=(), expecting=())


@pytest.mark.parametrize(("need", "cut"), [(0, None), (1, None), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_what_a_reader_has_not_read_stays(need: int, cut: int | None) -> None:
    world = World()
    for clock in (100, 200):
        world.append({"c/a": [rows(1, clock), ack(1, clock + 1)]})
    cuts = plan_cuts(world.loaded, before=Clock(1000), needs={"c/a": need})
    assert (cuts["c/a"].offset if cuts else None) == cut


def test_a_transaction_stays_if_a_reader_needs_its_part_in_another_journal() -> None:
    world = World()
    world.append({"c/a": [rows(1, 90), ack(1, 91)]})
    world.append({name: [rows(2, 100), ack(2, 101)] for name in ("c/a", "c/b")})
    world.append({"c/a": [rows(1, 110), ack(1, 111)]})
    cuts = plan_cuts(world.loaded, before=Clock(1000), needs={"c/b": 0})
    assert {name: cut.offset for name, cut in cuts.items()} == {"c/a": 2}


def test_a_clock_that_went_back_forgets_nothing_early() -> None:
    world = World()
    world.append({"c/a": [rows(1, 1000), ack(1, 1001)]})
    world.append({"c/b": [rows(2, 10), ack(2, 11)]})
    world.retain(1000, dead=frozenset())
    assert [state.begin for state in world.states.values()] == [0, 0]
    # What shows that the clock was wrong is forgotten, and still counts.
    world.append({"c/a": [rows(3, 12), ack(3, 13)]})
    world.retain(1002, needs={"c/a": 2, "c/b": 0}, dead=frozenset())
    assert [state.begin for state in world.states.values()] == [2, 0]
    world.retain(1001, dead=frozenset())
    assert [state.begin for state in world.states.values()] == [2, 0]
    world.retain(1002, dead=frozenset())
    assert [state.begin for state in world.states.values()] == [4, 2]


def test_a_journal_that_is_not_read_to_its_end_holds_what_was_committed_later() -> None:
    world = World()
    world.append({"c/a": [rows(1, 100), ack(1, 101)]})
    world.append({name: [rows(2, 110), ack(2, 111)] for name in ("c/a", "c/b")})
    world.append({"c/b": [rows(3, 120), ack(3, 121)]})
    loaded = world.loaded
    partly = {**loaded, "c/a": Loaded(records=loaded["c/a"].records[:2], complete=False)}
    cuts = plan_cuts(partly, before=Clock(1000), needs={})
    assert {name: cut.offset for name, cut in cuts.items()} == {"c/a": 2}
    everything = plan_cuts(loaded, before=Clock(1000), needs={}, abandoned=EVERYBODY)
    assert {name: cut.offset for name, cut in everything.items()} == {"c/a": 4, "c/b": 4}


def test_rows_and_their_repetitions_go_together() -> None:
    """A reader that has not seen the first would take the second for new ones."""
    world = World()
    world.append({"c/a": [rows(1, 100), ack(1, 101)]})
    world.append({"c/a": [rows(1, 100)]})
    world.append({"c/a": [rows(1, 500), ack(1, 501)]})
    assert plan_cuts(world.loaded, before=Clock(200), needs={})["c/a"].offset == 3
    world.append({"c/a": [rows(1, 100)]})
    assert plan_cuts(world.loaded, before=Clock(200), needs={}) == {}


def test_rows_that_are_repeated_beside_new_ones_stay_as_long_as_they_would() -> None:
    """Even if nobody commits the new ones: their writer is dead, and does not count."""
    world = World()
    world.append({"c/a": [rows(1, 100), ack(1, 101)]})
    world.append({"c/a": [rows(1, 500, 2), ack(1, 502)]})
    world.append({"c/a": [rows(1, 501, 3)]})
    dead = {producer(1)}
    assert plan_cuts(world.loaded, before=Clock(200), needs={}, abandoned=dead)["c/a"].offset == 2
    assert plan_cuts(world.loaded, before=Clock(503), needs={}, abandoned=dead)["c/a"].offset == 8


def test_a_span_and_the_commit_that_it_is_rolled_back_to_go_together() -> None:
    """A reader that has not seen that commit could not make sense of the rollback."""
    world = World()
    world.append({"c/a": [rows(1, 100), ack(1, 101)]})
    world.append({"c/a": [rows(2, 400), ack(2, 401)]})
    world.append({"c/a": [rows(1, 500), ack(1, 101)]})
    assert plan_cuts(world.loaded, before=Clock(200), needs={}) == {}
    assert plan_cuts(world.loaded, before=Clock(402), needs={})["c/a"].offset == 6


def test_an_ack_that_is_written_again_holds_nothing() -> None:
    """Sessions begin with writing the ACKs of the one before, however long ago that was."""
    world = World()
    world.append({name: [rows(1, 100), ack(1, 101)] for name in NAMES})
    world.append({"c/a": [rows(2, 500), ack(2, 501)]})
    world.append({name: [ack(1, 101)] for name in NAMES})
    cuts = plan_cuts(world.loaded, before=Clock(200), needs={})
    assert {name: cut.offset for name, cut in cuts.items()} == {"c/a": 2, "c/b": 2}
    world.retain(200, dead=frozenset())
    assert plan_cuts(world.loaded, before=Clock(200), needs={}) == {}


def test_nothing_goes_behind_records_that_contradict_each_other() -> None:
    world = World()
    world.append({"c/a": [rows(1, 100), ack(1, 101)]})
    world.append({"c/a": [rows(1, 200, 5), ack(1, 202)]})
    world.append({"c/a": [rows(2, 300), ack(2, 301)]})
    assert plan_cuts(world.loaded, before=Clock(10_000), needs={})["c/a"].offset == 2
