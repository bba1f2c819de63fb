"""Heads from memory, every decision from the store."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from consensus.committer.scripted import (
    CACHED,
    COMMITTED,
    MISMATCH,
    RESET,
    ScriptedBackend,
    V,
    committer_on,
    eventually,
    failing,
    fill,
    take,
    until,
)
from penstock.consensus.backend import Traits
from penstock.consensus.committer.committer import IN_PROCESS, foreign_poll_s
from penstock.consensus.committer.metrics import OPERATIONS, StatsLine
from penstock.consensus.committer.options import Limits
from penstock.consensus.store import (
    CaughtUp,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    WatchProgress,
)


async def test_heads_come_from_memory_and_survive_an_outage() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 3)
        backend.before["head"] = failing(Indeterminate(ErrorKind.UNAVAILABLE, "down"))
        assert await store.head("k") == V(2, b"2")
        assert backend.calls["head"] == 0
        with pytest.raises(Indeterminate):
            await store.head("k", fresh=True)


async def test_a_compare_and_set_is_never_refused_from_the_cache() -> None:
    """The cache may be behind another committer; only the store knows."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 1)
        await backend.foreign("k", 1)
        assert await store.head("k") == V(0, b"0")  # stale, as it may be
        assert await store.compare_and_set("k", V(2, b"")) is COMMITTED


async def test_after_a_mismatch_the_next_head_is_fresh_without_any_subscriber() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 1)
        await backend.foreign("k", 1)
        assert await store.compare_and_set("k", V(1, b"mine")) is MISMATCH
        assert await store.head("k") == V(1, b"foreign")


async def test_a_hundred_losers_cost_two_reads_and_each_finds_the_new_head() -> None:
    backend = ScriptedBackend()
    options = replace(CACHED, limits=Limits(queue_per_key_max=200))
    async with committer_on(backend, options) as store:
        await fill(store, "k", 1)
        await backend.foreign("k", 1)

        async def lose() -> object:
            assert await store.compare_and_set("k", V(1, b"mine")) is MISMATCH
            return await store.head("k")

        heads = await asyncio.gather(*[lose() for _ in range(100)])
        assert all(head == V(1, b"foreign") for head in heads)
        assert backend.calls["head"] <= 2
        await eventually(lambda: store.committer.metrics.refresh_lag.count == 1)


async def test_a_read_shares_only_reads_that_start_after_it() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 1)
        held, release = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            del backend.after["head"]
            held.set()
            await release.wait()

        backend.after["head"] = hold  # the read has its answer, and is slow to deliver it
        first = asyncio.create_task(store.head("k", fresh=True))
        await held.wait()
        assert await store.compare_and_set("k", V(1, b"")) is COMMITTED
        later = [asyncio.create_task(store.head("k", fresh=True)) for _ in range(10)]
        await asyncio.sleep(0)
        release.set()
        assert await first == V(0, b"0")
        assert set(await asyncio.gather(*later)) == {V(1, b"")}
        assert backend.calls["head"] == 2


async def test_a_store_that_knows_less_than_before_empties_the_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Restored from an older backup, it is the same store, and the heads in memory are ghosts."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 3)
        backend._logs.clear()
        assert await store.head("k", fresh=True) is None
        assert await store.head("k") is None
        assert store.committer.metrics.store_regressions.value == 1
        assert [r.levelno for r in caplog.records if "regression" in r.message] == [logging.ERROR]
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED


