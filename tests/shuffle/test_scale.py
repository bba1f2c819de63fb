"""What a session and its slice take does not grow with what it should not grow with."""

from __future__ import annotations

import gc
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

import pytest
from msgspec import Struct, structs

from penstock.shuffle.binding import ad_hoc_bindings
from penstock.shuffle.session import Session
from penstock.wall_clock import now
from penstock_bench.shuffle import CountedBlobs, Reader, Sequencer, Unwritten
from penstock_bench.stock import (
    Stage,
    Stock,
    Sums,
    collection,
    fill,
    read_to_the_end,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


async def test_what_the_driver_holds_does_not_depend_on_the_number_of_rows(tmp_path: Path) -> None:
    held = []
    for rows in (10, 100_000):
        spec = collection(f"bench/rows{rows}", by="part")
        async with Stage.opened(tmp_path) as here:
            await Unwritten(journals=3, transactions=50, rows=rows, at_once=5).append(here, spec)
            session = await Session.open(here.planner, ad_hoc_bindings(spec), now=now)
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
