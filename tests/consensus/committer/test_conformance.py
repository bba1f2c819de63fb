"""The committer keeps the contract of its backend, through both transports, cached or not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from consensus.committer.serving import served
from consensus.conformance import ConsensusConformance, Subject
from fix_postgres import PostgresServer
from penstock.consensus.backend import Backend
from penstock.consensus.coalesce import GroupCommitOptions
from penstock.consensus.committer.client import InProcessConsensus, RpcConsensus
from penstock.consensus.committer.committer import PersistCommitter
from penstock.consensus.committer.options import CommitterOptions
from penstock.consensus.open import open_backend
from penstock.consensus.store import Consensus

Opener = Callable[[], Awaitable[Backend]]

PLAIN = CommitterOptions(cache=False)
CACHED = CommitterOptions(cache=True)
ALONE = CommitterOptions(cache=False, group=GroupCommitOptions(elements_max=0))


async def in_process(
    opened: AsyncExitStack, backend: Backend, options: CommitterOptions
) -> Consensus:
    committer = PersistCommitter(backend, options)
    await committer.open()
    store = InProcessConsensus(committer)
    opened.push_async_callback(store.close)
    return store


async def over_grpc(
    opened: AsyncExitStack, backend: Backend, options: CommitterOptions
) -> Consensus:
    server = await opened.enter_async_context(served(backend, options))
    store = RpcConsensus(server.url)
    opened.push_async_callback(store.close)
    return store


Transport = Callable[[AsyncExitStack, Backend, CommitterOptions], Awaitable[Consensus]]


async def subject_of(
    opened: AsyncExitStack,
    open_one: Opener,
    transport: Transport,
    options: CommitterOptions,
    rounds: int,
) -> Subject:
    async def another() -> Consensus:
        return await transport(opened, await open_one(), options)

    return Subject(store=await another(), another=another, rounds=rounds)


@pytest.fixture(scope="module")
def shared_url(postgres: PostgresServer) -> str:
    """One database for all cases, which use keys of their own."""
    return postgres.create_database()


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        pytest.param(in_process, CACHED, id="in process, cached"),
        pytest.param(over_grpc, PLAIN, id="over gRPC, plain"),
    ],
)
class TestOverSqlite(ConsensusConformance):
    @pytest.fixture
    async def subject(
        self, tmp_path: Path, transport: Transport, options: CommitterOptions
    ) -> AsyncIterator[Subject]:
        async def open_one() -> Backend:
            return await open_backend(f"sqlite:///{tmp_path}/consensus.db")

        async with AsyncExitStack() as opened:
            yield await subject_of(opened, open_one, transport, options, rounds=6)


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("transport", "options"),
    [
        pytest.param(in_process, CACHED, id="in process, cached"),
        pytest.param(over_grpc, CACHED, id="over gRPC, cached"),
        pytest.param(over_grpc, ALONE, id="over gRPC, plain, one by one"),
    ],
)
class TestOverPostgres(ConsensusConformance):
    @pytest.fixture
    async def subject(
        self, shared_url: str, transport: Transport, options: CommitterOptions
    ) -> AsyncIterator[Subject]:
        async def open_one() -> Backend:
            return await open_backend(shared_url)

        async with AsyncExitStack() as opened:
            yield await subject_of(opened, open_one, transport, options, rounds=4)
