"""Garbage is what nobody names, or is about to; it goes after its quarantine, and not before."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.publishing import LATER_S, World, batch, swept, world
from penstock.consensus.open import open_consensus
from penstock.journal.blobs import BlobStore, MissingBlob, open_blobs
from penstock.journal.journals import Journals
from penstock.journal.ownership import ForeignBlobs
from penstock.journal.sealing import seal
from penstock.journal.state import Blob, Fragment
from penstock.journal.sweeping import (
    GRACE_S,
    QUARANTINE_S,
    GarbageReport,
    Note,
    collect_garbage,
    plan_quarantine,
    release,
    take_over,
)
from penstock.journal.upkeep import CompactionOptions, compact_all
from support.s3 import running_s3

ONE = "acme/orders/region=eu/pivot=00"
STRAY = "acme/orders/region=eu/" + "0" * 32 + "-dead.parquet"
EAGER = CompactionOptions(inputs_min=2)


async def publish(here: World, numbers: Sequence[int]) -> None:
    """One transaction, which does not fit inline."""
    publisher = here.publisher()
    text = secrets.token_hex(8192)
    await publisher.publish(0, batch([{"id": n, "region": "eu", "text": text} for n in numbers]))
    await publisher.commit_now()


async def collect(here: World, now_s: float = LATER_S, *, dry_run: bool = False) -> GarbageReport:
    return await collect_garbage(here.journals, here.blobs, now_s=now_s, dry_run=dry_run)


def age(file: Path) -> None:
    stat = file.stat()
    os.utime(file, (stat.st_atime, stat.st_mtime - 3600))


def objects(blobs: BlobStore) -> set[str]:
    return {found.path for found in blobs.list() if not found.path.startswith("=")}


def listed_s(here: World) -> float:
    """When the quarantine began; there is one list."""
    [found] = here.blobs.list("=quarantine")
    return found.modified_s


# ---------------------------------------------------------------------------------------- decided

PATHS = st.sampled_from("abcdefgh")


@given(
    garbage=st.sets(PATHS),
    used=st.sets(PATHS),
    lists=st.lists(st.tuples(st.integers(0, 9), st.sets(PATHS)), max_size=4),
    before_s=st.integers(0, 9),
)
def test_what_becomes_of_every_object(
    garbage: set[str], used: set[str], lists: list[tuple[int, set[str]]], before_s: int
) -> None:
    garbage -= used
    notes = [
        Note(path=str(n), modified_s=at, paths=tuple(sorted(paths)))
        for n, (at, paths) in enumerate(lists)
    ]
    plan = plan_quarantine(garbage, used, notes, before_s)
    assert not set(plan.enter) & set(plan.due)
    assert set(plan.enter) | set(plan.due) <= garbage, "nothing else is ever touched"
    assert used.isdisjoint(plan.due)
    for path in plan.due:
        assert any(at <= before_s and path in paths for at, paths in lists)
    left = {note.path: note.paths for note in notes} | dict(plan.lists)
    still = {path for paths in left.values() for path in paths or ()} | set(plan.enter)
    assert garbage <= still, "all garbage is in quarantine"
    assert used.isdisjoint(still), "and nothing that is used"
    assert set(plan.returned) == used & {path for _, paths in lists for path in paths}


# ------------------------------------------------------------------------------------------- done


async def test_only_what_nobody_names_is_collected(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, range(3))
        named = objects(here.blobs)
        torn = STRAY + ".partial"
        for path in (STRAY, torn, "acme/orders/notes.txt"):
            here.blobs.write(path, b"x")
        dry = await collect(here, dry_run=True)
        assert (set(dry.garbage), dry.deleted, dry.due) == ({STRAY, torn}, 0, ())
        assert not list(here.blobs.list("=quarantine")), "a dry run changes nothing"
        assert (await swept(here)).deleted == 2
        assert objects(here.blobs) == named | {"acme/orders/notes.txt"}


async def test_garbage_goes_after_its_quarantine_and_not_before(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [1])
        here.blobs.write(STRAY, b"xyz")
        first = await collect(here)
        assert (first.quarantined, first.due, first.deleted) == ({STRAY: 3}, (), 0)
        end_s = listed_s(here) + QUARANTINE_S
        early = await collect(here, end_s - 1)
        assert (early.quarantined, early.deleted) == ({STRAY: 3}, 0)
        assert listed_s(here) + QUARANTINE_S == end_s, "another collection does not prolong it"
        assert here.blobs.read(STRAY) == b"xyz"
        late = await collect(here, end_s)
        assert (late.quarantined, late.due, late.deleted, late.bytes) == ({}, (STRAY,), 1, 3)
        assert not here.blobs.exists(STRAY)
        assert not list(here.blobs.list("=quarantine"))


async def test_what_is_young_is_spared(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [1])
        here.blobs.write(STRAY, b"x")
        [found] = [f for f in here.blobs.list() if f.path == STRAY]
        assert not (await collect(here, found.modified_s + GRACE_S - 1)).garbage
        assert (await collect(here, found.modified_s + GRACE_S + 1)).quarantined


async def test_what_was_replaced_is_spared_for_the_same_time(tmp_path: Path) -> None:
    """However old it is: a scan that began before the compaction still reads it."""
    async with world(tmp_path) as here:
        for n in range(4):
            await publish(here, [n])
        replaced = objects(here.blobs)
        await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
        [note] = here.blobs.list("=replaced")
        # By now the objects are old enough to go, and the note is not.
        young_s = note.modified_s + GRACE_S - 1e-6
        for path in replaced:
            age(tmp_path / "blobs" / path)
        assert not (await collect(here, young_s)).garbage
        assert set((await swept(here)).due) == replaced
        assert not list(here.blobs.list("=replaced"))
        assert [d["id"] for d in (await here.read())[ONE]] == list(range(4))


async def test_what_was_quarantined_and_is_named_comes_back_and_waits_anew(tmp_path: Path) -> None:
    """As after a restore: what the journals name now, they did not name then."""
    async with world(tmp_path) as here:
        await publish(here, [1])
        [named] = objects(here.blobs)
        here.blobs.write(STRAY, b"x")
        here.blobs.write("=quarantine/" + "1" * 32, f"{named}\n{STRAY}".encode())
        found = await collect(here)
        assert (found.returned, found.deleted) == ((named,), 0)
        assert set(found.quarantined) == {STRAY}
        [left] = here.blobs.list("=quarantine")
        assert here.blobs.read(left.path) == STRAY.encode()
        assert (await collect(here)).due == (STRAY,)
        assert objects(here.blobs) == {named}


async def test_a_quarantine_that_was_ended_begins_anew(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [1])
        here.blobs.write(STRAY, b"x")
        await collect(here)
        assert release(here.blobs) == (STRAY,)
        assert (await collect(here)).deleted == 0
        assert (await collect(here)).deleted == 1
        assert release(here.blobs) == ()


async def test_a_list_that_is_torn_or_not_text_does_no_harm(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [1])
        before = objects(here.blobs)
        (tmp_path / "blobs/=quarantine").mkdir()
        (tmp_path / "blobs/=quarantine/torn.partial").write_bytes(b"acme/ord")
        (tmp_path / "blobs/=quarantine/rot").write_bytes(b"\xff\x00\n\n../../x\nacme/\xfe")
        await swept(here)
        assert objects(here.blobs) == before
        assert not list(here.blobs.list("=quarantine"))


async def test_nothing_is_collected_while_a_page_is_missing(tmp_path: Path) -> None:
    """What only its records name would look like garbage."""
    async with world(tmp_path) as here:
        for n in range(6):
            await publish(here, [n])
        await seal(here.journals, here.blobs, ONE, (await here.journals.load(ONE)).records[:4])
        before = objects(here.blobs)
        [page] = (await here.journals.load(ONE)).pages
        content = here.blobs.read(page.path)
        here.blobs.delete(page.path)
        with pytest.raises(MissingBlob, match="nothing is collected"):
            await collect(here)
        here.blobs.write(page.path, content)
        assert not (await collect(here)).garbage
        assert objects(here.blobs) == before


async def test_a_stop_leaves_the_rest_in_quarantine(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [1])
        for n in range(40):
            here.blobs.write(STRAY.replace("0" * 32, f"{n:032x}"), b"x")
        await collect(here)
        stop = asyncio.Event()
        gone = await collect_garbage(
            here.journals,
            here.blobs,
            now_s=LATER_S,
            stop=stop,
            progress=lambda done, _: stop.set() if done else None,
        )
        assert 0 < gone.deleted < 40
        assert list(here.blobs.list("=quarantine"))
        rest = await collect(here)
        assert (rest.deleted, rest.quarantined) == (40 - gone.deleted, {})
        assert not list(here.blobs.list("=quarantine"))


async def test_two_that_collect_at_once_do_the_same(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [1])
        before = objects(here.blobs)
        for n in range(20):
            here.blobs.write(STRAY.replace("0" * 32, f"{n:032x}"), b"x")
        for _ in range(3):
            await asyncio.gather(collect(here), collect(here))
        assert objects(here.blobs) == before
        assert not list(here.blobs.list("=quarantine"))
        await publish(here, [2])


async def test_objects_of_other_journals_are_not_garbage(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [1])
        elsewhere = await open_consensus("memory:")
        try:
            with pytest.raises(ForeignBlobs, match="not that of these journals"):
                await collect_garbage(Journals(elsewhere), here.blobs, now_s=LATER_S)
            with pytest.raises(ForeignBlobs, match="is not taken over"):
                await take_over(Journals(elsewhere), here.blobs)
        finally:
            await elsewhere.close()
        assert await here.read()


async def test_a_backup_has_the_whole_quarantine_to_copy_what_its_snapshot_names(
    tmp_path: Path,
) -> None:
    """Whatever is done to the journals: retention leaves no note, as compaction does."""
    async with world(tmp_path) as here:
        for n in range(4):
            await publish(here, [n])
        state = await here.journals.load(ONE)
        named = {r.at.path for r in state.records if isinstance(r, Fragment)
                 and isinstance(r.at, Blob)}  # fmt: skip
        await here.journals.retain(ONE, state.end)
        assert objects(here.blobs) == named
        assert set((await collect(here)).quarantined) == named
        assert not (await collect(here, listed_s(here) + QUARANTINE_S - 1)).deleted
        assert objects(here.blobs) == named
        assert (await collect(here, listed_s(here) + QUARANTINE_S)).deleted == len(named)


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with running_s3() as url:
        yield url


async def test_on_an_object_store_it_is_the_same(tmp_path: Path, s3_url: str) -> None:
    base, _, query = s3_url.partition("?")
    blobs = open_blobs(f"{base}/{tmp_path.name}?{query}")
    async with world(tmp_path) as local:
        here = World(local.journals, blobs, local.schemas)
        for n in range(4):
            await publish(here, [n])
        await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
        blobs.write(STRAY, b"x")
        first = await collect(here)
        assert len(first.quarantined) == 5
        assert not first.deleted
        assert len(release(blobs)) == 5
        assert (await swept(here)).deleted == 5
        assert len(objects(blobs)) == 1
        assert [d["id"] for d in (await here.read())[ONE]] == list(range(4))
        elsewhere = await open_consensus("memory:")
        try:
            with pytest.raises(ForeignBlobs, match="marked"):
                await collect_garbage(Journals(elsewhere), blobs, now_s=LATER_S)
        finally:
            await elsewhere.close()
