"""Streams whose committer dies, and streams whose reader sleeps."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.consensus.committer.client import RpcConsensus, RpcOptions
from penstock.consensus.store import (
    CasResult,
    ConsensusError,
    Entries,
    Entry,
    Resync,
    ResyncReason,
    VersionedData,
    WatchProgress,
    WatchResync,
)
from penstock_bench.persistd_process import PersistdProcess, running_persistd

LONG = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0")) > 0
KEYS = 10_000 if LONG else 1_000
WRITERS = 32
COMMITS = 20_000 if LONG else 2_000
KILLS = 4 if LONG else 2

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

Seen = tuple[int, str, int, bytes]
"""revision, key, seqno, data"""


class Writers:
    """Commits to random keys, through a few connections, until enough is committed."""

    def __init__(self, url: str) -> None:
        options = RpcOptions(read_s=5, write_s=5)
        self.stores = [RpcConsensus(url, options) for _ in range(4)]
        self.committed = 0
        self.progress = asyncio.Condition()

    async def reached(self, count: int) -> None:
        async with self.progress:
            await self.progress.wait_for(lambda: self.committed >= count)

    async def run(self) -> None:
        await asyncio.gather(*(self.write(n) for n in range(WRITERS)))
        for store in self.stores:
            await store.close()

    async def write(self, number: int) -> None:
        store = self.stores[number % len(self.stores)]
        rng = random.Random(number)
        while self.committed < COMMITS:
            key = f"watched/{rng.randrange(KEYS)}"
            try:
                head = await store.head(key)
                seqno = 0 if head is None else head.seqno + 1
                token = f"{number}-{self.committed}".encode()
                result = await store.compare_and_set(key, VersionedData(seqno, token))
                async with self.progress:
                    self.committed += result is CasResult.COMMITTED
                    self.progress.notify_all()
            except ConsensusError:
                await asyncio.sleep(0.05)


async def truth(store: RpcConsensus) -> list[Seen]:
    """Read all entries from the logs themselves."""
    found: list[Seen] = []
    async for key in store.list_keys("watched/"):
        entries = await store.scan(key, 0)
        found += [(entry.revision, key, entry.seqno, entry.data) for entry in entries]
    return sorted(found)


async def watch_until(
    store: RpcConsensus, seen: list[Seen], enough: asyncio.Event, last: list[int]
) -> None:
    """Collect events until everything up to `last` was delivered, once that is known."""
    newest = 0
    async for event in store.watch("watched/", 0):
        match event:
            case Entries(revision, entries):
                assert revision > newest, "strictly increasing"
                newest = revision
                seen += [(revision, key, entry.seqno, entry.data) for key, entry in entries]
                assert all(entry.revision == revision for _, entry in entries)
            case WatchProgress(revision):
                assert revision >= newest
                newest = revision
            case WatchResync():
                raise AssertionError("nothing was truncated")
        if enough.is_set() and newest >= last[0]:
            return


async def test_a_watch_over_all_keys_misses_and_repeats_nothing(
    persistd: PersistdProcess,
) -> None:
    writers = Writers(persistd.url)
    reader = RpcConsensus(persistd.url)
    seen: list[Seen] = []
    enough, last = asyncio.Event(), [0]
    watching = asyncio.create_task(watch_until(reader, seen, enough, last))
    writing = asyncio.create_task(writers.run())
    for kill in range(KILLS):
        await writers.reached(COMMITS * (kill + 1) // (KILLS + 1))
        await asyncio.to_thread(persistd.kill)
        await asyncio.to_thread(persistd.start)
    await writing
    wanted = await truth(reader)
    last[0] = wanted[-1][0]
    enough.set()
    # Another commit gives a stream that has everything something to deliver.
    await reader.compare_and_set("other", VersionedData(0, b"x"))
    await asyncio.wait_for(watching, 60)
    await reader.close()
    assert len(wanted) >= COMMITS
    assert sorted(seen) == wanted
    assert [each[0] for each in seen] == sorted(each[0] for each in seen)


async def test_a_sleeping_subscriber_costs_little_and_resyncs(
    persistd: PersistdProcess,
) -> None:
    """100 MiB are committed and truncated while it does not read; it resyncs and continues."""
    store, sleeper = RpcConsensus(persistd.url), RpcConsensus(persistd.url)
    size, count = 512 << 10, 200
    noise = random.Random(1).randbytes(size)
    await store.compare_and_set("log", VersionedData(0, b"first"))
    stream: AsyncIterator[object] = sleeper.subscribe("log", 0)
    assert await anext(stream) == Entry(VersionedData(0, b"first"))
    before = resident_bytes(persistd.pid)
    for seqno in range(1, count + 1):
        assert await store.compare_and_set("log", VersionedData(seqno, noise)) is (
            CasResult.COMMITTED
        )
        await store.truncate("log", seqno)
    grown = resident_bytes(persistd.pid) - before
    assert grown < size * count / 2, f"{grown >> 20} MiB are kept for one sleeper"
    following = 1
    resync: Resync | None = None
    async for event in stream:
        match event:
            case Entry(entry):
                assert entry.seqno == following
                following += 1
            case Resync():
                resync = event
            case _:
                pass
    assert resync is not None
    assert resync.reason in (ResyncReason.TRUNCATED, ResyncReason.SLOW)
    assert (resync.floor, resync.head) == (count, count)
    again = sleeper.subscribe("log", resync.floor)
    assert await anext(again) == Entry(VersionedData(count, noise))
    for each in (stream, again):
        await each.aclose()  # type: ignore[attr-defined]
    await store.close()
    await sleeper.close()


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


@pytest.fixture
def persistd(tmp_path: Path) -> Iterator[PersistdProcess]:
    url = f"sqlite:///{tmp_path / 'consensus.db'}"
    with running_persistd(url, tmp_path / "persistd.log") as daemon:
        yield daemon
