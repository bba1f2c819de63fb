from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from consensus.interposed import Fate, Interposed
from journal.publishing import seal_as
from penstock.consensus.open import open_consensus
from penstock.consensus.replica import Author, RollupPolicy, compose
from penstock.consensus.replicas import Moved
from penstock.consensus.statelog import load
from penstock.consensus.store import CasResult, Consensus, VersionedData
from penstock.journal.codec import JournalMachine
from penstock.journal.journals import Journals, MissingJournal, creation
from penstock.journal.names import JournalName, journal_key
from penstock.journal.selector import LabelSelector
from penstock.journal.state import (
    UNKNOWN,
    AckRecord,
    Blob,
    Compact,
    Create,
    Forgotten,
    Fragment,
    JournalState,
    Page,
    Refused,
    Retain,
    Status,
)
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.runs import Run
from support.unreliable import UnreliableConsensus

PRODUCER = Producer(Producer.MULTICAST | 1)
EU, US = (JournalName.of("acme/orders", {"region": region}) for region in ("eu", "us"))
TINY = RollupPolicy(diffs_min=3, diffs_max=6)
"""Rollups, and truncation behind them, at every third entry."""
PATIENCE_S = 60.0
"""Bounds a hang, not a duration."""


def fragment(rows: int = 2, clock: int = 10) -> Fragment:
    run = Run(
        producer=PRODUCER,
        kind=Flag.CONTINUE_TXN,
        first_offset=0,
        last_offset=rows - 1,
        rows=rows,
        clock_min=Clock(clock),
        clock_max=Clock(clock + rows - 1),
        clock_max_offset=rows - 1,
        increasing=True,
    )
    return Fragment(
        rows=rows,
        bytes=100,
        at=Blob(path=f"p{clock}"),
        schema="s",
        runs=(run,),
        key_hash_min=0,
        key_hash_max=9,
    )


def ack(clock: int = 20) -> AckRecord:
    return AckRecord(producer=PRODUCER, clock=Clock(clock))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Consensus]:
    opened = await open_consensus(f"sqlite:///{tmp_path}/consensus.db")
    yield opened
    await opened.close()


# -------------------------------------------------------------------------------------- writing


async def test_records_get_the_offsets_that_follow(store: Consensus) -> None:
    journals, others = Journals(store), Journals(store)
    await journals.create(EU)
    first = await journals.append(str(EU), [fragment(3), ack()])
    second = await others.append(str(EU), [fragment(2)])
    assert [(r.begin, r.end) for r in first.records] == [(0, 3), (3, 4)]
    assert (first.begin, first.end, second.begin, second.end) == (0, 4, 4, 6)
    assert {record.revision for record in first.records} == {UNKNOWN}
    state = await journals.load(str(EU))
    assert [(r.begin, r.end) for r in state.records] == [(0, 3), (3, 4), (4, 6)]
    assert all(record.revision > 0 for record in state.records)
    assert state.records[0].revision == state.records[1].revision < state.records[2].revision


async def test_creating_again_is_nothing_and_another_is_refused(store: Consensus) -> None:
    journals = Journals(store)
    created = await journals.create(EU, labels={"team": "a"})
    assert created.labels == (("region", "eu"), ("team", "a"))
    assert await Journals(store).create(EU, labels={"team": "a"}) == created
    with pytest.raises(Refused, match="is another") as caught:
        await Journals(store).create(EU, labels={"team": "b"})
    assert caught.value.where == str(EU)
    assert "team=a" in str(caught.value)
    with pytest.raises(Refused, match="is another"):
        await journals.create(EU, labels={"team": "a"}, key_end=0x7FFFFFFF)


async def test_whether_a_journal_exists_is_known_without_loading_it(store: Consensus) -> None:
    journals, name = Journals(store, policy=RollupPolicy(diffs_min=4)), str(EU)
    looking = Interposed(store)
    asked = Journals(looking)  # type: ignore[arg-type]
    assert not await asked.exists(name)
    await journals.create(EU)
    looking.calls.clear()
    for _ in range(10):
        await journals.append(name, [fragment(), ack()])
        assert await asked.exists(name)
    await journals.retain(name, 2)
    assert await asked.exists(name)
    await journals.drop(name)
    assert not await asked.exists(name)
    await journals.create(EU)
    assert await asked.exists(name)
    assert set(looking.calls) == {"head"}


