from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from consensus.conformance import ConsensusConformance, Subject
from consensus.direct import DirectConsensus
from fix_postgres import PostgresServer
from penstock.consensus.coalesce import GroupCommitOptions
from penstock.consensus.postgres import PostgresBackend
from penstock.consensus.store import Consensus

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def shared_url(postgres: PostgresServer) -> str:
    """One database for the whole suite: its cases use keys of their own."""
    return postgres.create_database()


@pytest.mark.parametrize(
    "options",
    [GroupCommitOptions(), GroupCommitOptions(elements_max=0)],
    ids=["grouped", "one by one"],
)
class TestPostgres(ConsensusConformance):
    @pytest.fixture
    async def subject(self, shared_url: str, options: GroupCommitOptions) -> AsyncIterator[Subject]:
        async with AsyncExitStack() as opened:

            async def another() -> Consensus:
                store = DirectConsensus(await PostgresBackend.open(shared_url), options)
                opened.push_async_callback(store.close)
                return store

            yield Subject(store=await another(), another=another, rounds=6)
