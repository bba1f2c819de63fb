from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from journal.publishing import ORDERS, SCHEMA, Document, World, batch, collection, world
from penstock.errors import Bug, PenstockError, UserError
from penstock.journal.journals import MissingJournal
from penstock.journal.names import JournalName
from penstock.journal.publisher import Fixed, Mapped, PublisherOptions, Retired
from penstock.journal.state import AckRecord, Blob, Fragment, Inline
from penstock.journal.transaction import BatchLimits, Intents
from penstock.model.clock import Clock, duration, from_unix
from penstock.model.keys import key_hash, pack

REGIONS = ["eu", "us", None, "a/b=%\u00e9"]


def orders(*ids: int, text: str = "") -> list[Document]:
    return [{"id": i, "region": REGIONS[i % len(REGIONS)], "text": text} for i in ids]


def journal(region: str | None) -> str:
    return str(JournalName.of("acme/orders", {"region": region}))


# ------------------------------------------------------------------------------- one transaction


async def test_documents_are_seen_when_their_intents_are_written(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch(orders(0, 1, 4)))
        intents = await publisher.commit()
        assert await here.read() == {}
        await publisher.write_intents(intents)
        assert await here.read() == {
            journal("eu"): orders(0, 4),
            journal("us"): orders(1),
        }


async def test_a_small_transaction_is_one_revision_in_all_its_journals(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch(orders(*range(8))))
        await publisher.publish(0, batch(orders(*range(8, 12))))
        intents = await publisher.commit_now()
        found = await here.journals.list("acme/orders")
        records = [record for each in found for record in each.state.records]
        assert len({record.revision for record in records}) == 1
        assert all(len(each.state.records) == 2 for each in found)
        assert intents.journals == tuple(each.name for each in found)
        hinted = [record for record in records if isinstance(record, AckRecord)]
        assert all(len(ack.hints) == len(found) - 1 for ack in hinted)


