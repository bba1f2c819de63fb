"""A committer behind a real gRPC port, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grpc import aio

from penstock.consensus.backend import Backend
from penstock.consensus.committer.committer import PersistCommitter
from penstock.consensus.committer.options import CommitterOptions
from penstock.consensus.committer.recovery import Recover
from penstock.consensus.committer.service import ConsensusService
from penstock.servicekit.rpc.listener import server_options
from penstock.servicekit.rpc.tokens import TokenFile


@dataclass
class Served:
    """A running committer and where it listens."""

    committer: PersistCommitter
    server: aio.Server
    port: int

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"


@asynccontextmanager
async def served(
    backend: Backend,
    options: CommitterOptions | None = None,
    *,
    tokens: TokenFile | None = None,
    port: int = 0,
    recover: Recover | None = None,
) -> AsyncIterator[Served]:
    committer = PersistCommitter(backend, options, recover=recover)
    await committer.open()
    server = aio.server(options=server_options())
    server.add_generic_rpc_handlers([ConsensusService(committer, tokens=tokens).handler()])
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield Served(committer, server, bound)
    finally:
        await server.stop(0)
        await committer.close()
