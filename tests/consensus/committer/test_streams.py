"""Followers miss nothing, repeat nothing, and cost a bounded amount of memory."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import aclosing

import pytest

from consensus.committer.scripted import (
    CACHED,
    COMMITTED,
    RESET,
    ScriptedBackend,
    V,
    committer_on,
    eventually,
    failing,
    fill,
    quick,
    take,
    until,
)
from penstock.consensus.committer import hub, streams
from penstock.consensus.committer.committer import IN_PROCESS
from penstock.consensus.store import (
    CaughtUp,
    Determinate,
    Entries,
    Entry,
    ErrorKind,
    Heartbeat,
    Indeterminate,
    Resync,
    ResyncReason,
    SubscribeEvent,
    WatchEvent,
    WatchProgress,
    WatchResync,
)


def delivered(events: list[SubscribeEvent]) -> list[int]:
    return [event.data.seqno for event in events if isinstance(event, Entry)]


def watched(events: list[WatchEvent]) -> list[tuple[int, str, int]]:
    return [
        (event.revision, key, entry.seqno)
        for event in events
        if isinstance(event, Entries)
        for key, entry in event.entries
    ]


def caught_up(events: list[SubscribeEvent]) -> bool:
    return isinstance(events[-1], CaughtUp)


async def test_a_commit_between_registration_and_snapshot_is_delivered() -> None:
    """A subscriber that registers after its snapshot loses what is committed in between."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 2)

        async def commit_meanwhile() -> None:
            del backend.after["scan"]
            await fill(store, "k", 1, start=2)

        backend.after["scan"] = commit_meanwhile
        events = await take(store.subscribe("k", 0), lambda e: len(delivered(e)) == 3)
        assert delivered(events) == [0, 1, 2]


async def test_a_subscriber_from_5_with_head_9_sees_5_to_9() -> None:
    """History is delivered entry by entry, not as a snapshot of the head."""
    async with committer_on(ScriptedBackend()) as store:
        await fill(store, "k", 10)
        events = await take(store.subscribe("k", 5), caught_up)
        assert delivered(events) == [5, 6, 7, 8, 9]
        assert events[-1] == CaughtUp(9)


async def test_every_entry_arrives_once_and_in_order_under_load() -> None:
    async with committer_on(ScriptedBackend()) as store:
        readers = [
            asyncio.create_task(
                take(store.subscribe("k", start), lambda e: 99 in delivered(e)[-1:])
            )
            for start in (0, 0, 3)
        ]
        await fill(store, "k", 100)
        for start, reader in zip((0, 0, 3), readers, strict=True):
            assert delivered(await reader) == list(range(start, 100))
        assert store.committer.metrics.subscribe_gap.value == 0


async def test_an_absent_key_waits_for_its_first_entry() -> None:
    async with committer_on(ScriptedBackend()) as store:
        reader = asyncio.create_task(take(store.subscribe("k", 0), lambda e: bool(delivered(e))))
        await eventually(lambda: store.committer.admission.subscribers == 1)
        await fill(store, "k", 1)
        assert (await reader)[0] == CaughtUp(None)


async def test_truncated_history_ends_the_stream_with_a_resync() -> None:
    async with committer_on(ScriptedBackend()) as store:
        await fill(store, "k", 6)
        await store.truncate("k", 4)
        events = await take(store.subscribe("k", 2), lambda _: False)
        assert events == [Resync(floor=4, head=5, reason=ResyncReason.TRUNCATED)]


async def test_a_reader_that_overflows_its_buffer_reads_the_store_and_loses_nothing() -> None:
    async with committer_on(ScriptedBackend()) as store:
        count = hub.BUFFER_ENTRIES_MAX + 50
        async with aclosing(store.subscribe("k", 0)) as events:
            assert await anext(events) == CaughtUp(None)
            await fill(store, "k", count)  # while the reader is elsewhere
            got: list[int] = []
            async for event in events:
                if isinstance(event, Entry):
                    got.append(event.data.seqno)
                elif got:
                    break
            assert event == CaughtUp(count - 1)
        assert got == list(range(count))
        assert store.committer.metrics.subscribe_lag.value == 1


async def test_a_reader_that_is_too_slow_must_resync() -> None:
    async with (
        committer_on(ScriptedBackend(), quick(slow_s=0.0)) as store,
        aclosing(store.subscribe("k", 0)) as events,
    ):
        assert await anext(events) == CaughtUp(None)
        await fill(store, "k", hub.BUFFER_ENTRIES_MAX + 1)
        await asyncio.sleep(0.01)
        resync = await anext(events)
        assert isinstance(resync, Resync)
        assert resync.reason is ResyncReason.SLOW
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_entries_too_large_to_publish_are_fetched() -> None:
    async with committer_on(ScriptedBackend()) as store:
        large = bytes(hub.PUBLISHED_ENTRY_BYTES_MAX + 1)
        async with aclosing(store.subscribe("k", 0)) as events:
            assert await anext(events) == CaughtUp(None)
            assert await store.compare_and_set("k", V(0, large)) is COMMITTED
            event = await anext(events)
            assert isinstance(event, Entry)
            assert event.data.data == large


