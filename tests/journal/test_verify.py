"""Verification below the command: what others do meanwhile, and what older releases left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from journal.publishing import World, batch, world
from penstock.journal import verify as module
from penstock.journal.journals import Journals
from penstock.journal.state import Blob, Fragment, Record
from penstock.journal.sweeping import collect_garbage
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.journal.verify import Verified, verify
from penstock.model.clock import Clock

EAGER = CompactionOptions(inputs_min=2)


async def publish(here: World, *numbers: int, text: int = 6_000) -> None:
    publisher = here.publisher()
    documents = [{"id": n, "region": "eu", "text": os.urandom(text).hex()} for n in numbers]
    await publisher.publish(0, batch(documents))
    await publisher.commit_now()


async def look(here: World) -> Verified:
    return await verify(here.journals.store, here.blobs)


def test_rows_that_compaction_moves_meanwhile_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the state and its objects, everything is compacted and collected."""

    async def scene() -> None:
        async with world(tmp_path) as here:
            for n in range(4):
                await publish(here, n)
            load, moved = Journals.load, []

            async def load_and_move(journals: Journals, name: str) -> Any:  # noqa: ANN401
                state = await load(journals, name)
                if not moved:
                    moved.append(name)
                    await compact_all(journals, here.blobs, here.schemas, options=EAGER)
                    for _ in range(2):  # into quarantine, and out of it
                        await collect_garbage(journals, here.blobs, now_s=4e9)
                return state

            monkeypatch.setattr(Journals, "load", load_and_move)
            found = await look(here)
            assert moved
            assert found.faults == []
            assert (found.objects, found.rows) == (1, 4)

    asyncio.run(scene())


def test_an_object_of_an_earlier_release_is_decoded_and_that_is_all(tmp_path: Path) -> None:
    async def scene() -> None:
        async with world(tmp_path) as here:
            await publish(here, *range(50))
            (journal,) = await here.journals.list()
            await here.journals.append(journal.name, map(undigested, journal.state.records))
            found = await look(here)
            assert (found.faults, found.unsummed, found.rows) == ([], 1, 100)

    asyncio.run(scene())


def undigested(record: Record) -> Record:
    """As a release wrote it that took no digests; later than what is there."""
    if not isinstance(record, Fragment):
        return structs.replace(record, clock=Clock(record.clock + 1))
    assert isinstance(record.at, Blob)
    return structs.replace(record, at=structs.replace(record.at, digest=None))


def test_rows_of_another_clock_than_their_record_says(tmp_path: Path) -> None:
    """The object is sound: what is wrong is what the journal says of it."""

    async def scene() -> None:
        async with world(tmp_path) as here:
            await publish(here, *range(50))
            (journal,) = await here.journals.list()
            fragment = journal.state.records[0]
            assert isinstance(fragment, Fragment)
            (run,) = fragment.runs
            later = structs.replace(
                run, clock_min=Clock(run.clock_max + 7), clock_max=Clock(run.clock_max + 56)
            )
            await here.journals.append(journal.name, [structs.replace(fragment, runs=(later,))])
            (fault,) = (await look(here)).faults
            assert fault.what == "rows are not those of their record"
            assert (fault.begin, fault.end) == (51, 101)
            assert fault.path is not None

    asyncio.run(scene())


def test_a_fault_counts_only_if_the_journal_is_still_as_it_was(tmp_path: Path) -> None:
    async def scene() -> None:
        async with world(tmp_path) as here:
            await publish(here, 1)
            (journal,) = await here.journals.list()
            await publish(here, 2)
            assert await module._still(here.journals, journal.name, journal.state)
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            assert not await module._still(here.journals, journal.name, journal.state)

    asyncio.run(scene())
