"""What is staged, who takes it, and when it may go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.publishing import world
from penstock.errors import Bug
from penstock.journal.follower import current_revision
from penstock.journal.state import JournalState
from penstock.model.clock import Clock, Producer
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.pressure import Pressure
from penstock.shuffle.rounds import Round
from penstock.shuffle.segments import (
    Clocks,
    Fenced,
    Manifest,
    Segment,
    SegmentRead,
    Segments,
    clocks_of,
    discarded_name,
    outdated,
    session_name,
)
from penstock.shuffle.state import Options
from shuffle.following import SPLIT, publish, publisher, session
from shuffle.staging import ONE, THREE, TWO, Staged, Task, Wrote, deliveries, wrote

TASK = Task()


def manifest(lsn: int, some: Iterable[Wrote], task: Task = TASK) -> Manifest:
    """What the tasks of a round report that stages these."""
    return Manifest.of(
        lsn,
        [segment(lsn, shard, rows) for shard, rows in enumerate(task.by_shard(some))],
        shards=task.shards,
    )


def segment(lsn: int, shard: int, rows: list[Staged]) -> Segment:
    if not rows:
        return Segment(shard=shard, path=None)
    clocks: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        clocks.setdefault((row.binding, row.producer), []).append(row.clock)
    ranges = [
        Clocks(
            binding=binding,
            producer=Producer(producer),
            first=Clock(min(each)),
            last=Clock(max(each)),
        )
        for (binding, producer), each in clocks.items()
    ]
    path = f"{lsn}/{shard}"
    return Segment(
        shard=shard, path=path, rows=len(rows), bytes=10 * len(rows), ranges=tuple(ranges)
    )


def staged(*rounds: list[Wrote], task: Task = TASK) -> Segments:
    segments = Segments(task.shards)
    for some in rounds:
        lsn = some[0].delivery.lsn
        segments.begin(lsn, deliveries(some))
        segments.commit(manifest(lsn, some, task))
    return segments


ALONE = Task(shards=1)


def test_the_example_of_the_design() -> None:
    one, two = wrote(1, ONE, [10, 20]), wrote(1, TWO, [15])
    segments = staged([one, two], task=ALONE)
    (read,) = segments.take(deliveries([two]))
    fifteen = Clocks(binding=0, producer=TWO, first=Clock(15), last=Clock(15))
    assert read == SegmentRead(lsn=1, shard=0, path="1/0", sum=0, wanted=(fifteen,))
    assert segments.reclaim(deliveries([two])).paths == ()
    assert segments.bytes == (30,)
    (read,) = segments.take(deliveries([one]))
    assert read.wanted is not None
    assert [(each.first, each.last) for each in read.wanted] == [(10, 20)]
    reclaimed = segments.reclaim(deliveries([one]))
    assert (reclaimed.paths, reclaimed.rounds) == (("1/0",), (1,))
    assert segments.bytes == (0,)


def test_a_repeated_scan_yields_nothing() -> None:
    one, two = wrote(1, ONE, [10, 20]), wrote(1, TWO, [15])
    segments = staged([one, two], task=ALONE)
    assert segments.take(deliveries([one]))
    assert segments.take(deliveries([one])) == ()
    segments.reclaim(deliveries([one]))
    assert segments.take(deliveries([one])) == ()
    assert segments.take(deliveries([two]))
    segments.reclaim(deliveries([two]))
    assert segments.take(deliveries([one, two])) == ()
    assert segments.reclaim(deliveries([one, two])).paths == ()


def test_a_round_that_is_taken_whole_is_read_without_a_filter() -> None:
    some = [wrote(1, producer, [10, 20, 30, 40]) for producer in (ONE, TWO)]
    reads = staged(some).take(deliveries(some))
    assert [read.wanted for read in reads] == [None] * len(reads)


def test_a_shard_that_has_only_rows_of_the_checkpoint_is_read_without_a_filter() -> None:
    task = Task(shards=8)
    some = [wrote(1, ONE, [10]), wrote(1, TWO, [15])]
    mine, others = (each.index(max(each)) for each in map(task.by_shard, ([some[0]], [some[1]])))
    assert mine != others, "the two rows lie in one shard: choose other clocks"
    segments = staged(some, task=task)
    (read,) = segments.take(deliveries(some[:1]))
    assert (read.shard, read.wanted) == (mine, None)
    assert segments.reclaim(deliveries(some[:1])).paths == (read.path,)


def test_neighbours_are_one_interval_unless_another_delivery_lies_between() -> None:
    parts = [wrote(1, ONE, [clock, clock + 1]) for clock in (10, 20, 30, 40)]
    segments = staged([*parts, wrote(1, TWO, [11, 41])], task=ALONE)
    (read,) = segments.take(deliveries([parts[0], parts[1], parts[3]]))
    assert read.wanted is not None
    assert [(each.first, each.last) for each in read.wanted] == [(10, 21), (40, 41)]


def test_journals_of_one_transaction_interleave_and_are_taken_together() -> None:
    here = wrote(1, ONE, [10, 30], journal="a", commit=50)
    there = wrote(1, ONE, [20, 40], journal="b", commit=50)
    later = wrote(1, ONE, [60], journal="a", clock_gt=50)
    segments = staged([here, there, later], task=ALONE)
    (read,) = segments.take(deliveries([here, there]))
    assert read.wanted is not None
    assert [(each.first, each.last) for each in read.wanted] == [(10, 40)]


def test_a_part_of_what_interleaves_is_refused() -> None:
    """Clocks cannot tell the two apart: to guess would lose a row, or deliver it twice."""
    here = wrote(1, ONE, [10, 30], journal="a")
    there = wrote(1, ONE, [20], journal="b")
    segments = staged([here, there], task=ALONE)
    for part in (here, there):
        with pytest.raises(Bug, match="at the same time"):
            segments.take(deliveries([part]))
    assert segments.take(deliveries([here, there])), "a refused scan has taken something"


def test_what_another_journal_got_since_the_last_commit_is_not_taken_along() -> None:
    """The journal's commit before is 5, and between 5 and 60 the producer wrote elsewhere."""
    elsewhere = wrote(1, ONE, [20, 30], journal="b")
    here = wrote(1, ONE, [60, 70], journal="a", clock_gt=5)
    (read,) = staged([elsewhere, here], task=ALONE).take(deliveries([here]))
    assert read.wanted is not None
    assert [(each.first, each.last) for each in read.wanted] == [(60, 70)]