@pytest.mark.parametrize("dropped", [False, True])
async def test_a_journal_exists_whatever_its_newest_entry_says(
    store: Consensus, dropped: bool
) -> None:
    """A rollup alone says nothing about what happened: then the state tells."""
    journals, name = Journals(store), str(EU)
    await journals.create(EU)
    if dropped:
        await journals.drop(name)
    replica = await load(store, journal_key(name), JournalMachine())
    author = Author(writer=b"w" * 16, writer_seq=1, token=b"t" * 16, epoch=0, wall_ms=0)
    rollup = compose(replica, author, None, policy=RollupPolicy(), force_rollup=True).new
    assert await store.compare_and_set(journal_key(name), rollup) is CasResult.COMMITTED
    assert await Journals(store).exists(name) is not dropped


async def test_journals_are_created_once_by_all_who_come_at_once(store: Consensus) -> None:
    names = [JournalName.of("acme/orders", {"n": n}) for n in range(20)]
    racers = [Journals(store) for _ in range(8)]

    async def race(journals: Journals, order: list[JournalName]) -> None:
        for name in order[:10]:
            await journals.create(name)
            await journals.append(str(name), [ack()])
        await journals.create_all({name: creation(name) for name in order})

    orders = [random.Random(seed).sample(names, len(names)) for seed in range(8)]
    await asyncio.gather(*(race(j, order) for j, order in zip(racers, orders, strict=True)))
    listed = await racers[0].list()
    assert [journal.name for journal in listed] == sorted(map(str, names))
    assert {journal.state.generation for journal in listed} == {1}
    assert sum(journal.state.end for journal in listed) == 80


async def test_a_batch_is_one_revision_or_nothing(store: Consensus) -> None:
    journals = Journals(store)
    await journals.create_all({name: creation(name) for name in (EU, US)})
    await journals.append_all({str(EU): [fragment(), ack()], str(US): [ack()], "none": []})
    eu, us = [journal.state for journal in await journals.list("acme/orders")]
    assert {r.revision for r in eu.records} == {r.revision for r in us.records}
    missing = str(JournalName.of("acme/orders", {"region": "mars"}))
    with pytest.raises(MissingJournal, match="mars"):
        await journals.append_all({str(EU): [ack()], missing: [ack()]})
    assert (await journals.load(str(EU))).end == eu.end


async def test_a_journal_is_retained_sealed_compacted_and_dropped(
    store: Consensus,
) -> None:
    journals, name = Journals(store), str(EU)
    await journals.create(EU)
    for clock in range(4):
        await journals.append(name, [fragment(2, clock=10 + 10 * clock)])
    await journals.append(name, [ack()])
    compacted = await journals.compact(name, Compact(begin=4, end=8, path="both", bytes=30))
    assert [r.at for r in compacted.records[2:4] if isinstance(r, Fragment)] == [
        Blob(path="both", row=0),
        Blob(path="both", row=2),
    ]
    with pytest.raises(Refused, match="not whole fragments") as caught:
        await journals.compact(name, Compact(begin=1, end=8, path="x", bytes=1))
    assert caught.value.where == name
    page = Page(
        path="page", begin=0, end=2, records=1, rows=2, bytes=100, revision_min=1, revision_max=9
    )
    assert (await seal_as(journals, name, page)).pages == (page,)
    assert (await journals.retain(name, 4)).begin == 4
    seqno = journals.log(name).replica.seqno
    assert (await journals.retain(name, 3)).begin == 4
    assert (await Journals(store).drop(name)).status is Status.DROPPED
    assert (await journals.drop(name)).status is Status.DROPPED
    assert journals.log(name).replica.seqno == seqno + 1
    with pytest.raises(MissingJournal, match="was dropped"):
        await journals.append(name, [ack()])
    with pytest.raises(MissingJournal, match="was dropped"):
        await journals.load(name)
    again = await journals.create(EU)
    assert (again.generation, again.begin, again.end) == (2, 9, 9)


