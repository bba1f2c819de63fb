from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from consensus.conformance import COMMITTED, MISMATCH, V
from penstock.consensus.blocking import BlockingConsensus
from penstock.consensus.open import open_consensus
from penstock.consensus.store import (
    CaughtUp,
    Determinate,
    Entries,
    Entry,
    ErrorKind,
    Heartbeat,
    Progress,
)
from penstock.errors import Bug, UsageError


def test_it_is_the_whole_contract(tmp_path: Path) -> None:
    with BlockingConsensus.open(f"sqlite:///{tmp_path}/p.db") as store:
        assert len(store.incarnation()) == 16
        assert store.head("k") is None
        assert store.compare_and_set("k", V(0, b"a")) is COMMITTED
        assert store.compare_and_set_many([("k", V(1, b"b")), ("k", V(5, b"c"))]) == [
            COMMITTED,
            MISMATCH,
        ]
        assert store.compare_and_set_all([("k", V(2, b"c")), ("l", V(0, b""))]) is COMMITTED
        assert store.head("k", fresh=True) == V(2, b"c")
        assert store.scan("k", 1) == [V(1, b"b"), V(2, b"c")]
        assert store.truncate("k", 1) == 1
        assert sorted(store.list_keys()) == ["k", "l"]
        events = store.subscribe("k", 1)
        assert [next(events), next(events)] == [Entry(V(1, b"b")), Entry(V(2, b"c"))]
        assert isinstance(next(events), CaughtUp | Heartbeat)
        events.close()
        watched = store.watch("l", 0)
        assert isinstance(next(watched), Entries | Progress)
        watched.close()
        with pytest.raises(Determinate) as caught:
            store.truncate("k", 9)
        assert caught.value.kind is ErrorKind.TRUNCATE_BOUND
    with pytest.raises(Determinate) as caught:
        store.head("k")
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert not [thread for thread in threading.enumerate() if thread.name == "consensus"]


def test_threads_share_it() -> None:
    with BlockingConsensus.open("memory:") as store, ThreadPoolExecutor(8) as threads:
        results = threads.map(lambda n: store.compare_and_set("k", V(0, b"%d" % n)), range(64))
        assert list(results).count(COMMITTED) == 1


async def test_on_the_loop_that_would_serve_it_a_call_is_refused_at_once() -> None:
    inner = await open_consensus("memory:")
    store = BlockingConsensus(inner, asyncio.get_running_loop())
    with pytest.raises(Bug, match="event loop"):
        store.head("k")
    assert await asyncio.to_thread(store.head, "k") is None
    await inner.close()


def test_a_url_that_is_none_leaves_no_thread_behind() -> None:
    with pytest.raises(UsageError), BlockingConsensus.open("nonsense://x"):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "consensus"]