def test_rows_that_were_seen_before_are_not_rows_of_the_delivery() -> None:
    again = wrote(1, ONE, [10, 20, 30], clock_gt=20)
    other = wrote(1, TWO, [10])
    (read,) = staged([again, other], task=ALONE).take(deliveries([again]))
    assert read.wanted is not None
    assert [(each.first, each.last) for each in read.wanted] == [(21, 30)]


def test_lsn_says_how_far_every_shard_is_staged() -> None:
    assert Segments(3).flushed_lsn == (0, 0, 0)
    assert staged([wrote(1, ONE, [1])], [wrote(4, ONE, [2])]).flushed_lsn == (4, 4)


# ----------------------------------------------------------------------------------------- errors

EMPTY = [Segment(shard=shard, path=None) for shard in range(3)]
FIRST = wrote(1, ONE, [10])


@pytest.mark.parametrize(
    ("reported", "why"),
    [
        pytest.param(EMPTY[:2], r"\[0, 1\]", id="a shard is missing"),
        pytest.param([*EMPTY, EMPTY[1]], r"\[0, 1, 1, 2\]", id="a shard has reported twice"),
        pytest.param([], r"\[\]", id="nobody has reported"),
    ],
)
def test_a_manifest_has_every_shard_once(reported: list[Segment], why: str) -> None:
    with pytest.raises(Bug, match=f"round 1 was staged for shards {why}"):
        Manifest.of(1, reported, shards=3)


def second_round_at_once(segments: Segments) -> None:
    segments.begin(2, deliveries([wrote(2, ONE, [20])]))
    segments.begin(3, deliveries([wrote(3, ONE, [30])]))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        pytest.param(
            lambda log: log.begin(1, deliveries([FIRST])),
            "after round 1",
            id="the same round again",
        ),
        pytest.param(second_round_at_once, "while round 2 was", id="two rounds at once"),
        pytest.param(
            lambda log: log.commit(manifest(1, [FIRST])), "not being staged", id="reported twice"
        ),
        pytest.param(lambda log: log.abandon(1), "not being staged", id="abandoned too late"),
        pytest.param(lambda log: log.begin(2, ()), "nothing to stage", id="a round of nothing"),
        pytest.param(
            lambda log: log.begin(2, deliveries([FIRST])),
            "delivery of round 1",
            id="a delivery of another round",
        ),
        pytest.param(
            lambda log: log.take(deliveries([wrote(2, ONE, [20])])),
            "staged up to 1",
            id="rows of a round to come",
        ),
        pytest.param(
            lambda log: log.take(deliveries([wrote(0, ONE, [10])])),
            "rows of round 0",
            id="rows of no round",
        ),
        pytest.param(
            lambda log: log.take(deliveries([wrote(1, TWO, [10])])),
            "no such rows",
            id="rows that no round had",
        ),
        pytest.param(
            lambda log: log.reclaim(deliveries([FIRST])),
            "before they were scanned",
            id="consumed unread",
        ),
    ],
)
def test_out_of_turn(act: Callable[[Segments], object], why: str) -> None:
    with pytest.raises(Bug, match=why):
        act(staged([FIRST]))


