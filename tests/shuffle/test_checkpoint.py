"""Checkpoints of one lane and of several: what waits, what is shown, and what may be committed.

Frontiers are written as the design writes them: `A: P1{100,0,-5}; B/1: P1{0,100,0} bytes 7` is
journal A under binding 0 and journal B under binding 1, entries being {last commit, hinted commit,
offset}. A clock of `3h` is a duration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from penstock.errors import Bug
from penstock.model.clock import Clock, Producer, duration
from penstock.model.frontier import EMPTY, Frontier, JournalFrontier
from penstock.model.producer_frontier import ProducerFrontier
from penstock.model.resume import prepare_resume
from penstock.shuffle.binding import Lane
from penstock.shuffle.checkpoint import (
    HINT_TIMEOUT_TICKS,
    TICK_S,
    CheckpointPipeline,
    Checkpoints,
    Stalled,
)

ONE_LANE = [Lane(bindings=(0,))]
TWO_LANES = [Lane(priority=1, bindings=(0,)), Lane(priority=0, bindings=(1,))]

JOURNAL = re.compile(r"(?P<name>\w+)(/(?P<binding>\d+))?: (?P<entries>.*?)( bytes (?P<read>\d+))?$")
ENTRY = re.compile(r"P(\d+)\{(\w+),(\w+),([+-]?\d+)\}")


def frontier(text: str, *, floors: Mapping[int, str] | None = None) -> Frontier:
    return Frontier.of(
        (journal(part) for part in text.split("; ") if part),
        gap_floors={binding: clock(floor) for binding, floor in (floors or {}).items()},
    )


def journal(text: str) -> JournalFrontier:
    parts = JOURNAL.match(text)
    assert parts is not None, text
    entries = parts["entries"].split(", ")
    return JournalFrontier(
        journal=parts["name"],
        binding=int(parts["binding"] or 0),
        producers=tuple(map(entry, entries)),
        bytes_read_delta=int(parts["read"] or 0),
    )


def entry(text: str) -> ProducerFrontier:
    parts = ENTRY.fullmatch(text)
    assert parts is not None, text
    number, last_commit, hint, offset = parts.groups()
    return ProducerFrontier(
        producer=Producer(Producer.MULTICAST | int(number)),
        last_commit=clock(last_commit),
        hinted_commit=clock(hint),
        offset=int(offset),
    )


def clock(text: str) -> Clock:
    return duration(int(text[:-1]) * 3600) if text.endswith("h") else Clock(int(text))


def stages(pipeline: CheckpointPipeline) -> tuple[Frontier, Frontier, Frontier]:
    return pipeline.unresolved, pipeline.ready, pipeline.progressed


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """A delta, and the stages after it."""

    delta: str
    floors: Mapping[int, str] | None = None
    unresolved: str = ""
    ready: str = ""
    progressed: str = ""


def without_floors(one: Frontier) -> Frontier:
    return Frontier(table=one.table)


HELD = After(
    delta="A: P1{100,0,-5}; B: P1{0,100,0}",
    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}",
)
FROZEN = After(
    delta="A: P1{200,0,-8}; B: P1{0,200,0}",
    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}",
    progressed="A: P1{200,0,-8}; B: P1{0,200,0}",
)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            [
                After(delta="A: P1{100,0,-5}", ready="A: P1{100,0,-5}"),
                After(
                    delta="A: P2{70,0,+5}; B: P1{120,0,-2}",
                    ready="A: P1{100,0,-5}, P2{70,0,+5}; B: P1{120,0,-2}",
                ),
            ],
            id="without hints, progress is ready at once",
        ),
        pytest.param(
            [
                HELD,
                After(delta="B: P1{100,0,-4}", ready="A: P1{100,0,-5}; B: P1{100,100,-4}"),
            ],
            id="E1: what a checkpoint waits for completes it, with its true offset",
        ),
        pytest.param(
            [
                After(
                    delta="A: P1{100,0,-5}; B: P1{0,100,0}, P2{50,0,-9}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}, P2{50,0,-9}",
                ),
                After(
                    delta="B: P1{120,0,-14}",
                    ready="A: P1{100,0,-5}; B: P1{120,100,-14}, P2{50,0,-9}",
                ),
            ],
            id="E2: what goes beyond it completes it as well, and follows",
        ),
        pytest.param(
            [
                HELD,
                FROZEN,
                After(
                    delta="B: P1{100,0,-4}",
                    unresolved="A: P1{200,0,-8}; B: P1{100,200,-4}",
                    ready="A: P1{100,0,-5}; B: P1{100,100,0}",
                ),
                After(delta="B: P1{200,0,-7}", ready="A: P1{200,0,-8}; B: P1{200,200,-7}"),
            ],
            id="E3: later progress waits its turn",
        ),
        pytest.param(
            [
                After(
                    delta="A: P1{40,0,-1}; B: P1{0,40,0}",
                    unresolved="A: P1{40,0,-1}; B: P1{0,40,0}",
                ),
                After(
                    delta="B: P1{40,0,-1}, P2{70,0,-3}; C: P2{0,70,0}",
                    unresolved="B: P1{40,0,-1}, P2{70,0,-3}; C: P2{0,70,0}",
                    ready="A: P1{40,0,-1}; B: P1{40,40,0}",
                ),
            ],
            id="a delta resolves a hint and brings another",
        ),
        pytest.param(
            [
                HELD,
                After(
                    delta="A: P2{1,0,+5}; B: P2{1,0,+0}",
                    unresolved="A: P1{100,0,-5}, P2{1,0,+5}; B: P1{0,100,0}, P2{1,0,+0}",
                ),
                After(
                    delta="A: P2{9,0,-7}",
                    unresolved="A: P1{100,0,-5}, P2{1,0,+5}; B: P1{0,100,0}, P2{1,0,+0}",
                    progressed="A: P2{9,0,-7}",
                ),
            ],
            id="spans that open are within any boundary, commits of them are not",
        ),
        pytest.param(
            [
                HELD,
                After(
                    delta="A: P1{0,100,0}; B: P1{100,0,-4}",
                    ready="A: P1{100,100,-5}; B: P1{100,100,-4}",
                ),
            ],
            id="two journals hint at each other",
        ),
        pytest.param(
            [
                HELD,
                FROZEN,
                After(
                    delta="A: P1{0,100,0}; B: P1{100,0,-4}",
                    unresolved="A: P1{200,100,-8}; B: P1{100,200,-4}",
                    ready="A: P1{100,0,-5}; B: P1{100,100,0}",
                ),
                After(
                    delta="A: P1{0,200,0}; B: P1{200,0,-7}",
                    ready="A: P1{200,200,-8}; B: P1{200,200,-7}",
                ),
            ],
            id="two journals hint at each other, while later progress waits",
        ),
        pytest.param(
            [
                HELD,
                After(
                    delta="B: P2{90,0,-9}; C: P1{0,50,0}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}",
                    progressed="B: P2{90,0,-9}; C: P1{0,50,0}",
                ),
                After(
                    delta="C: P1{50,0,-1}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}",
                    progressed="B: P2{90,0,-9}; C: P1{50,50,-1}",
                ),
                After(
                    delta="B: P1{100,0,-10}",
                    ready="A: P1{100,0,-5}; B: P1{100,100,-10}, P2{90,0,-9}; C: P1{50,50,-1}",
                ),
            ],
            id="a hint is resolved while it waits its turn",
        ),
        pytest.param(
            [
                After(
                    delta="A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{0,100,0}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{0,100,0}",
                ),
                After(
                    delta="C: P1{100,0,-2}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{100,100,-2}",
                ),
                After(
                    delta="C: P1{0,100,0}; D: P2{150,0,-1}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{100,100,-2}",
                    progressed="C: P1{0,100,0}; D: P2{150,0,-1}",
                ),
                After(
                    delta="B: P1{100,0,-4}",
                    ready="A: P1{100,0,-5}; B: P1{100,100,-4}; C: P1{100,100,-2}; D: P2{150,0,-1}",
                ),
            ],
            id="a hint becomes stale while it waits: the checkpoint before it has that commit",
        ),
        pytest.param(
            [
                After(delta="C: P2{90,0,-9}", ready="C: P2{90,0,-9}"),
                After(
                    delta="A: P1{100,0,-5}; B: P1{0,100,0}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}",
                    ready="C: P2{90,0,-9}",
                ),
                After(
                    delta="A: P2{1,0,+5}; C: P2{0,90,0}",
                    unresolved="A: P1{100,0,-5}, P2{1,0,+5}; B: P1{0,100,0}",
                    ready="C: P2{90,0,-9}",
                ),
            ],
            id="a stale hint is not waited for by the checkpoint that is pending",
        ),
        pytest.param(
            [
                After(delta="A: P9{100h,0,-5}", ready="A: P9{100h,0,-5}"),
                After(
                    delta="B: P1{53h,0,-1}; C: P1{0,53h,0}",
                    unresolved="B: P1{53h,0,-1}; C: P1{0,53h,0}",
                    ready="A: P9{100h,0,-5}",
                ),
            ],
            id="a producer 47 hours behind is still waited for",
        ),
        pytest.param(
            [
                After(delta="A: P9{100h,0,-5}", ready="A: P9{100h,0,-5}"),
                After(
                    delta="B: P1{52h,0,-1}; C: P1{0,52h,0}",
                    ready="A: P9{100h,0,-5}; B: P1{52h,0,-1}",
                ),
            ],
            id="a producer 48 hours behind may have been forgotten: nobody waits for it",
        ),
    ],
)
def test_progress_moves_through_the_stages(steps: list[After]) -> None:
    pipeline = CheckpointPipeline(EMPTY, recovery=False)
    for step in steps:
        pipeline.on_progressed(frontier(step.delta))
        assert stages(pipeline) == (
            frontier(step.unresolved),
            frontier(step.ready),
            frontier(step.progressed),
        )


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            [HELD, After(delta="", floors={0: "101"}, ready="A: P1{100,0,-5}")],
            id="content was removed, and with it what was waited for",
        ),
        pytest.param(
            [HELD, After(delta="", floors={0: "100"}, unresolved=HELD.unresolved)],
            id="a commit at the floor is still there",
        ),
        pytest.param(
            [
                HELD,
                After(
                    delta="B: P2{7,0,-3}", floors={0: "101"}, ready="A: P1{100,0,-5}; B: P2{7,0,-3}"
                ),
            ],
            id="what is read after the gap follows",
        ),
        pytest.param(
            [
                HELD,
                FROZEN,
                After(
                    delta="",
                    floors={0: "101"},
                    unresolved="A: P1{200,0,-8}; B: P1{0,200,0}",
                    ready="A: P1{100,0,-5}",
                ),
            ],
            id="what has waited its turn moves up",
        ),
        pytest.param(
            [
                HELD,
                FROZEN,
                After(delta="", floors={0: "201"}, ready="A: P1{200,0,-8}"),
            ],
            id="what has waited its turn has waited for the same content",
        ),
        pytest.param(
            [
                After(
                    delta="A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{0,300,0}",
                    unresolved="A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{0,300,0}",
                ),
                After(
                    delta="",
                    floors={0: "200"},
                    unresolved="A: P1{100,0,-5}; C: P1{0,300,0}",
                ),
            ],
            id="some of it was removed",
        ),
        pytest.param(
            [
                After(delta="", floors={0: "1000"}),
                After(
                    delta="A: P1{100,0,-5}; B: P1{0,999,0}; C: P1{0,1000,0}",
                    unresolved="A: P1{100,0,-5}; C: P1{0,1000,0}",
                ),
                After(
                    delta="D: P9{999,0,-1}",
                    unresolved="A: P1{100,0,-5}; C: P1{0,1000,0}",
                    progressed="D: P9{999,0,-1}",
                ),
            ],
            id="a floor excuses hints for good, and no commits",
        ),
    ],
)
def test_nothing_waits_for_content_that_was_removed(steps: list[After]) -> None:
    pipeline = CheckpointPipeline(EMPTY, recovery=False)
    for step in steps:
        pipeline.on_progressed(frontier(step.delta, floors=step.floors))
        unresolved, ready, progressed = map(without_floors, stages(pipeline))
        assert unresolved == frontier(step.unresolved)
        assert ready == frontier(step.ready)
        assert progressed == frontier(step.progressed)


def test_gap_floors_go_with_the_checkpoint_that_used_them() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.on_progressed(0, frontier(HELD.delta))
    checkpoints.on_progressed(0, frontier("", floors={0: "101"}))
    checkpoints.on_progressed(0, frontier("A: P2{7,0,-9}"))
    assert ask(checkpoints) == frontier("A: P1{100,0,-5}, P2{7,0,-9}", floors={0: "101"})


@pytest.mark.parametrize(
    ("deltas", "removed", "unresolved", "ready"),
    [
        pytest.param(
            [HELD.delta], "B: P1{100,0,0}", "", "A: P1{100,0,-5}", id="all that was waited for"
        ),
        pytest.param([HELD.delta], "B: P1{99,0,0}", HELD.unresolved, "", id="a commit before it"),
        pytest.param([HELD.delta], "B: P2{100,0,0}", HELD.unresolved, "", id="of somebody else"),
        pytest.param(
            [HELD.delta, FROZEN.delta],
            "B: P1{100,0,0}",
            "A: P1{200,0,-8}; B: P1{0,200,0}",
            "A: P1{100,0,-5}",
            id="and what has waited its turn moves up",
        ),
        pytest.param(
            [HELD.delta, FROZEN.delta],
            "B: P1{200,0,0}",
            "",
            "A: P1{200,0,-8}",
            id="also of what has waited its turn",
        ),
    ],
)
def test_commits_that_were_removed_are_not_waited_for(
    deltas: list[str], removed: str, unresolved: str, ready: str
) -> None:
    """Nor are they part of any checkpoint: nobody has read them, and a recovery could not."""
    pipeline = CheckpointPipeline(EMPTY, recovery=False)
    for delta in deltas:
        pipeline.on_progressed(frontier(delta))
    pipeline.discharge(frontier(removed))
    assert stages(pipeline) == (frontier(unresolved), frontier(ready), EMPTY)


def test_commits_are_removed_from_the_lane_that_waits_for_them() -> None:
    checkpoints = Checkpoints(TWO_LANES, EMPTY)
    checkpoints.on_progressed(0, frontier("A: P1{100,0,-5}; B: P1{0,100,0}"))
    checkpoints.on_progressed(1, frontier("A/1: P1{100,0,-5}; B/1: P1{0,100,0}"))
    checkpoints.discharge(frontier("B/1: P1{100,0,0}"))
    assert ask(checkpoints) == frontier("A/1: P1{100,0,-5}")
    assert checkpoints.unresolved() == frontier("B: P1{0,100,0}")


def test_a_partial_advance_takes_no_more_than_was_hinted() -> None:
    pipeline = CheckpointPipeline(EMPTY, recovery=False)
    pipeline.on_progressed(frontier("A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{0,100,0}"))
    pipeline.on_progressed(frontier("C: P1{120,0,-4}"))
    assert pipeline.unresolved == frontier("A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{100,100,0}")
    assert pipeline.progressed == frontier("C: P1{120,0,-4}")


def test_a_busy_producer_cannot_hold_back_a_checkpoint() -> None:
    """Each delta completes what was pending and begins another: every one is answered by a take."""
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.on_progressed(0, frontier("A: P1{1000,0,-1}; B: P1{0,1000,0}"))
    for n in range(1, 20):
        now, before = 1000 + 10 * n, 990 + 10 * n
        checkpoints.on_progressed(
            0, frontier(f"A: P1{{{now},0,{-n - 1}}}; B: P1{{{before},{now},{-n}}}")
        )
        taken = ask(checkpoints)
        assert taken is not None
        assert taken.unresolved_hints == 0
        assert [read.producers[0].last_commit for read in taken] == [before, before]


# Answers


def ask(checkpoints: Checkpoints) -> Frontier | None:
    if not checkpoints.requested:
        checkpoints.request()
    willing = checkpoints.would_answer()
    answer = checkpoints.answer()
    assert willing == (answer is not None)
    assert checkpoints.requested == (answer is None)
    return answer


@pytest.mark.parametrize(
    ("requested", "ready", "answered"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
)
def test_an_answer_takes_a_request_and_progress(
    requested: bool, ready: bool, answered: bool
) -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    if requested:
        checkpoints.request()
    if ready:
        checkpoints.on_progressed(0, frontier("A: P1{100,0,-5} bytes 9"))
    assert checkpoints.would_answer() == ready
    answer = checkpoints.answer()
    assert answer == (frontier("A: P1{100,0,-5} bytes 9") if answered else None)
    assert checkpoints.requested == (requested and not answered)


def test_a_second_request_is_refused_until_the_first_is_answered() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.request()
    with pytest.raises(Bug, match="outstanding"):
        checkpoints.request()
    checkpoints.on_progressed(0, frontier("A: P1{100,0,-5}"))
    assert checkpoints.answer() is not None
    checkpoints.request()
    assert checkpoints.answer() is None, "what was taken is consumed"


def test_a_pending_checkpoint_is_shown_as_it_comes_closer_and_taken_once() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    delta = "A: P1{100,0,-5} bytes 50; B: P1{0,100,0}; C: P1{0,100,0}"
    checkpoints.on_progressed(0, frontier(delta))
    assert ask(checkpoints) == frontier("A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{0,100,0}")
    assert ask(checkpoints) is None, "nothing new to show"
    checkpoints.on_progressed(0, frontier(""))
    assert ask(checkpoints) is None, "a delta without journals is nothing to show"
    checkpoints.on_progressed(0, frontier("B: P1{100,0,-4} bytes 40"))
    assert ask(checkpoints) == frontier("A: P1{100,0,-5}; B: P1{100,100,-4}; C: P1{0,100,0}")
    assert ask(checkpoints) is None
    checkpoints.on_progressed(0, frontier("C: P1{130,0,-3} bytes 30"))
    assert ask(checkpoints) == frontier(
        "A: P1{100,0,-5} bytes 50; B: P1{100,100,-4} bytes 40; C: P1{130,100,-3} bytes 30"
    )
    assert ask(checkpoints) is None


def test_progress_that_a_frozen_checkpoint_cannot_use_shows_nothing() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.on_progressed(0, frontier(HELD.delta))
    assert ask(checkpoints) is not None
    checkpoints.on_progressed(0, frontier(FROZEN.delta))
    assert ask(checkpoints) is None


def test_a_checkpoint_that_became_complete_unseen_is_simply_taken() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.on_progressed(0, frontier(HELD.delta))
    checkpoints.on_progressed(0, frontier("B: P1{100,0,-4}"))
    assert ask(checkpoints) == frontier("A: P1{100,0,-5}; B: P1{100,100,-4}")


def test_what_is_ready_is_taken_before_anyone_is_bound_to_what_is_not() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.on_progressed(0, frontier("C: P2{90,0,-3}"))
    checkpoints.on_progressed(0, frontier(HELD.delta))
    assert ask(checkpoints) == frontier("C: P2{90,0,-3}")
    assert ask(checkpoints) == frontier(HELD.unresolved)


def test_hints_that_were_all_stale_leave_nothing_to_answer() -> None:
    checkpoints = Checkpoints(TWO_LANES, frontier("A: P1{100,0,-5}"))
    checkpoints.on_progressed(0, frontier("A: P1{0,100,0}"))
    assert ask(checkpoints) is None
    checkpoints.on_progressed(1, frontier("L/1: P1{10,0,-2}; M/1: P1{0,10,0}"))
    assert ask(checkpoints) is not None
    checkpoints.on_progressed(0, frontier("A: P1{0,90,0}"))
    assert ask(checkpoints) is None, "nor anything to show to who waits for another lane"


# Lanes


def test_a_transaction_is_bound_to_the_lane_it_has_seen() -> None:
    checkpoints = Checkpoints(TWO_LANES, EMPTY)
    checkpoints.on_progressed(1, frontier("L/1: P1{10,0,-2} bytes 2; M/1: P1{0,10,0}"))
    assert ask(checkpoints) == frontier("L/1: P1{10,0,-2}; M/1: P1{0,10,0}")
    checkpoints.on_progressed(0, frontier("H: P2{20,0,-3} bytes 3"))
    assert ask(checkpoints) == frontier("H: P2{20,0,-3}; L/1: P1{10,0,-2}; M/1: P1{0,10,0}")
    assert ask(checkpoints) is None
    checkpoints.on_progressed(1, frontier("M/1: P1{10,0,-1} bytes 1"))
    assert ask(checkpoints) == frontier(
        "H: P2{20,0,-3} bytes 3; L/1: P1{10,0,-2} bytes 2; M/1: P1{10,10,-1} bytes 1"
    )
    assert ask(checkpoints) is None


def test_a_lane_that_is_not_complete_does_not_hold_back_one_that_is() -> None:
    checkpoints = Checkpoints(TWO_LANES, EMPTY)
    checkpoints.on_progressed(0, frontier("H: P1{10,0,-2}; I: P1{0,10,0}"))
    checkpoints.on_progressed(1, frontier("L/1: P1{10,0,-2}"))
    assert ask(checkpoints) == frontier("L/1: P1{10,0,-2}")
    checkpoints.on_progressed(1, frontier("L/1: P1{20,0,-3}"))
    assert ask(checkpoints) == frontier("L/1: P1{20,0,-3}"), "nobody was bound to the first lane"


def test_the_lane_of_highest_priority_is_shown_and_the_others_are_not() -> None:
    checkpoints = Checkpoints(TWO_LANES, EMPTY)
    checkpoints.on_progressed(1, frontier("L/1: P1{10,0,-2}; M/1: P1{0,10,0}"))
    checkpoints.on_progressed(0, frontier("H: P1{10,0,-2}; I: P1{0,10,0}"))
    assert ask(checkpoints) == frontier("H: P1{10,0,-2}; I: P1{0,10,0}")
    checkpoints.on_progressed(1, frontier("M/1: P2{1,0,+0}"))
    assert ask(checkpoints) is None, "the other lane has moved, and nobody is bound to it"
    checkpoints.on_progressed(0, frontier("I: P1{10,0,-2}"))
    assert ask(checkpoints) == frontier("H: P1{10,0,-2}; I: P1{10,10,-2}")
    assert ask(checkpoints) == frontier("L/1: P1{10,0,-2}; M/1: P1{0,10,0}, P2{1,0,+0}")


def test_everything_that_is_waited_for_is_known_across_lanes() -> None:
    checkpoints = Checkpoints(TWO_LANES, EMPTY)
    assert checkpoints.unresolved() == EMPTY
    checkpoints.on_progressed(0, frontier("H: P1{10,0,-2} bytes 9; I: P1{0,10,0}"))
    checkpoints.on_progressed(1, frontier("L/1: P1{10,0,-2}; M/1: P1{5,10,-7}"))
    assert checkpoints.unresolved() == frontier("I: P1{0,10,0}; M/1: P1{5,10,-7}")


def test_progress_belongs_to_its_lane() -> None:
    checkpoints = Checkpoints(TWO_LANES, EMPTY)
    with pytest.raises(Bug, match=r"bindings \[1\] progressed"):
        checkpoints.on_progressed(0, frontier("A/1: P1{10,0,-2}"))


def test_lanes_come_by_descending_priority() -> None:
    with pytest.raises(ValueError, match="descending"):
        Checkpoints(TWO_LANES[::-1], EMPTY)


# Recovery


def test_a_recovery_replays_one_checkpoint_and_then_is_silent() -> None:
    resume = prepare_resume(
        frontier("A: P1{50,0,-3}; C: P9{70,0,-11}"),
        frontier("A: P1{100,0,-6}; B: P1{100,100,-4}"),
    )
    assert resume == frontier("A: P1{50,100,-3}; B: P1{0,100,0}; C: P9{70,0,-11}")
    checkpoints = Checkpoints(ONE_LANE, resume)
    assert checkpoints.recovery
    assert checkpoints.unresolved() == frontier("A: P1{50,100,-3}; B: P1{0,100,0}")
    assert ask(checkpoints) is None, "nothing was read yet"
    checkpoints.on_progressed(0, frontier("A: P1{100,0,-6} bytes 300"))
    assert ask(checkpoints) == frontier("A: P1{100,100,-6}; B: P1{0,100,0}")
    checkpoints.on_progressed(0, frontier("B: P1{100,0,-4} bytes 200"))
    assert ask(checkpoints) == frontier("A: P1{100,100,-6} bytes 300; B: P1{100,100,-4} bytes 200")
    checkpoints.on_progressed(0, frontier("A: P1{140,0,-9}"))
    assert ask(checkpoints) is None
    assert checkpoints.unresolved() == EMPTY
    assert checkpoints.recovery, "it was decided once"


def test_what_a_recovery_reads_beyond_its_hint_is_not_visible() -> None:
    checkpoints = Checkpoints(ONE_LANE, frontier("A: P1{50,100,-3}"))
    checkpoints.on_progressed(0, frontier("A: P1{140,0,-12}"))
    assert ask(checkpoints) == frontier("A: P1{100,100,-3}")
    assert ask(checkpoints) is None


def test_a_recovery_waits_for_each_journal_whatever_others_have_seen() -> None:
    checkpoints = Checkpoints(ONE_LANE, frontier("A: P1{500,0,-9}; B: P1{100,300,-2}"))
    assert checkpoints.unresolved() == frontier("B: P1{100,300,-2}")
    checkpoints.on_progressed(0, frontier("A: P1{600,0,-11}"))
    assert ask(checkpoints) is None
    checkpoints.on_progressed(0, frontier("B: P1{300,0,-5}"))
    assert ask(checkpoints) == frontier("B: P1{300,300,-2}")


@pytest.mark.parametrize("floor", ["1000", "1000h"])
def test_a_recovery_is_not_cut_short_by_removed_content(floor: str) -> None:
    checkpoints = Checkpoints(ONE_LANE, frontier("A: P1{50,100,-3}; B: P1{0,100,0}"))
    checkpoints.on_progressed(0, frontier("A: P1{100,0,-6}", floors={0: floor}))
    assert ask(checkpoints) == frontier("A: P1{100,100,-6}; B: P1{0,100,0}", floors={0: floor})
    checkpoints.on_progressed(0, frontier("B: P1{100,0,-4}"))
    assert ask(checkpoints) == frontier("A: P1{100,100,-6}; B: P1{100,100,-4}", floors={0: floor})


def test_one_lane_that_recovers_stops_the_others() -> None:
    checkpoints = Checkpoints(TWO_LANES, frontier("A: P1{50,100,-3}; A/1: P1{50,0,-3}"))
    assert checkpoints.recovery
    checkpoints.on_progressed(1, frontier("A/1: P1{100,0,-6}"))
    assert ask(checkpoints) is None
    checkpoints.on_progressed(0, frontier("A: P1{100,0,-6}"))
    assert ask(checkpoints) == frontier("A: P1{100,100,-6}")
    assert ask(checkpoints) is None


def test_lanes_recover_together() -> None:
    checkpoints = Checkpoints(TWO_LANES, frontier("A: P1{50,100,-3}; A/1: P1{50,100,-3}"))
    checkpoints.on_progressed(0, frontier("A: P1{100,0,-6} bytes 3"))
    assert ask(checkpoints) == frontier("A: P1{100,100,-6}; A/1: P1{50,100,-3}"), "only half of it"
    checkpoints.on_progressed(1, frontier("A/1: P1{100,0,-6} bytes 3"))
    assert ask(checkpoints) == frontier("A: P1{100,100,-6} bytes 3; A/1: P1{100,100,-6} bytes 3")


def test_hints_of_bindings_that_no_lane_has_are_left_alone() -> None:
    checkpoints = Checkpoints(ONE_LANE, frontier("A: P1{50,0,-3}; A/7: P1{50,100,-3}"))
    assert not checkpoints.recovery
    checkpoints.on_progressed(0, frontier("A: P1{60,0,-4}"))
    assert ask(checkpoints) == frontier("A: P1{60,0,-4}")


def test_what_was_committed_before_the_restart_is_not_waited_for() -> None:
    checkpoints = Checkpoints(ONE_LANE, frontier("A: P1{100,0,-5}; B: P2{70,0,-5}"))
    checkpoints.on_progressed(0, frontier("A: P1{0,100,0}; B: P1{100,0,-9}"))
    assert ask(checkpoints) == frontier("B: P1{100,0,-9}")


# Stalls


def ticked(checkpoints: Checkpoints, ticks: int) -> list[list[str]]:
    return [checkpoints.tick() for _ in range(ticks)]


def test_a_stall_is_warned_of_and_then_ends_the_session() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.request()
    checkpoints.on_progressed(0, frontier(HELD.delta))
    first, *rest = ticked(checkpoints, HINT_TIMEOUT_TICKS - 1)
    assert first == [], "one minute is nothing"
    assert [len(warnings) for warnings in rest] == [1] * (HINT_TIMEOUT_TICKS - 2)
    assert "2 minutes" in rest[0][0]
    assert (
        "journal B, binding 0: producer 010000000001 is at 0x0, waiting for the hinted 0x64"
        in rest[0][0]
    )
    with pytest.raises(Stalled, match=f"{HINT_TIMEOUT_TICKS * TICK_S // 60} minutes") as caught:
        checkpoints.tick()
    assert "priority 0 (bindings 0)" in str(caught.value.where)
    assert "journal B, binding 0: producer 010000000001" in str(caught.value.why)
    assert "start" in str(caught.value.fix)


def test_a_stall_names_at_most_twenty_of_what_it_waits_for() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.request()
    waiting = "; ".join(f"B{n:02}: P1{{0,100,0}}" for n in range(25))
    checkpoints.on_progressed(0, frontier(f"A: P1{{100,0,-5}}; {waiting}"))
    with pytest.raises(Stalled) as caught:
        ticked(checkpoints, HINT_TIMEOUT_TICKS)
    lines = str(caught.value.why).splitlines()
    assert sum("waiting for the hinted" in line for line in lines) == 20
    assert lines[-1].strip() == "and 5 more"


def test_a_stall_counts_anew_whenever_the_checkpoint_comes_closer() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.request()
    delta = "A: P1{100,0,-5}; B: P1{0,100,0}; C: P1{0,100,0}; D: P1{0,100,0}"
    checkpoints.on_progressed(0, frontier(delta))
    closer = ["B: P1{100,0,-4}", "C: P1{120,0,-4}", "D: P1{90,0,-4}"]
    for delta in closer:
        ticked(checkpoints, HINT_TIMEOUT_TICKS - 1)
        checkpoints.on_progressed(0, frontier(delta))
    ticked(checkpoints, HINT_TIMEOUT_TICKS - 1)
    checkpoints.on_progressed(0, frontier("A: P1{130,0,-9}"))
    with pytest.raises(Stalled):
        checkpoints.tick()


def test_what_nobody_asks_for_does_not_stall() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.on_progressed(0, frontier(HELD.delta))
    assert ask(checkpoints) is not None
    assert ticked(checkpoints, 100) == [[]] * 100
    checkpoints.request()
    ticked(checkpoints, HINT_TIMEOUT_TICKS - 1)


def test_a_pause_between_requests_is_neither_counted_nor_forgiven() -> None:
    checkpoints = Checkpoints(TWO_LANES, EMPTY)
    checkpoints.on_progressed(0, frontier(HELD.delta))
    assert ask(checkpoints) is not None
    checkpoints.request()
    ticked(checkpoints, 10)
    checkpoints.on_progressed(1, frontier("A/1: P1{100,0,-5}"))
    assert checkpoints.answer() is not None, "a peek that the other lane has made possible"
    ticked(checkpoints, 10)
    checkpoints.request()
    ticked(checkpoints, HINT_TIMEOUT_TICKS - 11)
    with pytest.raises(Stalled):
        checkpoints.tick()


def test_a_lane_without_hints_does_not_stall() -> None:
    checkpoints = Checkpoints(ONE_LANE, EMPTY)
    checkpoints.request()
    assert ticked(checkpoints, 100) == [[]] * 100


def test_a_recovery_stalls_as_well() -> None:
    checkpoints = Checkpoints(ONE_LANE, frontier("A: P1{50,100,-3}"))
    checkpoints.request()
    with pytest.raises(Stalled):
        ticked(checkpoints, HINT_TIMEOUT_TICKS)
