"""The admin page of a process: /metrics, /healthz, /readyz, and what it does; on loopback only.

`/introspection/v1` names the relations of a process that has some, `/introspection/v1/NAME` is one
of them as JSON: `{"relation", "as_of", "rows", "truncated"}`, with `?limit=`, from memory.

It runs in the event loop it reports on, on purpose: a loop that is stuck does not answer, and that
is the truth a supervisor asks for.

Every process on the host can reach it, so it has limits, which ordinary requests never meet:
`CONNECTIONS_MAX`, of which the oldest makes room for a new one, `CONNECTION_S` for each of them,
and `HEADER_BYTES_MAX`. Bodies are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.servicekit.metrics import CONTENT_TYPE, Registry
from penstock.servicekit.readiness import Readiness

LOOPBACK = "127.0.0.1"

CONNECTIONS_MAX: Final = 64
"""Open connections; the oldest makes room, so that idle ones cannot shut out a new request."""

CONNECTION_S: Final = 30.0
"""How long one connection may last."""

_STOP_S: Final = 2

HEADER_BYTES_MAX: Final = 16 << 10
"""Size of a request without its body."""


ROWS_MAX: Final = 1_000
"""Rows of a relation in one answer, unless fewer are asked for."""

Rows = Sequence[Mapping[str, object]]

Relations = Mapping[str, Callable[[], Rows | Awaitable[Rows]]]
"""What gives the rows of each relation, by name; it does not block."""


def application(
    registry: Registry, readiness: Callable[[], Readiness], relations: Relations | None = None
) -> Starlette:
    """Return the pages; `readiness` is called at every request."""

    async def metrics(_: Request) -> Response:
        return Response(registry.render(), media_type=CONTENT_TYPE)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(_: Request) -> Response:
        now = readiness()
        return PlainTextResponse(f"{now.reason}\n", status_code=200 if now.ready else 503)

    pages = [Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)]
    if relations is not None:
        pages += _introspection(relations)
    return Starlette(routes=pages)


def _introspection(relations: Relations) -> list[Route]:
    async def names(_: Request) -> Response:
        return JSONResponse({"relations": sorted(relations)})

    async def rows(request: Request) -> Response:
        name = request.path_params["relation"]
        if name not in relations:
            known = ", ".join(sorted(relations))
            return PlainTextResponse(f"no relation has this name; there are {known}\n", 404)
        limit = request.query_params.get("limit", str(ROWS_MAX))
        if not (limit.isascii() and limit.isdecimal()):
            return PlainTextResponse("limit is not a number\n", 400)
        given = relations[name]()
        found = await given if isinstance(given, Awaitable) else given
        most = min(int(limit), ROWS_MAX)
        as_of = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        answer = {
            "relation": name,
            "as_of": as_of,
            "rows": found[:most],
            "truncated": len(found) > most,
        }
        return Response(msgspec.json.encode(answer), media_type=JSONResponse.media_type)

    return [Route("/introspection/v1", names), Route("/introspection/v1/{relation}", rows)]


@contextlib.asynccontextmanager
async def serving(app: Starlette, port: int) -> AsyncIterator[int]:
    """Serve `app` on loopback while the block runs; yields the port, chosen by the system if 0."""
    with contextlib.closing(_listen(port)) as listener:
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            log_config=None,
            log_level="error",  # a client's mistakes are not worth a log line
            timeout_graceful_shutdown=_STOP_S,
            access_log=False,
            lifespan="off",
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="admin")
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task


class _Connection(H11Protocol):
    """One connection, limited in time and number."""

    _numbers = itertools.count()

    def connection_made(  # type: ignore[override]  # as in H11Protocol
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self.number = next(self._numbers)
        self._ending = self.loop.call_later(CONNECTION_S, transport.abort)
        if len(self.connections) > CONNECTIONS_MAX:
            ours = (other for other in self.connections if isinstance(other, _Connection))
            min(ours, key=lambda connection: connection.number).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Leaves signals to the process: the admin page does not decide when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen()  # from here on a request waits for the server instead of being refused
    except OSError:
        listener.close()
        raise
    return listener
