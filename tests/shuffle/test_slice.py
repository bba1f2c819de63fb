"""Slices: the documents of deliveries, at their shards and in order, however they are stored."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from pyspark.errors import PySparkException

from journal.publishing import ORDERS, SCHEMA, World, batch, collection, world
from penstock.errors import Bug
from penstock.journal import scan
from penstock.journal.committed import CommitReader
from penstock.journal.fragments import FragmentLayout, FragmentWriter
from penstock.journal.publisher import Mapped
from penstock.journal.rows import META, UUID, stamp_rows, to_lines
from penstock.journal.schemas import layout
from penstock.journal.state import AckRecord, Fragment, Inline, JournalState
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.model.clock import NEVER, Clock, DocumentId, Flag, Producer, duration, from_unix
from penstock.model.keys import key_hash, pack
from penstock.model.routing import Routing, Shard, split_shards
from penstock.model.sequence import Bounds
from penstock.model.spec import CollectionSpec, Frozen
from penstock.native.arrow import to_json
from penstock.shuffle.binding import Binding, with_cohorts
from penstock.shuffle.delivery import Delivery
from penstock.shuffle.order import Order, arranged
from penstock.shuffle.rounds import RoundLimits
from penstock.shuffle.slice import ROUTED, Slice
from shuffle.following import binding, planner, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ONE, TWO, THREE = (Producer(Producer.MULTICAST | n) for n in (1, 2, 3))
START = from_unix(1_600_000_000)
EAGER = CompactionOptions(inputs_min=2)
EU = "acme/orders/region=eu/pivot=00"

# ---------------------------------------------------------------------------------------- writing


class Row(NamedTuple):
    """A row as nobody but a test would write it."""

    producer: Producer
    clock: int
    """Counted from `START`."""
    id: int
    flags: Flag = Flag.CONTINUE_TXN


def document(number: int) -> dict[str, Any]:
    return {"id": number, "region": "eu" if number % 2 else "us", "text": f"t{number}"}


async def publish(
    here: World, numbers: Iterable[int], spec: CollectionSpec = ORDERS, *, commit: bool = True
) -> None:
    publisher = here.publisher(Mapped(spec=spec))
    await publisher.publish(0, batch([document(n) for n in numbers], spec))
    await (publisher.commit_now() if commit else publisher.flush())


def fragment(
    here: World, rows: Sequence[Row], *, inline: bool = False, spec: CollectionSpec = ORDERS
) -> Fragment:
    root = layout(spec.write_schema.text)
    prefix = EU.rpartition("/")[0]
    with FragmentWriter(here.blobs, prefix, FragmentLayout.of(spec), "t", inline=inline) as writer:
        for row in rows:
            one = batch([{**document(row.id), "region": "eu"}], spec)
            clock = Clock(START + row.clock)
            writer.write(
                stamp_rows(one, root, producer=row.producer, first_clock=clock, flags=row.flags)
            )
        written = writer.finish()
    assert written is not None
    return written


def ack(producer: Producer, clock: int) -> AckRecord:
    return AckRecord(producer=producer, clock=Clock(START + clock))


# ---------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    deliveries: tuple[Delivery, ...]
    states: dict[str, JournalState]


async def delivered(
    here: World,
    bound: Binding,
    before: dict[str, JournalState] | None = None,
    *,
    leveled: bool = False,
) -> Delivered:
    """All that was committed since some states, as a session would deliver it.

    If it is `leveled`, after something that was ahead of the time.
    """
    found: list[Delivery] = []
    states: dict[str, JournalState] = {}
    for journal in await here.journals.list(bound.collection.name):
        states[journal.name] = journal.state
        past = before[journal.name].end if before and journal.name in before else 0
        committed = CommitReader(journal.name)
        for record in await planner(here).records(journal.state):
            visible = committed.read(record)
            if visible and record.begin >= past and bound.reads(journal.name):
                last = max(rows.run.clock_max for rows in visible)
                found.append(
                    Delivery(
                        journal=journal.name,
                        binding=bound.index,
                        producer=visible[0].run.producer,
                        commit=record.clock if isinstance(record, AckRecord) else last,
                        rows=tuple(visible),
                        bytes=sum(rows.fragment.bytes for rows in visible),
                        level=Clock(START + 10_000 + record.revision) if leveled else NEVER,
                    )
                )
    return Delivered(deliveries=tuple(found), states=states)


class Seen(NamedTuple):
    """A committed document: when, by whom, what."""

    clock: int
    producer: int
    text: str


async def oracle(here: World, name: str = "acme/orders") -> list[Seen]:
    """What `penstock read` shows, by its JSON."""
    found = []
    async for rows in here.reader(name).read():
        for line in to_lines(rows.batch, rows.root, uuid=True):
            read = json.loads(line)
            stamp = DocumentId.parse(read.pop(META)[UUID])
            found.append(Seen(stamp.clock, stamp.producer, json.dumps(read, sort_keys=True)))
    return sorted(found)


def seen(frame: DataFrame, spec: CollectionSpec = ORDERS) -> list[Seen]:
    """The rows of a frame with all columns, likewise."""
    root = layout(spec.read_schema.text)
    found = []
    for rows in frame.toArrow().to_batches():
        clock, producer, _ = (column.to_pylist() for column in rows.columns[-3:])
        texts = (json.dumps(json.loads(line), sort_keys=True) for line in to_json(rows, root))
        found += map(Seen, clock, producer, texts)
    return sorted(found)


async def mess(here: World) -> None:
    """Everything that can be the matter with rows of a journal, in one collection."""
    await publish(here, range(40))  # inline
    await publish(here, range(40, 50), commit=False)  # for ever open
    await here.journals.append(
        EU,
        [
            fragment(here, [Row(ONE, 10, 101), Row(TWO, 10, 102), Row(ONE, 11, 103)]),
            ack(ONE, 12),  # which leaves TWO open beside it
            fragment(here, [Row(ONE, 20, 901), Row(ONE, 21, 902)]),
            ack(ONE, 12),  # rolls back
            fragment(here, [Row(ONE, 30, 104), Row(ONE, 31, 105)]),
            fragment(here, [Row(ONE, 31, 105), Row(ONE, 32, 106)]),  # comes again, and goes on
            ack(ONE, 33),
            fragment(here, [Row(ONE, c, 100 + c) for c in (41, 40, 41, 42, 42)]),  # on its own
            ack(ONE, 43),
            fragment(here, [Row(ONE, 50, 150, Flag.OUTSIDE_TXN), Row(TWO, 51, 151)], inline=True),
        ],
    )


def slice_of(
    spark: SparkSession, here: World, *bindings: Binding, routing: Routing | None = None
) -> Slice:
    return Slice(spark, planner(here), bindings, routing or split_shards(1))


# ----------------------------------------------------------------------------------------- frames


def test_a_frame_has_what_is_committed_however_it_is_stored(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Rollbacks, duplicates, runs that repeat themselves, several producers, before and after
    compaction, which comes between sequencing and reading."""

    async def story() -> None:
        async with world(tmp_path) as here:
            await mess(here)
            bound = binding(0, ORDERS)
            made = await delivered(here, bound)
            of = slice_of(spark, here, bound)
            want = await oracle(here)
            assert {json.loads(one.text)["id"] for one in want if one.producer == ONE} == {
                *(101, 103, 104, 105, 106, 141, 142, 150)
            }
            assert seen(await of.frame(bound, made.deliveries, made.states)) == want
            await here.journals.append(EU, [ack(TWO, 60)])
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            now = await delivered(here, bound, made.states)
            assert len(now.deliveries) == 1
            assert seen(await of.frame(bound, made.deliveries, now.states)) == want
            late = await of.frame(bound, now.deliveries, now.states)
            assert [json.loads(one.text)["id"] for one in seen(late)] == [102, 151]
            assert sorted([*want, *seen(late)]) == await oracle(here)

    asyncio.run(story())