@pytest.mark.parametrize("call", ["load", "drop"])
async def test_a_missing_journal_is_told_with_its_neighbours(store: Consensus, call: str) -> None:
    journals = Journals(store)
    await journals.create_all({name: creation(name) for name in (EU, US)})
    await journals.drop(str(US))
    with pytest.raises(MissingJournal, match="region=ue/pivot=00 does not exist") as caught:
        await getattr(journals, call)("acme/orders/region=ue/pivot=00")
    assert caught.value.fix == f"did you mean {EU}?"  # and not the dropped one
    with pytest.raises(MissingJournal, match="does not exist") as caught:
        await journals.retain("zzz", 0)
    assert caught.value.fix == "list them: penstock journals"


async def test_a_handle_that_was_put_away_is_opened_again(store: Consensus) -> None:
    journals = Journals(store, handles_max=1)
    await journals.create_all({name: creation(name) for name in (EU, US)})
    for _ in range(3):
        await asyncio.gather(*(journals.append(str(name), [ack()]) for name in (EU, US)))
    assert [journal.state.end for journal in await journals.list()] == [3, 3]


async def test_a_cancelled_append_does_not_fail_the_next(store: Consensus) -> None:
    """The handle is shared: what one caller gave up is no business of another."""
    interposed = Interposed(store)
    journals = Journals(cast("Consensus", interposed))
    await journals.create(EU)
    interposed.fate = lambda _, call: Fate.LOSE_REPLY if call == "cas" else Fate.PASSES
    interposed.resume.clear()
    given_up = asyncio.create_task(journals.append(str(EU), [ack(1)]))
    await interposed.sent.wait()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    interposed.fate = lambda _, __: Fate.PASSES
    await journals.append(str(EU), [ack(2)])
    state = await journals.load(str(EU))
    assert [record.clock for record in state.records if isinstance(record, AckRecord)] == [1, 2]


# -------------------------------------------------------------------------------------- listing


async def test_journals_are_listed_by_collection_and_label(store: Consensus) -> None:
    journals = Journals(store)
    other = JournalName.of("acme/orders-old", {"region": "eu"})
    plain = JournalName.of("acme/plain", {})
    for name in (EU, US, other, plain):
        await journals.create(name, labels={"team": "a"} if name is US else None)

    async def listed(collection: str | None = None, selector: str = "") -> list[str]:
        found = await Journals(store).list(collection, LabelSelector.parse(selector))
        return [journal.name for journal in found]

    assert await listed() == [str(other), str(EU), str(US), str(plain)]
    assert await listed("acme/orders") == [str(EU), str(US)]
    assert await listed("acme/orders", "region=eu") == [str(EU)]
    assert await listed(selector="region=eu") == [str(other), str(EU)]
    assert await listed(selector="!team") == [str(other), str(EU), str(plain)]
    assert await listed("acme") == await listed()
    assert await listed("acme/order") == await listed("nothing") == []
    await journals.drop(str(EU))
    assert await listed("acme/orders") == [str(US)]


async def test_a_listing_equals_what_each_load_says(store: Consensus) -> None:
    """Also of journals that have rolled up and truncated."""
    writer = Journals(store, policy=TINY)
    names = [JournalName.of("c", {"n": n}) for n in range(30)]
    await writer.create_all({name: creation(name) for name in names})
    for n, name in enumerate(names):
        for clock in range(n):
            await writer.append(str(name), [fragment(1, clock=1 + clock), ack(clock + 1)])
    floors = [(await store.scan(journal_key(str(name)), 0))[0].seqno for name in names]
    assert max(floors) > 0
    listed = await Journals(store).list("c")
    assert len(listed) == 30
    for journal in listed:
        assert journal.state == await writer.load(journal.name)


