"""A cluster and its controller with a port between them: captures from files, without Spark."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.cluster import sessions as cluster_sessions
from penstock.cluster.claim import ClusterTaken
from penstock.cluster.controller import Controller, SessionTaken
from penstock.cluster.remote import RemoteCluster
from penstock.cluster.service import ClusterService, serving
from penstock.cluster.unified import Unified
from penstock.cluster.wanted import AppliedCatalog
from penstock.consensus.statelog import load
from penstock.errors import UserError
from penstock.model.domain import Domain
from penstock.runtime.recovery import RecoveryMachine, log_name, recovery_key
from penstock.servicekit.rpc.address import ServiceAddress
from penstock.servicekit.rpc.tokens import TokenFile
from support.deployments import (
    SOON_S,
    Deployment,
    Running,
    catalog_of,
    deployed,
    write_documents,
)


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.chdir(tmp_path)
    async with deployed(tmp_path) as deployment:
        yield deployment


@pytest.fixture
def address() -> str:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Cluster(Running):
    """A cluster that runs."""

    async def ends(self) -> None:
        self.unified.stop()
        self.unified.stop()
        await asyncio.wait([self.task])


@contextlib.asynccontextmanager
async def cluster(
    here: Deployment, address: str, tokens: TokenFile | None = None
) -> AsyncIterator[Cluster]:
    unified = Unified(await here.world(), controlled=True)
    service = ClusterService(unified.sessions, tokens=tokens)
    async with serving(service, listen=address, before=unified.claim):
        running = Cluster(unified, asyncio.create_task(unified.run()))
        try:
            yield running
        finally:
            await running.ends()


@contextlib.asynccontextmanager
async def controller(
    here: Deployment, address: str, options: str = ""
) -> AsyncIterator[tuple[Controller, asyncio.Task[None]]]:
    catalog = AppliedCatalog(here.store)
    remote = RemoteCluster(ServiceAddress.parse(f"grpc://{address}{options}"))
    made = Controller(catalog, remote.connect, holder="a controller")
    following = asyncio.create_task(catalog.follow())
    running = asyncio.create_task(made.run())
    try:
        yield made, running
    finally:
        for task in (running, following):
            task.cancel()
        await asyncio.gather(running, following, return_exceptions=True)
        await remote.close()


async def initialized(made: Controller) -> None:
    async with asyncio.timeout(SOON_S):
        await made.initialized()


async def epoch_of(here: Deployment, task: str) -> int:
    key = recovery_key(log_name("capture", task))
    return (await load(here.store, key, RecoveryMachine())).epoch


async def test_a_controller_says_what_runs_and_tasks_go_on_without_it(
    here: Deployment, address: str
) -> None:
    for name in ("a", "b"):
        write_documents(here.directory, name, range(3))
    await here.apply(catalog_of("a"))
    async with cluster(here, address) as running:
        async with controller(here, address):
            await running.until_read("acme/a-files", 3)
            await here.apply(catalog_of("a", "b"))
            await running.until_read("acme/b-files", 3)
        epoch, state = await epoch_of(here, "acme/a-files"), await here.state()
        write_documents(here.directory, "a", range(3, 5))
        await running.until_read("acme/a-files", 5)  # nobody says so any more
        await here.apply(catalog_of("a"))
        async with controller(here, address):
            await running.until(lambda: running.tasks == ["acme/a-files"])
        assert await epoch_of(here, "acme/a-files") == epoch  # T22: it has not noticed
    after = await here.state()
    kept = "capture/acme/a-files"
    assert after.objects == {kept: state.objects[kept]}


async def test_t06_a_cluster_that_comes_back_goes_on_with_what_it_was_told(
    here: Deployment, address: str
) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    async with cluster(here, address) as running, controller(here, address):
        await running.until_read("acme/a-files", 3)
        before = await here.state()
    write_documents(here.directory, "a", range(3, 5))
    async with cluster(here, address) as running:  # and no controller
        await running.until_read("acme/a-files", 2)
    after = await here.state()
    assert (after.objects, after.next_id) == (before.objects, before.next_id)
    assert after.sessions == before.sessions


async def test_a_controller_waits_for_its_cluster_and_comes_back_to_it(
    here: Deployment, address: str
) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    async with controller(here, address) as (made, _):
        await asyncio.sleep(0.3)  # refused meanwhile, many times
        async with cluster(here, address) as running:
            await running.until_read("acme/a-files", 3)
        state = await here.state()
        await here.apply(catalog_of("a", "b"))
        write_documents(here.directory, "b", range(4))
        async with cluster(here, address) as running:
            await running.until_read("acme/b-files", 4)
        await asyncio.sleep(0)
        assert made is not None
    after = await here.state()
    kept = "capture/acme/a-files"
    assert after.objects[kept] == state.objects[kept]
    assert all(after.epoch_of(each) > state.epoch_of(each) for each in Domain)


async def test_the_newest_controller_counts_and_the_one_before_ends(
    here: Deployment, address: str
) -> None:
    await here.apply(catalog_of("a"))
    async with cluster(here, address) as running, controller(here, address) as (older, ends):
        await initialized(older)
        async with controller(here, address) as (newer, stays):
            with pytest.raises(SessionTaken, match="another controller speaks to this cluster"):
                await asyncio.wait_for(ends, SOON_S)
            await initialized(newer)
            await here.apply(catalog_of("b"))
            await running.until(lambda: running.tasks == ["acme/b-files"])
            assert not stays.done()


async def test_a_second_cluster_on_the_log_takes_over_and_the_first_says_so(
    here: Deployment, address: str
) -> None:
    write_documents(here.directory, "a", range(3))
    await here.apply(catalog_of("a"))
    async with cluster(here, address) as first, controller(here, address) as (made, control):
        await initialized(made)
        await first.until_read("acme/a-files", 3)
        async with cluster(here, "127.0.0.1:0") as second:
            for ends in (first.task, control):
                with pytest.raises(ClusterTaken, match="another process runs this deployment"):
                    await asyncio.wait_for(ends, SOON_S)
            write_documents(here.directory, "a", range(3, 5))
            await second.until_read("acme/a-files", 2)  # what the first was told
            assert second.doing("acme/a-files") != "failed"


async def test_up_takes_over_from_a_cluster(here: Deployment, address: str) -> None:
    await here.apply(catalog_of("a"))
    async with cluster(here, address) as running, here.up() as up:
        with pytest.raises(ClusterTaken):
            await asyncio.wait_for(running.task, SOON_S)
        await up.until(lambda: up.tasks == ["acme/a-files"])


async def test_a_wrong_token_is_said_to_be_wrong(
    here: Deployment, address: str, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    files = {"tokens": f"it writer cluster/ {digest}\n", "right": "right", "wrong": "wrong"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    await here.apply(catalog_of("a"))
    async with cluster(here, address, TokenFile(tmp_path / "tokens")) as running:
        wrong = f"?token_file={tmp_path / 'wrong'}"
        async with controller(here, address, wrong) as (_, refused):
            with pytest.raises(UserError, match="refuses the controller") as error:
                await asyncio.wait_for(refused, SOON_S)
        assert "the token is not valid" in str(error.value)
        assert "as token_file" in str(error.value)
        right = f"?token_file={tmp_path / 'right'}"
        async with controller(here, address, right):
            await running.until(lambda: running.tasks == ["acme/a-files"])


async def test_a_token_that_is_rotated_costs_its_controller_a_reconnect(
    here: Deployment, address: str, tmp_path: Path
) -> None:
    def rotate(token: str) -> None:
        digest = hashlib.sha256(token.encode()).hexdigest()
        for name, text in {"token": token, "tokens": f"it apply cluster/ {digest}\n"}.items():
            new = tmp_path / f"{name}.new"
            new.write_text(text)
            new.chmod(0o600)
            new.rename(tmp_path / name)

    rotate("t-first")
    await here.apply(catalog_of("a"))
    options = f"?token_file={tmp_path / 'token'}"
    async with (
        cluster(here, address, TokenFile(tmp_path / "tokens")) as running,
        controller(here, address, options) as (made, _),
    ):
        await initialized(made)
        before = await here.state()
        rotate("t-second")
        await here.apply(catalog_of("b"))
        await running.until(lambda: running.tasks == ["acme/b-files"])
        deadline = time.monotonic() + SOON_S
        while (now := await here.state()).epoch_of(Domain.STORAGE) == before.epoch_of(
            Domain.STORAGE
        ):
            assert time.monotonic() < deadline, now
            await asyncio.sleep(0.05)
        await here.apply(catalog_of("c"))
        await running.until(lambda: running.tasks == ["acme/c-files"])


async def test_a_controller_of_another_release_is_told_so(
    here: Deployment, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.apply(catalog_of("a"))
    monkeypatch.setattr(cluster_sessions, "PROTOCOL", 2)  # of the cluster: Hello has its default
    async with cluster(here, address), controller(here, address) as (_, refused):
        with pytest.raises(UserError, match="use the same release for both"):
            await asyncio.wait_for(refused, SOON_S)
