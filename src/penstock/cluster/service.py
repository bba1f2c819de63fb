"""Sessions for controllers of other processes, over gRPC (`proto/cluster.proto`).

Each stream is a session (`sessions.py`), and this module only carries messages: nothing of a
stream is read before its sender is admitted, and a stream that ends takes its session with it. A
token needs the capability `apply` for `cluster/ID/DOMAIN`; one that is revoked ends its open
streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from penstock.cluster import wire
from penstock.cluster.sessions import CloseReason, Hello, Session, Sessions
from penstock.errors import UsageError, UserError
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.address import dial_target, socket_of
from penstock.servicekit.rpc.gate import Gate, Revoked, Unauthenticated
from penstock.servicekit.rpc.grpcio import Context, aio, grpc
from penstock.servicekit.rpc.listener import bind_server, is_exposed, server_options
from penstock.servicekit.rpc.tokens import Access, Principal, TokenFile
from penstock.servicekit.rpc.unread import Outlet, ReaderGone, SlowReader

_log = logging.getLogger("penstock.cluster")

SESSIONS_MAX: Final = 64
"""Streams at once. One of each domain has anything to say; others are about to be closed."""

HELLO_S: Final = 10.0
"""Seconds that a stream has to say whose it is."""

SLOW_S: Final = 60.0
"""Seconds that a controller may take to read an answer before its session is ended."""

LINGER_S: Final = 5.0
"""Seconds that a stream stays after its session, for its client to read why it is over."""

_STOP_S: Final = 1.0


class ClusterService:
    """The handler of the protocol."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        tokens: TokenFile | None = None,
        hello_s: float = HELLO_S,
        linger_s: float = LINGER_S,
        sessions_max: int = SESSIONS_MAX,
    ) -> None:
        self.tokens = tokens
        self._sessions = sessions
        self._gate = Gate(tokens)
        self._hello_s = hello_s
        self._linger_s = linger_s
        self._sessions_max = sessions_max
        self._open: set[Session] = set()

    @property
    def open(self) -> int:
        """Open streams."""
        return len(self._open)

    def handler(self) -> grpc.GenericRpcHandler:
        """For `aio.Server.add_generic_rpc_handlers`."""
        session: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._serve
        )
        return grpc.method_handlers_generic_handler(wire.SERVICE, {"Session": session})

    def close(self) -> None:
        """End every session."""
        for session in list(self._open):
            session.close(CloseReason.FAILED, "the cluster ends")

    async def _serve(self, _: object, context: Context) -> None:
        """One stream; gRPC cancels it when the client vanishes."""
        try:
            who = await self._gate.admit(context)
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if len(self._open) >= self._sessions_max:
            what = f"{self._sessions_max} sessions are open, and more are not served at once"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        session = self._sessions.connect()
        self._open.add(session)
        try:
            async with self._gate.visit(who):
                await self._session(context, session, who)
        except Revoked as error:
            session.close(CloseReason.LEFT)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except SlowReader:
            await context.abort(grpc.StatusCode.ABORTED, "the reader is too slow")
        except ReaderGone as gone:
            raise asyncio.CancelledError from gone
        finally:
            session.close(CloseReason.LEFT)
            self._open.discard(session)

    async def _session(self, context: Context, session: Session, who: Principal) -> None:
        """Carry messages both ways until the session is closed, and its client has read why."""
        await context.send_initial_metadata(wire.ADMITTED)
        outlet = Outlet(context, SLOW_S)
        reading = asyncio.create_task(self._read(context, session, who), name="session stream")
        try:
            async for response in session.responses():
                await outlet.write(wire.encode_response(response).SerializeToString())
            await asyncio.wait([reading], timeout=self._linger_s)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, context: Context, session: Session, who: Principal) -> None:
        """Hand on what the client says until it ends its side; then its session is over."""
        try:
            async with asyncio.timeout(self._hello_s):
                message = await context.read()
            while isinstance(message, bytes):
                self._receive(message, session, who)
                message = await context.read()
        except TimeoutError:
            what = f"Hello did not come within {self._hello_s:g} s"
            session.close(CloseReason.PROTOCOL, what)
        finally:
            session.close(CloseReason.LEFT, "the controller has ended its side")

    def _receive(self, data: bytes, session: Session, who: Principal) -> None:
        try:
            message = wire.decode_message(data)
        except UserError as error:
            session.close(CloseReason.PROTOCOL, error.what)
            return
        if isinstance(message, Hello):
            key = f"{self._sessions.key}/{message.domain}"
            if not who.allows(Access.APPLY, key):
                session.close(CloseReason.REFUSED, f"{who.name} may not apply {key}")
                return
            told = fields(domain=message.domain.value, controller=message.holder, client=who.name)
            _log.info("controller connected", extra=told)
        session.receive(message)


def check_exposure(listen: str, *, tls: bool, tokens: bool) -> None:
    """Refuse an address that other hosts reach, unless both TLS and tokens protect it."""
    if tls and socket_of(listen) is not None:
        raise UsageError("TLS has no use on a Unix socket", fix="leave out --tls-cert")
    if is_exposed(listen, tls=tls, tokens=tokens):
        raise UsageError(
            f"refusing to listen on {listen} without both TLS and tokens",
            why="anyone who reaches the port could start and stop every task",
            fix="listen on 127.0.0.1, or add --token-file, --tls-cert and --tls-key",
        )


@contextlib.asynccontextmanager
async def serving(
    service: ClusterService,
    *,
    listen: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
    before: Callable[[], Awaitable[None]],
) -> AsyncIterator[str]:
    """While the block runs, sessions are served at the address that it gets, a `grpc://` URL.

    `before` is called when the address is ours, and before anybody is answered there.
    """
    check_exposure(listen, tls=credentials is not None, tokens=service.tokens is not None)
    server = aio.server(options=server_options())
    server.add_generic_rpc_handlers([service.handler()])
    with bind_server(server, listen, credentials, tokens=service.tokens) as (host, port):
        try:
            await before()
            await server.start()
            at = host.removeprefix("unix:")
            yield f"grpc://{dial_target(host, port)}" if at == host else f"grpc+unix://{at}"
        finally:
            service.close()
            await server.stop(_STOP_S)
