"""A session in another process: `RemoteSession`, with the methods of `Session`.

Checkpoints come as the service has them, fragments, inline rows and all, so a client that reaches
the blob store reads the documents itself. When the connection is lost, so is the session: its
image here ends with an error, and the next session starts from the frontier that its owner stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Self

from penstock.errors import PenstockError, Unavailable, UserError
from penstock.journal.state import JournalState
from penstock.model.frontier import EMPTY, Frontier
from penstock.servicekit.rpc.address import ServiceAddress
from penstock.servicekit.rpc.channel import authorization, open_channel
from penstock.servicekit.rpc.grpcio import aio, grpc
from penstock.servicekit.rpc.sockets import check_owned_socket
from penstock.servicekit.secrets import mask
from penstock.shuffle import wire
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.handover import Handover
from penstock.shuffle.proto import shuffle_pb2 as pb
from penstock.shuffle.session import SessionClosed

log = logging.getLogger("penstock.shuffle")

_CLOSE_S: Final = 10.0
"""Time that the service may take to tear the session down before the client stops waiting."""

_Call = aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBinding:
    """A binding of a session, as its service describes it."""

    index: int
    collection: str
    read_suffix: str
    priority: int

    @property
    def state_key(self) -> str:
        """As `Binding.state_key`."""
        return self.read_suffix.rpartition("/")[2]


class RemoteSession:
    """The image of a session; made by `open`, on the event loop where it is used."""

    def __init__(self, where: str, channel: aio.Channel) -> None:
        self.bindings: tuple[RemoteBinding, ...] = ()
        self.states: dict[str, JournalState] = {}
        """None are known here. Rows are where their checkpoint says: objects that compaction has
        replaced since stay readable until garbage collection takes them."""
        self._where = where
        self._channel = channel
        self._handover = Handover()
        self._admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._opened = False
        self._assembly = wire.CheckpointAssembly()
        self._caught_up = -1
        self._why = ""
        self._requests: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        service: str | ServiceAddress,
        name: str,
        *,
        resume: Frontier = EMPTY,
    ) -> Self:
        """A session of a task or a collection at a service.

        Its URL is as a committer's: `grpc://host:port`, with options for TLS and a token's file.
        """
        address = ServiceAddress.parse(service) if isinstance(service, str) else service
        if address.socket is not None:
            check_owned_socket(address.socket)
        session = cls(address.url, open_channel(address))
        try:
            for request in wire.open_requests(name, resume):
                session._requests.put_nowait(request)
            call = session._call(authorization(address))
            session._reading = asyncio.create_task(session._read(call), name="remote session")
            await session._handover.until(lambda: session._opened)
        except BaseException:
            await session.close()
            raise
        return session

    async def next_checkpoint(self) -> Checkpoint:
        """As `Session.next_checkpoint`."""
        request = pb.SessionRequest(next_checkpoint=pb.NextCheckpoint())
        return await self._handover.take(lambda: self._requests.put_nowait(request))

    async def caught_up(self, revision: int) -> None:
        """As `Session.caught_up`."""
        if self._caught_up < revision:
            caught_up = pb.CaughtUp(revision=revision)
            self._requests.put_nowait(pb.SessionRequest(caught_up=caught_up))
        given = self._handover
        await given.until(lambda: given.empty and self._caught_up >= revision)

    def waiting_for(self) -> str:
        """As `Session.waiting_for`, a few seconds late; empty until the service reports it."""
        ended = self._handover.ended
        return self._why if ended is None else f"the session has ended: {ended}"

    async def close(self) -> None:
        """As `Session.close`; waits for the service, but not for one that does not answer."""
        self._handover.end(SessionClosed("the session is closed"))
        self._requests.put_nowait(None)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_CLOSE_S)
            self._reading.cancel()
        await self._channel.close()

    # ------------------------------------------------------------------------------------ details

    def _call(self, metadata: tuple[tuple[str, str], ...]) -> _Call:
        method: aio.StreamStreamMultiCallable[pb.SessionRequest, pb.SessionResponse] = (
            self._channel.stream_stream(
                wire.SESSION,
                request_serializer=pb.SessionRequest.SerializeToString,
                response_deserializer=pb.SessionResponse.FromString,
            )
        )
        return method(self._sent(), metadata=metadata)

    async def _sent(self) -> AsyncIterator[pb.SessionRequest]:
        """Requests as they come, until the session is closed: that ends our side of the stream."""
        if not await self._admitted:
            return
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self, call: _Call) -> None:
        """Take in what the service sends; whatever ends the stream ends the session."""
        try:
            said = await call.initial_metadata() or ()
            self._admitted.set_result(set(wire.ADMITTED) <= set(said))
            async for response in call:
                self._take(response)
            self._handover.end(Unavailable("the service ended the session", where=self._where))
        except PenstockError as error:
            self._handover.end(error)
        except aio.AioRpcError as error:
            self._handover.end(_lost(error, self._where, opened=self._opened))
        finally:
            self._handover.end(SessionClosed("the connection was closed", where=self._where))
            self._admitted.cancel()
            call.cancel()

    def _take(self, response: pb.SessionResponse) -> None:
        match response.WhichOneof("response"):
            case "opened":
                self.bindings = tuple(map(_binding_of, response.opened.bindings))
                self._opened = True
                self._handover.notify()
            case "checkpoint":
                self._assemble(response.checkpoint)
            case "caught_up":
                self._caught_up = max(self._caught_up, response.caught_up.revision)
                self._handover.notify()
            case "waiting":
                self._why = response.waiting.why
            case "failure":
                raise wire.decode_failure(response.failure)
            case _:
                log.debug("a message of a newer release was passed over")

    def _assemble(self, part: pb.CheckpointPart) -> None:
        checkpoint = self._assembly.add(part)
        if checkpoint is not None:
            # A service of an earlier release keeps a checkpoint until it gets this message.
            consumed = pb.Consumed(checkpoint=part.checkpoint)
            self._requests.put_nowait(pb.SessionRequest(consumed=consumed))
            self._assembly = wire.CheckpointAssembly()
            self._handover.give(checkpoint)


def _binding_of(message: pb.Binding) -> RemoteBinding:
    return RemoteBinding(
        index=message.index,
        collection=message.collection,
        read_suffix=message.read_suffix,
        priority=message.priority,
    )


def _lost(error: aio.AioRpcError, where: str, *, opened: bool) -> PenstockError:
    """The error that a gRPC status means to a client with a session, or without one yet."""
    details = mask(error.details() or error.code().name)
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED if not opened:
            return UserError(
                "the shuffle service refused the connection",
                where=where,
                why=details,
                fix="name a file with a valid token: ?token_file=FILE in the URL, or --token-file",
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return UserError(
                "this is no shuffle service",
                where=where,
                why=details,
                fix="give the address that `penstock shuffle --listen` has printed",
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Unavailable("the shuffle service is full", where=where, why=details)
        case _ if not opened:
            return Unavailable(
                "no connection to the shuffle service",
                where=where,
                why=details,
                fix="see that it runs there; with TLS, name the authority of its certificate: "
                "?ca=FILE in the URL, or --tls-ca",
            )
        case _:
            return Unavailable(
                "the connection to the shuffle service is lost",
                where=where,
                why=details,
                fix="open another session, with the frontier that was stored last",
            )
