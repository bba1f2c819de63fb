"""The admin page of a process: /metrics, /healthz and /readyz, on loopback only.

It runs in the event loop it reports on, on purpose: a loop that is stuck does not answer, and that
is the truth a supervisor asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.servicekit.metrics import CONTENT_TYPE, Registry
from penstock.servicekit.readiness import Readiness

LOOPBACK = "127.0.0.1"


def application(registry: Registry, readiness: Callable[[], Readiness]) -> Starlette:
    """The three pages; `readiness` is asked at every request."""

    async def metrics(_: Request) -> Response:
        return Response(registry.render(), media_type=CONTENT_TYPE)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(_: Request) -> Response:
        now = readiness()
        return PlainTextResponse(f"{now.reason}\n", status_code=200 if now.ready else 503)

    return Starlette(
        routes=[Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)]
    )


@contextlib.asynccontextmanager
async def serving(app: Starlette, port: int) -> AsyncIterator[int]:
    """Serve `app` on loopback while the block runs; yields the port, chosen by the system if 0."""
    with contextlib.closing(_listen(port)) as listener:
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, lifespan="off"
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="admin")
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task


class _Server(uvicorn.Server):
    """Leaves the signals to the process: the admin page is not what decides to stop."""

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
