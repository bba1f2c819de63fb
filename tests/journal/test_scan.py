"""Scans on Spark: what is committed, whichever way an object has to be read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from journal.publishing import ORDERS, SCHEMA, World, batch, collection, world
from penstock.errors import UserError
from penstock.journal import fragments
from penstock.journal.committed import CommitReader, VisibleRows
from penstock.journal.planning import ScannedJournal
from penstock.journal.publisher import Mapped
from penstock.journal.rows import stamp_rows
from penstock.journal.scan import (
    INTERVALS_MAX,
    SMALL_BYTES,
    SMALL_MAX,
    NativeScan,
    ScanPlan,
    plan_scan,
    read_collection,
)
from penstock.journal.schemas import layout
from penstock.journal.sealing import seal
from penstock.journal.selector import LabelSelector
from penstock.journal.splits import WholeRows, piece_rows
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
from penstock.journal.upkeep import CompactionOptions, Rewrite, _rewrite, compact_all
from penstock.model.clock import NEVER, Clock, Flag, Producer
from penstock.model.runs import Run
from penstock.model.spec import CollectionSpec, Frozen

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ONE, TWO = (Producer(Producer.MULTICAST | n) for n in (1, 2))
EAGER = CompactionOptions(inputs_min=2)

# --------------------------------------------------------------------------------------- planning


def run(producer: Producer, clocks: Sequence[int], first: int = 0) -> Run:
    return Run(
        producer=producer,
        kind=Flag.CONTINUE_TXN,
        first_offset=first,
        last_offset=first + len(clocks) - 1,
        rows=len(clocks),
        clock_min=Clock(min(clocks)),
        clock_max=Clock(max(clocks)),
        clock_max_offset=first + list(clocks).index(max(clocks)),
        increasing=all(a < b for a, b in pairwise(clocks)),
    )


def fragment(path: str | None, producer: Producer, *clocks: int, row: int = 0) -> Fragment:
    return Fragment(
        rows=len(clocks),
        bytes=100,
        at=Inline(data=b"") if path is None else Blob(path=path, row=row),
        schema="s",
        runs=(run(producer, clocks),),
        key_hash_min=0,
        key_hash_max=0,
    )


def ack(producer: Producer, clock: int) -> AckRecord:
    return AckRecord(producer=producer, clock=Clock(clock))


def scanned(*records: Record, name: str = "j") -> ScannedJournal:
    create = Create(collection="c", labels=(), key_begin=0, key_end=0xFFFFFFFF)
    state = apply(apply(JournalState(), create, 1), Append(records=records), 2)
    committed = CommitReader(name)
    visible = tuple(rows for record in state.records for rows in committed.read(record))
    return ScannedJournal(name=name, records=state.records, visible=visible)


def told(plan: ScanPlan) -> tuple[NativeScan, int]:
    """What Spark's reader gets, and how many rows are left for Arrow."""
    return plan.native.get("s", NativeScan()), sum(map(piece_rows, plan.rest))


P1, P2 = int(ONE), int(TWO)


