"""Sessions on real journals: what they hand out, and what they do when journals come and go."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from journal.publishing import World, collection, world
from penstock.errors import Bug, Unavailable
from penstock.journal.blobs import BlobStore, MissingBlob
from penstock.journal.publisher import PublisherOptions
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.model.clock import Clock, Flag, Producer, duration
from penstock.model.frontier import EMPTY, Frontier
from penstock.model.sequence import SequenceError
from penstock.shuffle import session as module
from penstock.shuffle.binding import with_cohorts
from penstock.shuffle.checkpoint import HINT_TIMEOUT_TICKS, Stalled
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.handover import Handover
from penstock.shuffle.session import Session, SessionClosed
from penstock.shuffle.state import NeedRows, RoundLimits
from penstock.shuffle.topology import RecoveryImpossible
from shuffle.following import (
    NOW,
    ORDERS,
    PAYMENTS,
    SPLIT,
    START,
    Coordinator,
    Restless,
    Seen,
    append_ack,
    append_rows,
    binding,
    documents,
    ids,
    publish,
    publisher,
    repeated,
    session,
    torn,
    write,
)

EU, US = "acme/orders/region=eu/pivot=00", "acme/orders/region=us/pivot=00"
PAID = "acme/payments/pivot=00"
P1 = Producer(Producer.MULTICAST | 1)
WHOLE = PublisherOptions()
STEP_BY_STEP = RoundLimits(records=1)
"""One revision a round."""


@pytest.fixture(params=["memory:", "sqlite"])
async def here(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.param if request.param == "memory:" else f"sqlite:///{tmp_path / 'consensus.db'}"
    async with world(tmp_path, url) as made:
        yield made


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What was logged so far."""
    caplog.set_level(logging.INFO, "penstock.shuffle")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


async def silent(reading: Session) -> bool:
    """Whether a session has nothing to hand out of what is committed now."""
    try:
        async with asyncio.timeout(0.2):
            await reading.next_checkpoint()
    except TimeoutError:
        return True
    return False


# ----------------------------------------------------------------------------------- transactions


async def test_a_transaction_is_handed_out_whole_and_once(here: World) -> None:
    await write(here, 1, 2, 3)
    reader = Coordinator(here)
    async with session(here) as reading:
        found = await reader.transaction(reading)
        assert ids(found, 0) == ids(found, 1) == [1, 2, 3]
        assert await silent(reading)
        await write(here, 4)
        found = await reader.transaction(reading)
        assert ids(found, 0) == ids(found, 1) == [4]


async def test_one_without_all_its_acks_is_shown_in_peeks_only(here: World) -> None:
    missing = await torn(here, 0, 1, 2, acknowledged=2)
    reader = Coordinator(here)
    async with session(here) as reading:
        first = await reading.next_checkpoint()
        assert first.is_peek
        assert await silent(reading)
        assert "announced" in reading.waiting_for()
        for parts in missing:
            await here.journals.append_all(parts)
        found = [*await documents(here, first), *await reader.transaction(reading)]
    assert ids(found, 0) == ids(found, 1) == [0, 1, 2]


async def test_what_is_not_acknowledged_is_not_shown_and_does_not_hold_back(here: World) -> None:
    to = publisher(here)
    await publish(to, [7])
    await to.flush()
    await write(here, 1)
    reader = Coordinator(here)
    async with session(here) as reading:
        assert ids(await reader.transaction(reading), 1) == [1]
        assert await silent(reading)


async def test_resuming_from_any_frontier_reads_the_rest_and_nothing_else(here: World) -> None:
    for n in range(6):
        await write(here, n, 10 + n, options=SPLIT if n % 2 else WHOLE)
    reader = Coordinator(here)
    stored: list[tuple[Frontier, int]] = [(EMPTY, 0)]
    async with session(here, limits=STEP_BY_STEP) as reading:
        while len(ids(reader.taken, 0)) < 12:
            await reader.transaction(reading)
            stored.append((reader.committed, len(reader.taken)))
    assert len(stored) >= 7
    whole = sorted(reader.taken)
    for frontier, already in stored[:-1]:
        again = Coordinator(here, committed=frontier, taken=reader.taken[:already])
        async with session(here, resume=frontier) as reading:
            await again.everything(reading)
        assert sorted(again.taken) == whole
    async with session(here, resume=reader.committed) as reading:
        assert await silent(reading)


