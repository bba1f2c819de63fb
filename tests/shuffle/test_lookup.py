"""Where a span begins, asked of Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from journal.publishing import batch, world
from penstock.journal.fragments import FragmentLayout, FragmentWriter
from penstock.journal.names import JournalName
from penstock.journal.planning import Planner
from penstock.journal.rows import stamp_rows
from penstock.journal.state import Blob, Fragment
from penstock.model.clock import Clock, Flag, Producer
from penstock.shuffle.lookup import spark_lookup
from penstock.shuffle.state import NeedRows
from shuffle.following import PAYMENTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P1, P2 = Producer(0x010000000001), Producer(0x010000000002)
START = 1_000_000


@pytest.mark.spark
async def test_the_first_new_row_is_found_where_the_journal_has_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    name = JournalName.of(PAYMENTS.name, {})
    layout = FragmentLayout.of(PAYMENTS)
    clocks = [(P1, 10), (P2, 50), (P1, 20), (P2, 60), (P1, 40), (P1, 45), (P2, 70)]
    rows = [
        stamp_rows(
            batch([{"id": clock, "region": None, "text": "x"}], PAYMENTS),
            layout.root,
            producer=producer,
            first_clock=Clock(START + clock),
            flags=Flag.CONTINUE_TXN,
        )
        for producer, clock in clocks
    ]
    async with world(tmp_path) as here:
        await here.schemas.put(PAYMENTS.write_schema)
        await here.journals.create(name)
        for _ in range(2):  # so that the one that is asked about does not begin at offset 0
            with FragmentWriter(here.blobs, PAYMENTS.name, layout, "a", inline=False) as writer:
                for row in rows:
                    writer.write(row)
                fragment = writer.finish()
            assert fragment is not None
            await here.journals.append(str(name), [fragment])
        planner = Planner(journals=here.journals, blobs=here.blobs, schemas=here.schemas)
        lookup = spark_lookup(lambda: spark, planner)
        second = (await here.journals.load(str(name))).records[1]
        assert isinstance(second, Fragment)
        assert isinstance(second.at, Blob)
        run = next(run for run in second.runs if run.producer == P1)
        need = NeedRows(journal=str(name), fragment=second, run=run, clock_gt=Clock(START + 20))
        assert await lookup(need) == second.begin + 4
