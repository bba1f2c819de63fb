"""Writers keep the states of their journals small; readers find every document all the same."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from consensus.interposed import Interposed
from journal.publishing import World, batch, swept, world
from penstock.errors import Bug, Unavailable
from penstock.journal import publisher as module
from penstock.journal.codec import decode_page
from penstock.journal.journals import Journals
from penstock.journal.publisher import Publisher
from penstock.journal.reader import Start
from penstock.journal.sealing import seal, seal_if_long
from penstock.journal.state import RECORDS_MAX, Blob, Fragment, JournalState, Record
from penstock.journal.sweeping import GRACE_S, collect_garbage
from penstock.journal.upkeep import CompactionOptions, compact_all, plan_pages
from penstock.shuffle.binding import with_cohorts
from shuffle.following import ORDERS, Coordinator, binding, session

ONE = "acme/orders/region=eu/pivot=00"
FEW = 8


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers seal at a few records."""

    async def seal_often(journals: Journals, blobs: object, name: str) -> None:
        await seal_if_long(journals, blobs, name, FEW)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "seal_if_long", seal_often)


async def append(to: Publisher, numbers: Iterable[int], text: str = "") -> None:
    """Each in a transaction of its own."""
    for n in numbers:
        await to.publish(0, batch([{"id": n, "region": "eu", "text": text}]))
        await to.commit_now()


async def read_ids(here: World, **options: Start) -> list[int]:
    return [document["id"] for document in (await here.read(**options)).get(ONE, [])]


async def all_records(here: World, state: JournalState) -> list[Record]:
    pages = [decode_page(here.blobs.read(page.path)) for page in state.pages]
    return [record for page in (*pages, state.records) for record in page]