def test_rows_can_be_read_after_the_journal_has_forgotten_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def story() -> None:
        async with world(tmp_path) as here:
            await mess(here)
            await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            bound = binding(0, ORDERS)
            made = await delivered(here, bound)
            want = await oracle(here)
            of = slice_of(spark, here, bound)
            cut = made.states[EU].records[-3].begin
            states = {EU: await here.journals.retain(EU, cut)}  # and the others were dropped
            assert seen(await of.frame(bound, made.deliveries, states)) == want

    asyncio.run(story())


def test_columns_and_bounds_limit_what_is_read(spark: SparkSession, tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path) as here:
            await mess(here)
            bounds = Bounds(not_before=Clock(START + 11), not_after=Clock(START + 41))
            bound = replace(binding(0, ORDERS), bounds=bounds, columns=("text",))
            made = await delivered(here, bound)
            of = slice_of(spark, here, bound)
            frame = await of.frame(bound, made.deliveries, made.states)
            assert frame.columns == ["text", "id", "_clock", "_producer", "_flags"]
            found = {row.id: row for row in frame.collect()}
            assert found.keys() == {103, 104, 105, 106}
            assert found[103].text == "t103"
            none = Bounds(not_before=Clock(START + 70), not_after=Clock(START + 80))
            bound = replace(bound, bounds=none)
            assert not (await of.frame(bound, made.deliveries, made.states)).head(1)

    asyncio.run(story())


