"""The suite that every store passes, whatever its backend and transport.

A test module says how to make one and inherits the rest:

    class TestSqlite(ConsensusConformance):
        @pytest.fixture
        async def subject(self, tmp_path: Path) -> AsyncIterator[Subject]: ...

Cases use keys of their own, so that a store may be shared between them.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import types
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pytest

from penstock.consensus.store import (
    ATOMIC_BYTES_MAX,
    ATOMIC_ELEMENTS_MAX,
    SCAN_ALL,
    SEQNO_MAX,
    CasResult,
    CaughtUp,
    Consensus,
    ConsensusError,
    Determinate,
    Entries,
    Entry,
    ErrorKind,
    Indeterminate,
    Live,
    Resync,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    WatchProgress,
    WatchResync,
)

COMMITTED = CasResult.COMMITTED
MISMATCH = CasResult.EXPECTATION_MISMATCH
A, D = b"abc", b"def"
PATIENCE_S = 60.0
"""Bounds a hang, not a duration."""

V = VersionedData
T = TypeVar("T")


@dataclass(kw_only=True)
class Subject:
    """A store under test."""

    store: Consensus
    another: Callable[[], Awaitable[Consensus]]
    """A second, independent way to the same store, as another process has; closed by the maker."""
    rounds: int = 12
    """Length of the races: commits per writer."""


def new_key(suffix: str = "") -> str:
    return f"t/{uuid.uuid4().hex}{suffix}"


async def seqnos(store: Consensus, key: str, from_: int = 0, limit: int = SCAN_ALL) -> list[int]:
    return [entry.seqno for entry in await store.scan(key, from_, limit)]


async def fill(store: Consensus, key: str, count: int) -> None:
    """Entries 0 … count-1, each with its seqno as data."""
    for n in range(count):
        assert await store.compare_and_set(key, V(n, b"%d" % n)) is COMMITTED


async def refused(call: Coroutine[Any, Any, object], kind: ErrorKind) -> Determinate:
    with pytest.raises(Determinate) as caught:
        await call
    assert caught.value.kind is kind
    return caught.value


async def increment(store: Consensus, key: str, times: int, writer: str) -> list[VersionedData]:
    """`times` commits by reading the head and appending to it, however often that loses."""
    done: list[VersionedData] = []
    while len(done) < times:
        head = await store.head(key, fresh=True)
        new = V(head.seqno + 1 if head else 0, f"{writer}:{len(done)}".encode())
        try:
            if await store.compare_and_set(key, new) is COMMITTED:
                done.append(new)
        except Determinate as error:
            if error.kind not in (ErrorKind.CONFLICT, ErrorKind.OVERLOADED):
                raise
    return done


async def take_until(
    stream: AsyncIterator[T], enough: Callable[[list[T]], bool], patience_s: float = PATIENCE_S
) -> list[T]:
    """Events of a stream until there are enough of them; closes the stream."""
    events: list[T] = []
    async with asyncio.timeout(patience_s), aclosing(cast("Any", stream)):
        async for event in stream:
            events.append(event)
            if enough(events):
                break
    return events


def own_tasks() -> set[asyncio.Task[Any]]:
    """Tasks of Python code: gRPC's server, written in Cython, keeps one waiting for requests."""
    return {t for t in asyncio.all_tasks() if isinstance(t.get_coro(), types.CoroutineType)}


def gather(logs: dict[str, list[VersionedData]], event: Live) -> None:
    """The logs that a reader of a snapshot keeps; one restarts at an entry that does not follow."""
    for key, entry in event.entries:
        log = logs.setdefault(key, [])
        if log and entry.seqno != log[-1].seqno + 1:
            assert entry.seqno > log[-1].seqno
            log.clear()
        log.append(entry)


async def taken(store: Consensus, prefix: str) -> tuple[dict[str, list[VersionedData]], int]:
    """A snapshot: the logs by key, and the revision."""
    logs: dict[str, list[VersionedData]] = {}
    events = [event async for event in store.snapshot(prefix)]
    for event in events[:-1]:
        assert isinstance(event, Live)
        gather(logs, event)
    assert isinstance(events[-1], WatchProgress)
    return logs, events[-1].revision


def watched(events: list[WatchEvent]) -> list[tuple[str, VersionedData]]:
    return [item for event in events if isinstance(event, Entries) for item in event.entries]