async def test_commits_of_another_committer_reach_subscribers() -> None:
    """The poller is what finds them, and this test is what runs the poller."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 1)
        reader = asyncio.create_task(take(store.subscribe("k", 0), lambda e: 2 in delivered(e)))
        await eventually(lambda: store.committer.admission.subscribers == 1)
        await backend.foreign("k", 1)
        await backend.foreign("k", 2)
        assert delivered(await reader) == [0, 1, 2]


async def test_commits_of_others_are_noticed_while_this_process_commits_all_the_time() -> None:
    """The store tells of a revision that our own newest commit has always left behind."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 1)
        seqnos = itertools.count()

        async def commit_meanwhile() -> None:
            await store.compare_and_set("own", V(next(seqnos), b""))

        reader = asyncio.create_task(take(store.subscribe("k", 0), lambda e: 2 in delivered(e)))
        await eventually(lambda: store.committer.admission.subscribers == 1)
        backend.after["revision"] = commit_meanwhile
        await backend.foreign("k", 1)
        await backend.foreign("k", 2)
        assert delivered(await reader) == [0, 1, 2]


async def test_commits_of_our_own_are_not_taken_for_those_of_others() -> None:
    """A commit is in the store a moment before it is heard of."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store, aclosing(store.subscribe("k", 0)) as events:
        assert await anext(events) == CaughtUp(None)
        hub_ = store.committer.serving(IN_PROCESS).hub
        assert not await hub_.poll()
        release = asyncio.Event()
        backend.after["commit"] = until(release)
        asyncio.get_running_loop().call_later(0.03, release.set)
        committing = asyncio.create_task(store.compare_and_set("own", V(0, b"")))
        await eventually(lambda: backend.calls["commit"] == 1)
        assert not await hub_.poll()
        assert await committing is COMMITTED


async def test_few_streams_read_the_store_at_once() -> None:
    backend = ScriptedBackend()
    reading = most = 0

    async def count() -> None:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.001)
        reading -= 1

    async with committer_on(backend) as store:
        await fill(store, "k", 3)
        backend.before |= {"entries_since": count, "scan": count}
        streams = [
            take(store.watch("", 0), lambda e: isinstance(e[-1], WatchProgress)) for _ in range(60)
        ]
        logs = [take(store.subscribe("k", 0), caught_up) for _ in range(60)]
        await asyncio.gather(*streams, *logs)
    assert most == store.committer.options.limits.catch_ups_max


async def test_an_idle_stream_has_a_heartbeat_with_the_incarnation() -> None:
    async with committer_on(ScriptedBackend(), quick(heartbeat_s=0.01)) as store:
        await fill(store, "k", 1)
        events = await take(store.subscribe("k", 1), lambda e: isinstance(e[-1], Heartbeat))
        assert events[-1] == Heartbeat(head=0, incarnation=await store.incarnation())


async def test_a_stream_outlives_an_outage_of_the_backend() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 3)
        outages = 3

        async def recover() -> None:
            nonlocal outages
            outages -= 1
            if outages >= 0:
                raise Indeterminate(ErrorKind.UNAVAILABLE, "connection lost")

        backend.before["scan"] = recover
        assert delivered(await take(store.subscribe("k", 0), caught_up)) == [0, 1, 2]


async def test_a_missing_schema_is_not_waited_out() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        backend.before["scan"] = failing(Determinate(ErrorKind.UNDEFINED_TABLE, "gone"))
        with pytest.raises(Determinate) as caught:
            await take(store.subscribe("k", 0), lambda _: False)
        assert caught.value.kind is ErrorKind.UNDEFINED_TABLE


async def test_a_reset_of_the_store_ends_subscriptions_and_watches() -> None:
    backend = ScriptedBackend()
    async with (
        committer_on(backend) as store,
        aclosing(store.subscribe("k", 0)) as events,
        aclosing(store.watch("", 0)) as all_,
    ):
        await anext(events)
        await anext(all_)
        backend.vanish(RESET)
        with pytest.raises(Determinate):
            await store.head("k", fresh=True)
        assert await anext(events) == Resync(floor=0, head=0, reason=ResyncReason.STORE_RESET)
        with pytest.raises(Determinate) as caught:
            await anext(all_)
        assert caught.value.kind is ErrorKind.STORE_RESET


# ----------------------------------------------------------------------------------------- watch


async def test_a_watch_delivers_own_and_foreign_commits_once_in_revision_order() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "w/before", 3)
        reader = asyncio.create_task(
            take(store.watch("w/", 0), lambda e: len(watched(e)) == 3 + 40)
        )
        await eventually(lambda: store.committer.admission.subscribers == 1)
        order = random.Random(7)
        for n in range(40):
            if order.random() < 0.5:
                await fill(store, f"w/{n}", 1)
            else:
                await backend.foreign(f"w/{n}", 0)
            await fill(store, "elsewhere", 1, start=n)
        events = await reader
        rows = watched(events)
        revisions = [revision for revision, _, _ in rows]
        assert revisions == sorted(set(revisions))
        assert {key for _, key, _ in rows} == {"w/before", *(f"w/{n}" for n in range(40))}
        for event in events:
            if isinstance(event, Entries):
                assert all(entry.revision == event.revision for _, entry in event.entries)


async def test_entries_of_one_transaction_come_together() -> None:
    async with committer_on(ScriptedBackend()) as store, aclosing(store.watch("", 0)) as events:
        assert await anext(events) == WatchProgress(0)
        await store.compare_and_set_all([("b", V(0, b"")), ("a", V(0, b""))])
        event = await anext(events)
        assert isinstance(event, Entries)
        assert [key for key, _ in event.entries] == ["a", "b"]
        assert await anext(events) == WatchProgress(1)


async def test_an_idle_watch_reports_progress_on_other_prefixes_too() -> None:
    async with committer_on(ScriptedBackend(), quick(progress_s=0.01)) as store:
        await fill(store, "elsewhere", 4)
        events = await take(store.watch("w/", 1), lambda e: len(e) == 3)
        assert events == [WatchProgress(4)] * 3


async def test_truncation_above_the_start_is_one_resync_and_the_watch_goes_on() -> None:
    async with committer_on(ScriptedBackend()) as store:
        await fill(store, "w/a", 5)
        await fill(store, "w/b", 1)
        await store.truncate("w/a", 4)
        async with aclosing(store.watch("w/", 1)) as events:
            resync = await anext(events)
            assert resync == WatchResync(
                revision=6, heads={"w/a": 4, "w/b": 0}, reason=ResyncReason.TRUNCATED
            )
            assert await anext(events) == WatchProgress(6)
            await fill(store, "w/b", 1, start=1)
            assert watched([await anext(events)]) == [(7, "w/b", 1)]


async def test_commits_heard_of_in_the_wrong_order_are_delivered_in_the_right_one() -> None:
    async with committer_on(ScriptedBackend()) as store:
        reader = asyncio.create_task(take(store.watch("", 0), lambda e: len(watched(e)) == 2))
        subscriber = asyncio.create_task(
            take(store.subscribe("k", 0), lambda e: len(delivered(e)) == 2)
        )
        await eventually(lambda: store.committer.admission.subscribers == 2)
        # What two transactions at once may do: the second is heard of first.
        later, earlier = V(1, b"", 2), V(0, b"", 1)
        store.committer._store.hub.publish(2, [("k", later)])
        store.committer._store.hub.publish(1, [("k", earlier)])
        assert watched(await reader) == [(1, "k", 0), (2, "k", 1)]
        assert delivered(await subscriber) == [0, 1]


async def test_a_slow_watcher_costs_the_tail_no_memory_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "TAIL_ENTRIES_MAX", 10)
    monkeypatch.setattr(streams, "REORDER_S", 0.0)
    async with committer_on(ScriptedBackend()) as store:
        async with aclosing(store.watch("", 0)) as events:
            assert await anext(events) == WatchProgress(0)
            await fill(store, "k", 200)
            assert len(store.committer._store.hub.tail) <= 10
            got: list[WatchEvent] = []
            async for event in events:
                got.append(event)
                if len(watched(got)) == 200:
                    break
        assert [seqno for _, _, seqno in watched(got)] == list(range(200))


async def test_what_every_watcher_has_got_is_not_kept() -> None:
    async with committer_on(ScriptedBackend()) as store:
        tail = store.committer._store.hub.tail
        async with aclosing(store.watch("", 0)) as one, aclosing(store.watch("k", 0)) as two:
            for events in (one, two):
                assert await anext(events) == WatchProgress(0)
            for round_ in range(3):
                await fill(store, f"k{round_}", 20)
                assert len(tail) == 20
                for events in (one, two):
                    got: list[WatchEvent] = []
                    async for event in events:
                        got.append(event)
                        if len(watched(got)) == 20 and isinstance(event, WatchProgress):
                            break
                    assert len(tail) == (20 if events is one else 0)


async def test_closing_the_committer_ends_streams_as_unavailable() -> None:
    async with committer_on(ScriptedBackend()) as store:
        async with (
            aclosing(store.subscribe("k", 0)) as events,
            aclosing(store.watch("", 0)) as all_,
        ):
            await anext(events)
            await anext(all_)
            store.committer.drain()
            for stream in (events, all_):
                with pytest.raises(Determinate) as caught:
                    await anext(stream)
                assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert store.committer.admission.subscribers == 0


async def test_streams_are_limited_in_number_only() -> None:
    async with committer_on(ScriptedBackend(), CACHED) as store:
        many = [store.subscribe(f"k/{n}", 0) for n in range(2_000)]
        for stream in many:
            await anext(stream)
        assert await store.head("k/0") is None
        for stream in many:
            await stream.aclose()  # type: ignore[attr-defined]
        assert not store.committer._store.hub.followed