async def test_a_journal_of_many_small_appends_has_a_small_state_and_all_documents(
    tmp_path: Path,
) -> None:
    count = RECORDS_MAX * 6
    only = with_cohorts([binding(0, ORDERS)])
    async with world(tmp_path) as here:
        to, reader = here.publisher(), Coordinator(here)
        await append(to, range(count // 2))
        async with session(here, only) as reading:
            await reader.everything(reading)
        half = await here.journals.load(ONE)
        await append(to, range(count // 2, count))

        state = await here.journals.load(ONE)
        assert len(state.records) <= RECORDS_MAX
        assert len(state.pages) <= 2 * count / (RECORDS_MAX // 2)
        records = await all_records(here, state)
        assert len(records) == 2 * count
        assert [r.revision for r in records] == sorted(r.revision for r in records)

        assert await read_ids(here) == list(range(count)), "from the beginning"
        middle = Start(offset=half.end)
        assert await read_ids(here, start=middle) == list(range(count // 2, count))
        async with session(here, only, resume=reader.committed) as reading:
            await reader.everything(reading)
        assert [seen.id for seen in reader.taken] == list(range(count)), "resumed in the middle"
        anew = Coordinator(here)
        async with session(here, only) as reading:
            await anew.everything(reading)
        assert [seen.id for seen in anew.taken] == list(range(count)), "by a session from the start"


@pytest.mark.usefixtures("often")
async def test_opening_a_journal_reads_a_bounded_number_of_entries(tmp_path: Path) -> None:
    """A seal carries the state: else the one before it would be loaded until the next rollup."""
    async with world(tmp_path) as here:
        to = here.publisher()
        read: list[int] = []
        for first in range(0, 120, 12):
            await append(to, range(first, first + 12))
            store = Interposed(here.journals.store)
            await Journals(store).load(ONE)  # type: ignore[arg-type]
            read.append(store.entries_read)
        assert max(read) <= FEW + 2


@pytest.mark.usefixtures("often")
async def test_intents_seal_too_and_a_reader_on_the_way_notices_nothing(tmp_path: Path) -> None:
    only = with_cohorts([binding(0, ORDERS)])
    async with world(tmp_path) as here:
        to, reader = here.publisher(), Coordinator(here)
        await append(to, [0])
        async with session(here, only) as reading:
            for n in range(1, 60):
                await to.publish(0, batch([{"id": n, "region": "eu"}]))
                await to.write_intents(await to.commit())
                if n % 20 == 0:  # so far that its place is in a page by now
                    await reader.everything(reading)
            await reader.everything(reading)
        state = await here.journals.load(ONE)
        assert state.pages
        assert len(state.records) <= FEW
        assert [seen.id for seen in reader.taken] == list(range(60))


@pytest.mark.usefixtures("often")
async def test_writers_that_race_to_seal_lose_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, f"sqlite:///{tmp_path / 'consensus.db'}") as here:
        others = [World(Journals(here.journals.store), here.blobs, here.schemas) for _ in range(3)]
        await append(here.publisher(), [0])

        async def write(number: int, by: World) -> None:
            await append(by.publisher(), range(100 * number, 100 * number + 15))

        async def tidy() -> None:
            for _ in range(5):
                eager = CompactionOptions(inputs_min=2, records_max=FEW)
                await compact_all(here.journals, here.blobs, here.schemas, options=eager)

        writers = (write(number, by) for number, by in enumerate(others, 1))
        await asyncio.gather(*writers, tidy())
        await swept(here)
        expected = [0, *(100 * k + n for k in (1, 2, 3) for n in range(15))]
        assert sorted(await read_ids(here)) == expected
        records = await all_records(here, await here.journals.load(ONE))
        assert all(record.revision > 0 for record in records)


@pytest.mark.usefixtures("often")
async def test_a_page_that_cannot_be_written_fails_no_transaction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as here:
        write = here.blobs.write

        def refuse(path: str, data: bytes) -> None:
            raise Unavailable("the disk is full")

        here.blobs.write = refuse  # type: ignore[method-assign]
        to = here.publisher()
        with caplog.at_level(logging.WARNING):
            await append(to, range(10))
        assert "none were sealed: the disk is full" in caplog.text
        assert len((await here.journals.load(ONE)).records) == 20
        here.blobs.write = write  # type: ignore[method-assign]
        await append(to, [10])
        assert len((await here.journals.load(ONE)).records) <= FEW
        assert await read_ids(here) == list(range(11))


async def test_a_record_of_unknown_revision_is_not_sealed(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await append(here.publisher(), range(3))
        unread = here.journals.log(ONE).state.records
        with pytest.raises(Bug, match="no revision is known"):
            await seal(here.journals, here.blobs, ONE, unread)


# ------------------------------------------------------------------------------- pages of pages


@pytest.mark.usefixtures("often")
async def test_rows_and_records_that_were_sealed_are_still_compacted(tmp_path: Path) -> None:
    """Writers seal before anybody compacts: small objects must not stay small for that."""
    options = CompactionOptions(inputs_min=2, records_max=FEW, page_records=64)
    noise = os.urandom(4096).hex()
    only = with_cohorts([binding(0, ORDERS)])
    async with world(tmp_path) as here:
        to, reader = here.publisher(), Coordinator(here)
        await append(to, range(20), noise)
        async with session(here, only) as reading:
            await reader.everything(reading)
        await append(to, range(20, 60), noise)
        before = await here.journals.load(ONE)
        records, shown = await all_records(here, before), await here.read()
        assert len(plan_pages(before, options)) == 2

        done = await compact_all(here.journals, here.blobs, here.schemas, options=options)
        after = await here.journals.load(ONE)
        assert done.objects >= 2
        assert len(after.pages) < len(before.pages) / 4
        moved = await all_records(here, after)
        assert [(r.begin, r.end, r.revision) for r in moved] == [
            (r.begin, r.end, r.revision) for r in records
        ]
        places = {r.at.path for r in moved if isinstance(r, Fragment) and isinstance(r.at, Blob)}
        assert len(places) <= 4

        assert await here.read() == shown
        note_s = min(note.modified_s for note in here.blobs.list("=replaced"))
        for file in (tmp_path / "blobs" / "acme").rglob("*.*"):
            os.utime(file, (note_s - 3600, note_s - 3600))  # old enough to go; the notes are not
        young_s = note_s + GRACE_S - 1e-6
        spared = await collect_garbage(here.journals, here.blobs, now_s=young_s)
        assert not spared.garbage, "readers may be about to read what was replaced"
        collected = await swept(here)
        assert collected.deleted > 50
        assert await here.read() == shown
        async with session(here, only, resume=reader.committed) as reading:
            await reader.everything(reading)
        assert [seen.id for seen in reader.taken] == list(range(60))
        again = await compact_all(here.journals, here.blobs, here.schemas, options=options)
        assert again.pages == 0, "there is nothing left to do"


@pytest.mark.usefixtures("often")
async def test_a_session_under_way_reads_on_in_pages_that_were_replaced(tmp_path: Path) -> None:
    options = CompactionOptions(records_max=FEW, inputs_min=2, page_records=64)
    only = with_cohorts([binding(0, ORDERS)])
    async with world(tmp_path) as here:
        to, reader = here.publisher(), Coordinator(here)
        await append(to, range(30))
        async with session(here, only) as reading:
            await reader.transaction(reading)
            await append(to, range(30, 60))
            await compact_all(here.journals, here.blobs, here.schemas, options=options)
            await append(to, range(60, 90))
            await reader.everything(reading)
        assert [seen.id for seen in reader.taken] == list(range(90))


async def test_pages_that_others_replaced_meanwhile_are_left_alone(tmp_path: Path) -> None:
    """Two compactors at once: the second must not bring back what the first has moved."""
    options = CompactionOptions(records_max=4, inputs_min=2, page_records=64)
    async with world(tmp_path) as here:
        to = here.publisher()
        for n in range(0, 24, 4):
            await append(to, range(n, n + 4))
            await seal_if_long(here.journals, here.blobs, ONE, 4)

        async def compact() -> None:
            await compact_all(here.journals, here.blobs, here.schemas, options=options)

        await asyncio.gather(compact(), compact(), compact())
        await swept(here)
        assert await read_ids(here) == list(range(24))
