"""Retention of collections: what is old goes, what somebody needs stays, and nobody misses any."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.catalog import desired
from penstock.consensus.statelog import StateLog
from penstock.errors import UserError
from penstock.journal.blobs import open_blobs
from penstock.journal.committed import VisibleRows
from penstock.journal.follower import Follower
from penstock.journal.journals import Journals
from penstock.journal.planning import Planner
from penstock.journal.publisher import Mapped, Publisher
from penstock.journal.schemas import Schemas, layout
from penstock.journal.sealing import seal
from penstock.journal.selector import EVERYTHING
from penstock.journal.state import AckRecord, JournalState
from penstock.journal.sweeping import collect_garbage
from penstock.journal.timeline import BEGIN, TimelinePosition
from penstock.journal.transaction import Intents
from penstock.journal.upkeep import CompactionOptions, compact_all
from penstock.journal.verify import verify
from penstock.model.clock import Clock, Producer, duration
from penstock.model.hints import Commit
from penstock.native.arrow import to_arrow
from penstock.retention import Retained, retain_collections
from penstock.runtime.recovery import RecoveryMachine, log_name, recovery_key
from penstock.status import statuses
from runtime.sessions import ACCOUNTS, Document, Place, accounts, now, reduced, task
from support.deployments import SOON_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY_S = 24 * 3600
NAME = "acme/accounts"
KEPT: Document = {**ACCOUNTS, "journals": {"fragments": {"retention": "30d"}}}
PARTITIONED: Document = {
    **KEPT,
    "projections": {"region": {"location": "/region", "partition": True}},
}


def later(days: float) -> Clock:
    return Clock(now() + int(days * duration(DAY_S)))


@contextlib.asynccontextmanager
async def planning(place: Place) -> AsyncIterator[Planner]:
    async with place.store() as store:
        blobs = open_blobs(place.settings.blob)
        yield Planner(journals=Journals(store), blobs=blobs, schemas=Schemas(store))


async def retained(place: Place, at: Clock, *, dry_run: bool = False) -> Retained:
    async with planning(place) as planner:
        catalog = await desired.load(planner.journals.store)
        [done] = await retain_collections(planner, catalog, now=at, dry_run=dry_run)
        return done


def retain(place: Place, days: float, *, dry_run: bool = False) -> Retained:
    """What happens so many days from now."""
    return asyncio.run(retained(place, later(days), dry_run=dry_run))


async def states(place: Place, collection: str = NAME) -> list[JournalState]:
    async with place.store() as store:
        return [journal.state for journal in await Journals(store).list(collection)]


def without_tasks(directory: Path, collection: Document = KEPT) -> Place:
    place = Place(directory, lambda _: None)  # type: ignore[arg-type]
    place.apply({NAME: collection}, {})
    return place


def with_views(
    place: Place, *, backfill: int = 0, disable: bool = False, collection: Document = KEPT
) -> None:
    binding: Document = {"source": NAME, "resource": {"table": "accounts"}}
    binding |= {"backfill": backfill, "disable": disable}
    views = task("sqlite", {"path": place.database()}, [binding])
    place.apply({NAME: collection}, {"acme/views": views})


# ------------------------------------------------------------------------------------ what goes


def test_documents_are_forgotten_when_they_are_old_enough_and_not_before(tmp_path: Path) -> None:
    place = without_tasks(tmp_path)
    place.append({NAME: accounts(0, 3)})
    place.append({NAME: accounts(3, 2)})
    young = retain(place, 29.9)
    assert (young.documents, young.held) == (0, None)
    planned = retain(place, 30.1, dry_run=True)
    assert (planned.documents, planned.journals) == (5, 1)
    assert len(place.read(NAME)) == 5, "a dry run changes nothing"
    assert retain(place, 30.1) == planned
    assert place.read(NAME) == []
    assert retain(place, 30.1).documents == 0, "there is no more to forget"
    place.append({NAME: accounts(5, 1)})
    assert place.read(NAME) == accounts(5, 1)
    assert retain(place, -400).documents == 0, "by a clock that went back"


def test_a_collection_without_retention_keeps_everything(tmp_path: Path) -> None:
    place = without_tasks(tmp_path, ACCOUNTS)
    place.append({NAME: accounts(0, 3)})

    async def run() -> list[Retained]:
        async with planning(place) as planner:
            catalog = await desired.load(planner.journals.store)
            return await retain_collections(planner, catalog, now=later(4000))

    assert asyncio.run(run()) == []
    assert len(place.read(NAME)) == 3


def test_a_transaction_that_is_open_stays_with_everything_behind_it(tmp_path: Path) -> None:
    place = without_tasks(tmp_path)

    async def run() -> None:
        async with place.store() as store:
            catalog = await desired.load(store)
            spec = catalog.collection(NAME)
            assert spec is not None
            publisher = Publisher(
                Journals(store), open_blobs(place.settings.blob), Schemas(store),
                [Mapped(spec=spec)], producer=Producer.from_random(os.urandom(6)), now=now,
            )  # fmt: skip
            await place.appended({NAME: accounts(0, 2)})
            rows = to_arrow(accounts(2, 4), layout(spec.write_schema.text))
            await publisher.publish(0, rows)
            await publisher.flush()
            await place.appended({NAME: accounts(6, 3)})
            done = await retained(place, later(31))
            assert done.documents == 2
            assert done.held is not None
            assert (done.held.documents, done.held.writers, done.held.tasks) == (7, 1, ())
            assert "a transaction before them may still be committed" in (done.reason or "")
            await publisher.write_intents(await publisher.commit())
        assert (await retained(place, later(31))).documents == 7

    asyncio.run(run())


@pytest.mark.parametrize("owed", [False, True])
def test_a_transaction_of_a_dead_writer_is_told_from_one_whose_ack_is_to_come(
    tmp_path: Path, *, owed: bool
) -> None:
    place = without_tasks(tmp_path)

    async def run() -> Retained:
        async with place.store() as store:
            spec = (await desired.load(store)).collection(NAME)
            assert spec is not None
            blobs, root = open_blobs(place.settings.blob), layout(spec.write_schema.text)

            def writer(days: float) -> Publisher:
                return Publisher(
                    Journals(store), blobs, Schemas(store), [Mapped(spec=spec)],
                    producer=Producer.from_random(os.urandom(6)), now=lambda: later(days),
                )  # fmt: skip

            dead = writer(-41)
            await dead.publish(0, to_arrow(accounts(0, 2), root))
            await dead.flush()
            for days in (-40, -39, -20, -1):
                alive = writer(days)
                await alive.publish(0, to_arrow(accounts(2, 3), root))
                await alive.commit_now()
            journals = Journals(store)
            [journal] = await journals.list(NAME)
            for count in (5, 2):  # what is younger is in a page that need not be read to cut
                state = await journals.load(journal.name)
                await seal(journals, blobs, journal.name, state.records[:count])
            if owed:
                intents = Intents((Commit(journal.name, dead.producer, later(-41)),))
                key = recovery_key(log_name("capture", "acme/source"))
                log = await StateLog.lead(store, key, RecoveryMachine())
                await log.append(lambda _: (("put", b"AI", intents.encode()),))
        return await retained(place, now())

    done = asyncio.run(run())
    if owed:
        assert (done.documents, done.held and done.held.writers) == (0, 1)
    else:
        assert (done.documents, done.held) == (2 + 3 + 3, None)
        assert len(place.read(NAME)) == 6


def test_a_transaction_over_partitions_goes_as_a_whole(tmp_path: Path) -> None:
    place = without_tasks(tmp_path, PARTITIONED)
    place.append({NAME: accounts(0, 6)})
    done = retain(place, 31)
    assert (done.journals, done.documents) == (3, 6)
    revisions = {state.forgotten.revision for state in asyncio.run(states(place))}
    assert len(revisions) == 1
    assert place.read(NAME) == []


# ----------------------------------------------------------------- beside compaction and sealing


def test_pages_and_compacted_objects_are_cut_at_any_record(tmp_path: Path) -> None:
    place = without_tasks(tmp_path, PARTITIONED)

    async def run() -> None:
        half = None
        for n in range(24):
            await place.appended({NAME: accounts(3 * n, 3)})
            if n == 13:
                half = now()
        assert half is not None
        async with planning(place) as planner:
            journals, blobs = planner.journals, planner.blobs
            for journal in await journals.list(NAME):
                await seal(journals, blobs, journal.name, journal.state.records[:40])
            options = CompactionOptions(inputs_min=2)
            await compact_all(journals, blobs, planner.schemas, options=options)
        done = await retained(place, Clock(half + duration(30 * DAY_S)))
        assert (done.documents, done.held) == (3 * 14, None)
        for state in await states(place):
            assert [page.begin for page in state.pages] == [state.begin] == [28]
        async with planning(place) as planner:
            found = await verify(planner.journals.store, planner.blobs)
            assert not found.faults
            options = CompactionOptions(inputs_min=2, records_max=4)
            await compact_all(planner.journals, planner.blobs, planner.schemas, options=options)
            found = await verify(planner.journals.store, planner.blobs)
            assert not found.faults

    asyncio.run(run())
    assert sorted(d["total"] for d in place.read(NAME)) == [n * n for n in range(42, 72)]


def test_objects_of_what_is_forgotten_are_garbage_after_grace_and_quarantine(
    tmp_path: Path,
) -> None:
    place = without_tasks(tmp_path)
    noise = os.urandom(40_000).hex()
    place.append({NAME: [{**accounts(0, 1)[0], "region": noise}]})

    async def collected(days: float) -> tuple[int, int]:
        async with planning(place) as planner:
            at_s = time.time() + days * DAY_S
            found = await collect_garbage(planner.journals, planner.blobs, now_s=at_s)
            return len(found.garbage), found.deleted

    assert retain(place, 31).documents == 1
    assert asyncio.run(collected(0.9)) == (0, 0), "noted just now: a reader may be using it"
    assert asyncio.run(collected(1.1)) == (1, 0), "in quarantine"
    assert asyncio.run(collected(5)) == (1, 1)


_CRASHES = """
import asyncio, os, sys
from pathlib import Path
from penstock import failpoints
from test_retention import Place, cut_half