@pytest.mark.parametrize(
    ("records", "native", "rest"),
    [
        pytest.param(
            [fragment("a", ONE, 10, 11), ack(ONE, 12)],
            NativeScan(whole=("a",)),
            0,
            id="clean: Spark reads it as it is",
        ),
        pytest.param([fragment("a", ONE, 10, 11)], NativeScan(), 0, id="uncommitted: not at all"),
        pytest.param(
            [fragment(None, ONE, 10, 11), ack(ONE, 12)], NativeScan(), 2, id="inline: by Arrow"
        ),
        pytest.param(
            [fragment("a", ONE, 10, 11, 11, 12), ack(ONE, 13)],
            NativeScan(),
            4,
            id="it repeats itself: by Arrow",
        ),
        pytest.param(
            [fragment("a", ONE, 10, 11), fragment("a", TWO, 10, row=2), ack(ONE, 12)],
            NativeScan(partly=("a",), shown={P1: [(10, 11)]}),
            0,
            id="a span is open beside one that is not: a filter",
        ),
        pytest.param(
            [fragment("a", ONE, 10, 11), ack(ONE, 12), fragment("b", ONE, 11, 13), ack(ONE, 14)],
            NativeScan(whole=("a",), partly=("b",), shown={P1: [(13, 13)]}),
            0,
            id="what came before comes again: a filter",
        ),
        pytest.param(
            [
                fragment("a", ONE, 10, 11),
                ack(ONE, 12),
                fragment("a", ONE, 10, 11, row=2),
                ack(ONE, 13),
            ],
            NativeScan(),
            2,
            id="both in one object: clocks do not tell them apart",
        ),
        pytest.param(
            [fragment("a", ONE, 10, 11, row=5), ack(ONE, 12)],
            NativeScan(),
            2,
            id="the object has rows that no record knows of",
        ),
    ],
)
def test_how_an_object_is_read(records: list[Record], native: NativeScan, rest: int) -> None:
    assert told(plan_scan([scanned(*records)])) == (native, rest)


def test_a_row_hidden_in_one_object_and_shown_in_another_takes_the_first_off_the_filter() -> None:
    """One filter serves all partly visible objects, and it knows no objects."""
    here = scanned(fragment("a", ONE, 10), fragment("a", TWO, 90, row=1), ack(ONE, 12))
    there = scanned(fragment("b", ONE, 10), fragment("b", TWO, 80, row=1), ack(TWO, 81), name="k")
    native, rest = told(plan_scan([here, there]))
    assert native == NativeScan(partly=("a",), shown={P1: [(10, 10)]})
    assert rest == 1


def test_many_small_objects_are_read_by_arrow_and_large_ones_never() -> None:
    small = [
        scanned(fragment(f"s{n}", ONE, 10 * n, 10 * n + 1), ack(ONE, 10 * n + 2), name=f"j{n}")
        for n in range(1, SMALL_MAX + 2)
    ]
    few, many = plan_scan(small[1:]), plan_scan(small)
    assert len(few.native["s"].whole) == SMALL_MAX
    assert told(many) == (NativeScan(), 2 * (SMALL_MAX + 1))
    large = structs.replace(fragment("l", ONE, 5, 6), bytes=SMALL_BYTES)
    plan = plan_scan([*small, scanned(large, ack(ONE, 7), name="l")])
    assert told(plan) == (NativeScan(whole=("l",)), 2 * (SMALL_MAX + 1))


def test_a_store_that_spark_does_not_know_is_read_by_arrow() -> None:
    plan = plan_scan([scanned(fragment("a", ONE, 10, 11), ack(ONE, 12))], native=False)
    assert told(plan) == (NativeScan(), 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ONE, TWO]),
            st.lists(st.integers(10, 25), min_size=1, max_size=4),
            st.booleans(),
            st.sampled_from("abc"),
        ),
        max_size=8,
    )
)
def test_every_visible_row_is_read_once_and_no_other(
    appends: list[tuple[Producer, list[int], bool, str]],
) -> None:
    """Compared row by row with what the records say, for any mess in any object."""
    records: list[Record] = []
    rows: dict[str, list[tuple[int, int]]] = {}
    last: dict[Producer, int] = {}
    for producer, clocks, acked, path in appends:
        at = rows.setdefault(path, [])
        records.append(fragment(path, producer, *clocks, row=len(at)))
        at += [(int(producer), clock) for clock in clocks]
        last[producer] = max(last.get(producer, 0), *clocks)
        if acked:
            records.append(ack(producer, last[producer] + 1))
            last[producer] += 1
    journal = scanned(*records)
    want = sorted(row for visible in journal.visible for row in shown_rows(visible, rows))
    plan = plan_scan([journal])
    native = plan.native.get("s", NativeScan())
    got = [row for path in native.whole for row in rows[path]]
    for path in native.partly:
        got += [
            (producer, clock)
            for producer, clock in rows[path]
            if any(low <= clock <= high for low, high in native.shown.get(producer, []))
        ]
    for piece in plan.rest:
        if isinstance(piece, WholeRows):
            assert isinstance(piece.at, Blob)
            got += rows[piece.at.path][piece.at.row : piece.at.row + piece.rows]
        else:
            got += shown_rows(piece, rows)
    assert sorted(got) == want


