"""A client that keeps to no rule: raw calls, bytes as given, answers that are not read."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from penstock.consensus.committer import wire
from penstock.consensus.committer.proto import consensus_pb2 as pb

MIB = 1 << 20
PATIENCE_S = 30.0
"""Bounds a hang, not a duration."""

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # What is not read stays with the server: this end takes as little as it may.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Told:
    """How a call ended."""

    code: grpc.StatusCode
    details: str


class Hostile:
    """One connection; `token` is shown if there is one."""

    def __init__(self, channel: aio.Channel, token: str | None, client: str) -> None:
        self._channel = channel
        self._metadata = ((wire.CLIENT_METADATA, client),)
        if token is not None:
            self._metadata += (("authorization", f"Bearer {token}"),)

    async def send(
        self, method: str, body: bytes, compression: grpc.Compression | None = None
    ) -> bytes | Told:
        """One request, and its answer or status."""
        call = self._channel.unary_unary(f"/{wire.SERVICE}/{method}")
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer: bytes = await call(body, metadata=self._metadata, compression=compression)
                return answer
        except aio.AioRpcError as error:
            return Told(error.code(), error.details() or "")

    def unread(self, method: str, body: bytes) -> aio.UnaryStreamCall[Any, Any]:
        """Send one request and leave its answer unread."""
        return self._channel.unary_stream(f"/{wire.SERVICE}/{method}")(
            body, metadata=self._metadata
        )

    def stream(self, method: str) -> aio.StreamStreamCall[Any, Any]:
        return self._channel.stream_stream(f"/{wire.SERVICE}/{method}")(metadata=self._metadata)

    async def session(self) -> aio.StreamStreamCall[Any, Any]:
        """A session that is open, and has a window."""
        stream = self.stream("Session")
        await stream.write(b"")
        async with asyncio.timeout(PATIENCE_S):
            opened = pb.SessionResponse.FromString(await stream.read())
        assert opened.window
        return stream


async def answer_of(stream: aio.StreamStreamCall[Any, Any]) -> pb.SessionResponse:
    """The next answer of a session."""
    async with asyncio.timeout(PATIENCE_S):
        return pb.SessionResponse.FromString(await stream.read())


@contextlib.asynccontextmanager
async def hostile(
    target: str, *, token: str | None = None, client: str = "hostile"
) -> AsyncIterator[Hostile]:
    async with aio.insecure_channel(target.removeprefix("grpc://"), options=_OPTIONS) as channel:
        yield Hostile(channel, token, client)


def peak_mib(pid: int) -> float:
    """The most memory that a process has ever had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@contextlib.contextmanager
def connecting(port: int, threads: int = 8) -> Iterator[list[int]]:
    """TLS connections while the block runs, as fast as they come: whole, half and hung up."""
    stop = threading.Event()
    made = [0]

    def connect() -> None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        while not stop.is_set():
            with contextlib.suppress(OSError):
                plain = socket.create_connection(("127.0.0.1", port), timeout=2)
                if random.random() < 0.2:
                    plain.close()
                    continue
                whole = random.random() < 0.8
                context.wrap_socket(plain, do_handshake_on_connect=whole).close()
                made[0] += 1

    running = [threading.Thread(target=connect, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield made
    finally:
        stop.set()
        for thread in running:
            thread.join()
