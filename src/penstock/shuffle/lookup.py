"""SPARK: where a span begins, found among more rows than a leader should look at.

One case of sequencing needs rows: a run that repeats what was committed and goes on beyond it. The
answer is one number, and Spark finds it without moving a document: it reads two columns of one
object, and knows the place of each row in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from penstock.errors import Bug
from penstock.journal.blobs import spark_root
from penstock.journal.committed import VisibleRows
from penstock.journal.frames import frame_schema
from penstock.journal.rows import stamp_names
from penstock.journal.scan import Trusted, check_trusted, parquet_frame
from penstock.journal.state import Blob
from penstock.scope import spark_scope

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.journal.planning import Planner
    from penstock.model.columns import Column
    from penstock.shuffle.session import Lookup
    from penstock.shuffle.state import NeedRows


def spark_lookup(spark: Callable[[], SparkSession], planner: Planner) -> Lookup:
    """A session's `lookup` by Spark, where `spark_root` reaches the objects."""

    async def look(need: NeedRows) -> int:
        rows = VisibleRows(fragment=need.fragment, run=need.run, clock_gt=need.clock_gt)
        state = await planner.journals.load(need.journal)
        (rows,) = (await planner.resolve_rows(need.journal, [rows], state)).visible
        layout = await planner.schemas.layout(rows.fragment.schema)

        def first() -> int:
            session, group = spark(), f"lookup/{need.journal}"
            context = session.sparkContext
            with spark_scope(context, group=group, description=f"rows of {need.journal}"):
                return _first(session, planner, need.journal, rows, layout)

        return await asyncio.to_thread(first)

    return look


def _first(
    spark: SparkSession, planner: Planner, journal: str, rows: VisibleRows, layout: Column
) -> int:
    """The journal's offset of the first row of a run that is above a clock."""
    at, run = rows.fragment.at, rows.run
    if not isinstance(at, Blob):
        raise Bug(f"a run of {run.rows} rows is not in an object")
    check_trusted(planner.blobs, [Trusted(at, journal, rows.fragment.begin, rows.fragment.end)])
    names = stamp_names(layout)
    first, last = at.row + run.first_offset, at.row + run.last_offset
    place = f.col("_metadata.row_index")
    found = (
        parquet_frame(spark, spark_root(planner.blobs), [at.path], frame_schema(layout))
        .where(f.col(names.producer) == f.lit(int(run.producer)))
        .where(f.col(names.clock) > f.lit(int(rows.clock_gt)))
        .where(place.between(first, last))
        .agg(f.min(place))
        .first()
    )
    if found is None or found[0] is None:
        raise Bug(f"no row of a run is above clock {rows.clock_gt:#x}", where=at.path)
    offset: int = rows.fragment.begin + found[0] - at.row
    return offset
