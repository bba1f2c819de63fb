from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from consensus.backend_conformance import BackendConformance
from consensus.conformance import ConsensusConformance, Subject
from consensus.direct import DirectConsensus
from penstock.consensus.backend import Backend
from penstock.consensus.coalesce import GroupCommitOptions
from penstock.consensus.memory import MemoryBackend
from penstock.consensus.store import Consensus, Determinate, ErrorKind

GROUPED = GroupCommitOptions()
ALONE = GroupCommitOptions(elements_max=0)


class _Door:
    """One of several ways to one memory: closing it leaves the others open."""

    def __init__(self, room: MemoryBackend) -> None:
        self._room = room
        self._closed = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return self._refuse if self._closed else getattr(self._room, name)

    async def _refuse(self, *_: object, **__: object) -> None:
        raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")

    async def close(self) -> None:
        self._closed = True


@pytest.mark.parametrize("options", [GROUPED, ALONE], ids=["grouped", "one by one"])
class TestMemory(ConsensusConformance):
    @pytest.fixture
    async def subject(self, options: GroupCommitOptions) -> AsyncIterator[Subject]:
        backend = MemoryBackend()

        async def another() -> Consensus:
            return DirectConsensus(cast("Backend", _Door(backend)), options)

        yield Subject(store=DirectConsensus(backend, options), another=another, rounds=50)
        await backend.close()


class TestMemoryBackend(BackendConformance):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        backend = MemoryBackend()
        yield backend
        await backend.close()
