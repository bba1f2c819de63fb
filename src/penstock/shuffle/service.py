"""Sessions for other processes, over gRPC (`proto/shuffle.proto`).

    async with serving(ShuffleService(planner, resolve, now=now)) as address:
        …                       # RemoteSession.open(address, "acme/orders")

Each stream is a session of its own, made of the bindings that `resolve` finds for the name of a
task or a collection. A slow client holds back only itself: until it asks again, its
session plans nothing. One that vanishes takes its session with it.

Clients get no documents from here. A checkpoint names fragments, which its consumer reads
from the blob store, on as many machines as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from itertools import count
from typing import Any, Final

from penstock.consensus.store import SEQNO_MAX
from penstock.errors import Bug, PenstockError, Unavailable, UsageError, UserError
from penstock.journal.names import collection_prefix
from penstock.journal.planning import Planner
from penstock.model.clock import Clock
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.address import dial_target, socket_of
from penstock.servicekit.rpc.gate import Gate, Revoked, Unauthenticated
from penstock.servicekit.rpc.grpcio import Context, aio, grpc
from penstock.servicekit.rpc.listener import bind_server, is_exposed, server_options
from penstock.servicekit.rpc.tokens import Access, Principal, TokenFile
from penstock.servicekit.rpc.unread import Outlet, ReaderGone, SlowReader
from penstock.shuffle import wire
from penstock.shuffle.binding import Binding
from penstock.shuffle.handover import first_error
from penstock.shuffle.proto import shuffle_pb2 as pb
from penstock.shuffle.session import Session
from penstock.shuffle.state import RoundLimits

log = logging.getLogger("penstock.shuffle")

SESSIONS_MAX: Final = 256
"""Sessions of one service. Each follows its collections and holds what it has not handed out."""

RESUME_BYTES_MAX: Final = 256 << 20
"""Bytes of a frontier to resume from, and of all that arrive at once: millions of producers."""

NAME_BYTES_MAX: Final = 512
"""Bytes of the name of a task or collection."""

CAUGHT_UP_MAX: Final = 64
"""Revisions that a client waits for at the same time."""

OPENING_S: Final = 30.0
"""Time that a message which opens a session may take to arrive."""

SLOW_S: Final = 60.0
"""Time that a message may wait to be taken by its client before the session is ended."""

WAITING_S: Final = 5.0
"""Interval at which a waiting client gets the reason."""

LINGER_S: Final = 5.0
"""Time that a stream stays after a failure, for its client to read it and to end its side."""

_STOP_S: Final = 1.0

Resolve = Callable[[str], Awaitable[Sequence[Binding]]]
"""The bindings of a task or a collection; raises `UserError` if there is none of that name."""


class ShuffleService:
    """The handler of the protocol."""

    def __init__(
        self,
        planner: Planner,
        resolve: Resolve,
        *,
        now: Callable[[], Clock],
        limits: RoundLimits = RoundLimits(),  # noqa: B008 - frozen
        tokens: TokenFile | None = None,
        sessions_max: int = SESSIONS_MAX,
        waiting_s: float = WAITING_S,
        linger_s: float = LINGER_S,
        opening_s: float = OPENING_S,
        slow_s: float = SLOW_S,
    ) -> None:
        self.tokens = tokens
        self._gate = Gate(tokens)
        self._planner = planner
        self._resolve = resolve
        self._now = now
        self._limits = limits
        self._sessions_max = sessions_max
        self._waiting_s = waiting_s
        self._linger_s = linger_s
        self._opening_s = opening_s
        self._slow_s = slow_s
        self._resuming = 0
        """Bytes of the frontiers that are arriving."""
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._serving)

    def handler(self) -> grpc.GenericRpcHandler:
        """For `aio.Server.add_generic_rpc_handlers`."""
        session: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._serve
        )
        return grpc.method_handlers_generic_handler(wire.SERVICE, {"Session": session})

    async def close(self) -> None:
        """End every session, and wait until nothing of them is left."""
        for serving in (ending := list(self._serving)):
            serving.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _serve(self, _: object, context: Context) -> None:
        """One stream; gRPC cancels it when the client vanishes."""
        try:
            who = await self._gate.admit(context)
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if self.sessions >= self._sessions_max:
            limit = self._sessions_max
            what = f"{self.sessions} sessions are open, and {limit} is the limit of this service"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        stream = _Stream(context, self._slow_s)
        task = asyncio.create_task(self._session(stream, who), name="served session")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            try:
                async with self._gate.visit(who):
                    await task
            except Revoked as error:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            except PenstockError as error:
                await self._tell_failure(stream, error)
            except (SlowReader, ReaderGone):
                raise
            except Exception as error:
                log.exception("a shuffle session failed unexpectedly")
                what = f"the session failed: {type(error).__name__}"
                await self._tell_failure(stream, Bug(what, why="see the service's log"))
        except ReaderGone as gone:
            raise asyncio.CancelledError from gone
        except SlowReader:
            log.info("slow reader closed", extra=fields(client=who.name, peer=stream.peer))
            await context.abort(grpc.StatusCode.ABORTED, "the reader is too slow")
        finally:
            stream.close()

    async def _tell_failure(self, stream: _Stream, error: PenstockError) -> None:
        """Send the error that ended the session, and leave it to the client to end the stream.

        To a client that can no longer send, gRPC reports that, and not what was sent before.
        """
        await stream.write(pb.SessionResponse(failure=wire.encode_failure(error)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s):
                while await stream.next_message() is not None:
                    pass

    async def _session(self, stream: _Stream, who: Principal) -> None:
        """One session, from its opening to the end of the client's side."""
        await stream.admit()
        opening = await self._opening(stream)
        bindings = await self._resolve(opening.name)
        for binding in bindings:
            _check_access(who, binding.collection.name)
        session = await Session.open(
            self._planner,
            bindings,
            resume=wire.decode_resume(opening.resume),
            limits=self._limits,
            now=self._now,
        )
        told = fields(name=opening.name, client=who.name, peer=stream.peer)
        log.info("shuffle session opened", extra=told)
        try:
            await stream.write(pb.SessionResponse(opened=wire.encode_opened(bindings)))
            await _Served(session, stream, self._waiting_s).run()
        finally:
            await session.close()
            log.info("shuffle session closed", extra=told)

    async def _opening(self, stream: _Stream) -> pb.Open:
        """Assemble the client's opening message from its parts."""
        opening = pb.Open(more=True)
        resume = bytearray()
        try:
            while opening.more:
                request = await self._part(stream)
                if request is None or not request.HasField("open"):
                    raise UserError("a session begins with what it is to read")
                part = request.open.resume
                request.open.ClearField("resume")
                opening.MergeFrom(request.open)
                opening.more = request.open.more
                if len(resume) + len(part) > RESUME_BYTES_MAX:
                    what = f"a frontier of more than {RESUME_BYTES_MAX} bytes is not resumed from"
                    raise UserError(what)
                if self._resuming + len(part) > RESUME_BYTES_MAX:
                    raise Unavailable(
                        "other sessions are about to resume",
                        why=f"their frontiers have {self._resuming} bytes, and "
                        f"{RESUME_BYTES_MAX} is the limit for all of them together",
                        fix="try again in a moment",
                    )
                self._resuming += len(part)
                resume += part
        finally:
            self._resuming -= len(resume)
        _check_name(opening.name)
        opening.resume = bytes(resume)
        return opening

    async def _part(self, stream: _Stream) -> pb.SessionRequest | None:
        try:
            async with asyncio.timeout(self._opening_s):
                return await stream.read()
        except TimeoutError:
            what = f"the session was not opened within {self._opening_s:g} s"
            raise UserError(what, why="a client has so long to say what it reads") from None