# ------------------------------------------------------------------------------------ following


class Mirror:
    """What a follower has; every state it had is kept by revision."""

    def __init__(self) -> None:
        self.states: dict[str, JournalState] = {}
        self.history: list[tuple[int, dict[str, JournalState]]] = []
        self.jumps = 0

    def take(self, moved: Moved[JournalState]) -> None:
        assert not self.history or moved.revision > self.history[-1][0] or moved.jumped
        self.states.update(moved.changed)
        self.history.append((moved.revision, dict(self.states)))
        self.jumps += moved.jumped


LAST = ack(999)


async def mirrored(journals: Journals, mirror: Mirror) -> None:
    async with asyncio.timeout(PATIENCE_S), aclosing(journals.follow("c")) as moves:
        async for moved in moves:
            mirror.take(moved)
            appended = [r for s in moved.changed.values() for r in s.records[-1:]]
            if any(isinstance(r, AckRecord) and r.clock == LAST.clock for r in appended):
                return


def as_of(
    entries: Mapping[str, list[VersionedData]], revision: int, oracle: Journals
) -> dict[str, JournalState]:
    """The states of whole logs, cut at a revision."""
    states = {}
    for name, log in entries.items():
        cut = [entry for entry in log if entry.revision <= revision]
        if cut:
            states[name] = oracle.log(name).replica.catch_up(cut).state
    return states


class Recorder:
    """Remembers every entry of a store that truncates, so that any revision can be folded again."""

    def __init__(self, store: Consensus) -> None:
        self.store = store
        self.logs: dict[str, list[VersionedData]] = {}

    async def note(self, name: str) -> None:
        log = self.logs.setdefault(name, [])
        log += await self.store.scan(journal_key(name), log[-1].seqno + 1 if log else 0)


async def act(journals: Journals, names: list[JournalName], rng: random.Random) -> set[str]:
    """One command of some kind, where it fits; the journals it may have touched."""
    name = rng.choice(names)
    try:
        match rng.randrange(6):
            case 0:
                await journals.create(name)
            case 1:
                await journals.drop(str(name))
            case 2:
                chosen = {str(n): [ack(rng.randrange(1, 99))] for n in rng.sample(names, 3)}
                await journals.append_all(chosen)
                return set(chosen)
            case 3:
                state = await journals.load(str(name))
                ends = [state.begin, *(record.end for record in state.records)]
                await journals.retain(str(name), rng.choice(ends))
            case _:
                await journals.append(str(name), [fragment(rng.randrange(1, 4)), ack()])
    except MissingJournal:
        await journals.create(name)
    return {str(name)}


@pytest.mark.parametrize("seed", range(4))
async def test_a_follower_has_at_every_revision_what_a_fresh_load_would(
    store: Consensus, seed: int
) -> None:
    """Through drops, recreation, batches, rollups and truncation."""
    rng = random.Random(seed)
    names = [JournalName.of("c", {"n": n}) for n in range(5)]
    writers = [Journals(store, policy=TINY), Journals(store, policy=TINY)]
    recorder, mirror = Recorder(store), Mirror()
    follower = asyncio.create_task(mirrored(Journals(store), mirror))
    for _ in range(80):
        touched = await act(rng.choice(writers), names, rng)
        for name in touched | {str(name) for name in names}:
            await recorder.note(name)
        if rng.random() < 0.3:
            await writers[0].create(JournalName.of("elsewhere", {"n": rng.randrange(10**6)}))
    await writers[0].create(names[0])
    await writers[0].append(str(names[0]), [LAST])
    await follower
    await recorder.note(str(names[0]))
    assert any(log[0].seqno == 0 and len(log) > 6 for log in recorder.logs.values())
    for revision, states in mirror.history:
        assert states == as_of(recorder.logs, revision, Journals(store))


