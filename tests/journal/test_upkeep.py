"""Compaction moves rows and nothing else."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.publishing import ORDERS, World, batch, collection, swept, world
from penstock.journal.codec import decode_page
from penstock.journal.publisher import Mapped
from penstock.journal.sealing import plan_page
from penstock.journal.state import (
    AckRecord,
    Append,
    Blob,
    Compact,
    Create,
    Fragment,
    Inline,
    JournalState,
    Record,
    apply,
)
from penstock.journal.upkeep import (
    Compacted,
    CompactionOptions,
    Rewrite,
    compact_all,
    compact_journal,
    plan_rewrites,
)
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.runs import Run

ONE = "acme/orders/region=eu/pivot=00"
PRODUCER = Producer(Producer.MULTICAST | 1)
EAGER = CompactionOptions(inputs_min=2)


def fragment(size: int, path: str | None = None, schema: str = "s", row: int = 0) -> Fragment:
    run = Run(
        producer=PRODUCER,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=0,
        rows=1,
        clock_min=Clock(100),
        clock_max=Clock(100),
        clock_max_offset=0,
        increasing=True,
    )
    return Fragment(
        rows=1,
        bytes=size,
        at=Inline(data=b"x" * size) if path is None else Blob(path=path, row=row),
        schema=schema,
        runs=(run,),
        key_hash_min=0,
        key_hash_max=0,
    )


ACK = AckRecord(producer=PRODUCER, clock=Clock(101))


def state_of(records: Sequence[Record]) -> JournalState:
    create = Create(collection="acme/orders", labels=(), key_begin=0, key_end=0xFFFFFFFF)
    state = apply(JournalState(), create, 1)
    return apply(state, Append(records=tuple(records)), 2) if records else state


def spans(rewrites: Sequence[Rewrite]) -> list[tuple[int, int]]:
    return [(rewrite.begin, rewrite.end) for rewrite in rewrites]


@pytest.mark.parametrize(
    ("records", "want"),
    [
        pytest.param([], [], id="nothing: nothing to do"),
        pytest.param([fragment(5, "a")], [], id="one object: it is as good as it gets"),
        pytest.param([fragment(5, "a"), fragment(5, "b")], [(0, 2)], id="two small ones: one"),
        pytest.param([fragment(5), ACK, fragment(5), ACK], [(0, 3)], id="inline ones, over an ACK"),
        pytest.param(
            [fragment(5, "a"), fragment(5, "b", schema="t"), fragment(5, "c", schema="t")],
            [(1, 3)],
            id="another schema: another object",
        ),
        pytest.param(
            [fragment(5, "a"), fragment(60, "b"), fragment(5, "c"), fragment(5, "d")],
            [(2, 4)],
            id="a large one is left alone, and parts its neighbours",
        ),
        pytest.param(
            [fragment(20, name) for name in "abcdefg"],
            [(0, 5), (5, 7)],
            id="no more than the target in one object",
        ),
        pytest.param(
            [fragment(10, "a"), fragment(10, "a", row=1)], [], id="fragments of one object: done"
        ),
        pytest.param(
            [fragment(40, "a"), fragment(5, "b"), fragment(6, "c")],
            [(1, 3)],
            id="what outweighs all others is not rewritten for them",
        ),
        pytest.param(
            [fragment(5, "b"), fragment(6, "c"), fragment(40, "a")], [(0, 2)], id="nor at the end"
        ),
    ],
)
def test_which_fragments_are_rewritten_together(
    records: list[Record], want: list[tuple[int, int]]
) -> None:
    options = CompactionOptions(target_bytes=100, inputs_min=2)
    assert spans(plan_rewrites(state_of(records), options)) == want


def test_few_neighbours_wait_for_more() -> None:
    options = CompactionOptions(inputs_min=3)
    two, three = ([fragment(5, name) for name in names] for names in ("ab", "abc"))
    assert plan_rewrites(state_of(two), options) == ()
    assert spans(plan_rewrites(state_of(three), options)) == [(0, 3)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=200))
def test_a_row_is_rewritten_a_logarithm_of_times(sizes: list[int]) -> None:
    """However often compaction runs between appends, and whatever their sizes."""
    options = CompactionOptions(target_bytes=1 << 40, inputs_min=2)
    state = state_of([])
    rewritten = 0
    for number, size in enumerate(sizes):
        state = apply(state, Append(records=(fragment(size, f"{number}"),)), number + 2)
        while rewrites := plan_rewrites(state, options):
            for rewrite in rewrites:
                rewritten += rewrite.bytes
                diff = Compact(
                    begin=rewrite.begin,
                    end=rewrite.end,
                    path=f"{number}-{rewritten}",
                    bytes=rewrite.bytes,
                )
                state = apply(state, diff, 0)
    total = sum(sizes)
    assert rewritten <= 2 * total * total.bit_length()


def test_the_oldest_records_become_a_page_when_there_are_too_many() -> None:
    records = [fragment(5, name) for name in "abcde"]
    assert plan_page(state_of(records[:4]), 4) == ()
    assert [r.begin for r in plan_page(state_of(records), 4)] == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------- compact


async def publish(here: World, numbers: Sequence[int], *, large: bool = False) -> None:
    """One transaction; a large one does not fit inline."""
    publisher = here.publisher()
    text = secrets.token_hex(8192) if large else ""
    documents = [{"id": n, "region": "eu", "text": text} for n in numbers]
    await publisher.publish(0, batch(documents))
    await publisher.commit_now()


async def open_span(here: World, numbers: Sequence[int]) -> None:
    """Rows that nobody will acknowledge."""
    publisher = here.publisher()
    await publisher.publish(0, batch([{"id": n, "region": "eu"} for n in numbers]))
    await publisher.flush()


async def compact(here: World, options: CompactionOptions = EAGER) -> Compacted:
    return await compact_all(here.journals, here.blobs, here.schemas, options=options)


def places(state: JournalState) -> set[str]:
    found = [r.at for r in state.records if isinstance(r, Fragment)]
    return {at.path if isinstance(at, Blob) else "inline" for at in found}


async def test_compaction_changes_nothing_that_readers_see(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for n in range(5):
            await publish(here, [n, n + 100], large=n % 2 == 1)
            await open_span(here, [n + 1000])
        before, shown = await here.journals.load(ONE), await here.read()
        done = await compact(here)
        after = await here.journals.load(ONE)
        assert await here.read() == shown
        assert await here.read(uncommitted=True) != shown
        assert [(r.begin, r.end, r.revision) for r in after.records] == [
            (r.begin, r.end, r.revision) for r in before.records
        ]
        assert (done.journals, done.objects, done.fragments, done.rows) == (1, 1, 10, 15)
        [path] = places(after)
        assert path.endswith("-compacted.parquet")
        assert await compact(here) == Compacted(), "there is nothing left to do"


async def test_a_journal_of_tiny_appends_becomes_one_object(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for n in range(10):
            await publish(here, [n])
        assert places(await here.journals.load(ONE)) == {"inline"}
        await compact(here, CompactionOptions())
        state = await here.journals.load(ONE)
        assert "inline" not in places(state)
        assert [d["id"] for d in (await here.read())[ONE]] == list(range(10))


async def test_an_object_has_the_codec_of_its_collection(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for n in range(10):
            await publish(here, [n])
        parts = here.journals, here.blobs, here.schemas
        await compact_all(*parts, codecs={"acme/orders": "GZIP", "acme/other": "SNAPPY"})
        [path] = places(await here.journals.load(ONE))
        with here.blobs.open(path) as opened:
            group: Any = pyarrow.parquet.ParquetFile(opened).metadata.row_group(0)
        used = {group.column(at).compression for at in range(group.num_columns)}
        assert used == {"GZIP", "UNCOMPRESSED"}


async def test_writers_go_on_while_their_journal_is_compacted(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await publish(here, [0])

        async def write() -> None:
            for n in range(1, 40):
                await publish(here, [n])

        async def tidy() -> None:
            for _ in range(20):
                await compact(here)

        await asyncio.gather(write(), tidy(), tidy())
        await swept(here)
        assert sorted(d["id"] for d in (await here.read())[ONE]) == list(range(40))


async def test_records_beyond_the_limit_are_sealed_and_still_read(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for n in range(6):
            await publish(here, [n])
        before = await here.journals.load(ONE)
        done = await compact(here, CompactionOptions(records_max=4, inputs_min=2))
        state = await here.journals.load(ONE)
        assert (done.pages, len(state.records)) == (1, 1)
        [page] = state.pages
        sealed = decode_page(here.blobs.read(page.path))
        kept = [*sealed, *state.records]
        assert [(r.begin, r.revision) for r in kept] == [
            (r.begin, r.revision) for r in before.records
        ]
        await swept(here)
        assert [d["id"] for d in (await here.read())[ONE]] == list(range(6))


async def test_a_page_is_not_sealed_over_rows_that_have_moved_meanwhile(tmp_path: Path) -> None:
    """It would name objects that garbage collection is free to remove."""
    async with world(tmp_path) as here:
        for n in range(6):
            await publish(here, [n])
        seal = CompactionOptions(records_max=4, inputs_min=99)
        write = here.blobs.write

        def slow(path: str, data: bytes) -> None:
            write(path, data)
            if path.endswith(".page") and not moved:
                moved.append(path)
                asyncio.run_coroutine_threadsafe(compact(here), loop).result(30)

        moved: list[str] = []
        loop = asyncio.get_running_loop()
        here.blobs.write = slow  # type: ignore[method-assign]
        await compact_journal(here.journals, here.blobs, here.schemas, ONE, seal)
        state = await here.journals.load(ONE)
        [page] = state.pages
        assert page.path not in moved
        await swept(here)
        assert [d["id"] for d in (await here.read())[ONE]] == list(range(6))


async def test_compaction_of_one_collection_leaves_others(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        other = collection("acme/users", partitioned=False)
        for n in range(2):
            publisher = here.publisher(Mapped(spec=ORDERS), Mapped(spec=other))
            for binding in (0, 1):
                await publisher.publish(binding, batch([{"id": n, "region": "eu"}]))
            await publisher.commit_now()
        await compact_all(here.journals, here.blobs, here.schemas, "acme/users", options=EAGER)
        assert places(await here.journals.load(ONE)) == {"inline"}
        assert places(await here.journals.load("acme/users/pivot=00")) != {"inline"}
