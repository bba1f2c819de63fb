"""Sessions of controllers over a real consensus store: who is heard, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.cluster import sessions as cluster_sessions
from penstock.cluster.sessions import (
    Closed,
    CloseReason,
    Done,
    Hello,
    InitializationComplete,
    Message,
    Opened,
    Response,
    Session,
    Sessions,
    Stage,
)
from penstock.cluster.state import (
    Change,
    ClusterMachine,
    ClusterState,
    CommandOutcome,
    Compact,
    Put,
    Reconcile,
    log_key,
)
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import StateLog, load
from penstock.consensus.store import Consensus
from penstock.model.domain import Domain
from penstock.settings import sqlite_url

SOON_S = 30.0
CLUSTER = "test"

R = TypeVar("R", bound=Response)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Consensus]:
    opened = await open_consensus(sqlite_url(tmp_path / "consensus.db"))
    yield opened
    await opened.close()


@pytest.fixture
async def sessions(store: Consensus) -> Sessions:
    return Sessions(store, CLUSTER)


def hello(nonce: bytes, domain: Domain = Domain.STORAGE, protocol: int = 1) -> Hello:
    return Hello(domain=domain, nonce=nonce, holder=f"controller {nonce!r}", protocol=protocol)


def capture(name: str, digest: str = "1") -> Put:
    return Put(kind="capture", name=name, digest=digest)


class Controller:
    """The other side of a session."""

    def __init__(self, sessions: Sessions, *said: Message) -> None:
        self.session: Session = sessions.connect()
        self._responses = self.session.responses()
        self.say(*said)

    def say(self, *said: Message) -> None:
        for message in said:
            self.session.receive(message)

    async def hears(self, kind: type[R]) -> R:
        """The next answer, which is of this kind."""
        async with asyncio.timeout(SOON_S):
            response = await anext(self._responses)
        assert isinstance(response, kind), response
        return response


async def state_of(store: Consensus) -> ClusterState:
    return (await load(store, log_key(CLUSTER), ClusterMachine())).state


async def test_everything_that_is_said_first_is_one_entry(
    store: Consensus, sessions: Sessions
) -> None:
    puts = [capture(name) for name in "abc"]
    controller = Controller(sessions, hello(b"1"), *puts)
    assert await controller.hears(Opened) == Opened(epoch=1, digests={})
    assert not (await state_of(store)).objects  # kept, until all is said
    controller.say(InitializationComplete())
    done = await controller.hears(Done)
    assert done.initialized
    assert done.outcomes == (CommandOutcome.APPLIED,) * 3
    assert [each.dataflow_id for each in (await state_of(store)).objects.values()] == [1, 2, 3]


async def test_commands_right_behind_the_batch_come_after_it_and_in_order(
    store: Consensus, sessions: Sessions
) -> None:
    later = [capture("x", str(n)) for n in range(20)]
    controller = Controller(sessions, hello(b"1"), capture("x"), InitializationComplete(), *later)
    await controller.hears(Opened)
    assert (await controller.hears(Done)).outcomes == (CommandOutcome.APPLIED,)
    seen: list[CommandOutcome] = []
    while len(seen) < 20:
        seen += (await controller.hears(Done)).outcomes
    assert (await state_of(store)).objects["capture/x"].digest == "19"


async def test_the_newest_session_wins_and_waits_for_nobody(
    store: Consensus, sessions: Sessions
) -> None:
    """The one before has said half of what it wants, and hangs."""
    hung = Controller(sessions, hello(b"1"), capture("a"))
    await hung.hears(Opened)
    newest = Controller(sessions, hello(b"2"), capture("b"), InitializationComplete())
    closed = await hung.hears(Closed)
    assert closed.reason is CloseReason.SUPERSEDED
    assert closed.detail == "controller b'2'"
    assert (await newest.hears(Opened)).epoch == 2
    await newest.hears(Done)
    hung.say(InitializationComplete(), capture("c"))
    await asyncio.sleep(0.1)
    assert list((await state_of(store)).objects) == ["capture/b"]


async def test_what_a_superseded_session_had_queued_has_no_effect(
    store: Consensus, sessions: Sessions
) -> None:
    old = Controller(sessions, hello(b"1"), InitializationComplete())
    await old.hears(Opened)
    await old.hears(Done)
    old.say(*(capture(f"old{n}") for n in range(50)))
    new = Controller(sessions, hello(b"2"), capture("new"), InitializationComplete())
    await new.hears(Opened)
    await new.hears(Done)
    assert list((await state_of(store)).objects) == ["capture/new"]


async def test_a_session_of_another_process_wins_as_well(
    store: Consensus, sessions: Sessions
) -> None:
    """It is the log that says so: to a session that speaks, and to one that is silent."""
    speaks = Controller(sessions, hello(b"1"), InitializationComplete())
    await speaks.hears(Opened)
    await speaks.hears(Done)
    silent = Controller(sessions, hello(b"2", Domain.COMPUTE), InitializationComplete())
    await silent.hears(Opened)
    await silent.hears(Done)
    elsewhere = Sessions(store, CLUSTER)
    for domain in Domain:
        other = Controller(elsewhere, hello(b"3" + domain.encode(), domain))
        await other.hears(Opened)
    speaks.say(capture("a"))
    assert (await speaks.hears(Closed)).reason is CloseReason.SUPERSEDED
    sessions.observe(await state_of(store))
    assert (await silent.hears(Closed)).reason is CloseReason.SUPERSEDED
    assert not (await state_of(store)).objects


async def test_a_stale_diff_that_lands_late_is_void(store: Consensus, sessions: Sessions) -> None:
    """As if it had been on its way to the store while a newer session opened."""
    for nonce in (b"1", b"2"):
        controller = Controller(sessions, hello(nonce), capture("a"), InitializationComplete())
        await controller.hears(Opened)
        await controller.hears(Done)
    log = await StateLog.open(store, log_key(CLUSTER), ClusterMachine())
    before = log.state
    await log.append(lambda _: Reconcile(domain=Domain.STORAGE, epoch=1, batch=()))
    await log.append(
        lambda _: Change(domain=Domain.STORAGE, epoch=1, commands=(Compact(id="capture/a"),))
    )
    assert log.state == before


async def test_domains_do_not_wait_for_each_other(store: Consensus, sessions: Sessions) -> None:
    storage = Controller(sessions, hello(b"1"), capture("a"), InitializationComplete())
    await storage.hears(Opened)
    await storage.hears(Done)  # and no controller of the compute domain ever came
    storm = [Controller(sessions, hello(b"c%d" % n, Domain.COMPUTE)) for n in range(20)]
    await storm[-1].hears(Opened)
    storage.say(capture("b"))
    assert (await storage.hears(Done)).outcomes == (CommandOutcome.APPLIED,)
    assert (await state_of(store)).epoch_of(Domain.STORAGE) == 1


async def test_an_equal_batch_writes_nothing_but_the_opening(
    store: Consensus, sessions: Sessions
) -> None:
    for nonce in (b"1", b"2"):
        controller = Controller(sessions, hello(nonce), capture("a"), InitializationComplete())
        await controller.hears(Opened)
        done = await controller.hears(Done)
        assert (done.seqno is None) == (nonce == b"2")
        assert done.outcomes == (CommandOutcome.APPLIED if nonce == b"1" else CommandOutcome.KEPT,)
    assert (await state_of(store)).objects["capture/a"].dataflow_id == 1


@pytest.mark.parametrize(
    ("said", "word"),
    [
        pytest.param([capture("a")], "first message", id="a command before Hello"),
        pytest.param([InitializationComplete()], "first message", id="an end before Hello"),
        pytest.param([hello(b"1"), hello(b"2")], "second time", id="Hello twice"),
        pytest.param(
            [hello(b"1"), InitializationComplete(), InitializationComplete()],
            "second time",
            id="complete twice",
        ),
        pytest.param([hello(b"1", protocol=2)], "same release", id="another protocol"),
        pytest.param([hello(b"used")], "nonce", id="a nonce that was used"),
        pytest.param([hello(b"1"), *map(capture, "abc")], "wait", id="too much"),
    ],
)
async def test_what_must_not_come_now_closes_its_session_and_no_other(
    store: Consensus,
    sessions: Sessions,
    said: list[Message],
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_sessions, "WAITING_MAX", 2)
    good = Controller(sessions, hello(b"used", Domain.COMPUTE), InitializationComplete())
    await good.hears(Opened)
    await good.hears(Done)
    if word == "nonce":
        said = [hello(b"used", Domain.COMPUTE)]
    bad = Controller(sessions, *said)
    closed = await bad.hears(Closed)
    assert closed.reason is CloseReason.PROTOCOL
    assert word in closed.detail
    assert good.session.stage is Stage.SERVING
    good.say(Put(kind="derivation", name="d", digest="1"))
    assert (await good.hears(Done)).outcomes == (CommandOutcome.APPLIED,)


async def test_the_log_never_has_a_hello(store: Consensus, sessions: Sessions) -> None:
    controller = Controller(sessions, hello(b"1"), capture("a"), InitializationComplete())
    await controller.hears(Opened)
    await controller.hears(Done)
    entries = await store.scan(log_key(CLUSTER), 0)
    assert len(entries) == 2  # that it is open, and the batch
