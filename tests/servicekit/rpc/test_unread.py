"""Unread bytes count until they are gone, and a client that does not read holds up only itself."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import NoReturn

import pytest

from consensus.committer.scripted import eventually
from penstock.servicekit.rpc.unread import Outlet, ReaderGone, SlowReader, Unread


class Refused(Exception):
    """The error of some service."""


def limited() -> Unread:
    def refuse(what: str) -> NoReturn:
        raise Refused(what)

    return Unread(bytes_max=400, client_bytes_max=100, refuse=refuse)


async def test_a_client_waits_for_itself_and_no_other() -> None:
    unread = limited()
    unread.add("slow", 100)
    waiting = asyncio.ensure_future(unread.room("slow"))
    async with asyncio.timeout(10):
        await unread.room("quick")
        await unread.room(None)
    assert not waiting.done()
    unread.add("slow", -1)
    await waiting


async def test_a_refusal_after_waiting_names_the_limit() -> None:
    unread = limited()
    unread.add("a", 100)
    with pytest.raises(Refused, match=r"this client.* 100 is the limit"):
        await unread.room("a", 0.01)
    for client in "bcd":
        unread.add(client, 100)
    with pytest.raises(Refused, match="400 is the limit"):
        await unread.room("e", 0.01)


async def test_a_turn_that_is_not_used_goes_to_the_next() -> None:
    unread = limited()
    unread.add("c", 100)
    waiting = [asyncio.ensure_future(unread.room("c")) for _ in range(9)]
    await asyncio.sleep(0)
    unread.add("c", -100)
    waiting[0].cancel()  # it has been given the turn
    async with asyncio.timeout(20):
        await asyncio.gather(*waiting, return_exceptions=True)
    assert not unread._waiting


async def test_every_waiter_gets_its_turn_whatever_the_others_do() -> None:
    """Some are cancelled, some find nothing to add: the next ones are not forgotten for it."""
    unread = limited()
    order = random.Random(3)
    most = 0

    async def reader(client: str) -> None:
        nonlocal most
        await unread.room(client)
        if order.random() < 0.3:
            return
        with unread.held(client, 30) as held:
            most = max(most, unread.bytes_total)
            await asyncio.sleep(0.0005)
            held.resize(order.randrange(30))
            await asyncio.sleep(0.0005)

    readers = [asyncio.ensure_future(reader(f"client {n % 7}")) for n in range(500)]
    await asyncio.sleep(0.002)
    for task in order.sample(readers, 100):
        task.cancel()
    async with asyncio.timeout(30):
        await asyncio.gather(*readers, return_exceptions=True)
    assert unread.bytes_total == 0
    assert most < 400 + 30
    assert not unread._waiting


class _Context:
    """The writing end of a stream whose reader a test controls."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()
        self.gone = False

    async def write(self, _: bytes) -> None:
        await self.taken.wait()
        if self.gone:
            raise RuntimeError("the call has ended")


async def test_a_message_counts_until_it_is_taken_also_when_its_stream_was_ended() -> None:
    unread = limited()
    context = _Context()
    outlet = Outlet(context, 0.01, partial(unread.add, "slow"))  # type: ignore[arg-type]
    with pytest.raises(SlowReader):
        await outlet.write(bytes(70))
    assert unread.bytes_total == 70
    context.taken.set()
    await eventually(lambda: unread.bytes_total == 0)


async def test_a_reader_that_is_gone_is_reported_as_gone_and_holds_nothing() -> None:
    unread = limited()
    context = _Context()
    context.gone = True
    context.taken.set()
    with pytest.raises(ReaderGone):
        await Outlet(context, 10.0, partial(unread.add, "c")).write(bytes(70))  # type: ignore[arg-type]
    assert unread.bytes_total == 0
