"""What a session and its slice take does not grow with what it should not grow with."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

import pytest
from msgspec import Struct, structs

from penstock.bench.backlog import bytes_below
from penstock.bench.shuffle import CountedBlobs, Reader, Sequencer, Unwritten
from penstock.bench.stock import (
    PRODUCER,
    START,
    Stage,
    Stock,
    Sums,
    collection,
    fill,
    read_to_the_end,
    write,
)
from penstock.journal.journals import creation
from penstock.journal.names import JournalName
from penstock.journal.state import AckRecord, JournalState
from penstock.model.clock import Clock
from penstock.model.routing import split_shards
from penstock.shuffle.binding import ad_hoc_bindings
from penstock.shuffle.session import Session
from penstock.shuffle.state import Options, Round
from penstock.wall_clock import now

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.shuffle.delivery import Checkpoint
    from penstock.shuffle.log import SliceLog


@pytest.mark.spark
async def test_a_checkpoint_takes_as_many_jobs_of_300_journals_as_of_10(
    spark: SparkSession, tmp_path: Path
) -> None:
    def consume(frame: DataFrame) -> Sums:
        return read_to_the_end(frame, "d0")

    stock = Stock(documents=3_000, lots=10, parts=300)
    async with Stage.opened(tmp_path) as here:
        few = Reader(here, spark, collection("bench/few", by="lot"))
        many = Reader(here, spark, collection("bench/many", by="part"))
        for reader in (few, many):
            written = await fill(here, reader.spec, stock)
            assert await reader.read(consume) == written
    assert few.jobs == many.jobs
    assert len(many.jobs) == 1


@pytest.mark.parametrize("journals", [1, 20])
async def test_a_clean_backlog_is_sequenced_without_reading_a_row(
    tmp_path: Path, journals: int
) -> None:
    """Its objects do not exist; of one journal, records are in pages too."""
    backlog = Unwritten(journals=journals, transactions=2_200 // journals, at_once=100)
    spec = collection("bench/backlog", by="part")
    blobs = CountedBlobs((tmp_path / "blobs").as_uri())
    async with Stage.opened(tmp_path, blobs) as here:
        await backlog.append(here, spec)
        blobs.pages = blobs.others = 0
        await Sequencer(here=here, spec=spec, backlog=backlog).sequence()
    assert blobs.others == 0
    assert (blobs.pages > 0) == (journals == 1)


# ------------------------------------------------------------------------------------------ bounded


class Watched:
    """A log whose files are measured whenever there are more of them."""

    def __init__(self, staging: SliceLog) -> None:
        self._staging = staging
        self.most = 0
        self.largest = 0

    async def stage(self, round_: Round, states: Mapping[str, JournalState]) -> None:
        await self._staging.stage(round_, states)
        self.most = max(self.most, bytes_below(self._staging.log.directory))
        self.largest = max(self.largest, round_.bytes)

    async def reclaim(self, checkpoint: Checkpoint) -> None:
        await self._staging.reclaim(checkpoint)

    async def close(self) -> None:
        await self._staging.close()


async def eventually(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110 - the session has nobody to tell
        await asyncio.sleep(0.01)


@pytest.mark.spark
async def test_a_slow_consumer_bounds_what_is_on_disk(spark: SparkSession, tmp_path: Path) -> None:
    """Row 98 of the table: it takes a checkpoint only when reading has stopped, at the limit."""
    from penstock.shuffle.log import Log, SliceLog
    from penstock.shuffle.slice import Slice

    spec, count = collection("bench/slow", by="lot"), 8
    stock = Stock(documents=count * 40, lots=count, parts=count, note_bytes=4096)
    bindings, routing = ad_hoc_bindings(spec), split_shards(2)
    async with Stage.opened(tmp_path) as here:
        written, stored = Sums(), 0
        name = JournalName.of(spec.name, {"lot": 0})
        await here.schemas.put(spec.write_schema)
        await here.journals.create_all({name: creation(name)})
        for ids in stock.pieces("lot"):
            fragment, sums = write(here, spec, name, stock, ids)
            ack = AckRecord(producer=PRODUCER, clock=Clock(START + ids.stop - 1))
            await here.journals.append(str(name), [fragment, ack])
            written, stored = written + sums, stored + fragment.bytes
        limit = stored // 4
        log = await Log.open(spark, tmp_path / "log", epoch=1, shards=2)
        watched = Watched(SliceLog(log, Slice(spark, here.planner, bindings, routing)))
        session = await Session.open(
            here.planner,
            bindings,
            routing=routing,
            log=watched,
            options=Options(disk_limit=limit, read_ahead=True),
            now=now,
        )
        try:
            found, checkpoints = Sums(), 0
            while found != written:
                rest = stored * (1 - found.documents / stock.documents)
                kept = session._state._pressure
                await eventually(lambda: kept.engaged or kept.bytes >= rest)  # noqa: B023
                checkpoint = await session.next_checkpoint()
                async with log.scan(checkpoint.deliveries) as frame:
                    found += await asyncio.to_thread(read_to_the_end, frame, "d0")
                session.consumed(checkpoint)
                checkpoints += 1
        finally:
            await session.close()
    assert limit < watched.most <= 1.5 * limit + watched.largest
    assert checkpoints >= 3


async def test_what_the_driver_holds_does_not_depend_on_the_number_of_rows(tmp_path: Path) -> None:
    held = []
    for rows in (10, 100_000):
        spec = collection(f"bench/rows{rows}", by="part")
        async with Stage.opened(tmp_path) as here:
            await Unwritten(journals=3, transactions=50, rows=rows, at_once=5).append(here, spec)
            session = await Session.open(
                here.planner, ad_hoc_bindings(spec), routing=split_shards(2), now=now
            )
            try:
                checkpoint = await session.next_checkpoint()
                held.append(objects_of(session._state, session.states, checkpoint))
            finally:
                await session.close()
        assert checkpoint.documents == 150 * rows
    few, many = held
    assert abs(many - few) <= 10, "but for what a task of the event loop happens to hold"
    assert few > 150


def objects_of(*roots: object) -> int:
    """How many containers hang on these, and thus on nothing that is shared by all."""
    shared = (type, ModuleType, FunctionType, MethodType)
    seen: dict[int, object] = {}
    below: list[object] = list(roots)
    while below:
        each = below.pop()
        held = isinstance(each, (Struct, tuple)) or gc.is_tracked(each)
        if id(each) not in seen and held and not isinstance(each, shared):
            seen[id(each)] = each
            below += structs.astuple(each) if isinstance(each, Struct) else gc.get_referents(each)
    return len(seen)
