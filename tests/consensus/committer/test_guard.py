"""A lost schema is created again only if all of it is lost, once, and nobody goes on unaware."""

from __future__ import annotations

import asyncio

import pytest

from consensus.committer.scripted import ScriptedBackend, V, failing
from penstock.consensus.backend import Backend
from penstock.consensus.committer.guard import Healer, SchemaGuard
from penstock.consensus.store import Determinate, ErrorKind
from penstock.errors import Unavailable

GONE = Determinate(ErrorKind.UNDEFINED_TABLE, 'relation "consensus_head" does not exist [42P01]')


def lost() -> ScriptedBackend:
    backend = ScriptedBackend()
    backend.before = {op: failing(GONE) for op in ("head", "commit", "incarnation", "revision")}
    return backend


async def test_concurrent_losses_heal_once_and_each_caller_is_told() -> None:
    """B21."""
    healed: list[bytes] = []
    opened: list[Backend] = []

    async def reopen() -> Backend:
        await asyncio.sleep(0)
        opened.append(ScriptedBackend())
        return opened[-1]

    guard = SchemaGuard(lost(), Healer(reopen, healed.append))
    calls = [guard.head("k") for _ in range(20)]
    calls += [guard.commit([(("k", V(0, b"")),)]) for _ in range(20)]  # type: ignore[list-item]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {getattr(o, "kind", None) for o in outcomes} == {ErrorKind.STORE_RESET}
    assert len(opened) == len(healed) == 1
    assert await guard.head("k") is None  # the commit was not repeated in the new store
    assert await guard.incarnation() == healed[0]


async def test_a_schema_that_is_partly_there_is_left_alone() -> None:
    """Filling it up with empty tables would lie about the part that is left."""
    backend = lost()
    del backend.before["incarnation"]

    async def reopen() -> Backend:
        raise AssertionError("must not be opened again")

    guard = SchemaGuard(backend, Healer(reopen, lambda _: None))
    with pytest.raises(Determinate) as caught:
        await guard.head("k")
    assert caught.value.kind is ErrorKind.UNDEFINED_TABLE
    assert guard.inner is backend


async def test_a_schema_that_cannot_be_created_is_tried_again_later() -> None:
    attempts = 0

    async def reopen() -> Backend:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise Unavailable("no connection")
        return ScriptedBackend()

    guard = SchemaGuard(lost(), Healer(reopen, lambda _: None))
    kinds = []
    for _ in range(2):
        with pytest.raises(Determinate) as caught:
            await guard.head("k")
        kinds.append(caught.value.kind)
    assert kinds == [ErrorKind.UNDEFINED_TABLE, ErrorKind.STORE_RESET]
    assert await guard.head("k") is None


async def test_listing_keys_heals_nothing() -> None:
    backend = lost()

    async def reopen() -> Backend:
        raise AssertionError("must not be opened again")

    guard = SchemaGuard(backend, Healer(reopen, lambda _: None))
    assert await guard.list_page("", "") == []