def test_a_manifest_of_other_shards_is_refused() -> None:
    segments = Segments(3)
    segments.begin(1, deliveries([FIRST]))
    with pytest.raises(Bug, match="2 of 3 shards"):
        segments.commit(manifest(1, [FIRST]))


@pytest.mark.parametrize(
    "stray",
    [
        pytest.param(wrote(1, TWO, [10]), id="another producer"),
        pytest.param(wrote(1, ONE, [10], binding=1), id="another binding"),
        pytest.param(wrote(1, ONE, [9]), id="an earlier clock"),
        pytest.param(wrote(1, ONE, [11]), id="a later clock"),
    ],
)
def test_rows_of_no_delivery_are_refused(stray: Wrote) -> None:
    segments = Segments(2)
    segments.begin(1, deliveries([FIRST]))
    with pytest.raises(Bug, match="that no delivery of it has"):
        segments.commit(manifest(1, [stray]))
    segments.abandon(1)


def test_a_round_that_failed_may_be_staged_again() -> None:
    segments = Segments(2)
    segments.begin(1, deliveries([FIRST]))
    segments.abandon(1)
    assert segments.flushed_lsn == (0, 0)
    segments.begin(1, deliveries([FIRST]))
    segments.commit(manifest(1, [FIRST]))
    assert segments.take(deliveries([FIRST]))


# ------------------------------------------------------------------------------------- properties


@st.composite
def histories(draw: st.DrawFn) -> tuple[Task, list[list[list[Wrote]]]]:
    """Rounds of transactions. A transaction has rows in one journal or in two, interleaved."""
    task = Task(shards=draw(st.integers(1, 3)))
    clock = 0
    rounds: list[list[list[Wrote]]] = []
    for lsn in range(1, draw(st.integers(1, 4)) + 1):
        transactions: list[list[Wrote]] = []
        for _ in range(draw(st.integers(1, 5))):
            producer = draw(st.sampled_from([ONE, TWO, THREE]))
            binding, journals = draw(st.integers(0, 1)), draw(st.integers(1, 2))
            count = draw(st.integers(journals, 6))
            clocks = range(clock + 1, clock + 1 + count)
            clock += count + 1
            transactions.append(
                [
                    wrote(
                        lsn,
                        producer,
                        clocks[journal::journals],
                        binding=binding,
                        journal=f"j{journal}",
                        commit=clock,
                    )
                    for journal in range(journals)
                ]
            )
        rounds.append(transactions)
    return task, rounds


def flat(transactions: Iterable[list[Wrote]]) -> list[Wrote]:
    return [each for transaction in transactions for each in transaction]


@given(histories(), st.randoms(use_true_random=False))
def test_every_row_is_scanned_once_and_segments_go_with_their_last_row(
    history: tuple[Task, list[list[list[Wrote]]]], chance: random.Random
) -> None:
    task, rounds = history
    on_disk: dict[str, list[Staged]] = {}
    segments = Segments(task.shards)
    for lsn, transactions in enumerate(rounds, 1):
        some = flat(transactions)
        segments.begin(lsn, deliveries(some))
        segments.commit(manifest(lsn, some, task))
        for shard, rows in enumerate(task.by_shard(some)):
            if rows:
                on_disk[f"{lsn}/{shard}"] = rows
    waiting = [transaction for transactions in rounds for transaction in transactions]
    chance.shuffle(waiting)
    while waiting:
        count = chance.randint(1, len(waiting))
        taken, waiting = flat(waiting[:count]), waiting[count:]
        found: list[list[Staged]] = [[] for _ in range(task.shards)]
        for read in segments.take(deliveries(taken)):
            found[read.shard] += [
                row
                for row in on_disk[read.path]
                if read.wanted is None
                or any(
                    (row.binding, row.producer) == each.source
                    and each.first <= row.clock <= each.last
                    for each in read.wanted
                )
            ]
        assert [sorted(rows) for rows in found] == task.by_shard(taken)
        for path in segments.reclaim(deliveries(taken)).paths:
            del on_disk[path]
        unconsumed = set(task.rows(flat(waiting)))
        if task.shards == 1:  # of several, one may be kept for a row that is in another
            assert all(unconsumed & set(rows) for rows in on_disk.values())
        assert unconsumed <= {row for rows in on_disk.values() for row in rows}
        assert sum(segments.bytes) == 10 * sum(map(len, on_disk.values()))
    assert on_disk == {}