def test_partitions_and_schemas_are_read_in_one_scan(spark: SparkSession, tmp_path: Path) -> None:
    properties: dict[str, Any] = SCHEMA["properties"]  # type: ignore[assignment]
    wider = {**SCHEMA, "properties": {**properties, "note": {"type": "string"}}}
    now = replace(ORDERS, write_schema=Frozen(wider), read_schema=Frozen(wider))

    async def story() -> None:
        async with world(tmp_path) as here:
            await publish(here, range(6))
            await here.journals.append(EU, [fragment(here, [Row(ONE, 1, 71)]), ack(ONE, 2)])
            await publish(here, range(6, 12), now)
            await here.schemas.put(now.write_schema)
            newer = fragment(here, [Row(ONE, 5, 73), Row(TWO, 5, 75)], spec=now)
            await here.journals.append(EU, [newer, ack(ONE, 6)])
            bound = binding(0, now)
            made = await delivered(here, bound)
            frame = await slice_of(spark, here, bound).frame(bound, made.deliveries, made.states)
            assert seen(frame, now) == await oracle(here)

    asyncio.run(story())


def test_planning_starts_no_job_and_few_inline_rows_need_no_python(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def story() -> None:
        async with world(tmp_path) as here:
            await publish(here, range(100))
            bound = binding(0, ORDERS)
            made = await delivered(here, bound)
            first = made.deliveries[0].rows[0]
            assert isinstance(first.fragment.at, Inline)
            tracker = spark.sparkContext.statusTracker()
            before = set(tracker.getJobIdsForGroup())
            frame = await slice_of(spark, here, bound).shuffled(made.deliveries, made.states)
            assert set(tracker.getJobIdsForGroup()) == before
            plan = frame._jdf.queryExecution().executedPlan().toString()
            assert "LocalTableScan" in plan
            assert "Exchange" not in plan
            assert "Python" not in plan
            assert len(frame.collect()) == 100

    asyncio.run(story())


# --------------------------------------------------------------------------------------- shuffles


def told(frame: DataFrame) -> list[Any]:
    """The rows in the order of partitions, with the partition of each."""
    from pyspark.sql import functions as f

    return frame.select(f.spark_partition_id().alias("at"), "*").collect()


def test_documents_of_a_key_come_in_the_same_order_for_any_number_of_shards(
    spark: SparkSession, tmp_path: Path
) -> None:
    """By clock, then producer; partition and shard are one; and Spark splits and joins none."""

    async def story() -> None:
        async with world(tmp_path) as here:
            await mess(here)
            await publish(here, range(20, 60))  # keys that were there before
            bound = replace(binding(0, ORDERS), columns=("id",))
            made = await delivered(here, bound)
            want: dict[bytes, list[tuple[int, int]]] = {}
            for one in await oracle(here):
                key = pack([json.loads(one.text)["id"]])
                want.setdefault(key, []).append((one.clock, one.producer))
            assert any(len(some) > 1 for some in want.values())
            for count in (1, 2, 8):
                of = slice_of(spark, here, bound, routing=split_shards(count))
                frame = await of.frame(bound, made.deliveries, made.states)
                shuffled = of.exchange([of.routed(frame, bound)])
                assert shuffled.columns == [*ROUTED, "d0"]
                got: dict[bytes, list[tuple[int, int]]] = {}
                order: dict[int, list[tuple[int, int]]] = {}
                for row in told(shuffled):
                    stamp = row["_clock"], row["_producer"]
                    got.setdefault(bytes(row["_key"]), []).append(stamp)
                    order.setdefault(row["at"], []).append(stamp)
                    assert row["at"] == row["_shard"]
                    assert row["_key"] == pack([row["d0"].id])
                    assert row["_key_hash"] == key_hash(bytes(row["_key"]))
                    assert row["_key_hash"] * count >> 32 == row["at"]
                assert got == want
                assert all(some == sorted(some) for some in order.values())
                partitions = shuffled._jdf.queryExecution().toRdd().getNumPartitions()
                assert partitions == count

    asyncio.run(story())


@pytest.mark.parametrize("reader", ["the driver", "Spark"])
def test_documents_come_in_the_order_of_commits_however_they_are_stored(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """Objects of one commit and of many, compacted ones, inline rows; and clocks that fall."""
    if reader == "Spark":
        monkeypatch.setattr(scan, "LOCAL_OBJECTS_MAX", 0)

    async def story() -> None:
        async with world(tmp_path) as here:
            await publish(here, range(2))  # whose clocks are far ahead of all others
            commits = [
                [
                    Row(Producer(Producer.MULTICAST | (50 + n)), at, 100 + 10 * n + at % 10)
                    for at in (range(500 - 10 * n, 503 - 10 * n) if n % 2 else [300 + 10 * n])
                ]
                for n in range(12)
            ]
            for n, rows in enumerate(commits):
                made = fragment(here, rows, inline=n % 4 == 0)
                await here.journals.append(EU, [made, ack(rows[0].producer, 900 + n)])
                if n == 6:
                    await compact_all(here.journals, here.blobs, here.schemas, options=EAGER)
            both = fragment(here, [Row(ONE, 5, 901), Row(THREE, 4, 902), Row(ONE, 6, 903)])
            await here.journals.append(EU, [both])  # of which each part commits by itself
            await here.journals.append(EU, [ack(THREE, 7)])
            await here.journals.append(EU, [ack(ONE, 8)])
            bound = replace(binding(0, ORDERS), columns=("id",))
            made_of = await delivered(here, bound, leveled=True)
            want = [
                *(row.id for rows in commits for row in rows),
                *(902, 901, 903),
            ]
            by_themselves = arranged(made_of.deliveries, delay=0)
            assert by_themselves.order is Order.COMMIT
            of = slice_of(spark, here, bound)
            for deliveries in (made_of.deliveries, by_themselves.deliveries):
                rows = told(await of.shuffled(deliveries, made_of.states))
                found = [row["d0"].id for row in rows if row["_clock"] < START + 10_000]
                assert found == want
                reading = await of.reading(bound, deliveries, made_of.states)
                assert reading.plan.here == (reader == "the driver")
                assert bool(reading.plan.native) == (reader == "Spark")
                assert reading.leveled

    asyncio.run(story())


def test_bindings_come_by_priority_then_adjusted_clock_each_with_its_own_key(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Two bindings of one collection, and one of another that is delayed by two ticks."""

    async def story() -> None:
        async with world(tmp_path) as here:
            await mess(here)
            payments = collection("acme/payments", partitioned=False)
            await publish(here, range(5), payments)
            by_id = replace(binding(0, ORDERS), priority=-1)
            by_text = replace(binding(2, ORDERS), key=("/text", "/id"), read_delay=2)
            other = replace(binding(5, payments), read_delay=duration(3600))
            bindings = (by_id, by_text, other)
            parts = [await delivered(here, each) for each in bindings]
            deliveries = [one for part in parts for one in part.deliveries]
            states = {name: state for part in parts for name, state in part.states.items()}
            of = slice_of(spark, here, *bindings, routing=split_shards(3))
            rows = told(await of.shuffled(deliveries, states))
            documents = dict.fromkeys((0, 2, 5), 0)
            for row in rows:
                index = row["_binding"]
                documents[index] += 1
                bound = next(each for each in bindings if each.index == index)
                key = [row[f"d{index}"][name[1:]] for name in bound.key]
                assert row["_key"] == pack(key)
                assert row["_priority"] == bound.priority
                assert row["_adj_clock"] == row["_clock"] + bound.read_delay
                assert [row[f"d{n}"] is None for n in documents] == [n != index for n in documents]
            everything = len(await oracle(here))
            assert documents == {0: everything, 2: everything, 5: 5}
            for shard in range(3):
                order = [
                    (
                        -row["_priority"],
                        row["_adj_clock"],
                        row["_clock"],
                        row["_producer"],
                        row["_binding"],
                    )
                    for row in rows
                    if row["at"] == shard
                ]
                assert order
                assert order == sorted(order)

    asyncio.run(story())


def test_shards_that_split_clocks_share_a_binding_or_each_have_it_whole(
    spark: SparkSession, tmp_path: Path
) -> None:
    routing = Routing(
        (Shard(id="t/0", r_end=0x7FFFFFFF), Shard(id="t/1", r_begin=0x80000000)),
    )

    async def story() -> None:
        async with world(tmp_path) as here:
            await publish(here, range(60))
            shared = replace(binding(0, ORDERS), filter_r_clocks=True)
            everywhere = binding(1, ORDERS)
            parts = [await delivered(here, each) for each in (shared, everywhere)]
            of = slice_of(spark, here, shared, everywhere, routing=routing)
            rows = told(
                await of.shuffled([d for p in parts for d in p.deliveries], parts[0].states)
            )
            ids: dict[tuple[int, int], set[int]] = {}
            for row in rows:
                found = row[f"d{row['_binding']}"].id
                ids.setdefault((row["_binding"], row["at"]), set()).add(found)
            assert ids[1, 0] == ids[1, 1] == set(range(60))
            assert ids[0, 0] | ids[0, 1] == set(range(60))
            assert not ids[0, 0] & ids[0, 1]
            assert ids[0, 0]
            assert ids[0, 1]

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(4))
def test_each_shard_gets_its_documents_in_the_order_of_commits_whatever_is_tried_again(
    seed: int, spark: SparkSession, tmp_path: Path
) -> None:
    """A backlog through a session, of two lanes, in checkpoints of any size, as one transaction."""
    from pyspark.sql import functions as f

    rng = random.Random(seed)
    shards = rng.choice((1, 2, 5))
    commits = [
        [
            Row(Producer(Producer.MULTICAST | (100 + number)), clock, rng.randrange(12))
            for clock in sorted(rng.sample(range(300), rng.randint(1, 4)))
        ]
        for number in range(14)
    ]
    soon = replace(binding(0, ORDERS), columns=("id",))
    first = replace(binding(1, ORDERS), columns=("id",), priority=3, read_delay=7)
    bindings = with_cohorts([soon, first])
    want = [
        [
            (bound.index, row.clock, int(row.producer), row.id)
            for bound in (first, soon)
            for rows in commits
            for row in rows
            if key_hash(pack([row.id])) * shards >> 32 == shard
        ]
        for shard in range(shards)
    ]

    async def story() -> None:
        async with world(tmp_path) as here:
            await publish(here, [1])  # which creates journals, and is far ahead of all clocks
            for rows in commits:
                made = fragment(here, rows, inline=rng.random() < 0.5)
                await here.journals.append(EU, [made, ack(rows[0].producer, 400)])
            deliveries: list[Delivery] = []
            limits = RoundLimits(records=rng.randint(1, 9))
            async with session(here, bindings, limits=limits) as reading:
                of = slice_of(spark, here, *bindings, routing=split_shards(shards))
                while sum(len(each.rows) for each in deliveries) < 2 * (len(commits) + 1):
                    deliveries += (await reading.next_checkpoint()).deliveries
                frame = await of.shuffled(deliveries, reading.states)
            is_early = f.col("_clock") < START + commits[-1][0].clock
            with pytest.raises(PySparkException, match="lost"):  # as an executor, half-way
                frame.where(f.assert_true(is_early, "lost").isNull()).collect()
            for rows in await asyncio.gather(*[asyncio.to_thread(told, frame)] * 2):
                found: list[list[tuple[int, ...]]] = [[] for _ in range(shards)]
                for row in rows:
                    at = row["_clock"] - START
                    if at < 1_000:
                        number = row[f"d{row['_binding']}"].id
                        found[row["at"]].append((row["_binding"], at, row["_producer"], number))
                assert found == want

    asyncio.run(story())


@pytest.mark.parametrize("shard", ["CAST(NULL AS INT)", "2", "-1"])
def test_a_row_without_a_shard_stops_the_job(
    shard: str, spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.sql import functions as f

    async def story() -> None:
        async with world(tmp_path) as here:
            bound = binding(0, ORDERS)
            await publish(here, range(3))
            made = await delivered(here, bound)
            of = slice_of(spark, here, bound, routing=split_shards(2))
            routed = of.routed(await of.frame(bound, made.deliveries, made.states), bound)
            with pytest.raises(PySparkException, match="a row is for shard"):
                of.exchange([routed.withColumn("_shard", f.expr(shard))]).collect()

    asyncio.run(story())


def test_a_checkpoint_without_documents_is_an_empty_frame(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def story() -> None:
        async with world(tmp_path) as here:
            bound = binding(3, ORDERS)
            of = slice_of(spark, here, bound)
            frame = await of.shuffled([], {})
            assert frame.columns == [*ROUTED, "d3"]
            assert not frame.collect()
            await publish(here, [1])
            strange = (await delivered(here, binding(4, ORDERS))).deliveries
            with pytest.raises(Bug, match=r"\[4\]"):
                await of.shuffled(strange, {})

    asyncio.run(story())