class ConsensusConformance:
    """The contract of `Consensus`, with the rules of revisions, subscribe and watch."""

    # ------------------------------------------------------------------------- one key, in order

    async def test_an_unknown_key_has_nothing(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        assert await store.head(key) is None
        assert await store.head(key, fresh=True) is None
        assert await store.scan(key, 0) == []
        await refused(store.truncate(key, 0), ErrorKind.TRUNCATE_BOUND)
        assert await store.compare_and_set(key, V(1, A)) is MISMATCH
        assert [k async for k in store.list_keys(key)] == []

    async def test_the_first_entry(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        assert await store.compare_and_set(key, V(0, A)) is COMMITTED
        assert [k async for k in store.list_keys(key)] == [key]
        assert await store.head(key) == V(0, A)
        assert [await seqnos(store, key, n) for n in (0, 1, 2)] == [[0], [], []]
        assert not await store.truncate(key, 0)
        await refused(store.truncate(key, 1), ErrorKind.TRUNCATE_BOUND)
        assert await seqnos(store, key) == [0]

    async def test_only_the_next_entry_is_taken(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        assert await store.compare_and_set(key, V(0, A)) is COMMITTED
        assert await store.compare_and_set(key, V(3, D)) is MISMATCH
        assert await store.compare_and_set(key, V(0, D)) is MISMATCH
        assert await store.head(key) == V(0, A)
        assert await store.compare_and_set(key, V(1, D)) is COMMITTED
        assert await store.head(key) == V(1, D)
        assert await store.compare_and_set(key, V(1, D)) is MISMATCH  # not by equal content
        assert await store.compare_and_set(key, V(11, D)) is MISMATCH
        assert [await seqnos(store, key, n) for n in (0, 1, 2)] == [[0, 1], [1], []]
        limited = [await seqnos(store, key, 0, limit) for limit in (0, 1, 2, 100)]
        assert limited == [[], [0], [0, 1], [0, 1]]

    async def test_a_limit_outside_its_range_is_refused(self, subject: Subject) -> None:
        for limit in (-1, 2**63):
            await refused(subject.store.scan(new_key(), 0, limit), ErrorKind.INVALID_ARGUMENT)

    async def test_truncation_is_idempotent_and_keeps_the_head(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 2)
        assert await store.truncate(key, 1) in (1, None)
        assert await seqnos(store, key) == [1]
        assert not await store.truncate(key, 1)
        assert not await store.truncate(key, 0)
        assert await store.head(key) == V(1, b"1")

    async def test_keys_are_independent(self, subject: Subject) -> None:
        store, one, other = subject.store, new_key(), new_key()
        await fill(store, one, 3)
        await store.truncate(one, 2)
        assert await store.head(other) is None
        assert await store.compare_and_set(other, V(0, A)) is COMMITTED
        assert await seqnos(store, one) == [2]

    @pytest.mark.parametrize("size", [10 << 10, 1 << 20, 5 << 20, 20 << 20])
    async def test_payloads_come_back_byte_by_byte(self, subject: Subject, size: int) -> None:
        store, key = subject.store, new_key()
        data = random.Random(size).randbytes(size)
        assert await store.compare_and_set(key, V(0, data)) is COMMITTED
        assert await store.head(key, fresh=True) == V(0, data)
        assert await store.scan(key, 0) == [V(0, data)]

    async def test_an_empty_payload_is_a_payload(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        assert await store.compare_and_set(key, V(0, b"")) is COMMITTED
        assert await store.head(key) == V(0, b"")

    async def test_nothing_comes_back_below_the_floor(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 4)
        assert await store.truncate(key, 3) in (3, None)
        assert await store.compare_and_set(key, V(0, D)) is MISMATCH
        assert await store.compare_and_set(key, V(1, D)) is MISMATCH
        assert await store.scan(key, 0) == [V(3, b"3")]
        assert await store.compare_and_set(key, V(4, D)) is COMMITTED

    async def test_seqnos_are_63_bits(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        assert await store.compare_and_set(key, V(SEQNO_MAX, A)) is MISMATCH
        for seqno in (2**63, -1):
            call = store.compare_and_set(key, V(seqno, A))
            await refused(call, ErrorKind.INVALID_ARGUMENT)
            await refused(store.scan(key, seqno), ErrorKind.INVALID_ARGUMENT)
            await refused(store.truncate(key, seqno), ErrorKind.INVALID_ARGUMENT)

    @pytest.mark.parametrize(
        "key",
        [
            pytest.param("", id="empty"),
            pytest.param("k" * 513, id="513 bytes"),
            pytest.param("ü" * 257, id="514 bytes in 257 characters"),
            pytest.param("a\0b", id="NUL inside"),
            pytest.param("a\ud800b", id="a lone surrogate"),
        ],
    )
    async def test_a_key_that_is_none_is_refused(self, subject: Subject, key: str) -> None:
        store = subject.store
        for call in (
            store.compare_and_set(key, V(0, A)),
            store.compare_and_set_all([(key, V(0, A))]),
            store.head(key),
            store.scan(key, 0),
            store.truncate(key, 0),
        ):
            await refused(call, ErrorKind.INVALID_ARGUMENT)
        [outcome, neighbour] = await store.compare_and_set_many(
            [(key, V(0, A)), (new_key(), V(0, A))]
        )
        assert isinstance(outcome, Determinate)
        assert outcome.kind is ErrorKind.INVALID_ARGUMENT
        assert neighbour is COMMITTED

    async def test_odd_keys_are_keys_and_all_different(self, subject: Subject) -> None:
        store, base = subject.store, new_key()
        odd = ["/%_", "'\"`;--", "é", "e\u0301", "日本", "😀", " ", "  ", "A", "a", "\\", "\n\t"]
        keys = [base + suffix for suffix in ["", *odd]]
        keys.append(base + "x" * (512 - len(base.encode())))
        for n, key in enumerate(keys):
            assert await store.compare_and_set(key, V(0, b"%d" % n)) is COMMITTED
        for n, key in enumerate(keys):
            assert await store.head(key, fresh=True) == V(0, b"%d" % n)
        assert sorted([k async for k in store.list_keys(base)]) == sorted(keys)
        assert [k async for k in store.list_keys(base + "/%")] == [base + "/%_"]

    async def test_list_keys_pages_through_thousands(self, subject: Subject) -> None:
        store, base = subject.store, new_key("/")
        keys = [f"{base}{n:05}" for n in range(2_100)]
        for start in range(0, len(keys), 700):
            batch = [(key, V(0, b"")) for key in keys[start : start + 700]]
            assert await store.compare_and_set_all(batch) is COMMITTED
        assert sorted([k async for k in store.list_keys(base)]) == keys

    # -------------------------------------------------------------------------------- concurrency

    @pytest.mark.parametrize("seqno", [0, 1])
    async def test_of_many_equal_appends_one_wins(self, subject: Subject, seqno: int) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, seqno)
        news = [V(seqno, b"writer %d" % n) for n in range(32)]
        results = await asyncio.gather(*[store.compare_and_set(key, new) for new in news])
        assert sorted(r.name for r in results) == ["COMMITTED", *["EXPECTATION_MISMATCH"] * 31]
        assert await store.head(key, fresh=True) == news[results.index(COMMITTED)]

    async def test_increments_lose_nothing(self, subject: Subject) -> None:
        store, key, writers = subject.store, new_key(), 16
        stop = asyncio.Event()

        async def watch_head() -> None:
            last = -1
            while not stop.is_set():
                before = await store.head(key, fresh=True)
                found = await seqnos(store, key)
                after = await store.head(key, fresh=True)
                assert found == list(range(len(found)))
                assert (before.seqno if before else -1) < len(found) or not found
                assert len(found) - 1 <= (after.seqno if after else -1)
                stale = await store.head(key)
                seen = stale.seqno if stale else -1
                assert seen >= last
                last = seen
                await asyncio.sleep(0)

        async def write() -> list[VersionedData]:
            try:
                return [
                    new
                    for done in await asyncio.gather(
                        *[increment(store, key, subject.rounds, f"w{n}") for n in range(writers)]
                    )
                    for new in done
                ]
            finally:
                stop.set()

        _, committed = await asyncio.gather(watch_head(), write())
        assert sorted(await store.scan(key, 0), key=lambda e: e.seqno) == sorted(
            committed, key=lambda e: e.seqno
        )
        assert len(committed) == writers * subject.rounds

    async def test_truncation_beside_appends_leaves_no_hole(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        stop = asyncio.Event()

        async def truncate() -> None:
            while not stop.is_set():
                if head := await store.head(key, fresh=True):
                    try:
                        await store.truncate(key, head.seqno)
                    except Determinate as error:
                        if error.kind is not ErrorKind.CONFLICT:
                            raise
                found = await seqnos(store, key)
                assert found == list(range(found[0], found[0] + len(found))) if found else True
                await asyncio.sleep(0)

        async def write() -> None:
            try:
                await asyncio.gather(
                    *[increment(store, key, subject.rounds, f"w{n}") for n in range(4)]
                )
            finally:
                stop.set()

        await asyncio.gather(truncate(), truncate(), write())
        head = await store.head(key, fresh=True)
        assert head is not None
        assert head.seqno == 4 * subject.rounds - 1

    async def test_a_cancelled_append_happens_whole_or_not(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        for turns in range(8):
            before = await store.head(key, fresh=True)
            new = V(before.seqno + 1 if before else 0, b"%d" % turns)
            append = asyncio.create_task(store.compare_and_set(key, new))
            for _ in range(turns):
                await asyncio.sleep(0)
            append.cancel()
            await asyncio.wait([append])
            # It may still be under way: the next append of the same seqno settles it.
            settled = await store.compare_and_set(key, V(new.seqno, b"next"))
            head = await store.head(key, fresh=True)
            assert head == (V(new.seqno, b"next") if settled is COMMITTED else new)

    # ------------------------------------------------------------------------------------ batches

    async def test_elements_of_many_are_independent(self, subject: Subject) -> None:
        store, one, two, three = subject.store, new_key(), new_key(), new_key()
        await fill(store, one, 1)
        await fill(store, two, 1)
        batch = [(one, V(1, A)), (two, V(5, A)), (three, V(0, A))]
        assert await store.compare_and_set_many(batch) == [COMMITTED, MISMATCH, COMMITTED]
        assert await store.compare_and_set_many([]) == []

    @pytest.mark.parametrize(
        ("chain", "want"),
        [
            pytest.param([1, 2, 3], [COMMITTED] * 3, id="c37: n, n+1, n+2"),
            pytest.param([1, 3, 2], [COMMITTED, MISMATCH, COMMITTED], id="c38: n, n+2, n+1"),
            pytest.param([1, 1], [COMMITTED, MISMATCH], id="c39: n, n"),
            pytest.param([2, 1, 2], [MISMATCH, COMMITTED, COMMITTED], id="n+1, n, n+1"),
        ],
    )
    @pytest.mark.parametrize("created", [True, False], ids=["existing key", "new key"])
    async def test_elements_of_one_key_are_judged_in_order(
        self, subject: Subject, created: bool, chain: list[int], want: list[CasResult]
    ) -> None:
        store, key, base = subject.store, new_key(), 0 if created else -1
        await fill(store, key, base + 1)
        batch = [(key, V(base + n, b"%d" % i)) for i, n in enumerate(chain)]
        assert await store.compare_and_set_many(batch) == want
        won = [new for (_, new), result in zip(batch, want, strict=True) if result is COMMITTED]
        assert await store.scan(key, base + 1) == won

    async def test_two_committers_in_opposite_order_do_not_deadlock(self, subject: Subject) -> None:
        one, two = subject.store, await subject.another()
        keys = [new_key(f"/{n}") for n in range(6)]

        async def work(store: Consensus, order: list[str], writer: str) -> int:
            won = 0
            for turn in range(subject.rounds):
                heads = {key: await store.head(key, fresh=True) for key in order}
                batch = [
                    (key, V(h.seqno + 1 if h else 0, f"{writer}:{turn}".encode()))
                    for key, h in heads.items()
                ]
                if turn % 2:
                    won += len(batch) * (await store.compare_and_set_all(batch) is COMMITTED)
                else:
                    results = await store.compare_and_set_many(batch)
                    assert not [r for r in results if isinstance(r, ConsensusError)]
                    won += results.count(COMMITTED)
            return won

        won = await asyncio.gather(
            *[work(one, keys, f"a{n}") for n in range(3)],
            *[work(two, keys[::-1], f"b{n}") for n in range(3)],
        )
        logs = [await seqnos(one, key) for key in keys]
        assert all(log == list(range(len(log))) for log in logs)
        assert sum(map(len, logs)) == sum(won)

    async def test_all_commits_every_element_under_one_revision(self, subject: Subject) -> None:
        store, keys = subject.store, [new_key() for _ in range(5)]
        await fill(store, keys[0], 2)
        batch = [(keys[0], V(2, A)), *[(key, V(0, D)) for key in keys[1:]]]
        assert await store.compare_and_set_all(batch) is COMMITTED
        heads = [await store.head(key, fresh=True) for key in keys]
        assert heads == [new for _, new in batch]
        assert len({head.revision for head in heads if head}) == 1

    async def test_all_with_one_mismatch_changes_nothing(self, subject: Subject) -> None:
        store, exists, fresh, wrong = subject.store, new_key(), new_key(), new_key()
        await fill(store, exists, 1)
        batch = [(exists, V(1, A)), (fresh, V(0, A)), (wrong, V(7, A))]
        assert await store.compare_and_set_all(batch) is MISMATCH
        assert await store.head(exists, fresh=True) == V(0, b"0")
        assert await store.head(fresh, fresh=True) is None
        assert [k async for k in store.list_keys(fresh)] == []
        # The key that was nearly created can still be.
        assert await store.compare_and_set(fresh, V(0, D)) is COMMITTED

    async def test_all_and_single_elements_mix_under_concurrency(self, subject: Subject) -> None:
        store, keys = subject.store, [new_key() for _ in range(4)]
        singles = [store.compare_and_set(key, V(0, b"single")) for key in keys[:2]]
        groups = [
            store.compare_and_set_all([(key, V(0, b"all %d" % n)) for key in keys])
            for n in range(8)
        ]
        results = await asyncio.gather(*groups, *singles)
        heads = [await store.head(key, fresh=True) for key in keys]
        if COMMITTED in results[:8]:
            assert results.count(COMMITTED) == 1
            assert {head and head.data for head in heads} == {b"all %d" % results.index(COMMITTED)}
        else:
            assert results[8:] == [COMMITTED, COMMITTED]
            assert heads[2:] == [None, None]

    async def test_all_refuses_what_it_cannot_carry(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        call = store.compare_and_set_all([(key, V(0, A)), (key, V(1, A))])
        await refused(call, ErrorKind.INVALID_ARGUMENT)
        await refused(store.compare_and_set_all([]), ErrorKind.INVALID_ARGUMENT)
        many = [(f"{key}/{n}", V(0, A)) for n in range(ATOMIC_ELEMENTS_MAX + 1)]
        await refused(store.compare_and_set_all(many), ErrorKind.INVALID_ARGUMENT)
        big = [(f"{key}/{n}", V(0, bytes(ATOMIC_BYTES_MAX // 2 + 1))) for n in range(2)]
        await refused(store.compare_and_set_all(big), ErrorKind.TOO_LARGE)
        assert [k async for k in store.list_keys(key)] == []
        assert await store.compare_and_set_all(many[:-1]) is COMMITTED

    # ---------------------------------------------------------------------------------- revisions

    async def test_revisions_follow_commit_order_over_two_committers(
        self, subject: Subject
    ) -> None:
        stores, base = [subject.store, await subject.another()], new_key("/")

        async def write(store: Consensus, writer: int) -> list[int]:
            revisions = []
            for n in range(subject.rounds):
                key = f"{base}{writer}"
                assert await store.compare_and_set(key, V(n, b"")) is COMMITTED
                head = await store.head(key, fresh=True)
                assert head is not None
                revisions.append(head.revision)
            return revisions

        written = await asyncio.gather(*[write(stores[n % 2], n) for n in range(12)])
        assert all(r == sorted(set(r)) and r[0] > 0 for r in written)
        # What is acknowledged before another begins has the smaller revision.
        last = max(revision for revisions in written for revision in revisions)
        for store in stores:
            key = new_key()
            assert await store.compare_and_set(key, V(0, b"")) is COMMITTED
            head = await store.head(key, fresh=True)
            assert head is not None
            assert head.revision > last
            last = head.revision

    async def test_a_mismatch_takes_no_revision(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 1)
        assert await store.compare_and_set(key, V(0, A)) is MISMATCH
        entries = await store.scan(key, 0)
        assert [entry.revision for entry in entries] == [
            head.revision for head in [await store.head(key, fresh=True)] if head
        ]

    # ---------------------------------------------------------------------------------- subscribe

    async def test_subscribe_delivers_history_then_new_entries(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 10)
        stream = store.subscribe(key, 5)

        async def append_later() -> None:
            for n in range(10, 15):
                assert await store.compare_and_set(key, V(n, b"%d" % n)) is COMMITTED

        def complete(events: list[SubscribeEvent]) -> bool:
            return any(isinstance(e, Entry) and e.data.seqno == 14 for e in events)

        events, _ = await asyncio.gather(take_until(stream, complete), append_later())
        got = [event.data for event in events if isinstance(event, Entry)]
        assert [entry.seqno for entry in got] == list(range(5, 15))
        assert all(entry.data == b"%d" % entry.seqno and entry.revision > 0 for entry in got)

    async def test_subscribe_to_an_absent_key_waits_for_its_first_entry(
        self, subject: Subject
    ) -> None:
        store, key = subject.store, new_key()
        caught_up = asyncio.Event()

        def complete(events: list[SubscribeEvent]) -> bool:
            if isinstance(events[-1], CaughtUp):
                caught_up.set()
            return isinstance(events[-1], Entry)

        async def append_when_caught_up() -> None:
            await caught_up.wait()
            assert await store.compare_and_set(key, V(0, A)) is COMMITTED

        events, _ = await asyncio.gather(
            take_until(store.subscribe(key, 0), complete), append_when_caught_up()
        )
        assert events[0] == CaughtUp(None)
        assert events[-1] == Entry(V(0, A))

    async def test_subscribe_says_when_it_has_reached_the_head(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 3)
        events = await take_until(
            store.subscribe(key, 0), lambda events: isinstance(events[-1], CaughtUp)
        )
        assert events == [*[Entry(V(n, b"%d" % n)) for n in range(3)], CaughtUp(2)]

    async def test_subscribe_below_the_floor_resyncs_and_ends(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 6)
        await store.truncate(key, 4)
        async with asyncio.timeout(PATIENCE_S):
            events = [event async for event in store.subscribe(key, 2)]
        assert isinstance(events[-1], Resync)
        assert (events[-1].floor, events[-1].head) == (4, 5)
        assert not [event for event in events if isinstance(event, Entry)]

    async def test_subscribe_sees_commits_of_another_committer(self, subject: Subject) -> None:
        store, other, key = subject.store, await subject.another(), new_key()
        await fill(store, key, 1)

        async def append() -> None:
            for n in range(1, 8):
                writer = other if n % 2 else store
                assert await writer.compare_and_set(key, V(n, b"%d" % n)) is COMMITTED

        events, _ = await asyncio.gather(
            take_until(
                store.subscribe(key, 0),
                lambda events: isinstance(e := events[-1], Entry) and e.data.seqno == 7,
            ),
            append(),
        )
        assert [e.data.seqno for e in events if isinstance(e, Entry)] == list(range(8))

    # -------------------------------------------------------------------------------------- watch

    async def test_watch_delivers_every_entry_once_in_revision_order(
        self, subject: Subject
    ) -> None:
        stores, base = [subject.store, await subject.another()], new_key("/")
        await fill(stores[0], new_key(), 1)
        start = await stores[0].compare_and_set(f"{base}start", V(0, b""))
        assert start is COMMITTED
        head = await stores[0].head(f"{base}start", fresh=True)
        assert head is not None
        writers, rounds = 12, subject.rounds

        async def write(writer: int) -> None:
            store = stores[writer % 2]
            for n in range(rounds):
                assert await store.compare_and_set(f"{base}{writer}", V(n, b"")) is COMMITTED

        events, *_ = await asyncio.gather(
            take_until(
                stores[0].watch(base, head.revision),
                lambda events: len(watched(events)) >= writers * rounds,
            ),
            *[write(n) for n in range(writers)],
        )
        revisions = [event.revision for event in events if isinstance(event, Entries)]
        assert revisions == sorted(set(revisions))
        assert revisions[0] > head.revision
        got = watched(events)
        assert len(got) == writers * rounds
        for writer in range(writers):
            mine = [entry.seqno for key, entry in got if key == f"{base}{writer}"]
            assert mine == list(range(rounds))
        # Whoever begins again at any point sees the same from there.
        middle = revisions[len(revisions) // 2]
        again = await take_until(
            stores[1].watch(base, middle),
            lambda events: len(watched(events)) >= len([e for _, e in got if e.revision > middle]),
        )
        assert watched(again) == [item for item in got if item[1].revision > middle]

    async def test_watch_keeps_a_revision_together(self, subject: Subject) -> None:
        store, base = subject.store, new_key("/")
        await fill(store, f"{base}0", 1)
        head = await store.head(f"{base}0", fresh=True)
        assert head is not None
        batch = [(f"{base}{n:03}", V(0, b"x" * 50)) for n in range(1, 400)]
        assert await store.compare_and_set_all(batch) is COMMITTED
        events = await take_until(
            store.watch(base, head.revision), lambda events: bool(watched(events))
        )
        [entries] = [event for event in events if isinstance(event, Entries)]
        assert list(entries.entries) == batch
        assert {entry.revision for _, entry in entries.entries} == {entries.revision}

    async def test_watch_reports_progress_past_other_keys(self, subject: Subject) -> None:
        store, base, elsewhere = subject.store, new_key("/"), new_key()
        await fill(store, f"{base}0", 1)
        mine = await store.head(f"{base}0", fresh=True)
        await fill(store, elsewhere, 3)
        theirs = await store.head(elsewhere, fresh=True)
        assert mine is not None
        assert theirs is not None
        events = await take_until(
            store.watch(base, mine.revision),
            lambda events: (
                isinstance(e := events[-1], WatchProgress) and e.revision >= theirs.revision
            ),
        )
        assert not watched(events)

    async def test_watch_resyncs_where_truncation_took_entries(self, subject: Subject) -> None:
        store, base = subject.store, new_key("/")
        await fill(store, f"{base}a", 1)
        start = await store.head(f"{base}a", fresh=True)
        assert start is not None
        for n in range(1, 5):
            assert await store.compare_and_set(f"{base}a", V(n, b"")) is COMMITTED
        await fill(store, f"{base}b", 2)
        await store.truncate(f"{base}a", 3)
        later = asyncio.create_task(store.compare_and_set(f"{base}b", V(2, b"")))
        events = await take_until(
            store.watch(base, start.revision),
            lambda events: (
                (f"{base}b", V(2, b"")) in watched(events)
                or any(isinstance(e, WatchResync) and e.heads.get(f"{base}b") == 2 for e in events)
            ),
        )
        assert await later is COMMITTED
        resync = next(event for event in events if isinstance(event, WatchResync))
        assert resync.heads[f"{base}a"] == 4
        assert not watched(events[: events.index(resync)])
        assert all(entry.revision > resync.revision for _, entry in watched(events))
        # Who had seen what is gone needs no resync.
        caught_up = await take_until(
            store.watch(base, resync.revision), lambda events: isinstance(events[-1], WatchProgress)
        )
        assert not [event for event in caught_up if isinstance(event, WatchResync)]

    async def test_watch_refuses_a_revision_that_is_none(self, subject: Subject) -> None:
        for revision in (-1, 2**63):
            with pytest.raises(Determinate) as caught:
                await take_until(subject.store.watch("", revision), bool)
            assert caught.value.kind is ErrorKind.INVALID_ARGUMENT

    # ----------------------------------------------------------------------------------- snapshot

    async def test_a_snapshot_of_nothing_has_a_revision(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 1)
        head = await store.head(key, fresh=True)
        assert head is not None
        logs, revision = await taken(store, new_key("/"))
        assert logs == {}
        assert revision >= head.revision

    async def test_a_snapshot_has_the_live_entries_and_no_others(self, subject: Subject) -> None:
        store, base = subject.store, new_key("/")
        for key, count in (("a", 3), ("b", 1), ("a/c", 5), ("ä", 2)):
            await fill(store, base + key, count)
        await fill(store, f"{base[:-1]}x", 2)  # shares all but the end of the prefix
        await store.truncate(f"{base}a/c", 3)
        logs, revision = await taken(store, base)
        assert {k.removeprefix(base): [e.seqno for e in log] for k, log in logs.items()} == {
            "a": [0, 1, 2],
            "a/c": [3, 4],
            "b": [0],
            "ä": [0, 1],
        }
        for key, log in logs.items():
            assert log == await store.scan(key, 0)
            assert all(0 < entry.revision <= revision for entry in log)
        whole, _ = await taken(store, "")
        assert logs.items() <= whole.items()

    async def test_a_snapshot_of_ten_thousand_keys_comes_in_pages(self, subject: Subject) -> None:
        store, base = subject.store, new_key("/")
        keys = [f"{base}{n:05}" for n in range(10_000)]
        for start in range(0, len(keys), ATOMIC_ELEMENTS_MAX):
            batch = [(key, V(0, key.encode())) for key in keys[start : start + ATOMIC_ELEMENTS_MAX]]
            assert await store.compare_and_set_all(batch) is COMMITTED
        events = [event async for event in store.snapshot(base)]
        pages = [event for event in events if isinstance(event, Live)]
        assert len(pages) > 2
        assert max(len(page.entries) for page in pages) < len(keys) / 2
        assert [key for page in pages for key, _ in page.entries] == keys
        assert isinstance(events[-1], WatchProgress)

    async def test_a_snapshot_and_then_a_watch_miss_and_repeat_nothing(
        self, subject: Subject
    ) -> None:
        """Logs whose writers truncate behind themselves, as state logs do, between all pages."""
        store, other, base = subject.store, await subject.another(), new_key("/")
        keys = [f"{base}{n}" for n in range(5)]
        bulk = bytes(1 << 20)  # a page holds some eight of them
        for n in range(4):
            for key in keys:
                assert await store.compare_and_set(key, V(n, bulk)) is COMMITTED
        heads = dict.fromkeys(keys, 3)

        async def write(key: str, *, truncate: bool) -> None:
            heads[key] += 1
            assert await other.compare_and_set(key, V(heads[key], b"later")) is COMMITTED
            if truncate:
                await other.truncate(key, heads[key])

        logs: dict[str, list[VersionedData]] = {}
        revision = -1
        turn = 0
        async for event in store.snapshot(base):
            if isinstance(event, WatchProgress):
                assert revision < 0
                revision = event.revision
                continue
            gather(logs, event)
            # Behind, on and before the page that was read: cut off, appended to, created.
            for offset, key in enumerate(keys):
                await write(key, truncate=(turn + offset) % 2 == 0)
            await fill(other, f"{base}{turn}/new", 2)
            heads[f"{base}{turn}/new"] = 1
            turn += 1
        assert turn > 2
        now = {key: await store.scan(key, 0) for key in heads}
        for key, log in now.items():
            live = [entry for entry in log if entry.revision <= revision]
            known = logs.get(key, [])
            assert known[len(known) - len(live) :] == live
            assert all(entry.revision <= revision for entry in known)
            # What is left of each is one log: contiguous up to the head as of the revision.
            assert [e.seqno for e in known] == list(
                range(known[0].seqno, known[0].seqno + len(known)) if known else ()
            )
        due = sum(entry.revision > revision for log in now.values() for entry in log)
        await fill(other, f"{base}end", 1)
        events = await take_until(
            store.watch(base, revision),
            lambda events: any(key == f"{base}end" for key, _ in watched(events)),
        )
        if not any(isinstance(event, WatchResync) for event in events):
            assert len(watched(events)) == due + 1
            assert all(entry.revision > revision for _, entry in watched(events))

    async def test_a_snapshot_beside_writers_is_of_one_revision(self, subject: Subject) -> None:
        """Keys that only ever move together are seen together."""
        stores, base = [subject.store, await subject.another()], new_key("/")
        keys = [f"{base}{n:04}" for n in range(700)]
        done = asyncio.Event()

        async def write() -> None:
            for n in range(6):  # three pages, in the end
                batch = [(key, V(n, b"")) for key in keys]
                assert await stores[1].compare_and_set_all(batch) is COMMITTED
            done.set()

        async def read() -> None:
            while not done.is_set():
                logs, revision = await taken(stores[0], base)
                assert len({log[-1].seqno for log in logs.values()}) <= 1
                assert len(logs) in (0, len(keys))
                assert all(log[-1].revision <= revision for log in logs.values())

        await asyncio.gather(write(), read())

    # ----------------------------------------------------------------------------------- identity

    async def test_a_fresh_head_sees_a_foreign_commit(self, subject: Subject) -> None:
        store, other, key = subject.store, await subject.another(), new_key()
        await fill(store, key, 1)
        assert await store.head(key) == V(0, b"0")
        assert await other.compare_and_set(key, V(1, D)) is COMMITTED
        assert await store.head(key, fresh=True) == V(1, D)
        assert await store.compare_and_set(key, V(2, A)) is COMMITTED

    async def test_every_way_in_sees_one_incarnation(self, subject: Subject) -> None:
        incarnation = await subject.store.incarnation()
        assert len(incarnation) == 16
        assert await (await subject.another()).incarnation() == incarnation

    async def test_a_closed_store_refuses_everything(self, subject: Subject) -> None:
        store, key = await subject.another(), new_key()
        tasks = own_tasks()
        assert await store.compare_and_set(key, V(0, A)) is COMMITTED
        await store.close()
        await store.close()
        for call in (
            store.head(key),
            store.compare_and_set(key, V(1, A)),
            store.compare_and_set_all([(key, V(1, A))]),
            store.scan(key, 0),
            store.truncate(key, 0),
            store.incarnation(),
        ):
            await refused(call, ErrorKind.UNAVAILABLE)
        streams = (
            store.subscribe(key, 0),
            store.watch("", 0),
            store.list_keys(),
            store.snapshot(""),
        )
        for stream in streams:
            with pytest.raises(Determinate) as caught:
                await take_until(cast("AsyncIterator[object]", stream), bool)
            assert caught.value.kind is ErrorKind.UNAVAILABLE
        [outcome] = await store.compare_and_set_many([(key, V(1, A))])
        assert isinstance(outcome, Determinate)
        async with asyncio.timeout(PATIENCE_S):  # the far end of a transport may take a moment
            while left := own_tasks() - tasks:
                await asyncio.wait(left)

    async def test_errors_keep_class_kind_and_message(self, subject: Subject) -> None:
        store, key = subject.store, new_key()
        await fill(store, key, 1)
        error = await refused(store.truncate(key, 9), ErrorKind.TRUNCATE_BOUND)
        assert key in error.message
        assert "0" in error.message
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert type(again) is Determinate
        assert (again.kind, again.message) == (error.kind, error.message)
        assert not isinstance(error, Indeterminate)
