"""The sessions of a cluster in another process, as its controller sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, TypeAlias

from penstock.cluster import wire
from penstock.cluster.proto import cluster_pb2 as pb
from penstock.cluster.sessions import Closed, CloseReason, Message, Opened, Response
from penstock.errors import UserError
from penstock.servicekit.rpc.address import ServiceAddress
from penstock.servicekit.rpc.channel import authorization, open_channel
from penstock.servicekit.rpc.grpcio import aio, grpc
from penstock.servicekit.rpc.sockets import check_owned_socket
from penstock.servicekit.secrets import mask

DEFAULT_PORT: Final = 7100

_CLOSE_S: Final = 1.0
"""Seconds that a cluster may take to hear that its controller leaves."""

_Call: TypeAlias = aio.StreamStreamCall[pb.ToCluster, pb.FromCluster]


class RemoteCluster:
    """A cluster at an address. Used on one event loop."""

    def __init__(self, address: ServiceAddress) -> None:
        self._address = address
        self._streams: set[asyncio.Task[None]] = set()

    def connect(self) -> RemoteSession:
        """Open a stream; whether that works is an answer of the session."""
        session = RemoteSession(self._address)
        task = asyncio.create_task(session.run(), name="stream to the cluster")
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return session

    async def close(self) -> None:
        """Wait until the streams of closed sessions have ended."""
        if self._streams:
            _, late = await asyncio.wait(self._streams, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)


class RemoteSession:
    """One stream (`controller.Connection`)."""

    def __init__(self, address: ServiceAddress) -> None:
        self._address = address
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._heard: asyncio.Queue[Response] = asyncio.Queue()
        self._admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._opened = False

    def receive(self, message: Message) -> None:
        """Send a message, after those before it."""
        self._said.put_nowait(message)

    async def responses(self) -> AsyncIterator[Response]:
        """Yield the answers, the last of which is `Closed`."""
        while True:
            response = await self._heard.get()
            yield response
            if isinstance(response, Closed):
                return

    def close(self, reason: CloseReason, detail: str = "") -> None:
        """Leave: it ends our side of the stream."""
        self._said.put_nowait(None)

    async def run(self) -> None:
        """Carry messages until the session is closed, or the stream is lost."""
        try:
            closed = await self._converse()
        except UserError as error:  # a token file that cannot be read, an answer nobody knows
            why = ": ".join(filter(None, (error.what, error.why, error.fix)))
            closed = Closed(reason=CloseReason.REFUSED, detail=why)
        except aio.AioRpcError as error:
            closed = self._lost(error)
        self._heard.put_nowait(closed)

    async def _converse(self) -> Closed:
        address = self._address
        if address.socket is not None:
            check_owned_socket(address.socket)
        metadata = authorization(address)
        async with open_channel(address) as channel:
            method: aio.StreamStreamMultiCallable[pb.ToCluster, pb.FromCluster] = (
                channel.stream_stream(
                    wire.SESSION,
                    request_serializer=pb.ToCluster.SerializeToString,
                    response_deserializer=pb.FromCluster.FromString,
                )
            )
            call = method(self._sent(), metadata=metadata)
            try:
                return await self._read(call)
            finally:
                self._admitted.cancel()
                self._said.put_nowait(None)
                call.cancel()

    async def _sent(self) -> AsyncIterator[pb.ToCluster]:
        """Messages as they come, until we leave: that ends our side of the stream."""
        if not await self._admitted:
            return
        while (message := await self._said.get()) is not None:
            yield wire.encode_message(message)

    async def _read(self, call: _Call) -> Closed:
        said = await call.initial_metadata() or ()
        self._admitted.set_result(set(wire.ADMITTED) <= set(said))
        async for answer in call:
            response = wire.decode_response(answer)
            if isinstance(response, Closed):
                return response
            self._opened = self._opened or isinstance(response, Opened)
            self._heard.put_nowait(response)
        return Closed(reason=CloseReason.FAILED, detail="the cluster ended the stream")

    def _lost(self, error: aio.AioRpcError) -> Closed:
        """What a gRPC status means for the session."""
        at = self._address.url
        details = mask(error.details() or error.code().name)
        match error.code():
            case grpc.StatusCode.UNAUTHENTICATED if not self._opened:
                fix = "name a file with a valid token in the URL, as token_file"
                return Closed(reason=CloseReason.REFUSED, detail=f"{at}: {details}: {fix}")
            case grpc.StatusCode.UNIMPLEMENTED:
                fix = "give the address that penstock cluster has printed"
                return Closed(reason=CloseReason.REFUSED, detail=f"{at}: this is no cluster: {fix}")
            case _:
                return Closed(reason=CloseReason.FAILED, detail=f"{at}: {details}")
