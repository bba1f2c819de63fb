"""Helpings of a timeline: every committed document once, whoever asks and how often."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Bug
from penstock.journal.state import AckRecord, Blob, Fragment, Record
from penstock.journal.timeline import BEGIN, MalformedPosition, Timeline, TimelinePosition, Unit
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.runs import Run

PRODUCERS = [Producer(Producer.MULTICAST | n) for n in (1, 2)]
JOURNALS = ["a", "b", "c"]


def fragment(producer: Producer, clock: int, rows: int = 1) -> Fragment:
    run = Run(
        producer=producer,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=rows - 1,
        rows=rows,
        clock_min=Clock(clock),
        clock_max=Clock(clock + rows - 1),
        clock_max_offset=rows - 1,
        increasing=True,
    )
    return Fragment(
        rows=rows,
        bytes=1,
        at=Blob(path="p"),
        schema="s",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=0,
    )


class History:
    """Journals as a store would have them: appends in the order of revisions."""

    def __init__(self) -> None:
        self.records: dict[str, list[Record]] = {name: [] for name in JOURNALS}
        self.revision = 0
        self.clock = 100

    def append(self, parts: dict[str, list[Record]]) -> None:
        self.revision += 1
        for name, records in parts.items():
            for record in records:
                there = self.records[name]
                there.append(record.placed(there[-1].end if there else 0, self.revision))

    def write(self, producer: Producer, names: Sequence[str], rows: int, *, ack: bool) -> None:
        clock = self.clock + 1
        self.clock += rows + 1
        closing: list[Record] = [AckRecord(producer=producer, clock=Clock(self.clock))]
        self.append(
            {name: [fragment(producer, clock, rows), *(closing if ack else [])] for name in names}
        )

    def ack(self, producer: Producer, names: Sequence[str]) -> None:
        self.clock += 1
        self.append({n: [AckRecord(producer=producer, clock=Clock(self.clock))] for n in names})

    def timeline(self) -> Timeline:
        timeline = Timeline()
        self.feed(timeline)
        return timeline

    def feed(self, timeline: Timeline) -> None:
        for name, records in self.records.items():
            offset = timeline.read_through(name, 1)
            timeline.read(name, 1, [r for r in records if r.begin >= offset])


@st.composite
def histories(draw: st.DrawFn) -> list[History]:
    """A history as it grows: the last one holds everything."""
    steps = st.tuples(
        st.sampled_from(["write", "commit", "ack"]),
        st.sampled_from(PRODUCERS),
        st.lists(st.sampled_from(JOURNALS), min_size=1, max_size=3, unique=True),
        st.integers(1, 4),
    )
    grown: list[History] = []
    history = History()
    for kind, producer, names, rows in draw(st.lists(steps, min_size=1, max_size=20)):
        if kind == "ack":
            history.ack(producer, names)
        else:
            history.write(producer, names, rows, ack=kind == "commit")
        copy = History()
        copy.records = {name: list(records) for name, records in history.records.items()}
        copy.revision = history.revision
        grown.append(copy)
    return grown


def taken(units: Sequence[Unit]) -> list[tuple[str, int, int, int]]:
    return [
        (u.journal, u.begin, int(v.run.producer), v.run.clock_min) for u in units for v in u.visible
    ]


@given(histories(), st.integers(1, 6), st.data())
def test_helpings_of_any_size_add_up_to_everything_that_is_committed(
    grown: list[History], rows_max: int, data: st.DataObject
) -> None:
    """Also when the reader restarts between them, and when it asks before everything is written."""
    everything = grown[-1].timeline()
    want = taken(everything.units_between(BEGIN, everything.cut(BEGIN)))
    position = BEGIN
    got: list[tuple[str, int, int, int]] = []
    timeline = Timeline()
    for history in grown:
        if data.draw(st.booleans()):
            timeline = Timeline()  # a restart
        history.feed(timeline)
        end = timeline.cut(position, rows_max=rows_max)
        helping = timeline.units_between(position, end)
        assert taken(history.timeline().units_between(position, end)) == taken(helping)
        got += taken(helping)
        position = TimelinePosition.of_json(end.to_json())
        if data.draw(st.booleans()):
            timeline.forget(position)
    while (end := timeline.cut(position, rows_max=rows_max)) != position:
        got += taken(timeline.units_between(position, end))
        position = end
    assert sorted(got) == sorted(want)
    assert len(set(got)) == len(got)


@given(histories(), st.integers(1, 6))
def test_what_was_committed_under_one_revision_comes_in_one_helping(
    grown: list[History], rows_max: int
) -> None:
    timeline = grown[-1].timeline()
    position, last = BEGIN, 0
    while (end := timeline.cut(position, rows_max=rows_max)) != position:
        units = timeline.units_between(position, end)
        revisions = {unit.revision for unit in units}
        assert min(revisions) > last
        assert sum(unit.rows for unit in units) <= rows_max or len(revisions) == 1
        last = max(revisions)
        position = end


@given(histories())
def test_where_there_is_nothing_to_take_a_position_stays_as_it_is(grown: list[History]) -> None:
    timeline = grown[-1].timeline()
    end = timeline.cut(BEGIN)
    assert timeline.cut(end) == end
    assert timeline.units_between(end, end) == []


def test_a_span_belongs_to_the_helping_of_its_ack_whole() -> None:
    history = History()
    history.write(PRODUCERS[0], ["a"], 2, ack=False)
    history.write(PRODUCERS[1], ["a"], 1, ack=True)
    first = history.timeline().cut(BEGIN)
    history.write(PRODUCERS[0], ["a"], 3, ack=True)
    timeline = history.timeline()
    [unit] = timeline.units_between(first, timeline.cut(first))
    assert unit.rows == 5


def test_a_stream_may_begin_at_a_revision() -> None:
    history = History()
    for _ in range(3):
        history.write(PRODUCERS[0], ["a", "b"], 1, ack=True)
    timeline = history.timeline()
    start = timeline.cut(BEGIN, before=2)
    assert {u.revision for u in timeline.units_between(start, timeline.cut(start))} == {2, 3}
    assert timeline.cut(BEGIN, before=1) == BEGIN


def test_a_journal_made_anew_goes_on_behind_the_one_that_was_dropped() -> None:
    history = History()
    history.write(PRODUCERS[0], ["a"], 1, ack=True)
    timeline = history.timeline()
    end = timeline.cut(BEGIN)
    timeline.drop("a")
    history.write(PRODUCERS[0], ["a"], 1, ack=True)
    assert timeline.read_through("a", 2) == 0
    timeline.read("a", 2, history.records["a"][2:])
    assert len(timeline.units_between(end, timeline.cut(end))) == 1


def test_what_was_forgotten_cannot_be_asked_for() -> None:
    history = History()
    history.write(PRODUCERS[0], ["a"], 1, ack=True)
    timeline = history.timeline()
    timeline.forget(timeline.cut(BEGIN))
    with pytest.raises(Bug, match="forgotten"):
        timeline.cut(BEGIN)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"revision": 1},
        {"revision": "1", "journals": {}},
        {"revision": 1, "journals": {"a": ""}},
    ],
)
def test_an_offset_of_another_source_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(MalformedPosition):
        TimelinePosition.of_json(value)
