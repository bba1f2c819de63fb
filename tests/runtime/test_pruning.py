"""What a task forgets when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from journal.publishing import ORDERS, World, batch, world
from penstock.consensus.statelog import StateLog
from penstock.journal.planning import Planner
from penstock.journal.sealing import seal
from penstock.journal.state import AckRecord, Blob, Fragment, JournalState, Page, Status
from penstock.journal.transaction import Intents
from penstock.model.clock import Clock, Flag, Producer, duration, from_unix
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.hints import Commit
from penstock.model.producer_frontier import OBSERVED_FLOOR, ProducerFrontier
from penstock.model.runs import Run
from penstock.runtime import ops
from penstock.runtime.pruning import Pruning, expected_acks, positions, pruned
from penstock.runtime.recovery import Layout, Persist, Recovered, RecoveryMachine

P1, P2 = Producer(0x010000000001), Producer(0x010000000002)
NOW = from_unix(1_800_000_000)


def planner_of(here: World) -> Planner:
    return Planner(journals=here.journals, blobs=here.blobs, schemas=here.schemas)


def fragment(begin: int, rows: int, size: int) -> Fragment:
    run = Run(
        producer=P1,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=rows - 1,
        rows=rows,
        clock_min=Clock(10),
        clock_max=Clock(10 + rows),
        clock_max_offset=rows - 1,
        increasing=True,
    )
    return Fragment(
        begin=begin,
        rows=rows,
        bytes=size,
        at=Blob(path="x"),
        schema="s",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=1,
    )


def test_bytes_before_an_offset_are_those_of_pages_fragments_and_parts_of_them() -> None:
    page = Page(
        path="p", begin=0, end=10, records=2, rows=9, bytes=100, revision_min=1, revision_max=2
    )
    ack = AckRecord(begin=14, producer=P1, clock=Clock(20))
    state = JournalState(
        status=Status.ACTIVE, end=19, pages=(page,), records=(fragment(10, 4, 40), ack)
    )
    position = positions({"A": state})
    assert [position("A", offset) for offset in (0, 5, 10, 12, 14, 15, 19)] == [
        *(0, 50, 100, 120),
        *(140, 140, 140),
    ]
    assert position("gone", 7) == 0


async def test_few_positions_are_all_kept_without_a_listing(tmp_path: Path) -> None:
    entry = ProducerFrontier(producer=P2, last_commit=Clock(5), offset=-3)
    frontier = Frontier.gather([JournalFrontier(journal="A", producers=(entry,))])
    recovered = Recovered(committed_frontier=frontier)
    async with world(tmp_path) as here:
        assert await pruned(recovered, planner_of(here), ["acme/orders"], now=NOW) is recovered


async def test_a_writer_that_is_near_is_kept_whatever_its_age(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([{"id": 1, "region": "eu"}]))
        await publisher.commit_now()
        [journal] = await here.journals.list(ORDERS.name)
        entries = (
            ProducerFrontier(producer=P1, last_commit=Clock(5), offset=-1),
            ProducerFrontier(producer=P2, last_commit=Clock(1 << 62), offset=-2),
        )
        frontier = Frontier.gather([JournalFrontier(journal=journal.name, producers=entries)])
        recovered = Recovered(committed_frontier=frontier)
        few = Pruning(entries_min=1)
        kept = await pruned(recovered, planner_of(here), [ORDERS.name], now=NOW, options=few)
        assert kept.committed_frontier == frontier


# -------------------------------------------------------------------------------------- abandoned

ALL = Pruning(entries_min=1, prune_bytes=1)
DAY = duration(24 * 3600)


async def left_open(
    here: World, began: Clock, *, paged: bool = False
) -> tuple[Producer, Recovered]:
    """A writer that has left a span open, and what a task knows that has read it and many more."""
    abandoned = here.publisher(now=began)
    await abandoned.publish(0, batch([{"id": 0, "region": "eu"}]))
    await abandoned.flush()
    for number in range(40 if paged else 2):
        publisher = here.publisher(now=Clock(NOW - DAY // 2 + number * 16))
        await publisher.publish(0, batch([{"id": number, "region": "eu"}]))
        await publisher.commit_now()
    [journal] = await here.journals.list(ORDERS.name)
    if paged:
        await here.journals.log(journal.name).catch_up()
        await seal(here.journals, here.blobs, journal.name, journal.state.records[:-4])
        [journal] = await here.journals.list(ORDERS.name)
        assert journal.state.pages[0].begin == 0
    latest = ProducerFrontier(
        producer=publisher.producer, last_commit=Clock(NOW - DAY // 2), offset=-journal.state.end
    )
    span = ProducerFrontier(producer=abandoned.producer, last_commit=OBSERVED_FLOOR, offset=0)
    read = JournalFrontier(journal=journal.name, producers=(latest, span))
    return abandoned.producer, Recovered(committed_frontier=Frontier.gather([read]))


async def is_forgotten(here: World, producer: Producer, recovered: Recovered) -> bool:
    kept = await pruned(recovered, planner_of(here), [ORDERS.name], now=NOW, options=ALL)
    [read] = kept.committed_frontier
    return all(entry.producer != producer for entry in read.producers)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("days", "forgotten"),
    [
        pytest.param(3, True, id="long ago"),
        pytest.param(2, False, id="not two days before the newest commit"),
        pytest.param(0, False, id="just now"),
        pytest.param(-3, False, id="by a clock that is ahead"),
    ],
)
async def test_a_writer_is_forgotten_that_left_a_span_open_long_ago(
    tmp_path: Path, days: int, paged: bool, forgotten: bool
) -> None:
    async with world(tmp_path) as here:
        producer, recovered = await left_open(here, Clock(NOW - days * DAY), paged=paged)
        assert await is_forgotten(here, producer, recovered) is forgotten


async def test_a_writer_whose_ack_is_on_its_way_is_kept_however_old_it_is(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        producer, recovered = await left_open(here, Clock(NOW - 3 * DAY))
        log = await StateLog.lead(here.journals.store, "task/acme/writer", RecoveryMachine())
        intents = Intents((Commit("acme/orders/x", producer, Clock(NOW - 2 * DAY)),))
        layout = Layout({})
        ops_ = layout.encode(Persist(committed_close=Clock(9), ack_intents=intents), log.state)
        await log.append(lambda _: ops_)
        assert not await is_forgotten(here, producer, recovered)


async def test_statistics_of_a_task_that_nobody_has_settled_with_are_waited_for(
    tmp_path: Path,
) -> None:
    """Its endpoint may have committed them and the ACK. Its log does not name its kind."""
    kinds = ops.TASK_KINDS
    stats = {str(ops.journal_of(ops.STATS, kind=kind, task="acme/writer")) for kind in kinds}
    async with world(tmp_path) as here:
        log = await StateLog.lead(here.journals.store, "task/acme/writer", RecoveryMachine())
        for hinted, expected in ((9, set[str]()), (10, stats), (10, stats)):
            record = Persist(committed_close=Clock(9), hinted_close=Clock(hinted))
            ops_ = Layout({}).encode(record, log.state)
            await log.append(lambda _, ops_=ops_: ops_)  # type: ignore[misc]
            assert (await expected_acks(here.journals.store)).journals == expected
