"""What is said arrives once and in order, whatever fails: the store's answers, or the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.forms import FORMS
from penstock.cluster.controller import Controller, differences
from penstock.cluster.remote import RemoteCluster
from penstock.cluster.sessions import (
    Closed,
    Done,
    Hello,
    InitializationComplete,
    Message,
    Opened,
    Sessions,
)
from penstock.cluster.state import (
    Change,
    ClusterMachine,
    ClusterState,
    Command,
    Diff,
    Put,
    Reconcile,
    log_key,
    reconcile,
)
from penstock.cluster.wanted import AppliedCatalog
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import load
from penstock.model.domain import Domain
from penstock.servicekit.rpc.address import ServiceAddress
from support.deployments import SOON_S, Deployment, catalog_of, deployed
from support.unreliable import UnreliableConsensus

WHOLE = Path(__file__).with_name("whole.py")
CLUSTER = "test"


class Recording(ClusterMachine):
    """Keeps what each session has said, as the log has it."""

    def __init__(self) -> None:
        self.said: dict[tuple[Domain, int], list[Command]] = {}

    def apply(self, state: ClusterState, diff: Diff, revision: int) -> ClusterState:
        match diff:
            case Reconcile():
                self.said.setdefault((diff.domain, diff.epoch), []).extend(diff.batch)
            case Change():
                self.said.setdefault((diff.domain, diff.epoch), []).extend(diff.commands)
            case _:
                pass
        return super().apply(state, diff, revision)


@pytest.mark.parametrize("seed", range(6))
async def test_t04_two_sessions_through_a_store_that_fails(seed: int) -> None:
    """No command is lost, none happens twice, and each session keeps its order."""
    store = UnreliableConsensus(
        await open_consensus("memory:"), p_happen=0.8, p_timeout=0.2, p_late=0.3, seed=seed
    )
    wanted = {Domain.STORAGE: "capture", Domain.COMPUTE: "derivation"}

    async def speaks(domain: Domain) -> None:
        """As a controller does: whatever ends the session, it says everything again."""
        sessions, kind = Sessions(store, CLUSTER), wanted[domain]
        versions = [Put(kind=kind, name="x", digest=str(n)) for n in range(10)]  # type: ignore[arg-type]
        for attempt in range(1_000):
            session = sessions.connect()
            nonce = f"{domain} {attempt}".encode()
            said: list[Message] = [
                Hello(domain=domain, nonce=nonce, holder=str(domain)),
                versions[0],
                InitializationComplete(),
                *versions[1:],
            ]
            for message in said:
                session.receive(message)
            answered = 0
            async for response in session.responses():
                match response:
                    case Closed():
                        break
                    case Done():
                        answered += len(response.outcomes)
                    case Opened():
                        pass
                if answered == len(versions):
                    return
        raise AssertionError("it was never heard")

    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*map(speaks, Domain))
        store.heal()
        await store.settle()
    recording = Recording()
    state = (await load(store.inner, log_key(CLUSTER), recording)).state
    assert recording.said
    for commands in recording.said.values():
        digests = [int(each.digest) for each in commands if isinstance(each, Put)]
        assert digests == list(range(len(digests)))  # from its first on, in order, none twice
    assert {each.id: each.digest for each in state.objects.values()} == {
        "capture/x": "9",
        "derivation/x": "9",
    }
    ids = [each.dataflow_id for each in state.objects.values()]
    assert len(set(ids)) == 2
    assert max(ids) < state.next_id
    await store.inner.close()


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    async with deployed(tmp_path) as deployment:
        yield deployment


class Process:
    """A cluster as a process, which is killed and started again."""

    def __init__(self, directory: Path, form: str) -> None:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._directory = directory
        self._form = form
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WHOLE), self._form, str(self._directory), self.address],
            cwd=self._directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def names_of(state: ClusterState) -> set[str]:
    names = [each.name for each in state.objects.values()]
    return {name.removeprefix("acme/").removesuffix("-files") for name in names}


@pytest.mark.parametrize("form", FORMS)
async def test_t06_a_cluster_that_is_killed_again_and_again_gives_the_ids_of_one_that_is_not(
    here: Deployment, form: str
) -> None:
    edits = [("a",), ("a", "b"), ("b", "c"), ("a", "c"), ("c", "d", "e")]
    chance = random.Random(6)
    process = Process(here.directory, form)
    catalog = AppliedCatalog(here.store)
    remote = RemoteCluster(ServiceAddress.parse(f"grpc://{process.address}"))
    controller = Controller(catalog, remote.connect, holder="a controller")
    tasks = [asyncio.create_task(catalog.follow()), asyncio.create_task(controller.run())]
    undisturbed, said = ClusterState(), dict[str, Put]()
    process.start()
    try:
        for edit in edits:
            await here.apply(catalog_of(*edit))
            if chance.random() < 0.7:
                await asyncio.sleep(chance.uniform(0, 0.3))
                process.kill()
                process.start()
            deadline = time.monotonic() + SOON_S
            while names_of(state := await here.state()) != {*edit}:
                assert not tasks[1].done(), tasks[1].exception()
                assert time.monotonic() < deadline, state
                await asyncio.sleep(0.05)
            now = {id_: put for id_, (put, _) in catalog.wanted.items()}
            assert differences(said, now)
            undisturbed, _ = reconcile(undisturbed, Domain.STORAGE, tuple(now.values()))
            said = now
            assert state.objects == undisturbed.objects
            assert state.next_id == undisturbed.next_id
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await remote.close()
        process.kill()