async def test_rows_that_are_few_are_inline_and_rows_that_are_many_are_objects(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher(Mapped(spec=collection(partitioned=False)))
        for text, kind in (("x", Inline), ("".join(map(chr, range(32, 20_000))), Blob)):
            await publisher.publish(0, batch(orders(1, text=text)))
            await publisher.commit_now()
            state = await here.journals.load("acme/orders/pivot=00")
            fragment = state.records[-2]
            assert isinstance(fragment, Fragment)
            assert isinstance(fragment.at, kind)


async def test_clocks_follow_the_wall_and_never_repeat(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        wall = from_unix(1_800_000_000)
        publisher = here.publisher(Mapped(spec=collection(partitioned=False)), now=wall)
        for _ in range(3):
            await publisher.publish(0, batch(orders(*range(100))))
            await publisher.commit_now()
        state = await here.journals.load("acme/orders/pivot=00")
        clocks = [
            clock
            for record in state.records
            for clock in (
                [record.clock]
                if isinstance(record, AckRecord)
                else [record.runs[0].clock_min, record.runs[0].clock_max]
            )
        ]
        assert clocks == sorted(set(clocks))
        assert clocks[0] == wall
        assert clocks[1] == wall + 99


async def test_nothing_published_is_nothing_to_acknowledge(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch([]))
        intents = await publisher.commit()
        assert not intents
        await publisher.write_intents(intents)
        assert not await publisher.commit_now()
        assert await here.journals.list() == ()


async def test_counters_count_what_was_appended_and_nothing_else(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch(orders(*range(10))))
        assert publisher.count(0).documents == 0
        intents = await publisher.commit()
        assert publisher.count(0).documents == 10
        before = publisher.count(0).bytes
        assert before > 0
        await publisher.write_intents(intents)
        await publisher.write_intents(intents)
        assert (publisher.count(0).documents, publisher.count(0).bytes) == (10, before)


# --------------------------------------------------------------------------------- what is refused


async def test_a_publisher_that_was_aborted_is_retired(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch(orders(1)))
        await publisher.flush()
        await publisher.abort()
        with pytest.raises(Retired):
            await publisher.publish(0, batch(orders(2)))
        with pytest.raises(Retired):
            await publisher.commit_now()
        assert await here.read() == {}


async def test_a_publisher_that_failed_is_retired(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher(Fixed(spec=ORDERS, journal="acme/orders/pivot=00"))
        with pytest.raises(MissingJournal, match="does not exist"):
            await publisher.publish(0, batch(orders(1)))
        with pytest.raises(Retired):
            await publisher.commit()


async def test_the_next_transaction_waits_for_the_acks_of_this_one(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch(orders(1)))
        await publisher.commit()
        with pytest.raises(Bug, match="before the ACKs"):
            await publisher.publish(0, batch(orders(2)))


async def test_a_transaction_of_yesterday_cannot_be_closed_any_more(tmp_path: Path) -> None:
    """Readers forget a writer that has left one open for two days."""
    async with world(tmp_path) as here:
        clock = from_unix(1_800_000_000)
        publisher = here.publisher()
        publisher._now = lambda: clock
        for _ in range(2):  # each transaction has a day
            await publisher.publish(0, batch(orders(1)))
            await publisher.flush()
            clock = Clock(clock + duration(23 * 3600))
            await publisher.commit_now()
        await publisher.publish(0, batch(orders(1)))
        await publisher.flush()
        clock = Clock(clock + duration(25 * 3600))
        with pytest.raises(PenstockError, match="more than a day"):
            await publisher.commit_now()
        [seen] = (await here.read()).values()
        assert len(seen) == 2


async def test_a_transaction_that_stands_still_is_given_up_before_its_objects_are_garbage(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        clock = from_unix(1_800_000_000)
        publisher = here.publisher(options=PublisherOptions(feed_bytes=1))
        publisher._now = lambda: clock
        await publisher.publish(0, batch(orders(1)))
        clock = Clock(clock + duration(3700))
        with pytest.raises(PenstockError, match="stood still"):
            await publisher.commit_now()
        await publisher.abort()
        again = here.publisher(options=PublisherOptions())
        again._now = lambda: clock
        await again.publish(0, batch(orders(2)))  # held in memory: nothing to be taken away
        clock = Clock(clock + duration(3700))
        await again.commit_now()
        assert await here.read() == {journal(None): orders(2)}


async def test_a_field_of_many_values_is_refused_as_a_partition(tmp_path: Path) -> None:
    many = [{"id": i, "region": f"r{i}"} for i in range(6)]
    async with world(tmp_path) as here:
        options = PublisherOptions(partitions_max=5)
        publisher = here.publisher(options=options)
        with pytest.raises(UserError, match="more than 5 partitions"):
            await publisher.publish(0, batch(many))
        ops = here.publisher(Mapped(spec=collection("ops/stats")), options=options)
        await ops.publish(0, batch(many))
        await ops.commit_now()
        assert len(await here.journals.list("ops/stats")) == 6


async def test_more_journals_than_one_store_transaction_need_intents(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        options = PublisherOptions(limits=BatchLimits(journals=2))
        publisher = here.publisher(options=options)
        await publisher.publish(0, batch(orders(0, 1, 2)))
        with pytest.raises(UserError, match="3 journals"):
            await publisher.commit_now()
        again = here.publisher(options=options)
        await again.publish(0, batch(orders(0, 1, 2)))
        await again.write_intents(await again.commit())
        assert sum(map(len, (await here.read()).values())) == 3


# -------------------------------------------------------------------------------- intents, replay


async def test_intents_survive_their_encoding_and_any_number_of_replays(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch(orders(*range(9))))
        kept = (await publisher.commit()).encode()
        for _ in range(3):
            await here.publisher().write_intents(Intents.decode(kept))
        found = await here.read()
        assert Counter(d["id"] for docs in found.values() for d in docs) == Counter(range(9))


async def test_an_ack_of_a_journal_that_is_gone_and_unbound_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as here:
        publisher = here.publisher()
        await publisher.publish(0, batch(orders(0, 1)))
        intents = await publisher.commit()
        await here.journals.drop(journal("eu"))
        bound = here.publisher()
        with pytest.raises(MissingJournal, match="was dropped"):
            await bound.write_intents(intents)
        unbound = here.publisher(Mapped(spec=collection("acme/others")))
        with caplog.at_level(logging.WARNING):
            await unbound.write_intents(intents)
        assert journal("eu") in caplog.text
        assert await here.read() == {journal("us"): orders(1)}


async def test_intents_of_several_producers_are_one_transaction(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        first, second = here.publisher(), here.publisher()
        await first.publish(0, batch(orders(0, 1)))
        await second.publish(0, batch(orders(4)))
        commits = [*(await first.commit()).commits, *(await second.commit()).commits]
        leader = here.publisher()
        await leader.write_intents(Intents.of(commits))
        found = {each.name: each.state for each in await here.journals.list()}
        acks = [r for r in found[journal("eu")].records if isinstance(r, AckRecord)]
        assert [len(ack.hints) for ack in acks] == [2, 0]
        found_ids = {name: {d["id"] for d in docs} for name, docs in (await here.read()).items()}
        assert found_ids == {journal("eu"): {0, 4}, journal("us"): {1}}


# ----------------------------------------------------------------------------------------- routing


async def test_key_hashes_choose_the_physical_partition(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        spec = collection(partitioned=False)
        low, high = (JournalName.of("acme/orders", {}, begin) for begin in (0, 0x80000000))
        await here.journals.create(low, key_end=0x7FFFFFFF)
        await here.journals.create(high)
        publisher = here.publisher(Mapped(spec=spec))
        await publisher.publish(0, batch(orders(*range(50)), spec))
        await publisher.commit_now()
        found = await here.read()
        for name, upper_bit in ((low, 0), (high, 1)):
            half = [d for d in orders(*range(50)) if key_hash(pack([d["id"]])) >> 31 == upper_bit]
            assert half
            assert found[str(name)] == half


async def test_a_gap_between_partitions_is_closed_by_one_that_covers_everything(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        spec = collection(partitioned=False)
        await here.journals.create(JournalName.of("acme/orders", {}, 0x80000000))
        publisher = here.publisher(Mapped(spec=spec))
        await publisher.publish(0, batch(orders(*range(50)), spec))
        await publisher.commit_now()
        found = await here.read()
        assert set(found) == {"acme/orders/pivot=00", "acme/orders/pivot=80"}
        assert sum(map(len, found.values())) == 50


async def test_a_missing_partition_value_is_the_default(tmp_path: Path) -> None:
    schema = {
        **SCHEMA,
        "required": ["id"],
        "properties": {**SCHEMA["properties"], "region": {"type": "string", "default": "eu"}},  # type: ignore[dict-item]
    }
    async with world(tmp_path) as here:
        spec = collection(schema=schema)
        publisher = here.publisher(Mapped(spec=spec))
        await publisher.publish(0, batch([{"id": 1}, {"id": 2, "region": "us"}], spec))
        await publisher.commit_now()
        assert set(await here.read()) == {journal("eu"), journal("us")}


async def test_a_fixed_binding_writes_to_its_journal_whatever_the_document(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.journals.create(JournalName.of("acme/orders", {}))
        publisher = here.publisher(Fixed(spec=ORDERS, journal="acme/orders/pivot=00"))
        await publisher.publish(0, batch(orders(0, 1, 2)))
        await publisher.commit_now()
        assert await here.read() == {"acme/orders/pivot=00": orders(0, 1, 2)}


async def test_publishers_that_race_make_each_partition_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        publishers = [here.publisher() for _ in range(5)]

        async def append(n: int) -> None:
            await publishers[n].publish(0, batch(orders(*range(n * 8, n * 8 + 8))))
            await publishers[n].commit_now()

        await asyncio.gather(*map(append, range(5)))
        found = await here.read()
        assert len(found) == len(REGIONS)
        assert Counter(d["id"] for docs in found.values() for d in docs) == Counter(range(40))


# ---------------------------------------------------------------------------------------- property


@dataclass(frozen=True)
class Transaction:
    """Batches of ids, how they are committed, and whether they are."""

    batches: tuple[tuple[int, ...], ...]
    end: str
    flush: bool


transactions = st.builds(
    Transaction,
    batches=st.lists(
        st.lists(st.integers(0, 200), max_size=6).map(tuple), min_size=1, max_size=3
    ).map(tuple),
    end=st.sampled_from(["now", "intents", "replayed", "aborted", "unacknowledged"]),
    flush=st.booleans(),
)

OPTIONS = [
    PublisherOptions(),
    PublisherOptions(feed_bytes=1, pending_bytes=0),
    PublisherOptions(buffer_bytes=1, limits=BatchLimits(journals=2, bytes=2000)),
]


def expected(told: Sequence[Transaction]) -> dict[str, list[Document]]:
    found: dict[str, list[Document]] = {}
    for transaction in told:
        if transaction.end in ("now", "intents", "replayed"):
            for ids in transaction.batches:
                for document in orders(*ids, text="t" * 40):
                    found.setdefault(journal(document["region"]), []).append(document)
    return found


async def tell(here: World, transaction: Transaction, options: PublisherOptions) -> None:
    publisher = here.publisher(options=options)
    for ids in transaction.batches:
        await publisher.publish(0, batch(orders(*ids, text="t" * 40)))
        if transaction.flush:
            await publisher.flush()
    atomic = len({i % len(REGIONS) for ids in transaction.batches for i in ids})
    match transaction.end:
        case "now" if atomic <= options.limits.journals:
            await publisher.commit_now()
        case "now" | "intents":
            await publisher.write_intents(await publisher.commit())
        case "replayed":
            kept = (await publisher.commit()).encode()
            for _ in range(2):
                await here.publisher(options=options).write_intents(Intents.decode(kept))
        case "aborted":
            await publisher.abort()
        case _:
            await publisher.commit()


@settings(max_examples=30)
@given(st.lists(transactions, max_size=5), st.sampled_from(OPTIONS))
def test_what_is_read_is_what_was_committed_in_the_order_of_commits(
    told: list[Transaction], options: PublisherOptions
) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with world(Path(directory)) as here:
                for transaction in told:
                    await tell(here, transaction, options)
                assert await here.read() == expected(told)

    asyncio.run(run())
