"""Fragments that tasks write and a publisher adopts."""

from __future__ import annotations

import pickle
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from journal.publishing import ORDERS, Document, World, batch, collection, swept, world
from penstock.errors import Bug, PenstockError, UserError
from penstock.journal.blobs import open_blobs
from penstock.journal.names import JournalName
from penstock.journal.ownership import own_objects
from penstock.journal.publisher import Fixed, Mapped, PublisherOptions, Retired
from penstock.journal.staging import FragmentStaging, StagedFragments, stage_fragments
from penstock.journal.state import AckRecord, Blob, Fragment
from penstock.journal.verify import verify
from penstock.model.clock import Clock, Producer, duration, from_unix

REGIONS = ["eu", "us", None]
NOISE = "".join(map(chr, range(32, 20_000)))
"""Too long to be inline."""


def orders(*ids: int, text: str = "") -> list[Document]:
    return [{"id": i, "region": REGIONS[i % len(REGIONS)], "text": text} for i in ids]


def run_task(staging: FragmentStaging, *chunks: list[Document]) -> StagedFragments:
    """One attempt, as a task elsewhere runs it."""
    sent: FragmentStaging = pickle.loads(pickle.dumps(staging))  # noqa: S301
    report = stage_fragments(sent, [batch(chunk) for chunk in chunks])
    return StagedFragments.decode(report.encode())


def sqlite(directory: Path) -> str:
    return f"sqlite:///{directory / 'consensus.db'}"


async def ids(here: World, name: str = "acme/orders") -> list[int]:
    return sorted(d["id"] for found in (await here.read(name)).values() for d in found)


# ---------------------------------------------------------------------------------- what is seen