async def test_a_recovery_replays_the_prepared_transaction_and_no_more(here: World) -> None:
    await write(here, 1)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.transaction(reading)
        await write(here, 2, 3, 4, options=SPLIT)
        prepared = await reader.prepare(reading)
    await write(here, 5, 6)
    async with session(here, resume=reader.recovery) as reading:
        assert await reader.prepare(reading) == prepared
        assert await silent(reading)
        assert "replayed" in reading.waiting_for()
    reader.commit()
    async with session(here, resume=reader.committed) as reading:
        found = await reader.transaction(reading)
    assert ids(found, 0) == ids(found, 1) == [5, 6]


async def test_a_recovery_without_a_journal_it_needs_is_refused(here: World) -> None:
    await write(here, 0, 1, 2)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.prepare(reading)
    await here.journals.drop(EU)
    with pytest.raises(RecoveryImpossible, match="acme/orders/region=eu"):
        async with session(here, resume=reader.recovery):
            pass


@pytest.mark.parametrize("seed", range(3))
async def test_two_collections_are_never_shown_apart(here: World, seed: int) -> None:
    rng = random.Random(seed)
    ended = asyncio.Event()

    def together(found: list[Seen]) -> None:
        assert ids(found, 0) == ids(found, 1)

    async def write_at_random() -> None:
        written, missing = 0, []
        for _ in range(30):
            some = range(written, written + rng.randint(1, 5))
            written = some.stop
            if rng.random() < 0.4:
                missing += await torn(here, *some, acknowledged=rng.randint(0, 1))
            else:
                await write(here, *some, options=rng.choice((SPLIT, WHOLE)))
            while missing and rng.random() < 0.5:
                await here.journals.append_all(missing.pop(rng.randrange(len(missing))))
        for parts in missing:
            await here.journals.append_all(parts)
        assert written > 30
        ended.set()

    reader = Coordinator(here)
    restless = Restless(reader, rng, together)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write_at_random())
        tasks.create_task(restless.read(lambda resume: session(here, resume=resume), ended))
    written = ids(reader.taken, 0)
    assert written == ids(reader.taken, 1) == list(range(len(written)))
    assert repeated(reader.taken) == []


# ---------------------------------------------------------------------------------------- journals


async def test_journals_that_appear_later_are_read(here: World) -> None:
    reader = Coordinator(here)
    async with session(here) as reading:
        assert await silent(reading)
        assert "Nothing new" in reading.waiting_for()
        await write(here, 1, 2, 3)
        assert ids(await reader.transaction(reading), 0) == [1, 2, 3]


async def test_a_dropped_journal_ends_and_the_others_go_on(
    here: World, told: Callable[[], str]
) -> None:
    await write(here, 0, 1, 2)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.transaction(reading)
        await here.journals.drop(EU)
        await write(here, 4)
        assert ids(await reader.transaction(reading), 0) == [4]
    assert f"{EU} was dropped" in told()
    async with session(here, resume=reader.committed) as reading:
        assert await silent(reading)


async def test_a_commit_of_a_dropped_journal_is_not_waited_for(here: World) -> None:
    missing = await torn(here, 0, 1, 2, acknowledged=1)
    reader = Coordinator(here)
    async with session(here) as reading:
        peek = await reading.next_checkpoint()
        assert peek.is_peek
        gone = [name for parts in missing for name in parts]
        for name in gone:
            await here.journals.drop(name)
        found = [*await documents(here, peek), *await reader.transaction(reading)]
    kept = {"acme/orders/region=ap/pivot=00", EU, US, PAID} - set(gone)
    assert {seen.journal for seen in found} == kept


