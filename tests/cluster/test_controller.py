"""A controller: says what the catalog wants, again after each reconnect, and what changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from penstock.cluster.controller import Controller, SessionTaken, differences
from penstock.cluster.sessions import CloseReason, Hello, Session, Sessions
from penstock.cluster.state import Compact, Put
from penstock.cluster.unified import MAIN
from penstock.cluster.wanted import AppliedCatalog, wanted
from penstock.errors import UserError
from penstock.model.domain import Domain
from support.deployments import SOON_S, Deployment, catalog_of, deployed


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    async with deployed(tmp_path) as deployment:
        yield deployment


class Wire:
    """Connections that a test can cut."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.made: list[Session] = []

    def connect(self) -> Session:
        self.made.append(self.sessions.connect())
        return self.made[-1]


@contextlib.asynccontextmanager
async def controlled(
    here: Deployment, wire: Wire
) -> AsyncIterator[tuple[Controller, asyncio.Task[None]]]:
    catalog = AppliedCatalog(here.store)
    controller = Controller(catalog, wire.connect, holder="a test")
    following = asyncio.create_task(catalog.follow())
    running = asyncio.create_task(controller.run())
    try:
        yield controller, running
    finally:
        for task in (running, following):
            task.cancel()
        await asyncio.gather(running, following, return_exceptions=True)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + SOON_S
    while not await is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_connection_that_is_cut_is_made_again_and_nothing_changes(here: Deployment) -> None:
    await here.apply(catalog_of("a", "b"))
    wire = Wire(Sessions(here.store, MAIN))
    async with controlled(here, wire) as (controller, _):
        async with asyncio.timeout(SOON_S):
            await controller.initialized()
        before = await here.state()
        for session in list(wire.made):
            session.close(CloseReason.FAILED, "cut by a test")

        async def reconnected() -> bool:
            state = await here.state()
            return all(state.epoch_of(each) == before.epoch_of(each) + 1 for each in Domain)

        await until(reconnected)
        await here.apply(catalog_of("b", "c"))  # it speaks as before

        async def changed() -> bool:
            return {*(await here.state()).objects} == {
                "capture/acme/b-files",
                "capture/acme/c-files",
            }

        await until(changed)
        after = await here.state()
        kept = "capture/acme/b-files"
        assert after.objects[kept] == before.objects[kept]


async def test_what_was_applied_while_it_was_away_is_said_when_it_is_back(here: Deployment) -> None:
    await here.apply(catalog_of("a"))
    async with controlled(here, Wire(Sessions(here.store, MAIN))) as (controller, _):
        async with asyncio.timeout(SOON_S):
            await controller.initialized()
    await here.apply(catalog_of("b"))
    async with controlled(here, Wire(Sessions(here.store, MAIN))) as (controller, _):
        async with asyncio.timeout(SOON_S):
            await controller.initialized()
        assert [*(await here.state()).objects] == ["capture/acme/b-files"]


async def test_one_that_is_replaced_does_not_fight(here: Deployment) -> None:
    await here.apply(catalog_of("a"))
    wire = Wire(Sessions(here.store, MAIN))
    async with controlled(here, wire) as (controller, running):
        async with asyncio.timeout(SOON_S):
            await controller.initialized()
        newer = wire.sessions.connect()
        newer.receive(Hello(domain=Domain.STORAGE, nonce=b"newer", holder="process 7 on mars"))
        with pytest.raises(SessionTaken, match="process 7 on mars"):
            await asyncio.wait_for(running, SOON_S)


async def test_one_that_speaks_another_protocol_is_told_so(
    here: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.apply(catalog_of("a"))
    monkeypatch.setattr("penstock.cluster.sessions.PROTOCOL", 2)
    async with controlled(here, Wire(Sessions(here.store, MAIN))) as (_, running):
        with pytest.raises(UserError, match="use the same release for both"):
            await asyncio.wait_for(running, SOON_S)


async def test_a_task_has_changed_if_a_collection_of_it_has(here: Deployment) -> None:
    async def digests(catalog: dict[str, object]) -> dict[str, str]:
        await here.apply(catalog)
        applied = AppliedCatalog(here.store)
        following = asyncio.create_task(applied.follow())
        async with asyncio.timeout(SOON_S):
            await applied.after(0)
        following.cancel()
        return {id_: put.digest for id_, (put, _) in wanted(applied.catalog).items()}

    before = await digests(catalog_of("a", "b"))
    edited = catalog_of("a", "b")
    edited["collections"]["acme/b"] = {
        "key": ["/id"],
        "schema": {
            "type": "object",
            "required": ["id"],
            "properties": {"id": {"type": "integer"}, "more": {"type": "string"}},
        },
    }
    after = await digests(edited)
    assert after.keys() == before.keys()
    assert [id_ for id_ in after if after[id_] != before[id_]] == ["capture/acme/b-files"]


def test_only_differences_are_said() -> None:
    a, b, c = (Put(kind="capture", name=name, digest="1") for name in "abc")
    other = Put(kind="capture", name="b", digest="2")
    before, after = {x.id: x for x in (a, b)}, {x.id: x for x in (other, c)}
    assert differences(before, after) == [Compact(id=a.id), other, c]
    assert differences(before, before) == []