@given(
    st.lists(
        st.tuples(
            st.sampled_from((ONE, TWO)),
            st.lists(st.integers(2, 40), min_size=1, max_size=3, unique=True).map(sorted),
            st.sampled_from("abc"),
            st.integers(0, 3),
        ),
        max_size=9,
    )
)
def test_every_row_of_a_plan_has_the_level_of_what_committed_it(
    appends: list[tuple[Producer, list[int], str, int]],
) -> None:
    """By an expression over stamps, or by piece; rows that came twice are for pieces."""
    fragments: list[Fragment] = []
    rows: dict[str, list[tuple[int, int]]] = {}
    for producer, clocks, path, _ in appends:
        at = rows.setdefault(path, [])
        fragments.append(fragment(path, producer, *clocks, row=len(at)))
        at += [(int(producer), clock) for clock in clocks]
    records = scanned(*fragments).records
    visible = tuple(
        VisibleRows(fragment=record, run=record.runs[0], clock_gt=NEVER, level=Clock(100 * level))
        for record, (*_, level) in zip(records, appends, strict=True)
        if isinstance(record, Fragment)
    )
    want = sorted(
        (producer, clock, int(each.level))
        for each in visible
        for producer, clock in shown_rows(each, rows)
    )
    plan = plan_scan([ScannedJournal(name="j", records=records, visible=visible)])
    native = plan.native.get("s", NativeScan())
    assert not native.partly
    got = [(*row, 0) for path in native.whole for row in rows[path]]
    for late in native.late:
        assert any(level for *_, level in late.steps)
        for row in (row for path in late.paths for row in rows[path]):
            *_, level = next(step for step in reversed(late.steps) if step[:2] <= row)
            got.append((*row, level))
    for piece in plan.rest:
        if isinstance(piece, WholeRows):
            assert isinstance(piece.at, Blob)
            some = rows[piece.at.path][piece.at.row : piece.at.row + piece.rows]
            runs = piece.levels or ((piece.rows, 0),)
            levels = [level for count, level in runs for _ in range(count)]
            got += [(*row, level) for row, level in zip(some, levels, strict=True)]
        else:
            got += [(*row, int(piece.level)) for row in shown_rows(piece, rows)]
    assert sorted(got) == want


def test_levels_of_many_commits_are_several_expressions() -> None:
    many = [
        structs.replace(fragment(f"o{n}", Producer(Producer.MULTICAST | n), 2), bytes=SMALL_BYTES)
        for n in range(2 * INTERVALS_MAX)
    ]
    records = scanned(*many).records
    for levels, scans in ((1, 1), (2, 2)):
        visible = tuple(
            VisibleRows(
                fragment=each, run=each.runs[0], clock_gt=NEVER, level=Clock(9 + n % levels)
            )
            for n, each in enumerate(records)
            if isinstance(each, Fragment)
        )
        plan = plan_scan([ScannedJournal(name="j", records=records, visible=visible)])
        assert not plan.rest
        assert len(plan.native["s"].late) == scans
        assert sum(len(late.paths) for late in plan.native["s"].late) == 2 * INTERVALS_MAX


def shown_rows(visible: Any, rows: dict[str, list[tuple[int, int]]]) -> list[tuple[int, int]]:  # noqa: ANN401
    at = visible.fragment.at
    begin = at.row + visible.run.first_offset
    above, shown = int(visible.clock_gt), []
    for producer, clock in rows[at.path][begin : begin + visible.run.rows]:
        if clock > above:
            shown.append((producer, clock))
            above = clock if visible.running_max else above
    return shown


