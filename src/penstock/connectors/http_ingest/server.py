"""uvicorn in a thread of its own: connections, with limits in time and number, and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.connectors.http_ingest.app import HEADER_BYTES_MAX, IngestApp
from penstock.connectors.http_ingest.desk import Desk
from penstock.connectors.http_ingest.options import Options
from penstock.runtime.connector.common import ConnectorError
from penstock.servicekit.rpc.address import is_loopback

KEEP_ALIVE_S: Final = 60
LINGER_S: Final = 2.0
"""How long what is left of a body is read and forgotten after its request was answered."""

STOP_S: Final = 3
"""Seconds for answers that are being sent when the server stops."""

_BACKLOG: Final = 1024
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)


def listen(options: Options, *, where: str) -> socket.socket:
    """Return a socket that listens: from here on a client waits instead of being refused."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise _cannot_listen(options, error, where) from None
    return listener


def _cannot_listen(options: Options, error: OSError, where: str) -> ConnectorError:
    why = error.strerror or os.strerror(error.errno or 0)
    if error.errno == errno.EADDRINUSE:
        return ConnectorError(
            f"port {options.port} is taken: cannot listen on {options.address}",
            where=where,
            why="another process listens there, or another capture",
            fix=f"end it, or choose another port: listen: {options.host}:{options.port + 1}",
            transient=True,  # as when this capture was just ended elsewhere
        )
    fixes = {
        errno.EACCES: "choose a port from 1024 on",
        errno.EADDRNOTAVAIL: "listen on an address of this machine",
    }
    return ConnectorError(
        f"cannot listen on {options.address}",
        where=where,
        why=why,
        fix=fixes.get(error.errno or 0, "choose another address"),
    )


class ServerThread:
    """Serves an application until it is stopped."""

    def __init__(
        self, app: IngestApp, listener: socket.socket, options: Options, desk: Desk
    ) -> None:
        self._listener = listener
        self._desk = desk
        self._ready = threading.Event()
        self._server = _Server(_config(app, options), self._ready)
        self._thread = threading.Thread(target=self._run, name="http-ingest", daemon=True)
        self.error: BaseException | None = None
        """Why it does not serve any more."""

    def start(self) -> None:
        """Return when it serves, or cannot."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Let answers be sent for a moment, and end."""
        self._server.should_exit = True
        self._thread.join(STOP_S + 2.0)
        self._listener.close()

    @property
    def serves(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._desk.loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listener])


def _config(app: IngestApp, options: Options) -> uvicorn.Config:
    limits = options.limits

    class Connection(_Connection):
        """With the limits of this server."""

        connections_max = limits.connections
        header_s = limits.header_s

    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        log_config=None,
        log_level="critical",  # a client's mistakes are not worth a log line
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=options.cert,
        ssl_keyfile=None if options.key is None else str(options.key),
    )


class _Server(uvicorn.Server):
    """Says when it serves, and leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """One connection."""

    connections_max = 0
    header_s = 0.0
    _numbers = itertools.count()

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - as in H11Protocol
        super().__init__(*given, **named)
        self.number = next(self._numbers)
        self._ending: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """True if there is no request on it."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(  # type: ignore[override]  # as in H11Protocol
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._end_in(self.header_s)
        if len(self.connections) > self.connections_max:
            self._make_room()

    def _make_room(self) -> None:
        idle = [
            other
            for other in self.connections
            if isinstance(other, _Connection) and other is not self and other.idle
        ]
        if idle:
            min(idle, key=lambda connection: connection.number).transport.abort()
        else:
            self.transport.write(_FULL)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.idle:
            if self._ending is None and not self._between_requests():
                self._end_in(self.header_s)
        elif not self.idle:
            self._keep()

    def _between_requests(self) -> bool:
        """True if nothing of a next request has come."""
        return not self.conn.trailing_data[0]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._end_in(LINGER_S)
        elif self.idle and self._between_requests():
            self._keep()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep()
        super().connection_lost(exc)

    def _end_in(self, seconds: float) -> None:
        self._keep()
        self._ending = self.loop.call_later(seconds, self.transport.abort)

    def _keep(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None


def check_free(options: Options, *, where: str) -> None:
    """Raise if nobody could listen there now."""
    listen(options, where=where).close()


def describe(options: Options, port: int) -> str:
    """The URL, for a log line."""
    scheme = "http" if options.cert is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    reach = "this machine only" if is_loopback(options.host) else "other machines too"
    return f"{scheme}://{host}:{port}/ ({reach})"