class _Stream:
    """A client's stream, which is read on after a read that was cancelled.

    gRPC would not: it has such a read still under way, and takes another for the end.
    """

    def __init__(self, context: Context, slow_s: float) -> None:
        self.peer = context.peer()
        self._outlet = Outlet(context, slow_s)
        self._context = context
        self._reading: asyncio.Future[Any] | None = None

    async def admit(self) -> None:
        """Let the client send."""
        await self._context.send_initial_metadata(wire.ADMITTED)

    async def read(self) -> pb.SessionRequest | None:
        """The next request; None at the end of the client's side. One call at a time."""
        message = await self.next_message()
        return None if message is None else wire.decode_request(message)

    async def next_message(self) -> bytes | None:
        """The next request as it came, whatever it is; None at the end of the client's side."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        request = await asyncio.shield(self._reading)
        self._reading = None
        return request if isinstance(request, bytes) else None

    async def write(self, response: pb.SessionResponse) -> None:
        """Send, and wait until the client has taken it; `SlowReader` or `ReaderGone` if not."""
        await self._outlet.write(response.SerializeToString())

    def close(self) -> None:
        """Nobody reads any more."""
        if self._reading is not None:
            self._reading.cancel()


class _Served:
    """A session at work for its client. One task answers each request, and reading goes on."""

    def __init__(self, session: Session, stream: _Stream, waiting_s: float) -> None:
        self._session = session
        self._stream = stream
        self._waiting_s = waiting_s
        self._asked = False
        """A checkpoint was asked for, and is not all sent."""
        self._awaited = 0
        """Revisions that the client waits for."""
        self._numbers = count(1)
        self._pen = asyncio.Lock()
        """Its holder writes, in turn. Nothing is awaited between taking a checkpoint and acquiring
        it, so a checkpoint is sent before anything that follows from its being taken."""

    async def run(self) -> None:
        """Answer requests until the client ends its side, or the session is at its end."""
        answering: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                while (request := await self._stream.read()) is not None:
                    for answer in self._answers(request):
                        answering.add(task := tasks.create_task(answer))
                        task.add_done_callback(answering.discard)
                for task in answering:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    def _answers(self, request: pb.SessionRequest) -> Sequence[Coroutine[None, None, None]]:
        match request.WhichOneof("request"):
            case "next_checkpoint":
                if self._asked:
                    raise UserError("a checkpoint was asked for while another call waits for it")
                self._asked = True
                answered = asyncio.Event()
                return self._next_checkpoint(answered), self._tell_why(answered)
            case "caught_up":
                _check_revision(request.caught_up.revision)
                if self._awaited >= CAUGHT_UP_MAX:
                    raise UserError(
                        f"{self._awaited} revisions are waited for, {CAUGHT_UP_MAX} is the limit"
                    )
                self._awaited += 1
                return (self._caught_up(request.caught_up.revision),)
            case "consumed":
                return ()  # sent by earlier releases: nothing is kept that it would release
            case unexpected:
                raise UserError(f"{unexpected or 'nothing known'} was sent to an open session")

    async def _next_checkpoint(self, answered: asyncio.Event) -> None:
        try:
            checkpoint = await self._session.next_checkpoint()
        finally:
            answered.set()
        number = next(self._numbers)
        async with self._pen:
            for part in wire.checkpoint_parts(number, checkpoint):
                self._asked = part.more  # after the last part the client may ask again
                await self._stream.write(pb.SessionResponse(checkpoint=part))

    async def _tell_why(self, answered: asyncio.Event) -> None:
        """Send the reason for waiting, now and then, until there is an answer."""
        told = ""
        while not answered.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._waiting_s):
                    await answered.wait()
                    return
            if (why := self._session.waiting_for()) != told:
                told = why
                await self._write(pb.SessionResponse(waiting=pb.Waiting(why=why)))

    async def _caught_up(self, revision: int) -> None:
        await self._session.caught_up(revision)
        self._awaited -= 1
        await self._write(pb.SessionResponse(caught_up=pb.CaughtUp(revision=revision)))

    async def _write(self, response: pb.SessionResponse) -> None:
        async with self._pen:
            await self._stream.write(response)


def _check_name(name: str) -> None:
    if len(name.encode()) > NAME_BYTES_MAX or "\0" in name:
        what = f"{name[:40]!r}… is no name of a task or a collection"
        raise UserError(what, why=f"names have at most {NAME_BYTES_MAX} bytes, and no NUL")


def _check_revision(revision: int) -> None:
    if revision > SEQNO_MAX:
        raise UserError(f"revision {revision} is outside 0 … 2^63-1")


def _check_access(who: Principal, collection: str) -> None:
    if not who.allows(Access.READ, collection_prefix(collection)):
        raise UserError(
            f"{who.name} may not read {collection}",
            fix="ask for a token whose prefix covers the collection's journals",
        )


def check_exposure(listen: str, *, tls: bool, tokens: bool) -> None:
    """Refuse an address that other hosts reach, unless both TLS and tokens protect it."""
    if tls and socket_of(listen) is not None:
        raise UsageError("TLS has no use on a Unix socket", fix="leave out --tls-cert")
    if is_exposed(listen, tls=tls, tokens=tokens):
        raise UsageError(
            f"refusing to listen on {listen} without both TLS and tokens",
            why="anyone who reaches the port could read every collection",
            fix="listen on 127.0.0.1, or add --token-file, --tls-cert and --tls-key",
        )


@contextlib.asynccontextmanager
async def serving(
    service: ShuffleService,
    *,
    listen: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[str]:
    """While the block runs, sessions are served at the address that it gets, a `grpc://` URL.

    Another host may be listened on only with TLS `credentials` and tokens.
    """
    check_exposure(listen, tls=credentials is not None, tokens=service.tokens is not None)
    server = aio.server(options=server_options())
    server.add_generic_rpc_handlers([service.handler()])
    with bind_server(server, listen, credentials, tokens=service.tokens) as (host, port):
        await server.start()
        at = host.removeprefix("unix:")
        address = f"grpc://{dial_target(host, port)}" if at == host else f"grpc+unix://{at}"
        log.info("shuffle service listening", extra=fields(address=address))
        try:
            yield address
        finally:
            await service.close()
            await server.stop(_STOP_S)
