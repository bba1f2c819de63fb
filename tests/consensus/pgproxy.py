"""A proxy that understands PostgreSQL's framing, and hangs up at a chosen message.

Every client message, and every answer, can be the last one that gets through: so every statement of
a transaction can be the one at which a connection dies, on either side of the network.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


class Side(enum.Enum):
    REQUEST = "the client's n-th message is not delivered"
    ANSWER = "the server's n-th message is not delivered"


@dataclass
class PgProxy:
    """Forwards; while `armed`, counts messages of `side` and cuts at the one numbered `cut_at`."""

    host: str
    port: int
    listen_port: int = 0
    side: Side = Side.REQUEST
    cut_at: int | None = None
    speaking: asyncio.Event = field(default_factory=asyncio.Event)
    """While not set, nothing is forwarded, and neither side hangs up."""
    counted: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    _links: set[asyncio.Task[None]] = field(default_factory=set)

    def arm(self, side: Side, cut_at: int | None) -> None:
        self.side, self.cut_at = side, cut_at
        self.counted = dict.fromkeys(Side, 0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PgProxy]:
        self.speaking.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.listen_port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for link in list(self._links):
                link.cancel()
            await asyncio.gather(*self._links, return_exceptions=True)
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        upstream_reader, upstream_writer = await asyncio.open_connection(self.host, self.port)
        pumps = [
            asyncio.create_task(self._pump(Side.REQUEST, reader, upstream_writer, startup=True)),
            asyncio.create_task(self._pump(Side.ANSWER, upstream_reader, writer, startup=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, upstream_writer):
                end.transport.abort()
            self._links.discard(task)

    async def _pump(
        self,
        side: Side,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        startup: bool,
    ) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind = b"" if startup else await reader.readexactly(1)
                startup = False
                length = await reader.readexactly(4)
                body = await reader.readexactly(int.from_bytes(length, "big") - 4)
                await self.speaking.wait()
                self.counted[side] += 1
                if side is self.side and self.counted[side] == self.cut_at:
                    return
                writer.write(kind + length + body)
                await writer.drain()