async def test_a_journal_that_is_created_again_is_read_anew(
    here: World, told: Callable[[], str]
) -> None:
    await write(here, 0, 3)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.transaction(reading)
        end = (await here.journals.load(EU)).end
        await here.journals.drop(EU)
        await write(here, 6)
        assert ids(await reader.transaction(reading), 0) == [6]
    assert f"{EU} was created again" in told()
    assert (await here.journals.load(EU)).begin == end
    async with session(here, resume=reader.committed) as reading:
        await write(here, 9)
        assert ids(await reader.transaction(reading), 0) == [9]


async def test_what_was_removed_before_it_was_read_is_told_of(
    here: World, told: Callable[[], str]
) -> None:
    await write(here, 0)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.transaction(reading)
    await write(here, 3)
    await here.journals.retain(EU, (await here.journals.load(EU)).end)
    await write(here, 6)
    async with session(here, resume=reader.committed) as reading:
        await reader.everything(reading)
    assert (ids(reader.taken, 0), ids(reader.taken, 1)) == ([0, 6], [0, 3, 6])
    assert reader.committed.gap_floors.keys() == {0}
    assert f"{EU}: offsets" in told()
    assert "removed before binding 0" in told()


async def test_what_is_removed_while_it_is_read_is_told_of(
    here: World, told: Callable[[], str]
) -> None:
    await write(here, 0)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.transaction(reading)
        await write(here, 3)
        await here.journals.retain(EU, (await here.journals.load(EU)).end)
        await write(here, 6)
        await reader.everything(reading)
    assert (ids(reader.taken, 0), ids(reader.taken, 1)) == ([0, 6], [0, 3, 6])
    assert "removed while binding 0" in told()


async def test_a_frontier_ahead_of_the_journals_is_waited_for(here: World, tmp_path: Path) -> None:
    async with world(tmp_path / "ahead") as ahead:
        for n in range(4):
            await write(ahead, n)
        reader = Coordinator(ahead)
        async with session(ahead) as reading:
            await reader.everything(reading)
    await write(here, 0)
    async with session(here, resume=reader.committed) as reading:
        assert await silent(reading)
        assert "was read through" in reading.waiting_for()
        for n in range(10, 19):
            await write(here, n)
        assert (await reading.next_checkpoint()).deliveries


# ----------------------------------------------------------------------------------------- objects


async def sealed(here: World) -> list[int]:
    """Payments with most of their records in pages; the ids in them."""
    for n in range(12):
        await write(here, n)
    options = CompactionOptions(records_max=6, inputs_min=4)
    await compact_all(here.journals, here.blobs, here.schemas, "acme/payments", options=options)
    assert (await here.journals.load(PAID)).pages
    return list(range(12))


async def test_records_in_pages_are_read_too(here: World) -> None:
    written = await sealed(here)
    reader = Coordinator(here)
    async with session(here, limits=STEP_BY_STEP) as reading:
        await reader.everything(reading)
    assert ids(reader.taken, 0) == ids(reader.taken, 1) == written


async def test_a_page_that_is_missing_ends_the_session(here: World) -> None:
    await sealed(here)
    [page, *_] = (await here.journals.load(PAID)).pages
    here.blobs.delete(page.path)
    async with session(here) as reading:
        for _ in range(2):
            with pytest.raises(MissingBlob, match=page.path):
                await reading.next_checkpoint()
        assert "has ended" in reading.waiting_for()


class Moody(BlobStore):
    """A blob store that fails some times before it reads."""

    def __init__(self, store: BlobStore, failures: int) -> None:
        super().__init__(store._url)
        self.failures = failures

    def read(self, path: str) -> bytes:
        self.failures -= 1
        if self.failures >= 0:
            raise Unavailable("cannot read an object", where=path, why="it is raining")
        return super().read(path)


