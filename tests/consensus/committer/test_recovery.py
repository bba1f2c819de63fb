"""A lost store is created again only if all of it is lost, once, and no client goes on unaware."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import psycopg
import pytest

from consensus.committer.scripted import (
    COMMITTED,
    GONE,
    RESET,
    ScriptedBackend,
    V,
    committer_on,
    eventually,
    failing,
    fill,
)
from consensus.committer.serving import served
from penstock.consensus.backend import Backend
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.committer.committer import Caller
from penstock.consensus.committer.recovery import Healer
from penstock.consensus.open import open_backend
from penstock.consensus.store import ConsensusError, Determinate, ErrorKind, Indeterminate
from penstock.errors import Unavailable


async def never() -> Backend:
    raise AssertionError("must not be opened again")


def opening(backend: Backend) -> Callable[[], Awaitable[Backend]]:
    async def reopen() -> Backend:
        await asyncio.sleep(0)
        return backend

    return reopen


async def kind_of(call: Awaitable[object]) -> ErrorKind:
    with pytest.raises(ConsensusError) as caught:
        await call
    return caught.value.kind


@pytest.mark.parametrize("error", [GONE, RESET], ids=["dropped", "created anew elsewhere"])
async def test_concurrent_losses_heal_once_and_reset_every_caller(error: Determinate) -> None:
    old, new = ScriptedBackend(), ScriptedBackend()
    reopened = 0

    async def reopen() -> Backend:
        nonlocal reopened
        reopened += 1
        await asyncio.sleep(0)
        return new

    async with committer_on(old, recover=Healer(reopen)) as store:
        old.vanish(error)
        calls: list[Awaitable[object]] = [store.head(f"h/{n}") for n in range(20)]
        calls += [store.compare_and_set(f"c/{n}", V(0, b"")) for n in range(20)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {getattr(o, "kind", None) for o in outcomes} == {ErrorKind.STORE_RESET}
        assert reopened == store.committer.metrics.heals.value == 1
        assert await store.incarnation() == new.incarnation
        assert [key async for key in store.list_keys()] == []  # nothing was done a second time
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED


async def test_what_waits_for_the_old_store_never_reaches_the_new_one() -> None:
    """Admitted before the store was lost, due after it was healed: a unit that runs, one that waits
    behind it in the commit queue, and a read that waits behind another."""
    old, new = ScriptedBackend(), ScriptedBackend()
    release = asyncio.Event()

    async def lost_at_last() -> None:
        await release.wait()
        raise RESET

    async with committer_on(old, recover=Healer(opening(new))) as store:
        old.vanish(RESET)
        old.before["commit"] = old.before["head"] = lost_at_last
        calls = [
            asyncio.create_task(call)  # type: ignore[arg-type]
            for call in (
                store.compare_and_set("k", V(0, b"runs")),
                store.compare_and_set("k", V(0, b"waits")),
                store.compare_and_set_all([("k", V(0, b"waits")), ("l", V(0, b"too"))]),
                store.head("k", fresh=True),
                store.head("k", fresh=True),
            )
        ]
        await eventually(lambda: old.calls["commit"] == old.calls["head"] == 1)
        calls.append(asyncio.create_task(store.head("k", fresh=True)))  # behind the one that runs
        await asyncio.sleep(0)
        assert await kind_of(store.scan("k", 0)) is ErrorKind.STORE_RESET
        assert await store.incarnation() == new.incarnation  # healed, and they still wait
        release.set()
        assert {await kind_of(call) for call in calls} == {ErrorKind.STORE_RESET}
        assert new.calls["commit"] == new.calls["head"] == 0
        assert [key async for key in store.list_keys()] == []


async def test_who_knows_the_old_store_is_refused_by_the_new_one_and_a_newcomer_is_not() -> None:
    old, new = ScriptedBackend(), ScriptedBackend()
    async with served(old, recover=Healer(opening(new))) as server:
        known, newcomer = RpcConsensus(server.url), RpcConsensus(server.url)
        assert await known.compare_and_set("k", V(0, b"")) is COMMITTED
        old.vanish(GONE)
        # Met while the store is being made again; reads nothing of the old one, so may go on.
        assert await newcomer.scan("k", 0) == []
        assert await newcomer.incarnation() == new.incarnation
        calls = (
            known.head("k", fresh=True),
            known.head("k"),
            known.compare_and_set("k", V(0, b"")),
            known.compare_and_set_all([("k", V(0, b""))]),
            known.truncate("k", 0),
            known.scan("k", 0),
        )
        for call in calls:
            assert await kind_of(call) is ErrorKind.STORE_RESET
        assert [key async for key in newcomer.list_keys()] == []
        await known.close()
        await newcomer.close()


@pytest.mark.postgres
async def test_a_store_created_anew_elsewhere_takes_nothing_from_old_clients(
    postgres_url: str,
) -> None:
    """Nobody met the gap between the two stores, and the next look is far away."""

    async def reopen() -> Backend:
        return await open_backend(postgres_url)

    async with served(await reopen(), recover=Healer(reopen)) as server:
        known, newcomer = RpcConsensus(server.url), RpcConsensus(server.url)
        assert await known.compare_and_set("k", V(0, b"old")) is COMMITTED
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as admin:
            await admin.execute("DROP SCHEMA penstock CASCADE")
        await (await reopen()).close()
        assert await kind_of(known.compare_and_set("first", V(0, b""))) is ErrorKind.STORE_RESET
        assert await kind_of(known.head("k")) is ErrorKind.STORE_RESET
        assert await newcomer.compare_and_set("k", V(0, b"new")) is COMMITTED
        assert [key async for key in newcomer.list_keys()] == ["k"]
        await known.close()
        await newcomer.close()


async def test_the_store_is_compared_where_it_is_chosen() -> None:
    """Not at some earlier moment: an operation that waited meanwhile would be let through."""
    old, new = ScriptedBackend(), ScriptedBackend()
    async with committer_on(old, recover=Healer(opening(new))) as store:
        committer = store.committer
        caller = Caller("c", "grpc", old.incarnation)
        assert await committer.head("k", caller=caller) is None
        old.vanish(GONE)
        assert await kind_of(committer.head("k", caller=caller)) is ErrorKind.STORE_RESET
        for call in (
            committer.head("k", caller=caller),
            committer.compare_and_set("k", V(0, b""), caller=caller),
            committer.compare_and_set_each([("k", V(0, b""))], caller=caller),
            committer.compare_and_set_all([("k", V(0, b""))], caller=caller),
            committer.truncate("k", 0, caller=caller),
            committer.scan("k", 0, 1, bytes_max=1, caller=caller),
            committer.list_page("", "", caller=caller),
            committer.snapshot_page("", 0, caller=caller),
            anext(committer.subscribe("k", 0, caller=caller)),
            anext(committer.watch("", 0, caller=caller)),
        ):
            assert await kind_of(call) is ErrorKind.STORE_RESET
        [many] = await committer.compare_and_set_many([("k", V(0, b""))], caller=caller)
        assert isinstance(many, Determinate)
        assert many.kind is ErrorKind.STORE_RESET
        assert not new.calls["commit"]


async def test_heads_of_the_old_store_are_forgotten() -> None:
    """A cache ahead of an empty store would serve ghosts for ever."""
    old, new = ScriptedBackend(), ScriptedBackend()
    async with committer_on(old, recover=Healer(opening(new))) as store:
        await fill(store, "k", 3)
        old.vanish(GONE)
        assert await kind_of(store.head("k", fresh=True)) is ErrorKind.STORE_RESET
        assert await store.head("k") is None
        assert await store.head("k", fresh=True) is None


async def test_a_schema_that_is_partly_there_is_left_alone() -> None:
    """Filling it up with empty tables would lie about the part that is left."""
    backend = ScriptedBackend()
    async with committer_on(backend, recover=Healer(never)) as store:
        backend.vanish(GONE)
        del backend.before["revision"]
        assert await kind_of(store.head("k")) is ErrorKind.UNDEFINED_TABLE
        assert await store.incarnation() == backend.incarnation


async def test_a_loss_that_cannot_be_confirmed_is_not_healed() -> None:
    backend = ScriptedBackend()
    async with committer_on(backend, recover=Healer(never)) as store:
        backend.vanish(Indeterminate(ErrorKind.UNAVAILABLE, "down"))
        backend.before |= {op: failing(GONE) for op in ("head", "commit")}
        for call in (store.head("k"), store.compare_and_set("k", V(0, b""))):
            with pytest.raises(Determinate) as caught:  # whatever else: it did not happen
                await call
            assert caught.value.kind is ErrorKind.UNDEFINED_TABLE


async def test_a_schema_that_cannot_be_created_is_tried_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = 0
    backend = ScriptedBackend()

    async def reopen() -> Backend:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise Unavailable("no connection")
        return ScriptedBackend()

    async with committer_on(backend, recover=Healer(reopen)) as store:
        backend.vanish(GONE)
        kinds = [await kind_of(store.head("k")) for _ in range(2)]
        assert kinds == [ErrorKind.UNDEFINED_TABLE, ErrorKind.STORE_RESET]
        assert await store.head("k") is None
    said = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert said == [
        "consensus schema is missing and cannot be created",
        "consensus schema was missing; recreated, previous contents are gone",
    ]


async def test_listing_keys_heals_nothing() -> None:
    class Unlisted(ScriptedBackend):
        async def list_page(self, prefix: str, after: str) -> list[str]:
            raise GONE

    async with committer_on(Unlisted(), recover=Healer(never)) as store:
        assert await kind_of(anext(aiter(store.list_keys()))) is ErrorKind.UNDEFINED_TABLE


async def test_closing_waits_for_a_recovery_that_is_under_way() -> None:
    old, new = ScriptedBackend(), ScriptedBackend()
    reached, release = asyncio.Event(), asyncio.Event()

    async def reopen() -> Backend:
        reached.set()
        await release.wait()
        return new

    async with committer_on(old, recover=Healer(reopen)) as store:
        old.vanish(GONE)
        asked = asyncio.create_task(store.scan("k", 0))
        await reached.wait()
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        release.set()
        await closing
        assert await kind_of(asked) is ErrorKind.STORE_RESET
        for backend in (old, new):
            backend.before.clear()
            assert await kind_of(backend.head("k")) is ErrorKind.UNAVAILABLE  # both are closed