# ----------------------------------------------------------------------------------------- frames


async def publish(
    here: World, numbers: Sequence[int], spec: CollectionSpec = ORDERS, *, commit: bool = True
) -> None:
    publisher = here.publisher(Mapped(spec=spec))
    documents = [
        {
            "id": n,
            "region": "eu" if n % 2 else "us",
            "text": os.urandom(4096).hex() if n % 3 == 0 else f"t{n}",
        }
        for n in numbers
    ]
    await publisher.publish(0, batch(documents, spec))
    await (publisher.commit_now() if commit else publisher.flush())


async def scan(
    spark: SparkSession,
    here: World,
    spec: CollectionSpec = ORDERS,
    **options: Any,  # noqa: ANN401 - those of read_collection
) -> DataFrame:
    return await read_collection(spark, here.journals, here.blobs, here.schemas, spec, **options)


def rows_of(frame: DataFrame) -> list[tuple[object, ...]]:
    return sorted(tuple(row) for row in frame.collect())


async def documents(here: World, name: str = "acme/orders") -> list[tuple[object, ...]]:
    found = [d for part in (await here.read(name)).values() for d in part]
    return sorted((d["id"], d["region"], d["text"]) for d in found)


@pytest.mark.spark
def test_a_scan_shows_what_reading_shows_however_rows_are_stored(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def story() -> None:
        async with world(tmp_path / "a [b] %20 c") as here:
            for n in range(0, 40, 10):
                await publish(here, range(n, n + 10))  # objects, wholly visible
            await publish(here, range(1000, 1010), commit=False)
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            await publish(here, [41, 43])  # inline
            await publish(here, range(60, 70))
            await repeat(here)
            frame = await scan(spark, here, columns=["id", "region", "text"])
            assert rows_of(frame) == await documents(here)
            assert frame.count() == 40 + 2 + 10 + 3
            eu = await scan(
                spark, here, selector=LabelSelector.parse("region=eu"), columns=["id"], meta=True
            )
            assert eu.columns == ["id", "_clock", "_producer", "_flags"]
            assert eu.where("id < 40").count() == 20
            nothing = await scan(spark, here, columns=[])
            assert (nothing.columns, nothing.count()) == ([], frame.count())
            with pytest.raises(UserError, match="no column name"):
                await scan(spark, here, columns=["name"])

    asyncio.run(story())


async def repeat(here: World) -> None:
    """Rows 2, 1, 2, 3 of a producer, as no writer of ours would put them into one fragment."""
    from penstock.journal.fragments import FragmentLayout
    from support.fragments import write_fragment

    spec = ORDERS
    root = layout(spec.write_schema.text)
    made = [{"id": 900 + n, "region": "eu", "text": os.urandom(9000).hex()} for n in (0, 1, 2)]
    first = batch(made)
    parts = [
        stamp_rows(
            part, root, producer=ONE, first_clock=Clock(10_000 + at), flags=Flag.CONTINUE_TXN
        )
        for part, at in ((first.slice(0, 2), 0), (first.slice(0, 1), 0), (first.slice(1, 2), 1))
    ]
    prefix = "acme/orders/region=eu"
    written = write_fragment(here.blobs, prefix, FragmentLayout.of(spec), parts, "test")
    assert written is not None
    await here.journals.append(f"{prefix}/pivot=00", [written, ack(ONE, 10_100)])


@pytest.mark.spark
def test_documents_of_an_older_schema_are_read_under_the_new_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    wider = {
        **SCHEMA,
        "properties": {
            **SCHEMA["properties"],  # type: ignore[dict-item]
            "id": {"type": "number"},
            "note": {"type": "string"},
        },
    }
    now = replace(ORDERS, write_schema=Frozen(wider), read_schema=Frozen(wider))

    async def story() -> None:
        async with world(tmp_path) as here:
            await publish(here, range(6))
            await publish(here, range(6, 12), now)
            frame = await scan(spark, here, now, columns=["id", "note"])
            assert dict(frame.dtypes) == {"id": "double", "note": "string"}
            assert rows_of(frame) == [(float(n), None) for n in range(12)]

    asyncio.run(story())


@pytest.mark.spark
def test_a_collection_without_documents_is_an_empty_frame(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def story() -> None:
        async with world(tmp_path) as here:
            frame = await scan(spark, here, collection("acme/none"))
            assert frame.columns[:3] == ["id", "region", "text"]
            assert frame.count() == 0

    asyncio.run(story())


@pytest.mark.spark
def test_planning_starts_no_job_and_a_scan_is_one_of_all_objects(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of more objects than Spark would list without a job, by default."""

    async def story() -> None:
        async with world(tmp_path) as here:
            for n in range(0, 150, 6):
                await publish(here, range(n, n + 6))
            tracker = spark.sparkContext.statusTracker()
            before = set(tracker.getJobIdsForGroup())
            frame = await scan(spark, here, columns=["id"])
            assert set(tracker.getJobIdsForGroup()) == before
            plan = frame._jdf.queryExecution().executedPlan().toString()
            assert plan.count("FileScan parquet") == 1
            assert frame.count() == 150
            monkeypatch.setattr("penstock.journal.scan.SMALL_MAX", 1)  # objects are for tasks
            monkeypatch.setattr("penstock.journal.scan.LOCAL_PIECES_MAX", 1)
            for columns in (["id"], ["text", "id"], []):
                apart = await scan(spark, here, columns=columns)
                assert "MapInArrow" in apart._jdf.queryExecution().executedPlan().toString()
                assert (apart.columns, apart.count()) == (columns, 150)

    asyncio.run(story())


def test_compaction_keeps_objects_whole() -> None:
    """What was clean in pieces is clean in one object."""
    parts = [fragment(name, ONE, n) for n, name in enumerate("abc", start=10)]
    create = Create(collection="c", labels=(), key_begin=0, key_end=0xFFFFFFFF)
    state = apply(apply(JournalState(), create, 1), Append(records=(*parts, ack(ONE, 20))), 2)
    state = apply(state, Compact(begin=0, end=3, path="d", bytes=9), 3)
    committed = CommitReader("j")
    visible = tuple(rows for record in state.records for rows in committed.read(record))
    plan = plan_scan([ScannedJournal(name="j", records=state.records, visible=visible)])
    assert told(plan) == (NativeScan(whole=("d",)), 0)


@pytest.mark.spark
@pytest.mark.parametrize("digests", [True, False], ids=["with digests", "of an older release"])
def test_rows_that_compaction_has_moved_out_of_an_object_are_not_read_from_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: bool
) -> None:
    """A page names the first rows of an object; the others were moved on, and are still in it."""
    if not digests:
        monkeypatch.setattr(fragments, "Blob", lambda path, digest: Blob(path=path))

    async def story() -> None:
        async with world(tmp_path) as here:
            spec = collection(partitioned=False)
            journal = "acme/orders/pivot=00"

            async def compact() -> None:
                await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)

            for n in range(0, 60, 10):
                await publish(here, range(n, n + 10), spec)
            await compact()
            records = (await here.journals.load(journal)).records
            await seal(here.journals, here.blobs, journal, records[: len(records) // 2])
            for n in range(60, 100, 10):
                await publish(here, range(n, n + 10), spec)
            state = await here.journals.load(journal)
            rest = [record for record in state.records if isinstance(record, Fragment)]
            whole = Rewrite(fragments=tuple(rest))  # as releases before this one did
            root = layout(spec.write_schema.text)
            await _rewrite(here.journals, here.blobs, journal, whole, root, "ZSTANDARD")
            frame = await scan(spark, here, spec, columns=["id"])
            assert [row["id"] for row in frame.orderBy("id").collect()] == list(range(100))

    asyncio.run(story())
