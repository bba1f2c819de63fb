"""What a task forgets when it starts."""

from __future__ import annotations

from pathlib import Path

from journal.publishing import ORDERS, batch, world
from penstock.journal.state import AckRecord, Blob, Fragment, JournalState, Page, Status
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.frontier import Frontier, JournalFrontier
from penstock.model.producer_frontier import ProducerFrontier
from penstock.model.runs import Run
from penstock.runtime.pruning import positions, pruned
from penstock.runtime.recovery import Recovered

P1, P2 = Producer(0x010000000001), Producer(0x010000000002)


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
        assert await pruned(recovered, here.journals, ["acme/orders"]) is recovered


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
        kept = await pruned(recovered, here.journals, [ORDERS.name], entries_min=1)
        assert kept.committed_frontier == frontier