for argument in sys.argv[1:]:
    child = os.fork()
    if not child:
        failpoints.arm(Path(argument).name)
        asyncio.run(cut_half(Place(Path(argument), None)))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


async def cut_half(place: Place) -> None:
    """Forget the first transaction, four documents, and nothing after it."""
    async with planning(place) as planner:
        [journal] = await planner.journals.list(NAME)
        records = await planner.records(journal.state)
        acks = [record.clock for record in records if isinstance(record, AckRecord)]
    await retained(place, Clock(acks[-4] + duration(30 * DAY_S)))


async def _paged(place: Place) -> None:
    """Append four documents, then four more one by one, and seal all of them."""
    await place.appended({NAME: accounts(0, 4)})
    for n in range(4, 8):
        await place.appended({NAME: accounts(n, 1)})
    async with planning(place) as planner:
        [journal] = await planner.journals.list(NAME)
        await seal(planner.journals, planner.blobs, journal.name, journal.state.records)


def test_a_crash_at_any_step_leaves_garbage_at_most(tmp_path: Path) -> None:
    points = ("seal.written", "retain.paged", "retain.noted", "retain.cut")
    places = {}
    for point in points:
        (tmp_path / point).mkdir()
        places[point] = without_tasks(tmp_path / point)
        asyncio.run(_paged(places[point]))
    ended = subprocess.run(
        [sys.executable, "-c", _CRASHES, *(str(place.directory) for place in places.values())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.split() == ["137"] * len(points)
    for point, place in places.items():
        left = accounts(4, 4) if point == "retain.cut" else accounts(0, 8)
        assert place.read(NAME) == left, point
        asyncio.run(cut_half(place))
        assert place.read(NAME) == accounts(4, 4)


# ---------------------------------------------------------------------------------------- streams


def test_a_stream_gets_what_is_there_and_is_refused_where_it_would_miss_something(
    tmp_path: Path,
) -> None:
    place = without_tasks(tmp_path, PARTITIONED)
    place.append({NAME: accounts(0, 6)})

    def follower() -> contextlib.closing[Follower]:
        return contextlib.closing(Follower(lambda: planning(place), NAME, EVERYTHING))

    with follower() as stream:
        taken = stream.cut(BEGIN)
        place.append({NAME: accounts(6, 6)})
        more = stream.cut(taken)
        assert retain(place, 31).documents == 12
        for late in (lambda: stream.cut(taken), lambda: stream.plan(taken, more)):
            with pytest.raises(UserError, match="were forgotten before this query has read them"):
                late()
        assert stream.cut(more) == more, "it had read everything"
    place.append({NAME: accounts(12, 1)})
    with follower() as stream:
        begun = stream.cut(BEGIN)
        assert sum(split_rows(stream, BEGIN, begun)) == 1, "what is there"
        place.append({NAME: accounts(13, 1)})
        assert sum(split_rows(stream, begun, stream.cut(begun))) == 1
        assert sum(split_rows(stream, more, stream.cut(more))) == 2


def split_rows(stream: Follower, start: TimelinePosition, end: TimelinePosition) -> Iterator[int]:
    for split in stream.plan(start, end):
        for piece in split.pieces:
            yield piece.run.rows if isinstance(piece, VisibleRows) else piece.rows


# ------------------------------------------------------------------------------------------ tasks


@pytest.mark.spark
def test_what_a_task_has_not_read_stays_and_it_is_said_whose_it_is(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    with_views(place)
    place.append({NAME: accounts(0, 5)})
    held = retain(place, 31)
    assert (held.documents, held.held and held.held.tasks) == (0, ("acme/views",))
    assert "acme/views has not read them" in (held.reason or "")
    place.run()
    place.append({NAME: accounts(5, 4)})
    done = retain(place, 31)
    assert (done.documents, done.held and done.held.documents) == (5, 4)

    # Disabled, stopped or failing: it goes on from where it was.
    with_views(place, disable=True)
    assert retain(place, 31).documents == 0
    with_views(place)
    assert place.run()["acme/views"].error is None
    assert place.table("accounts") == reduced(accounts(0, 9)), "nothing is lost or doubled"
    assert retain(place, 31).documents == 4
    assert place.read(NAME) == []
    place.append({NAME: accounts(9, 3)})
    place.run()
    assert place.table("accounts") == reduced(accounts(0, 12))


def test_a_binding_that_has_not_begun_holds_everything(tmp_path: Path) -> None:
    """It would begin with the oldest documents, whenever it is enabled."""
    place = Place(tmp_path, lambda _: None)  # type: ignore[arg-type]
    with_views(place, disable=True)
    place.append({NAME: accounts(0, 5)})
    held = retain(place, 31)
    assert (held.documents, held.held and held.held.tasks) == (0, ("acme/views",))


@pytest.mark.spark
def test_a_backfill_rebuilds_from_what_is_left(tmp_path: Path, spark: SparkSession) -> None:
    place = Place(tmp_path, spark)
    with_views(place)
    place.append({NAME: accounts(0, 5)})
    place.run()
    assert retain(place, 31).documents == 5
    place.append({NAME: accounts(5, 4)})
    with_views(place, backfill=1)
    assert retain(place, 31).documents == 0, "it reads from the beginning, and has not begun"
    place.run()
    assert place.table("accounts") == reduced(accounts(5, 4))


@pytest.mark.spark
def test_a_task_that_comes_back_too_late_is_told_what_is_missing(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    with_views(place)
    place.append({NAME: accounts(0, 5)})
    place.run()
    place.append({NAME: accounts(5, 4)})
    place.apply({NAME: KEPT}, {})
    assert retain(place, 31).documents == 9
    with_views(place)
    error = place.run()["acme/views"].error
    assert error is not None
    assert error.what == f"documents of {NAME} were forgotten before this task has read them"
    assert "backfill" in (error.fix or "")
    place.append({NAME: accounts(9, 3)})
    with_views(place, backfill=1)
    assert place.run()["acme/views"].error is None
    assert place.table("accounts") == reduced(accounts(9, 3))


@pytest.mark.spark
def test_status_says_which_task_holds_retention(tmp_path: Path, spark: SparkSession) -> None:
    place = Place(tmp_path, spark)
    soon = {**ACCOUNTS, "journals": {"fragments": {"retention": "1s"}}}
    with_views(place, collection=soon)
    place.append({NAME: accounts(0, 5)})

    async def holds() -> dict[str, int]:
        async with place.store() as store:
            (found,) = await statuses(store, await desired.load(store))
            assert found.as_json()["holds_retention"] == sorted(found.holds)
            return dict(found.holds)

    asyncio.run(asyncio.sleep(1.1))
    assert asyncio.run(holds()) == {NAME: 1}
    place.run()
    assert asyncio.run(holds()) == {}


def test_a_task_whose_connector_is_not_here_holds_everything(tmp_path: Path) -> None:
    place = Place(tmp_path, lambda _: None)  # type: ignore[arg-type]
    views = task("elsewhere", {}, [{"source": NAME, "resource": {"table": "accounts"}}])
    place.apply({NAME: KEPT}, {"acme/views": views})
    place.append({NAME: accounts(0, 5)})
    held = retain(place, 31)
    assert (held.documents, held.held and held.held.tasks) == (0, ("acme/views",))


@pytest.mark.spark
def test_a_task_that_runs_meanwhile_stores_every_document_once(
    tmp_path: Path, spark: SparkSession
) -> None:
    place = Place(tmp_path, spark)
    with_views(place, collection=PARTITIONED)
    appended, forgotten = 0, list[int]()

    def enough() -> bool:
        return len(forgotten) >= 2

    async def write() -> None:
        nonlocal appended
        while not enough():
            await place.appended({NAME: accounts(appended, 10)})
            appended += 10

    async def forget() -> None:
        while not enough():
            if documents := (await retained(place, later(31))).documents:
                forgotten.append(documents)
            async with planning(place) as planner:
                options = CompactionOptions(inputs_min=2, records_max=8)
                await compact_all(planner.journals, planner.blobs, planner.schemas, options=options)

    async def read() -> None:
        while not enough():
            runs = await place.ran()
            assert runs["acme/views"].error is None

    async def run() -> None:
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(write(), forget(), read())

    asyncio.run(run())
    place.run()
    assert place.table("accounts") == reduced(accounts(0, appended))
    assert sum(forgotten) + len(place.read(NAME)) == appended
