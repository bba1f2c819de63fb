from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from consensus.conformance import ConsensusConformance, Subject
from consensus.direct import DirectConsensus
from penstock.consensus.coalesce import GroupCommitOptions
from penstock.consensus.sqlite import SqliteBackend
from penstock.consensus.store import Consensus


@pytest.mark.parametrize(
    "options",
    [GroupCommitOptions(), GroupCommitOptions(elements_max=0)],
    ids=["grouped", "one by one"],
)
class TestSqlite(ConsensusConformance):
    @pytest.fixture
    async def subject(self, tmp_path: Path, options: GroupCommitOptions) -> AsyncIterator[Subject]:
        async with AsyncExitStack() as opened:

            async def another() -> Consensus:
                store = DirectConsensus(await SqliteBackend.open(tmp_path / "c.db"), options)
                opened.push_async_callback(store.close)
                return store

            yield Subject(store=await another(), another=another, rounds=12)