@given(
    limit=st.integers(100, 1000),
    rounds=st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=20, max_size=60),
)
def test_a_slow_consumer_keeps_the_disk_within_the_limit_and_one_round(
    limit: int, rounds: list[tuple[int, bool]]
) -> None:
    segments, pressure = Segments(1), Pressure(limit)
    waiting: list[Wrote] = []
    for lsn, (rows, consumes) in enumerate(rounds, 1):
        if pressure.allows(hinted=False):
            some = wrote(lsn, ONE, range(100 * lsn, 100 * lsn + rows))
            segments.begin(lsn, [some.delivery])
            segments.commit(manifest(lsn, [some], ALONE))
            pressure.add(segments.bytes[0] - pressure.bytes)
            waiting.append(some)
        if waiting and consumes:
            oldest = waiting.pop(0)
            segments.take([oldest.delivery])
            segments.reclaim([oldest.delivery])
            pressure.release(pressure.bytes - segments.bytes[0])
        assert segments.bytes[0] < limit + 10 * 30
        assert len(segments._rounds) == len(waiting), "what was consumed is still known"


class Ledger:
    """Stages the rounds of a session, as far as that is known without their rows."""

    def __init__(self) -> None:
        self.segments = Segments(1)
        self.scans = 0

    async def stage(self, round_: Round, states: Mapping[str, JournalState]) -> None:
        if round_.deliveries:
            ranges: dict[tuple[int, Producer], Clocks] = {}
            for clocks in map(clocks_of, round_.deliveries):
                before = ranges.get(clocks.source, clocks)
                first, last = min(before.first, clocks.first), max(before.last, clocks.last)
                ranges[clocks.source] = replace(clocks, first=first, last=last)
            made = Segment(shard=0, path=str(round_.lsn), rows=1, ranges=tuple(ranges.values()))
            self.segments.begin(round_.lsn, round_.deliveries)
            self.segments.commit(Manifest.of(round_.lsn, [made], shards=1))

    def take(self, taken: Checkpoint) -> None:
        reads = self.segments.take(taken.deliveries)
        assert bool(reads) == bool(taken.deliveries)
        self.scans += 1

    async def reclaim(self, checkpoint: Checkpoint) -> None:
        self.segments.reclaim(checkpoint.deliveries)

    async def close(self) -> None: ...


@pytest.mark.parametrize("seed", range(6))
async def test_checkpoints_never_want_a_part_of_what_interleaves(seed: int, tmp_path: Path) -> None:
    """Two writers over four journals, who acknowledge one journal at a time, and take turns."""
    chance = random.Random(seed)
    ledger = Ledger()
    ahead = Options(read_ahead=True, round_max_fragments=chance.choice([1, 3, 8]))
    number = count()
    async with world(tmp_path) as here, session(here, log=ledger, options=ahead) as following:

        async def write_many() -> None:
            to = publisher(here, SPLIT)
            for _ in range(8):
                ids = [next(number) for _ in range(chance.randint(1, 8))]
                await publish(to, ids, payments=chance.random() < 0.7)
                await to.write_intents(await to.commit())

        async def read_all() -> None:
            while True:
                taken = await following.next_checkpoint()
                ledger.take(taken)
                following.consumed(taken)

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read_all())
            await asyncio.gather(write_many(), write_many())
            await following.caught_up(await current_revision(here.journals.store))
            reading.cancel()
        assert ledger.scans


# ------------------------------------------------------------------------------------ directories

SEVEN = session_name(7)


@pytest.mark.parametrize(
    ("names", "want"),
    [
        pytest.param([SEVEN], [], id="nobody else"),
        pytest.param([SEVEN, session_name(6)], [session_name(6)], id="an older one goes"),
        pytest.param([SEVEN, discarded_name(SEVEN, "x")], [discarded_name(SEVEN, "x")], id="rest"),
        pytest.param(
            [SEVEN, discarded_name(session_name(9), "x")],
            [discarded_name(session_name(9), "x")],
            id="the rest of a newer one that was closed",
        ),
        pytest.param([SEVEN, "lost+found", "epoch-6", ".epoch"], [], id="others are left alone"),
    ],
)
def test_what_older_sessions_have_left(names: list[str], want: list[str]) -> None:
    assert outdated(names, 7) == want


def test_a_newer_session_fences() -> None:
    with pytest.raises(Fenced, match="epoch 7 was replaced"):
        outdated([session_name(6), SEVEN, session_name(8)], 7)


def test_epochs_are_not_negative() -> None:
    with pytest.raises(ValueError, match="-1 is no epoch"):
        session_name(-1)