async def test_a_blob_store_that_fails_is_asked_again(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    written = await sealed(here)
    moody = replace(here, blobs=Moody(here.blobs, 3))
    reader = Coordinator(here)
    async with session(moody) as reading:
        await reader.everything(reading)
    assert ids(reader.taken, 1) == written
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [r.getMessage() for r in warnings] == ["reading again"] * 2


async def test_pages_that_were_forgotten_meanwhile_are_not_missed(here: World) -> None:
    """The journal moves on between being planned and being read: that is no loss to tell of."""
    await sealed(here)
    state = await here.journals.load(PAID)

    class Overtaken(BlobStore):
        def read(self, path: str) -> bytes:
            asyncio.run_coroutine_threadsafe(here.journals.retain(PAID, state.end), loop).result()
            raise MissingBlob(f"an object is missing: {path}")

    loop = asyncio.get_running_loop()
    moved = replace(here, blobs=Overtaken(here.blobs._url))
    reader = Coordinator(here)
    async with session(moved) as reading:
        await reader.everything(reading)
    assert (ids(reader.taken, 0), ids(reader.taken, 1)) == (list(range(12)), [])


async def test_a_span_that_begins_among_repeated_rows_is_looked_up(here: World) -> None:
    """Rows 3 and 4 come twice: the second span begins where the first ended, in mid fragment."""
    await write(here, 0)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.transaction(reading)
        await append_rows(here, PAID, P1, range(100, 105), Flag.CONTINUE_TXN)
        await append_ack(here, PAID, P1, 105)
        assert ids(await reader.transaction(reading), 1) == list(range(100, 105))
        await append_rows(here, PAID, P1, [103, 104, 108, 109], Flag.CONTINUE_TXN)
        await write(here, 3)
        await reader.transaction(reading)
        entry = reader.committed.find(PAID, 1)
        assert entry is not None
        [open_] = [each for each in entry.producers if each.producer == P1]
        state = await here.journals.load(PAID)
        begin = next(r.begin for r in state.records if r.revision == state.records[-3].revision)
        assert open_.offset == begin + 2
        await append_ack(here, PAID, P1, 110)
        assert ids(await reader.transaction(reading), 1) == [108, 109]


async def test_a_long_run_is_looked_up_elsewhere(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOKUP_ROWS_MAX", 3)
    await write(here, 0)
    asked: list[NeedRows] = []

    async def lookup(need: NeedRows) -> int:
        asked.append(need)
        return need.fragment.begin + 2

    reader = Coordinator(here)
    async with session(here, lookup=lookup) as reading:
        await append_rows(here, PAID, P1, range(100, 105), Flag.CONTINUE_TXN)
        await append_ack(here, PAID, P1, 105)
        await append_rows(here, PAID, P1, [103, 104, 108, 109], Flag.CONTINUE_TXN)
        await append_ack(here, PAID, P1, 110)
        await reader.everything(reading)
    [need] = asked
    assert (need.journal, need.clock_gt) == (PAID, START + 105)
    assert ids(reader.taken, 1) == [0, *range(100, 105), 108, 109]


# -------------------------------------------------------------------------------------------- time


async def test_documents_with_a_read_delay_come_when_they_are_due(here: World) -> None:
    await write(here, 1)
    late = with_cohorts([binding(0, ORDERS), binding(1, PAYMENTS, read_delay=duration(3600))])
    begin = time.monotonic()

    def now() -> Clock:
        """Two seconds before what was written is an hour old, when the test begins."""
        passed = time.monotonic() - begin - 2
        return Clock(START + duration(3600) + int(passed * duration(1)))

    reader = Coordinator(here)
    async with session(here, late, now=now) as reading:
        assert ids(await reader.transaction(reading), 0) == [1]
        assert await silent(reading) or now() > START + duration(3600)
        assert ids(await reader.transaction(reading), 1) == [1]


async def test_a_session_that_waits_does_nothing(here: World) -> None:
    await write(here, 1)
    plans = 0

    def now() -> Clock:
        nonlocal plans
        plans += 1
        return NOW

    reader = Coordinator(here)
    async with session(here, now=now) as reading:
        await reader.everything(reading)
        assert await silent(reading)
        before = plans
        assert await silent(reading)
        assert plans <= before + 2


async def test_a_transaction_that_is_never_finished_ends_the_session(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    await torn(here, 0, 1, 2, acknowledged=1)
    async with session(here, tick_s=0.01) as reading:
        assert (await reading.next_checkpoint()).is_peek
        with pytest.raises(Stalled, match=PAID):
            await reading.next_checkpoint()
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == HINT_TIMEOUT_TICKS - 2


# -------------------------------------------------------------------------------- asking, and ends


async def test_only_one_checkpoint_may_be_asked_for_at_a_time(here: World) -> None:
    async with session(here) as reading:
        asked = asyncio.create_task(reading.next_checkpoint())
        await asyncio.sleep(0)
        with pytest.raises(Bug, match="while another call waits"):
            await reading.next_checkpoint()
        await write(here, 1)
        assert await asked


async def test_a_call_that_is_cancelled_loses_nothing(here: World) -> None:
    reader = Coordinator(here)
    async with session(here) as reading:
        for n in range(5):
            asked = asyncio.create_task(reading.next_checkpoint())
            writing = asyncio.create_task(write(here, n))
            for _ in range(n):
                await asyncio.sleep(0.002)
            asked.cancel()
            await asyncio.wait([asked, writing])
            if not asked.cancelled():
                reader.taken += await documents(here, asked.result())
        await reader.everything(reading)
    assert ids(reader.taken, 0) == ids(reader.taken, 1) == list(range(5))


async def test_a_call_that_is_cancelled_after_it_was_answered_leaves_the_answer() -> None:
    handover = Handover()
    requests = 0

    def request() -> None:
        nonlocal requests
        requests += 1

    asked = asyncio.create_task(handover.take(request))
    await asyncio.sleep(0)
    checkpoint = Checkpoint(frontier=EMPTY, deliveries=())
    handover.give(checkpoint)
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled()
    assert await handover.take(request) is checkpoint
    assert requests == 1


async def test_a_journal_that_contradicts_itself_ends_the_session(here: World) -> None:
    await write(here, 0)
    reader = Coordinator(here)
    async with session(here) as reading:
        await reader.transaction(reading)
        await append_rows(here, PAID, P1, [100, 110], Flag.CONTINUE_TXN)
        await append_ack(here, PAID, P1, 105)
        for _ in range(2):
            with pytest.raises(SequenceError, match=PAID):
                await reading.next_checkpoint()
        with pytest.raises(SequenceError):
            await reading.caught_up(1)
        await reading.close()
        with pytest.raises(SequenceError):
            await reading.next_checkpoint()


async def test_closing_ends_whoever_waits_and_leaves_nothing_running(here: World) -> None:
    before = asyncio.all_tasks()
    async with session(here) as reading:
        asked = asyncio.create_task(reading.next_checkpoint())
        await asyncio.sleep(0)
        await reading.close()
        with pytest.raises(SessionClosed):
            await asked
        await reading.close()
        with pytest.raises(SessionClosed):
            await reading.next_checkpoint()
    assert asyncio.all_tasks() <= before | {asked}


async def test_opening_may_be_cancelled(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = here.journals.follow
    listing = asyncio.Event()

    async def stuck(collection: str) -> AsyncIterator[object]:
        if collection == PAYMENTS.name:
            listing.set()
            await asyncio.Event().wait()
        async for moved in follow(collection):
            yield moved

    monkeypatch.setattr(here.journals, "follow", stuck)
    before = asyncio.all_tasks()
    opening = asyncio.create_task(session(here).__aenter__())
    await listing.wait()
    await asyncio.sleep(0.05)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert asyncio.all_tasks() <= before | {opening}


async def test_bindings_that_cannot_be_read_leave_nothing_running(here: World) -> None:
    before = asyncio.all_tasks()
    within = binding(1, collection("acme/orders/late", partitioned=False))
    with pytest.raises(ValueError, match="lies inside collection"):
        async with session(here, [binding(0, ORDERS), within]):
            pass
    assert asyncio.all_tasks() == before