async def test_a_follower_that_fell_behind_starts_over_and_is_right(store: Consensus) -> None:
    writer = Journals(store, policy=TINY)
    names = [JournalName.of("c", {"n": n}) for n in range(3)]
    await writer.create_all({name: creation(name) for name in names})
    mirror = Mirror()
    async with asyncio.timeout(PATIENCE_S), aclosing(Journals(store).follow("c")) as moves:
        mirror.take(await anext(moves))
        # The watch begins only when it is asked for: these are truncated before.
        for clock in range(1, 20):
            await writer.append(str(names[0]), [ack(clock)])
        await writer.append(str(names[1]), [ack()])
        async for moved in moves:
            mirror.take(moved)
            if mirror.states[str(names[1])].end == 1:
                break
        assert moved.jumped
        assert set(moved.changed) == {str(names[0]), str(names[1])}
        for name in names:
            assert mirror.states[str(name)] == await writer.load(str(name))
        # … and goes on from there, one by one.
        await writer.append(str(names[2]), [ack()])
        moved = await anext(moves)
        assert (set(moved.changed), moved.jumped) == ({str(names[2])}, False)


async def test_a_follower_hears_of_progress_elsewhere(store: Consensus) -> None:
    writer = Journals(store)
    await writer.create(JournalName.of("c", {}))
    async with asyncio.timeout(PATIENCE_S), aclosing(Journals(store).follow("c")) as moves:
        begin = await anext(moves)
        await writer.create(JournalName.of("cc", {}))
        moved = await anext(moves)
    assert (moved.revision, moved.changed, moved.jumped) == (begin.revision + 1, {}, False)


async def test_a_follower_waits_out_a_store_that_does_not_answer(store: Consensus) -> None:
    unreliable = UnreliableConsensus(store, p_happen=0.3, p_timeout=0.0, seed=3)
    writer = Journals(store)
    await writer.create(EU)
    async with asyncio.timeout(PATIENCE_S), aclosing(Journals(unreliable).follow()) as moves:
        assert set((await anext(moves)).changed) == {str(EU)}
        await writer.append(str(EU), [ack()])
        assert (await anext(moves)).changed == {str(EU): await writer.load(str(EU))}


def test_a_creation_has_the_partition_values_as_labels() -> None:
    name = JournalName.of("c", {"active": True, "city": "a b"}, key_begin=0x80000000)
    assert creation(name, labels={"zone": "1"}) == Create(
        collection="c",
        labels=(("active", "%_true"), ("city", "a%20b"), ("zone", "1")),
        key_begin=0x80000000,
        key_end=0xFFFFFFFF,
    )


async def test_journals_are_cut_at_one_revision_and_at_exactly_these_offsets(
    store: Consensus,
) -> None:
    journals = Journals(store)
    a, b = str(EU), str(US)
    for name in (EU, US):
        await journals.create(name)
    await journals.append_all({a: [fragment(2), ack()], b: [fragment(2), ack()]})
    await journals.append(a, [fragment(2), ack()])
    forgotten = Forgotten(clock=Clock(7), revision=3)
    cuts = dict.fromkeys((a, b), Retain(offset=3, forgotten=forgotten))
    # Within a record, or within a page that others have made meanwhile: none of them is cut.
    with pytest.raises(Refused, match="have changed"):
        await journals.retain_all({**cuts, b: Retain(offset=1)})
    page = Page(
        path="page", begin=0, end=6, records=4, rows=4, bytes=100, revision_min=1, revision_max=9
    )
    await seal_as(journals, a, page)
    with pytest.raises(Refused, match="have changed"):
        await journals.retain_all(cuts)
    rest = replace(page, path="rest", begin=3, records=2)
    other = replace(page, path="other")
    with pytest.raises(Refused, match="have changed"):
        await journals.retain_all({a: replace(cuts[a], page=rest), b: cuts[b]}, {a: other})
    assert {journal.state.begin for journal in await journals.list()} == {0}
    await journals.retain_all({a: replace(cuts[a], page=rest), b: cuts[b]}, {a: page})
    states = {journal.name: journal.state for journal in await Journals(store).list()}
    assert {(state.begin, state.forgotten) for state in states.values()} == {(3, forgotten)}
    assert states[a].pages == (rest,)
