"""A TCP proxy in user space that simulates a bad network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Self


class Proxy:
    """Passes bytes between a listener and a target, with the faults that are set.

    `up` is towards the target, `down` back to the caller. Held bytes are not lost, as in a
    partition that heals: TCP would send them again. Bytes of cut connections are lost.
    """

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.listen = ""
        self.delay_s = 0.0
        self._flowing = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._refusing = False
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.restore()

    def restore(self) -> None:
        """Remove all faults."""
        self.delay_s = 0.0
        self._refusing = False
        for event in self._flowing.values():
            event.set()

    def hold(self, *directions: str) -> None:
        """Hold all bytes in these directions."""
        for direction in directions:
            self._flowing[direction].clear()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection; with `refuse`, new ones as well."""
        self._refusing = refuse
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.listen = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, target_writer}
        for source, sink, direction in (
            (reader, target_writer, "up"),
            (target_reader, writer, "down"),
        ):
            pump = asyncio.create_task(self._pump(source, sink, direction))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str
    ) -> None:
        with contextlib.suppress(OSError):
            async for chunk in _chunks(source):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing[direction].wait()
                sink.write(chunk)
                await sink.drain()
        self._writers.discard(sink)
        sink.transport.abort() if direction == "up" else sink.close()


async def _chunks(source: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await source.read(1 << 16):
        yield chunk