@settings(deadline=None)
@given(
    transactions=st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=3),  # batches by task
            st.integers(0, 3),  # documents of the publisher itself
            st.integers(0, 2),  # attempts that die after they have written
            st.booleans(),
        ),
        max_size=3,
    ),
    large=st.booleans(),
)
async def test_what_successful_attempts_wrote_is_seen_once_whoever_wrote_it(
    transactions: list[tuple[list[list[int]], int, int, bool]], large: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        here_at, expected, number = Path(directory), Counter[int](), 0
        async with world(here_at, sqlite(here_at)) as here:
            publisher = here.publisher()
            for tasks, own, zombies, now in transactions:
                staging = await publisher.staging(0)
                for _ in range(zombies):
                    run_task(staging, orders(-1, -2, -3, text=NOISE if large else ""))
                for sizes in tasks:
                    chunks = []
                    for size in sizes:
                        chunks.append(orders(*range(number, number + size), text="x" * size))
                        number += size
                    await publisher.adopt(run_task(staging, *chunks))
                if own:
                    await publisher.publish(0, batch(orders(*range(number, number + own))))
                    number += own
                before = await ids(here)
                if now:
                    await publisher.commit_now()
                else:
                    intents = await publisher.commit()
                    assert await ids(here) == before, "nothing is seen before its ACK"
                    await publisher.write_intents(intents)
                expected = Counter(range(number))
                assert Counter(await ids(here)) == expected
            assert publisher.count(0).documents == number
            found = await verify(here.journals.store, here.blobs)
            assert found.faults == []
            assert found.rows == number
            await swept(here)
            assert Counter(await ids(here)) == expected


async def test_two_tasks_and_the_publisher_share_a_journal_and_one_clock_of_acks(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher(Mapped(spec=collection(partitioned=False)))
        await publisher.publish(0, batch(orders(1)))
        staging = await publisher.staging(0)
        staged = [run_task(staging, orders(2, 3)), run_task(staging, orders(4))]
        for each in staged:
            await publisher.adopt(each)
        intents = await publisher.commit()
        producers = {publisher.producer, *(each.producer for each in staged)}
        assert {commit.producer for commit in intents.commits} == producers
        assert len({commit.clock for commit in intents.commits}) == 1
        await publisher.write_intents(intents)
        state = await here.journals.load("acme/orders/pivot=00")
        rows = [r for r in state.records if isinstance(r, Fragment)]
        acks = [r for r in state.records if isinstance(r, AckRecord)]
        assert (sum(f.rows for f in rows), {a.producer for a in acks}) == (4, producers)
        assert max(run.clock_max for f in rows for run in f.runs) < acks[0].clock
        assert await ids(here) == [1, 2, 3, 4]


async def test_rows_are_adopted_where_the_task_has_put_them(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        staged = run_task(await publisher.staging(0), orders(*range(9), text=NOISE))
        places = {
            f.at.path for fs in staged.fragments.values() for f in fs if isinstance(f.at, Blob)
        }
        await publisher.adopt(staged)
        await publisher.commit_now()
        assert {found.path for found in own_objects(here.blobs.list())} == places
        assert len(places) == len(REGIONS)
        assert await ids(here) == list(range(9))


async def test_journals_of_partition_values_that_tasks_met_are_created(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        staging = await publisher.staging(0)
        for task in (orders(0, 3), orders(1), orders(0, 2)):
            await publisher.adopt(run_task(staging, task))
        await publisher.commit_now()
        names = [str(JournalName.of("acme/orders", {"region": region})) for region in REGIONS]
        assert {journal.name for journal in await here.journals.list()} == set(names)


async def test_a_task_meets_as_many_partitions_as_a_publisher_may(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher(options=PublisherOptions(partitions_max=2))
        staged = run_task(await publisher.staging(0), orders(0, 1, 2))
        with pytest.raises(UserError, match="more than 2 partitions"):
            await publisher.adopt(staged)


async def test_physical_partitions_get_the_rows_that_they_cover(tmp_path: Path) -> None:
    spec = collection(partitioned=False)
    async with world(tmp_path) as here:
        low = JournalName.of("acme/orders", {})
        high = JournalName.of("acme/orders", {}, 0x80000000)
        await here.journals.create(low, key_end=0x7FFFFFFF)
        await here.journals.create(high)
        publisher = here.publisher(Mapped(spec=spec))
        await publisher.adopt(run_task(await publisher.staging(0), orders(*range(20))))
        await publisher.commit_now()
        found = await here.read()
        assert set(found) == {str(low), str(high)}
        assert await ids(here) == list(range(20))


async def test_rows_of_a_partition_that_was_divided_meanwhile_are_refused(tmp_path: Path) -> None:
    spec = collection(partitioned=False)
    async with world(tmp_path) as here:
        publisher = here.publisher(Mapped(spec=spec))
        staged = run_task(await publisher.staging(0), orders(*range(20)))
        await here.journals.create(JournalName.of("acme/orders", {}), key_end=0x7FFFFFFF)
        other = here.publisher(Mapped(spec=spec))
        other_staged = replace(staged, publisher=other.producer)
        with pytest.raises(PenstockError, match="does not cover"):
            await other.adopt(other_staged)


async def test_a_fixed_binding_has_one_journal(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        name = JournalName.of("acme/orders", {"region": "all"})
        await here.journals.create(name)
        publisher = here.publisher(Fixed(spec=ORDERS, journal=str(name)))
        await publisher.adopt(run_task(await publisher.staging(0), orders(*range(6))))
        await publisher.commit_now()
        assert {journal: len(found) for journal, found in (await here.read()).items()} == {
            str(name): 6
        }


def test_a_task_holds_no_more_than_its_buffer(tmp_path: Path) -> None:
    staging = FragmentStaging(
        publisher=Producer(Producer.MULTICAST),
        binding=0,
        since=from_unix(1_700_000_000),
        blobs=open_blobs(str(tmp_path)),
        spec=ORDERS,
        buffer_bytes=100_000,
    )
    staged = stage_fragments(staging, [batch(orders(n, text=NOISE)) for n in range(30)])
    made = [f for fragments in staged.fragments.values() for f in fragments]
    assert sum(fragment.rows for fragment in made) == 30
    assert len(made) > len(REGIONS)
    assert staged.last_clock == staging.since + 29


@pytest.mark.spark
async def test_attempts_that_spark_runs_again_are_not_seen(
    tmp_path: Path, spark: SparkSession
) -> None:
    async with world(tmp_path, sqlite(tmp_path)) as here:
        publisher = here.publisher()
        staging = await publisher.staging(0)

        def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
            documents = list(batches)
            report = stage_fragments(staging, documents)
            # Another attempt at the same work, of which the leader learns nothing: a zombie.
            stage_fragments(staging, documents)
            yield pyarrow.RecordBatch.from_pydict({"report": [report.encode()]})

        table = pyarrow.Table.from_batches([batch(orders(*range(30), text=NOISE))])
        frame = spark.createDataFrame(table).repartition(3)
        reports = frame.mapInArrow(run, "report binary").collect()
        for row in reports:
            await publisher.adopt(StagedFragments.decode(bytes(row.report)))
        await publisher.write_intents(await publisher.commit())
        assert await ids(here) == list(range(30))
        written = len(list(own_objects(here.blobs.list())))
        assert (await swept(here)).deleted == written // 2
        assert await ids(here) == list(range(30))


async def test_spark_may_name_the_items_of_lists_as_it_likes(tmp_path: Path) -> None:
    spec = collection(
        partitioned=False,
        schema={
            "type": "object",
            "required": ["id"],
            "properties": {
                "id": {"type": "integer"},
                "region": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    )
    document = {"id": 1, "region": "eu", "tags": ["a", "b"]}
    given = batch([document], spec)
    at = given.schema.get_field_index("tags")
    renamed = pyarrow.field("tags", pyarrow.list_(pyarrow.field("item", pyarrow.string())))
    given = given.cast(given.schema.set(at, renamed))
    async with world(tmp_path) as here:
        publisher = here.publisher(Mapped(spec=spec))
        await publisher.adopt(stage_fragments(await publisher.staging(0), [given]))
        await publisher.commit_now()
        assert list((await here.read()).values()) == [[document]]


# ------------------------------------------------------------------------------- what is refused


async def test_an_attempt_is_adopted_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        staged = run_task(await publisher.staging(0), orders(1))
        await publisher.adopt(staged)
        with pytest.raises(Bug, match="adopted twice"):
            await publisher.adopt(staged)
        with pytest.raises(Retired):
            await publisher.commit()
        assert await ids(here) == []


@pytest.mark.parametrize("now", [False, True])
async def test_what_an_earlier_transaction_staged_is_not_adopted(tmp_path: Path, now: bool) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        staging = await publisher.staging(0)
        late = run_task(staging, orders(1))
        await publisher.adopt(run_task(staging, orders(2)))
        if now:
            await publisher.commit_now()
        else:
            await publisher.write_intents(await publisher.commit())
        await publisher.adopt(run_task(await publisher.staging(0), orders(3)))
        with pytest.raises(Bug, match="another transaction"):
            await publisher.adopt(late)
        assert await ids(here) == [2]


async def test_what_was_staged_for_another_leader_is_not_adopted(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        zombie = here.publisher()
        staged = run_task(await zombie.staging(0), orders(1))
        successor = here.publisher()
        await successor.staging(0)
        with pytest.raises(Bug, match="another transaction"):
            await successor.adopt(staged)


async def test_nothing_is_staged_before_the_last_acks_are_written(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.adopt(run_task(await publisher.staging(0), orders(1)))
        await publisher.commit()
        with pytest.raises(Bug, match="before the ACKs"):
            await publisher.staging(0)


async def test_fragments_that_garbage_collection_may_have_taken_are_not_adopted(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        times = [from_unix(1_700_000_000)]
        publisher = here.publisher()
        publisher._now = lambda: times[-1]
        staged = run_task(await publisher.staging(0), orders(1))
        times.append(Clock(times[0] + duration(3601)))
        with pytest.raises(PenstockError, match="stood still"):
            await publisher.adopt(staged)


async def test_a_task_without_documents_adds_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.adopt(run_task(await publisher.staging(0)))
        assert not await publisher.commit()