async def test_an_embedded_committer_stays_failed_after_a_reset() -> None:
    """A process that runs pipelines must not go on with an empty store."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 1)
        backend.vanish(RESET)
        with pytest.raises(Determinate):
            await store.scan("k", 0)
        backend.before.clear()
        for call in (store.head("k"), store.compare_and_set("k", V(1, b""))):
            with pytest.raises(Determinate) as caught:
                await call
            assert caught.value.kind is ErrorKind.STORE_RESET
        assert not store.committer.readiness().ready


async def test_a_reset_is_noticed_without_any_caller() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend, replace(CACHED, verify_s=0.005)) as store:
        await fill(store, "k", 1)
        backend.vanish(RESET)
        await eventually(lambda: not store.committer.readiness().ready)
        with pytest.raises(Determinate) as caught:
            await store.head("k")
        assert caught.value.kind is ErrorKind.STORE_RESET


async def test_an_unknown_outcome_is_not_served_as_known() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        await fill(store, "k", 1)
        lost = Indeterminate(ErrorKind.UNAVAILABLE, "connection lost after COMMIT")
        backend.after["commit"] = failing(lost)
        with pytest.raises(Indeterminate):
            await store.compare_and_set("k", V(1, b"landed"))
        assert await store.head("k") == V(1, b"landed")


async def test_a_cancelled_caller_does_not_cancel_its_compare_and_set() -> None:
    """Cache and followers hear of it all the same."""
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        release = asyncio.Event()

        async def hold() -> None:
            await release.wait()

        backend.before["commit"] = hold
        caller = asyncio.create_task(store.compare_and_set("k", V(0, b"")))
        await eventually(lambda: backend.calls["commit"] == 1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        release.set()
        await eventually(lambda: store.committer._store.cache.known("k") == 0)
        assert await store.head("k") == V(0, b"")
        assert store.committer.admission.inflight == 0


async def test_an_overloaded_committer_refuses_determinately_and_recovers() -> None:
    backend = ScriptedBackend()
    options = replace(CACHED, limits=Limits(inflight_max=4))
    async with committer_on(backend, options) as store:
        release = asyncio.Event()

        async def hold() -> None:
            await release.wait()

        backend.before["commit"] = hold
        running = [
            asyncio.create_task(store.compare_and_set(f"k/{n}", V(0, b""))) for n in range(4)
        ]
        await eventually(lambda: backend.calls["commit"] == 1)
        with pytest.raises(Determinate) as caught:
            await store.compare_and_set("one/more", V(0, b""))
        assert caught.value.kind is ErrorKind.OVERLOADED
        release.set()
        assert await asyncio.gather(*running) == [COMMITTED] * 4
        assert await store.head("one/more") is None
        assert await store.compare_and_set("one/more", V(0, b"")) is COMMITTED


async def test_callers_that_leave_do_not_grow_the_commit_queue() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend, replace(CACHED, limits=Limits(inflight_max=4))) as store:
        release = asyncio.Event()

        async def hold() -> None:
            await release.wait()

        backend.before["commit"] = hold
        refused = 0
        for n in range(50):
            caller = asyncio.create_task(store.compare_and_set(f"k/{n}", V(0, b"")))
            await asyncio.sleep(0.001)
            if caller.done():
                assert isinstance(caller.exception(), Determinate)
                refused += 1
            caller.cancel()
        assert refused >= 40
        release.set()


async def test_callers_that_leave_do_not_grow_the_commit_queue_in_bytes_either() -> None:
    backend = ScriptedBackend()
    limits = Limits(queue_bytes_max=10_000)
    async with committer_on(backend, replace(CACHED, limits=limits)) as store:
        release = asyncio.Event()
        backend.before["commit"] = until(release)
        admitted = 0
        for n in range(50):
            caller = asyncio.create_task(store.compare_and_set(f"k/{n}", V(0, bytes(1_000))))
            await asyncio.sleep(0.001)
            if caller.done():
                error = caller.exception()
                assert isinstance(error, Determinate)
                assert "10000" in error.message
            else:
                admitted += 1
            caller.cancel()
        held = store.committer.serving(IN_PROCESS).group.bytes_total
        release.set()
        assert (admitted, held) == (10, 10_000)
        await eventually(lambda: store.committer.serving(IN_PROCESS).group.bytes_total == 0)
        assert await store.compare_and_set("more", V(0, bytes(1_000))) is COMMITTED


# ------------------------------------------------------------------------------- observability


async def test_a_thousand_operations_log_nothing_at_info(caplog: pytest.LogCaptureFixture) -> None:
    """Per-operation lines are DEBUG."""
    caplog.set_level(logging.INFO, "penstock")
    async with committer_on(ScriptedBackend()) as store:
        await fill(store, "k", 1_000)
    assert caplog.records == []


async def test_conflicts_are_routine_and_a_lost_connection_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = ScriptedBackend()
    async with committer_on(backend) as store:
        backend.before["commit"] = failing(Determinate(ErrorKind.CONFLICT, "deadlock [40P01]"))
        for _ in range(100):
            with pytest.raises(Determinate):
                await store.compare_and_set("k", V(0, b""))
        assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
        backend.before = {"head": failing(Indeterminate(ErrorKind.UNAVAILABLE, "lost [08006]"))}
        with pytest.raises(Indeterminate):
            await store.head("k")
        warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "08006" in str(warnings[0].__dict__["fields"])


async def _smoke(store_backend: ScriptedBackend) -> str:
    """A little of everything, then the page Prometheus reads."""
    options = replace(CACHED, limits=Limits(queue_per_key_max=2))
    async with committer_on(store_backend, options) as store:
        await fill(store, "k", 3)
        await store.head("k")
        await store.head("absent")
        await asyncio.gather(
            *[store.compare_and_set("k", V(9, b"ahead")) for _ in range(5)], return_exceptions=True
        )
        await eventually(lambda: store.committer.metrics.refresh_lag.count > 0)
        await store.compare_and_set_many([("m", V(0, b"x"))])
        await store.compare_and_set_all([("n", V(0, b"x"))])
        await store.scan("k", 0)
        assert [event async for event in store.snapshot("k")]
        assert [key async for key in store.list_keys("k")] == ["k"]
        await take(store.subscribe("k", 0), lambda e: isinstance(e[-1], CaughtUp))
        await take(store.watch("", 0), lambda e: isinstance(e[-1], WatchProgress))
        await store.truncate("k", 1)
        await take(store.subscribe("k", 0), lambda _: False)
        with pytest.raises(ConsensusError):
            await store.truncate("k", 99)
        return store.committer.metrics.registry.render().decode()


async def test_every_metric_is_recorded() -> None:
    """Declared is not measured."""
    page = await _smoke(ScriptedBackend())
    families = {f.name: f for f in text_string_to_metric_families(page)}
    # These need an accident, or a kind of store, that this workload does not have.
    elsewhere = {
        "cache_late_inserts_dropped_total", "store_regressions", "subscribe_lag", "subscribe_gap",
        "pool_connections", "backend_heals", "coalesce_queue_depth", "inflight_rpcs",
        "inflight_rpcs_by_op", "subscribers", "auth_failures",
    }  # fmt: skip
    silent = {
        name.removeprefix("penstock_persist_")
        for name, family in families.items()
        if not any(sample.value for sample in family.samples)
    }
    assert silent <= elsewhere
    counted = {
        s.labels["op"] for s in families["penstock_persist_rpc"].samples if s.name.endswith("total")
    }
    assert counted == set(OPERATIONS)


async def test_nothing_is_left_in_flight() -> None:
    async with committer_on(ScriptedBackend()) as store:
        await fill(store, "k", 2)
        await take(store.subscribe("k", 0), lambda e: isinstance(e[-1], CaughtUp))
        caller = asyncio.create_task(store.head("k", fresh=True))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        metrics = store.committer.metrics
        assert metrics.inflight.value == 0
        assert metrics.rpc.labels("head", "cancelled").value == 1
        assert store.committer.admission.subscribers == 0


async def test_the_stats_line_tells_of_the_interval_only() -> None:
    async with committer_on(ScriptedBackend()) as store:
        line = StatsLine(store.committer.metrics)
        await fill(store, "k", 4)
        await store.compare_and_set("k", V(0, b""))
        await store.head("k")
        store.committer.update_gauges()
        first = line.fields()
        assert (first["cas_n"], first["cas_committed"], first["cas_mismatch"]) == (5, 4, 1)
        assert (first["head_n"], first["cache_hit_rate"], first["cached_shards"]) == (1, 1.0, 1)
        assert first["batches"] == 5
        second = line.fields()
        assert (second["cas_committed"], second["batches"]) == (0, 0)
        assert "cas_n" not in second


@pytest.mark.parametrize(
    ("since_s", "want"),
    [
        pytest.param(0.0, 0.01, id="one has just come: often"),
        pytest.param(2.0, 0.05, id="none for a while: as usual"),
        pytest.param(60.0, 0.1, id="none for long: seldom"),
        pytest.param(float("inf"), 0.1, id="there never was one"),
    ],
)
def test_commits_of_others_are_looked_for_as_often_as_they_come(
    since_s: float, want: float
) -> None:
    traits = Traits(name="any", cache_heads=False, foreign_poll_s=0.05, commit_concurrency=1)
    assert foreign_poll_s(traits, since_s) == pytest.approx(want)
